package egress

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/agentbox/agentbox/policy"
)

// never lists addresses that no rule can open: the host itself, its link, and the metadata
// services of clouds, which hand out credentials to any client.
var never = []netip.Prefix{
	netip.MustParsePrefix("0.0.0.0/8"),
	netip.MustParsePrefix("127.0.0.0/8"),
	netip.MustParsePrefix("169.254.0.0/16"),
	netip.MustParsePrefix("168.63.129.16/32"),
	netip.MustParsePrefix("100.100.100.200/32"),
	netip.MustParsePrefix("192.0.0.192/32"),
	netip.MustParsePrefix("224.0.0.0/3"), // multicast and above
}

func private(a netip.Addr) bool { return policy.PrivateBits(netip.PrefixFrom(a, a.BitLen())) > 0 }

func within(list []netip.Prefix, a netip.Addr) bool {
	return slices.ContainsFunc(list, func(p netip.Prefix) bool { return p.Contains(a) })
}

// guard knows which addresses are the host's own.
type guard struct {
	mu    sync.Mutex
	read  time.Time
	own   []netip.Addr
	boxes []netip.Prefix // the subnets of sandboxes
	local func() ([]netip.Addr, []netip.Prefix, error)
}

// ownFor is how long the host's addresses are cached.
const ownFor = 2 * time.Second

// address reports whether rules allow an address that a sandbox named itself.
func (g *guard) address(r Rules, to netip.AddrPort) bool {
	ok, alone := r.Address(to.Addr(), to.Port())
	if !ok || within(never, to.Addr()) {
		return false
	}
	// The host's services and other sandboxes are not what 0.0.0.0/0 means.
	return alone && !g.isBox(to.Addr()) || !g.isOwn(to.Addr())
}

// answer reports whether a name that is allowed may lead to an address.
func (g *guard) answer(r Rules, to netip.AddrPort) bool {
	a := to.Addr()
	if !a.Is4() || within(never, a) {
		return false
	}
	if private(a) || g.isOwn(a) {
		return g.address(r, to)
	}
	return true
}

func (g *guard) isOwn(a netip.Addr) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return !g.refresh() || slices.Contains(g.own, a) || within(g.boxes, a)
}

// isBox reports whether an address may be another sandbox's.
func (g *guard) isBox(a netip.Addr) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return !g.refresh() || within(g.boxes, a) && !slices.Contains(g.own, a)
}

// refresh reads the host's addresses; without them everything might be one.
func (g *guard) refresh() bool {
	if time.Since(g.read) < ownFor {
		return true
	}
	own, boxes, err := g.local()
	if err != nil {
		return false
	}
	g.own, g.boxes, g.read = own, boxes, time.Now()
	return true
}

// dial connects to an allowed name, by addresses that are looked up here: what
// address the sandbox believes it to have does not matter.
func (s *Server) dial(ctx context.Context, b *box, name string, port uint16) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, dialAllTime)
	defer cancel()
	addrs, err := s.resolve(ctx, b, name, port)
	if err != nil {
		return nil, err
	}
	errs := []error{fmt.Errorf("%s has no IPv4 address", name)}
	for i, a := range addrs {
		c, err := s.dialAddress(ctx, netip.AddrPortFrom(a, port))
		if err == nil {
			return c, nil
		}
		if i == 0 {
			errs = nil
		}
		errs = append(errs, err)
	}
	return nil, errors.Join(errs...)
}

func (s *Server) dialAddress(ctx context.Context, to netip.AddrPort) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, dialTime)
	defer cancel()
	var d net.Dialer
	return d.DialContext(ctx, "tcp4", to.String())
}
