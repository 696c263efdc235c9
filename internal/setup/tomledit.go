package setup

import (
	"bytes"
	"errors"
	"fmt"
	"math"
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/pelletier/go-toml/v2"
	"github.com/pelletier/go-toml/v2/unstable"

	"github.com/agentbox/agentbox/internal/fault"
)

// Setup's part of a TOML document stands between two comments, so that it can be told from what
// others wrote, and all else keeps its bytes. Every edit is proven on the decoded documents:
// prove.

func beginMark(engine, name string) string {
	return fmt.Sprintf("# agentbox setup %s, runtime %s: begin (`agentbox setup %s --remove` takes this out)", engine,
		name, engine)
}

func endMark(engine, name string) string {
	return fmt.Sprintf("# agentbox setup %s, runtime %s: end", engine, name)
}

func decodeTOML(doc []byte) (map[string]any, error) {
	tree := map[string]any{}
	err := toml.Unmarshal(doc, &tree)
	var at *toml.DecodeError
	switch {
	case errors.As(err, &at):
		line, column := at.Position()
		return nil, fmt.Errorf("line %d, column %d: %v: %w", line, column, at, fault.ErrInvalid)
	case err != nil:
		return nil, fmt.Errorf("%v: %w", err, fault.ErrInvalid)
	}
	return tree, nil
}

// lookup finds what stands at a path; ok is false if nothing does.
func lookup(tree map[string]any, path ...string) (v any, ok bool) {
	v = tree
	for _, key := range path {
		m, isTable := v.(map[string]any)
		if !isTable {
			return nil, false
		}
		if v, ok = m[key]; !ok {
			return nil, false
		}
	}
	return v, true
}

// prune takes out what stands at a path, and the tables that are empty then:
// a header makes the tables above it.
func prune(tree map[string]any, path ...string) {
	if len(path) > 1 {
		if sub, ok := tree[path[0]].(map[string]any); ok {
			prune(sub, path[1:]...)
			if len(sub) > 0 {
				return
			}
		} else {
			return
		}
	}
	delete(tree, path[0])
}

// prove refuses an edit that changed anything but what stands at path.
func prove(before, after []byte, path ...string) error {
	old, err := decodeTOML(before)
	if err != nil {
		return err
	}
	now, err := decodeTOML(after)
	if err != nil {
		return fmt.Errorf("the edit does not fit what is there: %w", err)
	}
	prune(old, path...)
	prune(now, path...)
	if !same(old, now) {
		return fmt.Errorf("the edit would change more than %s: %w", strings.Join(path, "."), fault.ErrState)
	}
	return nil
}

// same is reflect.DeepEqual, except that a NaN equals itself.
func same(a, b any) bool {
	switch a := a.(type) {
	case map[string]any:
		b, ok := b.(map[string]any)
		if !ok || len(a) != len(b) {
			return false
		}
		for k, v := range a {
			w, ok := b[k]
			if !ok || !same(v, w) {
				return false
			}
		}
		return true
	case []any:
		b, ok := b.([]any)
		return ok && slices.EqualFunc(a, b, same)
	case float64:
		b, ok := b.(float64)
		return ok && (a == b || math.IsNaN(a) && math.IsNaN(b))
	case time.Time:
		b, ok := b.(time.Time)
		return ok && a.Equal(b)
	}
	return reflect.DeepEqual(a, b)
}

// newline is how the document ends its lines.
func newline(doc []byte) string {
	if bytes.Contains(doc, []byte("\r\n")) {
		return "\r\n"
	}
	return "\n"
}

// splice replaces doc[from:to].
func splice(doc []byte, from, to int, text string) []byte {
	return slices.Replace(slices.Clone(doc), from, to, []byte(text)...)
}

// block is lines between the marks.
func block(nl, engine, name string, lines []string) string {
	all := append(append([]string{beginMark(engine, name)}, lines...), endMark(engine, name))
	return strings.Join(all, nl) + nl
}

// findBlock finds the lines of our block, marks included.
func findBlock(doc []byte, engine, name string) (from, to int, ok bool) {
	from, to = -1, -1
	for at := 0; at < len(doc); {
		end := bytes.IndexByte(doc[at:], '\n')
		if end < 0 {
			end = len(doc)
		} else {
			end += at + 1
		}
		switch strings.TrimSpace(string(doc[at:end])) {
		case beginMark(engine, name):
			from = at
		case endMark(engine, name):
			if from >= 0 {
				return from, end, true
			}
		}
		at = end
	}
	return 0, 0, false
}

// appendBlock puts a block at the end, behind an empty line.
func appendBlock(doc []byte, engine, name string, lines []string) []byte {
	nl := newline(doc)
	out := bytes.Clone(doc)
	if len(out) > 0 {
		if !bytes.HasSuffix(out, []byte("\n")) {
			out = append(out, nl...)
		}
		out = append(out, nl...)
	}
	return append(out, block(nl, engine, name, lines)...)
}

// cutBlock takes our block out, with the empty line that was put before it.
func cutBlock(doc []byte, engine, name string) ([]byte, bool) {
	from, to, ok := findBlock(doc, engine, name)
	if !ok {
		return doc, false
	}
	if before := strings.TrimSuffix(strings.TrimSuffix(string(doc[:from]), "\n"), "\r"); to == len(doc) &&
		(before == "" || strings.HasSuffix(before, "\n")) {
		from = len(before)
	}
	return splice(doc, from, to, ""), true
}

// An item is a table header or a key with its value, with its full path.
type item struct {
	path  []string
	table bool
	value unstable.Range // of a string; else of length 0
	end   int            // the header's last key ends here
}

// items lists what a document says, in its order.
func items(doc []byte) (all []item, err error) {
	var p unstable.Parser
	p.Reset(doc)
	var table []string
	for p.NextExpression() {
		e := p.Expression()
		var path []string
		end := 0
		for it := e.Key(); it.Next(); {
			path = append(path, string(it.Node().Data))
			end = int(it.Node().Raw.Offset + it.Node().Raw.Length)
		}
		switch e.Kind {
		case unstable.Table:
			table = path
			all = append(all, item{path: path, table: true, end: end})
		case unstable.ArrayTable:
			// Its keys are below an element, which no path of ours names.
			table = append(path, "")
		case unstable.KeyValue:
			one := item{path: append(slices.Clone(table), path...)}
			if v := e.Value(); v.Kind == unstable.String {
				one.value = v.Raw
			}
			all = append(all, one)
		}
	}
	return all, p.Error()
}

// setString replaces the string that stands at path; ok is false if it is
// written in a way that this does not find (an inline table).
func setString(doc []byte, value string, path ...string) (_ []byte, ok bool, err error) {
	all, err := items(doc)
	if err != nil {
		return nil, false, err
	}
	for _, it := range all {
		if !it.table && it.value.Length > 0 && slices.Equal(it.path, path) {
			return splice(doc, int(it.value.Offset), int(it.value.Offset+it.value.Length), quoteTOML(value)), true, nil
		}
	}
	return doc, false, nil
}

// insertBelow puts a block directly below a table's header; ok is false if
// the table has no header of its own.
func insertBelow(doc []byte, engine, name string, lines []string, path ...string) (_ []byte, ok bool, err error) {
	all, err := items(doc)
	if err != nil {
		return nil, false, err
	}
	for _, it := range all {
		if !it.table || !slices.Equal(it.path, path) {
			continue
		}
		nl := newline(doc)
		end := bytes.IndexByte(doc[it.end:], '\n')
		if end < 0 {
			return append(append(bytes.Clone(doc), nl...), block(nl, engine, name, lines)...), true, nil
		}
		return splice(doc, it.end+end+1, it.end+end+1, block(nl, engine, name, lines)), true, nil
	}
	return doc, false, nil
}

// quoteTOML writes a string; what is no printable character is refused long
// before (checkRuntime).
func quoteTOML(s string) string {
	return `"` + strings.NewReplacer(`\`, `\\`, `"`, `\"`).Replace(s) + `"`
}

// header writes a table's header.
func header(path ...string) string {
	parts := make([]string, len(path))
	for i, key := range path {
		parts[i] = key
		if strings.ContainsFunc(key, func(r rune) bool {
			return (r < 'a' || r > 'z') && (r < 'A' || r > 'Z') && (r < '0' || r > '9') && r != '_' && r != '-'
		}) {
			parts[i] = quoteTOML(key)
		}
	}
	return "[" + strings.Join(parts, ".") + "]"
}
