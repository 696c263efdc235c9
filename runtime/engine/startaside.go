package engine

import (
	"os/exec"
	"syscall"

	"github.com/agentbox/agentbox/runtime/internal/kernel"
)

// monitors is the cgroup of processes that outlive the process that started them.
const monitors = "/agentbox/monitor"

// StartAside starts a command in the cgroup monitors, on cgroup v2. Otherwise the end of the
// caller's unit, login session or scope would kill the command with all else in its cgroup,
// and leave a dump half done.
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
