package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/criu/crlog"
	"github.com/agentbox/agentbox/criu/freezer"
	"github.com/agentbox/agentbox/criu/host"
	"github.com/agentbox/agentbox/criu/stage"
	"github.com/agentbox/agentbox/internal/fault"
)

const (
	// A restore from damaged images was seen to loop and to write 50 MB of
	// log a second; an honest one writes a few MB for a thousand processes.
	maxLog    = 512 << 20
	keepLog   = 1 << 20
	lookAgain = time.Second
)

// restore does what the engine means by `create`: afterwards the container
// exists, with its processes as they were dumped, and none of them runs on
// before `start`. On failure nothing of it is left, but it stays staged.
func (w wrapper) restore(c call, r stage.Restore) int {
	if err := os.MkdirAll(r.Work, 0o700); err != nil {
		return w.fail(c, fmt.Errorf("restore of %s: %w", c.id, err))
	}
	log := filepath.Join(r.Work, "restore.log")
	if err := os.Remove(log); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return w.fail(c, fmt.Errorf("restore of %s: %w", c.id, err))
	}

	if err := ownCgroup(c, r); err != nil {
		return w.fail(c, fmt.Errorf("restore of %s: %w", c.id, err))
	}
	profile, err := w.confine(c, r)
	if err != nil {
		return w.fail(c, fmt.Errorf("restore of %s: %w", c.id, err))
	}
	args := append([]string{}, c.globals...)
	args = append(args, "restore", "--detach", "--bundle", c.bundle(), "--image-path", r.Images, "--work-path", r.Work)
	for _, f := range []string{"pid-file", "console-socket"} {
		if v := c.flags[f]; v != "" {
			args = append(args, "--"+f, v)
		}
	}
	if c.flags["no-pivot"] == "true" {
		args = append(args, "--no-pivot")
	}
	args = append(append(args, r.Flags...), c.id)

	if err := w.bounded(c, r, log, args); err != nil {
		why, _ := crlog.File(log)
		w.undo(c, r)
		if why.Reason != "" {
			err = errors.New(why.Reason)
			if why.Hint != "" {
				err = fmt.Errorf("%s. %s", why.Reason, why.Hint)
			}
			err = fmt.Errorf("%w [CRIU: %s] (log: %s)", err, why.Line, log)
		}
		return w.fail(c, fmt.Errorf("restore of %s failed: %w", c.id, err))
	}
	// The processes have been running since a moment ago. `create` promises
	// that they do not. Those that have ended already cannot.
	if err = freeze(c); err == nil {
		err = confined(c, profile)
	}
	if err != nil && !errors.Is(err, fault.ErrState) {
		w.undo(c, r)
		return w.fail(c, fmt.Errorf("restore of %s: %w", c.id, err))
	}
	if err := readOnly(c); err != nil {
		w.undo(c, r)
		return w.fail(c, fmt.Errorf("restore of %s: %w", c.id, err))
	}
	if err := w.settle(c, r); err != nil {
		w.undo(c, r)
		return w.fail(c, fmt.Errorf("restore of %s: network: %w", c.id, err))
	}
	if r.Paused || r.Held {
		if err := w.endStop(c, r.Stopped); err != nil {
			w.undo(c, r)
			return w.fail(c, fmt.Errorf("restore of %s: %w", c.id, err))
		}
	}
	if err := stage.MarkRestored(w.dir, c.slot); err != nil {
		w.undo(c, r)
		return w.fail(c, err)
	}
	return 0
}

func freeze(c call) error {
	box, err := freezer.Open(c.root, c.id)
	if err != nil {
		return err
	}
	return box.Freeze(context.Background())
}

func thaw(c call) error {
	box, err := freezer.Open(c.root, c.id)
	if err != nil {
		return err
	}
	return box.Thaw()
}

func frozen(c call) bool {
	box, err := freezer.Open(c.root, c.id)
	if err != nil {
		return false
	}
	is, err := box.Frozen()
	return is && err == nil && box.Alive()
}

// endStop takes back the stop in which CRIU left the processes of a frozen
// container: none of them runs before it thaws. Those that a signal had
// stopped before the dump stay so.
func (w wrapper) endStop(c call, stopped []int) error {
	out, err := w.quiet(c, "ps", "--format", "json", c.id).Output()
	if err != nil {
		return fmt.Errorf("list its processes: %w", err)
	}
	var pids []int
	if err := json.Unmarshal(out, &pids); err != nil {
		return fmt.Errorf("list its processes: %w", err)
	}
	for _, pid := range pids {
		inside, err := innerPid(pid)
		if err != nil {
			return err
		}
		if slices.Contains(stopped, inside) {
			continue
		}
		if err := syscall.Kill(pid, syscall.SIGCONT); err != nil {
			return fmt.Errorf("continue process %d: %w", pid, err)
		}
	}
	return nil
}

// innerPid is a process's pid in the innermost namespace it is in.
func innerPid(pid int) (int, error) {
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(status)) {
		if ids, ok := strings.CutPrefix(line, "NSpid:"); ok {
			fields := strings.Fields(ids)
			return strconv.Atoi(fields[len(fields)-1])
		}
	}
	return 0, fmt.Errorf("/proc/%d/status names no NSpid", pid)
}

// bounded runs the restore and kills it when it hangs or floods its log.
func (w wrapper) bounded(c call, r stage.Restore, log string, args []string) error {
	cmd := exec.Command(w.real, args...)
	// The restored processes get these as theirs.
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.Env = host.Environ()
	if err := cmd.Start(); err != nil {
		return err
	}
	done := make(chan error, 1)
	go func() { done <- cmd.Wait() }()
	timeout := r.Timeout
	if timeout <= 0 {
		timeout = stage.DefaultTimeout
	}
	deadline := time.NewTimer(timeout)
	defer deadline.Stop()
	look := time.NewTicker(lookAgain) // nothing tells of a file's growth
	defer look.Stop()
	for {
		var why error
		select {
		case err := <-done:
			return err
		case <-deadline.C:
			why = fmt.Errorf("it did not end within %v and was killed; %s", timeout.Round(time.Second), stands(log))
		case <-look.C:
			if stage.CalledOff(w.dir, c.slot) {
				why = fmt.Errorf("it was called off and killed; %s", stands(log))
				break
			}
			st, err := os.Stat(log)
			if err != nil || st.Size() < maxLog {
				continue
			}
			why = fmt.Errorf("CRIU filled its log without end and was killed; the images are probably damaged")
		}
		killTree(cmd.Process.Pid)
		<-done
		// The beginning tells enough, and the errors that killing it made tell nothing.
		if st, err := os.Stat(log); err == nil && st.Size() > keepLog {
			_ = os.Truncate(log, keepLog)
		}
		_ = os.Rename(log, log+".killed")
		return fmt.Errorf("%w (log: %s.killed)", why, log)
	}
}

// stands says how far a restore has come, by the last line of its log.
func stands(log string) string {
	f, err := os.Open(log)
	if err != nil {
		return "CRIU had not begun"
	}
	defer f.Close()
	end := make([]byte, 4<<10)
	st, err := f.Stat()
	if err != nil {
		return "its log cannot be read"
	}
	n, _ := f.ReadAt(end, max(0, st.Size()-int64(len(end))))
	lines := strings.Split(strings.TrimSpace(string(end[:n])), "\n")
	return fmt.Sprintf("CRIU stood at %q", strings.ToValidUTF8(lines[len(lines)-1], "?"))
}

// undo removes a half-restored container.
func (w wrapper) undo(c call, r stage.Restore) {
	// First, or `delete` would remove the container's files through a mount
	// that the restore left.
	if err := host.SweepRestore(c.root, c.id, r.Work); err != nil {
		fmt.Fprintln(os.Stderr, "agentbox-runtime:", err)
		return
	}
	if out, err := w.quiet(c, "delete", "--force", c.id).CombinedOutput(); err != nil {
		fmt.Fprintf(os.Stderr, "agentbox-runtime: delete %s: %s\n", c.id, bytes.TrimSpace(out))
	}
	if err := host.SweepTemp(); err != nil {
		fmt.Fprintln(os.Stderr, "agentbox-runtime:", err)
	}
	if p := c.flags["pid-file"]; p != "" {
		_ = os.Remove(p)
	}
}

// resume does what the engine means by `start`.
func (w wrapper) resume(c call) int {
	if stage.StaysPaused(w.dir, c.slot) {
		if err := stage.KeepPaused(w.dir, c.slot); err != nil {
			fmt.Fprintln(os.Stderr, "agentbox-runtime:", err)
		}
	} else if err := thaw(c); err != nil && !errors.Is(err, fault.ErrState) {
		// One that ended as soon as it was restored has nothing to resume.
		return w.fail(c, err)
	}
	if err := stage.ClearRestored(w.dir, c.slot); err != nil {
		fmt.Fprintln(os.Stderr, "agentbox-runtime:", err)
	}
	return 0
}

// delete lets the real runtime delete, forgets that the container was restored
// and begins what reaps it. What is staged and was not used stays: see package
// stage.
func (w wrapper) delete(c call, args []string) int {
	if err := host.SweepRestore(c.root, c.id, ""); err != nil {
		return w.fail(c, err)
	}
	cmd := exec.Command(w.real, args...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.Env = host.Environ()
	if err := cmd.Run(); err != nil {
		return exitCode(err)
	}
	if err := errors.Join(stage.ClearRestored(w.dir, c.slot), w.reap(c.slot)); err != nil {
		fmt.Fprintln(os.Stderr, "agentbox-runtime:", err)
	}
	return 0
}

// reap begins the command that was staged for the end of a container, once,
// and leaves it to itself: the engine waits for our output to end.
func (w wrapper) reap(id string) error {
	args, err := stage.TakeReap(w.dir, id)
	if err != nil || len(args) == 0 {
		return err
	}
	cmd := exec.Command(args[0], args[1:]...) // stdio is /dev/null; all else of ours is close-on-exec
	cmd.Env = host.Environ()
	cmd.Dir = "/"
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := closeOnExec(); err != nil {
		return fmt.Errorf("%s: %w", args[0], err)
	}
	return cmd.Start()
}

// closeOnExec keeps what the engine left open for us from our children.
func closeOnExec() error {
	err := unix.CloseRange(3, math.MaxUint32, unix.CLOSE_RANGE_CLOEXEC)
	if err != unix.ENOSYS && err != unix.EINVAL { // Linux before 5.11 has it not
		return err
	}
	fds, err := os.ReadDir("/proc/self/fd")
	for _, e := range fds {
		if fd, err := strconv.Atoi(e.Name()); err == nil && fd > 2 {
			unix.CloseOnExec(fd)
		}
	}
	return err
}

// quiet runs another verb of the real runtime with the same globals, for our
// own errands: the engine must not find their errors in its log.
func (w wrapper) quiet(c call, args ...string) *exec.Cmd {
	global := append(append([]string{}, c.globals...), "--log", "/dev/stderr")
	cmd := exec.Command(w.real, append(global, args...)...)
	cmd.Env = host.Environ()
	return cmd
}

// fail says why on stderr and in the runtime's log, where engines look for it.
func (w wrapper) fail(c call, err error) int {
	msg := strings.Join(strings.Fields(err.Error()), " ")
	fmt.Fprintln(os.Stderr, "agentbox-runtime:", msg)
	if c.log == "" || c.log == "/dev/stderr" {
		return 1
	}
	f, ferr := os.OpenFile(c.log, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o644)
	if ferr != nil {
		return 1
	}
	defer f.Close()
	now := time.Now().Format(time.RFC3339)
	if c.logJSON {
		line, _ := json.Marshal(struct {
			Level string `json:"level"`
			Msg   string `json:"msg"`
			Time  string `json:"time"`
		}{"error", msg, now})
		fmt.Fprintf(f, "%s\n", line)
	} else {
		fmt.Fprintf(f, "time=%q level=error msg=%q\n", now, msg)
	}
	return 1
}

func exitCode(err error) int {
	var e *exec.ExitError
	if !errors.As(err, &e) {
		fmt.Fprintln(os.Stderr, "agentbox-runtime:", err)
		return 126
	}
	if code := e.ExitCode(); code >= 0 {
		return code
	}
	return 137 // killed by a signal
}
