package engine_test

import (
	"context"
	"errors"
	"path/filepath"
	"testing"

	"github.com/agentbox/agentbox/images"
	"github.com/agentbox/agentbox/images/image"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/backendtest"
	"github.com/agentbox/agentbox/runtime/engine"
	"github.com/agentbox/agentbox/runtime/store"
)

// between calls what happens between two steps of a verb.
type between struct {
	*images.Store
	pulled, removing func()
}

func (b *between) Pull(ctx context.Context, ref string, opts image.PullOptions) (image.Image, error) {
	img, err := b.Store.Pull(ctx, ref, opts)
	b.pulled()
	return img, err
}

func (b *between) Remove(ctx context.Context, ref string, inUse func(string) bool) error {
	b.removing()
	return b.Store.Remove(ctx, ref, inUse)
}

func (b *between) Prune(ctx context.Context, all bool, inUse func(string) bool) ([]image.Image, int64, error) {
	b.removing()
	return b.Store.Prune(ctx, all, inUse)
}

// TestImageRemovedMeanwhile: a sandbox that is created while its image is removed keeps the
// image, or is not created.
func TestImageRemovedMeanwhile(t *testing.T) {
	nothing := func() {}
	b := &between{pulled: nothing, removing: nothing}
	r := newRig(t, nil)
	var err error
	if b.Store, err = images.Open(r.root); err != nil {
		t.Fatal(err)
	}
	st, err := store.Open(ctx, r.root)
	if err != nil {
		t.Fatal(err)
	}
	backend := backendtest.NewMemory(filepath.Join(r.root, "memory"))
	e := engine.New(engine.Options{Run: filepath.Join(r.root, "run"), Store: st, Backend: "memory",
		Open: func(string) (engine.Host, error) { return engine.Host{Backend: backend, Images: b}, nil }})
	t.Cleanup(func() { e.Close() })
	create := func(name string) (runtime.Sandbox, error) {
		return e.Create(ctx, runtime.CreateRequest{Spec: runtime.Spec{
			Name: name, Image: "base", Args: []string{"true"}, Network: runtime.Network{Mode: runtime.NetworkNone},
		}})
	}
	for what, remove := range map[string]func() error{
		"rm":    func() error { return e.RemoveImage(ctx, "base") },
		"prune": func() error { _, err := e.PruneImages(ctx, true); return err },
	} {
		var made runtime.Sandbox
		b.removing = func() {
			if made, err = create(what); err != nil {
				t.Fatal(err)
			}
		}
		if err := remove(); err != nil {
			t.Errorf("%s: %v", what, err)
		}
		b.removing = nothing
		img, err := b.ResolveDigest(ctx, made.ImageDigest)
		if err != nil {
			t.Errorf("%s: the sandbox has lost its image: %v", what, err)
		}
		if img.Name == "" {
			if err := b.Tag(ctx, img.Digest, "base"); err != nil {
				t.Fatal(err)
			}
		}
		if err := e.Remove(ctx, what, runtime.RemoveOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	b.pulled = func() {
		if err := b.Store.Remove(ctx, "base", nil); err != nil {
			t.Fatal(err)
		}
	}
	if sb, err := create("late"); !errors.Is(err, runtime.ErrNotFound) {
		t.Errorf("%+v, %v", sb, err)
	}
	if list, err := e.Sandboxes(ctx); err != nil || len(list) > 0 {
		t.Errorf("%+v, %v", list, err)
	}
}
