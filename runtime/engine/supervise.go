package engine

import (
	"context"
	"errors"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	goruntime "runtime"
	"strings"
	"sync"
	"time"

	"github.com/agentbox/agentbox/internal/flock"
	"github.com/agentbox/agentbox/internal/guard"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/internal/kernel"
)

// One process supervises all of a root: limits, restarts, checkpoints at intervals and leases
// (Engine.Supervise). The marks (marks.go) tell what there is to supervise. A process that
// writes a mark takes the lock RUN/supervisor, if that is free, and starts the supervisor,
// which gets the locked file as a descriptor: from then on there is never none and never two.
// The supervisor ends with its last mark. What a killed one has missed, the next command does,
// and starts another (ReviveOfBoot).

// supervisor is the process that supervises the root, and what starts it.
type supervisor struct {
	*core

	events    *eventLog
	restarts  *restartLog
	marks     *marks
	sandboxes *sandboxes
	restores  *restores
	limits    *limits
	leases    *leases
	recovery  *recovery

	start  func(lock *os.File) error // see Options.Supervisor
	engine *Engine                   // takes checkpoints at intervals
}

// Supervision is the right to supervise a root: the lock RUN/supervisor. The locked file is
// also the log of the supervisor.
type Supervision struct {
	path string
	mu   sync.Mutex
	lock *flock.Handle
	size int64

	stays bool // even if the program was replaced
}

// passedLock is the descriptor by which a supervisor gets its lock.
const passedLock = 3

func supervisorPath(run string) string { return filepath.Join(run, "supervisor") }

// TakeSupervision takes the lock of the directory run, which the process that started this one
// may have passed on. Nil: another process has it, or the directory is gone.
func TakeSupervision(run string) (*Supervision, error) {
	s := &Supervision{path: supervisorPath(run)}
	lock, err := flock.Passed(passedLock, s.path)
	if errors.Is(err, fs.ErrNotExist) {
		return s.again()
	}
	return s.with(lock, err)
}

// again takes the lock if it is free, as TakeSupervision does.
func (s *Supervision) again() (*Supervision, error) { return s.with(flock.Try(s.path, flock.Append)) }

func (s *Supervision) with(lock *flock.Handle, err error) (*Supervision, error) {
	if errors.Is(err, flock.ErrHeld) || errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.lock, s.size = lock, 0
	if info, err := lock.File().Stat(); err == nil {
		s.size = info.Size() // of the log of a killed supervisor
	}
	return s, nil
}

// maxLog is the size in bytes at which the log of the supervisor begins anew.
const maxLog = 1 << 20

// Write writes to the log.
func (s *Supervision) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.size += int64(len(p)); s.size > maxLog {
		s.size = int64(len(p))
		if err := s.lock.File().Truncate(0); err != nil {
			return 0, err
		}
	}
	return s.lock.File().Write(p)
}

// Release lets go of the lock; over: nothing is left to supervise, and the log goes.
func (s *Supervision) Release(over bool) {
	if over && s.lock.Named() { // else the name is that of another supervisor's
		_ = os.Remove(s.path)
	}
	s.lock.Unlock()
}

// takeSupervisor takes the lock for a supervisor that is to be started.
func (sv *supervisor) takeSupervisor() (*flock.Handle, error) {
	if err := os.MkdirAll(sv.run, 0o700); err != nil {
		return nil, err
	}
	return flock.Try(supervisorPath(sv.run), flock.Append)
}

// startSupervisor starts a supervisor, unless there is one.
func (sv *supervisor) startSupervisor() error {
	lock, err := sv.takeSupervisor()
	if errors.Is(err, flock.ErrHeld) {
		return nil
	}
	if err != nil {
		return err
	}
	return sv.passSupervisor(lock)
}

// passSupervisor starts a supervisor with the lock.
func (sv *supervisor) passSupervisor(lock *flock.Handle) (err error) {
	started := sv.start != nil
	if started {
		err = sv.start(lock.Pass())
	}
	if !started || err != nil {
		return errors.Join(err, lock.Remove())
	}
	lock.Unlock()
	return nil
}

// superviseFromNow has a sandbox that has started, or was changed, supervised.
func (sv *supervisor) superviseFromNow(s runtime.Spec) {
	if sv.start == nil {
		return
	}
	err := sv.marks.mark(s)
	if err == nil && supervised(s) {
		err = sv.startSupervisor()
	}
	if err != nil {
		sv.log.Error("supervisor not started; limits are not enforced", "sandbox", s.ID, "err", err)
	}
}

// Revive is ReviveOfBoot for the service and for Reconcile: it also has sandboxes supervised,
// and started as their restart policies say, that were started in an earlier boot of the host.
func (e *Engine) Revive(ctx context.Context) error { return e.supervisor.revive(ctx) }

func (sv *supervisor) revive(ctx context.Context) error {
	err := sv.marks.adopt()
	return errors.Join(fail("supervise", "", err), sv.reviveOfBoot(ctx))
}

// ReviveOfBoot does what fell due while there was no supervisor, and starts one if something
// is to be supervised. Every command calls it first; it is quick when there is nothing to do.
// It starts no sandbox that was not started in this boot of the host.
func (e *Engine) ReviveOfBoot(ctx context.Context) error { return e.supervisor.reviveOfBoot(ctx) }

func (sv *supervisor) reviveOfBoot(ctx context.Context) (err error) {
	defer func() { err = fail("supervise", "", err) }()
	errs := []error{sv.marks.replaceWatches()}
	for {
		marks, err := sv.marks.all()
		if err != nil {
			return errors.Join(append(errs, err)...)
		}
		needed := false
		catchUp := func(current bool) {
			for id, m := range marks {
				if m.current() != current {
					continue
				}
				err := guard.Do(func() error {
					needs, err := sv.missed(ctx, id, m)
					needed = needed || needs
					return err
				})
				if err != nil {
					errs = append(errs, fail("supervise", short(id), err))
				}
			}
		}
		catchUp(false)
		if !needed && !anyCurrent(marks) {
			return errors.Join(errs...)
		}

		lock, err := sv.takeSupervisor()
		if errors.Is(err, flock.ErrHeld) {
			return errors.Join(errs...)
		}
		if err != nil {
			return errors.Join(append(errs, err)...)
		}
		catchUp(true)
		if needed {
			return errors.Join(append(errs, sv.passSupervisor(lock))...)
		}
		// Look again: a process that has just written a mark may have found the lock taken.
		if err := lock.Remove(); err != nil {
			return errors.Join(append(errs, err)...)
		}
	}
}

func anyCurrent(marks map[string]mark) bool {
	for _, m := range marks {
		if m.current() {
			return true
		}
	}
	return false
}

// engineWait bounds how long a command waits for the engine of a sandbox that it only may have
// to supervise.
const engineWait = time.Second

// missed does what fell due for a sandbox, or for leases, while no supervisor ran, and reports
// whether one is needed. m is its mark.
func (sv *supervisor) missed(ctx context.Context, id string, m mark) (needs bool, err error) {
	if id == leasesMark {
		over, err := sv.leases.noLeases(ctx, m)
		return !over && m.current(), err
	}
	sb, err := sv.store.Sandbox(ctx, id)
	if errors.Is(err, runtime.ErrNotFound) {
		is, err := sv.settled(ctx, id, m)
		return !is && m.current(), err
	}
	if err != nil {
		return m.current(), err
	}
	s, err := spec(sb)
	if err != nil {
		return m.current(), err
	}

	if expired(s.Lifetime) {
		done, err := sv.limits.expire(ctx, id)
		if done && err == nil {
			done, err = sv.settled(ctx, id, m)
		}
		if errors.Is(err, runtime.ErrBusy) {
			err = nil // tried again later
		}
		return !done && m.current(), err
	}
	if m.current() {
		return true, nil
	}

	// It was started before the host was.
	host, err := sv.host(sb.Backend)
	if err != nil {
		return false, err
	}
	soon, cancel := context.WithTimeout(ctx, engineWait)
	defer cancel()
	c, err := host.Inspect(soon, id)
	switch {
	case err != nil && !errors.Is(err, runtime.ErrNotFound):
		return false, nil // its engine does not answer
	case c.Status == runtime.Running || c.Status == runtime.Paused:
		return true, sv.marks.set(id, bootID())
	case s.AutoRemove && s.Lifetime.TTL > 0 && !sb.Kept:
		return false, nil // its end was not seen, so its TTL removes it
	}
	if back, _, err := sv.comesBack(ctx, sb, s, c); back || err != nil {
		return false, err // by the service, or `agentbox recover`
	}
	if _, err = sv.settled(ctx, id, m); errors.Is(err, runtime.ErrBusy) {
		err = nil
	}
	return false, err
}

// settled removes the mark of a sandbox that needs no supervisor, unless the mark was written
// again since it was m.
func (sv *supervisor) settled(ctx context.Context, id string, m mark) (is bool, err error) {
	_, err = sv.store.Sandbox(ctx, id)
	if err == nil {
		lock, err := sv.store.Lock(ctx, id, opWatch, lockWait)
		if err != nil {
			return false, err
		}
		defer lock.Unlock()
	} else if !errors.Is(err, runtime.ErrNotFound) {
		return false, err
	}
	if now, marked, err := sv.marks.read(id); err != nil || now != m {
		return err == nil && !marked, err
	}
	err = sv.marks.remove(id)
	return err == nil, err
}

// Supervise enforces limits, restarts sandboxes, takes checkpoints at intervals and ends
// leases, until there is nothing to supervise. It takes over the lock. ErrNotFound: the root
// was removed.
func (e *Engine) Supervise(ctx context.Context, lock *Supervision) error {
	return e.supervisor.untilOver(ctx, lock)
}

func (sv *supervisor) untilOver(ctx context.Context, lock *Supervision) error {
	goruntime.GC() // little memory counts for more than a quick start: see internal/gclater

	// The last supervisor may have been killed in a checkpoint, with the sandbox frozen.
	var recovering guard.WaitGroup
	defer recovering.Wait()
	recovering.Go(func() {
		if _, err := sv.recovery.recoverFor(ctx, runtime.Own{Alone: true}); err != nil && ctx.Err() == nil {
			sv.log.Error("recovery failed; `agentbox recover` retries", "err", err)
		}
	})

	for {
		err := sv.supervise(ctx, lock)
		if errors.Is(err, errReplaced) {
			if err = sv.start(lock.lock.Pass()); err == nil {
				lock.lock.Unlock()
				return nil
			}
			sv.log.Error("program replaced, new supervisor not started", "err", err)
			lock.stays = true
			continue
		}
		if err != nil && ctx.Err() == nil {
			sv.log.Error("supervisor ended", "err", err)
		}
		lock.Release(ctx.Err() == nil && (err == nil || errors.Is(err, runtime.ErrNotFound)))
		if err != nil {
			return fail("supervise", "", err)
		}
		// A mark that was written before the lock was free, by a process that found it taken.
		marks, err := sv.marks.all()
		if err != nil || !anyCurrent(marks) {
			return fail("supervise", "", err)
		}
		if lock, err = lock.again(); lock == nil || err != nil {
			return fail("supervise", "", err)
		}
	}
}

// supervising is the supervisor at work.
type supervising struct {
	e     *supervisor
	wards map[string]*ward
	ended chan string // names of marks whose goroutine has ended
	all   guard.WaitGroup
}

// ward is a mark that a goroutine of its own attends to.
type ward struct {
	mark mark          // as last seen; empty: it is gone
	news chan struct{} // the mark has changed
}

func (sv *supervisor) supervise(ctx context.Context, lock *Supervision) error {
	if err := os.Mkdir(sv.marks.dir(), 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return sv.unlessGone(err)
	}
	changed, err := kernel.Watch(sv.marks.dir(), lock.path)
	if err != nil {
		return sv.unlessGone(err)
	}
	defer changed.Close()
	s := &supervising{e: sv, wards: map[string]*ward{}, ended: make(chan string)}
	defer s.all.Wait()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()

	var failed failures
	for {
		if sv.store.Gone() {
			return runtime.ErrNotFound
		}
		if !lock.lock.Named() {
			return nil // another process may have taken another lock
		}
		if !lock.stays && replaced() {
			return errReplaced
		}
		marks, err := sv.marks.all()
		if err == nil {
			s.update(ctx, marks)
			if len(s.wards) == 0 {
				return nil
			}
		}
		var again <-chan time.Time
		if pause := failed.pause(sv.log, err, "supervisor"); pause > 0 {
			again = time.After(pause)
		}

		select {
		case <-changed.Events:
		case id := <-s.ended:
			delete(s.wards, id)
		case <-again:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// errReplaced has the supervisor make way for one of the program that has replaced its own: an
// upgrade must not leave sandboxes to the old one for as long as there are any.
var errReplaced = errors.New("the program was replaced")

func replaced() bool {
	path, err := os.Readlink("/proc/self/exe")
	return err == nil && strings.HasSuffix(path, " (deleted)")
}

// unlessGone explains an error of a path that may be gone: with the root, or by itself.
func (sv *supervisor) unlessGone(err error) error {
	if sv.store.Gone() {
		return runtime.ErrNotFound
	}
	return ignoreMissing(err)
}

// update starts a goroutine for each new mark of this boot, and tells those of marks that have
// changed.
func (s *supervising) update(ctx context.Context, marks map[string]mark) {
	for id, m := range marks {
		if s.wards[id] == nil && m.current() {
			w := &ward{mark: m, news: make(chan struct{}, 1)}
			s.wards[id] = w
			s.start(ctx, id, w.news)
		}
	}
	for id, w := range s.wards {
		if now := marks[id]; now != w.mark {
			w.mark = now
			select {
			case w.news <- struct{}{}:
			default: // a message is pending already
			}
		}
	}
}

// start attends to a mark until nothing is to be done, or the mark is gone.
func (s *supervising) start(ctx context.Context, id string, news <-chan struct{}) {
	s.all.Go(func() {
		defer func() {
			select {
			case s.ended <- id:
			case <-ctx.Done():
			}
		}()
		_ = guard.Do(func() error { // a panic is in the log, and ends no other goroutine
			if id == leasesMark {
				s.e.leases.keepLeases(ctx, news)
			} else {
				s.e.guardSandbox(ctx, id, news)
			}
			return nil
		})
	})
}

// failures are those of repeated work in a row.
type failures struct {
	said string
	wait time.Duration
}

// pause returns how long to wait after err: longer with each failure, at most latest; 0: it was
// none. Each cause is logged once. What is busy is no failure.
func (f *failures) pause(log *slog.Logger, err error, what string, attrs ...any) time.Duration {
	switch {
	case err == nil:
		if f.said != "" {
			log.Info(what+" recovered", attrs...)
		}
		*f = failures{}
		return 0
	case errors.Is(err, runtime.ErrBusy):
		return time.Second
	case err.Error() != f.said:
		f.said = err.Error()
		log.Warn(what+" failed", append(attrs, "err", err)...)
	}
	f.wait = min(max(2*f.wait, time.Second), latest)
	return f.wait
}
