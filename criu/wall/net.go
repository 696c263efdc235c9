package wall

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/fault"
)

// A network namespace that CRIU makes is filled by programs that run as the host's root,
// in that namespace: a device could be moved out of it, and a program named that they run.

// netns judges what a network namespace has as a whole: settings, numbers.
func (j *judge) netns(name string) error {
	m, err := j.one(name, magicNetns, "netns_entry")
	if err != nil {
		return err
	}
	if err := m.once(nil, fields(8)); err != nil {
		return err
	}
	return m.only(1, 2, 3, 4, 5, 6, 7, 8, 9, 10)
}

// Types of network devices.
const deviceLoopback = 1

func (j *judge) netdev(name string) error {
	const kind, ifname = 1, 5
	return j.each(name, magicNetdev, 1<<12, func(data []byte) error {
		m, err := decode(name, "net_device_entry", data)
		if err != nil {
			return err
		}
		if err := m.only(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15); err != nil {
			return err
		}
		if err := m.once(fields(kind, 2, 3, 4, 12, 13, 14), fields(ifname, 6, 7, 11, 15)); err != nil {
			return err
		}
		// It becomes a part of the paths of its settings.
		if n := m.text(ifname); n == "" || n == "." || n == ".." || len(n) >= unix.IFNAMSIZ ||
			strings.ContainsAny(n, "/\x00 \t\n") {
			return refuse(name, "name", "%s is no network device's name", quoted(n))
		}
		// The others have their far end, or the device below, on the host.
		if k := m.number(kind); k != deviceLoopback && !j.spec.can("NET_ADMIN") && !kernelMade(m.text(ifname)) {
			return refuse(name, "type", "the device %s of type %d takes CAP_NET_ADMIN, which the container has not",
				quoted(m.text(ifname)), k)
		}
		return nil
	})
}

// kernelMade reports whether name is a device that a new network namespace has by itself, where
// its module is loaded.
func kernelMade(name string) bool {
	return slices.Contains([]string{
		"sit0", "tunl0", "gre0", "gretap0", "erspan0", "ip6tnl0", "ip6gre0", "ip_vti0", "ip6_vti0",
	}, name)
}

// routes judges addresses, routes and rules, which CRIU has ip(8) restore: it passes on
// whatever message it reads.
func (j *judge) routes(name string) error {
	data, err := j.read(name)
	if err != nil || len(data) == 0 {
		return err
	}
	kind := uint16(unix.RTM_NEWROUTE)
	begin := []byte(nil)
	switch {
	case strings.HasPrefix(name, "ifaddr-"):
		kind, begin = unix.RTM_NEWADDR, binary.NativeEndian.AppendUint32(nil, 0x47361222)
	case strings.HasPrefix(name, "rule-"):
		kind, begin = unix.RTM_NEWRULE, binary.NativeEndian.AppendUint32(nil, 0x71706986)
	default:
		begin = binary.NativeEndian.AppendUint32(nil, 0x45311224)
	}
	rest, ok := bytes.CutPrefix(data, begin)
	if !ok {
		return fmt.Errorf("image %s does not begin as one of its kind: %w", name, fault.ErrCorrupt)
	}
	return messages(name, rest, func(typ uint16) bool { return typ == kind || typ == unix.NLMSG_DONE })
}

// tracked judges the connections that netfilter tracks.
func (j *judge) tracked(name string) error {
	data, err := j.read(name)
	if err != nil {
		return err
	}
	// Connections (NFNL_SUBSYS_CTNETLINK), and expected ones; CRIU writes both into both.
	return messages(name, data, func(typ uint16) bool { return typ == 1<<8 || typ == 2<<8 })
}

func messages(name string, data []byte, may func(uint16) bool) error {
	for len(data) > 0 {
		if len(data) < unix.SizeofNlMsghdr {
			return fmt.Errorf("image %s is cut off: %w", name, fault.ErrCorrupt)
		}
		size := int64(binary.NativeEndian.Uint32(data))
		if size < unix.SizeofNlMsghdr || size > int64(len(data)) {
			return fmt.Errorf("image %s is cut off: %w", name, fault.ErrCorrupt)
		}
		if typ := binary.NativeEndian.Uint16(data[4:]); !may(typ) {
			return refuse(name, "message", "one of type %d is none of its kind", typ)
		}
		data = data[min(int64(len(data)), (size+3)&^3):]
	}
	return nil
}

// rule is a line of iptables-save without rules: tables, chains and their policies.
var chains = sync.OnceValue(func() *regexp.Regexp {
	return regexp.MustCompile(`^(#.*|\*[a-z]+|:[A-Za-z0-9_.-]+ (ACCEPT|DROP|-) \[\d+:\d+\]|COMMIT)?$`)
})

// iptablesOption are options of a rule that name no file and no program.
var iptablesOption = sync.OnceValue(func() map[string]bool {
	list := map[string]bool{}
	for o := range strings.FieldsSeq(`-A -s -d -p -j -g -i -o -m -f ! --dport --sport --dports --sports --ports --ctstate --state --comment
		--to-destination --to-source --to-ports --reject-with --limit --limit-burst --icmp-type --icmpv6-type --tcp-flags --syn --dst-type
		--src-type --mark --set-mark --set-xmark --mac-source --uid-owner --gid-owner --log-prefix --log-level --random --random-fully --persistent
		--physdev-in --physdev-out --pkt-type --ctdir --nfmask --ctmask --save-mark --restore-mark --clamp-mss-to-pmtu --set-mss`) {
		list[o] = true
	}
	return list
})

// iptables judges rules, which CRIU has iptables-restore read: an option of a rule can name a program that it runs.
func (j *judge) iptables(name string) error {
	data, err := j.read(name)
	if err != nil {
		return err
	}
	for line := range strings.Lines(string(data)) {
		line = strings.TrimRight(line, " \n")
		if chains().MatchString(line) {
			continue
		}
		if !strings.HasPrefix(line, "-A ") || strings.ContainsAny(line, "\\`\x00\r") {
			return refuse(name, "line", "%s is no rule", quoted(line))
		}
		if !j.spec.can("NET_ADMIN") {
			return refuse(name, "line", "the rule %s takes CAP_NET_ADMIN, which the container has not", quoted(line))
		}
		for _, word := range words(line) {
			if strings.HasPrefix(word, "-") && !iptablesOption()[word] {
				return refuse(name, "line",
					"the option %s of a rule is not known to this version of agentbox", quoted(word))
			}
		}
	}
	return nil
}

// words splits a line of iptables-save; what is quoted is one word, and no option.
func words(line string) (list []string) {
	for i, part := range strings.Split(line, `"`) {
		if i%2 == 0 {
			list = append(list, strings.Fields(part)...)
		}
	}
	return list
}

// nftWord are words with which nft reads files, or what is not there to be seen.
var nftWord = sync.OnceValue(func() *regexp.Regexp {
	return regexp.MustCompile(`(?m)(^|[\s;{}])(include|define|redefine|undefine)\b|\$|\\|^\s*(add|create|insert|delete|destroy|replace|flush|reset|rename|import|export|monitor|describe|list)\b`)
})

// nftables judges a list of tables, which CRIU has libnftables read.
func (j *judge) nftables(name string) error {
	data, err := j.read(name)
	if err != nil || len(bytes.TrimSpace(data)) == 0 {
		return err
	}
	if w := nftWord().Find(data); w != nil {
		return refuse(name, "text", "%s is no part of a list of tables", quoted(strings.TrimSpace(string(w))))
	}
	depth := 0
	for line := range strings.Lines(string(data)) {
		line = strings.TrimSpace(line)
		if depth == 0 && line != "" && !strings.HasPrefix(line, "table ") {
			return refuse(name, "text", "%s is no table", quoted(line))
		}
		if depth += strings.Count(line, "{") - strings.Count(line, "}"); depth < 0 {
			return fmt.Errorf("image %s: a brace too many: %w", name, fault.ErrCorrupt)
		}
		own := strings.HasPrefix(line, "table inet CRIU-")
		if strings.HasPrefix(line, "table ") && !own && !j.spec.can("NET_ADMIN") {
			return refuse(name, "text", "%s takes CAP_NET_ADMIN, which the container has not", quoted(line))
		}
	}
	return nil
}
