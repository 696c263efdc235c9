package engine

import (
	"context"
	"errors"
	goruntime "runtime"

	"github.com/agentbox/agentbox/internal/guard"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/store"
)

// An Observer sees each verb before it is done and with what came of it. It calls do, which
// does it, and returns do's error; or it refuses, and returns its own. The audit log and
// the traces are observers.
type Observer func(ctx context.Context, op *Op, do func(context.Context) error) error

// Op is one verb as observers see it: one that a caller has asked for or, with Own, one
// that the Engine does by itself.
type Op struct {
	Verb  string // as its command is called, "checkpoint rm"
	Ref   string // what it is about, as the caller names it; may be empty
	About About
	Reads bool // it changes nothing

	// Details of what is asked.
	Name     string // of what is to be made
	To, From string // where something goes, or comes from; another name
	Signal   string
	Program  string // the first word of a command: arguments can be secrets

	// What came of it, when do has returned.
	Exit   *int // of a process that was waited for
	Result any  // what the verb returns, or nil

	Own *Own

	subject *runtime.Subject // what Ref was found to be
	engine  *Engine
	named   bool // its errors name the verb and the object already
}

// About is what an Op's Ref names.
type About int

// What an Op is about.
const (
	AboutOther About = iota // an image, a lease, or all there is
	AboutSandbox
	AboutCheckpoint
)

// Own is about a verb that no caller has asked for.
type Own struct {
	By    string   // the part of agentbox that does it; empty: whatever this process does it for
	Why   string   // such as the lease that has ended, the limit that was reached
	Made  []string // prune: the ids of the checkpoints that are gone
	Did   []string // recover: a sentence for each
	Past  bool     // it is done, and how that ended is all there is to say
	Alone bool     // of no verb whose end would take its record along to the disk
}

// Parts of agentbox that do something by themselves, whichever process they run in.
const (
	ByKeeper = "keeper" // of leases: removes what belonged to those that have ended
	ByReap   = "reap"   // frees what has ended, called by its monitor
	ByWatch  = "watch"  // of sandboxes: holds them to their limits, starts them again
)

func on(verb, ref string) *Op           { return &Op{Verb: verb, Ref: ref} }
func onSandbox(verb, ref string) *Op    { return &Op{Verb: verb, Ref: ref, About: AboutSandbox} }
func onCheckpoint(verb, ref string) *Op { return &Op{Verb: verb, Ref: ref, About: AboutCheckpoint} }

// reads marks a verb that changes nothing.
func (op *Op) reads() *Op {
	op.Reads = true
	return op
}

// errorsNamed marks a verb whose errors name it, or what it is a part of, already.
func (op *Op) errorsNamed() *Op {
	op.named = true
	return op
}

// Subject is what Ref names, as far as the records say: no backend is asked, and what is
// not known is empty. It is looked up once, by the first that asks.
func (op *Op) Subject(ctx context.Context) runtime.Subject {
	if op.subject == nil {
		op.subject = &runtime.Subject{}
		switch {
		case op.engine == nil || op.Ref == "" || op.About == AboutOther:
		case op.About == AboutSandbox:
			if sb, err := op.engine.store.Sandbox(ctx, op.Ref); err == nil {
				op.subject = &runtime.Subject{Sandbox: sb.ID, Name: sb.Name}
			}
		default:
			if row, err := op.engine.store.Checkpoint(ctx, op.Ref); err == nil {
				op.subject = &runtime.Subject{Sandbox: row.SandboxID, Name: row.SandboxName, Checkpoint: row.ID}
			}
		}
	}
	return *op.subject
}

// verb is the frame of each verb that returns something: the observers see it, its errors
// name it, and what a panic has left half-done is recovered.
func verb[T any](ctx context.Context, e *Engine, op *Op, do func(context.Context) (T, error)) (out T, err error) {
	err = e.verb(ctx, op, func(ctx context.Context) (err error) {
		out, err = do(ctx)
		op.Result = out
		return err
	})
	return out, err
}

// verb is the frame of each verb that returns an error alone.
func (e *Engine) verb(ctx context.Context, op *Op, do func(context.Context) error) error {
	op.engine = e
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
		// The process goes on, so that no other one would do it: what the verb has frozen
		// must not stand still until the next command.
		goruntime.GC() // which closes the locks that nothing refers to any more
		if _, e := e.RecoverInterrupted(context.WithoutCancel(ctx)); e != nil {
			op.engine.log.Error("verb not recovered after a panic", "verb", op.Verb, "ref", op.Ref, "err", e)
		}
	}
	return err
}

// observed does something by way of the observers, the first of them outermost. A nil op
// is a step of a verb that they see already.
func (e *Engine) observed(ctx context.Context, op *Op, do func(context.Context) error) error {
	if op == nil {
		return do(ctx)
	}
	for i := len(e.observers) - 1; i >= 0; i-- {
		observe, next := e.observers[i], do
		do = func(ctx context.Context) error { return observe(ctx, op, next) }
	}
	return do(ctx)
}

// ByItself returns the Op of a verb that the Engine does to a subject by itself.
func ByItself(verb string, subject runtime.Subject, own Own) *Op {
	return &Op{Verb: verb, Own: &own, subject: &subject}
}

// subjectOf is a sandbox as the subject of a verb.
func subjectOf(sb store.Sandbox) runtime.Subject {
	return runtime.Subject{Sandbox: sb.ID, Name: sb.Name}
}
