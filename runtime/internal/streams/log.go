package streams

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"github.com/agentbox/agentbox/internal/fsx"
	"github.com/agentbox/agentbox/internal/guard"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/internal/kernel"
	"github.com/agentbox/agentbox/runtime/internal/record"
)

// A log is conmon's k8s-file: lines of
//
//	2006-01-02T15:04:05.999999999-07:00 stdout F text
//
// where the tag is F for the end of a line that was printed and P for a part
// without its line break. A record is at most some 8 KiB, conmon's buffer.
const recordMax = 64 << 10

// entry is one record of the log.
type entry struct {
	at      []byte // as it stands there
	stderr  bool
	partial bool
	text    []byte
}

func parseEntry(line []byte) (e entry, ok bool) {
	at, rest, ok1 := bytes.Cut(line, []byte(" "))
	stream, rest, ok2 := bytes.Cut(rest, []byte(" "))
	tag, text, ok3 := bytes.Cut(rest, []byte(" "))
	if !ok1 || !ok2 || !ok3 {
		return e, false
	}
	return entry{at: at, stderr: string(stream) == "stderr", partial: string(tag) == "P", text: text}, true
}

// Print writes what a log holds now. A missing log is empty; one that reached its bound has
// lost its beginning.
func Print(ctx context.Context, path string, opts runtime.LogOptions, stdout, stderr io.Writer) error {
	r, err := openLog(path)
	if err != nil || r.f == nil {
		return err
	}
	defer r.close()
	st, err := r.f.Stat()
	if err != nil {
		return err
	}
	if err := r.seekTail(opts.Tail); err != nil {
		return err
	}
	// Output printed from now on is not waited for: it may never end.
	r.limit = st.Size()
	return r.drain(ctx, &printer{opts: opts, out: [2]io.Writer{stdout, stderr}})
}

// Follow writes the log as it grows, until the process has ended, for which
// ended waits, and all of it is written.
func Follow(
	ctx context.Context, path string, opts runtime.LogOptions, stdout, stderr io.Writer,
	ended func(context.Context) error,
) error {
	p := &printer{opts: opts, out: [2]io.Writer{stdout, stderr}}
	r, err := openLog(path)
	if err != nil {
		return err
	}
	defer r.close()
	w, err := kernel.Watch(filepath.Dir(path))
	if err != nil {
		return err
	}
	defer w.Close()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	over := guard.Start(func() error { return ended(ctx) })
	if err := r.seekTail(opts.Tail); err != nil {
		return err
	}
	last := false
	for {
		if err := r.drain(ctx, p); err != nil {
			return err
		}
		// A new file is begun when one is full, and then all of the old one
		// is written, which may be more than was just read.
		next, err := r.successor()
		if err != nil {
			return err
		}
		if next != nil {
			if err := r.drain(ctx, p); err != nil {
				return errors.Join(err, next.Close())
			}
			r.turn(next)
			continue
		}
		if last {
			return nil
		}
		select {
		case <-w.Events:
		case <-over:
			// Or removed; either way nothing more is written.
			last = true
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// printer writes records as what was printed.
type printer struct {
	opts runtime.LogOptions
	out  [2]io.Writer
	mid  [2]bool // the stream is within a line
}

func (p *printer) print(e entry) error {
	i := 0
	if e.stderr {
		i = 1
	}
	if !p.opts.Since.IsZero() {
		if at, err := time.Parse(time.RFC3339Nano, string(e.at)); err == nil && at.Before(p.opts.Since) {
			return nil
		}
	}
	w := p.out[i]
	if w == nil {
		return nil
	}
	var line []byte
	if p.opts.Timestamps && !p.mid[i] {
		line = append(append(line, e.at...), ' ')
	}
	line = append(line, e.text...)
	if !e.partial {
		line = append(line, '\n')
	}
	p.mid[i] = e.partial
	_, err := w.Write(line)
	return err
}

// logReader reads a log file record by record; half of one stays unread.
type logReader struct {
	path  string
	f     *os.File // nil: there is none yet
	at    int64    // where the next record begins
	limit int64    // read no further; 0: to the end
}

func openLog(path string) (*logReader, error) {
	r := &logReader{path: path}
	f, err := os.Open(r.path)
	if errors.Is(err, fs.ErrNotExist) {
		return r, nil
	}
	r.f = f
	return r, err
}

func (r *logReader) close() {
	if r.f != nil {
		_ = r.f.Close()
	}
}

// successor opens the file that has taken the place of the one being read, if
// one has.
func (r *logReader) successor() (*os.File, error) {
	if r.f != nil && record.Same(r.f, r.path) {
		return nil, nil
	}
	f, err := os.Open(r.path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	return f, err
}

// turn goes on with another file.
func (r *logReader) turn(f *os.File) {
	r.close()
	r.f, r.at = f, 0
}

// drain prints all whole records that are there.
func (r *logReader) drain(ctx context.Context, p *printer) error {
	if r.f == nil {
		return nil
	}
	limit := r.limit
	if limit == 0 {
		limit = 1<<63 - 1
	}
	in := bufio.NewReaderSize(io.NewSectionReader(r.f, r.at, limit-r.at), recordMax)
	for {
		if err := ctx.Err(); err != nil {
			return err
		}
		line, err := in.ReadSlice('\n')
		if errors.Is(err, io.EOF) {
			return nil
		}
		if errors.Is(err, bufio.ErrBufferFull) {
			// No record is that long: the file is damaged here. Skip to the
			// next line.
			r.at += int64(len(line))
			continue
		}
		if err != nil {
			return err
		}
		r.at += int64(len(line))
		if e, ok := parseEntry(line[:len(line)-1]); ok {
			if err := p.print(e); err != nil {
				return err
			}
		}
	}
}

// seekTail moves to where the last n lines begin, by reading backwards.
func (r *logReader) seekTail(n int) error {
	if r.f == nil || n < 0 {
		return nil
	}
	end, err := r.f.Seek(0, io.SeekEnd)
	if err != nil {
		return err
	}
	r.at = end
	if n == 0 {
		return nil
	}
	lines := backward{f: r.f, at: end}
	seen, open := 0, false
	for {
		line, at, err := lines.previous()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		e, ok := parseEntry(line)
		if !ok {
			continue
		}
		// A line ends with a full record; what follows the last one is a
		// line that has not ended yet.
		if !e.partial || !open {
			if seen == n {
				return nil
			}
			seen++
			open = true
		}
		r.at = at
	}
}

// backward reads the lines of a file from its end.
type backward struct {
	f    *os.File
	at   int64  // what lies before is not read yet
	held []byte // what lies behind and is not handed out yet
}

const backwardBlock = 64 << 10

// previous returns a line without its break, and where it begins.
func (b *backward) previous() (line []byte, at int64, err error) {
	for {
		// The break at the very end closes the line that we want.
		body := bytes.TrimSuffix(b.held, []byte("\n"))
		if i := bytes.LastIndexByte(body, '\n'); i >= 0 {
			line = body[i+1:]
			b.held = b.held[:i+1]
			return line, b.at + int64(i) + 1, nil
		}
		if b.at == 0 {
			if len(b.held) == 0 {
				return nil, 0, io.EOF
			}
			line, b.held = body, nil
			return line, 0, nil
		}
		if len(b.held) > recordMax {
			// Damaged, as in drain.
			b.held = nil
		}
		size := min(b.at, backwardBlock)
		block := make([]byte, size, int(size)+len(b.held))
		if _, err := b.f.ReadAt(block, b.at-size); err != nil {
			return nil, 0, err
		}
		b.at -= size
		b.held = append(block, b.held...)
	}
}

// Limit is the size at which the writer starts a log anew, and Kept is what Trim leaves of
// the output of earlier runs: together a log stays below 96 MiB; older lines are lost.
const (
	Limit = 64 << 20
	Kept  = 32 << 20
)

// Trim keeps the end of a log that previous runs have made long.
func Trim(path string) (err error) {
	st, err := os.Stat(path)
	if errors.Is(err, fs.ErrNotExist) || err == nil && st.Size() <= Kept {
		return nil
	}
	if err != nil {
		return err
	}
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	in := bufio.NewReader(io.NewSectionReader(f, st.Size()-Kept, Kept))
	if _, err := in.ReadString('\n'); err != nil && !errors.Is(err, io.EOF) {
		return err
	}
	return fsx.Create(path, fsx.Options{Volatile: true}, func(f *os.File) error {
		_, err := io.Copy(f, in)
		return err
	})
}
