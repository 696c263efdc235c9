package engine

import (
	"bytes"
	"context"
	"encoding/base64"
	"errors"
	"io"
	"io/fs"
	"os"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/overlay"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/engine/worktree"
	"github.com/agentbox/agentbox/runtime/store"
)

// contents finds the data of files on the two sides of a Diff.
type contents struct {
	d     *differ
	areas []area
	files []([2]map[string]overlay.Entry) // of each area's checkpoints: the requested files
}

// contents reads the entries at the paths of list from each checkpoint's file lists.
func (d *differ) contents(ctx context.Context, list []runtime.Change, areas []area) (*contents, error) {
	c := &contents{d: d, areas: areas, files: make([]([2]map[string]overlay.Entry), len(areas))}
	for n, a := range areas {
		for i, from := range a.from {
			if from == nil {
				continue
			}
			want := map[string]bool{}
			for _, change := range list {
				if at, in := areaOf(areas, inTree(rawPath(change, i == 1))); at == n {
					want[in] = true
				}
			}
			var err error
			if c.files[n][i], err = wanted(ctx, from, a.tree[i], want); err != nil {
				return nil, err
			}
		}
	}
	return c, nil
}

// wanted reads the entries of files from a tree of a checkpoint; those of hard links are of the
// files that they are links to.
func wanted(
	ctx context.Context, from *worktree.Target, tree int, want map[string]bool,
) (map[string]overlay.Entry, error) {
	all := map[string]overlay.Entry{}
	targets := map[string][]string{} // of hard links
	for entry, err := range from.Entries(ctx, tree) {
		switch {
		case err != nil:
			return nil, err
		case entry.Type != overlay.TypeFile || !want[entry.Path]:
		case entry.Hardlink == "":
			all[entry.Path] = entry
		default:
			targets[entry.Hardlink] = append(targets[entry.Hardlink], entry.Path)
		}
	}
	if len(targets) == 0 {
		return all, nil
	}
	for entry, err := range from.Entries(ctx, tree) {
		if err != nil {
			return nil, err
		}
		for _, name := range targets[entry.Path] {
			all[name] = entry
		}
	}
	return all, nil
}

// rawPath returns the path of a change in bytes; unless newer, the old one of a rename.
func rawPath(c runtime.Change, newer bool) string {
	text, b64 := c.Path, c.PathB64
	if !newer && c.Change == string(overlay.Renamed) {
		text, b64 = c.From, c.FromB64
	}
	if raw, err := base64.StdEncoding.DecodeString(b64); err == nil && b64 != "" {
		return string(raw)
	}
	return text
}

// open is an openContent.
func (c *contents) open(ctx context.Context, change runtime.Change, newer bool) (io.ReadCloser, error) {
	i := 0
	if newer {
		i = 1
	}
	name := rawPath(change, newer)
	if m, ok := c.d.managed[i][name]; ok && c.d.covered(inTree(name)) {
		return io.NopCloser(bytes.NewReader(m.Data)), nil
	}
	n, name := areaOf(c.areas, inTree(name))
	a := c.areas[n]
	if entry, ok := c.files[n][i][name]; ok {
		return c.data(ctx, a.from[i].Reader, entry)
	}
	layers := a.lower
	if dir := a.sides[i].Dir; dir != "" {
		layers = append([]string{dir}, layers...)
	}
	for _, layer := range layers {
		f, err := openIn(layer, name)
		if !errors.Is(err, fs.ErrNotExist) {
			return f, err
		}
	}
	return nil, fs.ErrNotExist
}

// data reads a file of a checkpoint, holes included.
func (c *contents) data(ctx context.Context, r *store.Reader, e overlay.Entry) (io.ReadCloser, error) {
	if !e.Sparse() {
		return r.Source().Data(ctx, e)
	}
	if e.Size > maxPatchFile {
		return io.NopCloser(bytes.NewReader(make([]byte, maxPatchFile+1))), nil // too long for its text to matter
	}
	in, err := r.Source().Data(ctx, e)
	if err != nil {
		return nil, err
	}
	whole := make([]byte, e.Size)
	for _, x := range e.Extents {
		if _, err := io.ReadFull(in, whole[x.Off:x.Off+x.Len]); err != nil {
			return nil, errors.Join(err, in.Close())
		}
	}
	return io.NopCloser(bytes.NewReader(whole)), in.Close()
}

// openIn opens a regular file below a directory, following no links.
func openIn(dir, name string) (io.ReadCloser, error) {
	root, err := os.OpenFile(dir, unix.O_PATH|unix.O_DIRECTORY, 0)
	if err != nil {
		return nil, err
	}
	defer root.Close()
	fd, err := unix.Openat2(int(root.Fd()), name, &unix.OpenHow{
		Flags:   unix.O_RDONLY | unix.O_NONBLOCK | unix.O_CLOEXEC | unix.O_NOFOLLOW,
		Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_MAGICLINKS,
	})
	switch err {
	case nil:
	case unix.ENOTDIR, unix.ELOOP, unix.ENXIO:
		return nil, fs.ErrNotExist
	default:
		return nil, &fs.PathError{Op: "open", Path: name, Err: err}
	}
	f := os.NewFile(uintptr(fd), name)
	info, err := f.Stat()
	if err == nil && !info.Mode().IsRegular() {
		err = fs.ErrNotExist
	}
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}
