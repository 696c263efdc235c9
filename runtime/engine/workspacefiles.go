package engine

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/runtime"
)

// boundWorkspaces refuses workspaces with more files in all than a limit, since every checkpoint looks at
// each file. The error names the directories with the most files.
func boundWorkspaces(ctx context.Context, mounts []runtime.Mount, most int64) error {
	if most == 0 {
		most = runtime.UsualWorkspaceFiles
	}
	if most < 0 {
		return nil
	}
	left := most
	for _, m := range mounts {
		if m.Type != runtime.MountWorkspace {
			continue
		}
		n := counting{ctx: ctx, left: left, in: map[string]int64{}}
		err := n.tree(m.Source)
		if errors.Is(err, errEnough) {
			return hint(fmt.Errorf("%w: workspace %s: more than %d files, which every checkpoint looks at%s",
				runtime.ErrInvalid, m.Source, most, n.largest(m.Source)),
				fmt.Sprintf("Choose a smaller directory in it, or raise the limit: --workspace-files %d", 4*most))
		}
		if err != nil {
			return fmt.Errorf("workspace %s: %w", m.Source, err)
		}
		left = n.left
	}
	return nil
}

// readBefore reports whether a checkpoint of another sandbox has read the directories of all workspaces:
// they need not be counted again.
func (bx *sandboxes) readBefore(mounts []runtime.Mount) bool {
	return !slices.ContainsFunc(mounts, func(m runtime.Mount) bool {
		if m.Type != runtime.MountWorkspace {
			return false
		}
		_, err := os.Lstat(bx.store.BelowCachePath(m.Source))
		return err != nil
	})
}

// counting counts what is in a directory, until it is more than is left.
type counting struct {
	ctx  context.Context
	left int64
	in   map[string]int64 // by directory, down to countDepth: what was found below it
}

// countDepth is how deep the directories lie that are named, below that of the workspace.
const countDepth = 3

// tree counts without following symlinks, or entering what is mounted in the directory: neither would a
// checkpoint.
func (n *counting) tree(dir string) error {
	top, err := unix.Open(dir, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(top)
	for todo := []string{"."}; len(todo) > 0; {
		rel := todo[len(todo)-1]
		todo = todo[:len(todo)-1]
		fd, err := unix.Openat2(top, rel, &unix.OpenHow{
			Flags:   unix.O_RDONLY | unix.O_DIRECTORY | unix.O_NOFOLLOW | unix.O_CLOEXEC,
			Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_XDEV,
		})
		if err != nil && rel != "." {
			continue // it is gone or replaced by now, or a mount; what fails a checkpoint says so itself
		}
		if err != nil {
			return err
		}
		f := os.NewFile(uintptr(fd), rel)
		dirs, err := n.directory(f, rel)
		f.Close()
		if err != nil {
			return err
		}
		todo = append(todo, dirs...)
	}
	return nil
}

// directory counts what is in one directory, and returns the directories in it.
func (n *counting) directory(f *os.File, rel string) (dirs []string, err error) {
	for {
		if err := n.ctx.Err(); err != nil {
			return nil, context.Cause(n.ctx)
		}
		list, err := f.ReadDir(1000)
		n.left -= int64(len(list))
		n.found(rel, int64(len(list)))
		for _, e := range list {
			if e.IsDir() {
				dirs = append(dirs, path.Join(rel, e.Name()))
			}
		}
		switch {
		case n.left < 0:
			return nil, errEnough
		case errors.Is(err, io.EOF):
			return dirs, nil
		case err != nil:
			return dirs, nil // it is being removed
		}
	}
}

// found adds to the directories that a directory is in, and is.
func (n *counting) found(rel string, count int64) {
	if rel == "." {
		return
	}
	parts := strings.Split(rel, "/")
	for i := range min(len(parts), countDepth) {
		n.in[strings.Join(parts[:i+1], "/")] += count
	}
}

// largest names the directories that have the most of what was found: of one with almost all of another's,
// the inner one.
func (n *counting) largest(dir string) string {
	var all []string
	for rel := range n.in {
		all = append(all, rel)
	}
	slices.SortFunc(all, func(a, b string) int { // the inner ones first, among those with as many
		if n.in[a] != n.in[b] {
			return int(n.in[b] - n.in[a])
		}
		return len(b) - len(a)
	})
	total := int64(0)
	for rel, count := range n.in {
		if !strings.Contains(rel, "/") {
			total += count
		}
	}
	var named []string
	for _, rel := range all {
		related := slices.ContainsFunc(named, func(other string) bool { return inOrAt(rel, other) || inOrAt(other, rel) })
		inner := slices.ContainsFunc(all, func(other string) bool {
			return other != rel && inOrAt(other, rel) && n.in[other]*10 >= n.in[rel]*9
		})
		if !related && !inner && n.in[rel]*10 >= total {
			named = append(named, rel)
		}
		if len(named) == 3 {
			break
		}
	}
	if len(named) == 0 {
		return ""
	}
	for i, rel := range named {
		named[i] = fmt.Sprintf("%s (%d)", path.Join(dir, rel), n.in[rel])
	}
	return "; of those found most are in " + strings.Join(named, ", ")
}
