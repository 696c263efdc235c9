package docker

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"time"

	cerrdefs "github.com/containerd/errdefs"
	dockerimage "github.com/docker/docker/api/types/image"
	"github.com/docker/docker/pkg/jsonmessage"

	"github.com/agentbox/agentbox/images/image"
	"github.com/agentbox/agentbox/images/reference"
	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/runtime"
)

// Images are the daemon's.
type Images struct{ b *Backend }

var _ runtime.Images = Images{}

// Images returns the daemon's images.
func (b *Backend) Images() Images { return Images{b} }

// Resolve finds an image that the daemon has.
func (i Images) Resolve(ctx context.Context, ref string) (image.Image, error) {
	got, err := i.b.api.ImageInspect(ctx, strings.TrimPrefix(ref, "docker://"))
	if cerrdefs.IsNotFound(err) {
		return image.Image{}, hint(
			fmt.Errorf("image %s: %w: the Docker daemon does not have it", ref, fault.ErrNotFound),
			"Pull it: agentbox --backend docker image pull "+ref)
	}
	if err != nil {
		return image.Image{}, i.b.explain(ctx, err)
	}
	return describeImage(ref, got), nil
}

// ResolveDigest finds an image by its id.
func (i Images) ResolveDigest(ctx context.Context, digest string) (image.Image, error) {
	got, err := i.b.api.ImageInspect(ctx, digest)
	if cerrdefs.IsNotFound(err) {
		return image.Image{}, hint(
			fmt.Errorf("image %s: %w: the Docker daemon does not have it any more", digest, fault.ErrNotFound),
			"Pull or load the image again.")
	}
	if err != nil {
		return image.Image{}, i.b.explain(ctx, err)
	}
	name := ""
	if len(got.RepoTags) > 0 {
		name = got.RepoTags[0]
	}
	return describeImage(name, got), nil
}

// follow reads the daemon's progress messages, and its error.
func (i Images) follow(ctx context.Context, r io.Reader, progress func(image.Progress)) error {
	for dec := json.NewDecoder(r); ; {
		var m jsonmessage.JSONMessage
		if err := dec.Decode(&m); errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return err
		}
		if m.Error != nil {
			return m.Error
		}
		i.b.log.DebugContext(ctx, "docker: "+m.Status, "id", m.ID)
		if progress != nil && m.ID != "" {
			progress(layerProgress(m))
		}
	}
}

func describeImage(name string, got dockerimage.InspectResponse) image.Image {
	img := image.Image{
		Name: familiar(strings.TrimPrefix(name, "docker://")), Digest: got.ID, Bytes: got.Size,
		Config:   imageConfig(got),
		Platform: strings.TrimSuffix(got.Os+"/"+got.Architecture+"/"+got.Variant, "/"), Layers: got.RootFS.Layers,
	}
	for _, d := range got.RepoDigests {
		if ref, err := reference.Parse(d, ""); err == nil {
			img.RepoDigests = append(img.RepoDigests, ref.String())
		}
	}
	img.Created, _ = time.Parse(time.RFC3339Nano, got.Created)
	if !got.Metadata.LastTagTime.IsZero() {
		img.Created = got.Metadata.LastTagTime
	}
	return img
}

func familiar(name string) string { return strings.TrimSuffix(name, ":latest") }

func imageConfig(got dockerimage.InspectResponse) image.Config {
	if got.Config == nil {
		return image.Config{}
	}
	c := got.Config
	out := image.Config{
		Entrypoint: c.Entrypoint, Cmd: c.Cmd, Env: c.Env, User: c.User, Workdir: c.WorkingDir,
		StopSignal: c.StopSignal, Labels: c.Labels,
	}
	for v := range c.Volumes {
		out.Volumes = append(out.Volumes, v)
	}
	for p := range c.ExposedPorts {
		out.ExposedPorts = append(out.ExposedPorts, p)
	}
	if h := c.Healthcheck; h != nil {
		out.Healthcheck = &image.Healthcheck{
			Test: h.Test, Interval: h.Interval, Timeout: h.Timeout, StartPeriod: h.StartPeriod, Retries: h.Retries,
		}
	}
	return out
}

// List returns the images that have a name, one entry for each name, and those
// without one that are not the parents of others.
func (i Images) List(ctx context.Context) ([]image.Image, error) {
	list, err := i.b.api.ImageList(ctx, dockerimage.ListOptions{})
	if err != nil {
		return nil, i.b.explain(ctx, err)
	}
	var out []image.Image
	for _, got := range list {
		img := image.Image{Digest: got.ID, Bytes: got.Size, Created: time.Unix(got.Created, 0)}
		named := false
		for _, tag := range got.RepoTags {
			if tag != "<none>:<none>" {
				img.Name, named = familiar(tag), true
				out = append(out, img)
			}
		}
		if !named {
			out = append(out, img)
		}
	}
	return out, nil
}

// Import makes the image name of a tar archive, of files or as `docker save`
// writes it, or of a directory.
func (i Images) Import(ctx context.Context, name, source string) (image.Image, error) {
	st, err := os.Stat(source)
	if errors.Is(err, os.ErrNotExist) {
		return image.Image{}, fmt.Errorf("%w: %w", fault.ErrNotFound, err)
	}
	if err != nil {
		return image.Image{}, err
	}
	if st.IsDir() {
		return i.importDir(ctx, name, source)
	}
	f, err := os.Open(source)
	if err != nil {
		return image.Image{}, err
	}
	defer f.Close()
	return i.ImportFrom(ctx, name, f)
}

// importDir has tar read the directory: the daemon takes a stream.
func (i Images) importDir(ctx context.Context, name, dir string) (image.Image, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	cmd := exec.CommandContext(ctx, "tar", "--numeric-owner", "--xattrs", "--xattrs-include=*",
		"-C", dir, "-cf", "-", ".")
	out, err := cmd.StdoutPipe()
	if err != nil {
		return image.Image{}, err
	}
	var said strings.Builder
	cmd.Stderr = &said
	if err := cmd.Start(); err != nil {
		return image.Image{}, fmt.Errorf("%w: %w", fault.ErrUnsupported, err)
	}
	// The stream must not end as if it were whole when tar fails.
	img, err := i.ImportFrom(ctx, name, &faithful{out, cmd, &said})
	cancel()
	return img, err
}

// faithful is a program's output that ends well only if the program does.
type faithful struct {
	io.Reader
	cmd  *exec.Cmd
	said *strings.Builder
}

func (f *faithful) Read(p []byte) (int, error) {
	n, err := f.Reader.Read(p)
	if errors.Is(err, io.EOF) {
		if e := f.cmd.Wait(); e != nil {
			return n, fmt.Errorf("tar: %w: %s", e, strings.TrimSpace(f.said.String()))
		}
	}
	return n, err
}

// plainChanges are what an image of plain files says of its processes, in the
// words of a Dockerfile.
var plainChanges = []string{`ENV PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin`, `CMD ["/bin/sh"]`}

// ImportFrom makes the image name of a tar stream of files.
func (i Images) ImportFrom(ctx context.Context, name string, r io.Reader) (image.Image, error) {
	head := make([]byte, 512)
	n, err := io.ReadFull(r, head)
	if err != nil && !errors.Is(err, io.ErrUnexpectedEOF) && !errors.Is(err, io.EOF) {
		return image.Image{}, err
	}
	all := io.MultiReader(strings.NewReader(string(head[:n])), r)
	if saved(head[:n]) {
		return i.load(ctx, name, all)
	}
	out, err := i.b.api.ImageImport(ctx, dockerimage.ImportSource{Source: all, SourceName: "-"}, name,
		dockerimage.ImportOptions{Changes: plainChanges})
	if err != nil {
		return image.Image{}, i.b.explain(ctx, err)
	}
	defer out.Close()
	if err := i.follow(ctx, out, nil); err != nil {
		return image.Image{}, fmt.Errorf("import %s: %w: %w", name, fault.ErrInvalid, err)
	}
	got, err := i.b.api.ImageInspect(ctx, name)
	if err != nil {
		return image.Image{}, i.b.explain(ctx, err)
	}
	return describeImage(name, got), nil
}

// saved reports whether a tar archive begins as those of `docker save` do: with
// the directory or file of a layer, a blob, or one of its indexes.
func saved(head []byte) bool {
	if len(head) < 512 {
		return false
	}
	first, _, _ := strings.Cut(string(head[:100]), "\x00")
	first = strings.TrimPrefix(first, "./")
	switch first {
	case "manifest.json", "repositories", "oci-layout", "index.json", "blobs/":
		return true
	}
	dir, _, ok := strings.Cut(first, "/")
	dir = strings.TrimSuffix(dir, ".json")
	return (ok || strings.HasSuffix(first, ".json")) && len(dir) == 64 && strings.Trim(dir, "0123456789abcdef") == ""
}

// load takes an archive of `docker save` and gives the image in it the name.
func (i Images) load(ctx context.Context, name string, r io.Reader) (image.Image, error) {
	loaded, err := i.loaded(ctx, r)
	if err != nil {
		return image.Image{}, fmt.Errorf("load %s: %w", name, err)
	}
	if err := i.b.api.ImageTag(ctx, loaded, name); err != nil {
		return image.Image{}, i.b.explain(ctx, err)
	}
	return i.Resolve(ctx, name)
}

// loaded has the daemon load an archive of `docker save`, and returns how it
// calls the first image in it: what an image's id is depends on its storage.
func (i Images) loaded(ctx context.Context, r io.Reader) (ref string, err error) {
	resp, err := i.b.api.ImageLoad(ctx, r)
	if err != nil {
		return "", i.b.explain(ctx, err)
	}
	defer resp.Body.Close()
	for dec := json.NewDecoder(resp.Body); ; {
		var m jsonmessage.JSONMessage
		if err := dec.Decode(&m); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			return "", err
		}
		if m.Error != nil {
			return "", fmt.Errorf("%w: %w", fault.ErrInvalid, m.Error)
		}
		// It has the image by then, and nothing can be run of it.
		if strings.HasPrefix(m.Stream, "Error unpacking image") {
			return "", fmt.Errorf("%w: %s", fault.ErrInvalid, strings.TrimSpace(m.Stream))
		}
		for _, said := range []string{"Loaded image: ", "Loaded image ID: "} {
			if is, ok := strings.CutPrefix(m.Stream, said); ok && ref == "" {
				ref = strings.TrimSpace(is)
			}
		}
	}
	if ref == "" {
		return "", fmt.Errorf("%w: there is no image in it", fault.ErrInvalid)
	}
	return ref, nil
}

// Remove takes a name from an image, and the image with its last name.
func (i Images) Remove(ctx context.Context, ref string, inUse func(digest string) bool) error {
	got, err := i.b.api.ImageInspect(ctx, ref)
	if cerrdefs.IsNotFound(err) {
		return fmt.Errorf("image %s: %w", ref, fault.ErrNotFound)
	}
	if err != nil {
		return i.b.explain(ctx, err)
	}
	if len(got.RepoTags) < 2 && inUse != nil && inUse(got.ID) {
		return fmt.Errorf("image %s: %w: a sandbox or a checkpoint needs it", ref, fault.ErrBusy)
	}
	_, err = i.b.api.ImageRemove(ctx, ref, dockerimage.RemoveOptions{PruneChildren: true})
	if cerrdefs.IsConflict(err) {
		return fmt.Errorf("image %s: %w: %s", ref, fault.ErrBusy,
			strings.TrimPrefix(err.Error(), "Error response from daemon: "))
	}
	return i.b.explain(ctx, err)
}
