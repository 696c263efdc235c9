package runtime

import (
	"context"
	"time"
)

// Kinds of findings.
const (
	FoundInterrupted = "interrupted" // a verb that was interrupted
	FoundStore       = "store"       // unfinished checkpoints and packs
	FoundEnded       = "ended"       // its exit was not recorded, or what it held was not freed
	FoundGone        = "gone"        // a sandbox whose container is gone
	FoundStray       = "stray"       // leftovers of a sandbox that is gone
	FoundLease       = "lease"       // a lease that is over, with what belongs to it
	FoundUnknown     = "unknown"     // an intact sandbox that is not on record; it is left alone
	FoundMonitor     = "monitor"     // the process that records its output and its exit code is dead
	FoundStaged      = "staged"      // a staged restore without a sandbox
	FoundHost        = "host"        // rules, bridges, helpers of all sandboxes
)

// Finding is one difference between the records and the actual state.
type Finding struct {
	Kind    string `json:"kind"`
	Sandbox string `json:"sandbox,omitempty"` // its id
	Action  string `json:"action,omitempty"`  // the repair, in a sentence
	Error   string `json:"error,omitempty"`   // why the repair failed
	Left    bool   `json:"left,omitempty"`    // nothing was done: Action is advice to its owner
	Again   bool   `json:"again,omitempty"`   // the previous Reconcile of this process found it too
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

// Deeds returns the actions that changed something.
func (r ReconcileReport) Deeds() (did []string) {
	for _, f := range r.Findings {
		if f.Action != "" && !f.Left {
			did = append(did, f.Action)
		}
	}
	return did
}

// Holder is a Backend that lists, with one look at the kernel, what its containers
// hold that only a start needs. Healthy containers need no further look.
type Holder interface {
	// Held lists, by id, what containers hold, one word each: processes, mounts,
	// cgroups, links, files of RUN, an exit that is not on record. It includes
	// containers of which nothing else is left, but none of other roots or of other
	// backends on the same root.
	Held(ctx context.Context) (map[string][]string, error)
	// Busy reports whether the backend itself works on a container without a lock of
	// the Engine: a copy out of a stopped container, for example, has it mounted.
	Busy(id string) bool
	// Tend repairs or frees what belongs to no single container: bridges, rules,
	// a proxy. It returns a sentence for each action.
	Tend(ctx context.Context) (did []string, err error)
}

// HeldMonitor is the word for the process that keeps a container's output.
const HeldMonitor = "monitor"
