package oci

import (
	"context"
	"os/exec"

	"github.com/agentbox/agentbox/internal/failpoint"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/internal/box"
)

var _ runtime.EgressFilter = (*Backend)(nil)

// egress makes the process behind the filtered sandboxes of this root.
func (b *Backend) egress() *exec.Cmd {
	cmd := exec.Command(b.self, "--root", b.box.Base, "egress")
	cmd.Env = b.environ()
	return cmd
}

// startEgress starts it beside the conmons: like them it outlives its caller.
func (b *Backend) startEgress(cmd *exec.Cmd) error {
	born, err := b.box.Cgroups.StartIn(cmd, monitors)
	if err != nil {
		return err
	}
	if err := b.box.Cgroups.MoveTo(cmd.Process.Pid, monitors, born); err != nil {
		b.log.Debug("proxy left in the caller's cgroup", "error", err)
	}
	return nil
}

// SetEgress gives a container other egress rules.
func (b *Backend) SetEgress(ctx context.Context, id string, rules []string) error {
	unlock, err := b.box.Lock(ctx, id)
	if err != nil {
		return err
	}
	defer unlock()
	rec, err := b.box.Load(id)
	if err != nil {
		return err
	}
	rec.Spec.Network.Egress = rules
	// On record first: what starts it next has to know.
	if err := b.box.Save(id, rec); err != nil {
		return err
	}
	if err := failpoint.Hit("oci.egress.after-record"); err != nil {
		return err
	}
	return b.box.Net.SetEgress(ctx, id, rules)
}

// EgressLog returns the directory in which denials of containers are recorded.
func (b *Backend) EgressLog() string { return b.box.Net.EventsDir() }

// ServeEgress is the life of that process.
func ServeEgress(ctx context.Context, root, run string) error {
	net, err := box.OpenNetwork(root, run)
	if err != nil {
		return err
	}
	return net.Serve(ctx)
}

// LeaveNetwork takes off the host what a root has there of a network for sandboxes
// that do not run. It returns false, and does nothing, while one does.
func LeaveNetwork(ctx context.Context, root, run string) (left bool, err error) {
	net, err := box.OpenNetwork(root, run)
	if err != nil {
		return false, err
	}
	return net.Leave(ctx)
}
