package docker

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/docker/docker/api/types/container"
	"github.com/docker/docker/api/types/filters"
	"github.com/docker/docker/api/types/mount"

	"github.com/agentbox/agentbox/runtime"
)

// volumes are those of a container whose data lies in a directory of the
// daemon's and nowhere else, the anonymous ones included: of the driver local,
// which mounts something of its own when it is given options.
func (b *Backend) volumes(ctx context.Context, c box) ([]runtime.Volume, error) {
	var list []runtime.Volume
	for _, m := range c.Mounts {
		at := func(v runtime.Volume) bool { return v.Name == m.Name }
		if m.Type != mount.TypeVolume || m.Driver != "local" || m.Source == "" || slices.ContainsFunc(list, at) {
			continue
		}
		v, err := b.api.VolumeInspect(ctx, m.Name)
		if err != nil {
			return nil, fmt.Errorf("volume %s: %w", m.Name, b.explain(ctx, err))
		}
		if len(v.Options) > 0 {
			continue
		}
		list = append(list, runtime.Volume{Name: m.Name, Path: m.Source, Target: m.Destination})
	}
	return list, b.sharers(ctx, c, list)
}

// sharers notes in each volume who has it besides the container, be it that it binds the
// directory of its data. A paused one has it, too: a restore puts another directory in
// the place of the one that it would go on with.
func (b *Backend) sharers(ctx context.Context, c box, of []runtime.Volume) error {
	if len(of) == 0 {
		return nil
	}
	all, err := b.api.ContainerList(ctx, container.ListOptions{Filters: filters.NewArgs(
		filters.Arg("status", "running"), filters.Arg("status", "paused"), filters.Arg("status", "restarting"))})
	if err != nil {
		return fmt.Errorf("who has the volumes: %w", b.explain(ctx, err))
	}
	for i := range of {
		for _, u := range all {
			has := func(m container.MountPoint) bool {
				return m.Type == mount.TypeVolume && m.Name == of[i].Name || of[i].Has(m.Source)
			}
			if u.ID == c.ID || !slices.ContainsFunc(u.Mounts, has) {
				continue
			}
			name := u.ID[:min(12, len(u.ID))]
			if len(u.Names) > 0 {
				name = strings.TrimPrefix(u.Names[0], "/")
			}
			of[i].Users = append(of[i].Users, name)
		}
	}
	return nil
}
