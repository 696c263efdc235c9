package layer

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"os"
	"strconv"

	"github.com/klauspost/compress/zstd"
	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/fault"
)

// A frame is a zstd stream of a line that says so and then records, each a byte
// for its kind and what follows, numbers as varints:
//
//	'r' LENGTH BYTES               bytes of the tar
//	'f' SIZE LENGTH PATH CRC-32C   here the tar has the content of PATH
//	'x' LENGTH PATH NUMBER         all 'f' of PATH before this mean spare/NUMBER
const frameMagic = "agentbox frame 1\n"

const (
	recRaw      = 'r'
	recFile     = 'f'
	recReplaced = 'x'
	maxRaw      = 64 << 10
	maxPath     = 4096
	maxSpares   = 1 << 20
	askEvery    = 16 << 20
)

// frameWriter is a tree.Frame that goes to a file.
type frameWriter struct {
	dir    *os.File
	f      *os.File
	z      *zstd.Encoder
	raw    []byte
	buf    []byte
	spares int

	minFree int64 // bytes of the file system that stay free
	unasked int64 // bytes since the file system was asked
}

func newFrameWriter(dir *os.File) (*frameWriter, error) {
	fd, err := unix.Openat(int(dir.Fd()), frameName, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return nil, &os.PathError{Op: "create", Path: frameName, Err: err}
	}
	f := os.NewFile(uintptr(fd), frameName)
	z, err := zstd.NewWriter(f, zstd.WithEncoderLevel(zstd.SpeedFastest), zstd.WithEncoderConcurrency(1))
	if err != nil {
		f.Close()
		return nil, err
	}
	w := &frameWriter{dir: dir, f: f, z: z}
	_, err = io.WriteString(z, frameMagic)
	return w, err
}

func (w *frameWriter) Raw(p []byte) error {
	for len(p) > 0 {
		n := min(len(p), maxRaw-len(w.raw))
		w.raw = append(w.raw, p[:n]...)
		p = p[n:]
		if len(w.raw) == maxRaw {
			if err := w.flush(); err != nil {
				return err
			}
		}
	}
	return nil
}

func (w *frameWriter) flush() error {
	if len(w.raw) == 0 {
		return nil
	}
	if w.unasked += int64(len(w.raw)); w.minFree > 0 && w.unasked >= askEvery {
		w.unasked = 0
		var fs unix.Statfs_t
		if err := unix.Fstatfs(int(w.f.Fd()), &fs); err != nil {
			return err
		}
		if int64(fs.Bavail)*fs.Bsize < w.minFree {
			return fmt.Errorf("what the layer has beside its files does not fit (%d bytes are kept free): %w",
				w.minFree, unix.ENOSPC)
		}
	}
	w.buf = binary.AppendUvarint(append(w.buf[:0], recRaw), uint64(len(w.raw)))
	if _, err := w.z.Write(w.buf); err != nil {
		return err
	}
	_, err := w.z.Write(w.raw)
	w.raw = w.raw[:0]
	return err
}

func (w *frameWriter) File(path string, size int64, sum uint32) error {
	if err := w.flush(); err != nil {
		return err
	}
	w.buf = binary.AppendUvarint(append(w.buf[:0], recFile), uint64(size))
	w.buf = append(binary.AppendUvarint(w.buf, uint64(len(path))), path...)
	w.buf = binary.LittleEndian.AppendUint32(w.buf, sum)
	_, err := w.z.Write(w.buf)
	return err
}

// Replace keeps the content of a file that the tar has, though the tree will not.
func (w *frameWriter) Replace(dir *os.File, base, path string) (bool, error) {
	var st unix.Stat_t
	if err := unix.Fstatat(int(dir.Fd()), base, &st, unix.AT_SYMLINK_NOFOLLOW); err != nil ||
		st.Mode&unix.S_IFMT != unix.S_IFREG {
		return false, nil // the caller's own removal reports what is wrong
	}
	if w.spares == maxSpares {
		return false, fmt.Errorf("%w: the archive has more than %d files twice", fault.ErrInvalid, maxSpares)
	}
	if w.spares == 0 {
		if err := unix.Mkdirat(int(w.dir.Fd()), spareName, 0o700); err != nil {
			return false, err
		}
	}
	name := spareName + "/" + strconv.Itoa(w.spares)
	if err := unix.Renameat(int(dir.Fd()), base, int(w.dir.Fd()), name); err != nil {
		return false, err
	}
	if err := w.flush(); err != nil {
		return false, err
	}
	w.buf = binary.AppendUvarint(append(w.buf[:0], recReplaced), uint64(len(path)))
	w.buf = binary.AppendUvarint(append(w.buf, path...), uint64(w.spares))
	w.spares++
	_, err := w.z.Write(w.buf)
	return true, err
}

func (w *frameWriter) close() error {
	return errors.Join(w.flush(), w.z.Close(), w.f.Close())
}

// record is one of a frame.
type record struct {
	kind   byte
	raw    []byte // good until the next
	path   string
	size   int64
	sum    uint32
	number int
}

// frameReader reads a frame, believing nothing.
type frameReader struct {
	f   *os.File
	z   *zstd.Decoder
	br  *bufio.Reader
	raw []byte
}

func openFrame(dir *os.File) (*frameReader, error) {
	fd, err := unix.Openat(int(dir.Fd()), frameName, unix.O_RDONLY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("%w: the layer's frame: %w", fault.ErrCorrupt, err)
	}
	f := os.NewFile(uintptr(fd), frameName)
	z, err := zstd.NewReader(f, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxWindow(8<<20))
	if err != nil {
		f.Close()
		return nil, err
	}
	r := &frameReader{f: f, z: z, br: bufio.NewReader(z)}
	magic := make([]byte, len(frameMagic))
	if _, err := io.ReadFull(r.br, magic); err != nil || string(magic) != frameMagic {
		r.close()
		return nil, fmt.Errorf("%w: the layer's frame is not one", fault.ErrCorrupt)
	}
	return r, nil
}

func (r *frameReader) close() {
	r.z.Close()
	_ = r.f.Close() // only read
}

// next returns io.EOF at the end.
func (r *frameReader) next() (record, error) {
	kind, err := r.br.ReadByte()
	if err == io.EOF {
		return record{}, io.EOF
	}
	rec := record{kind: kind}
	var n uint64
	if err == nil {
		n, err = binary.ReadUvarint(r.br)
	}
	switch {
	case err != nil:
	case kind == recRaw && n <= maxRaw:
		if r.raw == nil {
			r.raw = make([]byte, maxRaw)
		}
		rec.raw = r.raw[:n]
		_, err = io.ReadFull(r.br, rec.raw)
	case kind == recFile && n < 1<<62:
		rec.size = int64(n)
		if n, err = binary.ReadUvarint(r.br); err == nil {
			rec.path, err = r.path(n)
		}
		var b [4]byte
		if err == nil {
			_, err = io.ReadFull(r.br, b[:])
		}
		rec.sum = binary.LittleEndian.Uint32(b[:])
	case kind == recReplaced:
		if rec.path, err = r.path(n); err == nil {
			n, err = binary.ReadUvarint(r.br)
		}
		if rec.number = int(n); n >= maxSpares {
			err = errors.New("a number out of range")
		}
	default:
		err = errors.New("an unknown record")
	}
	if err != nil {
		return record{}, fmt.Errorf("%w: the layer's frame is damaged: %v", fault.ErrCorrupt, err)
	}
	return rec, nil
}

func (r *frameReader) path(n uint64) (string, error) {
	if n > maxPath {
		return "", errors.New("a path too long")
	}
	b := make([]byte, n)
	_, err := io.ReadFull(r.br, b)
	return string(b), err
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)
