package oci

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/criu/stage"
	"github.com/agentbox/agentbox/internal/failpoint"
	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/internal/undo"
	"github.com/agentbox/agentbox/overlay"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/internal/home"
	"github.com/agentbox/agentbox/runtime/internal/kernel"
	"github.com/agentbox/agentbox/runtime/internal/record"
	"github.com/agentbox/agentbox/runtime/internal/streams"
)

// Start starts a created or exited container, or has the wrapper restore it if
// a restore is staged. ctx also bounds the attachment: when it ends, wait
// returns its error; the container goes on.
func (b *Backend) Start(ctx context.Context, id string, opts runtime.StartOptions) (wait func() error, err error) {
	if err := home.Check(id); err != nil {
		return nil, err
	}
	unlock, err := b.home.Lock(ctx, id)
	if err != nil {
		return nil, err
	}
	defer unlock()
	v, err := b.look(ctx, id)
	if err != nil {
		return nil, err
	}
	if v.live() {
		return nil, fmt.Errorf("container %s is %s: %w", id, v.status, fault.ErrState)
	}
	// Settle what an exit or a killed start left.
	if err := b.settle(ctx, v); err != nil {
		return nil, err
	}
	s := &starting{b: b, view: v, opts: opts}
	if s.n, err = b.home.Next(id); err != nil {
		return nil, err
	}
	var undo undo.Stack
	defer func() { undo.Run(ctx, &err) }()
	undo.Add(func(ctx context.Context) error {
		_ = s.filler.done() // what the start fails with is known
		s.attached.Close()
		err := b.release(ctx, id, true)
		return errors.Join(err, b.home.Undo(id, s.n))
	})
	if err := s.launch(); err != nil {
		return nil, err
	}
	defer s.conmon.close()
	if err := s.prepare(ctx); err != nil {
		return nil, err
	}
	if err := s.create(ctx); err != nil {
		return nil, err
	}
	if err := s.begin(ctx); err != nil {
		return nil, err
	}
	if err := b.home.Prune(id); err != nil {
		b.log.Warn("old runs not removed", "sandbox", id, "error", err)
	}
	if s.attached == nil {
		return nil, nil
	}
	return s.attached.Wait, nil
}

// starting is a Start on its way.
type starting struct {
	b        *Backend
	view     view
	opts     runtime.StartOptions
	n        int // of the run
	run      runRecord
	size     *runtime.Size
	conmon   *conmon
	filler   *filler // with a user namespace
	attached *streams.Attachment
}

// prepare mounts the root filesystem, makes the network and writes the bundle.
func (s *starting) prepare(ctx context.Context) error {
	b, id := s.b, s.view.Spec.ID
	ids := s.view.Spec.IDs
	if err := b.letThrough(s.view.Spec); err != nil {
		return err
	}
	if err := b.root(s.view.container).Mount(); err != nil {
		return err
	}
	if err := failpoint.Hit("oci.start.after-mount"); err != nil {
		return err
	}
	// Cut off until the processes are there: a peer's packet for a socket
	// that is yet to be restored would be answered with a reset.
	connect := b.net.Prepare
	if ids != nil {
		connect = b.net.Reserve
	}
	end, err := connect(ctx, id, s.view.Spec.Network)
	if err != nil {
		return err
	}
	for _, warning := range end.Warnings {
		b.log.Warn(warning, "sandbox", id)
	}
	if end.Address.IsValid() {
		s.run.Address = end.Address.String()
	}
	if err := failpoint.Hit("oci.start.after-network"); err != nil {
		return err
	}
	if s.view.Spec.Terminal && s.opts.Streams != nil {
		s.size = streams.FirstSize(ctx, s.opts.Streams.Resize)
	}
	own, err := b.mapBinds(s.view.Spec)
	if err != nil {
		return err
	}
	spec, err := b.place(id).Prepare(own, s.run.Env, end, s.size, s.restores(), s.opts.Secrets)
	if err != nil {
		return err
	}
	if ids != nil {
		if s.filler, err = b.filler(ctx, s.view.Spec, spec); err != nil {
			return err
		}
	}
	data, err := json.Marshal(spec)
	if err != nil {
		return err
	}
	if err := record.Write(b.home.Bundle(id, s.n, "config.json"), data, 0o600, false); err != nil {
		return err
	}
	if err := record.WriteJSON(b.home.Start(id, s.n, "run.json"), s.run, false); err != nil {
		return err
	}
	return failpoint.Hit("oci.start.after-bundle")
}

// restores reports whether the wrapper will restore processes instead of
// starting the command.
func (s *starting) restores() bool {
	_, err := stage.At(s.b.home.Stage, s.view.Spec.ID).Load()
	return !errors.Is(err, fault.ErrNotFound)
}

// launch makes the run's directories and starts its conmon.
func (s *starting) launch() (err error) {
	b, spec := s.b, s.view.Spec
	s.run = runRecord{Number: s.n, Bundle: b.home.Bundle(spec.ID, s.n), Env: s.opts.Env}
	if err := b.home.Begin(spec.ID, s.n); err != nil {
		return err
	}
	if err := streams.Trim(b.home.Dir(spec.ID, "log")); err != nil {
		return err
	}
	args := []string{
		// The path is relative, since conmon takes a colon in it for syntax.
		"-l", "k8s-file:log", "--log-size-max", strconv.Itoa(streams.Limit),
		"--persist-dir", b.home.Start(spec.ID, s.n),
	}
	switch {
	case spec.Terminal:
		args = append(args, "-t")
	case spec.OpenStdin:
		args = append(args, "-i")
	}
	if b.self != "" {
		for i, arg := range []string{b.self, "--root", b.home.Base, "reap", spec.ID} {
			if i == 0 {
				args = append(args, "--exit-command", arg)
				continue
			}
			args = append(args, "--exit-command-arg", arg)
		}
	}
	s.conmon, err = b.launch(launch{id: spec.ID, bundle: s.run.Bundle, dir: b.home.Dir(spec.ID), runtime: b.wrapper, args: args})
	return err
}

// create has conmon create, or restore, the container: its first process then
// waits, or stands still.
func (s *starting) create(ctx context.Context) error {
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
		return s.conmon.explain(commandError(s.view.Spec.Args, rep.Message))
	}
	return failpoint.Hit("oci.start.after-conmon")
}

// begin connects the streams and lets the command run, or the restored
// processes go on.
func (s *starting) begin(ctx context.Context) error {
	b, id := s.b, s.view.Spec.ID
	if s.opts.Streams != nil {
		a, err := b.connect(ctx, s.run.Bundle, *s.opts.Streams, s.view.Spec.Terminal, s.size)
		if err != nil {
			return err
		}
		s.attached = a
		a.EndInput = true
		a.Serve()
	}
	if err := b.net.Connect(ctx, id); err != nil {
		return err
	}
	if err := failpoint.Hit("oci.start.after-attach"); err != nil {
		return err
	}
	at := time.Now() // a short command ends before we know that it began
	err := b.letGo(ctx, id, s.n)
	var said *callError
	if errors.As(err, &said) {
		return commandError(s.view.Spec.Args, said.Error())
	}
	if err != nil {
		return err
	}
	if err := failpoint.Hit("oci.start.after-start"); err != nil {
		return err
	}
	return b.note(id, s.n, at)
}

// letGo has the runtime let a container's command run, or its restored processes go on. For
// a container made by runc it does what `runc start` does, and saves the start of two
// programs: the command waits to write a byte to a fifo, and closes its end when it is
// executed or, since runc 1.3.3, before. Until it is executed the first process is still the
// runtime's: CRIU may not inspect that from the sandbox's user namespace, and it does not
// belong in a checkpoint. So letGo waits for that.
func (b *Backend) letGo(ctx context.Context, id string, n int) (err error) {
	state := filepath.Join(b.home.State, id)
	if !b.home.Unborn(id) {
		return b.call(ctx, b.wrapper, "start", id)
	}
	p, err := b.first(id, n)
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
		if err := b.call(ctx, b.wrapper, "start", id); err != nil {
			return err
		}
		return p.Executed(ctx)
	}
	// Non-blocking, or a process that has just ended would leave us waiting.
	fd, err := unix.Open(filepath.Join(state, "exec.fifo"), unix.O_RDONLY|unix.O_NONBLOCK|unix.O_CLOEXEC|unix.O_NOFOLLOW, 0)
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
		err = fmt.Errorf("its command was not executed within %s, for which the kernel is in %s: %w", b.execution, at, fault.ErrBusy)
	}
	return &fault.Error{Err: err, Hint: "Look at what the command and its libraries lie on: a bind mount of a network or FUSE filesystem that does not answer, or a file that another program has a lease on. Start it again once that answers."}
}

// note puts on record that run n was started, and when.
func (b *Backend) note(id string, n int, at time.Time) error {
	return b.home.Note(id, n, at)
}

// root returns the mount of a container's root filesystem.
func (b *Backend) root(c container) overlay.Mount {
	id := c.Spec.ID
	return overlay.Mount{Lower: c.Lower, Upper: b.home.Dir(id, "upper"), Work: b.home.Dir(id, "work"), Target: b.home.Dir(id, "merged"), IDs: c.Spec.IDs}
}
