package local

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"

	"github.com/agentbox/agentbox/images"
	"github.com/agentbox/agentbox/images/image"
	"github.com/agentbox/agentbox/images/source"
	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/runtime/containerd"
	"github.com/agentbox/agentbox/runtime/docker"
	"github.com/agentbox/agentbox/runtime/engine"
	"github.com/agentbox/agentbox/runtime/oci"
	"github.com/agentbox/agentbox/runtime/podman"
	"github.com/agentbox/agentbox/runtime/volume"
)

// place is where a backend keeps its state, and the agentbox command that it calls.
type place struct {
	root, run, program string
	existing           bool // nothing lasting is made in a root
}

// backends are all there are, by the names that --backend and the scheme of
// BACKEND://REF take.
var backends = map[string]func(place) (engine.Host, error){
	"containerd": openContainerd,
	"docker":     openDocker,
	"oci":        openOCI,
	"podman":     openPodman,
	"volume":     openVolume,
}

// Backends returns the names of all backends.
func Backends() []string { return slices.Sorted(maps.Keys(backends)) }

// Adopts reports whether a backend makes no sandboxes: it only takes on what is there, by
// BACKEND://REF, with any backend of new sandboxes.
func Adopts(name string) bool { return name == "podman" || name == "volume" }

// openBackend opens a backend. A name of none is ErrInvalid.
func openBackend(name string, p place) (engine.Host, error) {
	open, ok := backends[name]
	if !ok {
		return engine.Host{}, fmt.Errorf("%w: unknown backend %q: choose %s", fault.ErrInvalid, name,
			strings.Join(Backends(), ", "))
	}
	return open(p)
}

func openOCI(p place) (engine.Host, error) {
	open := images.Open
	if p.existing {
		open = images.OpenExisting
	}
	img, err := open(p.root)
	if err != nil {
		return engine.Host{}, err
	}
	// An error in that file concerns only those who use a registry.
	if cfg, err := source.LoadConfig(""); err != nil {
		slog.Warn("registries.toml not readable; image names without a registry mean Docker Hub", "err", err)
	} else {
		img.Default = cfg.Default
	}
	backend, err := oci.Open(oci.Options{Root: p.root, Run: p.run, Self: p.program, Existing: p.existing})
	return engine.Host{Backend: backend, Images: withBuiltin{img}}, err
}

// withBuiltin lists the built-in image before it was ever used.
type withBuiltin struct{ *images.Store }

func (s withBuiltin) List(ctx context.Context) ([]image.Image, error) {
	_, _ = s.Resolve(ctx, "busybox") // a host without a static busybox has none
	return s.Store.List(ctx)
}

// ResolveDigest makes the built-in image if it may be the one that is wanted: a
// checkpoint from elsewhere can name it before it was ever used here.
func (s withBuiltin) ResolveDigest(ctx context.Context, digest string) (image.Image, error) {
	im, err := s.Store.ResolveDigest(ctx, digest)
	if !errors.Is(err, fault.ErrNotFound) {
		return im, err
	}
	if _, e := s.Resolve(ctx, "busybox"); e != nil {
		return im, err
	}
	return s.Store.ResolveDigest(ctx, digest)
}

func openContainerd(p place) (engine.Host, error) {
	backend, err := containerd.Open(containerd.Options{
		Root: p.root, Run: p.run, Self: p.program, Existing: p.existing,
	})
	if err != nil {
		return engine.Host{}, err
	}
	return engine.Host{Backend: backend, Images: backend.Images()}, nil
}

func openDocker(p place) (engine.Host, error) {
	backend, err := docker.Open(docker.Options{Root: p.root, Run: p.run, Self: p.program})
	if err != nil {
		return engine.Host{}, err
	}
	return engine.Host{Backend: backend, Images: backend.Images()}, nil
}

// openPodman only adopts: it makes no sandboxes and has no images.
func openPodman(p place) (engine.Host, error) {
	backend, err := podman.Open(podman.Options{Root: p.root})
	return engine.Host{Backend: backend}, err
}

// openVolume only adopts, too: the verbs of volumes make them.
func openVolume(p place) (engine.Host, error) {
	v, err := volume.Open(volume.Options{Root: p.root, Run: p.run})
	b := volume.Backend{Volumes: v}
	return engine.Host{Backend: b, Original: b}, err
}
