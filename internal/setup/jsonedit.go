package setup

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/tailscale/hujson"

	"github.com/agentbox/agentbox/internal/fault"
)

// checkJSON refuses what is not one valid JSON object, telling where.
func checkJSON(text []byte) error {
	var v any
	if err := json.Unmarshal(text, &v); err != nil {
		var syntax *json.SyntaxError
		if errors.As(err, &syntax) {
			// Offset counts the bytes read, the offending one included.
			return errorAt(text, int(syntax.Offset)-1, "%v", syntax)
		}
		return fmt.Errorf("%v: %w", err, fault.ErrInvalid)
	}
	if _, ok := v.(map[string]any); !ok {
		return fmt.Errorf("the document is not a JSON object: %w", fault.ErrInvalid)
	}
	return nil
}

// errorAt names the line and the column, both from 1, of the byte at offset.
func errorAt(text []byte, offset int, format string, args ...any) error {
	before := text[:min(max(offset, 0), len(text))]
	line := bytes.Count(before, []byte("\n")) + 1
	column := utf8.RuneCount(before[bytes.LastIndexByte(before, '\n')+1:]) + 1
	return fmt.Errorf("line %d, column %d: %s: %w", line, column, fmt.Sprintf(format, args...), fault.ErrInvalid)
}

// A document is a JSON object as a syntax tree that keeps all white space: what
// an edit does not touch keeps its bytes.
type document struct {
	text   []byte // as it was parsed; the tree's offsets are into it
	root   hujson.Value
	top    *hujson.Object
	layout layout
}

func parseDocument(text []byte) (*document, error) {
	// hujson accepts comments and trailing commas, dockerd does not.
	if err := checkJSON(text); err != nil {
		return nil, err
	}
	root, err := hujson.Parse(text)
	if err != nil {
		return nil, fmt.Errorf("%v: %w", err, fault.ErrInvalid)
	}
	top := root.Value.(*hujson.Object)
	return &document{text: text, root: root, top: top, layout: layoutOf(text, top)}, nil
}

func (d *document) object(v hujson.Value) (*hujson.Object, error) {
	o, ok := v.Value.(*hujson.Object)
	if !ok {
		return nil, errorAt(d.text, v.StartOffset, "this must be an object")
	}
	return o, nil
}

// find returns the member's index, or -1. Two members of one name are an error: it does not guess
// which of them an engine takes.
func (d *document) find(o *hujson.Object, key string) (int, error) {
	found := -1
	for i, m := range o.Members {
		if nameOf(m) != key {
			continue
		}
		if found >= 0 {
			return -1, errorAt(d.text, m.Name.StartOffset, "%q is there twice", key)
		}
		found = i
	}
	return found, nil
}

func nameOf(m hujson.ObjectMember) string { return m.Name.Value.(hujson.Literal).String() }

// A layout is how a document is written.
type layout struct {
	nl, unit string
	oneLine  bool
}

func layoutOf(text []byte, top *hujson.Object) layout {
	l := layout{nl: newline(text), unit: "  "}
	if len(top.Members) > 0 {
		space := string(top.Members[0].Name.BeforeExtra)
		if i := strings.LastIndexByte(space, '\n'); i < 0 {
			l.oneLine = true
		} else if space[i+1:] != "" {
			l.unit = space[i+1:]
		}
	}
	return l
}

// object makes an object of one member whose own line is indented by indent.
func (l layout) object(indent, key string, value hujson.ValueTrimmed) *hujson.Object {
	if l.oneLine {
		return &hujson.Object{Members: []hujson.ObjectMember{newMember("", key, value)}}
	}
	return &hujson.Object{
		Members:    []hujson.ObjectMember{newMember(l.nl+indent+l.unit, key, value)},
		AfterExtra: hujson.Extra(l.nl + indent),
	}
}

func newMember(space, key string, value hujson.ValueTrimmed) hujson.ObjectMember {
	return hujson.ObjectMember{
		Name:  hujson.Value{BeforeExtra: hujson.Extra(space), Value: hujson.String(key)},
		Value: hujson.Value{BeforeExtra: hujson.Extra(" "), Value: value},
	}
}

// A valueFunc makes a value whose own line is indented by indent.
type valueFunc func(l layout, indent string) hujson.ValueTrimmed

// insert puts a member behind the last one of the object v, in the way the
// others are written.
func (d *document) insert(v hujson.Value, key string, value valueFunc) {
	l, o := d.layout, v.Value.(*hujson.Object)
	if len(o.Members) == 0 {
		indent := ""
		if !l.oneLine {
			line := d.text[bytes.LastIndexByte(d.text[:v.StartOffset], '\n')+1:]
			indent = string(line[:len(line)-len(bytes.TrimLeft(line, " \t"))])
		}
		*o = *l.object(indent, key, value(l, indent+l.unit))
		return
	}
	space := string(o.Members[len(o.Members)-1].Name.BeforeExtra)
	indent := ""
	if i := strings.LastIndexByte(space, '\n'); i >= 0 {
		indent = space[i+1:]
		space = l.nl + indent
	} else {
		l.oneLine = true
		space = " "
	}
	o.Members = append(o.Members, newMember(space, key, value(l, indent)))
}

// set sets a member of the object v to a string. One that has that value
// already stays as it is written.
func (d *document) set(v hujson.Value, key, value string) error {
	o := v.Value.(*hujson.Object)
	i, err := d.find(o, key)
	if err != nil {
		return err
	}
	if i < 0 {
		d.insert(v, key, func(layout, string) hujson.ValueTrimmed { return hujson.String(value) })
		return nil
	}
	at := &o.Members[i].Value
	if old, ok := at.Value.(hujson.Literal); !ok || old.Kind() != '"' || old.String() != value {
		at.Value = hujson.String(value)
	}
	return nil
}

// cut takes the i-th member of o out.
func cut(o *hujson.Object, i int) {
	switch {
	case len(o.Members) == 1:
		o.AfterExtra = nil
	case i == 0:
		o.Members[1].Name.BeforeExtra = o.Members[0].Name.BeforeExtra
	default:
		o.Members[i-1].Value.AfterExtra = o.Members[i].Value.AfterExtra
	}
	o.Members = slices.Delete(o.Members, i, i+1)
}

// Keys of daemon.json.
const (
	keyRuntimes       = "runtimes"
	keyDefaultRuntime = "default-runtime"
	keyPath           = "path"
)

// addRuntime registers a runtime in the text of a daemon.json. In an existing entry of that name
// only the path changes.
func addRuntime(text []byte, name, path string, makeDefault bool) ([]byte, error) {
	if len(bytes.TrimSpace(text)) == 0 {
		text = []byte("{}\n")
	}
	d, err := parseDocument(text)
	if err != nil {
		return nil, err
	}
	if err := d.addRuntime(name, path); err != nil {
		return nil, err
	}
	if makeDefault {
		if err := d.set(d.root, keyDefaultRuntime, name); err != nil {
			return nil, err
		}
	}
	return d.root.Pack(), nil
}

func (d *document) addRuntime(name, path string) error {
	i, all, err := d.runtimes()
	if err != nil {
		return err
	}
	entry := func(l layout, indent string) hujson.ValueTrimmed {
		return l.object(indent, keyPath, hujson.String(path))
	}
	if i < 0 {
		d.insert(d.root, keyRuntimes, func(l layout, indent string) hujson.ValueTrimmed {
			return l.object(indent, name, entry(l, indent+l.unit))
		})
		return nil
	}

	at := &d.top.Members[i].Value
	if all == nil { // null
		l := d.layout
		at.Value = l.object(l.unit, name, entry(l, l.unit+l.unit))
		return nil
	}

	k, err := d.find(all, name)
	if err != nil {
		return err
	}
	if k < 0 {
		d.insert(*at, name, entry)
		return nil
	}

	one := all.Members[k].Value
	if t, err := d.find(one.Value.(*hujson.Object), "runtimeType"); err != nil {
		return err
	} else if t >= 0 {
		return &fault.Error{
			Hint: "Register agentbox's under another name with --name.",
			Err: fmt.Errorf("the runtime %q is there with a runtimeType, which excludes a path: %w",
				name, fault.ErrExists),
		}
	}
	return d.set(one, keyPath, path)
}

// setDefaultRuntime sets default-runtime; an empty name takes it out.
func setDefaultRuntime(text []byte, name string) ([]byte, error) {
	d, err := parseDocument(text)
	if err != nil {
		return nil, err
	}
	i := -1
	if name != "" {
		err = d.set(d.root, keyDefaultRuntime, name)
	} else if i, err = d.find(d.top, keyDefaultRuntime); i >= 0 {
		cut(d.top, i)
	}
	if err != nil {
		return nil, err
	}
	return d.root.Pack(), nil
}

// removeRuntime takes a runtime out, and default-runtime if it names it. An
// object that gets empty goes, too: dockerd 20.10 panics when it reloads
// "runtimes": {}.
func removeRuntime(text []byte, name string) ([]byte, error) {
	d, err := parseDocument(text)
	if err != nil {
		return nil, err
	}
	i, all, err := d.runtimes()
	if err != nil {
		return nil, err
	}
	if all != nil {
		k, err := d.find(all, name)
		switch {
		case err != nil:
			return nil, err
		case k >= 0 && len(all.Members) > 1:
			cut(all, k)
		case k >= 0:
			cut(d.top, i)
		}
	}
	text = d.root.Pack()
	if c, err := readDaemonConfig(text); err != nil || c.DefaultRuntime != name {
		return text, err
	}
	return setDefaultRuntime(text, "")
}

// runtimes finds "runtimes": its index in the top, or -1, and the object that
// it is, or nil if it is null.
func (d *document) runtimes() (i int, all *hujson.Object, err error) {
	i, err = d.find(d.top, keyRuntimes)
	if err != nil || i < 0 {
		return i, nil, err
	}
	v := d.top.Members[i].Value
	if v.Value.Kind() == 'n' {
		return i, nil, nil
	}
	if all, err = d.object(v); err != nil {
		return i, nil, fmt.Errorf("%q: %w", keyRuntimes, err)
	}
	for _, m := range all.Members {
		if _, err := d.object(m.Value); err != nil {
			return i, nil, fmt.Errorf("runtime %q: %w", nameOf(m), err)
		}
	}
	return i, all, nil
}

// daemonConfig is what setup must know of a daemon.json.
type daemonConfig struct {
	Runtimes map[string]struct {
		Path string `json:"path"`
	} `json:"runtimes"`
	DefaultRuntime string   `json:"default-runtime"`
	Pidfile        string   `json:"pidfile"`
	Hosts          []string `json:"hosts"`

	present map[string]json.RawMessage
}

func readDaemonConfig(doc []byte) (c daemonConfig, err error) {
	if len(bytes.TrimSpace(doc)) == 0 {
		return c, nil
	}
	if err := checkJSON(doc); err != nil {
		return c, err
	}
	// Unlike encoding/json, dockerd takes keys only as they are written.
	if err := json.Unmarshal(doc, &c.present); err != nil {
		return c, fmt.Errorf("%v: %w", err, fault.ErrInvalid)
	}
	for key, to := range map[string]any{
		keyRuntimes: &c.Runtimes, keyDefaultRuntime: &c.DefaultRuntime, "pidfile": &c.Pidfile, "hosts": &c.Hosts,
	} {
		raw, ok := c.present[key]
		if !ok {
			continue
		}
		if err := json.Unmarshal(raw, to); err != nil {
			return c, fmt.Errorf("%q: %v: %w", key, err, fault.ErrInvalid)
		}
	}
	return c, nil
}

// reloadable reports whether a running dockerd survives reading it: 20.10
// panics at a "runtimes" that is empty or null.
func (c daemonConfig) reloadable() bool {
	_, there := c.present[keyRuntimes]
	return !there || len(c.Runtimes) > 0
}
