package oci

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/failpoint"
	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/internal/bundle"
	"github.com/agentbox/agentbox/runtime/internal/kernel"
	"github.com/agentbox/agentbox/runtime/internal/record"
	"github.com/agentbox/agentbox/runtime/internal/streams"
)

// Exec runs one more process in a running container, under a conmon of its own. If ctx ends
// while the caller is attached, the process is killed; a detached one goes on.
func (b *Backend) Exec(ctx context.Context, id string, p runtime.Process, ends runtime.Streams) (exit int, err error) {
	v, err := b.look(ctx, id)
	if err != nil {
		return 0, err
	}
	if v.status != runtime.Running {
		return 0, fmt.Errorf("container %s is %s: %w", id, v.status, fault.ErrState)
	}
	var size *runtime.Size
	if p.Terminal && !p.Detach {
		size = streams.FirstSize(ctx, ends.Resize)
	}
	b.sweepExecs(id)
	var name [8]byte
	_, _ = rand.Read(name[:])
	s := &session{b: b, view: v, p: p, streams: ends, size: size, dir: b.home.RunDir(id, "exec", hex.EncodeToString(name[:]))}
	if err := os.MkdirAll(s.dir, 0o700); err != nil {
		return 0, err
	}
	exit, err = s.run(ctx)
	if !s.began || !p.Detach && !errors.Is(err, runtime.ErrDetached) {
		err = errors.Join(err, os.RemoveAll(s.dir))
	}
	return exit, err
}

// session is an exec on its way.
type session struct {
	b       *Backend
	view    view
	p       runtime.Process
	streams runtime.Streams
	size    *runtime.Size
	dir     string
	began   bool // the directory is conmon's, too
}

// writeProcess writes the process section for the runtime.
func (s *session) writeProcess() error {
	spec := s.view.Spec
	first, err := s.b.first(spec.ID, s.view.run.Number)
	if err != nil {
		return err
	}
	if first == nil {
		return fmt.Errorf("container %s has ended: %w", spec.ID, fault.ErrState)
	}
	defer first.Close()
	proc, err := bundle.Process(first, spec, s.view.run.Env, s.p, s.size)
	if err != nil {
		return err
	}
	data, err := json.Marshal(proc)
	if err != nil {
		return err
	}
	return record.Write(filepath.Join(s.dir, "process.json"), data, 0o600, false)
}

// runtime is the program that executes the process: the wrapper where it has anything
// to do. With a user namespace it gives the pipes to the user inside, and into a
// restored sandbox it brings the process by the time namespace.
func (s *session) runtime() string {
	if s.view.Spec.IDs != nil && !s.p.Terminal || kernel.OtherClock(s.view.pid) {
		return s.b.wrapper
	}
	return s.b.oci
}

// run starts conmon and sees the session through.
func (s *session) run(ctx context.Context) (exit int, err error) {
	args := []string{"-e", "--exec-process-spec", filepath.Join(s.dir, "process.json"), "-l", "none"}
	switch {
	case s.p.Terminal:
		args = append(args, "-t")
	case s.streams.Stdin != nil && !s.p.Detach:
		args = append(args, "-i")
	}
	if !s.p.Detach {
		args = append(args, "--exec-attach")
	}
	if err := failpoint.Hit("oci.exec.after-dir"); err != nil {
		return 0, err
	}
	c, err := s.b.launch(launch{
		id: s.view.Spec.ID, session: filepath.Base(s.dir), bundle: s.dir, dir: s.dir,
		runtime: s.runtime(), args: args, attach: !s.p.Detach,
	})
	if err != nil {
		return 0, err
	}
	defer c.close()
	if err := s.writeProcess(); err != nil {
		return 0, err
	}
	s.began = true
	if err := c.allow(); err != nil {
		return 0, err
	}
	var a *streams.Attachment
	defer func() { a.Close() }()
	if !s.p.Detach {
		if err := c.ready(ctx); err != nil {
			return 0, err
		}
		if a, err = s.b.connect(ctx, s.dir, s.streams, s.p.Terminal, s.size); err != nil {
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
		return 0, s.refused(rep.Message)
	}
	if err := failpoint.Hit("oci.exec.after-start"); err != nil {
		s.abort()
		return 0, err
	}
	if s.p.Detach {
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
	if pid, _ := kernel.PidFile(filepath.Join(s.dir, "pid")); pid != 0 {
		if p, _ := kernel.OpenMember(pid, s.b.home.Cgroup(s.view.Spec.ID)); p != nil {
			_ = p.Kill(unix.SIGKILL)
			p.Close()
			return
		}
	}
	if p, _ := monitor(s.dir); p != nil {
		_ = p.Kill(unix.SIGKILL)
		p.Close()
	}
}

// refused explains why the runtime did not start the process.
func (s *session) refused(msg string) error {
	for _, gone := range []string{"does not exist", "stopped container", "paused container", "not running"} {
		if strings.Contains(msg, gone) {
			return fmt.Errorf("container %s: %w: %s", s.view.Spec.ID, fault.ErrState, strings.TrimSpace(msg))
		}
	}
	return commandError(s.p.Args, msg)
}

// fresh is how old a session's directory may be without a conmon in it.
const fresh = time.Minute

// sweepExecs removes what sessions left that ended without a caller attached.
func (b *Backend) sweepExecs(id string) {
	entries, err := os.ReadDir(b.home.RunDir(id, "exec"))
	if err != nil {
		return
	}
	for _, e := range entries {
		dir := b.home.RunDir(id, "exec", e.Name())
		p, err := monitor(dir)
		if p != nil {
			p.Close()
		}
		if p != nil || err != nil {
			continue
		}
		if st, err := e.Info(); err == nil && time.Since(st.ModTime()) > fresh {
			_ = os.RemoveAll(dir)
		}
	}
}
