package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/audit"
	"github.com/agentbox/agentbox/runtime/volume"
)

func newVolumeCommand(a *app) *cobra.Command {
	cmd := &cobra.Command{
		Use:     "volume COMMAND",
		Aliases: []string{"volumes"},
		Short:   "Work with copy-on-write volumes",
		Long: `A volume lies over a directory, which it leaves as it is: what containers change in the volume
is kept apart. Docker makes and mounts volumes through 'docker-agentbox serve'.
volume://NAME stands wherever a verb takes a sandbox: checkpoint, restore, diff, log, cp, and
apply, which brings the changes into the directory.`,
		Example: `  agentbox volume create ws --from /srv/repo
  docker run -v ws:/work IMAGE ...
  agentbox checkpoint volume://ws
  agentbox apply volume://ws`,
		Annotations: exits(exitUsage, exitNotFound, exitState, exitDenied),
		Args:        cobra.ArbitraryArgs,
		RunE:        helpOrUnknown,
	}
	cmd.AddCommand(newVolumeCreateCommand(a), newVolumeLsCommand(a), newVolumeInspectCommand(a), newVolumeRmCommand(a))
	return cmd
}

// volumes opens the volumes, runs fn with them.
func (a *app) volumes(fn func(*volume.Recorded) error) error {
	g, err := a.globals.resolve()
	if err != nil {
		return err
	}
	if os.Geteuid() != 0 {
		return errNotRoot()
	}
	v, err := a.openVolumes(g)
	if err != nil {
		return err
	}
	root, _ := g.dirs()
	return fn(volume.Record(v, audit.Open(root), "command"))
}

// openVolumes opens the volumes. What a killed agentbox holds of a volume is freed when the
// volume is next requested.
func (a *app) openVolumes(g globals) (*volume.Volumes, error) {
	root, run := g.dirs()
	return volume.Open(volume.Options{Root: root, Run: run, Recover: func(ctx context.Context) error {
		svc, err := a.open(ctx, g)
		if err != nil {
			return err
		}
		return svc.Close()
	}})
}

type volumeCreateOptions struct {
	From     string
	ReadOnly bool
}

func (o *volumeCreateOptions) addFlags(fl *pflag.FlagSet) {
	fl.StringVar(&o.From, "from", "", "lay it over `DIR` (default: it begins empty)")
	fl.BoolVar(&o.ReadOnly, "read-only", false, "make it read-only")
}

func newVolumeCreateCommand(a *app) *cobra.Command {
	var opts volumeCreateOptions
	cmd := &cobra.Command{
		Use:   "create [flags] NAME",
		Short: "Make a volume",
		Long: `Create makes a volume and prints its name. DIR must not hold agentbox's own state, nor lie
in it. It should not be changed while the volume is mounted: what its users then see of
files that they have not changed themselves is up to the kernel.`,
		Example: `  agentbox volume create ws --from /srv/repo
  docker volume create -d agentbox -o from=/srv/repo ws`,
		Annotations: exits(exitUsage, exitNotFound, exitState, exitDenied, exitUnsupported),
		Args:        args(1, 1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.volumes(func(v *volume.Recorded) error {
				return runVolumeCreate(cmd.Context(), args[0], opts, v, a.stdout)
			})
		},
	}
	opts.addFlags(cmd.Flags())
	return cmd
}

func runVolumeCreate(
	ctx context.Context, name string, opts volumeCreateOptions, v *volume.Recorded, out io.Writer,
) (err error) {
	from := opts.From
	if from != "" {
		if from, err = filepath.Abs(from); err != nil {
			return err
		}
	}
	if err := v.Create(ctx, name, volume.CreateOptions{From: from, ReadOnly: opts.ReadOnly}); err != nil {
		return &runtime.Error{Op: "volume create", ID: name, Err: err}
	}
	_, err = fmt.Fprintln(out, name)
	return err
}

type volumeLsOptions struct {
	Quiet  bool
	Format string
}

func (o *volumeLsOptions) addFlags(fl *pflag.FlagSet) {
	fl.BoolVarP(&o.Quiet, "quiet", "q", false, "print names only")
	addFormat(fl, &o.Format, formatTable, formatJSON)
}

func newVolumeLsCommand(a *app) *cobra.Command {
	var opts volumeLsOptions
	cmd := &cobra.Command{
		Use:     "ls [flags]",
		Aliases: []string{"list"},
		Short:   "List volumes",
		Long: `Ls lists volumes. With --format json it prints an array of objects: id, name, from (the
directory below; empty: none), read_only, created, upperdir, mountpoint (empty unless it is
mounted), mounts (how many users have it mounted), applied (when its changes were last
brought into the directory).`,
		Example:     "  agentbox volume ls --format json",
		Annotations: exits(exitUsage, exitDenied),
		Args:        args(0, 0),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := oneForm(opts.Quiet, opts.Format); err != nil {
				return err
			}
			return a.volumes(func(v *volume.Recorded) error {
				return runVolumeLs(cmd.Context(), opts, v, a.stdout, a.now())
			})
		},
	}
	opts.addFlags(cmd.Flags())
	completeFlags(cmd)
	return cmd
}

func runVolumeLs(ctx context.Context, opts volumeLsOptions, v *volume.Recorded, out io.Writer, now time.Time) error {
	list, err := v.List(ctx)
	if err != nil {
		return err
	}
	return listing[volume.Volume]{
		format: opts.Format,
		quiet:  opts.Quiet,
		name:   func(one volume.Volume) string { return one.Name },
		header: []string{"NAME", "FROM", "CREATED", "MOUNTS"},
		row: func(one volume.Volume) []string {
			return []string{one.Name, one.From, ago(now, one.Created), strconv.Itoa(one.Mounts)}
		},
	}.print(out, list)
}

func newVolumeInspectCommand(a *app) *cobra.Command {
	return &cobra.Command{
		Use:         "inspect NAME...",
		Short:       "Print all that is known of volumes, as JSON",
		Long:        "Inspect prints a JSON array with one object per volume; see 'agentbox volume ls --help'.",
		Example:     "  agentbox volume inspect ws | jq -r '.[0].upperdir'",
		Annotations: exits(exitUsage, exitNotFound, exitDenied),
		Args:        args(1, -1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.volumes(func(v *volume.Recorded) error {
				return inspectEach(cmd.Context(), args, a.stdout, func(name string) (volume.Volume, error) {
					return v.Inspect(cmd.Context(), name)
				})
			})
		},
	}
}

func newVolumeRmCommand(a *app) *cobra.Command {
	return &cobra.Command{
		Use:     "rm NAME...",
		Aliases: []string{"remove"},
		Short:   "Remove volumes and their changes",
		Long: `Rm removes volumes that nobody uses, with all that was changed in them, and prints their
names. The directories below stay as they are, and checkpoints of the volumes are kept.`,
		Example:     "  agentbox volume rm ws",
		Annotations: exits(exitUsage, exitNotFound, exitState, exitBusy, exitDenied),
		Args:        args(1, -1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.volumes(func(v *volume.Recorded) error {
				return eachNamed(cmd.Context(), args, a.stdout, func(name string) error {
					if _, err := v.Inspect(cmd.Context(), name); err != nil {
						return err
					}
					return v.Remove(cmd.Context(), name)
				})
			})
		},
	}
}
