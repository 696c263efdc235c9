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
		return fmt.Errorf("%w: restart policy %.40q: choose no, on-failure, always or unless-stopped", runtime.ErrInvalid, r.Policy)
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
		return hint(fmt.Errorf("%w: backend %s has no restart policies", runtime.ErrUnsupported, p.Name), "Make it with the backend oci; agentbox start starts it by hand.")
	}
	return nil
}

func (e *Engine) restartsDir() string           { return filepath.Join(e.store.Root(), "restarts") }
func (e *Engine) restartsPath(id string) string { return filepath.Join(e.restartsDir(), id) }

// restartsOf reads the restart record. A corrupt one means that the sandbox was
// stopped: only a stop on a full disk overwrites the record in place.
func (e *Engine) restartsOf(id string) (st restarts, err error) {
	err = record.ReadJSON(e.restartsPath(id), &st)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return restarts{}, nil
	case errors.Is(err, runtime.ErrCorrupt):
		return restarts{Restarts: runtime.Restarts{Stopped: true, Error: "how often it was restarted is not known any more: start it with agentbox start"}}, nil
	}
	return st, err
}

func (e *Engine) noteRestarts(id string, st restarts) error {
	if err := os.MkdirAll(e.restartsDir(), 0o700); err != nil {
		return err
	}
	path := e.restartsPath(id)
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

func (e *Engine) forgetRestarts(id string) error {
	err := ignoreMissing(os.Remove(e.restartsPath(id)))
	_ = os.Remove(e.restartsDir()) // stays while there are others
	return err
}

// begun records that a sandbox has come up. A start by its owner, rather than by its
// restart policy, resets the count.
func (e *Engine) begun(s runtime.Spec) error {
	if !comesBack(s.Restart) {
		return e.forgetRestarts(s.ID)
	}
	st, err := e.restartsOf(s.ID)
	if err != nil {
		return err
	}
	if !st.Ours {
		st = restarts{}
	}
	st.Ours, st.Stopped, st.GivenUp, st.Error, st.Tried, st.Boot = false, false, false, "", runtime.Moment{}, bootID()
	return e.noteRestarts(s.ID, st)
}

// meant records, before a sandbox is ended, that the end is intended.
func (e *Engine) meant(sb store.Sandbox) error {
	s, err := spec(sb)
	if err != nil {
		return err
	}
	return e.staysDown(s, false)
}

// staysDown records that a sandbox that ends is not started again. ours: the caller is
// part of a restart that is under way; otherwise the owner takes over from the restart.
func (e *Engine) staysDown(s runtime.Spec, ours bool) error {
	if !comesBack(s.Restart) {
		return nil
	}
	st, err := e.restartsOf(s.ID)
	if err != nil {
		return err
	}
	st.Stopped, st.Ours = true, st.Ours && ours
	return e.noteRestarts(s.ID, st)
}

// comesBack reports whether a sandbox that has ended is to be started again, and
// returns its restart record. A sandbox that is on hold, or whose lease is over, is not.
func (e *Engine) comesBack(ctx context.Context, sb store.Sandbox, s runtime.Spec, c runtime.Container) (back bool, st restarts, err error) {
	if !comesBack(s.Restart) || c.Status != runtime.Exited || expired(s.Lifetime) || sb.Held != "" {
		return false, st, nil
	}
	if sb.Lease != "" {
		if l, err := e.store.Lease(ctx, sb.Lease); errors.Is(err, runtime.ErrNotFound) || err == nil && l.State != store.LeaseActive {
			return false, st, nil
		} else if err != nil {
			return false, st, err
		}
	}
	if st, err = e.restartsOf(s.ID); err != nil {
		return false, st, err
	}
	switch s.Restart.Policy {
	case runtime.RestartAlways:
		back = !st.Stopped || st.rebooted()
	case runtime.RestartUnlessStopped:
		back = !st.Stopped
	case runtime.RestartOnFailure: // a reboot of the host is not its failure
		back = !st.Stopped && !st.rebooted() && c.ExitCode != 0 && (s.Restart.Retries == 0 || st.Count < s.Restart.Retries)
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
func (e *Engine) restart(ctx context.Context, id string, finished time.Time) (err error) {
	defer func() { err = fail("restart", id, err) }()
	sb, s, c, err := e.overdue(ctx, id)
	if err != nil {
		return err
	}
	back, st, err := e.comesBack(ctx, sb.Sandbox, s, c)
	if err != nil || !back || !c.Finished.Equal(finished) {
		sb.lock.Unlock()
		return err
	}
	st.Ours, st.Count, st.LastExit, st.LastEnd, st.Row = true, st.Count+1, c.ExitCode, c.Finished, st.fast(c)+1
	if err = e.noteRestarts(id, st); err == nil {
		err = failpoint.Hit("restart.after-note")
	}
	if err != nil {
		sb.lock.Unlock()
		return err
	}
	if err := e.bringBack(ctx, sb, s, fmt.Sprintf("restart policy %s: it had ended with exit code %d", s.Restart.Policy, c.ExitCode)); err != nil {
		e.log.Error("sandbox not restarted", "sandbox", id, "count", st.Count, "err", err)
		return e.notRestarted(ctx, id, st.Stopped, err)
	}
	e.log.Info("sandbox restarted", "sandbox", id, "exit", c.ExitCode, "count", st.Count)
	return e.note(id, runtime.Event{Time: time.Now(), Type: runtime.EventRestarted, Exit: &c.ExitCode, Count: int64(st.Count)})
}

// notRestarted records why a restart has failed. The restart has released the sandbox's
// lock, so a verb that has held it since takes precedence. stopped is the recorded value
// from before the restart, which may itself have set it, as a restore does.
func (e *Engine) notRestarted(ctx context.Context, id string, stopped bool, cause error) error {
	ctx = context.WithoutCancel(ctx)
	lock, err := e.lock(ctx, id, opWatch, lockWait)
	if err != nil {
		return err
	}
	defer lock.Unlock()
	if _, err := e.store.Sandbox(ctx, id); err != nil {
		return err // it was removed; leave no record behind
	}
	st, err := e.restartsOf(id)
	if err != nil || !st.Ours {
		return err
	}
	st.Ours, st.Stopped, st.Error, st.Tried = false, stopped, cause.Error(), thisMoment()
	if !isCalledOff(cause) {
		return e.noteRestarts(id, st)
	}
	// A failing undo command must not run over and over unattended.
	st.Stopped, st.GivenUp = true, true
	return errors.Join(e.noteRestarts(id, st), e.note(id, runtime.Event{Time: time.Now(), Type: runtime.EventGivenUp, Total: int64(st.Count), Reason: cause.Error()}))
}

// bringBack restarts a sandbox, whose lock it takes over, from its command or its head
// checkpoint, as its policy says.
func (e *Engine) bringBack(ctx context.Context, sb *locked, s runtime.Spec, why string) error {
	if s.Restart.From == runtime.RestartFromHead {
		_, err := e.choose(ctx, sb.Sandbox, "", false, false)
		if err == nil {
			var out runtime.Restored
			op := ByItself("restore", subjectOf(sb.Sandbox), Own{By: ByWatch, Why: why})
			err = e.observed(ctx, op, func(ctx context.Context) (err error) {
				out, err = e.restoreLocked(ctx, sb.ID, sb, runtime.RestoreOptions{NoUndo: true})
				op.Result = out
				return err
			})
			sb.lock.Unlock() // in case restoreLocked was not reached
			if now := out.Sandbox.Status; err != nil || now == runtime.Running || now == runtime.Paused {
				return err
			}
			return e.startRestored(ctx, sb.ID, why) // the checkpoint is of a stopped sandbox
		}
		if !errors.Is(err, runtime.ErrNotFound) {
			sb.lock.Unlock()
			return err
		}
		// There is no checkpoint yet.
	}
	return e.startAgain(ctx, sb, why)
}

// startAgain starts a sandbox, whose lock it takes over, for its restart policy.
func (e *Engine) startAgain(ctx context.Context, sb *locked, why string) error {
	defer sb.lock.Unlock() // in case start, which also unlocks, is not reached
	op := ByItself("start", subjectOf(sb.Sandbox), Own{By: ByWatch, Why: why})
	return e.observed(ctx, op, func(ctx context.Context) error {
		_, err := e.start(ctx, sb, nil)
		return err
	})
}

// startRestored starts a sandbox that a restart has restored, unless its owner has
// started or stopped it in the meantime.
func (e *Engine) startRestored(ctx context.Context, id, why string) error {
	sb, err := e.acquire(ctx, id, opWatch, lockWait)
	if err != nil {
		return err
	}
	st, err := e.restartsOf(id)
	if err == nil && !st.Ours {
		err = fmt.Errorf("%w: it was stopped or started meanwhile", runtime.ErrState)
	}
	if err != nil {
		sb.lock.Unlock()
		return err
	}
	return e.startAgain(ctx, sb, why)
}

// restartLimits reports whether the end of a sandbox counts against its retry limit.
func restartLimits(r runtime.Restart, c runtime.Container) bool {
	return r.Policy == runtime.RestartOnFailure && r.Retries > 0 && c.Status == runtime.Exited && c.ExitCode != 0
}

// whileOver calls fn with the lock of a sandbox that ended at finished, if it has not
// been started since. same reports whether fn was called. Interrupted verbs are
// recovered first.
func (e *Engine) whileOver(ctx context.Context, id string, finished time.Time, fn func(*locked) error) (same bool, err error) {
	if err := e.recoverBy(ctx, ByWatch); err != nil {
		return false, err
	}
	sb, _, c, err := e.overdue(ctx, id)
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
func (e *Engine) giveUp(s runtime.Spec, c runtime.Container) error {
	st, err := e.restartsOf(s.ID)
	if err != nil || st.Stopped || st.GivenUp || st.Count < s.Restart.Retries {
		return err
	}
	st.GivenUp = true
	return errors.Join(e.noteRestarts(s.ID, st), e.note(s.ID, runtime.Event{Time: time.Now(), Type: runtime.EventGivenUp, Exit: &c.ExitCode, Total: int64(st.Count)}))
}
