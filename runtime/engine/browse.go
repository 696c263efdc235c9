package engine

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/cptar"
	"github.com/agentbox/agentbox/overlay"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/engine/worktree"
	"github.com/agentbox/agentbox/runtime/internal/changes"
	"github.com/agentbox/agentbox/runtime/store"
)

// recordedState is SANDBOX@CHECKPOINT, or SANDBOX@image.
type recordedState struct{ sandbox, state string }

// splitState reports whether a reference names a recorded state. The names of sandboxes have no @.
func splitState(ref string) (recordedState, bool) {
	at := strings.LastIndexByte(ref, '@')
	if at <= 0 {
		return recordedState{}, false
	}
	return recordedState{ref[:at], ref[at+1:]}, true
}

// onState is about a sandbox, or about a checkpoint of it.
func onState(verb, ref string) *runtime.Op {
	if _, ok := splitState(ref); ok {
		return onCheckpoint(verb, ref)
	}
	return onSandbox(verb, ref)
}

// onView runs fn on the files of a recorded state. fn asks for the path p first.
func (cs *checkpoints) onView(
	ctx context.Context, ref recordedState, p string, fn func(*overlay.View) error,
) (err error) {
	return cs.onFiles(ctx, ref, func(v *overlay.View, _ overlay.ViewOptions, _ string) error {
		if err := v.Foresee(p); err != nil {
			return err
		}
		return fn(v)
	})
}

// onFiles is onView for the whole tree. fn gets what the view is made of, and the digest of the image.
func (cs *checkpoints) onFiles(
	ctx context.Context, ref recordedState, fn func(v *overlay.View, of overlay.ViewOptions, image string) error,
) (err error) {
	if ref.state == "" {
		return fmt.Errorf("%w: it names no checkpoint after the @", runtime.ErrInvalid)
	}
	d, host, _, err := cs.differ(ctx, ref.sandbox)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, d.close()) }()
	opts := overlay.ViewOptions{Mounts: map[string]overlay.ViewMount{}}
	if opts.Lower, err = layers(ctx, d.sb, d.c, host); err != nil {
		return err
	}
	// Those of the mounts are open before the view is.
	defer func() {
		for _, m := range opts.Mounts {
			if m.Files != nil {
				m.Files.Close()
			}
		}
	}()
	if ref.state != runtime.DiffImage {
		row, err := d.checkpoint(ctx, ref.state)
		if err != nil {
			return err
		}
		r, err := cs.store.OpenCheckpoint(ctx, row.ID)
		if err != nil {
			return err
		}
		d.readers = append(d.readers, r)
		if err := d.ofCheckpoint(ctx, row, r, host, &opts); err != nil {
			return err
		}
	}
	v, err := overlay.NewView(ctx, opts)
	if err != nil {
		return err
	}
	defer v.Close()
	return fn(v, opts, d.sb.ImageDigest)
}

// ofCheckpoint says what the files of a checkpoint are, apart from the layers.
func (d *differ) ofCheckpoint(
	ctx context.Context, row store.Checkpoint, r *store.Reader, host Host, opts *overlay.ViewOptions,
) error {
	s, err := specOf(row.SandboxID, row.Spec)
	if err != nil {
		return err
	}
	tree := func(n int) func() (io.ReadCloser, error) {
		return func() (io.ReadCloser, error) { return r.Tree(ctx, n) }
	}
	opts.Tree, opts.Data, opts.Bound = tree(0), r.Source(), map[string]overlay.BoundFile{}
	m := r.Manifest()
	for name, f := range m.Managed {
		// Their own times are not recorded.
		opts.Bound[name] = overlay.BoundFile{Mode: f.Mode, UID: f.UID, GID: f.GID, Data: f.Data,
			Mtime: overlay.Time{Sec: row.Created.Unix(), Nsec: int64(row.Created.Nanosecond())}}
	}
	if !host.Properties().FilesOnly {
		opts.Mounts["/proc"] = overlay.ViewMount{Kind: "proc"}
		opts.Mounts["/sys"] = overlay.ViewMount{Kind: "sysfs"}
		opts.Mounts["/dev"] = overlay.ViewMount{Kind: "devices"}
	}
	if len(s.Secrets) > 0 {
		opts.Mounts[runtime.SecretsDir] = overlay.ViewMount{Kind: "secrets"}
	}
	for _, mount := range s.Mounts {
		name, files := path.Clean(mount.Target), (*overlay.View)(nil)
		i := slices.IndexFunc(m.Volumes, func(v store.Volume) bool {
			return mount.Type == "volume" && v.Name == mount.Source ||
				mount.Type == runtime.MountWorkspace && v.Workspace() && v.Name == name
		})
		if i >= 0 {
			read := tree(1 + i)
			if below := m.Below(1 + i); below > 0 {
				read = d.once(wholeWorkspace(ctx, r, 1+i, below))
			}
			files, err = overlay.NewView(ctx, overlay.ViewOptions{Tree: read, Data: r.Source()})
			if err != nil {
				return fmt.Errorf("%s %s: %w", mount.Type, m.Volumes[i].Name, err)
			}
		}
		opts.Mounts[name] = overlay.ViewMount{Kind: mount.Type, Files: files}
	}
	return nil
}

// wholeWorkspace reads all that a workspace showed as one tree: what its upperdir would be over a
// directory that has nothing.
func wholeWorkspace(ctx context.Context, r *store.Reader, tree, below int) func() (io.ReadCloser, error) {
	empty := func(yield func(overlay.Entry, error) bool) {
		yield(overlay.Entry{Path: ".", Type: overlay.TypeDir}, nil)
	}
	to := worktree.Target{Reader: r, Moved: map[int]worktree.Moved{tree: {Below: below, Now: empty}}}
	return func() (io.ReadCloser, error) { return to.Tree(ctx, tree) }
}

// once returns read so that it is called once: what it has read is kept in a file.
func (d *differ) once(read func() (io.ReadCloser, error)) func() (io.ReadCloser, error) {
	file := ""
	return func() (io.ReadCloser, error) {
		if file != "" {
			return os.Open(file)
		}
		dir, err := d.scratchDir()
		if err != nil {
			return nil, err
		}
		r, err := read()
		if err != nil {
			return nil, err
		}
		to, err := os.CreateTemp(dir, "whole-")
		if err != nil {
			return nil, errors.Join(err, r.Close())
		}
		_, err = io.Copy(to, r)
		if err := errors.Join(err, r.Close(), to.Close()); err != nil {
			return nil, errors.Join(err, os.Remove(to.Name()))
		}
		file = to.Name()
		return os.Open(file)
	}
}

// ofKernel reports whether a mount of a View has nothing that a copy of a sandbox would have,
// either.
func ofKernel(mount string) bool { return mount == "proc" || mount == "sysfs" || mount == "devices" }

// stat describes a path; see cptar.StatPath.
func (cs *checkpoints) stat(ctx context.Context, ref recordedState, p string) (out runtime.PathStat, err error) {
	err = cs.onView(ctx, ref, p, func(v *overlay.View) error {
		_, e, err := v.Resolve(p, false)
		if err != nil {
			return err
		}
		if e == nil {
			return notThere(p)
		}
		out = runtime.PathStat{
			Name: path.Base(p), Mode: uint32(fileMode(e)), Size: e.Size, Dir: e.Type == overlay.TypeDir,
		}
		if e.Type == overlay.TypeSymlink {
			out.Size = int64(len(e.Link))
			to, _, err := v.Resolve(p, true)
			if err != nil {
				return err
			}
			out.Link = path.Join("/", to)
		}
		return nil
	})
	return out, err
}

func notThere(p string) error { return fmt.Errorf("%q: %w", p, runtime.ErrNotFound) }

// fileMode is the mode of an entry as io/fs has it.
func fileMode(e *overlay.Entry) fs.FileMode {
	m := fs.FileMode(e.Mode & 0o777)
	switch e.Type {
	case overlay.TypeDir:
		m |= fs.ModeDir
	case overlay.TypeSymlink:
		m |= fs.ModeSymlink
	case overlay.TypeFifo:
		m |= fs.ModeNamedPipe
	case overlay.TypeSocket:
		m |= fs.ModeSocket
	case overlay.TypeChar:
		m |= fs.ModeDevice | fs.ModeCharDevice
	case overlay.TypeBlock:
		m |= fs.ModeDevice
	}
	if e.Mode&unix.S_ISUID != 0 {
		m |= fs.ModeSetuid
	}
	if e.Mode&unix.S_ISGID != 0 {
		m |= fs.ModeSetgid
	}
	if e.Mode&unix.S_ISVTX != 0 {
		m |= fs.ModeSticky
	}
	return m
}

// list lists a path; see cptar.List.
func (cs *checkpoints) list(
	ctx context.Context, ref recordedState, p string, recursive bool, fn func(runtime.FileEntry) error,
) error {
	return cs.onView(ctx, ref, p, func(v *overlay.View) error {
		real, e, err := v.Resolve(p, true)
		if err == nil && (e == nil || e.Type != overlay.TypeDir) {
			real, e, err = v.Resolve(p, false) // a symlink to a file is listed itself
		}
		if err != nil {
			return err
		}
		if e == nil {
			return notThere(p)
		}
		return v.Walk(real, func(f *overlay.ViewFile) error {
			out := changes.Entry(&f.Entry)
			out.Mount = f.Mount
			if err := fn(out); err != nil {
				return err
			}
			if f.Type == overlay.TypeDir && !recursive && f.Path != real {
				return fs.SkipDir
			}
			return nil
		})
	})
}

// entryOf is what was found in a sandbox.
func entryOf(f cptar.Listed) runtime.FileEntry {
	e := overlay.Entry{
		Path: strings.TrimPrefix(f.Path, "/"), Mode: f.Stat.Mode & 0o7777, UID: f.Stat.Uid, GID: f.Stat.Gid,
		Mtime: overlay.Time{Sec: f.Stat.Mtim.Sec, Nsec: f.Stat.Mtim.Nsec}, Link: f.Link,
	}
	switch f.Stat.Mode & unix.S_IFMT {
	case unix.S_IFDIR:
		e.Type = overlay.TypeDir
	case unix.S_IFLNK:
		e.Type = overlay.TypeSymlink
	case unix.S_IFIFO:
		e.Type = overlay.TypeFifo
	case unix.S_IFSOCK:
		e.Type = overlay.TypeSocket
	case unix.S_IFCHR, unix.S_IFBLK:
		if e.Type = overlay.TypeChar; f.Stat.Mode&unix.S_IFMT == unix.S_IFBLK {
			e.Type = overlay.TypeBlock
		}
		e.Major, e.Minor = unix.Major(f.Stat.Rdev), unix.Minor(f.Stat.Rdev)
	default:
		e.Type, e.Size = overlay.TypeFile, f.Stat.Size
	}
	return changes.Entry(&e)
}

// filter calls fn for what the options want, and for what is listed whatever they say.
func filter(
	opts runtime.ListOptions, fn func(runtime.FileEntry) error,
) (func(runtime.FileEntry) error, error) {
	if _, err := path.Match(opts.Name, ""); err != nil {
		return nil, fmt.Errorf("%w: %q is not a pattern of names", runtime.ErrInvalid, opts.Name)
	}
	types := []overlay.Type{
		"", overlay.TypeDir, overlay.TypeFile, overlay.TypeSymlink, overlay.TypeFifo, overlay.TypeSocket,
		overlay.TypeChar, overlay.TypeBlock,
	}
	if !slices.Contains(types, overlay.Type(opts.Type)) {
		return nil, fmt.Errorf("%w: %q is not a type of files", runtime.ErrInvalid, opts.Type)
	}
	first := true
	return func(e runtime.FileEntry) error {
		always := first || e.Mount != ""
		first = false
		if !always && opts.Type != "" && opts.Type != e.Type {
			return nil
		}
		if !always && opts.Name != "" {
			if matches, err := path.Match(opts.Name, path.Base(rawName(e))); err != nil || !matches {
				return err
			}
		}
		return fn(e)
	}, nil
}

// rawName is the path of an entry in bytes.
func rawName(e runtime.FileEntry) string {
	return rawPath(runtime.Change{Path: e.Path, PathB64: e.PathB64}, true)
}

// copyFrom writes a path as a tar stream; see cptar.From.
func (cs *checkpoints) copyFrom(ctx context.Context, ref recordedState, p string, w io.Writer) error {
	return cs.onView(ctx, ref, p, func(v *overlay.View) error { return copyOf(v, p, w) })
}

// copyOf writes what a view has at a path as an archive.
func copyOf(v *overlay.View, p string, w io.Writer) error {
	real, e, err := v.Resolve(p, false)
	if err != nil {
		return err
	}
	if e == nil {
		return notThere(p)
	}
	name := path.Base(p)
	if name == "." || name == ".." || name == "/" {
		name = "."
	}
	out := bufio.NewWriterSize(w, 256<<10)
	t := viewTar{w: overlay.NewTarWriter(out), top: real, name: name, first: map[string]string{}}
	if err := v.Walk(real, t.add); err != nil {
		return err
	}
	if err := t.w.Close(); err != nil {
		return err
	}
	if err := out.Flush(); err != nil {
		return err
	}
	if len(t.report.Skipped) > 0 {
		return &cptar.Partial{Report: t.report}
	}
	return nil
}

// viewTar writes what a walk finds as an archive.
type viewTar struct {
	w      *overlay.TarWriter
	top    string // of the walk
	name   string // its name in the archive
	first  map[string]string
	report cptar.Report
}

func (t *viewTar) skip(name, why string) {
	if len(t.report.Skipped) >= maxSkipped {
		t.report.SkippedMore++
		return
	}
	t.report.Skipped = append(t.report.Skipped, fmt.Sprintf("%q: %s", name, why))
}

// maxSkipped bounds what a copy names of what it left out.
const maxSkipped = 1000

func (t *viewTar) add(f *overlay.ViewFile) (err error) {
	name := t.name
	switch {
	case f.Path == t.top:
	case t.top == ".":
		name += "/" + f.Path
	default:
		name += strings.TrimPrefix(f.Path, t.top)
	}
	if len(name) >= unix.PathMax {
		return fmt.Errorf("%w: the path %.100q... is too long", runtime.ErrInvalid, name)
	}
	switch {
	case f.Mount != "" && f.Path == t.top:
		return fmt.Errorf("%w: the sandbox has a mount (%s) there, which is not part of a checkpoint",
			runtime.ErrNotFound, f.Mount)
	case f.Mount != "" && !ofKernel(f.Mount):
		t.skip(name, "what is mounted there ("+f.Mount+") is not part of the checkpoint")
	case f.Type == overlay.TypeSocket && f.Path == t.top:
		return fmt.Errorf("%w: %q is a socket, which no archive can hold", runtime.ErrUnsupported, name)
	case f.Type == overlay.TypeSocket:
		t.skip(name, "a socket has no place in an archive")
		return nil
	}
	if f.Mount != "" && f.Type != overlay.TypeDir {
		return nil
	}
	var data io.ReadCloser
	first, linked := t.first[f.Inode]
	if f.Type == overlay.TypeFile && !linked {
		if data, err = f.Open(); err != nil {
			return err
		}
		defer func() { err = errors.Join(err, data.Close()) }()
	}
	e := f.Entry
	e.Path, e.Xattrs = name, nil
	for key, value := range f.Xattrs {
		if cptar.Xattr(key) {
			if e.Xattrs == nil {
				e.Xattrs = map[string]string{}
			}
			e.Xattrs[key] = value
		}
	}
	switch {
	case linked:
		e.Hardlink, e.Size, e.Extents = first, 0, nil
	case f.Inode != "":
		t.first[f.Inode] = name
	}
	if err := t.w.Header(e); err != nil || data == nil {
		return err
	}
	_, err = io.Copy(t.w, data)
	return err
}
