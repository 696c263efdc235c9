package streams

import (
	"bytes"
	"errors"
	"os"
	"sync"
	"time"
)

// Writer appends to a log what a process prints.
type Writer struct {
	path string

	mu   sync.Mutex
	f    *os.File
	size int64 // what this Writer wrote to f
	buf  bytes.Buffer
}

// stamp is the time's form in a record.
const stamp = "2006-01-02T15:04:05.000000000Z07:00"

// OpenWriter opens a log for appending, and creates it if it does not exist. It first ends a record
// that was cut off when its writer was killed.
func OpenWriter(path string) (*Writer, error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_APPEND, 0o600)
	if err != nil {
		return nil, err
	}
	w := &Writer{path: path, f: f}
	var last [1]byte
	if st, err := f.Stat(); err == nil && st.Size() > 0 {
		if _, err := f.ReadAt(last[:], st.Size()-1); err == nil && last[0] != '\n' {
			_, err = f.WriteString("\n")
			if err != nil {
				return nil, errors.Join(err, f.Close())
			}
		}
	}
	return w, nil
}

// Write appends what was printed in one go; at most some 8 KiB of it, so that
// no record is longer than readers take. A log that is full is started anew.
func (w *Writer) Write(stderr bool, data []byte) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	name := " stdout "
	if stderr {
		name = " stderr "
	}
	at := time.Now().Format(stamp)
	w.buf.Reset()
	for len(data) > 0 {
		line, rest, whole := bytes.Cut(data, []byte("\n"))
		tag := "F "
		if !whole {
			tag = "P "
		}
		w.buf.WriteString(at)
		w.buf.WriteString(name)
		w.buf.WriteString(tag)
		w.buf.Write(line)
		w.buf.WriteByte('\n')
		data = rest
	}
	if w.size+int64(w.buf.Len()) > Limit {
		if err := w.turn(); err != nil {
			return err
		}
	}
	n, err := w.f.Write(w.buf.Bytes())
	w.size += int64(n)
	return err
}

// turn puts an empty file in the log's place; a reader of the old one reads it to its end
// first.
func (w *Writer) turn() error {
	tmp := w.path + ".new"
	f, err := os.OpenFile(tmp, os.O_RDWR|os.O_CREATE|os.O_TRUNC|os.O_APPEND, 0o600)
	if err != nil {
		return err
	}
	if err := os.Rename(tmp, w.path); err != nil {
		return errors.Join(err, f.Close())
	}
	old := w.f
	w.f, w.size = f, 0
	return old.Close()
}

// Close ends the writing.
func (w *Writer) Close() error { return w.f.Close() }
