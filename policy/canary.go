package policy

import (
	"path"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"
)

// Canary is the part of an apply that comes first, and the command that judges the directories with just
// that in them. If it fails, all is taken back.
type Canary struct {
	Validator
	Paths     []string // patterns, relative to the directory; nil: all
	Workspace string   // by its path in the sandbox; empty: any
}

const maxCanaries = 4

// Takes reports whether a change of a path, which is relative to the directory below a workspace, is
// part of the canary.
func (c Canary) Takes(workspace, rel string) bool {
	return (c.Workspace == "" || c.Workspace == workspace) && (len(c.Paths) == 0 || covers(c.Paths, rel) != "")
}

func (c Canary) equal(o Canary) bool {
	return c.Validator.equal(o.Validator) && slices.Equal(c.Paths, o.Paths) && c.Workspace == o.Workspace
}

// canaryKey is a key with one canary, or a list of some. Those of the base come first.
func canaryKey() key {
	const name = "apply.canary"
	return key{
		name: name,
		read: func(r *Rules, n *yaml.Node) (problems []*Problem) {
			items := []*yaml.Node{n}
			if n.Kind == yaml.SequenceNode && n.Anchor == "" {
				items = n.Content
			}
			if len(items) > maxCanaries {
				return []*Problem{wrong(n, "%s: more than %d", name, maxCanaries)}
			}
			list := []Canary{}
			for _, item := range items {
				c, p := readCanary(item, name)
				if p != nil {
					problems = append(problems, p)
				}
				list = append(list, c)
			}
			r.Apply.Canaries = list
			return problems
		},
		value: func(r *Rules) any {
			if len(r.Apply.Canaries) == 0 {
				return nil
			}
			list := []any{}
			for _, c := range r.Apply.Canaries {
				one := map[string]any{"name": c.Name, "check": c.Run, "timeout": short(c.Timeout), "network": c.Network}
				if len(c.Paths) > 0 {
					one["paths"] = c.Paths
				}
				if c.Workspace != "" {
					one["workspace"] = c.Workspace
				}
				list = append(list, one)
			}
			return list
		},
		copy: func(dst, src *Rules) {
			dst.Apply.Canaries = union(dst.Apply.Canaries, src.Apply.Canaries, Canary.equal)
		},
		zero:  func(r *Rules) { r.Apply.Canaries = nil },
		wider: func(_, _ *Rules) []widening { return nil },
	}
}

// readCanary reads {paths: [PATTERN...], workspace: PATH, check: COMMAND, ...}.
func readCanary(n *yaml.Node, name string) (c Canary, p *Problem) {
	if n.Kind != yaml.MappingNode || n.Anchor != "" {
		return c, wrong(n, "%s: write {paths: [PATTERN...], check: COMMAND}", name)
	}
	var own Rules
	check := &yaml.Node{Kind: yaml.MappingNode, Line: n.Line, Column: n.Column}
	for i := 0; i+1 < len(n.Content); i += 2 {
		at, value := n.Content[i], n.Content[i+1]
		word, p := scalar(at, "a key")
		switch {
		case p != nil:
		case (word == "paths" && own.Apply.Approve.Paths != nil) || (word == "workspace" && c.Workspace != ""):
			p = wrong(at, "%s: %s stands here a second time", name, word)
		case word == "paths":
			if problems := approvePathsKey().read(&own, value); len(problems) > 0 {
				p = wrong(value, "%s.paths: %v", name, problems[0].Err)
			}
			c.Paths = own.Apply.Approve.Paths
		case word == "workspace":
			if c.Workspace, p = scalar(value, name+".workspace"); p == nil &&
				(!path.IsAbs(c.Workspace) || path.Clean(c.Workspace) != c.Workspace) {
				p = wrong(value, "%s.workspace: %.200q is no clean, absolute path in the sandbox", name, c.Workspace)
			}
		case word == "check":
			run := *at
			run.Value = "run"
			check.Content = append(check.Content, &run, value)
		case word == "name" || word == "timeout" || word == "network":
			check.Content = append(check.Content, at, value)
		default:
			p = wrong(at, "unknown key %.80q%s", name+"."+word,
				didYouMean(word, []string{"paths", "workspace", "check", "name", "timeout", "network"}))
		}
		if p != nil {
			return c, p
		}
	}
	if len(c.Paths) == 0 && c.Workspace == "" {
		return c, wrong(n, "%s: a canary without paths and workspace", name)
	}
	if c.Validator, p = readValidator(check, name); p != nil && strings.HasSuffix(p.Err.Error(), "without run") {
		p = wrong(n, "%s: a canary without check", name)
	}
	return c, p
}
