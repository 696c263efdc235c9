package policy

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Rules are what a policy says once all that it inherits is filled in.
type Rules struct {
	Images    []string // patterns of references
	Digests   []string // of images; one that is here needs no pattern
	ReadWrite []string // host directories and files that may be mounted, with all below them
	ReadOnly  []string // the same, read-only
	Volumes   bool     // named volumes of the engine

	UIDs    []IDRange
	NonRoot bool
	User    string // user of a command when neither the caller nor the image says; UID[:GID]
	// Namespace says whether a sandbox has a user namespace: NamespaceOptional
	// (or empty), NamespacePreferred or NamespaceRequired.
	Namespace string

	Capabilities    []string // the most that a sandbox has, without CAP_, sorted
	Privileged      bool
	NoNewPrivileges bool     // cannot be switched off
	Seccomp         []string // profiles: SeccompDefault, SeccompUnconfined, or by SeccompDigest
	AppArmor        []string // patterns of profiles that may be asked for
	IOUring         bool

	Networks []string // modes
	Network  string   // the mode when the caller names none
	Groups   bool     // network groups
	Publish  []PortRange
	// Egress is what egress rules may be asked for, and what a filtered sandbox
	// has that asks for none; nil: any, and none.
	Egress []EgressRule

	Memory, Pids, Swap, IO, StorageSize Limit[int64]
	CPUs                                Limit[float64]

	// TTL and Idle are the most that may be asked for, and what one has that asks
	// for none; 0: none.
	TTL, Idle time.Duration

	Triggers  []string // what may have checkpoints taken by itself: TriggerExec, TriggerInterval
	Every     string   // when they are taken when the caller does not say
	Retention Retention
	Automatic Retention // of those taken by itself, MaxBytes apart; with any rule it is they that count for these

	Labels []string // KEY or KEY=PATTERN, each of which a sandbox must have

	Hooks map[string][]Hook // by when they are run

	Apply Apply // the rules of an apply to a directory of the host
}

// namespaces are in the order of how much they ask for.
var namespaces = []string{NamespaceOptional, NamespacePreferred, NamespaceRequired}

func rankOf(namespace string) int { return max(slices.Index(namespaces, namespace), 0) }

// Keeping is what they say of a sandbox's checkpoints.
func (r *Rules) Keeping() Keeping { return Keeping{r.Retention, r.Automatic} }

// NeedsNamespace reports whether a sandbox must have a user namespace.
func (r *Rules) NeedsNamespace() bool { return r.Namespace == NamespaceRequired }

// Limit bounds a resource; zero means that there is none.
type Limit[T int64 | float64] struct {
	Default, Max T
}

// Values of Rules.
const (
	SeccompDefault    = "default"
	SeccompUnconfined = "unconfined"

	NamespaceOptional  = "optional"  // as the caller wishes
	NamespacePreferred = "preferred" // wherever it can have one, whatever the caller wishes
	NamespaceRequired  = "required"  // else it is not made

	networkFiltered = "filtered"

	TriggerExec     = "exec"
	TriggerInterval = "interval"
)

// IDRange is a range of user ids, ends included.
type IDRange struct{ First, Last uint32 }

func (r IDRange) String() string {
	if r.First == r.Last {
		return strconv.FormatUint(uint64(r.First), 10)
	}
	return fmt.Sprintf("%d-%d", r.First, r.Last)
}

func parseIDRange(s string) (r IDRange, err error) {
	first, last, isRange := strings.Cut(s, "-")
	if !isRange {
		last = first
	}
	a, err1 := strconv.ParseUint(first, 10, 32)
	b, err2 := strconv.ParseUint(last, 10, 32)
	// The last id means "none" to the kernel.
	if err1 != nil || err2 != nil || a > b || b == 1<<32-1 {
		return r, fmt.Errorf("%.40q is neither a user id nor a range like 1000-1999", s)
	}
	return IDRange{uint32(a), uint32(b)}, nil
}

// PortRange is a range of ports of the host, ends included.
type PortRange struct {
	IP          netip.Addr // the zero one: every address
	First, Last uint16
	Protocol    string // "tcp", "udp"
}

func (p PortRange) String() string {
	s := strconv.Itoa(int(p.First))
	if p.First != p.Last {
		s += "-" + strconv.Itoa(int(p.Last))
	}
	if p.IP.Is6() {
		s = "[" + p.IP.String() + "]:" + s
	} else if p.IP.IsValid() {
		s = p.IP.String() + ":" + s
	}
	return s + "/" + p.Protocol
}

func parsePortRange(s string) (p PortRange, err error) {
	bad := fmt.Errorf("%.80q: write [IP:]PORT[-PORT][/udp]", s)
	ports, proto, found := strings.Cut(s, "/")
	if p.Protocol = proto; !found {
		p.Protocol = "tcp"
	}
	if p.Protocol != "tcp" && p.Protocol != "udp" {
		return p, bad
	}
	if i := strings.LastIndexByte(ports, ':'); i >= 0 {
		if p.IP, err = netip.ParseAddr(strings.TrimSuffix(strings.TrimPrefix(ports[:i], "["),
			"]")); err != nil || p.IP.Zone() != "" {
			return p, bad
		}
		p.IP, ports = p.IP.Unmap(), ports[i+1:]
	}
	if p.First, p.Last, err = parsePorts(ports); err != nil {
		return p, bad
	}
	return p, nil
}

func parsePorts(s string) (first, last uint16, err error) {
	a, b, isRange := strings.Cut(s, "-")
	if !isRange {
		b = a
	}
	x, err1 := strconv.ParseUint(a, 10, 16)
	y, err2 := strconv.ParseUint(b, 10, 16)
	if err1 != nil || err2 != nil || x == 0 || x > y {
		return 0, 0, fmt.Errorf("%.40q is no port and no range of ports", s)
	}
	return uint16(x), uint16(y), nil
}

// AllCapabilities are the kernel's, by their numbers.
var AllCapabilities = []string{
	"CHOWN", "DAC_OVERRIDE", "DAC_READ_SEARCH", "FOWNER", "FSETID", "KILL", "SETGID", "SETUID",
	"SETPCAP", "LINUX_IMMUTABLE",
	"NET_BIND_SERVICE", "NET_BROADCAST", "NET_ADMIN", "NET_RAW", "IPC_LOCK", "IPC_OWNER", "SYS_MODULE",
	"SYS_RAWIO", "SYS_CHROOT",
	"SYS_PTRACE", "SYS_PACCT", "SYS_ADMIN", "SYS_BOOT", "SYS_NICE", "SYS_RESOURCE", "SYS_TIME",
	"SYS_TTY_CONFIG", "MKNOD", "LEASE",
	"AUDIT_WRITE", "AUDIT_CONTROL", "SETFCAP", "MAC_OVERRIDE", "MAC_ADMIN", "SYSLOG", "WAKE_ALARM",
	"BLOCK_SUSPEND", "AUDIT_READ",
	"PERFMON", "BPF", "CHECKPOINT_RESTORE",
}

// DefaultCapabilities are those of a sandbox that requests none, sorted: what package managers,
// servers and databases need as root. SETFCAP is for packages whose files have capabilities,
// which rpm fails without.
var DefaultCapabilities = []string{
	"CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "NET_BIND_SERVICE", "SETFCAP", "SETGID",
	"SETUID", "SYS_CHROOT",
}

// DockerCapabilities are what Docker gives its containers unasked, sorted. No
// container engine gives more, and sandboxes of older versions have them.
var DockerCapabilities = []string{
	"AUDIT_WRITE", "CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "MKNOD",
	"NET_BIND_SERVICE", "NET_RAW", "SETFCAP", "SETGID", "SETPCAP", "SETUID", "SYS_CHROOT",
}

// KernelNames are capabilities as the kernel, and a runtime's spec, write them.
func KernelNames(capabilities []string) []string {
	names := []string{}
	for _, c := range capabilities {
		names = append(names, "CAP_"+c)
	}
	return names
}

// ExpandCapabilities reads names, with or without CAP_ and in any case, and the
// words ALL and DEFAULT, and returns them sorted, each once.
func ExpandCapabilities(names []string) ([]string, error) {
	set := []string{}
	for _, name := range names {
		switch c := strings.TrimPrefix(strings.ToUpper(name), "CAP_"); {
		case c == "ALL":
			set = append(set, AllCapabilities...)
		case c == "DEFAULT":
			set = append(set, DefaultCapabilities...)
		case slices.Contains(AllCapabilities, c):
			set = append(set, c)
		default:
			return nil, fmt.Errorf("%.40q is no capability%s", name,
				didYouMean(c, append([]string{"ALL", "DEFAULT"}, AllCapabilities...)))
		}
	}
	slices.Sort(set)
	return slices.Compact(set), nil
}

// Tree returns the rules in the form of a policy file without a base: nothing that is left out is
// inherited.
func (r *Rules) Tree() map[string]any {
	tree := map[string]any{}
	for _, k := range keys {
		v := k.value(r)
		if v == nil {
			continue
		}
		into := tree
		parts := strings.Split(k.name, ".")
		for _, p := range parts[:len(parts)-1] {
			sub, ok := into[p].(map[string]any)
			if !ok {
				sub = map[string]any{}
				into[p] = sub
			}
			into = sub
		}
		into[parts[len(parts)-1]] = v
	}
	return tree
}

// Canonical is the one form of the rules: JSON, sorted by key. ParseCanonical
// reads it.
func (r *Rules) Canonical() []byte {
	b, err := json.Marshal(r.Tree())
	if err != nil {
		panic(err) // of strings, numbers and truth values
	}
	return b
}

// Digest names what Canonical returns.
func (r *Rules) Digest() string {
	sum := sha256.Sum256(r.Canonical())
	return "sha256:" + hex.EncodeToString(sum[:])
}
