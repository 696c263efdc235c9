package oci

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/failpoint"
	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/runtime/internal/box"
	"github.com/agentbox/agentbox/runtime/internal/kernel"
	"github.com/agentbox/agentbox/runtime/internal/record"
	"github.com/agentbox/agentbox/runtime/internal/streams"
)

// starting is this backend's part in a start.
type starting struct {
	*box.Start
	b      *Backend
	conmon *conmon
	filler *filler // with a user namespace
}

// Launch implements box.Hooks: it starts conmon.
func (h hooks) Launch(s *box.Start) (box.Launched, error) {
	spec := s.View.Spec
	if err := h.letThrough(spec); err != nil {
		return nil, err
	}
	args := []string{
		// The path is relative, since conmon takes a colon in it for syntax.
		"-l", "k8s-file:log", "--log-size-max", strconv.Itoa(streams.Limit),
		"--persist-dir", s.Dir(),
	}
	switch {
	case spec.Terminal:
		args = append(args, "-t")
	case spec.OpenStdin:
		args = append(args, "-i")
	}
	if h.self != "" {
		for i, arg := range []string{h.self, "--root", h.box.Base, "reap", spec.ID} {
			if i == 0 {
				args = append(args, "--exit-command", arg)
				continue
			}
			args = append(args, "--exit-command-arg", arg)
		}
	}
	c, err := h.launch(launch{
		id: spec.ID, bundle: s.Run.Bundle, dir: h.box.Dir(spec.ID), runtime: h.box.Wrapper, args: args,
	})
	if err != nil {
		return nil, err
	}
	return &starting{Start: s, b: h.Backend, conmon: c}, nil
}

// Create implements box.Launched: it writes the bundle and has conmon create, or restore, the
// container.
func (s *starting) Create(ctx context.Context) error {
	if err := s.writeBundle(ctx); err != nil {
		return err
	}
	if err := s.conmon.allow(); err != nil {
		return err
	}
	rep, err := s.conmon.report(ctx)
	filled := s.filler.done()
	s.filler = nil
	if err = errors.Join(filled, err); err != nil {
		return err
	}
	if rep.Data <= 0 {
		if rep.Message == "" {
			return s.conmon.failure(nil)
		}
		return s.conmon.explain(commandError(s.View.Spec.Args, rep.Message))
	}
	return failpoint.Hit("oci.start.after-conmon")
}

// writeBundle writes what conmon gives to the runtime.
func (s *starting) writeBundle(ctx context.Context) error {
	own, err := s.b.mapBinds(s.View.Spec)
	if err != nil {
		return err
	}
	spec, err := s.OCISpec(own)
	if err != nil {
		return err
	}
	if own.IDs != nil {
		if s.filler, err = s.b.filler(ctx, s.View.Spec, spec); err != nil {
			return err
		}
	}
	data, err := json.Marshal(spec)
	if err != nil {
		return err
	}
	if err := record.Write(filepath.Join(s.Run.Bundle, "config.json"), data, 0o600, false); err != nil {
		return err
	}
	if err := record.WriteJSON(s.Dir("run.json"), s.Run, false); err != nil {
		return err
	}
	return failpoint.Hit("oci.start.after-bundle")
}

// Go implements box.Launched.
func (s *starting) Go(ctx context.Context) error {
	err := s.b.letGo(ctx, s.View.Spec.ID, s.Run)
	var said *callError
	if errors.As(err, &said) {
		return commandError(s.View.Spec.Args, said.Error())
	}
	return err
}

// Started implements box.Launched.
func (s *starting) Started() error { return nil }

// Close implements box.Launched.
func (s *starting) Close() { s.conmon.close() }

// Abort implements box.Launched.
func (s *starting) Abort() { _ = s.filler.done() } // what the start fails with is known

// letGo has the runtime let a container's command run, or its restored processes go on. For
// a container made by runc it does what `runc start` does, and saves the start of two
// programs: the command waits to write a byte to a fifo, and closes its end when it is
// executed or, since runc 1.3.3, before. Until it is executed the first process is still the
// runtime's: CRIU may not inspect that from the sandbox's user namespace, and it does not
// belong in a checkpoint. So letGo waits for that.
func (b *Backend) letGo(ctx context.Context, id string, run box.Run) (err error) {
	state := filepath.Join(b.box.State, id)
	if !b.box.NotStarted(id) {
		return b.call(ctx, b.box.Wrapper, "start", id)
	}
	p, err := b.box.First(id, run)
	if err != nil {
		return err
	}
	if p == nil {
		return fmt.Errorf("container %s ended before it was started: %w", id, fault.ErrState)
	}
	defer p.Close()
	// The filesystem of the command may never answer.
	ctx, cancel := context.WithTimeoutCause(ctx, b.execution, errUnexecuted)
	defer cancel()
	defer func() {
		if err != nil && context.Cause(ctx) == errUnexecuted {
			err = b.unexecuted(p)
		}
	}()
	if _, err := os.Lstat(filepath.Join(state, "state.json")); err != nil { // other runtimes have other files, and fifos that work otherwise
		if err := b.call(ctx, b.box.Wrapper, "start", id); err != nil {
			return err
		}
		return p.Executed(ctx)
	}
	// Non-blocking, or a process that has just ended would leave us waiting.
	fd, err := unix.Open(filepath.Join(state, "exec.fifo"),
		unix.O_RDONLY|unix.O_NONBLOCK|unix.O_CLOEXEC|unix.O_NOFOLLOW, 0)
	if err != nil {
		return fmt.Errorf("start container %s: %w", id, err)
	}
	defer unix.Close(fd)
	waited := false
	for buf := make([]byte, 8); ; {
		if err := p.Either(ctx, fd); err != nil {
			return err
		}
		switch got, err := unix.Read(fd, buf); {
		case got > 0:
			waited = true
			continue
		case err == unix.EINTR, err == unix.EAGAIN && p.Alive():
			continue
		}
		break
	}
	if !waited {
		return fmt.Errorf("container %s ended before it was started: %w", id, fault.ErrState)
	}
	if err := p.Executed(ctx); err != nil {
		return err
	}
	return os.Remove(filepath.Join(state, "exec.fifo"))
}

// errUnexecuted is that a command was not executed in time.
var errUnexecuted = errors.New("its command was not executed in time")

// unexecuted says what a first process does that should have executed its command.
func (b *Backend) unexecuted(p *kernel.Process) error {
	err := fmt.Errorf("its command was not executed within %s: %w", b.execution, fault.ErrBusy)
	if at := p.Waits(); at != "" {
		err = fmt.Errorf("its command was not executed within %s, for which the kernel is in %s: %w",
			b.execution, at, fault.ErrBusy)
	}
	return &fault.Error{Err: err, Hint: "Look at what the command and its libraries lie on: a bind mount of a network or FUSE filesystem that does not answer, or a file that another program has a lease on. Start it again once that answers."}
}
