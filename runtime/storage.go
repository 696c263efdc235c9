package runtime

import (
	"context"
	"encoding/json"
	"errors"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/overlay"
	"github.com/agentbox/agentbox/runtime/internal/kernel"
)

// StorageHit is that a sandbox was killed because its files took more than it
// was given.
type StorageHit struct {
	Time  time.Time `json:"time"`
	Used  int64     `json:"used"` // at least
	Limit int64     `json:"limit"`
}

// enforce has the limit of a sandbox's files watched, if it has one.
func (e *Engine) enforce(s Spec) {
	if err := e.noteHit(s.ID, nil); err != nil {
		e.log.Warn("that it was killed for its files is still on record", "sandbox", s.ID, "err", err)
	}
	if s.Resources.Storage == 0 || e.watch == nil {
		return
	}
	if err := e.watch(s.ID); err != nil {
		e.log.Error("the limit of its files is not watched", "sandbox", s.ID, "err", err)
	}
}

// hitPath is where it is noted that a sandbox was killed for its files.
func (e *Engine) hitPath(id string) string { return filepath.Join(e.run, "storage", id) }

// storageHit is nil if the sandbox was not killed for its files since it was
// last started.
func (e *Engine) storageHit(id string) (*StorageHit, error) {
	data, err := os.ReadFile(e.hitPath(id))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	var hit StorageHit
	if err == nil {
		err = json.Unmarshal(data, &hit)
	}
	return &hit, err
}

func (e *Engine) noteHit(id string, hit *StorageHit) error {
	path := e.hitPath(id)
	if hit == nil {
		if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		_ = os.Remove(filepath.Dir(path)) // stays while there are others
		return nil
	}
	data, err := json.Marshal(hit)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return err
	}
	if err := os.WriteFile(path+".new", data, 0o600); err != nil {
		return err
	}
	return os.Rename(path+".new", path)
}

// hits is nil while no limit has come into force.
func (e *Engine) hits(sb Sandbox) (*LimitHits, error) {
	var out LimitHits
	var err error
	if out.Storage, err = e.storageHit(sb.ID); err != nil {
		return nil, err
	}
	if sb.Pid > 0 {
		cgroups, err := kernel.Hierarchies()
		if err != nil {
			return nil, err
		}
		h, err := cgroups.HitsOf(sb.Pid)
		if err != nil && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, unix.ESRCH) { // it has just ended
			return nil, err
		}
		out.OOMKills, out.Pids = h.OOMKills, h.PidsMax
	}
	if out == (LimitHits{}) {
		return nil, nil
	}
	return &out, nil
}

// Watch kills a sandbox when its files take more than it was given. It ends
// with the sandbox's processes.
func (e *Engine) Watch(ctx context.Context, id string) error {
	w := watching{e: e, id: id}
	for {
		c, err := w.look(ctx)
		if errors.Is(err, ErrNotFound) {
			return nil
		}
		if err != nil {
			return fail("watch", id, err)
		}
		if c.Status != Running && c.Status != Paused {
			return nil
		}
		wait, err := w.step(ctx, c)
		switch {
		case ctx.Err() != nil:
			return context.Cause(ctx)
		case err != nil:
			// Whatever it is, the limit holds as soon as it is over.
			e.log.Warn("the limit of its files", "sandbox", id, "err", err)
			wait = max(wait, time.Second)
		}
		select {
		case <-time.After(wait):
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// watching is the watch over one sandbox's files. Adding up what they take
// costs, so that is done when the filesystem has lost so much space that the
// limit could be near, whoever took it, and now and then in any case.
type watching struct {
	e     *Engine
	id    string
	limit int64

	used int64 // when it was last added up
	free int64 // what the filesystem had left then
	at   time.Time
	took time.Duration
}

const (
	// fastest is the rate, in bytes a second, that the watch reckons with.
	fastest = 2 << 30
	// soonest and latest bound the time between two looks.
	soonest, latest = 20 * time.Millisecond, time.Second
	// recount is after how long the files are added up in any case.
	recount = 10 * time.Second
)

func (w *watching) look(ctx context.Context) (Container, error) {
	sb, err := w.e.store.Sandbox(ctx, w.id)
	if err != nil {
		return Container{}, err
	}
	s, err := spec(sb)
	if err != nil {
		return Container{}, err
	}
	if w.limit = s.Resources.Storage; w.limit == 0 {
		w.limit = math.MaxInt64
	}
	host, err := w.e.host(sb.Backend)
	if err != nil {
		return Container{}, err
	}
	return host.Inspect(ctx, w.id)
}

// step looks once, and says when to look again.
func (w *watching) step(ctx context.Context, c Container) (time.Duration, error) {
	var st unix.Statfs_t
	if err := unix.Statfs(c.Upper, &st); err != nil {
		return latest, &fs.PathError{Op: "statfs", Path: c.Upper, Err: err}
	}
	free := int64(st.Bfree) * st.Bsize
	left := w.limit - w.used
	old := time.Since(w.at)
	if w.at.IsZero() || old > max(recount, 20*w.took) || w.free-free >= left/2 && old > 4*w.took {
		start := time.Now()
		used, err := overlay.Usage(ctx, c.Upper, w.limit)
		if errors.Is(err, overlay.ErrTooDeep) {
			// They are looked at no further; no program needs them so deep.
			used, err = w.limit+1, nil
		}
		if err != nil {
			return latest, err
		}
		w.used, w.free, w.at, w.took = used, free, start, time.Since(start)
		if left = w.limit - used; left < 0 {
			return soonest, w.kill(ctx, used)
		}
	}
	return min(max(time.Duration(float64(left)/2/fastest*float64(time.Second)), soonest, w.took), latest), nil
}

// kill ends a sandbox. Not while another verb is at work on it: a dump would
// not survive that, and what is frozen writes nothing.
func (w *watching) kill(ctx context.Context, used int64) error {
	sb, err := w.e.acquire(ctx, w.id, "watch", lockWait)
	if err != nil {
		return err
	}
	defer sb.lock.Unlock()
	if err := w.e.noteHit(w.id, &StorageHit{Time: time.Now(), Used: used, Limit: w.limit}); err != nil {
		return err
	}
	w.e.log.Warn("killed: its files take more than it was given", "sandbox", w.id, "limit", w.limit, "used", used)
	return sb.host.Kill(ctx, w.id, "KILL")
}
