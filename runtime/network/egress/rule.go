package egress

import (
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/agentbox/agentbox/internal/fault"
)

// ruleLimit is how many rules a sandbox may have.
const ruleLimit = 1024

// Rule is one place that a sandbox may reach, written
//
//	CIDR|ADDRESS|DOMAIN|*.DOMAIN [PORT|FROM-TO[,...]]
//
// *.DOMAIN is all names below DOMAIN, not itself. Without ports it is all of them.
type Rule struct {
	prefix netip.Prefix // or else
	name   string
	below  bool // the names below name instead of itself
	ports  []portRange
}

type portRange struct{ from, to uint16 }

// ParseRule reads one rule.
func ParseRule(s string) (Rule, error) {
	bad := func(why string) (Rule, error) {
		return Rule{}, fmt.Errorf("egress rule %.80q: %s: %w", s, why, fault.ErrInvalid)
	}
	words := strings.Fields(s)
	if len(words) == 0 || len(words) > 2 {
		return bad("write DOMAIN, *.DOMAIN, ADDRESS or CIDR, and ports after a space: pypi.org 443")
	}
	var r Rule
	to := words[0]
	if p, err := netip.ParsePrefix(to); err == nil {
		r.prefix = p.Masked()
	} else if a, err := netip.ParseAddr(to); err == nil {
		r.prefix = netip.PrefixFrom(a.WithZone(""), a.BitLen())
	} else if name, ok := cleanName(strings.TrimPrefix(to, "*.")); ok && strings.Contains(name, ".") {
		r.name, r.below = name, strings.HasPrefix(to, "*.")
	} else {
		return bad(fmt.Sprintf("%.80q is no domain, address or CIDR", to))
	}
	if r.prefix.IsValid() && !r.prefix.Addr().Is4() {
		return bad("sandboxes have no IPv6")
	}
	if len(words) == 1 {
		return r, nil
	}
	for part := range strings.SplitSeq(words[1], ",") {
		if strings.HasSuffix(part, "/udp") {
			return bad("a filtered sandbox has no UDP but to its resolver")
		}
		from, to, isRange := strings.Cut(strings.TrimSuffix(part, "/tcp"), "-")
		if !isRange {
			to = from
		}
		a, err1 := strconv.ParseUint(from, 10, 16)
		b, err2 := strconv.ParseUint(to, 10, 16)
		if err1 != nil || err2 != nil || a == 0 || a > b {
			return bad(fmt.Sprintf("%.40q is no port and no range of ports", part))
		}
		r.ports = append(r.ports, portRange{uint16(a), uint16(b)})
	}
	return r, nil
}

// String is the rule's canonical form.
func (r Rule) String() string {
	to := r.name
	switch {
	case r.prefix.IsValid() && r.prefix.IsSingleIP():
		to = r.prefix.Addr().String()
	case r.prefix.IsValid():
		to = r.prefix.String()
	case r.below:
		to = "*." + r.name
	}
	var ports []string
	for _, p := range r.ports {
		s := strconv.Itoa(int(p.from))
		if p.to != p.from {
			s += "-" + strconv.Itoa(int(p.to))
		}
		ports = append(ports, s)
	}
	return strings.TrimSpace(to + " " + strings.Join(ports, ","))
}

// covers tells whether the rule is about a port; 0 asks about any at all.
func (r Rule) covers(port uint16) bool {
	return port == 0 || len(r.ports) == 0 ||
		slices.ContainsFunc(r.ports, func(p portRange) bool { return p.from <= port && port <= p.to })
}

func (r Rule) matches(name string) bool {
	if r.below {
		return strings.HasSuffix(name, "."+r.name)
	}
	return r.name != "" && name == r.name
}

// Rules are all that a sandbox may reach; what none allows is denied.
type Rules []Rule

// ParseRules reads a sandbox's rules.
func ParseRules(texts []string) (Rules, error) {
	if len(texts) > ruleLimit {
		return nil, fmt.Errorf("%d egress rules: %d is the limit: %w", len(texts), ruleLimit, fault.ErrInvalid)
	}
	rules := make(Rules, 0, len(texts))
	for _, s := range texts {
		r, err := ParseRule(s)
		if err != nil {
			return nil, err
		}
		rules = append(rules, r)
	}
	return rules, nil
}

// Name tells whether a name, as cleanName makes it, is allowed on a port; 0 is
// any port.
func (r Rules) Name(name string, port uint16) bool {
	return slices.ContainsFunc(r, func(r Rule) bool { return r.matches(name) && r.covers(port) })
}

// Address tells whether an address is allowed on a port, and whether by a rule
// about it alone. Rules about more than a private network do not open it:
// 0.0.0.0/0 is the internet.
func (r Rules) Address(a netip.Addr, port uint16) (ok, alone bool) {
	least := 0
	for _, p := range private {
		if p.Contains(a) {
			least = p.Bits()
		}
	}
	for _, rule := range r {
		if rule.prefix.IsValid() && rule.prefix.Bits() >= least && rule.prefix.Contains(a) && rule.covers(port) {
			ok = true
			alone = alone || rule.prefix.IsSingleIP()
		}
	}
	return ok, alone
}

// cleanName brings a domain name to the form that is compared: lower case and
// without a dot at the end. Addresses are none.
func cleanName(s string) (string, bool) {
	s = strings.ToLower(strings.TrimSuffix(s, "."))
	if s == "" || len(s) > 253 {
		return "", false
	}
	for label := range strings.SplitSeq(s, ".") {
		if label == "" || len(label) > 63 || strings.Trim(label, "abcdefghijklmnopqrstuvwxyz0123456789-_") != "" {
			return "", false
		}
	}
	// Something like 127.1 is an address to many a program.
	last := s[strings.LastIndexByte(s, '.')+1:]
	return s, strings.Trim(last, "0123456789") != "" && !strings.HasPrefix(last, "0x")
}
