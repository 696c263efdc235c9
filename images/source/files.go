package source

import (
	"archive/tar"
	"bufio"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"strings"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zstd"
	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/images/image"
	"github.com/agentbox/agentbox/internal/fault"
)

// files is a directory or a tar archive. Names are relative, with slashes.
type files interface {
	// open returns a file and its size. Not there is fs.ErrNotExist.
	open(name string) (io.ReadCloser, int64, error)
	Close() error
}

// dirFiles is a directory. Nothing outside of it is read, whatever symlinks it has.
type dirFiles struct{ *os.Root }

func (d dirFiles) open(name string) (io.ReadCloser, int64, error) {
	f, err := d.OpenFile(name, os.O_RDONLY|unix.O_NONBLOCK, 0) // not to wait for the writer of a FIFO
	if err != nil {
		return nil, 0, err
	}
	fi, err := f.Stat()
	if err == nil && !fi.Mode().IsRegular() {
		err = fmt.Errorf("%s: %w: it is no file", name, fault.ErrInvalid)
	}
	if err != nil {
		f.Close()
		return nil, 0, err
	}
	return f, fi.Size(), nil
}

// tarFiles is an archive that can be read at any place.
type tarFiles struct {
	f     *os.File
	index map[string]span
	links map[string]string // old versions of Docker save the same layer once
}

type span struct{ at, size int64 }

func (t *tarFiles) Close() error { return t.f.Close() }

func (t *tarFiles) open(name string) (io.ReadCloser, int64, error) {
	name = path.Clean(name)
	for range 8 {
		if to, ok := t.links[name]; ok {
			name = to
		}
	}
	s, ok := t.index[name]
	if !ok {
		return nil, 0, fmt.Errorf("%s: %w", name, fs.ErrNotExist)
	}
	return io.NopCloser(io.NewSectionReader(t.f, s.at, s.size)), s.size, nil
}

const (
	maxArchived = 1 << 16  // files in an archive of an image
	maxNames    = 32 << 20 // bytes of their names, which one file may have a megabyte of
)

// openTar indexes an archive. One that is compressed, or that cannot be read
// twice, is first copied to the scratch directory.
func openTar(ctx context.Context, name string, opts image.SourceOptions) (_ *tarFiles, err error) {
	f, err := OpenFile(ctx, name)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			f.Close()
		}
	}()
	fi, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if fi.IsDir() {
		return nil, &fault.Error{
			Hint: "For a directory use oci:DIR (an image layout) or dir:DIR (a root filesystem).",
			Err:  fmt.Errorf("%s: %w: it is a directory", name, fault.ErrInvalid),
		}
	}
	if fi.Mode().IsRegular() {
		var magic [4]byte
		if n, err := f.ReadAt(magic[:], 0); err != nil && err != io.EOF {
			return nil, err
		} else if packed(magic[:n]) == "" {
			return indexTar(ctx, f)
		}
	}
	plain, err := spool(ctx, f, nil, opts)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	return plain, f.Close()
}

// OpenFile opens a path that a user gives: a file, a directory or a pipe. In a FIFO it waits for
// the writer, without which there would be nothing to read, until ctx ends. A missing file is
// ErrNotFound.
func OpenFile(ctx context.Context, path string) (_ *os.File, err error) {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK, 0) // which no context would end
	if err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			err = fmt.Errorf("%w: %w", fault.ErrNotFound, err)
		}
		return nil, err
	}
	defer func() {
		if err != nil {
			f.Close()
		}
	}()
	fi, err := f.Stat()
	if err != nil || fi.Mode()&fs.ModeNamedPipe == 0 {
		return f, err
	}
	raw, err := f.SyscallConn()
	if err != nil {
		return nil, err
	}
	for {
		var n int
		var perr error
		err := raw.Control(func(fd uintptr) {
			// ms; it cannot wait for a context
			n, perr = unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 100)
		})
		switch {
		case ctx.Err() != nil:
			return nil, context.Cause(ctx)
		case err != nil:
			return nil, err
		case perr != nil && perr != unix.EINTR:
			return nil, fmt.Errorf("wait for the writer of %s: %w", path, perr)
		case n > 0:
			return f, nil
		}
	}
}

// packed tells by its first bytes how data is compressed.
func packed(magic []byte) string {
	switch {
	case strings.HasPrefix(string(magic), "\x1f\x8b"):
		return "gzip"
	case strings.HasPrefix(string(magic), "\x28\xb5\x2f\xfd"):
		return "zstd"
	}
	return ""
}

// spool copies an archive to a file without a name and indexes it. report, if
// not nil, is told how far it is.
func spool(ctx context.Context, r io.Reader, report func(n int64), opts image.SourceOptions) (_ *tarFiles, err error) {
	br := bufio.NewReaderSize(r, 256<<10)
	magic, err := br.Peek(4)
	if err != nil && err != io.EOF {
		return nil, err
	}
	var plain io.Reader = br
	switch packed(magic) {
	case "gzip":
		if plain, err = gzip.NewReader(br); err != nil {
			return nil, fmt.Errorf("%w: %w", fault.ErrCorrupt, err)
		}
	case "zstd":
		z, err := zstd.NewReader(br, zstd.WithDecoderMaxWindow(128<<20), zstd.WithDecoderConcurrency(1))
		if err != nil {
			return nil, err
		}
		defer z.Close()
		plain = z
	}
	f, err := os.CreateTemp(opts.Scratch, "image-*.tar")
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			f.Close()
		}
	}()
	if err := os.Remove(f.Name()); err != nil && !errors.Is(err, fs.ErrNotExist) { // the owner of the directory may clear up
		return nil, err
	}
	limit := opts.MaxBytes
	if limit == 0 {
		limit = maxImage
	}
	n, err := io.Copy(&roomy{f: f}, &watchedReader{ctx: ctx, r: io.LimitReader(plain, limit+1), report: report})
	if err != nil {
		if errors.Is(err, io.ErrUnexpectedEOF) {
			err = fmt.Errorf("%w: the archive is cut short", fault.ErrCorrupt)
		}
		return nil, err
	}
	if err := checkSize(n, opts); err != nil {
		return nil, err
	}
	return indexTar(ctx, f)
}

// roomy writes to a file while the disk has room: what is spooled may be a bomb,
// and a full disk hurts all that is on it.
type roomy struct {
	f       *os.File
	unasked int // bytes since the file system was asked
}

func (w *roomy) Write(p []byte) (int, error) {
	const every = 4 << 20
	if w.unasked += len(p); w.unasked >= every {
		w.unasked = 0
		var st unix.Statfs_t
		if err := unix.Fstatfs(int(w.f.Fd()), &st); err != nil {
			return 0, err
		}
		keep := min(max(int64(st.Blocks)*st.Bsize/100, 16<<20), 1<<30)
		if int64(st.Bavail)*st.Bsize < keep {
			return 0, fmt.Errorf("the archive does not fit (%d bytes are kept free): %w", keep, unix.ENOSPC)
		}
	}
	return w.f.Write(p)
}

// watchedReader reads until its context ends.
type watchedReader struct {
	ctx    context.Context
	r      io.Reader
	n      int64
	report func(n int64)
}

func (w *watchedReader) Read(p []byte) (int, error) {
	if w.ctx.Err() != nil {
		return 0, context.Cause(w.ctx)
	}
	n, err := w.r.Read(p)
	if w.n += int64(n); w.report != nil {
		w.report(w.n)
	}
	return n, err
}

// indexTar finds what is where in an archive. The file is closed with it.
func indexTar(ctx context.Context, f *os.File) (*tarFiles, error) {
	if _, err := f.Seek(0, io.SeekStart); err != nil {
		return nil, err
	}
	t := &tarFiles{f: f, index: map[string]span{}, links: map[string]string{}}
	names := 0
	for r := tar.NewReader(f); ; { // it seeks over what is not read
		h, err := r.Next()
		if err == io.EOF {
			return t, nil
		}
		if ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
		if err != nil {
			return nil, fmt.Errorf("%s: %w: it is no tar archive, or cut short: %w",
				path.Base(f.Name()), fault.ErrCorrupt, err)
		}
		if len(t.index)+len(t.links) >= maxArchived {
			return nil, fmt.Errorf("%s: %w: it has more than %d files", path.Base(f.Name()),
				fault.ErrUnsupported, maxArchived)
		}
		if names += len(h.Name) + len(h.Linkname); names > maxNames {
			return nil, fmt.Errorf("%s: %w: the names of its files have more than %d bytes", path.Base(f.Name()),
				fault.ErrUnsupported, maxNames)
		}
		name := path.Clean(h.Name)
		switch h.Typeflag {
		case tar.TypeReg:
			at, err := f.Seek(0, io.SeekCurrent)
			if err != nil {
				return nil, err
			}
			t.index[name] = span{at, h.Size}
		case tar.TypeSymlink:
			t.links[name] = path.Join(path.Dir(name), h.Linkname)
		case tar.TypeLink:
			t.links[name] = path.Clean(h.Linkname)
		}
	}
}

// readSmall reads a file of at most limit bytes.
func readSmall(fsys files, name string, limit int64) ([]byte, error) {
	r, n, err := fsys.open(name)
	if err != nil {
		return nil, err
	}
	defer r.Close()
	if n > limit {
		return nil, fmt.Errorf("%s: %w: it has %d bytes", name, fault.ErrCorrupt, n)
	}
	return io.ReadAll(io.LimitReader(r, limit))
}

// blobs are the blobs of a layout: a place.
type blobs struct{ files }

func (b blobs) openBlob(d v1.Descriptor) (*proof, error) {
	name := path.Join("blobs", d.Digest.Algorithm, d.Digest.Hex)
	r, n, err := b.open(name)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("%w: it lacks the blob %s", fault.ErrCorrupt, d.Digest)
	}
	if err != nil {
		return nil, err
	}
	if n != d.Size {
		r.Close()
		return nil, fmt.Errorf("%s: %w: it has %d bytes, %d are declared", d.Digest, fault.ErrCorrupt, n, d.Size)
	}
	return prove(r, r, d.Digest.String(), d.Size), nil
}

func (b blobs) manifest(ctx context.Context, d v1.Descriptor) ([]byte, error) {
	if d.Size > maxManifest {
		return nil, fmt.Errorf("%s: %w: a manifest of %d bytes", d.Digest, fault.ErrCorrupt, d.Size)
	}
	return b.small(ctx, d)
}

func (b blobs) small(_ context.Context, d v1.Descriptor) ([]byte, error) {
	p, err := b.openBlob(d)
	if err != nil {
		return nil, err
	}
	return p.whole()
}

func (b blobs) layer(d v1.Descriptor) Layer {
	return Layer{Open: func(ctx context.Context) (io.ReadCloser, error) {
		p, err := b.openBlob(d)
		if err != nil {
			return nil, err
		}
		p.r = &watchedReader{ctx: ctx, r: p.r}
		return p, nil
	}}
}

// sumOf reads a file to its end.
func sumOf(ctx context.Context, fsys files, name string) (digest string, size int64, err error) {
	r, n, err := fsys.open(name)
	if err != nil {
		return "", 0, err
	}
	defer r.Close()
	sum := sha256.New()
	got, err := io.Copy(sum, &watchedReader{ctx: ctx, r: r})
	if err == nil && got != n {
		err = fmt.Errorf("%s: %w: it is cut short", name, fault.ErrCorrupt)
	}
	return "sha256:" + hex.EncodeToString(sum.Sum(nil)), n, err
}
