package network

import (
	"bufio"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"testing"
	"time"

	"golang.org/x/net/dns/dnsmessage"
	"golang.org/x/sys/unix"
)

// A sandbox tries to have the proxy take it elsewhere than the rules allow.
func TestFilterIsNotTricked(t *testing.T) {
	w := filtered(t)
	c := client{t, w.setup("a", egressTo("good.example 80,443", "*.wild.example 80,443", "mixed.example 80"))}
	web, secure := internetAddress+":80", internetAddress+":443"
	const no = "no rule allows the name on this port"
	const nameless = "no rule allows the address, and the request names no host"

	t.Run("http", func(t *testing.T) {
		for _, q := range []struct{ say, want string }{
			{"GET / HTTP/1.1\r\nHost: good.example\r\n\r\n", "200 page of good.example"},
			{"GET / HTTP/1.1\r\nHost: GOOD.example.:80\r\n\r\n", "200 page of GOOD.example.:80"},
			{"GET / HTTP/1.1\r\nHost: a.b.wild.example\r\n\r\n", "502"}, // allowed, and there is none
			{"GET / HTTP/1.1\r\nHost: mixed.example\r\n\r\n", "200 page of mixed.example"},
			{"GET / HTTP/1.1\r\nHost: good.example.evil.example\r\n\r\n", "403 " + no},
			{"GET / HTTP/1.1\r\nHost: evilgood.example\r\n\r\n", "403 " + no},
			{"GET / HTTP/1.1\r\nHost: sub.good.example\r\n\r\n", "403 " + no},
			{"GET / HTTP/1.1\r\nHost: wild.example\r\n\r\n", "403 " + no},
			{"GET / HTTP/1.1\r\nHost: evilwild.example\r\n\r\n", "403 " + no},
			{
				"GET / HTTP/1.1\r\nHost: good.example:81\r\n\r\n",
				"403 the request is for another port than the connection",
			},
			{"GET / HTTP/1.1\r\nHost: " + internetAddress + "\r\n\r\n", "403 " + nameless},
			{"GET / HTTP/1.1\r\nHost: [::ffff:198.51.100.2]\r\n\r\n", "403 " + nameless},
			{"GET / HTTP/1.1\r\nHost: 0xc6336402\r\n\r\n", "403 " + nameless},
			{"GET / HTTP/1.1\r\nHost: good.example@evil.example\r\n\r\n", "4"},
			{"GET / HTTP/1.1\r\nHost: good.example\r\nHost: other.example\r\n\r\n", "400"},
			{"GET / HTTP/1.1\r\n\r\n", "400"},
			{"GET / HTTP/1.0\r\n\r\n", "403 " + nameless},
			{"GET http://other.example/ HTTP/1.1\r\nHost: good.example\r\n\r\n", "403 " + no},
			{"GET http://good.example/ HTTP/1.1\r\nHost: other.example\r\n\r\n", "200 page of good.example"},
			{"GET / HTTP/1.1\r\n Host: good.example\r\nHost: other.example\r\n\r\n", "400"},
			{"\r\nGET / HTTP/1.1\r\nHost: other.example\r\n\r\n", "400"},
			{
				"CONNECT good.example:443 HTTP/1.1\r\nHost: good.example:443\r\n\r\n",
				"403 this is no proxy to CONNECT through",
			},
			{"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "403 " + nameless},
			{"GET / HTTP/1.1\r\nHost: good.example\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA\r\n\r\n", "200 page of good.example"},
			{"GET / HTTP/1.1\r\nHost: good.example\r\nX: " + strings.Repeat("x", 80<<10) + "\r\n\r\n", ""},
			{
				"GET /" + strings.Repeat("x", 20<<10) + " HTTP/1.1\r\nHost: good.example\r\n\r\n",
				"200 page of good.example",
			},
			{"GET /" + strings.Repeat("x", 20<<10) + " HTTP/1.1\r\nHost: other.example\r\n\r\n", "403 " + no},
			{"GET  / HTTP/1.1\r\nHost: good.example\r\n\r\n", ""},
		} {
			said, err := c.say(web, q.say)
			said = strings.Replace(strings.TrimSpace(said), "agentbox: egress denied: ", "", 1)
			if !strings.HasPrefix(said, q.want) || q.want == "" && err == nil && !strings.HasPrefix(said, "4") {
				t.Errorf("%.80q: %q, %v, want %q", q.say, said, err, q.want)
			}
		}
	})
	t.Run("requests in one breath", func(t *testing.T) {
		conn, err := c.dial("tcp4", web)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := io.WriteString(conn,
			"GET / HTTP/1.1\r\nHost: good.example\r\n\r\nGET / HTTP/1.1\r\nHost: other.example\r\n\r\nGET / HTTP/1.1\r\nHost: good.example\r\n\r\n"); err != nil {
			t.Fatal(err)
		}
		r := bufio.NewReader(conn)
		for _, want := range []int{200, 403} {
			answer, err := http.ReadResponse(r, nil)
			if err != nil {
				t.Fatal(err)
			}
			if _, err := io.Copy(io.Discard, answer.Body); err != nil || answer.StatusCode != want {
				t.Errorf("%s, %v, want %d", answer.Status, err, want)
			}
		}
		if b, err := r.ReadByte(); err == nil {
			t.Errorf("it goes on after what was denied: %q", b)
		}
	})
	t.Run("tls", func(t *testing.T) {
		for name, ok := range map[string]bool{
			"good.example": true, "GOOD.example": true, "sub.wild.example": true,
			"good.example.evil.example": false, "wild.example": false, "evilgood.example": false,
			"other.example": false,
		} {
			said, err := c.https(secure, name)
			if ok != (err == nil) || ok && said != "200 page of "+name {
				t.Errorf("%s: %q, %v", name, said, err)
			}
		}
	})
}

// say returns the status and the text that answer a request.
func (c client) say(to, request string) (string, error) {
	conn, err := c.dial("tcp4", to)
	if err != nil {
		return "", err
	}
	_, werr := io.WriteString(conn, request) // it may be closed before it is through
	r, err := http.ReadResponse(bufio.NewReader(conn), nil)
	if err != nil {
		return "", errors.Join(werr, err)
	}
	defer r.Body.Close()
	b, err := io.ReadAll(r.Body)
	return fmt.Sprintf("%d %s", r.StatusCode, b), err
}

// Neither one sandbox nor a server makes the proxy hold more than it should.
func TestFilterIsBounded(t *testing.T) {
	w := filtered(t)
	c := client{t, w.setup("a", egressTo("good.example", "huge.example 443"))}
	other := client{t, w.setup("b", egressTo("good.example"))}

	said, err := c.lookUp(c.Gateway.String(), "udp4", "huge.example.", dnsmessage.TypeA)
	want(t, "a huge answer", said, err, "Success"+strings.Repeat(" "+internetAddress, 16))
	said, err = c.https(internetAddress+":443", "huge.example")
	want(t, "a name with many addresses", said, err, "200 page of huge.example")

	// Connections that say nothing.
	var held []net.Conn
	for range 256 + 8 {
		conn, err := c.dial("tcp4", "192.0.2.1:443")
		if err != nil {
			t.Fatal(err)
		}
		held = append(held, conn)
	}
	w.mustDeny("a", "tcp||192.0.2.1:443|the sandbox has 256 connections, which is its limit now")
	said, err = other.https(internetAddress+":443", "good.example")
	want(t, "another sandbox meanwhile", said, err, "200 page of good.example")
	for _, conn := range held {
		conn.Close()
	}
	said = ""
	for end := time.Now().Add(10 * time.Second); err == nil && said == "" && time.Now().Before(end); {
		if said, err = c.https(internetAddress+":443", "good.example"); err != nil {
			said, err = "", nil // the last of them are not closed yet
		}
	}
	want(t, "afterwards", said, err, "200 page of good.example")
	if rss := rssOf(t, w.workerPid()); rss > 200<<20 {
		t.Errorf("the proxy takes %d MiB", rss>>20)
	}
}

// A name that is allowed begins to lead into the host's network.
func TestFilterSurvivesRebinding(t *testing.T) {
	w := filtered(t)
	w.secondInternet()
	serve(t, internet, "tcp4", "10.99.0.2:8443")
	c := client{t, w.setup("a", egressTo("mixed.example", "rebind.example"))}
	// The address, which the sandbox has from elsewhere, is no way either.
	for _, to := range []string{"10.99.0.2:8443", "10.1.2.3:8443"} {
		said, err := c.raw(to, "SSH-2.0-x\r\n")
		refused(t, to, said, err)
	}
	said, err := c.say("10.99.0.2:80", "GET / HTTP/1.1\r\nHost: rebind.example\r\n\r\n")
	if err != nil || !strings.HasPrefix(said, "502") || !strings.Contains(said, "10.1.2.3") {
		t.Errorf("%q, %v", said, err)
	}
	// A name that leads to both goes to the public one.
	said, err = c.lookUp("9.9.9.9", "tcp4", "mixed.example.", dnsmessage.TypeA)
	want(t, "mixed", said, err, "Success "+internetAddress)
	conn, err := c.dial("tcp4", "10.1.2.3:443")
	if err != nil {
		t.Fatal(err)
	}
	said, err = get(tls.Client(conn, &tls.Config{ServerName: "mixed.example", InsecureSkipVerify: true}),
		"mixed.example") //nolint:gosec // a test's server
	want(t, "https", said, err, "200 page of mixed.example")
}

func rssOf(t *testing.T, pid int) int64 {
	t.Helper()
	var size, rss int64
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/statm", pid))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := fmt.Sscan(string(b), &size, &rss); err != nil {
		t.Fatal(err)
	}
	return rss * int64(unix.Getpagesize())
}
