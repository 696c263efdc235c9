package server

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"reflect"
	"sync"
	"time"

	"github.com/coder/websocket"

	"github.com/agentbox/agentbox/internal/guard"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/api/wire"
)

// channel is the writer of one output.
type channel struct {
	ctx context.Context
	l   *wire.Line
	n   byte
}

func (c channel) Write(p []byte) (int, error) {
	for done := 0; done < len(p); {
		n := min(len(p)-done, 64<<10)
		if err := c.l.Write(c.ctx, websocket.MessageBinary, append([]byte{c.n}, p[done:done+n]...)); err != nil {
			return done, err
		}
		done += n
	}
	return len(p), nil
}

// input is a caller's input, as a reader. It never holds more than Window.
type input struct {
	mu    sync.Mutex
	some  sync.Cond
	held  []byte
	err   error
	taken func(n int)
}

func newInput(taken func(int)) *input {
	in := &input{taken: taken}
	in.some.L = &in.mu
	return in
}

func (in *input) add(p []byte) error {
	in.mu.Lock()
	defer in.mu.Unlock()
	if len(in.held)+len(p) > wire.Window {
		return fmt.Errorf("%w: more input than the window of %d bytes", runtime.ErrInvalid, wire.Window)
	}
	in.held = append(in.held, p...)
	in.some.Broadcast()
	return nil
}

func (in *input) close(err error) {
	in.mu.Lock()
	defer in.mu.Unlock()
	if in.err == nil {
		in.err = err
	}
	in.some.Broadcast()
}

func (in *input) Read(p []byte) (int, error) {
	in.mu.Lock()
	for len(in.held) == 0 && in.err == nil {
		in.some.Wait()
	}
	if len(in.held) == 0 {
		defer in.mu.Unlock()
		return 0, in.err
	}
	n := copy(p, in.held)
	in.held = in.held[n:]
	in.mu.Unlock()
	in.taken(n)
	return n, nil
}

// opened is a session as its verb sees it.
type opened struct {
	ref     string
	open    wire.Open
	streams runtime.Streams
	started func() error // reports to the caller that it runs
}

// session is a verb that connects streams.
func (h *Handler) session(path, summary string, do func(ctx context.Context, s opened) (wire.Message, error)) route {
	return route{method: http.MethodGet, path: path, summary: summary, event: reflect.TypeFor[wire.Message](),
		serve: func(w http.ResponseWriter, r *http.Request) {
			_ = h.before(r.Context()) // it has logged
			conn, err := websocket.Accept(w, r, &websocket.AcceptOptions{
				Subprotocols: []string{wire.Subprotocol}, CompressionMode: websocket.CompressionDisabled,
			})
			if err != nil {
				return // it has answered
			}
			defer conn.CloseNow() //nolint:errcheck // after Close there is nothing to do
			conn.SetReadLimit(wire.MaxMessage)
			// The request's own context does not end with the connection any more. When
			// it ends, the line does not: a read that is given up would end that.
			ctx, cancel := context.WithCancel(r.Context())
			defer cancel()
			hearing, hush := context.WithCancel(context.WithoutCancel(ctx))
			defer hush()
			l := &wire.Line{Conn: conn, Stall: h.opts.Stall}
			m, _, err := kept(ctx, h, func() (wire.Message, error) {
				return h.converse(ctx, hearing, cancel, ref(r), l, do)
			})
			if err != nil {
				p := problem(err)
				failedWith(w, p.Code)
				m = wire.Message{Kind: wire.MsgProblem, Problem: &p}
			}
			patience := h.opts.Body
			if h.end.Err() != nil {
				patience = min(patience, wire.LastTime)
			}
			last, stop := context.WithTimeout(hearing, patience)
			defer stop()
			if err := l.Send(last, m); err == nil {
				_ = conn.Close(websocket.StatusNormalClosure, "")
			}
		}}
}

// converse runs one session up to its last message.
func (h *Handler) converse(
	ctx, hearing context.Context, cancel context.CancelFunc, ref string, l *wire.Line,
	do func(context.Context, opened) (wire.Message, error),
) (wire.Message, error) {
	soon, stop := context.WithTimeout(hearing, h.opts.Body)
	unopened := context.AfterFunc(ctx, stop)
	first, _, err := l.Read(soon)
	unopened()
	stop()
	if err != nil {
		return wire.Message{}, err
	}
	if first.Kind != wire.MsgOpen || first.Open == nil {
		return wire.Message{}, fmt.Errorf("%w: a session begins with the message %q", runtime.ErrInvalid, wire.MsgOpen)
	}
	// a line that is cut ends ctx
	in := newInput(func(n int) { _ = l.Send(ctx, wire.Message{Kind: wire.MsgAck, Bytes: n}) })
	var wrong error
	var sizes chan runtime.Size
	if first.Open.Resize {
		sizes = make(chan runtime.Size, 1)
	}
	heard := make(chan struct{})
	guard.Go(func() {
		defer close(heard)
		defer cancel() // the caller is gone
		wrong = guard.Do(func() error { return listen(hearing, l, in, sizes) })
		if wrong == nil || wrong == io.EOF {
			in.close(io.ErrUnexpectedEOF) // an end that was not said
			return
		}
		in.close(wrong)
	})
	s := opened{ref: ref, open: *first.Open, started: func() error {
		return l.Send(ctx, wire.Message{Kind: wire.MsgStarted})
	}}
	s.streams = runtime.Streams{DetachKeys: s.open.DetachKeys, Resize: sizes}
	if s.open.Stdin {
		s.streams.Stdin = in
	}
	if s.open.Stdout {
		s.streams.Stdout = channel{ctx, l, 1}
	}
	if s.open.Stderr {
		s.streams.Stderr = channel{ctx, l, 2}
	}
	m, err := do(ctx, s)
	in.close(io.EOF)
	select {
	case <-heard:
		if errors.Is(wrong, runtime.ErrInvalid) {
			return m, wrong
		}
	default:
	}
	return m, err
}

// listen takes what the caller sends until it is gone.
func listen(ctx context.Context, l *wire.Line, in *input, sizes chan runtime.Size) error {
	for {
		m, data, err := l.Read(ctx)
		switch {
		case err != nil:
			return err
		case data != nil:
			if err := in.add(data); err != nil {
				return err
			}
		case m.Kind == wire.MsgEOF:
			in.close(io.EOF)
		case m.Kind == wire.MsgResize && m.Size != nil && sizes != nil:
			select { // only the newest waits
			case <-sizes:
			default:
			}
			sizes <- *m.Size
		}
	}
}

// releaser is a Service that keeps exit codes for its callers.
type releaser interface{ Release(id string) }

func (h *Handler) startSession(ctx context.Context, s opened) (wire.Message, error) {
	sb, err := h.svc.Sandbox(ctx, s.ref)
	if err != nil {
		return wire.Message{}, err
	}
	if rel, ok := h.svc.(releaser); ok && sb.Spec.AutoRemove {
		// A caller that lives removes it when it has the exit code.
		defer time.AfterFunc(h.opts.Linger, func() { _ = guard.Do(func() error { rel.Release(sb.ID); return nil }) })
	}
	begun, done, err := h.inTurn(ctx, true)
	if err != nil {
		return wire.Message{}, err
	}
	defer done()
	wait, err := h.svc.Start(s.open.WithSecrets(begun), s.ref, &s.streams)
	done()
	if err == nil {
		err = s.started()
	}
	if err == nil {
		err = wait()
	}
	return wire.Message{Kind: wire.MsgEnd}, err
}

func (h *Handler) attachSession(ctx context.Context, s opened) (wire.Message, error) {
	return wire.Message{Kind: wire.MsgEnd}, h.svc.Attach(ctx, s.ref, s.streams)
}

func (h *Handler) execSession(ctx context.Context, s opened) (wire.Message, error) {
	if s.open.Process == nil {
		return wire.Message{}, fmt.Errorf("%w: no process", runtime.ErrInvalid)
	}
	exit, err := h.svc.Exec(ctx, s.ref, *s.open.Process, s.streams)
	return wire.Message{Kind: wire.MsgExit, Exit: exit}, err
}
