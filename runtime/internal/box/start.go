package box

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"syscall"
	"time"

	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/agentbox/agentbox/criu/stage"
	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/internal/undo"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/internal/record"
	"github.com/agentbox/agentbox/runtime/internal/streams"
	"github.com/agentbox/agentbox/runtime/network"
)

// Start is a start on its way.
type Start struct {
	View    View // as it was found
	Options runtime.StartOptions
	Run     Run
	Size    *runtime.Size

	l        *Lifecycle
	end      network.Endpoint
	attached *streams.Attachment
}

// Start starts a created or exited container, or has the wrapper restore it if
// a restore is staged. ctx also bounds the attachment: when it ends, wait
// returns its error; the container goes on.
func (l *Lifecycle) Start(ctx context.Context, id string, opts runtime.StartOptions) (wait func() error, err error) {
	if err := record.CheckID(id); err != nil {
		return nil, err
	}
	unlock, err := l.Lock(ctx, id)
	if err != nil {
		return nil, err
	}
	defer unlock()
	v, err := l.hooks.Look(ctx, id)
	if err != nil {
		return nil, err
	}
	if v.Live() {
		return nil, fmt.Errorf("container %s is %s: %w", id, v.Status, fault.ErrState)
	}
	// Settle what an exit or a killed start left.
	if err := l.settle(ctx, v); err != nil {
		return nil, err
	}
	s, err := l.NewStart(v, opts)
	if err != nil {
		return nil, err
	}

	var undo undo.Stack
	defer func() { undo.Run(ctx, &err) }()
	var m Launched
	undo.Add(func(ctx context.Context) error {
		if m != nil {
			m.Abort()
		}
		s.attached.Close()
		return errors.Join(l.release(ctx, id, true), l.removeStarts(id, s.Run.Number))
	})
	if err := s.MakeDirs(); err != nil {
		return nil, err
	}
	if m, err = l.hooks.Launch(s); err != nil {
		return nil, err
	}
	defer m.Close()
	if err := s.prepare(ctx); err != nil {
		return nil, err
	}
	if err := m.Create(ctx); err != nil {
		return nil, err
	}
	return s.Begin(ctx, m)
}

// NewStart numbers a start.
func (l *Lifecycle) NewStart(v View, opts runtime.StartOptions) (*Start, error) {
	n, err := l.nextStart(v.Spec.ID)
	return &Start{View: v, Options: opts, Run: Run{Number: n, Bundle: l.Bundle(v.Spec.ID, n), Env: opts.Env}, l: l}, err
}

// Dir returns a path in the start's directory.
func (s *Start) Dir(elem ...string) string {
	return s.l.StartDir(s.View.Spec.ID, s.Run.Number, elem...)
}

// MakeDirs makes the start's directories.
func (s *Start) MakeDirs() error {
	if err := s.l.makeStart(s.View.Spec.ID, s.Run.Number); err != nil {
		return err
	}
	return streams.Trim(s.l.Dir(s.View.Spec.ID, "log"))
}

// Discard takes back a start that holds no more than its directories.
func (s *Start) Discard() error {
	s.attached.Close()
	return errors.Join(s.l.ClearRun(s.View.Spec.ID), s.l.removeStarts(s.View.Spec.ID, s.Run.Number))
}

// prepare mounts the root filesystem and makes the network.
func (s *Start) prepare(ctx context.Context) error {
	l, spec := s.l, s.View.Spec
	if err := l.rootfs(s.View.Container).Mount(); err != nil {
		return err
	}
	if err := l.place(s.View.Container).MountWorkspaces(spec); err != nil {
		return err
	}
	if err := l.hit("start.after-mount"); err != nil {
		return err
	}
	// Cut off until the processes are there: a peer's packet for a socket
	// that is yet to be restored would be answered with a reset.
	connect := l.Net.Prepare
	if spec.IDs != nil {
		connect = l.Net.Reserve
	}
	var err error
	if s.end, err = connect(ctx, spec.ID, spec.Network); err != nil {
		return err
	}
	for _, warning := range s.end.Warnings {
		l.log.Warn(warning, "sandbox", spec.ID)
	}
	if s.end.Address.IsValid() {
		s.Run.Address = s.end.Address.String()
	}
	if err := l.hit("start.after-network"); err != nil {
		return err
	}
	if spec.Terminal && s.Options.Streams != nil {
		s.Size = streams.FirstSize(ctx, s.Options.Streams.Resize)
	}
	return nil
}

// OCISpec makes the OCI spec of a start, for a sandbox's spec whose mounts a backend may have replaced.
func (s *Start) OCISpec(spec runtime.Spec) (*specs.Spec, error) {
	// With a restore staged, the wrapper restores processes instead of starting the command.
	_, err := stage.At(s.l.Stage, spec.ID).Load()
	restores := !errors.Is(err, fault.ErrNotFound)
	return s.l.place(s.View.Container).Prepare(spec, s.Run.Env, s.end, s.Size, restores, s.Options.Secrets)
}

// Begin connects the streams and lets the command run, or the restored
// processes go on.
func (s *Start) Begin(ctx context.Context, m Launched) (wait func() error, err error) {
	l, v := s.l, s.View
	v.Run = s.Run
	if s.Options.Streams != nil {
		a, err := l.hooks.Connect(ctx, v, *s.Options.Streams, s.Size)
		if err != nil {
			return nil, err
		}
		s.attached = a
		a.EndInput = true
		a.Serve()
	}
	if !v.Foreign {
		if err := l.Net.Connect(ctx, v.Spec.ID); err != nil {
			return nil, err
		}
	}
	if err := l.hit("start.after-attach"); err != nil {
		return nil, err
	}

	at := time.Now() // a short command ends before we know that it began
	if err := m.Go(ctx); err != nil {
		return nil, err
	}
	if err := l.hit("start.after-start"); err != nil {
		return nil, err
	}
	if err := l.NoteStart(v.Spec.ID, s.Run.Number, at); err != nil {
		return nil, err
	}
	if err := m.Started(); err != nil {
		return nil, err
	}
	if err := l.pruneStarts(v.Spec.ID); err != nil {
		l.log.Warn("old runs not removed", "sandbox", v.Spec.ID, "error", err)
	}
	if s.attached == nil {
		return nil, nil
	}
	return s.attached.Wait, nil
}

// Attach connects streams to a running container's first process; a paused one is silent.
func (l *Lifecycle) Attach(ctx context.Context, id string, ends runtime.Streams) error {
	v, err := l.hooks.Look(ctx, id)
	if err != nil {
		return err
	}
	if !v.Live() {
		return fmt.Errorf("container %s is %s: %w", id, v.Status, fault.ErrState)
	}
	var size *runtime.Size
	if v.Spec.Terminal {
		size = streams.FirstSize(ctx, ends.Resize)
	}
	a, err := l.hooks.Connect(ctx, v, ends, size)
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ECONNREFUSED) {
		return fmt.Errorf("container %s: %w: its monitor is gone", id, fault.ErrState)
	}
	if err != nil {
		return err
	}
	a.Serve()
	return a.Wait()
}

// Logs writes the log. Following ends with the run that is live when Logs is
// called.
func (l *Lifecycle) Logs(ctx context.Context, id string, opts runtime.LogOptions, stdout, stderr io.Writer) error {
	v, err := l.hooks.Look(ctx, id)
	if err != nil {
		return err
	}
	if !opts.Follow || !v.Live() {
		return streams.Print(ctx, l.Dir(id, "log"), opts, stdout, stderr)
	}
	return streams.Follow(ctx, l.Dir(id, "log"), opts, stdout, stderr, func(ctx context.Context) error {
		_, err := l.AwaitExit(ctx, id, v.Run)
		return err
	})
}
