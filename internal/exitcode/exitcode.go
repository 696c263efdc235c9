// Package exitcode has the exit codes of agentbox's programs. They are part of the interface:
// scripts test them.
package exitcode

import (
	"errors"

	"github.com/agentbox/agentbox/internal/fault"
)

// The exit codes.
const (
	OK          = 0
	Failure     = 1
	Usage       = 2
	NotFound    = 3
	State       = 4
	Busy        = 5
	Corrupt     = 6
	Denied      = 7
	Unsupported = 8
	Approval    = 9
)

// Of returns the code of the first error in err's tree that has one, depth first: of joined
// errors the first one is what the caller asked about. An error has a code if it is one of
// fault's, or has a method ExitStatus.
func Of(err error) int {
	if err == nil {
		return OK
	}
	if code := find(err); code != 0 {
		return code
	}
	return Failure
}

func find(err error) int {
	if err == nil {
		return 0
	}
	if own, ok := err.(interface{ ExitStatus() int }); ok {
		return own.ExitStatus()
	}
	switch err {
	case fault.ErrInvalid:
		return Usage
	case fault.ErrNotFound:
		return NotFound
	case fault.ErrExists, fault.ErrState:
		return State
	case fault.ErrBusy:
		return Busy
	case fault.ErrCorrupt:
		return Corrupt
	case fault.ErrDenied:
		return Denied
	case fault.ErrUnsupported:
		return Unsupported
	case fault.ErrApproval:
		return Approval
	}
	if many, ok := err.(interface{ Unwrap() []error }); ok {
		for _, e := range many.Unwrap() {
			if code := find(e); code != 0 {
				return code
			}
		}
		return 0
	}
	return find(errors.Unwrap(err))
}
