package engine

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/failpoint"
	"github.com/agentbox/agentbox/internal/guard"
	"github.com/agentbox/agentbox/policy"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/store"
)

// upkeep prunes checkpoints, verifies them, and reclaims the space of what is gone.
type upkeep struct {
	*core

	sandboxes *sandboxes
	restores  *restores

	tidyAt int64 // see Options.TidyAt
}

// PinCheckpoint protects a checkpoint from Prune, or ends the protection.
func (v checkpointVerbs) PinCheckpoint(ctx context.Context, ref string, pinned bool) error {
	name := "checkpoint pin"
	if !pinned {
		name = "checkpoint unpin"
	}
	return v.e.verb(ctx, onCheckpoint(name, ref), func(ctx context.Context) error {
		row, err := v.e.checkpoint(ctx, ref)
		if err == nil {
			err = v.e.store.Pin(ctx, row.ID, pinned)
		}
		return err
	})
}

// TagCheckpoint gives a checkpoint one more name in its sandbox.
func (v checkpointVerbs) TagCheckpoint(ctx context.Context, ref, tag string) error {
	op := onCheckpoint("checkpoint tag", ref)
	op.To = tag
	return v.e.verb(ctx, op, func(ctx context.Context) error {
		row, err := v.e.checkpoint(ctx, ref)
		if err == nil {
			err = v.e.store.Tag(ctx, row.ID, tag)
		}
		return err
	})
}

// UntagCheckpoint removes the tag of SANDBOX@TAG.
func (v checkpointVerbs) UntagCheckpoint(ctx context.Context, ref string) error {
	return v.e.verb(ctx, onCheckpoint("checkpoint untag", ref), func(ctx context.Context) (err error) {
		sandbox, tag, ok := strings.Cut(ref, "@")
		if !ok || sandbox == "" || tag == "" {
			return hint(fmt.Errorf("%w: %q", runtime.ErrInvalid, ref), "Name the tag as SANDBOX@TAG.")
		}
		sb, _, err := v.e.owner(ctx, sandbox)
		if err != nil {
			return err
		}
		return v.e.store.Untag(ctx, sb.ID, tag)
	})
}

// Prune removes the checkpoints that no rule keeps and frees unused space. Without a rule
// the rules of the sandboxes' policies apply.
func (v hostVerbs) Prune(ctx context.Context, opts runtime.PruneOptions) (runtime.Pruned, error) {
	return verb(ctx, v.e, &runtime.Op{Verb: "prune", Ref: opts.Sandbox, About: runtime.AboutSandbox, Reads: opts.DryRun},
		func(ctx context.Context) (runtime.Pruned, error) {
			return v.e.upkeep.prune(ctx, opts)
		})
}

func (up *upkeep) prune(ctx context.Context, opts runtime.PruneOptions) (out runtime.Pruned, err error) {
	rules := policy.Retention{
		KeepLast: opts.KeepLast, KeepWithin: opts.KeepWithin, KeepHourly: opts.KeepHourly,
		KeepDaily: opts.KeepDaily, KeepWeekly: opts.KeepWeekly, MaxBytes: opts.MaxBytes,
	}
	if err := rules.Validate(); err != nil {
		return out, err
	}
	out = runtime.Pruned{Removed: []runtime.PrunedCheckpoint{}, Kept: []runtime.PrunedCheckpoint{}, DryRun: opts.DryRun}
	sandbox := ""
	if opts.Sandbox != "" {
		sb, _, err := up.owner(ctx, opts.Sandbox)
		if err != nil {
			return out, err
		}
		sandbox = sb.ID
	}
	if rules != (policy.Retention{}) {
		if err := up.retain(ctx, store.Filter{SandboxID: sandbox},
			retention{Keeping: policy.Keeping{All: rules}}, &out); err != nil {
			return out, err
		}
	} else if err := up.keepByPolicy(ctx, sandbox, &out); err != nil {
		return out, err
	}
	if err := up.forgetFailures(ctx, sandbox, true, &out); err != nil {
		return out, err
	}
	got, err := up.store.Reclaim(ctx, store.ReclaimOptions{
		MaxWaste: opts.MaxWaste, DryRun: opts.DryRun, Progress: opts.Progress,
	})
	out.Freed, out.Packs, out.Before, out.After = got.Freed, got.Deleted+got.Rewritten, got.Before, got.After
	if err == nil && opts.DryRun && len(out.Removed) > 0 {
		err = up.estimate(ctx, &out)
	}
	if err == nil && !opts.DryRun {
		up.log.Info("pruned", "checkpoints", len(out.Removed), "freed", out.Freed)
	}
	return out, err
}

// tidy removes old failures, and frees the space of removed checkpoints once there is
// enough of it. If it fails, the next call does the work.
func (up *upkeep) tidy(ctx context.Context) {
	ctx = context.WithoutCancel(ctx)
	// Keep a recent failure for the user to look at.
	if err := up.forgetFailures(ctx, "", false, &runtime.Pruned{}); err != nil {
		up.log.Warn("records of failed checkpoints not removed", "err", err)
	}
	n, err := up.store.Removed(ctx)
	if err == nil && n < up.tidyAt {
		return
	}
	var got store.Reclaimed
	if err == nil {
		got, err = up.store.Reclaim(ctx, store.ReclaimOptions{Wait: time.Second})
	}
	if err != nil {
		up.log.Warn("space not freed; `agentbox prune` frees it", "err", err)
		return
	}
	up.log.Info("space of removed checkpoints freed", "bytes", got.Freed)
}

// retainQuietly is Prune by the policies, in the background: it copies at most rate bytes a
// second, no caller waits for it, and if there is nothing to free it reads only records.
func (up *upkeep) retainQuietly(ctx context.Context, rate int64) (out runtime.Pruned, err error) {
	err = guard.Do(func() error {
		return errors.Join(up.keepByPolicy(ctx, "", &out), up.forgetFailures(ctx, "", false, &out))
	})
	// Record this before freeing the space, which may take minutes, and fail.
	up.recordPruned(context.WithoutCancel(ctx), out, err)
	if err != nil {
		return out, err
	}
	n, err := up.store.Removed(ctx)
	if err != nil || n == 0 {
		return out, err
	}
	if err := failpoint.Hit("prune.before-reclaim"); err != nil {
		return out, err
	}
	got, err := up.store.Reclaim(ctx, store.ReclaimOptions{Rate: rate, Yield: true})
	out.Freed, out.Packs, out.Before, out.After = got.Freed, got.Deleted+got.Rewritten, got.Before, got.After
	return out, err
}

// estimate adds to a dry run the space that its checkpoints would free.
func (up *upkeep) estimate(ctx context.Context, out *runtime.Pruned) error {
	sizes, err := up.store.Sizes(ctx)
	if err != nil {
		return err
	}
	gone := map[string]bool{}
	for _, p := range out.Removed {
		gone[p.Checkpoint.ID] = true
	}
	// Use the checkpoints of one moment: they come and go meanwhile.
	all := sizes.IDs()
	kept := slices.DeleteFunc(slices.Clone(all), func(id string) bool { return gone[id] })
	free := sizes.Packed(all) - sizes.Packed(kept)
	out.Freed += free
	out.After -= free
	return nil
}

// candidates returns checkpoints as the rules see them; at are the heads of all sandboxes.
func (r retention) candidates(rows []store.Checkpoint, at map[string]store.Position) []policy.Kept {
	heads, redo := map[string]bool{}, map[string]bool{}
	for _, p := range at {
		heads[p.Head] = true
		for _, id := range p.Redo {
			redo[id] = true
		}
	}
	undo := map[string]*store.Attached{} // host files that a sandbox's newer undo checkpoints have
	list := make([]policy.Kept, 0, len(rows))
	for _, row := range rows {
		k := policy.Kept{
			ID: row.ID, Group: row.SandboxID, Created: row.Created, Pinned: row.Pinned, Automatic: r.covers(row),
		}
		if heads[row.ID] {
			k.Protected = append(k.Protected, "head")
		}
		if redo[row.ID] {
			k.Protected = append(k.Protected, "redo")
		}
		if _, alive := at[row.SandboxID]; alive && isBase(row) {
			k.Protected = append(k.Protected, "base")
		}
		for _, tag := range row.Tags {
			k.Protected = append(k.Protected, "tag "+tag)
		}
		if row.Trigger == runtime.TriggerUndo {
			k.Group += " undo" // the rules are not about undo checkpoints
			if newer, seen := undo[row.SandboxID]; !seen || !newer.Covers(row.Attached) {
				undo[row.SandboxID] = newer.And(row.Attached)
				if _, alive := at[row.SandboxID]; alive {
					k.Protected = append(k.Protected, "undo of the last restore") // of the sandbox, or of host files
				}
			}
		}
		list = append(list, k)
	}
	return list
}

// retain applies the rules to the checkpoints that a filter selects and, unless it is a dry
// run, removes those that no rule keeps. The filter must select all of a sandbox's
// checkpoints that count.
func (up *upkeep) retain(ctx context.Context, f store.Filter, r retention, out *runtime.Pruned) error {
	rows, err := up.store.Checkpoints(ctx, f)
	if err != nil {
		return err
	}
	at, err := up.store.Positions(ctx)
	if err != nil {
		return err
	}
	byID := map[string]store.Checkpoint{}
	for _, row := range rows {
		byID[row.ID] = row
	}
	var sizes *store.Sizes
	decisions, err := r.Apply(time.Now(), r.candidates(rows, at), func(ids []string) (n int64, err error) {
		if sizes == nil {
			// Usually all fits, and nothing needs to be read.
			of := make([]store.Checkpoint, len(ids))
			for i, id := range ids {
				of[i] = byID[id]
			}
			if n, err := up.store.AtMost(ctx, of); err != nil || n <= r.All.MaxBytes {
				return n, err
			}
			if sizes, err = up.store.Sizes(ctx); err != nil {
				return 0, err
			}
		}
		return sizes.Of(ids), nil
	})
	if err != nil {
		return err
	}

	for _, d := range decisions {
		p := runtime.PrunedCheckpoint{Checkpoint: checkpointView(byID[d.ID]), Reasons: d.Reasons}
		if d.Keep {
			out.Kept = append(out.Kept, p)
			continue
		}
		if !out.DryRun {
			err := up.forget(ctx, byID[d.ID])
			if errors.Is(err, runtime.ErrNotFound) {
				continue // another process has removed it
			}
			if errors.Is(err, runtime.ErrBusy) {
				// A checkpoint in use must not keep the others from being removed.
				p.Reasons = append(slices.Clone(p.Reasons), "busy")
				out.Kept = append(out.Kept, p)
				continue
			}
			if err != nil {
				return err
			}
		}
		out.Removed = append(out.Removed, p)
	}
	return nil
}

// failureAge is how long the record of a failed checkpoint stays.
const failureAge = 24 * time.Hour

// forgetFailures removes the records of failed checkpoints, of one sandbox or of all, that
// are old or, with superseded, that have a newer ready checkpoint. They have no pieces, and
// no verb uses them.
func (up *upkeep) forgetFailures(ctx context.Context, sandbox string, superseded bool, out *runtime.Pruned) error {
	old := time.Now().Add(-failureAge)
	rows, err := up.store.Failures(ctx, sandbox, old, superseded)
	if err != nil {
		return err
	}
	for _, row := range rows {
		if !out.DryRun {
			if err := up.store.RemoveCheckpoint(ctx, row.ID); err != nil {
				return err
			}
		}
		reason := "failed, and a newer one is ready"
		if row.Created.Before(old) {
			reason = "failed more than a day ago"
		}
		out.Removed = append(out.Removed, runtime.PrunedCheckpoint{
			Checkpoint: checkpointView(row), Reasons: []string{reason},
		})
	}
	return nil
}

// forget removes a checkpoint for Prune. A checkpoint that has become a head, or was tagged
// or pinned, since the rules were applied is ErrBusy; one that is gone is ErrNotFound.
func (up *upkeep) forget(ctx context.Context, row store.Checkpoint) error {
	lock, err := up.lock(ctx, row.SandboxID, "prune", lockWait)
	if err != nil {
		return err
	}
	defer lock.Unlock()
	now, err := up.store.Checkpoint(ctx, row.ID)
	if err != nil {
		return err
	}
	sb, err := up.store.Sandbox(ctx, row.SandboxID)
	if err != nil && !errors.Is(err, runtime.ErrNotFound) {
		return err
	}
	removed := false
	if (sb.Head != row.ID || sb.ID == "") && len(now.Tags) == 0 && !slices.Contains(sb.Redo, row.ID) {
		removed, err = up.store.RemoveUnpinned(ctx, row.ID)
	}
	if err == nil && !removed {
		return fmt.Errorf("%w: checkpoint %s has come into use meanwhile", runtime.ErrBusy, short(row.ID))
	}
	return err
}

// Usage returns the disk usage by checkpoint and sandbox.
func (v hostVerbs) Usage(ctx context.Context) (runtime.Usage, error) {
	return verb(ctx, v.e, reads(on("df", "")), func(ctx context.Context) (runtime.Usage, error) {
		return v.e.upkeep.usage(ctx)
	})
}

func (up *upkeep) usage(ctx context.Context) (out runtime.Usage, err error) {
	u, err := up.store.Usage(ctx)
	if err != nil {
		return out, err
	}
	out = runtime.Usage{
		Root: up.store.Root(), Stored: u.Stored, Raw: u.Raw, Logical: u.Logical, Waste: u.Waste,
		Packs: u.Packs, Pieces: u.Chunks,
		Checkpoints: []runtime.CheckpointUsage{}, Sandboxes: []runtime.SandboxUsage{},
	}
	for _, c := range u.Checkpoints {
		out.Checkpoints = append(out.Checkpoints, runtime.CheckpointUsage{
			Checkpoint: checkpointView(c.Checkpoint), Needs: c.Needs, Unique: c.Unique,
		})
	}
	boxes, err := up.sandboxes.list(ctx)
	if err != nil {
		return out, err
	}
	uppers := map[string]int64{}
	for _, sb := range boxes {
		n, err := onDisk(ctx, sb.Upperdir)
		if err != nil {
			return out, err
		}
		out.Sandboxes = append(out.Sandboxes, runtime.SandboxUsage{ID: sb.ID, Name: sb.Name, Upperdir: n})
		uppers[sb.Upperdir] = n
	}
	if out.Disk, err = rootOnDisk(ctx, out.Root, uppers); err != nil {
		return out, err
	}
	var st unix.Statfs_t
	if err := unix.Statfs(out.Root, &st); err != nil {
		return out, err
	}
	out.Free = int64(st.Bavail) * int64(st.Bsize)
	return out, nil
}

// Verify checks checkpoints, and marks those that are damaged.
func (v hostVerbs) Verify(ctx context.Context, opts runtime.VerifyOptions) (runtime.VerifyReport, error) {
	return verb(ctx, v.e, errorsNamed(on("verify", "")), func(ctx context.Context) (runtime.VerifyReport, error) {
		return v.e.upkeep.verify(ctx, opts)
	})
}

func (up *upkeep) verify(ctx context.Context, opts runtime.VerifyOptions) (out runtime.VerifyReport, err error) {
	defer func() { err = fail("verify", strings.Join(opts.Checkpoints, " "), err) }()
	if opts.Rehearse && len(opts.Checkpoints) == 0 {
		return out, fmt.Errorf("%w: a rehearsal needs checkpoints", runtime.ErrInvalid)
	}
	var ids []string
	for _, ref := range opts.Checkpoints {
		row, err := up.checkpoint(ctx, ref)
		if err != nil {
			return out, err
		}
		ids = append(ids, row.ID)
	}
	got, err := up.store.VerifyAll(ctx, store.VerifyOptions{IDs: ids, ReadData: opts.ReadData, Progress: opts.Progress})
	out = runtime.VerifyReport{
		Checkpoints: got.Checkpoints, Pieces: got.Chunks, Bytes: got.Bytes, Damaged: []runtime.Damaged{},
		Unrestorable: []runtime.Damaged{}, Notes: slices.Clone(got.Notes),
	}
	if out.Notes == nil {
		out.Notes = []string{}
	}
	for _, d := range got.Damaged {
		out.Damaged = append(out.Damaged, runtime.Damaged{Checkpoint: checkpointView(d.Checkpoint), What: d.What})
	}
	if err == nil {
		out.Unrestorable, err = up.judgeAll(ctx, ids, got.Damaged)
	}
	if err == nil && opts.Rehearse && len(out.Damaged) == 0 {
		out.Rehearsed, err = up.restores.rehearseAll(ctx, ids)
	}
	return out, err
}

// Reindex rebuilds the index of the store from packs and manifests.
func (v hostVerbs) Reindex(ctx context.Context) (runtime.Reindexed, error) {
	return verb(ctx, v.e, on("store reindex", ""), func(ctx context.Context) (runtime.Reindexed, error) {
		got, err := v.e.store.Reindex(ctx)
		return runtime.Reindexed{
			Packs: got.Packs, Pieces: got.Chunks, Checkpoints: got.Checkpoints, Notes: got.Notes,
		}, err
	})
}
