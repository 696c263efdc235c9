package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/agentbox/agentbox/criu/freezer"
	"github.com/agentbox/agentbox/criu/stage"
	"github.com/agentbox/agentbox/internal/fault"
)

// CRIU names what it is about to do, and the first process, when it runs its action
// script, which is this program. The container's name comes by way of the runtime, which
// passes its environment on.
const (
	envAction   = "CRTOOLS_SCRIPT_ACTION"
	envInit     = "CRTOOLS_INIT_PID"
	envHoldRoot = "AGENTBOX_HOLD_ROOT"
	envHoldID   = "AGENTBOX_HOLD_ID"
	envHoldPid  = "AGENTBOX_HOLD_PID" // the wrapper that waits for the restore
)

// hold is the action script of a restore. At pre-resume each thread is back at the
// instruction at which it was dumped, and CRIU still traces it. The cgroup is frozen
// now, so that no thread runs when CRIU lets go of it. CRIU, which the runtime has
// put into that cgroup, and this process move to the wrapper's before.
func hold(action string) int {
	if action != "pre-resume" {
		return 0
	}
	box, err := freezer.Open(os.Getenv(envHoldRoot), os.Getenv(envHoldID))
	if err != nil { // other runtimes than runc note it only when CRIU has ended
		pid, _ := strconv.Atoi(os.Getenv(envInit))
		box, err = freezer.Of(pid)
	}
	if err == nil {
		err = box.Leave(os.Getenv(envHoldPid), os.Getppid(), os.Getpid())
	}
	if err == nil {
		err = box.Freeze(context.Background())
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "agentbox-runtime: hold the restored processes:", err)
		return 1
	}
	return 0
}

// held proves that the restored processes were held: that none has run yet.
func held(c call) error {
	box, err := freezer.Open(c.root, c.id)
	if err != nil {
		return err
	}
	is, err := box.Freezing()
	switch {
	case !box.Alive():
		return fmt.Errorf("container %s has ended: %w", c.id, fault.ErrState)
	case err != nil:
		return err
	case !is:
		return errors.New("CRIU did not freeze the processes before it let them go")
	}
	return box.Freeze(context.Background()) // they go from CRIU's stop into the freezer
}

// ownConfig has a restore name a configuration file of CRIU that the wrapper may change:
// one beside its log, with what the bundle's own has, where none was staged.
func ownConfig(c call, r *stage.Restore) error {
	if r.Config != "" {
		return nil
	}
	data, err := os.ReadFile(filepath.Join(c.bundle(), "config.json"))
	if err != nil {
		return err
	}
	var spec struct {
		Annotations map[string]string `json:"annotations"`
	}
	if err := json.Unmarshal(data, &spec); err != nil {
		return fmt.Errorf("config.json: %w", err)
	}
	var lines []byte
	if theirs := spec.Annotations[criuConfig]; theirs != "" {
		if lines, err = os.ReadFile(theirs); err != nil {
			return err
		}
	}
	if err := os.MkdirAll(r.Work, 0o700); err != nil {
		return err
	}
	r.Config = filepath.Join(r.Work, "criu.conf")
	return os.WriteFile(r.Config, lines, 0o600)
}

// holds has CRIU call this program as its action script.
func holds(config string) error {
	self, err := os.Executable()
	if err != nil {
		return err
	}
	self, err = filepath.EvalSymlinks(self)
	if err != nil {
		return err
	}
	data, err := os.ReadFile(config)
	if err != nil {
		return err
	}
	line := `action-script "` + self + `"` + "\n"
	if strings.Contains(string(data), line) {
		return nil
	}
	return replace(config, append(data, line...))
}
