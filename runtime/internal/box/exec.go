package box

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/internal/bundle"
	"github.com/agentbox/agentbox/runtime/internal/kernel"
	"github.com/agentbox/agentbox/runtime/internal/streams"
)

// Session is an exec on its way.
type Session struct {
	View    View
	Process runtime.Process
	Streams runtime.Streams
	Size    *runtime.Size
	Name    string
	Dir     string
	Kept    bool // Dir outlasts the call: the process goes on

	l *Lifecycle
}

// Exec runs one more process in a running container, under a monitor of its own. If ctx ends
// while the caller is attached, the process is killed; a detached one goes on.
func (l *Lifecycle) Exec(
	ctx context.Context, id string, p runtime.Process, ends runtime.Streams,
) (exit int, err error) {
	v, err := l.hooks.Look(ctx, id)
	if err != nil {
		return 0, err
	}
	if v.Status != runtime.Running {
		return 0, runtime.Unstarted(fmt.Errorf("container %s is %s: %w", id, v.Status, fault.ErrState))
	}
	s := &Session{View: v, Process: p, Streams: ends, l: l}
	if p.Terminal && !p.Detach {
		s.Size = streams.FirstSize(ctx, ends.Resize)
	}
	l.sweepExecs(id)
	var name [8]byte
	_, _ = rand.Read(name[:])
	s.Name = hex.EncodeToString(name[:])
	s.Dir = l.RunDir(id, "exec", s.Name)
	if err := os.MkdirAll(s.Dir, 0o700); err != nil {
		return 0, err
	}
	exit, err = l.hooks.Exec(ctx, s)
	if !s.Kept {
		err = errors.Join(err, os.RemoveAll(s.Dir))
	}
	return exit, err
}

// OCIProcess makes the process section for the OCI runtime.
func (s *Session) OCIProcess() (*specs.Process, error) {
	v, open := s.View, s.l.First
	if v.Foreign { // in a cgroup of its owner's
		open = func(string, Run) (*kernel.Process, error) { return kernel.OpenProcess(v.Pid) }
	}
	first, err := open(v.Spec.ID, v.Run)
	if err != nil && !kernel.Gone(err) {
		return nil, err
	}
	if first == nil {
		return nil, fmt.Errorf("container %s has ended: %w", v.Spec.ID, fault.ErrState)
	}
	defer first.Close()
	return bundle.Process(first, v.Spec, v.Run.Env, s.Process, s.Size)
}

// fresh is how old a session's directory may be without a monitor in it.
const fresh = time.Minute

// sweepExecs removes what sessions left that ended without a caller attached.
func (l *Lifecycle) sweepExecs(id string) {
	entries, err := os.ReadDir(l.RunDir(id, "exec"))
	if err != nil {
		return
	}
	for _, e := range entries {
		st, err := e.Info()
		if err != nil || time.Since(st.ModTime()) <= fresh {
			continue
		}
		dir := l.RunDir(id, "exec", e.Name())
		if used, err := l.hooks.Monitored(dir); err == nil && !used {
			// Only names: what still needs the fifos holds them open.
			_ = os.RemoveAll(dir)
		}
	}
}
