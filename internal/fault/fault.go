// Package fault holds the few errors that every layer of agentbox speaks.
//
// A leaf wraps one of the sentinels; the engine adds the verb, the object and
// a hint by wrapping it in an Error; cmd/agentbox turns the sentinel into an
// exit code. Package runtime re-exports all of it, so that users of the
// library need not reach in here.
package fault

import "errors"

// The sentinels. Match them with errors.Is.
var (
	ErrNotFound    = errors.New("not found")
	ErrExists      = errors.New("already exists")
	ErrState       = errors.New("not possible in this state")
	ErrDenied      = errors.New("denied")
	ErrUnsupported = errors.New("not supported here")
	ErrCorrupt     = errors.New("corrupt")
	ErrBusy        = errors.New("busy")
	ErrInvalid     = errors.New("invalid argument")
)

// Error says which verb failed on which object, why, and what to do about it.
type Error struct {
	Op   string // the verb, e.g. "checkpoint"; empty: Error only carries the hint
	ID   string // the object as the user named it; may be empty
	Hint string // the remedy, a full sentence; may be empty
	Err  error  // the cause; wraps a sentinel where one fits
}

func (e *Error) Error() string {
	if e.Op == "" {
		return e.Err.Error()
	}
	s := e.Op
	if e.ID != "" {
		s += " " + e.ID
	}
	return s + ": " + e.Err.Error()
}

func (e *Error) Unwrap() error { return e.Err }

// Hint returns the remedies found in err's tree, outermost first.
func Hint(err error) []string {
	var hints []string
	for err != nil {
		if e, ok := err.(*Error); ok && e.Hint != "" {
			hints = append(hints, e.Hint)
		}
		if many, ok := err.(interface{ Unwrap() []error }); ok {
			for _, e := range many.Unwrap() {
				hints = append(hints, Hint(e)...)
			}
			return hints
		}
		err = errors.Unwrap(err)
	}
	return hints
}
