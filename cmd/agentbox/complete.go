package main

import (
	"cmp"
	"context"
	"slices"
	"time"

	"github.com/spf13/cobra"

	"github.com/agentbox/agentbox/runtime"
)

// Shell completion asks the service; whatever goes wrong then means that
// there is nothing to offer. A prompt must not hang.
const completeTimeout = 2 * time.Second

type completeFunc = cobra.CompletionFunc

const noFiles = cobra.ShellCompDirectiveNoFileComp

func (a *app) ask(cmd *cobra.Command, fn func(context.Context, runtime.Service) error) {
	ctx := cmd.Context()
	if ctx == nil {
		ctx = context.Background()
	}
	ctx, cancel := context.WithTimeout(ctx, completeTimeout)
	defer cancel()
	_ = a.service(ctx, func(svc runtime.Service) error { return fn(ctx, svc) })
}

func isRunning(sb runtime.Sandbox) bool { return sb.Status == runtime.Running }
func isPaused(sb runtime.Sandbox) bool  { return sb.Status == runtime.Paused }
func isStopped(sb runtime.Sandbox) bool {
	return sb.Status == runtime.Created || sb.Status == runtime.Exited
}

// sandboxNames lists the names of sandboxes that ok accepts (nil: all) and
// that are not given already.
func (a *app) sandboxNames(cmd *cobra.Command, given []string, ok func(runtime.Sandbox) bool) (names []string) {
	a.ask(cmd, func(ctx context.Context, svc runtime.Service) error {
		all, err := svc.Sandboxes(ctx)
		for _, sb := range all {
			if (ok == nil || ok(sb)) && !slices.Contains(given, sb.Name) {
				names = append(names, cobra.CompletionWithDesc(sb.Name, string(sb.Status)))
			}
		}
		return err
	})
	return names
}

func (a *app) completeSandboxes(ok func(runtime.Sandbox) bool) completeFunc {
	return func(cmd *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
		return a.sandboxNames(cmd, args, ok), noFiles
	}
}

func (a *app) completeOneSandbox(ok func(runtime.Sandbox) bool) completeFunc {
	return func(cmd *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
		if len(args) > 0 {
			return nil, noFiles
		}
		return a.sandboxNames(cmd, nil, ok), noFiles
	}
}

// checkpointNames lists checkpoints by name, or by id if they have none. For the checkpoints of
// one sandbox the bare name will do, and HEAD is among them; else it is SANDBOX@NAME.
func (a *app) checkpointNames(cmd *cobra.Command, given []string, filter runtime.CheckpointFilter) (names []string) {
	a.ask(cmd, func(ctx context.Context, svc runtime.Service) error {
		if filter.Sandbox != "" {
			if sb, err := svc.Sandbox(ctx, filter.Sandbox); err == nil && sb.Head != "" {
				names = append(names, headName("", sb))
			}
		}
		all, err := svc.Checkpoints(ctx, filter)
		for _, c := range all {
			name := c.Name
			switch {
			case name == "":
				name = shortID(c.ID)
			case filter.Sandbox == "":
				name = c.SandboxName + "@" + name
			}
			for i, name := range append([]string{name}, c.Tags...) {
				if i > 0 && filter.Sandbox == "" {
					name = c.SandboxName + "@" + name
				}
				if !slices.Contains(given, name) {
					names = append(names, cobra.CompletionWithDesc(name, c.Kind+" of "+c.SandboxName))
				}
			}
		}
		return err
	})
	return names
}

// headName offers HEAD of a sandbox.
func headName(prefix string, sb runtime.Sandbox) string {
	return cobra.CompletionWithDesc(prefix+"HEAD", "where "+sb.Name+" was last, "+shortID(sb.Head))
}

func (a *app) completeCheckpoints(cmd *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
	return a.checkpointNames(cmd, args, runtime.CheckpointFilter{All: true}), noFiles
}

// completeOneCheckpoint is for verbs whose other arguments are files or made up.
func (a *app) completeOneCheckpoint(others cobra.ShellCompDirective) completeFunc {
	return func(cmd *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
		if len(args) > 0 {
			return nil, others
		}
		return a.checkpointNames(cmd, nil, runtime.CheckpointFilter{}), noFiles
	}
}

// completeStates offers sandboxes, and all of their checkpoints as
// SANDBOX@NAME.
func (a *app) completeStates(cmd *cobra.Command, args []string, _ string) (names []string, _ cobra.ShellCompDirective) {
	if len(args) > 0 {
		return nil, noFiles
	}
	names = a.sandboxNames(cmd, nil, nil)
	a.ask(cmd, func(ctx context.Context, svc runtime.Service) error {
		sandboxes, err := svc.Sandboxes(ctx)
		if err != nil {
			return err
		}
		for _, sb := range sandboxes {
			if sb.Head != "" {
				names = append(names, headName(sb.Name+"@", sb))
			}
		}
		all, err := svc.Checkpoints(ctx, runtime.CheckpointFilter{})
		for _, c := range all {
			for _, name := range append([]string{cmp.Or(c.Name, shortID(c.ID))}, c.Tags...) {
				names = append(names, cobra.CompletionWithDesc(c.SandboxName+"@"+name, c.Kind))
			}
		}
		return err
	})
	return names, noFiles
}

// completeTags offers SANDBOX@TAG.
func (a *app) completeTags(cmd *cobra.Command, args []string, _ string) (names []string, _ cobra.ShellCompDirective) {
	a.ask(cmd, func(ctx context.Context, svc runtime.Service) error {
		all, err := svc.Checkpoints(ctx, runtime.CheckpointFilter{})
		for _, c := range all {
			for _, tag := range c.Tags {
				if name := c.SandboxName + "@" + tag; !slices.Contains(args, name) {
					names = append(names, cobra.CompletionWithDesc(name, "tag of "+shortID(c.ID)))
				}
			}
		}
		return err
	})
	return names, noFiles
}

func (a *app) completeRestore(cmd *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
	switch len(args) {
	case 0:
		return a.sandboxNames(cmd, nil, nil), noFiles
	case 1:
		return a.checkpointNames(cmd, nil, runtime.CheckpointFilter{Sandbox: args[0]}), noFiles
	}
	return nil, noFiles
}

func (a *app) imageNames(cmd *cobra.Command, given []string, ok func(runtime.Image) bool) (names []string) {
	a.ask(cmd, func(ctx context.Context, svc runtime.Service) error {
		all, err := svc.Images(ctx)
		for _, im := range all {
			if (ok == nil || ok(im)) && !slices.Contains(given, im.Name) {
				names = append(names, im.Name)
			}
		}
		return err
	})
	return names
}

// completeImage is for run and create: what follows the image is a command in
// the sandbox, of which nothing is known here.
func (a *app) completeImage(cmd *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
	if len(args) > 0 {
		return nil, noFiles
	}
	return a.imageNames(cmd, nil, nil), noFiles
}
