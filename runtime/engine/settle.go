package engine

import (
	"context"
	"errors"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/criu"
	"github.com/agentbox/agentbox/runtime"
)

// instantTries is how often a dump is repeated that met a process in a transient state that
// cannot be dumped.
const instantTries = 4

// dumpAgain reports whether a failed dump should be repeated, with all that goes with it,
// because the cause of the failure is transient.
func (cs *checkpoints) dumpAgain(ctx context.Context, sb *locked, err error) bool {
	if !criu.Passing(err) || ctx.Err() != nil {
		return false
	}
	cs.log.Warn("dump repeated", "sandbox", sb.ID, "err", err)
	return true
}

// settle waits until no process of the sandbox, which was frozen at since, is in a transient
// state that cannot be dumped, and returns from when on it is frozen.
func (cs *checkpoints) settle(ctx context.Context, k *making, since time.Time) (time.Time, error) {
	if k.row.Kind != runtime.KindFull {
		return since, nil
	}
	again, err := criu.Runtime(k.c.Runtime).Settle(ctx, k.c.Pid)
	if again.IsZero() {
		again = since
	}
	return again, err
}

// pause freezes a running sandbox so that it can be dumped as it stands.
func (cs *checkpoints) pause(ctx context.Context, sb *locked, c runtime.Container) error {
	err := sb.host.Pause(ctx, sb.ID)
	if err != nil || c.Pid == 0 || sb.host.Properties().FilesOnly {
		return err
	}
	if _, err = criu.Runtime(c.Runtime).Settle(ctx, c.Pid); err == nil ||
		ctx.Err() == nil && (criu.Passing(err) || errors.Is(err, runtime.ErrBusy)) {
		return nil // it is paused, as requested
	}
	return errors.Join(err, sb.host.Unpause(context.WithoutCancel(ctx), sb.ID))
}

// timeLeft returns the time until the caller's deadline, for the restore of processes; 0: none.
func (r *processesPart) timeLeft() (time.Duration, error) {
	if r.caller == nil {
		return 0, nil
	}
	end, ok := r.caller.Deadline()
	if err := r.caller.Err(); err != nil || !ok {
		return 0, err
	}
	return max(time.Until(end), time.Second), nil
}

// callOff ends the restore of processes when its caller's context ends, until end is called.
func (r *processesPart) callOff() (end func()) {
	if r.caller == nil {
		return func() {}
	}
	place := r.c.Stage
	stop := context.AfterFunc(r.caller, func() { _ = place.CallOff() })
	return func() { stop() }
}

// breakWait is how long a verb may take to end after its CRIU was killed.
const breakWait = 30 * time.Second

// breakIn locks a sandbox that is to be removed, even if a verb is at work on it: it kills
// the CRIU of the verb that holds the lock, which makes that verb fail.
func (bx *sandboxes) breakIn(ctx context.Context, ref string, busy error) (*locked, error) {
	found, err := bx.find(ctx, ref)
	if err != nil {
		return nil, err
	}
	host, err := bx.host(found.Backend)
	if err != nil {
		return nil, err
	}
	ended := criu.EndHolders(bx.store.LockPath(found.ID))
	if bx.store.Holder(found.ID) == opRestore {
		if c, err := host.Inspect(ctx, found.ID); err == nil && c.Stage.ID != "" && c.Stage.CallOff() == nil {
			ended = true
		}
	}
	if !ended {
		return nil, busy
	}
	bx.log.Warn("verb ended for a removal", "sandbox", found.ID, "verb", bx.store.Holder(found.ID))
	return bx.acquire(ctx, ref, "rm", breakWait)
}

// atWork returns the checkpoints and restores that are under way, by sandbox.
func (bx *sandboxes) atWork(ctx context.Context) map[string]*runtime.Work {
	intents, err := bx.store.Intents(ctx)
	if err != nil {
		return nil // the list is useful without it
	}
	work := map[string]*runtime.Work{}
	for _, in := range intents {
		if in.Op != opCheckpoint && in.Op != opRestore || errors.Is(unix.Kill(in.Pid, 0), unix.ESRCH) {
			continue
		}
		work[in.Sandbox] = &runtime.Work{Verb: in.Op, Since: in.Started}
	}
	return work
}
