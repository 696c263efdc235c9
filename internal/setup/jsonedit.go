package setup

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"unicode/utf8"

	"github.com/agentbox/agentbox/internal/fault"
)

// The edits below work on the text of a JSON document, so that all that they
// do not touch stays as its author wrote it. They rely on the document being
// valid; checkJSON says so first.

// checkJSON refuses what is not one valid JSON object, telling where.
func checkJSON(doc []byte) error {
	var v any
	if err := json.Unmarshal(doc, &v); err != nil {
		var syntax *json.SyntaxError
		if errors.As(err, &syntax) {
			// Offset counts the bytes read, the offending one included.
			line, column := position(doc, int(syntax.Offset)-1)
			return fmt.Errorf("line %d, column %d: %v: %w", line, column, syntax, fault.ErrInvalid)
		}
		return fmt.Errorf("%v: %w", err, fault.ErrInvalid)
	}
	if _, ok := v.(map[string]any); !ok {
		return fmt.Errorf("the document is not a JSON object: %w", fault.ErrInvalid)
	}
	return nil
}

// position is the line and the column, both from 1, of a byte.
func position(doc []byte, at int) (line, column int) {
	at = min(max(at, 0), len(doc))
	before := doc[:at]
	start := bytes.LastIndexByte(before, '\n') + 1
	return bytes.Count(before, []byte("\n")) + 1, utf8.RuneCount(before[start:]) + 1
}

// A member of an object, as offsets into the document.
type member struct {
	key        string
	keyStart   int
	start, end int // of the value
}

// An object of a document, as offsets into it.
type object struct {
	open, shut int // its braces
	members    []member
}

// find returns the member's index, or -1. Two members of one name are an error: it does not guess
// which of them an engine takes.
func (o object) find(doc []byte, key string) (int, error) {
	found := -1
	for i, m := range o.members {
		if m.key != key {
			continue
		}
		if found >= 0 {
			line, column := position(doc, m.keyStart)
			return -1, fmt.Errorf("line %d, column %d: %q is there twice: %w", line, column, key, fault.ErrInvalid)
		}
		found = i
	}
	return found, nil
}

func skipSpace(doc []byte, i int) int {
	for i < len(doc) && strings.IndexByte(" \t\r\n", doc[i]) >= 0 {
		i++
	}
	return i
}

func skipString(doc []byte, i int) int {
	for i++; doc[i] != '"'; i++ {
		if doc[i] == '\\' {
			i++
		}
	}
	return i + 1
}

// skipValue returns the offset behind the value that starts at i.
func skipValue(doc []byte, i int) int {
	depth := 0
	for i < len(doc) {
		switch doc[i] {
		case '"':
			i = skipString(doc, i)
		case '{', '[':
			depth++
			i++
		case '}', ']':
			if depth == 0 {
				return i // behind a number or a word
			}
			depth--
			i++
		case ',', ' ', '\t', '\r', '\n':
			if depth == 0 {
				return i
			}
			i++
			continue
		default: // of a number or a word; within a container also a colon
			i++
			if depth == 0 {
				continue
			}
		}
		if depth == 0 {
			return i
		}
	}
	return i
}

// scanObject takes the object apart that starts at i or behind the space there.
func scanObject(doc []byte, i int) (object, error) {
	i = skipSpace(doc, i)
	if i >= len(doc) || doc[i] != '{' {
		line, column := position(doc, i)
		return object{}, fmt.Errorf("line %d, column %d: this must be an object: %w", line, column, fault.ErrInvalid)
	}
	o := object{open: i}
	for i = skipSpace(doc, i+1); doc[i] != '}'; i = skipSpace(doc, i) {
		if doc[i] == ',' {
			i++
			continue
		}
		m := member{keyStart: i}
		i = skipString(doc, i)
		if err := json.Unmarshal(doc[m.keyStart:i], &m.key); err != nil {
			return object{}, err
		}
		i = skipSpace(doc, i) + 1 // the colon
		m.start = skipSpace(doc, i)
		m.end = skipValue(doc, m.start)
		i = m.end
		o.members = append(o.members, m)
	}
	o.shut = i
	return o, nil
}

// A layout is how a document is written.
type layout struct {
	nl, unit string
	oneLine  bool
}

func layoutOf(doc []byte, top object) layout {
	l := layout{nl: "\n", unit: "  "}
	if bytes.Contains(doc, []byte("\r\n")) {
		l.nl = "\r\n"
	}
	if len(top.members) > 0 {
		space := string(doc[top.open+1 : top.members[0].keyStart])
		if i := strings.LastIndexByte(space, '\n'); i < 0 {
			l.oneLine = true
		} else if space[i+1:] != "" {
			l.unit = space[i+1:]
		}
	}
	return l
}

// object writes an object of one member whose own line is indented by indent.
func (l layout) object(indent, key, value string) string {
	if l.oneLine {
		return "{" + quote(key) + ": " + value + "}"
	}
	return "{" + l.nl + indent + l.unit + quote(key) + ": " + value + l.nl + indent + "}"
}

func quote(s string) string {
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	_ = enc.Encode(s) // strings can be encoded
	return strings.TrimSuffix(b.String(), "\n")
}

// splice replaces doc[from:to].
func splice(doc []byte, from, to int, text string) []byte {
	out := make([]byte, 0, len(doc)+len(text)-(to-from))
	out = append(out, doc[:from]...)
	out = append(out, text...)
	return append(out, doc[to:]...)
}

// A valueFunc writes a value whose own line is indented by indent.
type valueFunc func(l layout, indent string) string

func plain(value string) valueFunc { return func(layout, string) string { return value } }

// insert puts a member behind the last one of o, in the way the others are
// written.
func (l layout) insert(doc []byte, o object, key string, value valueFunc) []byte {
	if len(o.members) == 0 {
		indent := ""
		if line := bytes.LastIndexByte(doc[:o.open], '\n') + 1; !l.oneLine {
			indent = string(doc[line : line+len(doc[line:])-len(bytes.TrimLeft(doc[line:], " \t"))])
		}
		return splice(doc, o.open, o.shut+1, l.object(indent, key, value(l, indent+l.unit)))
	}
	last := o.members[len(o.members)-1]
	before := o.open
	if n := len(o.members); n > 1 {
		before = o.members[n-2].end + bytes.IndexByte(doc[o.members[n-2].end:], ',')
	}
	space := string(doc[before+1 : last.keyStart])
	indent := ""
	if i := strings.LastIndexByte(space, '\n'); i >= 0 {
		indent = space[i+1:]
		space = l.nl + indent
	} else {
		l.oneLine = true
		space = " "
	}
	return splice(doc, last.end, last.end, ","+space+quote(key)+": "+value(l, indent))
}

// cut takes the i-th member of o out.
func cut(doc []byte, o object, i int) []byte {
	switch {
	case len(o.members) == 1:
		return splice(doc, o.open+1, o.shut, "")
	case i == 0:
		return splice(doc, o.members[0].keyStart, o.members[1].keyStart, "")
	}
	return splice(doc, o.members[i-1].end, o.members[i].end, "")
}

// Keys of daemon.json.
const (
	keyRuntimes       = "runtimes"
	keyDefaultRuntime = "default-runtime"
	keyPath           = "path"
)

// addRuntime registers a runtime in the text of a daemon.json. In an existing entry of that name
// only the path changes.
func addRuntime(doc []byte, name, path string, makeDefault bool) ([]byte, error) {
	if len(bytes.TrimSpace(doc)) == 0 {
		doc = []byte("{}\n")
	}
	top, all, err := runtimesOf(doc)
	if err != nil {
		return nil, err
	}
	l := layoutOf(doc, top)
	entry := func(l layout, indent string) string { return l.object(indent, keyPath, quote(path)) }
	switch i, err := top.find(doc, keyRuntimes); {
	case err != nil:
		return nil, err
	case i < 0:
		doc = l.insert(doc, top, keyRuntimes, func(l layout, indent string) string {
			return l.object(indent, name, entry(l, indent+l.unit))
		})
	case all == nil: // null
		doc = splice(doc, top.members[i].start, top.members[i].end, l.object(l.unit, name, entry(l, l.unit+l.unit)))
	default:
		if doc, err = l.addEntry(doc, *all, name, path, entry); err != nil {
			return nil, err
		}
	}
	if makeDefault {
		return setDefaultRuntime(doc, name)
	}
	return doc, nil
}

func (l layout) addEntry(doc []byte, all object, name, path string, entry valueFunc) ([]byte, error) {
	i, err := all.find(doc, name)
	if err != nil {
		return nil, err
	}
	if i < 0 {
		return l.insert(doc, all, name, entry), nil
	}
	one, err := scanObject(doc, all.members[i].start)
	if err != nil {
		return nil, err
	}
	if t, err := one.find(doc, "runtimeType"); err != nil {
		return nil, err
	} else if t >= 0 {
		return nil, &fault.Error{
			Hint: "Register agentbox's under another name with --name.",
			Err:  fmt.Errorf("the runtime %q is there with a runtimeType, which excludes a path: %w", name, fault.ErrExists),
		}
	}
	p, err := one.find(doc, keyPath)
	switch {
	case err != nil:
		return nil, err
	case p < 0:
		return l.insert(doc, one, keyPath, plain(quote(path))), nil
	}
	var old any
	if err := json.Unmarshal(doc[one.members[p].start:one.members[p].end], &old); err != nil {
		return nil, err
	}
	if old == path {
		return doc, nil
	}
	return splice(doc, one.members[p].start, one.members[p].end, quote(path)), nil
}

// setDefaultRuntime sets default-runtime; an empty name takes it out.
func setDefaultRuntime(doc []byte, name string) ([]byte, error) {
	top, err := scanObject(doc, 0)
	if err != nil {
		return nil, err
	}
	i, err := top.find(doc, keyDefaultRuntime)
	switch {
	case err != nil:
		return nil, err
	case i >= 0 && name == "":
		return cut(doc, top, i), nil
	case i >= 0:
		var old any
		if err := json.Unmarshal(doc[top.members[i].start:top.members[i].end], &old); err != nil {
			return nil, err
		}
		if old == name {
			return doc, nil
		}
		return splice(doc, top.members[i].start, top.members[i].end, quote(name)), nil
	case name == "":
		return doc, nil
	}
	return layoutOf(doc, top).insert(doc, top, keyDefaultRuntime, plain(quote(name))), nil
}

// removeRuntime takes a runtime out, and default-runtime if it names it. An
// object that gets empty goes, too: dockerd 20.10 panics when it reloads
// "runtimes": {}.
func removeRuntime(doc []byte, name string) ([]byte, error) {
	top, all, err := runtimesOf(doc)
	if err != nil {
		return nil, err
	}
	if all != nil {
		i, err := all.find(doc, name)
		switch {
		case err != nil:
			return nil, err
		case i >= 0 && len(all.members) > 1:
			doc = cut(doc, *all, i)
		case i >= 0:
			if i, err = top.find(doc, keyRuntimes); err != nil {
				return nil, err
			}
			doc = cut(doc, top, i)
		}
	}
	if d, err := readDaemonConfig(doc); err != nil || d.DefaultRuntime != name {
		return doc, err
	}
	return setDefaultRuntime(doc, "")
}

// runtimesOf takes the document and its "runtimes" apart, which is nil when
// it is missing or null.
func runtimesOf(doc []byte) (top object, all *object, err error) {
	if err := checkJSON(doc); err != nil {
		return top, nil, err
	}
	if top, err = scanObject(doc, 0); err != nil {
		return top, nil, err
	}
	i, err := top.find(doc, keyRuntimes)
	if err != nil || i < 0 {
		return top, nil, err
	}
	if string(doc[top.members[i].start:top.members[i].end]) == "null" {
		return top, nil, nil
	}
	o, err := scanObject(doc, top.members[i].start)
	if err != nil {
		return top, nil, fmt.Errorf("%q: %w", keyRuntimes, err)
	}
	for _, m := range o.members {
		if _, err := scanObject(doc, m.start); err != nil {
			return top, nil, fmt.Errorf("runtime %q: %w", m.key, err)
		}
	}
	return top, &o, nil
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
	for key, to := range map[string]any{keyRuntimes: &c.Runtimes, keyDefaultRuntime: &c.DefaultRuntime, "pidfile": &c.Pidfile, "hosts": &c.Hosts} {
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
