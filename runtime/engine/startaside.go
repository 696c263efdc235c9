package engine

import (
	"os/exec"
	"syscall"

	"github.com/agentbox/agentbox/runtime/internal/kernel"
)

// monitors is the cgroup of what goes on without the process that has started it.
const monitors = "/agentbox/monitor"

// StartAside starts a command in that cgroup, where the kernel has v2: the end of the
// unit, the login session or the scope that its caller is in ends all that is in
// its cgroup, and would leave a dump half done.
func StartAside(cmd *exec.Cmd) error {
	groups, err := kernel.Hierarchies()
	if err != nil {
		return cmd.Start()
	}
	if cmd.SysProcAttr == nil {
		cmd.SysProcAttr = &syscall.SysProcAttr{}
	}
	_, err = groups.StartIn(cmd, monitors)
	return err
}
