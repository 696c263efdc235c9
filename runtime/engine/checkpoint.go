package engine

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"sync/atomic"
	"time"

	"github.com/agentbox/agentbox/criu"
	"github.com/agentbox/agentbox/internal/failpoint"
	"github.com/agentbox/agentbox/internal/guard"
	"github.com/agentbox/agentbox/internal/hostfile"
	"github.com/agentbox/agentbox/internal/undo"
	"github.com/agentbox/agentbox/overlay"
	"github.com/agentbox/agentbox/policy"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/engine/progress"
	"github.com/agentbox/agentbox/runtime/engine/worktree"
	"github.com/agentbox/agentbox/runtime/store"
)

// checkpoints takes checkpoints, and reads and removes them.
type checkpoints struct {
	*core

	effects   *effectLog
	restarts  *restartLog
	admission *admission
	images    *localImages
	limits    *limits
	leases    *leases
	upkeep    *upkeep
}

// freezing is the journal's data of a checkpoint: the state that recovery must put back.
type freezing struct {
	Was  runtime.Status `json:"was"`  // before the verb
	Stop bool           `json:"stop"` // a committed checkpoint is followed by a stop
}

// Checkpoint records the state of a sandbox at one instant. It reads files ahead, then
// freezes the sandbox until it has read what has changed since, and with Stop until the
// checkpoint is durable. When Checkpoint returns without an error the checkpoint is
// durable. On error the sandbox goes on as before and no new checkpoint is ready.
func (v checkpointVerbs) Checkpoint(
	ctx context.Context, ref string, opts runtime.CheckpointOptions,
) (runtime.Checkpoint, error) {
	return verb(ctx, v.e, onSandbox("checkpoint", ref), func(ctx context.Context) (runtime.Checkpoint, error) {
		return v.e.checkpoints.takeCheckpoint(ctx, ref, opts)
	})
}

// checkOptions refuses what does not depend on the sandbox.
func checkOptions(opts runtime.CheckpointOptions) error {
	if opts.IfChanged && (opts.Name != "" || opts.Stop || len(opts.Attach) > 0) {
		return fmt.Errorf("%w: a checkpoint that is taken only if files have changed has no name and no host files, and does not stop the sandbox",
			runtime.ErrInvalid)
	}
	if err := store.ValidMessage(opts.Message); err != nil {
		return err
	}
	if opts.Name != "" {
		if err := store.ValidCheckpointName(opts.Name); err != nil {
			return err
		}
	}
	switch opts.TCP {
	case runtime.TCPEstablished, runtime.TCPClose, runtime.TCPRefuse:
		return nil
	}
	return fmt.Errorf("%w: tcp %q: choose %s, %s or %s", runtime.ErrInvalid, opts.TCP,
		runtime.TCPEstablished, runtime.TCPClose, runtime.TCPRefuse)
}

func (cs *checkpoints) takeCheckpoint(
	ctx context.Context, ref string, opts runtime.CheckpointOptions,
) (out runtime.Checkpoint, err error) {
	defer func() { err = fail("checkpoint", ref, err) }()
	steps := progress.Follow(opts.Progress)
	defer steps.End()
	opts.TCP = cmp.Or(opts.TCP, runtime.TCPEstablished)
	if err := checkOptions(opts); err != nil {
		return runtime.Checkpoint{}, err
	}
	verb := "checkpoint"
	switch opts.Trigger {
	case runtime.TriggerInterval:
		verb = opInterval
	case runtime.TriggerPrompt:
		verb = opPrompt
	}

	if err := cs.mayTrigger(ctx, ref, opts); err != nil {
		return runtime.Checkpoint{}, err
	}
	sb, err := cs.acquire(ctx, ref, verb, lockWait)
	if err != nil {
		return runtime.Checkpoint{}, err
	}
	defer func() {
		if err == nil {
			cs.upkeep.makeRoom(ctx, sb.Sandbox, out) // after the unlock
		}
	}()
	defer sb.lock.Unlock()
	sb.steps = steps
	if opts.Timeout > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, opts.Timeout)
		defer cancel()
	}
	s, err := spec(sb.Sandbox)
	if err != nil {
		return runtime.Checkpoint{}, err
	}
	if opts.Attach, err = cs.attachable(s, opts.Attach); err != nil {
		return runtime.Checkpoint{}, err
	}
	if opts.IfChanged {
		head, err := cs.unchanged(ctx, sb, opts)
		if err != nil || head != nil {
			return reused(head), err
		}
	}
	h, err := cs.admission.hooksOf("checkpoint", s)
	if err != nil {
		return runtime.Checkpoint{}, err
	}
	defer func() { h.failed(ctx, err) }()
	h.of(store.Checkpoint{Name: opts.Name, Trigger: cmp.Or(opts.Trigger, "manual"), Labels: opts.Labels})
	if err := h.before(ctx, policy.BeforeCheckpoint); err != nil {
		return runtime.Checkpoint{}, err
	}
	row, err := cs.checkpointOf(ctx, sb, opts, "")
	if err != nil {
		return runtime.Checkpoint{}, err
	}
	cs.log.Info("checkpoint ready", "sandbox", sb.ID, "checkpoint", row.ID, "kind", row.Kind, "bytes",
		row.Bytes, "frozen", row.Frozen)
	h.of(row)
	out = checkpointView(row)
	for _, f := range out.Attached {
		if f.Absent { // a mistyped path looks like this
			out.Warnings = append(slices.Clone(out.Warnings),
				fmt.Sprintf("host file %s is not there: a restore removes what is there then", f.Path))
		}
	}
	out.Warnings = slices.Concat(out.Warnings, h.after(ctx, policy.AfterCheckpoint))
	return out, nil
}

// mayTrigger refuses a trigger of automatic checkpoints before it waits for such a one to end.
func (cs *checkpoints) mayTrigger(ctx context.Context, ref string, opts runtime.CheckpointOptions) error {
	if opts.Trigger == "" || opts.Automatic {
		return nil
	}
	sb, err := cs.find(ctx, ref)
	if err != nil {
		return err
	}
	s, err := spec(sb)
	if err != nil {
		return err
	}
	return ownTrigger(s, opts)
}

// checkpointOf makes a checkpoint of a sandbox whose lock is held. aside is the id of a
// checkpoint that will be removed again and does not become the sandbox's head.
func (cs *checkpoints) checkpointOf(
	ctx context.Context, sb *locked, opts runtime.CheckpointOptions, aside string,
) (row store.Checkpoint, err error) {
	c, err := sb.host.Inspect(ctx, sb.ID)
	if err != nil {
		return row, err
	}
	unlock, err := lockSlot(c)
	if err != nil {
		return row, err
	}
	defer unlock()
	try := func() (k *making, err error) {
		if k, err = cs.prepare(ctx, sb, c, opts); err != nil {
			return k, err
		}
		if aside != "" {
			k.row.ID, k.aside = aside, true
		}
		row, err = cs.take(ctx, k)
		return k, err
	}
	k, err := try()
	for more := instantTries; more > 0 && cs.dumpAgain(ctx, sb, err); more-- {
		k, err = try() // the sandbox has gone on since
	}
	if errors.Is(err, runtime.ErrCorrupt) && k != nil && k.stale {
		// Try once more without the file cache.
		_, err = try()
	}
	return row, err
}

// making is one checkpoint under way.
type making struct {
	sb   *locked
	spec runtime.Spec
	c    runtime.Container
	live bool // the sandbox has processes to freeze
	opts runtime.CheckpointOptions

	row   store.Checkpoint
	parts store.Manifest // the parts of the manifest that the store does not fill in
	trees []worktree.Tree
	below []worktree.Tree   // the directories that workspaces lie over
	taken []*hostfile.Taken // its attached files

	freeze
	aside  bool                  // the checkpoint will be removed again
	beside func(context.Context) // work to do during the commit
	like   []overlay.Chunk       // of the base tree: the file list of an open checkpoint that is likely similar
	stale  bool                  // the file cache was wrong, and is deleted
}

// freeze is how a checkpoint holds its sandbox.
type freeze struct {
	hold  bool      // the sandbox stays frozen when the checkpoint is ready
	cut   *criu.Cut // of the network, if the sandbox stops afterwards
	thawn bool      // the sandbox is thawed already
}

// prepare does all that does not need the sandbox frozen.
func (cs *checkpoints) prepare(
	ctx context.Context, sb *locked, c runtime.Container, opts runtime.CheckpointOptions,
) (*making, error) {
	s, err := spec(sb.Sandbox)
	if err != nil {
		return nil, err
	}
	k := &making{sb: sb, spec: s, c: c, opts: opts, live: c.Status == runtime.Running || c.Status == runtime.Paused}
	kind := runtime.KindFull
	only := sb.host.Properties().FilesOnly
	if only && k.live && opts.Stop {
		return nil, hint(fmt.Errorf("%w: it has no processes of its own to stop", runtime.ErrUnsupported),
			"Stop what uses it, or leave --stop away.")
	}
	if opts.Stop && k.live && c.AutoRemove {
		return nil, hint(fmt.Errorf("%w: its engine removes it as soon as it stops (it was started with --rm), and it could not be restored", runtime.ErrState), "Leave --stop away, or start it again without --rm.")
	}
	if !k.live || opts.FilesOnly || only {
		kind = runtime.KindFiles
	}
	k.row = store.Checkpoint{
		ID: newID(), Name: opts.Name, SandboxID: sb.ID, SandboxName: sb.Name, Kind: kind,
		Parent: sb.Head, Trigger: cmp.Or(opts.Trigger, "manual"), Message: opts.Message, Created: time.Now(),
		ImageDigest: sb.ImageDigest, Labels: opts.Labels, Spec: sb.Spec,
	}
	if k.row.Lease, err = cs.leases.leaseOf(ctx, sb.Sandbox, opts); err != nil {
		return nil, err
	}
	if k.row.Spec, err = nameless(s, sb.Spec); err != nil {
		return nil, err
	}
	if kind == runtime.KindFull && len(s.Secrets) > 0 {
		k.row.Warnings = append(k.row.Warnings, "what processes have read of the secrets in "+runtime.SecretsDir+
			" is part of their memory, and so of the checkpoint")
	}

	if err := k.prepareMounts(ctx); err != nil {
		return nil, err
	}
	if k.live {
		if err := k.warnFresh(); err != nil {
			return nil, err
		}
	}

	if kind == runtime.KindFull {
		if err := k.prepareProcesses(ctx); err != nil {
			return nil, err
		}
	}

	home := cs.home(sb)
	k.trees = []worktree.Tree{{Dir: c.Upper, Home: home}}
	for i, v := range k.parts.Volumes {
		at := slices.IndexFunc(c.Volumes, func(have runtime.Volume) bool { return have.Name == v.Name })
		if tree := (worktree.Tree{Dir: c.Volumes[at].Path, Number: 1 + i, Home: home}); v.Below {
			tree.Dir, tree.Below = c.Volumes[at].Lower, true
			k.below = append(k.below, tree)
		} else {
			k.trees = append(k.trees, tree)
		}
	}
	if k.parts.Effect, err = cs.store.NewestEffect(ctx, sb.ID); err != nil {
		return nil, err
	}
	k.parts.Status = string(c.Status)
	k.parts.TCP = opts.TCP
	k.parts.Warnings = k.row.Warnings
	return k, nil
}

// prepareMounts says which mounts are not part of the checkpoint, and takes the volumes that are.
func (k *making) prepareMounts(ctx context.Context) error {
	for _, m := range k.spec.Mounts {
		switch {
		case m.Type == "bind" && m.ReadOnly: // nothing that the sandbox does is lost with it
		case m.Type == "bind":
			k.row.Warnings = append(k.row.Warnings,
				fmt.Sprintf("%s is bind mounted from %s and not part of the checkpoint", m.Target, m.Source))
		case m.Type == "volume" && k.opts.WithVolumes:
			if !slices.ContainsFunc(k.c.Volumes, func(v runtime.Volume) bool { return v.Name == m.Source }) {
				return hint(fmt.Errorf("%w: volume %s (%s) has no directory of its own on this host, or its engine does not tell", runtime.ErrUnsupported, m.Source, m.Target),
					"Leave --with-volumes away.")
			}
		case m.Type == runtime.MountWorkspace: // taken along
		case m.Type == "volume":
			k.row.Warnings = append(k.row.Warnings,
				fmt.Sprintf("%s is volume %s and not part of the checkpoint", m.Target, m.Source))
		case k.row.Kind == runtime.KindFiles:
			k.row.Warnings = append(k.row.Warnings,
				fmt.Sprintf("%s is a tmpfs and not part of a files-only checkpoint", m.Target))
		}
	}

	if k.opts.WithVolumes || slices.ContainsFunc(k.c.Volumes, runtime.Volume.Workspace) {
		if err := k.takeVolumes(ctx); err != nil {
			return err
		}
	} else {
		for _, v := range k.c.Volumes { // volumes that the image declares
			if !slices.ContainsFunc(k.spec.Mounts, func(m runtime.Mount) bool {
				return m.Type == "volume" && m.Source == v.Name
			}) {
				k.row.Warnings = append(k.row.Warnings,
					fmt.Sprintf("%s is volume %s and not part of the checkpoint", v.Target, v.Name))
			}
		}
	}
	return nil
}

// prepareProcesses says which processes are not part of the checkpoint.
func (k *making) prepareProcesses(ctx context.Context) error {
	// Processes that exec has started are not descendants of the first
	// process, and CRIU silently leaves them out.
	strays, err := criu.Strays(k.c.Pid, nil)
	if err != nil {
		return err
	}
	for _, p := range strays {
		k.row.Warnings = append(k.row.Warnings,
			fmt.Sprintf("process %d (%s) came in through an exec and is not part of the checkpoint", p.Pid, p.Cmdline))
	}
	if len(strays) > 0 && k.opts.Strict {
		return hint(fmt.Errorf("%w: %s", runtime.ErrState, k.row.Warnings[len(k.row.Warnings)-1]),
			"End the exec session, or leave --strict away to checkpoint without it.")
	}
	v, err := criu.ToolVersions(ctx, criu.Runtime(k.c.Runtime))
	if err != nil {
		return err
	}
	k.parts.Versions = store.Versions(v)
	return nil
}

// take makes a checkpoint and stops the sandbox if asked to.
func (cs *checkpoints) take(ctx context.Context, k *making) (row store.Checkpoint, err error) {
	in := store.Intent{Op: opCheckpoint, Sandbox: k.sb.ID, Checkpoint: k.row.ID, Lazy: true}
	k.hold = k.opts.Stop
	err = cs.intent(ctx, in, freezing{k.c.Status, k.opts.Stop}, func(int64) (err error) {
		if row, err = cs.record(ctx, k); err != nil {
			return err
		}
		return cs.resume(context.WithoutCancel(ctx), k, &row)
	})
	return row, err
}

// record freezes, captures, thaws unless the sandbox is held, and commits. On
// error the sandbox goes on as before and there is no checkpoint.
func (cs *checkpoints) record(ctx context.Context, k *making) (row store.Checkpoint, err error) {
	var undo undo.Stack
	defer func() { undo.Run(ctx, &err) }()
	draft, err := cs.store.BeginCheckpoint(ctx, k.row)
	if err != nil {
		return row, err
	}
	undo.Add(func(ctx context.Context) error { return draft.Abort(ctx, err, filepath.Join(workDir, "dump.log")) })
	k.sb.steps.Begin(runtime.PhaseFiles, 0)
	if err := k.readAhead(ctx, draft); err != nil {
		return row, err
	}
	if err := k.readBelow(ctx, draft); err != nil {
		return row, err
	}
	if err := k.takeAttached(ctx, draft); err != nil {
		return row, err
	}
	frozen, err := cs.freeze(ctx, k, &undo)
	if err != nil {
		return row, err
	}

	if err := cs.capture(ctx, k, draft); err != nil {
		return row, k.explain(ctx, err)
	}
	if err := k.checkFrozen(ctx); err != nil {
		return row, k.explain(ctx, err)
	}

	if !k.hold {
		// All of the instant is read; the rest needs only the disk. Only a
		// sandbox that stops must wait until the checkpoint is durable.
		if err := cs.thaw(ctx, k); err != nil {
			return row, err
		}
		if err := failpoint.Hit("checkpoint.after-thaw"); err != nil {
			return row, err
		}
	}
	stood := time.Since(frozen)
	if err := k.fileAttached(ctx, draft); err != nil {
		return row, err
	}
	if err := k.put(ctx, draft); err != nil {
		return row, err
	}
	if err := failpoint.Hit("checkpoint.before-commit"); err != nil {
		return row, err
	}
	if row, err = k.commit(ctx, draft); err != nil {
		return row, err
	}

	// From here on the checkpoint exists: failures below are reported, but nothing is
	// rolled back.
	undo.Release()
	ctx = context.WithoutCancel(ctx)
	cs.keepCaches(k)
	if row.Frozen = stood; k.hold {
		row.Frozen = time.Since(frozen)
	}

	// The caller may still have a frozen sandbox to deal with. An error in what is only
	// reported, or swept later, must not interrupt that.
	if err := errors.Join(failpoint.Hit("checkpoint.after-ready"), draft.Close(),
		cs.store.SetFrozen(ctx, row.ID, row.Frozen)); err != nil {
		cs.log.Warn("frozen time not recorded", "sandbox", k.sb.ID, "checkpoint", row.ID, "err", err)
	}
	return row, nil
}

// freeze freezes a running sandbox, and returns when; undo thaws it.
func (cs *checkpoints) freeze(ctx context.Context, k *making, undo *undo.Stack) (frozen time.Time, err error) {
	frozen = time.Now()
	if k.c.Status == runtime.Running {
		// Added first: a pause that failed half-way must be undone too.
		undo.Add(func(ctx context.Context) error { return cs.thaw(ctx, k) })
		if err := failpoint.Hit("checkpoint.before-freeze"); err != nil {
			return frozen, err
		}
		if err := k.sb.host.Pause(ctx, k.sb.ID); err != nil {
			return frozen, err
		}
		if frozen, err = cs.settle(ctx, k, frozen); err != nil {
			return frozen, err
		}
		cs.limits.liftFiles(k.spec, k.c) // writes from here on are agentbox's
	}
	if err := failpoint.Hit("checkpoint.after-freeze"); err != nil {
		return frozen, err
	}

	if k.hold && k.row.Kind == runtime.KindFull {
		if k.cut, err = criu.CutOff(k.c.Pid); err != nil {
			// A kernel without nftables: what a peer sends in the last
			// instant may be lost with its connection.
			cs.log.Warn("connections not cut before the dump", "sandbox", k.sb.ID, "err", err)
			err = nil
		}
		undo.Add(func(context.Context) error { return k.cut.End() })
	}
	return frozen, nil
}

// commit makes the checkpoint durable.
func (k *making) commit(ctx context.Context, draft *store.Draft) (row store.Checkpoint, err error) {
	k.sb.steps.Begin(runtime.PhaseSyncing, 0)
	var beside guard.WaitGroup
	defer beside.Wait() // even if the commit fails
	if k.beside != nil {
		beside.Go(func() { k.beside(ctx) })
	}
	row, err = draft.Commit(ctx, k.parts)
	beside.Wait()
	if errors.Is(err, runtime.ErrCorrupt) {
		// The file cache names pieces that the store has lost. The next checkpoint
		// reads all files again.
		err = errors.Join(err, k.dropCaches())
		k.stale = true
	}
	return row, err
}

// resume stops or thaws the sandbox after a commit.
func (cs *checkpoints) resume(ctx context.Context, k *making, row *store.Checkpoint) error {
	err := failpoint.Hit("checkpoint.after-commit")
	if err != nil {
		return errors.Join(err, k.cut.End(), cs.thaw(ctx, k))
	}
	if k.opts.Stop {
		// The network namespace, if it still exists, is the engine's again.
		if err = cs.restarts.meant(k.sb.Sandbox); err == nil {
			err = errors.Join(k.sb.host.Stop(ctx, k.sb.ID, runtime.StopOptions{Silent: true}), k.cut.End())
		}
		if err != nil {
			// Its engine failed; do not leave the sandbox frozen for that.
			err = hint(errors.Join(err, cs.thaw(ctx, k)),
				fmt.Sprintf("Checkpoint %s is ready; stop the sandbox with: agentbox stop %s",
					short(row.ID), k.sb.Name))
		}
	}
	if k.aside {
		return err
	}
	return errors.Join(err, cs.store.SetHead(ctx, k.sb.ID, row.ID, k.sb.Attempt))
}

// checkFrozen proves that the sandbox was not resumed during the capture: its files and processes
// would be of two instants.
func (k *making) checkFrozen(ctx context.Context) error {
	if k.sb.host.Properties().FilesOnly {
		return nil
	}
	want := k.c.Status
	if k.live {
		want = runtime.Paused
	}
	now, err := k.sb.host.Inspect(ctx, k.sb.ID)
	if err != nil && k.live && !errors.Is(err, runtime.ErrNotFound) {
		// Its engine does not answer; ask the OCI runtime.
		state, e2 := criu.Runtime(k.c.Runtime).State(ctx)
		if e2 != nil {
			return errors.Join(err, e2)
		}
		now, err = runtime.Container{Status: runtime.Status(state.Status), Pid: state.Pid}, nil
	}
	switch {
	case err != nil:
		return err
	case k.live && now.Pid != k.c.Pid && now.Pid != 0:
		return fmt.Errorf("%w: another program restarted it while it was being checkpointed", runtime.ErrState)
	case now.Status != want:
		return fmt.Errorf("%w: another program let it go on while it was being checkpointed: it is %s",
			runtime.ErrState, now.Status)
	}
	return nil
}

// thaw puts a frozen container back to how Inspect found it.
func (cs *checkpoints) thaw(ctx context.Context, k *making) error {
	if k.c.Status != runtime.Running || k.thawn {
		return nil
	}
	cs.limits.holdFiles(k.spec, k.c)
	err := k.sb.host.Unpause(ctx, k.sb.ID)
	if err == nil {
		k.thawn = true
		return nil
	}
	// A sandbox that has exited or was removed in the meantime needs no thawing.
	now, e2 := k.sb.host.Inspect(ctx, k.sb.ID)
	if errors.Is(e2, runtime.ErrNotFound) || e2 == nil && now.Status == runtime.Exited {
		return nil
	}
	return err
}

// explain replaces err if its real cause is that the sandbox exited or was removed during
// the capture.
func (k *making) explain(ctx context.Context, err error) error {
	now, e2 := k.sb.host.Inspect(context.WithoutCancel(ctx), k.sb.ID)
	if errors.Is(e2, runtime.ErrNotFound) {
		return fmt.Errorf("%w: it was removed while it was being checkpointed", runtime.ErrState)
	}
	if k.live && e2 == nil && now.Status == runtime.Exited {
		return fmt.Errorf("%w: it ended (exit code %d) while it was being checkpointed", runtime.ErrState, now.ExitCode)
	}
	return err
}

// workDir returns the directory in a draft where CRIU writes its log.
const workDir = "work"

// capture reads processes and files concurrently: both only read, and the sandbox is
// frozen.
func (cs *checkpoints) capture(ctx context.Context, k *making, draft *store.Draft) error {
	if err := errors.Join(k.takeManaged(), k.takeAttached(ctx, draft)); err != nil {
		return err
	}
	if k.row.Kind == runtime.KindFiles {
		return k.collect(ctx, draft, overlay.CollectOptions{})
	}
	print, err := newFootprint(k.c.Pid, k.c.Upper)
	if err != nil {
		return err
	}
	var read atomic.Bool
	var group guard.Group // no shared context: a dump that began must end
	group.Go(func() error {
		defer read.Store(true)
		return k.collect(ctx, draft, overlay.CollectOptions{Skip: print.skip, Fixed: print.known})
	})
	k.sb.steps.Begin(runtime.PhaseProcesses, 0)
	group.Go(func() (err error) {
		k.parts.Processes, err = cs.dump(ctx, k, draft)
		if !read.Load() {
			k.sb.steps.At(runtime.PhaseFiles)
		}
		if err == nil {
			err = k.checkFresh(draft.CRIUDir())
		}
		return errors.Join(err, print.erase())
	})
	if err := group.Wait(); err != nil {
		return err
	}
	return ctx.Err()
}

// dump has CRIU write the processes' images.
func (cs *checkpoints) dump(ctx context.Context, k *making, draft *store.Draft) (*store.Processes, error) {
	opts := criu.DumpOptions{
		ImageDir: draft.CRIUDir(), WorkDir: filepath.Join(draft.Dir(), workDir), LeaveRunning: true, Upper: k.c.Upper,
		Options: criu.Options{TCP: k.opts.TCP, EmptyNetwork: k.c.EmptyNetwork},
		Hold:    k.sb.lock.File(), Start: StartAside,
	}
	if deadline, ok := ctx.Deadline(); ok {
		opts.Timeout = time.Until(deadline)
	}
	res, err := criu.Dump(ctx, criu.Runtime(k.c.Runtime), opts)
	cs.interruptedWaits(k.sb.ID, res.Interrupted)
	for _, lost := range res.Lost {
		cs.log.Warn("state lost by a checkpoint", "sandbox", k.sb.ID, "what", lost)
	}
	if err != nil {
		return nil, cs.logKept(draft, err)
	}
	res.Warnings = append(res.Warnings, res.Lost...)
	if len(res.Warnings) > 0 && k.opts.Strict {
		return nil, hint(fmt.Errorf("%w: %s", runtime.ErrState, res.Warnings[0]),
			"End that process, or leave --strict away to checkpoint without it.")
	}
	k.row.Warnings = append(k.row.Warnings, res.Warnings...)
	k.parts.Warnings = k.row.Warnings
	out := &store.Processes{Count: len(res.Processes)}
	for _, p := range res.Processes {
		out.List = append(out.List, store.Process{Pid: p.Pid, Parent: p.Ppid, Command: p.Comm, Stopped: p.Stopped})
	}
	return out, failpoint.Hit("checkpoint.after-dump")
}

// logKept has the error of a dump name the path at which the failed draft keeps CRIU's log.
func (cs *checkpoints) logKept(draft *store.Draft, err error) error {
	var failed *criu.DumpError
	if errors.As(err, &failed) && failed.Log != "" {
		failed.Log = draft.KeptLog(failed.Log)
	}
	return err
}

// Checkpoints lists checkpoints, newest first.
func (v checkpointVerbs) Checkpoints(ctx context.Context, filter runtime.CheckpointFilter) ([]runtime.Checkpoint, error) {
	return verb(ctx, v.e, reads(onSandbox("checkpoint ls", filter.Sandbox)),
		func(ctx context.Context) ([]runtime.Checkpoint, error) {
			return v.e.checkpoints.listCheckpoints(ctx, filter)
		})
}

func (cs *checkpoints) listCheckpoints(
	ctx context.Context, filter runtime.CheckpointFilter,
) (_ []runtime.Checkpoint, err error) {
	defer func() { err = fail("checkpoint ls", filter.Sandbox, err) }()
	f := store.Filter{All: filter.All, Labels: filter.Labels, Trigger: filter.Trigger}
	if filter.Sandbox != "" {
		switch sb, err := cs.find(ctx, filter.Sandbox); {
		case err == nil:
			f.SandboxID = sb.ID
		case errors.Is(err, runtime.ErrNotFound):
			// A removed sandbox still has its checkpoints.
			ck, e := cs.newestOfGone(ctx, filter.Sandbox, false)
			if e != nil {
				return nil, err
			}
			f.SandboxID = ck.SandboxID
		default:
			return nil, err
		}
	}
	rows, err := cs.store.Checkpoints(ctx, f)
	if err != nil {
		return nil, err
	}
	list := make([]runtime.Checkpoint, 0, len(rows))
	for _, row := range rows {
		// Undo checkpoints are listed only with All or by their trigger.
		if row.Trigger == runtime.TriggerUndo && !filter.All && filter.Trigger != runtime.TriggerUndo {
			continue
		}
		if c := checkpointView(row); filter.Policy == "" || c.Policy == filter.Policy {
			list = append(list, c)
		}
	}
	return list, nil
}

// CheckpointInfo describes one checkpoint.
func (v checkpointVerbs) CheckpointInfo(ctx context.Context, ref string) (runtime.Checkpoint, error) {
	return verb(ctx, v.e, reads(onCheckpoint("checkpoint inspect", ref)),
		func(ctx context.Context) (runtime.Checkpoint, error) {
			row, err := v.e.checkpoint(ctx, ref)
			if err != nil {
				return runtime.Checkpoint{}, err
			}
			v.e.checkpoints.countAll(ctx, []*store.Checkpoint{&row})
			return checkpointView(row), nil
		})
}

// RemoveCheckpoint deletes a checkpoint and its data.
func (v checkpointVerbs) RemoveCheckpoint(ctx context.Context, ref string) error {
	return v.e.verb(ctx, onCheckpoint("checkpoint rm", ref), func(ctx context.Context) (err error) {
		row, err := v.e.checkpoint(ctx, ref)
		if err != nil {
			return err
		}
		lock, err := v.e.lock(ctx, row.SandboxID, "checkpoint rm", lockWait)
		if err != nil {
			return err
		}
		defer v.e.upkeep.tidy(ctx)
		defer lock.Unlock()
		return v.e.store.RemoveCheckpoint(ctx, row.ID)
	})
}

// VerifyCheckpoint rereads all of a checkpoint.
func (v checkpointVerbs) VerifyCheckpoint(ctx context.Context, ref string) error {
	return v.e.verb(ctx, onCheckpoint("checkpoint verify", ref), func(ctx context.Context) error {
		row, err := v.e.checkpoint(ctx, ref)
		if err == nil {
			err = v.e.store.VerifyCheckpoint(ctx, row.ID)
		}
		return err
	})
}

func checkpointView(row store.Checkpoint) runtime.Checkpoint {
	var attached []runtime.AttachedFile
	if row.Attached != nil {
		for _, f := range row.Attached.Paths {
			attached = append(attached, runtime.AttachedFile(f))
		}
	}
	labels := row.Labels
	if labels == nil {
		labels = map[string]string{}
	}
	view := runtime.Checkpoint{
		ID: row.ID, Name: row.Name, Sandbox: row.SandboxID, SandboxName: row.SandboxName, Kind: row.Kind,
		Status: row.Status, Error: row.Error, Parent: row.Parent, Trigger: row.Trigger,
		Message: row.Message, Policy: policyName(row.Spec), Created: row.Created,
		Files: row.Files, Processes: row.Processes, Bytes: row.Bytes, Digest: row.Digest,
		ImageDigest: row.ImageDigest, Labels: labels, Frozen: row.Frozen, Warnings: row.Warnings,
		Added: row.Added, Unchanged: row.Unchanged, Pinned: row.Pinned, Lease: row.Lease, Tags: row.Tags,
		Damaged: row.Damaged, Attached: attached, Foreign: row.Foreign,
	}
	if row.Changes != nil {
		view.Changes = (*runtime.Changes)(row.Changes)
	}
	if s, err := specOf(row.SandboxID, row.Spec); row.Foreign && err == nil {
		view.Command, view.Asks = s.Args, asks(s, row.Kind == runtime.KindFull)
	}
	return view
}
