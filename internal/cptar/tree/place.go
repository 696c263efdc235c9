package tree

import (
	"archive/tar"
	"bytes"
	"crypto/rand"
	"fmt"
	"io"
	"os"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/fault"
)

// clear makes way for a new non-directory. A file that a frame refers to is kept.
func (x *extractor) clear(dir *os.File, base, path string) error {
	if x.opts.Frame != nil {
		if kept, err := x.opts.Frame.Replace(dir, base, path); kept || err != nil {
			return err
		}
	}
	switch err := unix.Unlinkat(int(dir.Fd()), base, 0); err {
	case nil, unix.ENOENT:
		return nil
	case unix.EISDIR, unix.EPERM:
		h, herr := openat(dir, base, unix.O_PATH|unix.O_DIRECTORY, 0)
		if herr != nil {
			return err
		}
		h.Close()
		return errDirectory()
	default:
		return err
	}
}

// place runs make until it found the name free. The retries are for a process
// inside that races; it can make the extraction fail, no more.
func (x *extractor) place(dir *os.File, base, path string, make func() error) error {
	var err error
	for range 100 {
		if err = make(); err != unix.EEXIST {
			return err
		}
		if err := x.clear(dir, base, path); err != nil {
			return err
		}
	}
	return err
}

// replaceable refuses a name that a directory has.
func replaceable(dir *os.File, base string) error {
	h, err := openat(dir, base, unix.O_PATH|unix.O_DIRECTORY, 0)
	if err != nil {
		return nil // it is no directory, or not there
	}
	h.Close()
	return errDirectory()
}

func errDirectory() error {
	return fmt.Errorf("%w: only a directory can replace a directory", fault.ErrExists)
}

func (x *extractor) file(dir *os.File, base, path string, hdr *tar.Header, r io.Reader, m meta) (err error) {
	sparse := hdr.Typeflag == tar.TypeGNUSparse || hdr.PAXRecords[paxSparse+"realsize"] != "" ||
		hdr.PAXRecords[paxSparse+"size"] != "" || hdr.PAXRecords[paxSparse+"map"] != ""
	if sparse && hdr.Size > maxSparse {
		return fmt.Errorf("%w: a sparse file of %d bytes", fault.ErrInvalid, hdr.Size)
	}
	if !sparse {
		if err := x.room(hdr.Size); err != nil {
			return err
		}
	}
	var f *os.File
	name := base
	if x.opts.Whole {
		name = ".agentbox-" + rand.Text()
		if err := replaceable(dir, base); err != nil {
			return err
		}
	}
	err = x.place(dir, name, path, func() (err error) {
		f, err = openat(dir, name, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL, 0o600)
		return err
	})
	if err != nil {
		return err
	}
	defer func() {
		if cerr := f.Close(); err == nil {
			err = cerr
		}
		if !x.opts.Whole {
			return
		}
		if err == nil {
			err = unix.Renameat(int(dir.Fd()), name, int(dir.Fd()), base)
		}
		if err != nil {
			_ = unix.Unlinkat(int(dir.Fd()), name, 0) // the error that counts is known
		}
	}()
	w := &holeWriter{f: f, dense: hdr.Size < 2*hole}
	// The archive's data of a sparse file is not the file's content.
	framed := x.opts.Frame != nil && !sparse && hdr.Size > 0
	x.in.aside(framed)
	n, err := x.copy(w, r)
	if err != nil {
		return err
	}
	if n != hdr.Size {
		return fmt.Errorf("%w: %d bytes instead of %d", fault.ErrInvalid, n, hdr.Size)
	}
	if framed {
		if err := x.opts.Frame.File(path, n, x.in.sum); err != nil {
			return err
		}
		x.in.aside(false)
	}
	if !w.dense {
		if err := f.Truncate(n); err != nil {
			return err
		}
	}
	return m.applyOpen(f)
}

func (x *extractor) link(dir *os.File, base, path, target string) error {
	parts, err := x.split(target)
	if err != nil {
		return err
	}
	from := strings.Join(parts, "/")
	missing := fmt.Errorf("%w: a hard link to %q, which is not a file in the archive before it",
		fault.ErrInvalid, target)
	if len(parts) == 0 || x.made != nil && !x.made[from] {
		return missing
	}
	if from == path { // some writers link a file to itself
		h, err := handle(dir, base)
		if err != nil {
			return missing
		}
		return h.Close()
	}
	// openParent would give up dir.
	src, err := (&extractor{top: x.top, opts: x.opts}).openExisting(parts[:len(parts)-1])
	if err == unix.ENOENT || err == unix.ENOTDIR || err == unix.ELOOP {
		return missing
	}
	if err != nil {
		return err
	}
	defer src.Close()
	if x.opts.Layer && whiteout(src, parts[len(parts)-1]) {
		return missing
	}
	err = x.place(dir, base, path, func() error {
		return unix.Linkat(int(src.Fd()), parts[len(parts)-1], int(dir.Fd()), base, 0)
	})
	if err == unix.ENOENT || err == unix.EPERM {
		return missing
	}
	return err
}

// openExisting is openParent that makes nothing; the caller closes.
func (x *extractor) openExisting(parts []string) (*os.File, error) {
	dir, err := reopen(x.top, unix.O_PATH|unix.O_DIRECTORY)
	for _, c := range parts {
		if err != nil {
			return nil, err
		}
		var next *os.File
		next, err = openat(dir, c, unix.O_PATH|unix.O_DIRECTORY, 0)
		dir.Close()
		dir = next
	}
	return dir, err
}

func (x *extractor) symlink(dir *os.File, base, path, target string, m meta) error {
	if target == "" || len(target) >= maxPath {
		return fmt.Errorf("%w: a symlink without a usable target", fault.ErrInvalid)
	}
	err := x.place(dir, base, path, func() error { return unix.Symlinkat(target, int(dir.Fd()), base) })
	if err != nil {
		return err
	}
	return x.dress(dir, base, unix.S_IFLNK, m)
}

func (x *extractor) node(dir *os.File, base, path string, kind uint32, dev uint64, m meta) error {
	err := x.place(dir, base, path, func() error { return unix.Mknodat(int(dir.Fd()), base, kind|0o600, int(dev)) })
	if err != nil {
		return err
	}
	return x.dress(dir, base, kind, m)
}

// dress sets metadata on what was just made by name. Should a process inside
// have put something else there, it must not receive an owner or a mode.
func (x *extractor) dress(dir *os.File, base string, kind uint32, m meta) error {
	h, err := handle(dir, base)
	if err != nil {
		return err
	}
	defer h.Close()
	st, err := fstat(h)
	if err != nil {
		return err
	}
	if st.Mode&unix.S_IFMT != kind || st.Nlink != 1 {
		return fmt.Errorf("%w: it was replaced while it was made", fault.ErrBusy)
	}
	return m.apply(h, kind == unix.S_IFLNK)
}

// holeWriter leaves runs of zeros unwritten. Truncate sets the size afterwards.
type holeWriter struct {
	f     *os.File
	off   int64
	dense bool
}

func (w *holeWriter) Write(p []byte) (int, error) {
	total := len(p)
	if w.dense {
		_, err := w.f.WriteAt(p, w.off)
		w.off += int64(total)
		return total, err
	}
	for len(p) > 0 {
		// One write per run of data, so that dense files cost nothing extra.
		n := 0
		for n < len(p) && !isZero(p[n:min(n+hole, len(p))]) {
			n = min(n+hole, len(p))
		}
		if n > 0 {
			if _, err := w.f.WriteAt(p[:n], w.off); err != nil {
				return 0, err
			}
		} else {
			n = min(hole, len(p))
		}
		w.off += int64(n)
		p = p[n:]
	}
	return total, nil
}

func isZero(p []byte) bool { return bytes.Equal(p, zeros[:len(p)]) }
