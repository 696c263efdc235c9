package test

import (
	"net"
	"net/http"
	"strings"
	"testing"

	"golang.org/x/net/dns/dnsmessage"
)

// TestBusyboxTools: no tool of the built-in image ends by a signal, and names are
// looked up, in /etc/hosts and by DNS. wget, which some builds make end by one at -T, takes
// it however it is called.
func TestBusyboxTools(t *testing.T) {
	t.Parallel()
	b := newBox(t)
	if got := b.ok("run", "--rm", "--network", "none", "busybox", "sh", "-c", `for a in $(busybox --list); do
	busybox $a --help </dev/null >/dev/null 2>&1; [ $? -lt 128 ] || echo "$a --help: $?"
done`); got != "" {
		t.Errorf("%s", got)
	}

	// On addresses of this test's own, whose well-known ports nothing else has.
	const resolver, web = "127.77.16.53", "127.77.16.80"
	answerNames(t, resolver, "served.test.", net.ParseIP(web).To4())
	listener, err := net.Listen("tcp", web+":80")
	if err != nil {
		t.Fatal(err)
	}
	server := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_, _ = w.Write([]byte("served\n"))
	})}
	t.Cleanup(func() { _ = server.Close() })
	go func() { _ = server.Serve(listener) }()

	b.start("c", "--userns", "host", "--network", "host", "busybox", "sleep", "1000")
	b.sh("c", "echo nameserver "+resolver+" > /etc/resolv.conf; echo "+web+" listed.test >> /etc/hosts")
	for _, name := range []string{"served.test", "listed.test"} {
		for _, wget := range []string{
			"wget -q -O -", "wget -T 20 -q -O -", "/usr/bin/wget -qT20 -O -", "busybox wget -T 20 -t 1 -q -O -",
		} {
			equal(b, wget+" "+name, b.sh("c", wget+" http://"+name+"/"), "served")
		}
		equal(b, "nc "+name, b.sh("c", `printf 'GET / HTTP/1.0\r\n\r\n' | nc `+name+` 80 | tail -n 1`), "served")
	}
	if got := b.sh("c", "nslookup served.test"); !strings.Contains(got, web) {
		t.Errorf("nslookup: %s", got)
	}
	if got := b.sh("c", "wget -T 20 -O - http://no.test/ 2>&1; echo $?"); !strings.Contains(got,
		"bad address 'no.test'\n1") {
		t.Errorf("a name that there is not: %s", got)
	}
}

// answerNames answers DNS queries at an address until the test ends: one name has an
// IPv4 address, and no other is known.
func answerNames(t *testing.T, at, name string, address net.IP) {
	t.Helper()
	conn, err := net.ListenPacket("udp", at+":53")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	go func() {
		buf := make([]byte, 512)
		for {
			n, from, err := conn.ReadFrom(buf)
			if err != nil {
				return
			}
			var m dnsmessage.Message
			if m.Unpack(buf[:n]) != nil || len(m.Questions) != 1 {
				continue
			}
			m.Response, m.RecursionAvailable, m.Additionals = true, true, nil
			q := m.Questions[0]
			switch {
			case q.Name.String() != name:
				m.RCode = dnsmessage.RCodeNameError
			case q.Type == dnsmessage.TypeA:
				m.Answers = []dnsmessage.Resource{{
					Header: dnsmessage.ResourceHeader{Name: q.Name, Type: q.Type, Class: q.Class, TTL: 60},
					Body:   &dnsmessage.AResource{A: [4]byte(address)},
				}}
			}
			if out, err := m.Pack(); err == nil {
				_, _ = conn.WriteTo(out, from)
			}
		}
	}()
}
