package main

import (
	"github.com/spf13/cobra"

	"github.com/agentbox/agentbox/runtime"
)

func newReleaseCommand(a *app) *cobra.Command {
	return &cobra.Command{
		Use:   "release SANDBOX...",
		Short: "Let sandboxes be used that a failed restore holds",
		Long: `Release lets sandboxes be used again, as they are, that 'agentbox restore --strategy auto' holds
because nothing has brought them back, and prints their names. They stay paused, or stopped.
A restore that succeeds does the same.`,
		Example: `  agentbox release c
  agentbox unpause c`,
		Annotations:       exits(exitUsage, exitNotFound, exitState, exitBusy, exitDenied),
		Args:              args(1, -1),
		ValidArgsFunction: a.completeSandboxes(isHeld),
		RunE:              a.eachCommand(runtime.Service.ReleaseHold),
	}
}

func isHeld(sb runtime.Sandbox) bool { return sb.Held != "" }
