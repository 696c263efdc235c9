package docker

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	cerrdefs "github.com/containerd/errdefs"
	dockerimage "github.com/docker/docker/api/types/image"
	"github.com/docker/docker/api/types/registry"
	"github.com/docker/docker/pkg/jsonmessage"
	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/name"

	"github.com/agentbox/agentbox/images/image"
	"github.com/agentbox/agentbox/images/reference"
	"github.com/agentbox/agentbox/internal/fault"
)

// Pull finds an image, and has the daemon pull it as the policy says: from where
// the daemon thinks that it lies, with our credentials.
func (i Images) Pull(ctx context.Context, ref string, opts image.PullOptions) (image.Image, error) {
	parsed, err := reference.Parse(ref, "")
	if err == nil && parsed.Transport != reference.Docker {
		return image.Image{}, hint(fmt.Errorf("%w: the Docker daemon does not pull from %s",
			fault.ErrUnsupported, parsed),
			fmt.Sprintf("Bring it there by way of agentbox's own images: agentbox image pull %[1]s, then agentbox image push %[1]s docker-daemon:NAME", ref))
	}
	if opts.Policy != image.PullAlways {
		img, err := i.Resolve(ctx, ref)
		if opts.Policy == image.PullNever || !errors.Is(err, fault.ErrNotFound) {
			return img, err
		}
	}
	if err != nil {
		return image.Image{}, err
	}
	if opts.Source.Insecure {
		return image.Image{}, hint(
			fmt.Errorf("%w: which registries may be insecure is the Docker daemon's to say", fault.ErrUnsupported),
			"Name them as insecure-registries in its daemon.json.")
	}
	if opts.Source.Timeout > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, opts.Source.Timeout)
		defer cancel()
	}
	if err := i.pull(ctx, ref, parsed, opts); err != nil {
		return image.Image{}, err
	}
	return i.Resolve(ctx, ref)
}

func (i Images) pull(ctx context.Context, ref string, parsed reference.Reference, opts image.PullOptions) error {
	failed := func(err error) error {
		return hint(fmt.Errorf("image %s: %w: the Docker daemon does not have it and cannot pull it: %w", ref,
			fault.ErrNotFound, err),
			fmt.Sprintf("Check the name, load it (docker load), or make it of a root filesystem: agentbox --backend docker image import %s ROOTFS.tar", ref))
	}
	i.b.log.Info("image pull started", "image", ref)
	auth, err := credentials(parsed.Name)
	if err != nil {
		return err
	}
	// With a tag or a digest, else the daemon pulls every tag there is.
	r, err := i.b.api.ImagePull(ctx, parsed.String(), dockerimage.PullOptions{
		RegistryAuth: auth, Platform: opts.Source.Platform,
	})
	if err != nil {
		if e := i.b.explain(ctx, err); ctx.Err() != nil || errors.Is(e, fault.ErrUnsupported) {
			return e
		}
		return failed(errors.New(strings.TrimPrefix(err.Error(), "Error response from daemon: ")))
	}
	defer r.Close()
	if err := i.follow(ctx, r, opts.Progress); err != nil {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		return failed(err)
	}
	return nil
}

// credentials are those of `docker login` for a repository's registry, as the
// daemon wants them.
func credentials(repository string) (string, error) {
	repo, err := name.NewRepository(repository)
	if err != nil {
		return "", fmt.Errorf("%w: %w", fault.ErrInvalid, err)
	}
	found, err := authn.DefaultKeychain.Resolve(repo)
	if err != nil || found == authn.Anonymous {
		return "", err
	}
	cfg, err := found.Authorization()
	if err != nil {
		return "", err
	}
	return registry.EncodeAuthConfig(registry.AuthConfig{
		Username: cfg.Username, Password: cfg.Password, IdentityToken: cfg.IdentityToken,
		RegistryToken: cfg.RegistryToken, ServerAddress: repo.RegistryStr(),
	})
}

// layerProgress converts the daemon's progress of one layer.
func layerProgress(m jsonmessage.JSONMessage) image.Progress {
	p := image.Progress{Layer: m.ID, Stage: image.StageWaiting}
	if m.Progress != nil {
		p.Done, p.Total = m.Progress.Current, m.Progress.Total
	}
	switch m.Status {
	case "Downloading", "Extracting", "Verifying Checksum", "Download complete":
		p.Stage = image.StagePulling
	case "Pull complete":
		p.Stage = image.StageDone
	case "Already exists":
		p.Stage = image.StagePresent
	}
	return p
}

// Tag gives an image one more name.
func (i Images) Tag(ctx context.Context, ref, name string) error {
	err := i.b.api.ImageTag(ctx, ref, name)
	if cerrdefs.IsNotFound(err) {
		return fmt.Errorf("image %s: %w", ref, fault.ErrNotFound)
	}
	if cerrdefs.IsInvalidArgument(err) {
		return fmt.Errorf("%w: %s", fault.ErrInvalid, strings.TrimPrefix(err.Error(), "Error response from daemon: "))
	}
	return i.b.explain(ctx, err)
}

// Inspect describes an image as the daemon knows it.
func (i Images) Inspect(ctx context.Context, ref string) (image.Details, error) {
	img, err := i.Resolve(ctx, ref)
	if err != nil {
		return image.Details{}, err
	}
	got, err := i.b.api.ImageInspect(ctx, img.Digest)
	if err != nil {
		return image.Details{}, i.b.explain(ctx, err)
	}
	out := image.Details{Image: img}
	for _, tag := range got.RepoTags {
		out.Names = append(out.Names, familiar(tag))
	}
	for _, d := range got.RootFS.Layers {
		out.LayerList = append(out.LayerList, image.Layer{DiffID: d})
	}
	steps, err := i.b.api.ImageHistory(ctx, img.Digest)
	if err != nil {
		return image.Details{}, i.b.explain(ctx, err)
	}
	for _, s := range slices.Backward(steps) {
		out.History = append(out.History, image.History{
			Created: time.Unix(s.Created, 0).UTC(), CreatedBy: s.CreatedBy, Comment: s.Comment,
			Empty: s.Size == 0, Bytes: s.Size,
		})
	}
	return out, nil
}

// Prune removes images as `docker image prune` does, but none that is in use by
// checkpoints, of which the daemon knows nothing.
func (i Images) Prune(
	ctx context.Context, all bool, inUse func(digest string) bool,
) (removed []image.Image, freed int64, err error) {
	list, err := i.b.api.ImageList(ctx, dockerimage.ListOptions{})
	if err != nil {
		return nil, 0, i.b.explain(ctx, err)
	}
	for _, got := range list {
		tags := slices.DeleteFunc(slices.Clone(got.RepoTags), func(tag string) bool { return tag == "<none>:<none>" })
		if len(tags) > 0 && !all || inUse != nil && inUse(got.ID) {
			continue
		}
		if len(tags) < 2 {
			tags = []string{got.ID}
		}
		for _, tag := range tags {
			_, err = i.b.api.ImageRemove(ctx, tag, dockerimage.RemoveOptions{PruneChildren: true})
			if err != nil {
				break
			}
		}
		if cerrdefs.IsConflict(err) || cerrdefs.IsNotFound(err) {
			continue // a container or another image needs it, or it is gone
		}
		if err != nil {
			return removed, freed, i.b.explain(ctx, err)
		}
		img := image.Image{Digest: got.ID, Bytes: got.Size, Created: time.Unix(got.Created, 0)}
		if len(got.RepoTags) > 0 {
			img.Name = familiar(got.RepoTags[0])
		}
		removed, freed = append(removed, img), freed+got.Size
	}
	return removed, freed, nil
}

// Verify is not to be had: the layers are the daemon's.
func (i Images) Verify(context.Context, string) error {
	return fmt.Errorf("%w: Docker keeps its layers to itself, and has no check of them", fault.ErrUnsupported)
}
