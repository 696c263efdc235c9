package containerd

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	tasks "github.com/containerd/containerd/api/services/tasks/v1"
	"github.com/containerd/typeurl/v2"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/types/known/anypb"

	"github.com/agentbox/agentbox/internal/failpoint"
	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/internal/guard"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/internal/bundle"
	"github.com/agentbox/agentbox/runtime/internal/kernel"
	"github.com/agentbox/agentbox/runtime/internal/streams"
)

// Exec runs one more process in a running container. If ctx ends while the caller is
// attached, the process is killed; a detached one goes on.
func (b *Backend) Exec(ctx context.Context, id string, p runtime.Process, ends runtime.Streams) (exit int, err error) {
	v, err := b.lookAny(ctx, id)
	if err != nil {
		return 0, err
	}
	if v.status != runtime.Running {
		return 0, fmt.Errorf("container %s is %s: %w", id, v.status, fault.ErrState)
	}
	s := &session{b: b, view: v, p: p, ends: ends}
	if p.Terminal && !p.Detach {
		s.size = streams.FirstSize(ctx, ends.Resize)
	}
	b.sweepExecs(id)
	var name [8]byte
	_, _ = rand.Read(name[:])
	s.name = hex.EncodeToString(name[:])
	s.dir = b.home.RunDir(id, "exec", s.name)
	s.ns, s.container = b.nameOf(v.container)
	if err := os.MkdirAll(s.dir, 0o700); err != nil {
		return 0, err
	}
	// Tells sweepExecs that the session is in use.
	here, err := takeMonitor(s.dir)
	if err != nil {
		return 0, err
	}
	defer here.Unlock()
	exit, err = s.run(ctx)
	if !errors.Is(err, runtime.ErrDetached) {
		err = errors.Join(err, os.RemoveAll(s.dir))
	}
	return exit, err
}

// session is an exec on its way.
type session struct {
	b             *Backend
	view          view
	p             runtime.Process
	ends          runtime.Streams
	size          *runtime.Size
	name, dir     string
	ns, container string
}

// process makes the process section for the runtime.
func (s *session) process(ctx context.Context) (*specs.Process, error) {
	first, err := kernel.OpenProcess(s.view.pid)
	if err != nil && !kernel.Gone(err) {
		return nil, err
	}
	if err != nil {
		return nil, fmt.Errorf("container %s has ended: %w", s.view.Spec.ID, fault.ErrState)
	}
	defer first.Close()
	proc, err := bundle.Process(first, s.view.Spec, s.view.run.Env, s.p, s.size)
	if err != nil || s.view.Theirs == nil {
		return proc, err
	}
	return (&adoptee{s.b, s.view.container}).confine(ctx, s.p, proc, s.view.run.Env)
}

// run sees the session through.
func (s *session) run(ctx context.Context) (exit int, err error) {
	proc, err := s.process(ctx)
	if err != nil {
		return 0, err
	}
	packed, err := typeurl.MarshalAny(proc)
	if err != nil {
		return 0, err
	}
	req := &tasks.ExecProcessRequest{
		ContainerID: s.container, ExecID: s.name, Terminal: s.p.Terminal && !s.p.Detach,
		Spec: &anypb.Any{TypeUrl: packed.GetTypeUrl(), Value: packed.GetValue()},
	}
	proc.Terminal = req.Terminal
	input := s.p.Terminal || s.ends.Stdin != nil
	var h *hub
	if !s.p.Detach {
		if err := makeFifos(s.dir, s.p.Terminal, input); err != nil {
			return 0, err
		}
		if h, err = openHub(s.dir, s.p.Terminal, input, true); err != nil {
			return 0, err
		}
		defer h.close()
		h.endInput = s.closeInput
		h.pump()
		req.Stdin, req.Stdout, req.Stderr = fifos(s.dir, s.p.Terminal, input)
	}
	if err := failpoint.Hit("containerd.exec.after-dir"); err != nil {
		return 0, err
	}
	svc := s.b.client.TaskService()
	if err := ctx.Err(); err != nil {
		return 0, err
	}
	// As in Start, these calls are not broken off.
	call := in(context.WithoutCancel(ctx), s.ns)
	if _, err := svc.Exec(call, req); err != nil {
		return 0, s.refused(plain(err))
	}
	gone := false // its process may not be deleted by us
	defer func() {
		if !gone {
			s.remove(call)
		}
	}()
	if err := failpoint.Hit("containerd.exec.after-exec"); err != nil {
		return 0, err
	}
	var a *streams.Attachment
	defer func() { a.Close() }()
	if h != nil {
		// Before it prints.
		pair, err := h.pair()
		if err != nil {
			return 0, err
		}
		conn := streams.Packets{UnixConn: pair}
		a = streams.New(ctx, conn, s.ends, s.p.Terminal, nil, func(size runtime.Size) { s.b.resize(s.view, s.name, size) })
		a.EndInput = true
		if err := conn.Greeted(ctx); err != nil {
			return 0, err
		}
	}
	if _, err := svc.Start(call, &tasks.StartRequest{ContainerID: s.container, ExecID: s.name}); err != nil {
		return 0, s.refused(plain(err))
	}
	if err := failpoint.Hit("containerd.exec.after-start"); err != nil {
		return 0, err
	}
	if s.p.Detach {
		gone = true
		return 0, nil
	}
	h.started()
	if s.size != nil {
		s.b.resize(s.view, s.name, *s.size)
	}
	a.Serve()
	type ending struct {
		code int
		err  error
	}
	ended := make(chan ending, 1)
	waiting, cancel := context.WithCancel(in(ctx, s.ns))
	defer cancel()
	guard.Go(func() {
		var code int
		err := guard.Do(func() (err error) {
			code, err = s.wait(waiting)
			return err
		})
		ended <- ending{code, err}
		if err == nil {
			h.ended()
			h.flush(patience)
		}
		h.close()
	})
	if err := a.Wait(); err != nil {
		if errors.Is(err, runtime.ErrDetached) {
			gone = true
			if lerr := s.leave(ctx); lerr != nil {
				s.b.log.Warn("output of the detached process not read", "sandbox", s.view.Spec.ID, "err", lerr)
			}
		}
		return 0, err
	}
	end := <-ended
	return end.code, end.err
}

// wait returns the exit code of the process. The daemon may be restarted
// meanwhile.
func (s *session) wait(ctx context.Context) (int, error) {
	for {
		resp, err := s.b.client.TaskService().Wait(ctx, &tasks.WaitRequest{ContainerID: s.container, ExecID: s.name})
		if err == nil {
			return int(resp.ExitStatus), nil
		}
		if err = plain(err); ctx.Err() != nil || !isDown(err) {
			return 0, err
		}
		if _, err := os.Stat(fmt.Sprintf("/proc/%d", s.view.pid)); err != nil {
			return 128 + int(unix.SIGKILL), nil // with its container
		}
		select {
		case <-ctx.Done():
			return 0, ctx.Err()
		case <-time.After(100 * time.Millisecond): // a daemon that is back is not announced
		}
	}
}

// remove ends and deletes the process.
func (s *session) remove(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, grace)
	defer cancel()
	svc := s.b.client.TaskService()
	for {
		_, err := svc.DeleteProcess(ctx, &tasks.DeleteProcessRequest{ContainerID: s.container, ExecID: s.name})
		if err = plain(err); err == nil || errors.Is(err, fault.ErrNotFound) || isDown(err) || ctx.Err() != nil {
			return
		}
		_, _ = svc.Kill(ctx, &tasks.KillRequest{ContainerID: s.container, ExecID: s.name, Signal: uint32(unix.SIGKILL)})
		select { // the shim hears of an end a moment after it
		case <-ctx.Done():
		case <-time.After(5 * time.Millisecond):
		}
	}
}

// closeInput has the shim let go of the input.
func (s *session) closeInput() {
	ctx, cancel := context.WithTimeout(in(context.Background(), s.ns), callTimeout)
	defer cancel()
	_, err := s.b.client.TaskService().CloseIO(ctx, &tasks.CloseIORequest{ContainerID: s.container, ExecID: s.name, Stdin: true})
	if err != nil {
		s.b.log.Debug("input not closed", "sandbox", s.view.Spec.ID, "err", plain(err))
	}
}

// leave starts a monitor that reads what the process goes on to print.
func (s *session) leave(ctx context.Context) error {
	o := orders{
		Namespace: s.ns, Container: s.container, Address: s.b.address, Exec: s.name,
		Terminal: s.p.Terminal, Input: s.p.Terminal || s.ends.Stdin != nil,
	}
	w, err := s.b.watch(s.dir, o, false)
	if err != nil {
		return err
	}
	defer w.close()
	return w.await(ctx, s.dir)
}

// refused explains why the runtime did not start the process.
func (s *session) refused(err error) error {
	for _, gone := range []string{"does not exist", "stopped container", "paused container", "paused state", "stopped state", "not running", "cannot exec in a", "process already finished"} {
		if strings.Contains(err.Error(), gone) {
			return fmt.Errorf("container %s: %w: %w", s.view.Spec.ID, fault.ErrState, err)
		}
	}
	if errors.Is(err, fault.ErrNotFound) {
		return fmt.Errorf("container %s: %w: %v", s.view.Spec.ID, fault.ErrState, err)
	}
	return refusal(s.p.Args, err)
}

// sweepExecs removes what sessions of killed callers left.
const fresh = time.Minute

// sweepExecs removes what sessions left whose caller was killed.
func (b *Backend) sweepExecs(id string) {
	entries, err := os.ReadDir(b.home.RunDir(id, "exec"))
	if err != nil {
		return
	}
	for _, e := range entries {
		st, err := e.Info()
		if err != nil || time.Since(st.ModTime()) <= fresh {
			continue
		}
		if used, err := monitored(b.home.RunDir(id, "exec", e.Name())); err == nil && !used {
			// Only names: the shim holds the fifos open for as long as it needs them.
			_ = os.RemoveAll(b.home.RunDir(id, "exec", e.Name()))
		}
	}
}
