package containerd

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"path/filepath"
	"strings"
	"time"

	shim "github.com/containerd/containerd/api/runtime/task/v2"
	"github.com/containerd/containerd/api/types/task"
	"github.com/containerd/ttrpc"
	"google.golang.org/protobuf/types/known/emptypb"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/runtime/internal/box"
	"github.com/agentbox/agentbox/runtime/internal/kernel"
	"github.com/agentbox/agentbox/runtime/internal/record"
)

// A shim is the parent of a container's processes. It outlives the daemon, and
// answers on a socket of its own what the daemon would ask it: so what must not
// depend on the daemon is asked there.

// shimAddress is where a shim answers. Version 3 has another name for its service; the
// messages are the same.
type shimAddress struct {
	Address  string `json:"address"`
	Version  int    `json:"version"`
	Protocol string `json:"protocol,omitempty"`
}

// shimOf finds the shim of a container by its first process: the shim is its
// parent and stands in the container's bundle, where it notes its address.
func shimOf(pid int) (shimAddress, error) {
	parent, ok := kernel.ParentOf(pid)
	if !ok {
		return shimAddress{}, fmt.Errorf("shim of process %d: %w", pid, fault.ErrNotFound)
	}
	// The address is spoken to as root: no process of a container may name it.
	if !kernel.SharesNamespaces(parent, "pid", "user") {
		return shimAddress{}, fmt.Errorf("process %d has no shim (its parent, %d, is in a container): %w", pid,
			parent, fault.ErrUnsupported)
	}
	cwd := fmt.Sprintf("/proc/%d/cwd", parent)
	var a shimAddress
	err := record.ReadJSON(filepath.Join(cwd, "bootstrap.json"), &a)
	if errors.Is(err, fs.ErrNotExist) {
		var text []byte
		text, _, err = record.Read(filepath.Join(cwd, "address"))
		a = shimAddress{Address: strings.TrimSpace(string(text)), Version: 2}
	}
	if err != nil {
		return a, fmt.Errorf("shim of process %d: %w", pid, err)
	}
	if !strings.HasPrefix(a.Address, "unix://") || a.Protocol != "" && a.Protocol != "ttrpc" {
		return a, fmt.Errorf("shim of process %d: address %q: %w", pid, a.Address, fault.ErrUnsupported)
	}
	return a, nil
}

// shimConn is a connection to a shim.
type shimConn struct {
	c       *ttrpc.Client
	service string
	id      string
}

func (a shimAddress) dial(ctx context.Context, id string) (*shimConn, error) {
	if a.Address == "" {
		return nil, fmt.Errorf("shim of %s: %w", id, fault.ErrNotFound)
	}
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	conn, err := (&net.Dialer{}).DialContext(ctx, "unix", strings.TrimPrefix(a.Address, "unix://"))
	if err != nil {
		return nil, fmt.Errorf("shim of %s: %w", id, err)
	}
	return &shimConn{ttrpc.NewClient(conn), fmt.Sprintf("containerd.task.v%d.Task", max(a.Version, 2)), id}, nil
}

func (s *shimConn) close() { _ = s.c.Close() }

// wait blocks until the first process has exited.
func (s *shimConn) wait(ctx context.Context) (box.Exit, error) {
	var resp shim.WaitResponse
	if err := s.c.Call(ctx, s.service, "Wait", &shim.WaitRequest{ID: s.id}, &resp); err != nil {
		return box.Exit{}, err
	}
	exit := box.Exit{Code: int(resp.ExitStatus), Finished: time.Now()}
	if resp.ExitedAt != nil {
		exit.Finished = resp.ExitedAt.AsTime()
	}
	return exit, nil
}

func (s *shimConn) state(ctx context.Context) (task.Status, error) {
	var resp shim.StateResponse
	err := s.c.Call(ctx, s.service, "State", &shim.StateRequest{ID: s.id}, &resp)
	return resp.Status, err
}

func (s *shimConn) resume(ctx context.Context) error {
	return s.c.Call(ctx, s.service, "Resume", &shim.ResumeRequest{ID: s.id}, new(emptypb.Empty))
}

func (s *shimConn) closeInput(ctx context.Context, exec string) error {
	return s.c.Call(ctx, s.service, "CloseIO", &shim.CloseIORequest{
		ID: s.id, ExecID: exec, Stdin: true,
	}, new(emptypb.Empty))
}
