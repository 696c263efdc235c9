package main

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"

	"github.com/agentbox/agentbox/internal/setup"
	"github.com/agentbox/agentbox/runtime"
)

func newSetupSystemdCommand(a *app) *cobra.Command {
	var opts setup.SystemdOptions
	var format string
	cmd := &cobra.Command{
		Use:   "systemd [flags]",
		Short: "Have systemd run the service",
		Long: `Systemd installs agentbox.service and agentbox.socket, the group agentbox, whose members may
use the socket (and so do on this host whatever root can), and the directory of the socket;
then it enables and starts them. Called again it brings the files up to date. Units are
verified by systemd before they are written. Change them by drop-ins: systemctl edit agentbox.

Sandboxes are not the service's: they go on when it is stopped, restarted or replaced. After
an upgrade of agentbox: systemctl restart agentbox.

With --destdir files are written below a directory, for packages and images, and nobody is told.`,
		Example: `  agentbox setup systemd --dry-run
  agentbox setup systemd
  usermod -aG agentbox alice
  journalctl -u agentbox SANDBOX=web
  agentbox setup systemd --remove`,
		Annotations: exits(exitUsage, exitNotFound, exitState, exitBusy, exitDenied, exitUnsupported),
		Args:        args(0, 0),
		RunE: func(cmd *cobra.Command, args []string) error {
			if !opts.DryRun && opts.Dest == "" && os.Geteuid() != 0 {
				return &runtime.Error{Op: "setup",
					Err:  fmt.Errorf("only root can configure systemd: %w", runtime.ErrDenied),
					Hint: "Run agentbox as root, for example with sudo; --dry-run shows what would change."}
			}
			var err error
			if opts.Program == "" {
				opts.Program, err = selfPath()
			}
			if err == nil && opts.Dest != "" {
				opts.Dest, err = filepath.Abs(opts.Dest)
			}
			if err != nil {
				return err
			}
			var r setup.SystemdResult
			// Files written below a directory are not this host's.
			err = a.setupOnRecord("systemd", opts.DryRun || opts.Dest != "", func() (did string, err error) {
				if r, err = setup.Systemd(cmd.Context(), opts); err != nil || !r.Changed {
					return "", err
				}
				if r.Removed {
					return "took the units out", nil
				}
				return "installed the units", nil
			})
			if err != nil {
				if errors.Is(err, fs.ErrPermission) {
					err = fmt.Errorf("%w: %w", err, runtime.ErrDenied)
				}
				return &runtime.Error{Op: "setup", ID: "systemd", Err: err}
			}
			if format == formatJSON {
				return printJSON(a.stdout, r)
			}
			return printSetupSystemd(a.stdout, r)
		},
	}
	fl := cmd.Flags()
	fl.BoolVar(&opts.DryRun, "dry-run", false, "only show what would change")
	fl.BoolVar(&opts.Remove, "remove", false, "stop the service, and take out what setup put in, but for the group")
	fl.BoolVar(&opts.Force, "force", false, "also replace or remove files that setup has not made")
	fl.StringVar(&opts.Program, "program", "", "have systemd start this `FILE` (default: this program)")
	fl.StringVar(&opts.Dest, "destdir", "", "write below `DIR`, and do not reload systemd")
	addFormat(fl, &format, "text", formatJSON)
	completeFlags(cmd)
	return cmd
}

func printSetupSystemd(out io.Writer, r setup.SystemdResult) error {
	word := "written"
	if r.Removed {
		word = "removed"
	}
	if r.DryRun {
		word = "would be " + word
	}
	for _, f := range r.Files {
		switch {
		case f.Changed:
			fmt.Fprint(out, printable(f.Diff))
			fmt.Fprintf(out, "%s: %s\n", f.Path, word)
		case r.Removed:
			fmt.Fprintf(out, "%s: is not there\n", f.Path)
		default:
			fmt.Fprintf(out, "%s: is as it should be\n", f.Path)
		}
		if f.Backup != "" {
			fmt.Fprintf(out, "backup: %s\n", f.Backup)
		}
	}
	switch {
	case r.Others:
	case r.Told && r.Removed:
		fmt.Fprintln(out, "the service is stopped")
	case r.Told:
		fmt.Fprintln(out, "the service is enabled and runs: systemctl status agentbox")
	}
	for _, note := range r.Notes {
		if _, err := fmt.Fprintf(out, "note: %s\n", printable(note)); err != nil {
			return err
		}
	}
	return nil
}
