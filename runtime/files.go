package runtime

import (
	"context"
	"fmt"
	"io"

	"github.com/agentbox/agentbox/images"
	"github.com/agentbox/agentbox/internal/copy"
	"github.com/agentbox/agentbox/runtime/store"
)

// onRoot runs fn on a sandbox's root filesystem.
func (e *Engine) onRoot(ctx context.Context, ref string, fn func(root string) error) error {
	sb, err := e.locate(ctx, ref)
	if err != nil {
		return fail("cp", ref, err)
	}
	return fail("cp", ref, sb.host.Mount(ctx, sb.ID, fn))
}

// CopyFrom writes a path of the sandbox as a tar stream.
func (e *Engine) CopyFrom(ctx context.Context, ref, path string, w io.Writer) error {
	return e.onRoot(ctx, ref, func(root string) error { return copy.From(ctx, root, path, w) })
}

// CopyTo extracts a tar stream into a directory of the sandbox.
func (e *Engine) CopyTo(ctx context.Context, ref, path string, r io.Reader) error {
	return e.onRoot(ctx, ref, func(root string) error { return copy.To(ctx, root, path, r) })
}

// Stat tells what a path in the sandbox is.
func (e *Engine) Stat(ctx context.Context, ref, path string) (out PathStat, err error) {
	err = e.onRoot(ctx, ref, func(root string) error {
		st, err := copy.StatPath(root, path)
		out = PathStat(st)
		return err
	})
	return out, err
}

// ImportImage makes an image of a tarball or a directory.
func (e *Engine) ImportImage(ctx context.Context, name, source string) (Image, error) {
	to, err := e.images()
	if err != nil {
		return Image{}, fail("image import", name, err)
	}
	img, err := to.Import(ctx, name, source)
	return imageView(img), fail("image import", name, err)
}

// ImportImageFrom makes an image of a tar stream.
func (e *Engine) ImportImageFrom(ctx context.Context, name string, r io.Reader) (Image, error) {
	to, err := e.images()
	if err != nil {
		return Image{}, fail("image import", name, err)
	}
	img, err := to.ImportFrom(ctx, name, r)
	return imageView(img), fail("image import", name, err)
}

// Images lists all images.
func (e *Engine) Images(ctx context.Context) ([]Image, error) {
	from, err := e.images()
	if err != nil {
		return nil, fail("image ls", "", err)
	}
	list, err := from.List(ctx)
	if err != nil {
		return nil, fail("image ls", "", err)
	}
	out := make([]Image, len(list))
	for i, img := range list {
		out[i] = imageView(img)
	}
	return out, nil
}

func imageView(img images.Image) Image {
	return Image{Name: img.Name, Digest: img.Digest, Created: img.Created, Bytes: img.Bytes, Builtin: img.Builtin}
}

// RemoveImage removes an image's name, and its files when no other name has
// them. One that a sandbox or a checkpoint needs is refused.
func (e *Engine) RemoveImage(ctx context.Context, name string) (err error) {
	defer func() { err = fail("image rm", name, err) }()
	users := map[string]string{}
	boxes, err := e.store.Sandboxes(ctx)
	if err != nil {
		return err
	}
	for _, sb := range boxes {
		users[sb.ImageDigest] = "sandbox " + sb.Name
	}
	cks, err := e.store.Checkpoints(ctx, store.Filter{})
	if err != nil {
		return err
	}
	for _, ck := range cks {
		if users[ck.ImageDigest] == "" {
			users[ck.ImageDigest] = "checkpoint " + short(ck.ID) + " of " + ck.SandboxName
		}
	}
	from, err := e.images()
	if err != nil {
		return err
	}
	img, err := from.Resolve(ctx, name)
	if err != nil {
		return err
	}
	if user := users[img.Digest]; user != "" {
		return hint(fmt.Errorf("%w: %s needs it", ErrState, user), "Remove what needs it first.")
	}
	return from.Remove(ctx, name, func(digest string) bool { return users[digest] != "" })
}
