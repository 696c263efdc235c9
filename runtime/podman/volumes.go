package podman

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/runtime"
)

var _ runtime.VolumeSharer = (*Backend)(nil)

// volumes are those of a container whose data lies in a directory of Podman's and
// nowhere else, the anonymous ones included: of the driver local, which mounts
// something of its own, or sets a quota, when it is given options.
func (b *Backend) volumes(ctx context.Context, c container) (list []runtime.Volume, err error) {
	var names []string
	for _, m := range c.Mounts {
		if m.Type == "volume" && m.Driver == "local" && !slices.Contains(names, m.Name) {
			names = append(names, m.Name)
		}
	}
	if len(names) == 0 {
		return nil, nil
	}
	out, err := b.ask(ctx, append([]string{"volume", "inspect", "--"}, names...)...)
	if err != nil {
		return nil, err
	}
	var all []struct {
		Name, Driver, Mountpoint string
		Options                  map[string]string
	}
	if err := json.Unmarshal(out, &all); err != nil {
		return nil, fmt.Errorf("podman volume inspect: %w", err)
	}
	for _, v := range all {
		at := slices.IndexFunc(c.Mounts, func(m mount) bool { return m.Type == "volume" && m.Name == v.Name })
		// A part of a volume is not at the path that its data has.
		part := slices.ContainsFunc(c.Mounts, func(m mount) bool {
			return m.Type == "volume" && m.Name == v.Name && m.SubPath != ""
		})
		if at >= 0 && v.Driver == "local" && v.Mountpoint != "" && len(v.Options) == 0 && !part {
			list = append(list, runtime.Volume{Name: v.Name, Path: v.Mountpoint, Target: c.Mounts[at].Destination})
		}
	}
	return list, nil
}

// VolumeUsers lists, for each volume, the other containers that use it.
func (b *Backend) VolumeUsers(ctx context.Context, id string, of []runtime.Volume) (map[string][]string, error) {
	others, err := b.others(ctx, id)
	if err != nil {
		return nil, err
	}
	users := map[string][]string{}
	for _, v := range of {
		for _, o := range others {
			if slices.ContainsFunc(o.Mounts, func(m mount) bool {
				return m.Type == "volume" && m.Name == v.Name || v.ReachedBy(m.Source, m.RW)
			}) {
				users[v.Name] = append(users[v.Name], o.Name)
			}
		}
	}
	return users, nil
}

// others returns the containers with processes, the paused ones included, except the sandbox's
// own. `podman ps` reports only the targets of mounts in the container, and since Podman 5 its
// filter does not find a bound directory of the host.
func (b *Backend) others(ctx context.Context, id string) ([]container, error) {
	out, err := b.ask(ctx, "ps", "--all", "--format", "json")
	if err != nil {
		return nil, err
	}
	var all []struct {
		ID    string `json:"Id"`
		State string
	}
	if err := json.Unmarshal(out, &all); err != nil {
		return nil, fmt.Errorf("podman ps: %w", err)
	}
	var ids []string
	for _, u := range all {
		switch u.State {
		case "created", "configured", "exited", "stopped":
			continue
		}
		if !strings.HasPrefix(u.ID, id) {
			ids = append(ids, u.ID)
		}
	}
	if len(ids) == 0 {
		return nil, nil
	}
	list, err := b.inspected(ctx, ids...)
	if !errors.Is(err, fault.ErrNotFound) {
		return list, err
	}
	for _, other := range ids { // one of them was removed meanwhile
		one, err := b.inspected(ctx, other)
		if err != nil && !errors.Is(err, fault.ErrNotFound) {
			return nil, err
		}
		list = append(list, one...)
	}
	return list, nil
}
