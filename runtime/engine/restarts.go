package engine

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/failpoint"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/internal/record"
	"github.com/agentbox/agentbox/runtime/store"
)

// restartLog records how often sandboxes were restarted, and which of them are to stay down.
type restartLog struct {
	*core

	events *eventLog
}

func comesBack(r runtime.Restart) bool { return r.Policy != "" && r.Policy != runtime.RestartNo }

// restarts is the content of ROOT/restarts/ID, which survives a reboot of the host.
type restarts struct {
	runtime.Restarts
	Row   int            `json:"row"`            // how many followed each other quickly
	Tried runtime.Moment `json:"tried,omitzero"` // the last failed restart
	Boot  string         `json:"boot,omitempty"` // the boot in which it was last started
	// Ours: a restart by policy is under way, and the owner has neither started nor
	// stopped the sandbox since it began.
	Ours bool `json:"ours,omitempty"`
}

const (
	// The pause before the first restart; it doubles with each one up to lastRestart.
	firstRestart, lastRestart = 100 * time.Millisecond, time.Minute
	// steady is how long a sandbox has to run for the pause to start over.
	steady = 10 * time.Second
)

// checkRestart refuses restart policies that are invalid or unsupported.
func checkRestart(s runtime.Spec, p runtime.Properties) error {
	r := s.Restart
	switch r.Policy {
	case "", runtime.RestartNo, runtime.RestartAlways, runtime.RestartUnlessStopped, runtime.RestartOnFailure:
	default:
		return fmt.Errorf("%w: restart policy %.40q: choose no, on-failure, always or unless-stopped",
			runtime.ErrInvalid, r.Policy)
	}
	switch {
	case r.From != "" && r.From != runtime.RestartFromCommand && r.From != runtime.RestartFromHead:
		return fmt.Errorf("%w: restart from %.40q: choose command or head", runtime.ErrInvalid, r.From)
	case r.Retries < 0 || r.Retries > 0 && r.Policy != runtime.RestartOnFailure:
		return fmt.Errorf("%w: a number of restarts is for on-failure", runtime.ErrInvalid)
	case !comesBack(r):
		return nil
	case s.AutoRemove:
		return fmt.Errorf("%w: a sandbox that is removed when it exits cannot be restarted", runtime.ErrInvalid)
	case !p.Restarts:
		return hint(fmt.Errorf("%w: backend %s has no restart policies", runtime.ErrUnsupported, p.Name),
			"Make it with the backend oci; agentbox start starts it by hand.")
	}
	return nil
}

func (l *restartLog) dir() string           { return filepath.Join(l.store.Root(), "restarts") }
func (l *restartLog) path(id string) string { return filepath.Join(l.dir(), id) }

// restartsOf reads the restart record. A corrupt one means that the sandbox was
// stopped: only a stop on a full disk overwrites the record in place.
func (l *restartLog) of(id string) (st restarts, err error) {
	err = record.ReadJSON(l.path(id), &st)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return restarts{}, nil
	case errors.Is(err, runtime.ErrCorrupt):
		return restarts{Restarts: runtime.Restarts{
			Stopped: true, Error: "how often it was restarted is not known any more: start it with agentbox start",
		}}, nil
	}
	return st, err
}

func (l *restartLog) note(id string, st restarts) error {
	if err := os.MkdirAll(l.dir(), 0o700); err != nil {
		return err
	}
	path := l.path(id)
	err := record.WriteJSON(path, st, true)
	if errors.Is(err, unix.ENOSPC) && st.Stopped {
		// A full disk must not prevent a stop, nor undo it by a restart. Overwriting one
		// byte in the file's existing block is enough.
		if f, e2 := os.OpenFile(path, os.O_WRONLY|unix.O_NOFOLLOW, 0); e2 == nil {
			_, e2 = f.WriteAt([]byte("-"), 0)
			if errors.Join(e2, f.Sync(), f.Close()) == nil {
				err = nil
			}
		}
	}
	return err
}

func (l *restartLog) forget(id string) error {
	err := ignoreMissing(os.Remove(l.path(id)))
	_ = os.Remove(l.dir()) // stays while there are others
	return err
}

// begun records that a sandbox has come up. A start by its owner, rather than by its
// restart policy, resets the count.
func (l *restartLog) begun(s runtime.Spec) error {
	if !comesBack(s.Restart) {
		return l.forget(s.ID)
	}
	st, err := l.of(s.ID)
	if err != nil {
		return err
	}
	if !st.Ours {
		st = restarts{}
	}
	st.Ours, st.Stopped, st.GivenUp, st.Error, st.Tried, st.Boot = false, false, false, "", runtime.Moment{}, bootID()
	return l.note(s.ID, st)
}

// meant records, before a sandbox is ended, that the end is intended.
func (l *restartLog) meant(sb store.Sandbox) error {
	s, err := spec(sb)
	if err != nil {
		return err
	}
	return l.staysDown(s, false)
}

// staysDown records that a sandbox that ends is not started again. ours: the caller is
// part of a restart that is under way; otherwise the owner takes over from the restart.
func (l *restartLog) staysDown(s runtime.Spec, ours bool) error {
	if !comesBack(s.Restart) {
		return nil
	}
	st, err := l.of(s.ID)
	if err != nil {
		return err
	}
	st.Stopped, st.Ours = true, st.Ours && ours
	return l.note(s.ID, st)
}

// comesBack reports whether a sandbox that has ended is to be started again, and
// returns its restart record. A sandbox that is on hold, or whose lease is over, is not.
func (sv *supervisor) comesBack(
	ctx context.Context, sb store.Sandbox, s runtime.Spec, c runtime.Container,
) (back bool, st restarts, err error) {
	if !comesBack(s.Restart) || c.Status != runtime.Exited || expired(s.Lifetime) || sb.Held != "" {
		return false, st, nil
	}
	if sb.Lease != "" {
		if l, err := sv.store.Lease(ctx, sb.Lease); errors.Is(err, runtime.ErrNotFound) ||
			err == nil && l.State != store.LeaseActive {
			return false, st, nil
		} else if err != nil {
			return false, st, err
		}
	}
	if st, err = sv.restarts.of(s.ID); err != nil {
		return false, st, err
	}
	switch s.Restart.Policy {
	case runtime.RestartAlways:
		back = !st.Stopped || st.rebooted()
	case runtime.RestartUnlessStopped:
		back = !st.Stopped
	case runtime.RestartOnFailure: // a reboot of the host is not its failure
		back = !st.Stopped && !st.rebooted() && c.ExitCode != 0 &&
			(s.Restart.Retries == 0 || st.Count < s.Restart.Retries)
	}
	return back, st, nil
}

// rebooted reports whether the host was rebooted since the sandbox was last started.
func (st restarts) rebooted() bool { return st.Boot != "" && st.Boot != bootID() }

// fast counts the quick restarts in a row before the next one.
func (st restarts) fast(c runtime.Container) int {
	if st.Tried == (runtime.Moment{}) && c.Finished.Sub(c.Started) >= steady {
		return 0
	}
	return st.Row
}

// pause returns how long the next restart must still wait. seen is how long, at least,
// the sandbox has been over. The wall clock may say that it was longer; a clock that was
// set back delays nothing.
func (st restarts) pause(c runtime.Container, seen time.Duration) time.Duration {
	tried := st.Tried != (runtime.Moment{})
	if st.rebooted() && !tried {
		return 0
	}
	pause := lastRestart
	if row := st.fast(c); row < 10 {
		pause = min(firstRestart<<row, lastRestart)
	}
	past := max(seen, time.Since(c.Finished))
	if tried {
		past = age(st.Tried)
	}
	return max(0, pause-past)
}

// restart starts a sandbox that ended at finished, if that is still due once its lock
// is held: a stop, removal or start in the meantime takes precedence.
func (sv *supervisor) restart(ctx context.Context, id string, finished time.Time) (err error) {
	defer func() { err = fail("restart", id, err) }()
	sb, s, c, err := sv.limits.overdue(ctx, id)
	if err != nil {
		return err
	}
	back, st, err := sv.comesBack(ctx, sb.Sandbox, s, c)
	if err != nil || !back || !c.Finished.Equal(finished) {
		sb.lock.Unlock()
		return err
	}
	st.Ours, st.Count, st.LastExit, st.LastEnd, st.Row = true, st.Count+1, c.ExitCode, c.Finished, st.fast(c)+1
	if err = sv.restarts.note(id, st); err == nil {
		err = failpoint.Hit("restart.after-note")
	}
	if err != nil {
		sb.lock.Unlock()
		return err
	}
	if err := sv.bringBack(ctx, sb, s, fmt.Sprintf("restart policy %s: it had ended with exit code %d",
		s.Restart.Policy, c.ExitCode)); err != nil {
		sv.log.Error("sandbox not restarted", "sandbox", id, "count", st.Count, "err", err)
		return sv.notRestarted(ctx, id, st.Stopped, err)
	}
	sv.log.Info("sandbox restarted", "sandbox", id, "exit", c.ExitCode, "count", st.Count)
	return sv.events.note(id, runtime.Event{
		Time: time.Now(), Type: runtime.EventRestarted, Exit: &c.ExitCode, Count: int64(st.Count),
	})
}

// notRestarted records why a restart has failed. The restart has released the sandbox's
// lock, so a verb that has held it since takes precedence. stopped is the recorded value
// from before the restart, which may itself have set it, as a restore does.
func (sv *supervisor) notRestarted(ctx context.Context, id string, stopped bool, cause error) error {
	ctx = context.WithoutCancel(ctx)
	lock, err := sv.lock(ctx, id, opWatch, lockWait)
	if err != nil {
		return err
	}
	defer lock.Unlock()
	if _, err := sv.store.Sandbox(ctx, id); err != nil {
		return err // it was removed; leave no record behind
	}
	st, err := sv.restarts.of(id)
	if err != nil || !st.Ours {
		return err
	}
	st.Ours, st.Stopped, st.Error, st.Tried = false, stopped, cause.Error(), thisMoment()
	if !isCalledOff(cause) {
		return sv.restarts.note(id, st)
	}
	// A failing undo command must not run over and over unattended.
	st.Stopped, st.GivenUp = true, true
	return errors.Join(sv.restarts.note(id, st), sv.events.note(id,
		runtime.Event{Time: time.Now(), Type: runtime.EventGivenUp, Total: int64(st.Count), Reason: cause.Error()}))
}

// bringBack restarts a sandbox, whose lock it takes over, from its command or its head
// checkpoint, as its policy says.
func (sv *supervisor) bringBack(ctx context.Context, sb *locked, s runtime.Spec, why string) error {
	if s.Restart.From == runtime.RestartFromHead {
		_, err := sv.restores.choose(ctx, sb.Sandbox, "", false, false)
		if err == nil {
			var out runtime.Restored
			op := runtime.ByItself("restore", subjectOf(sb.Sandbox), runtime.Own{By: runtime.ByWatch, Why: why})
			err = sv.observed(ctx, op, func(ctx context.Context) (err error) {
				out, err = sv.restores.restoreLocked(ctx, sb.ID, sb, runtime.RestoreOptions{NoUndo: true})
				op.Result = out
				return err
			})
			sb.lock.Unlock() // in case restoreLocked was not reached
			if now := out.Sandbox.Status; err != nil || now == runtime.Running || now == runtime.Paused {
				return err
			}
			return sv.startRestored(ctx, sb.ID, why) // the checkpoint is of a stopped sandbox
		}
		if !errors.Is(err, runtime.ErrNotFound) {
			sb.lock.Unlock()
			return err
		}
		// There is no checkpoint yet.
	}
	return sv.startAgain(ctx, sb, why)
}

// startAgain starts a sandbox, whose lock it takes over, for its restart policy.
func (sv *supervisor) startAgain(ctx context.Context, sb *locked, why string) error {
	defer sb.lock.Unlock() // in case start, which also unlocks, is not reached
	op := runtime.ByItself("start", subjectOf(sb.Sandbox), runtime.Own{By: runtime.ByWatch, Why: why})
	return sv.observed(ctx, op, func(ctx context.Context) error {
		_, err := sv.sandboxes.start(ctx, sb, nil)
		return err
	})
}

// startRestored starts a sandbox that a restart has restored, unless its owner has
// started or stopped it in the meantime.
func (sv *supervisor) startRestored(ctx context.Context, id, why string) error {
	sb, err := sv.acquire(ctx, id, opWatch, lockWait)
	if err != nil {
		return err
	}
	st, err := sv.restarts.of(id)
	if err == nil && !st.Ours {
		err = fmt.Errorf("%w: it was stopped or started meanwhile", runtime.ErrState)
	}
	if err != nil {
		sb.lock.Unlock()
		return err
	}
	return sv.startAgain(ctx, sb, why)
}

// restartLimits reports whether the end of a sandbox counts against its retry limit.
func restartLimits(r runtime.Restart, c runtime.Container) bool {
	return r.Policy == runtime.RestartOnFailure && r.Retries > 0 && c.Status == runtime.Exited && c.ExitCode != 0
}

// whileOver calls fn with the lock of a sandbox that ended at finished, if it has not
// been started since. same reports whether fn was called. Interrupted verbs are
// recovered first.
func (sv *supervisor) whileOver(
	ctx context.Context, id string, finished time.Time, fn func(*locked) error,
) (same bool, err error) {
	if err := sv.recovery.recoverBy(ctx, runtime.ByWatch); err != nil {
		return false, err
	}
	sb, _, c, err := sv.limits.overdue(ctx, id)
	if err != nil {
		return false, err
	}
	defer sb.lock.Unlock()
	if c.Status != runtime.Exited || !c.Finished.Equal(finished) {
		return false, nil
	}
	return true, fn(sb)
}

// giveUp records that a sandbox, whose lock is held, has used up its retries.
func (l *restartLog) giveUp(s runtime.Spec, c runtime.Container) error {
	st, err := l.of(s.ID)
	if err != nil || st.Stopped || st.GivenUp || st.Count < s.Restart.Retries {
		return err
	}
	st.GivenUp = true
	return errors.Join(l.note(s.ID, st), l.events.note(s.ID,
		runtime.Event{Time: time.Now(), Type: runtime.EventGivenUp, Exit: &c.ExitCode, Total: int64(st.Count)}))
}
