// Command agentbox-runtime is an OCI runtime that can restore.
//
// Engines (conmon and Podman, containerd and Docker, CRI-O) call it in place of runc. For a
// container that has a restore staged (package criu/stage), `create` does a `runc restore` and
// freezes the container, and `start` thaws it. Every other call, and every call for a container
// with nothing staged, becomes the real runtime, with the arguments untouched: it is exec'ed in
// place of this process. An `exec` in a container that was restored enters the container's time
// namespace first (exec.go), and `create` and `exec` give the pipes they were started with to the
// user in the container (stdio.go).
//
// A container that was paused when it was checkpointed comes back paused, and
// its engine, which has just started it, does not know: the first `pause` of it
// then succeeds, with nothing left to do.
//
// A start may be staged as well (stage.Start): variables for the bundle's
// process, files to be overwritten before the runtime sees them, and a command
// to be begun when the container has been deleted. These and, for a restore, what
// it takes (type changes) are all that the wrapper changes of a bundle.
//
// Environment: AGENTBOX_RUNTIME names the real runtime (default: runc, looked
// for in PATH and the system's directories), AGENTBOX_RUN the directory with
// the staged restores (default /run/agentbox).
package main

import (
	"errors"
	"fmt"
	"os"
	"os/signal"
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
	if action := os.Getenv(envAction); len(args) == 0 && action != "" {
		return hold(action)
	}
	if code, ok := hooked(args); ok {
		return code
	}
	real, err := realRuntime()
	if err != nil {
		fmt.Fprintln(os.Stderr, "agentbox-runtime:", err)
		return 127
	}
	w := wrapper{real: real, dir: stage.Run()}
	if len(args) > 3 && args[0] == insideVerb {
		return w.inside(args[1:])
	}
	c, ok := parse(args)
	if c.root == "" {
		c.root = host.StateRoot(real)
	}
	if !ok && c.verb == "exec" {
		c.id, ok = w.named(c, args)
	}
	if !ok {
		if id, found := w.stagedUnder(args); found {
			return w.fail(c, fmt.Errorf("container %s has a restore staged, and this command line is not understood: %q", id, args))
		}
		return w.execRuntime(args)
	}
	if !stage.Valid(c.id) {
		return w.execRuntime(args)
	}
	if c.verb == "exec" {
		return w.exec(c, args)
	}
	c.slot = w.slot(c)
	switch c.verb {
	case "create":
		return w.create(c, args)
	case "run":
		if staged(c.slot) {
			return w.fail(c, fmt.Errorf("container %s has a restore or start staged: it takes `create` and `start`, not `run`", c.id))
		}
	case "start":
		// Docker writes them after `create`, too, since version 28.
		files, err := c.slot.TakeFiles()
		if !errors.Is(err, fault.ErrCorrupt) {
			err = nil
		}
		for _, f := range files {
			if theirs, e := os.ReadFile(f.Path); e == nil && f.Host != "" {
				f.Data = withOwn(f.Data, theirs, f.Host)
			}
			err = errors.Join(err, overwrite(f))
		}
		if err != nil {
			return w.fail(c, fmt.Errorf("start of %s: %w", c.id, err))
		}
		if err := c.slot.ArmReap(); err != nil {
			fmt.Fprintln(os.Stderr, "agentbox-runtime:", err)
		}
		if c.slot.Restored() {
			return w.resume(c)
		}
	case "pause":
		// One that was restored as it was, paused, runs for the engine until
		// it has paused it itself; the real runtime would refuse.
		if c.slot.TakePaused() && frozen(c) {
			return 0
		}
	case "resume":
		c.slot.TakePaused()
	case "delete":
		c.slot.TakePaused()
		if err := c.slot.DropFiles(); err != nil {
			fmt.Fprintln(os.Stderr, "agentbox-runtime:", err)
		}
		if keepsState(c.slot) {
			return w.delete(c, args)
		}
	}
	return w.execRuntime(args)
}

// hooked does what the hooks call this program for, if these are their arguments.
func hooked(args []string) (code int, ok bool) {
	switch {
	case len(args) == 1 && args[0] == cutVerb:
		return cutOff(os.Stdin), true
	case len(args) == 1 && args[0] == downVerb:
		return down(os.Stdin), true
	case len(args) > 0 && args[0] == standInVerb:
		return standIn(os.Stdin, args[1:]), true
	case len(args) == 2 && args[0] == fillVerb:
		return fill(os.Stdin, args[1]), true
	}
	return 0, false
}

// create starts what is staged for a container, if anything is. Staged state that exists but
// makes no sense fails it: a restore was wanted, and a fresh start is none. State that cannot
// even be looked at counts as none.
func (w wrapper) create(c call, args []string) int {
	r, err := c.slot.Load()
	restore := err == nil
	switch {
	case errors.Is(err, fault.ErrCorrupt):
		return w.fail(c, err)
	case !restore && c.slot.Held():
		return w.fail(c, fmt.Errorf("container %s is being restored by agentbox, which has not got to its start; if that agentbox is gone, 'agentbox recover' finishes it, and without %s it starts afresh", c.id, c.slot.HeldBy()))
	}
	s, err := c.slot.LoadStart()
	if errors.Is(err, fault.ErrCorrupt) {
		return w.fail(c, err)
	}
	started := err == nil
	if restore || started {
		// Nothing may be done to what is there already: not to its files, and
		// not by deleting what a failed restore leaves.
		if _, err := os.Lstat(filepath.Join(c.root, c.id)); err == nil {
			return w.fail(c, fmt.Errorf("start of %s: a container of that name exists", c.id))
		}
	}
	giveCreate(c)
	if restore {
		if err := ownConfig(c, &r); err != nil {
			return w.fail(c, fmt.Errorf("restore of %s: %w", c.id, err))
		}
	}
	change := changes{env: s.Env, config: r.Config, cut: restore && cuts(r), standIn: addresses(r), resolve: restore}
	if err := w.prepare(c, s.Files, change); err != nil {
		return w.fail(c, fmt.Errorf("start of %s: %w", c.id, err))
	}
	if restore {
		if code := w.restore(c, r); code != 0 {
			return code
		}
	} else if c.slot.Restored() {
		// A container of this name was restored and went without `delete`.
		if err := c.slot.ClearRestored(); err != nil {
			return w.fail(c, err)
		}
	}
	if started {
		if err := c.slot.UseStart(s); err != nil {
			if restore {
				w.undo(c, r)
			}
			return w.fail(c, err)
		}
	}
	if restore {
		return 0
	}
	return w.execRuntime(args)
}

// prepare does what a staged start and a restore ask for before the runtime is
// called.
func (w wrapper) prepare(c call, files []stage.File, change changes) error {
	for _, f := range files {
		if err := overwrite(f); err != nil {
			return err
		}
	}
	return edit(c.bundle(), change)
}

// wrapper is one call of an engine.
type wrapper struct {
	real string // the real runtime
	dir  string // RUN
}

// staged reports whether anything is staged for a container.
func staged(at stage.Slot) bool {
	_, err := at.Load()
	_, serr := at.LoadStart()
	return err == nil || errors.Is(err, fault.ErrCorrupt) || serr == nil ||
		errors.Is(serr, fault.ErrCorrupt) || at.Held()
}

// keepsState reports whether anything is kept for the end of a container.
func keepsState(at stage.Slot) bool { return staged(at) || at.Restored() || at.Armed() }

// slot is that of the container of a call.
func (w wrapper) slot(c call) stage.Slot {
	if under := stage.At(w.dir, stage.Under(c.root, c.id)); keepsState(under) || under.KeptPaused() {
		return under
	}
	return stage.At(w.dir, c.id)
}

// stagedUnder finds the container of a command line that parse gave up on, if
// running it could start afresh what is to be restored.
func (w wrapper) stagedUnder(args []string) (string, bool) {
	if !slices.Contains(args, "create") && !slices.Contains(args, "run") {
		return "", false
	}
	slots, _ := stage.List(w.dir)
	for _, slot := range slots {
		_, under, _ := strings.Cut(slot, "@")
		for _, id := range args {
			if (id == slot || under != "" && id == under) && staged(stage.At(w.dir, slot)) {
				return id, true
			}
		}
	}
	return "", false
}

// execRuntime replaces this process by the real runtime. It returns only on failure.
func (w wrapper) execRuntime(args []string) int {
	env := append(host.Environ(), envGuard+"="+strconv.Itoa(os.Getpid()))
	resetSignals()
	err := syscall.Exec(w.real, append([]string{w.real}, args...), env)
	fmt.Fprintf(os.Stderr, "agentbox-runtime: exec %s: %v\n", w.real, err)
	return 126
}

// resetSignals keeps the runtime from inheriting signals that a caller under nohup
// ignores: an exec resets those that are caught, and only those.
func resetSignals() {
	for _, sig := range []os.Signal{syscall.SIGHUP, syscall.SIGINT} {
		if signal.Ignored(sig) {
			signal.Notify(make(chan os.Signal, 1), sig)
		}
	}
}

func realRuntime() (string, error) {
	if os.Getenv(envGuard) == strconv.Itoa(os.Getpid()) {
		return "", fmt.Errorf("the runtime %q is agentbox-runtime itself: set %s to runc's path",
			os.Getenv(envRuntime), envRuntime)
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
