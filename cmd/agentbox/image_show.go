package main

import (
	"context"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/agentbox/agentbox/images/image"
	"github.com/agentbox/agentbox/runtime"
)

func (a *app) completeImages(cmd *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
	return a.imageNames(cmd, args, nil), noFiles
}

func newImageInspectCommand(a *app) *cobra.Command {
	var opts inspectOptions
	cmd := &cobra.Command{
		Use:   "inspect [flags] IMAGE...",
		Short: "Print all that is known of images, as JSON",
		Long: `Inspect prints a JSON array with one object per image. Its fields only ever grow in number:
those of 'image ls --format json', and names, source, manifest_digest, manifest_type, config
(entrypoint, cmd, env, user, workdir, stop_signal, labels, volumes, exposed_ports,
healthcheck), layer_list, history, manifest and raw_config (as its source had them), used_by.`,
		Example:           `  agentbox image inspect debian | jq '.[0].config'`,
		Annotations:       exits(exitUsage, exitNotFound, exitDenied),
		Args:              args(1, -1),
		ValidArgsFunction: a.completeImages,
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.service(cmd.Context(), func(svc runtime.Service) error {
				return runImageInspect(cmd.Context(), args, svc, a.stdout)
			})
		},
	}
	opts.addFlags(cmd.Flags())
	completeFlags(cmd)
	return cmd
}

func runImageInspect(ctx context.Context, names []string, svc runtime.Service, out io.Writer) error {
	return inspectEach(ctx, names, out, func(name string) (runtime.ImageDetails, error) {
		d, err := svc.InspectImage(ctx, name)
		d.Image = documentedImage(d.Image)
		d.Names, d.LayerList, d.History, d.UsedBy = notNull(d.Names), notNull(d.LayerList),
			notNull(d.History), notNull(d.UsedBy)
		return d, err
	})
}

type imageHistoryOptions struct {
	NoTrunc bool
	Format  string
}

func newImageHistoryCommand(a *app) *cobra.Command {
	var opts imageHistoryOptions
	cmd := &cobra.Command{
		Use:   "history [flags] IMAGE",
		Short: "Show how an image was made",
		Long: `History lists the steps that an image was made in, the newest first. With --format json it prints
an array of objects: created, created_by, author, comment, empty_layer, bytes, diff_id.`,
		Example:           "  agentbox image history debian",
		Annotations:       exits(exitUsage, exitNotFound, exitDenied),
		Args:              args(1, 1),
		ValidArgsFunction: a.completeOneImage,
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.service(cmd.Context(), func(svc runtime.Service) error {
				return runImageHistory(cmd.Context(), args[0], opts, svc, a.stdout, a.now())
			})
		},
	}
	cmd.Flags().BoolVar(&opts.NoTrunc, "no-trunc", false, "whole commands")
	addFormat(cmd.Flags(), &opts.Format, formatTable, formatJSON)
	completeFlags(cmd)
	return cmd
}

func (a *app) completeOneImage(cmd *cobra.Command, args []string, to string) ([]string, cobra.ShellCompDirective) {
	if len(args) > 0 {
		return nil, noFiles
	}
	return a.completeImages(cmd, args, to)
}

func runImageHistory(
	ctx context.Context, name string, opts imageHistoryOptions, svc runtime.Service, out io.Writer, now time.Time,
) error {
	d, err := svc.InspectImage(ctx, name)
	if err != nil {
		return err
	}
	steps := []image.History{}
	for i := range d.History {
		steps = append(steps, d.History[len(d.History)-1-i])
	}
	return listing[image.History]{
		format: opts.Format,
		header: []string{"LAYER", "CREATED", "CREATED BY", "SIZE", "COMMENT"},
		row: func(s image.History) []string {
			by, layer, size := s.CreatedBy, shortDigest(s.DiffID), sizeText(s.Bytes)
			if !opts.NoTrunc {
				by = shorten(by, 45)
			}
			if s.Empty {
				layer, size = "", ""
			}
			return []string{layer, ago(now, s.Created), by, size, s.Comment}
		},
	}.print(out, steps)
}

func newImageTagCommand(a *app) *cobra.Command {
	return &cobra.Command{
		Use:               "tag IMAGE NAME",
		Short:             "Give an image one more name",
		Long:              "Tag gives an image one more name. If another image has the name, it loses it.",
		Example:           "  agentbox image tag debian:12 registry.example.com/team/base:1",
		Annotations:       exits(exitUsage, exitNotFound, exitDenied),
		Args:              args(2, 2),
		ValidArgsFunction: a.completeOneImage,
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.service(cmd.Context(), func(svc runtime.Service) error {
				return svc.TagImage(cmd.Context(), args[0], args[1])
			})
		},
	}
}

type imagePruneOptions struct {
	All    bool
	Force  bool
	Format string
}

func newImagePruneCommand(a *app) *cobra.Command {
	var opts imagePruneOptions
	cmd := &cobra.Command{
		Use:   "prune [flags]",
		Short: "Remove images that nothing needs",
		Long: `Prune removes the images that have no name, or with --all every one, unless a sandbox or a
checkpoint needs it, and what pulls that were cut short have left. With --all it asks first,
unless --force is given. With --format json it prints one object: removed (as 'image ls' has
them), freed (bytes).`,
		Example: `  agentbox image prune
  agentbox image prune --all --force`,
		Annotations:       exits(exitUsage, exitState, exitDenied),
		Args:              args(0, 0),
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, args []string) error {
			if opts.All && !opts.Force {
				if !isTerminal(a.stdin) {
					return usageErrorf("--all removes images that have names: give --force too")
				}
				fmt.Fprint(a.stderr, "Remove all images that no sandbox and no checkpoint needs? [y/N] ")
				if err := confirmed(cmd.Context(), a.stdin, a.stderr, "nothing was removed"); err != nil {
					return err
				}
			}
			return a.service(cmd.Context(), func(svc runtime.Service) error {
				return runImagePrune(cmd.Context(), opts, svc, a.stdout)
			})
		},
	}
	cmd.Flags().BoolVarP(&opts.All, "all", "a", false, "also those that have a name")
	cmd.Flags().BoolVarP(&opts.Force, "force", "f", false, "do not ask")
	addFormat(cmd.Flags(), &opts.Format, formatTable, formatJSON)
	completeFlags(cmd)
	return cmd
}

func runImagePrune(ctx context.Context, opts imagePruneOptions, svc runtime.Service, out io.Writer) error {
	got, err := svc.PruneImages(ctx, opts.All)
	if err != nil {
		return err
	}
	if opts.Format == formatJSON {
		for i, im := range got.Removed {
			got.Removed[i] = documentedImage(im)
		}
		got.Removed = notNull(got.Removed)
		return printJSON(out, got)
	}
	for _, im := range got.Removed {
		if _, err := fmt.Fprintln(out, strings.TrimSpace(im.Name+" "+shortDigest(im.Digest))); err != nil {
			return err
		}
	}
	_, err = fmt.Fprintf(out, "%s removed, %s freed\n", countText(int64(len(got.Removed)),
		"image"), sizeText(got.Freed))
	return err
}

func newImageVerifyCommand(a *app) *cobra.Command {
	return &cobra.Command{
		Use:   "verify [IMAGE...]",
		Short: "Read images again and prove them",
		Long: `Verify reads all files of images again, of all if none is named, and holds them against the
digests of their layers: contents, names, owners, modes, times and attributes. It prints the
names of those that are sound.`,
		Example:           "  agentbox image verify debian:12",
		Annotations:       exits(exitUsage, exitNotFound, exitCorrupt, exitDenied, exitUnsupported),
		Args:              args(0, -1),
		ValidArgsFunction: a.completeImages,
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.service(cmd.Context(), func(svc runtime.Service) error {
				return runImageVerify(cmd.Context(), args, svc, a.stdout)
			})
		},
	}
}

func runImageVerify(ctx context.Context, names []string, svc runtime.Service, out io.Writer) error {
	if len(names) == 0 {
		all, err := svc.Images(ctx)
		if err != nil {
			return err
		}
		for _, im := range all {
			name := im.Name
			if name == "" {
				name = im.Digest
			}
			names = append(names, name)
		}
	}
	return eachNamed(ctx, names, out, func(name string) error {
		_, err := svc.VerifyImage(ctx, name)
		return err
	})
}
