package apply

import (
	"bytes"
	"context"
	"errors"
	"io"
	"io/fs"
	"maps"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/overlay"
)

// entry describes what is at a path, without a digest; nil: nothing.
func (r *Root) entry(rel string) (*overlay.Entry, uint64, error) {
	d, name, err := r.parent(rel)
	if gone(err) {
		return nil, 0, nil
	}
	if err != nil {
		return nil, 0, err
	}
	defer d.Close()
	st, err := statAt(int(d.Fd()), name)
	if gone(err) {
		return nil, 0, nil
	}
	if err != nil {
		return nil, 0, &fs.PathError{Op: "stat", Path: rel, Err: err}
	}
	e := overlay.Entry{
		Path: rel, Mode: uint32(st.Mode) & 0o7777, UID: st.Uid, GID: st.Gid,
		Mtime: overlay.Time{Sec: st.Mtime.Sec, Nsec: int64(st.Mtime.Nsec)},
	}
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFDIR:
		e.Type = overlay.TypeDir
	case unix.S_IFLNK:
		e.Type, e.Mode = overlay.TypeSymlink, 0o777
		buf := make([]byte, unix.PathMax)
		n, err := unix.Readlinkat(int(d.Fd()), name, buf)
		if err != nil {
			return nil, 0, &fs.PathError{Op: "readlink", Path: rel, Err: err}
		}
		e.Link = string(buf[:n])
	case unix.S_IFIFO:
		e.Type = overlay.TypeFifo
	case unix.S_IFSOCK:
		e.Type = overlay.TypeSocket
	case unix.S_IFCHR, unix.S_IFBLK:
		if e.Type = overlay.TypeChar; st.Mode&unix.S_IFMT == unix.S_IFBLK {
			e.Type = overlay.TypeBlock
		}
		e.Major, e.Minor = st.Rdev_major, st.Rdev_minor
	default:
		e.Type, e.Size = overlay.TypeFile, int64(st.Size)
	}
	raw, err := xattrs(procFD(d)+"/"+name, unix.Llistxattr, unix.Lgetxattr)
	if gone(err) {
		return nil, 0, nil
	}
	e.Xattrs = textXattrs(visible(raw))
	return &e, st.Ino, err
}

// alike reports whether two sides have the same, but for times.
func alike(ctx context.Context, a, b side, owners bool) (bool, error) {
	what, err := differ(ctx, a, b)
	what = slices.DeleteFunc(what, func(s string) bool {
		return s == overlay.WhatMtime || s == overlay.WhatOwner && !owners
	})
	return len(what) == 0, err
}

// differ lists in which respects two sides differ, as overlay.Change has them.
func differ(ctx context.Context, a, b side) (what []string, err error) {
	switch {
	case a.Entry == nil && b.Entry == nil:
		return nil, nil
	case a.Entry == nil || b.Entry == nil || a.Type != b.Type:
		return []string{overlay.WhatType}, nil
	}
	add := func(s string, is bool) {
		if is {
			what = append(what, s)
		}
	}
	if a.isFile() {
		same, err := sameContent(ctx, a, b)
		if err != nil {
			return nil, err
		}
		add(overlay.WhatContent, !same)
	}
	add(overlay.WhatTarget, a.Link != b.Link)
	add(overlay.WhatDevice, a.Major != b.Major || a.Minor != b.Minor)
	add(overlay.WhatMode, a.Mode != b.Mode)
	add(overlay.WhatOwner, a.UID != b.UID || a.GID != b.GID)
	add(overlay.WhatXattrs, !maps.Equal(a.Xattrs, b.Xattrs))
	add(overlay.WhatMtime, a.Mtime != b.Mtime && a.Type != overlay.TypeDir)
	return what, nil
}

// sameContent compares two files.
func sameContent(ctx context.Context, a, b side) (bool, error) {
	if a.Size != b.Size {
		return false, nil
	}
	if a.Size == 0 || a.Digest != "" && a.Digest == b.Digest && slices.Equal(a.Extents, b.Extents) {
		return true, nil
	}
	if a.Digest != "" && b.Digest != "" && a.Extents == nil && b.Extents == nil {
		return false, nil
	}
	x, err := a.open(ctx)
	if err != nil {
		return false, err
	}
	defer x.Close()
	y, err := b.open(ctx)
	if err != nil {
		return false, err
	}
	defer y.Close()
	return sameBytes(under{ctx, x}, y)
}

// under reads until its context ends.
type under struct {
	ctx context.Context
	io.Reader
}

func (u under) Read(p []byte) (int, error) {
	if err := u.ctx.Err(); err != nil {
		return 0, err
	}
	return u.Reader.Read(p)
}

// sameBytes compares two streams to their ends.
func sameBytes(x, y io.Reader) (bool, error) {
	a, b := make([]byte, 128<<10), make([]byte, 128<<10)
	for {
		n, err := io.ReadFull(x, a)
		m, e2 := io.ReadFull(y, b)
		end := func(err error) bool { return errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) }
		if err != nil && !end(err) || e2 != nil && !end(e2) {
			return false, errors.Join(err, e2)
		}
		if n != m || !bytes.Equal(a[:n], b[:m]) {
			return false, nil
		}
		if end(err) && end(e2) {
			return true, nil
		}
	}
}
