package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/docker/go-units"

	"github.com/agentbox/agentbox/internal/guard"
	"github.com/agentbox/agentbox/runtime"
)

// An outcome says how far follow got.
type outcome struct{ started, detached bool }

// exited is how a sandbox's first process ended, as Wait says.
type exited struct {
	runtime.Exit
	err error
}

// follow connects the caller to a sandbox's first process until it exits, and
// ends with its exit code, or with nil when the user detached. After a restore it
// connects to the process that goes on. Errors are told as the verb's.
func (s *session) follow(
	ctx context.Context, svc runtime.Service, verb string, sb runtime.Sandbox,
	connect func(runtime.Streams) (wait func() error, err error),
) (outcome, error) {
	var started atomic.Bool
	ready := make(chan struct{})
	var end exited
	err := s.run(ctx, func(streams runtime.Streams) error {
		// Its output can reach the caller, and the caller answer with a
		// signal, before connect has returned.
		defer s.forward(ctx, svc, sb.ID, ready)()
		var input *relay
		if streams.Stdin != nil {
			input = newRelay(streams.Stdin)
		}
		sizes := streams.Resize
		for {
			var since time.Time
			err := input.connection(func(in io.Reader) (err error) {
				ctx, cancel := context.WithCancel(ctx) // ends what a connection leaves behind
				defer cancel()
				streams.Stdin = in
				if started.Load() {
					streams.Resize = s.redrawn(ctx, sizes)
				}
				wait, err := connect(streams)
				if err != nil {
					return err
				}
				since = time.Now()
				if !started.Swap(true) {
					close(ready)
				}
				end, err = attached(ctx, svc, sb.ID, wait)
				return err
			})
			if err != nil || end.err != nil || end.Code != exitKilled { // as a restore ends processes
				return err
			}
			if on, err := s.goesOn(ctx, svc, sb, since); err != nil || !on {
				return err
			}
			connect = func(streams runtime.Streams) (func() error, error) {
				return func() error { return svc.Attach(ctx, sb.ID, streams) }, nil
			}
		}
	})
	o := outcome{started.Load(), errors.Is(err, runtime.ErrDetached)}
	switch {
	case o.detached:
		fmt.Fprintf(s.app.stderr, "\ndetached from %[1]s, which goes on; back with: agentbox attach %[1]s\n", sb.Name)
		return o, nil
	case err != nil && o.started && ctx.Err() != nil:
		return o, left(ctx, verb, sb.Name)
	case err != nil:
		return o, reword(err, verb, sb.Name)
	case end.err != nil:
		return o, reword(end.err, verb, sb.Name)
	}
	if end.Code == exitKilled && end.OOMKilled {
		sayLimit(sb, s.app.stderr)
	}
	return o, status(end.Code)
}

// sayLimit says that a sandbox was killed by its memory limit.
func sayLimit(sb runtime.Sandbox, stderr io.Writer) {
	text := sb.Name + " was killed for lack of memory"
	if limit := sb.Spec.Resources.Memory; limit > 0 {
		text = sb.Name + " was killed: memory limit " + units.BytesSize(float64(limit))
	}
	fmt.Fprintln(stderr, printable(text))
}

// attached waits until the first process has ended, and then for its output.
func attached(ctx context.Context, svc runtime.Service, id string, wait func() error) (end exited, err error) {
	// Wait now, not after the output has ended: with --rm the monitor
	// removes the sandbox at its exit, and the exit code with it.
	var exit runtime.Exit
	waited := guard.Start(func() (err error) {
		exit, err = svc.Wait(ctx, id)
		return err
	})
	if err := wait(); err != nil {
		return end, err
	}
	select {
	case err := <-waited:
		return exited{exit, err}, nil
	case <-ctx.Done():
		return end, context.Cause(ctx)
	}
}

// restoredPoll is how often whyEnded looks: other processes' work does not signal its end.
const restoredPoll = 50 * time.Millisecond

// What whyEnded finds.
type finding int

const (
	notRestored finding = iota
	restored            // another command has restored it, and it runs
	notBack             // the restore has failed
)

// whyEnded returns a sandbox whose processes have ended since an instant, and finds out whether that
// was for a restore by another command. It waits for one that is at work.
func whyEnded(
	ctx context.Context, svc runtime.Service, id string, since time.Time,
) (sb runtime.Sandbox, found finding, err error) {
	for {
		all, err := svc.Sandboxes(ctx)
		if err != nil {
			return sb, notRestored, err
		}
		at := slices.IndexFunc(all, func(sb runtime.Sandbox) bool { return sb.ID == id })
		if at < 0 {
			return sb, notRestored, nil
		}
		sb = all[at]
		working := sb.Work != nil && sb.Work.Verb == "restore"
		if working {
			found = notBack // unless it comes
		}
		switch {
		case found == notBack && sb.Status == runtime.Running && sb.Started.After(since):
			return sb, restored, nil
		case !working:
			return sb, found, nil
		}
		select {
		case <-time.After(restoredPoll):
		case <-ctx.Done():
			return sb, found, context.Cause(ctx)
		}
	}
}

// goesOn reports whether the sandbox goes on, although the first process to which the caller was
// connected has ended, and says what happened.
func (s *session) goesOn(
	ctx context.Context, svc runtime.Service, was runtime.Sandbox, since time.Time,
) (bool, error) {
	sb, found, err := whyEnded(ctx, svc, was.ID, since)
	switch {
	case err != nil:
		return false, err
	case found == restored:
		fmt.Fprintf(s.app.stderr, "\r\n%s\r\n", printable(restoredText(ctx, svc, sb)))
	case found == notBack:
		fmt.Fprintf(s.app.stderr, "\r\n%s\r\n", printable("another command's restore of "+was.Name+" failed"))
	}
	return found == restored, nil
}

// restoredText says what a sandbox was restored to.
func restoredText(ctx context.Context, svc runtime.Service, sb runtime.Sandbox) string {
	c, err := svc.CheckpointInfo(ctx, sb.Head)
	if sb.Head == "" || err != nil {
		return sb.Name + " was restored"
	}
	text := sb.Name + " was restored to checkpoint " + shortID(c.ID)
	if c.Name != "" {
		text += " (" + c.Name + ")"
	}
	return text
}

// redrawn returns the sizes of a terminal for a new connection: first one that differs, because
// only a change makes the program draw its screen again.
func (s *session) redrawn(ctx context.Context, sizes <-chan runtime.Size) <-chan runtime.Size {
	tty := firstTerminal(s.app.stdout, s.app.stdin)
	if sizes == nil || tty == nil {
		return sizes
	}
	now, ok := terminalSize(tty)
	if !ok {
		return sizes
	}
	out := make(chan runtime.Size)
	guard.Go(func() {
		list := []runtime.Size{{Width: now.Width, Height: max(1, now.Height-1)}, now}
		for {
			var next runtime.Size
			if len(list) > 0 {
				next, list = list[0], list[1:]
			} else {
				select {
				case next = <-sizes:
				case <-ctx.Done():
					return
				}
			}
			select {
			case out <- next:
			case <-ctx.Done():
				return
			}
		}
	})
	return out
}

// A relay reads the caller's input, and hands it to one connection after the other: a read that a
// connection leaves behind when it ends must not swallow what the next one is to get.
type relay struct {
	mu   sync.Mutex // held by the connection that reads
	data chan []byte
	rest []byte
	err  error // set before data is closed
}

func newRelay(from io.Reader) *relay {
	r := &relay{data: make(chan []byte)}
	guard.Go(func() {
		r.err = guard.Do(func() error {
			for {
				buf := make([]byte, 32<<10)
				n, err := from.Read(buf)
				if n > 0 {
					r.data <- buf[:n]
				}
				if err != nil {
					return err
				}
			}
		})
		close(r.data)
	})
	return r
}

// connection calls fn with the input of a connection, which ends with it; without a relay there is
// none.
func (r *relay) connection(fn func(io.Reader) error) error {
	if r == nil {
		return fn(nil)
	}
	l := &line{relay: r, over: make(chan struct{})}
	defer close(l.over)
	return fn(l)
}

// line is a relay's input as one connection reads it. Its reads fail once the connection has ended,
// and none is lost to it.
type line struct {
	*relay
	over chan struct{}
}

var errLineEnded = errors.New("the connection has ended")

// Read implements io.Reader.
func (l *line) Read(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.rest) == 0 {
		select {
		case <-l.over:
			return 0, errLineEnded
		case data, ok := <-l.data:
			if !ok {
				return 0, l.err
			}
			l.rest = data
		}
	}
	select {
	case <-l.over:
		return 0, errLineEnded
	default:
	}
	n := copy(p, l.rest)
	l.rest = l.rest[n:]
	return n, nil
}
