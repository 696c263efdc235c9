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

// A sandbox with a limit of its files or of its lifetime has a process beside it
// that holds it to these (Engine.Watch). ROOT/watch/ID is that process's lock,
// and, while there is none, the mark that there should be one: what was killed,
// with the host perhaps, is found by the next command.

func (e *Engine) marks() string { return filepath.Join(e.store.Root(), "watch") }

// watched reports whether a sandbox needs that process.
func watched(s runtime.Spec) bool {
	return s.Resources.Storage > 0 || s.Lifetime.TTL > 0 || s.Lifetime.Idle > 0 || comesBack(s.Restart)
}

// enforce begins a start of a sandbox, whose limits are watched from here on.
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

// watchOver sees to it that a sandbox has its watch, if it needs one.
func (e *Engine) watchOver(s runtime.Spec) {
	if e.watch == nil {
		return
	}
	err := e.mark(s)
	if err == nil && watched(s) && !e.watches(s.ID) {
		err = e.watch(s.ID) // one that is there already may be about to end
	}
	if err != nil {
		e.log.Error("watch not started; limits are not enforced", "sandbox", s.ID, "err", err)
	}
}

// mark has a watch that is there look at its spec, and the next command find out
// if there is none, but not at once: one that was just started needs a moment.
func (e *Engine) mark(s runtime.Spec) error { return e.touch(s.ID, time.Now(), watched(s)) }

// touch sets the time of a mark, from which on it counts.
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
		if ignoreMissing(err) != nil { // else the last watch took the directory away
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

// ReviveWatches does what watches that were killed have missed, and starts them
// again. It is quick when there is nothing to do.
func (e *Engine) ReviveWatches(ctx context.Context) error {
	_, err := e.reviveWatches(ctx, false)
	return err
}

// ReviveWatchesOfBoot is ReviveWatches as every command calls it first: a sandbox that was not
// started in this boot of the host comes back by the service, or by Reconcile. The root may be from
// elsewhere, and looking at it must not run its author's program.
func (e *Engine) ReviveWatchesOfBoot(ctx context.Context) error {
	_, err := e.reviveWatches(ctx, true)
	return err
}

// reviveWatches tells what was done, by the ids of sandboxes.
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
			continue // it has just ended
		}
		// One further ahead is from before the clock was set back.
		if old := time.Since(info.ModTime()); old < watchStart && old >= -latest {
			continue // it starts, or is to be looked at later
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
			return "", nil // whoever is at it is followed by another command
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
		// Its engine does not answer. Not every command is to wait for that.
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
			e.watchOver(s) // it does that
			return fmt.Sprintf("sandbox %s is started again, as its restart policy says", sb.Name), err
		}
	case s.AutoRemove && s.Lifetime.TTL > 0 && !sb.Kept:
		// The host has ended it, and nobody has removed it. Then its time does.
		return "", e.touch(sb.ID, time.Now().Add(min(latest, timeLeft(s.Lifetime))), false)
	}
	return "", e.unmark(sb.ID)
}

// latest bounds the time between two looks of a watch.
const latest = 10 * time.Second

// watches reports whether this very process is the watch of a sandbox.
func (e *Engine) watches(id string) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.watching == id
}

// Watch holds a sandbox to its limits: it kills it when its files take more than
// it was given and the kernel does not see to that, stops it when its time is over
// or nothing goes on in it, and starts it again as its restart policy says. It
// ends with the sandbox's processes, when these do not come back.
func (e *Engine) Watch(ctx context.Context, id string) error {
	e.mu.Lock()
	e.watching = id
	e.mu.Unlock()
	w := watching{e: e, id: id, storage: filesLimit{e: e, id: id}}
	// The mark's time says that the spec is another.
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
			// Whatever it is, the limits hold as soon as it is over.
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
	ended   chan struct{} // closed when its processes have, or nobody can tell any more
	noted   time.Duration // when what the kernel counts was last noted: uptime
	storage filesLimit
	idle    idling
	over    time.Time     // when it ended, that is to be started again
	seen    time.Duration // and when that was seen: uptime
}

// look looks once, and says when to look again.
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
				select { // whatever keeps it from waiting may last
				case <-time.After(latest):
				case <-ctx.Done():
				}
			}
		})
	}
	if now := uptime(); now-w.noted >= time.Second { // the files may be looked at more often
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

// again starts a sandbox that has ended, if that is its policy.
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
	// By a clock that nobody sets, unless another has looked on before us.
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

// later has the watch look again: whoever has the sandbox, or had it since, has the last word.
func (w *watching) later(err error) (done bool, wait time.Duration, _ error) {
	if err != nil && !errors.Is(err, runtime.ErrBusy) && !errors.Is(err, runtime.ErrNotFound) {
		return false, latest, err
	}
	return false, time.Second, nil
}

// end stops a sandbox. One that a verb is at work on is tried again.
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
