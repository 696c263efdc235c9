package docker

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"path"
	"slices"
	"strconv"
	"strings"

	"github.com/docker/docker/api/types/container"
	"github.com/docker/docker/api/types/mount"
	"github.com/docker/go-connections/nat"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/runtime"
)

// Adopt describes a container by its name, its id or a prefix of that.
func (b *Backend) Adopt(ctx context.Context, ref string) (runtime.Spec, error) {
	if ref == "" || strings.ContainsAny(ref, "/?#%\\") {
		return runtime.Spec{}, fmt.Errorf("container %q: %w", ref, fault.ErrNotFound)
	}
	c, err := b.inspect(ctx, ref)
	if errors.Is(err, fault.ErrNotFound) {
		return runtime.Spec{}, hint(err, "List what the Docker daemon has with: docker ps -a")
	}
	if err != nil {
		return runtime.Spec{}, err
	}
	if c.own() {
		return specOfLabel(c)
	}
	if _, err := b.describe(ctx, c); err != nil {
		return runtime.Spec{}, err
	}
	return specOf(c), nil
}

// specOfLabel is the spec that Create was given.
func specOfLabel(c box) (s runtime.Spec, err error) {
	err = json.Unmarshal([]byte(c.Config.Labels[labelSpec]), &s)
	if err != nil || s.ID != c.Config.Labels[labelID] {
		return s, fmt.Errorf("container %s: %w: its label %s is no spec of a sandbox", c.ID,
			fault.ErrCorrupt, labelSpec)
	}
	s.Adopted = false
	return s, nil
}

// specOf describes a container that agentbox did not make.
func specOf(c box) runtime.Spec {
	if len(c.ID) < 32 {
		return runtime.Spec{}
	}
	s := runtime.Spec{
		ID: c.ID[:32], Name: strings.TrimPrefix(c.Name, "/"), Adopted: true, Backend: "docker",
		Image: c.Config.Image, ImageDigest: c.Image, Args: append([]string{c.Path}, c.Args...),
		Env: c.Config.Env, Workdir: path.Clean("/" + c.Config.WorkingDir), User: c.Config.User,
		Hostname: c.Config.Hostname,
		Terminal: c.Config.Tty, OpenStdin: c.Config.OpenStdin, ReadOnly: c.HostConfig.ReadonlyRootfs,
		Init: c.HostConfig.Init != nil && *c.HostConfig.Init, StopSignal: c.Config.StopSignal, Labels: c.Config.Labels,
		Resources: resources(c.HostConfig), Mounts: mounts(c),
	}
	switch mode := c.HostConfig.NetworkMode; {
	case mode.IsHost():
		s.Network.Mode = runtime.NetworkHost
	case mode.IsNone():
		s.Network.Mode = runtime.NetworkNone
	default:
		s.Network.Mode = runtime.NetworkBridge
		if mode.IsUserDefined() {
			s.Network.Group = string(mode)
		}
	}
	s.Network.Ports = ports(c)
	return s
}

func resources(h *container.HostConfig) runtime.Resources {
	r := runtime.Resources{Memory: h.Memory, CPUs: float64(h.NanoCPUs) / 1e9}
	if r.CPUs == 0 && h.CPUQuota > 0 {
		r.CPUs = float64(h.CPUQuota) / float64(cmp.Or(h.CPUPeriod, 100_000))
	}
	if h.PidsLimit != nil && *h.PidsLimit > 0 {
		r.Pids = *h.PidsLimit
	}
	return r
}

// mounts lists what is mounted over the root filesystem by its owner's wish.
func mounts(c box) (list []runtime.Mount) {
	for _, m := range c.Mounts {
		switch m.Type {
		case mount.TypeBind:
			list = append(list, runtime.Mount{Type: "bind", Source: m.Source, Target: m.Destination, ReadOnly: !m.RW})
		case mount.TypeTmpfs:
			list = append(list, runtime.Mount{Type: "tmpfs", Target: m.Destination, ReadOnly: !m.RW})
		default:
			list = append(list, runtime.Mount{Type: "volume", Source: m.Name, Target: m.Destination, ReadOnly: !m.RW})
		}
	}
	add := func(target, options string) {
		if !slices.ContainsFunc(list, func(m runtime.Mount) bool {
			return path.Clean(m.Target) == path.Clean(target)
		}) {
			list = append(list, runtime.Mount{Type: "tmpfs", Target: target, Options: options})
		}
	}
	for target, options := range c.HostConfig.Tmpfs {
		add(target, options)
	}
	for _, m := range c.HostConfig.Mounts {
		if m.Type == mount.TypeTmpfs {
			add(m.Target, "")
		}
	}
	slices.SortFunc(list, func(a, b runtime.Mount) int { return strings.Compare(a.Target, b.Target) })
	return list
}

func ports(c box) (list []runtime.Port) {
	add := func(all nat.PortMap) {
		for inside, outside := range all {
			for _, o := range outside {
				host, err := strconv.ParseUint(o.HostPort, 10, 16)
				if err != nil {
					continue // one that the daemon chooses at the start
				}
				p := runtime.Port{
					HostIP: o.HostIP, Host: uint16(host), Sandbox: uint16(inside.Int()), Protocol: inside.Proto(),
				}
				if p.HostIP == "0.0.0.0" || p.HostIP == "::" {
					p.HostIP = ""
				}
				if !slices.Contains(list, p) {
					list = append(list, p)
				}
			}
		}
	}
	add(c.HostConfig.PortBindings)
	if c.NetworkSettings != nil {
		add(c.NetworkSettings.Ports)
	}
	slices.SortFunc(list, func(a, b runtime.Port) int {
		return cmp.Or(cmp.Compare(a.Sandbox, b.Sandbox), cmp.Compare(a.Host, b.Host),
			strings.Compare(a.HostIP, b.HostIP), strings.Compare(a.Protocol, b.Protocol))
	})
	return list
}
