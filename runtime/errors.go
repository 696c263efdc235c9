package runtime

import (
	"errors"

	"github.com/agentbox/agentbox/internal/fault"
)

// Error is the one typed error of agentbox; see fault.Error.
type Error = fault.Error

// The sentinels, for errors.Is. They mean the same on every Service and Backend.
var (
	ErrNotFound    = fault.ErrNotFound    // no such sandbox, checkpoint or image
	ErrExists      = fault.ErrExists      // the name is taken
	ErrState       = fault.ErrState       // the sandbox's state does not allow the verb
	ErrDenied      = fault.ErrDenied      // a rule forbids it
	ErrUnsupported = fault.ErrUnsupported // this host or runtime cannot do it
	ErrCorrupt     = fault.ErrCorrupt     // stored data does not match its digest
	ErrBusy        = fault.ErrBusy        // another verb holds the sandbox
	ErrInvalid     = fault.ErrInvalid     // an argument is invalid
	ErrApproval    = fault.ErrApproval    // a person has to approve it first
)

// Unstarted marks the error of an Exec of which no process has begun, so that it can be tried again.
func Unstarted(err error) error {
	if err == nil {
		return nil
	}
	return &unstarted{err}
}

// IsUnstarted reports whether an error is marked by Unstarted.
func IsUnstarted(err error) bool {
	var u *unstarted
	return errors.As(err, &u)
}

type unstarted struct{ err error }

func (u *unstarted) Error() string { return u.err.Error() }
func (u *unstarted) Unwrap() error { return u.err }
