package engine

import (
	"context"
	"errors"
	goruntime "runtime"

	"github.com/agentbox/agentbox/internal/guard"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/store"
)

// An Observer sees each verb before it runs, and its result. It calls do, which runs the
// verb, and returns do's error; or it refuses the verb, and returns its own error. The audit
// log and the traces are observers.
type Observer func(ctx context.Context, op *Op, do func(context.Context) error) error

// Op is one verb as observers see it: a request of a caller or, with Own, an action that the
// Engine takes on its own.
type Op struct {
	Verb  string // the name of its command, such as "checkpoint rm"
	Ref   string // its object, as the caller names it; may be empty
	About About
	Reads bool // the verb changes nothing

	// Details of the request.
	Name     string // of the object to create
	To, From string // destination or source, or another name
	Signal   string
	Program  string // the first word of a command; arguments may be secrets

	// Results, once do has returned.
	Exit   *int // of a process that was waited for
	Result any  // what the verb returns, or nil

	Own *Own

	subject *runtime.Subject // the object that Ref was resolved to
	core    *core
	named   bool // its errors already name the verb and the object
}

// About is the kind of object that an Op's Ref names.
type About int

// Kinds of objects.
const (
	AboutOther About = iota // an image, a lease, or everything
	AboutSandbox
	AboutCheckpoint
)

// Own describes an action that the Engine takes on its own.
type Own struct {
	By    string   // the part of agentbox that acts; empty: the caller, or this process
	Why   string   // such as a lease that has ended, or a limit that was reached
	Made  []string // prune: the ids of the checkpoints that are gone
	Did   []string // recover: a sentence for each action
	Past  bool     // the action is over; only its result is recorded
	Alone bool     // not part of a verb whose end would sync the record to the disk
}

// Parts of agentbox that act on their own, in any process.
const (
	ByKeeper = "keeper" // removes the members of ended leases
	ByReap   = "reap"   // cleans up after an exit; called by the monitor
	ByWatch  = "watch"  // enforces the limits of a sandbox and restarts it
)

func on(verb, ref string) *Op           { return &Op{Verb: verb, Ref: ref} }
func onSandbox(verb, ref string) *Op    { return &Op{Verb: verb, Ref: ref, About: AboutSandbox} }
func onCheckpoint(verb, ref string) *Op { return &Op{Verb: verb, Ref: ref, About: AboutCheckpoint} }

// reads marks a verb that changes nothing.
func (op *Op) reads() *Op {
	op.Reads = true
	return op
}

// errorsNamed marks a verb whose errors already name it, or the verb it is part of.
func (op *Op) errorsNamed() *Op {
	op.named = true
	return op
}

// Subject returns the object that Ref names, from the records alone: it asks no backend, and
// unknown fields are empty. The first call looks it up.
func (op *Op) Subject(ctx context.Context) runtime.Subject {
	if op.subject == nil {
		op.subject = &runtime.Subject{}
		switch {
		case op.core == nil || op.Ref == "" || op.About == AboutOther:
		case op.About == AboutSandbox:
			if sb, err := op.core.store.Sandbox(ctx, op.Ref); err == nil {
				op.subject = &runtime.Subject{Sandbox: sb.ID, Name: sb.Name}
			}
		default:
			if row, err := op.core.store.Checkpoint(ctx, op.Ref); err == nil {
				op.subject = &runtime.Subject{Sandbox: row.SandboxID, Name: row.SandboxName, Checkpoint: row.ID}
			}
		}
	}
	return *op.subject
}

// framed is the Engine, or one of its rooms.
type framed interface {
	verb(ctx context.Context, op *Op, do func(context.Context) error) error
}

// verb is the frame of every verb that returns a value: it calls the observers, has errors
// name the verb, and recovers what a panic has left half done.
func verb[T any](ctx context.Context, e framed, op *Op, do func(context.Context) (T, error)) (out T, err error) {
	err = e.verb(ctx, op, func(ctx context.Context) (err error) {
		out, err = do(ctx)
		op.Result = out
		return err
	})
	return out, err
}

// verb is the frame of every verb that returns only an error.
func (e *core) verb(ctx context.Context, op *Op, do func(context.Context) error) error {
	op.core = e
	named := func(ctx context.Context) error {
		err := do(ctx)
		if op.named {
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
func (e *core) observed(ctx context.Context, op *Op, do func(context.Context) error) error {
	if op == nil {
		return do(ctx)
	}
	for i := len(e.observers) - 1; i >= 0; i-- {
		observe, next := e.observers[i], do
		do = func(ctx context.Context) error { return observe(ctx, op, next) }
	}
	return do(ctx)
}

// ByItself returns the Op of a verb that the Engine runs on a subject on its own.
func ByItself(verb string, subject runtime.Subject, own Own) *Op {
	return &Op{Verb: verb, Own: &own, subject: &subject}
}

// subjectOf returns a sandbox as the subject of a verb.
func subjectOf(sb store.Sandbox) runtime.Subject {
	return runtime.Subject{Sandbox: sb.ID, Name: sb.Name}
}
