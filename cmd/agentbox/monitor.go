package main

import (
	"github.com/spf13/cobra"

	"github.com/agentbox/agentbox/runtime/containerd"
)

// newMonitorCommand is the process that holds the streams of a sandbox of the
// containerd backend; that backend starts it, no user needs it.
func newMonitorCommand() *cobra.Command {
	return &cobra.Command{
		Use:         "monitor BUNDLE [start]",
		Short:       "Hold the streams of a sandbox (started by the containerd backend)",
		Hidden:      true,
		Annotations: exits(exitUsage, exitNotFound),
		Args:        args(1, 2),
		RunE: func(cmd *cobra.Command, args []string) error {
			return containerd.Monitor(cmd.Context(), args)
		},
	}
}
