package engine

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	goruntime "runtime"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/policy"
	"github.com/agentbox/agentbox/runtime"
)

// hostPath is the PATH for programs of the host that run as root.
const hostPath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// maxHostOutput is how much output of a program of the host is kept.
const maxHostOutput = 1 << 10

// errKilled: a program was killed before it had finished.
var errKilled = errors.New("killed")

// hostRun runs a program of the host as root. At the timeout, or when ctx ends, it kills the
// program and its process group; the program also dies with agentbox. After an error other
// than errKilled the program has ended by itself, or was not started.
func hostRun(ctx context.Context, argv, env []string, stdin []byte, timeout time.Duration) (said string, err error) {
	// Check on each run: the program may have been replaced since it was named.
	program, err := policy.Trusted(argv[0])
	if err != nil {
		return "", err
	}
	// The program may call agentbox, which may have to wait for our turn.
	defer runtime.Aside(ctx)()
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	var output head
	cmd := exec.CommandContext(ctx, program, argv[1:]...)
	cmd.Args[0], cmd.Dir, cmd.Env = argv[0], "/", append([]string{"PATH=" + hostPath}, env...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = bytes.NewReader(stdin), &output, &output
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Pdeathsig: syscall.SIGKILL}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	cmd.WaitDelay = time.Second
	// Pdeathsig is sent when the thread that started the program ends.
	goruntime.LockOSThread()
	defer goruntime.UnlockOSThread()
	if err = ctx.Err(); err == nil {
		err = cmd.Run()
	}
	said = strings.TrimSpace(string(output.kept))
	switch {
	case err == nil, errors.Is(err, exec.ErrWaitDelay): // a process that it left behind holds its output open
		return said, nil
	case errors.Is(ctx.Err(), context.DeadlineExceeded):
		err = fmt.Errorf("it did not end within %s, and was %w", timeout, errKilled)
	case ctx.Err() != nil && cmd.Process == nil:
		err = context.Cause(ctx)
	case ctx.Err() != nil:
		err = fmt.Errorf("it was %w: %w", errKilled, context.Cause(ctx))
	case cmd.ProcessState != nil && !cmd.ProcessState.Exited():
		err = fmt.Errorf("it was %w: %w", errKilled, err)
	}
	return said, err
}

// saying adds what a program printed to its error.
func saying(err error, said string) error {
	if said = strings.TrimSpace(clipLabel(said)); said != "" && err != nil {
		err = fmt.Errorf("%w: %s", err, said)
	}
	return err
}

// rootEnv returns the environment for an agentbox that a program of the host calls.
func (e *core) rootEnv() []string {
	if root := e.store.Root(); e.run == filepath.Join(root, "run") {
		return []string{"AGENTBOX_ROOT=" + root}
	}
	return nil
}

// head keeps the first bytes that are written to it. It does not embed a bytes.Buffer, whose
// ReadFrom would keep everything.
type head struct{ kept []byte }

func (h *head) Write(p []byte) (int, error) {
	h.kept = append(h.kept, p[:min(len(p), maxHostOutput-len(h.kept))]...)
	return len(p), nil
}

// endMarked kills the processes that have mark, NAME=VALUE, in their environment: children of
// a program of the host outlive an agentbox that was killed.
func endMarked(mark string) error {
	for range 100 { // they may fork meanwhile
		found := false
		procs, err := filepath.Glob("/proc/[0-9]*")
		if err != nil {
			return err
		}
		for _, dir := range procs {
			pid, err := strconv.Atoi(filepath.Base(dir))
			if err != nil {
				continue
			}
			fd, err := unix.PidfdOpen(pid, 0)
			if err != nil {
				continue // it has ended
			}
			env, _ := os.ReadFile(filepath.Join(dir, "environ")) // empty: it has ended
			if bytes.Contains(append([]byte{0}, env...), append([]byte{0}, mark+"\x00"...)) {
				found = true
				err = unix.PidfdSendSignal(fd, unix.SIGKILL, nil, 0)
			}
			_ = unix.Close(fd)
			if err != nil && !errors.Is(err, unix.ESRCH) {
				return fmt.Errorf("kill process %d: %w", pid, err)
			}
		}
		if !found {
			return nil
		}
		time.Sleep(10 * time.Millisecond) // until they are gone
	}
	return fmt.Errorf("%w: processes with %s do not end", runtime.ErrBusy, mark)
}
