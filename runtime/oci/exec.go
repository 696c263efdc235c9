package oci

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/failpoint"
	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/internal/box"
	"github.com/agentbox/agentbox/runtime/internal/kernel"
	"github.com/agentbox/agentbox/runtime/internal/record"
	"github.com/agentbox/agentbox/runtime/internal/streams"
)

// session is this backend's part in an exec.
type session struct {
	*box.Session
	b *Backend
}

// Exec implements box.Hooks, by a conmon of the session's own.
func (h hooks) Exec(ctx context.Context, s *box.Session) (exit int, err error) {
	exit, err = (&session{s, h.Backend}).run(ctx)
	if !s.Process.Detach && !errors.Is(err, runtime.ErrDetached) {
		s.Kept = false
	}
	return exit, err
}

// writeProcess writes the process section for the runtime.
func (s *session) writeProcess() error {
	proc, err := s.OCIProcess()
	if err != nil {
		return err
	}
	data, err := json.Marshal(proc)
	if err != nil {
		return err
	}
	return record.Write(filepath.Join(s.Dir, "process.json"), data, 0o600, false)
}

// runtime is the program that executes the process: the wrapper where it has anything
// to do. With a user namespace it gives the pipes to the user inside, and into a
// restored sandbox it brings the process by the time namespace.
func (s *session) runtime() string {
	if s.View.Spec.IDs != nil && !s.Process.Terminal || kernel.OtherClock(s.View.Pid) {
		return s.b.box.Wrapper
	}
	return s.b.box.OCI
}

// run starts conmon and sees the session through.
func (s *session) run(ctx context.Context) (exit int, err error) {
	args := []string{"-e", "--exec-process-spec", filepath.Join(s.Dir, "process.json"), "-l", "none"}
	switch {
	case s.Process.Terminal:
		args = append(args, "-t")
	case s.Streams.Stdin != nil && !s.Process.Detach:
		args = append(args, "-i")
	}
	if !s.Process.Detach {
		args = append(args, "--exec-attach")
	}
	if err := failpoint.Hit("oci.exec.after-dir"); err != nil {
		return 0, err
	}
	c, err := s.b.launch(launch{
		id: s.View.Spec.ID, session: filepath.Base(s.Dir), bundle: s.Dir, dir: s.Dir,
		runtime: s.runtime(), args: args, attach: !s.Process.Detach,
	})
	if err != nil {
		return 0, err
	}
	defer c.close()
	if err := s.writeProcess(); err != nil {
		return 0, err
	}
	s.Kept = true // the directory is conmon's, too
	if err := c.allow(); err != nil {
		return 0, err
	}
	var a *streams.Attachment
	defer func() { a.Close() }()
	if !s.Process.Detach {
		if err := c.ready(ctx); err != nil {
			return 0, err
		}
		if a, err = s.b.connect(ctx, s.Dir, s.Streams, s.Process.Terminal, s.Size); err != nil {
			return 0, err
		}
		a.EndInput = true
		a.Serve()
		if err := c.begin(); err != nil {
			return 0, err
		}
	}
	rep, err := c.report(ctx)
	if err != nil {
		s.abort()
		return 0, err
	}
	if rep.Data <= 0 {
		return 0, runtime.Unstarted(s.refused(rep.Message))
	}
	if err := failpoint.Hit("oci.exec.after-start"); err != nil {
		s.abort()
		return 0, err
	}
	if s.Process.Detach {
		return 0, nil
	}
	if err := a.Wait(); err != nil {
		if ctx.Err() != nil {
			s.abort()
		}
		return 0, err
	}
	rep, err = c.report(ctx)
	if err != nil {
		return 0, err
	}
	if rep.Data < 0 {
		return 0, s.refused(rep.Message)
	}
	return rep.Data, nil
}

// abort kills what was started. Before there is a process, that is conmon,
// with which the runtime's call ends.
func (s *session) abort() {
	if pid, _ := kernel.PidFile(filepath.Join(s.Dir, "pid")); pid != 0 {
		if p, _ := kernel.OpenMember(pid, s.b.box.Cgroup(s.View.Spec.ID)); p != nil {
			_ = p.Kill(unix.SIGKILL)
			p.Close()
			return
		}
	}
	if p, _ := monitor(s.Dir); p != nil {
		_ = p.Kill(unix.SIGKILL)
		p.Close()
	}
}

// refused explains why the runtime did not start the process.
func (s *session) refused(msg string) error {
	for _, gone := range []string{"does not exist", "stopped container", "paused container", "not running"} {
		if strings.Contains(msg, gone) {
			return fmt.Errorf("container %s: %w: %s", s.View.Spec.ID, fault.ErrState, strings.TrimSpace(msg))
		}
	}
	return commandError(s.Process.Args, msg)
}
