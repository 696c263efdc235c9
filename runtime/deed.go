package runtime

import (
	"context"
	"fmt"

	"github.com/agentbox/agentbox/runtime/store"
)

// Parts of agentbox that do something by themselves, whichever process comes by to
// do it.
const (
	ByKeeper = "keeper" // of leases: removes what belonged to those that have ended
	ByReap   = "reap"   // frees what has ended, called by its monitor
	ByWatch  = "watch"  // of sandboxes: holds them to their limits, starts them again
)

// Deed is what the Engine does to a sandbox by itself: nobody has called that verb.
type Deed struct {
	Verb string // as the command is called that does the same
	By   string // the part that does it; empty: it belongs to a verb, and is its caller's
	Why  string // such as the lease that has ended, the limit that was reached
	Subject

	Ref, To string   // of a lease: its name and its id
	Signal  string   // kill
	Made    []string // prune: the ids of the checkpoints that are gone
	Did     []string // recover: a sentence for each
	Past    bool     // it is done, and how that ended is all there is to say

	Restored Restored // restore: what came of it; filled in by what does it
}

// deed does something of the Engine's own by way of who puts that on record; nil:
// the verb that it is a step of is there already. A start or restore that cannot be
// put on record is not done.
func (e *Engine) deed(ctx context.Context, d *Deed, do func() error) error {
	if d == nil || e.deeds == nil {
		return do()
	}
	return e.deeds(ctx, d, do)
}

// deedTo is what a part does to a sandbox by itself.
func deedTo(sb store.Sandbox, verb, by, why string) *Deed {
	return &Deed{Verb: verb, By: by, Why: why, Subject: Subject{Sandbox: sb.ID, Name: sb.Name}}
}

// recoverBy is RecoverInterrupted for a part of agentbox. It is on record when it
// has found something to do.
func (e *Engine) recoverBy(ctx context.Context, by string) error {
	done, err := e.RecoverInterrupted(ctx)
	if len(done.Actions) == 0 {
		return err
	}
	return e.deed(ctx, &Deed{Verb: "recover", By: by, Did: done.Actions, Past: true}, func() error { return err })
}

// ofLease is why something goes with a lease.
func ofLease(l Lease) string {
	if l.Name == "" {
		return fmt.Sprintf("lease %s: %s", short(l.ID), l.Reason)
	}
	return fmt.Sprintf("lease %s (%s): %s", short(l.ID), l.Name, l.Reason)
}
