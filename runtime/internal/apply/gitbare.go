package apply

import (
	"errors"
	"maps"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/overlay"
)

// Git takes any directory for a repository that has HEAD, objects and refs, whatever its name, and
// also one with HEAD and commondir, which says where the others are. A user who works in it, or below
// it, has git run what its configuration and hooks name. So these are held back as those of .git are.

// kinds are the types of what a path has and of what comes there; empty ones are nothing.
type kinds struct{ old, new overlay.Type }

// git refuses what would have git run programs, and remembers what comes for bare.
func (g *gate) git(rel string, old, new overlay.Type) {
	g.coming[rel] = kinds{old, new}
	if new == "" && old == overlay.TypeDir || new == overlay.TypeDir && old == "" {
		return // what is in it counts
	}
	if why := gitReason(path.Join(g.dir, rel), old, new); why != "" && !g.allowsBelow(rel) {
		g.refuse(rel, why, true)
	}
}

// bare refuses what would have git run programs in a directory that is a repository after the apply.
func (g *gate) bare() error {
	outer := g.outerRepositories()
	for _, rel := range slices.Sorted(maps.Keys(g.coming)) {
		if g.allowsBelow(rel) || gitReason(path.Join(g.dir, rel), g.coming[rel].old, g.coming[rel].new) != "" {
			continue // let through, or refused already
		}
		why, dir := g.outerReason(outer, rel), ""
		var err error
		for i, names := 0, strings.Split(rel, "/"); i < len(names) && why == "" && err == nil; i++ {
			dir = path.Join(names[:i]...)
			why, err = g.bareReason(path.Clean(dir), names[i:], g.coming[rel])
		}
		if err != nil {
			return err
		}
		if why != "" {
			g.refuse(rel, why, true)
		}
	}
	return nil
}

// bareReason is gitReason for a path in dir, by its names from there.
func (g *gate) bareReason(dir string, names []string, k kinds) (why string, err error) {
	makes := len(names) == 1 && slices.Contains([]string{"HEAD", "objects", "refs", "commondir"}, names[0])
	if why = gitFileReason(names, k); why == "" && !makes || isGitDir(path.Base(path.Join(g.dir, dir))) {
		return "", nil
	}
	has := func(name string) (bool, error) { return g.hasThen(path.Join(dir, name)) }
	if is, err := isRepository(has); err != nil || !is {
		return "", err
	}
	takes := "git takes " + path.Join(g.at, dir) + " for a repository with it, "
	if why != "" {
		return takes + "and " + why, nil
	}
	had := func(name string) (bool, error) { return g.has(path.Join(dir, name)) }
	if was, err := isRepository(had); err != nil || was {
		return "", err
	}
	for _, name := range []string{"config", "config.worktree", "hooks", "info/attributes", "commondir"} {
		rel := path.Join(dir, name)
		if _, comes := g.coming[rel]; comes {
			continue // it is judged itself
		}
		if has, err := g.has(rel); err != nil || has {
			return takes + "of which " + name + " is there already and can have git run programs", err
		}
	}
	return "", nil
}

// gitFileReason is gitFile for what comes; of a directory, what is in it counts.
func gitFileReason(names []string, k kinds) string {
	dir := func(t overlay.Type) bool { return t == "" || t == overlay.TypeDir }
	if dir(k.old) && dir(k.new) {
		return ""
	}
	return gitFile(names)
}

// isRepository reports whether git would take a directory for a repository that has these names.
func isRepository(has func(name string) (bool, error)) (bool, error) {
	all := func(names ...string) (bool, error) {
		for _, name := range names {
			if is, err := has(name); err != nil || !is {
				return false, err
			}
		}
		return true, nil
	}
	if is, err := all("HEAD", "objects", "refs"); err != nil || is {
		return is, err
	}
	return all("HEAD", "commondir")
}

// has reports whether the directory has something at a path.
func (g *gate) has(rel string) (bool, error) {
	st, err := g.from.stat(rel)
	if errors.Is(err, fault.ErrUnsupported) {
		return true, nil // a mount point
	}
	return st != nil, err
}

// hasThen is has for after the apply.
func (g *gate) hasThen(rel string) (bool, error) {
	if k, comes := g.coming[rel]; comes {
		return k.new != "", nil
	}
	return g.has(rel)
}

// outerRepositories lists the repositories that the directory itself lies in, if it is a part of
// what git keeps in one.
func (g *gate) outerRepositories() (list []string) {
	for dir := filepath.Dir(g.dir); ; dir = filepath.Dir(dir) {
		is, _ := isRepository(func(name string) (bool, error) {
			_, err := os.Lstat(filepath.Join(dir, name))
			return err == nil, nil
		})
		if is {
			list = append(list, dir)
		}
		if dir == "/" {
			return list
		}
	}
}

func (g *gate) outerReason(outer []string, rel string) string {
	for _, dir := range outer {
		below, _ := Inside(dir, path.Join(g.dir, rel))
		if why := gitFileReason(strings.Split(below, "/"), g.coming[rel]); why != "" {
			return "it is part of the repository " + dir + ", and " + why
		}
	}
	return ""
}
