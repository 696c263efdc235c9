package main

import (
	"github.com/spf13/cobra"

	"github.com/agentbox/agentbox/runtime"
)

func newPauseCommand(a *app) *cobra.Command {
	return &cobra.Command{
		Use:               "pause SANDBOX...",
		Short:             "Freeze all processes of sandboxes",
		Long:              "Pause freezes every process of running sandboxes where it stands and prints their names.",
		Example:           "  agentbox pause c",
		Annotations:       exits(exitUsage, exitNotFound, exitState, exitBusy, exitDenied),
		Args:              args(1, -1),
		ValidArgsFunction: a.completeSandboxes(isRunning),
		RunE:              a.eachCommand(runtime.Service.Pause),
	}
}
