package network

import (
	"strings"
	"testing"

	"github.com/google/nftables"
)

// Leave removes what exists for sandboxes that do not run, their rules in the host's firewall and
// the proxy with it, and the next start makes it again; under a running one nothing is removed.
func TestLeave(t *testing.T) {
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
	if err := c.Flush(); err != nil {
		t.Fatal(err)
	}
	defer func() { c.DelTable(filter); _ = c.Flush() }()
	w := filtered(t)
	leave := func(want bool) {
		t.Helper()
		if left, err := w.m.Leave(t.Context()); err != nil || left != want {
			t.Errorf("left %v, want %v: %v", left, want, err)
		}
	}
	there := func() string {
		t.Helper()
		var list []string
		for _, l := range leftovers(t, w.m.root) {
			if !strings.HasPrefix(l, "file ") && l != "table filter" {
				list = append(list, l)
			}
		}
		rules, err := c.GetRules(filter, forward)
		if err != nil {
			t.Fatal(err)
		}
		for range rules {
			list = append(list, "rule")
		}
		return strings.Join(list, "\n")
	}
	leave(true) // there never was any
	box := client{t, w.setup("a", egressTo("good.example"))}
	w.setup("b", bridged)
	works := func() {
		t.Helper()
		said, err := box.https(internetAddress+":443", "good.example")
		want(t, "an allowed one", said, err, "200 page of good.example")
	}
	works()
	w.teardown("a")
	had, proxy := there(), w.proxyPid()
	leave(false)
	if now := there(); now != had {
		t.Errorf("under a sandbox that runs:\n%s\nand there was\n%s", now, had)
	}
	w.teardown("b")
	leave(true)
	if now := there(); now != "" {
		t.Errorf("it has left\n%s", now)
	}
	ended(t, proxy)
	leave(true)
	before := box.Address
	box.Endpoint = w.setup("a", egressTo("good.example"))
	if box.Address != before {
		t.Errorf("its address is %s, and was %s", box.Address, before)
	}
	works()
}
