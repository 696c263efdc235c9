package engine

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/criu"
	"github.com/agentbox/agentbox/internal/guard"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/store"
)

// The verbs that leave an intent in the journal.
const (
	opCreate     = "create"
	opStart      = "start"
	opCheckpoint = "checkpoint"
	opRestore    = "restore"
	opRemove     = "rm"
	opApply      = "apply"
	opCommit     = "commit"
	opUpdate     = "update"
	opUndoPaths  = "undo-paths"
)

// recoverWait is how long recovery waits for the lock of an interrupted verb: a
// dump that outlives the agentbox that began it keeps the lock and must end by
// itself, because killing CRIU half-way harms the processes it works on.
const recoverWait = 30 * time.Second

// recovery finishes or takes back verbs that were interrupted, and reconciles the records with the host.
type recovery struct {
	*core

	events      *eventLog
	effects     *effectLog
	restarts    *restartLog
	marks       *marks
	sandboxes   *sandboxes
	checkpoints *checkpoints
	restores    *restores
	leases      *leases
	supervisor  *supervisor

	last reconciled // findings of the last Reconcile; under mu
}

// RecoverInterrupted rolls each verb that was killed half-way forward or back.
// A verb whose process lives is left alone. It is quick when there is nothing
// to do, so every command calls it first.
func (e *Engine) RecoverInterrupted(ctx context.Context) (runtime.Recovery, error) {
	return e.recovery.recoverFor(ctx, runtime.Own{Alone: true})
}

// recoverFor is RecoverInterrupted, recorded as as says.
func (rec *recovery) recoverFor(ctx context.Context, as runtime.Own) (runtime.Recovery, error) {
	var done runtime.Recovery
	intents, err := rec.store.Intents(ctx)
	if err != nil {
		return done, fail("recover", "", err)
	}
	var errs []error
	for _, in := range intents {
		if rec.underWay(in.Seq) {
			continue
		}
		// looked up now: nothing of it may be left afterwards
		about := rec.subject(ctx, in.Sandbox, runtime.AboutSandbox)
		about.Sandbox = in.Sandbox
		var did string
		err := guard.Do(func() (err error) { // an intent that cannot be finished does not block the others
			did, err = rec.finish(ctx, in)
			return err
		})
		if did != "" {
			done.Actions = append(done.Actions, did)
			rec.log.Warn("verb recovered", "sandbox", in.Sandbox, "verb", in.Op, "action", did)
			own := as
			own.Why, own.Did, own.Past = fmt.Sprintf("its %s was interrupted", in.Op), []string{did}, true
			_ = rec.observed(ctx, runtime.ByItself("recover", about, own), func(context.Context) error { return err })
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("%s of %s: %w", in.Op, short(in.Sandbox), err))
		}
	}
	did, err := rec.sandboxes.freeUnstarted(ctx, as)
	freed, left := rec.freeMounts()
	for _, text := range freed {
		rec.log.Warn("mount recovered", "action", text)
	}
	done.Actions = slices.Concat(done.Actions, did, freed)
	return done, fail("recover", "", errors.Join(append(errs, err, left)...))
}

// interrupted locks an intent's sandbox if no process works on it; otherwise the lock
// is nil. A verb holds the lock from before it writes its intent until after it has
// removed it, so an intent whose lock is free was abandoned.
func (rec *recovery) interrupted(ctx context.Context, in store.Intent) (*store.Lock, error) {
	lock, err := rec.store.Lock(ctx, in.Sandbox, "recover", 0)
	if errors.Is(err, runtime.ErrBusy) && errors.Is(unix.Kill(in.Pid, 0), unix.ESRCH) {
		// A child of the killed process is still at work, or its CRIU left an orphan.
		if err := criu.Sweep(); err != nil {
			rec.log.Warn("orphans of CRIU not ended", "error", err)
		}
		defer rec.assistDump(ctx, in)()
		lock, err := rec.store.Lock(ctx, in.Sandbox, "recover", recoverWait)
		if errors.Is(err, runtime.ErrBusy) && criu.EndHolders(rec.store.LockPath(in.Sandbox)) {
			rec.log.Warn("abandoned dump ended", "sandbox", in.Sandbox)
			lock, err = rec.store.Lock(ctx, in.Sandbox, "recover", recoverWait)
		}
		return lock, err
	}
	if errors.Is(err, runtime.ErrBusy) {
		return nil, nil
	}
	return lock, err
}

// assistDump helps the dump of a killed verb over stopped processes, until end is
// called.
func (rec *recovery) assistDump(ctx context.Context, in store.Intent) (end func()) {
	host, err := rec.hostOf(ctx, in)
	if err != nil {
		return func() {}
	}
	c, err := host.Inspect(ctx, in.Sandbox)
	if err != nil || c.Pid == 0 {
		return func() {} // no dump is under way any more
	}
	return criu.AssistHolders(rec.store.LockPath(in.Sandbox), c.Pid)
}

// finish finishes one interrupted verb or rolls it back.
func (rec *recovery) finish(ctx context.Context, in store.Intent) (did string, err error) {
	lock, err := rec.interrupted(ctx, in)
	if err != nil || lock == nil {
		return "", err
	}
	defer lock.Unlock()
	// Another process may have recovered it while we waited.
	in, ok, err := rec.pending(ctx, in.Seq)
	if err != nil || !ok {
		return "", err
	}
	host, err := rec.hostOf(ctx, in)
	if err != nil {
		return "", err
	}

	switch in.Op {
	case opCreate:
		did, err = rec.finishCreate(ctx, in, host)
	case opStart:
		did, err = rec.finishStart(ctx, in, host)
	case opCheckpoint:
		did, err = rec.finishCheckpoint(ctx, in, host)
	case opRestore:
		var unsure string
		if unsure, err = rec.effects.unsureEffects(ctx, in.Sandbox); err == nil {
			did, err = rec.finishRestore(ctx, in, host, lock)
		}
		if did != "" {
			did += unsure
		}
	case opUndoPaths:
		did, err = rec.finishUndoPaths(ctx, in, host, lock)
	case opCommit:
		did, err = rec.checkpoints.finishCommit(ctx, in)
	case opApply:
		did, err = finishApply(ctx, in, host, &workspaces{core: rec.core})
	case opUpdate:
		did, err = rec.sandboxes.finishUpdate(ctx, in, host)
	case opRemove:
		var checkpoints bool
		if _, checkpoints, err = rec.sandboxes.removals(ctx, in.Sandbox); err == nil {
			if err = rec.sandboxes.finishRemove(ctx, host, in.Sandbox, checkpoints); err == nil {
				err = rec.sandboxes.dropBase(ctx, in.Sandbox)
			}
			did, err = unless(err, "finished the removal of sandbox %s", short(in.Sandbox))
		}
	default:
		return "", fmt.Errorf("%w: the journal names a verb %q that this version does not know",
			runtime.ErrUnsupported, in.Op)
	}
	if err != nil {
		return did, err
	}
	if in.Op == opStart || in.Op == opRestore {
		if err := rec.attend(ctx, in.Sandbox, host); err != nil {
			return did, err
		}
	}
	return did, rec.store.Done(ctx, in.Seq)
}

// unless returns err or, if it is nil, a sentence that says what was done.
func unless(err error, did string, args ...any) (string, error) {
	if err != nil {
		return "", err
	}
	return fmt.Sprintf(did, args...), nil
}

// attend has a sandbox supervised that came up although its start was killed.
func (rec *recovery) attend(ctx context.Context, id string, host Host) error {
	sb, err := rec.store.Sandbox(ctx, id)
	if errors.Is(err, runtime.ErrNotFound) {
		return nil
	}
	if err != nil {
		return err
	}
	s, err := spec(sb)
	if err != nil || !supervised(s) {
		return err
	}
	c, err := host.Inspect(ctx, id)
	if err == nil && (c.Status == runtime.Running || c.Status == runtime.Paused) {
		rec.supervisor.enforce(s, c)
	}
	if errors.Is(err, runtime.ErrNotFound) {
		return nil
	}
	return err
}

// interruptedIn reports whether a sandbox has an interrupted verb.
func (e *core) interruptedIn(ctx context.Context, id string) (bool, error) {
	intents, err := e.store.Intents(ctx)
	for _, in := range intents {
		if in.Sandbox == id {
			return true, err
		}
	}
	return false, err
}

func (rec *recovery) pending(ctx context.Context, seq int64) (store.Intent, bool, error) {
	intents, err := rec.store.Intents(ctx)
	if err != nil {
		return store.Intent{}, false, err
	}
	for _, in := range intents {
		if in.Seq == seq {
			return in, true, nil
		}
	}
	return store.Intent{}, false, nil
}

// hostOf returns the backend of an interrupted verb's sandbox. For a sandbox without a record
// it is the backend that the verb noted.
func (e *core) hostOf(ctx context.Context, in store.Intent) (Host, error) {
	sb, err := e.store.Sandbox(ctx, in.Sandbox)
	if err == nil {
		return e.host(sb.Backend)
	}
	if !errors.Is(err, runtime.ErrNotFound) {
		return Host{}, err
	}
	noted, err := decode[creating](in.Data)
	if err != nil {
		return Host{}, err
	}
	return e.host(cmp.Or(noted.Backend, "oci"))
}

func (rec *recovery) finishCreate(ctx context.Context, in store.Intent, host Host) (string, error) {
	data, err := decode[creating](in.Data)
	if err != nil {
		return "", err
	}
	if err := host.Remove(ctx, in.Sandbox); err != nil {
		return "", err
	}
	if data.Base != "" {
		if _, err = rec.store.FinishPending(ctx, data.Base); err == nil {
			err = rec.store.RemoveCheckpoint(ctx, data.Base)
		}
		if err != nil {
			return "", err
		}
	}
	return unless(rec.store.DeleteSandbox(ctx, in.Sandbox), "took back the half-made sandbox %s", short(in.Sandbox))
}

// finishStart keeps a sandbox that came up, and stops one that did not.
func (rec *recovery) finishStart(ctx context.Context, in store.Intent, host Host) (string, error) {
	c, err := host.Inspect(ctx, in.Sandbox)
	if errors.Is(err, runtime.ErrNotFound) {
		return "", nil
	}
	if err != nil {
		return "", err
	}
	if c.Status == runtime.Running || c.Status == runtime.Paused {
		// A restart has marked it as kept.
		return unless(rec.store.Keep(ctx, in.Sandbox, false), "sandbox %s had started", short(in.Sandbox))
	}
	return unless(host.Stop(ctx, in.Sandbox, runtime.StopOptions{}),
		"took back the half-done start of sandbox %s", short(in.Sandbox))
}

// finishCheckpoint thaws the sandbox that the killed verb froze. A checkpoint that is
// durable is made ready; another one is removed.
func (rec *recovery) finishCheckpoint(ctx context.Context, in store.Intent, host Host) (string, error) {
	data, err := decode[freezing](in.Data)
	if err != nil {
		return "", err
	}
	thawed := ""
	if !data.Stop {
		if thawed, err = rec.letGo(ctx, host, in.Sandbox, data.Was, false); err != nil {
			return "", err
		}
		data.Was = runtime.Unknown // a later pause is the user's
		if err := rec.advance(ctx, in.Seq, data, true); err != nil {
			return "", err
		}
	}
	ready, err := rec.store.FinishPending(ctx, in.Checkpoint)
	if err != nil {
		return "", err
	}
	did := fmt.Sprintf("took back the half-made checkpoint %s", short(in.Checkpoint))
	if ready {
		did = fmt.Sprintf("checkpoint %s was complete", short(in.Checkpoint))
		sb, err := rec.store.Sandbox(ctx, in.Sandbox)
		if err == nil {
			err = rec.store.SetHead(ctx, sb.ID, in.Checkpoint, sb.Attempt)
		}
		if err == nil && data.Stop {
			err = rec.restarts.meant(sb) // its restart policy must not start it again
		}
		if err != nil && !errors.Is(err, runtime.ErrNotFound) {
			return did, err
		}
	}
	if ready && data.Stop {
		return did, host.Stop(ctx, in.Sandbox, runtime.StopOptions{Silent: true})
	}
	if data.Stop { // only now that it is clear that it does not end
		thawed, err = rec.letGo(ctx, host, in.Sandbox, data.Was, true)
	}
	return did + thawed, err
}

// letGo resumes a sandbox that a killed verb has frozen, and may have cut off its network.
// It comes first, because the rest of recovery may have to wait, or fail.
func (rec *recovery) letGo(
	ctx context.Context, host Host, id string, was runtime.Status, cut bool,
) (did string, err error) {
	c, err := host.Inspect(ctx, id)
	if errors.Is(err, runtime.ErrNotFound) {
		return "", nil
	}
	if err != nil {
		return "", err
	}
	if cut && c.Pid != 0 {
		err = criu.Reconnect(c.Pid)
	}
	if c.Runtime.ID != "" && c.Pid != 0 {
		err = errors.Join(err, criu.Runtime(c.Runtime).Abandon(c.Pid))
	}
	if c.Status == runtime.Paused && c.Runtime.ID != "" {
		rec.checkpoints.interruptedWaits(id, criu.Runtime(c.Runtime).ContinueWaits(ctx, c.Pid))
	}
	if c.Runtime.ID != "" && c.Pid != 0 {
		lost, e2 := criu.Runtime(c.Runtime).PutBack(ctx, was == runtime.Paused)
		for _, what := range lost {
			rec.log.Warn("state lost by an interrupted checkpoint", "sandbox", id, "what", what)
		}
		err = errors.Join(err, e2)
	}
	if was == runtime.Running && c.Status == runtime.Paused {
		did, err = " and thawed its sandbox", errors.Join(err, host.Unpause(ctx, id))
	}
	return did, err
}

// interruptedWaits logs why processes of a resumed sandbox may see EINTR.
func (cs *checkpoints) interruptedWaits(id string, err error) {
	if err != nil && !errors.Is(err, runtime.ErrNotFound) {
		cs.log.Warn("waiting system calls may return EINTR", "sandbox", id, "err", err)
	}
}

// finishRestore rolls back a restore that had not changed the sandbox yet, and finishes all
// others. It restores again an upperdir that differs from the checkpoint, because it was in
// use already or because a power cut lost unwritten data.
func (rec *recovery) finishRestore(ctx context.Context, in store.Intent, host Host, lock *store.Lock) (string, error) {
	data, err := decode[restoring](in.Data)
	if err != nil {
		return "", err
	}
	if data.Phase == phaseHosts {
		return rec.finishHosts(ctx, in, host, lock, data)
	}
	c, err := host.Inspect(ctx, in.Sandbox)
	if err != nil && !errors.Is(err, runtime.ErrNotFound) {
		return "", err
	}
	unlock, err := lockSlot(c)
	if err != nil {
		return "", err
	}
	defer unlock()
	if c.Stage.ID != "" {
		if err := c.Stage.Clear(); err != nil {
			return "", err
		}
	}
	if data.Fork {
		// Its origin is untouched, and no caller has been told of the fork yet.
		return unless(rec.sandboxes.finishRemove(ctx, host, in.Sandbox, false),
			"took back the half-made fork %s", short(in.Sandbox))
	}
	own, foreign := data.own(c)
	untouched, err := data.untouched()
	if err != nil {
		return "", err
	}
	if untouched {
		data.Phase = phasePrepare
	}

	if data.Phase == phasePrepare {
		switch {
		case data.Recreated:
			err = rec.sandboxes.finishRemove(ctx, host, in.Sandbox, false)
		case len(data.Trees) == 0:
			return "", nil
		default:
			data.Trees = own
			err = rec.takeBack(ctx, in, host, data)
		}
		return unless(err, "took back the half-done restore of sandbox %s", short(in.Sandbox))
	}
	if foreign != "" {
		return "", hint(
			fmt.Errorf("%w: the journal has it change %s, which is not the sandbox's", runtime.ErrCorrupt, foreign),
			"Remove the sandbox, whose checkpoints stay, and restore one of these: agentbox rm "+short(in.Sandbox))
	}
	did := fmt.Sprintf("finished the restore of sandbox %s to checkpoint %s", short(in.Sandbox), short(in.Checkpoint))
	told, err := rec.finishSwap(ctx, in, host, lock, data)
	if errors.Is(err, errUnfinished) {
		return "", err // its engine has failed; the intent stays
	}

	if err != nil {
		// Try only once: then the sandbox stays stopped, with its present files, and
		// its owner decides. An attempt at every command would stop the sandbox each
		// time it was started.
		did = fmt.Sprintf("could not finish the restore of sandbox %s to checkpoint %s: %v", short(in.Sandbox),
			short(in.Checkpoint), err)
		if len(data.Trees) > 0 && data.Trees[0].Displaced() != "" {
			did += "; what it had replaced lies in " + data.Trees[0].Displaced()
		}
		if n := len(data.HostFiles); n > 0 {
			did += fmt.Sprintf("; its host files (%d) are as they were", n)
		}
		return did, errors.Join(data.discard(false), os.RemoveAll(rec.store.StagedImages(in.Sandbox)),
			rec.store.Keep(ctx, in.Sandbox, true))
	}
	if !data.thisBoot() && c.Status != runtime.Running && c.Status != runtime.Paused {
		did += "; what ran at the checkpoint is not started any more, because the host was restarted since"
	}
	return did + told, nil
}

// takeBack undoes a restore that had only frozen the sandbox.
func (rec *recovery) takeBack(ctx context.Context, in store.Intent, host Host, data restoring) error {
	if _, err := rec.letGo(ctx, host, in.Sandbox, data.Was, true); err != nil {
		return err
	}
	data.Was = runtime.Unknown // a later pause is the user's
	if err := rec.advance(ctx, in.Seq, data, true); err != nil {
		return err
	}
	ready, err := rec.store.FinishPending(ctx, data.Undo)
	if err == nil && ready {
		err = rec.store.RemoveCheckpoint(ctx, data.Undo)
	}
	return errors.Join(err, data.discard(true), os.RemoveAll(rec.store.StagedImages(in.Sandbox)))
}

// finishSwap finishes a restore that was killed after it began to swap files. It returns the
// report about its host files.
func (rec *recovery) finishSwap(
	ctx context.Context, in store.Intent, host Host, lock *store.Lock, data restoring,
) (told string, err error) {
	sb, err := rec.store.Sandbox(ctx, in.Sandbox)
	if err != nil {
		return "", err
	}
	r := rec.restores.newRestoration(&locked{Sandbox: sb, host: host, lock: lock}, data)
	r.resumed, r.seq = true, in.Seq
	if r.spec, err = spec(sb); err != nil {
		return "", err
	}
	if r.row, err = rec.store.Checkpoint(ctx, in.Checkpoint); err != nil {
		return "", err
	}
	if err := rec.restores.open(ctx, r); err != nil {
		return "", err
	}
	defer r.reader.Close()
	if row, err := rec.store.Checkpoint(ctx, data.Undo); err == nil && row.Status == store.Ready {
		r.files.undone = row.ID
	}
	err = r.run(ctx)
	return r.attached.report, err
}

// recoverBy is RecoverInterrupted, recorded as an action of a part of agentbox.
func (rec *recovery) recoverBy(ctx context.Context, by string) error {
	_, err := rec.recoverFor(ctx, runtime.Own{By: by})
	return err
}
