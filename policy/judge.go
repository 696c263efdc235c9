package policy

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/agentbox/agentbox/internal/fault"
)

// Request is what a sandbox is to be. The zero values of its fields ask for
// nothing: they are filled in by Judge.
type Request struct {
	Image   string   // its reference as written; empty: not judged
	Digests []string // what Image resolved to; nil: not known yet
	Mounts  []Mount
	// User is USER[:GROUP], a name or a number.
	User string
	// UserNS is "auto" for a user namespace, "host" for none.
	UserNS string

	Capabilities []string // nil: the default ones
	CapAdd       []string
	CapDrop      []string

	Privileged      bool
	NoNewPrivileges bool // granted unless there are to be new ones
	NewPrivileges   bool
	Seccomp         string
	AppArmor        string // empty: the default profile, where there is AppArmor
	IOUring         bool

	Network string
	Egress  []string // of a filtered one; nil: the policy's
	Group   string
	Ports   []Port

	Memory, Pids, IO, Storage int64
	Swap                      int64 // negative: without limit
	CPUs                      float64

	TTL, Idle time.Duration

	Every  string
	Labels map[string]string
}

// Mount is one mount that is asked for.
type Mount struct {
	// "bind", "volume", "tmpfs", "workspace": a directory that is read, or "secret": a file that
	// is read for the sandbox
	Type, Source, Target string
	ReadOnly             bool
}

// Port is one port that is to be published.
type Port struct {
	IP       string
	Host     uint16
	Protocol string
}

const (
	userNSHost = "host"
	userNSAuto = "auto"
)

// Verdicts.
const (
	Allowed = "allowed"
	Denied  = "denied"
	Clamped = "clamped" // not requested: the rule supplies the value
)

// A Finding is what becomes of one thing that is asked for, and the rule that
// decided.
type Finding struct {
	Verdict string `json:"verdict"`
	What    string `json:"what"`
	Rule    string `json:"rule"`           // the key and what it says
	Origin  Origin `json:"origin"`         // where that stands
	Why     string `json:"why,omitempty"`  // beyond the rule
	Hint    string `json:"hint,omitempty"` // the way out
}

// Where says it as people write it.
func (o Origin) Where() string {
	if o.Line == 0 {
		return o.Policy
	}
	return fmt.Sprintf("%s (%s:%d)", o.Policy, o.File, o.Line)
}

func (f Finding) String() string {
	s := fmt.Sprintf("%s by policy %s: %s", f.What, f.Origin.Where(), f.Rule)
	if f.Why != "" {
		s += ": " + f.Why
	}
	return s
}

// Denials makes one error of what is denied; nil: nothing is.
func Denials(findings []Finding) error {
	var errs []error
	for _, f := range findings {
		if f.Verdict == Denied {
			errs = append(errs, &fault.Error{Err: fmt.Errorf("%w: %s", fault.ErrDenied, f), Hint: f.Hint})
		}
	}
	return errors.Join(errs...)
}

// judging is one request under judgement.
type judging struct {
	*Policy
	ask      Request
	findings []Finding
}

// Judge says what becomes of all that is asked for, and returns the request as
// it is granted. That is only to be used when nothing is denied. What it
// grants it would grant again, unchanged.
//
// The sources of bind mounts are judged, and granted, as where they really are.
func (p *Policy) Judge(ask Request) (Request, []Finding) {
	j := &judging{Policy: p, ask: ask}
	j.image()
	j.mounts()
	j.user()
	j.namespace()
	j.security()
	j.network()
	limit(j, "memory", &j.ask.Memory, p.Rules.Memory, sizeText)
	j.swap()
	limit(j, "cpus", &j.ask.CPUs, p.Rules.CPUs, func(n float64) string { return strconv.FormatFloat(n, 'g', -1, 64) })
	limit(j, "pids", &j.ask.Pids, p.Rules.Pids, func(n int64) string { return strconv.FormatInt(n, 10) })
	limit(j, "io", &j.ask.IO, p.Rules.IO, sizeText)
	limit(j, "storage_size", &j.ask.Storage, p.Rules.StorageSize, sizeText)
	j.lifetime("ttl", &j.ask.TTL, p.Rules.TTL)
	j.lifetime("idle", &j.ask.Idle, p.Rules.Idle)
	j.checkpoints()
	j.labels()
	j.hooks()
	return j.ask, j.findings
}

func (j *judging) note(verdict, what, key, rule string) *Finding {
	f := Finding{Verdict: verdict, What: what, Rule: key + ": " + rule, Origin: j.origin[key]}
	if f.Origin.Policy == "" {
		f.Origin.Policy = j.Name // no policy sets it: the zero value decides
	}
	j.findings = append(j.findings, f)
	return &j.findings[len(j.findings)-1]
}

func verdict(ok bool) string {
	if ok {
		return Allowed
	}
	return Denied
}

func listText[T any](list []T) string {
	texts := []string{}
	for _, v := range list {
		texts = append(texts, fmt.Sprint(v))
	}
	if len(texts) > 6 {
		texts = append(texts[:5], fmt.Sprintf("and %d more", len(texts)-5))
	}
	return "[" + strings.Join(texts, ", ") + "]"
}

func (j *judging) image() {
	if j.ask.Image == "" {
		return
	}
	what := "image " + j.ask.Image
	names := names(j.ask.Image)
	for _, pattern := range j.Rules.Images {
		if slices.ContainsFunc(names, func(n string) bool { return matches(pattern, n) }) {
			j.note(Allowed, what, "images.references", pattern)
			return
		}
	}
	for _, d := range j.ask.Digests {
		if slices.Contains(j.Rules.Digests, d) {
			j.note(Allowed, what, "images.digests", d)
			return
		}
	}
	switch {
	case len(j.Rules.Digests) == 0:
		j.note(Denied, what, "images.references", listText(j.Rules.Images))
	case j.ask.Digests != nil:
		j.note(Denied, what, "images.digests", listText(j.Rules.Digests)).Why = "it is " +
			strings.Join(j.ask.Digests, ", ")
	default:
		j.note(Allowed, what, "images.digests", listText(j.Rules.Digests)).Why = "if it is one of these once it is here"
	}
}

// names are the forms of a reference that patterns are compared with: as it
// is written, and without its tag or digest.
func names(ref string) []string {
	ref = strings.TrimPrefix(ref, "docker://")
	short, _, _ := strings.Cut(ref, "@")
	if i := strings.LastIndexByte(short, ':'); i > strings.LastIndexByte(short, '/') {
		short = short[:i]
	}
	return []string{ref, short}
}

func (j *judging) mounts() {
	j.ask.Mounts = slices.Clone(j.ask.Mounts)
	for i := range j.ask.Mounts {
		m := &j.ask.Mounts[i]
		mode := "rw"
		if m.ReadOnly {
			mode = "ro"
		}
		switch m.Type {
		case "bind", "secret", "workspace":
			what := fmt.Sprintf("mount %s (%s)", m.Source, mode)
			if m.Type != "bind" {
				what = m.Type + " of " + m.Source
			}
			real, err := filepath.EvalSymlinks(m.Source)
			if err != nil {
				j.note(Denied, what, "mounts.read_write", listText(j.Rules.ReadWrite)).Why = fmt.Sprintf("where it really is cannot be seen: %v", err)
				continue
			}
			if real != filepath.Clean(m.Source) {
				what += ", which really is " + real
			}
			m.Source = real
			j.mount(what, real, m.ReadOnly || m.Type == "workspace")
		case "volume":
			j.note(verdict(j.Rules.Volumes), "volume "+m.Source, "mounts.volumes", strconv.FormatBool(j.Rules.Volumes))
		}
	}
}

func (j *judging) mount(what, real string, readOnly bool) {
	for _, top := range j.Rules.ReadWrite {
		if beneath(top, real) {
			j.note(Allowed, what, "mounts.read_write", top)
			return
		}
	}
	for _, top := range j.Rules.ReadOnly {
		if beneath(top, real) {
			if f := j.note(verdict(readOnly), what, "mounts.read_only", top); !readOnly {
				f.Hint = "Mount it read-only: SRC:DST:ro."
			}
			return
		}
	}
	if readOnly && len(j.Rules.ReadOnly) > 0 {
		j.note(Denied, what, "mounts.read_only", listText(j.Rules.ReadOnly)).Why = "it is not beneath any of these"
		return
	}
	f := j.note(Denied, what, "mounts.read_write", listText(j.Rules.ReadWrite))
	if len(j.Rules.ReadWrite) > 0 {
		f.Why = "it is not beneath any of these"
	}
}

// Image judges a reference of which nothing is known yet.
func (p *Policy) Image(ref string) error {
	j := &judging{Policy: p, ask: Request{Image: ref}}
	j.image()
	return Denials(j.findings)
}

// Mounts judges what is mounted, as it is now.
func (p *Policy) Mounts(mounts []Mount) error {
	j := &judging{Policy: p, ask: Request{Mounts: mounts}}
	j.mounts()
	return Denials(j.findings)
}

// HostFile judges a file of the host, by its real path, that a restore may write:
// as the source of a writable mount.
func (p *Policy) HostFile(real string) error {
	j := &judging{Policy: p}
	j.mount("host file "+real, real, false)
	return Denials(j.findings)
}

// User judges the user that a command is to run as.
func (p *Policy) User(user string) error {
	j := &judging{Policy: p, ask: Request{User: user}}
	j.user()
	return Denials(j.findings)
}

func (j *judging) user() {
	r := &j.Rules
	if j.ask.User == "" && r.User != "" {
		j.ask.User = r.User
		j.note(Clamped, "user "+r.User, "user.default", r.User)
		return
	}
	name := j.ask.User
	if name == "" {
		name = "0"
	}
	uid, _, _ := strings.Cut(name, ":")
	what := "user " + name
	switch _, err := strconv.ParseUint(uid, 10, 32); {
	case r.allUsers():
		j.note(Allowed, what, "user.uids", listText(r.UIDs))
	case err != nil:
		f := j.note(Denied, what, "user.uids", listText(r.UIDs))
		if r.NonRoot {
			f.Rule = "user.non_root: true"
			f.Origin = j.origin["user.non_root"]
		}
		f.Why, f.Hint = "a name means whom the image says", "Give the number: --user UID[:GID]."
	case r.NonRoot && trimZeros(uid) == "0":
		j.note(Denied, what, "user.non_root", "true").Hint = "Give another user: --user UID[:GID]."
	default:
		j.note(verdict(r.allowsUID(uid)), what, "user.uids", listText(r.UIDs))
	}
}

// namespace: a request for the host's user ids has to be allowed; whether others are available is
// for the host to say.
func (j *judging) namespace() {
	r := &j.Rules
	switch optional := rankOf(r.Namespace) == 0; {
	case j.ask.UserNS == userNSHost:
		j.note(verdict(optional), "the host's user ids", "user.namespace", cmp.Or(r.Namespace, NamespaceOptional))
	case r.NeedsNamespace():
		j.ask.UserNS = userNSAuto
		j.note(Clamped, "user ids of its own", "user.namespace", r.Namespace)
	case !optional:
		j.note(Clamped, "user ids of its own, where that is possible", "user.namespace", r.Namespace)
	}
}

// NoNamespace is the denial of a sandbox that must have a user namespace and,
// for why, can have none.
func (p *Policy) NoNamespace(why string) error {
	j := &judging{Policy: p}
	j.note(Denied, "the host's user ids", "user.namespace", p.Rules.Namespace).Why = why
	return Denials(j.findings)
}

func trimZeros(s string) string {
	if s = strings.TrimLeft(s, "0"); s == "" {
		return "0"
	}
	return s
}

func (j *judging) security() {
	r := &j.Rules
	if j.ask.Privileged {
		f := j.note(verdict(r.Privileged), "privileged", "privileged", strconv.FormatBool(r.Privileged))
		f.Hint = "No policy can allow it; name the capabilities that it is for: --cap-add NAME."
	}
	j.capabilities()
	switch rule := strconv.FormatBool(r.NoNewPrivileges); {
	case j.ask.NewPrivileges:
		j.ask.NoNewPrivileges = false
		j.note(verdict(!r.NoNewPrivileges), "new privileges", "no_new_privileges", rule)
	case r.NoNewPrivileges && !j.ask.NoNewPrivileges:
		j.note(Clamped, "no new privileges", "no_new_privileges", rule)
		fallthrough
	default:
		j.ask.NoNewPrivileges = true
	}
	if j.ask.Seccomp == "" {
		j.ask.Seccomp = SeccompDefault
	}
	if s := j.ask.Seccomp; s != SeccompDefault || !r.allowsSeccomp(s) {
		f := j.note(verdict(r.allowsSeccomp(s)), "seccomp profile "+s, "seccomp", listText(r.Seccomp))
		if s != SeccompDefault && s != SeccompUnconfined {
			f.Hint = "A policy allows the profile of a file by its digest: seccomp: [default, " + s + "]."
		}
	}
	if a := j.ask.AppArmor; a != "" {
		j.note(verdict(coversAppArmor(r, a)), "AppArmor profile "+a, "apparmor", listText(r.AppArmor))
	}
	if j.ask.IOUring {
		j.note(verdict(r.IOUring), "io_uring", "io_uring", strconv.FormatBool(r.IOUring))
	}
}

// capabilities: those asked for by name have to be allowed; of the default ones, those that are
// not allowed are left out.
func (j *judging) capabilities() {
	most := j.Rules.Capabilities
	named, err := ExpandCapabilities(append(slices.Clone(j.ask.Capabilities), j.ask.CapAdd...))
	drop, err2 := ExpandCapabilities(j.ask.CapDrop)
	// As for Docker, --cap-drop ALL --cap-add X leaves X.
	back, err3 := ExpandCapabilities(slices.DeleteFunc(slices.Clone(j.ask.CapAdd), func(s string) bool {
		return strings.EqualFold(s, "ALL")
	}))
	if err = errors.Join(err, err2, err3); err != nil {
		j.note(Denied, "capabilities", "capabilities", listText(most)).Why = err.Error()
		return
	}
	set := []string{}
	for _, c := range named {
		if slices.Contains(drop, c) && !slices.Contains(back, c) {
			continue
		}
		if set = append(set, c); !slices.Contains(most, c) {
			j.note(Denied, "capability "+c, "capabilities", listText(most))
		} else if len(j.ask.CapAdd) > 0 && !slices.Contains(DefaultCapabilities, c) {
			j.note(Allowed, "capability "+c, "capabilities", listText(most))
		}
	}
	if j.ask.Capabilities == nil {
		var without []string
		for _, c := range DefaultCapabilities {
			switch {
			case slices.Contains(drop, c) || slices.Contains(set, c):
			case slices.Contains(most, c):
				set = append(set, c)
			default:
				without = append(without, c)
			}
		}
		switch {
		case len(without) == len(DefaultCapabilities):
			j.note(Clamped, "none of the usual capabilities", "capabilities", listText(most))
		case len(without) > 0:
			j.note(Clamped, "capabilities without "+listText(without), "capabilities", listText(most))
		}
	}
	slices.Sort(set)
	if j.ask.Capabilities, j.ask.CapAdd, j.ask.CapDrop = set, nil, nil; slices.Equal(set, DefaultCapabilities) {
		j.ask.Capabilities = nil
	}
}

func (j *judging) network() {
	r := &j.Rules
	asked := j.ask.Network != ""
	if !asked {
		if j.ask.Network = r.Network; r.Network == "" {
			j.ask.Network = "bridge"
		}
	}
	if m := j.ask.Network; !asked && m != "bridge" && slices.Contains(r.Networks, m) {
		j.note(Clamped, "network "+m, "network.default", m)
	} else {
		j.note(verdict(r.allowsNetwork(m)), "network "+m, "network.modes", listText(r.Networks))
	}
	if j.ask.Network == networkFiltered {
		j.egress()
	}
	if j.ask.Group != "" {
		j.note(verdict(r.Groups), "network group "+j.ask.Group, "network.groups", strconv.FormatBool(r.Groups))
	}
	for _, p := range j.ask.Ports {
		what := fmt.Sprintf("published port %d/%s", p.Host, p.Protocol)
		if p.IP != "" {
			what = fmt.Sprintf("published port %s %d/%s", p.IP, p.Host, p.Protocol)
		}
		addr, err := netip.ParseAddr(p.IP)
		if err != nil && p.IP != "" {
			j.note(Denied, what, "network.publish", listText(r.Publish)).Why = err.Error()
			continue
		}
		want := PortRange{IP: addr.Unmap(), First: p.Host, Last: p.Host, Protocol: p.Protocol}
		j.note(verdict(coversPorts(r, want)), what, "network.publish", listText(r.Publish))
	}
}

// egress: each rule in a request has to be covered; a request without any gets those of the
// policy.
func (j *judging) egress() {
	r := &j.Rules
	if j.ask.Egress == nil {
		if r.Egress == nil {
			return
		}
		j.ask.Egress = EgressText(r.Egress)
		j.note(Clamped, "egress "+listText(j.ask.Egress), "network.egress", listText(r.Egress))
		return
	}
	rule := listText(r.Egress)
	if r.Egress == nil {
		rule = "any"
	}
	j.ask.Egress = slices.Clone(j.ask.Egress)
	for i, text := range j.ask.Egress {
		own, err := ParseEgressRule(text)
		if err != nil {
			j.note(Denied, "egress "+text, "network.egress", rule).Why = err.Error()
			continue
		}
		j.ask.Egress[i] = own.String()
		f := j.note(verdict(r.allowsEgress(own)), "egress "+own.String(), "network.egress", rule)
		if r.Egress == nil {
			continue
		}
		if f.Verdict == Allowed {
			f.Rule = "network.egress: " + covering(r.Egress, own)
		} else if network := own; own.Alone {
			if network.Alone = false; r.allowsEgress(network) {
				f.Hint = fmt.Sprintf("An address alone is the host's, too, if it is one of its own; write %s.", network)
			}
		}
	}
}

// covering are the rules that let out what own lets out, or some of it.
func covering(base []EgressRule, own EgressRule) string {
	for _, b := range base {
		if coversEgress([]EgressRule{b}, own) {
			return b.String()
		}
	}
	return listText(slices.DeleteFunc(slices.Clone(base), func(b EgressRule) bool { return !b.leadsTo(own) }))
}

// MayReach judges egress rules of a sandbox that is there.
func (p *Policy) MayReach(egress []string) error {
	j := &judging{Policy: p, ask: Request{Egress: egress}}
	j.egress()
	return Denials(j.findings)
}
