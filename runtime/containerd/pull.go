package containerd

import (
	"context"
	"errors"
	"fmt"
	"io"

	"github.com/containerd/containerd"
	cimages "github.com/containerd/containerd/images"
	"github.com/containerd/containerd/remotes"
	"github.com/containerd/containerd/remotes/docker"
	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/name"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/agentbox/agentbox/images/image"
	"github.com/agentbox/agentbox/images/reference"
	"github.com/agentbox/agentbox/internal/fault"
)

// Pull finds an image here, or pulls it into containerd, as the policy says.
func (m Images) Pull(ctx context.Context, ref string, opts image.PullOptions) (image.Image, error) {
	parsed, err := reference.Parse(ref, "")
	if err == nil && parsed.Transport != reference.Docker {
		return image.Image{}, &fault.Error{Err: fmt.Errorf("%w: containerd does not pull from %s",
			fault.ErrUnsupported, parsed),
			Hint: fmt.Sprintf("Bring it there by way of an archive: agentbox image pull %[1]s, agentbox image push %[1]s oci-archive:FILE, ctr -n %s images import FILE", ref, m.b.namespace)}
	}
	missing := error(nil)
	if opts.Policy != image.PullAlways || shortName(ref) == "busybox" {
		img, err := m.Resolve(ctx, ref)
		if opts.Policy == image.PullNever || !errors.Is(err, fault.ErrNotFound) {
			return img, err
		}
		missing = err
	}
	if digestRule().MatchString(ref) && missing != nil {
		return image.Image{}, missing
	}
	if err != nil {
		return image.Image{}, errors.Join(missing, err)
	}
	if opts.Source.Timeout > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, opts.Source.Timeout)
		defer cancel()
	}
	return m.pull(in(ctx, m.b.namespace), ref, parsed, opts)
}

func (m Images) pull(
	ctx context.Context, ref string, parsed reference.Reference, opts image.PullOptions,
) (image.Image, error) {
	how := []containerd.RemoteOpt{
		containerd.WithPullUnpack, containerd.WithPullSnapshotter(m.b.snapshotter),
		containerd.WithResolver(resolver(opts.Source.Insecure)),
	}
	if opts.Source.Platform != "" {
		how = append(how, containerd.WithPlatform(opts.Source.Platform))
	}
	if opts.Progress != nil {
		how = append(how, containerd.WithImageHandler(cimages.HandlerFunc(func(_ context.Context, d ocispec.Descriptor) ([]ocispec.Descriptor, error) {
			if cimages.IsLayerType(d.MediaType) {
				opts.Progress(image.Progress{Layer: d.Digest.String(), Stage: image.StagePulling, Total: d.Size})
			}
			return nil, nil
		})))
	}
	img, err := m.b.client.Pull(ctx, parsed.String(), how...)
	if err == nil {
		return m.describe(ctx, img.Metadata())
	}
	if ctx.Err() != nil || isDown(plain(err)) {
		return image.Image{}, plain(err)
	}
	remedy := fmt.Sprintf("Import one (agentbox --backend containerd image import %s TARBALL|DIR, or ctr -n %s images import FILE), or pull it where a registry can be reached.", ref, m.b.namespace)
	if ns := m.elsewhere(ctx, parsed.String()); ns != "" {
		remedy = fmt.Sprintf("Namespace %s has it: ctr -n %s images export - %s | ctr -n %s images import -", ns,
			ns, parsed, m.b.namespace)
	}
	return image.Image{}, &fault.Error{Err: fmt.Errorf("image %s: %w, and it cannot be pulled: %w", ref,
		fault.ErrNotFound, plain(err)), Hint: remedy}
}

// resolver asks registries with the credentials of `docker login`; those on this
// host, and with insecure all, by plain HTTP.
func resolver(insecure bool) remotes.Resolver {
	plainHTTP := docker.MatchLocalhost
	if insecure {
		plainHTTP = docker.MatchAllHosts
	}
	return docker.NewResolver(docker.ResolverOptions{Hosts: docker.ConfigureDefaultRegistries(
		docker.WithPlainHTTP(plainHTTP),
		docker.WithAuthorizer(docker.NewDockerAuthorizer(docker.WithAuthCreds(credentials))),
	)})
}

func credentials(host string) (user, secret string, err error) {
	if host == "registry-1.docker.io" {
		host = name.DefaultRegistry
	}
	registry, err := name.NewRegistry(host)
	if err != nil {
		return "", "", err
	}
	found, err := authn.DefaultKeychain.Resolve(registry)
	if err != nil {
		return "", "", err
	}
	cfg, err := found.Authorization()
	if err != nil {
		return "", "", err
	}
	if cfg.IdentityToken != "" {
		return "", cfg.IdentityToken, nil
	}
	return cfg.Username, cfg.Password, nil
}

// Tag gives an image one more name. A sandbox that has pinned what that name meant before
// still finds it.
func (m Images) Tag(ctx context.Context, ref, name string) error {
	ctx = in(ctx, m.b.namespace)
	img, err := m.find(ctx, ref)
	if err != nil {
		return err
	}
	full, err := fullName(name)
	if err != nil {
		return err
	}
	_, err = m.publish(ctx, cimages.Image{Name: full, Target: img.Target})
	return err
}

// Inspect describes an image as containerd knows it.
func (m Images) Inspect(ctx context.Context, ref string) (image.Details, error) {
	ctx = in(ctx, m.b.namespace)
	img, err := m.find(ctx, ref)
	if err != nil {
		return image.Details{}, err
	}
	out := image.Details{ManifestDigest: img.Target.Digest.String(), ManifestType: img.Target.MediaType}
	if out.Image, err = m.describe(ctx, img); err != nil {
		return out, err
	}
	all, err := m.b.client.ImageService().List(ctx, fmt.Sprintf("target.digest==%q", img.Target.Digest))
	if err != nil {
		return out, plain(err)
	}
	for _, i := range all {
		if n := shortName(i.Name); n != "" {
			out.Names = append(out.Names, n)
		}
	}
	core, err := m.core(ctx, img)
	if err != nil {
		return out, err
	}
	out.RawConfig, out.Manifest = core.config, core.raw
	spec, err := containerd.NewImage(m.b.client.Client, img).Spec(ctx)
	if err != nil {
		return out, plain(err)
	}
	for k, l := range core.manifest.Layers {
		layer := image.Layer{Digest: l.Digest.String(), MediaType: l.MediaType, Size: l.Size}
		if k < len(spec.RootFS.DiffIDs) {
			layer.DiffID = spec.RootFS.DiffIDs[k].String()
		}
		out.LayerList = append(out.LayerList, layer)
	}
	for _, h := range spec.History {
		step := image.History{CreatedBy: h.CreatedBy, Author: h.Author, Comment: h.Comment, Empty: h.EmptyLayer}
		if h.Created != nil {
			step.Created = *h.Created
		}
		out.History = append(out.History, step)
	}
	return out, nil
}

// Prune removes unneeded names, including those that only pin a digest, and with them what
// they alone kept.
func (m Images) Prune(
	ctx context.Context, all bool, inUse func(digest string) bool,
) (removed []image.Image, freed int64, err error) {
	ctx = in(ctx, m.b.namespace)
	list, err := m.b.client.ImageService().List(ctx)
	if err != nil {
		return nil, 0, plain(err)
	}
	named := map[string]bool{}
	for _, img := range list {
		if shortName(img.Name) != "" {
			named[img.Target.Digest.String()] = true
		}
	}
	for _, img := range list {
		digest := img.Target.Digest.String()
		if inUse != nil && inUse(digest) || shortName(img.Name) != "" && !all {
			continue
		}
		out, err := m.describe(ctx, img)
		if err != nil {
			out = image.Image{Name: shortName(img.Name), Digest: digest, Created: img.CreatedAt}
		}
		err = plain(m.b.client.ImageService().Delete(ctx, img.Name, cimages.SynchronousDelete()))
		if err != nil && !errors.Is(err, fault.ErrNotFound) {
			return removed, freed, err
		}
		if shortName(img.Name) != "" || !named[digest] {
			removed, freed = append(removed, out), freed+out.Bytes
		}
	}
	return removed, freed, nil
}

// Verify reads all blobs of an image again.
func (m Images) Verify(ctx context.Context, digest string) error {
	ctx = in(ctx, m.b.namespace)
	img, err := m.b.byDigest(ctx, digest)
	if err != nil {
		return err
	}
	core, err := m.core(ctx, img)
	if err != nil {
		return err
	}
	for _, l := range core.manifest.Layers {
		if err := m.verifyBlob(ctx, l); err != nil {
			return err
		}
	}
	return nil
}

func (m Images) verifyBlob(ctx context.Context, d ocispec.Descriptor) error {
	r, err := m.open(ctx, d)
	if err != nil {
		return err
	}
	sum := d.Digest.Algorithm().Digester()
	_, err = io.Copy(sum.Hash(), r)
	if err := errors.Join(err, r.Close()); err != nil {
		return err
	}
	if sum.Digest() != d.Digest {
		return &fault.Error{
			Err:  fmt.Errorf("%w: blob %s has changed", fault.ErrCorrupt, d.Digest),
			Hint: "Remove the image and pull it again.",
		}
	}
	return nil
}
