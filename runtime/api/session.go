package api

import (
	"context"
	"encoding/json"
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
)

// A session is a process with its streams, over a websocket. Binary messages are
// data: input as it is; output behind one byte, 1 for stdout and 2 for stderr.
// Text messages are JSON, a Message each. The caller's first is what to do
// (Open); it may then send as much input as Window bytes, and as much more as was
// acknowledged. The service's last is an exit, an end or a problem; a session
// without one was cut short.

// Window is how much input may be on its way.
const Window = 256 << 10

// maxMessage bounds one message.
const maxMessage = 1 << 20

// subprotocol names the above.
const subprotocol = "agentbox.v1"

// The kinds of messages.
const (
	msgOpen    = "open"    // from the caller: Open
	msgResize  = "resize"  // from the caller: Size
	msgEOF     = "eof"     // from the caller: the end of its input
	msgStarted = "started" // it runs
	msgAck     = "ack"     // Bytes of input were taken
	msgExit    = "exit"    // the last of an exec
	msgEnd     = "end"     // the last of start and attach
	msgProblem = "problem" // the last that went wrong
)

// Message is one text message.
type Message struct {
	Kind    string        `json:"kind"`
	Open    *Open         `json:"open,omitempty"`
	Size    *runtime.Size `json:"size,omitempty"`
	Bytes   int           `json:"bytes,omitempty"`
	Exit    int           `json:"exit,omitempty"`
	Problem *Problem      `json:"problem,omitempty"`
}

// Open says what a session connects.
type Open struct {
	Process    *runtime.Process `json:"process,omitempty"` // of an exec
	Stdin      bool             `json:"stdin"`
	Stdout     bool             `json:"stdout"`
	Stderr     bool             `json:"stderr"`
	Resize     bool             `json:"resize"`                // the terminal's size will come, and its changes
	DetachKeys []byte           `json:"detach_keys,omitempty"` // in base64
	SecretValues
}

// A line is one side of a session.
type line struct {
	conn  *websocket.Conn
	stall time.Duration // how long the other side may take none of a message; 0: for ever
	mu    sync.Mutex
}

func (l *line) send(ctx context.Context, m Message) error {
	data, err := json.Marshal(m)
	if err != nil {
		return err
	}
	return l.write(ctx, websocket.MessageText, data)
}

func (l *line) write(ctx context.Context, kind websocket.MessageType, data []byte) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.stall == 0 {
		return l.conn.Write(ctx, kind, data)
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	// A message that ends halfway ends the line, and there is a last one to come.
	bound, cancel := context.WithTimeout(context.WithoutCancel(ctx), l.stall)
	defer cancel()
	defer context.AfterFunc(ctx, func() { time.AfterFunc(lastTime, cancel) })()
	return l.conn.Write(bound, kind, data)
}

// read returns the next message, or data.
func (l *line) read(ctx context.Context) (m Message, data []byte, err error) {
	kind, data, err := l.conn.Read(ctx)
	if err != nil || kind == websocket.MessageBinary {
		return m, data, err
	}
	if err := json.Unmarshal(data, &m); err != nil {
		return m, nil, fmt.Errorf("%w: message: %v", runtime.ErrInvalid, err)
	}
	return m, nil, nil
}

// channel is the writer of one output.
type channel struct {
	ctx context.Context
	l   *line
	n   byte
}

func (c channel) Write(p []byte) (int, error) {
	for done := 0; done < len(p); {
		n := min(len(p)-done, 64<<10)
		if err := c.l.write(c.ctx, websocket.MessageBinary, append([]byte{c.n}, p[done:done+n]...)); err != nil {
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
	if len(in.held)+len(p) > Window {
		return fmt.Errorf("%w: more input than the window of %d bytes", runtime.ErrInvalid, Window)
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
	open    Open
	streams runtime.Streams
	started func() error // reports to the caller that it runs
}

// session is a verb that connects streams.
func (h *Handler) session(path, summary string, do func(ctx context.Context, s opened) (Message, error)) route {
	return route{method: http.MethodGet, path: path, summary: summary, event: reflect.TypeFor[Message](), serve: func(w http.ResponseWriter, r *http.Request) {
		_ = h.before(r.Context()) // it has logged
		conn, err := websocket.Accept(w, r, &websocket.AcceptOptions{Subprotocols: []string{subprotocol}, CompressionMode: websocket.CompressionDisabled})
		if err != nil {
			return // it has answered
		}
		defer conn.CloseNow() //nolint:errcheck // after Close there is nothing to do
		conn.SetReadLimit(maxMessage)
		// The request's own context does not end with the connection any more. When
		// it ends, the line does not: a read that is given up would end that.
		ctx, cancel := context.WithCancel(r.Context())
		defer cancel()
		hearing, hush := context.WithCancel(context.WithoutCancel(ctx))
		defer hush()
		l := &line{conn: conn, stall: h.opts.Stall}
		m, _, err := kept(ctx, h, func() (Message, error) { return h.converse(ctx, hearing, cancel, ref(r), l, do) })
		if err != nil {
			p := problem(err)
			failedWith(w, p.Code)
			m = Message{Kind: msgProblem, Problem: &p}
		}
		patience := h.opts.Body
		if h.end.Err() != nil {
			patience = min(patience, lastTime)
		}
		last, stop := context.WithTimeout(hearing, patience)
		defer stop()
		if err := l.send(last, m); err == nil {
			_ = conn.Close(websocket.StatusNormalClosure, "")
		}
	}}
}

// converse runs one session up to its last message.
func (h *Handler) converse(ctx, hearing context.Context, cancel context.CancelFunc, ref string, l *line, do func(context.Context, opened) (Message, error)) (Message, error) {
	soon, stop := context.WithTimeout(hearing, h.opts.Body)
	unopened := context.AfterFunc(ctx, stop)
	first, _, err := l.read(soon)
	unopened()
	stop()
	if err != nil {
		return Message{}, err
	}
	if first.Kind != msgOpen || first.Open == nil {
		return Message{}, fmt.Errorf("%w: a session begins with the message %q", runtime.ErrInvalid, msgOpen)
	}
	in := newInput(func(n int) { _ = l.send(ctx, Message{Kind: msgAck, Bytes: n}) }) // a line that is cut ends ctx
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
		in.close(noEOF(cmpErr(wrong, io.EOF)))
	})
	s := opened{ref: ref, open: *first.Open, started: func() error { return l.send(ctx, Message{Kind: msgStarted}) }}
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

func cmpErr(a, b error) error {
	if a != nil {
		return a
	}
	return b
}

// listen takes what the caller sends until it is gone.
func listen(ctx context.Context, l *line, in *input, sizes chan runtime.Size) error {
	for {
		m, data, err := l.read(ctx)
		switch {
		case err != nil:
			return err
		case data != nil:
			if err := in.add(data); err != nil {
				return err
			}
		case m.Kind == msgEOF:
			in.close(io.EOF)
		case m.Kind == msgResize && m.Size != nil && sizes != nil:
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

func (h *Handler) startSession(ctx context.Context, s opened) (Message, error) {
	sb, err := h.svc.Sandbox(ctx, s.ref)
	if err != nil {
		return Message{}, err
	}
	if rel, ok := h.svc.(releaser); ok && sb.Spec.AutoRemove {
		// A caller that lives removes it when it has the exit code.
		defer time.AfterFunc(h.opts.Linger, func() { _ = guard.Do(func() error { rel.Release(sb.ID); return nil }) })
	}
	begun, done, err := h.inTurn(ctx, true)
	if err != nil {
		return Message{}, err
	}
	defer done()
	wait, err := h.svc.Start(s.open.with(begun), s.ref, &s.streams)
	done()
	if err == nil {
		err = s.started()
	}
	if err == nil {
		err = wait()
	}
	return Message{Kind: msgEnd}, err
}

func (h *Handler) attachSession(ctx context.Context, s opened) (Message, error) {
	return Message{Kind: msgEnd}, h.svc.Attach(ctx, s.ref, s.streams)
}

func (h *Handler) execSession(ctx context.Context, s opened) (Message, error) {
	if s.open.Process == nil {
		return Message{}, fmt.Errorf("%w: no process", runtime.ErrInvalid)
	}
	exit, err := h.svc.Exec(ctx, s.ref, *s.open.Process, s.streams)
	return Message{Kind: msgExit, Exit: exit}, err
}
