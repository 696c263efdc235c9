package engine

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/criu"
	"github.com/agentbox/agentbox/overlay"
	"github.com/agentbox/agentbox/policy"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/engine/worktree"
)

// checkSources proves that the sources of a sandbox's bind mounts and workspaces still exist:
// without them nothing can be started in place of what a restore ends.
func checkSources(s runtime.Spec) error {
	for _, m := range s.Mounts {
		if m.Type != "bind" && m.Type != runtime.MountWorkspace {
			continue
		}
		_, err := os.Stat(m.Source)
		if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENOTDIR) {
			return hint(fmt.Errorf("%s source %s of %s: %w", m.Type, m.Source, m.Target, runtime.ErrNotFound),
				"Put it back first: the sandbox cannot start without it.")
		}
		if err != nil {
			return fmt.Errorf("%s source of %s: %w", m.Type, m.Target, err)
		}
	}
	return mayMount(s)
}

// possible proves, before anything is created, that the sandbox can be started again after
// the restore has ended it.
func (r *restoration) possible() error {
	if r.c.AutoRemove {
		return hint(fmt.Errorf("%w: its engine removes it as soon as it stops (it was started with --rm), and a restore stops it", runtime.ErrState),
			"Start it again without --rm; checkpoints of it can be taken all the same.")
	}
	if r.c.Busy != "" {
		return hint(fmt.Errorf("%w: %s", runtime.ErrState, r.c.Busy), r.c.Remedy)
	}
	if r.full() && r.c.NoRestore != "" {
		return hint(hint(fmt.Errorf("%w: %s", runtime.ErrUnsupported, r.c.NoRestore), r.c.Remedy),
			fmt.Sprintf("Or restore the files alone: agentbox restore %s %s --files-only", r.sb.Name, short(r.row.ID)))
	}
	return checkSources(r.spec)
}

// checkTools proves that the programs that restore processes are present.
func (r *restoration) checkTools() error {
	if !r.full() {
		return nil
	}
	remedy := fmt.Sprintf("Install it (agentbox doctor tells more), or restore the files alone: agentbox restore %s %s --files-only", r.sb.Name, short(r.row.ID))
	if _, err := criu.Program(); err != nil {
		return hint(
			fmt.Errorf("%w: processes cannot be restored without criu, which is not installed", runtime.ErrUnsupported),
			remedy)
	}
	if _, err := exec.LookPath(r.c.Runtime.Binary); err != nil {
		return hint(fmt.Errorf("%w: OCI runtime: %w", runtime.ErrUnsupported, err), remedy)
	}
	return nil
}

// mountsPart is the bind mounts of the sandbox, and the volumes that stay as they are.
type mountsPart struct {
	noWork
	*restoration
}

// prepare proves that bind mounts can be made over the staged files, and that the files
// that the checkpoint's processes have open in the mounts are as CRIU expects them: the
// restore does not put those back.
func (r *mountsPart) prepare(ctx context.Context) error {
	if r.resumed {
		return nil
	}
	if err := r.checkTargets(ctx); err != nil || !r.full() {
		return err
	}
	return r.checkOpened(r.processes.images)
}

// checkOpened checks the files that processes have open, according to the images in a directory.
func (r *mountsPart) checkOpened(images string) error {
	files, err := criu.OpenFiles(images)
	if err != nil {
		return err
	}
	jails := map[string]*policy.Jail{}
	defer func() {
		for _, j := range jails {
			_ = j.Close()
		}
	}()
	managed := r.reader.Manifest().Managed
	for _, f := range files {
		if secret, in := strings.CutPrefix(f.Path, runtime.SecretsDir+"/"); in && f.HasSize {
			if err := r.secrets.checkSize(secret, f.Size); err != nil {
				return err
			}
		}
		switch f.Mode & unix.S_IFMT {
		case unix.S_IFCHR, unix.S_IFBLK, unix.S_IFSOCK:
			continue // terminals and devices, which CRIU opens in its own way
		}
		source, rest, kind := r.bound(f.Path)
		if _, put := managed[f.Path]; kind != "bind" || put && r.c.Managed[f.Path] != "" {
			continue
		}
		if err := check(jails, source, rest, f); err != nil {
			return hint(fmt.Errorf("%w: %s, which a process of the checkpoint has open, %w; it lies in a bind mount (%s) and is not part of the checkpoint", runtime.ErrState, f.Path, err, source),
				fmt.Sprintf("Put it back as it was, or restore the files alone: agentbox restore %s %s --files-only",
					r.sb.Name, short(r.row.ID)))
		}
	}
	return nil
}

// checkTargets proves that no bind's source has turned from a directory into
// something else, or the other way round, since its mount point was made.
func (r *mountsPart) checkTargets(ctx context.Context) error {
	targets := map[string]runtime.Mount{}
	for _, m := range r.spec.Mounts {
		if _, _, in := r.bound(path.Dir(path.Clean(m.Target))); m.Type == "bind" && in == "" {
			targets[inTree(path.Clean(m.Target))] = m // else its mount point is in another mount
		}
	}
	if len(targets) == 0 {
		return nil
	}

	for e, err := range worktree.Entries(ctx, r.reader, 0) {
		if err != nil {
			return err
		}
		m, is := targets[e.Path]
		if !is {
			continue
		}
		delete(targets, e.Path)
		if e.Type == overlay.TypeDir || e.Type == overlay.TypeFile {
			if err := checkTarget(m, e.Type == overlay.TypeDir); err != nil {
				return err
			}
		}
	}

	for _, m := range targets {
		for _, layer := range r.c.Lower {
			jail, err := policy.Open(layer)
			if err != nil {
				return err
			}
			info, err := jail.Stat(m.Target)
			_ = jail.Close()
			if err != nil {
				continue
			}
			if info.IsDir() || info.Mode().IsRegular() {
				if err := checkTarget(m, info.IsDir()); err != nil {
					return err
				}
			}
			break
		}
	}
	return nil
}

func checkTarget(m runtime.Mount, dir bool) error {
	source, err := os.Stat(m.Source)
	if err != nil {
		return err
	}
	if dir != source.IsDir() {
		return hint(fmt.Errorf("%w: bind source %s cannot be mounted at %s: one of them is a directory, the other is not", runtime.ErrState, m.Source, m.Target),
			"Put back what was there when the sandbox was made.")
	}
	return nil
}

// bound finds the mount that contains a path of the sandbox: its type, empty if there is
// none, its source on the host, and the rest of the path below it.
func (r *mountsPart) bound(name string) (source, rest, kind string) {
	longest := -1
	for _, m := range r.spec.Mounts {
		target := path.Clean(m.Target)
		if below, in := strings.CutPrefix(name, target); in && (below == "" || below[0] == '/') &&
			len(target) > longest {
			longest, source, rest, kind = len(target), m.Source, below, m.Type
			if dir := r.volume(m.Source); kind == "volume" && dir != "" {
				source, kind = dir, "bind"
			}
		}
	}
	if file := r.c.Managed[name]; file != "" && len(name) > longest {
		return file, "", "bind"
	}
	return source, rest, kind
}

// volume returns where the files of a volume are that the restore leaves as it is; empty:
// the checkpoint has the volume.
func (r *mountsPart) volume(name string) string {
	for _, v := range r.reader.Manifest().Volumes {
		if v.Name == name {
			return ""
		}
	}
	for _, v := range r.c.Volumes {
		if v.Name == name {
			return v.Path
		}
	}
	return ""
}

// check compares a file below a bind's source, which other processes may write, with what
// CRIU recorded about it.
func check(jails map[string]*policy.Jail, source, rest string, f criu.OpenFile) error {
	var info fs.FileInfo
	var err error
	if rest == "" {
		info, err = os.Stat(source)
	} else {
		jail := jails[source]
		if jail == nil {
			if jail, err = policy.Open(source); err != nil {
				return err
			}
			jails[source] = jail
		}
		// CRIU follows a symlink, too.
		info, err = jail.Stat(rest)
	}
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, runtime.ErrNotFound) {
		return errors.New("is gone")
	}
	if err != nil {
		return fmt.Errorf("cannot be looked at: %w", err)
	}
	mode := f.Mode
	if st, ok := info.Sys().(*syscall.Stat_t); ok {
		mode = st.Mode
	}
	if f.HasMode && mode&unix.S_IFMT != f.Mode&unix.S_IFMT {
		return errors.New("is now of another type")
	}
	if f.HasSize && info.Mode().IsRegular() && info.Size() != f.Size {
		return fmt.Errorf("has %d bytes now and had %d then", info.Size(), f.Size)
	}
	if f.HasMode && mode != f.Mode {
		return fmt.Errorf("has mode %04o now and had %04o then", mode&0o7777, f.Mode&0o7777)
	}
	return nil
}
