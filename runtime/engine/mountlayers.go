package engine

import (
	"bufio"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/guard"
	"github.com/agentbox/agentbox/overlay"
	"github.com/agentbox/agentbox/runtime"
)

// applyTar extracts the archive that write produces into an empty directory.
func applyTar(ctx context.Context, dir string, write func(*overlay.TarWriter) error) error {
	r, w := io.Pipe()
	read := guard.Start(func() error {
		_, err := overlay.Apply(ctx, r, dir, overlay.ApplyOptions{})
		_ = r.CloseWithError(err) // the writer waits for it
		return err
	})
	out := bufio.NewWriterSize(w, 256<<10)
	t := overlay.NewTarWriter(out)
	err := guard.Do(func() error { return write(t) })
	if err == nil {
		err = errors.Join(t.Close(), out.Flush())
	}
	_ = w.CloseWithError(err)
	return cmp.Or(<-read, err) // a reader that fails for the writer's error wraps it
}

// writeTree archives the tree of an upperdir as it is, with all marks of overlayfs.
func writeTree(ctx context.Context, opts overlay.ViewOptions, w *overlay.TarWriter) (err error) {
	tree, err := opts.Tree()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, tree.Close()) }()
	for e, err := range overlay.TreeEntries(tree) {
		if err == nil {
			err = w.Header(e)
		}
		if err == nil && e.DataSize() > 0 && e.Hardlink == "" {
			err = copyData(func() (io.ReadCloser, error) { return opts.Data.Data(ctx, e) }, w)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func copyData(open func() (io.ReadCloser, error), w io.Writer) error {
	data, err := open()
	if err != nil {
		return err
	}
	_, err = io.Copy(w, data)
	return errors.Join(err, data.Close())
}

// overMounts is the layer above that of the upperdir: what is mounted over a sandbox's files, as
// files, so that one mount shows everything. What is not recorded is an empty directory.
type overMounts struct {
	ctx  context.Context
	v    *overlay.View
	opts overlay.ViewOptions

	entries map[string]overlay.Entry
	data    map[string][]byte        // of files that are bound
	filled  map[string]*overlay.View // what is recorded of mounts
}

const opaqueMark = "trusted.overlay.opaque"

// collect finds the paths that the layer has.
func (o *overMounts) collect() error {
	o.entries, o.data = map[string]overlay.Entry{}, map[string][]byte{}
	o.filled = map[string]*overlay.View{}
	if err := o.add("."); err != nil {
		return err
	}
	for at, m := range o.v.Mounts() {
		e, ok, err := o.entry(at)
		if err != nil {
			return err
		}
		if !ok || e.Type != overlay.TypeDir {
			continue
		}
		if err := o.add(at); err != nil {
			return err
		}
		if m.Files != nil {
			o.filled[at] = m.Files
		}
		if e.Xattrs = maps.Clone(e.Xattrs); e.Xattrs == nil {
			e.Xattrs = map[string]string{}
		}
		e.Xattrs[opaqueMark] = "y"
		o.entries[at] = e
	}
	for name, b := range o.opts.Bound {
		at := strings.TrimPrefix(name, "/")
		e, ok, err := o.entry(at)
		if err != nil {
			return err
		}
		if !ok || e.Type != overlay.TypeFile || o.mounted(at) {
			continue
		}
		if err := o.add(at); err != nil {
			return err
		}
		o.data[at] = b.Data
	}
	return nil
}

// mounted reports whether a path lies in a mount.
func (o *overMounts) mounted(at string) bool {
	for top := range o.v.Mounts() {
		if inOrAt(at, top) {
			return true
		}
	}
	return false
}

// entry describes what is at a path itself.
func (o *overMounts) entry(at string) (overlay.Entry, bool, error) {
	real, e, err := o.v.Resolve(at, false)
	if errors.Is(err, runtime.ErrNotFound) || err == nil && (e == nil || real != at) {
		return overlay.Entry{}, false, nil
	}
	if err != nil {
		return overlay.Entry{}, false, err
	}
	return escaped(*e), true, nil
}

// add has the layer have a path, and the directories that it is in.
func (o *overMounts) add(at string) error {
	if _, ok := o.entries[at]; ok {
		return nil
	}
	e, ok, err := o.entry(at)
	if err == nil && !ok {
		err = fmt.Errorf("%q: %w", at, runtime.ErrCorrupt) // it was there a moment ago, and is recorded
	}
	if err != nil {
		return err
	}
	o.entries[at] = e
	if at == "." {
		return nil
	}
	return o.add(filepath.Dir(at))
}

// escaped has attributes that overlayfs would take for its own under the names by which it shows them.
func escaped(e overlay.Entry) overlay.Entry {
	const own = "trusted.overlay."
	e.Hardlink = ""
	set := map[string]string{}
	for name, value := range e.Xattrs {
		if rest, ok := strings.CutPrefix(name, own); ok {
			name = own + "overlay." + rest
		}
		set[name] = value
	}
	e.Xattrs = nil
	if len(set) > 0 {
		e.Xattrs = set
	}
	return e
}

// write archives the layer, without what is in mounts.
func (o *overMounts) write(w *overlay.TarWriter) error {
	for _, at := range slices.SortedFunc(maps.Keys(o.entries), overlay.ComparePaths) {
		e := o.entries[at]
		e.Path = at
		if err := w.Header(e); err != nil {
			return err
		}
		if _, err := w.Write(o.data[at]); err != nil {
			return err
		}
	}
	return nil
}

// fill lays out what is in mounts.
func (o *overMounts) fill(top string) error {
	for at, files := range o.filled {
		dir := filepath.Join(top, at)
		if err := applyTar(o.ctx, dir, func(w *overlay.TarWriter) error { return writeView(files, w) }); err != nil {
			return fmt.Errorf("what is mounted at /%s: %w", at, err)
		}
		if err := unix.Setxattr(dir, opaqueMark, []byte("y"), 0); err != nil {
			return err
		}
	}
	return nil
}

// writeView archives all that a view shows.
func writeView(v *overlay.View, w *overlay.TarWriter) error {
	first := map[string]string{} // names of inodes
	return v.Walk(".", func(f *overlay.ViewFile) error {
		linked, ok := first[f.Inode]
		if ok {
			e := escaped(f.Entry)
			e.Hardlink, e.Size, e.Extents = linked, 0, nil
			return w.Header(e)
		}
		if f.Inode != "" {
			first[f.Inode] = f.Path
		}
		if f.Type != overlay.TypeFile {
			return w.Header(escaped(f.Entry))
		}
		data, err := f.Open()
		if err != nil {
			return err
		}
		if err = w.Header(escaped(f.Entry)); err == nil {
			_, err = io.Copy(w, data)
		}
		return errors.Join(err, data.Close())
	})
}
