package engine

import (
	"context"
	"errors"
	"time"

	"github.com/agentbox/agentbox/internal/guard"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/store"
)

// latest bounds the time between two looks at a sandbox, or at leases.
const latest = 10 * time.Second

// enforce is called when a sandbox has started: from here on its limits are enforced, and its
// checkpoints are taken at its interval.
func (sv *supervisor) enforce(s runtime.Spec, c runtime.Container) {
	if err := sv.events.noteHit(s.ID, nil); err != nil {
		sv.log.Warn("storage kill not cleared from the record", "sandbox", s.ID, "err", err)
	}
	if err := sv.restarts.begun(s); err != nil {
		sv.log.Warn("restart count not recorded", "sandbox", s.ID, "err", err)
	}
	sv.limits.holdFiles(s, c)
	sv.superviseFromNow(s)
}

// guardSandbox attends to one sandbox until it needs no supervisor, or its mark is gone.
func (sv *supervisor) guardSandbox(ctx context.Context, id string, news <-chan struct{}) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	w := watching{e: sv, id: id, storage: filesLimit{e: sv.limits, id: id}, checkpoints: takings{e: sv.engine, id: id}}
	defer w.checkpoints.end()
	for {
		wait, calm := w.calm()
		if !calm {
			var over bool
			if over, wait = w.attend(ctx); over {
				return
			}
		}

		select {
		case <-time.After(wait):
		case <-news:
			w.next = 0
		case <-w.ended:
			w.ended, w.next = nil, 0
		case <-ctx.Done():
			return
		}
	}
}

// attend looks at the sandbox, and returns when to do so again. Over: it needs no supervisor, and
// its mark is gone.
func (w *watching) attend(ctx context.Context) (over bool, wait time.Duration) {
	m, marked, err := w.e.marks.read(w.id)
	if err == nil && !marked {
		return true, 0
	}
	done, wait := false, latest
	if err == nil {
		err = guard.Do(func() (err error) {
			done, wait, err = w.look(ctx)
			return err
		})
	}
	if done && ctx.Err() == nil {
		over, e2 := w.e.settled(ctx, w.id, m)
		if over && err != nil {
			w.e.log.Error("sandbox not supervised any more", "sandbox", w.id, "err", err)
		}
		if over {
			return true, 0
		}
		err, wait = errors.Join(err, e2), time.Second
	}
	if ctx.Err() != nil {
		return true, 0
	}
	return false, max(wait, w.failed.pause(w.e.log, err, "supervision of a sandbox", "sandbox", w.id))
}

// watching is the supervision of one sandbox: its limits and its restarts.
type watching struct {
	e           *supervisor
	id          string
	ended       chan struct{} // closed when its processes have ended, or some time after Wait failed
	noted       time.Duration // uptime at which the kernel's counters were last recorded
	storage     filesLimit
	glance      time.Duration // how soon the free space of the filesystem is to be looked at again
	next        time.Duration // uptime at which all else is
	idle        idling
	checkpoints takings
	over        time.Time     // when a sandbox that is to be restarted ended
	seen        time.Duration // uptime at which that was seen
	failed      failures
}

// look checks the sandbox once, and returns when to check again. Done: it needs no supervisor.
func (w *watching) look(ctx context.Context) (done bool, wait time.Duration, err error) {
	e := w.e
	if old, err := e.marks.watched(w.id); old || err != nil {
		return false, latest, err
	}
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
	if !supervised(s) {
		return true, 0, nil
	}
	if c.Status != runtime.Running && c.Status != runtime.Paused {
		if s.AutoRemove && s.Lifetime.TTL > 0 && !sb.Kept { // its TTL removes it if its monitor does not
			return w.expire(ctx, s)
		}
		return w.again(ctx, sb, s, c)
	}
	w.await(ctx, host)
	if now := uptime(); now-w.noted >= time.Second { // the files may be checked more often
		e.events.keepHits(ctx, sb, c)
		w.noted = now
	}
	if err := w.checkpoints.begin(ctx, s); err != nil {
		return false, latest, err
	}
	return w.limits(ctx, s, c)
}

// calm reports whether a look would only find that the files are not near their limit: they may
// have to be looked at many times a second, all else has not. It returns when to look again.
func (w *watching) calm() (wait time.Duration, is bool) {
	rest := w.next - uptime()
	if w.storage.upper == "" || rest <= 0 {
		return 0, false
	}
	due, _, err := w.storage.due()
	return min(w.glance, rest), !due && err == nil
}

// await has ended closed when the sandbox ends.
func (w *watching) await(ctx context.Context, host Host) {
	if w.ended != nil {
		return
	}
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

// limits enforces the limits of a sandbox that runs.
func (w *watching) limits(
	ctx context.Context, s runtime.Spec, c runtime.Container,
) (done bool, wait time.Duration, err error) {
	w.storage.upper = ""
	if done, wait, err = w.expire(ctx, s); done || err != nil || expired(s.Lifetime) {
		return done, wait, err
	}
	w.glance = wait
	if s.Resources.Storage > 0 {
		if w.glance, err = w.storage.look(ctx, c, s); err != nil {
			return false, min(wait, w.glance), err
		}
	}
	if s.Lifetime.Idle > 0 {
		quiet, again, err := w.idle.look(w.e.limits, c, w.id, s.Lifetime.Idle)
		if wait = min(wait, again); err != nil {
			return false, min(wait, w.glance), err
		}
		if quiet >= s.Lifetime.Idle {
			return w.end(ctx, func(ctx context.Context, id string) (bool, error) {
				return w.e.limits.stopIdle(ctx, id, quiet, w.idle.touch)
			})
		}
	}
	w.next = uptime() + min(wait, time.Second)
	return false, min(wait, w.glance), nil
}

// expire stops or removes a sandbox whose TTL is over.
func (w *watching) expire(ctx context.Context, s runtime.Spec) (done bool, wait time.Duration, err error) {
	switch {
	case s.Lifetime.TTL == 0:
		return false, latest, nil
	case expired(s.Lifetime):
		return w.end(ctx, w.e.limits.expire)
	}
	return false, min(latest, timeLeft(s.Lifetime)), nil
}

// again restarts a sandbox that has ended, if its policy says so.
func (w *watching) again(
	ctx context.Context, sb store.Sandbox, s runtime.Spec, c runtime.Container,
) (done bool, wait time.Duration, err error) {
	if w.storage.unsaid {
		same, err := w.e.whileOver(ctx, w.id, c.Finished, func(sb *locked) error {
			return w.storage.stayDown(sb.Sandbox)
		})
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
		same, err := w.e.whileOver(ctx, w.id, c.Finished, func(*locked) error { return w.e.restarts.giveUp(s, c) })
		if !same {
			return w.later(err)
		}
		return true, 0, err
	case !back:
		return true, 0, nil
	}
	// Uptime, unlike the wall clock, is never set. It counts from the first look here.
	if w.over != c.Finished {
		w.over, w.seen = c.Finished, uptime()
	}
	if wait = st.pause(c, uptime()-w.seen); wait > 0 {
		return false, min(wait, latest), nil
	}
	if err := w.e.recovery.recoverBy(ctx, runtime.ByWatch); err != nil {
		return false, time.Second, err
	}
	err = w.e.restart(ctx, w.id, c.Finished)
	if err != nil && !errors.Is(err, runtime.ErrBusy) && !errors.Is(err, runtime.ErrNotFound) {
		return false, latest, err
	}
	return false, firstRestart, nil
}

// later has the sandbox looked at again: a verb that has held the sandbox since takes precedence.
func (w *watching) later(err error) (done bool, wait time.Duration, _ error) {
	if err != nil && !errors.Is(err, runtime.ErrBusy) && !errors.Is(err, runtime.ErrNotFound) {
		return false, latest, err
	}
	return false, time.Second, nil
}

// end stops a sandbox. If a verb is at work on it, that is tried again later.
func (w *watching) end(
	ctx context.Context, stop func(context.Context, string) (bool, error),
) (done bool, wait time.Duration, err error) {
	if err := w.e.recovery.recoverBy(ctx, runtime.ByWatch); err != nil {
		return false, time.Second, err
	}
	done, err = stop(ctx, w.id)
	if errors.Is(err, runtime.ErrBusy) {
		err = nil
	}
	return done && err == nil, time.Second, err
}
