package engine

import (
	"context"
	"errors"
	goruntime "runtime"

	"github.com/agentbox/agentbox/internal/guard"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/store"
)

func on(verb, ref string) *runtime.Op { return &runtime.Op{Verb: verb, Ref: ref} }
func onSandbox(verb, ref string) *runtime.Op {
	return &runtime.Op{Verb: verb, Ref: ref, About: runtime.AboutSandbox}
}
func onCheckpoint(verb, ref string) *runtime.Op {
	return &runtime.Op{Verb: verb, Ref: ref, About: runtime.AboutCheckpoint}
}

// reads marks a verb that changes nothing.
func reads(op *runtime.Op) *runtime.Op {
	op.Reads = true
	return op
}

// errorsNamed marks a verb whose errors already name it, or the verb it is part of.
func errorsNamed(op *runtime.Op) *runtime.Op {
	op.ErrorsNamed = true
	return op
}

// subject looks up the object of a verb.
func (e *core) subject(ctx context.Context, ref string, about runtime.About) (s runtime.Subject) {
	switch {
	case ref == "" || about == runtime.AboutOther:
	case about == runtime.AboutSandbox:
		if sb, err := e.store.Sandbox(ctx, ref); err == nil {
			s = subjectOf(sb)
		}
	default:
		if row, err := e.store.Checkpoint(ctx, ref); err == nil {
			s = runtime.Subject{Sandbox: row.SandboxID, Name: row.SandboxName, Checkpoint: row.ID}
		}
	}
	return s
}

// framed is the Engine, or one of its rooms.
type framed interface {
	verb(ctx context.Context, op *runtime.Op, do func(context.Context) error) error
}

// verb is the frame of every verb that returns a value: it calls the observers, has errors
// name the verb, and recovers what a panic has left half done.
func verb[T any](
	ctx context.Context, e framed, op *runtime.Op, do func(context.Context) (T, error),
) (out T, err error) {
	err = e.verb(ctx, op, func(ctx context.Context) (err error) {
		out, err = do(ctx)
		op.Result = out
		return err
	})
	return out, err
}

// verb is the frame of every verb that returns only an error.
func (e *core) verb(ctx context.Context, op *runtime.Op, do func(context.Context) error) error {
	op.Find = func(ctx context.Context) runtime.Subject { return e.subject(ctx, op.Ref, op.About) }
	named := func(ctx context.Context) error {
		err := do(ctx)
		if op.ErrorsNamed {
			return err
		}
		return fail(op.Verb, op.Ref, err)
	}
	if op.Reads {
		return e.observed(ctx, op, named)
	}
	err := e.observed(ctx, op, func(ctx context.Context) error { return guard.Do(func() error { return named(ctx) }) })
	if p := (*guard.Panic)(nil); errors.As(err, &p) {
		// This process lives on, so no other process would recover the verb, and a sandbox
		// that it froze would stay frozen until the next command.
		goruntime.GC() // closes the locks that are unreachable now
		if failed := e.afterPanic(context.WithoutCancel(ctx)); failed != nil {
			e.log.Error("verb not recovered after a panic", "verb", op.Verb, "ref", op.Ref, "err", failed)
		}
	}
	return err
}

// observed runs do inside the observers, the first of them outermost. A nil op is a step of
// a verb that they already see.
func (e *core) observed(ctx context.Context, op *runtime.Op, do func(context.Context) error) error {
	if op == nil {
		return do(ctx)
	}
	for i := len(e.observers) - 1; i >= 0; i-- {
		observe, next := e.observers[i], do
		do = func(ctx context.Context) error { return observe(ctx, op, next) }
	}
	return do(ctx)
}

// subjectOf returns a sandbox as the subject of a verb.
func subjectOf(sb store.Sandbox) runtime.Subject {
	return runtime.Subject{Sandbox: sb.ID, Name: sb.Name}
}
