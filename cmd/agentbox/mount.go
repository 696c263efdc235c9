package main

import (
	"context"
	"fmt"
	"io"
	"path/filepath"

	"github.com/spf13/cobra"

	"github.com/agentbox/agentbox/runtime"
)

func newMountCommand(a *app) *cobra.Command {
	return &cobra.Command{
		Use:   "mount SANDBOX@CHECKPOINT DIR",
		Short: "Show the files of a checkpoint in a directory",
		Long: `Mount mounts the files of a checkpoint on DIR, an empty directory of yours, for any program
to read. It stays there as long as the command runs: Ctrl-C ends it, and so does umount DIR.
The mount is read-only, set-id bits have no effect in it, and it has no devices. Nothing is
restored for it, and the checkpoint may be removed meanwhile. SANDBOX@image are the files of
the image.

The layers of the image are mounted as they are. What the checkpoint has beside them is
written out for the mount, and takes that much room below agentbox's root until its end.

Files have the owners that they have in the image and in checkpoints: root in a sandbox is
root. What a sandbox mounts is in no checkpoint: bind mounts, tmpfs, /proc, /sys and /dev,
and volumes that were not taken along. Such a directory is empty here; a workspace is not.

A command that is killed leaves the mount; the next command of agentbox takes it away.`,
		Example: `  mkdir before && agentbox mount c@before before
  agentbox mount c@HEAD~2 /mnt & diff -r /mnt/work work; umount /mnt
  agentbox mount c@image /mnt`,
		Annotations: exits(exitUsage, exitNotFound, exitCorrupt, exitDenied, exitUnsupported),
		Args:        args(2, 2),
		ValidArgsFunction: func(cmd *cobra.Command, args []string, toComplete string) ([]string,
			cobra.ShellCompDirective) {
			if len(args) > 0 {
				return nil, cobra.ShellCompDirectiveFilterDirs
			}
			return a.completeStates(cmd, args, toComplete)
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := checkState(args[0]); err != nil {
				return err
			}
			dir, err := filepath.Abs(args[1])
			if err != nil {
				return err
			}
			return a.service(cmd.Context(), func(svc runtime.Service) error {
				ref, _, err := stateHere(cmd.Context(), args[0], svc)
				if err != nil {
					return err
				}
				return runMount(cmd.Context(), ref, dir, svc, a.stderr)
			})
		},
	}
}

func runMount(ctx context.Context, ref, dir string, svc runtime.Service, stderr io.Writer) error {
	err := svc.Mount(ctx, ref, dir, func(m runtime.Mounted) {
		fmt.Fprintln(stderr, printable(fmt.Sprintf("%s is mounted on %s; Ctrl-C or umount ends it", ref, m.Dir)))
	})
	return reword(err, "mount", ref)
}
