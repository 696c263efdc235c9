package network

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/internal/guard"
)

// inside is the name of the veth's end in the sandbox.
const inside = "eth0"

// mac is the link address that goes with an address. 02 marks it as locally
// administered. Since it follows from the address, a restored connection finds
// every neighbour where it was.
func mac(a netip.Addr) net.HardwareAddr {
	b := a.As4()
	return net.HardwareAddr{0x02, 0xab, b[0], b[1], b[2], b[3]}
}

// links are all links of the namespace.
func (h *handle) links() ([]netlink.Link, error) { return dump(h.LinkList) }

// dump repeats a listing that a concurrent change has made inconsistent.
func dump[T any](list func() (T, error)) (T, error) {
	for range 20 {
		t, err := list()
		if !errors.Is(err, netlink.ErrDumpInterrupted) {
			return t, err
		}
	}
	return list()
}

// find returns nil if there is no such link.
func (h *handle) find(name string) (netlink.Link, error) {
	l, err := h.LinkByName(name)
	var missing netlink.LinkNotFoundError
	if errors.As(err, &missing) {
		return nil, nil
	}
	return l, err
}

func (h *handle) deleteLink(name string) error {
	l, err := h.find(name)
	if l == nil {
		return err
	}
	if err := h.LinkDel(l); err != nil && !errors.Is(err, unix.ENODEV) {
		return fmt.Errorf("remove %s: %w", name, err)
	}
	return nil
}

// ensureBridge makes b as it should be, whatever is there. publish says that
// a sandbox on it has published ports.
func (v *verb) ensureBridge(b *bridge, publish bool) error {
	fail := func(err error) error { return fmt.Errorf("bridge %s: %w", b.Name, err) }
	l, err := v.host.find(b.Name)
	if err != nil {
		return fail(err)
	}
	if l != nil && l.Type() != "bridge" {
		return fail(fmt.Errorf("a %s of that name is in the way; rename or remove it: %w", l.Type(), fault.ErrExists))
	}
	if l == nil {
		off := false
		a := netlink.NewLinkAttrs()
		a.Name, a.HardwareAddr = b.Name, mac(b.gateway())
		// Snooping would only add queries that every sandbox has to hear.
		err := v.host.LinkAdd(&netlink.Bridge{LinkAttrs: a, MulticastSnooping: &off})
		if errors.Is(err, unix.EOPNOTSUPP) {
			return fail(fmt.Errorf("this kernel makes no bridges (module bridge); use network mode none or host: %w",
				fault.ErrUnsupported))
		}
		if err != nil {
			return fail(err)
		}
		if l, err = v.host.LinkByName(b.Name); err != nil {
			return fail(err)
		}
	}
	if err := sysctl("ipv6/conf/"+b.Name+"/disable_ipv6", "1"); err != nil {
		return fail(err)
	}
	if publish {
		// Without it the kernel refuses to send what comes from 127.0.0.1
		// out of the bridge, before it is masqueraded. The rules keep
		// sandboxes from using it the other way round.
		if err := sysctl("ipv4/conf/"+b.Name+"/route_localnet", "1"); err != nil {
			return fail(err)
		}
	}
	address := &netlink.Addr{IPNet: ipnet(netip.PrefixFrom(b.gateway(), b.Subnet.Bits()))}
	if err := v.host.AddrReplace(l, address); err != nil {
		return fail(err)
	}
	if l.Attrs().Flags&net.FlagUp == 0 {
		if err := v.host.LinkSetUp(l); err != nil {
			return fail(err)
		}
	}
	return nil
}

// ensureVeth makes the pair that connects id, complete except that the host's end is down, and
// returns that end.
func (v *verb) ensureVeth(id string, le *lease, b *bridge) (netlink.Link, error) {
	name := v.m.veth(id)
	fail := func(err error) (netlink.Link, error) {
		return nil, fmt.Errorf("link %s to bridge %s: %w", name, b.Name, err)
	}
	br, err := v.host.LinkByName(b.Name)
	if err != nil {
		return fail(err)
	}
	box, err := enter(v.m.namespace(id))
	if err != nil {
		return fail(err)
	}
	defer box.Close()

	l, err := v.host.find(name)
	if err != nil {
		return fail(err)
	}
	eth, err := box.find(inside)
	if err != nil {
		return fail(err)
	}
	whole := l != nil && eth != nil &&
		eth.Attrs().HardwareAddr.String() == mac(le.Address).String() &&
		eth.Attrs().ParentIndex == l.Attrs().Index && l.Attrs().ParentIndex == eth.Attrs().Index
	if !whole {
		// An end whose other end is elsewhere is of no use.
		if err := errors.Join(v.host.deleteLink(name), box.deleteLink(inside)); err != nil {
			return fail(err)
		}
		if err := v.addVeth(id, le); err != nil {
			return fail(err)
		}
		if l, err = v.host.LinkByName(name); err != nil {
			return fail(err)
		}
		if eth, err = box.LinkByName(inside); err != nil {
			return fail(err)
		}
		if err := v.host.LinkSetAlias(l, v.m.alias(id)); err != nil {
			return fail(err)
		}
		if err := sysctl("ipv6/conf/"+name+"/disable_ipv6", "1"); err != nil {
			return fail(err)
		}
	}
	if l.Attrs().MasterIndex != br.Attrs().Index {
		if err := v.host.LinkSetMaster(l, br); err != nil {
			return fail(err)
		}
	}
	if err := v.guardPort(l, br, le); err != nil {
		return fail(err)
	}
	address := &netlink.Addr{IPNet: ipnet(netip.PrefixFrom(le.Address, b.Subnet.Bits()))}
	if err := box.AddrReplace(eth, address); err != nil {
		return fail(err)
	}
	if err := box.LinkSetUp(eth); err != nil {
		return fail(err)
	}
	if err := box.RouteReplace(&netlink.Route{LinkIndex: eth.Attrs().Index, Gw: b.gateway().AsSlice()}); err != nil {
		return fail(fmt.Errorf("default route: %w", err))
	}
	return l, nil
}

func (v *verb) addVeth(id string, le *lease) error {
	f, err := os.Open(v.m.namespace(id))
	if err != nil {
		return err
	}
	defer f.Close()
	mtu, err := v.host.mtu()
	if err != nil {
		return err
	}
	a := netlink.NewLinkAttrs()
	a.Name, a.MTU = v.m.veth(id), mtu
	err = v.host.LinkAdd(&netlink.Veth{
		LinkAttrs:        a,
		PeerName:         inside,
		PeerHardwareAddr: mac(le.Address),
		PeerNamespace:    netlink.NsFd(f.Fd()),
	})
	if errors.Is(err, unix.EOPNOTSUPP) {
		return fmt.Errorf("this kernel makes no veth pairs (module veth); use network mode none or host: %w",
			fault.ErrUnsupported)
	}
	return err
}

// guardPort sets what a sandbox may do on its bridge, before its link is up.
func (v *verb) guardPort(l, br netlink.Link, le *lease) error {
	port := nl.NewRtAttr(unix.IFLA_PROTINFO|unix.NLA_F_NESTED, nil)
	flag := func(attr int, on bool) {
		b := byte(0)
		if on {
			b = 1
		}
		port.AddRtAttr(attr, []byte{b})
	}
	flag(nl.IFLA_BRPORT_ISOLATED, le.Group == "")
	flag(nl.IFLA_BRPORT_LEARNING, false)
	flag(nl.IFLA_BRPORT_LOCKED, true) // frames of another MAC; older kernels ignore this one
	req := nl.NewNetlinkRequest(unix.RTM_SETLINK, unix.NLM_F_ACK)
	msg := nl.NewIfInfomsg(unix.AF_BRIDGE)
	msg.Index = int32(l.Attrs().Index)
	req.AddData(msg)
	req.AddData(port)
	if _, err := req.Execute(unix.NETLINK_ROUTE, 0); err != nil {
		return fmt.Errorf("guard the port: %w", err)
	}
	got, err := dump(func() (netlink.Protinfo, error) { return v.host.LinkGetProtinfo(l) })
	if err != nil {
		return fmt.Errorf("guard the port: %w", err)
	}
	if got.Isolated != (le.Group == "") {
		return fmt.Errorf("this kernel cannot isolate bridge ports (4.18 and later can): %w", fault.ErrUnsupported)
	}
	// The forwarding entry is set here instead of learned.
	err = v.host.NeighSet(&netlink.Neigh{
		LinkIndex: l.Attrs().Index, Family: unix.AF_BRIDGE, Flags: netlink.NTF_MASTER,
		State: netlink.NUD_NOARP, HardwareAddr: mac(le.Address),
	})
	if err != nil {
		return fmt.Errorf("forwarding entry: %w", err)
	}
	// A fixed neighbour also means that while the sandbox is away, packets for it vanish; a
	// failed look-up would reveal that to the peer.
	err = v.host.NeighSet(neighbour(br, le))
	if err != nil {
		return fmt.Errorf("neighbour: %w", err)
	}
	return nil
}

func neighbour(br netlink.Link, le *lease) *netlink.Neigh {
	return &netlink.Neigh{
		LinkIndex: br.Attrs().Index, Family: unix.AF_INET, State: netlink.NUD_PERMANENT,
		IP: le.Address.AsSlice(), HardwareAddr: mac(le.Address),
	}
}

func (h *handle) forgetNeighbour(le *lease) error {
	br, err := h.find(le.Bridge)
	if br == nil {
		return err
	}
	if err := h.NeighDel(neighbour(br, le)); err != nil && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("forget neighbour %s: %w", le.Address, err)
	}
	return nil
}

func (v *verb) up(l netlink.Link) error   { return v.host.LinkSetUp(l) }
func (v *verb) down(l netlink.Link) error { return v.host.LinkSetDown(l) }

// isolated reports whether id's veth is there but down, as Isolate, Prepare
// and an interrupted Setup leave it.
func (v *verb) isolated(id string) bool {
	l, err := v.host.find(v.m.veth(id))
	return err == nil && l != nil && l.Attrs().Flags&net.FlagUp == 0
}

// setLink sets the host's end of id's veth up or down.
func (m *Manager) setLink(id string, up bool) error {
	h, err := openHost()
	if err != nil {
		return err
	}
	defer h.Close()
	l, err := h.find(m.veth(id))
	if l == nil {
		return err
	}
	if up {
		return h.LinkSetUp(l)
	}
	return h.LinkSetDown(l)
}

// mtu returns the MTU of the host's way out, at most Ethernet's.
func (h *handle) mtu() (int, error) {
	mtu := 1500
	routes, err := dump(func() ([]netlink.Route, error) { return h.RouteList(nil, netlink.FAMILY_V4) })
	if err != nil {
		return 0, err
	}
	for _, r := range routes {
		if r.Dst != nil && !r.Dst.IP.IsUnspecified() {
			continue
		}
		l, err := h.LinkByIndex(r.LinkIndex)
		if err != nil {
			continue // of several hops, or gone meanwhile
		}
		if n := l.Attrs().MTU; n >= 576 && n < mtu {
			mtu = n
		}
	}
	return mtu, nil
}

func ipnet(p netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}

// forgetFlows drops what connection tracking knows of an address. Where that
// cannot be done, it stays there until it times out.
func forgetFlows(a netip.Addr) {
	h, err := netlink.NewHandle(unix.NETLINK_NETFILTER)
	if err != nil {
		return
	}
	_, _ = h.ConntrackDeleteFilters(netlink.ConntrackTable, unix.AF_INET, flowsOf(a))
	guard.Go(h.Close) // slow, as in (*verb).end
}

// flowsOf selects the flows that begin or, after translation, end at an address.
type flowsOf netip.Addr

func (f flowsOf) MatchConntrackFlow(flow *netlink.ConntrackFlow) bool {
	ip := net.IP(netip.Addr(f).AsSlice())
	return flow.Forward.SrcIP.Equal(ip) || flow.Reverse.SrcIP.Equal(ip)
}
