package policy

import (
	"fmt"
	"path"
	"strconv"
	"strings"
	"time"

	"go.yaml.in/yaml/v3"
)

// Bounds of the rules of approval.
const (
	maxRisk         = 1000
	maxApprovePaths = 64
	maxApproval     = 7 * 24 * time.Hour
)

// Approve defines which applies need a person's approval.
type Approve struct {
	At      int64         // those with this risk or more; 0: none
	Expires time.Duration // how long an approval counts; 0: DefaultApproval
	Paths   []string      // those that change something at one of these patterns, whatever their risk
}

// DefaultApproval is how long an approval counts where no rule says it.
const DefaultApproval = time.Hour

// Asks reports whether an apply can need an approval.
func (a Approve) Asks() bool { return a.At > 0 || len(a.Paths) > 0 }

// Covers returns the first pattern that matches a path or a directory above it; empty: none does. The path
// is relative to the directory of the apply.
func (a Approve) Covers(rel string) string { return covers(a.Paths, rel) }

// CoversBelow is Covers for a path at which a symlink comes or goes: with it all comes or goes that is, or
// could be, below.
func (a Approve) CoversBelow(rel string) string {
	if p := a.Covers(rel); p != "" || rel == "" || rel == "." {
		return p
	}
	for _, p := range a.Paths {
		g, err := ParseGlob(p)
		if err != nil {
			continue
		}
		rest, ok := strings.CutPrefix(rel, g.Base)
		if strings.HasPrefix(g.Base, rel+"/") || ok && g.leadsBelow(rest) {
			return p
		}
	}
	return ""
}

func covers(patterns []string, rel string) string {
	for _, p := range patterns {
		g, err := ParseGlob(p)
		if err == nil && rel == "." && g.Base == "" && g.Match("") {
			return p
		}
		for at := rel; err == nil && at != "." && at != "/"; at = path.Dir(at) {
			if rest, ok := strings.CutPrefix(at, g.Base); ok && g.Match(rest) {
				return p
			}
		}
	}
	return ""
}

// approvePathsKey is a key with patterns of paths, which add to those of the base.
func approvePathsKey() key {
	k := listOf("apply.approve.paths", func(r *Rules) *[]string { return &r.Apply.Approve.Paths }, parseApprovePath, nil)
	value, read := k.value, k.read
	k.read = func(r *Rules, n *yaml.Node) []*Problem {
		if len(n.Content) > maxApprovePaths {
			return []*Problem{wrong(n, "%s: more than %d", k.name, maxApprovePaths)}
		}
		return read(r, n)
	}
	k.value = func(r *Rules) any {
		if len(r.Apply.Approve.Paths) == 0 {
			return nil
		}
		return value(r)
	}
	k.copy = func(dst, src *Rules) {
		dst.Apply.Approve.Paths = union(dst.Apply.Approve.Paths, src.Apply.Approve.Paths, same[string])
	}
	k.wider = func(_, _ *Rules) []widening { return nil }
	return k
}

func parseRisk(s string) (int64, error) {
	n, err := strconv.ParseInt(s, 10, 64)
	if err != nil || n <= 0 || n > maxRisk {
		return 0, fmt.Errorf("%.40q is not a number from 1 to %d", s, maxRisk)
	}
	return n, nil
}

func parseApproval(s string) (time.Duration, error) {
	d, err := parsePositive(s)
	if err == nil && d > maxApproval {
		err = fmt.Errorf("%s is more than %s", s, short(maxApproval))
	}
	return d, err
}

func parseApprovePath(s string) (string, error) {
	_, err := ParseGlob(s)
	if err == nil && (strings.HasPrefix(s, "/") || path.Clean("/"+s) != "/"+s) {
		err = fmt.Errorf("%.200q: write a pattern that is relative to the directory", s)
	}
	return s, err
}
