package main

import (
	"github.com/spf13/cobra"

	"github.com/agentbox/agentbox/runtime/oci"
)

// newEgressCommand is the proxy and the resolver of filtered sandboxes; the
// first of them starts it, no user needs it.
func newEgressCommand(a *app) *cobra.Command {
	return &cobra.Command{
		Use:         "egress",
		Short:       "Let filtered sandboxes out by their rules (started by the first of them)",
		Hidden:      true,
		Annotations: exits(exitUsage, exitDenied),
		Args:        args(0, 0),
		RunE: func(cmd *cobra.Command, _ []string) error {
			g, err := a.globals.resolve()
			if err != nil {
				return err
			}
			root, run := g.dirs()
			return oci.ServeEgress(cmd.Context(), root, run)
		},
	}
}
