package network

import (
	"strings"
	"testing"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
)

// A firewall that drops what it was not told to forward, as Docker's.
func TestFirewall(t *testing.T) {
	for _, docker := range []bool{true, false} {
		name := "FORWARD"
		if docker {
			name = "DOCKER-USER"
		}
		t.Run(name, func(t *testing.T) {
			c, err := nftables.New()
			if err != nil {
				t.Fatal(err)
			}
			drop := nftables.ChainPolicyDrop
			filter := c.AddTable(&nftables.Table{Name: "filter", Family: nftables.TableFamilyIPv4})
			forward := c.AddChain(&nftables.Chain{
				Name: "FORWARD", Table: filter, Type: nftables.ChainTypeFilter,
				Hooknum: nftables.ChainHookForward, Priority: nftables.ChainPriorityFilter, Policy: &drop,
			})
			chain, before := forward, 0
			if docker {
				chain = c.AddChain(&nftables.Chain{Name: "DOCKER-USER", Table: filter})
				c.AddRule(&nftables.Rule{Table: filter, Chain: forward, Exprs: []expr.Any{&expr.Verdict{Kind: expr.VerdictJump, Chain: "DOCKER-USER"}}})
			}
			before = 1
			c.AddRule(&nftables.Rule{Table: filter, Chain: chain, Exprs: []expr.Any{&expr.Counter{}}})
			if err := c.Flush(); err != nil {
				t.Fatal(err)
			}
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
			count(before + 4)
			w.release("a")
			count(before + 4)
			w.release("b")
			count(before)
		})
	}
}

func TestFirewallWarning(t *testing.T) {
	c, err := nftables.New()
	if err != nil {
		t.Fatal(err)
	}
	drop := nftables.ChainPolicyDrop
	table := c.AddTable(&nftables.Table{Name: "strict", Family: nftables.TableFamilyINet})
	c.AddChain(&nftables.Chain{
		Name: "through", Table: table, Type: nftables.ChainTypeFilter,
		Hooknum: nftables.ChainHookForward, Priority: nftables.ChainPriorityFilter, Policy: &drop,
	})
	if err := c.Flush(); err != nil {
		t.Fatal(err)
	}
	defer func() { c.DelTable(table); _ = c.Flush() }()
	e := open(t).setup("a", bridged)
	if s := strings.Join(e.Warnings, " "); !strings.Contains(s, "through") || !strings.Contains(s, "strict") {
		t.Errorf("warnings %q name neither chain nor table", s)
	}
}
