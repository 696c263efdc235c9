package main

import (
	"fmt"
	"os"

	"github.com/spf13/cobra"
	"github.com/spf13/cobra/doc"
)

// newManCommand writes a manual page per command; packaging calls it.
func newManCommand() *cobra.Command {
	return &cobra.Command{
		Use:         "man DIR",
		Short:       "Write the manual pages",
		Hidden:      true,
		Annotations: exits(exitUsage),
		Args:        args(1, 1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := os.MkdirAll(args[0], 0o755); err != nil {
				return fmt.Errorf("manual pages: %w", err)
			}
			root := cmd.Root()
			root.DisableAutoGenTag = true // the same source gives the same pages
			return doc.GenManTree(root, &doc.GenManHeader{Title: "AGENTBOX", Section: "1", Source: "agentbox"}, args[0])
		},
	}
}
