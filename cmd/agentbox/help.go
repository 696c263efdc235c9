package main

import (
	"fmt"
	"strings"

	"github.com/spf13/cobra"
)

// newHelpCommand is cobra's, but an unknown command is an error.
func newHelpCommand() *cobra.Command {
	return &cobra.Command{
		Use:         "help [COMMAND]",
		Short:       "Print the help of a command",
		Long:        "Help prints what 'agentbox COMMAND --help' prints.",
		Example:     "  agentbox help checkpoint ls",
		Annotations: exits(exitUsage),
		Args:        args(0, -1),
		ValidArgsFunction: func(cmd *cobra.Command, args []string, _ string) (names []string,
			_ cobra.ShellCompDirective) {
			parent, rest, err := cmd.Root().Find(args)
			if err != nil || len(rest) > 0 {
				return nil, noFiles
			}
			for _, c := range parent.Commands() {
				if c.IsAvailableCommand() {
					names = append(names, cobra.CompletionWithDesc(c.Name(), c.Short))
				}
			}
			return names, noFiles
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			c, rest, err := cmd.Root().Find(args)
			if err != nil || len(rest) > 0 {
				return &usageError{
					err: fmt.Errorf("unknown command %q", strings.Join(args, " ")), cmd: cmd.Root().CommandPath(),
				}
			}
			c.InitDefaultHelpFlag() // done by cobra only for what it executes
			return c.Help()
		},
	}
}
