package criu

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/agentbox/agentbox/criu/freezer"
	"github.com/agentbox/agentbox/criu/host"
	"github.com/agentbox/agentbox/internal/fault"
)

// State is what the OCI runtime knows of a container.
type State struct {
	Status      string            `json:"status"` // creating, created, running, paused, stopped
	Pid         int               `json:"pid"`    // of its init on the host; 0 when stopped
	Bundle      string            `json:"bundle"`
	Annotations map[string]string `json:"annotations,omitempty"`
}

// State asks the runtime. A container it does not know is ErrNotFound.
func (r Runtime) State(ctx context.Context) (State, error) {
	var s State
	out, err := r.call(ctx, "state", r.ID)
	if err != nil {
		return s, err
	}
	if err := json.Unmarshal(out, &s); err != nil {
		return s, fmt.Errorf("%s state %s: %w", r.Binary, r.ID, err)
	}
	return s, nil
}

// Pause freezes the container's processes. A paused one is nil; a stopped one is ErrState.
func (r Runtime) Pause(ctx context.Context) error {
	c, err := freezer.Open(r.stateRoot(), r.ID)
	if err != nil {
		return err
	}
	return c.Freeze(ctx)
}

// Resume thaws the container's processes. A running one is nil; a stopped one is ErrState.
func (r Runtime) Resume(ctx context.Context) error {
	c, err := freezer.Open(r.stateRoot(), r.ID)
	if err != nil {
		return err
	}
	return c.Thaw()
}

func (r Runtime) stateRoot() string { return cmp.Or(r.Root, host.StateRoot(r.Binary)) }

// Kill sends a signal, by name ("KILL", "SIGTERM") or number, to the init or
// to all processes. A stopped container is nil.
func (r Runtime) Kill(ctx context.Context, signal string, all bool) error {
	args := []string{"kill"}
	if all {
		args = append(args, "--all")
	}
	_, err := r.call(ctx, append(args, r.ID, signal)...)
	if err == nil || errors.Is(err, fault.ErrNotFound) {
		return err
	}
	if s, serr := r.State(context.WithoutCancel(ctx)); serr == nil && s.Status == "stopped" {
		return nil
	}
	return err
}

// Delete removes a stopped container; with force it kills a running one
// first. A container that is not there is nil. Mounts that a killed restore
// left are undone first, because the runtime would delete through them.
func (r Runtime) Delete(ctx context.Context, force bool) error {
	if err := host.SweepRestore(r.Root, r.ID, ""); err != nil {
		return fmt.Errorf("delete %s: %w", r.ID, err)
	}
	args := []string{"delete"}
	if force {
		args = append(args, "--force")
	}
	_, err := r.call(ctx, append(args, r.ID)...)
	if errors.Is(err, fault.ErrNotFound) {
		return nil
	}
	return err
}

// Sweep ends and removes what CRIUs that were killed have left: child processes, and
// directories in /tmp.
func Sweep() error {
	_, err := host.EndOrphans()
	return errors.Join(err, host.SweepTemp())
}

// call runs the runtime and returns its output. Its error has the last thing
// the runtime said.
func (r Runtime) call(ctx context.Context, args ...string) ([]byte, error) {
	cmd := exec.CommandContext(ctx, r.Binary, append(r.globals(), args...)...)
	cmd.WaitDelay = time.Second
	cmd.Env = host.Environ()
	var out, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &stderr
	if err := cmd.Run(); err != nil {
		if ctx.Err() != nil {
			return nil, fmt.Errorf("%s %s: %w", filepath.Base(r.Binary), args[0], ctx.Err())
		}
		return nil, r.explain(args[0], err, stderr.String())
	}
	return out.Bytes(), nil
}

func (r Runtime) globals() []string {
	if r.Root == "" {
		return nil
	}
	return []string{"--root", r.Root}
}

// explain turns what a runtime printed into an error.
func (r Runtime) explain(verb string, err error, text string) error {
	msg := lastMessage(text)
	switch {
	case strings.Contains(msg, "does not exist"), strings.Contains(msg, "container not found"),
		strings.Contains(msg, "error opening file `") && strings.Contains(msg, "No such file"): // crun
		return fmt.Errorf("container %s: %s: %w", r.ID, msg, fault.ErrNotFound)
	case msg == "":
		return fmt.Errorf("%s %s %s: %w", r.Binary, verb, r.ID, err)
	}
	return fmt.Errorf("%s %s: %s: %w", verb, r.ID, msg, err)
}

// lastMessage takes the message out of the last line of a runtime's log.
func lastMessage(text string) string {
	lines := strings.Split(strings.TrimSpace(text), "\n")
	line := strings.TrimSpace(lines[len(lines)-1])
	if _, after, ok := strings.Cut(line, " msg="); ok && strings.HasPrefix(line, "time=") {
		var msg string
		if json.Unmarshal([]byte(after), &msg) == nil {
			return strings.ReplaceAll(msg, "\n", ", ")
		}
		return after
	}
	return line
}
