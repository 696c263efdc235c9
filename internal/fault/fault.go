// Package fault holds the few errors that every layer of agentbox speaks.
//
// A leaf wraps one of the sentinels; the engine adds the verb, the object and
// a hint by wrapping it in an Error; cmd/agentbox turns the sentinel into an
// exit code. Package runtime re-exports all of it, so that users of the
// library need not reach in here.
package fault

import (
	"errors"
	"slices"
	"strings"
	"unicode"
)

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
	ErrApproval    = errors.New("needs approval")
)

// Error says which verb failed on which object, why, and what to do about it.
type Error struct {
	Op   string // the verb, e.g. "checkpoint"; empty: Error only carries the hint
	ID   string // the object as the user named it; may be empty
	Hint string // the remedy, a full sentence; may be empty
	Log  string // a file that says more, of another program; may be empty
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

// Hint returns the remedies found in err's tree, outermost first, each once.
func Hint(err error) []string { return collect(err, func(e *Error) string { return e.Hint }) }

// Logs returns the files found in err's tree that say more, outermost first, each once.
func Logs(err error) []string { return collect(err, func(e *Error) string { return e.Log }) }

func collect(err error, what func(*Error) string) (found []string) {
	for err != nil {
		if e, ok := err.(*Error); ok && what(e) != "" && !slices.Contains(found, what(e)) {
			found = append(found, what(e))
		}
		if many, ok := err.(interface{ Unwrap() []error }); ok {
			for _, e := range many.Unwrap() {
				for _, text := range collect(e, what) {
					if !slices.Contains(found, text) {
						found = append(found, text)
					}
				}
			}
			return found
		}
		err = errors.Unwrap(err)
	}
	return found
}

// Printable replaces what could drive a terminal: text may come from inside a sandbox.
func Printable(s string) string {
	return strings.Map(func(r rune) rune {
		if r == '\n' || r == '\t' || unicode.IsPrint(r) {
			return r
		}
		return unicode.ReplacementChar
	}, s)
}
