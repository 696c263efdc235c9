package server

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"reflect"

	"github.com/agentbox/agentbox/internal/guard"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/api/wire"
)

// A request is one call of a verb.
type request[I any] struct {
	*http.Request
	ref    string // what the path names
	in     I
	rec    *record   // the record of its idempotency key; nil: it has none
	report func(any) // reports progress to the caller; nil: not wanted
}

// LabelRequest is the label of sandboxes and checkpoints made for an idempotency key. Its
// value is secret until they exist, so a second attempt finds by it what the first has
// made, and nothing else.
const LabelRequest = "agentbox.request"

// label marks what is made for a key.
func (r *request[I]) label(labels *map[string]string) {
	if r.rec == nil {
		return
	}
	if *labels == nil {
		*labels = map[string]string{}
	}
	(*labels)[LabelRequest] = r.rec.Nonce
}

// again reports whether the verb, or a part of it, may have been done already.
func (r *request[I]) again() bool { return r.rec != nil && r.rec.again }

// unsettled is err, of a verb that may have been done, or a part of it: the key
// stays that of a request that was begun.
func (r *request[I]) unsettled(err error) error {
	if err != nil && r.rec != nil {
		r.rec.keep = true
	}
	return err
}

// noted settles the second try of a verb: an error that says it is done already
// is what the first one left.
func noted[I any](r *request[I], err, done error) (wire.None, error) {
	if r.again() && errors.Is(err, done) {
		return wire.None{}, nil
	}
	return wire.None{}, err
}

// stood settles the second try of a verb that brings a sandbox to a status: where
// it is in that, the first one has.
func (h *Handler) stood(
	ctx context.Context, ref string, again bool, want runtime.Status, err error,
) (wire.None, error) {
	if !again || !errors.Is(err, runtime.ErrState) {
		return wire.None{}, err
	}
	sb, e := h.svc.Sandbox(ctx, ref)
	if e == nil && sb.Status == want {
		return wire.None{}, nil
	}
	return wire.None{}, err // the verb's own, which is about the state it found
}

// unknown is the error of a second try of what must not be done twice.
func unknown[I any](r *request[I]) error {
	if !r.again() {
		return nil
	}
	return r.unsettled(&runtime.Error{Err: fmt.Errorf("%w: the first try was interrupted, or failed halfway, and how much of it was done is not known", runtime.ErrState), Hint: "Look, and use another key."})
}

// stepping does undo or redo: done twice it goes further.
func stepping(
	ctx context.Context, h *Handler, r *request[runtime.UndoOptions],
	do func(context.Context, string, runtime.UndoOptions) (runtime.Restored, error),
) (runtime.Restored, error) {
	if err := unknown(r); err != nil {
		return runtime.Restored{}, err
	}
	r.in.Progress = stepped(r)
	out, err := do(ctx, r.ref, r.in)
	if err == nil {
		h.opts.Metrics.restored(out)
	}
	return out, err
}

// errAnswered keeps once from answering: the stream has.
var errAnswered = errors.New("answered")

// once does a verb unless it was done for the same key before, and answers.
func (h *Handler) once(w http.ResponseWriter, r *http.Request, body []byte, do func(*record) (any, error)) {
	key := r.Header.Get(wire.HeaderKey)
	var rec *record
	if key != "" {
		if h.requests == nil {
			writeProblem(w, fmt.Errorf("%w: this service remembers no %s", runtime.ErrUnsupported, wire.HeaderKey))
			return
		}
		sum := sha256.New()
		fmt.Fprintf(sum, "%s %s\n", r.Method, r.URL.RequestURI())
		sum.Write(body)
		var err error
		if rec, err = h.requests.begin(peerOf(r).identity(), key, hex.EncodeToString(sum.Sum(nil))); err != nil {
			writeProblem(w, err)
			return
		}
		if rec.Done && rec.Body == nil {
			writeProblem(w, fmt.Errorf("%w: it was done, but its answer was too large to be remembered",
				runtime.ErrState))
			return
		}
		if rec.Done {
			w.Header().Set(wire.HeaderReplay, "true")
			h.replay(w, r, rec.Body)
			return
		}
	}
	settle := func(out any, err error) {
		if rec == nil {
			return
		}
		if e := h.requests.finish(rec, out, err); e != nil {
			h.log.Error("request not recorded", "err", e)
		}
	}
	defer func() {
		if p := recover(); p != nil {
			if p != http.ErrAbortHandler {
				p = guard.Caught(p)
			}
			if rec != nil {
				rec.keep = true
			}
			settle(nil, fmt.Errorf("%v", p))
			panic(p)
		}
	}()
	out, err := do(rec)
	answered := errors.Is(err, errAnswered)
	err = unanswered(err)
	settle(out, err)
	switch {
	case answered:
	case err != nil:
		writeAProblem(w, problemWith(err, out))
	default:
		h.writeJSON(w, r, out)
	}
}

// problemWith is the problem of a verb, with what it has done all the same.
func problemWith(err error, out any) wire.Problem {
	p := problem(err)
	if v := reflect.ValueOf(out); v.IsValid() && !v.IsZero() {
		p.Partial, _ = json.Marshal(out) // a result that cannot be encoded is left out
	}
	return p
}

// unanswered is err without errAnswered.
func unanswered(err error) error {
	many, ok := err.(interface{ Unwrap() []error })
	if !ok || !errors.Is(err, errAnswered) {
		return err
	}
	for _, e := range many.Unwrap() {
		if e != errAnswered {
			return e
		}
	}
	return nil
}

// replay answers with the recorded answer.
func (h *Handler) replay(w http.ResponseWriter, r *http.Request, body json.RawMessage) {
	if wantsEvents(r) {
		events := h.events(w, r)
		defer events.close()
		events.end(body, nil)
		return
	}
	h.writeJSON(w, r, body)
}
