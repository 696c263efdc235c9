package main

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/agentbox/agentbox/internal/fsx"
	"github.com/agentbox/agentbox/runtime"
)

type checkpointExportOptions struct {
	Output     string
	Compress   string
	Recipients []string
}

func (o *checkpointExportOptions) addFlags(fl *pflag.FlagSet) {
	fl.StringVarP(&o.Output, "output", "o", "", "write to `FILE`, as the argument does")
	o.Compress = "zstd"
	fl.Var(choice(&o.Compress, "zstd", "gzip", "none"), "compress", "compress with `HOW`: zstd, gzip or none")
	fl.VarP(list(&o.Recipients), "recipient", "r", "encrypt to this age `KEY`; once for each who shall read it")
}

func newCheckpointExportCommand(a *app) *cobra.Command {
	var opts checkpointExportOptions
	cmd := &cobra.Command{
		Use:   "export [flags] CHECKPOINT FILE|-",
		Short: "Write a checkpoint to a file, for another machine",
		Long: `Export writes an archive in the layout that Podman, CRI-O and checkpointctl read, the same bytes
each time; - is stdout. FILE appears when it is complete, readable by its owner only: a
checkpoint holds the memory of processes, and with it their secrets. With --recipient it is
encrypted with age, and only those can read it. Podman restores processes of sandboxes with the host's
user ids only (run --userns host), and has to have the image under the same name and by the same
digest: pulled from the same place, or brought by podman save and 'agentbox image pull oci-archive:FILE'.`,
		Example: `  agentbox checkpoint export c@before-upgrade c.tar.zst
  agentbox checkpoint export c@before-upgrade - | ssh host agentbox checkpoint import -
  agentbox checkpoint export --compress gzip -o c.tar.gz 3f2a && podman container restore --import c.tar.gz
  agentbox checkpoint export --recipient age1... 3f2a c.age`,
		Annotations:       exits(exitUsage, exitNotFound, exitState, exitCorrupt, exitDenied, exitUnsupported),
		Args:              args(1, 2),
		ValidArgsFunction: a.completeOneCheckpoint(cobra.ShellCompDirectiveDefault),
		RunE: func(cmd *cobra.Command, args []string) error {
			file := opts.Output
			switch {
			case len(args) > 1 && file != "":
				return usageErrorf("FILE and --output exclude each other")
			case len(args) > 1:
				file = args[1]
			}
			if file == "" {
				return &usageError{err: errors.New("FILE|- is missing"), cmd: cmd.CommandPath()}
			}
			if file == "-" && isTerminal(a.stdout) {
				return usageErrorf("stdout is a terminal: redirect it, or name a file")
			}
			for _, r := range opts.Recipients {
				if strings.TrimSpace(r) == "" {
					return usageErrorf("--recipient is empty; write age1...")
				}
			}
			return a.service(cmd.Context(), func(svc runtime.Service) error {
				return runCheckpointExport(cmd.Context(), opts, args[0], file, svc, a.stdout, a.stderr)
			})
		},
	}
	opts.addFlags(cmd.Flags())
	completeFlags(cmd)
	return cmd
}

func runCheckpointExport(
	ctx context.Context, opts checkpointExportOptions, checkpoint, file string, svc runtime.Service,
	stdout, stderr io.Writer,
) error {
	update, end := watch(stderr, "export")
	defer end()
	var written int64
	write := func(w io.Writer) error {
		n := &countingWriter{w: w}
		err := svc.ExportCheckpoint(ctx, checkpoint, n, runtime.ExportOptions{
			Compress: opts.Compress, Recipients: opts.Recipients, Progress: update,
		})
		written = n.n
		return err
	}
	var err error
	if file == "-" {
		err = write(stdout)
	} else {
		err = publish(file, write)
	}
	end()
	if err == nil && file != "-" && isTerminalWriter(stderr) {
		fmt.Fprintln(stderr, printable(fmt.Sprintf("%s: %s", file, sizeText(written))))
	}
	return err
}

type countingWriter struct {
	w io.Writer
	n int64
}

func (c *countingWriter) Write(p []byte) (int, error) {
	n, err := c.w.Write(p)
	c.n += int64(n)
	return n, err
}

// publish writes file with the output of write. The file appears whole and durable or not at all,
// and replaces an existing one. A special file, such as a pipe, is written to directly.
func publish(file string, write func(io.Writer) error) error {
	if real, e := filepath.EvalSymlinks(file); e == nil {
		file = real
	}
	if fi, e := os.Stat(file); e == nil && !fi.Mode().IsRegular() {
		f, err := os.OpenFile(file, os.O_WRONLY, 0)
		if err != nil {
			return err
		}
		return errors.Join(write(f), f.Close())
	}
	dir, base := filepath.Split(file)
	temp := dir + "." + base + ".tmp-" + strings.ToLower(rand.Text())
	t, err := fsx.New(file, fsx.Options{Temp: temp, Unnamed: true})
	if err != nil {
		return notThere(err)
	}
	defer t.Discard()
	if err := write(t); err != nil {
		return err
	}
	return t.Commit()
}

// notThere gives a missing file of the host the exit code of what is missing.
func notThere(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("%v: %w", err, runtime.ErrNotFound)
	}
	return err
}
