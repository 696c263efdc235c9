package overlay

import (
	"bufio"
	"fmt"
	"io"

	"github.com/agentbox/agentbox/internal/fault"
)

// TarWriter writes entries in the archive format of this package, for archives
// that are not made of a directory. After Header come exactly the bytes of data
// that the entry has: its extents, one after the other.
type TarWriter struct{ t tarWriter }

// NewTarWriter returns a TarWriter onto w.
func NewTarWriter(w io.Writer) *TarWriter { return &TarWriter{tarWriter{w: w}} }

// Header begins an entry.
func (t *TarWriter) Header(e Entry) error { return t.t.header(&e) }

// Write adds to the data of the entry.
func (t *TarWriter) Write(p []byte) (int, error) {
	if err := t.t.data(p); err != nil {
		return 0, err
	}
	return len(p), nil
}

// Skip counts the data of the entry as written, for a caller that only wants
// to know how long an archive will be.
func (t *TarWriter) Skip() {
	if t.t.left > 0 {
		t.t.n += t.t.left + t.t.pad
		t.t.left = 0
	}
}

// Close writes the end of the archive. It leaves the writer below open.
func (t *TarWriter) Close() error {
	if t.t.left != 0 {
		return fmt.Errorf("write archive: the last entry lacks %d bytes: %w", t.t.left, fault.ErrInvalid)
	}
	return t.t.end()
}

// Size returns how many bytes were written.
func (t *TarWriter) Size() int64 { return t.t.n }

// TarReader reads what a TarWriter wrote, and nothing else: all that it does
// not know is ErrCorrupt. A hard link comes back as one to a file, whatever it
// links to.
type TarReader struct{ t tarReader }

// NewTarReader returns a TarReader on r.
func NewTarReader(r io.Reader) *TarReader {
	return &TarReader{tarReader{r: bufio.NewReaderSize(r, 64<<10)}}
}

// Next returns the next entry, and io.EOF after a proper end. All data of the
// entry before must have been read.
func (t *TarReader) Next() (Entry, error) { return t.t.next() }

// Read reads the data of the entry that Next returned.
func (t *TarReader) Read(p []byte) (int, error) {
	if t.t.left == 0 {
		return 0, io.EOF
	}
	if int64(len(p)) > t.t.left {
		p = p[:t.t.left]
	}
	n, err := t.t.r.Read(p)
	t.t.n += int64(n)
	t.t.left -= int64(n)
	if err == io.EOF {
		err = io.ErrUnexpectedEOF
	}
	if err == io.ErrUnexpectedEOF {
		return n, corrupt("the archive is cut off at byte %d", t.t.n)
	}
	return n, err
}

// DataSize returns how many bytes of data a file has: its size without holes.
func (e *Entry) DataSize() int64 { return e.data() }

// CheckEntry tells why e cannot be an entry; it wraps ErrCorrupt.
func CheckEntry(e Entry) error { return e.checked() }
