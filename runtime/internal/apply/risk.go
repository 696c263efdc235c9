package apply

import (
	"fmt"
	"path"
	"slices"
	"strconv"

	"github.com/agentbox/agentbox/overlay"
	"github.com/agentbox/agentbox/runtime"
)

// The risk of an apply is the sum of the points of this table. It says what deserves a look, and is
// no proof of anything.

// riskStep is a number from which on something has so many points.
type riskStep struct {
	from   int64
	points int
}

// The steps of what is counted, the highest first.
var (
	deletionSteps = []riskStep{{100, 5}, {10, 3}, {1, 1}} // files
	numberSteps   = []riskStep{{1000, 5}, {200, 3}, {50, 1}}
	sizeSteps     = []riskStep{{100 << 20, 3}, {10 << 20, 1}} // bytes that come
)

const executablePoints = 2

// sensitive are the kinds of paths that count, each once.
var sensitive = []struct {
	kind   string
	points int
	is     func(rel, name string) bool
}{
	{"rules of sandboxes", 5, func(rel, _ string) bool { return rel == ".agentbox.yaml" }},
	{"CI", 4, func(rel, name string) bool {
		for _, dir := range []string{".github", ".circleci", ".buildkite", ".gitlab"} {
			if within(rel, dir) {
				return true
			}
		}
		return slices.Contains([]string{
			".gitlab-ci.yml", ".travis.yml", "Jenkinsfile", "azure-pipelines.yml", ".drone.yml",
			"bitbucket-pipelines.yml", "cloudbuild.yaml",
		}, name)
	}},
	{"infrastructure", 4, func(_, name string) bool {
		return slices.Contains([]string{".tf", ".tfvars", ".tfstate"}, path.Ext(name))
	}},
	{"dependencies that are locked", 2, func(_, name string) bool {
		return slices.Contains([]string{
			"go.sum", "package-lock.json", "npm-shrinkwrap.json", "yarn.lock", "pnpm-lock.yaml", "bun.lock", "bun.lockb",
			"Cargo.lock", "poetry.lock", "Pipfile.lock", "uv.lock", "pdm.lock", "Gemfile.lock", "composer.lock",
			"mix.lock", "pubspec.lock", "flake.lock", "packages.lock.json", "gradle.lockfile", ".terraform.lock.hcl",
		}, name)
	}},
}

// RiskOf rates the changes of an apply to places, of which removed are the files that go.
func RiskOf(places []Place, list []runtime.Change, removed []string) runtime.Risk {
	r := runtime.Risk{Reasons: []runtime.RiskReason{}}
	add := func(points int, format string, args ...any) {
		if points > 0 {
			r.Score += points
			r.Reasons = append(r.Reasons, runtime.RiskReason{Text: fmt.Sprintf(format, args...), Points: points})
		}
	}
	add(riskPoints(deletionSteps, int64(len(removed))), "deletes %s", someFiles(len(removed), removed))

	paths, size := slices.Clone(removed), int64(0)
	var programs []string
	for _, c := range list {
		if c.Type == string(overlay.TypeDir) && c.Change != string(overlay.TypeChanged) {
			continue // what is in it counts
		}
		p := rawPath(c)
		if c.Change != string(overlay.Deleted) {
			paths = append(paths, p)
		}
		if c.New == nil || c.New.Type != string(overlay.TypeFile) {
			continue
		}
		if c.Old == nil || slices.Contains(c.What, overlay.WhatContent) || c.Change == string(overlay.TypeChanged) {
			size += c.New.Size
		}
		if isProgram(c.New) && (c.Change != string(overlay.Modified) || !isProgram(c.Old) ||
			slices.Contains(c.What, overlay.WhatContent)) {
			programs = append(programs, p)
		}
	}
	slices.Sort(paths)
	paths = slices.Compact(paths)
	add(riskPoints(numberSteps, int64(len(paths))), "changes %d paths", len(paths))
	add(riskPoints(sizeSteps, size), "brings %d MiB", size>>20)
	if len(programs) > 0 {
		add(executablePoints, "brings %s, executable", someFiles(len(programs), programs))
	}
	for _, s := range sensitive {
		var hit []string
		for _, p := range paths {
			if rel := RelativeTo(places, p); rel != "" && s.is(rel, path.Base(rel)) {
				hit = append(hit, p)
			}
		}
		if len(hit) > 0 {
			add(s.points, "changes %s: %s", s.kind, someFiles(len(hit), hit))
		}
	}
	return r
}

// RelativeTo returns a path in the sandbox relative to the innermost of the places that has it; empty:
// none has.
func RelativeTo(places []Place, p string) (rel string) {
	best := -1
	for _, at := range places {
		if r, ok := Inside(at.At, p); ok && len(at.At) > best {
			rel, best = r, len(at.At)
		}
	}
	return rel
}

func riskPoints(steps []riskStep, n int64) int {
	for _, s := range steps {
		if n >= s.from {
			return s.points
		}
	}
	return 0
}

// isProgram reports whether a file may be executed.
func isProgram(s *runtime.FileState) bool {
	if s == nil || s.Type != string(overlay.TypeFile) {
		return false
	}
	mode, err := strconv.ParseUint(s.Mode, 8, 32)
	return err == nil && mode&0o111 != 0
}

// someFiles names one file, or says how many there are and names the first.
func someFiles(n int, list []string) string {
	switch n {
	case 0:
		return "no file"
	case 1:
		return list[0]
	}
	return fmt.Sprintf("%d files, such as %s", n, list[0])
}
