package bundle

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	pathrs "github.com/cyphar/filepath-securejoin/pathrs-lite"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/overlay"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/internal/apply"
	"github.com/agentbox/agentbox/runtime/internal/kernel"
)

// A workspace is an overlay over a directory of the host, mounted beside the root filesystem and
// bound into the sandbox. So neither the sandbox nor a restore ever writes to the directory.

// workspacesDir is the directory of the workspaces in a sandbox's own, one below it for each.
const workspacesDir = "workspaces"

// Workspace is one workspace of a sandbox.
type Workspace struct {
	overlay.Mount
	Path string // where it is in the sandbox
}

// Workspaces lists the workspaces of a sandbox.
func (p Place) Workspaces(s runtime.Spec) (list []Workspace) {
	for i, m := range s.Mounts {
		if m.Type != runtime.MountWorkspace {
			continue
		}
		dir := filepath.Join(p.Dir, workspacesDir, strconv.Itoa(i))
		list = append(list, Workspace{
			Path: path.Clean(m.Target),
			Mount: overlay.Mount{
				Lower: []string{m.Source}, Upper: filepath.Join(dir, "upper"), Work: filepath.Join(dir, "work"),
				Target: filepath.Join(dir, "merged"), IDs: s.IDs,
			},
		})
	}
	return list
}

// Volumes describes the workspaces of a sandbox, and Applies is the directory that keeps what is
// known of applies of them.
func (p Place) Volumes(s runtime.Spec) (list []runtime.Volume) {
	for _, w := range p.Workspaces(s) {
		list = append(list, runtime.Volume{Name: w.Path, Path: w.Upper, Target: w.Path, Lower: w.Lower[0]})
	}
	return list
}

// Applies: see Volumes.
func (p Place) Applies() string { return filepath.Join(p.Dir, workspacesDir) }

// SettleApply finishes an apply of the workspaces that was killed, or takes it back: what the host's
// directories had may be in it.
func (p Place) SettleApply(s runtime.Spec, log *slog.Logger) error {
	_, err := apply.Settle(apply.OfWorkspaces(p.Applies(), s.Name, p.Volumes(s), log))
	return err
}

// layOutWorkspaces makes the directories of the workspaces. To the sandbox, an upperdir is the
// inode of the workspace's top directory, so it takes after the host's.
func (p Place) layOutWorkspaces(s runtime.Spec) error {
	list := p.Workspaces(s)
	if len(list) == 0 {
		return nil
	}
	made := []string{filepath.Join(p.Dir, workspacesDir)}
	for _, w := range list {
		made = append(made, filepath.Dir(w.Upper))
	}
	// The OCI runtime and CRIU pass through them with the rights of a sandbox's root.
	for _, dir := range made {
		if err := errors.Join(os.Mkdir(dir, 0o711), os.Chmod(dir, 0o711)); err != nil {
			return err
		}
	}
	for _, w := range list {
		for _, dir := range []string{w.Upper, w.Work, w.Target} {
			if err := os.Mkdir(dir, 0o700); err != nil {
				return err
			}
		}
		if err := takeAfter(w.Upper, w.Lower[0]); err != nil {
			return fmt.Errorf("workspace %s: %w", w.Lower[0], err)
		}
	}
	return nil
}

// takeAfter gives a directory the owner, mode and times of another one.
func takeAfter(dir, of string) error {
	var st unix.Stat_t
	if err := unix.Stat(of, &st); err != nil {
		return &fs.PathError{Op: "stat", Path: of, Err: err}
	}
	if err := os.Chown(dir, int(st.Uid), int(st.Gid)); err != nil {
		return err
	}
	if err := unix.Chmod(dir, st.Mode&0o7777); err != nil {
		return err
	}
	return unix.UtimesNanoAt(unix.AT_FDCWD, dir, []unix.Timespec{st.Atim, st.Mtim}, unix.AT_SYMLINK_NOFOLLOW)
}

// MountWorkspaces mounts the workspaces of a sandbox beside its root filesystem.
func (p Place) MountWorkspaces(s runtime.Spec) error {
	for _, w := range p.Workspaces(s) {
		// Its owner may have put a link in its place, to what only root can read.
		if real, err := filepath.EvalSymlinks(w.Lower[0]); err == nil && real != filepath.Clean(w.Lower[0]) {
			return &fault.Error{Err: fmt.Errorf("workspace %s: %s leads to %s: %w", w.Path, w.Lower[0], real, fault.ErrDenied),
				Hint: "Put the directory back where it was, or create a sandbox over the other one."}
		}
		if err := w.Mount.Mount(); errors.Is(err, fault.ErrNotFound) {
			return &fault.Error{Err: fmt.Errorf("workspace %s: %w", w.Path, err),
				Hint: "Put the directory back where it was: the sandbox has the rest of its files in it."}
		} else if err != nil {
			return fmt.Errorf("workspace %s: %w", w.Path, err)
		}
	}
	return nil
}

// unmountWorkspaces unmounts all workspaces that there may be.
func (p Place) unmountWorkspaces(ctx context.Context, log *slog.Logger) error {
	dir := filepath.Join(p.Dir, workspacesDir)
	list, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	errs := []error{err}
	for _, e := range list {
		if merged := filepath.Join(dir, e.Name(), "merged"); isDir(merged) { // else it is half-made
			errs = append(errs, unmount(ctx, log, merged))
		}
	}
	return errors.Join(errs...)
}

func isDir(path string) bool {
	info, err := os.Lstat(path)
	return err == nil && info.IsDir()
}

// showWorkspaces binds the mounted workspaces of a stopped sandbox into its root filesystem, as
// they are in a running one. It follows nothing in the sandbox's files out of them.
func (p Place) showWorkspaces(root *os.File, s runtime.Spec) error {
	list := p.Workspaces(s)
	slices.SortStableFunc(list, func(a, b Workspace) int { // none hides another
		return strings.Count(a.Path, "/") - strings.Count(b.Path, "/")
	})
	for _, w := range list {
		if err := s.IDs.AsRoot(func() error { return makeDir(root, w.Path) }); err != nil {
			return fmt.Errorf("workspace %s: %w", w.Path, err)
		}
		at, err := pathrs.OpenatInRoot(root, w.Path)
		if err != nil {
			return fmt.Errorf("workspace %s: %w", w.Path, err)
		}
		err = kernel.BindTo(w.Target, at)
		if err = errors.Join(err, at.Close()); err != nil {
			return fmt.Errorf("workspace %s: %w", w.Path, err)
		}
	}
	return nil
}
