package remote

import (
	"context"
	"errors"
	"net"
	"net/http"
	"strings"
	"testing"

	"github.com/agentbox/agentbox/internal/fault"
)

// Where a registry may send us, and how we would speak there. Nothing is sent:
// what passes the guard finds its context cancelled.
func TestGuard(t *testing.T) {
	for _, c := range []struct {
		home, to string
		plain    bool
		want     string // empty: it passes
	}{
		{"192.0.2.1", "https://192.0.2.1/", false, ""},
		{"192.0.2.1", "http://192.0.2.1/", false, "not be encrypted"},
		{"192.0.2.1", "http://192.0.2.1:5000/", true, ""},
		{"192.0.2.1", "https://192.0.2.2/", false, ""},
		{"192.0.2.1", "http://192.0.2.2/", true, "not be encrypted"},
		{"192.0.2.1", "http://127.0.0.1/", true, "sends us to 127.0.0.1"},
		{"192.0.2.1", "https://localhost/", false, "sends us"},
		{"192.0.2.1", "https://LOCALHOST./", false, "sends us"},
		{"192.0.2.1", "https://a.localhost/", false, "sends us"},
		{"192.0.2.1", "https://10.0.0.1/", false, "sends us"},
		{"192.0.2.1", "https://[fd00::1]/", false, "sends us"},
		{"192.0.2.1", "https://[::ffff:10.0.0.1]/", false, "sends us"},
		{"192.0.2.1", "https://0.0.0.0/", false, "sends us"},
		{"192.0.2.1", "https://[64:ff9b::a9fe:a9fe]/", false, "sends us"},
		{"192.0.2.1", "https://[64:ff9b::c000:202]/", false, ""},
		{"192.0.2.1", "https://[2002:a00:1::]/", false, "sends us"},
		{"192.0.2.1", "https://100.64.0.1/", false, "sends us"},
		{"10.0.0.1", "https://100.100.100.200/", false, "sends us"},
		{"127.0.0.1", "https://[fd00:ec2::254]/", false, "sends us"},
		{"127.0.0.1", "https://168.63.129.16/", false, "sends us"},
		{"10.0.0.1", "https://192.168.7.7/", false, ""},
		{"10.0.0.1", "http://192.168.7.7/", true, "not be encrypted"},
		{"10.0.0.1", "https://127.0.0.1/", false, "sends us"},
		{"10.0.0.1", "https://169.254.169.254/", false, "sends us"},
		{"127.0.0.1", "http://localhost/", false, ""},
		{"localhost", "https://10.0.0.1/", false, ""},
		{"localhost", "https://[fe80::1%25lo]/", false, "sends us"},
		{"localhost", "https://169.254.169.254/", false, "sends us"},
	} {
		tr := Transport()
		g := newGuard(c.home, tr, Options{Plain: c.plain, Elsewhere: func(string) (http.RoundTripper, bool) {
			return tr, false
		}})
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, c.to, nil)
		if err != nil {
			t.Fatal(err)
		}
		_, err = g.RoundTrip(req)
		if passed := errors.Is(err, context.Canceled); passed != (c.want == "") ||
			!passed && (!errors.Is(err, fault.ErrDenied) || !strings.Contains(err.Error(), c.want)) {
			t.Errorf("%s to %s (plain %v): %v", c.home, c.to, c.plain, err)
		}
	}
}

// A name that has led to a public address may lead to this host by the time of the
// connection, which is refused then.
func TestConnectionIsHeld(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	_, port, err := net.SplitHostPort(l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		bound bound
		ok    bool
	}{
		{bound{"localhost", public}, false}, {bound{"localhost", private}, false}, {bound{"localhost", here}, true},
		{bound{"other.example", public}, true},
	} {
		conn, err := dial(context.WithValue(t.Context(), bound{}, c.bound), "tcp4", "localhost:"+port)
		if (err == nil) != c.ok || err != nil && !errors.Is(err, fault.ErrDenied) {
			t.Errorf("%+v: %v", c.bound, err)
		}
		if err == nil {
			conn.Close()
		}
	}
	req, err := http.NewRequestWithContext(context.WithValue(t.Context(), bound{}, bound{"localhost", public}),
		http.MethodGet, "http://localhost:"+port+"/", nil)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := Transport().RoundTrip(req); !errors.Is(err, fault.ErrDenied) {
		t.Errorf("a request: %v", err)
	}
}
