package main

import (
	"github.com/spf13/cobra"

	"github.com/agentbox/agentbox/runtime"
)

func newUnpauseCommand(a *app) *cobra.Command {
	return &cobra.Command{
		Use:               "unpause SANDBOX...",
		Short:             "Thaw paused sandboxes",
		Long:              "Unpause lets the processes of paused sandboxes go on and prints their names.",
		Example:           "  agentbox unpause c",
		Annotations:       exits(exitUsage, exitNotFound, exitState, exitBusy, exitDenied),
		Args:              args(1, -1),
		ValidArgsFunction: a.completeSandboxes(isPaused),
		RunE:              a.eachCommand(runtime.Service.Unpause),
	}
}
