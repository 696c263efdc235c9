package engine

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"iter"
	"maps"
	"os"
	"path"
	"path/filepath"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/fsx"
	"github.com/agentbox/agentbox/internal/idmap"
	"github.com/agentbox/agentbox/overlay"
	"github.com/agentbox/agentbox/policy"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/store"
)

// maxPuts bounds the paths that differ in one undo of paths.
const maxPuts = 100_000

// foresee reads what a checkpoint has at the requested paths.
func (rs *restores) foresee(
	ctx context.Context, sb *locked, s runtime.Spec, c runtime.Container, v *overlay.View, asked []string,
) (plans []*pathPlan, err error) {
	err = rs.inAreas(ctx, sb, rootArea, func(j *policy.Jail, _ *idmap.Map, _ string, _ putArea) error {
		paths, err := realPaths(j, asked)
		if err != nil {
			return err
		}
		if err := mayPut(paths, s, c); err != nil {
			return err
		}
		for _, at := range areasOf(s, paths) {
			p := newPathPlan(at, s, c, paths)
			if err := p.foresee(v); err != nil {
				return err
			}
			plans = append(plans, p)
		}
		return nil
	})
	return plans, err
}

// rootArea is the root filesystem, with nothing to put.
var rootArea = putting{Areas: []putArea{{At: "/"}}}

// planPaths finds the differences between the frozen sandbox, which the undo checkpoint records, and a
// checkpoint, at the requested paths.
func (rs *restores) planPaths(
	ctx context.Context, sb *locked, row store.Checkpoint, plans []*pathPlan, data *putting,
) error {
	var paths []string
	for _, p := range plans {
		for _, top := range p.tops {
			paths = append(paths, path.Join("/", top))
		}
	}
	diff, err := rs.checkpoints.diffKnown(ctx, runtime.DiffRequest{
		Sandbox: sb.ID, From: data.Undo, To: row.ID, Paths: paths, NoRenames: true, Limit: maxPuts,
	}, data.Undo)
	if err != nil {
		return err
	}
	if diff.Truncated {
		return hint(fmt.Errorf("%w: more than %d paths differ", runtime.ErrUnsupported, maxPuts),
			"Undo all of them: agentbox undo "+sb.Name)
	}
	return rs.inAreas(ctx, sb, rootArea, func(j *policy.Jail, _ *idmap.Map, _ string, _ putArea) error {
		now, err := realPaths(j, data.paths)
		if err != nil {
			return err
		}
		slices.Sort(now)
		slices.Sort(paths)
		if !slices.Equal(now, paths) {
			return fmt.Errorf("%w: a symlink on the way to a path was changed meanwhile; try again", runtime.ErrBusy)
		}
		for _, p := range plans {
			p.changed(diff.Changes)
			if err := p.compare(j); err != nil {
				return err
			}
			if a := p.area(); len(a.Puts) > 0 {
				data.Areas = append(data.Areas, a)
			}
		}
		return nil
	})
}

// realPaths resolves the symlinks on the way to paths.
func realPaths(j *policy.Jail, paths []string) (list []string, err error) {
	for _, p := range paths {
		dir, exists, err := j.Real(path.Dir(p))
		if err == nil && !exists {
			err = hint(fmt.Errorf("%s: %w", path.Dir(p), runtime.ErrNotFound),
				"Its parent directory does not exist. Put that back instead: --path "+path.Dir(p))
		}
		if err != nil {
			return nil, err
		}
		list = append(list, path.Join(dir, path.Base(p)))
	}
	return list, nil
}

// areasOf returns the areas, the root filesystem and workspaces, that contain the paths.
func areasOf(s runtime.Spec, paths []string) (list []string) {
	for _, p := range paths {
		if at := areaAt(s, p); !slices.Contains(list, at) {
			list = append(list, at)
		}
	}
	return list
}

// areaAt returns the path of the innermost workspace that contains a path; "/": there is none.
func areaAt(s runtime.Spec, p string) string {
	at := "/"
	for _, m := range s.Workspaces() {
		if target := path.Clean(m.Target); fsx.Within(target, p) && len(target) > len(at) {
			at = target
		}
	}
	return at
}

// pathPlan finds out what has to be put in one area. Its paths are those of trees.
type pathPlan struct {
	at    string
	upper string   // the directory of the host that has what was changed in it
	tops  []string // what was asked for in it
	puts  map[string]putKind
	mtime *overlay.Time   // of the directory at in the end; nil: of then
	has   []hadEntry      // what the checkpoint has of it, and the directories on the way
	dirs  map[string]bool // directories in the checkpoint and now

	then map[string][]string    // the names of an inode in the checkpoint
	now  map[[2]uint64][]string // those of one now
}

// hadEntry is an entry of the checkpoint.
type hadEntry struct {
	path  string
	typ   overlay.Type
	mtime overlay.Time
	inode string
}

func newPathPlan(at string, s runtime.Spec, c runtime.Container, paths []string) *pathPlan {
	p := &pathPlan{
		at: inTree(at), upper: c.Upper, puts: map[string]putKind{}, dirs: map[string]bool{},
		then: map[string][]string{}, now: map[[2]uint64][]string{},
	}
	for _, v := range c.Volumes {
		if v.Workspace() && v.Name == at {
			p.upper = v.Path
		}
	}
	for _, top := range paths {
		if areaAt(s, top) == at {
			p.tops = append(p.tops, inTree(top))
		}
	}
	return p
}

// asked reports whether a path is among the requested ones, or below one of them.
func (p *pathPlan) asked(name string) bool {
	return slices.ContainsFunc(p.tops, func(top string) bool { return inOrAt(name, top) })
}

// onTheWay reports whether a requested path lies in a directory.
func (p *pathPlan) onTheWay(dir string) bool {
	return dir == "." || slices.ContainsFunc(p.tops, func(top string) bool { return inOrAt(top, dir) })
}

// changed takes over what a Diff from now to the checkpoint has found.
func (p *pathPlan) changed(changes []runtime.Change) {
	for _, c := range changes {
		name := inTree(c.Path)
		if !p.asked(name) {
			continue
		}
		switch kind := overlay.ChangeKind(c.Change); {
		case kind == overlay.Deleted:
			p.puts[name] = putAbsent
		case kind == overlay.Modified && c.Type == string(overlay.TypeDir):
			p.puts[name] = putLook
		default:
			p.puts[name] = putWhole
		}
	}
}

// foresee reads what the checkpoint has.
func (p *pathPlan) foresee(v *overlay.View) error {
	return v.Walk(p.at, func(f *overlay.ViewFile) error {
		if p.asked(f.Path) || f.Type == overlay.TypeDir && p.onTheWay(f.Path) {
			p.has = append(p.has, hadEntry{f.Path, f.Type, f.Mtime, f.Inode})
		} else if f.Type == overlay.TypeDir {
			return fs.SkipDir
		}
		return nil
	})
}

// compare adds what a Diff leaves out: the times of directories, and which names share an inode.
func (p *pathPlan) compare(j *policy.Jail) error {
	root, err := j.OpenFile(path.Join("/", p.at), os.O_RDONLY|unix.O_DIRECTORY, 0)
	if err != nil {
		return err
	}
	defer root.Close()
	dirs := map[string]bool{} // those now, to which no symlink leads
	for _, f := range p.has {
		isDir, asked := f.typ == overlay.TypeDir, p.asked(f.path)
		if f.inode != "" && !isDir && asked {
			p.then[f.inode] = append(p.then[f.inode], f.path)
		}
		if f.path != p.at && !dirs[path.Dir(f.path)] {
			continue // it comes with the directory that it is in
		}
		rel, _ := area{at: p.at}.within(f.path)
		var st unix.Stat_t
		err := unix.Fstatat(int(root.Fd()), rel, &st, unix.AT_SYMLINK_NOFOLLOW)
		if errors.Is(err, unix.ENOENT) {
			continue
		}
		if err != nil {
			return fmt.Errorf("/%s: %w", f.path, err)
		}
		switch nowDir := st.Mode&unix.S_IFMT == unix.S_IFDIR; {
		case isDir && nowDir:
			dirs[f.path] = true
			if f.path == p.at {
				p.mtime = &overlay.Time{Sec: st.Mtim.Sec, Nsec: st.Mtim.Nsec}
			}
			if f.path == p.at && asked {
				p.mtime = &f.mtime
			}
			if asked {
				p.dirs[f.path] = true
			}
			if asked && f.mtime != (overlay.Time{Sec: st.Mtim.Sec, Nsec: st.Mtim.Nsec}) && p.puts[f.path] == "" {
				p.puts[f.path] = putLook
			}
		case asked && !isDir && !nowDir && st.Nlink > 1:
			// The number that overlayfs shows is another one for each name of a file that was linked
			// after its copy-up.
			var own unix.Stat_t
			if unix.Lstat(filepath.Join(p.upper, rel), &own) == nil {
				st = own
			}
			inode := [2]uint64{st.Dev, st.Ino}
			p.now[inode] = append(p.now[inode], f.path)
		}
	}
	p.links()
	return nil
}

// links has all names go back of an inode that has others than in the checkpoint, or of which one goes back.
func (p *pathPlan) links() {
	groups := [2]map[string][]string{{}, {}}
	for i, sets := range [2]iter.Seq[[]string]{maps.Values(p.then), maps.Values(p.now)} {
		for names := range sets {
			for _, name := range names {
				if len(names) > 1 {
					groups[i][name] = names
				}
			}
		}
	}
	all := func(names []string) {
		for _, name := range names {
			p.puts[name] = putWhole
		}
	}
	for i := range groups {
		for name, names := range groups[i] {
			if other := groups[1-i][name]; !slices.Equal(names, other) {
				all(names)
				all(other)
				p.puts[name] = putWhole
			}
		}
	}
	for _, names := range p.then {
		if slices.ContainsFunc(names, p.goes) {
			all(names)
		}
	}
}

// goes reports whether a path is replaced, by itself or with a directory that it is in.
func (p *pathPlan) goes(name string) bool {
	for ; name != "."; name = path.Dir(name) {
		if p.puts[name] == putWhole {
			return true
		}
	}
	return false
}

// area returns what is to be put: no path of which another one has the directory, and the looks of directories
// last, since the others change their times.
func (p *pathPlan) area() putArea {
	a := putArea{At: path.Join("/", p.at)}
	a.Stage, a.Mtime = path.Join(a.At, ".agentbox-undo-"+newID()), p.mtime
	looks := map[string]bool{}
	last := ""
	for _, name := range slices.SortedFunc(maps.Keys(p.puts), overlay.ComparePaths) {
		if last != "" && inOrAt(name, last) {
			continue
		}
		if p.puts[name] == putLook {
			looks[name] = true
			continue
		}
		a.Puts = append(a.Puts, put{path.Join("/", name), p.puts[name]})
		looks[path.Dir(name)] = true
		last = name
	}
	for _, name := range slices.SortedFunc(maps.Keys(looks), overlay.ComparePaths) {
		if p.dirs[name] {
			a.Puts = append(a.Puts, put{path.Join("/", name), putLook})
		}
	}
	return a
}
