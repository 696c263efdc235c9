package policy

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/internal/lazy"
)

// maxFile bounds a policy file.
const maxFile = 256 << 10

// errLater is what a policy may say one day. Accepting it today would promise
// what nothing keeps.
var errLater = fmt.Errorf("not supported yet: %w", fault.ErrUnsupported)

// A Problem is one thing that is wrong with a policy file.
type Problem struct {
	File         string
	Line, Column int
	Err          error // wraps a sentinel
}

func (p *Problem) Error() string {
	return fmt.Sprintf("%s:%d:%d: %v", p.File, p.Line, p.Column, p.Err)
}
func (p *Problem) Unwrap() error { return p.Err }

// Problems are all that is wrong with a policy file, in its order.
type Problems []*Problem

func (l Problems) Error() string {
	var b strings.Builder
	for i, p := range l {
		if i > 0 {
			b.WriteByte('\n')
		}
		b.WriteString(p.Error())
	}
	return b.String()
}

// Unwrap makes the first one decide.
func (l Problems) Unwrap() []error {
	var errs []error
	for _, p := range l {
		errs = append(errs, p)
	}
	return errs
}

func problem(n *yaml.Node, err error) *Problem {
	return &Problem{Line: max(n.Line, 1), Column: max(n.Column, 1), Err: err}
}

// wrong is a problem of a value or a key.
func wrong(n *yaml.Node, format string, args ...any) *Problem {
	text := fmt.Errorf(format, args...)
	for _, a := range args {
		if err, ok := a.(error); ok && errors.Is(err, fault.ErrUnsupported) {
			return problem(n, &sentinel{text.Error(), fault.ErrUnsupported})
		}
	}
	return problem(n, &sentinel{text.Error(), fault.ErrInvalid})
}

// unsupported is a problem of what is right and not done yet.
func unsupported(n *yaml.Node, format string, args ...any) *Problem {
	return problem(n, fmt.Errorf(format+": %w", append(args, errLater)...))
}

// A sentinel is a sentence that already says what its sentinel means.
type sentinel struct {
	text string
	is   error
}

func (e *sentinel) Error() string { return e.text }
func (e *sentinel) Unwrap() error { return e.is }

// A document is one file, read and checked by itself.
type document struct {
	name, file  string
	base        string
	baseAt      *yaml.Node
	description string
	rules       Rules
	set         map[string]*yaml.Node // the values that it has, by their key
}

// parse reads a file. On error it returns the part that is right.
func parse(name, file string, data []byte) (*document, error) {
	d := &document{name: name, file: file, set: map[string]*yaml.Node{}}
	problems := d.parse(data)
	for _, p := range problems {
		p.File = file
	}
	if len(problems) > 0 {
		slices.SortStableFunc(problems, func(a, b *Problem) int {
			if a.Line != b.Line {
				return a.Line - b.Line
			}
			return a.Column - b.Column
		})
		return d, problems
	}
	return d, nil
}

func (d *document) parse(data []byte) Problems {
	top := &yaml.Node{Line: 1, Column: 1}
	if len(data) > maxFile {
		return Problems{wrong(top, "larger than %d bytes", maxFile)}
	}
	dec := yaml.NewDecoder(bytes.NewReader(data))
	var doc, more yaml.Node
	if err := dec.Decode(&doc); errors.Is(err, io.EOF) {
		return nil // empty, or comments only: what its base says
	} else if err != nil {
		return Problems{syntax(err)}
	}
	if err := dec.Decode(&more); err == nil {
		return Problems{wrong(&more, "a second document; a policy is one")}
	} else if !errors.Is(err, io.EOF) {
		return Problems{syntax(err)}
	}
	return d.mapping(doc.Content[0], "")
}

// mapping reads the keys below prefix.
func (d *document) mapping(n *yaml.Node, prefix string) (problems Problems) {
	if n.Kind != yaml.MappingNode || n.Anchor != "" {
		what := strings.TrimSuffix(prefix, ".")
		if what == "" {
			what = "a policy"
		}
		return Problems{wrong(n, "%s: not a mapping of keys to values", what)}
	}
	seen := map[string]bool{}
	for i := 0; i+1 < len(n.Content); i += 2 {
		at, value := n.Content[i], n.Content[i+1]
		word, p := scalar(at, "a key")
		if p != nil {
			problems = append(problems, p)
			continue
		}
		name := prefix + word
		if seen[name] {
			problems = append(problems, wrong(at, "%s stands here a second time", name))
			continue
		}
		seen[name] = true
		k := slices.IndexFunc(keys, func(k key) bool { return k.name == name })
		switch {
		case name == "base" || name == "description":
			if s, p := scalar(value, name); p != nil {
				problems = append(problems, p)
			} else if name == "description" {
				d.description = s
			} else if d.base, d.baseAt = s, value; !nameRE().MatchString(s) {
				problems = append(problems, wrong(value, "base: %.80q is no name of a policy", s))
			}
		case k >= 0:
			found := keys[k].read(&d.rules, value)
			problems = append(problems, found...)
			if len(found) == 0 {
				d.set[name] = value
			}
		case isSection(name):
			problems = append(problems, d.mapping(value, name+".")...)
		default:
			problems = append(problems, wrong(at, "unknown key %.80q%s", name, didYouMean(word, known(prefix))))
		}
	}
	return problems
}

// scalar is the text of a plain value. "yes" is a text, and so is 512.
func scalar(n *yaml.Node, name string) (string, *Problem) {
	switch {
	case n.Kind == yaml.AliasNode || n.Anchor != "":
		return "", wrong(n, "%s: anchors and aliases are not for policies", name)
	case n.Kind != yaml.ScalarNode:
		return "", wrong(n, "%s: not a single value", name)
	case n.Tag == "!!null" || n.Value == "":
		return "", wrong(n, "%s: empty", name)
	}
	return n.Value, nil
}

func isSection(name string) bool {
	return slices.ContainsFunc(keys, func(k key) bool { return strings.HasPrefix(k.name, name+".") })
}

// known lists the words that may follow prefix.
func known(prefix string) (words []string) {
	if prefix == "" {
		words = append(words, "base", "description")
	}
	for _, k := range keys {
		if rest, ok := strings.CutPrefix(k.name, prefix); ok {
			word, _, _ := strings.Cut(rest, ".")
			words = append(words, word)
		}
	}
	slices.Sort(words)
	return slices.Compact(words)
}

// didYouMean ends a sentence about a word that is none of words.
func didYouMean(word string, words []string) string {
	if len(word) > 64 {
		return ""
	}
	best, at := 1+max(2, len(word)/3), ""
	for _, w := range words {
		if d := distance(strings.ToLower(word), strings.ToLower(w)); d < best {
			best, at = d, w
		}
	}
	if at == "" {
		if len(words) > 16 {
			return ""
		}
		return "; known are " + strings.Join(words, ", ")
	}
	return "; did you mean " + at + "?"
}

// distance counts the letters to change, add or take away.
func distance(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		last := row[0]
		row[0] = i + 1
		for j := range len(b) {
			cost := last
			if a[i] != b[j] {
				cost++
			}
			last = row[j+1]
			row[j+1] = min(cost, row[j]+1, row[j+1]+1)
		}
	}
	return row[len(b)]
}

var lineRE = lazy.Regexp(`^line (\d+): (?s:(.*))$`)

// syntax tells an error of the library, "yaml: line 3: ...", as the others.
func syntax(err error) *Problem {
	why := strings.TrimPrefix(err.Error(), "yaml: ")
	n := &yaml.Node{Line: 1, Column: 1}
	if m := lineRE().FindStringSubmatch(why); m != nil {
		n.Line, _ = strconv.Atoi(m[1]) // digits; what does not fit is line 1
		why = m[2]
	}
	return wrong(n, "%s", why)
}
