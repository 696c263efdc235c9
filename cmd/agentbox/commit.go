package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"strconv"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/agentbox/agentbox/runtime"
)

type commitOptions struct {
	transferOptions
	Author  string
	Message string
	Changes []string
	Format  string
}

func (o *commitOptions) addFlags(fl *pflag.FlagSet) {
	o.transferOptions.addFlags(fl)
	fl.StringVarP(&o.Author, "author", "a", "", "who made it, e.g. `'NAME <MAIL>'`")
	fl.StringVarP(&o.Message, "message", "m", "", "`TEXT` for the image's history")
	fl.VarP(list(&o.Changes), "change", "c",
		"change the configuration: an `INSTRUCTION` of a Dockerfile (CMD, ENTRYPOINT, ENV, LABEL, USER, WORKDIR, EXPOSE, VOLUME, STOPSIGNAL)")
	o.Format = "digest"
	fl.Var(choice(&o.Format, "digest", formatJSON), "format", "print as `FORMAT`: digest or json")
}

func newCommitCommand(a *app) *cobra.Command {
	var opts commitOptions
	cmd := &cobra.Command{
		Use:   "commit [flags] SANDBOX[@CHECKPOINT] REFERENCE",
		Short: "Make an image of a sandbox or a checkpoint",
		Long: `Commit makes an OCI image of the layers of a sandbox's image and one more with what the sandbox
changed, and prints its digest. A running sandbox is frozen for as long as a checkpoint of its
files takes; its processes, bind mounts and tmpfs are not part of the image. The configuration
is that of the image below, with the changes asked for: neither the sandbox's command nor its
environment is taken over. Whoever can read the image can read the secrets in those files.

REFERENCE is a NAME[:TAG] among the images here, or docker://REGISTRY/NAME, docker-daemon:NAME,
containers-storage:NAME, oci:DIR[:TAG], oci-archive:FILE[:TAG], docker-archive:FILE[:NAME].

The same checkpoint, options and SOURCE_DATE_EPOCH give the same digest; without that variable
the image's time is the checkpoint's. With --format json it prints one object: reference,
digest, manifest, base, layer, layer_bytes, layer_size, sandbox, sandbox_name, checkpoint, notes.`,
		Example: `  agentbox commit work work-image
  agentbox commit -c 'CMD ["python3", "/app.py"]' work@good docker-daemon:app:latest
  agentbox commit work docker://registry.example.com/team/work:1`,
		Annotations: exits(exitUsage, exitNotFound, exitState, exitBusy, exitCorrupt,
			exitDenied, exitUnsupported),
		Args:              args(2, 2),
		ValidArgsFunction: a.completeStates,
		RunE: func(cmd *cobra.Command, args []string) error {
			commit := runtime.CommitOptions{
				Author: opts.Author, Message: opts.Message, Changes: opts.Changes, Source: opts.source(),
			}
			var err error
			if commit.Created, err = sourceDate(os.Getenv("SOURCE_DATE_EPOCH")); err != nil {
				return err
			}
			return a.service(cmd.Context(), func(svc runtime.Service) error {
				return runCommit(cmd.Context(), args[0], args[1], commit, opts.Format, svc, a.stdout, a.stderr)
			})
		},
	}
	opts.addFlags(cmd.Flags())
	completeFlags(cmd)
	return cmd
}

// sourceDate reads what reproducible builds set; empty: no time.
func sourceDate(s string) (time.Time, error) {
	if s == "" {
		return time.Time{}, nil
	}
	sec, err := strconv.ParseInt(s, 10, 64)
	if err != nil || sec < 0 || sec > 253402300799 { // the end of the year 9999
		return time.Time{}, usageErrorf("SOURCE_DATE_EPOCH %q: must be seconds since 1970", s)
	}
	return time.Unix(sec, 0).UTC(), nil
}

func runCommit(
	ctx context.Context, sandbox, ref string, opts runtime.CommitOptions, format string, svc runtime.Service,
	stdout, stderr io.Writer,
) error {
	bars, end := watchLayers(stderr)
	defer end()
	if bars != nil {
		opts.Source.Progress = bars.push
	}
	got, err := svc.Commit(ctx, sandbox, ref, opts)
	end()
	if err != nil {
		return err
	}
	warn(stderr, got.Notes)
	if format == formatJSON {
		return printJSON(stdout, got)
	}
	_, err = fmt.Fprintln(stdout, got.Digest)
	return err
}
