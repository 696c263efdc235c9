package docker

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"

	task "github.com/containerd/containerd/api/runtime/task/v2"
	"github.com/containerd/ttrpc"
	"google.golang.org/protobuf/types/known/emptypb"

	"github.com/agentbox/agentbox/criu"
)

// handle is all it takes to thaw a container without the daemon.
type handle struct {
	ID      string       `json:"id"`                // ours
	Shim    string       `json:"shim"`              // the socket of its shim
	Version int          `json:"version,omitempty"` // of what its shim speaks; 0: 2
	Runtime criu.Runtime `json:"runtime"`
}

func (b *Backend) handleOf(c box) handle {
	rt, _ := b.ociRuntime(c)
	h := handle{Runtime: rt}
	if dir, err := bundleDir(c); err == nil {
		h.Shim, h.Version = shimSocket(dir)
	}
	return h
}

// shimSocket returns where a shim answers, and the version of its service. Under
// containerd 2 the bundle has no file with the bare address any more.
func shimSocket(bundle string) (path string, version int) {
	var told struct {
		Address, Protocol string
		Version           int
	}
	if data, err := os.ReadFile(filepath.Join(bundle, "bootstrap.json")); err == nil &&
		json.Unmarshal(data, &told) == nil && told.Protocol == "ttrpc" {
		return strings.TrimPrefix(told.Address, "unix://"), told.Version
	}
	address, _ := os.ReadFile(filepath.Join(bundle, "address"))
	return strings.TrimPrefix(strings.TrimSpace(string(address)), "unix://"), 2
}

// thaw has the shim thaw the container: what the shim does not know of, the
// daemon never learns. When it cannot, the OCI runtime does.
func (h handle) thaw(ctx context.Context) error {
	err := h.ask(ctx)
	if err == nil {
		return nil
	}
	if e := h.Runtime.Resume(ctx); e != nil {
		return errors.Join(e, err)
	}
	return nil
}

func (h handle) ask(ctx context.Context) error {
	if h.Shim == "" {
		return errors.New("the container's shim has no address")
	}
	ctx, cancel := context.WithTimeout(ctx, grace)
	defer cancel()
	var dialer net.Dialer
	conn, err := dialer.DialContext(ctx, "unix", h.Shim)
	if err != nil {
		return fmt.Errorf("shim: %w", err)
	}
	client := ttrpc.NewClient(conn)
	defer client.Close()
	// The messages are the same in all versions.
	service := fmt.Sprintf("containerd.task.v%d.Task", max(h.Version, 2))
	if err := client.Call(ctx, service, "Resume", &task.ResumeRequest{ID: h.Runtime.ID},
		new(emptypb.Empty)); err != nil {
		return fmt.Errorf("shim: %w", err)
	}
	return nil
}
