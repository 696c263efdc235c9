package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"

	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/group"
)

// maxLine is how long a member's line may be before it is printed in parts, and
// maxScore how much is kept of what a score's command prints.
const (
	maxLine  = 64 << 10
	maxScore = 4 << 10
)

// memberOutput is where what members print goes: to files of theirs, or, behind
// their names, line by line to the caller's streams.
type memberOutput struct {
	dir            string // empty: to the streams
	mu             sync.Mutex
	stdout, stderr io.Writer
}

// exec runs a command in a member.
func (o *memberOutput) exec(ctx context.Context, svc runtime.Service, m group.Member, command []string) (err error) {
	stdout, err := o.writer(m, o.stdout, ".out")
	if err != nil {
		return err
	}
	defer func() { err = first(err, stdout.Close()) }()
	stderr, err := o.writer(m, o.stderr, ".err")
	if err != nil {
		return err
	}
	defer func() { err = first(err, stderr.Close()) }()
	return execIn(ctx, svc, m, command, runtime.Streams{Stdout: stdout, Stderr: stderr})
}

// first is the first error of two.
func first(a, b error) error {
	if a != nil {
		return a
	}
	return b
}

func execIn(ctx context.Context, svc runtime.Service, m group.Member, command []string, streams runtime.Streams) error {
	exit, err := svc.Exec(ctx, m.ID, runtime.Process{Args: command, Env: m.Env, NoStep: true}, streams)
	var exec *runtime.ExecError
	if errors.As(err, &exec) && exec.Code != 0 {
		return &group.ExitError{Code: exec.Code, Err: err}
	}
	if err == nil && exit != 0 {
		err = &group.ExitError{Code: exit}
	}
	return err
}

// scoreOf is what a command prints.
func scoreOf(
	ctx context.Context, svc runtime.Service, m group.Member, command string, out *memberOutput,
) (_ string, err error) {
	stderr := &lineWriter{out: out, to: out.stderr, prefix: m.Name}
	defer func() { err = first(err, stderr.Close()) }()
	var score boundedBuffer
	err = execIn(ctx, svc, m, []string{"sh", "-c", command}, runtime.Streams{Stdout: &score, Stderr: stderr})
	return strings.TrimSpace(strings.ToValidUTF8(score.String(), "\uFFFD")), err
}

// boundedBuffer keeps the first maxScore bytes.
type boundedBuffer struct{ bytes.Buffer }

func (b *boundedBuffer) Write(p []byte) (int, error) {
	b.Buffer.Write(p[:min(len(p), maxScore-b.Len())])
	return len(p), nil
}

func (o *memberOutput) writer(m group.Member, to io.Writer, suffix string) (io.WriteCloser, error) {
	if o.dir != "" {
		return os.Create(filepath.Join(o.dir, m.Name+suffix))
	}
	return &lineWriter{out: o, to: to, prefix: m.Name}, nil
}

// lineWriter prints whole lines behind a prefix, so that those of several members
// do not mix.
type lineWriter struct {
	out    *memberOutput
	to     io.Writer
	prefix string
	rest   []byte
}

func (w *lineWriter) Write(p []byte) (int, error) {
	w.rest = append(w.rest, p...)
	for {
		i := bytes.IndexByte(w.rest, '\n')
		if i < 0 && len(w.rest) < maxLine {
			return len(p), nil
		}
		end := i + 1
		if i < 0 || i > maxLine {
			i, end = maxLine, maxLine
		}
		if err := w.print(w.rest[:i]); err != nil {
			return 0, err
		}
		w.rest = w.rest[end:]
	}
}

func (w *lineWriter) print(line []byte) error {
	w.out.mu.Lock()
	defer w.out.mu.Unlock()
	_, err := fmt.Fprintf(w.to, "[%s] %s\n", w.prefix, line)
	return err
}

// Close prints what has no end of line.
func (w *lineWriter) Close() error {
	if len(w.rest) == 0 {
		return nil
	}
	err := w.print(w.rest)
	w.rest = nil
	return err
}
