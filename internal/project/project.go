// Package project reads .agentbox.yaml, the file in which a directory says what a sandbox over it
// needs. The file may have come with the directory from elsewhere, so each value in it is only a
// request: Words tells a person what it asks for, and Trust remembers the answer.
package project

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"
	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/internal/lazy"
	"github.com/agentbox/agentbox/policy"
)

// Name is the name of the file.
const Name = ".agentbox.yaml"

// Bounds of what is read.
const (
	maxFile   = 64 << 10
	maxValues = 256 // of a list or a mapping
)

// File is the content of a .agentbox.yaml. The keys mean what the flags of the same name do; the
// schema is docs/agentbox.schema.json.
type File struct {
	Image   string            `json:"image,omitempty"`
	Memory  string            `json:"memory,omitempty"`
	CPUs    string            `json:"cpus,omitempty"` // a number
	Network string            `json:"network,omitempty"`
	Egress  []string          `json:"egress,omitempty"`
	Env     map[string]string `json:"env,omitempty"`
	Secrets map[string]string `json:"secrets,omitempty"` // name -> file:PATH or env:VARIABLE
	// Apply is no wish of a sandbox: the engine reads it again for each apply to the directory.
	Apply policy.Apply `json:"apply,omitzero"`
}

// A key is one key of the file.
type key struct {
	name string
	read func(*File, string, *yaml.Node) error
}

// keys are in the order in which Words has them.
var keys = []key{
	{"image", func(f *File, name string, n *yaml.Node) error { return text(name, n, &f.Image) }},
	{"memory", func(f *File, name string, n *yaml.Node) error { return text(name, n, &f.Memory) }},
	{"cpus", func(f *File, name string, n *yaml.Node) error { return number(name, n, &f.CPUs) }},
	{"network", func(f *File, name string, n *yaml.Node) error { return choice(name, n, &f.Network, networks) }},
	{"egress", func(f *File, name string, n *yaml.Node) error { return texts(name, n, &f.Egress) }},
	{"env", func(f *File, name string, n *yaml.Node) error { return pairs(name, n, &f.Env, variable()) }},
	{"secrets", func(f *File, name string, n *yaml.Node) error { return sources(name, n, &f.Secrets) }},
	{"apply", func(f *File, _ string, n *yaml.Node) error { return applying(n, &f.Apply) }},
}

// networks are the modes of a network.
var networks = []string{"none", "host", "bridge", "filtered"}

// Read reads the file in a directory; nil: there is none. It follows no symlink out of the
// directory.
func Read(dir string) ([]byte, error) {
	root, err := os.OpenRoot(dir)
	if err != nil {
		return nil, err
	}
	defer root.Close()
	f, err := root.OpenFile(Name, os.O_RDONLY|unix.O_NONBLOCK, 0)
	if errors.Is(err, fs.ErrNotExist) {
		if _, lerr := root.Lstat(Name); errors.Is(lerr, fs.ErrNotExist) {
			return nil, nil
		}
	}
	if err != nil {
		return nil, err
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if !st.Mode().IsRegular() {
		return nil, fmt.Errorf("%w: %s is not a regular file", fault.ErrInvalid, Name)
	}
	data, err := io.ReadAll(io.LimitReader(f, maxFile+1))
	if err == nil && len(data) > maxFile {
		err = fmt.Errorf("%w: %s is larger than %d bytes", fault.ErrInvalid, Name, maxFile)
	}
	if data == nil {
		data = []byte{}
	}
	return data, err
}

// Parse reads the content of a file. Unknown keys and values of another type are errors, with
// their lines.
func Parse(data []byte) (File, error) {
	var f File
	dec := yaml.NewDecoder(bytes.NewReader(data))
	var doc, more yaml.Node
	if err := dec.Decode(&doc); errors.Is(err, io.EOF) {
		return f, nil
	} else if err != nil {
		return f, syntax(err)
	}
	if err := dec.Decode(&more); err == nil {
		return f, wrong(&more, "a second document")
	} else if !errors.Is(err, io.EOF) {
		return f, syntax(err)
	}
	top := doc.Content[0]
	if top.Kind == yaml.ScalarNode && top.Tag == "!!null" { // comments only
		return f, nil
	}
	err := each("the file", top, func(at, value *yaml.Node) error {
		i := slices.IndexFunc(keys, func(k key) bool { return k.name == at.Value })
		if i < 0 {
			return wrong(at, "unknown key %.80q; known are %s", at.Value, strings.Join(known(), ", "))
		}
		return keys[i].read(&f, at.Value, value)
	})
	return f, err
}

func known() (names []string) {
	for _, k := range keys {
		names = append(names, k.name)
	}
	return names
}

// A problem is what is wrong in a file, with its line. It wraps ErrInvalid.
type problem struct {
	line int
	text string
}

func (p *problem) Error() string { return fmt.Sprintf("%s:%d: %s", Name, p.line, p.text) }
func (p *problem) Unwrap() error { return fault.ErrInvalid }

func wrong(n *yaml.Node, format string, args ...any) error {
	return &problem{max(n.Line, 1), fmt.Sprintf(format, args...)}
}

var lineRE = lazy.Regexp(`^line (\d+): (?s:(.*))$`)

// syntax tells an error of the library, "yaml: line 3: ...", as the others.
func syntax(err error) error {
	p := &problem{1, strings.TrimPrefix(err.Error(), "yaml: ")}
	if m := lineRE().FindStringSubmatch(p.text); m != nil {
		p.line, _ = strconv.Atoi(m[1]) // digits
		p.text = m[2]
	}
	return p
}

// each calls fn for the keys of a mapping.
func each(name string, n *yaml.Node, fn func(key, value *yaml.Node) error) error {
	if n.Kind != yaml.MappingNode || n.Anchor != "" {
		return wrong(n, "%s: not a mapping of keys to values", name)
	}
	if len(n.Content) > 2*maxValues {
		return wrong(n, "%s: more than %d keys", name, maxValues)
	}
	var errs []error
	seen := map[string]bool{}
	for i := 0; i+1 < len(n.Content); i += 2 {
		key := n.Content[i]
		switch {
		case key.Kind != yaml.ScalarNode || key.Anchor != "" || key.Value == "" || key.Tag == "!!merge":
			errs = append(errs, wrong(key, "%s: not a key", name))
		case seen[key.Value]:
			errs = append(errs, wrong(key, "%.80q stands here a second time", key.Value))
		default:
			seen[key.Value] = true
			errs = append(errs, fn(key, n.Content[i+1]))
		}
	}
	return errors.Join(errs...)
}

const quotes = `a text; write it "in quotes"`

// plain returns a single value of one of the types.
func plain(name string, n *yaml.Node, want string, tags ...string) (string, error) {
	if n.Kind != yaml.ScalarNode || n.Anchor != "" || !slices.Contains(tags, n.ShortTag()) {
		return "", wrong(n, "%s: not %s", name, want)
	}
	return n.Value, nil
}

func text(name string, n *yaml.Node, to *string) (err error) {
	if *to, err = plain(name, n, quotes, "!!str"); err == nil && *to == "" {
		err = wrong(n, "%s: empty", name)
	}
	return err
}

func choice(name string, n *yaml.Node, to *string, words []string) error {
	if err := text(name, n, to); err != nil {
		return err
	}
	if !slices.Contains(words, *to) {
		return wrong(n, "%s: %.80q is none of %s", name, *to, strings.Join(words, ", "))
	}
	return nil
}

func number(name string, n *yaml.Node, to *string) (err error) {
	*to, err = plain(name, n, "a number", "!!int", "!!float")
	return err
}

func texts(name string, n *yaml.Node, to *[]string) error {
	if n.Kind != yaml.SequenceNode || n.Anchor != "" {
		return wrong(n, "%s: not a list", name)
	}
	if len(n.Content) > maxValues {
		return wrong(n, "%s: more than %d values", name, maxValues)
	}
	*to = make([]string, len(n.Content))
	var errs []error
	for i, item := range n.Content {
		errs = append(errs, text(name, item, &(*to)[i]))
	}
	return errors.Join(errs...)
}

// The names of variables and of secrets.
var (
	variable = lazy.Regexp(`^[A-Za-z_][A-Za-z0-9_]*$`)
	secret   = lazy.Regexp(`^[A-Za-z0-9][A-Za-z0-9_.-]*$`)
)

func pairs(name string, n *yaml.Node, to *map[string]string, names *regexp.Regexp) error {
	*to = map[string]string{}
	return each(name, n, func(key, value *yaml.Node) (err error) {
		if !names.MatchString(key.Value) {
			return wrong(key, "%s: %.80q is not a name", name, key.Value)
		}
		(*to)[key.Value], err = plain(name+"."+key.Value, value, quotes, "!!str")
		return err
	})
}

// sources reads where secrets come from.
func sources(name string, n *yaml.Node, to *map[string]string) error {
	if err := pairs(name, n, to, secret()); err != nil {
		return err
	}
	return each(name, n, func(key, value *yaml.Node) error {
		kind, from, _ := strings.Cut(value.Value, ":")
		if kind != "file" && kind != "env" || from == "" {
			return wrong(value, "%s.%s: write file:PATH or env:VARIABLE", name, key.Value)
		}
		return nil
	})
}

// applying reads the rules of an apply, which are as in a policy.
func applying(n *yaml.Node, to *policy.Apply) error {
	rules, problems := policy.ParseApply(n)
	var errs []error
	for _, p := range problems {
		errs = append(errs, &problem{p.Line, p.Err.Error()})
	}
	*to = rules
	return errors.Join(errs...)
}

// Words tells what a file asks for, one line each. Control characters of its values are escaped:
// a terminal shows what there is.
func (f File) Words() (lines []string) {
	add := func(format string, args ...any) { lines = append(lines, fmt.Sprintf(format, args...)) }
	if f.Image != "" {
		add("runs the image %s", visible(f.Image))
	}
	if f.Memory != "" {
		add("may use %s of memory", visible(f.Memory))
	}
	if f.CPUs != "" {
		add("may use %s cores", visible(f.CPUs))
	}
	if f.Network != "" {
		add("has the network %s", visible(f.Network))
	}
	if f.Egress != nil && len(f.Egress) == 0 {
		add("reaches no other host")
	}
	for _, rule := range f.Egress {
		add("reaches %s", visible(rule))
	}
	for _, name := range slices.Sorted(maps.Keys(f.Env)) {
		add("sets the variable %s to %s", visible(name), visible(f.Env[name]))
	}
	for _, name := range slices.Sorted(maps.Keys(f.Secrets)) {
		from, source := "file", f.Secrets[name]
		if kind, value, ok := strings.Cut(source, ":"); ok {
			source = value
			if kind == "env" {
				from = "variable"
			}
		}
		add("reads the secret %s from your %s %s", visible(name), from, visible(source))
	}
	return lines
}

// visible is text without what a terminal would obey or hide.
func visible(s string) string {
	if q := strconv.QuoteToGraphic(s); q != `"`+s+`"` || s == "" {
		return q
	}
	return s
}
