package remote

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/agentbox/agentbox/internal/fault"
)

// errPlain is why guard refuses a request.
var errPlain = fmt.Errorf("the connection would not be encrypted: %w", fault.ErrDenied)

// guard checks every request of a client before it is sent: the registry's answers name further
// hosts, for blobs, tokens and uploads. Only to this host does it allow plain text, where the
// library would speak plain HTTP to private addresses and to *.local as well; what was allowed
// for the registry it allows for no other host; and for a registry outside the puller's network
// it sends no request into that network.
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
		var held *http.Request
		if held, err = g.reachable(req, host); err == nil {
			req = held
		}
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

// reachable refuses hosts that are nearer to us than the registry is. The request it
// returns holds the connection to that, too: a name may lead elsewhere by then.
func (g *guard) reachable(req *http.Request, host string) (*http.Request, error) {
	most := min(max(g.distance(req, g.home, false), public), here)
	if g.distance(req, host, true) > most {
		return nil, errSentTo(host)
	}
	return req.WithContext(context.WithValue(req.Context(), bound{}, bound{host, most})), nil
}

func errSentTo(host string) error {
	return fmt.Errorf("the registry sends us to %s: %w", host, fault.ErrDenied)
}

// bound is how near the addresses of a host may be. A context has it under bound{}.
type bound struct {
	host string
	most distance
}

// dial connects, and holds the address to the bound of the context.
func dial(ctx context.Context, network, addr string) (net.Conn, error) {
	d := &net.Dialer{Timeout: 30 * time.Second, KeepAlive: 30 * time.Second}
	host, _, err := net.SplitHostPort(addr)
	if b, ok := ctx.Value(bound{}).(bound); ok && err == nil && host == b.host { // else it is a proxy's
		d.ControlContext = func(_ context.Context, _, address string, _ syscall.RawConn) error {
			to, err := netip.ParseAddrPort(address)
			if err == nil && distanceOf(to.Addr()) > b.most {
				err = errSentTo(host)
			}
			return err
		}
	}
	return d.DialContext(ctx, network, addr)
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
	ip = within(ip)
	switch {
	case ip.IsLoopback():
		return here
	case ip.IsLinkLocalUnicast(), ip.IsUnspecified(), ip.IsMulticast(), slices.Contains(metadata, ip):
		return linkLocal
	case ip.IsPrivate(), shared.Contains(ip):
		return private
	}
	return public
}

var (
	// metadata are addresses of clouds' metadata that are not link-local.
	metadata = []netip.Addr{
		netip.MustParseAddr("100.100.100.200"), netip.MustParseAddr("168.63.129.16"),
		netip.MustParseAddr("192.0.0.192"), netip.MustParseAddr("fd00:ec2::254"),
	}
	// shared are the addresses behind providers' NAT.
	shared = netip.MustParsePrefix("100.64.0.0/10")
	nat64  = netip.MustParsePrefix("64:ff9b::/96")
	sixTo4 = netip.MustParsePrefix("2002::/16")
)

// within is the IPv4 address that an IPv6 one stands for.
func within(ip netip.Addr) netip.Addr {
	b := ip.As16()
	switch {
	case nat64.Contains(ip):
		return netip.AddrFrom4([4]byte(b[12:]))
	case sixTo4.Contains(ip):
		return netip.AddrFrom4([4]byte(b[2:6]))
	}
	return ip.Unmap()
}
