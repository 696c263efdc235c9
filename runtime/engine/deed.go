package engine

import (
	"context"
	"fmt"

	"github.com/agentbox/agentbox/runtime"
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
	By   string // the part that does it; empty: whoever this process does something for
	Why  string // such as the lease that has ended, the limit that was reached
	runtime.Subject

	Ref, To string   // of a lease: its name and its id
	Signal  string   // kill
	Made    []string // prune: the ids of the checkpoints that are gone
	Did     []string // recover: a sentence for each
	Past    bool     // it is done, and how that ended is all there is to say
	Alone   bool     // of no verb whose end would take its record along to the disk

	Restored runtime.Restored // restore: what came of it; filled in by what does it
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
	return &Deed{Verb: verb, By: by, Why: why, Subject: runtime.Subject{Sandbox: sb.ID, Name: sb.Name}}
}

// recoverBy is RecoverInterrupted for a part of agentbox.
func (e *Engine) recoverBy(ctx context.Context, by string) error {
	_, err := e.recoverFor(ctx, Deed{By: by})
	return err
}

// maxDeeds bounds the records of one Reconcile. What is more shares one.
const maxDeeds = 64

// record puts on record what a Reconcile has done about each thing that it found. What
// was on record when it was done is not among it: verbs that were cut off, ended leases.
func (r *reconciling) record(ctx context.Context) {
	ctx = context.WithoutCancel(ctx)
	rest := Deed{Verb: "recover", Why: fmt.Sprintf("found: more than %d things", maxDeeds), Past: true, Alone: r.unasked}
	n := 0
	for i, f := range r.report.Findings {
		if f.Action == "" || f.Left || f.Kind == runtime.FoundInterrupted || f.Kind == runtime.FoundLease {
			continue
		}
		if n++; n > maxDeeds {
			rest.Did = append(rest.Did, f.Action)
			if f.Sandbox != "" {
				rest.Made = append(rest.Made, f.Sandbox)
			}
			continue
		}
		d := Deed{Verb: rest.Verb, Why: "found: " + f.Kind, Subject: runtime.Subject{Sandbox: f.Sandbox, Name: r.known[f.Sandbox].Name}, Did: []string{f.Action}, Past: true, Alone: r.unasked}
		_ = r.e.deed(ctx, &d, func() error { return r.causes[i] })
	}
	if len(rest.Did) > 0 {
		_ = r.e.deed(ctx, &rest, func() error { return nil })
	}
}

// recordPruned puts on record what the retention rules have removed, by its sandboxes.
func (e *Engine) recordPruned(ctx context.Context, out runtime.Pruned, err error) {
	var list []*Deed
	at := map[string]*Deed{}
	for _, p := range out.Removed {
		c := p.Checkpoint
		d := at[c.Sandbox]
		if d == nil {
			d = &Deed{Verb: "prune", Why: "retention", Subject: runtime.Subject{Sandbox: c.Sandbox, Name: c.SandboxName}, Past: true, Alone: true}
			at[c.Sandbox], list = d, append(list, d)
		}
		d.Made = append(d.Made, c.ID)
	}
	for _, d := range list {
		_ = e.deed(ctx, d, func() error { return err }) // which Upkeep logs
	}
}

// ofLease is why something goes with a lease.
func ofLease(l runtime.Lease) string {
	if l.Name == "" {
		return fmt.Sprintf("lease %s: %s", short(l.ID), l.Reason)
	}
	return fmt.Sprintf("lease %s (%s): %s", short(l.ID), l.Name, l.Reason)
}
