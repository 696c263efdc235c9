package engine

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net/url"
	"os"
	"slices"
	"strings"
	"sync"

	v1 "github.com/google/go-containerregistry/pkg/v1"

	"github.com/agentbox/agentbox/images/image"
	"github.com/agentbox/agentbox/images/reference"
	"github.com/agentbox/agentbox/images/source"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/store"
)

// localImages works on the images of the backend of new sandboxes.
type localImages struct {
	*core
}

// ImportImage makes an image from a tarball or a directory.
func (v imageVerbs) ImportImage(ctx context.Context, name, source string) (runtime.Image, error) {
	return verb(ctx, v.e, &runtime.Op{Verb: "image import", Ref: name, From: source},
		func(ctx context.Context) (runtime.Image, error) {
			to, err := v.e.imageStore()
			if err != nil {
				return runtime.Image{}, err
			}
			img, err := to.Import(ctx, name, source)
			return imageView(img), err
		})
}

// ImportImageFrom makes an image from a tar stream.
func (v imageVerbs) ImportImageFrom(ctx context.Context, name string, r io.Reader) (runtime.Image, error) {
	return verb(ctx, v.e, on("image import", name), func(ctx context.Context) (runtime.Image, error) {
		to, err := v.e.imageStore()
		if err != nil {
			return runtime.Image{}, err
		}
		img, err := to.ImportFrom(ctx, name, r)
		return imageView(img), err
	})
}

// Images lists all images.
func (v imageVerbs) Images(ctx context.Context) ([]runtime.Image, error) {
	return verb(ctx, v.e, reads(on("image ls", "")), func(ctx context.Context) ([]runtime.Image, error) {
		return v.e.images.listImages(ctx)
	})
}

func (im *localImages) listImages(ctx context.Context) ([]runtime.Image, error) {
	from, err := im.imageStore()
	if err != nil {
		return nil, err
	}
	list, err := from.List(ctx)
	if err != nil {
		return nil, err
	}
	out := make([]runtime.Image, len(list))
	for i, img := range list {
		out[i] = imageView(img)
	}
	return out, nil
}

func imageView(img image.Image) runtime.Image {
	return runtime.Image{
		Name: img.Name, Digest: img.Digest, Created: img.Created, Bytes: img.Bytes, Builtin: img.Builtin,
		Platform: img.Platform, RepoDigests: img.RepoDigests, Layers: len(img.Layers), Size: img.Size,
		Damaged: img.Damaged,
	}
}

// PullImage fetches an image, or finds it here.
func (v imageVerbs) PullImage(ctx context.Context, ref string, opts image.PullOptions) (runtime.Image, error) {
	return verb(ctx, v.e, on("image pull", ref), func(ctx context.Context) (runtime.Image, error) {
		from, err := v.e.imageStore()
		if err != nil {
			return runtime.Image{}, err
		}
		img, err := from.Pull(ctx, ref, opts)
		return imageView(img), err
	})
}

// unreachable turns the network error for an image that is not here into ErrNotFound.
func unreachable(ref string, err error) error {
	var network *url.Error
	if !errors.As(err, &network) || errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
		return err
	}
	return hint(fmt.Errorf("image %s: %w here, and its registry cannot be reached: %w", ref, runtime.ErrNotFound, err),
		"'agentbox image ls' lists the images that are here.")
}

// PushImage writes an image to another place.
func (v imageVerbs) PushImage(ctx context.Context, ref, to string, opts image.SourceOptions) (runtime.PushedImage, error) {
	return verb(ctx, v.e, &runtime.Op{Verb: "image push", Ref: ref, To: to},
		func(ctx context.Context) (runtime.PushedImage, error) {
			return v.e.images.pushImage(ctx, ref, to, opts)
		})
}

func (im *localImages) pushImage(
	ctx context.Context, ref, to string, opts image.SourceOptions,
) (out runtime.PushedImage, err error) {
	from, err := im.imageStore()
	if err != nil {
		return out, err
	}
	img, err := from.Resolve(ctx, ref)
	if err != nil {
		return out, err
	}
	if to == "" {
		to = "docker://" + strings.TrimPrefix(ref, "docker://")
	}
	dest, err := chosenDestination(to, opts)
	if err != nil {
		return out, err
	}
	if dest.here {
		return out, hint(fmt.Errorf("%w: %s names no place but this one", runtime.ErrInvalid, to),
			"Write docker://"+to+" for a registry, or give the image one more name with: agentbox image tag "+ref+" "+
				to)
	}
	v1, err := from.V1(ctx, img.Digest)
	if err != nil {
		return out, err
	}
	made, digest, err := im.put(ctx, from, dest, v1, opts)
	out.Reference, out.Digest = made.Name, digest
	return out, err
}

// destination is where an image is written.
type destination struct {
	name string // as the user gave it
	ref  reference.Reference
	here bool // among the images that are here
}

// destination parses where an image is written: a name alone means this host.
func chosenDestination(to string, opts image.SourceOptions) (destination, error) {
	cfg := opts.Config
	if cfg == nil {
		read, err := source.LoadConfig("")
		if err != nil {
			return destination{}, err
		}
		cfg = &read
	}
	ref, err := reference.Parse(to, cfg.Default)
	if err != nil {
		return destination{}, err
	}
	rest, url := strings.CutPrefix(to, "docker://")
	switch {
	case ref.Transport == reference.Dir || ref.Transport == reference.Bootstrap:
		return destination{}, fmt.Errorf("%w: images are not written to %s", runtime.ErrUnsupported, ref)
	case ref.Transport == reference.Docker && ref.Digest != "":
		return destination{}, fmt.Errorf("%w: %s names an image by its digest, which is not known yet",
			runtime.ErrInvalid, to)
	case url && cfg.Default == "" && strings.HasPrefix(ref.Name, "docker.io/") &&
		!strings.HasPrefix(rest, "docker.io/"):
		// An image of a sandbox may hold secrets.
		return destination{}, hint(fmt.Errorf("%w: %s names no registry", runtime.ErrInvalid, rest),
			"Name it: docker://REGISTRY/"+rest+"; Docker Hub is docker.io.")
	}
	return destination{name: to, ref: ref, here: ref.Transport == reference.Docker && !url}, nil
}

// put writes an image to its destination, and returns its name there and the digest of its
// manifest, if it has one.
func (im *localImages) put(
	ctx context.Context, here runtime.Images, to destination, img v1.Image, opts image.SourceOptions,
) (made image.Image, manifest string, err error) {
	if to.here {
		made, err = here.Add(ctx, to.name, img)
		return made, "", err
	}
	scratch, err := im.store.Scratch()
	if err != nil {
		return made, "", err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(scratch)) }()
	opts.Scratch = scratch
	manifest, err = source.Write(ctx, to.ref, img, opts)
	return image.Image{Name: to.ref.Familiar()}, manifest, err
}

// TagImage gives an image one more name.
func (v imageVerbs) TagImage(ctx context.Context, ref, name string) error {
	return v.e.verb(ctx, &runtime.Op{Verb: "image tag", Ref: ref, To: name}, func(ctx context.Context) error {
		from, err := v.e.imageStore()
		if err == nil {
			err = from.Tag(ctx, ref, name)
		}
		return err
	})
}

// InspectImage returns the details of an image.
func (v imageVerbs) InspectImage(ctx context.Context, ref string) (runtime.ImageDetails, error) {
	return verb(ctx, v.e, reads(on("image inspect", ref)), func(ctx context.Context) (runtime.ImageDetails, error) {
		return v.e.images.inspectImage(ctx, ref)
	})
}

func (im *localImages) inspectImage(ctx context.Context, ref string) (out runtime.ImageDetails, err error) {
	from, err := im.imageStore()
	if err != nil {
		return out, err
	}
	got, err := from.Inspect(ctx, ref)
	if err != nil {
		return out, err
	}
	users, err := im.imageUsers(ctx)
	if err != nil {
		return out, err
	}
	out = runtime.ImageDetails{
		Image: imageView(got.Image), Names: got.Names, Source: got.Source, ManifestDigest: got.ManifestDigest,
		ManifestType: got.ManifestType,
		Config:       got.Config, LayerList: got.LayerList, History: got.History, Manifest: got.Manifest,
		RawConfig: got.RawConfig,
		UsedBy:    append([]string{}, users[got.Digest]...),
	}
	out.Layers = len(got.LayerList)
	return out, nil
}

// VerifyImage reads an image's files again.
func (v imageVerbs) VerifyImage(ctx context.Context, ref string) (runtime.Image, error) {
	return verb(ctx, v.e, on("image verify", ref), func(ctx context.Context) (_ runtime.Image, err error) {
		from, err := v.e.imageStore()
		if err != nil {
			return runtime.Image{}, err
		}
		img, err := from.Resolve(ctx, ref)
		if err != nil {
			return runtime.Image{}, err
		}
		return imageView(img), from.Verify(ctx, img.Digest)
	})
}

// PruneImages removes unused images.
func (v imageVerbs) PruneImages(ctx context.Context, all bool) (runtime.PrunedImages, error) {
	return verb(ctx, v.e, on("image prune", ""), func(ctx context.Context) (runtime.PrunedImages, error) {
		return v.e.images.pruneImages(ctx, all)
	})
}

func (im *localImages) pruneImages(ctx context.Context, all bool) (out runtime.PrunedImages, err error) {
	out.Removed = []runtime.Image{}
	from, err := im.imageStore()
	if err != nil {
		return out, err
	}
	needed, failed := im.needs(ctx)
	gone, freed, err := from.Prune(ctx, all, needed)
	err = cmp.Or(failed(), err)
	for _, img := range gone {
		out.Removed = append(out.Removed, imageView(img))
	}
	out.Freed = freed
	return out, err
}

// imageOf finds the image that a sandbox or a checkpoint refers to, and fetches it from its
// source if it is not here.
func imageOf(
	ctx context.Context, from runtime.Images, digest string, s runtime.Spec, opts image.PullOptions,
) (image.Image, error) {
	img, err := from.ResolveDigest(ctx, digest)
	if !errors.Is(err, runtime.ErrNotFound) {
		return img, err
	}
	gone := fmt.Errorf("image %s (%s): %w", s.Image, digest, runtime.ErrNotFound)
	remedy := howToGet(s)
	if s.ImageSource == "" || opts.Policy == image.PullNever {
		return img, hint(gone, remedy)
	}
	opts.Policy = image.PullMissing
	img, err = from.Pull(ctx, s.ImageSource, opts)
	if err != nil {
		return img, hint(fmt.Errorf("%w, and cannot be pulled: %w", gone, err), remedy)
	}
	if img.Digest != digest {
		return img, fmt.Errorf("%w, and what is %s now is another image (%s)", gone, s.ImageSource, img.Digest)
	}
	return img, nil
}

// howToGet says how to get the image of a sandbox.
func howToGet(s runtime.Spec) string {
	if s.ImageSource == "" {
		return "It did not come from a registry: bring it here from where it is (agentbox image push there, agentbox image pull here), or import the same files again."
	}
	return "Pull it with: agentbox image pull " + s.ImageSource
}

// arrived adds a warning to a checkpoint from elsewhere whose image is not here. The warning
// is not stored with the checkpoint: the image may still arrive.
func (im *localImages) arrived(ctx context.Context, row store.Checkpoint) runtime.Checkpoint {
	out := checkpointView(row)
	s, err := specOf(row.SandboxID, row.Spec)
	if err != nil {
		return out
	}
	host, err := im.host(cmp.Or(s.Backend, im.first))
	if err != nil || host.Images == nil {
		return out
	}
	if _, err := host.Images.ResolveDigest(ctx, row.ImageDigest); errors.Is(err, runtime.ErrNotFound) {
		out.Warnings = append(slices.Clone(out.Warnings),
			fmt.Sprintf("its image %s (%s) is not here. %s", s.Image, row.ImageDigest, howToGet(s)))
	}
	return out
}

// RemoveImage removes an image's name, and its files when no other name has
// them. The last name of one that a sandbox or a checkpoint needs is refused.
func (v imageVerbs) RemoveImage(ctx context.Context, name string) error {
	return v.e.verb(ctx, on("image rm", name), func(ctx context.Context) error { return v.e.images.removeImage(ctx, name) })
}

func (im *localImages) removeImage(ctx context.Context, name string) (err error) {
	from, err := im.imageStore()
	if err != nil {
		return err
	}
	img, err := from.Resolve(ctx, name)
	if err != nil && (img.Digest == "" || !errors.Is(err, runtime.ErrCorrupt) && !errors.Is(err, runtime.ErrNotFound)) {
		return err
	}
	users, err := im.imageUsers(ctx)
	if err != nil {
		return err
	}
	if need := users[img.Digest]; len(need) > 0 {
		if last, err := lastName(ctx, from, img.Digest); err != nil || last {
			return cmp.Or(err, hint(fmt.Errorf("%w: %s", runtime.ErrState, needed(need)),
				"Remove what needs it first."))
		}
	}
	needed, failed := im.needs(ctx)
	err = from.Remove(ctx, name, needed)
	return cmp.Or(failed(), err)
}

// needs returns a function that reports whether an image is needed. The image store calls
// it while no other process can resolve an image: sandboxes may have been created since the
// verb began. If the users cannot be determined, failed says why and all images are needed.
func (im *localImages) needs(ctx context.Context) (needed func(digest string) bool, failed func() error) {
	var err error
	users := sync.OnceValue(func() (all map[string][]string) {
		all, err = im.imageUsers(ctx)
		return all
	})
	return func(digest string) bool { return len(users()[digest]) > 0 || err != nil }, func() error { return err }
}

// imageUsers lists, by image digest, the sandboxes and checkpoints that need the image.
func (im *localImages) imageUsers(ctx context.Context) (map[string][]string, error) {
	users, err := im.mountedImages()
	if err != nil {
		return nil, err
	}
	boxes, err := im.store.Sandboxes(ctx)
	if err != nil {
		return nil, err
	}
	for _, sb := range boxes {
		users[sb.ImageDigest] = append(users[sb.ImageDigest], "sandbox "+sb.Name)
	}
	cks, err := im.store.Checkpoints(ctx, store.Filter{})
	if err != nil {
		return nil, err
	}
	for _, ck := range cks {
		users[ck.ImageDigest] = append(users[ck.ImageDigest], "checkpoint "+short(ck.ID)+" of "+ck.SandboxName)
	}
	return users, nil
}

// needed says which sandboxes and checkpoints need an image.
func needed(users []string) string {
	const most = 10
	more := ""
	if len(users) > most {
		more = fmt.Sprintf(" and %d more", len(users)-most)
		users = users[:most]
	}
	verb := " need it"
	if len(users) == 1 {
		verb = " needs it"
	}
	return strings.Join(users, ", ") + more + verb
}

// lastName reports whether an image has at most one name.
func lastName(ctx context.Context, from runtime.Images, digest string) (bool, error) {
	list, err := from.List(ctx)
	if err != nil {
		return false, err
	}
	n := 0
	for _, img := range list {
		if img.Digest == digest {
			n++
		}
	}
	return n < 2, nil
}
