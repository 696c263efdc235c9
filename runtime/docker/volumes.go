package docker

import (
	"context"
	"fmt"
	"slices"
	"strings"

	cerrdefs "github.com/containerd/errdefs"
	"github.com/docker/docker/api/types/container"
	"github.com/docker/docker/api/types/filters"
	"github.com/docker/docker/api/types/mount"

	"github.com/agentbox/agentbox/runtime"
)

var _ runtime.VolumeSharer = (*Backend)(nil)

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
		if cerrdefs.IsNotFound(err) {
			continue // that is no word on the container
		}
		if err != nil {
			return nil, fmt.Errorf("volume %s: %w", m.Name, b.explain(ctx, err))
		}
		if len(v.Options) > 0 {
			continue
		}
		list = append(list, runtime.Volume{Name: m.Name, Path: m.Source, Target: m.Destination})
	}
	return list, nil
}

// VolumeUsers lists, for each volume, the other containers that use it.
func (b *Backend) VolumeUsers(ctx context.Context, id string, of []runtime.Volume) (map[string][]string, error) {
	c, err := b.find(ctx, id)
	if err != nil {
		return nil, err
	}
	all, err := b.api.ContainerList(ctx, container.ListOptions{Filters: filters.NewArgs(
		filters.Arg("status", "running"), filters.Arg("status", "paused"), filters.Arg("status", "restarting"))})
	if err != nil {
		return nil, b.explain(ctx, err)
	}
	users := map[string][]string{}
	for _, v := range of {
		for _, u := range all {
			has := func(m container.MountPoint) bool {
				return m.Type == mount.TypeVolume && m.Name == v.Name || v.ReachedBy(m.Source, m.RW)
			}
			if u.ID == c.ID || !slices.ContainsFunc(u.Mounts, has) {
				continue
			}
			name := u.ID[:min(12, len(u.ID))]
			if len(u.Names) > 0 {
				name = strings.TrimPrefix(u.Names[0], "/")
			}
			users[v.Name] = append(users[v.Name], name)
		}
	}
	return users, nil
}
