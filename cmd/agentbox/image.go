package main

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/agentbox/agentbox/runtime"
)

func newImageCommand(a *app) *cobra.Command {
	cmd := &cobra.Command{
		Use:     "image COMMAND",
		Aliases: []string{"images"},
		Short:   "Work with images",
		Long:    "An image is the read-only files a sandbox starts from. The image busybox is built in: it is made from the host's static busybox.",
		Example: `  agentbox image pull debian:12
  agentbox image ls`,
		Annotations: exits(exitUsage, exitNotFound, exitState, exitCorrupt, exitDenied, exitUnsupported),
		Args:        cobra.ArbitraryArgs,
		RunE:        helpOrUnknown,
	}
	cmd.AddCommand(newImagePullCommand(a), newImagePushCommand(a), newImageImportCommand(a), newImageLsCommand(a),
		newImageInspectCommand(a), newImageHistoryCommand(a),
		newImageTagCommand(a), newImageRmCommand(a), newImagePruneCommand(a), newImageVerifyCommand(a),
		newImageLoginCommand(a), newImageLogoutCommand(a))
	return cmd
}

func newImageImportCommand(a *app) *cobra.Command {
	return &cobra.Command{
		Use:   "import NAME TARBALL|DIR|-",
		Short: "Make an image from a tarball or a directory",
		Long: `Import makes an image from the root filesystem in a tarball (plain, gzip, zstd), a directory,
or with - a tar stream on stdin, and prints its digest.`,
		Example: `  mmdebstrap --variant=minbase trixie debian.tar && agentbox image import debian debian.tar
  docker export c1 | agentbox image import c1 -`,
		Annotations: exits(exitUsage, exitNotFound, exitState, exitCorrupt, exitDenied),
		Args:        args(2, 2),
		ValidArgsFunction: func(_ *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
			if len(args) == 1 {
				return nil, cobra.ShellCompDirectiveDefault
			}
			return nil, noFiles
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			if args[1] == "-" && isTerminal(a.stdin) {
				return usageErrorf("stdin is a terminal: pipe a tar stream in, or name a file")
			}
			return a.service(cmd.Context(), func(svc runtime.Service) error {
				return runImageImport(cmd.Context(), args[0], args[1], svc, a.stdin, a.stdout, a.stderr)
			})
		},
	}
}

func runImageImport(
	ctx context.Context, name, source string, svc runtime.Service, stdin io.Reader, stdout, stderr io.Writer,
) error {
	var im runtime.Image
	var err error
	if source == "-" {
		im, err = svc.ImportImageFrom(ctx, name, stdin)
	} else {
		if source, err = filepath.Abs(source); err != nil {
			return err
		}
		im, err = svc.ImportImage(ctx, name, source)
	}
	if err != nil {
		return err
	}
	if isTerminalWriter(stderr) {
		fmt.Fprintf(stderr, "image %s: %s\n", im.Name, sizeText(im.Bytes))
	}
	_, err = fmt.Fprintln(stdout, im.Digest)
	return err
}

type imageLsOptions struct {
	Quiet   bool
	NoTrunc bool
	Format  string
}

func (o *imageLsOptions) addFlags(fl *pflag.FlagSet) {
	fl.BoolVarP(&o.Quiet, "quiet", "q", false, "names only")
	fl.BoolVar(&o.NoTrunc, "no-trunc", false, "whole digests")
	addFormat(fl, &o.Format, formatTable, formatJSON)
}

func newImageLsCommand(a *app) *cobra.Command {
	var opts imageLsOptions
	cmd := &cobra.Command{
		Use:         "ls [flags]",
		Aliases:     []string{"list"},
		Short:       "List images",
		Long:        "Ls lists images. With --format json it prints an array of objects: name, digest (of its\nconfiguration), created, bytes (unpacked), builtin, platform, repo_digests, layers, size (as it was\npulled), damaged (why it cannot be used). Images that cannot be used are named in a warning.",
		Example:     "  agentbox image ls --format json",
		Annotations: exits(exitUsage, exitDenied),
		Args:        args(0, 0),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := oneForm(opts.Quiet, opts.Format); err != nil {
				return err
			}
			return a.service(cmd.Context(), func(svc runtime.Service) error {
				return runImageLs(cmd.Context(), opts, svc, a.stdout, a.stderr, a.now())
			})
		},
	}
	opts.addFlags(cmd.Flags())
	completeFlags(cmd)
	return cmd
}

func runImageLs(
	ctx context.Context, opts imageLsOptions, svc runtime.Service, out, stderr io.Writer, now time.Time,
) error {
	images, err := svc.Images(ctx)
	if err != nil {
		return err
	}
	for i, im := range images {
		images[i] = documentedImage(im)
		if im.Damaged != "" {
			warn(stderr, []string{fmt.Sprintf("image %s is damaged: %s; pull or import it again, or remove it",
				cmp.Or(im.Name, shortDigest(im.Digest)), im.Damaged)})
		}
	}

	return listing[runtime.Image]{
		format: opts.Format,
		quiet:  opts.Quiet,
		name:   func(im runtime.Image) string { return im.Name },
		header: []string{"NAME", "DIGEST", "CREATED", "SIZE"},
		row: func(im runtime.Image) []string {
			name, digest := im.Name, im.Digest
			if !opts.NoTrunc {
				digest = shortDigest(digest)
				if repo, pin, ok := strings.Cut(name, "@"); ok {
					name = repo + "@" + shortDigest(pin)
				}
			}
			created := ago(now, im.Created)
			if im.Builtin {
				created = "built in"
			}
			return []string{name, digest, created, sizeText(im.Bytes)}
		},
	}.print(out, images)
}

func newImageRmCommand(a *app) *cobra.Command {
	return &cobra.Command{
		Use:         "rm NAME...",
		Aliases:     []string{"remove"},
		Short:       "Remove images",
		Long:        "Rm removes the names of images, and prints them. An image goes with its last name, which stays while a\nsandbox or a checkpoint needs it.",
		Example:     "  agentbox image rm debian",
		Annotations: exits(exitUsage, exitNotFound, exitState, exitBusy, exitDenied),
		Args:        args(1, -1),
		ValidArgsFunction: func(cmd *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
			return a.imageNames(cmd, args, func(im runtime.Image) bool { return !im.Builtin }), noFiles
		},
		RunE: a.eachCommand(runtime.Service.RemoveImage),
	}
}
