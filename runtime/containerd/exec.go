package containerd

import (
	"context"
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
	"github.com/agentbox/agentbox/runtime/internal/box"
	"github.com/agentbox/agentbox/runtime/internal/streams"
)

// Exec runs one more process in a running container.
func (b *Backend) Exec(ctx context.Context, id string, p runtime.Process, ends runtime.Streams) (exit int, err error) {
	return b.box.Exec(ctx, id, p, ends)
}

// session is this backend's part in an exec.
type session struct {
	*box.Session
	b             *Backend
	ns, container string
}

// Exec implements box.Hooks.
func (h hooks) Exec(ctx context.Context, bs *box.Session) (exit int, err error) {
	s := &session{Session: bs, b: h.Backend}
	s.ns, s.container = h.nameOf(s.View.Spec.ID)
	// Tells the sweep of sessions that this one is in use.
	here, err := takeMonitor(s.Dir)
	if err != nil {
		return 0, err
	}
	defer here.Unlock()
	exit, err = s.run(ctx)
	s.Kept = errors.Is(err, runtime.ErrDetached)
	return exit, err
}

// process makes the process section for the runtime.
func (s *session) process(ctx context.Context) (*specs.Process, error) {
	proc, err := s.OCIProcess()
	if err != nil || !s.View.Foreign {
		return proc, err
	}
	a, err := s.b.adopted(s.View.Spec.ID)
	if a == nil || err != nil {
		return nil, errors.Join(err, fmt.Errorf("container %s: %w", s.View.Spec.ID, fault.ErrNotFound))
	}
	return a.confine(ctx, s.Process, proc, s.View.Run.Env)
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
		ContainerID: s.container, ExecID: s.Name, Terminal: s.Process.Terminal && !s.Process.Detach,
		Spec: &anypb.Any{TypeUrl: packed.GetTypeUrl(), Value: packed.GetValue()},
	}
	proc.Terminal = req.Terminal
	input := s.Process.Terminal || s.Streams.Stdin != nil
	var h *hub
	if !s.Process.Detach {
		if err := makeFifos(s.Dir, s.Process.Terminal, input); err != nil {
			return 0, err
		}
		if h, err = openHub(s.Dir, s.Process.Terminal, input, true); err != nil {
			return 0, err
		}
		defer h.close()
		h.endInput = s.closeInput
		h.pump()
		req.Stdin, req.Stdout, req.Stderr = fifos(s.Dir, s.Process.Terminal, input)
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
		return 0, runtime.Unstarted(s.refused(plain(err)))
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
		a = streams.New(ctx, conn, s.Streams, s.Process.Terminal, nil, func(size runtime.Size) {
			s.b.resize(s.View.Spec.ID, s.Name, size)
		})
		a.EndInput = true
		if err := conn.Greeted(ctx); err != nil {
			return 0, err
		}
	}
	if _, err := svc.Start(call, &tasks.StartRequest{ContainerID: s.container, ExecID: s.Name}); err != nil {
		return 0, runtime.Unstarted(s.refused(plain(err)))
	}
	if err := failpoint.Hit("containerd.exec.after-start"); err != nil {
		return 0, err
	}
	if s.Process.Detach {
		gone = true
		return 0, nil
	}
	h.started()
	if s.Size != nil {
		s.b.resize(s.View.Spec.ID, s.Name, *s.Size)
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
				s.b.log.Warn("output of the detached process not read", "sandbox", s.View.Spec.ID, "err", lerr)
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
		resp, err := s.b.client.TaskService().Wait(ctx, &tasks.WaitRequest{ContainerID: s.container, ExecID: s.Name})
		if err == nil {
			return int(resp.ExitStatus), nil
		}
		if err = plain(err); ctx.Err() != nil || !isDown(err) {
			return 0, err
		}
		if _, err := os.Stat(fmt.Sprintf("/proc/%d", s.View.Pid)); err != nil {
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
	ctx, cancel := context.WithTimeout(ctx, box.Grace)
	defer cancel()
	svc := s.b.client.TaskService()
	for {
		_, err := svc.DeleteProcess(ctx, &tasks.DeleteProcessRequest{ContainerID: s.container, ExecID: s.Name})
		if err = plain(err); err == nil || errors.Is(err, fault.ErrNotFound) || isDown(err) || ctx.Err() != nil {
			return
		}
		_, _ = svc.Kill(ctx, &tasks.KillRequest{ContainerID: s.container, ExecID: s.Name, Signal: uint32(unix.SIGKILL)})
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
	_, err := s.b.client.TaskService().CloseIO(ctx, &tasks.CloseIORequest{
		ContainerID: s.container, ExecID: s.Name, Stdin: true,
	})
	if err != nil {
		s.b.log.Debug("input not closed", "sandbox", s.View.Spec.ID, "err", plain(err))
	}
}

// leave starts a monitor that reads what the process goes on to print.
func (s *session) leave(ctx context.Context) error {
	o := orders{
		Namespace: s.ns, Container: s.container, Address: s.b.address, Exec: s.Name,
		Terminal: s.Process.Terminal, Input: s.Process.Terminal || s.Streams.Stdin != nil,
	}
	w, err := s.b.watch(s.Dir, o, false)
	if err != nil {
		return err
	}
	defer w.close()
	return w.await(ctx, s.Dir)
}

// refused explains why the runtime did not start the process.
func (s *session) refused(err error) error {
	for _, gone := range []string{
		"does not exist", "stopped container", "paused container", "paused state", "stopped state", "not running",
		"cannot exec in a", "process already finished",
	} {
		if strings.Contains(err.Error(), gone) {
			return fmt.Errorf("container %s: %w: %w", s.View.Spec.ID, fault.ErrState, err)
		}
	}
	if errors.Is(err, fault.ErrNotFound) {
		return fmt.Errorf("container %s: %w: %v", s.View.Spec.ID, fault.ErrState, err)
	}
	return refusal(s.Process.Args, err)
}
