package engine

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"time"

	"github.com/agentbox/agentbox/criu"
	"github.com/agentbox/agentbox/internal/flock"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/internal/kernel"
	"github.com/agentbox/agentbox/runtime/store"
)

// idling measures how long a sandbox has been idle. It samples every tenth of the limit,
// at least every latest.
type idling struct {
	pid   int           // the first process, whose cgroup was sampled
	at    time.Duration // uptime of the sample
	used  time.Duration // CPU time until then
	touch time.Time     // last use until then
	quiet time.Duration
}

// look takes a sample, if it is time to, and returns when to take the next.
func (i *idling) look(
	e *limits, c runtime.Container, id string, limit time.Duration,
) (quiet, again time.Duration, err error) {
	window := min(max(limit/10, 50*time.Millisecond), latest)
	now := uptime()
	span := now - i.at
	if i.pid == c.Pid && span < window {
		return i.quiet, window - span, nil
	}
	groups, err := kernel.Hierarchies()
	if err != nil {
		return 0, window, err
	}
	use, err := groups.UseOf(c.Pid)
	if err != nil {
		return 0, window, err
	}
	used := use.CPU
	last := *i
	i.pid, i.at, i.used, i.touch = c.Pid, now, used, e.lastUse(id)
	switch {
	case last.pid != c.Pid: // the first sample of a new start
		i.quiet = 0
	case c.Status == runtime.Paused: // this time does not count
	case span > 2*window: // nor does a long gap between samples, as on a suspended host
	case float64(used-last.used) >= runtime.IdleShare*float64(span) || !i.touch.Equal(last.touch):
		i.quiet = 0
	default:
		busy, err := e.inUse(c, id)
		if err != nil {
			return 0, window, err
		}
		if i.quiet += span; busy {
			i.quiet = 0
		}
	}
	return i.quiet, min(window, max(limit-i.quiet, time.Millisecond)), nil
}

// inUse reports whether a terminal is attached to a sandbox, or a command runs in it.
func (lm *limits) inUse(c runtime.Container, id string) (bool, error) {
	attached, err := flock.Held(lm.usePath(id), 0)
	if attached || err != nil || c.Pid == 0 {
		return attached, err
	}
	groups, err := kernel.Hierarchies()
	if err != nil {
		return false, err
	}
	pids, err := groups.MembersWith(c.Pid)
	if err != nil {
		return false, err
	}
	strays, err := criu.Strays(c.Pid, pids)
	if errors.Is(err, runtime.ErrNotFound) {
		err = nil // it has just ended
	}
	return len(strays) > 0, err
}

// usePath is a file on which processes attached to a sandbox hold a shared lock. Its time is
// that of the last use.
func (lm *limits) usePath(id string) string { return filepath.Join(lm.run, id, "used") }

func (lm *limits) lastUse(id string) time.Time {
	st, err := os.Lstat(lm.usePath(id))
	if err != nil {
		return time.Time{}
	}
	return st.ModTime()
}

// inUseBy is use of a sandbox by its record.
func (lm *limits) inUseBy(sb store.Sandbox) (done func(), err error) {
	s, err := spec(sb)
	if err != nil {
		return nil, err
	}
	return lm.use(s)
}

// use marks a sandbox as in use until done is called or this process ends. It does nothing
// for a sandbox without an idle limit.
func (lm *limits) use(s runtime.Spec) (done func(), err error) {
	if s.Lifetime.Idle == 0 {
		return func() {}, nil
	}
	path := lm.usePath(s.ID)
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return nil, err
	}
	l, err := flock.Lock(context.Background(), path, flock.Shared)
	if err != nil {
		return nil, err
	}
	now := time.Now()
	if err := os.Chtimes(path, now, now); err != nil {
		l.Unlock()
		return nil, err
	}
	return func() {
		now := time.Now()
		_ = os.Chtimes(path, now, now) // its sandbox may be gone
		l.Unlock()
	}, nil
}
