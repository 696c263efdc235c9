package network

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"strings"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	mdl "github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/fault"
)

// Registers. The first, of 16 bytes, is also the first four of 4 bytes.
const (
	reg  = unix.NFT_REG_1
	reg2 = unix.NFT_REG_2
	r0   = unix.NFT_REG32_00
	r1   = r0 + 1
	r2   = r0 + 2
)

const (
	anyMap   = "ports"
	hostMap  = "host_ports"
	dstNAT   = 1 << 5 // IPS_DST_NAT
	elements = 500    // in one message; an attribute ends at 64 KiB
)

var (
	typePort   = nftables.MustConcatSetType(nftables.TypeInetProto, nftables.TypeInetService)
	typeHost   = nftables.MustConcatSetType(nftables.TypeIPAddr, nftables.TypeInetProto, nftables.TypeInetService)
	typeTarget = nftables.MustConcatSetType(nftables.TypeIPAddr, nftables.TypeInetService)
	typeSource = nftables.MustConcatSetType(nftables.TypeEtherAddr, nftables.TypeIPAddr)
	typePair   = nftables.MustConcatSetType(nftables.TypeIFName, nftables.TypeIFName)
)

// openTables returns the verb's connection to nftables, which is good for
// large transactions.
func (v *verb) openTables() (*nftables.Conn, error) {
	if v.tables != nil {
		return v.tables, nil
	}
	c, err := nftables.New(nftables.AsLasting(), nftables.WithSockOptions(func(c *mdl.Conn) error {
		return errors.Join(c.SetWriteBuffer(8<<20), c.SetReadBuffer(4<<20))
	}))
	if err != nil {
		return nil, fmt.Errorf("nftables: %w", err)
	}
	v.tables = c
	return c, nil
}

// ruleset is this root's table. Its chains and rules, except those of the chain udp, never
// change; its sets hold what they apply to:
//
//	bridges     our bridges
//	nets        their subnets' first addresses
//	peers       (bridge, bridge) of those whose sandboxes reach each other
//	sources     (MAC, address) of every sandbox that is up
//	ports       (protocol, port) -> (sandbox, port)
//	host_ports  (host address, protocol, port) -> (sandbox, port)
//
// and those of filterSets.
type ruleset struct {
	c *nftables.Conn
	t *nftables.Table

	bridges, nets, peers, sources, anyPorts, hostPorts             *nftables.Set
	inBridges, inNets, inPeers, inSources, inAnyPorts, inHostPorts []nftables.SetElement
	filter                                                         filterSets
}

// applyRules makes the table say what the state and the mounted namespaces
// say, in one transaction, whatever was in it.
func (v *verb) applyRules() error {
	c, err := v.openTables()
	if err != nil {
		return err
	}
	r := &ruleset{c: c, t: &nftables.Table{Name: v.m.table, Family: nftables.TableFamilyIPv4}}
	if err := r.collect(v); err != nil {
		return err
	}
	err = r.transact(false)
	if err != nil {
		// A table of the same name but of another make: replace it whole.
		// That is not the ordinary way because it takes the hooks away and
		// puts them back, which costs the kernel far more.
		err = r.transact(true)
	}
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.EPROTONOSUPPORT) {
		return fmt.Errorf("this kernel has not all that bridge mode needs of nftables (modules nf_tables, nft_chain_nat, nft_masq, nft_nat, nft_ct, nft_fib_ipv4); use network mode none or host: %w: %w", fault.ErrUnsupported, err)
	}
	if err != nil {
		return fmt.Errorf("nftables table %s: %w", v.m.table, err)
	}
	return nil
}

// dropRules removes the table and what openFirewall put elsewhere.
func (v *verb) dropRules() error {
	c, err := v.openTables()
	if err != nil {
		return err
	}
	t := &nftables.Table{Name: v.m.table, Family: nftables.TableFamilyIPv4}
	c.AddTable(t) // so that deleting it cannot fail
	c.DelTable(t)
	err = c.Flush()
	if errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.EPROTONOSUPPORT) {
		err = nil // a kernel without nftables has no table either
	}
	return errors.Join(err, v.closeFirewall(c))
}

func (r *ruleset) collect(v *verb) error {
	for _, b := range v.state.Bridges {
		name := ifname(b.Name)
		net := b.Subnet.Addr().As4()
		r.inBridges = append(r.inBridges, nftables.SetElement{Key: name})
		r.inNets = append(r.inNets, nftables.SetElement{Key: net[:]})
		if b.Group != "" {
			r.inPeers = append(r.inPeers, nftables.SetElement{Key: append(name, name...)})
		}
	}
	for id, le := range v.state.Sandboxes {
		if !isNamespace(v.m.namespace(id)) {
			continue
		}
		a := le.Address.As4()
		source := append(append([]byte(mac(le.Address)), 0, 0), a[:]...)
		r.inSources = append(r.inSources, nftables.SetElement{Key: source})
		if le.Filtered {
			if err := r.filter.add(le, v.state.bridge(le.Bridge)); err != nil {
				return err
			}
		}
		for _, p := range le.Ports {
			pub, err := published(p)
			if err != nil {
				return err
			}
			key := []byte{pub.protocol, 0, 0, 0, byte(pub.port >> 8), byte(pub.port), 0, 0}
			val := append(a[:], byte(p.Sandbox>>8), byte(p.Sandbox), 0, 0)
			if pub.address.IsUnspecified() {
				r.inAnyPorts = append(r.inAnyPorts, nftables.SetElement{Key: key, Val: val})
			} else {
				key = append(pub.address.AsSlice(), key...)
				r.inHostPorts = append(r.inHostPorts, nftables.SetElement{Key: key, Val: val})
			}
		}
	}
	return nil
}

// transact sends the whole table. Adding what is there already changes
// nothing, so with fresh false only rules and elements are replaced.
func (r *ruleset) transact(fresh bool) error {
	if fresh {
		r.c.AddTable(r.t)
		r.c.DelTable(r.t)
	}
	r.c.AddTable(r.t)
	r.c.FlushTable(r.t)
	id := uint32(0)
	set := func(name string, key nftables.SetDatatype, data *nftables.SetDatatype, in []nftables.SetElement) (*nftables.Set, error) {
		// Left at 0, the number would come from a counter that the library
		// shares, unprotected, among all connections.
		id++
		s := &nftables.Set{Table: r.t, ID: id, Name: name, KeyType: key}
		if key == nftables.TypeIFName {
			s.KeyByteOrder = binaryutil.NativeEndian // or nft cannot show the names
		}
		if data != nil {
			s.IsMap, s.DataType = true, *data
		}
		if name == deniedSet {
			s.Dynamic, s.HasTimeout, s.Timeout, s.Size = true, true, deniedTime, deniedLimit
		}
		if err := r.c.AddSet(s, nil); err != nil {
			return nil, err
		}
		if name != deniedSet { // the kernel fills that one
			r.c.FlushSet(s)
		}
		for len(in) > 0 {
			n := min(len(in), elements)
			if err := r.c.SetAddElements(s, in[:n]); err != nil {
				return nil, err
			}
			in = in[n:]
		}
		return s, nil
	}
	var err error
	for _, s := range []struct {
		set  **nftables.Set
		name string
		key  nftables.SetDatatype
		data *nftables.SetDatatype
		in   []nftables.SetElement
	}{
		{&r.bridges, "bridges", nftables.TypeIFName, nil, r.inBridges},
		{&r.nets, "nets", nftables.TypeIPAddr, nil, r.inNets},
		{&r.peers, "peers", typePair, nil, r.inPeers},
		{&r.sources, "sources", typeSource, nil, r.inSources},
		{&r.anyPorts, anyMap, typePort, &typeTarget, r.inAnyPorts},
		{&r.hostPorts, hostMap, typeHost, &typeTarget, r.inHostPorts},
		{&r.filter.boxes, "filtered", nftables.TypeIPAddr, nil, r.filter.inBoxes},
		{&r.filter.listeners, "listeners", typeHost, nil, r.filter.inListeners},
		{&r.filter.proxies, "proxies", nftables.TypeIPAddr, &typeTarget, r.filter.inProxies},
		{&r.filter.resolvers, "resolvers", nftables.TypeIPAddr, &typeTarget, r.filter.inResolvers},
		{&r.filter.denied, deniedSet, typeDenied, nil, nil},
	} {
		if *s.set, err = set(s.name, s.key, s.data, s.in); err != nil {
			return err
		}
	}
	r.spoof()
	r.lead()
	r.input()
	r.forward()
	r.dnat("prerouting", nftables.ChainHookPrerouting)
	r.dnat("output", nftables.ChainHookOutput)
	r.snat()
	return r.c.Flush()
}

// chains is the number of chains that transact makes, except the chain udp; each has rules.
const chains = 7

func (r *ruleset) chain(
	name string, kind nftables.ChainType, hook *nftables.ChainHook, prio *nftables.ChainPriority,
) func(...[]expr.Any) {
	accept := nftables.ChainPolicyAccept
	ch := r.c.AddChain(&nftables.Chain{
		Name: name, Table: r.t, Type: kind, Hooknum: hook, Priority: prio, Policy: &accept,
	})
	return func(parts ...[]expr.Any) {
		var all []expr.Any
		for _, p := range parts {
			all = append(all, p...)
		}
		r.c.AddRule(&nftables.Rule{Table: r.t, Chain: ch, Exprs: all})
	}
}

// spoof drops what a sandbox must not send: to the host's loopback, which
// route_localnet would let in, and from an address that is not its own.
func (r *ruleset) spoof() {
	rule := r.chain("spoof", nftables.ChainTypeFilter, nftables.ChainHookPrerouting, nftables.ChainPriorityRaw)
	rule(r.from(), destinationIn(loopback), verdict(expr.VerdictDrop))
	rule(r.from(),
		[]expr.Any{
			&expr.Meta{Key: expr.MetaKeyIIFTYPE, Register: reg},
			&expr.Cmp{Op: expr.CmpOpEq, Register: reg, Data: binaryutil.NativeEndian.PutUint16(unix.ARPHRD_ETHER)},
			&expr.Payload{DestRegister: r0, Base: expr.PayloadBaseLLHeader, Offset: 6, Len: 6}, // r0 and r1
			&expr.Payload{DestRegister: r2, Base: expr.PayloadBaseNetworkHeader, Offset: 12, Len: 4},
			&expr.Lookup{SourceRegister: reg, SetName: r.sources.Name, SetID: r.sources.ID, Invert: true},
		}, verdict(expr.VerdictDrop))
}

// forward lets in what was asked for or answers a sandbox, and what goes from
// peer to peer; that passes here by the host's address, or where br_netfilter
// is loaded. Sandboxes do not even reach each other's published ports: where
// br_netfilter is loaded those would be bridged, and isolated ports drop that,
// and what is allowed should not depend on a module.
func (r *ruleset) forward() {
	rule := r.chain("forward", nftables.ChainTypeFilter, nftables.ChainHookForward, nftables.ChainPriorityFilter)
	r.answers(rule)
	r.datagrams(rule)
	r.confine(rule)
	rule([]expr.Any{
		&expr.Meta{Key: expr.MetaKeyIIFNAME, Register: reg},
		&expr.Meta{Key: expr.MetaKeyOIFNAME, Register: reg2},
		&expr.Lookup{SourceRegister: reg, SetName: r.peers.Name, SetID: r.peers.ID},
	}, verdict(expr.VerdictAccept))
	for _, prefix := range bridgePrefixes { // of other roots as well
		rule([]expr.Any{
			&expr.Meta{Key: expr.MetaKeyIIFNAME, Register: reg},
			&expr.Cmp{Op: expr.CmpOpEq, Register: reg, Data: []byte(prefix)},
		}, r.to(false), verdict(expr.VerdictDrop))
	}
	rule(r.to(false), ct(expr.CtKeySTATE, expr.CtStateBitESTABLISHED|expr.CtStateBitRELATED),
		verdict(expr.VerdictAccept))
	rule(r.to(false), ct(expr.CtKeySTATUS, dstNAT), verdict(expr.VerdictAccept))
	rule(r.to(false), verdict(expr.VerdictDrop))
}

// dnat leads published ports to their sandboxes.
func (r *ruleset) dnat(name string, hook *nftables.ChainHook) {
	rule := r.chain(name, nftables.ChainTypeNAT, hook, nftables.ChainPriorityNATDest)
	local := []expr.Any{
		&expr.Fib{Register: reg, FlagDADDR: true, ResultADDRTYPE: true},
		&expr.Cmp{Op: expr.CmpOpEq, Register: reg, Data: binaryutil.NativeEndian.PutUint32(unix.RTN_LOCAL)},
	}
	if hook == nftables.ChainHookPrerouting {
		// Packets from outside must not reach 127.0.0.1; translated here they would pass for
		// something else.
		rule(destinationIn(loopback), verdict(expr.VerdictReturn))
	}
	// The key is (protocol, port), with the address before it in host_ports.
	translate := func(first uint32, m *nftables.Set) []expr.Any {
		return []expr.Any{
			&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: first},
			&expr.Payload{DestRegister: first + 1, Base: expr.PayloadBaseTransportHeader, Offset: 2, Len: 2},
			&expr.Lookup{SourceRegister: reg, DestRegister: reg, IsDestRegSet: true, SetName: m.Name, SetID: m.ID},
			&expr.NAT{Type: expr.NATTypeDestNAT, Family: unix.NFPROTO_IPV4, RegAddrMin: reg, RegProtoMin: r1},
		}
	}
	rule(local, []expr.Any{&expr.Payload{DestRegister: r0, Base: expr.PayloadBaseNetworkHeader, Offset: 16, Len: 4}},
		translate(r1, r.hostPorts))
	rule(local, translate(r0, r.anyPorts))
}

// snat gives what leaves a sandbox for the outside the host's address, and
// what comes back through a published port to where it began, the gateway's:
// the answer has to come this way again.
func (r *ruleset) snat() {
	rule := r.chain("postrouting", nftables.ChainTypeNAT, nftables.ChainHookPostrouting,
		nftables.ChainPriorityNATSource)
	ours := append(address(12, 24), &expr.Lookup{SourceRegister: reg, SetName: r.nets.Name, SetID: r.nets.ID})
	masquerade := []expr.Any{&expr.Masq{}}
	rule(r.to(false), append(address(12, 8), cmpEq(loopback.Addr())), masquerade)
	rule(r.to(false), ours, ct(expr.CtKeySTATUS, dstNAT), masquerade)
	rule(r.to(true), ours, masquerade)
}

var loopback = netip.MustParsePrefix("127.0.0.0/8")

func (r *ruleset) from() []expr.Any {
	return []expr.Any{
		&expr.Meta{Key: expr.MetaKeyIIFNAME, Register: reg},
		&expr.Lookup{SourceRegister: reg, SetName: r.bridges.Name, SetID: r.bridges.ID},
	}
}

func (r *ruleset) to(others bool) []expr.Any {
	return []expr.Any{
		&expr.Meta{Key: expr.MetaKeyOIFNAME, Register: reg},
		&expr.Lookup{SourceRegister: reg, SetName: r.bridges.Name, SetID: r.bridges.ID, Invert: others},
	}
}

// address loads the first bits of the address at an offset of the IPv4 header.
func address(offset uint32, bits int) []expr.Any {
	mask := make([]byte, 4)
	binary.BigEndian.PutUint32(mask, ^uint32(0)<<(32-bits))
	return []expr.Any{
		&expr.Payload{DestRegister: reg, Base: expr.PayloadBaseNetworkHeader, Offset: offset, Len: 4},
		&expr.Bitwise{SourceRegister: reg, DestRegister: reg, Len: 4, Mask: mask, Xor: make([]byte, 4)},
	}
}

func destinationIn(p netip.Prefix) []expr.Any {
	return append(address(16, p.Bits()), cmpEq(p.Addr()))
}

func cmpEq(a netip.Addr) expr.Any {
	return &expr.Cmp{Op: expr.CmpOpEq, Register: reg, Data: a.AsSlice()}
}

// ct matches when any of the bits is set.
func ct(key expr.CtKey, bits uint32) []expr.Any {
	return []expr.Any{
		&expr.Ct{Key: key, Register: reg},
		&expr.Bitwise{
			SourceRegister: reg, DestRegister: reg, Len: 4,
			Mask: binaryutil.NativeEndian.PutUint32(bits), Xor: make([]byte, 4),
		},
		&expr.Cmp{Op: expr.CmpOpNeq, Register: reg, Data: make([]byte, 4)},
	}
}

func verdict(k expr.VerdictKind) []expr.Any { return []expr.Any{&expr.Verdict{Kind: k}} }

func ifname(name string) []byte {
	b := make([]byte, unix.IFNAMSIZ)
	copy(b, name)
	return b
}

// foreignPorts are the ports that sandboxes of other roots have published. To
// a process that tries to bind them they look free.
func (v *verb) foreignPorts() ([]publication, error) {
	c, err := v.openTables()
	if err != nil {
		return nil, err
	}
	tables, err := c.ListTablesOfFamily(nftables.TableFamilyIPv4)
	if err != nil {
		return nil, fmt.Errorf("list nftables tables: %w", err)
	}
	var ports []publication
	for _, t := range tables {
		if t.Name == v.m.table || (t.Name != "agentbox" && !strings.HasPrefix(t.Name, "agentbox_")) {
			continue
		}
		for _, name := range []string{anyMap, hostMap} {
			s, err := c.GetSetByName(t, name)
			if err != nil {
				continue // gone meanwhile, or not what it looks like
			}
			in, err := c.GetSetElements(s)
			if err != nil {
				continue
			}
			for _, e := range in {
				p := publication{address: netip.IPv4Unspecified()}
				key := e.Key
				if name == hostMap && len(key) > 4 {
					p.address, key = netip.AddrFrom4([4]byte(key[:4])), key[4:]
				}
				if len(key) == 8 {
					p.protocol, p.port = key[0], binary.BigEndian.Uint16(key[4:6])
					ports = append(ports, p)
				}
			}
		}
	}
	return ports, nil
}
