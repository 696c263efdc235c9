package runtime

import (
	"context"
)

// Caller is the process that asked for a verb which another process performs.
type Caller struct {
	UID    uint32
	GID    uint32
	Groups []uint32 // its further groups, unless it is root
	Pid    int
	// For a caller on another host: the subject of its certificate, and its address.
	// The fields above are unknown then.
	Client  string
	Address string
}

type callerKey struct{}

// WithCaller names the caller of the verbs that are called with the context.
// Without it the caller is this process.
func WithCaller(ctx context.Context, c Caller) context.Context {
	return context.WithValue(ctx, callerKey{}, c)
}

// CallerOf returns the caller that a verb is performed for; false: this process itself.
func CallerOf(ctx context.Context) (Caller, bool) {
	c, ok := ctx.Value(callerKey{}).(Caller)
	return c, ok
}

type asideKey struct{}

// WithAside has the verbs that are called with the context call aside before they wait
// for another process, such as a program on the host. They call back, the function that
// aside returned, when they go on.
func WithAside(ctx context.Context, aside func() (back func())) context.Context {
	return context.WithValue(ctx, asideKey{}, aside)
}

// Aside must be called before a wait for another process, and back after the wait.
func Aside(ctx context.Context) (back func()) {
	if aside, ok := ctx.Value(asideKey{}).(func() func()); ok {
		return aside()
	}
	return func() {}
}

type readsKey struct{}

// Reading promises that calls with the context change nothing in a sandbox.
func Reading(ctx context.Context) context.Context {
	return context.WithValue(ctx, readsKey{}, true)
}

// OnlyReads reports whether the context is one of Reading.
func OnlyReads(ctx context.Context) bool { return ctx.Value(readsKey{}) != nil }

// Subject is the sandbox or checkpoint that a verb acts on, as far as it is on record.
type Subject struct {
	Sandbox    string // its id
	Name       string
	Checkpoint string // its id
}

// variablesKey is the context's key of WithVariables.
type variablesKey struct{}

// WithVariables has verbs read the variables of secrets from vars instead of this
// process's environment. It is for verbs that are called for another process.
func WithVariables(ctx context.Context, vars map[string]string) context.Context {
	return context.WithValue(ctx, variablesKey{}, vars)
}

// Variables returns the variables of WithVariables; false: it was not called.
func Variables(ctx context.Context) (vars map[string]string, ok bool) {
	vars, ok = ctx.Value(variablesKey{}).(map[string]string)
	return vars, ok
}
