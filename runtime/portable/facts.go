package portable

import (
	"encoding/json"
	"fmt"
	"path"
	"slices"
	"strconv"
	"strings"

	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/agentbox/agentbox/overlay"
	"github.com/agentbox/agentbox/policy"
)

const (
	maxConfig  = 16 << 20 // bytes of config.dump, of spec.dump and of network.status
	maxDeleted = 64 << 20 // bytes of deleted.files
)

// standardTargets are mounts that every engine's containers have.
var standardTargets = []string{
	"/", "/proc", "/dev", "/dev/pts", "/dev/shm", "/dev/mqueue", "/sys", "/sys/fs/cgroup",
	"/etc/hosts", "/etc/hostname", "/etc/resolv.conf", "/run/.containerenv", "/run/secrets",
}

// parseConfig reads config.dump.
func parseConfig(data []byte) (*container, error) {
	c := &container{}
	if err := decode(configName, data, c); err != nil {
		return nil, err
	}
	if c.ID == "" || len(c.ID) > 255 || !isPrintable(c.ID, "/") || len(c.Name) > 255 || !isPrintable(c.Name, "/") {
		return nil, corrupt("%s: id %.64q, name %.64q", configName, c.ID, c.Name)
	}
	if len(c.NamedVolumes) > maxVolumes {
		return nil, corrupt("%s: %d volumes", configName, len(c.NamedVolumes))
	}
	for i, v := range c.NamedVolumes {
		if !plain(v.Name) || !isPrintable(v.Name, "/") || !path.IsAbs(v.Dest) ||
			slices.ContainsFunc(c.NamedVolumes[:i], func(o namedVolume) bool { return o.Name == v.Name }) {
			return nil, corrupt("%s: volume %.64q at %.64q", configName, v.Name, v.Dest)
		}
	}
	return c, nil
}

// parseSpec reads spec.dump.
func parseSpec(data []byte) (*specs.Spec, error) {
	s := &specs.Spec{}
	if err := decode(specName, data, s); err != nil {
		return nil, err
	}
	if s.Process == nil || len(s.Process.Args) == 0 {
		return nil, corrupt("%s: no command", specName)
	}
	if !path.IsAbs(s.Process.Cwd) {
		return nil, corrupt("%s: working directory %.64q", specName, s.Process.Cwd)
	}
	for _, text := range slices.Concat(s.Process.Args, s.Process.Env, []string{s.Process.Cwd, s.Hostname}) {
		if strings.IndexByte(text, 0) >= 0 {
			return nil, corrupt("%s: a NUL in %.64q", specName, text)
		}
	}
	if len(s.Hostname) > 64 || !isPrintable(s.Hostname, "/") {
		return nil, corrupt("%s: hostname %.64q", specName, s.Hostname)
	}
	for _, m := range s.Mounts {
		if !path.IsAbs(m.Destination) || strings.IndexByte(m.Destination+m.Source, 0) >= 0 {
			return nil, corrupt("%s: mount at %.64q", specName, m.Destination)
		}
	}
	return s, nil
}

func decode(name string, data []byte, v any) error {
	if len(data) > maxConfig {
		return corrupt("%s is longer than %d bytes", name, maxConfig)
	}
	if err := json.Unmarshal(data, v); err != nil {
		return corrupt("%s: %v", name, err)
	}
	return nil
}

// isPrintable reports whether s has no control characters and none of those in not.
func isPrintable(s, not string) bool {
	return !strings.ContainsFunc(s, func(r rune) bool { return !strconv.IsPrint(r) || strings.ContainsRune(not, r) })
}

// facts returns the facts in config.dump and spec.dump.
func facts(c *container, s *specs.Spec) Facts {
	f := Facts{
		ID: c.ID, Name: c.Name, Image: c.RootfsImageName, Created: c.CreatedTime, Runtime: c.OCIRuntime,
		Args: s.Process.Args, Env: s.Process.Env, Workdir: path.Clean(s.Process.Cwd), Hostname: s.Hostname,
		Terminal:  s.Process.Terminal,
		User:      fmt.Sprintf("%d:%d", s.Process.User.UID, s.Process.User.GID),
		OpenStdin: c.Stdin, ReadOnly: s.Root != nil && s.Root.Readonly, Labels: c.Labels, Network: "bridge",
	}
	if hexID().MatchString(c.RootfsImageID) {
		f.ImageID = c.RootfsImageID
	}
	if c.RootfsImage != "" && f.Image == "" {
		f.Image = c.RootfsImage
	}
	switch {
	case c.RootfsImageRef != "":
		f.Engine = "cri-o"
	case s.Annotations["io.container.manager"] == "libpod":
		f.Engine = "podman"
	}
	if c.StopSignal > 0 {
		f.Signal = strconv.FormatUint(uint64(c.StopSignal), 10)
	}
	if !c.CreateNetNS {
		f.Network = "host"
	}
	if s.Process.Capabilities != nil {
		f.Capabilities = []string{}
		for _, name := range policy.DockerCapabilities {
			if slices.Contains(s.Process.Capabilities.Bounding, "CAP_"+name) {
				f.Capabilities = append(f.Capabilities, name)
			}
		}
	}
	if s.Linux != nil {
		for _, ns := range s.Linux.Namespaces {
			if ns.Type == specs.NetworkNamespace && !c.CreateNetNS && c.RootfsImageRef == "" {
				f.Network = "none"
			}
		}
		if r := s.Linux.Resources; r != nil {
			if r.Memory != nil && r.Memory.Limit != nil && *r.Memory.Limit > 0 {
				f.Memory = *r.Memory.Limit
			}
			if r.Pids != nil && r.Pids.Limit > 0 {
				f.Pids = r.Pids.Limit
			}
			if r.CPU != nil && r.CPU.Quota != nil && r.CPU.Period != nil && *r.CPU.Quota > 0 && *r.CPU.Period > 0 {
				f.CPUs = float64(*r.CPU.Quota) / float64(*r.CPU.Period)
			}
		}
	}
	for _, p := range c.PortMappings {
		for i := range max(p.Range, 1) {
			if i > 1024 || int(p.HostPort)+int(i) > 65535 || int(p.ContainerPort)+int(i) > 65535 {
				break
			}
			for proto := range strings.SplitSeq(p.Protocol, ",") {
				f.Ports = append(f.Ports, Port{p.HostIP, p.HostPort + i, p.ContainerPort + i, proto})
			}
		}
	}
	volumes := map[string]string{}
	for _, v := range c.NamedVolumes {
		f.Volumes = append(f.Volumes, v.Name)
		volumes[path.Clean(v.Dest)] = v.Name
	}
	for _, m := range s.Mounts {
		target := path.Clean(m.Destination)
		if slices.Contains(standardTargets, target) {
			continue
		}
		out := Mount{
			Type: m.Type, Source: m.Source, Target: target, Options: m.Options,
			ReadOnly: slices.Contains(m.Options, "ro"),
		}
		if name, ok := volumes[target]; ok {
			out.Type, out.Source = "volume", name
		}
		f.Mounts = append(f.Mounts, out)
	}
	return f
}

// parseDeleted reads deleted.files: absolute paths, which may not be sorted. It returns paths
// of entries, sorted, each once.
func parseDeleted(data []byte) ([]string, error) {
	var list []string
	if len(data) > maxDeleted {
		return nil, corrupt("%s is longer than %d bytes", deletedName, maxDeleted)
	}
	if err := json.Unmarshal(data, &list); err != nil {
		return nil, corrupt("%s: %v", deletedName, err)
	}
	for i, p := range list {
		rel, ok := strings.CutPrefix(p, "/")
		// The way out of the root that a restore of Podman's once took.
		if !ok || rel == "" || rel == "." {
			return nil, corrupt("%s: %.80q is not the path of a file in the container", deletedName, p)
		}
		e := overlay.Entry{Path: rel, Type: overlay.TypeWhiteout}
		if err := overlay.CheckEntry(e); err != nil {
			return nil, fmt.Errorf("%s: %w", deletedName, err)
		}
		list[i] = rel
	}
	slices.SortFunc(list, overlay.ComparePaths)
	return slices.Compact(list), nil
}
