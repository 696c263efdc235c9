package audit

import (
	"context"
	"fmt"
	"log/slog"
	"slices"

	"github.com/agentbox/agentbox/runtime"
)

// Observer puts on record what an Engine does (engine.Options.Observers). by says which
// process this is, for verbs that no caller of the service has asked for: "command",
// "mcp", "auto".
func (l *Log) Observer(by string) runtime.Observer {
	itself := &own{log: l, by: by}
	return func(ctx context.Context, op *runtime.Op, do func(context.Context) error) error {
		switch {
		case op.Own != nil:
			return itself.do(ctx, op, func() error { return do(ctx) })
		case op.Reads: // or a heartbeat, which must not depend on a record
			return do(ctx)
		}
		r := asked(op)
		if op.About != runtime.AboutOther {
			r.about(op.Subject(ctx))
		}
		return l.Do(whoAsks(ctx, by), r, func(r *Record) error {
			err := do(ctx)
			r.came(l, op, err)
			return err
		})
	}
}

// asked is a record of what is asked.
func asked(op *runtime.Op) Record {
	r := Record{
		Verb: op.Verb, Ref: Clip(op.Ref), Name: Clip(op.Name), To: Clip(op.To), Signal: Clip(op.Signal),
		Program: Clip(op.Program),
	}
	if op.Verb == "image import" {
		r.Ref, r.To = Clip(op.From), Clip(op.Ref)
	}
	return r
}

// came records the result of a verb.
func (r *Record) came(l *Log, op *runtime.Op, err error) {
	r.Exit = op.Exit
	switch out := op.Result.(type) {
	case runtime.Sandbox:
		r.box(out)
	case runtime.Checkpoint:
		if out.Reused { // what an earlier record tells of
			r.Sandbox, r.Name = out.Sandbox, Clip(out.SandboxName)
			break
		}
		r.at(out)
		if op.Verb == "checkpoint" {
			for _, f := range out.Attached {
				r.Attached = some(r.Attached, f.Path)
			}
		}
	case runtime.Restored:
		r.restored(l, out)
	case []runtime.Forked:
		for _, f := range out {
			r.Checkpoint = f.Checkpoint.ID
			r.Made = some(r.Made, f.Sandbox.ID)
		}
	case runtime.RemovedCheckpoints:
		for _, id := range out.Removed {
			r.Made = some(r.Made, id)
		}
	case runtime.Pruned:
		for _, p := range out.Removed {
			r.Made = some(r.Made, p.Checkpoint.ID)
		}
	case runtime.Committed:
		if err == nil {
			r.Sandbox, r.Name, r.Checkpoint = out.Sandbox, Clip(out.SandboxName), out.Checkpoint
		}
	case runtime.Applied:
		r.applied(out)
	case runtime.Approval:
		if err == nil {
			r.To, r.Sandbox, r.Name, r.Checkpoint = out.ID, out.Sandbox, Clip(out.SandboxName), out.Checkpoint
			r.Text = some(r.Text, fmt.Sprintf("risk %d", out.Risk.Score))
		}
	case runtime.Effect:
		r.To = out.ID
	case runtime.Lease:
		r.To = out.ID
	case runtime.ReconcileReport:
		r.did(out.Actions)
		r.concerns(out)
	}
}

func (r *Record) about(sub runtime.Subject) {
	r.Sandbox, r.Name, r.Checkpoint = sub.Sandbox, Clip(sub.Name), sub.Checkpoint
}

// box notes which sandbox it turned out to be.
func (r *Record) box(sb runtime.Sandbox) {
	if sb.ID != "" {
		r.Sandbox, r.Name = sb.ID, Clip(sb.Name)
	}
}

// at notes which checkpoint it turned out to be.
func (r *Record) at(c runtime.Checkpoint) {
	if c.ID != "" {
		r.Checkpoint, r.Sandbox, r.Name = c.ID, c.Sandbox, Clip(c.SandboxName)
	}
}

// restored records the result of a restore.
func (r *Record) restored(l *Log, out runtime.Restored) {
	r.at(out.Checkpoint)
	r.box(out.Sandbox)
	r.Undo = out.Undo
	for _, f := range out.Compensated {
		r.Effects = some(r.Effects, f.ID+" "+f.Status)
	}
	for _, f := range out.Attached {
		if f.Action == runtime.AttachedPut || f.Action == runtime.AttachedRemoved {
			r.Attached = some(r.Attached, f.Path+" "+f.Action)
		}
	}
	if out.Checkpoint.ID != "" {
		var err error
		if r.Undid, err = l.undone(r.Sandbox, out.Checkpoint.ID, out.Checkpoint.Created, r.Of); err != nil {
			slog.Warn("audit record lacks what the restore has undone", "sandbox", r.Sandbox, "err", err)
		}
	}
}

// applied records what an apply had to pass, also if it did not.
func (r *Record) applied(out runtime.Applied) {
	r.Checkpoint = out.Checkpoint
	if out.Risk != nil {
		r.Text = some(r.Text, fmt.Sprintf("risk %d", out.Risk.Score))
	}
	if out.Approval != nil {
		state := "approved"
		if out.Approval.Approved.IsZero() {
			state = "not approved"
		}
		r.Text = some(r.Text, "approval "+out.Approval.ID+": "+state)
	}
	r.judged("validator", out.Validators)
	r.judged("canary", out.Canaries)
}

func (r *Record) judged(what string, list []runtime.Validated) {
	for _, v := range list {
		switch {
		case v.Exit == nil: // a dry run
		case v.TimedOut:
			r.Text = some(r.Text, Clip(what+" "+v.Name+": ended, its time was over"))
		default:
			r.Text = some(r.Text, Clip(fmt.Sprintf("%s %s: exit code %d", what, v.Name, *v.Exit)))
		}
	}
}

func (r *Record) did(actions []string) {
	for _, a := range actions {
		r.Text = some(r.Text, Clip(a))
	}
}

// concerns notes which sandboxes something was done about, so that they are found.
func (r *Record) concerns(out runtime.ReconcileReport) {
	for _, f := range out.Findings {
		if f.Sandbox != "" && f.Action != "" && !f.Left && !slices.Contains(r.Made, f.Sandbox) {
			r.Made = some(r.Made, f.Sandbox)
		}
	}
}

// maxSome bounds the lists of a record.
const maxSome = 64

// some is a list with one more, or with word that there were more.
func some(list []string, one string) []string {
	switch {
	case len(list) < maxSome:
		return append(list, one)
	case len(list) == maxSome:
		return append(list, "…")
	}
	return list
}
