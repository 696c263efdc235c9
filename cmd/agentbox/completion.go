package main

import (
	"fmt"

	"github.com/spf13/cobra"
)

func newCompletionCommand(a *app) *cobra.Command {
	shells := []string{"bash", "zsh", "fish", "powershell"}
	return &cobra.Command{
		Use:   "completion SHELL",
		Short: "Print a completion script for bash, zsh, fish or powershell",
		Long: `Completion prints a script that lets a shell complete verbs, flags, and the names of
sandboxes, checkpoints and images. The one for bash needs the package bash-completion.`,
		Example: `  agentbox completion bash > /etc/bash_completion.d/agentbox
  agentbox completion fish > ~/.config/fish/completions/agentbox.fish
  source <(agentbox completion zsh)`,
		Annotations: exits(exitUsage),
		Args:        args(1, 1),
		ValidArgs:   shells,
		RunE: func(cmd *cobra.Command, args []string) error {
			root := cmd.Root()
			switch args[0] {
			case "bash":
				return root.GenBashCompletionV2(a.stdout, true)
			case "zsh":
				return root.GenZshCompletion(a.stdout)
			case "fish":
				return root.GenFishCompletion(a.stdout, true)
			case "powershell":
				return root.GenPowerShellCompletionWithDesc(a.stdout)
			}
			return &usageError{
				err: fmt.Errorf("unknown shell %q: there are %v", args[0], shells), cmd: cmd.CommandPath(),
			}
		},
	}
}
