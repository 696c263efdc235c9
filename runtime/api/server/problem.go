package server

import (
	"errors"
	"net/http"
	"slices"
	"time"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/api/wire"
)

// codeInternal is the code of errors that wrap no sentinel.
const codeInternal = "internal"

// problem describes an error.
func problem(err error) wire.Problem {
	p := wire.Problem{
		Type: "about:blank", Code: codeInternal, Status: http.StatusInternalServerError,
		Detail: err.Error(), Codes: codesOf(err), Hints: fault.Hint(err),
	}
	if len(p.Codes) > 0 {
		p.Code = p.Codes[0]
	}
	for _, c := range wire.Codes {
		if c.Code == p.Code {
			p.Status = c.Status
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
		p.Command = &wire.CommandProblem{Command: exec.Command, Exit: exec.Code}
	}
	return p
}

// codesOf lists the sentinels in err's tree, depth first: of joined errors the
// first one is what the caller asked about.
func codesOf(err error) []string {
	var found []string
	var walk func(error)
	walk = func(err error) {
		for _, c := range wire.Codes {
			if err == c.Err && !slices.Contains(found, c.Code) {
				found = append(found, c.Code)
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
	for _, c := range wire.Codes {
		// An error may be a sentinel without wrapping it.
		if errors.Is(err, c.Err) && !slices.Contains(found, c.Code) {
			found = append(found, c.Code)
		}
	}
	return found
}
