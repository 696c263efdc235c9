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
		// A paused one is a user, too: a restore puts another directory in the
		// place of the one that it would go on with.
		users, err := b.api.ContainerList(ctx, container.ListOptions{Filters: filters.NewArgs(filters.Arg("volume", m.Name),
			filters.Arg("status", "running"), filters.Arg("status", "paused"), filters.Arg("status", "restarting"))})
		if err != nil {
			return nil, fmt.Errorf("volume %s: %w", m.Name, b.explain(ctx, err))
		}
		out := runtime.Volume{Name: m.Name, Path: m.Source, Target: m.Destination}
		for _, u := range users {
			name := u.ID[:min(12, len(u.ID))]
			if len(u.Names) > 0 {
				name = strings.TrimPrefix(u.Names[0], "/")
			}
			if u.ID != c.ID {
				out.Users = append(out.Users, name)
			}
		}
		list = append(list, out)
	}
	return list, nil
}
