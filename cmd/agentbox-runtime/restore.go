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
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/criu/crlog"
	"github.com/agentbox/agentbox/criu/freezer"
	"github.com/agentbox/agentbox/criu/host"
	"github.com/agentbox/agentbox/criu/stage"
	"github.com/agentbox/agentbox/criu/wall"
	"github.com/agentbox/agentbox/internal/fault"
)

const (
	// A restore from damaged images was seen to loop and to write 50 MB of
	// log a second; an honest one writes a few MB for a thousand processes.
	maxLog    = 512 << 20
	keepLog   = 1 << 20
	lookAgain = 50 * time.Millisecond
	// killLimit is how long what was killed may take to end.
	killLimit = 10 * time.Second
)

// restore does what the engine means by `create`: afterwards the container
// exists, with its processes as they were dumped, and none of them runs on
// before `start`. On failure nothing of it is left, but it stays staged.
func (w wrapper) restore(c call, r stage.Restore) int {
	if err := os.MkdirAll(r.Work, 0o700); err != nil {
		return w.fail(c, fmt.Errorf("restore of %s: %w", c.id, err))
	}
	log := filepath.Join(r.Work, "restore.log")
	for _, old := range []string{log, log + killedLog} {
		if err := os.Remove(old); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return w.fail(c, fmt.Errorf("restore of %s: %w", c.id, err))
		}
	}
	if err := crlog.ClearFailure(r.Work); err != nil {
		return w.fail(c, fmt.Errorf("restore of %s: %w", c.id, err))
	}

	if err := ownCgroup(c, r); err != nil {
		return w.unrestored(c, r, reason(err))
	}
	if err := holds(r.Config); err != nil {
		return w.unrestored(c, r, reason(err))
	}
	spec, err := judge(c, r)
	if err != nil {
		return w.unrestored(c, r, reason(err))
	}
	profile, err := w.confine(c, r)
	if err != nil {
		return w.unrestored(c, r, reason(err))
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
		why := explain(log, err)
		w.undo(c, r)
		return w.unrestored(c, r, why)
	}
	if err := w.complete(c, r, spec, profile); err != nil {
		w.undo(c, r)
		return w.unrestored(c, r, reason(err))
	}
	return 0
}

// complete makes of what CRIU has restored what the engine is promised. The action script
// has frozen the processes before any has run; those that have ended cannot be.
func (w wrapper) complete(c call, r stage.Restore, spec *wall.Spec, profile string) error {
	err := held(c)
	if err == nil {
		err = errors.Join(confined(c, profile), prove(c, r, spec))
	}
	if err != nil && !errors.Is(err, fault.ErrState) {
		return err
	}
	ended := errors.Is(err, fault.ErrState)
	if err := readOnly(c); err != nil {
		return err
	}
	if !ended {
		if err := walled(c, spec); err != nil {
			return err
		}
	}
	if err := putTimes(c, r.Times); err != nil {
		return err
	}
	if err := w.settle(c, r); err != nil {
		return fmt.Errorf("network: %w", err)
	}
	return c.slot.MarkRestored()
}

// killedLog is added to the name of the log of a CRIU that was killed.
const killedLog = ".killed"

// cutShort is a restore that was ended, or whose CRIU was.
type cutShort struct {
	why string
	log string // what CRIU had written; empty: nothing
}

func (c cutShort) Error() string { return c.why }

// explain says why a restore failed: what CRIU's log tells, or why CRIU was killed.
func explain(log string, err error) crlog.Failure {
	var cut cutShort
	if errors.As(err, &cut) {
		return crlog.Failure{
			Diagnosis: crlog.Diagnosis{
				Code: "killed", Reason: cut.why,
				Hint: "Try again; if it fails again, restore another checkpoint, or the files alone (--files-only).",
			},
			Log: cut.log,
		}
	}
	why, e := crlog.File(log)
	if e != nil { // CRIU was not reached, and the runtime has said why
		return crlog.Failure{}
	}
	if why.Reason == "" {
		why.Reason = fmt.Sprintf("CRIU failed and its log names no error (%v)", err)
	}
	return crlog.Failure{Diagnosis: why, Log: log}
}

// unrestored says why a restore failed as fail does, and leaves it for the engine.
func (w wrapper) unrestored(c call, r stage.Restore, why crlog.Failure) int {
	if why.Reason == "" {
		return w.fail(c, fmt.Errorf("restore of %s failed", c.id))
	}
	if err := why.Write(r.Work); err != nil {
		fmt.Fprintln(os.Stderr, "agentbox-runtime:", err)
	}
	text := strings.TrimSuffix(why.Reason, ".")
	if why.Hint != "" {
		text += ". " + why.Hint
	}
	if why.Log != "" {
		text += " (log: " + why.Log + ")"
	}
	return w.fail(c, fmt.Errorf("restore of %s failed: %s", c.id, text))
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

// bounded runs the restore. It kills it when it hangs or floods its log, when it is called
// off, and when its CRIU was killed: what that had restored by then may keep the runtime
// waiting without end.
func (w wrapper) bounded(c call, r stage.Restore, log string, args []string) error {
	cmd := exec.Command(w.real, args...)
	// The restored processes get these as theirs.
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.Env = append(host.Environ(), envHoldRoot+"="+c.root, envHoldID+"="+c.id,
		envHoldPid+"="+strconv.Itoa(os.Getpid()))
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
	look := time.NewTicker(lookAgain) // a file's growth raises no event
	defer look.Stop()
	s := sight{runtime: cmd.Process.Pid, id: c.id, log: log}
	for {
		why := ""
		select {
		case err := <-done:
			if err == nil {
				return nil
			}
			s.clear()
			if !silent(log) {
				return err
			}
			return cutShort{"CRIU was killed; " + stands(log), setAside(log)}
		case <-deadline.C:
			why = fmt.Sprintf("the restore did not end within %v and was killed; %s",
				timeout.Round(time.Second), stands(log))
		case <-look.C:
			st, err := os.Stat(log)
			switch {
			case s.died():
				why = "CRIU was killed, by the kernel for lack of memory or by another process; " + stands(log)
			case c.slot.CalledOff():
				why = "the restore was called off and killed; " + stands(log)
			case err == nil && st.Size() >= maxLog:
				why = "CRIU filled its log without end and was killed; the images are probably damaged"
			default:
				continue
			}
		}
		killTree(cmd.Process.Pid)
		s.clear()
		select {
		case <-done:
		case <-time.After(killLimit): // it waits in the kernel
			why += fmt.Sprintf("; process %d has not ended by that yet", cmd.Process.Pid)
		}
		return cutShort{why, setAside(log)}
	}
}

// setAside gives the log of a CRIU that was killed another name. The beginning tells enough,
// and the errors that killing it made tell nothing.
func setAside(log string) string {
	if st, err := os.Stat(log); err == nil && st.Size() > keepLog {
		_ = os.Truncate(log, keepLog)
	}
	if err := os.Rename(log, log+killedLog); err != nil {
		return ""
	}
	return log + killedLog
}

// silent reports whether a CRIU that has ended says nothing of why in its log: only one that
// was killed does not.
func silent(log string) bool {
	why, err := crlog.File(log)
	return err == nil && why.Reason == "" && !finished(log)
}

// finished reports whether CRIU has done its part of a restore.
func finished(log string) bool {
	end, err := tail(log)
	return err == nil && strings.Contains(end, "Restore finished successfully")
}

// stands says how far a restore has come, by the last line of its log.
func stands(log string) string {
	end, err := tail(log)
	if err != nil {
		return "CRIU had not begun"
	}
	lines := strings.Split(strings.TrimSpace(end), "\n")
	return fmt.Sprintf("CRIU stood at %q", strings.ToValidUTF8(lines[len(lines)-1], "?"))
}

// tail returns the end of a log.
func tail(log string) (string, error) {
	f, err := os.Open(log)
	if err != nil {
		return "", err
	}
	defer f.Close()
	end := make([]byte, 4<<10)
	st, err := f.Stat()
	if err != nil {
		return "", err
	}
	n, _ := f.ReadAt(end, max(0, st.Size()-int64(len(end))))
	return string(end[:n]), nil
}

// undo removes a half-restored container.
func (w wrapper) undo(c call, r stage.Restore) {
	// First, or `delete` would remove the container's files through a mount
	// that the restore left.
	if err := host.SweepRestore(c.root, c.id, r.Work); err != nil {
		fmt.Fprintln(os.Stderr, "agentbox-runtime:", err)
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), 3*killLimit)
	defer cancel()
	if out, err := w.quiet(ctx, c, "delete", "--force", c.id).CombinedOutput(); err != nil {
		fmt.Fprintf(os.Stderr, "agentbox-runtime: delete %s: %s\n", c.id, bytes.TrimSpace(out))
	}
	if _, err := host.EndOrphans(); err != nil {
		fmt.Fprintln(os.Stderr, "agentbox-runtime:", err)
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
	if c.slot.StaysPaused() {
		if err := c.slot.KeepPaused(); err != nil {
			fmt.Fprintln(os.Stderr, "agentbox-runtime:", err)
		}
	} else if err := thaw(c); err != nil && !errors.Is(err, fault.ErrState) {
		// One that ended as soon as it was restored has nothing to resume.
		return w.fail(c, err)
	}
	if err := c.slot.ClearRestored(); err != nil {
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
	if err := errors.Join(c.slot.ClearRestored(), w.reap(c.slot)); err != nil {
		fmt.Fprintln(os.Stderr, "agentbox-runtime:", err)
	}
	return 0
}

// reap begins the command that was staged for the end of a container, once,
// and leaves it to itself: the engine waits for our output to end.
func (w wrapper) reap(at stage.Slot) error {
	args, err := at.TakeReap()
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
func (w wrapper) quiet(ctx context.Context, c call, args ...string) *exec.Cmd {
	global := append(append([]string{}, c.globals...), "--log", "/dev/stderr")
	cmd := exec.CommandContext(ctx, w.real, append(global, args...)...)
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
