package egress

import (
	"bufio"
	"bytes"
	"context"
	"crypto/ecdh"
	"crypto/rand"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/net/dns/dnsmessage"

	"github.com/agentbox/agentbox/policy"
	"github.com/agentbox/agentbox/runtime/eventlog"
)

func rules(t testing.TB, texts ...string) Rules {
	t.Helper()
	r, err := ParseRules(texts)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func TestGuard(t *testing.T) {
	g := &guard{local: func() ([]netip.Addr, []netip.Prefix, error) {
		return []netip.Addr{netip.MustParseAddr("203.0.113.5"), netip.MustParseAddr("10.87.0.1")},
			[]netip.Prefix{netip.MustParsePrefix("10.87.0.0/24")}, nil
	}}
	all := []string{"0.0.0.0/0", "169.254.169.254", "127.0.0.1", "100.100.100.200", "168.63.129.16"}
	for _, c := range []struct {
		to            string
		rules         []string
		address, name bool
	}{
		{"198.51.100.1:443", nil, false, true},
		{"198.51.100.1:443", []string{"198.51.100.0/24 443"}, true, true},
		{"198.51.100.1:80", []string{"198.51.100.0/24 443"}, false, true},
		{"10.1.2.3:443", nil, false, false},
		{"10.1.2.3:443", []string{"0.0.0.0/0"}, false, false},
		{"10.1.2.3:443", []string{"10.1.0.0/16 443"}, true, true},
		{"10.1.2.3:80", []string{"10.1.0.0/16 443"}, false, false},
		{"192.168.1.1:80", []string{"192.168.1.1"}, true, true},
		{"127.0.0.1:80", all, false, false},
		{"169.254.169.254:80", all, false, false},
		{"100.100.100.200:80", all, false, false},
		{"168.63.129.16:80", all, false, false},
		{"224.0.0.1:80", all, false, false},
		{"255.255.255.255:80", all, false, false},
		{"0.0.0.0:80", all, false, false},
		{"203.0.113.5:80", all, false, false},
		{"203.0.113.5:80", []string{"203.0.113.0/24"}, false, false},
		{"203.0.113.5:80", []string{"203.0.113.5 80"}, true, true},
		{"10.87.0.1:80", []string{"10.0.0.0/8"}, false, false},
		{"10.87.0.1:80", []string{"10.87.0.1 80"}, true, true},
		{"10.87.0.9:80", []string{"10.87.0.9", "10.0.0.0/8"}, false, false},
	} {
		r, to := rules(t, c.rules...), netip.MustParseAddrPort(c.to)
		if got := g.address(r, to); got != c.address {
			t.Errorf("%s by %q: %v", c.to, c.rules, got)
		}
		if got := g.answer(r, to); got != c.name {
			t.Errorf("a name at %s by %q: %v", c.to, c.rules, got)
		}
	}
	blind := &guard{local: func() ([]netip.Addr, []netip.Prefix, error) { return nil, nil, errors.New("no") }}
	if blind.answer(nil, netip.MustParseAddrPort("198.51.100.1:443")) {
		t.Error("open without knowing the host's addresses")
	}
}

func TestUDP(t *testing.T) {
	for text, want := range map[string]string{
		"198.51.100.0/24 53,443/udp,8000-8999/udp": "[{198.51.100.0/24 [] 443 443} {198.51.100.0/24 [] 8000 8999}]",
		"198.51.100.7 53/udp":                      "[{198.51.100.7/32 [] 53 53}]",
		"10.0.0.0/8 53/udp":                        "[{10.0.0.0/8 [] 53 53}]",
		"8.0.0.0/6 53/udp":                         "[{8.0.0.0/6 [10.0.0.0/8] 53 53}]",
		"169.254.169.254 80/udp":                   "[{169.254.169.254/32 [169.254.0.0/16] 80 80}]",
		"0.0.0.0/0 1/udp": "[{0.0.0.0/0 [0.0.0.0/8 127.0.0.0/8 169.254.0.0/16 168.63.129.16/32 100.100.100.200/32 192.0.0.192/32 224.0.0.0/3 " +
			"10.0.0.0/8 100.64.0.0/10 172.16.0.0/12 192.0.0.0/24 192.168.0.0/16 198.18.0.0/15] 1 1}]",
		"198.51.100.0/24": "[]", "a.example": "[]",
	} {
		if got := fmt.Sprint(rules(t, text).UDP()); got != want {
			t.Errorf("%s: %s, want %s", text, got, want)
		}
	}
}

// helloOf is what a client sends first.
func helloOf(t testing.TB, name string) []byte {
	return helloBy(t, &tls.Config{ServerName: name, InsecureSkipVerify: true}) //nolint:gosec // nobody answers
}

func helloBy(t testing.TB, config *tls.Config) []byte {
	t.Helper()
	ours, theirs := net.Pipe()
	defer ours.Close()
	go func() {
		defer theirs.Close()
		_ = tls.Client(theirs, config).HandshakeContext(t.Context())
	}()
	buf := make([]byte, 16<<10)
	n, err := ours.Read(buf)
	if err != nil {
		t.Fatal(err)
	}
	return buf[:n]
}

func TestHello(t *testing.T) {
	sent := helloOf(t, "good.example")
	name, read, err := hello(t.Context(), io.MultiReader(bytes.NewReader(sent), strings.NewReader("more")))
	if err != nil || name != "good.example" || !bytes.HasPrefix(read, sent) {
		t.Errorf("%q, %d of %d bytes, %v", name, len(read), len(sent), err)
	}
	for i := range sent {
		if name, _, err := hello(t.Context(), bytes.NewReader(sent[:i])); err == nil {
			t.Fatalf("%d of %d bytes: %q", i, len(sent), name)
		}
	}
	if name, _, err := hello(t.Context(), bytes.NewReader(helloOf(t, ""))); err != nil || name != "" {
		t.Errorf("without a name: %q, %v", name, err)
	}
}

// Where the true name is encrypted, the one outside counts.
func TestHelloEncrypted(t *testing.T) {
	key, err := ecdh.X25519().GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	const outside = "outside.example"
	config := append([]byte{1, 0, 0x20, 0, 32}, key.PublicKey().Bytes()...)
	config = append(config, 0, 4, 0, 1, 0, 1, 64, byte(len(outside)))
	config = append(append(config, outside...), 0, 0)
	config = append([]byte{0xfe, 0x0d, 0, byte(len(config))}, config...)
	config = append([]byte{0, byte(len(config))}, config...)
	sent := helloBy(t, &tls.Config{ServerName: "inside.example", EncryptedClientHelloConfigList: config})
	if name, _, err := hello(t.Context(), bytes.NewReader(sent)); err != nil || name != outside {
		t.Errorf("%q, %v", name, err)
	}
}

// endless is a handshake record that has no end.
type endless struct{ read int }

func (e *endless) Read(p []byte) (int, error) {
	const record = "\x16\x03\x01\x40\x00"
	for i := range p {
		if at := e.read % (len(record) + 0x4000); at < len(record) {
			p[i] = record[at]
		} else {
			p[i] = 1
		}
		e.read++
	}
	return len(p), nil
}

func TestHelloIsBounded(t *testing.T) {
	e := &endless{}
	if name, read, err := hello(t.Context(), e); err == nil || len(read) > helloLimit || e.read > helloLimit {
		t.Errorf("%q, %d of %d bytes, %v", name, len(read), e.read, err)
	}
}

// A client that names its destination a byte at a time is not waited for.
func TestSlowConnections(t *testing.T) {
	s := New(Options{Events: t.TempDir()})
	s.peek = 100 * time.Millisecond
	for _, say := range []string{
		string(helloOf(t, "good.example")), "GET / HTTP/1.1\r\nHost: good.example\r\nX: " +
			strings.Repeat("x", 1000), "",
	} {
		b := newBox(s.events, "a")
		r := rules(t, "good.example")
		b.rules.Store(&r)
		ours, theirs := net.Pipe()
		begun, done := time.Now(), make(chan struct{})
		go func() {
			defer close(done)
			defer ours.Close()
			s.proxy(t.Context(), b, &flow{conn: ours, to: netip.MustParseAddrPort("192.0.2.1:443")})
		}()
		go func() { _, _ = io.Copy(io.Discard, theirs) }() // what it is told
		for i := 0; i < len(say); i++ {
			if _, err := theirs.Write([]byte{say[i]}); err != nil {
				break
			}
			time.Sleep(time.Millisecond)
		}
		<-done
		if took := time.Since(begun); took > 5*time.Second {
			t.Errorf("%.20q: %v", say, took)
		}
		theirs.Close()
	}
}

// A request that comes in pieces is one, also where a server may be the one to
// begin.
func TestBegins(t *testing.T) {
	s := New(Options{Events: t.TempDir()})
	s.silent = 20 * time.Millisecond
	to := netip.MustParseAddrPort("198.51.100.1:8080")
	b := newBox(s.events, "a")
	r := rules(t, "good.example")
	b.rules.Store(&r)
	b.pin("good.example", []netip.Addr{to.Addr()})
	for _, c := range []struct {
		say  []string // each after the other, when the one before has been waited for
		want kind
		ok   bool
	}{
		{nil, kindOther, true},
		{[]string{"GET / ", "HTTP/1.1\r\nHost: other.example\r\n\r\n"}, kindHTTP, true},
		{[]string{"G", "ET / HTTP/1.1\r\n"}, kindHTTP, true},
		{[]string{"AMQP\x00"}, kindOther, true},
		{[]string{"GET /"}, kindOther, false},
		{[]string{"GET", "  / HTTP/1.1\r\n"}, kindUnclear, true},
	} {
		s.peek = 20 * s.silent
		ours, theirs := net.Pipe()
		go func() {
			for i, text := range c.say {
				time.Sleep(time.Duration(min(i, 1)) * 3 * s.silent)
				if _, err := io.WriteString(theirs, text); err != nil {
					return
				}
			}
		}()
		what, err := s.begins(t.Context(), b, &flow{conn: ours, to: to}, bufio.NewReaderSize(ours, helloLimit))
		if what != c.want || (err == nil) != c.ok {
			t.Errorf("%q: %v, %v", c.say, what, err)
		}
		ours.Close()
		theirs.Close()
	}
}

func TestCache(t *testing.T) {
	c := cache{names: map[string]*found{}}
	asked := 0
	get := func(name string, addrs []netip.Addr, err error) ([]netip.Addr, error) {
		return c.get(t.Context(), name, func() ([]netip.Addr, error) { asked++; return addrs, err })
	}
	one := []netip.Addr{netip.MustParseAddr("192.0.2.1")}
	for range 3 {
		if got, err := get("a", one, nil); err != nil || len(got) != 1 {
			t.Errorf("%v, %v", got, err)
		}
		if _, err := get("b", nil, io.EOF); !errors.Is(err, io.EOF) {
			t.Error(err)
		}
	}
	if asked != 2 {
		t.Errorf("asked %d times", asked)
	}
	c.names["a"].until = time.Now()
	if got, _ := get("a", slices.Repeat(one, 1000), nil); len(got) != foundLimit || asked != 3 {
		t.Errorf("%d addresses, asked %d times", len(got), asked)
	}
	// A client that asks for too much does not spoil the name for others.
	if _, err := get("c", nil, errTooMany); !errors.Is(err, errTooMany) {
		t.Error(err)
	}
	if got, err := get("c", one, nil); err != nil || len(got) != 1 {
		t.Errorf("%v, %v", got, err)
	}
	// Waiting clients get the same answer, or give up.
	ask, answer := make(chan struct{}), make(chan struct{})
	go func() {
		_, _ = c.get(t.Context(), "d", func() ([]netip.Addr, error) { close(ask); <-answer; return one, nil })
	}()
	<-ask
	gone, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := c.get(gone, "d", nil); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	close(answer)
	if got, err := c.get(t.Context(), "d", nil); err != nil || len(got) != 1 {
		t.Errorf("%v, %v", got, err)
	}
	// However many names there are.
	for i := range cacheLimit + 100 {
		if _, err := get(fmt.Sprint(i), one, nil); err != nil {
			t.Fatal(err)
		}
	}
	if len(c.names) > cacheLimit {
		t.Errorf("%d names", len(c.names))
	}
	for _, f := range c.names {
		f.until = time.Now()
	}
	if _, err := get("new", one, nil); err != nil || len(c.names) != 1 {
		t.Errorf("%d names, %v", len(c.names), err)
	}
}

func TestLook(t *testing.T) {
	for text, want := range map[string]kind{
		"GET / HTTP/1.1\r\n": kindHTTP, "\r\n\r\nget /x HTTP/1.0\n": kindHTTP, "PRI * HTTP/2.0\r\n": kindHTTP,
		"M-SEARCH * HTTP/1.1\r\n": kindHTTP, "!x http://a.example/ HTTP/1.1\r\n": kindHTTP,
		"CONNECT a.example:443 HTTP/1.1\r\n":                  kindHTTP,
		"GET /" + strings.Repeat("a", 9000) + " HTTP/1.1\r\n": kindHTTP,
		"SSH-2.0-x\r\n": kindOther, "SSH-2.0-OpenSSH_9.2p1 Debian-2\r\n": kindOther, "EHLO me\r\n": kindOther,
		"USER a 0 * :A/B\r\n":              kindOther,
		"\x00\x00\x00\x08\x04\xd2\x16\x2f": kindOther, "*1\r\n$4\r\nPING\r\n": kindOther, "GET key\r\n": kindOther,
		"0032git-upload-pack /project.git\x00host=a.example\x00": kindOther, `{"id":1}`: kindOther,
		"Content-Length: 9\r\n": kindOther,
		"\x16\x03":              kindTLS, "QUIT\n": kindOther, strings.Repeat("A", 9000): kindOther,
		"\xff\xfd\x01":         kindOther,
		"\x15\x00\x00\x01\x05": kindOther,
		"GET  / HTTP/1.1\r\n":  kindUnclear, "GET\t/ HTTP/1.1\r\n": kindUnclear, "GET /\tHTTP/1.1\r\n": kindUnclear,
		"GET / HTTP/1.1 \r\n": kindHTTP,
		"GET / http/1.1\r\n":  kindUnclear, "GET /\r\n": kindUnclear, "GET /": kindUnclear, "GET / x\n": kindUnclear,
		"GET http://a.example/\n": kindUnclear,
		"GET a b c HTTP/1.1\n":    kindUnclear, "GET \x0b/ HTTP/1.1\n": kindUnclear, "x\rGET / HTTP/1.1\n": kindUnclear,
		" GET / HTTP/1.1\n":                      kindHTTP,
		"GET " + strings.Repeat("a", helloLimit): kindUnclear, "GET " + strings.Repeat(" ", helloLimit): kindUnclear,
		strings.Repeat("M", 65) + " / HTTP/1.1\r\n": kindUnclear, "\r\n\r\nSSH-2.0-x\r\n": kindUnclear,
		"PROXY TCP4 192.0.2.1 192.0.2.2 1 80\r\nGET / HTTP/1.1\r\n": kindUnclear, "\r\n\r\n\x00\r\nQUIT\n": kindUnclear,
		"\x80\x2e\x01\x03\x01\x00\x15": kindUnclear, "\x80\x2e\x01\x00\x02\x00\x15": kindUnclear,
		"\x15\x03\x01\x00\x02\x01\x00": kindUnclear, "\x14\x03\x01\x00\x01\x01": kindUnclear,
	} {
		got, err := look(bufio.NewReaderSize(strings.NewReader(text), helloLimit))
		if got != want {
			t.Errorf("%.40q: %v, %v, want %v", text, got, err, want)
		}
	}
}

// A server that takes what is no request for one is not talked to any further.
func TestServerSpeaksHTTP(t *testing.T) {
	for answer, want := range map[string]string{
		"HTTP/1.1 200 OK\r\n\r\n": "", "HT": "HT", "+OK HTTP/\r\n": "+OK HTTP/\r\n",
	} {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		dir := t.TempDir()
		s := New(Options{Events: dir})
		b := newBox(dir, "a")
		r := rules(t, "good.example")
		b.rules.Store(&r)
		theirs, err := net.Dial("tcp", l.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		defer theirs.Close()
		ours, err := l.Accept()
		if err != nil {
			t.Fatal(err)
		}
		f := &flow{conn: ours, to: netip.MustParseAddrPort(l.Addr().String())}
		b.pin("good.example", []netip.Addr{f.to.Addr()})
		b.lead(f, "good.example")
		go func() {
			c, err := l.Accept()
			if err != nil {
				return
			}
			defer c.Close()
			if _, err := io.ReadFull(c, make([]byte, 4)); err == nil {
				_, _ = io.WriteString(c, answer)
			}
		}()
		out, err := net.Dial("tcp", l.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		done := make(chan struct{})
		go func() {
			defer close(done)
			defer ours.Close()
			s.relay(b, f, out, nil, bufio.NewReader(ours),
				&checks{answer: func(r *bufio.Reader) error { return s.answers(b, f, r) }})
		}()
		if _, err := io.WriteString(theirs, "odd\n"); err != nil {
			t.Fatal(err)
		}
		got := make([]byte, 100)
		n, _ := io.ReadFull(theirs, got)
		if string(got[:n]) != want {
			t.Errorf("%q came through of %q, want %q", got[:n], answer, want)
		}
		theirs.Close()
		<-done
		noted, err := os.ReadFile(eventlog.Path(dir, "a"))
		if said := strings.Contains(string(noted), "the server speaks HTTP"); said != (want == "") {
			t.Errorf("noted of %q: %q, %v", answer, noted, err)
		}
	}
}

// However many sandboxes take all the connections that they can get, one more gets some.
func TestConnectionsAreShared(t *testing.T) {
	const all, each = 400, 100
	for hogs := range 40 {
		s := New(Options{Events: t.TempDir()})
		s.total, s.each = make(chan struct{}, all), each
		open := func(b *box) (n int) {
			for {
				if _, refused := s.admit(b, &flow{}); refused != "" {
					return n
				}
				n++
			}
		}
		var boxes []*box
		for i := range hogs + 1 {
			b := newBox(s.events, fmt.Sprint(i))
			boxes = append(boxes, b)
			s.boxes[netip.AddrFrom4([4]byte{10, 0, 0, byte(i)})] = b
		}
		for _, b := range boxes[:hogs] {
			if n := open(b); n > each {
				t.Errorf("a sandbox has %d connections", n)
			}
		}
		if n, least := open(boxes[hogs]), all/2/(hogs+1); n < min(least, each) {
			t.Errorf("behind %d hogs there are %d connections, want %d", hogs, n, least)
		}
	}
	s := New(Options{Events: t.TempDir()})
	s.total, s.each = make(chan struct{}, 2), 1
	b := newBox(s.events, "a")
	for range 5 {
		done, refused := s.admit(b, &flow{})
		if refused != "" {
			t.Fatal(refused)
		}
		done()
	}
}

func TestCleanHost(t *testing.T) {
	for host, want := range map[string]string{
		"a.example": "a.example 0", "A.Example.:8080": "a.example 8080", "a.example:": " 0", "a.example:0": " 0",
		"192.0.2.1": " 0", "192.0.2.1:80": " 0",
		"[::1]:80": " 0", "": " 0", "a.example:99999": " 0", "a/b": " 0", "user@a.example": " 0",
	} {
		name, port := cleanHost(host)
		if got := fmt.Sprint(name, " ", port); got != want {
			t.Errorf("%q: %q, want %q", host, got, want)
		}
	}
}

func TestEventsAreBounded(t *testing.T) {
	dir := t.TempDir()
	l := &eventLog{dir: dir, id: "a"}
	for i := range 30000 {
		l.bucket = bucket{} // as if time went by
		if err := l.add(Event{
			Protocol: "dns", Name: fmt.Sprint(i, strings.Repeat("x\x1b", 200)), Reason: "no",
		}); err != nil {
			t.Fatal(err)
		}
	}
	var size int64
	logs, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range logs {
		st, err := f.Info()
		if err != nil {
			t.Fatal(err)
		}
		size += st.Size()
	}
	if size > 2<<20 || len(logs) != 2 {
		t.Errorf("%d bytes in %v", size, logs)
	}
	last := ""
	err = eventlog.NewReader(dir, "a").Read(func(line []byte) error { last = string(line); return nil })
	if err != nil || !strings.Contains(last, `"name":"29999x?x?`) {
		t.Errorf("last %.80q, %v", last, err)
	}
	l.bucket = bucket{}
	begun, taken := time.Now(), 0
	for i := range eventBurst * 2 {
		if err := l.add(Event{Protocol: "tcp", Address: fmt.Sprint(i), Reason: "no"}); err != nil {
			t.Fatal(err)
		}
		if l.missed == 0 {
			taken++
		}
	}
	if most := eventBurst + int(time.Since(begun).Seconds()*eventRate) + 1; taken > most {
		t.Errorf("%d were taken, want %d at most", taken, most)
	}
}

func TestLogIsBounded(t *testing.T) {
	var said bytes.Buffer
	s := New(Options{Log: slog.New(slog.NewTextHandler(&said, nil))})
	for range 3 * saidLimit {
		s.complain("no")
	}
	if n := bytes.Count(said.Bytes(), []byte("\n")); n != saidLimit {
		t.Errorf("%d lines", n)
	}
}

func TestEventLine(t *testing.T) {
	dir := t.TempDir()
	l := &eventLog{dir: dir, id: "box"}
	for range 3 {
		if err := l.add(Event{
			Protocol: "tls", Name: "evil.example", Address: "192.0.2.1:443", Reason: "no rule",
		}); err != nil {
			t.Fatal(err)
		}
	}
	if err := l.add(Event{Protocol: "udp", Address: "192.0.2.1:443", Reason: "no rule"}); err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(eventlog.Path(dir, "box"))
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for line := range strings.Lines(string(b)) {
		_, rest, _ := strings.Cut(line, ",")
		got = append(got, strings.TrimSpace(rest))
	}
	want := []string{
		`"sandbox":"box","protocol":"tls","name":"evil.example","address":"192.0.2.1:443","reason":"no rule"}`,
		`"sandbox":"box","protocol":"udp","address":"192.0.2.1:443","reason":"no rule","missed":2}`,
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Error(d)
	}
}

func FuzzHello(f *testing.F) {
	f.Add(helloOf(f, "good.example"))
	f.Add([]byte("\x16\x03\x01\x00\x05\x01\x00\x00\x01\x03"))
	f.Fuzz(func(t *testing.T, b []byte) {
		name, read, err := hello(context.Background(), bytes.NewReader(b))
		if !bytes.HasPrefix(b, read) || err != nil && name != "" {
			t.Errorf("%q, %d bytes, %v", name, len(read), err)
		}
	})
}

func FuzzLook(f *testing.F) {
	f.Add([]byte("GET / HTTP/1.1\r\nHost: a.example\r\n\r\n"), "a.example:80")
	f.Add([]byte("\r\n\r\nSSH-2.0-x"), "[::1]")
	f.Fuzz(func(t *testing.T, b []byte, host string) {
		r := bufio.NewReaderSize(bytes.NewReader(b), helloLimit)
		what, _ := look(r)
		rest, err := io.ReadAll(r)
		if err != nil || !bytes.Equal(rest, b) {
			t.Errorf("look took something: %q, %v", rest, err)
		}
		if what == kindTLS && b[0] != 0x16 {
			t.Errorf("%q is taken for TLS", b)
		}
		if name, _ := cleanHost(host); name != "" {
			if again, ok := policy.CleanDomain(name); !ok || again != name {
				t.Errorf("%q: %q is no clean name", host, name)
			}
		}
	})
}

func FuzzQuestion(f *testing.F) {
	q := dnsmessage.Message{
		Header: dnsmessage.Header{ID: 7},
		Questions: []dnsmessage.Question{{
			Name: dnsmessage.MustNewName("good.example."), Type: dnsmessage.TypeA, Class: dnsmessage.ClassINET,
		}},
	}
	b, err := q.Pack()
	if err != nil {
		f.Fatal(err)
	}
	f.Add(b)
	f.Add(b[:12])
	s := New(Options{Events: f.TempDir()})
	none := newBox(s.events, "a")
	none.rules.Store(&Rules{})
	f.Fuzz(func(t *testing.T, msg []byte) {
		answer := s.answer(context.Background(), none, msg)
		if answer == nil {
			return
		}
		var m dnsmessage.Message
		if err := m.Unpack(answer); err != nil || !m.Response || len(m.Answers) > 0 {
			t.Errorf("%q: %+v, %v", msg, m, err)
		}
	})
}
