package containerd

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"strings"
	"time"

	tasks "github.com/containerd/containerd/api/services/tasks/v1"
	"github.com/containerd/containerd/api/types"
	"github.com/containerd/containerd/api/types/task"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/criu"
	"github.com/agentbox/agentbox/criu/stage"
	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/internal/undo"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/internal/box"
	"github.com/agentbox/agentbox/runtime/internal/bundle"
	"github.com/agentbox/agentbox/runtime/internal/kernel"
	"github.com/agentbox/agentbox/runtime/internal/record"
)

// adoptee is an adopted container: it has the verbs that differ from those of ours. It
// runs as its owner configured it; a start of ours gives it a monitor and a log of ours in
// place of its owner's streams, unless these were a file or a logging program, which it
// then keeps.
type adoptee struct {
	b *Backend
	adoptedRecord
}

// theirStreams is streams.json: where an adopted container's task, which a
// Stop has deleted, had its streams.
type theirStreams struct {
	Stdin, Stdout, Stderr string
	Terminal              bool
}

// adopted returns an adopted container, or nil if the id is not one's.
func (b *Backend) adopted(id string) (*adoptee, error) {
	rec, err := b.readRecord(id)
	if err != nil || rec.Theirs == nil {
		return nil, nil // the caller finds out why
	}
	return &adoptee{b, rec}, nil
}

// there asks containerd for the container; an id that was given to another one
// meanwhile is ErrNotFound.
func (a *adoptee) there(ctx context.Context) error {
	c, err := a.b.client.ContainerService().Get(in(ctx, a.Theirs.Namespace), a.Theirs.ID)
	if err = plain(err); err != nil && !errors.Is(err, fault.ErrNotFound) {
		return err
	}
	if err != nil || !c.CreatedAt.Equal(a.Theirs.Created) {
		return fmt.Errorf("container %s: %w", a.Spec.Name, fault.ErrNotFound)
	}
	return nil
}

// look finds out its state: from containerd, or, while that does not answer,
// from the OCI runtime.
func (a *adoptee) look(ctx context.Context) (box.View, error) {
	v := box.View{Container: a.Container, Status: runtime.Created, Foreign: true}
	var t *taskInfo
	err := a.there(ctx)
	if err == nil {
		t, err = a.task(ctx)
	}
	switch {
	case isDown(err):
		return a.lookAlone(ctx, v)
	case errors.Is(err, fault.ErrNotFound) && a.gone(ctx):
		return v, errors.Join(err, a.forget())
	case errors.Is(err, fault.ErrNotFound):
		if record.ReadJSON(a.b.box.Dir(a.Spec.ID, "exit.json"), &v.Exit) == nil {
			v.Status = runtime.Exited
		}
		return v, nil
	case err != nil:
		return v, err
	}
	switch t.Status {
	case task.Status_STOPPED:
		v.Status, v.Exit = runtime.Exited, box.Exit{Code: int(t.ExitStatus), Finished: t.ExitedAt.AsTime()}
	case task.Status_RUNNING, task.Status_PAUSED, task.Status_PAUSING:
		return v, a.lookAlive(&v, int(t.Pid))
	}
	return v, nil
}

// task returns what containerd knows of its task; ErrNotFound when it
// has none.
func (a *adoptee) task(ctx context.Context) (*taskInfo, error) {
	resp, err := a.b.client.TaskService().Get(in(ctx, a.Theirs.Namespace), &tasks.GetRequest{ContainerID: a.Theirs.ID})
	if err != nil {
		return nil, plain(err)
	}
	return resp.Process, nil
}

// gone reports whether the container, and not only its task, is not there.
func (a *adoptee) gone(ctx context.Context) bool { return errors.Is(a.there(ctx), fault.ErrNotFound) }

// lookAlone asks the OCI runtime.
func (a *adoptee) lookAlone(ctx context.Context, v box.View) (box.View, error) {
	state, err := a.runtime().State(ctx)
	switch {
	case errors.Is(err, fault.ErrNotFound) || err == nil && state.Status == "stopped":
		v.Status = runtime.Exited
		_ = record.ReadJSON(a.b.box.Dir(a.Spec.ID, "exit.json"), &v.Exit)
		return v, nil
	case err != nil:
		return v, err
	}
	if state.Status == "running" || state.Status == "paused" {
		return v, a.lookAlive(&v, state.Pid)
	}
	return v, nil
}

// lookAlive fills in what is so of a container whose first process is pid.
func (a *adoptee) lookAlive(v *box.View, pid int) error {
	v.Status, v.Pid, v.Started = runtime.Running, pid, kernel.Started(pid)
	// The kernel's word, not the shim's: others may have frozen it.
	frozen, err := a.b.box.Cgroups.FrozenProcess(pid)
	if err != nil {
		return err
	}
	if frozen {
		v.Status = runtime.Paused
	}
	runs, err := a.b.box.Starts(a.Spec.ID)
	if err != nil || len(runs) == 0 {
		return err
	}
	run := box.Run{Number: runs[0]}
	if err := a.b.box.ReadRun(a.Spec.ID, run.Number, &run); err != nil {
		return err
	}
	if run.Pid == pid {
		v.Run = run
	}
	return nil
}

// runtime is the OCI runtime's view of it.
func (a *adoptee) runtime() criu.Runtime {
	r := a.Theirs.Runtime
	if a.Theirs.Wrapped {
		r.Binary = a.b.box.OCI
	}
	return r
}

func (a *adoptee) inspect(ctx context.Context) (runtime.Container, error) {
	v, err := a.look(ctx)
	if err != nil {
		return runtime.Container{}, err
	}
	c := runtime.Container{
		Status: v.Status, Pid: v.Pid, Started: v.Started, ExitCode: v.Exit.Code, Finished: v.Exit.Finished,
		Upper: a.Upper, Lower: a.Lower, Runtime: runtime.OCIRuntime(a.runtime()), Stage: a.slot(),
		EmptyNetwork: a.Theirs.Hooks,
	}
	switch {
	case a.Theirs.Pod:
		c.Busy = "it belongs to a Kubernetes pod, and the kubelet would start another container in its place"
		c.Remedy = "Checkpoints of it can be taken; stop it by way of Kubernetes."
	case !a.Theirs.Wrapped:
		c.NoRestore = fmt.Sprintf("it was started with %s, which cannot restore in place of a start",
			a.Theirs.Runtime.Binary)
		c.Remedy = "Start it with the runtime agentbox-runtime: ctr run --runc-binary /usr/local/bin/agentbox-runtime ..., nerdctl run --runtime /usr/local/bin/agentbox-runtime ..."
	}
	return c, nil
}

// slot returns the slot in which its runtime looks for a staged restore: the runtime has the
// daemon's environment.
func (a *adoptee) slot() stage.Slot {
	return stage.Slot{
		Run: cmp.Or(a.b.client.daemonEnv(stage.Env), a.Theirs.Stage, stage.DefaultRun),
		ID:  stage.Under(a.Theirs.Runtime.Root, a.Theirs.ID),
	}
}

// mayStop refuses to stop a container that the kubelet would replace at once.
func (a *adoptee) mayStop() error {
	if !a.Theirs.Pod {
		return nil
	}
	return &fault.Error{Err: fmt.Errorf("%w: %s belongs to a Kubernetes pod: the kubelet would start another container in its place", fault.ErrUnsupported, a.Spec.Name),
		Hint: "Checkpoints of it can be taken; stop it by way of Kubernetes."}
}

func (a *adoptee) wait(ctx context.Context) (runtime.Exit, error) {
	for {
		v, err := a.look(ctx)
		if err != nil {
			return runtime.Exit{}, err
		}
		switch v.Status {
		case runtime.Created:
			return runtime.Exit{}, fmt.Errorf("container %s was never started: %w", a.Spec.Name, fault.ErrState)
		case runtime.Exited:
			return v.Exit.Told(), nil
		}
		if v.Run.Number > 0 && a.hasMonitor(v) {
			exit, err := a.b.box.AwaitExit(ctx, a.Spec.ID, v.Run)
			return exit.Told(), err
		}
		resp, err := a.b.client.TaskService().Wait(in(ctx, a.Theirs.Namespace),
			&tasks.WaitRequest{ContainerID: a.Theirs.ID})
		if err == nil {
			return runtime.Exit{Code: int(resp.ExitStatus)}, nil
		}
		if err = plain(err); ctx.Err() != nil || !isDown(err) && !errors.Is(err, fault.ErrNotFound) {
			return runtime.Exit{}, err
		}
		p, err := kernel.OpenProcess(v.Pid)
		if err == nil {
			err = p.WaitFor(ctx, time.Second)
			p.Close()
		}
		if ctx.Err() != nil {
			return runtime.Exit{}, ctx.Err()
		}
		if err == nil && isDown(a.there(ctx)) {
			return runtime.Exit{Code: box.UnknownExit}, nil // over, with an unknown exit code
		}
	}
}

// hasMonitor reports whether a run of ours has our streams.
func (a *adoptee) hasMonitor(v box.View) bool {
	_, err := os.Stat(v.Run.Bundle + "/" + ordersFile)
	return err == nil
}

// stop ends its processes and deletes its task, so that it can be started
// again. Its container stays.
func (a *adoptee) stop(ctx context.Context, opts runtime.StopOptions) error {
	unlock, err := a.b.box.Lock(ctx, a.Spec.ID)
	if err != nil {
		return err
	}
	defer unlock()
	v, err := a.look(ctx)
	if err != nil {
		return err
	}
	if !v.Live() && v.Status != runtime.Exited {
		return nil
	}
	t, err := a.task(ctx)
	if errors.Is(err, fault.ErrNotFound) {
		return nil
	}
	if err != nil {
		return err
	}
	if err := a.mayStop(); err != nil {
		return err
	}
	// Not of a task of ours, whose fifos go with it.
	if v.Run.Number == 0 {
		s := theirStreams{t.Stdin, t.Stdout, t.Stderr, t.Terminal}
		if err := record.WriteJSON(a.b.box.Dir(a.Spec.ID, "streams.json"), s, false); err != nil {
			return err
		}
	}
	if v.Live() {
		if v.Exit, err = a.end(ctx, v, opts); err != nil {
			return err
		}
	}
	if err := record.WriteJSON(a.b.box.Dir(a.Spec.ID, "exit.json"), v.Exit, true); err != nil {
		return err
	}
	return errors.Join(a.b.dropTask(ctx, a.Theirs.Namespace, a.Theirs.ID), a.b.box.ClearRun(a.Spec.ID))
}

// end ends its processes.
func (a *adoptee) end(ctx context.Context, v box.View, opts runtime.StopOptions) (exit box.Exit, err error) {
	sig, err := bundle.StopSignal(a.Spec, opts.Signal)
	if err != nil {
		return exit, err
	}
	p, err := kernel.OpenProcess(v.Pid)
	if err != nil && !kernel.Gone(err) {
		return exit, err
	}
	if err != nil {
		return exit, fmt.Errorf("container %s has just ended: %w", a.Spec.Name, fault.ErrState)
	}
	defer p.Close()
	exit = box.Exit{Code: 128 + int(unix.SIGKILL)}
	killed := true
	if v.Status == runtime.Running && opts.Timeout > 0 {
		ended, err := p.Ask(ctx, sig, opts.Timeout)
		if err != nil {
			return exit, err
		}
		killed = !ended
	}
	svc := a.b.client.TaskService()
	ctx = in(ctx, a.Theirs.Namespace)
	if killed && v.Status == runtime.Paused {
		// Each is sent the signal before any thaws: it then takes it first.
		list, err := svc.ListPids(ctx, &tasks.ListPidsRequest{ContainerID: a.Theirs.ID})
		if err != nil {
			return exit, plain(err)
		}
		for _, one := range list.Processes {
			q, err := kernel.OpenProcess(int(one.Pid))
			if kernel.Gone(err) {
				continue
			}
			if err != nil {
				return exit, err
			}
			_ = q.Kill(unix.SIGKILL)
			q.Close()
		}
		if err := a.runtime().Resume(ctx); err != nil && p.Alive() {
			return exit, err
		}
	} else if killed {
		if err := p.Kill(unix.SIGKILL); err != nil {
			return exit, err
		}
	}
	if err := p.WaitFor(ctx, box.Grace); err != nil {
		return exit, fmt.Errorf("container %s does not end: %w", a.Spec.Name, err)
	}
	if v.Run.Number > 0 && a.hasMonitor(v) {
		soon, cancel := context.WithTimeout(ctx, drain)
		defer cancel()
		if e, err := a.b.box.AwaitExit(soon, a.Spec.ID, v.Run); err == nil {
			exit = e
		}
	} else if resp, err := svc.Wait(ctx, &tasks.WaitRequest{ContainerID: a.Theirs.ID}); err == nil {
		exit.Code, exit.Finished = int(resp.ExitStatus), resp.ExitedAt.AsTime()
	}
	if exit.Finished.IsZero() {
		exit.Finished = time.Now()
	}
	return exit, nil
}

// start starts it again, with the spec that its owner gave it.
func (a *adoptee) start(ctx context.Context, opts runtime.StartOptions) (wait func() error, err error) {
	b, id := a.b, a.Spec.ID
	unlock, err := b.box.Lock(ctx, id)
	if err != nil {
		return nil, err
	}
	defer unlock()
	v, err := a.look(ctx)
	if err != nil {
		return nil, err
	}
	if v.Live() {
		return nil, fmt.Errorf("container %s is %s: %w", a.Spec.Name, v.Status, fault.ErrState)
	}
	if err := a.mayStop(); err != nil {
		return nil, err
	}
	if t, err := a.task(ctx); err == nil {
		if err := record.WriteJSON(b.box.Dir(id, "streams.json"),
			theirStreams{t.Stdin, t.Stdout, t.Stderr, t.Terminal}, false); err != nil {
			return nil, err
		}
	}
	if err := b.dropTask(ctx, a.Theirs.Namespace, a.Theirs.ID); err != nil {
		return nil, err
	}
	start, err := b.box.NewStart(v, opts)
	if err != nil {
		return nil, err
	}
	s := &starting{Start: start, b: b, theirs: a.Theirs}
	var undo undo.Stack
	defer func() { undo.Run(ctx, &err) }()
	undo.Add(func(ctx context.Context) error {
		s.monitor.kill()
		var err error
		if s.created {
			err = b.dropTask(ctx, a.Theirs.Namespace, a.Theirs.ID)
		}
		return errors.Join(err, s.Discard())
	})
	if err := s.watchTheirs(a); err != nil {
		return nil, err
	}
	defer s.monitor.close()
	if a.Theirs.Wrapped && len(opts.Env) > 0 {
		at := a.slot()
		if err := at.PutStart(stage.Start{Env: opts.Env}); err != nil {
			return nil, err
		}
		undo.Add(func(context.Context) error { return at.ClearStart() })
	}
	mounts, err := b.client.SnapshotService(a.Theirs.Snapshotter).Mounts(in(ctx, a.Theirs.Namespace), a.Theirs.Snapshot)
	if err != nil {
		return nil, plain(err)
	}
	for _, m := range mounts {
		s.rootfs = append(s.rootfs, &types.Mount{Type: m.Type, Source: m.Source, Target: m.Target, Options: m.Options})
	}
	if err := s.createTask(ctx); err != nil {
		return nil, err
	}
	if wait, err = s.Begin(ctx, s); err != nil {
		return nil, err
	}
	if err := os.Remove(b.box.Dir(id, "exit.json")); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	return wait, nil
}

// watchTheirs is watch for an adopted container. A container whose output went to a file or to a
// logging program keeps that; a shim that is given a fifo needs a reader at its other end, which is
// our monitor from now on.
func (s *starting) watchTheirs(a *adoptee) error {
	var had theirStreams
	if err := record.ReadJSON(a.b.box.Dir(a.Spec.ID, "streams.json"), &had); err != nil &&
		!errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if !isURI(had.Stdout) && !isURI(had.Stderr) {
		// The input of a restored process must be replaced by its like: in place of a pipe
		// it would get the host's /dev/null, which CRIU could not dump again.
		at := a.slot()
		_, err := at.Load()
		s.input = had.Stdin != "" || !errors.Is(err, fault.ErrNotFound)
		if err := s.MakeDirs(); err != nil {
			return err
		}
		return s.watch()
	}
	if s.Options.Streams != nil {
		return &fault.Error{Err: fmt.Errorf("%w: the output of %s goes to %s", fault.ErrUnsupported, a.Spec.Name,
			cmp.Or(had.Stdout, had.Stderr)), Hint: "Start it detached."}
	}
	s.keep = &had
	s.Run.Bundle = ""
	return os.MkdirAll(s.Dir(), 0o700)
}

func isURI(stream string) bool {
	return strings.Contains(stream, "://") && !strings.HasPrefix(stream, "fifo://")
}

// remove deletes the container, as its owner's tool would, and our records of it.
func (a *adoptee) remove(ctx context.Context) error {
	ns := a.Theirs.Namespace
	err := a.there(ctx)
	if err == nil {
		if err := a.mayStop(); err != nil {
			return err
		}
		if err := a.stop(ctx, runtime.StopOptions{}); err != nil {
			return err
		}
		ctx := in(ctx, ns)
		if err := gone(a.b.client.ContainerService().Delete(ctx, a.Theirs.ID)); err != nil {
			return err
		}
		if err := a.b.dropSnapshot(ctx, a.Theirs.Snapshotter, a.Theirs.Snapshot); err != nil {
			return err
		}
	} else if !errors.Is(err, fault.ErrNotFound) {
		return err
	}
	return a.forget()
}

// forget deletes what we have kept of a container that is gone.
func (a *adoptee) forget() error {
	at, id := a.slot(), a.Spec.ID
	return errors.Join(at.Clear(), kernel.UnmountBelow(a.b.box.Dir(id)), os.RemoveAll(a.b.box.RunDir(id)),
		os.RemoveAll(a.b.box.Dir(id)))
}

// confine gives an exec's process the confinement of the container that it
// comes into.
func (a *adoptee) confine(
	ctx context.Context, p runtime.Process, proc *specs.Process, env []string,
) (*specs.Process, error) {
	found, err := a.b.client.ContainerService().Get(in(ctx, a.Theirs.Namespace), a.Theirs.ID)
	if err != nil {
		return nil, plain(err)
	}
	spec, err := specOf(found)
	if err != nil {
		return nil, err
	}
	out := *spec.Process
	out.Args, out.Terminal, out.ConsoleSize = proc.Args, proc.Terminal, proc.ConsoleSize
	out.Env = runtime.JoinEnv(out.Env, p.Env, env)
	out.Cwd = cmp.Or(p.Workdir, out.Cwd)
	if p.User != "" {
		out.User = proc.User
		if out.User.UID != 0 && out.Capabilities != nil {
			out.Capabilities = &specs.LinuxCapabilities{Bounding: out.Capabilities.Bounding}
		}
	}
	return &out, nil
}

// logs writes the log that a start of ours has given it, else its owner's.
func (a *adoptee) logs(ctx context.Context, opts runtime.LogOptions, stdout, stderr io.Writer) error {
	v, err := a.look(ctx)
	if err != nil {
		return err
	}
	if v.Run.Bundle == "" {
		if _, err := os.Lstat(a.b.box.Dir(a.Spec.ID, "log")); errors.Is(err, fs.ErrNotExist) || v.Live() {
			return a.ownersLog(ctx, opts, stdout)
		}
	}
	return a.b.box.Logs(ctx, a.Spec.ID, opts, stdout, stderr)
}

// ownersLog writes the log of a container that still has its owner's streams.
func (a *adoptee) ownersLog(ctx context.Context, opts runtime.LogOptions, stdout io.Writer) error {
	var had theirStreams
	if t, err := a.task(ctx); err == nil {
		had = theirStreams{Stdout: t.Stdout, Stderr: t.Stderr}
	} else if err := record.ReadJSON(a.b.box.Dir(a.Spec.ID, "streams.json"), &had); err != nil &&
		!errors.Is(err, fs.ErrNotExist) {
		return err
	}
	path, ok := strings.CutPrefix(had.Stdout, "file://")
	if !ok || opts.Follow || opts.Timestamps || !opts.Since.IsZero() {
		where := "to the program that started it"
		if had.Stdout != "" {
			where = "to " + had.Stdout
		}
		return &fault.Error{
			Err:  fmt.Errorf("%w: the output of %s goes %s", fault.ErrUnsupported, a.Spec.Name, where),
			Hint: "Ask the tool that started it, or read that file.",
		}
	}
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	return tail(f, opts.Tail, stdout)
}

// tail copies the last n lines, or, when n is negative, all.
func tail(f io.Reader, n int, w io.Writer) error {
	if w == nil {
		return nil
	}
	if n < 0 {
		_, err := io.Copy(w, f)
		return err
	}
	var last [][]byte
	for in := bufio.NewReader(f); ; {
		line, err := in.ReadBytes('\n')
		if len(line) > 0 && n > 0 {
			if last = append(last, line); len(last) > n {
				last = last[1:]
			}
		}
		if errors.Is(err, io.EOF) {
			_, err = w.Write(bytes.Join(last, nil))
			return err
		}
		if err != nil {
			return err
		}
	}
}
