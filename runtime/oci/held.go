package oci

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/internal/box"
	"github.com/agentbox/agentbox/runtime/internal/kernel"
	"github.com/agentbox/agentbox/runtime/internal/record"
)

var _ runtime.Holder = (*Backend)(nil)

// Held lists what containers hold that only a start needs. Mounts, cgroups and processes
// carry our paths, or the tag of our root, so only ours are counted.
func (b *Backend) Held(ctx context.Context) (map[string][]string, error) {
	held := map[string][]string{}
	add := func(id, what string) {
		if record.IsID(id) && !slices.Contains(held[id], what) && !b.box.OwnedByOther(id) {
			held[id] = append(held[id], what)
		}
	}
	sandboxes := filepath.Join(b.box.Root, "sandboxes")
	mounts, err := kernel.MountsBelow(sandboxes, b.box.Run)
	if err != nil {
		return nil, err
	}
	for _, path := range mounts {
		for _, dir := range []string{sandboxes, b.box.Run, b.box.State} {
			if rest, ok := strings.CutPrefix(path, dir+"/"); ok {
				id, _, _ := strings.Cut(rest, "/")
				add(id, "mounts")
			}
		}
	}
	for _, path := range b.box.Cgroups.Children(box.CgroupRoot) {
		if id, ok := b.box.OfCgroup(path); ok {
			add(id, "cgroups")
		}
	}
	if err := entries(b.box.State, func(name string) { add(name, "runtime state") }); err != nil {
		return nil, err
	}
	err = entries(b.box.Run, func(id string) {
		if !record.IsID(id) {
			return
		}
		_ = entries(b.box.RunDir(id), func(name string) {
			if strings.HasPrefix(name, "bundle.") || name == "exec" {
				add(id, "bundles")
			}
		})
	})
	if err != nil {
		return nil, err
	}
	err = entries(sandboxes, func(id string) {
		if starts, err := b.box.Starts(id); record.IsID(id) && err == nil && len(starts) > 0 {
			if _, err := os.Lstat(b.box.StartDir(id, starts[0], "exit.json")); errors.Is(err, fs.ErrNotExist) {
				add(id, "its end")
			}
		}
	})
	if err != nil {
		return nil, err
	}
	plugged, err := b.box.Net.Plugged(ctx)
	if err != nil {
		return nil, err
	}
	for _, id := range plugged {
		add(id, "links")
	}
	return held, b.monitors(add)
}

// monitors finds what works for containers by the bundles in its arguments.
func (b *Backend) monitors(add func(id, what string)) error {
	pids, err := kernel.AllPids()
	if err != nil {
		return err
	}
	for _, pid := range pids {
		for _, arg := range kernel.Arguments(pid) {
			rest, ok := strings.CutPrefix(arg, b.box.Run+"/")
			if !ok {
				continue
			}
			id, rest, _ := strings.Cut(rest, "/")
			if record.IsID(id) && (strings.HasPrefix(rest, "bundle.") ||
				strings.HasPrefix(rest, "exec")) && isEngine(pid) {
				add(id, runtime.HeldMonitor)
			}
		}
	}
	return nil
}

// Busy reports whether a container's lock is taken.
func (b *Backend) Busy(id string) bool { return b.box.Busy(id) }

// Tend repairs what all containers share.
func (b *Backend) Tend(ctx context.Context) (did []string, err error) {
	dead, err := b.box.Net.Revive(ctx)
	if dead && err == nil {
		did = append(did, "started the proxy of filtered sandboxes, which was dead")
	}
	more, err2 := b.box.Net.Tend(ctx)
	return append(did, more...), errors.Join(err, err2)
}

// entries hands the names in a directory to each; one that is not there has none.
func entries(dir string, each func(name string)) error {
	f, err := os.Open(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	defer f.Close()
	names, err := f.Readdirnames(-1)
	for _, name := range names {
		each(name)
	}
	return err
}
