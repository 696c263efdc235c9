package api

import (
	"context"
	"errors"
	"io"
	"net/http"
	"sync"

	"github.com/coder/websocket"

	"github.com/agentbox/agentbox/internal/guard"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/api/wire"
)

// Exec runs one more process in a running sandbox.
func (c sandboxCalls) Exec(ctx context.Context, sandbox string, p runtime.Process, streams runtime.Streams) (int, error) {
	route := at("sandboxes", sandbox, "exec")
	if p.Detach {
		b, err := do[wire.ExitBody](ctx, c.conn, route, p, nil)
		return b.Exit, err
	}
	s, err := c.dial(ctx, route, streams, wire.Open{Process: &p})
	if err != nil {
		return 0, err
	}
	m, err := s.end()
	return m.Exit, err
}

// Attach connects streams to a running sandbox's first process.
func (c sandboxCalls) Attach(ctx context.Context, sandbox string, streams runtime.Streams) error {
	s, err := c.dial(ctx, at("sandboxes", sandbox, "attach"), streams, wire.Open{})
	if err != nil {
		return err
	}
	_, err = s.end()
	return err
}

// Start starts a sandbox; see runtime.Service for streams and wait.
func (c sandboxCalls) Start(ctx context.Context, sandbox string, streams *runtime.Streams) (wait func() error, err error) {
	v, err := c.valuesOf(ctx, sandbox, nil)
	if err != nil {
		return nil, err
	}
	route := at("sandboxes", sandbox, "start")
	if streams == nil {
		return nil, none(ctx, c.conn, route, wire.StartBody{SecretValues: v})
	}
	s, err := c.dial(ctx, route, *streams, wire.Open{SecretValues: v})
	if err != nil {
		return nil, err
	}
	select {
	case <-s.started:
	case <-s.done:
		// It may have been so short that both are true.
		select {
		case <-s.started:
		default:
			return nil, s.err
		}
	}
	return func() error { _, err := s.end(); return err }, nil
}

// session is the caller's side of one.
type session struct {
	c       *conn
	l       *wire.Line
	streams runtime.Streams

	started chan struct{}
	done    chan struct{} // last and err are known
	last    wire.Message
	err     error

	mu     sync.Mutex
	some   sync.Cond
	credit int // bytes of input that may still be sent; negative: none ever
}

// dial opens a session, which then runs until its last message, or ctx ends.
func (c *conn) dial(ctx context.Context, route string, streams runtime.Streams, open wire.Open) (*session, error) {
	if _, err := encode(open); err != nil {
		return nil, err
	}
	header := http.Header{}
	passTrace(ctx, header)
	conn, resp, err := websocket.Dial(ctx, "ws://agentbox"+route, &websocket.DialOptions{
		HTTPClient: c.http, HTTPHeader: header,
		Subprotocols: []string{wire.Subprotocol}, CompressionMode: websocket.CompressionDisabled,
	})
	if err != nil {
		if resp != nil && resp.Header.Get("Content-Type") == "application/problem+json" {
			return nil, c.refusal(ctx, toChange, resp)
		}
		return nil, c.unanswered(ctx, toChange, err)
	}
	conn.SetReadLimit(wire.MaxMessage)
	s := &session{
		c: c, l: &wire.Line{Conn: conn}, streams: streams, credit: wire.Window,
		started: make(chan struct{}), done: make(chan struct{}),
	}
	s.some.L = &s.mu
	open.Stdin, open.Stdout, open.Stderr = streams.Stdin != nil, streams.Stdout != nil, streams.Stderr != nil
	open.Resize, open.DetachKeys = streams.Resize != nil, streams.DetachKeys
	if err := s.l.Send(ctx, wire.Message{Kind: wire.MsgOpen, Open: &open}); err != nil {
		return nil, errors.Join(c.unanswered(ctx, toChange, err), conn.CloseNow())
	}
	guard.Go(func() { s.run(ctx) })
	if streams.Stdin != nil {
		guard.Go(func() { s.feed(ctx) })
	}
	if streams.Resize != nil {
		guard.Go(func() { s.resize(ctx) })
	}
	return s, nil
}

// end waits for the last message.
func (s *session) end() (wire.Message, error) {
	<-s.done
	return s.last, s.err
}

// run takes what the service sends.
func (s *session) run(ctx context.Context) {
	defer close(s.done)
	s.err = guard.Do(func() (err error) {
		s.last, err = s.hear(ctx)
		return err
	})
	if s.err != nil && ctx.Err() != nil && !errors.Is(s.err, runtime.ErrDetached) {
		s.err = context.Cause(ctx)
	}
	s.give(-1 << 30) // nothing is to be sent any more
	if s.err == nil {
		_ = s.l.Conn.Close(websocket.StatusNormalClosure, "") // all is said
	}
	_ = s.l.Conn.CloseNow()
}

func (s *session) hear(ctx context.Context) (wire.Message, error) {
	for {
		m, data, err := s.l.Read(ctx)
		if err != nil {
			return m, s.c.unanswered(ctx, toChange, err)
		}
		if len(data) > 0 {
			var w io.Writer
			switch data[0] {
			case 1:
				w = s.streams.Stdout
			case 2:
				w = s.streams.Stderr
			}
			if w != nil {
				if _, err := w.Write(data[1:]); err != nil {
					return m, err
				}
			}
			continue
		}
		switch m.Kind {
		case wire.MsgStarted:
			close(s.started)
		case wire.MsgAck:
			s.give(m.Bytes)
		case wire.MsgExit, wire.MsgEnd:
			return m, nil
		case wire.MsgProblem:
			if m.Problem == nil {
				return m, errors.New("the service ends the session and does not say why")
			}
			return m, m.Problem.Err()
		}
	}
}

// give adds to what may be sent.
func (s *session) give(n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.credit += n
	s.some.Broadcast()
}

// take waits until something may be sent, at most so much.
func (s *session) take(most int) (n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for s.credit == 0 {
		s.some.Wait()
	}
	n = min(s.credit, most)
	s.credit -= max(n, 0)
	return n
}

// feed sends the caller's input. Like the embedded engine it may be left in the
// middle of a Read when the session ends.
func (s *session) feed(ctx context.Context) {
	buf := make([]byte, 32<<10)
	for {
		n, err := s.streams.Stdin.Read(buf)
		for p := buf[:n]; len(p) > 0; {
			m := s.take(len(p))
			if m < 0 || s.l.Write(ctx, websocket.MessageBinary, p[:m]) != nil {
				return // run knows why
			}
			p = p[m:]
		}
		if err != nil {
			// As for a pipe: that its input ended badly a process is not told.
			_ = s.l.Send(ctx, wire.Message{Kind: wire.MsgEOF})
			return
		}
	}
}

// resize sends the terminal's sizes.
func (s *session) resize(ctx context.Context) {
	for {
		select {
		case size, ok := <-s.streams.Resize:
			if !ok || s.l.Send(ctx, wire.Message{Kind: wire.MsgResize, Size: &size}) != nil {
				return
			}
		case <-s.done:
			return
		}
	}
}
