package policy

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/agentbox/agentbox/internal/fault"
)

// How many egress rules a sandbox may have, and how many ranges of UDP ports
// in them: the kernel goes through those for each packet.
const (
	EgressLimit    = 1024
	EgressUDPLimit = 64
)

// EgressRule is one place that a filtered sandbox may reach, written
//
//	CIDR|ADDRESS|DOMAIN|*.DOMAIN [PORT|FROM-TO[/udp][,...]]
//
// *.DOMAIN is all names below DOMAIN, not itself. Without ports it is TCP on
// all of them; UDP is for addresses only, and only where it is said.
type EgressRule struct {
	Prefix netip.Prefix // or else
	Domain string       // as CleanDomain makes it
	Below  bool         // the names below Domain instead of itself
	// Alone: an address that is written without /32. Where it is the host's
	// own, which no network stands for, it is that, too.
	Alone bool
	Ports []EgressPorts // sorted; empty: all of TCP
}

// EgressPorts is a range of ports, ends included.
type EgressPorts struct {
	First, Last uint16
	UDP         bool
}

func (p EgressPorts) String() string {
	s := strconv.Itoa(int(p.First))
	if p.Last != p.First {
		s += "-" + strconv.Itoa(int(p.Last))
	}
	if p.UDP {
		s += "/udp"
	}
	return s
}

// ParseEgressRule reads one rule.
func ParseEgressRule(s string) (EgressRule, error) {
	bad := func(format string, args ...any) (EgressRule, error) {
		return EgressRule{}, fmt.Errorf("egress rule %.80q: %s: %w", s, fmt.Sprintf(format, args...), fault.ErrInvalid)
	}
	words := strings.Fields(s)
	if len(words) == 0 || len(words) > 2 {
		return bad("write DOMAIN, *.DOMAIN, ADDRESS or CIDR, and ports after a space: pypi.org 443")
	}
	var r EgressRule
	to := words[0]
	name, below := strings.CutPrefix(to, "*.")
	if p, err := netip.ParsePrefix(to); err == nil {
		r.Prefix = p.Masked()
	} else if a, err := netip.ParseAddr(to); err == nil {
		r.Prefix, r.Alone = netip.PrefixFrom(a.WithZone(""), a.BitLen()), true
	} else if name, ok := CleanDomain(name); ok && strings.Contains(name, ".") {
		r.Domain, r.Below = name, below
	} else if strings.ContainsFunc(to, func(r rune) bool { return r > '~' }) {
		return bad("write the name as it goes over the wire, in ASCII: xn--...")
	} else {
		return bad("%.80q is no domain, address or CIDR", to)
	}
	if r.Prefix.IsValid() && !r.Prefix.Addr().Is4() {
		return bad("sandboxes have no IPv6")
	}
	if len(words) == 1 {
		return r, nil
	}
	for part := range strings.SplitSeq(words[1], ",") {
		ports, proto, found := strings.Cut(part, "/")
		var p EgressPorts
		var err error
		if p.First, p.Last, err = parsePorts(ports); err != nil {
			return bad("%v", err)
		}
		switch p.UDP = proto == "udp"; {
		case found && proto != "tcp" && proto != "udp":
			return bad("%.40q ends in neither /tcp nor /udp", part)
		case p.UDP && r.Domain != "":
			return bad("UDP does not say what name it is for; write the addresses")
		}
		r.Ports = append(r.Ports, p)
	}
	r.Ports = joined(r.Ports)
	return r, nil
}

// joined are ranges sorted, those that touch each other as one.
func joined(ports []EgressPorts) []EgressPorts {
	order := func(p EgressPorts) int {
		if p.UDP {
			return int(p.First) + 1<<16
		}
		return int(p.First)
	}
	slices.SortFunc(ports, func(a, b EgressPorts) int { return cmp.Compare(order(a), order(b)) })
	var out []EgressPorts
	for _, p := range ports {
		if n := len(out) - 1; n >= 0 && out[n].UDP == p.UDP && int(p.First) <= int(out[n].Last)+1 {
			out[n].Last = max(out[n].Last, p.Last)
		} else {
			out = append(out, p)
		}
	}
	return out
}

// ParseEgress reads a sandbox's rules.
func ParseEgress(texts []string) ([]EgressRule, error) {
	if len(texts) > EgressLimit {
		return nil, fmt.Errorf("%d egress rules: %d is the limit: %w", len(texts), EgressLimit, fault.ErrInvalid)
	}
	udp := 0
	rules := make([]EgressRule, 0, len(texts))
	for _, s := range texts {
		r, err := ParseEgressRule(s)
		if err != nil {
			return nil, err
		}
		for _, p := range r.Ports {
			if p.UDP {
				udp++
			}
		}
		rules = append(rules, r)
	}
	if udp > EgressUDPLimit {
		return nil, fmt.Errorf("egress rules with %d ranges of UDP ports: %d is the limit: %w", udp,
			EgressUDPLimit, fault.ErrInvalid)
	}
	return rules, nil
}

// String is the rule's canonical form.
func (r EgressRule) String() string {
	to := r.Domain
	switch {
	case r.Alone:
		to = r.Prefix.Addr().String()
	case r.Prefix.IsValid():
		to = r.Prefix.String()
	case r.Below:
		to = "*." + r.Domain
	}
	var ports []string
	for _, p := range r.Ports {
		ports = append(ports, p.String())
	}
	return strings.TrimSpace(to + " " + strings.Join(ports, ","))
}

// EgressText is rules in their canonical form.
func EgressText(rules []EgressRule) []string {
	texts := make([]string, len(rules))
	for i, r := range rules {
		texts[i] = r.String()
	}
	return texts
}

func (r EgressRule) ports() []EgressPorts {
	if len(r.Ports) == 0 {
		return []EgressPorts{{First: 1, Last: 65535}}
	}
	return r.Ports
}

// TCP reports whether the rule is about a TCP port; 0 asks about any at all.
func (r EgressRule) TCP(port uint16) bool {
	return slices.ContainsFunc(r.ports(), func(p EgressPorts) bool {
		return !p.UDP && (port == 0 || p.First <= port && port <= p.Last)
	})
}

// Matches reports whether the rule is about a name, as CleanDomain makes it.
func (r EgressRule) Matches(name string) bool {
	if r.Below {
		return strings.HasSuffix(name, "."+r.Domain)
	}
	return r.Domain != "" && name == r.Domain
}

// leadsTo reports whether a rule is about all places that own is about.
func (r EgressRule) leadsTo(own EgressRule) bool {
	if own.Domain != "" {
		return r.Matches(own.Domain) && (r.Below || !own.Below) || own.Below && r.Below && r.Domain == own.Domain
	}
	return r.Prefix.IsValid() && r.Prefix.Bits() <= own.Prefix.Bits() && r.Prefix.Contains(own.Prefix.Addr()) &&
		r.Prefix.Bits() >= PrivateBits(own.Prefix) && (r.Alone || !own.Alone)
}

// coversEgress reports whether what one rule lets out is let out by others.
func coversEgress(base []EgressRule, own EgressRule) bool {
	var open []EgressPorts
	for _, b := range base {
		if b.leadsTo(own) {
			open = append(open, b.ports()...)
		}
	}
	open = joined(open)
	for _, p := range own.ports() {
		if !slices.ContainsFunc(open, func(o EgressPorts) bool {
			return o.UDP == p.UDP && o.First <= p.First && p.Last <= o.Last
		}) {
			return false
		}
	}
	return true
}

// Private are the networks that a rule about more than one of them does not
// open: 0.0.0.0/0 is the internet.
var Private = []netip.Prefix{
	netip.MustParsePrefix("10.0.0.0/8"),
	netip.MustParsePrefix("100.64.0.0/10"),
	netip.MustParsePrefix("172.16.0.0/12"),
	netip.MustParsePrefix("192.0.0.0/24"),
	netip.MustParsePrefix("192.168.0.0/16"),
	netip.MustParsePrefix("198.18.0.0/15"),
}

// PrivateBits is the least length that the prefix of a rule must have to open
// p: that of the private network which p is in, or 0.
func PrivateBits(p netip.Prefix) int {
	for _, net := range Private {
		if net.Bits() <= p.Bits() && net.Contains(p.Addr()) {
			return net.Bits()
		}
	}
	return 0
}

// CleanDomain brings a domain name to the form that is compared: lower case and
// without a dot at the end. Addresses are none.
func CleanDomain(s string) (string, bool) {
	if s = strings.TrimSuffix(s, "."); s == "" || len(s) > 253 {
		return "", false
	}
	// Before letters change: that of the sign for Kelvin is a k.
	if strings.ContainsFunc(s, func(r rune) bool { return r > '~' }) {
		return "", false
	}
	s = strings.ToLower(s)
	for label := range strings.SplitSeq(s, ".") {
		if label == "" || len(label) > 63 || strings.Trim(label, "abcdefghijklmnopqrstuvwxyz0123456789-_") != "" {
			return "", false
		}
	}
	// Something like 127.1 is an address to many a program.
	last := s[strings.LastIndexByte(s, '.')+1:]
	return s, strings.Trim(last, "0123456789") != "" && !strings.HasPrefix(last, "0x")
}
