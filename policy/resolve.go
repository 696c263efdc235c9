package policy

import (
	"embed"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"go.yaml.in/yaml/v3"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/internal/lazy"
)

// Default is the policy of sandboxes that name none, and the base of policies that name none.
const Default = "default"

// maxChain bounds how many policies narrow each other.
const maxChain = 16

//go:embed builtin/*.yaml
var builtin embed.FS

// Schema is the JSON Schema of policy files.
//
//go:embed schema.json
var Schema []byte

var nameRE = lazy.Regexp(`^[a-zA-Z0-9][a-zA-Z0-9_.-]{0,127}$`)

// A Policy is the rules that a file and its bases come to.
type Policy struct {
	Name        string
	File        string // where its own rules stand
	Description string
	Base        []string // the names of its bases, the nearest first
	Rules       Rules

	origin map[string]Origin // of each key
}

// Origin is where a rule stands.
type Origin struct {
	Policy string `json:"policy"`
	File   string `json:"file"`
	Line   int    `json:"line"`
}

// Finder finds policies by name: NAME.yaml in the directories, in order, and
// then the built-in ones. A policy whose base has its own name narrows the one
// that it stands before.
type Finder struct {
	Dirs []string
	// Base, if there is one, finds the policies that a file narrows, instead.
	Base func(name string) (*Policy, error)
}

// place is the n-th place that a policy may be found at; past the last one
// there is none.
func (f Finder) read(name string, n int) (file string, data []byte, err error) {
	if n < len(f.Dirs) {
		file = filepath.Join(f.Dirs[n], name+".yaml")
		data, err = readFile(file, true)
		return file, data, err
	}
	file = "builtin/" + name + ".yaml"
	if data, err = builtin.ReadFile(file); n > len(f.Dirs) || err != nil {
		err = fs.ErrNotExist
	}
	return file, data, err
}

// readFile reads a policy. One that is found by its name must be root's, or the caller's: a user
// that can write it can allow anything.
func readFile(file string, trusted bool) ([]byte, error) {
	f, err := os.OpenFile(file, os.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return nil, err
	}
	if st.Mode&unix.S_IFMT == unix.S_IFDIR {
		return nil, fmt.Errorf("%s is a directory: %w", file, fault.ErrInvalid)
	}
	if trusted && (!ours(st.Uid) || st.Mode&0o022 != 0) {
		return nil, &fault.Error{Err: fmt.Errorf("others than root can change %s: %w", file, fault.ErrDenied),
			Hint: fmt.Sprintf("Run 'chown root %s && chmod go-w %s'.", file, file)}
	}
	return io.ReadAll(io.LimitReader(f, maxFile+1))
}

// Find resolves the policy of a name.
func (f Finder) Find(name string) (*Policy, error) {
	return f.find(name, 0, 0)
}

func (f Finder) find(name string, from, depth int) (*Policy, error) {
	if nameRE().MatchString(name) {
		for n := from; n <= len(f.Dirs); n++ {
			file, data, err := f.read(name, n)
			if errors.Is(err, fs.ErrNotExist) {
				continue
			}
			if err != nil {
				return nil, fmt.Errorf("policy %s: %w", name, err)
			}
			return f.resolve(name, file, data, n, depth)
		}
	}
	return nil, &fault.Error{
		Err:  fmt.Errorf("policy %.200q: %w", name, fault.ErrNotFound),
		Hint: "'agentbox policy ls' lists those that are here; a file is named with a slash, ./FILE.",
	}
}

// Load resolves the policy in a file.
func (f Finder) Load(file string) (*Policy, error) {
	data, err := readFile(file, false)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("policy %s: %w", file, fault.ErrNotFound)
	}
	if err != nil {
		return nil, fmt.Errorf("policy: %w", err)
	}
	return f.Resolve(file, data)
}

// Resolve resolves a policy that was read from a file.
func (f Finder) Resolve(file string, data []byte) (*Policy, error) {
	name := strings.TrimSuffix(strings.TrimSuffix(filepath.Base(file), ".yml"), ".yaml")
	return f.resolve(name, file, data, -1, 0)
}

// List returns the names of all policies.
func (f Finder) List() ([]string, error) {
	var names []string
	entries, err := builtin.ReadDir("builtin")
	for _, dir := range f.Dirs {
		more, e := os.ReadDir(dir)
		if entries = append(entries, more...); e != nil && !errors.Is(e, fs.ErrNotExist) {
			err = errors.Join(err, e)
		}
	}
	for _, e := range entries {
		if name, ok := strings.CutSuffix(e.Name(), ".yaml"); ok && nameRE().MatchString(name) {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return slices.Compact(names), err
}

// used is where Remember leaves its marks, in the first of the directories.
const used = ".used"

// Remember notes that a policy was used here. A sandbox that says it was made
// under one that never was came from elsewhere.
func (f Finder) Remember(digest string) error {
	if len(f.Dirs) == 0 || f.Remembers(digest) {
		return nil
	}
	// The name is all there is to it, so that nothing can be half-written.
	dir := filepath.Join(f.Dirs[0], used)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	file, err := os.OpenFile(filepath.Join(dir, mark(digest)), os.O_CREATE|os.O_WRONLY|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return err
	}
	return file.Close()
}

// Remembers reports whether a policy of that digest was used here.
func (f Finder) Remembers(digest string) bool {
	if len(f.Dirs) == 0 || !digestRE().MatchString(digest) {
		return false
	}
	_, err := os.Lstat(filepath.Join(f.Dirs[0], used, mark(digest)))
	return err == nil
}

func mark(digest string) string { return strings.TrimPrefix(digest, "sha256:") }

// resolve reads a policy, found at the n-th place, and fills in what it leaves
// to its base.
func (f Finder) resolve(name, file string, data []byte, n, depth int) (*Policy, error) {
	d, err := parse(name, file, data)
	if err != nil {
		return nil, err
	}
	p := &Policy{Name: name, File: file, Description: d.description, origin: map[string]Origin{}}
	if file == "builtin/trusted.yaml" && n == len(f.Dirs) {
		d.inherit(p, &Policy{}) // all that there is to allow
		return p, nil
	}
	base, from := d.base, 0
	if base == "" {
		base = Default
	}
	switch {
	case n == len(f.Dirs):
		from = n // what stands before a built-in one does not change the others
	case base == name && n >= 0:
		from = n + 1
	}
	at := d.baseAt
	if at == nil {
		at = &yaml.Node{Line: 1, Column: 1}
	}
	if depth == maxChain {
		return nil, d.problems(wrong(at,
			"base: more than %d policies narrow each other, or one narrows itself", maxChain))
	}
	var b *Policy
	if f.Base != nil && n < 0 {
		b, err = f.Base(base)
	} else {
		b, err = f.find(base, from, depth+1)
	}
	if errors.Is(err, fault.ErrNotFound) && !isProblem(err) {
		return nil, d.problems(wrong(at, "base: there is no policy %s", base))
	}
	if err != nil {
		return nil, err
	}
	if problems := slices.Concat(d.widenings(b), d.impossible(b), d.untrusted(n >= 0)); len(problems) > 0 {
		return nil, d.problems(problems...)
	}
	p.Base = append([]string{b.Name}, b.Base...)
	d.inherit(p, b)
	return p, nil
}

func isProblem(err error) bool {
	var l Problems
	return errors.As(err, &l)
}

func (d *document) problems(list ...*Problem) Problems {
	for _, p := range list {
		p.File = d.file
	}
	return list
}

// inherit makes p what the document and its base say together.
func (d *document) inherit(p, base *Policy) {
	p.Rules = d.over(base.Rules)
	for _, k := range keys {
		if n, ok := d.set[k.name]; ok {
			p.origin[k.name] = Origin{d.name, d.file, n.Line}
		} else if at := d.replaced(k); at != nil {
			p.origin[k.name] = Origin{d.name, d.file, at.Line}
		} else if o, ok := base.origin[k.name]; ok {
			p.origin[k.name] = o
		}
	}
}

// replaced is where another key of k's group is given, or one that replaces the
// group, which takes what the base says of k away.
func (d *document) replaced(k key) *yaml.Node {
	for _, other := range keys {
		n, ok := d.set[other.name]
		if !ok || k.group == "" {
			continue
		}
		if other.group == k.group || other.replaces == k.group && other.value(&d.rules) != nil {
			return n
		}
	}
	return nil
}

// over lays what the document says over the rules of its base. A default that
// it leaves to its base is held down to its own maximum.
func (d *document) over(base Rules) Rules {
	out := base
	for _, k := range keys {
		if _, ok := d.set[k.name]; ok {
			k.copy(&out, &d.rules)
		} else if d.replaced(k) != nil {
			k.zero(&out)
		} else {
			k.copy(&out, &base)
		}
	}
	hold(&out.Memory)
	hold(&out.CPUs)
	hold(&out.Pids)
	hold(&out.Swap)
	hold(&out.IO)
	hold(&out.StorageSize)
	return out
}

func hold[T int64 | float64](l *Limit[T]) {
	if l.Max > 0 {
		l.Default = min(l.Default, l.Max)
	}
}

// widenings are what the document allows and its base does not.
func (d *document) widenings(base *Policy) (problems []*Problem) {
	for _, k := range keys {
		n, ok := d.set[k.name]
		if !ok {
			continue
		}
		for _, w := range k.wider(&base.Rules, &d.rules) {
			at := n
			if w.item >= 0 && w.item < len(n.Content) {
				at = n.Content[w.item]
			}
			problems = append(problems, wrong(at, "%s: wider than its base %s: %s%s", k.name, base.Name,
				w.why, base.at(k.name)))
		}
	}
	return problems
}

// at says where a rule stands.
func (p *Policy) at(name string) string {
	o, ok := p.origin[name]
	if !ok {
		return ""
	}
	return fmt.Sprintf(" (%s:%d)", o.File, o.Line)
}

// impossible are values that no sandbox could have.
func (d *document) impossible(base *Policy) (problems []*Problem) {
	r := d.over(base.Rules)
	bad := func(why string, names ...string) {
		for _, name := range names {
			if n, ok := d.set[name]; ok {
				problems = append(problems, wrong(n, "%s: %s", name, why))
				return
			}
		}
	}
	if r.User != "" {
		if uid, _, _ := strings.Cut(r.User, ":"); !r.allowsUID(uid) {
			bad(fmt.Sprintf("the default user %s is not among those allowed", r.User), "user.default",
				"user.uids", "user.non_root")
		}
	}
	if r.NonRoot && len(r.UIDs) == 1 && r.UIDs[0] == (IDRange{}) {
		bad("non_root leaves no user of these", "user.uids", "user.non_root")
	}
	if !r.allowsNetwork(r.Network) && r.Network != "" {
		bad(fmt.Sprintf("the default mode %s is not among those allowed", r.Network),
			"network.default", "network.modes")
	}
	if r.Egress != nil {
		for _, mode := range r.Networks {
			if mode == "bridge" || mode == "host" {
				bad(fmt.Sprintf("they have no effect while network.modes allows %s; allow none and filtered", mode),
					"network.egress", "network.modes")
				break
			}
		}
	}
	if _, err := ParseEgress(EgressText(r.Egress)); err != nil {
		bad(err.Error(), "network.egress") // too many
	}
	if !slices.Contains(r.Seccomp, SeccompDefault) {
		bad("the profile default has to be among those allowed", "seccomp")
	}
	if t, ok := r.allowsEvery(r.Every); !ok {
		bad(fmt.Sprintf("checkpoints by %s are not among the triggers allowed", t), "checkpoints.every",
			"checkpoints.triggers")
	}
	if r.Swap != (Limit[int64]{}) && r.Memory == (Limit[int64]{}) {
		bad("swap has a limit only where memory has one: give limits.memory.default or max",
			"limits.swap.max", "limits.swap.default")
	}
	for _, point := range hookPoints {
		if len(r.Hooks[point]) > maxHooks {
			bad(fmt.Sprintf("more than %d, those of the base among them", maxHooks), "hooks."+point)
		}
	}
	if len(r.Apply.Validators) > maxValidators {
		bad(fmt.Sprintf("more than %d, those of the base among them", maxValidators), "apply.validators")
	}
	if len(r.Apply.Canaries) > maxCanaries {
		bad(fmt.Sprintf("more than %d, those of the base among them", maxCanaries), "apply.canary")
	}
	own := &d.rules
	for _, l := range []struct {
		name string
		over bool
	}{
		{"limits.memory", r.Memory.Max > 0 && own.Memory.Default > r.Memory.Max},
		{"limits.cpus", r.CPUs.Max > 0 && own.CPUs.Default > r.CPUs.Max},
		{"limits.pids", r.Pids.Max > 0 && own.Pids.Default > r.Pids.Max},
		{"limits.swap", r.Swap.Max > 0 && own.Swap.Default > r.Swap.Max},
		{"limits.io", r.IO.Max > 0 && own.IO.Default > r.IO.Max},
		{"limits.storage_size", r.StorageSize.Max > 0 && own.StorageSize.Default > r.StorageSize.Max},
	} {
		if l.over {
			bad("more than the maximum", l.name+".default")
		}
	}
	return problems
}

// ParseCanonical reads what Canonical wrote: the policy of that name, as it was
// then.
func ParseCanonical(name string, data []byte) (*Policy, error) {
	d, err := parse(name, name, data)
	if err != nil {
		return nil, fmt.Errorf("recorded policy %s: %w: %w", name, fault.ErrCorrupt, err)
	}
	p := &Policy{Name: name, File: name, origin: map[string]Origin{}}
	d.inherit(p, &Policy{})
	for k, o := range p.origin {
		o.Line = 0 // of no file
		p.origin[k] = o
	}
	return p, nil
}
