package overlay

import (
	"bufio"
	"context"
	"fmt"
	"io"

	"github.com/zeebo/blake3"
	"golang.org/x/sys/unix"
)

// CaptureOptions modify Capture.
type CaptureOptions struct {
	// Entry is called for every entry once it is in the archive, in order,
	// from the calling goroutine, digest included. An error ends the capture
	// and is returned as it is.
	Entry func(Entry) error
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
	s := scan{content: withContent}
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

type capture struct {
	tar  tarWriter
	opts CaptureOptions
	sum  Summary
	own  error // the caller's own, from opts.Entry
}

func (c *capture) item(ctx context.Context, it *item) error {
	e := &it.entry
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
	err = inPieces(e.data(), fileReader(ctx, fd, e), func(p []byte) error {
		_, _ = h.Write(p)
		return c.tar.data(p)
	})
	if err != nil {
		return err
	}
	e.Digest = hasherDigest(h)
	return stillSame(fd, &it.stat, e.Path)
}
