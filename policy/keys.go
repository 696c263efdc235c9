package policy

import (
	"errors"
	"fmt"
	"math"
	"net/netip"
	"path"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/docker/go-units"
	"go.yaml.in/yaml/v3"

	"github.com/agentbox/agentbox/internal/lazy"
)

// A key of a policy file: how it is read, written, inherited and compared.
type key struct {
	name string
	// group: giving one of its keys replaces them all. The mounts that a policy lists, for one,
	// are all that can be mounted.
	group string
	// replaces is a group whose keys this key replaces, as one of their own does.
	replaces string

	read  func(r *Rules, n *yaml.Node) []*Problem
	value func(r *Rules) any // as in a file; nil: not said
	copy  func(dst, src *Rules)
	zero  func(r *Rules)
	// wider lists what own allows and base does not: which item of a list (0
	// for other values), and why.
	wider func(base, own *Rules) []widening
}

type widening struct {
	item int
	why  string
}

// keys are all there are, but for base and description.
var keys = append([]key{
	listOf("images.references", func(r *Rules) *[]string { return &r.Images }, parsePattern, coversImage).in("images"),
	listOf("images.digests", func(r *Rules) *[]string { return &r.Digests }, parseDigest, coversDigest).in("images"),
	listOf("mounts.read_write", func(r *Rules) *[]string {
		return &r.ReadWrite
	}, parsePath, func(base *Rules, p string) bool { return beneathAny(base.ReadWrite, p) }).in("mounts"),
	listOf("mounts.read_only", func(r *Rules) *[]string {
		return &r.ReadOnly
	}, parsePath, func(base *Rules, p string) bool {
		return beneathAny(base.ReadWrite, p) || beneathAny(base.ReadOnly, p)
	}).in("mounts"),
	boolOf("mounts.volumes", func(r *Rules) *bool { return &r.Volumes }, true),

	listOf("user.uids", func(r *Rules) *[]IDRange {
		return &r.UIDs
	}, parseIDRange, func(base *Rules, own IDRange) bool { return coversIDs(base.UIDs, own) }),
	boolOf("user.non_root", func(r *Rules) *bool { return &r.NonRoot }, false),
	valueOf("user.default", func(r *Rules) *string { return &r.User }, parseUser, textOf),
	valueOf("user.namespace", func(r *Rules) *string {
		return &r.Namespace
	}, parseNamespace, textOf).atLeast(func(r *Rules) int { return rankOf(r.Namespace) }),

	capabilities(),
	boolOf("privileged", func(r *Rules) *bool { return &r.Privileged }, true).onlyFalse(),
	boolOf("no_new_privileges", func(r *Rules) *bool { return &r.NoNewPrivileges }, false),
	listOf("seccomp", func(r *Rules) *[]string { return &r.Seccomp }, parseSeccomp, func(base *Rules, s string) bool {
		return base.allowsSeccomp(s)
	}),
	listOf("apparmor", func(r *Rules) *[]string { return &r.AppArmor }, parseProfile, coversAppArmor),
	boolOf("io_uring", func(r *Rules) *bool { return &r.IOUring }, true),

	listOf("network.modes", func(r *Rules) *[]string {
		return &r.Networks
	}, parseNetwork, func(base *Rules, s string) bool { return base.allowsNetwork(s) }),
	valueOf("network.default", func(r *Rules) *string { return &r.Network }, parseNetwork, textOf),
	boolOf("network.groups", func(r *Rules) *bool { return &r.Groups }, true),
	listOf("network.publish", func(r *Rules) *[]PortRange { return &r.Publish }, parsePortRange, coversPorts),
	listOf("network.egress", func(r *Rules) *[]EgressRule {
		return &r.Egress
	}, ParseEgressRule, func(base *Rules, r EgressRule) bool { return base.allowsEgress(r) }).orAny(),

	valueOf("limits.memory.default", func(r *Rules) *int64 { return &r.Memory.Default }, parseMemory, sizeOf),
	atMost("limits.memory.max", func(r *Rules) *int64 { return &r.Memory.Max }, parseMemory, sizeOf),
	valueOf("limits.cpus.default", func(r *Rules) *float64 { return &r.CPUs.Default }, parseCPUs, cpusOf),
	atMost("limits.cpus.max", func(r *Rules) *float64 { return &r.CPUs.Max }, parseCPUs, cpusOf),
	valueOf("limits.pids.default", func(r *Rules) *int64 { return &r.Pids.Default }, parseCount, countOf),
	atMost("limits.pids.max", func(r *Rules) *int64 { return &r.Pids.Max }, parseCount, countOf),
	valueOf("limits.swap.default", func(r *Rules) *int64 { return &r.Swap.Default }, parseSize, sizeOf),
	atMost("limits.swap.max", func(r *Rules) *int64 { return &r.Swap.Max }, parseSize, sizeOf),
	valueOf("limits.io.default", func(r *Rules) *int64 { return &r.IO.Default }, parseSize, sizeOf),
	atMost("limits.io.max", func(r *Rules) *int64 { return &r.IO.Max }, parseSize, sizeOf),
	valueOf("limits.storage_size.default", func(r *Rules) *int64 { return &r.StorageSize.Default }, parseSize, sizeOf),
	atMost("limits.storage_size.max", func(r *Rules) *int64 { return &r.StorageSize.Max }, parseSize, sizeOf),

	atMost("lifetime.ttl", func(r *Rules) *time.Duration { return &r.TTL }, parseLifetime, ageOf),
	atMost("lifetime.idle", func(r *Rules) *time.Duration { return &r.Idle }, parseLifetime, ageOf),

	listOf("checkpoints.triggers", func(r *Rules) *[]string {
		return &r.Triggers
	}, parseTrigger, func(base *Rules, s string) bool { return slices.Contains(base.Triggers, s) }),
	valueOf("checkpoints.every", func(r *Rules) *string { return &r.Every }, parseEvery, textOf),
	valueOf("checkpoints.keep_last", func(r *Rules) *int {
		return &r.Retention.KeepLast
	}, parseKeep, intOf).replacing("automatic"),
	valueOf("checkpoints.keep_within", func(r *Rules) *time.Duration {
		return &r.Retention.KeepWithin
	}, parsePositive, ageOf).replacing("automatic"),
	valueOf("checkpoints.keep_hourly", func(r *Rules) *int {
		return &r.Retention.KeepHourly
	}, parseKeep, intOf).replacing("automatic"),
	valueOf("checkpoints.keep_daily", func(r *Rules) *int {
		return &r.Retention.KeepDaily
	}, parseKeep, intOf).replacing("automatic"),
	valueOf("checkpoints.keep_weekly", func(r *Rules) *int {
		return &r.Retention.KeepWeekly
	}, parseKeep, intOf).replacing("automatic"),
	atMost("checkpoints.max_bytes", func(r *Rules) *int64 {
		return &r.Retention.MaxBytes
	}, parseSize, sizeOf).replacing("automatic"),
	valueOf("checkpoints.automatic.keep_last", func(r *Rules) *int {
		return &r.Automatic.KeepLast
	}, parseKeepSome, intOf).in("automatic"),
	valueOf("checkpoints.automatic.keep_within", func(r *Rules) *time.Duration {
		return &r.Automatic.KeepWithin
	}, parsePositive, ageOf).in("automatic"),
	valueOf("checkpoints.automatic.keep_hourly", func(r *Rules) *int {
		return &r.Automatic.KeepHourly
	}, parseKeepSome, intOf).in("automatic"),
	valueOf("checkpoints.automatic.keep_daily", func(r *Rules) *int {
		return &r.Automatic.KeepDaily
	}, parseKeepSome, intOf).in("automatic"),
	valueOf("checkpoints.automatic.keep_weekly", func(r *Rules) *int {
		return &r.Automatic.KeepWeekly
	}, parseKeepSome, intOf).in("automatic"),

	listOf("labels", func(r *Rules) *[]string { return &r.Labels }, parseLabel, nil).needsAllOf(),

	hooksAt(BeforeStart), hooksAt(BeforeCheckpoint), hooksAt(AfterCheckpoint), hooksAt(BeforeRestore),
	hooksAt(AfterRestore), hooksAt(OnFailure),
}, applyKeys...)

func (k key) in(group string) key        { k.group = group; return k }
func (k key) replacing(group string) key { k.replaces = group; return k }

// listOf is a key with a list of texts. Each item of it has to be covered by
// the base; a list in a file replaces the base's.
func listOf[T any](
	name string, at func(*Rules) *[]T, parse func(string) (T, error), covered func(base *Rules, item T) bool,
) key {
	text := func(v T) string { return fmt.Sprint(v) }
	return key{
		name: name,
		read: func(r *Rules, n *yaml.Node) (problems []*Problem) {
			if n.Kind != yaml.SequenceNode {
				return []*Problem{wrong(n, "%s: not a list; write [] for an empty one", name)}
			}
			list := []T{}
			for _, item := range n.Content {
				s, p := scalar(item, name)
				if p == nil {
					v, err := parse(s)
					if list = append(list, v); err != nil {
						p = wrong(item, "%s: %v", name, err)
					}
				}
				if p != nil {
					problems = append(problems, p)
				}
			}
			*at(r) = list
			return problems
		},
		value: func(r *Rules) any {
			texts := []string{}
			for _, v := range *at(r) {
				texts = append(texts, text(v))
			}
			return texts
		},
		copy: func(dst, src *Rules) { *at(dst) = slices.Clone(*at(src)) },
		zero: func(r *Rules) { *at(r) = nil },
		wider: func(base, own *Rules) (out []widening) {
			for i, v := range *at(own) {
				if !covered(base, v) {
					out = append(out, widening{i, text(v)})
				}
			}
			return out
		},
	}
}

// needsAllOf is for a list that asks for something: what the base asks for
// has to be in it.
func (k key) needsAllOf() key {
	k.wider = func(base, own *Rules) (out []widening) {
		for _, v := range base.Labels {
			if !slices.Contains(own.Labels, v) {
				out = append(out, widening{-1, "without " + v})
			}
		}
		return out
	}
	return k
}

// orAny is for a list that is not said by those that allow anything.
func (k key) orAny() key {
	value := k.value
	k.value = func(r *Rules) any {
		if r.Egress == nil {
			return nil
		}
		return value(r)
	}
	return k
}

func capabilities() key {
	k := listOf("capabilities", func(r *Rules) *[]string { return &r.Capabilities }, func(s string) (string, error) {
		_, err := ExpandCapabilities([]string{s})
		return s, err
	}, func(base *Rules, s string) bool { return slices.Contains(base.Capabilities, s) })
	read := k.read
	k.read = func(r *Rules, n *yaml.Node) []*Problem {
		problems := read(r, n)
		if len(problems) == 0 {
			r.Capabilities, _ = ExpandCapabilities(r.Capabilities) // each one is good
		}
		return problems
	}
	k.wider = func(base, own *Rules) []widening {
		var more []string
		for _, c := range own.Capabilities {
			if !slices.Contains(base.Capabilities, c) {
				more = append(more, c)
			}
		}
		switch {
		case len(more) == 0:
			return nil
		case len(more) > 4:
			more = append(more[:3], fmt.Sprintf("and %d more", len(more)-3))
		}
		return []widening{{-1, strings.Join(more, ", ")}}
	}
	return k
}

// boolOf is a key that is true or false; loose is the value that allows more.
func boolOf(name string, at func(*Rules) *bool, loose bool) key {
	return key{
		name: name,
		read: func(r *Rules, n *yaml.Node) []*Problem {
			if n.Kind != yaml.ScalarNode || n.Tag != "!!bool" || n.Decode(at(r)) != nil {
				return []*Problem{wrong(n, "%s: neither true nor false", name)}
			}
			return nil
		},
		value: func(r *Rules) any { return *at(r) },
		copy:  func(dst, src *Rules) { *at(dst) = *at(src) },
		zero:  func(r *Rules) { *at(r) = false },
		wider: func(base, own *Rules) []widening {
			if *at(own) == loose && *at(base) != loose {
				return []widening{{-1, strconv.FormatBool(loose)}}
			}
			return nil
		},
	}
}

// onlyFalse refuses a permission that nothing can act upon yet.
func (k key) onlyFalse() key {
	read := k.read
	k.read = func(r *Rules, n *yaml.Node) []*Problem {
		problems := read(r, n)
		if len(problems) == 0 && n.Value != "false" {
			problems = append(problems, unsupported(n, "%s: true", k.name))
		}
		return problems
	}
	return k
}

// valueOf is a key with one value that may differ from the base's.
func valueOf[T comparable](name string, at func(*Rules) *T, parse func(string) (T, error), value func(T) any) key {
	return key{
		name: name,
		read: func(r *Rules, n *yaml.Node) []*Problem {
			s, p := scalar(n, name)
			if p == nil {
				v, err := parse(s)
				if *at(r) = v; err != nil {
					p = wrong(n, "%s: %v", name, err)
				}
			}
			if p != nil {
				return []*Problem{p}
			}
			return nil
		},
		value: func(r *Rules) any {
			var none T
			if *at(r) == none {
				return nil
			}
			return value(*at(r))
		},
		copy:  func(dst, src *Rules) { *at(dst) = *at(src) },
		zero:  func(r *Rules) { var none T; *at(r) = none },
		wider: func(_, _ *Rules) []widening { return nil },
	}
}

// atMost is valueOf where more than the base's is too much, unless that is 0.
func atMost[T int64 | float64 | time.Duration](
	name string, at func(*Rules) *T, parse func(string) (T, error), value func(T) any,
) key {
	k := valueOf(name, at, parse, value)
	k.wider = func(base, own *Rules) []widening {
		if b := *at(base); b > 0 && *at(own) > b {
			return []widening{{-1, fmt.Sprintf("%v is more than %v", value(*at(own)), value(b))}}
		}
		return nil
	}
	return k
}

// atLeast is for a value that asks for something: what asks for less than the
// base allows more.
func (k key) atLeast(rank func(*Rules) int) key {
	k.wider = func(base, own *Rules) []widening {
		if rank(own) < rank(base) {
			return []widening{{-1, fmt.Sprintf("%v asks for less than %v", k.value(own), k.value(base))}}
		}
		return nil
	}
	return k
}

func textOf(s string) any       { return s }
func countOf(n int64) any       { return n }
func intOf(n int) any           { return n }
func cpusOf(n float64) any      { return n }
func sizeOf(n int64) any        { return sizeText(n) }
func ageOf(d time.Duration) any { return short(d) }

// sizeText is exact, and short where it can be.
func sizeText(n int64) string {
	for _, u := range []struct {
		unit string
		size int64
	}{{"t", units.TiB}, {"g", units.GiB}, {"m", units.MiB}, {"k", units.KiB}} {
		if n > 0 && n%u.size == 0 {
			return strconv.FormatInt(n/u.size, 10) + u.unit
		}
	}
	return strconv.FormatInt(n, 10) + "b"
}

func parseSize(s string) (int64, error) {
	n, err := units.RAMInBytes(s)
	if err != nil || n <= 0 {
		return 0, fmt.Errorf("%.40q is not a size; write for example 512m or 2g", s)
	}
	return n, nil
}

// minMemory is the kernel's own minimum for a process to start, and Docker's.
const minMemory = 6 << 20

func parseMemory(s string) (int64, error) {
	n, err := parseSize(s)
	if err == nil && n < minMemory {
		return 0, fmt.Errorf("%s is below 6m, with which nothing starts", s)
	}
	return n, err
}

func parseCPUs(s string) (float64, error) {
	n, err := strconv.ParseFloat(s, 64)
	if err != nil || !(n >= 0.001 && n <= 1e6) {
		return 0, fmt.Errorf("%.40q is not a number of cores above 0; write for example 1.5", s)
	}
	return n, nil
}

func parseCount(s string) (int64, error) {
	n, err := strconv.ParseInt(s, 10, 64)
	if err != nil || n <= 0 {
		return 0, fmt.Errorf("%.40q is not a number above 0", s)
	}
	return n, nil
}

func parseKeep(s string) (int, error) {
	n, err := strconv.Atoi(s)
	if err != nil || n < -1 || n > math.MaxInt32 {
		return 0, fmt.Errorf("%.40q is not a number of checkpoints, nor -1 for all", s)
	}
	return n, nil
}

// parseKeepSome is for rules that take the place of the base's: with a 0 one could
// not tell what they say.
func parseKeepSome(s string) (int, error) {
	n, err := parseKeep(s)
	if err == nil && n == 0 {
		return 0, errors.New("0 is no rule; leave it out, or write -1, which keeps all")
	}
	return n, err
}

var ageRE = lazy.Regexp(`^(?:(\d{1,5})w)?(?:(\d{1,6})d)?(.*)$`)

// ParseDuration reads Go's durations with weeks and days before them, as
// restic has them: 2w, 1d12h, 90m. They are not negative.
func ParseDuration(s string) (time.Duration, error) {
	const day = 24 * time.Hour
	m := ageRE().FindStringSubmatch(s)
	if m == nil {
		return 0, errors.New("not a duration") // it has a line break
	}
	var d time.Duration
	for i, unit := range []time.Duration{7 * day, day} {
		if m[i+1] != "" {
			n, err := strconv.Atoi(m[i+1])
			if err != nil {
				return 0, err
			}
			// 99999 weeks are more than 292 years: too many nanoseconds.
			if time.Duration(n) > (math.MaxInt64-d)/unit {
				return 0, errors.New("too long")
			}
			d += time.Duration(n) * unit
		}
	}
	if rest := m[3]; rest != "" || d == 0 && s == "" {
		more, err := time.ParseDuration(rest)
		if err != nil {
			return 0, err
		}
		if more < 0 || more > math.MaxInt64-d {
			return 0, errors.New("out of range")
		}
		d += more
	}
	return d, nil
}

func parsePositive(s string) (time.Duration, error) {
	d, err := ParseDuration(s)
	if err != nil || d == 0 {
		return 0, fmt.Errorf("%.40q is not a duration; write for example 90m, 12h, 2d or 1w", s)
	}
	return d, nil
}

// MinLifetime is the least that a sandbox may live or be idle.
const MinLifetime = time.Second

func parseLifetime(s string) (time.Duration, error) {
	d, err := parsePositive(s)
	if err == nil && d < MinLifetime {
		return 0, fmt.Errorf("%s is below %v", s, MinLifetime)
	}
	return d, err
}

func parseEvery(s string) (string, error) {
	e, err := ParseEvery(s)
	return e.String(), err
}

func oneOf(s string, words ...string) (string, error) {
	if slices.Contains(words, s) {
		return s, nil
	}
	return "", fmt.Errorf("%.40q is none of %s%s", s, strings.Join(words, ", "), didYouMean(s, words))
}

func parseTrigger(s string) (string, error) { return oneOf(s, TriggerExec, TriggerInterval) }
func parseNetwork(s string) (string, error) {
	return oneOf(s, "none", networkFiltered, "bridge", "host")
}

func parseNamespace(s string) (string, error) { return oneOf(s, namespaces...) }

func parseSeccomp(s string) (string, error) {
	if strings.Contains(s, "/") {
		return "", fmt.Errorf("%.80q: the profile of a file goes by its content; write sha256: and what sha256sum says of it", s)
	}
	if strings.HasPrefix(s, "sha256:") {
		return parseDigest(s)
	}
	return oneOf(s, SeccompDefault, SeccompUnconfined)
}

func parseProfile(s string) (string, error) {
	if s == "" || len(s) > 4096 || strings.ContainsAny(s, "\t\n\x00") {
		return "", fmt.Errorf("%.80q is no AppArmor profile, nor a pattern of some; write for example unconfined, or team-*", s)
	}
	return s, nil
}

var userRE = lazy.Regexp(`^[0-9]{1,10}(:[0-9]{1,10})?$`)

func parseUser(s string) (string, error) {
	uid, gid, _ := strings.Cut(s, ":")
	_, err := parseIDRange(uid)
	if gid != "" && err == nil {
		_, err = parseIDRange(gid)
	}
	if err != nil || !userRE().MatchString(s) {
		return "", fmt.Errorf("%.40q: write UID or UID:GID, in digits: names mean what the image says", s)
	}
	return s, nil
}

func parsePattern(s string) (string, error) {
	if s == "" || len(s) > 4096 || strings.ContainsAny(s, " \t\n\x00") {
		return "", fmt.Errorf("%.80q is no pattern of image references; write for example debian:* or registry.example/team/**", s)
	}
	return s, nil
}

var digestRE = lazy.Regexp(`^sha256:[0-9a-f]{64}$`)

func parseDigest(s string) (string, error) {
	if !digestRE().MatchString(s) {
		return "", fmt.Errorf("%.80q is no digest: sha256: and 64 hex digits", s)
	}
	return s, nil
}

func parsePath(s string) (string, error) {
	switch {
	case !strings.HasPrefix(s, "/"):
		return "", fmt.Errorf("%.200q is no absolute path", s)
	case strings.ContainsRune(s, 0) || len(s) > 4096:
		return "", fmt.Errorf("%.200q is no path that the kernel takes", s)
	case path.Clean(s) != s:
		return "", fmt.Errorf("%.200q: write the path that it means, %.200q", s, path.Clean(s))
	case strings.ContainsAny(s, "*?["):
		return "", fmt.Errorf("%.200q: there are no wildcards here; a path stands for itself and all below it", s)
	}
	return s, nil
}

func parseLabel(s string) (string, error) {
	name, _, _ := strings.Cut(s, "=")
	if name == "" || strings.ContainsAny(name, " \t\n*") {
		return "", fmt.Errorf("%.80q: write KEY or KEY=PATTERN", s)
	}
	return s, nil
}

func coversPorts(base *Rules, own PortRange) bool {
	return slices.ContainsFunc(base.Publish, func(b PortRange) bool {
		return b.Protocol == own.Protocol && (b.IP == own.IP || b.IP == netip.Addr{}) &&
			b.First <= own.First && own.Last <= b.Last
	})
}
