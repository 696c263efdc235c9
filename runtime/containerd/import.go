package containerd

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	goruntime "runtime"
	"strconv"
	"strings"

	"github.com/containerd/containerd"
	"github.com/containerd/containerd/content"
	cimages "github.com/containerd/containerd/images"
	"github.com/opencontainers/go-digest"
	"github.com/opencontainers/image-spec/specs-go"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/images"
	"github.com/agentbox/agentbox/images/image"
	"github.com/agentbox/agentbox/internal/cptar/tree"
	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/internal/guard"
)

// builtinLabel is on the image that agentbox made itself.
const builtinLabel = "agentbox.builtin"

// Import makes an image of one layer from a tarball or a directory, as
// images.Store does, whose checks apply. An existing name moves to it.
func (m Images) Import(ctx context.Context, name, source string) (image.Image, error) {
	return m.convert(ctx, func(s *images.Store) (image.Image, error) { return s.Import(ctx, name, source) })
}

// ImportFrom makes an image of a tar stream.
func (m Images) ImportFrom(ctx context.Context, name string, r io.Reader) (image.Image, error) {
	return m.convert(ctx, func(s *images.Store) (image.Image, error) { return s.ImportFrom(ctx, name, r) })
}

// builtin makes the built-in busybox and returns its digest.
func (m Images) builtin(ctx context.Context) (string, error) {
	img, err := m.convert(ctx, func(s *images.Store) (image.Image, error) { return s.Resolve(ctx, "busybox") })
	return img.Digest, err
}

// convert makes an image in a temporary store of agentbox's, which checks what others wrote, and
// hands it over to containerd.
func (m Images) convert(
	ctx context.Context, make func(*images.Store) (image.Image, error),
) (out image.Image, err error) {
	if err := plain(m.b.client.alive()); err != nil {
		return out, err
	}
	m.sweep()
	tmp, err := os.MkdirTemp(m.b.box.Root, fmt.Sprintf("import-%d-", os.Getpid()))
	if err != nil {
		return out, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(tmp)) }()
	store, err := images.Open(tmp)
	if err != nil {
		return out, err
	}
	made, err := make(store)
	if err != nil {
		return out, err
	}
	if len(made.Lower) != 1 {
		return out, fmt.Errorf("%w: an import of %d layers", fault.ErrUnsupported, len(made.Lower))
	}
	var img cimages.Image
	err = m.b.leased(ctx, func(ctx context.Context) (err error) {
		img, err = m.put(ctx, made)
		return err
	})
	if err != nil {
		return out, err
	}
	return m.describe(in(ctx, m.b.namespace), img)
}

// sweep deletes what killed imports left.
func (m Images) sweep() {
	entries, err := os.ReadDir(m.b.box.Root)
	if err != nil {
		return
	}
	for _, e := range entries {
		rest, ok := strings.CutPrefix(e.Name(), "import-")
		owner, _, _ := strings.Cut(rest, "-")
		pid, err := strconv.Atoi(owner)
		if ok && err == nil && errors.Is(unix.Kill(pid, 0), unix.ESRCH) {
			_ = os.RemoveAll(filepath.Join(m.b.box.Root, e.Name()))
		}
	}
}

// put writes an image's blobs and its name. Equal files give equal digests.
func (m Images) put(ctx context.Context, made image.Image) (img cimages.Image, err error) {
	name, err := fullName(made.Name)
	if err != nil {
		return img, err
	}
	layer, err := m.layer(ctx, made.Lower[0])
	if err != nil {
		return img, err
	}
	c := made.Config
	spec := ocispec.Image{
		Platform: ocispec.Platform{Architecture: goruntime.GOARCH, OS: "linux"},
		RootFS:   ocispec.RootFS{Type: "layers", DiffIDs: []digest.Digest{layer.Digest}},
		Config: ocispec.ImageConfig{
			User: c.User, Env: c.Env, Entrypoint: c.Entrypoint, Cmd: c.Cmd, WorkingDir: c.Workdir, Labels: c.Labels,
			StopSignal: c.StopSignal,
		},
	}
	config, err := m.document(ctx, ocispec.MediaTypeImageConfig, spec, nil)
	if err != nil {
		return img, err
	}
	manifest := ocispec.Manifest{
		Versioned: specs.Versioned{SchemaVersion: 2}, MediaType: ocispec.MediaTypeImageManifest, Config: config,
		Layers: []ocispec.Descriptor{layer},
	}
	target, err := m.document(ctx, ocispec.MediaTypeImageManifest, manifest, map[string]string{
		"containerd.io/gc.ref.content.config": config.Digest.String(),
		"containerd.io/gc.ref.content.l.0":    layer.Digest.String(),
	})
	if err != nil {
		return img, err
	}
	img = cimages.Image{Name: name, Target: target}
	if made.Builtin {
		img.Labels = map[string]string{builtinLabel: "true"}
	}
	return m.publish(ctx, img)
}

// publish gives an image its name and unpacks it.
func (m Images) publish(ctx context.Context, img cimages.Image) (cimages.Image, error) {
	svc := m.b.client.ImageService()
	// A sandbox that has pinned what the name meant before still finds it.
	if old, err := svc.Get(ctx, img.Name); err == nil && old.Target.Digest != img.Target.Digest {
		if err := m.b.pin(ctx, old.Target); err != nil {
			return img, err
		}
	}
	made, err := svc.Create(ctx, img)
	if errors.Is(plain(err), fault.ErrExists) {
		made, err = svc.Update(ctx, img, "target", "labels")
	}
	if err != nil {
		return img, plain(err)
	}
	if err := containerd.NewImage(m.b.client.Client, made).Unpack(ctx, m.b.snapshotter); err != nil {
		return img, fmt.Errorf("unpack %s: %w", shortName(img.Name), plain(err))
	}
	return made, nil
}

// layer writes a directory as a layer.
func (m Images) layer(ctx context.Context, dir string) (ocispec.Descriptor, error) {
	top, err := os.Open(dir)
	if err != nil {
		return ocispec.Descriptor{}, err
	}
	defer top.Close()
	r, w := io.Pipe()
	guard.Go(func() {
		_ = w.CloseWithError(guard.Do(func() error {
			_, err := tree.Pack(ctx, top, ".", w, tree.PackOptions{Name: ".", Xattr: func(name string) bool {
				return !tree.HostXattr(name)
			}})
			return err
		}))
	})
	defer r.Close()
	return m.blob(ctx, "agentbox-layer-"+filepath.Base(filepath.Dir(filepath.Dir(filepath.Dir(dir)))),
		ocispec.MediaTypeImageLayer, r, nil)
}

func (m Images) document(
	ctx context.Context, kind string, v any, labels map[string]string,
) (ocispec.Descriptor, error) {
	data, err := json.Marshal(v)
	if err != nil {
		return ocispec.Descriptor{}, err
	}
	return m.blob(ctx, "agentbox-"+digest.FromBytes(data).Encoded(), kind, bytes.NewReader(data), labels)
}

// blob writes to the content store what may be there already.
func (m Images) blob(
	ctx context.Context, ref, kind string, r io.Reader, labels map[string]string,
) (ocispec.Descriptor, error) {
	w, err := content.OpenWriter(ctx, m.b.client.ContentStore(), content.WithRef(ref))
	if err != nil {
		return ocispec.Descriptor{}, plain(err)
	}
	defer w.Close()
	// Drop what an interrupted import left under the name.
	if err := w.Truncate(0); err != nil {
		return ocispec.Descriptor{}, plain(err)
	}
	sum := digest.Canonical.Digester()
	n, err := io.Copy(w, io.TeeReader(r, sum.Hash()))
	if err != nil {
		return ocispec.Descriptor{}, plain(err)
	}
	err = plain(w.Commit(ctx, n, sum.Digest(), content.WithLabels(labels)))
	if err != nil && !errors.Is(err, fault.ErrExists) {
		return ocispec.Descriptor{}, err
	}
	return ocispec.Descriptor{MediaType: kind, Digest: sum.Digest(), Size: n}, nil
}
