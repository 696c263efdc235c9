package freezer

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/failpoint"
	"github.com/agentbox/agentbox/internal/guard"
)

// On cgroups of v1 a tracer cannot attach to a thread that a signal has stopped
// (kill -STOP, Ctrl-Z) and that is frozen: PTRACE_SEIZE waits until the thread has
// gone from the one stop into the other, for which it has to be thawed, and nothing
// but a kill ends that wait. So while a tracer waits the thread is taken out of the
// frozen cgroup, alone, and brought back. Stopped as it is, it runs no instruction of
// its program meanwhile, and neither it nor its parent notices.

// outLimit is how long a thread may stay out of its cgroup.
const outLimit = time.Second

// Stopped reports whether a signal has stopped a thread. A frozen one shows only by
// where it waits in the kernel: the state of both versions' freezers hides the stop.
func Stopped(tid int) bool {
	state, _, ok := thread(tid)
	if !ok || state != "T" && state != "D" {
		return false
	}
	return state == "T" || Waits(tid) == "do_signal_stop"
}

// Waits names the function of the kernel that a thread waits in; empty: none, or not known.
func Waits(tid int) string {
	where, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%d/wchan", tid, tid))
	if err != nil || string(where) == "0" {
		return ""
	}
	return string(where)
}

// Halts reports whether the function of the kernel that a thread waits in is one where
// threads stand in a freezer. By name that of v2 is get_signal where the compiler has made
// do_freezer_trap a part of it, as Debian 13's has.
func Halts(where string) bool {
	return strings.Contains(where, "refrigerator") || strings.Contains(where, "freezer_trap") || where == "get_signal"
}

// seizing returns the thread that a tracer, a thread itself, waits to attach to; 0: it
// does not.
func seizing(tracer int) int {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%d/syscall", tracer, tracer))
	f := strings.Fields(string(data))
	if err != nil || len(f) < 3 || f[0] != strconv.Itoa(unix.SYS_PTRACE) ||
		f[1] != fmt.Sprintf("%#x", unix.PTRACE_SEIZE) {
		return 0
	}
	tid, err := strconv.ParseInt(strings.TrimPrefix(f[2], "0x"), 16, 32)
	if err != nil {
		return 0
	}
	return int(tid)
}

// Unstick helps a tracer that waits to attach to a stopped thread of the frozen
// container. It reports whether there was something to help with. A tracer that is
// another process goes on only once the thread is back: CRIU records the cgroup of
// each thread.
func (c Container) Unstick(tracer int) (bool, error) {
	tid := seizing(tracer)
	if tid == 0 || c.v2 {
		return false, nil
	}
	if seizing(tracer) != tid || !Stopped(tid) {
		return false, nil // it takes a moment, but no help
	}
	if err := failpoint.Hit("stopped.unstick"); err != nil {
		return false, err
	}
	attached := func() bool { return seizing(tracer) != tid }
	if _, err := os.Stat(fmt.Sprintf("/proc/self/task/%d", tracer)); errors.Is(err, fs.ErrNotExist) {
		// The stop takes effect behind the call that waits; until then it is D.
		if err := unix.Kill(tracer, unix.SIGSTOP); err != nil {
			return false, nil // it has ended
		}
		defer func() { _ = unix.Kill(tracer, unix.SIGCONT) }()
		attached = func() bool { state, _, ok := thread(tracer); return !ok || state == "T" }
	}
	back, err := c.takeOut(tid)
	if err != nil || back == nil {
		return false, err
	}
	for begun := time.Now(); !attached() && time.Since(begun) < outLimit; {
		time.Sleep(50 * time.Microsecond)
	}
	return true, back()
}

// takeOut moves a thread of the container from its frozen cgroup of v1 into the one
// above, which is not frozen; back moves it back. Nil: it has ended, or is not of the container.
func (c Container) takeOut(tid int) (back func() error, err error) {
	home, err := c.home(tid)
	if err != nil || home == "" {
		return nil, err
	}
	above := filepath.Dir(c.dir)
	if data, err := os.ReadFile(filepath.Join(above, "freezer.state")); err == nil && !hasLine(data, "THAWED") {
		return nil, fmt.Errorf("stopped thread %d: the cgroup above that of its container is frozen, too", tid)
	}
	if err := errors.Join(moveTo(above, tid), failpoint.Hit("stopped.out")); err != nil {
		return nil, errors.Join(err, moveTo(home, tid))
	}
	return func() error { return moveTo(home, tid) }, nil
}

// moveTo gives a thread to a cgroup. One that has ended is nil.
func moveTo(dir string, tid int) error {
	f, err := os.OpenFile(filepath.Join(dir, "tasks"), os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	if _, err = f.WriteString(strconv.Itoa(tid)); errors.Is(err, unix.ESRCH) {
		return nil
	}
	return err
}

// home is the cgroup of v1 that a thread of the container is in, empty: none of the container's.
func (c Container) home(tid int) (home string, err error) {
	err = filepath.WalkDir(c.dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || !d.IsDir() {
			return nil // gone, or a file
		}
		data, err := os.ReadFile(filepath.Join(path, "tasks"))
		if err == nil && slices.Contains(strings.Fields(string(data)), strconv.Itoa(tid)) {
			home = path
			return filepath.SkipAll
		}
		return nil
	})
	return home, err
}

// Gather brings back the thread that a process which was killed has left outside of the
// container's cgroup: it had taken it out because it was stopped.
func (c Container) Gather() error {
	if c.v2 || !c.Alive() {
		return nil
	}
	ns, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/pid", c.Pid))
	if err != nil {
		return nil // it has ended
	}
	if own, err := os.Readlink("/proc/self/ns/pid"); err != nil || own == ns {
		return err // it shares that of the host, and its threads cannot be told from others
	}
	data, err := os.ReadFile(filepath.Join(filepath.Dir(c.dir), "tasks"))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	for _, field := range strings.Fields(string(data)) {
		link, e := os.Readlink("/proc/" + field + "/ns/pid")
		if tid, _ := strconv.Atoi(field); e == nil && link == ns {
			err = errors.Join(err, moveTo(c.dir, tid))
		}
	}
	if err != nil {
		return fmt.Errorf("container %s: stopped threads: %w", c.ID, err)
	}
	return nil
}

// assist unsticks this process' own thread, which attaches to others, until the
// returned function is called.
func (c Container) assist() (end func() error) {
	self, quit, done := unix.Gettid(), make(chan struct{}), make(chan error, 1)
	guard.Go(func() {
		var errs []error
		for {
			select {
			case <-quit:
				done <- errors.Join(errs...)
				return
			case <-time.After(2 * time.Millisecond): // no event says that a thread waits
				if _, err := c.Unstick(self); err != nil && len(errs) < 3 {
					errs = append(errs, err)
				}
			}
		}
	})
	return func() error { close(quit); return <-done }
}

// PlainStops makes every stop by SIGTTIN or SIGTTOU (a job in the background that wants
// the terminal) of the frozen container one by SIGSTOP, which CRIU knows. The parent is
// told nothing of it, and what it has not been told of the stop yet it still will be.
func (c Container) PlainStops(ctx context.Context, stopped []int) error {
	if c.v2 || len(stopped) == 0 {
		return nil
	}
	var err error
	onThread(func() {
		for _, tid := range stopped {
			if err = errors.Join(ctx.Err(), c.plainStop(tid)); err != nil {
				return
			}
		}
	})
	if err != nil {
		return fmt.Errorf("container %s: %w", c.ID, err)
	}
	return nil
}

func (c Container) plainStop(tid int) (err error) {
	back, err := c.takeOut(tid)
	if err != nil || back == nil {
		return err
	}
	defer func() { err = errors.Join(err, back()) }()
	held, err := seize(tid)
	if err != nil || !held {
		return err
	}
	signal, err := stopSignal(tid)
	if err != nil || signal == 0 {
		return err
	}
	if signal == unix.SIGTTIN || signal == unix.SIGTTOU {
		// The kernel takes the signal before the thread is back in its program, and
		// with that begins a stop in the stop.
		err = unix.Tgkill(processOf(tid), tid, unix.SIGSTOP)
		for try := 0; err == nil && signal != unix.SIGSTOP && try < 8; try++ {
			if err = unix.PtraceCont(tid, 0); err == nil {
				signal, err = stopSignal(tid)
			}
		}
	}
	if e := unix.PtraceDetach(tid); e != nil && !gone(tid) {
		err = errors.Join(err, e)
	}
	for begun := time.Now(); !Stopped(tid) && !gone(tid) && time.Since(begun) < outLimit; {
		time.Sleep(50 * time.Microsecond)
	}
	if err != nil && gone(tid) {
		return nil
	}
	return err
}

// stopSignal waits until a seized thread has stopped, and returns by what signal its
// process is; 0: it has ended.
func stopSignal(tid int) (unix.Signal, error) {
	held, status, err := stopsBy(tid)
	if err != nil || !held {
		return 0, err
	}
	return status.StopSignal(), nil
}

// processOf is the process of a thread.
func processOf(tid int) int {
	data, _ := os.ReadFile(fmt.Sprintf("/proc/%d/status", tid))
	_, after, _ := strings.Cut(string(data), "\nTgid:")
	line, _, _ := strings.Cut(after, "\n")
	pid, _ := strconv.Atoi(strings.TrimSpace(line))
	return pid
}
