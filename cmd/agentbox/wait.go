package main

import (
	"context"
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"github.com/agentbox/agentbox/runtime"
)

func newWaitCommand(a *app) *cobra.Command {
	return &cobra.Command{
		Use:               "wait SANDBOX...",
		Short:             "Wait until sandboxes have exited",
		Long:              "Wait blocks until each sandbox has exited and prints its exit code, one line each; its own exit code tells only whether that worked.",
		Example:           "  agentbox wait c",
		Annotations:       exits(exitUsage, exitNotFound, exitDenied),
		Args:              args(1, -1),
		ValidArgsFunction: a.completeSandboxes(isRunning),
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.service(cmd.Context(), func(svc runtime.Service) error {
				return runWait(cmd.Context(), args, svc, a.stdout)
			})
		},
	}
}

func runWait(ctx context.Context, sandboxes []string, svc runtime.Service, out io.Writer) error {
	return each(ctx, sandboxes, func(name string) error {
		exit, err := svc.Wait(ctx, name)
		if err != nil {
			return err
		}
		_, err = fmt.Fprintln(out, exit.Code)
		return err
	})
}
