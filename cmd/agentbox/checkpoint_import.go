package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/agentbox/agentbox/runtime"
)

type checkpointImportOptions struct {
	Name     string
	Image    string
	Identity string
	Trust    bool
	Format   string
}

func (o *checkpointImportOptions) addFlags(fl *pflag.FlagSet) {
	fl.StringVar(&o.Name, "name", "", "`NAME` of the sandbox, instead of the archive's")
	fl.StringVar(&o.Image, "image", "", "`IMAGE` it lies over, where the archive's is not known here by its digest")
	fl.BoolVar(&o.Trust, "trust", false,
		"take processes with more rights than a sandbox has by default: CRIU does as root what process images say")
	fl.StringVarP(&o.Identity, "identity", "i", "", "read the age keys that decrypt it from `FILE`")
	addIDFormat(fl, &o.Format)
}

func newCheckpointImportCommand(a *app) *cobra.Command {
	var opts checkpointImportOptions
	cmd := &cobra.Command{
		Use:   "import [flags] FILE|-",
		Short: "Bring a checkpoint in from a file",
		Long: `Import reads what 'agentbox checkpoint export' or 'podman container checkpoint --export' wrote,
from FILE or with - from stdin, and prints the checkpoint's id. Its sandbox is not made yet:
'agentbox restore --foreign NAME' does that, and gives it nothing of the host unasked (see
'agentbox restore --help'). An id that is here already has to be the same checkpoint. Nothing in the archive is trusted to import it. To restore
its processes is to trust whoever made it: CRIU does as root what process images say.`,
		Example: `  agentbox checkpoint import c.tar.zst && agentbox restore --foreign c
  podman container checkpoint --export web.tar web && agentbox checkpoint import --name web web.tar
  agentbox checkpoint import --identity key.txt c.age`,
		Annotations: exits(exitUsage, exitNotFound, exitState, exitCorrupt, exitDenied, exitUnsupported),
		Args:        args(1, 1),
		ValidArgsFunction: func(_ *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
			if len(args) == 0 {
				return nil, cobra.ShellCompDirectiveDefault
			}
			return nil, noFiles
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			if opts.Name != "" {
				if err := checkName("--name", opts.Name); err != nil {
					return err
				}
			}
			if args[0] == "-" && isTerminal(a.stdin) {
				return usageErrorf("stdin is a terminal: pipe an archive in, or name a file")
			}
			return a.service(cmd.Context(), func(svc runtime.Service) error {
				return runCheckpointImport(cmd.Context(), opts, args[0], svc, a.stdin, a.stdout, a.stderr)
			})
		},
	}
	opts.addFlags(cmd.Flags())
	completeFlags(cmd)
	_ = cmd.RegisterFlagCompletionFunc("image", func(cmd *cobra.Command, _ []string, _ string) ([]string,
		cobra.ShellCompDirective) {
		return a.imageNames(cmd, nil, nil), noFiles
	})
	return cmd
}

func runCheckpointImport(
	ctx context.Context, opts checkpointImportOptions, file string, svc runtime.Service, stdin io.Reader,
	stdout, stderr io.Writer,
) (err error) {
	im := runtime.ImportOptions{Name: opts.Name, Image: opts.Image, Trust: opts.Trust}
	if opts.Identity != "" {
		if im.Identities, err = filepath.Abs(opts.Identity); err != nil {
			return err
		}
	}
	in := stdin
	if file != "-" {
		f, err := os.Open(file)
		if err != nil {
			return notThere(err)
		}
		defer f.Close()
		in = f
	}
	update, end := watch(stderr, "import")
	defer end()
	im.Progress = update
	c, err := svc.ImportCheckpoint(ctx, in, im)
	end()
	if err != nil {
		return err
	}
	return printArrived(opts.Format, c, stdout, stderr)
}

// printArrived reports a checkpoint that came from elsewhere.
func printArrived(format string, c runtime.Checkpoint, stdout, stderr io.Writer) error {
	warn(stderr, c.Warnings)
	if isTerminalWriter(stderr) {
		fmt.Fprintln(stderr, printable(checkpointSummary(c)+
			"\nrestore with: agentbox restore --foreign "+c.SandboxName))
	}
	if format == formatJSON {
		return printJSON(stdout, documentedCheckpoint(c))
	}
	_, err := fmt.Fprintln(stdout, c.ID)
	return err
}
