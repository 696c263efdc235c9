package main

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"os/signal"
	"syscall"

	"golang.org/x/sys/unix"
)

// initPath is where a sandbox with an init sees this binary; runtime/oci
// mounts it there and makes it the first process.
const initPath = "/dev/agentbox-init"

// Started under the init's name this binary is nothing else, and does not
// come to main.
func init() {
	if len(os.Args) > 0 && os.Args[0] == initPath {
		os.Exit(runInit(os.Args[1:]))
	}
}

// runInit is process 1 of a sandbox: it starts a command, passes signals on to
// it, reaps what others leave, and ends as the command does. The kernel then
// ends everything else in the PID namespace.
func runInit(args []string) int {
	if len(args) > 0 && args[0] == "--" {
		args = args[1:]
	}
	if len(args) == 0 {
		fmt.Fprintln(os.Stderr, "agentbox-init: no command")
		return 125
	}
	// Before the child exists, so that no signal is lost.
	signals := make(chan os.Signal, 64)
	signal.Notify(signals)
	child, code, err := spawn(args)
	if err != nil {
		fmt.Fprintf(os.Stderr, "agentbox-init: %s: %v\n", args[0], err)
		return code
	}
	for sig := range signals {
		switch sig {
		case syscall.SIGCHLD:
			if code, ended := reap(child); ended {
				return code
			}
		case syscall.SIGURG, syscall.SIGTTIN, syscall.SIGTTOU:
			// The Go runtime's own, to preempt goroutines, and what the terminal sends us because
			// we are in its background.
		default:
			_ = syscall.Kill(child, sig.(syscall.Signal))
		}
	}
	return 125
}

// spawn starts the command in a process group of its own, which a terminal,
// if there is one, then counts as the foreground: Ctrl-C is for the command.
func spawn(args []string) (pid, code int, err error) {
	path, err := exec.LookPath(args[0])
	if err != nil {
		code = 127
		if errors.Is(err, fs.ErrPermission) {
			code = 126
		}
		return 0, code, err
	}
	attr := &syscall.ProcAttr{
		Env:   os.Environ(),
		Files: []uintptr{0, 1, 2},
		Sys:   &syscall.SysProcAttr{Setpgid: true},
	}
	if _, err := unix.IoctlGetTermios(0, unix.TCGETS); err == nil {
		attr.Sys.Foreground, attr.Sys.Ctty = true, 0
	}
	pid, err = syscall.ForkExec(path, args, attr)
	if errors.Is(err, syscall.EPERM) || errors.Is(err, syscall.ENOTTY) {
		// A terminal that is not our controlling one.
		attr.Sys.Foreground = false
		pid, err = syscall.ForkExec(path, args, attr)
	}
	if err != nil {
		return 0, 126, err
	}
	return pid, 0, nil
}

// reap collects every process that has ended.
func reap(child int) (code int, ended bool) {
	for {
		var status syscall.WaitStatus
		pid, err := syscall.Wait4(-1, &status, syscall.WNOHANG, nil)
		switch {
		case err == syscall.EINTR:
		case err != nil || pid <= 0:
			return code, ended
		case pid == child && status.Signaled():
			code, ended = 128+int(status.Signal()), true
		case pid == child:
			code, ended = status.ExitStatus(), true
		}
	}
}
