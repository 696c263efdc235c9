package overlay

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"iter"

	"github.com/agentbox/agentbox/internal/fault"
)

// maxLine bounds one line of a tree; an entry at its own bounds fits.
const maxLine = 96 << 20

// TreeWriter writes entries as JSON lines. Close is needed to flush it; it
// leaves the writer below open.
type TreeWriter struct {
	w    *bufio.Writer
	line []byte
	last string
	any  bool
}

// NewTreeWriter returns a TreeWriter onto w.
func NewTreeWriter(w io.Writer) *TreeWriter {
	return &TreeWriter{w: bufio.NewWriterSize(w, 64<<10)}
}

// Write adds an entry. Entries out of order are ErrInvalid.
func (t *TreeWriter) Write(e Entry) error {
	if t.any && ComparePaths(t.last, e.Path) >= 0 {
		return fmt.Errorf("write tree: %q after %q: %w", clip(e.Path), clip(t.last), fault.ErrInvalid)
	}
	t.last, t.any = e.Path, true
	t.line = append(e.AppendJSON(t.line[:0]), '\n')
	if _, err := t.w.Write(t.line); err != nil {
		return fmt.Errorf("write tree: %w", err)
	}
	if cap(t.line) > 1<<20 {
		t.line = nil // one entry with very many holes should not be remembered for ever
	}
	return nil
}

// Close flushes what was written. A tree without entries is ErrInvalid.
func (t *TreeWriter) Close() error {
	if !t.any {
		return fmt.Errorf("write tree: no entries: %w", fault.ErrInvalid)
	}
	if err := t.w.Flush(); err != nil {
		return fmt.Errorf("write tree: %w", err)
	}
	return nil
}

// ReadTree calls fn for every entry of a tree that a TreeWriter wrote. It is
// strict: a line that is not canonical, is too long or is cut off, a path out
// of order or without the directory it lies in, a tree that does not begin with
// "." are ErrCorrupt. An error of fn ends it and is returned as it is.
func ReadTree(r io.Reader, fn func(Entry) error) error {
	br := bufio.NewReaderSize(r, 64<<10)
	var order orderCheck
	for n := 1; ; n++ {
		line, err := readLine(br)
		if err == io.EOF {
			if n == 1 {
				return fmt.Errorf("read tree: %w: it is empty", fault.ErrCorrupt)
			}
			return nil
		}
		if err != nil {
			return fmt.Errorf("read tree: line %d: %w", n, err)
		}
		e, err := ParseEntry(line)
		if err == nil {
			err = order.next(&e)
		}
		if err != nil {
			return fmt.Errorf("read tree: line %d: %w", n, err)
		}
		if err := fn(e); err != nil {
			return err
		}
	}
}

// readLine returns the next line without its newline, and io.EOF only where a
// line could have begun. The line is valid until the next call.
func readLine(br *bufio.Reader) ([]byte, error) {
	line, err := br.ReadSlice('\n')
	if err == bufio.ErrBufferFull {
		long := bytes.Clone(line)
		for err == bufio.ErrBufferFull {
			if len(long) > maxLine {
				return nil, fmt.Errorf("%w: longer than %d bytes", fault.ErrCorrupt, maxLine)
			}
			line, err = br.ReadSlice('\n')
			long = append(long, line...)
		}
		line = long
	}
	switch {
	case err == io.EOF && len(line) == 0:
		return nil, io.EOF
	case err == io.EOF || errors.Is(err, io.ErrUnexpectedEOF):
		return nil, fmt.Errorf("%w: cut off", fault.ErrCorrupt)
	case err != nil:
		return nil, err
	}
	return line[:len(line)-1], nil
}

// orderCheck holds a stream of entries to the order and the shape of a tree.
type orderCheck struct {
	any  bool
	last string
	dirs []string // the directories above the last entry, itself included if it is one
}

func (o *orderCheck) next(e *Entry) error {
	if !o.any {
		if e.Path != "." {
			return fmt.Errorf("%w: the first entry is %q, not \".\"", fault.ErrCorrupt, clip(e.Path))
		}
		o.any, o.last, o.dirs = true, ".", []string{"."}
		return nil
	}
	switch c := ComparePaths(o.last, e.Path); {
	case c == 0:
		return fmt.Errorf("%w: %q comes twice", fault.ErrCorrupt, clip(e.Path))
	case c > 0:
		return fmt.Errorf("%w: %q comes after %q", fault.ErrCorrupt, clip(e.Path), clip(o.last))
	}
	parent, _ := splitPath(e.Path)
	// Every directory on the stack lies in the one below it, so the first from
	// the top that is the parent is the right one, and those above it are done.
	for len(o.dirs) > 0 && o.dirs[len(o.dirs)-1] != parent {
		o.dirs = o.dirs[:len(o.dirs)-1]
	}
	if len(o.dirs) == 0 {
		return fmt.Errorf("%w: %q is not in a directory that came before it", fault.ErrCorrupt, clip(e.Path))
	}
	o.last = e.Path
	if e.Type == TypeDir {
		o.dirs = append(o.dirs, e.Path)
	}
	return nil
}

// errStop ends a walk whose reader has gone away.
var errStop = errors.New("stop")

// TreeEntries is ReadTree as a sequence; an error is its last element.
func TreeEntries(r io.Reader) iter.Seq2[Entry, error] {
	return pull(func(fn func(Entry) error) error { return ReadTree(r, fn) })
}

// DirEntries is Walk as a sequence; an error is its last element.
func DirEntries(ctx context.Context, dir string, opts WalkOptions) iter.Seq2[Entry, error] {
	return pull(func(fn func(Entry) error) error { return Walk(ctx, dir, opts, fn) })
}

func pull(run func(fn func(Entry) error) error) iter.Seq2[Entry, error] {
	return func(yield func(Entry, error) bool) {
		err := run(func(e Entry) error {
			if !yield(e, nil) {
				return errStop
			}
			return nil
		})
		if err != nil && err != errStop {
			yield(Entry{}, err)
		}
	}
}
