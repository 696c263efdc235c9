package main

import (
	"cmp"
	"context"
	"os"
	"slices"
	"strings"

	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/doctor"
	"github.com/agentbox/agentbox/runtime/engine"
	"github.com/agentbox/agentbox/runtime/local"
)

// dirs returns where lasting and transient state are kept.
func (g globals) dirs() (root, run string) { return local.Dirs(g.Root) }

// checkBackend refuses a --backend that does not exist.
func (g globals) checkBackend() error {
	if names := local.Backends(); !slices.Contains(names, g.Backend) {
		return usageErrorf("unknown backend %q: choose %s", g.Backend, strings.Join(names, ", "))
	}
	return nil
}

// place is where a backend keeps what it has.
type place struct {
	root, run string
	self      string // this program
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

// adopting are those that make no sandboxes: they take on what is there, by
// BACKEND://REF, whatever --backend says.
var adopting = map[string]bool{"podman": true, "volume": true}

func backendNames() string {
	return strings.Join(slices.Sorted(maps.Keys(backends)), ", ")
}

func openOCI(p place) (engine.Host, error) {
	img, err := images.Open(p.root)
	if err != nil {
		return engine.Host{}, err
	}
	// An error in that file matters only for registries.
	if cfg, err := source.LoadConfig(""); err != nil {
		slog.Warn("registries.toml not readable; image names without a registry mean Docker Hub", "err", err)
	} else {
		img.Default = cfg.Default
	}
	backend, err := oci.Open(oci.Options{Root: p.root, Run: p.run, Self: p.self})
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
	if !errors.Is(err, runtime.ErrNotFound) {
		return im, err
	}
	if _, e := s.Resolve(ctx, "busybox"); e != nil {
		return im, err
	}
	return s.Store.ResolveDigest(ctx, digest)
}

func openContainerd(p place) (engine.Host, error) {
	backend, err := containerd.Open(containerd.Options{Root: p.root, Run: p.run, Self: p.self})
	if err != nil {
		return engine.Host{}, err
	}
	return engine.Host{Backend: backend, Images: backend.Images()}, nil
}

func openDocker(p place) (engine.Host, error) {
	backend, err := docker.Open(docker.Options{Root: p.root, Run: p.run, Self: p.self})
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

// openService makes the embedded engine. Only this file
// names concrete backends.
func openService(ctx context.Context, g globals) (_ runtime.Service, err error) {
	root, run := g.dirs()
	st, err := store.Open(ctx, root)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, st.Close())
		}
	}()
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	return local.Open(ctx, local.Options{
		Root: g.Root, Backend: g.Backend, Program: self, By: g.by, NoRecovery: g.reaping,
		Observers: []engine.Observer{g.traces.Observer(cmp.Or(g.by, "command"))},
	})
}

// examine checks the host for `agentbox doctor`.
func examine(ctx context.Context, g globals) doctor.Report {
	root, _ := g.dirs()
	return doctor.Examine(ctx, root)
}
