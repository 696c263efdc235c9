package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"golang.org/x/sync/errgroup"

	"github.com/agentbox/agentbox/internal/cptar"
	"github.com/agentbox/agentbox/runtime"
)

type cpOptions struct {
	Archive bool
	Follow  bool
}

func (o *cpOptions) addFlags(fl *pflag.FlagSet) {
	fl.BoolVarP(&o.Archive, "archive", "a", false, "to the host: keep owners, attributes and devices too")
	fl.BoolVarP(&o.Follow, "follow-link", "L", false, "copy what a symlink SRC points to")
}

func newCpCommand(a *app) *cobra.Command {
	var opts cpOptions
	cmd := &cobra.Command{
		Use:   "cp [flags] SRC DST",
		Short: "Copy between a sandbox and the host",
		Long: `Cp copies a file or a directory. One of SRC and DST is SANDBOX:PATH, the other a path on
the host, or - for a tar stream on stdout or stdin. The sandbox may be running or stopped.
SANDBOX@CHECKPOINT:PATH as SRC is a path as the checkpoint has it, and SANDBOX@image:PATH
one of the image; nothing is restored for that. What the sandbox mounts is in no checkpoint.

A directory is copied into an existing directory DST under its own name, and with DST
under that name when there is none; SRC/. copies what is in it. DST/ must be a directory.`,
		Example: `  agentbox cp c:/etc/passwd .
  agentbox cp ./src/. c:/work
  agentbox cp c@before:/work/src .
  agentbox cp c:/var/log - | tar t`,
		Annotations: exits(exitUsage, exitNotFound, exitState, exitBusy, exitCorrupt, exitDenied, exitUnsupported),
		Args:        args(2, 2),
		ValidArgsFunction: func(cmd *cobra.Command, args []string, toComplete string) ([]string,
			cobra.ShellCompDirective) {
			if len(args) > 1 {
				return nil, noFiles
			}
			return a.completeEnds(cmd, toComplete, cobra.ShellCompDirectiveDefault)
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			src, dst := parseEnd(args[0]), parseEnd(args[1])
			if err := checkEnds(a, src, dst); err != nil {
				return err
			}
			return a.service(cmd.Context(), func(svc runtime.Service) error {
				full, in, err := stateHere(cmd.Context(), src.sandbox, svc)
				if err != nil {
					return err
				}
				if full != src.sandbox {
					src.sandbox, src.path = full, in(src.path)
				}
				return runCp(cmd.Context(), opts, src, dst, svc, a.stdin, a.stdout, a.stderr)
			})
		},
	}
	opts.addFlags(cmd.Flags())
	return cmd
}

// completeEnds offers sandboxes and checkpoints, with a colon for the path. Files are completed by
// the directive that is given.
func (a *app) completeEnds(
	cmd *cobra.Command, toComplete string, files cobra.ShellCompDirective,
) ([]string, cobra.ShellCompDirective) {
	if strings.ContainsAny(toComplete, "/.:") {
		return nil, files
	}
	names := a.sandboxNames(cmd, nil, nil)
	if strings.Contains(toComplete, "@") {
		names, _ = a.completeStates(cmd, nil, toComplete)
	}
	for i, n := range names {
		name, _, _ := strings.Cut(n, "\t")
		names[i] = name + ":"
	}
	return names, cobra.ShellCompDirectiveNoSpace
}

// An end is one side of a copy.
type end struct {
	sandbox string // or SANDBOX@CHECKPOINT; empty: the host
	path    string // "-": a tar stream
}

// parseEnd reads SANDBOX:PATH or a host path; a host path with a colon in it
// begins with / or a dot.
func parseEnd(s string) end {
	if strings.HasPrefix(s, "/") || strings.HasPrefix(s, ".") {
		return end{path: s}
	}
	if sandbox, p, ok := strings.Cut(s, ":"); ok && sandbox != "" {
		return end{sandbox: sandbox, path: p}
	}
	return end{path: s}
}

func (e end) stream() bool { return e.sandbox == "" && e.path == "-" }

func checkEnds(a *app, src, dst end) error {
	switch {
	case src.sandbox != "" && dst.sandbox != "":
		return usageErrorf("one of SRC and DST must be on the host; copy between sandboxes with 'agentbox cp A:PATH - | agentbox cp - B:DIR'")
	case src.sandbox == "" && dst.sandbox == "":
		return usageErrorf("one of SRC and DST must be SANDBOX:PATH")
	case src.path == "" || dst.path == "":
		return usageErrorf("the path is empty")
	case strings.Contains(dst.sandbox, "@"):
		return usageErrorf("a checkpoint cannot be changed: DST must be a sandbox or a path on the host")
	case dst.stream() && isTerminal(a.stdout):
		return usageErrorf("stdout is a terminal: send the tar stream to a file or a pipe")
	case src.stream() && isTerminal(a.stdin):
		return usageErrorf("stdin is a terminal: pipe a tar stream in")
	case src.sandbox != "":
		return checkState(src.sandbox)
	}
	return nil
}

func runCp(
	ctx context.Context, opts cpOptions, src, dst end, svc runtime.Service, stdin io.Reader, stdout, stderr io.Writer,
) error {
	if strings.Contains(src.sandbox, "@") {
		err := copyOut(ctx, opts, src.sandbox, rooted(src.path), dst.path, svc, stdout, stderr)
		if own, ok := err.(*runtime.Error); ok && own.ID == src.sandbox {
			err = reword(own, "cp", src.sandbox)
		}
		return err
	}
	// Asked first, so that a missing sandbox is not taken for a missing path.
	sb, err := svc.Sandbox(ctx, src.sandbox+dst.sandbox)
	if err != nil {
		return reword(err, "cp", src.sandbox+dst.sandbox)
	}
	if dst.sandbox != "" {
		err = copyIn(ctx, opts, src.path, sb.ID, rooted(dst.path), svc, stdin, stderr)
	} else {
		err = copyOut(ctx, opts, sb.ID, rooted(src.path), dst.path, svc, stdout, stderr)
	}
	if own, ok := err.(*runtime.Error); ok && own.ID == sb.ID {
		err = reword(own, "cp", sb.Name)
	}
	return err
}

// rooted makes a sandbox path absolute, relative ones beginning at the root,
// and leaves its ending alone: "/" and "/." there have a meaning.
func rooted(p string) string {
	if path.IsAbs(p) {
		return p
	}
	return "/" + p
}

func isContents(p string) bool { return p == "." || strings.HasSuffix(p, "/.") }

// copyOut copies from in a sandbox to a path on the host.
func copyOut(
	ctx context.Context, opts cpOptions, sandbox, from, to string, svc runtime.Service, stdout, stderr io.Writer,
) error {
	st, err := svc.Stat(ctx, sandbox, from)
	if err != nil {
		return err
	}
	name := path.Base(from)
	if opts.Follow && st.Link != "" {
		from = st.Link
		if st, err = svc.Stat(ctx, sandbox, from); err != nil {
			return err
		}
	}
	if to == "-" {
		return svc.CopyFrom(ctx, sandbox, from, stdout)
	}
	if !st.Dir && (isContents(from) || strings.HasSuffix(from, "/")) {
		return cpErrorf(from, "%w: not a directory", runtime.ErrInvalid)
	}
	var target cptar.Target
	if fi, err := os.Stat(to); err == nil {
		target = cptar.Target{Exists: true, Dir: fi.IsDir()}
		// A link at the destination is followed, as for the shell's cp.
		if !target.Dir {
			if to, err = filepath.EvalSymlinks(to); err != nil {
				return err
			}
		}
	} else if !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	dir, rename, err := cptar.Place(to, target, st.Dir, isContents(from) || path.Clean(from) == "/")
	if err != nil {
		return cpErrorf(to, "%w", err)
	}
	if rename == "" {
		rename = name
	}
	var report cptar.Report
	err = pipe(ctx,
		func(ctx context.Context, w io.Writer) error { return svc.CopyFrom(ctx, sandbox, from, w) },
		func(ctx context.Context, r io.Reader) (err error) {
			report, err = cptar.Untar(ctx, dir, r, cptar.UntarOptions{Rename: rename, Archive: opts.Archive})
			return err
		})
	return both(err, skipped(report, stderr))
}

// copyIn copies a path on the host, or the tar stream on stdin, into a sandbox.
func copyIn(
	ctx context.Context, opts cpOptions, from, sandbox, to string, svc runtime.Service,
	stdin io.Reader, stderr io.Writer,
) error {
	if from == "-" {
		return svc.CopyTo(ctx, sandbox, to, stdin)
	}
	name := filepath.Base(from)
	if opts.Follow {
		real, err := filepath.EvalSymlinks(from)
		if err != nil {
			return hostError(from, err)
		}
		if isContents(from) {
			real += "/."
		}
		from = real
	}
	fi, err := os.Lstat(from) // follows "link/" and "link/."
	if err != nil {
		return hostError(from, err)
	}
	target, to, err := sandboxTarget(ctx, svc, sandbox, to)
	if err != nil {
		return err
	}
	contents := isContents(from) || name == "/"
	dir, rename, err := cptar.Place(to, target, fi.IsDir(), contents)
	if err != nil {
		return cpErrorf(to, "%w", err)
	}
	if rename == "" && opts.Follow && !contents {
		rename = name
	}
	var report cptar.Report
	err = pipe(ctx,
		func(ctx context.Context, w io.Writer) (err error) {
			report, err = cptar.TarPath(ctx, from, rename, w)
			return err
		},
		func(ctx context.Context, r io.Reader) error { return svc.CopyTo(ctx, sandbox, dir, r) })
	return both(err, skipped(report, stderr))
}

// sandboxTarget tells what is at a destination in a sandbox, and where it
// really is when that is a symlink.
func sandboxTarget(ctx context.Context, svc runtime.Service, sandbox, to string) (cptar.Target, string, error) {
	st, err := svc.Stat(ctx, sandbox, to)
	if err == nil && st.Link != "" {
		to = st.Link
		st, err = svc.Stat(ctx, sandbox, to)
	}
	if errors.Is(err, runtime.ErrNotFound) {
		return cptar.Target{}, to, nil
	}
	return cptar.Target{Exists: err == nil, Dir: st.Dir}, to, err
}

// pipe streams what one side writes to the other. The side that fails first has the cause: its
// error closes the pipe for the other.
func pipe(
	ctx context.Context, write func(context.Context, io.Writer) error, read func(context.Context, io.Reader) error,
) error {
	pr, pw := io.Pipe()
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error {
		err := write(ctx, pw)
		pw.CloseWithError(err)
		return err
	})
	g.Go(func() error {
		err := read(ctx, pr)
		if err == nil {
			// A tar reader stops at the end mark, which may have padding.
			_, err = io.Copy(io.Discard, pr)
		}
		pr.CloseWithError(err)
		return err
	})
	return g.Wait()
}

// skipped names what a stream could not carry. That is a partial result, and
// so no success.
func skipped(report cptar.Report, stderr io.Writer) error {
	warn(stderr, report.Skipped)
	n := int64(len(report.Skipped)) + report.SkippedMore
	if n == 0 {
		return nil
	}
	return &runtime.Error{Op: "cp", Err: fmt.Errorf("%s could not be copied whole: see the warnings",
		countText(n, "entry"))}
}

func hostError(p string, err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return cpErrorf(p, "no such file on the host: %w", runtime.ErrNotFound)
	}
	return err
}

func cpErrorf(p, format string, args ...any) error {
	return &runtime.Error{Op: "cp", ID: p, Err: fmt.Errorf(format, args...)}
}
