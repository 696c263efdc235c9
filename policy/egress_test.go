package policy

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/agentbox/agentbox/internal/fault"
)

func TestParseEgressRule(t *testing.T) {
	for text, want := range map[string]string{
		"pypi.org 443":            "pypi.org 443",
		"PyPI.org. 443/tcp":       "pypi.org 443",
		"*.debian.org  80,443":    "*.debian.org 80,443",
		"10.1.2.3/8 5432":         "10.0.0.0/8 5432",
		"192.0.2.1/32":            "192.0.2.1/32",
		"192.0.2.1":               "192.0.2.1",
		"192.0.2.1 1-65535":       "192.0.2.1 1-65535",
		"a_b.example 8000-8999,1": "a_b.example 1,8000-8999",
		"a.example 1,3,2,4-9,443": "a.example 1-9,443",
		"10.0.0.0/8 53/udp,53":    "10.0.0.0/8 53,53/udp",
		"xn--bcher-kva.example":   "xn--bcher-kva.example",
	} {
		r, err := ParseEgressRule(text)
		if err != nil || r.String() != want {
			t.Errorf("%q: %q, %v, want %q", text, r, err, want)
		}
	}
	for _, text := range []string{
		"", "  ", "a b c", "pypi.org 0", "pypi.org 70000", "pypi.org 9-1", "pypi.org 443/udp", "pypi.org ,",
		"pypi.org https", "pypi.org 443/sctp", "org", "*", "*.", "*.org",
		"a..b", "-", "1.2.3", "0x7f.1", "a.0x1", "2001:db8::/32", "::1", "pypi.org/24", "https://pypi.org", "p\x00.org",
		"a.*.b", "*.*.example", "bücher.example", "\u212aernel.org", strings.Repeat("a.", 130) + "b",
	} {
		if r, err := ParseEgressRule(text); !errors.Is(err, fault.ErrInvalid) {
			t.Errorf("%q: %q, %v, want %v", text, r, err, fault.ErrInvalid)
		}
	}
	if _, err := ParseEgress(make([]string, EgressLimit+1)); !errors.Is(err, fault.ErrInvalid) {
		t.Errorf("too many: %v", err)
	}
	many := slices.Repeat([]string{"198.51.100.0/24 53/udp"}, EgressUDPLimit+1)
	if _, err := ParseEgress(many); !errors.Is(err, fault.ErrInvalid) {
		t.Errorf("too many for UDP: %v", err)
	}
	if _, err := (Finder{}).Resolve("p.yaml", []byte("network: {modes: [filtered], default: filtered, egress: ["+
		strings.Join(many, ", ")+"]}\n")); err == nil ||
		!strings.Contains(err.Error(), "p.yaml:1:57: network.egress: egress rules with 65 ranges") {
		t.Errorf("a policy with too many: %v", err)
	}
}

func TestCoversEgress(t *testing.T) {
	for _, c := range []struct {
		base []string
		own  string
		want bool
	}{
		{[]string{"pypi.org 443"}, "PyPI.org. 443", true},
		{[]string{"pypi.org 443"}, "pypi.org", false},
		{[]string{"pypi.org"}, "pypi.org 1-65535", true},
		{[]string{"pypi.org 80", "pypi.org 81-443"}, "pypi.org 80,100-443", true},
		{[]string{"pypi.org 80", "x.org 443"}, "pypi.org 80,443", false},
		{[]string{"*.debian.org"}, "deb.debian.org", true},
		{[]string{"*.debian.org"}, "*.deb.debian.org", true},
		{[]string{"*.debian.org"}, "*.debian.org", true},
		{[]string{"*.debian.org"}, "debian.org", false},
		{[]string{"*.debian.org"}, "evildebian.org", false},
		{[]string{"*.debian.org"}, "deb.debian.org.evil.org", false},
		{[]string{"deb.debian.org"}, "*.deb.debian.org", false},
		{[]string{"deb.debian.org"}, "*.debian.org", false},
		{[]string{"debian.org"}, "*.debian.org", false},
		{[]string{"0.0.0.0/0"}, "pypi.org", false},
		{[]string{"198.51.100.0/24"}, "198.51.100.0/25", true},
		{[]string{"198.51.100.0/25"}, "198.51.100.0/24", false},
		{[]string{"198.51.100.0/24"}, "198.51.101.0/25", false},
		{[]string{"0.0.0.0/0"}, "10.0.0.0/8", false}, // a rule about a private network opens it, that one does not
		{[]string{"0.0.0.0/0"}, "10.1.0.0/16", false},
		{[]string{"8.0.0.0/6"}, "10.1.0.0/16", false},
		{[]string{"10.0.0.0/8"}, "10.1.0.0/16", true},
		{[]string{"0.0.0.0/0"}, "0.0.0.0/1", true},
		{[]string{"198.51.100.0/24"}, "198.51.100.7/32", true},
		{[]string{"198.51.100.0/24"}, "198.51.100.7", false}, // that may be the host's own
		{[]string{"198.51.100.7"}, "198.51.100.7", true},
		{[]string{"198.51.100.7"}, "198.51.100.7/32", true},
		{[]string{"198.51.100.7/32"}, "198.51.100.7", false},
		{[]string{"198.51.100.0/24"}, "198.51.100.0/24 53/udp", false},
		{[]string{"198.51.100.0/24 53/udp"}, "198.51.100.0/24 53", false},
		{[]string{"198.51.100.0/24 1-99/udp"}, "198.51.100.0/24 53/udp", true},
		{nil, "pypi.org", false},
	} {
		base, err := ParseEgress(c.base)
		if err != nil {
			t.Fatal(err)
		}
		own, err := ParseEgressRule(c.own)
		if err != nil {
			t.Fatal(err)
		}
		if got := coversEgress(base, own); got != c.want {
			t.Errorf("%q covers %q: %v", c.base, c.own, got)
		}
	}
}

// Whatever a covered rule matches, one of those that cover it matches.
func TestCoversEgressIsSound(t *testing.T) {
	rule := rapid.Custom(func(t *rapid.T) EgressRule {
		to := rapid.SampledFrom([]string{
			"a.org", "*.a.org", "b.a.org", "*.b.a.org", "0.0.0.0/0", "8.0.0.0/6", "10.0.0.0/8", "10.0.0.0/9",
			"10.0.0.1", "10.0.0.1/32", "9.9.9.9",
		}).Draw(t, "to")
		ports := []string{"", " 1", " 1-2", " 2,3", " 1-65535"}
		if strings.Trim(to, "./0123456789") == "" {
			ports = append(ports, " 1/udp", " 2,1-2/udp")
		}
		r, err := ParseEgressRule(to + rapid.SampledFrom(ports).Draw(t, "ports"))
		if err != nil {
			t.Fatal(err)
		}
		return r
	})
	about := func(r EgressRule, name, addr string, p EgressPorts) bool {
		in := slices.ContainsFunc(r.ports(), func(o EgressPorts) bool {
			return o.UDP == p.UDP && o.First <= p.First && p.First <= o.Last
		})
		a := netip.MustParseAddr(addr)
		return in && (r.Matches(name) || r.Prefix.IsValid() && r.Prefix.Contains(a) &&
			r.Prefix.Bits() >= PrivateBits(netip.PrefixFrom(a, 32)))
	}
	rapid.Check(t, func(t *rapid.T) {
		base, own := rapid.SliceOfN(rule, 0, 3).Draw(t, "base"), rule.Draw(t, "own")
		name := rapid.SampledFrom([]string{"a.org", "b.a.org", "c.b.a.org", "x.org"}).Draw(t, "name")
		addr := rapid.SampledFrom([]string{
			"10.0.0.1", "10.200.0.1", "9.9.9.9", "8.8.8.8", "198.51.100.1",
		}).Draw(t, "addr")
		port := EgressPorts{
			First: rapid.SampledFrom([]uint16{1, 2, 3, 65535}).Draw(t, "port"), UDP: rapid.Bool().Draw(t, "udp"),
		}
		if coversEgress(base, own) && about(own, name, addr, port) &&
			!slices.ContainsFunc(base, func(b EgressRule) bool { return about(b, name, addr, port) }) {
			t.Fatalf("%q covers %q, but not its %s, %s %s", base, own, name, addr, port)
		}
	})
}

func TestJudgeEgress(t *testing.T) {
	p := resolved(t, `
network:
  modes: [none, filtered]
  default: filtered
  egress:
  - "*.debian.org 80,443"
  - pypi.org 443
  - 198.51.100.0/24 53/udp
`)
	said := func(p *Policy, ask Request) (Request, string) {
		t.Helper()
		got, findings := p.Judge(ask)
		var lines []string
		for _, f := range findings {
			if strings.HasPrefix(f.Rule, "network.") {
				lines = append(lines, strings.TrimSuffix(fmt.Sprintf("%s %s, %s at %s:%d %s", f.Verdict, f.What, f.Rule,
					f.Origin.File, f.Origin.Line, f.Why), " "))
			}
		}
		return got, strings.Join(lines, "\n")
	}
	all := []string{"*.debian.org 80,443", "pypi.org 443", "198.51.100.0/24 53/udp"}
	for _, c := range []struct {
		ask  []string
		got  []string
		want string
	}{
		{nil, all, "clamped network filtered, network.default: filtered at p.yaml:4\n" +
			"clamped egress [*.debian.org 80,443, pypi.org 443, 198.51.100.0/24 53/udp], network.egress: [*.debian.org 80,443, pypi.org 443, 198.51.100.0/24 53/udp] at p.yaml:6"},
		{[]string{}, []string{}, "clamped network filtered, network.default: filtered at p.yaml:4"},
		{[]string{"Deb.Debian.org 443"}, []string{"deb.debian.org 443"},
			"clamped network filtered, network.default: filtered at p.yaml:4\n" +
				"allowed egress deb.debian.org 443, network.egress: *.debian.org 80,443 at p.yaml:6"},
		{[]string{"pypi.org"}, []string{"pypi.org"},
			"clamped network filtered, network.default: filtered at p.yaml:4\n" +
				"denied egress pypi.org, network.egress: [*.debian.org 80,443, pypi.org 443, 198.51.100.0/24 53/udp] at p.yaml:6"},
		{[]string{"nonsense"}, []string{"nonsense"},
			"clamped network filtered, network.default: filtered at p.yaml:4\n" +
				"denied egress nonsense, network.egress: [*.debian.org 80,443, pypi.org 443, 198.51.100.0/24 53/udp] at p.yaml:6 egress rule \"nonsense\": \"nonsense\" is no domain, address or CIDR: invalid argument"},
	} {
		got, lines := said(p, Request{Egress: c.ask})
		if lines != c.want || !slices.Equal(got.Egress, c.got) || (got.Egress == nil) != (c.got == nil) {
			t.Errorf("%q: %q\n%s\nwant %q\n%s", c.ask, got.Egress, lines, c.got, c.want)
		}
	}
	// An address of a network that is allowed, and the way to ask for it.
	_, findings := p.Judge(Request{Egress: []string{"198.51.100.7 53/udp"}})
	if f := findings[len(findings)-1]; f.Verdict != Denied ||
		!strings.Contains(f.Hint, "write 198.51.100.7/32 53/udp.") {
		t.Errorf("%+v", findings)
	}
	if err := p.MayReach([]string{"198.51.100.7/32 53/udp"}); err != nil {
		t.Error(err)
	}
	if err := p.MayReach([]string{"pypi.org 443", "evil.org 443"}); !errors.Is(err, fault.ErrDenied) ||
		!strings.Contains(err.Error(), "evil.org 443 by policy p (p.yaml:6)") {
		t.Errorf("%v", err)
	}

	// Without rules, any may be asked for, and none is the default.
	p, err := Finder{}.Find(Default)
	if err != nil {
		t.Fatal(err)
	}
	if got, lines := said(p, Request{Network: "filtered"}); got.Egress != nil ||
		!strings.HasPrefix(lines, "allowed network filtered") {
		t.Errorf("%q: %s", got.Egress, lines)
	}
	if _, lines := said(p, Request{Network: "filtered", Egress: []string{"pypi.org"}}); !strings.Contains(lines,
		"allowed egress pypi.org, network.egress: any") {
		t.Error(lines)
	}
	if p, err = (Finder{}).Find("strict"); err != nil {
		t.Fatal(err)
	}
	if _, lines := said(p, Request{Network: "filtered", Egress: []string{"pypi.org"}}); !strings.Contains(lines,
		"denied network filtered, network.modes: [none] at builtin/strict.yaml") {
		t.Error(lines)
	}
	// A policy that allows a bridge allows less, too.
	if _, lines := said(resolved(t, "network: {modes: [bridge]}\n"),
		Request{Network: "filtered"}); !strings.Contains(lines, "allowed network filtered") {
		t.Error(lines)
	}
}

func FuzzParseEgressRule(f *testing.F) {
	for _, s := range []string{
		"pypi.org 443", "*.debian.org 80,443", "10.0.0.0/8 5432", "192.0.2.1", "192.0.2.1/32 1/udp",
		"a.example 1-2,3/tcp", "::/0", "1.2.3",
	} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		r, err := ParseEgressRule(s)
		if err != nil {
			return
		}
		again, err := ParseEgressRule(r.String())
		if err != nil || again.String() != r.String() || !coversEgress([]EgressRule{r}, again) ||
			!coversEgress([]EgressRule{again}, r) {
			t.Errorf("%q: %q, then %q, %v", s, r, again, err)
		}
	})
}
