package network

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"slices"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/internal/flock"
	"github.com/agentbox/agentbox/runtime"
)

// pools are carved into /24s, in this order. 10.88 and 10.89 are Podman's,
// 172.17 to 172.31 are Docker's first choice.
var pools = []netip.Prefix{
	netip.MustParsePrefix("10.87.0.0/16"),
	netip.MustParsePrefix("10.86.0.0/16"),
	netip.MustParsePrefix("10.85.0.0/16"),
	netip.MustParsePrefix("172.30.0.0/16"),
	netip.MustParsePrefix("192.168.224.0/19"),
	netip.MustParsePrefix("100.87.0.0/16"), // shared address space, for hosts that route all of the above
}

// reserve makes sure that id has an address and that this is on disk. It
// returns with the host's subnets locked if the bridge may have to be made;
// unlock, which may be called twice, ends that.
func (v *verb) reserve(ctx context.Context, id string, n runtime.Network) (unlock func(), err error) {
	unlock = func() {}
	le := v.state.Sandboxes[id]
	changed := false
	if le == nil {
		le = &lease{Group: n.Group}
	}
	if !equalPorts(le.Ports, n.Ports) {
		le.Ports, changed = n.Ports, true
	}
	if filtered := n.Mode == runtime.NetworkFiltered; le.Filtered != filtered || !slices.Equal(le.Egress, n.Egress) {
		le.Filtered, le.Egress, changed = filtered, n.Egress, true
	}
	if le.Bridge == "" {
		for i := range v.state.Bridges {
			b := &v.state.Bridges[i]
			if b.Group != n.Group {
				continue
			}
			if a, ok := v.state.free(b); ok {
				v.state.assign(id, le, b, a)
				break
			}
			if n.Group != "" {
				return unlock, fmt.Errorf("network group %q is full: 253 sandboxes share one subnet: %w",
					n.Group, fault.ErrState)
			}
		}
		changed = true
	}
	b := v.state.bridge(le.Bridge)
	if b != nil {
		l, err := v.host.find(b.Name)
		if err != nil {
			return unlock, err
		}
		if l == nil { // since a reboot; others may have come there meanwhile
			if unlock, err = lockSubnets(ctx); err != nil {
				return unlock, err
			}
			if err := v.checkSubnet(b); err != nil {
				unlock()
				return func() {}, err
			}
		}
	} else {
		if unlock, err = lockSubnets(ctx); err != nil {
			return unlock, err
		}
		if err := v.newBridge(id, le); err != nil {
			unlock()
			return func() {}, err
		}
	}
	if changed {
		if err := v.save(); err != nil {
			unlock()
			return func() {}, err
		}
	}
	return unlock, nil
}

func (s *state) assign(id string, le *lease, b *bridge, a netip.Addr) {
	le.Bridge, le.Address = b.Name, a
	b.Last = a.As4()[3]
	s.Sandboxes[id] = le
}

// newBridge adds a bridge for le to the state and gives it its first address.
func (v *verb) newBridge(id string, le *lease) error {
	name := v.state.unused(v.m.bridge)
	// A bridge that the state does not list is left from a lost state file.
	if l, err := v.host.find(name); err != nil {
		return err
	} else if l != nil && l.Type() == "bridge" {
		if err := v.host.deleteLink(name); err != nil {
			return err
		}
	}
	taken, err := v.host.taken()
	if err != nil {
		return err
	}
	for _, b := range v.state.Bridges {
		taken = append(taken, b.Subnet)
	}
	subnet, ok := pickSubnet(taken, v.m.firstSubnet())
	if !ok {
		return fmt.Errorf("no subnet is free for a bridge: the host's routes cover all of %v; use network mode none or host, or narrow a route: %w", pools, fault.ErrUnsupported)
	}
	v.state.Bridges = append(v.state.Bridges, bridge{Name: name, Group: le.Group, Subnet: subnet})
	b := &v.state.Bridges[len(v.state.Bridges)-1]
	a, _ := v.state.free(b)
	v.state.assign(id, le, b, a)
	return nil
}

// firstSubnet returns the index in the first pool at which a root begins to look. Roots other than
// the default begin at one that depends on their tag, so that two whose bridges are down, and so
// cannot be seen, hardly ever take the same.
func (m *Manager) firstSubnet() int {
	if m.table == "agentbox" {
		return 0
	}
	var n int
	for _, c := range m.tag {
		n = n*31 + int(c)
	}
	return 1 + (n&0x7fffffff)%255
}

func pickSubnet(taken []netip.Prefix, first int) (netip.Prefix, bool) {
	for _, pool := range pools {
		base := binary.BigEndian.Uint32(pool.Addr().AsSlice())
		count := 1 << (24 - pool.Bits())
	next:
		for i := range count {
			var b [4]byte
			binary.BigEndian.PutUint32(b[:], base+uint32((first+i)%count)<<8)
			p := netip.PrefixFrom(netip.AddrFrom4(b), 24)
			for _, t := range taken {
				if t.Overlaps(p) {
					continue next
				}
			}
			return p, true
		}
	}
	return netip.Prefix{}, false
}

// taken are all subnets and addresses the host has a route to, in any table,
// the default route aside. Its own addresses are among them (table local).
func (h *handle) taken() ([]netip.Prefix, error) {
	routes, err := h.routes()
	if err != nil {
		return nil, err
	}
	var taken []netip.Prefix
	for _, r := range routes {
		if p, ok := destination(r); ok {
			taken = append(taken, p)
		}
	}
	return taken, nil
}

func (h *handle) routes() ([]netlink.Route, error) {
	routes, err := dump(func() ([]netlink.Route, error) {
		return h.RouteListFiltered(netlink.FAMILY_V4, &netlink.Route{Table: unix.RT_TABLE_UNSPEC},
			netlink.RT_FILTER_TABLE)
	})
	if err != nil {
		return nil, fmt.Errorf("read the host's routes: %w", err)
	}
	return routes, nil
}

func destination(r netlink.Route) (netip.Prefix, bool) {
	if r.Dst == nil {
		return netip.Prefix{}, false
	}
	a, ok := netip.AddrFromSlice(r.Dst.IP)
	bits, _ := r.Dst.Mask.Size()
	// Halves of everything are how tunnels override the default route.
	return netip.PrefixFrom(a.Unmap(), bits), ok && bits > 1
}

// checkSubnet refuses to put a bridge where the host has something else by
// now. A route to more than the subnet does no harm, it gives way.
func (v *verb) checkSubnet(b *bridge) error {
	routes, err := v.host.routes()
	if err != nil {
		return err
	}
	for _, r := range routes {
		if p, ok := destination(r); ok && p.Bits() >= b.Subnet.Bits() && p.Overlaps(b.Subnet) {
			return &fault.Error{
				Op: "make bridge", ID: b.Name,
				Err: fmt.Errorf("the host has a route to %s, which lies in the bridge's subnet %s: %w", p,
					b.Subnet, fault.ErrState),
				Hint: "Remove the route, or remove the sandboxes on this bridge: new ones get another subnet.",
			}
		}
	}
	return nil
}

// lockSubnets keeps other roots on this host from choosing a subnet meanwhile. It locks the
// network namespace, since that is what they share.
func lockSubnets(ctx context.Context) (unlock func(), err error) {
	l, err := waitLock(ctx, threadNamespace, flock.Existing|flock.Follow)
	if err != nil {
		return func() {}, err
	}
	return l.Unlock, nil
}

// enableForwarding lets the host route. It stays on: see the package comment.
func enableForwarding() error {
	const path = "/proc/sys/net/ipv4/ip_forward"
	b, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	if len(b) > 0 && b[0] != '0' {
		return nil
	}
	if err := sysctl("ipv4/ip_forward", "1"); err != nil {
		if errors.Is(err, unix.EROFS) || errors.Is(err, unix.EACCES) {
			return fmt.Errorf("forwarding is off and cannot be switched on from here; run sysctl -w net.ipv4.ip_forward=1 on the host: %w", fault.ErrUnsupported)
		}
		return err
	}
	slog.Info("IPv4 forwarding enabled (net.ipv4.ip_forward)")
	return nil
}
