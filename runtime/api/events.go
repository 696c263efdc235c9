package api

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"unicode/utf8"

	"github.com/agentbox/agentbox/images/image"
	"github.com/agentbox/agentbox/internal/guard"
	"github.com/agentbox/agentbox/runtime"
)

const eventStream = "text/event-stream"

// Events of a stream. The last one is a result, an end or a problem; a stream
// without one was cut short.
const (
	eventProgress = "progress" // of a verb
	eventResult   = "result"   // of a verb: what it answers without events
	eventStdout   = "stdout"   // of logs: Text
	eventStderr   = "stderr"
	eventEvent    = "event" // of events
	eventEnd      = "end"
	eventProblem  = "problem"
)

// Text is a piece of output.
type Text struct {
	Text string `json:"text,omitempty"`
	B64  []byte `json:"b64,omitempty"` // what is not UTF-8, in base64
}

func newText(p []byte) Text {
	if utf8.Valid(p) {
		return Text{Text: string(p)}
	}
	return Text{B64: p}
}

func (t Text) bytes() []byte {
	if t.B64 != nil {
		return t.B64
	}
	return []byte(t.Text)
}

func wantsEvents(r *http.Request) bool { return strings.Contains(r.Header.Get("Accept"), eventStream) }

// events writes server-sent events. Progress that the caller is too slow for is
// left out: the verb does not wait.
type events struct {
	to      http.ResponseWriter
	ctl     *http.ResponseController
	w       io.Writer
	waiting chan any
	done    chan struct{}
	mu      sync.Mutex

	ending sync.Mutex // guards what follows
	closed bool       // waiting is
}

func (h *Handler) events(w http.ResponseWriter, r *http.Request) *events {
	w.Header().Set("Content-Type", eventStream)
	w.Header().Set("Cache-Control", "no-store")
	w.WriteHeader(http.StatusOK)
	e := &events{to: w, ctl: http.NewResponseController(w), w: h.writer(w), waiting: make(chan any, 256), done: make(chan struct{})}
	_ = e.ctl.Flush()
	guard.Go(func() {
		defer close(e.done)
		for v := range e.waiting {
			_ = guard.Do(func() error { return e.send(eventProgress, v) }) // the caller may be gone
		}
	})
	return e
}

// progress may be called after the end, so the reporter need not be waited for.
func (e *events) progress(v any) {
	e.ending.Lock()
	defer e.ending.Unlock()
	if e.closed {
		return
	}
	select {
	case e.waiting <- v:
	default:
	}
}

// send writes one event.
func (e *events) send(name string, v any) error {
	data, err := json.Marshal(v)
	if err != nil {
		return err
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if _, err := fmt.Fprintf(e.w, "event: %s\ndata: %s\n\n", name, data); err != nil {
		return err
	}
	return e.ctl.Flush()
}

// close lets the progress out that waits.
func (e *events) close() {
	e.ending.Lock()
	if !e.closed {
		e.closed = true
		close(e.waiting)
	}
	e.ending.Unlock()
	<-e.done
}

// end is the last event of a verb.
func (e *events) end(out any, err error) {
	e.close()
	if err != nil {
		failedWith(e.to, problem(err).Code)
		_ = e.send(eventProblem, problemWith(err, out)) // the caller may be gone
		return
	}
	_ = e.send(eventResult, out)
}

// stream answers with events that do calls for.
func (h *Handler) stream(w http.ResponseWriter, r *http.Request, do func(ctx context.Context, e *events) error) {
	e := h.events(w, r)
	defer e.close()
	ctx, cancel := h.untilDrained(r.Context())
	defer cancel()
	if _, _, err := kept(ctx, h, func() (None, error) { return None{}, do(ctx, e) }); err != nil {
		failedWith(w, problem(err).Code)
		_ = e.send(eventProblem, problem(err)) // the caller may be gone
		return
	}
	_ = e.send(eventEnd, None{})
}

// untilDrained is the context of what may never end by itself.
func (h *Handler) untilDrained(ctx context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancel(ctx)
	guard.Go(func() {
		select {
		case <-h.draining:
			cancel()
		case <-ctx.Done():
		}
	})
	return ctx, cancel
}

// output is the writer of one of the logs' streams.
type output struct {
	e    *events
	name string
}

func (o output) Write(p []byte) (int, error) {
	if err := o.e.send(o.name, newText(p)); err != nil {
		return 0, err
	}
	return len(p), nil
}

// readEvents calls each for the events of a stream until the last, whose data it returns. A
// problem is an error, and so is a stream without an end.
func readEvents(r io.Reader, each func(name string, data []byte) error) (last []byte, err error) {
	lines := bufio.NewReader(r)
	var name string
	var data []byte
	for {
		line, err := lines.ReadBytes('\n')
		if err != nil {
			return nil, &cutShort{noEOF(err)}
		}
		line = line[:len(line)-1]
		field, value, _ := bytes.Cut(line, []byte(": "))
		switch {
		case len(line) > 0 && string(field) == "event":
			name = string(value)
		case len(line) > 0 && string(field) == "data":
			data = bytes.Clone(value)
		case len(line) > 0: // a comment, or a field of another version
		case name == eventProblem:
			var p Problem
			if err := json.Unmarshal(data, &p); err != nil {
				return nil, err
			}
			return p.Partial, p.Err()
		case name == eventResult || name == eventEnd:
			return data, nil
		case name != "":
			if err := each(name, data); err != nil {
				return nil, err
			}
			name, data = "", nil
		}
	}
}

// cutShort is the error of an answer that has no end.
type cutShort struct{ err error }

func (c *cutShort) Error() string { return c.err.Error() }
func (c *cutShort) Unwrap() error { return c.err }

// noEOF is an end of file where there must be none.
func noEOF(err error) error {
	if err == io.EOF {
		return io.ErrUnexpectedEOF
	}
	return err
}

// progressOf hands the progress that a service reports to fn.
func progressOf(fn runtime.Progress) func([]byte) error {
	if fn == nil {
		return nil
	}
	return func(data []byte) error {
		var p Progress
		err := json.Unmarshal(data, &p)
		if err == nil {
			fn(p.Done, p.Total)
		}
		return err
	}
}

// RestoreProgress is the progress of a restore: a runtime.Step or, without phase, the
// image.Progress of a layer that is pulled.
type RestoreProgress struct {
	image.Progress
	Phase runtime.Phase `json:"phase"`
}

// restored passes the progress of a restore to the callback for its phase.
func restored(opts runtime.RestoreOptions) func([]byte) error {
	if opts.Progress == nil && opts.Pull.Progress == nil {
		return nil
	}
	return decoded(func(p RestoreProgress) {
		switch {
		case p.Phase == "" && opts.Pull.Progress != nil:
			opts.Pull.Progress(p.Progress)
		case p.Phase != "" && opts.Progress != nil:
			opts.Progress(runtime.Step{Phase: p.Phase, Done: p.Done, Total: p.Total})
		}
	})
}

// Progress is the progress of a verb, in bytes unless it says otherwise.
type Progress struct {
	Done  int64 `json:"done"`
	Total int64 `json:"total"` // 0: not known
}
