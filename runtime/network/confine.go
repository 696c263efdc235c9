package network

import (
	"net/netip"
	"time"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/runtime/network/egress"
)

const (
	deniedSet   = "denied"
	deniedTime  = 30 * time.Second // for which the same attempt is noted once
	deniedLimit = 4096
)

var typeDenied = nftables.MustConcatSetType(nftables.TypeIPAddr, nftables.TypeIPAddr, nftables.TypeInetProto,
	nftables.TypeInetService)

// filterSets are the sets about filtered sandboxes:
//
//	filtered   their addresses
//	listeners  (gateway, protocol, port) of proxies and resolvers
//	proxies    sandbox -> (gateway, port)
//	resolvers  sandbox -> (gateway, port)
//	denied     (sandbox, destination, protocol, port) of what was dropped
type filterSets struct {
	boxes, listeners, proxies, resolvers, denied *nftables.Set
	inBoxes, inListeners, inProxies, inResolvers []nftables.SetElement
	gates                                        map[*bridge]bool
	udp                                          []datagrams
}

// datagrams are the datagrams that a sandbox may send. They become rules and no set: a set of
// networks and ranges of ports needs a kernel that bridges do without.
type datagrams struct {
	from netip.Addr
	egress.Datagrams
}

func (s *filterSets) add(le *lease, br *bridge) error {
	rules, err := egress.ParseRules(le.Egress)
	if err != nil {
		return err
	}
	for _, d := range rules.UDP() {
		s.udp = append(s.udp, datagrams{le.Address, d})
	}
	a := le.Address.As4()
	s.inBoxes = append(s.inBoxes, nftables.SetElement{Key: a[:]})
	if br.Proxy == nil {
		return nil // no proxy: no TCP leaves, and no DNS
	}
	gate := br.gateway().As4()
	port := func(p uint16) []byte { return []byte{byte(p >> 8), byte(p), 0, 0} }
	to := func(p uint16) nftables.SetElement {
		return nftables.SetElement{Key: a[:], Val: append(gate[:], port(p)...)}
	}
	s.inProxies = append(s.inProxies, to(br.Proxy.TCP))
	s.inResolvers = append(s.inResolvers, to(br.Proxy.DNS))
	if s.gates[br] {
		return nil
	}
	if s.gates == nil {
		s.gates = map[*bridge]bool{}
	}
	s.gates[br] = true
	listener := func(protocol byte, p uint16) {
		s.inListeners = append(s.inListeners, nftables.SetElement{Key: append(append(gate[:], protocol,
			0, 0, 0), port(p)...)})
	}
	listener(unix.IPPROTO_TCP, br.Proxy.TCP)
	listener(unix.IPPROTO_TCP, br.Proxy.DNS)
	listener(unix.IPPROTO_UDP, br.Proxy.DNS)
	return nil
}

func (r *ruleset) fromFiltered() []expr.Any {
	return []expr.Any{
		&expr.Payload{DestRegister: reg, Base: expr.PayloadBaseNetworkHeader, Offset: 12, Len: 4},
		&expr.Lookup{SourceRegister: reg, SetName: r.filter.boxes.Name, SetID: r.filter.boxes.ID},
	}
}

// lead sends filtered sandboxes' DNS queries to the resolver, whatever server they are for, and
// their other TCP to the proxy. It comes before all other translations: a host port that Docker
// publishes is none of theirs.
func (r *ruleset) lead() {
	first := nftables.ChainPriorityRef(*nftables.ChainPriorityNATDest - 10)
	rule := r.chain("lead", nftables.ChainTypeNAT, nftables.ChainHookPrerouting, first)
	translate := func(m *nftables.Set) []expr.Any {
		return []expr.Any{
			&expr.Payload{DestRegister: reg, Base: expr.PayloadBaseNetworkHeader, Offset: 12, Len: 4},
			&expr.Lookup{SourceRegister: reg, DestRegister: reg, IsDestRegSet: true, SetName: m.Name, SetID: m.ID},
			&expr.NAT{Type: expr.NATTypeDestNAT, Family: unix.NFPROTO_IPV4, RegAddrMin: reg, RegProtoMin: r1},
		}
	}
	dns := []expr.Any{
		&expr.Payload{DestRegister: reg, Base: expr.PayloadBaseTransportHeader, Offset: 2, Len: 2},
		&expr.Cmp{Op: expr.CmpOpEq, Register: reg, Data: binaryutil.BigEndian.PutUint16(53)},
	}
	rule(r.fromFiltered(), protocol(unix.IPPROTO_UDP), dns, translate(r.filter.resolvers))
	rule(r.fromFiltered(), protocol(unix.IPPROTO_TCP), dns, translate(r.filter.resolvers))
	rule(r.fromFiltered(), protocol(unix.IPPROTO_TCP), translate(r.filter.proxies))
}

// input lets filtered sandboxes reach nothing of the host but where lead has
// brought them.
func (r *ruleset) input() {
	rule := r.chain("input", nftables.ChainTypeFilter, nftables.ChainHookInput, nftables.ChainPriorityFilter)
	rule(r.fromFiltered(), []expr.Any{
		&expr.Payload{DestRegister: r0, Base: expr.PayloadBaseNetworkHeader, Offset: 16, Len: 4},
		&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: r1},
		&expr.Payload{DestRegister: r2, Base: expr.PayloadBaseTransportHeader, Offset: 2, Len: 2},
		&expr.Lookup{SourceRegister: reg, SetName: r.filter.listeners.Name, SetID: r.filter.listeners.ID},
	}, verdict(expr.VerdictAccept))
	r.answers(rule)
	r.confine(rule)
}

// answers lets go on what answers a connection from outside. Where connection
// tracking knows nothing of a packet, it is no answer.
func (r *ruleset) answers(rule func(...[]expr.Any)) {
	rule(r.fromFiltered(), []expr.Any{
		&expr.Ct{Key: expr.CtKeyDIRECTION, Register: reg},
		&expr.Cmp{Op: expr.CmpOpEq, Register: reg, Data: []byte{1}}, // IP_CT_DIR_REPLY
	}, verdict(expr.VerdictAccept))
}

// udpChain has a rule for each of the sandboxes' that lets UDP out, if there are any.
const udpChain = "udp"

// datagrams lets out what the rules about addresses let out of UDP. It goes to
// no bridge of ours; those of other roots see to that themselves.
func (r *ruleset) datagrams(rule func(...[]expr.Any)) {
	t := r.c.AddChain(&nftables.Chain{Name: udpChain, Table: r.t})
	rule(r.fromFiltered(), protocol(unix.IPPROTO_UDP), r.to(true),
		[]expr.Any{&expr.Verdict{Kind: expr.VerdictJump, Chain: t.Name}})
	for _, d := range r.filter.udp {
		all := append(address(12, 32), cmpEq(d.from))
		all = append(all, destinationIn(d.To)...)
		for _, p := range d.Except {
			all = append(append(all, address(16, p.Bits())...),
				&expr.Cmp{Op: expr.CmpOpNeq, Register: reg, Data: p.Addr().AsSlice()})
		}
		all = append(all,
			&expr.Payload{DestRegister: reg, Base: expr.PayloadBaseTransportHeader, Offset: 2, Len: 2},
			&expr.Range{
				Op: expr.CmpOpEq, Register: reg, FromData: binaryutil.BigEndian.PutUint16(d.First),
				ToData: binaryutil.BigEndian.PutUint16(d.Last),
			})
		r.c.AddRule(&nftables.Rule{Table: r.t, Chain: t, Exprs: append(all, verdict(expr.VerdictAccept)...)})
	}
}

// confine drops what filtered sandboxes begin, and notes it.
func (r *ruleset) confine(rule func(...[]expr.Any)) {
	note := func(port []expr.Any) []expr.Any {
		key := []expr.Any{
			&expr.Payload{DestRegister: r0, Base: expr.PayloadBaseNetworkHeader, Offset: 12, Len: 4},
			&expr.Payload{DestRegister: r1, Base: expr.PayloadBaseNetworkHeader, Offset: 16, Len: 4},
			&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: r2},
		}
		return append(append(key, port...), &expr.Dynset{
			SrcRegKey: reg, SetName: r.filter.denied.Name, SetID: r.filter.denied.ID, Operation: unix.NFT_DYNSET_OP_ADD,
		})
	}
	const r3 = r2 + 1
	for _, p := range []byte{unix.IPPROTO_TCP, unix.IPPROTO_UDP} {
		rule(r.fromFiltered(), protocol(p), note([]expr.Any{
			&expr.Payload{DestRegister: r3, Base: expr.PayloadBaseTransportHeader, Offset: 2, Len: 2},
		}), verdict(expr.VerdictDrop))
	}
	rule(r.fromFiltered(), note([]expr.Any{&expr.Immediate{Register: r3, Data: make([]byte, 4)}}),
		verdict(expr.VerdictDrop))
	// Also when there is no room for the note.
	rule(r.fromFiltered(), verdict(expr.VerdictDrop))
}

func protocol(p byte) []expr.Any {
	return []expr.Any{
		&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: reg},
		&expr.Cmp{Op: expr.CmpOpEq, Register: reg, Data: []byte{p}},
	}
}
