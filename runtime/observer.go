package runtime

import "context"

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

	ErrorsNamed bool // its errors already name the verb and the object

	// Find looks up the object that Ref names, from the records alone; nil: there is none.
	Find func(context.Context) Subject

	subject *Subject // what Find has found
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

// Subject returns the object that Ref names, from the records alone: it asks no backend, and
// unknown fields are empty. The first call looks it up.
func (op *Op) Subject(ctx context.Context) Subject {
	if op.subject == nil {
		op.subject = &Subject{}
		if op.Find != nil {
			*op.subject = op.Find(ctx)
		}
	}
	return *op.subject
}

// ByItself returns the Op of a verb that the Engine runs on a subject on its own.
func ByItself(verb string, subject Subject, own Own) *Op {
	return &Op{Verb: verb, Own: &own, subject: &subject}
}
