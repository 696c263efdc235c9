package remote

import (
	"context"
	"errors"
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
		g := newGuard(c.home, tr, Options{Plain: c.plain, Elsewhere: func(string) (http.RoundTripper, bool) { return tr, false }})
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, c.to, nil)
		if err != nil {
			t.Fatal(err)
		}
		_, err = g.RoundTrip(req)
		if passed := errors.Is(err, context.Canceled); passed != (c.want == "") || !passed && (!errors.Is(err, fault.ErrDenied) || !strings.Contains(err.Error(), c.want)) {
			t.Errorf("%s to %s (plain %v): %v", c.home, c.to, c.plain, err)
		}
	}
}
