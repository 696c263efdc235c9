package podman

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"

	"github.com/agentbox/agentbox/runtime"
)

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
		part := slices.ContainsFunc(c.Mounts, func(m mount) bool { return m.Type == "volume" && m.Name == v.Name && m.SubPath != "" })
		if at >= 0 && v.Driver == "local" && v.Mountpoint != "" && len(v.Options) == 0 && !part {
			list = append(list, runtime.Volume{Name: v.Name, Path: v.Mountpoint, Target: c.Mounts[at].Destination})
		}
	}
	users, err := b.users(ctx, c, list...)
	if err != nil || len(users) == 0 {
		return list, err
	}
	for i, v := range list {
		if list[i].Users, err = b.users(ctx, c, v); err != nil {
			return nil, err
		}
	}
	return list, nil
}

// users are the other containers with processes that have one of the volumes, by name
// or by the path of its data. A paused one is one, too: a restore puts another
// directory in the place of the one that it would go on with.
func (b *Backend) users(ctx context.Context, c container, of ...runtime.Volume) (names []string, err error) {
	if len(of) == 0 {
		return nil, nil
	}
	args := []string{"ps", "--all", "--format", "json"}
	for _, v := range of {
		args = append(args, "--filter", "volume="+v.Name, "--filter", "volume="+v.Path)
	}
	out, err := b.ask(ctx, args...)
	if err != nil {
		return nil, err
	}
	var all []struct {
		ID    string `json:"Id"`
		Names []string
		State string
	}
	if err := json.Unmarshal(out, &all); err != nil {
		return nil, fmt.Errorf("podman ps: %w", err)
	}
	for _, u := range all {
		switch u.State {
		case "created", "configured", "exited", "stopped":
			continue
		}
		if u.ID == c.ID {
			continue
		}
		name := u.ID[:min(12, len(u.ID))]
		if len(u.Names) > 0 {
			name = u.Names[0]
		}
		names = append(names, name)
	}
	return names, nil
}
