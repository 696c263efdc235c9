//go:build !amd64

package freezer

import "errors"

// CanInject reports whether Inject works on this kind of machine.
const CanInject = false

// Tracee is a thread, in a stop of ptrace, that calls the kernel for us.
type Tracee struct{}

var errInject = errors.New("no thread of this kind of machine can be made to call the kernel")

func tracee(int) (*Tracee, error) { return nil, errInject }

// ID returns the thread's id on the host.
func (t *Tracee) ID() int { return 0 }

// Call has the thread make a system call.
func (t *Tracee) Call(uintptr, ...uint64) (uint64, error) { return 0, errInject }

// Page returns the address of a page of memory for arguments, which begins with data.
func (t *Tracee) Page([]byte) (uint64, error) { return 0, errInject }

// Peek reads from the thread's memory.
func (t *Tracee) Peek(uint64, int) ([]byte, error) { return nil, errInject }

func (t *Tracee) leave() error { return nil }
