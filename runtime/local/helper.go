package local

import (
	"os"
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

// start passes files on as descriptors from 3 on.
func (h helper) start(files []*os.File, args ...string) error {
	args = append([]string{"--backend", h.backend}, args...)
	if h.root != "" {
		args = append([]string{"--root", h.root}, args...)
	}
	cmd := exec.Command(h.program, args...)
	cmd.Args[0] = "agentbox" // not a plugin of docker, whatever this process is
	cmd.Dir = "/"
	cmd.ExtraFiles = files
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := engine.StartAside(cmd); err != nil {
		return err
	}
	guard.Start(cmd.Wait) // a service would have its zombie; how it ended is in its log
	return nil
}
