// Package podman is the backend for containers of Podman, which has no daemon:
// it runs the podman command, as the user of agentbox would.
//
// It only adopts: containers are made by Podman. What Podman does not record of
// them is in ROOT/podman/ID.json (memory.go): the addresses they
// had, so that processes find theirs after a restore, the networks that they are
// taken off for a moment, where their managed files are, and which of these are
// not as Podman made them.
//
// A start goes podman -> conmon -> agentbox-runtime -> runc, and what is staged
// for the container (package criu/stage) meets it in the third of these. A stop
// goes through Podman too, so that it knows it was meant and its restart
// policies leave the container alone.
//
// Only the containers of root are served: CRIU takes root, and the storage of
// other users' containers is out of Podman's sight here.
package podman

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/agentbox/agentbox/criu/host"
	"github.com/agentbox/agentbox/criu/stage"
	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/internal/lazy"
	"github.com/agentbox/agentbox/runtime"
)

// Options say where things are; only Root is needed.
type Options struct {
	Root string // the memory is kept in Root/podman
	// Run is the directory in which the OCI runtime wrapper looks for staged restores. Podman
	// passes some of its environment on to it and, by version, some not, so nothing of ours
	// moves that.
	Run    string // default: stage.DefaultRun
	Podman string // the program; default: podman, looked for in PATH and the system's directories
	Log    *slog.Logger
}

// Backend implements runtime.Backend.
type Backend struct {
	root, run string
	podman    string // empty: looked for at each call
	log       *slog.Logger
}

// Open makes the backend. Podman need not be there yet.
func Open(opts Options) (*Backend, error) {
	if !filepath.IsAbs(opts.Root) {
		return nil, fmt.Errorf("root %q is not absolute: %w", opts.Root, fault.ErrInvalid)
	}
	return &Backend{
		root: filepath.Join(opts.Root, "podman"), run: cmp.Or(opts.Run, stage.DefaultRun), podman: opts.Podman,
		log: cmp.Or(opts.Log, slog.Default()),
	}, nil
}

// Properties are this backend's differences.
func (b *Backend) Properties() runtime.Properties { return runtime.Properties{Name: "podman"} }

// Create makes nothing: containers are made by Podman.
func (b *Backend) Create(context.Context, runtime.Spec, []string) error {
	return &fault.Error{
		Err:  fmt.Errorf("the podman backend makes no sandboxes: %w", fault.ErrUnsupported),
		Hint: "Make the container with podman run --runtime agentbox, and name it podman://NAME.",
	}
}

// List is empty, as Create makes nothing.
func (b *Backend) List(context.Context) ([]string, error) { return nil, nil }

const (
	// whole bounds what must not be broken off half-way.
	whole = 2 * time.Minute
	grace = 5 * time.Second
)

// refusal is podman's message for a failure.
type refusal struct {
	verb, said string
	exit       int
}

func (e *refusal) Error() string { return "podman " + e.verb + ": " + e.said }

func (e *refusal) Is(target error) bool {
	switch target {
	case fault.ErrNotFound:
		return strings.Contains(e.said, "no such container") || strings.Contains(e.said, "no container with name or ID")
	case fault.ErrState:
		return strings.Contains(e.said, "container state improper") || strings.Contains(e.said, "is not running") ||
			strings.Contains(e.said, "can only ")
	}
	return false
}

// command is a call of podman on this machine, which signals from our terminal
// do not reach.
func (b *Backend) command(ctx context.Context, args ...string) (*exec.Cmd, error) {
	if os.Geteuid() != 0 {
		return nil, &fault.Error{
			Err:  fmt.Errorf("containers of rootless Podman: %w", fault.ErrUnsupported),
			Hint: "CRIU takes root: run the container, and agentbox, as root.",
		}
	}
	program := b.podman
	if program == "" {
		var err error
		if program, err = host.Find("podman", nil); err != nil {
			return nil, &fault.Error{
				Err: fmt.Errorf("podman: %w: %w", fault.ErrUnsupported, err), Hint: "Install podman.",
			}
		}
	}
	cmd := exec.CommandContext(ctx, program, args...)
	// Its containers must be here, where we are, and agentbox-runtime must get the same at
	// `create` as at all other calls, which other programs make, too.
	cmd.Env = slices.DeleteFunc(slices.Clone(host.Environ()), func(kv string) bool {
		name, _, _ := strings.Cut(kv, "=")
		return slices.Contains([]string{"CONTAINER_HOST", "CONTAINER_CONNECTION", stage.Env, "AGENTBOX_RUNTIME"}, name)
	})
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	cmd.WaitDelay = grace
	return cmd, nil
}

// ask calls podman for something that changes nothing.
func (b *Backend) ask(ctx context.Context, args ...string) ([]byte, error) {
	cmd, err := b.command(ctx, args...)
	if err != nil {
		return nil, err
	}
	var out, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &stderr
	if err := cmd.Run(); err != nil {
		return nil, explain(ctx, args, stderr.String(), err)
	}
	return out.Bytes(), nil
}

// do makes a call of podman that must complete, even if ctx ends.
func (b *Backend) do(ctx context.Context, args ...string) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), whole)
	defer cancel()
	_, err := b.ask(ctx, args...)
	return err
}

func explain(ctx context.Context, args []string, stderr string, err error) error {
	if ctx.Err() != nil {
		return fmt.Errorf("podman %s: %w", args[0], ctx.Err())
	}
	var exit *exec.ExitError
	if !errors.As(err, &exit) {
		return fmt.Errorf("podman %s: %w", args[0], err)
	}
	return &refusal{verb: args[0], said: said(stderr), exit: exit.ExitCode()}
}

// said is podman's error without what it logged before. When agentbox-runtime
// has told why it failed, that is all of it.
func said(stderr string) string {
	lines := strings.Split(strings.TrimSpace(stderr), "\n")
	for _, l := range lines {
		if why, ok := strings.CutPrefix(l, wrapper+": "); ok {
			return why
		}
	}
	for i := len(lines) - 1; i >= 0; i-- {
		if msg, ok := strings.CutPrefix(lines[i], "Error: "); ok {
			return strings.Join(append([]string{msg}, lines[i+1:]...), " ")
		}
	}
	return lines[len(lines)-1]
}

var (
	notFound      = lazy.Regexp(`executable file not found|exec: "[^"]*": (stat [^:]*: )?no such file or directory|attempted to invoke a command that was not found`)
	notExecutable = lazy.Regexp(`(?i)permission denied|exec format error|is a directory`)
)

// commandError distinguishes a command that cannot be started from all other errors.
func commandError(args []string, err error) error {
	var r *refusal
	if !errors.As(err, &r) || !strings.Contains(r.said, "OCI") {
		return err
	}
	name := ""
	if len(args) > 0 {
		name = args[0]
	}
	switch {
	case notFound().MatchString(r.said):
		return &runtime.ExecError{
			Command: name, Code: 127, Err: fmt.Errorf("%s: not found in the container: %w", name, err),
		}
	case r.exit == 126 || notExecutable().MatchString(r.said):
		return &runtime.ExecError{Command: name, Code: 126, Err: fmt.Errorf("%s: cannot be executed: %w", name, err)}
	}
	return err
}

// tail keeps the end of what is written through it.
type tail struct {
	to   io.Writer // may be nil
	last []byte
}

func (t *tail) Write(p []byte) (int, error) {
	const keep = 8 << 10
	t.last = append(t.last, p...)
	if over := len(t.last) - keep; over > 0 {
		t.last = append(t.last[:0], t.last[over:]...)
	}
	if t.to == nil {
		return len(p), nil
	}
	return t.to.Write(p)
}
