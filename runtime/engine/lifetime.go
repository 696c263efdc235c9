package engine

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/policy"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/store"
)

// limits enforces and changes the limits of sandboxes: lifetime, idle time and storage.
type limits struct {
	*core

	events     *eventLog
	restarts   *restartLog
	marks      *marks
	sandboxes  *sandboxes
	supervisor *supervisor
}

// livesFor returns a lifetime that begins now.
func livesFor(ttl, idle time.Duration) runtime.Lifetime {
	l := runtime.Lifetime{TTL: ttl, Idle: idle}
	if ttl > 0 {
		l.Begun = thisMoment()
	}
	return l
}

func thisMoment() runtime.Moment {
	return runtime.Moment{Time: time.Now().UTC().Round(0), Boot: bootID(), Up: uptime()}
}

// bootID identifies this boot of the host; empty: unknown.
var bootID = sync.OnceValue(func() string {
	data, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(data))
})

func uptime() time.Duration {
	var ts unix.Timespec
	if unix.ClockGettime(unix.CLOCK_BOOTTIME, &ts) != nil {
		return 0 // every supported kernel has this clock
	}
	return time.Duration(ts.Nano())
}

// age is how long ago it was: exact within a boot, else as the clock has it.
func age(m runtime.Moment) time.Duration { return ageAt(m, thisMoment()) }

func ageAt(m runtime.Moment, now runtime.Moment) time.Duration {
	if m.Boot != "" && m.Boot == now.Boot {
		return now.Up - m.Up
	}
	return max(0, now.Time.Sub(m.Time))
}

func timeLeft(l runtime.Lifetime) time.Duration { return l.TTL - age(l.Begun) }

func expired(l runtime.Lifetime) bool { return l.TTL > 0 && timeLeft(l) <= 0 }

// expiresAt returns the end of a lifetime by the wall clock. It moves only when the clock is
// set.
func expiresAt(l runtime.Lifetime) time.Time {
	if l.TTL == 0 {
		return time.Time{}
	}
	at := l.Begun.Time.Add(l.TTL)
	if d := time.Until(at) - timeLeft(l); d.Abs() > time.Second {
		at = at.Add(-d)
	}
	return at
}

// checkLifetime refuses invalid lifetimes.
func checkLifetime(l runtime.Lifetime) error {
	for name, d := range map[string]time.Duration{"ttl": l.TTL, "idle": l.Idle} {
		if d != 0 && d < policy.MinLifetime {
			return fmt.Errorf("%w: lifetime %s %v: the least is %v", runtime.ErrInvalid, name, d, policy.MinLifetime)
		}
	}
	return nil
}

// mayStart refuses to start an expired sandbox.
func mayStart(s runtime.Spec) error {
	if !expired(s.Lifetime) {
		return nil
	}
	return hint(fmt.Errorf("%w: its time (%v) was over at %s", runtime.ErrState, s.Lifetime.TTL,
		expiresAt(s.Lifetime).Local().Format(time.DateTime)),
		"Give it more: agentbox update --ttl DURATION "+s.Name)
}

// acquireOurs locks a sandbox for an update, and returns its spec and its policy, which may
// be nil. It refuses an adopted sandbox, whose engine decides.
func (lm *limits) acquireOurs(
	ctx context.Context, ref, what string,
) (sb *locked, s runtime.Spec, p *policy.Policy, err error) {
	if sb, err = lm.acquire(ctx, ref, "update", lockWait); err != nil {
		return nil, runtime.Spec{}, nil, err
	}
	if s, err = spec(sb.Sandbox); err == nil && s.Adopted {
		err = fmt.Errorf("%w: its engine decides %s", runtime.ErrUnsupported, what)
	}
	if err == nil {
		p, err = recorded(s)
	}
	if err != nil {
		sb.lock.Unlock()
	}
	return sb, s, p, err
}

// UpdateLifetime changes how long a sandbox lives, from now on.
func (v hostVerbs) UpdateLifetime(
	ctx context.Context, ref string, change runtime.LifetimeChange,
) (runtime.Sandbox, error) {
	return verb(ctx, v.e, onSandbox("update", ref), func(ctx context.Context) (runtime.Sandbox, error) {
		return v.e.limits.updateLifetime(ctx, ref, change)
	})
}

func (lm *limits) updateLifetime(
	ctx context.Context, ref string, change runtime.LifetimeChange,
) (_ runtime.Sandbox, err error) {
	sb, s, p, err := lm.acquireOurs(ctx, ref, "how long the container lives")
	if err != nil {
		return runtime.Sandbox{}, err
	}
	defer sb.lock.Unlock()
	if change.TTL != nil {
		s.Lifetime = livesFor(*change.TTL, s.Lifetime.Idle)
	}
	if change.Idle != nil {
		s.Lifetime.Idle = *change.Idle
	}
	if change.Restart != nil {
		s.Restart = *change.Restart
	}
	if err := errors.Join(checkLifetime(s.Lifetime), checkRestart(s, sb.host.Properties())); err != nil {
		return runtime.Sandbox{}, err
	}
	if p != nil {
		if err := p.MayLive(change.TTL, change.Idle); err != nil {
			return runtime.Sandbox{}, err
		}
	}
	data, err := json.Marshal(s)
	if err != nil {
		return runtime.Sandbox{}, err
	}
	c, err := sb.host.Inspect(ctx, sb.ID)
	if err != nil {
		return runtime.Sandbox{}, err
	}
	live := c.Status == runtime.Running || c.Status == runtime.Paused
	if live { // after a crash below, the mark has the next command start a supervisor
		if err := lm.marks.mark(s); err != nil {
			return runtime.Sandbox{}, err
		}
	}
	if err := lm.store.SetSpec(ctx, sb.ID, data); err != nil {
		return runtime.Sandbox{}, err
	}

	if change.Restart != nil {
		err := lm.restarts.begun(s)
		if err == nil && !live { // only its owner starts it
			err = lm.restarts.meant(store.Sandbox{ID: sb.ID, Spec: data})
		}
		if err != nil {
			return runtime.Sandbox{}, err
		}
	}
	if live {
		lm.supervisor.superviseFromNow(s)
	}
	lm.log.Info("lifetime changed", "sandbox", sb.ID, "ttl", s.Lifetime.TTL, "idle", s.Lifetime.Idle)
	return lm.sandboxes.inspect(ctx, sb.ID)
}

// expire stops a sandbox whose TTL is over, and removes it if it is an --rm sandbox. It
// reports whether nothing is left to supervise.
func (lm *limits) expire(ctx context.Context, id string) (done bool, err error) {
	sb, s, c, err := lm.overdue(ctx, id)
	if errors.Is(err, runtime.ErrNotFound) {
		return true, nil
	}
	if err != nil {
		return false, err
	}
	defer sb.lock.Unlock()
	if !expired(s.Lifetime) {
		return false, nil // it was given more time
	}
	why := fmt.Sprintf("ttl: its time of %v is over", s.Lifetime.TTL)
	if c.Status == runtime.Running || c.Status == runtime.Paused {
		lm.log.Info("sandbox stopped: lifetime over", "sandbox", id, "ttl", s.Lifetime.TTL)
		if err := lm.putDown(ctx, sb, why); err != nil {
			return false, err
		}
		if err := lm.events.note(id, runtime.Event{
			Time: time.Now(), Type: runtime.EventExpired, After: int64(s.Lifetime.TTL),
		}); err != nil {
			return false, err
		}
	}
	if s.AutoRemove && !sb.Kept {
		op := runtime.ByItself("rm", subjectOf(sb.Sandbox), runtime.Own{By: runtime.ByWatch, Why: why})
		return true, lm.observed(ctx, op, func(ctx context.Context) error {
			return lm.sandboxes.remove(ctx, sb, false)
		})
	}
	return true, nil
}

// putDown stops a sandbox, whose lock is held, for good.
func (lm *limits) putDown(ctx context.Context, sb *locked, why string) error {
	op := runtime.ByItself("stop", subjectOf(sb.Sandbox), runtime.Own{By: runtime.ByWatch, Why: why})
	return lm.observed(ctx, op, func(ctx context.Context) error {
		if err := lm.restarts.meant(sb.Sandbox); err != nil {
			return err
		}
		return sb.host.Stop(ctx, sb.ID, runtime.StopOptions{Timeout: stopTimeout})
	})
}

// stopIdle stops an idle sandbox. An --rm sandbox is kept: idle does not mean done.
// touched is the time of the last use on which the finding is based.
func (lm *limits) stopIdle(
	ctx context.Context, id string, quiet time.Duration, touched time.Time,
) (done bool, err error) {
	sb, s, c, err := lm.overdue(ctx, id)
	if errors.Is(err, runtime.ErrNotFound) {
		return true, nil
	}
	if err != nil {
		return false, err
	}
	defer sb.lock.Unlock()
	if !lm.lastUse(id).Equal(touched) {
		return false, nil
	}
	if busy, err := lm.inUse(c, id); err != nil || busy || c.Status != runtime.Running || s.Lifetime.Idle == 0 ||
		quiet < s.Lifetime.Idle {
		return false, err
	}
	if s.AutoRemove && !sb.Kept {
		if err := lm.store.Keep(ctx, id, true); err != nil {
			return false, err
		}
	}
	lm.log.Info("sandbox stopped: idle", "sandbox", id, "idle", quiet)
	if err := lm.putDown(ctx, sb, fmt.Sprintf("idle: nothing went on for %v", s.Lifetime.Idle)); err != nil {
		return false, err
	}
	return true, lm.events.note(id, runtime.Event{Time: time.Now(), Type: runtime.EventIdle, After: int64(quiet)})
}

// opWatch is the verb under which the supervisor holds a sandbox's lock.
const opWatch = "watch"

// overdue locks and inspects a sandbox that is to be stopped. It refuses one that a verb is
// at work on, or on which a verb was interrupted.
func (lm *limits) overdue(ctx context.Context, id string) (sb *locked, s runtime.Spec, c runtime.Container, err error) {
	lock, err := lm.store.Lock(ctx, id, opWatch, lockWait)
	if err != nil {
		return nil, s, c, err
	}
	defer func() {
		if err != nil {
			lock.Unlock()
		}
	}()
	row, err := lm.store.Sandbox(ctx, id)
	if err != nil {
		return nil, s, c, err
	}
	cut, err := lm.interruptedIn(ctx, id)
	if err == nil && cut {
		err = fmt.Errorf("%w: a verb on it was cut off", runtime.ErrBusy)
	}
	if err != nil {
		return nil, s, c, err
	}
	if s, err = spec(row); err != nil {
		return nil, s, c, err
	}
	host, err := lm.host(row.Backend)
	if err != nil {
		return nil, s, c, err
	}
	c, err = host.Inspect(ctx, id)
	return &locked{Sandbox: row, host: host, lock: lock}, s, c, err
}
