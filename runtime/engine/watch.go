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

	"github.com/agentbox/agentbox/internal/flock"
	"github.com/agentbox/agentbox/internal/guard"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/internal/kernel"
	"github.com/agentbox/agentbox/runtime/store"
)

// A sandbox with a limit on its files or its lifetime, or with a restart policy, has a
// supervisor, its watch (Engine.Watch). ROOT/watch/ID is the lock file of the watch and,
// while there is no watch, the mark that there should be one: the next command finds a
// watch that was killed, perhaps with the host.

func (e *Engine) marks() string { return filepath.Join(e.store.Root(), "watch") }

// watched reports whether a sandbox needs a watch.
func watched(s runtime.Spec) bool {
	return s.Resources.Storage > 0 || s.Lifetime.TTL > 0 || s.Lifetime.Idle > 0 || comesBack(s.Restart)
}

// enforce is called when a sandbox starts; its limits are enforced from here on.
func (e *Engine) enforce(s runtime.Spec, c runtime.Container) {
	if err := e.noteHit(s.ID, nil); err != nil {
		e.log.Warn("storage kill not cleared from the record", "sandbox", s.ID, "err", err)
	}
	if err := e.begun(s); err != nil {
		e.log.Warn("restart count not recorded", "sandbox", s.ID, "err", err)
	}
	e.holdFiles(s, c)
	e.watchOver(s)
}

// watchOver starts the watch of a sandbox that needs one and lacks it.
func (e *Engine) watchOver(s runtime.Spec) {
	if e.watch == nil {
		return
	}
	err := e.mark(s)
	if err == nil && watched(s) && !e.watches(s.ID) {
		err = e.watch(s.ID) // a running watch may be about to end
	}
	if err != nil {
		e.log.Error("watch not started; limits are not enforced", "sandbox", s.ID, "err", err)
	}
}

// mark has a running watch read its spec again, and has a later command start a missing
// one, after watchStart: a watch that was just started needs a moment.
func (e *Engine) mark(s runtime.Spec) error { return e.touch(s.ID, time.Now(), watched(s)) }

// touch sets the time of a mark, from which on the mark counts.
func (e *Engine) touch(id string, at time.Time, create bool) error {
	path := filepath.Join(e.marks(), id)
	for {
		err := os.Chtimes(path, at, at)
		if !errors.Is(err, fs.ErrNotExist) || !create {
			return ignoreMissing(err)
		}
		if err := os.MkdirAll(e.marks(), 0o700); err != nil {
			return err
		}
		f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|unix.O_NOFOLLOW, 0o600)
		if err == nil {
			err = f.Close()
		}
		if ignoreMissing(err) != nil { // otherwise the last watch has removed the directory
			return err
		}
	}
}

func (e *Engine) unmark(id string) error {
	err := ignoreMissing(os.Remove(filepath.Join(e.marks(), id)))
	_ = os.Remove(e.marks()) // stays while there are others
	return err
}

func ignoreMissing(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// watchStart is how long a watch may take from its start to its lock.
const watchStart = 2 * time.Second

// ReviveWatches catches up on what killed watches have missed and restarts them. It is
// quick when there is nothing to do.
func (e *Engine) ReviveWatches(ctx context.Context) error {
	_, err := e.reviveWatches(ctx, false)
	return err
}

// ReviveWatchesOfBoot is ReviveWatches for the start of every command: it leaves sandboxes
// that were not started in this boot of the host to the service and to Reconcile. The root
// may come from another machine, and reading it must not run its author's programs.
func (e *Engine) ReviveWatchesOfBoot(ctx context.Context) error {
	_, err := e.reviveWatches(ctx, true)
	return err
}

// reviveWatches returns what it did, by sandbox id.
func (e *Engine) reviveWatches(ctx context.Context, ofBoot bool) (did map[string]string, err error) {
	list, err := os.ReadDir(e.marks())
	if err != nil {
		return nil, fail("watch", "", ignoreMissing(err))
	}
	did = map[string]string{}
	var errs []error
	for _, entry := range list {
		info, err := entry.Info()
		if err != nil {
			continue // the watch has just ended
		}
		// A mark further ahead is from before the clock was set back.
		if old := time.Since(info.ModTime()); old < watchStart && old >= -latest {
			continue // it is starting, or is due later
		}
		alive, err := flock.Held(filepath.Join(e.marks(), entry.Name()), 0)
		if err == nil && !alive {
			var said string
			err = guard.Do(func() (err error) {
				said, err = e.revive(ctx, entry.Name(), ofBoot)
				return err
			})
			if said != "" {
				did[entry.Name()] = said
			}
		}
		if err != nil {
			errs = append(errs, fail("watch", short(entry.Name()), err))
		}
	}
	return did, errors.Join(errs...)
}

func (e *Engine) revive(ctx context.Context, id string, ofBoot bool) (did string, err error) {
	sb, err := e.store.Sandbox(ctx, id)
	if errors.Is(err, runtime.ErrNotFound) {
		return "", e.unmark(id)
	}
	if err != nil {
		return "", err
	}
	s, err := spec(sb)
	if err != nil {
		return "", err
	}
	if expired(s.Lifetime) {
		done, err := e.expire(ctx, sb.ID)
		if errors.Is(err, runtime.ErrBusy) {
			return "", nil // another verb holds it; a later command tries again
		}
		if done && err == nil {
			err = e.unmark(sb.ID)
		}
		return "", err
	}
	host, err := e.host(sb.Backend)
	if err != nil {
		return "", err
	}
	c, err := host.Inspect(ctx, sb.ID)
	switch {
	case errors.Is(err, runtime.ErrNotFound):
		return "", e.unmark(sb.ID)
	case err != nil:
		// Its engine does not answer. Do not have every command wait for it.
		return "", e.touch(sb.ID, time.Now().Add(latest), false)
	case c.Status == runtime.Running || c.Status == runtime.Paused:
		e.watchOver(s)
		return fmt.Sprintf("sandbox %s is held to its limits again", sb.Name), nil
	case comesBack(s.Restart):
		back, st, err := e.comesBack(ctx, sb, s, c)
		if back && err == nil && ofBoot && (st.Boot == "" || st.rebooted()) {
			return "", nil
		}
		if back || err != nil {
			e.watchOver(s) // the watch restarts it
			return fmt.Sprintf("sandbox %s is started again, as its restart policy says", sb.Name), err
		}
	case s.AutoRemove && s.Lifetime.TTL > 0 && !sb.Kept:
		// It ended with the host and was not removed. Its TTL removes it.
		return "", e.touch(sb.ID, time.Now().Add(min(latest, timeLeft(s.Lifetime))), false)
	}
	return "", e.unmark(sb.ID)
}

// latest bounds the time between two checks of a watch.
const latest = 10 * time.Second

// watches reports whether this process itself is the watch of a sandbox.
func (e *Engine) watches(id string) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.watching == id
}

// Watch enforces the limits of a sandbox. It kills the sandbox when its files exceed
// their limit and the kernel does not enforce that, stops it when its TTL is over or it
// is idle, and restarts it as its restart policy says. Watch returns when the sandbox has
// ended and is not restarted.
func (e *Engine) Watch(ctx context.Context, id string) error {
	e.mu.Lock()
	e.watching = id
	e.mu.Unlock()
	w := watching{e: e, id: id, storage: filesLimit{e: e, id: id}}
	// A new time of the mark says that the spec has changed.
	var changed chan struct{}
	if mark, err := kernel.Watch(filepath.Join(e.marks(), id)); err == nil {
		defer mark.Close()
		changed = mark.Events
	} else if !errors.Is(err, fs.ErrNotExist) {
		return fail("watch", id, err)
	}
	for {
		done, wait, err := w.look(ctx)
		switch {
		case ctx.Err() != nil:
			return context.Cause(ctx)
		case done:
			return fail("watch", id, err)
		case err != nil:
			// The limits are enforced again as soon as the error is gone.
			e.log.Warn("watch failed", "sandbox", id, "err", err)
			wait = max(wait, time.Second)
		}
		select {
		case <-time.After(wait):
		case <-changed:
		case <-w.ended:
			w.ended = nil
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// watching is the watch over one sandbox.
type watching struct {
	e       *Engine
	id      string
	ended   chan struct{} // closed when its processes have ended, or some time after Wait failed
	noted   time.Duration // uptime at which the kernel's counters were last recorded
	storage filesLimit
	idle    idling
	over    time.Time     // when a sandbox that is to be restarted ended
	seen    time.Duration // uptime at which that was seen
}

// look checks the sandbox once, and returns when to check again.
func (w *watching) look(ctx context.Context) (done bool, wait time.Duration, err error) {
	e := w.e
	sb, err := e.store.Sandbox(ctx, w.id)
	if errors.Is(err, runtime.ErrNotFound) {
		return true, 0, nil
	}
	if err != nil {
		return false, latest, err
	}
	s, err := spec(sb)
	if err != nil {
		return true, 0, err
	}
	host, err := e.host(sb.Backend)
	if err != nil {
		return false, latest, err
	}
	c, err := host.Inspect(ctx, w.id)
	if errors.Is(err, runtime.ErrNotFound) {
		return true, 0, nil
	}
	if err != nil {
		return false, time.Second, err
	}
	if !watched(s) {
		return true, 0, nil
	}
	if c.Status != runtime.Running && c.Status != runtime.Paused {
		return w.again(ctx, sb, s, c)
	}
	if w.ended == nil {
		ended := make(chan struct{})
		w.ended = ended
		guard.Go(func() {
			defer close(ended)
			if _, err := host.Wait(ctx, w.id); err != nil {
				select { // the cause of the error may last
				case <-time.After(latest):
				case <-ctx.Done():
				}
			}
		})
	}
	if now := uptime(); now-w.noted >= time.Second { // the files may be checked more often
		e.keepHits(ctx, sb, c)
		w.noted = now
	}
	wait = latest
	if s.Lifetime.TTL > 0 {
		if left := timeLeft(s.Lifetime); left > 0 {
			wait = min(wait, left)
		} else {
			return w.end(ctx, e.expire)
		}
	}
	if s.Resources.Storage > 0 {
		again, err := w.storage.look(ctx, c, s)
		if wait = min(wait, again); err != nil {
			return false, wait, err
		}
	}
	if s.Lifetime.Idle > 0 {
		quiet, again, err := w.idle.look(e, c, w.id, s.Lifetime.Idle)
		if wait = min(wait, again); err != nil {
			return false, wait, err
		}
		if quiet >= s.Lifetime.Idle {
			return w.end(ctx, func(ctx context.Context, id string) (bool, error) { return e.stopIdle(ctx, id, quiet, w.idle.touch) })
		}
	}
	return false, wait, nil
}

// again restarts a sandbox that has ended, if its policy says so.
func (w *watching) again(ctx context.Context, sb store.Sandbox, s runtime.Spec, c runtime.Container) (done bool, wait time.Duration, err error) {
	if w.storage.unsaid {
		same, err := w.e.whileOver(ctx, w.id, c.Finished, func(sb *locked) error { return w.storage.stayDown(sb.Sandbox) })
		if !same || err != nil {
			w.storage.unsaid = w.storage.unsaid && err != nil
			return w.later(err)
		}
	}
	back, st, err := w.e.comesBack(ctx, sb, s, c)
	switch {
	case err != nil:
		return false, latest, err
	case !back && restartLimits(s.Restart, c):
		same, err := w.e.whileOver(ctx, w.id, c.Finished, func(*locked) error { return w.e.giveUp(s, c) })
		if !same {
			return w.later(err)
		}
		return true, 0, err
	case !back:
		return true, 0, nil
	}
	// Uptime, unlike the wall clock, is never set. It counts from this watch's first look.
	if w.over != c.Finished {
		w.over, w.seen = c.Finished, uptime()
	}
	if wait = st.pause(c, uptime()-w.seen); wait > 0 {
		return false, min(wait, latest), nil
	}
	if err := w.e.recoverBy(ctx, ByWatch); err != nil {
		return false, time.Second, err
	}
	if err := w.e.restart(ctx, w.id, c.Finished); err != nil && !errors.Is(err, runtime.ErrBusy) && !errors.Is(err, runtime.ErrNotFound) {
		return false, latest, err
	}
	return false, firstRestart, nil
}

// later has the watch check again: a verb that has held the sandbox since takes precedence.
func (w *watching) later(err error) (done bool, wait time.Duration, _ error) {
	if err != nil && !errors.Is(err, runtime.ErrBusy) && !errors.Is(err, runtime.ErrNotFound) {
		return false, latest, err
	}
	return false, time.Second, nil
}

// end stops a sandbox. If a verb is at work on it, the watch tries again later.
func (w *watching) end(ctx context.Context, stop func(context.Context, string) (bool, error)) (done bool, wait time.Duration, err error) {
	if err := w.e.recoverBy(ctx, ByWatch); err != nil {
		return false, time.Second, err
	}
	done, err = stop(ctx, w.id)
	if errors.Is(err, runtime.ErrBusy) {
		err = nil
	}
	return done && err == nil, time.Second, err
}
