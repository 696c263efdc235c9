package docker

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"

	task "github.com/containerd/containerd/api/runtime/task/v2"
	"github.com/containerd/ttrpc"

	"github.com/agentbox/agentbox/criu"
)

// handle is all it takes to thaw a container without the daemon.
type handle struct {
	ID      string       `json:"id"`   // ours
	Shim    string       `json:"shim"` // the socket of its shim
	Runtime criu.Runtime `json:"runtime"`
}

func (b *Backend) handleOf(c box) handle {
	rt, _ := b.ociRuntime(c)
	h := handle{Runtime: rt}
	if dir, err := bundleDir(c); err == nil {
		address, _ := os.ReadFile(filepath.Join(dir, "address"))
		h.Shim = strings.TrimPrefix(strings.TrimSpace(string(address)), "unix://")
	}
	return h
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
	if _, err := task.NewTaskClient(client).Resume(ctx, &task.ResumeRequest{ID: h.Runtime.ID}); err != nil {
		return fmt.Errorf("shim: %w", err)
	}
	return nil
}
