package runtime

import (
	"context"
	"time"
)

// Kinds of findings.
const (
	FoundInterrupted = "interrupted" // a verb that was cut off
	FoundStore       = "store"       // unfinished checkpoints and packs
	FoundEnded       = "ended"       // it ended, and nobody put that on record or freed what it held
	FoundGone        = "gone"        // a sandbox whose container is gone
	FoundStray       = "stray"       // what is left of a sandbox that is gone
	FoundLease       = "lease"       // a lease that is over, with what belongs to it
	FoundUnknown     = "unknown"     // a sandbox that is whole and not on record; it is left alone
	FoundWatch       = "watch"       // the process that holds a sandbox to its limits was dead
	FoundAuto        = "auto"        // the process that takes its checkpoints was dead
	FoundMonitor     = "monitor"     // the process that keeps its output and its exit code is dead
	FoundStaged      = "staged"      // a restore that nobody will start
	FoundHost        = "host"        // rules, bridges, helpers of all sandboxes
)

// Finding is one difference between what is recorded and what there is.
type Finding struct {
	Kind    string `json:"kind"`
	Sandbox string `json:"sandbox,omitempty"` // its id
	Action  string `json:"action,omitempty"`  // what was done about it, in a sentence
	Error   string `json:"error,omitempty"`   // why nothing could be
	Left    bool   `json:"left,omitempty"`    // nothing was done: Action says what its owner can do
	Again   bool   `json:"again,omitempty"`   // the Reconcile before, of this service, found it, too
}

// ReconcileReport is the documented JSON of `agentbox recover`; it only ever grows.
type ReconcileReport struct {
	Actions   []string       `json:"actions"` // those of the findings
	Findings  []Finding      `json:"findings"`
	Counts    map[string]int `json:"counts"`    // findings by their kind
	Failed    int            `json:"failed"`    // of them: with an error
	Sandboxes int            `json:"sandboxes"` // looked at
	Took      time.Duration  `json:"took_ns"`
}

// Deeds are the actions by which something was changed.
func (r ReconcileReport) Deeds() (did []string) {
	for _, f := range r.Findings {
		if f.Action != "" && !f.Left {
			did = append(did, f.Action)
		}
	}
	return did
}

// Holder is a Backend that tells at one look at the kernel what its containers
// hold that only a start needs, so that those that are well cost nothing more.
type Holder interface {
	// Held lists, by id, what there is, a word each: processes, mounts, cgroups,
	// links, files of RUN, an end that is not on record. Containers of which
	// nothing else is left are among them; those of other roots never are, nor
	// those of other backends on the same root.
	Held(ctx context.Context) (map[string][]string, error)
	// Busy reports whether the backend is at work on a container by itself, under no
	// lock of the Engine's: a copy out of one that is stopped has it mounted.
	Busy(id string) bool
	// Tend repairs or frees what belongs to no single container: bridges, rules,
	// a proxy. It returns a sentence for each deed.
	Tend(ctx context.Context) (did []string, err error)
}

// HeldMonitor is the word for the process that keeps a container's output.
const HeldMonitor = "monitor"
