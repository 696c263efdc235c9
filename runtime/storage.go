package runtime

import (
	"context"
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/overlay"
	"github.com/agentbox/agentbox/runtime/store"
)

// StorageHit is that a sandbox was killed because its files took more than it
// was given.
type StorageHit struct {
	Time  time.Time `json:"time"`
	Used  int64     `json:"used"` // at least
	Limit int64     `json:"limit"`
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

// filesLimit is the watch over one sandbox's files. Adding up what they take
// costs, so that is done when the filesystem has lost so much space that the
// limit could be near, whoever took it, and now and then in any case.
type filesLimit struct {
	e     *Engine
	id    string
	limit int64

	used int64 // when it was last added up
	free int64 // what the filesystem had left then
	at   time.Time
	took time.Duration

	killed int  // the first process of the start that was killed
	unsaid bool // it was killed, and that it is to stay down is not on record yet
}

const (
	// fastest is the rate, in bytes a second, that the watch reckons with.
	fastest = 2 << 30
	// soonest and late bound the time between two looks.
	soonest, late = 20 * time.Millisecond, time.Second
	// recount is after how long the files are added up in any case.
	recount = 10 * time.Second
)

// look looks once, and says when to look again.
func (w *filesLimit) look(ctx context.Context, c Container, limit int64) (time.Duration, error) {
	w.limit = limit
	if w.killed != 0 && w.killed == c.Pid {
		return soonest, nil // about to end
	}
	var st unix.Statfs_t
	if err := unix.Statfs(c.Upper, &st); err != nil {
		return late, &fs.PathError{Op: "statfs", Path: c.Upper, Err: err}
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
			return late, err
		}
		w.used, w.free, w.at, w.took = used, free, start, time.Since(start)
		if left = w.limit - used; left < 0 {
			return soonest, w.kill(ctx, c, used)
		}
	}
	return min(max(time.Duration(float64(left)/2/fastest*float64(time.Second)), soonest, w.took), late), nil
}

// stayDown keeps it from being restarted: it would have as many files.
func (w *filesLimit) stayDown(sb store.Sandbox) error {
	err := w.e.meant(sb)
	w.unsaid = err != nil
	return err
}

// kill ends a sandbox. Not while another verb is at work on it: a dump would
// not survive that, and what is frozen writes nothing.
func (w *filesLimit) kill(ctx context.Context, c Container, used int64) error {
	sb, err := w.e.acquire(ctx, w.id, opWatch, lockWait)
	if err != nil {
		return err
	}
	defer sb.lock.Unlock()
	// What it was killed for is noted after it: it may have left no room for that.
	if err := sb.host.Kill(ctx, w.id, "KILL"); err != nil {
		return err
	}
	w.killed = c.Pid
	w.e.log.Warn("killed: its files take more than it was given", "sandbox", w.id, "limit", w.limit, "used", used)
	now := time.Now()
	return errors.Join(
		w.stayDown(sb.Sandbox),
		w.e.noteHit(w.id, &StorageHit{Time: now, Used: used, Limit: w.limit}),
		w.e.note(w.id, Event{Time: now, Type: EventStorage, Used: used, Limit: w.limit}),
	)
}
