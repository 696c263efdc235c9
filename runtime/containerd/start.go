package containerd

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"syscall"
	"time"

	tasks "github.com/containerd/containerd/api/services/tasks/v1"
	"github.com/containerd/containerd/api/types"
	"github.com/containerd/containerd/containers"
	"github.com/containerd/typeurl/v2"

	"github.com/agentbox/agentbox/criu/stage"
	"github.com/agentbox/agentbox/internal/failpoint"
	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/internal/undo"
	"github.com/agentbox/agentbox/overlay"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/internal/bundle"
	"github.com/agentbox/agentbox/runtime/internal/home"
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
	if a, err := b.adopted(id); a != nil || err != nil {
		return a.start(ctx, opts)
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
		s.attached.Close()
		s.monitor.kill()
		err := b.release(ctx, id)
		return errors.Join(err, b.home.Undo(id, s.n))
	})
	if err := s.watch(); err != nil {
		return nil, err
	}
	defer s.monitor.close()
	if err := s.prepare(ctx); err != nil {
		return nil, err
	}
	if err := s.create(ctx); err != nil {
		return nil, err
	}
	if err := s.begin(ctx); err != nil {
		return nil, err
	}
	b.prune(id)
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
	monitor  *watcher
	attached *streams.Attachment
	created  bool // the task is ours to delete

	// For an adopted container:
	rootfs []*types.Mount
	keep   *theirStreams // no monitor; the output goes where it went
	input  bool          // it has one, whatever its spec says
}

// orders are the monitor's.
func (s *starting) orders() orders {
	o := s.b.ordersOf(s.view.container, s.n)
	o.Input = o.Input || s.input
	return o
}

// watch makes the run's directories and starts its monitor, which takes a
// while to come up.
func (s *starting) watch() (err error) {
	b, spec := s.b, s.view.Spec
	s.run = runRecord{Number: s.n, Bundle: b.home.Bundle(spec.ID, s.n), Env: s.opts.Env}
	if err := b.home.Begin(spec.ID, s.n); err != nil {
		return err
	}
	if err := streams.Trim(b.home.Dir(spec.ID, "log")); err != nil {
		return err
	}
	o := s.orders()
	if err := makeFifos(s.run.Bundle, o.Terminal, o.Input); err != nil {
		return err
	}
	s.monitor, err = b.watch(s.run.Bundle, o, true)
	return err
}

// prepare mounts the root filesystem, makes the network and writes the spec.
func (s *starting) prepare(ctx context.Context) error {
	b, id := s.b, s.view.Spec.ID
	if err := b.wrap(); err != nil {
		return err
	}
	if err := b.root(s.view.container).Mount(); err != nil {
		return err
	}
	if err := failpoint.Hit("containerd.start.after-mount"); err != nil {
		return err
	}
	// Cut off until the processes are there: a peer's packet for a socket
	// that is yet to be restored would be answered with a reset.
	end, err := b.net.Prepare(ctx, id, s.view.Spec.Network)
	if err != nil {
		return err
	}
	for _, warning := range end.Warnings {
		b.log.Warn(warning, "sandbox", id)
	}
	if end.Address.IsValid() {
		s.run.Address = end.Address.String()
	}
	if err := failpoint.Hit("containerd.start.after-network"); err != nil {
		return err
	}
	if s.view.Spec.Terminal && s.opts.Streams != nil {
		s.size = streams.FirstSize(ctx, s.opts.Streams.Resize)
	}
	place := b.place(id)
	place.Upper = s.view.Upper
	spec, err := place.Prepare(s.view.Spec, s.run.Env, end, s.size, s.restores(), s.opts.Secrets)
	if err != nil {
		return err
	}
	packed, err := typeurl.MarshalAny(spec)
	if err != nil {
		return err
	}
	_, err = b.client.ContainerService().Update(in(ctx, b.namespace), containers.Container{ID: id, Spec: packed}, "spec")
	if err != nil {
		return plain(err)
	}
	return failpoint.Hit("containerd.start.after-spec")
}

// restores reports whether the wrapper will restore processes instead of
// starting the command.
func (s *starting) restores() bool {
	_, err := stage.At(s.b.home.Stage, s.view.Spec.ID).Load()
	return !errors.Is(err, fault.ErrNotFound)
}

// create has containerd create, or restore, the task: its first process then
// waits, or stands still.
func (s *starting) create(ctx context.Context) error {
	b := s.b
	o := s.orders()
	req := &tasks.CreateTaskRequest{ContainerID: o.Container, Terminal: o.Terminal, Rootfs: s.rootfs}
	if s.keep != nil {
		req.Stdout, req.Stderr = s.keep.Stdout, s.keep.Stderr
	} else {
		if err := s.monitor.await(ctx, s.run.Bundle); err != nil {
			return err
		}
		req.Stdin, req.Stdout, req.Stderr = fifos(s.run.Bundle, o.Terminal, o.Input)
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	// A call that is cancelled goes on in the daemon for a while, and what it
	// makes then would come after our clean-up: so it is waited for.
	resp, err := b.client.TaskService().Create(in(context.WithoutCancel(ctx), o.Namespace), req)
	if err = plain(err); errors.Is(err, fault.ErrExists) {
		// Another program, such as containerd's restart plugin, was faster.
		return fmt.Errorf("container %s has just been started: %w: %w", s.view.Spec.ID, fault.ErrState, err)
	}
	s.created = true
	if err != nil {
		return refusal(s.view.Spec.Args, err)
	}
	if err := failpoint.Hit("containerd.start.after-create"); err != nil {
		return err
	}
	s.run.Pid = int(resp.Pid)
	if s.run.Shim, err = shimOf(s.run.Pid); err != nil {
		return err
	}
	if err := record.WriteJSON(b.home.Start(s.view.Spec.ID, s.n, "run.json"), s.run, false); err != nil {
		return err
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	return failpoint.Hit("containerd.start.after-run")
}

// begin connects the streams and lets the command run, or the restored
// processes go on.
func (s *starting) begin(ctx context.Context) error {
	b, id := s.b, s.view.Spec.ID
	v := s.view
	v.run = s.run
	if s.opts.Streams != nil {
		a, err := b.connect(ctx, v, *s.opts.Streams, s.size)
		if err != nil {
			return err
		}
		s.attached = a
		a.EndInput = true
		a.Serve()
	}
	if v.Theirs == nil {
		if err := b.net.Connect(ctx, id); err != nil {
			return err
		}
	}
	if err := failpoint.Hit("containerd.start.after-attach"); err != nil {
		return err
	}
	at := time.Now() // a short command ends before we know that it began
	ns, name := b.nameOf(v.container)
	if _, err := b.client.TaskService().Start(in(context.WithoutCancel(ctx), ns), &tasks.StartRequest{ContainerID: name}); err != nil {
		return refusal(v.Spec.Args, plain(err))
	}
	if err := failpoint.Hit("containerd.start.after-start"); err != nil {
		return err
	}
	if err := b.home.Note(id, s.n, at); err != nil {
		return err
	}
	if s.keep != nil {
		return nil
	}
	return s.monitor.started()
}

// root returns the mount of a container's root filesystem. containerd would mount the snapshot
// itself, with the kernel's defaults; the options that keep an upperdir free of references to the
// layers below are ours.
func (b *Backend) root(c container) overlay.Mount {
	return overlay.Mount{Lower: c.Lower, Upper: c.Upper, Work: c.Work, Target: b.home.Dir(c.Spec.ID, "merged")}
}

// prune removes all but the last few runs.
func (b *Backend) prune(id string) {
	if err := b.home.Prune(id); err != nil {
		b.log.Warn("old runs not removed", "sandbox", id, "error", err)
	}
}

// Attach connects streams to a running container's first process; a paused one is silent.
// Without a terminal, the container's input ends when the caller's input ends or the caller
// leaves after having typed.
func (b *Backend) Attach(ctx context.Context, id string, ends runtime.Streams) error {
	v, err := b.lookAny(ctx, id)
	if err != nil {
		return err
	}
	if !v.live() {
		return fmt.Errorf("container %s is %s: %w", id, v.status, fault.ErrState)
	}
	var size *runtime.Size
	if v.Spec.Terminal {
		size = streams.FirstSize(ctx, ends.Resize)
	}
	if v.Theirs != nil && v.run.Bundle == "" {
		return &fault.Error{Err: fmt.Errorf("%w: the streams of %s are with the program that started it", fault.ErrUnsupported, v.Spec.Name), Hint: "Attach with the tool that did."}
	}
	a, err := b.connect(ctx, v, ends, size)
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
func (b *Backend) Logs(ctx context.Context, id string, opts runtime.LogOptions, stdout, stderr io.Writer) error {
	v, err := b.lookAny(ctx, id)
	if err != nil {
		return err
	}
	if v.Theirs != nil && v.run.Bundle == "" {
		if _, err := os.Lstat(b.home.Dir(id, "log")); errors.Is(err, fs.ErrNotExist) || v.live() {
			return b.theirLog(ctx, v, opts, stdout)
		}
	}
	if !opts.Follow || !v.live() {
		return streams.Print(ctx, b.home.Dir(id, "log"), opts, stdout, stderr)
	}
	return streams.Follow(ctx, b.home.Dir(id, "log"), opts, stdout, stderr, func(ctx context.Context) error {
		_, err := b.awaitExit(ctx, v.container, v.run)
		return err
	})
}

// refusal says that a command could not be started, if that is what containerd
// says.
func refusal(args []string, err error) error {
	if err == nil || isDown(err) {
		return err
	}
	if x := bundle.CommandError(args, err.Error()); x != nil {
		return x
	}
	return err
}
