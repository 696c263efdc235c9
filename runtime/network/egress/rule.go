package egress

import (
	"net/netip"
	"slices"

	"github.com/agentbox/agentbox/policy"
)

// Rules are all that a sandbox may reach; what none allows is denied.
type Rules []policy.EgressRule

// ParseRules reads a sandbox's rules.
func ParseRules(texts []string) (Rules, error) { return policy.ParseEgress(texts) }

// Name reports whether a name, as policy.CleanDomain makes it, is allowed on a
// port; 0 is any port.
func (r Rules) Name(name string, port uint16) bool {
	return slices.ContainsFunc(r, func(r policy.EgressRule) bool { return r.Matches(name) && r.TCP(port) })
}

// Address reports whether an address is allowed on a port, and whether by a rule
// about it alone. Rules about more than a private network do not open it:
// 0.0.0.0/0 is the internet.
func (r Rules) Address(a netip.Addr, port uint16) (ok, alone bool) {
	least := policy.PrivateBits(netip.PrefixFrom(a, a.BitLen()))
	for _, rule := range r {
		if rule.Prefix.IsValid() && rule.Prefix.Bits() >= least && rule.Prefix.Contains(a) && rule.TCP(port) {
			ok = true
			alone = alone || rule.Alone
		}
	}
	return ok, alone
}

// Datagrams are UDP ports of a network that a sandbox may reach, except the addresses in Except.
type Datagrams struct {
	To          netip.Prefix
	Except      []netip.Prefix
	First, Last uint16
}

// UDP returns the datagrams that the rules allow.
func (r Rules) UDP() []Datagrams {
	var all []Datagrams
	for _, rule := range r {
		var except []netip.Prefix
		for _, p := range never {
			if p.Overlaps(rule.Prefix) {
				except = append(except, p)
			}
		}
		for _, p := range policy.Private {
			if p.Overlaps(rule.Prefix) && rule.Prefix.Bits() < p.Bits() {
				except = append(except, p)
			}
		}
		for _, p := range rule.Ports {
			if p.UDP {
				all = append(all, Datagrams{rule.Prefix, except, p.First, p.Last})
			}
		}
	}
	return all
}
