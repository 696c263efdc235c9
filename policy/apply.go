package policy

import (
	"fmt"
	"slices"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"go.yaml.in/yaml/v3"
)

// Apply has the rules of an apply to a directory of the host. A policy and the directory's own
// .agentbox.yaml have the same keys for them, and both count.
type Apply struct {
	Validators []Validator // in the order in which they run
	Approve    Approve
	Canaries   []Canary // in the order in which they come
}

// Validator is a command that judges the result of an apply before it reaches the directory. It runs
// in a sandbox, never on the host.
type Validator struct {
	Name    string   // for messages
	Run     []string // the program and its arguments
	Timeout time.Duration
	Network string // ValidatorNone or ValidatorSandbox
}

// Networks of a validator.
const (
	ValidatorNone    = "none"
	ValidatorSandbox = "sandbox" // that of the sandbox whose changes are applied
)

// Bounds of the rules of an apply.
const (
	maxValidators    = 16
	maxCommand       = 16 << 10 // bytes
	validatorTimeout = 10 * time.Minute
	maxValidatorTime = 6 * time.Hour
	maxNameLength    = 60 // characters
)

// applyKeys are the keys of Apply.
var applyKeys = []key{
	validatorsKey(),
	atMost("apply.approve.at", func(r *Rules) *int64 { return &r.Apply.Approve.At }, parseRisk, countOf),
	atMost("apply.approve.expires", func(r *Rules) *time.Duration {
		return &r.Apply.Approve.Expires
	}, parseApproval, ageOf),
	approvePathsKey(),
	canaryKey(),
}

// ParseApply reads the value of the key apply of a .agentbox.yaml.
func ParseApply(n *yaml.Node) (Apply, []*Problem) {
	d := &document{set: map[string]*yaml.Node{}}
	problems := d.mapping(n, "apply.")
	return d.rules.Apply, problems
}

// With combines two sets of rules: the validators and canaries of both, and the stricter approval.
func (a Apply) With(o Apply) Apply {
	stricter := func(x, y int64) int64 {
		if x == 0 || y != 0 && y < x {
			return y
		}
		return x
	}
	return Apply{
		Validators: slices.Concat(a.Validators, o.Validators),
		Approve: Approve{
			At:      stricter(a.Approve.At, o.Approve.At),
			Expires: time.Duration(stricter(int64(a.Approve.Expires), int64(o.Approve.Expires))),
			Paths:   union(a.Approve.Paths, o.Approve.Paths, same[string]),
		},
		Canaries: slices.Concat(a.Canaries, o.Canaries),
	}
}

// Asks reports whether the rules ask for anything.
func (a Apply) Asks() bool { return len(a.Validators) > 0 || a.Approve.Asks() || len(a.Canaries) > 0 }

func (v Validator) equal(o Validator) bool {
	return v.Name == o.Name && v.Timeout == o.Timeout && v.Network == o.Network && slices.Equal(v.Run, o.Run)
}

// validatorsKey is a key with the validators. Those of the base always run, and first: a file can
// only add to them.
func validatorsKey() key {
	const name = "apply.validators"
	return key{
		name: name,
		read: func(r *Rules, n *yaml.Node) (problems []*Problem) {
			if n.Kind != yaml.SequenceNode || n.Anchor != "" {
				return []*Problem{wrong(n, "%s: not a list; write [] for an empty one", name)}
			}
			if len(n.Content) > maxValidators {
				return []*Problem{wrong(n, "%s: more than %d", name, maxValidators)}
			}
			list := []Validator{}
			for _, item := range n.Content {
				v, p := readValidator(item, name)
				if p == nil && slices.ContainsFunc(list, func(o Validator) bool { return o.Name == v.Name }) {
					p = wrong(item, "%s: %.80q stands here a second time", name, v.Name)
				}
				if p != nil {
					problems = append(problems, p)
				}
				list = append(list, v)
			}
			r.Apply.Validators = list
			return problems
		},
		value: func(r *Rules) any {
			if len(r.Apply.Validators) == 0 {
				return nil
			}
			list := []any{}
			for _, v := range r.Apply.Validators {
				list = append(list, map[string]any{
					"name": v.Name, "run": v.Run, "timeout": short(v.Timeout), "network": v.Network,
				})
			}
			return list
		},
		copy: func(dst, src *Rules) {
			dst.Apply.Validators = union(dst.Apply.Validators, src.Apply.Validators, Validator.equal)
		},
		zero:  func(r *Rules) { r.Apply.Validators = nil },
		wider: func(_, _ *Rules) []widening { return nil },
	}
}

// union returns a list with what only the other one has behind it.
func union[T any](list, more []T, equal func(T, T) bool) []T {
	list = slices.Clone(list)
	for _, one := range more {
		if !slices.ContainsFunc(list, func(have T) bool { return equal(one, have) }) {
			list = append(list, one)
		}
	}
	return list
}

func same[T comparable](a, b T) bool { return a == b }

// readValidator reads a command, or {run: COMMAND, name: NAME, timeout: 10m, network: none}. A command
// is a text for the shell, or a list of a program and its arguments.
func readValidator(n *yaml.Node, name string) (v Validator, p *Problem) {
	v.Timeout, v.Network = validatorTimeout, ValidatorNone
	if n.Kind != yaml.MappingNode {
		v.Run, v.Name, p = readValidatorCommand(n, name)
		return v, p
	}
	if n.Anchor != "" {
		return v, wrong(n, "%s: anchors and aliases are not for policies", name)
	}
	seen, given := map[string]bool{}, ""
	for i := 0; i+1 < len(n.Content); i += 2 {
		at, value := n.Content[i], n.Content[i+1]
		word, p := scalar(at, "a key")
		switch {
		case p != nil:
		case seen[word]:
			p = wrong(at, "%s: %s stands here a second time", name, word)
		case word == "run":
			v.Run, v.Name, p = readValidatorCommand(value, name+".run")
		case word == "name":
			given, p = readValidatorName(value, name+".name")
		case word == "timeout":
			v.Timeout, p = readDuration(value, name+".timeout", maxValidatorTime)
		case word == "network":
			v.Network, p = readNetwork(value, name+".network")
		default:
			p = wrong(at, "unknown key %.80q%s", name+"."+word,
				didYouMean(word, []string{"run", "name", "timeout", "network"}))
		}
		if p != nil {
			return v, p
		}
		seen[word] = true
	}
	if !seen["run"] {
		return v, wrong(n, "%s: a validator without run", name)
	}
	if given != "" {
		v.Name = given
	}
	return v, nil
}

// readValidatorCommand returns a command and its default name.
func readValidatorCommand(n *yaml.Node, name string) (run []string, called string, p *Problem) {
	bad := func(n *yaml.Node, s string) *Problem {
		if len(s) > maxCommand || strings.ContainsRune(s, 0) || !utf8.ValidString(s) {
			return wrong(n, "%s: %.80q is no command that can be run", name, s)
		}
		return nil
	}
	if n.Kind == yaml.SequenceNode && n.Anchor == "" {
		if len(n.Content) == 0 || len(n.Content) > maxHookArgs {
			return nil, "", wrong(n, "%s: not a program and at most %d arguments", name, maxHookArgs-1)
		}
		for _, item := range n.Content {
			s, p := scalar(item, name)
			if p == nil {
				p = bad(item, s)
			}
			if p != nil {
				return nil, "", p
			}
			run = append(run, s)
		}
		return run, nameOf(strings.Join(run, " ")), nil
	}
	s, p := scalar(n, name)
	if p == nil && n.ShortTag() != "!!str" {
		p = wrong(n, "%s: not a text; write it \"in quotes\"", name)
	}
	if p == nil {
		p = bad(n, s)
	}
	if p != nil {
		return nil, "", p
	}
	return []string{"sh", "-c", s}, nameOf(s), nil
}

// nameOf derives a name from a command: its beginning, on one line.
func nameOf(command string) string {
	line := strings.Join(strings.Fields(strings.Map(func(r rune) rune {
		if unicode.IsPrint(r) {
			return r
		}
		return ' '
	}, command)), " ")
	if r := []rune(line); len(r) > maxNameLength {
		line = string(r[:maxNameLength-3]) + "..."
	}
	return line
}

func readValidatorName(n *yaml.Node, name string) (string, *Problem) {
	s, p := scalar(n, name)
	if p == nil && nameOf(s) != s {
		p = wrong(n, "%s: %.80q is no name: at most %d printable characters on one line", name, s, maxNameLength)
	}
	return s, p
}

func readDuration(n *yaml.Node, name string, most time.Duration) (time.Duration, *Problem) {
	s, p := scalar(n, name)
	if p != nil {
		return 0, p
	}
	d, err := parsePositive(s)
	if err == nil && d > most {
		err = fmt.Errorf("%s is more than %s", s, short(most))
	}
	if err != nil {
		return 0, wrong(n, "%s: %v", name, err)
	}
	return d, nil
}

func readNetwork(n *yaml.Node, name string) (string, *Problem) {
	s, p := scalar(n, name)
	if p != nil {
		return "", p
	}
	s, err := oneOf(s, ValidatorNone, ValidatorSandbox)
	if err != nil {
		return "", wrong(n, "%s: %v", name, err)
	}
	return s, nil
}
