package main

import (
	"context"
	"fmt"
	"io"
	"time"

	"github.com/docker/go-units"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/agentbox/agentbox/images/image"
	"github.com/agentbox/agentbox/runtime"
)

// transferOptions are the flags of verbs that move images.
type transferOptions struct {
	Insecure bool
	CertDir  string
	AuthFile string
	Timeout  time.Duration
}

func (o *transferOptions) addFlags(fl *pflag.FlagSet) {
	addInsecure(fl, &o.Insecure)
	fl.StringVar(&o.CertDir, "cert-dir", "",
		"`DIR` with the registry's authorities (*.crt) and our certificate (*.cert, *.key)")
	fl.StringVar(&o.AuthFile, "authfile", "", "`FILE` with credentials; default: that of 'docker login'")
	fl.DurationVar(&o.Timeout, "timeout", 0, "give up after this `DURATION`; default: when nothing comes any more")
}

func addInsecure(fl *pflag.FlagSet, p *bool) {
	fl.BoolVar(p, "insecure", false, "accept plain HTTP and unknown certificates from the registry")
}

func (o *transferOptions) source() image.SourceOptions {
	return image.SourceOptions{Insecure: o.Insecure, CertDir: o.CertDir, AuthFile: o.AuthFile, Timeout: o.Timeout}
}

// pullPolicyOptions are the flags of verbs that may pull an image.
type pullPolicyOptions struct {
	Policy   string
	Platform string
	Insecure bool
}

func (o *pullPolicyOptions) addFlags(fl *pflag.FlagSet) {
	o.Policy = string(image.PullMissing)
	fl.Var(choice(&o.Policy, string(image.PullMissing), string(image.PullAlways), string(image.PullNever)), "pull",
		"pull the image: missing, always or never")
	addPlatform(fl, &o.Platform)
	addInsecure(fl, &o.Insecure)
}

// addMissing adds those of a verb that knows which image it needs.
func (o *pullPolicyOptions) addMissing(fl *pflag.FlagSet) {
	o.Policy = string(image.PullMissing)
	fl.Var(choice(&o.Policy, string(image.PullMissing), string(image.PullNever)), "pull",
		"pull the image of a removed sandbox: missing or never")
	addInsecure(fl, &o.Insecure)
}

func addPlatform(fl *pflag.FlagSet, p *string) {
	fl.StringVar(p, "platform", "", "`OS/ARCH[/VARIANT]` of the image; default: this machine's")
}

func (o *pullPolicyOptions) options() image.PullOptions {
	return image.PullOptions{
		Policy: image.Policy(o.Policy), Source: image.SourceOptions{Platform: o.Platform, Insecure: o.Insecure},
	}
}

type imagePullOptions struct {
	transferOptions
	Platform string
	MaxBytes string
	Policy   string
	Format   string
}

func (o *imagePullOptions) addFlags(fl *pflag.FlagSet) {
	o.transferOptions.addFlags(fl)
	addPlatform(fl, &o.Platform)
	fl.StringVar(&o.MaxBytes, "max-size", "", "refuse images larger than `SIZE` as they travel; default: 64g")
	o.Policy = string(image.PullAlways)
	fl.Var(choice(&o.Policy, string(image.PullAlways), string(image.PullMissing)), "policy",
		"ask the registry: always, or only when it is missing here")
	o.Format = "digest"
	fl.Var(choice(&o.Format, "digest", formatJSON), "format", "print as `FORMAT`: digest or json")
}

const imageReferences = `REFERENCE is one of
  NAME[:TAG][@DIGEST], docker://NAME  in a registry; names without one are Docker Hub's
  docker-daemon:NAME                  in the Docker daemon
  containers-storage:NAME             among Podman's images
  oci:DIR[:TAG], oci-archive:FILE[:TAG], docker-archive:FILE[:NAME]
                                      an image in files
  dir:ROOTFS                          a directory with a root filesystem
  bootstrap:debian/SUITE[?include=PACKAGE,...]
                                      made by mmdebstrap, kept by what it was made of`

func newImagePullCommand(a *app) *cobra.Command {
	var opts imagePullOptions
	cmd := &cobra.Command{
		Use:   "pull [flags] REFERENCE",
		Short: "Get an image from a registry or another place",
		Long: `Pull gets an image and prints its digest. Every layer is proven before it is used, kept once
for all images, and not fetched again when it is here; a pull that was cut short goes on
where it stood. With --backend docker or containerd the engine pulls, into its own images.
With --format json it prints the image as 'image ls' does.

` + imageReferences,
		Example: `  agentbox image pull debian:12
  agentbox image pull --platform linux/arm64 ghcr.io/org/app@sha256:...
  agentbox image pull 'bootstrap:debian/bookworm?include=python3,git'`,
		Annotations: exits(exitUsage, exitNotFound, exitCorrupt, exitDenied, exitUnsupported),
		Args:        args(1, 1),
		ValidArgsFunction: func(cmd *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
			return a.imageNames(cmd, args, func(im runtime.Image) bool { return !im.Builtin }),
				cobra.ShellCompDirectiveNoSpace
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			pull := image.PullOptions{Policy: image.Policy(opts.Policy), Source: opts.source()}
			pull.Source.Platform = opts.Platform
			if opts.MaxBytes != "" {
				var err error
				if pull.Source.MaxBytes, err = units.RAMInBytes(opts.MaxBytes); err != nil ||
					pull.Source.MaxBytes <= 0 {
					return usageErrorf("--max-size %q: must be a size such as 2g", opts.MaxBytes)
				}
			}
			return a.service(cmd.Context(), func(svc runtime.Service) error {
				return runImagePull(cmd.Context(), args[0], pull, opts.Format, svc, a.stdout, a.stderr)
			})
		},
	}
	opts.addFlags(cmd.Flags())
	completeFlags(cmd)
	return cmd
}

func runImagePull(
	ctx context.Context, ref string, opts image.PullOptions, format string, svc runtime.Service,
	stdout, stderr io.Writer,
) error {
	bars, end := watchLayers(stderr)
	defer end()
	if bars != nil {
		opts.Progress = bars.pull
	}
	im, err := svc.PullImage(ctx, ref, opts)
	end()
	if err != nil {
		return err
	}
	if format == formatJSON {
		return printJSON(stdout, documentedImage(im))
	}
	_, err = fmt.Fprintln(stdout, im.Digest)
	return err
}

// documentedImage is im without null.
func documentedImage(im runtime.Image) runtime.Image {
	im.RepoDigests = notNull(im.RepoDigests)
	return im
}

type imagePushOptions struct {
	transferOptions
	Format string
}

func (o *imagePushOptions) addFlags(fl *pflag.FlagSet) {
	o.transferOptions.addFlags(fl)
	o.Format = "digest"
	fl.Var(choice(&o.Format, "digest", formatJSON), "format", "print as `FORMAT`: digest or json")
}

func newImagePushCommand(a *app) *cobra.Command {
	var opts imagePushOptions
	cmd := &cobra.Command{
		Use:   "push [flags] IMAGE [REFERENCE]",
		Short: "Write an image to a registry or another place",
		Long: `Push writes an image to REFERENCE, or to the registry in its own name, and prints the digest of
its manifest there. The reference has to name its registry, also Docker Hub (docker.io), since
an image of a sandbox may hold secrets. With --format json it prints one object: reference,
digest.

REFERENCE is one of docker://REGISTRY/NAME[:TAG], docker-daemon:NAME, containers-storage:NAME,
oci:DIR[:TAG] (other images in DIR stay), oci-archive:FILE[:TAG], docker-archive:FILE[:NAME].`,
		Example: `  agentbox image push registry.example.com/team/app:1
  agentbox image push app docker-daemon:app:latest
  agentbox image push app oci:/srv/images:app`,
		Annotations: exits(exitUsage, exitNotFound, exitCorrupt, exitDenied, exitUnsupported),
		Args:        args(1, 2),
		ValidArgsFunction: func(cmd *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
			if len(args) > 0 {
				return nil, cobra.ShellCompDirectiveDefault
			}
			return a.imageNames(cmd, nil, nil), noFiles
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			to := ""
			if len(args) > 1 {
				to = args[1]
			}
			return a.service(cmd.Context(), func(svc runtime.Service) error {
				return runImagePush(cmd.Context(), args[0], to, opts.source(), opts.Format, svc, a.stdout, a.stderr)
			})
		},
	}
	opts.addFlags(cmd.Flags())
	completeFlags(cmd)
	return cmd
}

func runImagePush(
	ctx context.Context, name, to string, opts image.SourceOptions, format string, svc runtime.Service,
	stdout, stderr io.Writer,
) error {
	bars, end := watchLayers(stderr)
	defer end()
	if bars != nil {
		opts.Progress = bars.push
	}
	p, err := svc.PushImage(ctx, name, to, opts)
	end()
	if err != nil {
		return err
	}
	if format == formatJSON {
		return printJSON(stdout, p)
	}
	_, err = fmt.Fprintln(stdout, p.Digest)
	return err
}
