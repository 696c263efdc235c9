package network

import (
	"fmt"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"
)

// A firewall that refuses what no rule of it accepts, as Docker's, by its policy or by its last
// rule. If it is started or reloaded under sandboxes, the rules are added again.
func TestFirewall(t *testing.T) {
	drop, accept := nftables.ChainPolicyDrop, nftables.ChainPolicyAccept
	count := []expr.Any{&expr.Counter{}}
	reject := []expr.Any{&expr.Counter{}, &expr.Reject{Type: unix.NFT_REJECT_ICMP_UNREACH, Code: 10}}
	for _, try := range []struct {
		name   string
		policy nftables.ChainPolicy
		docker bool
		last   []expr.Any
	}{
		{"DOCKER-USER", drop, true, count},
		{"FORWARD", drop, false, count},
		{"FORWARD that rejects", accept, false, reject},
	} {
		t.Run(try.name, func(t *testing.T) {
			c, err := nftables.New()
			if err != nil {
				t.Fatal(err)
			}
			filter := c.AddTable(&nftables.Table{Name: "filter", Family: nftables.TableFamilyIPv4})
			forward := c.AddChain(&nftables.Chain{
				Name: "FORWARD", Table: filter, Type: nftables.ChainTypeFilter,
				Hooknum: nftables.ChainHookForward, Priority: nftables.ChainPriorityFilter, Policy: &try.policy,
			})
			chain := forward
			if try.docker {
				chain = c.AddChain(&nftables.Chain{Name: "DOCKER-USER", Table: filter})
				c.AddRule(&nftables.Rule{
					Table: filter, Chain: forward, Exprs: []expr.Any{&expr.Verdict{
						Kind: expr.VerdictJump, Chain: "DOCKER-USER",
					}},
				})
			}
			load := func() { // as it is loaded from its configuration
				t.Helper()
				c.FlushChain(chain)
				c.AddRule(&nftables.Rule{Table: filter, Chain: chain, Exprs: try.last})
				if err := c.Flush(); err != nil {
					t.Fatal(err)
				}
			}
			load()
			defer func() { c.DelTable(filter); _ = c.Flush() }()

			w := open(t)
			serve(t, internet, "tcp4", ":101")
			e := w.setup("a", bridged)
			mustReach(t, e.Path, "tcp4", internetAddress+":101", hostAddress)
			f := w.setup("b", group("g"))
			mustReach(t, f.Path, "tcp4", internetAddress+":101", hostAddress)
			count := func(want int) {
				t.Helper()
				if rules, err := c.GetRules(filter, chain); err != nil || len(rules) != want {
					t.Errorf("%d rules, error %v, want %d", len(rules), err, want)
				}
			}
			count(1 + 4)
			load()
			count(1)
			for _, want := range []string{"let the sandboxes through the host's firewall again", ""} {
				if did, err := w.m.Tend(t.Context()); err != nil || strings.Join(did, ", ") != want {
					t.Errorf("did %q, %v, want %q", did, err, want)
				}
				count(1 + 4)
				mustReach(t, e.Path, "tcp4", internetAddress+":101", hostAddress)
			}
			w.release("a")
			count(1 + 4)
			w.release("b")
			count(1)
		})
	}
}

func TestFirewallWarning(t *testing.T) {
	for _, table := range []string{"strict", "firewalld"} {
		t.Run(table, func(t *testing.T) { testFirewallWarning(t, table) })
	}
}

func testFirewallWarning(t *testing.T, name string) {
	c, err := nftables.New()
	if err != nil {
		t.Fatal(err)
	}
	policy := nftables.ChainPolicyDrop
	if name == "firewalld" {
		policy = nftables.ChainPolicyAccept // and rejects by the last rule
	}
	table := c.AddTable(&nftables.Table{Name: name, Family: nftables.TableFamilyINet})
	through := c.AddChain(&nftables.Chain{
		Name: "through", Table: table, Type: nftables.ChainTypeFilter,
		Hooknum: nftables.ChainHookForward, Priority: nftables.ChainPriorityFilter, Policy: &policy,
	})
	if name == "firewalld" {
		c.AddRule(&nftables.Rule{
			Table: table, Chain: through, Exprs: []expr.Any{&expr.Reject{
				Type: unix.NFT_REJECT_ICMPX_UNREACH, Code: unix.NFT_REJECT_ICMPX_ADMIN_PROHIBITED,
			}},
		})
	}
	if err := c.Flush(); err != nil {
		t.Fatal(err)
	}
	defer func() { c.DelTable(table); _ = c.Flush() }()
	e := open(t).setup("a", bridged)
	s := strings.Join(e.Warnings, " ")
	if !strings.Contains(s, "through") || !strings.Contains(s, name) {
		t.Errorf("warnings %q name neither chain nor table", s)
	}
	if remedy := strings.Contains(s, "firewall-cmd "); remedy != (name == "firewalld") {
		t.Errorf("warnings %q", s)
	}
}

// Foreign rules that the library cannot read block nothing, wherever they are.
func TestFirewallUnknownRule(t *testing.T) {
	for _, at := range []struct{ name, family, table, chain, policy string }{
		{"a table of its own", "inet", "odd", "forward", "accept"},
		{"FORWARD", "ip", "filter", "FORWARD", "drop"},
	} {
		t.Run(at.name, func(t *testing.T) {
			nft := exec.Command("nft", "-f", "-")
			nft.Stdin = strings.NewReader(fmt.Sprintf(`table %s %s {
				chain %s { type filter hook forward priority 0; policy %s; meta l4proto tcp ct original proto-dst 8080 accept; }
			}`, at.family, at.table, at.chain, at.policy))
			if out, err := nft.CombinedOutput(); err != nil {
				t.Fatalf("%v: %s", err, out)
			}
			c, err := nftables.New()
			if err != nil {
				t.Fatal(err)
			}
			table := &nftables.Table{Name: at.table, Family: nftables.TableFamilyINet}
			if at.family == "ip" {
				table.Family = nftables.TableFamilyIPv4
			}
			defer func() { c.DelTable(table); _ = c.Flush() }()
			if _, err := c.GetRules(table, &nftables.Chain{Name: at.chain, Table: table}); err == nil {
				t.Log("the library can read that rule by now")
			}
			rules := func() []string {
				t.Helper()
				out, err := exec.Command("nft", "list", "chain", at.family, at.table, at.chain).Output()
				if err != nil {
					t.Fatal(err)
				}
				return strings.Split(string(out), "\n")
			}
			before := rules()
			w := open(t)
			serve(t, internet, "tcp4", ":101")
			e := w.setup("a", bridged)
			mustReach(t, e.Path, "tcp4", internetAddress+":101", hostAddress)
			if did, err := w.m.Tend(t.Context()); err != nil || len(did) > 0 || len(e.Warnings) > 0 {
				t.Errorf("did %q, %v, warnings %q", did, err, e.Warnings)
			}
			w.release("a")
			if after := rules(); !slices.Equal(before, after) {
				t.Errorf("left: %q, was %q", after, before)
			}
		})
	}
}
