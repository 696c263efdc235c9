package portable

import (
	"encoding/json"
	"fmt"
	"path"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/agentbox/agentbox/internal/lazy"
	"github.com/agentbox/agentbox/policy"
)

// boxSpec is the needed part of a sandbox's spec.
type boxSpec struct {
	Image      string   `json:"image"`
	Args       []string `json:"args"`
	Env        []string `json:"env"`
	Workdir    string   `json:"workdir"`
	User       string   `json:"user"`
	Hostname   string   `json:"hostname"`
	Terminal   bool     `json:"terminal"`
	OpenStdin  bool     `json:"open_stdin"`
	Init       bool     `json:"init"`
	ReadOnly   bool     `json:"read_only"`
	StopSignal string   `json:"stop_signal"`
	Security   struct {
		Capabilities    []string `json:"capabilities"` // null: the usual ones
		NoNewPrivileges bool     `json:"no_new_privileges"`
	} `json:"security"`
	Labels  map[string]string `json:"labels"`
	Backend string            `json:"backend"`
	Mounts  []struct {
		Type     string `json:"type"`
		Source   string `json:"source"`
		Target   string `json:"target"`
		ReadOnly bool   `json:"read_only"`
		Options  string `json:"options"`
	} `json:"mounts"`
	Network struct {
		Mode  string `json:"mode"`
		Ports []struct {
			HostIP   string `json:"host_ip"`
			Host     uint16 `json:"host"`
			Sandbox  uint16 `json:"sandbox"`
			Protocol string `json:"protocol"`
		} `json:"ports"`
	} `json:"network"`
	Resources struct {
		Memory int64   `json:"memory"`
		Swap   int64   `json:"swap"`
		CPUs   float64 `json:"cpus"`
		Pids   int64   `json:"pids"`
	} `json:"resources"`
}

// container is the part of libpod's ContainerConfig (4.3) that a restore or agentbox reads.
// CRI-O and checkpointctl write and read a part of it.
type container struct {
	Spec            *specs.Spec        `json:"spec,omitempty"`
	ID              string             `json:"id"`
	Name            string             `json:"name"`
	Pod             string             `json:"pod,omitempty"`
	RawImageName    string             `json:"RawImageName,omitempty"`
	IDMappings      *idMappings        `json:"idMappingsOptions,omitempty"`
	Dependencies    []string           `json:"Dependencies"`
	RootfsImageID   string             `json:"rootfsImageID,omitempty"`
	RootfsImage     string             `json:"rootfsImage,omitempty"`    // CRI-O
	RootfsImageRef  string             `json:"rootfsImageRef,omitempty"` // CRI-O
	RootfsImageName string             `json:"rootfsImageName,omitempty"`
	NoShm           bool               `json:"NoShm,omitempty"`
	ShmSize         int64              `json:"shmSize"`
	NamedVolumes    []namedVolume      `json:"namedVolumes,omitempty"`
	Privileged      bool               `json:"privileged"`
	LabelOpts       []string           `json:"labelopts,omitempty"`
	User            string             `json:"user,omitempty"`
	CreateNetNS     bool               `json:"createNetNS"`
	PortMappings    []portMapping      `json:"newPortMappings,omitempty"`
	Networks        map[string]network `json:"newNetworks,omitempty"`
	Entrypoint      []string           `json:"entrypoint,omitempty"`
	Command         []string           `json:"command,omitempty"`
	Stdin           bool               `json:"stdin,omitempty"`
	Labels          map[string]string  `json:"labels,omitempty"`
	StopSignal      uint               `json:"stopSignal,omitempty"`
	StopTimeout     uint               `json:"stopTimeout,omitempty"`
	CreatedTime     time.Time          `json:"createdTime"`
	CgroupsMode     string             `json:"cgroupsMode,omitempty"`
	LogDriver       string             `json:"logDriver"`
	OCIRuntime      string             `json:"runtime,omitempty"`
	SdNotifyMode    string             `json:"sdnotifyMode,omitempty"`
	CheckpointedAt  time.Time          `json:"checkpointedTime"`
}

type idMappings struct {
	HostUIDMapping bool
	HostGIDMapping bool
}

type namedVolume struct {
	Name    string   `json:"volumeName"`
	Dest    string   `json:"dest"`
	Options []string `json:"options,omitempty"`
}

type portMapping struct {
	HostIP        string `json:"host_ip"`
	ContainerPort uint16 `json:"container_port"`
	HostPort      uint16 `json:"host_port"`
	Range         uint16 `json:"range"`
	Protocol      string `json:"protocol"`
}

type network struct {
	InterfaceName string `json:"interface_name"`
}

var (
	podmanName = lazy.Regexp(`[^a-zA-Z0-9_.-]+`)
	hexID      = lazy.Regexp(`^[0-9a-f]{64}$`)
)

// podmanConfig makes config.dump and spec.dump: the container that Podman must
// make for CRIU to find in it the mounts and namespaces of the dump.
func podmanConfig(m *manifest, c Checkpoint) (*container, *specs.Spec, error) {
	var s boxSpec
	if err := json.Unmarshal(m.Spec, &s); err != nil {
		return nil, nil, corrupt("%s: spec: %v", manifestName, err)
	}
	name, id := c.ImageName, c.ImageID
	if name == "" {
		name = imageName(s.Image)
	}
	if digest, found := strings.CutPrefix(m.ImageDigest, "sha256:"); id == "" && found && hexID().MatchString(digest) {
		id = digest // it is of the configuration, and that is what Podman calls an image by, too
	}
	if id == "" {
		// Podman hands it to its storage, which before Podman 5 took a name for it, too.
		id = name
	}
	spec := podmanSpec(m, s)
	conf := &container{
		Spec: spec, ID: podmanID(m.SandboxID),
		Name:         strings.Trim(podmanName().ReplaceAllString(m.SandboxName, "-"), "_.-"),
		RawImageName: name, RootfsImageID: id, RootfsImageName: name, RootfsImage: name,
		IDMappings: &idMappings{true, true},
		// A restore would mount a directory of the host there, and CRIU has a tmpfs.
		NoShm: true, ShmSize: 64 << 20,
		LabelOpts: []string{"disable"}, User: s.User,
		// With a namespace of Podman's making even when there is to be no
		// network: CRIU looks for the one that was outside of the dump.
		CreateNetNS: s.Network.Mode != "host",
		Command:     s.Args, Stdin: s.OpenStdin, Labels: s.Labels,
		StopSignal: 15, StopTimeout: 10, CreatedTime: m.Created.UTC(), CheckpointedAt: m.Created.UTC(),
		CgroupsMode: "enabled", LogDriver: "k8s-file", OCIRuntime: "runc", SdNotifyMode: "container",
	}
	if conf.Name == "" {
		conf.Name = "agentbox-" + m.ID
	}
	if s.Network.Mode == "bridge" {
		conf.Networks = map[string]network{"podman": {InterfaceName: "eth0"}}
		for _, p := range s.Network.Ports {
			conf.PortMappings = append(conf.PortMappings, portMapping{p.HostIP, p.Sandbox, p.Host, 1, p.Protocol})
		}
	}
	return conf, spec, nil
}

func podmanSpec(m *manifest, s boxSpec) *specs.Spec {
	uid, gid := numericUser(s.User)
	// For processes that are started later; restored ones have what they had.
	caps := policy.KernelNames(policy.DefaultCapabilities)
	if s.Security.Capabilities != nil {
		caps = policy.KernelNames(s.Security.Capabilities)
	}
	set := &specs.LinuxCapabilities{Bounding: caps}
	if uid == 0 {
		set.Effective, set.Permitted = caps, caps
	}
	cwd := s.Workdir
	if cwd == "" {
		cwd = "/"
	}
	spec := &specs.Spec{
		Version: "1.0.2",
		Process: &specs.Process{
			Terminal: s.Terminal, User: specs.User{UID: uid, GID: gid}, Args: s.Args, Env: withPath(s.Env),
			Cwd: cwd, Capabilities: set,
			NoNewPrivileges: s.Security.NoNewPrivileges,
			Rlimits:         []specs.POSIXRlimit{{Type: "RLIMIT_NOFILE", Hard: 1024, Soft: 1024}},
		},
		Root:     &specs.Root{Path: "rootfs", Readonly: s.ReadOnly},
		Hostname: s.Hostname,
		Mounts:   standardMounts(),
		Annotations: map[string]string{
			"io.container.manager":      "libpod",
			"io.kubernetes.cri-o.TTY":   fmt.Sprint(s.Terminal),
			"dev.agentbox.checkpoint":   m.ID,
			"dev.agentbox.sandbox":      m.SandboxName,
			"dev.agentbox.image-digest": m.ImageDigest,
		},
		Linux: &specs.Linux{
			Resources: &specs.LinuxResources{Devices: []specs.LinuxDeviceCgroup{{Allow: false, Access: "rwm"}}},
			Namespaces: []specs.LinuxNamespace{
				{Type: specs.PIDNamespace}, {Type: specs.IPCNamespace}, {Type: specs.UTSNamespace},
				{Type: specs.MountNamespace},
			},
			MaskedPaths:   policy.MaskedPaths,
			ReadonlyPaths: policy.ReadonlyPaths,
		},
	}
	if s.Network.Mode != "host" {
		spec.Linux.Namespaces = append(spec.Linux.Namespaces, specs.LinuxNamespace{Type: specs.NetworkNamespace})
	}
	for _, mt := range s.Mounts {
		out := specs.Mount{Destination: path.Clean(mt.Target), Type: mt.Type, Source: mt.Source}
		switch mt.Type {
		case "bind":
			out.Options = []string{"rbind", "rprivate"}
			if mt.ReadOnly {
				out.Options = append(out.Options, "ro")
			}
		case "tmpfs":
			out.Source, out.Options = "tmpfs", []string{"noexec", "nosuid", "nodev"}
		default:
			continue
		}
		spec.Mounts = append(spec.Mounts, out)
	}
	if n := s.Resources.Memory; n > 0 {
		spec.Linux.Resources.Memory = &specs.LinuxMemory{Limit: &n}
		if swap := n + s.Resources.Swap; s.Resources.Swap > 0 {
			spec.Linux.Resources.Memory.Swap = &swap
		}
	}
	if n := s.Resources.Pids; n > 0 {
		spec.Linux.Resources.Pids = &specs.LinuxPids{Limit: n}
	}
	if c := s.Resources.CPUs; c > 0 {
		period := uint64(100_000)
		quota := int64(c * float64(period))
		spec.Linux.Resources.CPU = &specs.LinuxCPU{Quota: &quota, Period: &period}
	}
	return spec
}

// withPath adds where a shell looks for programs, as every backend does.
func withPath(env []string) []string {
	if slices.ContainsFunc(env, func(kv string) bool { return strings.HasPrefix(kv, "PATH=") }) {
		return env
	}
	return append([]string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}, env...)
}

// standardMounts returns the mounts of a sandbox of the oci backend, except for the files of /etc,
// which Podman adds by itself.
func standardMounts() []specs.Mount {
	return []specs.Mount{
		{Destination: "/proc", Type: "proc", Source: "proc", Options: []string{"nosuid", "noexec", "nodev"}},
		{
			Destination: "/dev", Type: "tmpfs", Source: "tmpfs",
			Options: []string{"nosuid", "strictatime", "mode=755", "size=65536k"},
		},
		{
			Destination: "/dev/pts", Type: "devpts", Source: "devpts",
			Options: []string{"nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620", "gid=5"},
		},
		{Destination: "/sys", Type: "sysfs", Source: "sysfs", Options: []string{"nosuid", "noexec", "nodev", "ro"}},
		{Destination: "/dev/mqueue", Type: "mqueue", Source: "mqueue", Options: []string{"nosuid", "noexec", "nodev"}},
		{
			Destination: "/sys/fs/cgroup", Type: "cgroup", Source: "cgroup",
			Options: []string{"rprivate", "nosuid", "noexec", "nodev", "relatime", "ro"},
		},
	}
}

// imageName returns Podman's name for an image that was loaded by this name.
func imageName(name string) string {
	if name == "" {
		return "localhost/unknown:latest"
	}
	first, _, slash := strings.Cut(name, "/")
	if !slash || !strings.ContainsAny(first, ".:") && first != "localhost" {
		name = "localhost/" + name
	}
	if last := name[strings.LastIndexByte(name, '/')+1:]; !strings.ContainsAny(last, ":@") {
		name += ":latest"
	}
	return name
}

// podmanID is 64 hex digits, as Podman's own.
func podmanID(id string) string {
	for len(id) > 0 && len(id) < 64 {
		id += id
	}
	return id[:min(len(id), 64)]
}

func numericUser(user string) (uid, gid uint32) {
	u, g, _ := strings.Cut(user, ":")
	n, err := strconv.ParseUint(u, 10, 32)
	if err != nil {
		return 0, 0
	}
	k, err := strconv.ParseUint(g, 10, 32)
	if err != nil {
		k = 0
	}
	return uint32(n), uint32(k)
}
