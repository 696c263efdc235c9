package main

import (
	"archive/tar"
	"context"
	"errors"
	"io"
	"io/fs"

	"github.com/spf13/cobra"

	"github.com/agentbox/agentbox/runtime"
)

func newCatCommand(a *app) *cobra.Command {
	return &cobra.Command{
		Use:   "cat SANDBOX[@CHECKPOINT]:PATH...",
		Short: "Print files of a sandbox or of a checkpoint",
		Long: `Cat prints what is in files of a sandbox as it is now, running or stopped, or as a
checkpoint has it. Nothing is restored for that. SANDBOX@image:PATH is a file of the image.
Symlinks are followed as in the sandbox.`,
		Example: `  agentbox cat c@before:/etc/passwd
  agentbox cat c:/var/log/messages
  agentbox cat c@image:/etc/passwd | diff - passwd`,
		Annotations: exits(exitUsage, exitNotFound, exitState, exitCorrupt, exitDenied, exitUnsupported),
		Args:        args(1, -1),
		ValidArgsFunction: func(cmd *cobra.Command, _ []string, toComplete string) ([]string, cobra.ShellCompDirective) {
			return a.completeEnds(cmd, toComplete, noFiles)
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			ends := make([]end, len(args))
			for i, arg := range args {
				ends[i] = parseEnd(arg)
				switch {
				case ends[i].sandbox == "":
					return usageErrorf("%q is not SANDBOX:PATH", arg)
				case ends[i].path == "":
					return usageErrorf("the path is empty")
				}
				if err := checkState(ends[i].sandbox); err != nil {
					return err
				}
			}
			return a.service(cmd.Context(), func(svc runtime.Service) error {
				for _, e := range ends {
					full, in, err := stateHere(cmd.Context(), e.sandbox, svc)
					if err != nil {
						return err
					}
					e.sandbox, e.path = full, in(e.path)
					if err := runCat(cmd.Context(), e, svc, a.stdout); err != nil {
						return reword(err, "cat", e.sandbox)
					}
				}
				return nil
			})
		},
	}
}

func runCat(ctx context.Context, from end, svc runtime.Service, stdout io.Writer) error {
	p := rooted(from.path)
	st, err := svc.Stat(ctx, from.sandbox, p)
	if err == nil && st.Link != "" {
		p = st.Link
		st, err = svc.Stat(ctx, from.sandbox, p)
	}
	switch {
	case err != nil:
		return err
	case st.Dir:
		return cpErrorf(from.sandbox, "%w: %q is a directory", runtime.ErrInvalid, p)
	case !fs.FileMode(st.Mode).IsRegular():
		return cpErrorf(from.sandbox, "%w: %q is not a regular file", runtime.ErrInvalid, p)
	}
	return pipe(ctx,
		func(ctx context.Context, w io.Writer) error { return svc.CopyFrom(ctx, from.sandbox, p, w) },
		func(_ context.Context, r io.Reader) error {
			in := tar.NewReader(r)
			h, err := in.Next()
			if errors.Is(err, io.EOF) || err == nil && h.Typeflag != tar.TypeReg {
				return cpErrorf(from.sandbox, "%w: %q is not a regular file any more", runtime.ErrBusy, p)
			}
			if err == nil {
				_, err = io.Copy(stdout, in)
			}
			return err
		})
}
