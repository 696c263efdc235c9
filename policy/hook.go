package policy

import (
	"maps"
	"path"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"go.yaml.in/yaml/v3"
)

// When hooks are run.
const (
	BeforeStart      = "before_start"
	BeforeCheckpoint = "before_checkpoint"
	AfterCheckpoint  = "after_checkpoint"
	BeforeRestore    = "before_restore"
	AfterRestore     = "after_restore"
	OnFailure        = "on_failure"
)

var hookPoints = []string{BeforeStart, BeforeCheckpoint, AfterCheckpoint, BeforeRestore, AfterRestore, OnFailure}

// Bounds of hooks.
const (
	maxHooks    = 8  // at one point
	maxHookArgs = 64 // the program among them
	hookTimeout = 30 * time.Second
	maxHookTime = 10 * time.Minute
)

// Hook is a program of the host that agentbox runs when something happens to a
// sandbox.
type Hook struct {
	Run     []string // the program, by its absolute path, and its arguments
	Timeout time.Duration
}

func (h Hook) String() string { return strings.Join(h.Run, " ") }

func (h Hook) equal(o Hook) bool { return h.Timeout == o.Timeout && slices.Equal(h.Run, o.Run) }

// hooksAt is a key with the hooks of one point. Those of the base are always
// run, and first: a file can only add to them.
func hooksAt(point string) key {
	name := "hooks." + point
	return key{
		name: name,
		read: func(r *Rules, n *yaml.Node) (problems []*Problem) {
			if n.Kind != yaml.SequenceNode || n.Anchor != "" {
				return []*Problem{wrong(n, "%s: not a list; write [] for an empty one", name)}
			}
			hooks := []Hook{}
			for _, item := range n.Content {
				h, p := readHook(item, name)
				if p == nil && slices.ContainsFunc(hooks, h.equal) {
					p = wrong(item, "%s: %.80q stands here a second time", name, h)
				}
				if p != nil {
					problems = append(problems, p)
				}
				hooks = append(hooks, h)
			}
			r.Hooks = with(r.Hooks, point, hooks)
			return problems
		},
		value: func(r *Rules) any {
			if len(r.Hooks[point]) == 0 {
				return nil
			}
			list := []any{}
			for _, h := range r.Hooks[point] {
				list = append(list, map[string]any{"run": h.Run, "timeout": short(h.Timeout)})
			}
			return list
		},
		copy: func(dst, src *Rules) {
			dst.Hooks = with(dst.Hooks, point, union(dst.Hooks[point], src.Hooks[point], Hook.equal))
		},
		zero:  func(r *Rules) { r.Hooks = with(r.Hooks, point, nil) },
		wider: func(_, _ *Rules) []widening { return nil },
	}
}

// with leaves the map that it is given as it is: rules share it.
func with(all map[string][]Hook, point string, hooks []Hook) map[string][]Hook {
	all = maps.Clone(all)
	if all == nil {
		all = map[string][]Hook{}
	}
	all[point] = hooks
	return all
}

// readHook reads {run: [PROGRAM, ARGUMENT...], timeout: 30s}.
func readHook(n *yaml.Node, name string) (h Hook, p *Problem) {
	if n.Kind != yaml.MappingNode || n.Anchor != "" {
		return h, wrong(n, "%s: write {run: [/PROGRAM, ARGUMENT...], timeout: 30s}", name)
	}
	h.Timeout = hookTimeout
	seen := map[string]bool{}
	for i := 0; i+1 < len(n.Content); i += 2 {
		at, value := n.Content[i], n.Content[i+1]
		word, p := scalar(at, "a key")
		switch {
		case p != nil:
		case seen[word]:
			p = wrong(at, "%s: %s stands here a second time", name, word)
		case word == "run":
			h.Run, p = readCommand(value, name)
		case word == "timeout":
			h.Timeout, p = readDuration(value, name+": timeout", maxHookTime)
		default:
			p = wrong(at, "unknown key %.80q%s", name+"."+word, didYouMean(word, []string{"run", "timeout"}))
		}
		if p != nil {
			return h, p
		}
		seen[word] = true
	}
	if !seen["run"] {
		return h, wrong(n, "%s: a hook without run", name)
	}
	return h, nil
}

func readCommand(n *yaml.Node, name string) (args []string, p *Problem) {
	if n.Kind != yaml.SequenceNode || n.Anchor != "" || len(n.Content) == 0 || len(n.Content) > maxHookArgs {
		return nil, wrong(n, "%s: run: not a list of a program and at most %d arguments; there is no shell", name,
			maxHookArgs-1)
	}
	for _, item := range n.Content {
		s, p := scalar(item, name+".run")
		if p != nil {
			return nil, p
		}
		if len(s) > 4096 || strings.ContainsRune(s, 0) || !utf8.ValidString(s) {
			return nil, wrong(item, "%s: run: %.80q is no argument that a program takes", name, s)
		}
		args = append(args, s)
	}
	if !path.IsAbs(args[0]) || path.Clean(args[0]) != args[0] {
		return nil, wrong(n.Content[0],
			"%s: run: %.200q: write the program by its absolute path, without . and ..", name, args[0])
	}
	return args, nil
}

// untrusted returns a problem for each list of hooks that the document must not have. Root runs
// hooks, so only a policy that is found by name, in a directory of root's, can have any, and only
// programs that no other user can change.
func (d *document) untrusted(named bool) (problems []*Problem) {
	for _, point := range hookPoints {
		n, ok := d.set["hooks."+point]
		if !ok || len(d.rules.Hooks[point]) == 0 {
			continue
		}
		if !named {
			problems = append(problems,
				wrong(n, "hooks.%s: root runs hooks, and this file is named by its path; put it into a directory of policies, and name it by its name", point))
			continue
		}
		if _, err := Trusted(d.file); err != nil {
			problems = append(problems, wrong(n, "hooks.%s: root runs hooks, and %v", point, err))
			continue
		}
		for i, h := range d.rules.Hooks[point] {
			if _, err := Trusted(h.Run[0]); err != nil {
				problems = append(problems, wrong(n.Content[i], "hooks.%s: %v", point, err))
			}
		}
	}
	return problems
}
