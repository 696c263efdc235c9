package runtime

import (
	"context"
)

// Caller is who has a verb done for whom another process does it.
type Caller struct {
	UID uint32
	GID uint32
	Pid int
	// Of one on another host the subject of its certificate, and its address; the
	// rest is not known then.
	Client  string
	Address string
}

type callerKey struct{}

// WithCaller tells the verbs that are called with the context who asks for them.
// Without one it is this process.
func WithCaller(ctx context.Context, c Caller) context.Context {
	return context.WithValue(ctx, callerKey{}, c)
}

// CallerOf is who a verb is done for; false: this process itself.
func CallerOf(ctx context.Context) (Caller, bool) {
	c, ok := ctx.Value(callerKey{}).(Caller)
	return c, ok
}

type asideKey struct{}

// WithAside has the verbs that are called with the context call aside before they
// wait for another process, such as a program of the host, and what that returns when
// they go on.
func WithAside(ctx context.Context, aside func() (back func())) context.Context {
	return context.WithValue(ctx, asideKey{}, aside)
}

// Aside is to be called before a wait for another process, and what it returns afterwards.
func Aside(ctx context.Context) (back func()) {
	if aside, ok := ctx.Value(asideKey{}).(func() func()); ok {
		return aside()
	}
	return func() {}
}

type readsKey struct{}

// Reading promises that what is done with the context changes nothing in a sandbox.
func Reading(ctx context.Context) context.Context {
	return context.WithValue(ctx, readsKey{}, true)
}

// OnlyReads reports whether that was promised.
func OnlyReads(ctx context.Context) bool { return ctx.Value(readsKey{}) != nil }

// Subject is what a verb is about, as far as it is on record.
type Subject struct {
	Sandbox    string // its id
	Name       string
	Checkpoint string // its id
}

// variablesKey is the context's key of WithVariables.
type variablesKey struct{}

// WithVariables has verbs take the variables that secrets come from out of vars,
// and none of this process's own: they are called for another process.
func WithVariables(ctx context.Context, vars map[string]string) context.Context {
	return context.WithValue(ctx, variablesKey{}, vars)
}

// Variables are those of WithVariables; false: it was not called.
func Variables(ctx context.Context) (vars map[string]string, ok bool) {
	vars, ok = ctx.Value(variablesKey{}).(map[string]string)
	return vars, ok
}
