package api

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"slices"
	"time"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/runtime"
)

// Problem is the body of every error, as RFC 9457 has it: application/problem+json.
type Problem struct {
	Type   string   `json:"type"` // about:blank; what happened is in Code
	Title  string   `json:"title"`
	Status int      `json:"status"`
	Detail string   `json:"detail"` // the whole message
	Code   string   `json:"code"`   // stable; see docs/api.md
	Codes  []string `json:"codes,omitempty"`

	// The typed error, if it is one: the verb, the object as the caller named it,
	// the rest of the message, remedies, the outermost first, and a file of the host
	// that says more.
	Op     string   `json:"op,omitempty"`
	Object string   `json:"object,omitempty"`
	Cause  string   `json:"cause,omitempty"`
	Hint   string   `json:"hint,omitempty"` // the first of Hints
	Hints  []string `json:"hints,omitempty"`
	Log    string   `json:"log,omitempty"`

	Command *CommandProblem `json:"command,omitempty"`
	Partial json.RawMessage `json:"partial,omitempty"` // what was done before it went wrong

	RetryAfter int `json:"retry_after,omitempty"` // of a service that has too much to do: in so many seconds
}

// CommandProblem is a command that could not be started.
type CommandProblem struct {
	Command string `json:"command"`
	Exit    int    `json:"exit"` // 127: not found, 126: not executable
}

// codeInternal is the code of errors that wrap no sentinel.
const codeInternal = "internal"

// codes are the sentinels with their codes and HTTP statuses.
var codes = []struct {
	err    error
	code   string
	status int
}{
	{fault.ErrNotFound, "not_found", http.StatusNotFound},
	{fault.ErrExists, "exists", http.StatusConflict},
	{fault.ErrState, "state", http.StatusConflict},
	{fault.ErrDenied, "denied", http.StatusForbidden},
	{fault.ErrUnsupported, "unsupported", http.StatusNotImplemented},
	{fault.ErrCorrupt, "corrupt", http.StatusInternalServerError},
	{fault.ErrBusy, "busy", http.StatusLocked},
	{fault.ErrInvalid, "invalid", http.StatusBadRequest},
	{runtime.ErrDetached, "detached", http.StatusConflict},
	{context.Canceled, "canceled", http.StatusServiceUnavailable},
	{context.DeadlineExceeded, "deadline", http.StatusGatewayTimeout},
}

// problem describes an error.
func problem(err error) Problem {
	p := Problem{Type: "about:blank", Code: codeInternal, Status: http.StatusInternalServerError, Detail: err.Error(), Codes: codesOf(err), Hints: fault.Hint(err)}
	if len(p.Codes) > 0 {
		p.Code = p.Codes[0]
	}
	for _, c := range codes {
		if c.code == p.Code {
			p.Status = c.status
		}
	}
	var crowded *errCrowded
	if errors.As(err, &crowded) {
		p.Status, p.RetryAfter = http.StatusServiceUnavailable, int(crowded.after.Round(time.Second).Seconds())
		err = crowded.error
	}
	p.Title = http.StatusText(p.Status)
	if own, ok := err.(*fault.Error); ok {
		p.Op, p.Object, p.Cause = own.Op, own.ID, own.Err.Error()
	}
	if len(p.Hints) > 0 {
		p.Hint = p.Hints[0]
	}
	if logs := fault.Logs(err); len(logs) > 0 {
		p.Log = logs[0]
	}
	var exec *runtime.ExecError
	if errors.As(err, &exec) {
		p.Command = &CommandProblem{exec.Command, exec.Code}
	}
	return p
}

// codesOf lists the sentinels in err's tree, depth first: of joined errors the
// first one is what the caller asked about.
func codesOf(err error) []string {
	var found []string
	var walk func(error)
	walk = func(err error) {
		for _, c := range codes {
			if err == c.err && !slices.Contains(found, c.code) {
				found = append(found, c.code)
			}
		}
		switch e := err.(type) {
		case interface{ Unwrap() []error }:
			for _, one := range e.Unwrap() {
				walk(one)
			}
		case interface{ Unwrap() error }:
			if next := e.Unwrap(); next != nil {
				walk(next)
			}
		}
	}
	walk(err)
	for _, c := range codes {
		// An error may be a sentinel without wrapping it.
		if errors.Is(err, c.err) && !slices.Contains(found, c.code) {
			found = append(found, c.code)
		}
	}
	return found
}

// remote is an error of the service: its text, and the sentinels it is.
type remote struct {
	text string
	is   []error
}

func (r *remote) Error() string   { return r.text }
func (r *remote) Unwrap() []error { return r.is }

// Err is the error that the problem describes.
func (p Problem) Err() error {
	text := p.Detail
	if p.Cause != "" {
		text = p.Cause
	}
	inner := &remote{text: text}
	if p.Command != nil {
		inner.is = append(inner.is, &runtime.ExecError{Command: p.Command.Command, Code: p.Command.Exit, Err: errors.New(text)})
	}
	for _, code := range p.Codes {
		for _, c := range codes {
			if c.code == code {
				inner.is = append(inner.is, c.err)
			}
		}
	}
	if p.Code == "detached" {
		return runtime.ErrDetached
	}
	var err error = inner
	hints := p.Hints
	if p.Hint != "" && len(hints) > 0 {
		hints = hints[1:]
	}
	for _, h := range slices.Backward(hints) {
		err = &fault.Error{Hint: h, Err: err}
	}
	if p.Op != "" || p.Object != "" || p.Hint != "" || p.Log != "" {
		err = &fault.Error{Op: p.Op, ID: p.Object, Hint: p.Hint, Log: p.Log, Err: err}
	}
	return err
}
