package engine

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/fsx"
	"github.com/agentbox/agentbox/overlay"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/store"
)

// hitPath is the file that records that a sandbox's files have reached their limit.
func (evs *eventLog) hitPath(id string) string { return filepath.Join(evs.run, "storage", id) }

// storageHit returns nil if the sandbox's files have not reached their limit since it was
// last started.
func (evs *eventLog) storageHit(id string) (*runtime.StorageHit, error) {
	data, err := os.ReadFile(evs.hitPath(id))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	var hit runtime.StorageHit
	if err == nil {
		err = json.Unmarshal(data, &hit)
	}
	return &hit, err
}

func (evs *eventLog) noteHit(id string, hit *runtime.StorageHit) error {
	path := evs.hitPath(id)
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
	return fsx.Write(path, data, fsx.Options{Temp: path + ".new", Volatile: true})
}

// liftFiles lifts the kernel's storage limit of a stopped or frozen sandbox.
func (lm *limits) liftFiles(s runtime.Spec, c runtime.Container) {
	if s.Resources.Storage > 0 {
		s.Resources.Storage = 0
		lm.holdFiles(s, c)
	}
}

// holdFiles sets the storage limit of a sandbox in the kernel, where that is supported.
func (lm *limits) holdFiles(s runtime.Spec, c runtime.Container) {
	if c.Upper == "" {
		return
	}
	if _, err := overlay.LimitProject(c.Upper, s.Resources.Storage); err != nil {
		lm.log.Error("storage limit not set in the kernel", "sandbox", s.ID, "err", err)
	}
}

// UpdateStorage changes the storage limit of a sandbox, at once if it runs.
func (v hostVerbs) UpdateStorage(ctx context.Context, ref string, change runtime.StorageChange) (runtime.Sandbox, error) {
	return verb(ctx, v.e, onSandbox("update", ref), func(ctx context.Context) (runtime.Sandbox, error) {
		return v.e.limits.updateStorage(ctx, ref, change)
	})
}

func (lm *limits) updateStorage(
	ctx context.Context, ref string, change runtime.StorageChange,
) (_ runtime.Sandbox, err error) {
	if change.Size < 0 {
		return runtime.Sandbox{}, fmt.Errorf("%w: a limit is negative", runtime.ErrInvalid)
	}
	sb, s, p, err := lm.acquireOurs(ctx, ref, "what the container's files take")
	if err != nil {
		return runtime.Sandbox{}, err
	}
	defer sb.lock.Unlock()
	if p != nil {
		if err := p.MayStore(change.Size); err != nil {
			return runtime.Sandbox{}, err
		}
	}
	s.Resources.Storage = change.Size
	data, err := json.Marshal(s)
	if err != nil {
		return runtime.Sandbox{}, err
	}
	c, err := sb.host.Inspect(ctx, sb.ID)
	if err != nil {
		return runtime.Sandbox{}, err
	}
	live := c.Status == runtime.Running || c.Status == runtime.Paused
	if live { // after a crash below, the mark has the next command enforce the limit
		if err := lm.marks.mark(s); err != nil {
			return runtime.Sandbox{}, err
		}
	}
	if change.Size == 0 { // while a supervisor would set it again
		lm.holdFiles(s, c)
	}
	if err := lm.store.SetSpec(ctx, sb.ID, data); err != nil {
		return runtime.Sandbox{}, err
	}
	if live {
		lm.holdFiles(s, c)
		lm.supervisor.superviseFromNow(s)
	}
	lm.log.Info("storage limit changed", "sandbox", sb.ID, "size", change.Size)
	return lm.sandboxes.inspect(ctx, sb.ID)
}

// filesLimit watches the storage limit of one sandbox. Adding up the sizes of its files is
// expensive, so it does so only when the filesystem has lost so much space, to any user,
// that the limit could be near, and now and then in any case.
type filesLimit struct {
	e     *limits
	id    string
	limit int64

	upper string // of the last count; empty: the last look was another one
	most  int64
	used  int64 // at the last count
	free  int64 // free space of the filesystem then
	at    time.Time
	took  time.Duration

	killed int  // first process of the start that was killed
	full   int  // first process of a start that was refused more space, until it has room again
	unsaid bool // it was killed, and that it must stay down is not on record yet
}

const (
	// fastest is the highest write rate that is assumed, in bytes a second.
	fastest = 2 << 30
	// soonest and late bound the time between two checks.
	soonest, late = 20 * time.Millisecond, time.Second
	// recount is the time after which the files are counted in any case.
	recount = 10 * time.Second
)

// look checks once, and returns when to check again.
func (w *filesLimit) look(ctx context.Context, c runtime.Container, s runtime.Spec) (time.Duration, error) {
	w.limit, w.upper = s.Resources.Storage, ""
	project, ours, err := overlay.ProjectOf(c.Upper)
	if err != nil {
		return late, err
	}
	if !ours {
		return w.count(ctx, c, w.limit)
	}
	wait, err := w.refused(ctx, c, project)
	if s.IDs != nil || err != nil {
		return wait, err
	}
	// Root without a user namespace can give its files another project. All that it
	// may have in its own, blocks and files, is less than twice as much.
	again, err := w.count(ctx, c, 2*w.limit+1<<20)
	return min(wait, max(again, 5*soonest)), err
}

// refused records that a sandbox has reached a limit that the kernel enforces.
func (w *filesLimit) refused(ctx context.Context, c runtime.Container, p overlay.Project) (time.Duration, error) {
	if p.Limit != (w.limit+1023)>>10<<10 {
		return w.set(ctx, c)
	}
	switch {
	case !p.Full():
		if p.Used < p.Limit-p.Limit/10 {
			w.full = 0
		}
	case w.full != c.Pid:
		w.full = c.Pid
		now := time.Now()
		return soonest, errors.Join(
			w.e.events.noteHit(w.id, &runtime.StorageHit{Time: now, Used: p.Used, Limit: w.limit, Refused: true}),
			w.e.events.note(w.id, runtime.Event{
				Time: now, Type: runtime.EventStorage, Used: p.Used, Limit: w.limit, Refused: true,
			}),
		)
	}
	return late, nil // the kernel enforces the limit
}

// set restores the kernel's limit of a running sandbox that has none, or another one. The
// limit of a frozen sandbox is lifted on purpose.
func (w *filesLimit) set(ctx context.Context, c runtime.Container) (time.Duration, error) {
	if c.Status != runtime.Running {
		return late, nil
	}
	sb, err := w.e.acquire(ctx, w.id, opWatch, lockWait)
	if errors.Is(err, runtime.ErrBusy) {
		return soonest, nil // the verb that holds the lock sets the limit in the end
	}
	if err != nil {
		return late, err
	}
	defer sb.lock.Unlock()
	s, err := spec(sb.Sandbox)
	if err != nil {
		return late, err
	}
	if c, err = sb.host.Inspect(ctx, w.id); err != nil || c.Status != runtime.Running {
		return late, err
	}
	_, err = overlay.LimitProject(c.Upper, s.Resources.Storage)
	return soonest, err
}

// soon returns the time in which half of so many bytes could be written.
func soon(left int64) time.Duration {
	return min(max(time.Duration(float64(left)/2/fastest*float64(time.Second)), soonest), late)
}

// count adds up the sizes of the files, if they could be near most, and kills a sandbox that
// exceeds it.
func (w *filesLimit) count(ctx context.Context, c runtime.Container, most int64) (time.Duration, error) {
	if w.killed != 0 && w.killed == c.Pid {
		return soonest, nil // about to end
	}
	w.upper, w.most = c.Upper, most
	due, free, err := w.due()
	if err != nil {
		return late, err
	}
	if due {
		start := time.Now()
		used, err := usage(ctx, c, most)
		if errors.Is(err, overlay.ErrTooDeep) {
			// They are not counted further; no program needs such depth.
			used, err = most+1, nil
		}
		if err != nil {
			return late, err
		}
		w.used, w.free, w.at, w.took = used, free, start, time.Since(start)
		if used > most {
			return soonest, w.kill(ctx, c, used)
		}
	}
	return max(soon(most-w.used), min(w.took, late)), nil
}

// usage returns what the files of a sandbox take, those that it has changed in its workspaces
// included; it stops counting beyond most.
func usage(ctx context.Context, c runtime.Container, most int64) (sum int64, err error) {
	if sum, err = overlay.Usage(ctx, c.Upper, most); err != nil {
		return sum, err
	}
	for _, v := range c.Volumes {
		if !v.Workspace() || sum > most {
			continue
		}
		used, err := overlay.Usage(ctx, v.Path, most-sum)
		if sum += used; err != nil {
			return sum, err
		}
	}
	return sum, nil
}

// due reports whether the files are to be counted: they could be near their limit by the free
// space of the filesystem, which it returns.
func (w *filesLimit) due() (is bool, free int64, err error) {
	var st unix.Statfs_t
	if err := unix.Statfs(w.upper, &st); err != nil {
		return true, 0, &fs.PathError{Op: "statfs", Path: w.upper, Err: err}
	}
	free = int64(st.Bfree) * st.Bsize
	old := time.Since(w.at)
	is = w.at.IsZero() || old > max(recount, 20*w.took) || w.free-free >= (w.most-w.used)/2 && old > 4*w.took
	return is, free, nil
}

// stayDown suppresses restarts: the sandbox would have just as many files.
func (w *filesLimit) stayDown(sb store.Sandbox) error {
	err := w.e.restarts.meant(sb)
	w.unsaid = err != nil
	return err
}

// kill ends a sandbox, but not while another verb is at work on it: a dump would not survive
// that, and a frozen sandbox writes nothing.
func (w *filesLimit) kill(ctx context.Context, c runtime.Container, used int64) error {
	sb, err := w.e.acquire(ctx, w.id, opWatch, lockWait)
	if err != nil {
		return err
	}
	defer sb.lock.Unlock()
	// Record the reason after the kill: before it, the disk may have had no room.
	op := runtime.ByItself("kill", subjectOf(sb.Sandbox),
		runtime.Own{
			By: runtime.ByWatch, Why: fmt.Sprintf("storage: its files take %d bytes, and may take %d", used, w.limit),
		})
	op.Signal = "KILL"
	if err := w.e.observed(ctx, op, func(ctx context.Context) error {
		return sb.host.Kill(ctx, w.id, "KILL")
	}); err != nil {
		return err
	}
	w.killed = c.Pid
	w.e.log.Warn("sandbox killed: storage limit exceeded", "sandbox", w.id, "limit", w.limit, "used", used)
	now := time.Now()
	return errors.Join(
		w.stayDown(sb.Sandbox),
		w.e.events.noteHit(w.id, &runtime.StorageHit{Time: now, Used: used, Limit: w.limit}),
		w.e.events.note(w.id, runtime.Event{Time: now, Type: runtime.EventStorage, Used: used, Limit: w.limit}),
	)
}
