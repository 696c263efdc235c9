// Package eventlog stores the events of a sandbox: a file with one JSON object a line, of which
// the newest 1 to 2 MiB are kept. Append writes an event; a Reader reads them and continues where
// it stopped. Several processes may write a log and any number may read it, at the same time.
package eventlog

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/flock"
)

// limit is how large a file gets, in bytes; there are at most two.
const limit = 1 << 20

// Path returns the file with the newest events of a sandbox; older ones are in a file beside it.
func Path(dir, id string) string { return filepath.Join(dir, id+".jsonl") }

func older(dir, id string) string { return filepath.Join(dir, id+".1.jsonl") }

// Append adds one line, which ends with its newline.
func Append(dir, id string, line []byte) error {
	for {
		l, err := flock.Lock(context.Background(), Path(dir, id), flock.Append)
		if errors.Is(err, fs.ErrNotExist) { // it may have gone with the last file
			if err = os.MkdirAll(dir, 0o700); err == nil {
				continue
			}
		}
		if err != nil {
			return err
		}
		again, err := appendTo(l.File(), dir, id, line)
		l.Unlock()
		if err != nil || !again {
			return err
		}
	}
}

// appendTo appends to the locked file. It is to be called again when it has put that aside.
func appendTo(f *os.File, dir, id string, line []byte) (again bool, err error) {
	mine, err := f.Stat()
	if err != nil {
		return false, err
	}
	if mine.Size() > 0 && mine.Size()+int64(len(line)) > limit {
		return true, os.Rename(Path(dir, id), older(dir, id))
	}
	// A line cut off by a full disk or a kill is no line, nor part of the next.
	whole, err := end(f, mine.Size())
	if err == nil && whole < mine.Size() {
		err = f.Truncate(whole)
	}
	if err != nil {
		return false, err
	}
	if _, err = f.Write(line); err != nil {
		err = errors.Join(err, f.Truncate(whole))
	}
	return false, err
}

// end returns the offset at which the last whole line of a file ends.
func end(f *os.File, size int64) (int64, error) {
	buf := make([]byte, 4096)
	for size > 0 {
		part := buf[:min(size, int64(len(buf)))]
		if _, err := f.ReadAt(part, size-int64(len(part))); err != nil {
			return 0, err
		}
		if i := bytes.LastIndexByte(part, '\n'); i >= 0 {
			return size - int64(len(part)) + int64(i) + 1, nil
		}
		size -= int64(len(part))
	}
	return 0, nil
}

func ignore(err, what error) error {
	if errors.Is(err, what) {
		return nil
	}
	return err
}

// Remove deletes a sandbox's events. The directory stays.
func Remove(dir, id string) error {
	var errs []error
	for _, path := range []string{Path(dir, id), older(dir, id)} {
		errs = append(errs, ignore(os.Remove(path), fs.ErrNotExist))
	}
	return errors.Join(errs...)
}

// A Reader reads a sandbox's events, each once, oldest first.
type Reader struct {
	dir, id string
	f       *os.File // the newest file that was read of
	at      int64    // up to where
}

// NewReader returns a Reader at the oldest event.
func NewReader(dir, id string) *Reader { return &Reader{dir: dir, id: id} }

// Close ends the reader.
func (r *Reader) Close() error {
	if r.f == nil {
		return nil
	}
	return r.f.Close()
}

// Read hands the lines to each that were not read yet.
func (r *Reader) Read(each func(line []byte) error) error {
	// The former newest file is complete once there is a newer one.
	now, err := r.open(Path(r.dir, r.id))
	if err != nil {
		return err
	}
	same, err := sameFile(r.f, now)
	if err == nil && r.f == nil {
		err = r.past(now, each)
	}
	if err == nil && r.f != nil {
		err = r.rest(each)
	}
	if err != nil || now == nil || same {
		return errors.Join(err, closed(now))
	}
	err = closed(r.f)
	r.f, r.at = now, 0
	return errors.Join(err, r.rest(each))
}

// past reads the older of the files, unless that is now, which was put aside
// since we opened it. It is the newest where a crash came before the next.
func (r *Reader) past(now *os.File, each func([]byte) error) error {
	old, err := r.open(older(r.dir, r.id))
	if err != nil || old == nil {
		return err
	}
	same, err := sameFile(old, now)
	at := int64(0)
	if err == nil && !same {
		at, err = lines(old, 0, each)
	}
	if now == nil && err == nil {
		r.f, r.at = old, at
		return nil
	}
	return errors.Join(err, old.Close())
}

func (r *Reader) rest(each func([]byte) error) (err error) {
	r.at, err = lines(r.f, r.at, each)
	return err
}

// open returns nil when there is no such file.
func (r *Reader) open(path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NOFOLLOW, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	return f, err
}

func closed(f *os.File) error {
	if f == nil {
		return nil
	}
	return f.Close()
}

func sameFile(a, b *os.File) (bool, error) {
	if a == nil || b == nil {
		return false, nil
	}
	x, err := a.Stat()
	if err != nil {
		return false, err
	}
	y, err := b.Stat()
	return err == nil && os.SameFile(x, y), err
}

// lines reads whole lines from an offset on, and returns where they end.
func lines(f *os.File, at int64, each func([]byte) error) (int64, error) {
	in := bufio.NewReader(io.NewSectionReader(f, at, 2*limit))
	for {
		line, err := in.ReadBytes('\n')
		if errors.Is(err, io.EOF) {
			return at, nil // one that is cut off may still be on its way
		}
		if err != nil {
			return at, err
		}
		at += int64(len(line))
		if err := each(line); err != nil {
			return at, err
		}
	}
}
