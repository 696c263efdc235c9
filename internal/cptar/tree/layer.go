package tree

import (
	"fmt"
	"hash/crc32"
	"io"
	"os"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/fault"
)

// The marks of an image's layer, as the OCI's specification has them.
const (
	markPrefix = ".wh."
	markMeta   = ".wh..wh." // of AUFS, for itself
	markOpaque = ".wh..wh..opq"
)

// OpaqueXattr is what overlayfs marks an opaque directory with.
const OpaqueXattr = "trusted.overlay.opaque"

// MarkKind is what a name means in a layer.
type MarkKind int

// A name is that of a file, or it hides another, or all that is below its
// directory, or it means nothing.
const (
	NoMark MarkKind = iota
	Whiteout
	Opaque
	Ignored
	BadMark
)

// Mark tells what a name in a layer means, and the path that it is about.
func Mark(parts []string) (kind MarkKind, path string) {
	above, base := parts[:len(parts)-1], parts[len(parts)-1]
	if base == markOpaque {
		return Opaque, strings.Join(above, "/")
	}
	for _, c := range parts {
		if strings.HasPrefix(c, markMeta) {
			return Ignored, ""
		}
	}
	name, ok := strings.CutPrefix(base, markPrefix)
	switch {
	case !ok:
		return NoMark, ""
	case name == "" || name == "." || name == "..":
		return BadMark, ""
	}
	return Whiteout, strings.TrimPrefix(strings.Join(above, "/")+"/"+name, "/")
}

// mark makes what an entry with the name of a mark means; done is false if it is
// none. Marks are about the layers below: what this archive has itself stays.
func (x *extractor) mark(parts []string) (done bool, err error) {
	kind, path := Mark(parts)
	switch kind {
	case NoMark:
		return false, nil
	case Ignored:
		return true, nil
	case BadMark:
		return false, fmt.Errorf("%w: it hides nothing", fault.ErrInvalid)
	}
	dir, err := x.openParent(parts[:len(parts)-1])
	if err != nil {
		return false, err
	}
	if kind == Opaque {
		if len(parts) == 1 {
			x.report.Opaque = true // overlayfs looks for no mark on a layer's top
		}
		return true, setOpaque(dir)
	}
	name := path[strings.LastIndexByte(path, '/')+1:]
	err = unix.Mknodat(int(dir.Fd()), name, unix.S_IFCHR, 0)
	if err != unix.EEXIST {
		return true, err
	}
	h, err := openat(dir, name, unix.O_PATH|unix.O_DIRECTORY, 0)
	if err == unix.ENOTDIR || err == unix.ELOOP {
		return true, nil // it hides what is below already
	}
	if err != nil {
		return false, err
	}
	defer h.Close()
	return true, setOpaque(h)
}

func setOpaque(dir *os.File) error {
	if err := unix.Setxattr(procPath(dir), OpaqueXattr, []byte("y"), 0); err != nil {
		return fmt.Errorf("mark a directory as opaque: %w", err)
	}
	return nil
}

func isWhiteout(st *unix.Stat_t) bool {
	return st.Mode&unix.S_IFMT == unix.S_IFCHR && st.Rdev == 0
}

func whiteout(dir *os.File, base string) bool {
	var st unix.Stat_t
	return unix.Fstatat(int(dir.Fd()), base, &st, unix.AT_SYMLINK_NOFOLLOW) == nil && isWhiteout(&st)
}

// unhide makes a directory in place of a whiteout of this archive: something of
// its own is to lie below the name.
func (x *extractor) unhide(dir *os.File, base string) (*os.File, error) {
	if !whiteout(dir, base) {
		return nil, unix.ENOTDIR
	}
	if err := unix.Unlinkat(int(dir.Fd()), base, 0); err != nil {
		return nil, err
	}
	if err := unix.Mkdirat(int(dir.Fd()), base, 0o755); err != nil {
		return nil, err
	}
	h, err := openat(dir, base, unix.O_PATH|unix.O_DIRECTORY, 0)
	if err != nil {
		return nil, err
	}
	if err := setOpaque(h); err != nil {
		h.Close()
		return nil, err
	}
	return h, nil
}

// Frame takes what an archive has beside the contents of its files: with the
// files it makes the very same archive again.
type Frame interface {
	// Raw is called with bytes of the archive, in order, which are the
	// caller's again when it returns.
	Raw(p []byte) error
	// File says that here follow size bytes, the content of path, with their
	// CRC-32C.
	File(path string, size int64, sum uint32) error
	// Replace is called before base in dir, known as path so far, makes way
	// for another. If it has taken the file away itself, kept is true.
	Replace(dir *os.File, base, path string) (kept bool, err error)
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// counter counts what is read, and hides all other methods of the reader. The data goes to the
// frame, unless it is set aside.
type counter struct {
	r     io.Reader
	n     int64
	max   int64 // 0: none
	frame Frame
	off   bool
	sum   uint32 // of what was set aside
	err   error  // the frame's, or that it is too much
}

// aside says whether the following data is the content of a file.
func (c *counter) aside(yes bool) { c.off, c.sum = yes, 0 }

func (c *counter) Read(p []byte) (int, error) {
	n, err := c.r.Read(p)
	if c.n += int64(n); c.max > 0 && c.n > c.max { // headers, and what is skipped, count too
		c.err = fmt.Errorf("%w: the archive has more than %d bytes", fault.ErrInvalid, c.max)
		return 0, c.err
	}
	if c.frame != nil && n > 0 {
		if c.off {
			c.sum = crc32.Update(c.sum, castagnoli, p[:n])
		} else if ferr := c.frame.Raw(p[:n]); ferr != nil {
			c.err = ferr
			return 0, ferr
		}
	}
	return n, err
}

// frameWriter is counter's other direction, for Pack.
type frameWriter struct {
	w     io.Writer
	frame Frame
	off   bool
	sum   uint32
}

func (f *frameWriter) Write(p []byte) (int, error) {
	if f.frame != nil {
		if f.off {
			f.sum = crc32.Update(f.sum, castagnoli, p)
		} else if err := f.frame.Raw(p); err != nil {
			return 0, err
		}
	}
	return f.w.Write(p)
}
