package containerd

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/containerd/containerd"
	cimages "github.com/containerd/containerd/images"
	"github.com/containerd/containerd/leases"
	"github.com/distribution/reference"
	"github.com/opencontainers/image-spec/identity"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/agentbox/agentbox/images/image"
	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/internal/lazy"
	"github.com/agentbox/agentbox/runtime"
)

// Images are containerd's images in our namespace. A sandbox and its checkpoints refer to an
// image by the digest that its name pointed to (target); a record under a name of ours,
// which is not listed, keeps that digest from the garbage collector when the name has
// moved on.
type Images struct{ b *Backend }

var _ runtime.Images = Images{}

// Images returns the source of this backend's images.
func (b *Backend) Images() Images { return Images{b} }

const (
	pinPrefix = "pinned.agentbox.local/image@"
	pinLabel  = "agentbox.pinned"
)

var digestRule = lazy.Regexp(`^(?:sha256:)?[0-9a-f]{6,64}$`)

// fullName is the form in which containerd's tools keep names.
func fullName(ref string) (string, error) {
	named, err := reference.ParseDockerRef(ref)
	if err != nil {
		return "", &fault.Error{Err: fmt.Errorf("%w: %.100q is not an image name: %w", fault.ErrInvalid, ref, err),
			Hint: "Image names have lower-case letters, digits, '.', '_', '-' and '/', and an optional ':TAG'."}
	}
	return named.String(), nil
}

// shortName is the form that people write.
func shortName(name string) string {
	if strings.HasPrefix(name, pinPrefix) {
		return ""
	}
	named, err := reference.ParseDockerRef(name)
	if err != nil {
		return name
	}
	return strings.TrimSuffix(reference.FamiliarString(named), ":latest")
}

// Resolve finds the image that a reference means: a name, or a digest or a
// unique prefix of one. The built-in busybox is made.
func (m Images) Resolve(ctx context.Context, ref string) (image.Image, error) {
	ctx = in(ctx, m.b.namespace)
	img, err := m.find(ctx, ref)
	if errors.Is(err, fault.ErrNotFound) {
		img, err = m.makeBuiltin(ctx, ref, err)
	}
	if err != nil {
		return image.Image{}, err
	}
	return m.describe(ctx, img)
}

// find finds an existing image. The context carries the namespace.
func (m Images) find(ctx context.Context, ref string) (cimages.Image, error) {
	svc := m.b.client.ImageService()
	if _, digest, ok := strings.Cut(ref, "@"); ok {
		return m.b.byDigest(ctx, digest)
	}
	name, nameErr := fullName(ref)
	for _, n := range []string{name, ref} {
		if n == "" {
			continue
		}
		img, err := svc.Get(ctx, n)
		if err = plain(err); !errors.Is(err, fault.ErrNotFound) {
			return img, err
		}
	}
	if !digestRule().MatchString(ref) {
		if nameErr != nil {
			return cimages.Image{}, nameErr
		}
		return cimages.Image{}, fmt.Errorf("image %s: %w", ref, fault.ErrNotFound)
	}
	list, err := svc.List(ctx)
	if err != nil {
		return cimages.Image{}, plain(err)
	}
	found := map[string]cimages.Image{}
	for _, img := range list {
		if d := img.Target.Digest.String(); strings.HasPrefix(d, ref) || strings.HasPrefix(d, "sha256:"+ref) {
			found[d] = better(found[d], img)
		}
	}
	switch len(found) {
	case 0:
		return cimages.Image{}, fmt.Errorf("image %s: %w", ref, fault.ErrNotFound)
	case 1:
		for _, img := range found {
			return img, nil
		}
	}
	return cimages.Image{}, fmt.Errorf("%w: %s begins the digests of %d images", fault.ErrInvalid, ref, len(found))
}

// better prefers a name that people gave.
func better(a, b cimages.Image) cimages.Image {
	if a.Name == "" || strings.HasPrefix(a.Name, pinPrefix) {
		return b
	}
	return a
}

// byDigest finds an image by what a sandbox or a checkpoint has pinned.
func (b *Backend) byDigest(ctx context.Context, digest string) (img cimages.Image, err error) {
	list, err := b.client.ImageService().List(ctx, fmt.Sprintf("target.digest==%q", digest))
	if err != nil {
		return img, plain(err)
	}
	for _, i := range list {
		img = better(img, i)
	}
	if img.Name == "" {
		return img, &fault.Error{Err: fmt.Errorf("image %s: %w", digest, fault.ErrNotFound),
			Hint: "Import or pull the same image again; the containerd namespace is " + b.namespace + "."}
	}
	return img, nil
}

// makeBuiltin makes the built-in image, if that is the one that is missing.
func (m Images) makeBuiltin(ctx context.Context, ref string, missing error) (cimages.Image, error) {
	if shortName(ref) != "busybox" {
		return cimages.Image{}, missing
	}
	made, err := m.builtin(ctx)
	if err != nil {
		return cimages.Image{}, err
	}
	return m.b.byDigest(ctx, made)
}

// elsewhere names another namespace that has an image.
func (m Images) elsewhere(ctx context.Context, name string) string {
	list, err := m.b.client.NamespaceService().List(ctx)
	if err != nil {
		return ""
	}
	for _, ns := range list {
		if ns == m.b.namespace {
			continue
		}
		if _, err := m.b.client.ImageService().Get(in(ctx, ns), name); err == nil {
			return ns
		}
	}
	return ""
}

// ResolveDigest finds the image that a sandbox or a checkpoint has pinned.
func (m Images) ResolveDigest(ctx context.Context, digest string) (image.Image, error) {
	ctx = in(ctx, m.b.namespace)
	img, err := m.b.byDigest(ctx, digest)
	if err != nil {
		return image.Image{}, err
	}
	return m.describe(ctx, img)
}

// describe reads what an image says about itself.
func (m Images) describe(ctx context.Context, img cimages.Image) (image.Image, error) {
	i := containerd.NewImage(m.b.client.Client, img)
	spec, err := i.Spec(ctx)
	if err != nil {
		return image.Image{}, fmt.Errorf("image %s: %w",
			cmp.Or(shortName(img.Name), img.Target.Digest.String()), plain(err))
	}
	out := image.Image{
		Name: shortName(img.Name), Digest: img.Target.Digest.String(), Created: img.CreatedAt,
		Builtin: img.Labels[builtinLabel] != "",
		Config: image.Config{
			Entrypoint: spec.Config.Entrypoint, Cmd: spec.Config.Cmd, Env: spec.Config.Env, User: spec.Config.User,
			Workdir: spec.Config.WorkingDir, StopSignal: spec.Config.StopSignal, Labels: spec.Config.Labels,
			Volumes:      slices.Sorted(maps.Keys(spec.Config.Volumes)),
			ExposedPorts: slices.Sorted(maps.Keys(spec.Config.ExposedPorts)),
		},
	}
	out.Platform = strings.TrimSuffix(spec.OS+"/"+spec.Architecture+"/"+spec.Variant, "/")
	for _, d := range spec.RootFS.DiffIDs {
		out.Layers = append(out.Layers, d.String())
	}
	if repo, err := reference.ParseDockerRef(img.Name); err == nil && out.Name != "" && !out.Builtin {
		out.RepoDigests = []string{repo.Name() + "@" + out.Digest}
	}
	out.Bytes = m.size(ctx, i, spec)
	return out, nil
}

// size returns the size of an image unpacked or, before it is, packed.
func (m Images) size(ctx context.Context, i containerd.Image, spec ocispec.Image) (n int64) {
	for k := range spec.RootFS.DiffIDs {
		use, err := m.b.snapshots().Usage(ctx, identity.ChainID(spec.RootFS.DiffIDs[:k+1]).String())
		if err != nil {
			n, _ = i.Size(ctx)
			return n
		}
		n += use.Size
	}
	return n
}

// List returns all images by name; those that lost their name come last.
func (m Images) List(ctx context.Context) ([]image.Image, error) {
	ctx = in(ctx, m.b.namespace)
	all, err := m.b.client.ImageService().List(ctx)
	if err != nil {
		return nil, plain(err)
	}
	named := map[string]bool{}
	for _, img := range all {
		if shortName(img.Name) != "" {
			named[img.Target.Digest.String()] = true
		}
	}
	var list []image.Image
	for _, img := range all {
		if shortName(img.Name) == "" && named[img.Target.Digest.String()] {
			continue
		}
		out, err := m.describe(ctx, img)
		if errors.Is(err, fault.ErrNotFound) {
			// It is for another platform, or incomplete.
			out = image.Image{Name: shortName(img.Name), Digest: img.Target.Digest.String(), Created: img.CreatedAt}
		} else if err != nil {
			return nil, err
		}
		list = append(list, out)
	}
	slices.SortFunc(list, func(a, b image.Image) int {
		if (a.Name == "") != (b.Name == "") {
			return strings.Compare(b.Name, a.Name)
		}
		return strings.Compare(a.Name, b.Name)
	})
	return list, nil
}

// Remove removes a name or, when ref is a digest or a prefix of one, the only name that the
// image has. An image that no name and no sandbox needs any more is deleted.
func (m Images) Remove(ctx context.Context, ref string, inUse func(digest string) bool) error {
	ctx = in(ctx, m.b.namespace)
	svc := m.b.client.ImageService()
	img, err := m.find(ctx, ref)
	if err != nil {
		return err
	}
	digest := img.Target.Digest.String()
	all, err := svc.List(ctx)
	if err != nil {
		return plain(err)
	}
	var names []string
	for _, i := range all {
		if n := shortName(i.Name); n != "" && i.Target.Digest.String() == digest {
			names = append(names, i.Name)
		}
	}
	if full, _ := fullName(ref); img.Name != full && img.Name != ref && len(names) > 1 {
		return &fault.Error{
			Err: fmt.Errorf("%w: it has the names %q", fault.ErrInvalid, names), Hint: "Remove each of its names.",
		}
	}
	used := func(d string) bool { return inUse != nil && inUse(d) }
	if len(names) == 0 && used(digest) {
		return fmt.Errorf("%w: image %s is in use", fault.ErrState, digest)
	}
	if used(digest) {
		if err := m.b.pin(ctx, img.Target); err != nil {
			return err
		}
	}
	var errs []error
	remove := func(name string, how ...cimages.DeleteOpt) {
		if err := plain(svc.Delete(ctx, name, how...)); err != nil && !errors.Is(err, fault.ErrNotFound) {
			errs = append(errs, err)
		}
	}
	for _, i := range all {
		if i.Name != img.Name && strings.HasPrefix(i.Name, pinPrefix) && !used(i.Target.Digest.String()) &&
			(i.Target.Digest.String() != digest || len(names) <= 1) {
			remove(i.Name)
		}
	}
	// Last, and waited for: the garbage goes with it.
	remove(img.Name, cimages.SynchronousDelete())
	return errors.Join(errs...)
}

// pin keeps an image for as long as a sandbox or a checkpoint names its digest.
func (b *Backend) pin(ctx context.Context, target ocispec.Descriptor) error {
	_, err := b.client.ImageService().Create(ctx, cimages.Image{
		Name: pinPrefix + target.Digest.String(), Target: target, Labels: map[string]string{pinLabel: "true"},
	})
	if err = plain(err); errors.Is(err, fault.ErrExists) {
		return nil
	}
	return err
}

// chain makes sure that an image is unpacked and pinned, and returns the name of
// its last committed snapshot, and its own. The context carries namespace and
// lease.
func (b *Backend) chain(ctx context.Context, digest string) (parent, name string, err error) {
	img, err := b.byDigest(ctx, digest)
	if err != nil {
		return "", "", err
	}
	if err := b.pin(ctx, img.Target); err != nil {
		return "", "", err
	}
	i := containerd.NewImage(b.client.Client, img)
	diffs, err := i.RootFS(ctx)
	if err != nil {
		return "", "", plain(err)
	}
	parent = identity.ChainID(diffs).String()
	if _, err := b.snapshots().Stat(ctx, parent); err == nil {
		return parent, img.Name, nil
	}
	if err := i.Unpack(ctx, b.snapshotter); err != nil {
		return "", "", fmt.Errorf("unpack %s: %w", cmp.Or(shortName(img.Name), digest), plain(err))
	}
	return parent, img.Name, nil
}

// leased runs fn with a lease, so that what it makes is not collected before
// something refers to it.
func (b *Backend) leased(ctx context.Context, fn func(context.Context) error) error {
	ctx, done, err := b.client.WithLease(in(ctx, b.namespace), leases.WithRandomID(), leases.WithExpiration(time.Hour))
	if err != nil {
		return plain(err)
	}
	return errors.Join(fn(ctx), plain(done(context.WithoutCancel(ctx))))
}
