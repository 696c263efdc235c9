package local

import (
	"os/exec"
	"syscall"

	"github.com/agentbox/agentbox/internal/guard"
	"github.com/agentbox/agentbox/runtime/engine"
)

// helper starts the agentbox command as a process that outlives this one.
type helper struct {
	program string
	root    string // empty: the default
	backend string
}

func (h helper) start(args ...string) error {
	args = append([]string{"--backend", h.backend}, args...)
	if h.root != "" {
		args = append([]string{"--root", h.root}, args...)
	}
	cmd := exec.Command(h.program, args...)
	cmd.Args[0] = "agentbox" // not a plugin of docker, whatever this process is
	cmd.Dir = "/"
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := engine.StartAside(cmd); err != nil {
		return err
	}
	guard.Start(cmd.Wait) // a service would have its zombie; how it ended is in its log
	return nil
}
