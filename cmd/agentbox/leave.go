package main

import (
	"errors"
	"fmt"
	"io/fs"
	"os"

	"github.com/spf13/cobra"

	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/oci"
)

// newLeaveHostCommand is what a package calls when it is removed; no user needs it.
func newLeaveHostCommand(a *app) *cobra.Command {
	return &cobra.Command{
		Use:         "leave-host",
		Short:       "Take bridges and rules for sandboxes that do not run off this host (called when the package is removed)",
		Hidden:      true,
		Annotations: exits(exitUsage, exitState, exitDenied),
		Args:        args(0, 0),
		RunE: func(cmd *cobra.Command, _ []string) error {
			g, err := a.globals.resolve()
			if err != nil {
				return err
			}
			root, run := g.dirs()
			if _, err := os.Lstat(root); errors.Is(err, fs.ErrNotExist) {
				return nil // nothing is made for this
			}
			left, err := oci.LeaveNetwork(cmd.Context(), root, run)
			if err == nil && !left {
				err = fmt.Errorf("sandboxes run in the network: %w", runtime.ErrState)
			}
			return err
		},
	}
}
