// Package undo takes back the steps of a verb that fails. A verb adds to a Stack, after each
// step, how to reverse it; Run reverses them, the last one first.
package undo

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// Timeout bounds a Run as a whole.
const Timeout = 2 * time.Minute

// Stack is what must be taken back when a verb fails. The zero value is empty.
type Stack struct{ steps []func(context.Context) error }

// Add puts a step on top.
func (s *Stack) Add(step func(context.Context) error) { s.steps = append(s.steps, step) }

// Release forgets all steps: the verb is past the point where it can be undone.
func (s *Stack) Release() { s.steps = nil }

// Run takes everything back, newest first, unless *err is nil; a failing step
// does not stop the others, and joins *err. It works on a context of its own,
// because the caller's may be what failed.
func (s *Stack) Run(ctx context.Context, err *error) {
	if *err == nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), Timeout)
	defer cancel()
	for i := len(s.steps) - 1; i >= 0; i-- {
		if e := s.steps[i](ctx); e != nil {
			*err = errors.Join(*err, fmt.Errorf("while undoing: %w", e))
		}
	}
}
