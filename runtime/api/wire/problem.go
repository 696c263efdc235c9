package wire

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"slices"

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

// Codes are the sentinels with their codes and HTTP statuses.
var Codes = []struct {
	Err    error
	Code   string
	Status int
}{
	{fault.ErrNotFound, "not_found", http.StatusNotFound},
	{fault.ErrExists, "exists", http.StatusConflict},
	{fault.ErrState, "state", http.StatusConflict},
	{fault.ErrDenied, "denied", http.StatusForbidden},
	{fault.ErrUnsupported, "unsupported", http.StatusNotImplemented},
	{fault.ErrCorrupt, "corrupt", http.StatusInternalServerError},
	{fault.ErrBusy, "busy", http.StatusLocked},
	{fault.ErrInvalid, "invalid", http.StatusBadRequest},
	{fault.ErrApproval, "approval", http.StatusForbidden},
	{runtime.ErrDetached, "detached", http.StatusConflict},
	{context.Canceled, "canceled", http.StatusServiceUnavailable},
	{context.DeadlineExceeded, "deadline", http.StatusGatewayTimeout},
}

// Remote is an error of the service: its text, and the sentinels it is.
type Remote struct {
	Text string
	is   []error
}

func (r *Remote) Error() string   { return r.Text }
func (r *Remote) Unwrap() []error { return r.is }

// Err is the error that the problem describes.
func (p Problem) Err() error {
	text := p.Detail
	if p.Cause != "" {
		text = p.Cause
	}
	inner := &Remote{Text: text}
	if p.Command != nil {
		inner.is = append(inner.is, &runtime.ExecError{
			Command: p.Command.Command, Code: p.Command.Exit, Err: errors.New(text),
		})
	}
	for _, code := range p.Codes {
		for _, c := range Codes {
			if c.Code == code {
				inner.is = append(inner.is, c.Err)
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
