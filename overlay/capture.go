package overlay

import (
	"bufio"
	"context"
	"fmt"
	"io"

	"github.com/zeebo/blake3"
	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/fault"
)

// CaptureOptions modify Capture.
type CaptureOptions struct {
	// Entry is called for every entry once it is in the archive, in order,
	// from the calling goroutine, digest included. An error ends the capture
	// and is returned as it is.
	Entry func(Entry) error

	// Skip leaves an entry, and all below it, out. It is for what did not
	// belong to dir at the instant that is captured, and is called from
	// another goroutine, before the entry is looked at.
	Skip func(path string) bool

	// Fixed are directories that were read (ReadDir) at that instant: they
	// are recorded so, whatever has become of them since.
	Fixed map[string]Entry
}

// Capture writes dir to w as the archive that the package comment describes.
// It only reads, leaves access times as they are, follows no symlink, and
// crosses no mount point. Whatever cannot be captured whole is an error: an
// entry that vanishes, changes or cannot be read, a mount point in the tree
// (ErrUnsupported), a missing privilege (ErrDenied). On error the archive has no
// end marker, which Apply notices.
func Capture(ctx context.Context, dir string, w io.Writer, opts CaptureOptions) (Summary, error) {
	bw := bufio.NewWriterSize(w, 256<<10)
	c := capture{tar: tarWriter{w: bw}, opts: opts}
	s := scan{content: withContent, skip: opts.Skip}
	err := s.run(ctx, dir, func(it *item) error { return c.item(ctx, it) })
	if err == nil {
		err = c.tar.end()
	}
	if err == nil {
		if err = bw.Flush(); err != nil {
			err = fmt.Errorf("write archive: %w", err)
		}
	}
	c.sum.Archive = c.tar.n
	if err != nil && c.own == nil {
		err = fmt.Errorf("capture %s: %w", dir, err)
	}
	return c.sum, err
}

// ReadDir returns the entry of one directory below dir, as Walk would. Anything
// else at path, and a symlink on the way, is ErrNotFound.
func ReadDir(dir, path string) (e Entry, err error) {
	s := scan{}
	root, err := s.open(dir)
	if err != nil {
		return e, err
	}
	defer root.release()
	fd, err := unix.Openat2(root.fd, path, &unix.OpenHow{
		Flags:   unix.O_RDONLY | unix.O_DIRECTORY | unix.O_CLOEXEC,
		Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS,
	})
	switch err {
	case nil:
	case unix.ENOENT, unix.ENOTDIR, unix.ELOOP, unix.ENXIO:
		return e, fmt.Errorf("directory %q: %w", clip(path), fault.ErrNotFound)
	default:
		return e, pathError("open", path, err)
	}
	d := &dirFD{fd: fd}
	d.refs.Store(1)
	defer d.release()
	it := item{dir: d, entry: Entry{Path: path}}
	err = s.readDir(&it, newScratch())
	return it.entry, err
}

type capture struct {
	tar  tarWriter
	opts CaptureOptions
	sum  Summary
	own  error // the caller's own, from opts.Entry
}

func (c *capture) item(ctx context.Context, it *item) error {
	e := &it.entry
	if fixed, ok := c.opts.Fixed[e.Path]; ok && e.Type == TypeDir {
		*e = fixed
	}
	if err := c.tar.header(e); err != nil {
		return err
	}
	if it.large {
		if err := c.large(ctx, it); err != nil {
			return err
		}
	} else if err := c.tar.data(it.data); err != nil {
		return err
	}
	c.sum.add(e)
	if c.opts.Entry != nil {
		c.own = c.opts.Entry(*e)
	}
	return c.own
}

// large copies a file that was not read ahead.
func (c *capture) large(ctx context.Context, it *item) error {
	e := &it.entry
	fd, err := openAt(it.dir.fd, it.name, 0)
	if err != nil {
		return pathError("open", e.Path, err)
	}
	defer unix.Close(fd)
	if err := stillSame(fd, &it.stat, e.Path); err != nil {
		return err
	}
	h := blake3.New()
	err = inBuffers(e.data(), fileReader(ctx, fd, e), func(p []byte) error {
		_, _ = h.Write(p)
		return c.tar.data(p)
	})
	if err != nil {
		return err
	}
	e.Digest = hasherDigest(h)
	return stillSame(fd, &it.stat, e.Path)
}
