package network

import (
	"bufio"
	"crypto/tls"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/net/dns/dnsmessage"
	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/eventlog"
	"github.com/agentbox/agentbox/runtime/network/egress"
)

// filtered is a world whose proxy is a process as in real life, and an
// internet with a resolver, web servers and a server that speaks first.
func filtered(t *testing.T) *world {
	t.Helper()
	theInternet(t)
	w := open(t)
	w.m.UseProxy(func() *exec.Cmd {
		cmd := exec.Command("/proc/self/exe")
		cmd.Env = append(os.Environ(), roleEnv+"=egress "+w.m.root)
		return cmd
	}, (*exec.Cmd).Start)
	return w
}

func egressTo(rules ...string) runtime.Network {
	return runtime.Network{Mode: runtime.NetworkFiltered, Egress: rules}
}

// names is what the test's resolver knows.
var names = map[string]string{
	"good.example.": internetAddress, "other.example.": internetAddress, "sub.wild.example.": internetAddress,
	"rebind.example.": "10.1.2.3", "local.example.": "127.0.0.1", "metadata.example.": "169.254.169.254",
	"host.example.":   hostAddress,
	"broken.example.": "broken",
	"mixed.example.":  "10.1.2.3 " + internetAddress, "huge.example.": strings.Repeat(internetAddress+" ", 2000),
}

func theInternet(t *testing.T) {
	t.Helper()
	conf := filepath.Join(t.TempDir(), "resolv.conf")
	if err := os.WriteFile(conf, []byte("nameserver "+internetAddress+"\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount(conf, "/etc/resolv.conf", "", unix.MS_BIND, ""); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount("/etc/resolv.conf", unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	listen := func(port string) net.Listener {
		var l net.Listener
		if err := in(t, internet, func() (err error) { l, err = net.Listen("tcp4", ":"+port); return }); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { l.Close() })
		return l
	}
	page := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		fmt.Fprintf(w, "page of %s%s", r.Host, r.Header.Get("Upgrade"))
	})
	web := &httptest.Server{Listener: listen("80"), Config: &http.Server{Handler: page}}
	web.Start()
	t.Cleanup(web.Close)
	secure := &httptest.Server{Listener: listen("443"), Config: &http.Server{Handler: page, ErrorLog: nil}}
	secure.StartTLS()
	t.Cleanup(secure.Close)
	first := listen("22") // speaks first, then echoes
	go func() {
		for {
			c, err := first.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				fmt.Fprintln(c, "SSH-2.0-test")
				_, _ = io.Copy(c, c)
			}()
		}
	}()
	var dns net.PacketConn
	if err := in(t, internet, func() (err error) { dns, err = net.ListenPacket("udp4", ":53"); return }); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { dns.Close() })
	go resolver(dns)
	go resolverTCP(listen("53"))
}

func resolver(c net.PacketConn) {
	buf := make([]byte, 4096)
	for {
		n, from, err := c.ReadFrom(buf)
		if err != nil {
			return
		}
		if b := answer(buf[:n], 1000); b != nil {
			_, _ = c.WriteTo(b, from)
		}
	}
}

func resolverTCP(l net.Listener) {
	for {
		c, err := l.Accept()
		if err != nil {
			return
		}
		buf := make([]byte, 4096)
		if n, err := c.Read(buf); err == nil && n > 2 {
			if b := answer(buf[2:n], 1<<16); b != nil {
				_, _ = c.Write(append(binary.BigEndian.AppendUint16(nil, uint16(len(b))), b...))
			}
		}
		c.Close()
	}
}

// answer is a resolver's; one that is longer than the limit is cut off, and says so.
func answer(question []byte, limit int) []byte {
	var q dnsmessage.Message
	if q.Unpack(question) != nil || len(q.Questions) != 1 {
		return nil
	}
	a := dnsmessage.Message{
		Header: dnsmessage.Header{ID: q.ID, Response: true, RecursionAvailable: true}, Questions: q.Questions,
	}
	name := q.Questions[0].Name
	addresses, ok := names[name.String()]
	if !ok {
		a.RCode = dnsmessage.RCodeNameError
	}
	if addresses == "broken" {
		a.RCode, addresses = dnsmessage.RCodeServerFailure, ""
	}
	for ip := range strings.FieldsSeq(addresses) {
		if q.Questions[0].Type == dnsmessage.TypeA {
			a.Answers = append(a.Answers, dnsmessage.Resource{
				Header: dnsmessage.ResourceHeader{Name: name, Class: dnsmessage.ClassINET, TTL: 1},
				Body:   &dnsmessage.AResource{A: netip.MustParseAddr(ip).As4()},
			})
		}
	}
	b, err := a.Pack()
	if err == nil && len(b) > limit {
		a.Answers, a.Truncated = nil, true
		b, err = a.Pack()
	}
	if err != nil {
		return nil
	}
	return b
}

// client is a raw client in a sandbox.
type client struct {
	testing.TB
	Endpoint
}

func (c client) dial(network, to string) (conn net.Conn, err error) {
	c.Helper()
	err = in(c, c.Path, func() error {
		conn, err = net.DialTimeout(network, to, 2*time.Second)
		return err
	})
	if err == nil {
		c.Cleanup(func() { conn.Close() })
		err = conn.SetDeadline(time.Now().Add(15 * time.Second))
	}
	return conn, err
}

// lookUp asks a resolver for the addresses of a name.
func (c client) lookUp(server, network, name string, kind dnsmessage.Type) (string, error) {
	c.Helper()
	conn, err := c.dial(network, server+":53")
	if err != nil {
		return "", err
	}
	q := dnsmessage.Message{
		Header:    dnsmessage.Header{ID: 7, RecursionDesired: true},
		Questions: []dnsmessage.Question{{Name: dnsmessage.MustNewName(name), Type: kind, Class: dnsmessage.ClassINET}},
	}
	b, err := q.Pack()
	if err != nil {
		c.Fatal(err)
	}
	if strings.HasPrefix(network, "tcp") {
		b = append([]byte{0, byte(len(b))}, b...)
	}
	if _, err := conn.Write(b); err != nil {
		return "", err
	}
	buf := make([]byte, 4096)
	n, err := conn.Read(buf)
	if err != nil {
		return "", err
	}
	answer := buf[:n]
	if strings.HasPrefix(network, "tcp") {
		answer = answer[2:]
	}
	var m dnsmessage.Message
	if err := m.Unpack(answer); err != nil {
		return "", err
	}
	said := []string{strings.TrimPrefix(m.RCode.String(), "RCode")}
	for _, r := range m.Answers {
		said = append(said, net.IP(r.Body.(*dnsmessage.AResource).A[:]).String())
	}
	return strings.Join(said, " "), nil
}

func (c client) https(to, name string) (string, error) {
	conn, err := c.dial("tcp4", to)
	if err != nil {
		return "", err
	}
	t := tls.Client(conn, &tls.Config{ServerName: name, InsecureSkipVerify: true}) //nolint:gosec // a test's server
	return get(t, name)
}

func (c client) http(to, host string) (string, error) {
	conn, err := c.dial("tcp4", to)
	if err != nil {
		return "", err
	}
	return get(conn, host)
}

func get(conn net.Conn, host string) (string, error) {
	if _, err := fmt.Fprintf(conn, "GET / HTTP/1.1\r\nHost: %s\r\n\r\n", host); err != nil {
		return "", err
	}
	r, err := http.ReadResponse(bufio.NewReader(conn), nil)
	if err != nil {
		return "", err
	}
	defer r.Body.Close()
	b, err := io.ReadAll(r.Body)
	return fmt.Sprintf("%d %s", r.StatusCode, b), err
}

// raw says something, or waits for the other side to begin.
func (c client) raw(to, say string) (string, error) {
	conn, err := c.dial("tcp4", to)
	if err != nil {
		return "", err
	}
	if _, err := io.WriteString(conn, say); err != nil {
		return "", err
	}
	line, err := bufio.NewReader(conn).ReadString('\n')
	return strings.TrimSpace(line), err
}

// denied are a sandbox's events without their times.
func (w *world) denied(id string) []string {
	w.Helper()
	var all []string
	err := eventlog.NewReader(w.m.EventsDir(), id).Read(func(line []byte) error {
		var e egress.Event
		if err := json.Unmarshal(line, &e); err != nil {
			return err
		}
		if e.Sandbox != id || time.Since(e.Time) > time.Hour {
			w.Errorf("event %+v", e)
		}
		all = append(all, strings.Join([]string{e.Protocol, e.Name, e.Address, e.Reason}, "|"))
		return nil
	})
	if err != nil {
		w.Fatal(err)
	}
	return all
}

func (w *world) mustDeny(id, prefix string) {
	w.Helper()
	for end := time.Now().Add(10 * time.Second); ; time.Sleep(20 * time.Millisecond) {
		all := w.denied(id)
		for _, e := range all {
			if strings.HasPrefix(e, prefix) {
				return
			}
		}
		if time.Now().After(end) {
			w.Errorf("no event %q among %q", prefix, all)
			return
		}
	}
}

func want(t testing.TB, what, said string, err error, wanted string) {
	t.Helper()
	if err != nil || said != wanted {
		t.Errorf("%s: %q, %v, want %q", what, said, err, wanted)
	}
}

func refused(t testing.TB, what, said string, err error) {
	t.Helper()
	if err == nil {
		t.Errorf("%s: %q, want an error", what, said)
	}
}
