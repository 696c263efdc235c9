package main

import (
	"context"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/agentbox/agentbox/runtime"
)

// fakeHistory holds the fake's answers to the verbs of history, and what it was asked.
type fakeHistory struct {
	effects    []runtime.Effect
	effectReq  runtime.EffectRequest
	forkOpts   runtime.ForkOptions
	forks      []runtime.Forked
	plan       runtime.RestorePlan
	stepped    runtime.Restored
	undoList   runtime.UndoList
	undoOpts   runtime.UndoOptions
	lost       []string
	pruneOpts  []runtime.PruneOptions
	pruned     runtime.Pruned
	usage      runtime.Usage
	stats      func(runtime.StatsOptions) []runtime.Stats
	verifyOpts []runtime.VerifyOptions
	damaged    []runtime.Damaged
	exportOpts runtime.ExportOptions
	importOpts runtime.ImportOptions
	regOpts    runtime.RegistryOptions
}

// slowly reports how far a verb is, and goes on. With the name slow it is stuck there.
func slowly(ctx context.Context, progress *runtime.Steps, name string) error {
	fn := *progress
	*progress = nil // like a struct of values only, to compare
	if fn == nil {
		return nil
	}
	fn(runtime.Step{Phase: runtime.PhaseFiles, Done: 1_500_000})
	fn(runtime.Step{Phase: runtime.PhaseStoring, Done: 500_000, Total: 1_000_000})
	fn(runtime.Step{Phase: "of \x1b another version"})
	if name != "slow" {
		return nil
	}
	fn(runtime.Step{Phase: runtime.PhaseProcesses})
	<-ctx.Done()
	return context.Cause(ctx)
}

func (f *fakeService) Fork(ctx context.Context, ref string, opts runtime.ForkOptions) ([]runtime.Forked, error) {
	if err := slowly(ctx, &opts.Progress, opts.Checkpoint); err != nil {
		return nil, err
	}
	f.forkOpts = opts
	return f.forks, f.simple("Fork", ref)
}

func (f *fakeService) PlanRestore(
	_ context.Context, ref string, opts runtime.RestoreOptions,
) (runtime.RestorePlan, error) {
	f.reOpts = opts
	return f.plan, f.simple("PlanRestore", ref)
}

func (f *fakeService) Undo(_ context.Context, ref string, opts runtime.UndoOptions) (runtime.Restored, error) {
	f.undoOpts = opts
	if err := f.simple("Undo", ref); err != nil {
		return runtime.Restored{}, err
	}
	return f.stepped, nil
}

func (f *fakeService) Redo(_ context.Context, ref string, opts runtime.UndoOptions) (runtime.Restored, error) {
	f.undoOpts = opts
	if err := f.simple("Redo", ref); err != nil {
		return runtime.Restored{}, err
	}
	return f.stepped, nil
}

func (f *fakeService) PlanUndo(_ context.Context, ref string, opts runtime.UndoOptions) (runtime.RestorePlan, error) {
	f.undoOpts = opts
	return f.plan, f.simple("PlanUndo", ref)
}

func (f *fakeService) UndoList(_ context.Context, ref string) (runtime.UndoList, error) {
	return f.undoList, f.simple("UndoList", ref)
}

func (f *fakeService) PinCheckpoint(_ context.Context, ref string, pinned bool) error {
	return f.call("PinCheckpoint", ref, pinned)
}

func (f *fakeService) TagCheckpoint(_ context.Context, ref, tag string) error {
	return f.call("TagCheckpoint", ref, tag)
}

func (f *fakeService) UntagCheckpoint(_ context.Context, ref string) error {
	return f.call("UntagCheckpoint", ref)
}

func (f *fakeService) Prune(_ context.Context, opts runtime.PruneOptions) (runtime.Pruned, error) {
	// Like a struct of values only, to compare.
	if opts.Progress != nil {
		opts.Progress(500_000, 1_000_000)
		opts.Progress = nil
	}
	f.pruneOpts = append(f.pruneOpts, opts)
	p := f.pruned
	p.DryRun = opts.DryRun
	return p, f.call("Prune", opts.Sandbox)
}

func (f *fakeService) Usage(context.Context) (runtime.Usage, error) { return f.usage, f.call("Usage") }

func (f *fakeService) Stats(ctx context.Context, opts runtime.StatsOptions) ([]runtime.Stats, error) {
	err := f.call("Stats", opts.Sandboxes, opts.All, opts.Disk)
	return f.stats(opts), err
}

func (f *fakeService) Verify(_ context.Context, opts runtime.VerifyOptions) (runtime.VerifyReport, error) {
	opts.Progress = nil
	f.verifyOpts = append(f.verifyOpts, opts)
	r := runtime.VerifyReport{Pieces: 10, Bytes: 1000}
	if r.Checkpoints = len(opts.Checkpoints); r.Checkpoints == 0 {
		r.Checkpoints = len(f.checkpoints)
	}
	for _, d := range f.damaged {
		if len(opts.Checkpoints) == 0 || slices.Contains(opts.Checkpoints, d.Checkpoint.ID) {
			r.Damaged = append(r.Damaged, d)
		}
	}
	return r, f.call("Verify", strings.Join(opts.Checkpoints, " "))
}

func (f *fakeService) Reindex(context.Context) (runtime.Reindexed, error) {
	return runtime.Reindexed{
		Packs: 2, Pieces: 30, Checkpoints: 1, Notes: []string{"pack ab: cut off"},
	}, f.call("Reindex")
}

func (f *fakeService) ExportCheckpoint(_ context.Context, ref string, w io.Writer, opts runtime.ExportOptions) error {
	opts.Progress = nil
	f.exportOpts = opts
	_, err := io.WriteString(w, "an archive of "+ref)
	if e := f.call("ExportCheckpoint", ref); e != nil {
		return e
	}
	return err
}

func (f *fakeService) arrived(name string) runtime.Checkpoint {
	return runtime.Checkpoint{
		ID: strings.Repeat("77ab", 8), SandboxName: name, Kind: runtime.KindFull,
		Status: runtime.CheckpointReady, Created: epoch,
	}
}

func (f *fakeService) ImportCheckpoint(
	_ context.Context, r io.Reader, opts runtime.ImportOptions,
) (runtime.Checkpoint, error) {
	opts.Progress = nil
	f.importOpts = opts
	data, err := io.ReadAll(r)
	if err != nil {
		return runtime.Checkpoint{}, err
	}
	f.stdin = data
	return f.arrived(opts.Name), f.call("ImportCheckpoint", opts.Name)
}

func (f *fakeService) PushCheckpoint(
	_ context.Context, ref, reference string, opts runtime.RegistryOptions,
) (runtime.Pushed, error) {
	opts.Progress = nil
	f.regOpts = opts
	return runtime.Pushed{Reference: reference + "@sha256:" + strings.Repeat("ab", 32), Bytes: 1, Skipped: 2},
		f.call("PushCheckpoint", ref, reference)
}

func (f *fakeService) PullCheckpoint(
	_ context.Context, reference string, opts runtime.RegistryOptions,
) (runtime.Checkpoint, error) {
	opts.Progress = nil
	f.regOpts = opts
	return f.arrived("c"), f.call("PullCheckpoint", reference)
}

// history is boxes with a past.
func history() *fakeService {
	f := boxes()
	run := f.sandboxes[1]
	c := f.checkpoints[0]
	c.Added, c.Pinned, c.Tags = 4096, true, []string{"good", "v1"}
	undo := c
	undo.ID, undo.Name, undo.Tags, undo.Pinned = strings.Repeat("9abc", 8), "", nil, false
	undo.Trigger, undo.Created, undo.Parent = runtime.TriggerUndo, epoch.Add(time.Second), c.ID
	f.checkpoints = []runtime.Checkpoint{undo, c}
	fork := run
	fork.ID, fork.Name, fork.Address = strings.Repeat("f0", 16), "run-fork-1", "10.88.0.7"
	f.forks = []runtime.Forked{{Sandbox: fork, Checkpoint: c, Took: 42 * time.Millisecond,
		Reseeded: []string{"host name", "/etc/machine-id"}, Shared: []string{"ssh host keys"}}}
	second := f.forks[0]
	second.Sandbox.ID, second.Sandbox.Name = strings.Repeat("f1", 16), "run-fork-2"
	f.forks = append(f.forks, second)
	f.plan = runtime.RestorePlan{Sandbox: run.ID, SandboxName: "run", Checkpoint: c,
		Changes: slices.Clone(changed().diff.Changes[:3]), Added: 2, Modified: 1, Bytes: 140,
		Ends:    []runtime.PlanProcess{{Pid: 1, Command: "sh -c loop"}, {Pid: 12, Command: "evil\n\x1b[31m"}},
		Begins:  []runtime.PlanProcess{{Pid: 1, Command: "sh -c loop"}},
		Effects: []string{"2 connections are closed"}}
	f.pruned = runtime.Pruned{Freed: 3_000_000, Packs: 2, Before: 5_000_000, After: 2_000_000,
		Removed: []runtime.PrunedCheckpoint{{Checkpoint: undo, Reasons: []string{"no rule keeps it"}}},
		Kept:    []runtime.PrunedCheckpoint{{Checkpoint: c, Reasons: []string{"pinned", "last 1"}}}}
	f.usage = runtime.Usage{Root: "/var/lib/agentbox", Stored: 2_000_000, Raw: 5_000_000, Logical: 20_000_000,
		Waste: 500_000, Packs: 3, Pieces: 1234, Free: 10_000_000_000,
		Checkpoints: []runtime.CheckpointUsage{
			{Checkpoint: undo, Needs: 1_500_000, Unique: 4096}, {Checkpoint: c, Needs: 1_000_000},
		},
		Sandboxes: []runtime.SandboxUsage{{ID: run.ID, Name: "run", Upperdir: 3_000_000}},
		Disk: runtime.DiskUsage{
			Total: 9_500_000, Packs: 2_100_000, Records: 300_000, Sandboxes: 3_100_000, Images: 3_000_000,
			Rest: 1_000_000, Elsewhere: 50_000,
		}}
	return f
}

func damaged(c runtime.Checkpoint) runtime.Damaged {
	return runtime.Damaged{Checkpoint: c, What: []string{fmt.Sprintf("usr/lib/x\n: piece %s", "blake3:00")}}
}

func (f *fakeService) AddEffect(_ context.Context, ref string, req runtime.EffectRequest) (runtime.Effect, error) {
	f.effectReq = req
	return runtime.Effect{
		ID: "3f2a3f2a3f2a3f2a3f2a3f2a3f2a3f2a", Command: req.Command, Status: runtime.EffectOutstanding,
	}, f.simple("AddEffect", ref)
}

func (f *fakeService) Effects(_ context.Context, ref string, all bool) ([]runtime.Effect, error) {
	return f.effects, f.fail["Effects"]
}

func (f *fakeService) RemoveEffect(_ context.Context, ref, effect string) error {
	return f.call("RemoveEffect", ref, effect)
}

func (f *fakeService) Approvals(context.Context) ([]runtime.Approval, error) {
	return nil, f.simple("Approvals", "")
}

func (f *fakeService) Approve(_ context.Context, id string) (runtime.Approval, error) {
	return runtime.Approval{ID: id}, f.simple("Approve", id)
}

func (f *fakeService) ReleaseHold(_ context.Context, ref string) error {
	return f.simple("ReleaseHold", ref)
}
