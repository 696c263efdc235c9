// Command agentbox-runtime is an OCI runtime that can restore.
//
// Engines (conmon and Podman, containerd and Docker, CRI-O) call it in place
// of runc. For a container that has a restore staged (package criu/stage) it
// does, where the engine says `create`, a `runc restore` and a `runc pause`,
// and where the engine says `start`, a `runc resume`. Every other call, and
// every call for a container nobody staged anything for, becomes the real
// runtime, with the arguments untouched: it is exec'ed in place of this
// process.
//
// Environment: AGENTBOX_RUNTIME names the real runtime (default: runc, looked
// for in PATH and the system's directories), AGENTBOX_RUN the directory with
// the staged restores (default /run/agentbox).
package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"github.com/agentbox/agentbox/criu/host"
	"github.com/agentbox/agentbox/criu/stage"
	"github.com/agentbox/agentbox/internal/fault"
)

const (
	envRuntime = "AGENTBOX_RUNTIME"
	// envGuard holds the pid of the process that exec'ed the real runtime. exec
	// keeps the pid, so finding our own means that we are that runtime.
	envGuard = "AGENTBOX_RUNTIME_GUARD"
)

func main() {
	os.Exit(run(os.Args[1:]))
}

func run(args []string) int {
	real, err := realRuntime()
	if err != nil {
		fmt.Fprintln(os.Stderr, "agentbox-runtime:", err)
		return 127
	}
	w := wrapper{real: real, dir: stage.Run()}
	c, ok := parse(args)
	if c.root == "" {
		// Where the runtimes keep their state when nobody says.
		c.root = "/run/runc"
		if filepath.Base(real) == "crun" {
			c.root = "/run/crun"
		}
	}
	if !ok {
		if id, found := w.stagedUnder(args); found {
			return w.fail(c, fmt.Errorf("container %s has a restore staged, and this command line is not understood: %q", id, args))
		}
		return w.become(args)
	}
	if !stage.Valid(c.id) {
		return w.become(args)
	}
	switch c.verb {
	case "create":
		r, err := stage.Load(w.dir, c.id)
		switch {
		case err == nil:
			return w.restore(c, r)
		case errors.Is(err, fault.ErrCorrupt):
			// Somebody wants a restore; a fresh start is not one.
			return w.fail(c, err)
		}
		// A container of this name was restored and went without `delete`.
		if stage.Restored(w.dir, c.id) {
			if err := stage.ClearRestored(w.dir, c.id); err != nil {
				return w.fail(c, err)
			}
		}
	case "run":
		if _, err := stage.Load(w.dir, c.id); err == nil || errors.Is(err, fault.ErrCorrupt) {
			return w.fail(c, fmt.Errorf("container %s has a restore staged: it takes `create` and `start`, not `run`", c.id))
		}
	case "start":
		if stage.Restored(w.dir, c.id) {
			return w.resume(c)
		}
	case "delete":
		if w.known(c.id) {
			return w.delete(c, args)
		}
	}
	return w.become(args)
}

// wrapper is one call of an engine.
type wrapper struct {
	real string // the real runtime
	dir  string // RUN
}

// known tells whether anything is kept for a container.
func (w wrapper) known(id string) bool {
	if stage.Restored(w.dir, id) {
		return true
	}
	_, err := stage.Load(w.dir, id)
	return err == nil || errors.Is(err, fault.ErrCorrupt)
}

// stagedUnder finds the container of a command line that parse gave up on, if
// running it could start afresh what is to be restored.
func (w wrapper) stagedUnder(args []string) (string, bool) {
	if len(args) == 0 || !slices.Contains(args, "create") && !slices.Contains(args, "run") {
		return "", false
	}
	id := args[len(args)-1]
	if !stage.Valid(id) {
		return "", false
	}
	_, err := stage.Load(w.dir, id)
	return id, err == nil || errors.Is(err, fault.ErrCorrupt)
}

// become replaces this process by the real runtime. It returns only on failure.
func (w wrapper) become(args []string) int {
	env := append(host.Environ(), envGuard+"="+strconv.Itoa(os.Getpid()))
	err := syscall.Exec(w.real, append([]string{w.real}, args...), env)
	fmt.Fprintf(os.Stderr, "agentbox-runtime: exec %s: %v\n", w.real, err)
	return 126
}

func realRuntime() (string, error) {
	if os.Getenv(envGuard) == strconv.Itoa(os.Getpid()) {
		return "", fmt.Errorf("the runtime %q is agentbox-runtime itself: set %s to runc's path", os.Getenv(envRuntime), envRuntime)
	}
	self, err := os.Stat("/proc/self/exe")
	if err != nil {
		return "", err
	}
	isSelf := func(st os.FileInfo) bool { return os.SameFile(st, self) }
	name := os.Getenv(envRuntime)
	if !strings.Contains(name, "/") {
		if name == "" {
			name = "runc"
		}
		return host.Find(name, isSelf)
	}
	st, err := os.Stat(name)
	if err != nil {
		return "", fmt.Errorf("%s: %w", envRuntime, err)
	}
	if isSelf(st) {
		return "", fmt.Errorf("%s=%s is agentbox-runtime itself: set it to runc's path", envRuntime, name)
	}
	return name, nil
}
