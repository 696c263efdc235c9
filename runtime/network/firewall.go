package network

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"github.com/google/nftables/userdata"
	mdl "github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

// A packet is forwarded only if no table drops it; accepting it in ours does not help against
// another one. Docker, and many a firewall, let the table "ip filter" (that of iptables-nft)
// refuse whatever has no accept rule. So we add rules, in Docker's chain for this, DOCKER-USER,
// or else at the top of FORWARD:
//
//	to our bridges      accept; our own table has decided what may pass
//	to Docker's bridges return; Docker decides which containers may be reached
//	from our bridges    accept
//
// The rules are such as iptables itself writes, so that it can show them. For an iptables of the
// old kind (x_tables) and for other tables there is only a warning.

// openFirewall adds what is missing, reports whether something was, and returns what it
// could not do.
func (v *verb) openFirewall() (added bool, warnings []string, err error) {
	c, err := v.openTables()
	if err != nil {
		return false, nil, err
	}
	chains, err := c.ListChainsOfTableFamily(nftables.TableFamilyUnspecified)
	if err != nil {
		return false, nil, fmt.Errorf("list nftables chains: %w", err)
	}
	var user, forward *nftables.Chain
	for _, ch := range chains {
		refuses := func(hook *nftables.ChainHook) bool {
			ours := ch.Table.Family == nftables.TableFamilyIPv4 || ch.Table.Family == nftables.TableFamilyINet
			return ours && ch.Hooknum != nil && *ch.Hooknum == *hook && refusesTheRest(c, ch)
		}
		switch {
		case v.state.filters() && refuses(nftables.ChainHookInput):
			warnings = append(warnings,
				fmt.Sprintf("The nftables chain %s of table %s drops what is for the host by default; let it accept TCP and UDP from %s*, or filtered sandboxes reach nothing.%s",
					ch.Name, ch.Table.Name, v.m.bridge, v.trust(ch)))
		case inFilter(ch) && ch.Name == "DOCKER-USER":
			user = ch
		case !refuses(nftables.ChainHookForward):
		case inFilter(ch) && ch.Name == "FORWARD":
			forward = ch
		default:
			warnings = append(warnings,
				fmt.Sprintf("The nftables chain %s of table %s drops forwarded packets by default; let it accept those from and to %s*, or sandboxes reach nothing outside.%s",
					ch.Name, ch.Table.Name, v.m.bridge, v.trust(ch)))
		}
	}
	if legacyFilter() {
		warnings = append(warnings, fmt.Sprintf("A legacy iptables filter table is in use; if its FORWARD chain drops, sandboxes reach nothing outside until you run: iptables-legacy -I FORWARD -i %[1]s+ -j ACCEPT; iptables-legacy -I FORWARD -o %[1]s+ -j ACCEPT.",
			v.m.bridge))
	}
	target := cmp.Or(user, forward)
	if target == nil {
		return false, warnings, nil
	}
	added, err = v.permit(c, target)
	return added, warnings, err
}

// refusesTheRest reports whether a chain of a hook refuses what none of its rules decides: by
// its policy, or by its last rule, as firewalld does. Unreadable rules count as not refusing,
// without an error: the library does not know every rule that the kernel has, and a table
// may go while it is read.
func refusesTheRest(c *nftables.Conn, ch *nftables.Chain) bool {
	if ch.Policy != nil && *ch.Policy == nftables.ChainPolicyDrop {
		return true
	}
	rules, err := c.GetRules(ch.Table, ch)
	if err != nil || len(rules) == 0 {
		return false
	}
	for _, e := range rules[len(rules)-1].Exprs {
		switch e := e.(type) {
		case *expr.Counter, *expr.Log:
		case *expr.Reject:
			return true
		case *expr.Target: // iptables'
			return e.Name == "REJECT"
		case *expr.Verdict:
			return e.Kind == expr.VerdictDrop
		default:
			return false
		}
	}
	return false
}

// trust returns the command by which the owner of a chain accepts what is ours, if it is known.
func (v *verb) trust(ch *nftables.Chain) string {
	if ch.Table.Name != "firewalld" {
		return ""
	}
	return fmt.Sprintf(" With firewalld: firewall-cmd --permanent --zone=trusted --add-interface=%s+ && firewall-cmd --reload.", v.m.bridge)
}

func inFilter(ch *nftables.Chain) bool {
	return ch.Table.Family == nftables.TableFamilyIPv4 && ch.Table.Name == "filter"
}

// permit makes our rules the first ones of the chain, once, and reports whether it had to.
func (v *verb) permit(c *nftables.Conn, ch *nftables.Chain) (added bool, err error) {
	want := []struct {
		from, to string
		verdict  expr.VerdictKind
	}{ // in reverse, since each goes to the top
		{v.m.bridge, "", expr.VerdictAccept},
		{v.m.bridge, "br-", expr.VerdictReturn},
		{v.m.bridge, "docker", expr.VerdictReturn},
		{"", v.m.bridge, expr.VerdictAccept},
	}
	have, err := v.permitted(ch)
	if err != nil {
		return false, err
	}
	if len(have) == len(want) {
		return false, nil
	}
	for _, r := range have {
		if err := c.DelRule(r); err != nil {
			return false, err
		}
	}
	for _, w := range want {
		var e []expr.Any
		match := func(key expr.MetaKey, prefix string) {
			if prefix != "" {
				e = append(e, &expr.Meta{Key: key, Register: reg},
					&expr.Cmp{Op: expr.CmpOpEq, Register: reg, Data: []byte(prefix)})
			}
		}
		match(expr.MetaKeyIIFNAME, w.from)
		match(expr.MetaKeyOIFNAME, w.to)
		e = append(e, &expr.Counter{}, &expr.Verdict{Kind: w.verdict})
		c.InsertRule(&nftables.Rule{Table: ch.Table, Chain: ch, Exprs: e, UserData: v.m.mark()})
	}
	if err := c.Flush(); err != nil {
		return false, fmt.Errorf("let %s* through chain %s of table ip filter: %w", v.m.bridge, ch.Name, err)
	}
	return true, nil
}

// mark is the comment by which our rules are found again.
func (m *Manager) mark() []byte {
	return userdata.AppendString(nil, userdata.TypeComment, "agentbox "+m.tag)
}

// permitted returns those of our rules that a chain has, with their handles and nothing
// else. The library would read all rules of the chain, and fails if it does not know one.
func (v *verb) permitted(ch *nftables.Chain) (ours []*nftables.Rule, err error) {
	attributes, err := mdl.MarshalAttributes([]mdl.Attribute{
		{Type: unix.NFTA_RULE_TABLE, Data: append([]byte(ch.Table.Name), 0)},
		{Type: unix.NFTA_RULE_CHAIN, Data: append([]byte(ch.Name), 0)},
	})
	if err != nil {
		return nil, err
	}
	c, err := mdl.Dial(unix.NETLINK_NETFILTER, nil)
	if err != nil {
		return nil, fmt.Errorf("nftables: %w", err)
	}
	defer c.Close()
	answers, err := c.Execute(mdl.Message{
		Header: mdl.Header{Type: unix.NFNL_SUBSYS_NFTABLES<<8 | unix.NFT_MSG_GETRULE, Flags: mdl.Request | mdl.Dump},
		Data:   append([]byte{byte(ch.Table.Family), unix.NFNETLINK_V0, 0, 0}, attributes...), // nfgenmsg
	})
	if err != nil {
		return nil, fmt.Errorf("list the rules of %s: %w", ch.Name, err)
	}
	for _, a := range answers {
		if len(a.Data) < 4 {
			return nil, fmt.Errorf("list the rules of %s: a message of %d bytes", ch.Name, len(a.Data))
		}
		d, err := mdl.NewAttributeDecoder(a.Data[4:])
		if err != nil {
			return nil, fmt.Errorf("list the rules of %s: %w", ch.Name, err)
		}
		d.ByteOrder = binary.BigEndian
		r := &nftables.Rule{Table: ch.Table, Chain: ch}
		for d.Next() {
			switch d.Type() {
			case unix.NFTA_RULE_HANDLE:
				r.Handle = d.Uint64()
			case unix.NFTA_RULE_USERDATA:
				r.UserData = d.Bytes()
			}
		}
		if err := d.Err(); err != nil {
			return nil, fmt.Errorf("list the rules of %s: %w", ch.Name, err)
		}
		if bytes.Equal(r.UserData, v.m.mark()) {
			ours = append(ours, r)
		}
	}
	return ours, nil
}

// closeFirewall takes back what openFirewall added.
func (v *verb) closeFirewall(c *nftables.Conn) error {
	chains, err := c.ListChainsOfTableFamily(nftables.TableFamilyIPv4)
	if err != nil {
		return fmt.Errorf("list nftables chains: %w", err)
	}
	var ours []*nftables.Rule
	for _, ch := range chains {
		if !inFilter(ch) || (ch.Name != "DOCKER-USER" && ch.Name != "FORWARD") {
			continue
		}
		rules, err := v.permitted(ch)
		if err != nil {
			return err
		}
		ours = append(ours, rules...)
	}
	for _, r := range ours {
		if err := c.DelRule(r); err != nil {
			return err
		}
	}
	if err := c.Flush(); err != nil && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("remove the rules from table ip filter: %w", err)
	}
	return nil
}

// legacyFilter reports whether the filter table of the old iptables is loaded.
func legacyFilter() bool {
	b, err := os.ReadFile("/proc/thread-self/net/ip_tables_names")
	return err == nil && slices.Contains(strings.Fields(string(b)), "filter")
}
