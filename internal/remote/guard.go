package remote

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"sync"

	"github.com/agentbox/agentbox/internal/fault"
)

// errPlain is why guard refuses a request.
var errPlain = fmt.Errorf("the connection would not be encrypted: %w", fault.ErrDenied)

// guard stands before every request of a client: the registry's answers name
// further hosts, for blobs, tokens and uploads. It lets nothing out in the clear,
// but to this host, where the library would speak plain HTTP to private addresses
// and to *.local as well; what was allowed for the registry it allows for no
// other host; and it asks nothing of the network of whoever pulls for a registry
// outside of it.
type guard struct {
	home      string // the registry's host, without a port
	inner     http.RoundTripper
	plain     bool // HTTP will do, at home
	elsewhere func(host string) (rt http.RoundTripper, plain bool)

	mu   sync.Mutex
	near map[string]distance
}

func newGuard(home string, inner http.RoundTripper, opts Options) *guard {
	g := &guard{home: home, inner: inner, plain: opts.Plain, elsewhere: opts.Elsewhere, near: map[string]distance{}}
	if g.elsewhere == nil {
		g.elsewhere = func(string) (http.RoundTripper, bool) { return inner, opts.Plain }
	}
	return g
}

func (g *guard) RoundTrip(req *http.Request) (*http.Response, error) {
	host := req.URL.Hostname()
	rt, plain := g.inner, g.plain
	var err error
	if host != g.home {
		rt, plain = g.elsewhere(req.URL.Host)
		err = g.reachable(req, host)
	}
	if err == nil && req.URL.Scheme != "https" && !plain && !loopback(host) {
		err = errPlain
		if host != g.home {
			err = fmt.Errorf("the registry sends us to %s: %w", req.URL.Host, err)
		}
	}
	if err != nil {
		if req.Body != nil {
			req.Body.Close()
		}
		return nil, err
	}
	resp, err := rt.RoundTrip(req)
	// The library reads the answers to its own questions to the end.
	if err == nil && req.Header.Get("Accept-Encoding") != "identity" {
		resp.Body = limited(resp.Body)
	}
	return resp, err
}

// limited ends a body that is too long for what is read without a bound.
func limited(body io.ReadCloser) io.ReadCloser {
	return struct {
		io.Reader
		io.Closer
	}{io.LimitReader(body, maxOther), body}
}

func loopback(host string) bool {
	ip, err := netip.ParseAddr(host)
	return host == "localhost" || err == nil && ip.Unmap().IsLoopback()
}

// reachable refuses hosts that are nearer to us than the registry is.
func (g *guard) reachable(req *http.Request, host string) error {
	d := g.distance(req, host, true)
	if d == public || d < linkLocal && d <= g.distance(req, g.home, false) {
		return nil
	}
	return fmt.Errorf("the registry sends us to %s: %w", host, fault.ErrDenied)
}

// distance is how near a host is.
type distance int

const (
	public    distance = iota
	private            // in the network that we are in
	here               // this host
	linkLocal          // where clouds have their metadata; and what is no host's address
)

// distance is that of the nearest of a host's addresses, or else of the farthest.
func (g *guard) distance(req *http.Request, host string, nearest bool) distance {
	g.mu.Lock()
	d, ok := g.near[host]
	g.mu.Unlock()
	if ok {
		return d
	}
	for i, ip := range addresses(req, host) {
		if one := distanceOf(ip); i == 0 || nearest == (one > d) {
			d = one
		}
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	g.near[host] = d
	return d
}

// addresses are those of a host. A name that is a proxy's to look up has none.
func addresses(req *http.Request, host string) []netip.Addr {
	if ip, err := netip.ParseAddr(host); err == nil {
		return []netip.Addr{ip}
	}
	name := strings.TrimSuffix(strings.ToLower(host), ".")
	if name == "localhost" || strings.HasSuffix(name, ".localhost") {
		return []netip.Addr{netip.IPv6Loopback()}
	}
	if proxy, err := http.ProxyFromEnvironment(req); proxy != nil || err != nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(req.Context(), lookupTime)
	defer cancel()
	list, err := net.DefaultResolver.LookupNetIP(ctx, "ip", host)
	if err != nil {
		return nil // the connection will say so
	}
	return list
}

func distanceOf(ip netip.Addr) distance {
	ip = ip.Unmap()
	switch {
	case ip.IsLoopback():
		return here
	case ip.IsLinkLocalUnicast(), ip.IsUnspecified(), ip.IsMulticast():
		return linkLocal
	case ip.IsPrivate():
		return private
	}
	return public
}
