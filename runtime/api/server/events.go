package server

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"

	"github.com/agentbox/agentbox/internal/guard"
	"github.com/agentbox/agentbox/runtime/api/wire"
)

func wantsEvents(r *http.Request) bool {
	return strings.Contains(r.Header.Get("Accept"), wire.EventStream)
}

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
	w.Header().Set("Content-Type", wire.EventStream)
	w.Header().Set("Cache-Control", "no-store")
	w.WriteHeader(http.StatusOK)
	e := &events{
		to: w, ctl: http.NewResponseController(w), w: h.writer(w), waiting: make(chan any, 256),
		done: make(chan struct{}),
	}
	_ = e.ctl.Flush()
	guard.Go(func() {
		defer close(e.done)
		for v := range e.waiting {
			_ = guard.Do(func() error { return e.send(wire.EventProgress, v) }) // the caller may be gone
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
		_ = e.send(wire.EventProblem, problemWith(err, out)) // the caller may be gone
		return
	}
	_ = e.send(wire.EventResult, out)
}

// stream answers with events that do calls for.
func (h *Handler) stream(w http.ResponseWriter, r *http.Request, do func(ctx context.Context, e *events) error) {
	e := h.events(w, r)
	defer e.close()
	ctx, cancel := h.untilDrained(r.Context())
	defer cancel()
	if _, _, err := kept(ctx, h, func() (wire.None, error) { return wire.None{}, do(ctx, e) }); err != nil {
		failedWith(w, problem(err).Code)
		_ = e.send(wire.EventProblem, problem(err)) // the caller may be gone
		return
	}
	_ = e.send(wire.EventEnd, wire.None{})
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
	if err := o.e.send(o.name, wire.NewText(p)); err != nil {
		return 0, err
	}
	return len(p), nil
}
