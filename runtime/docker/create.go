package docker

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"time"

	cerrdefs "github.com/containerd/errdefs"
	"github.com/docker/docker/api/types/blkiodev"
	"github.com/docker/docker/api/types/container"
	"github.com/docker/docker/api/types/mount"
	"github.com/docker/docker/api/types/network"
	"github.com/docker/docker/api/types/system"
	"github.com/docker/go-connections/nat"
	"github.com/moby/profiles/seccomp"
	"github.com/moby/sys/signal"
	"golang.org/x/sys/unix"

	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/agentbox/agentbox/criu/stage"
	"github.com/agentbox/agentbox/internal/failpoint"
	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/internal/undo"
	"github.com/agentbox/agentbox/policy"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/internal/apparmor"
	"github.com/agentbox/agentbox/runtime/internal/bundle"
	"github.com/agentbox/agentbox/runtime/internal/record"
)

// Create has the daemon make a container. The image is the daemon's own.
func (b *Backend) Create(ctx context.Context, s runtime.Spec, lower []string) (err error) {
	switch {
	case !record.IsID(s.ID):
		return fmt.Errorf("%w: container id %q", fault.ErrInvalid, s.ID)
	case len(lower) > 0:
		return fmt.Errorf("%w: the Docker daemon has its own images and takes no directories", fault.ErrInvalid)
	case len(s.Args) == 0:
		return fmt.Errorf("%w: no command", fault.ErrInvalid)
	case len(s.Name) < 2:
		return fmt.Errorf("%w: Docker takes no name of one character (%q)", fault.ErrInvalid, s.Name)
	}
	if s.StopSignal != "" {
		if _, err := signal.ParseSignal(s.StopSignal); err != nil {
			return fmt.Errorf("%w: stop signal: %w", fault.ErrInvalid, err)
		}
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	info, err := b.info(ctx, true)
	if err != nil {
		return err
	}
	if err := b.able(info); err != nil {
		return err
	}
	if _, err := b.find(ctx, s.ID); err == nil {
		return fmt.Errorf("container %s: %w", s.ID, fault.ErrExists)
	} else if !errors.Is(err, fault.ErrNotFound) {
		return err
	}
	config, hostConfig, err := b.config(ctx, info, s)
	if err != nil {
		return err
	}
	var undo undo.Stack
	defer func() { undo.Run(ctx, &err) }()
	undo.Add(func(ctx context.Context) error { return b.Remove(ctx, s.ID) })
	if len(s.Secrets) > 0 {
		// The daemon wants to see what it is to bind, though not yet to bind it.
		if err := os.MkdirAll(b.place(s.ID).SecretFiles(), 0o700); err != nil {
			return err
		}
		hostConfig.Mounts = append(hostConfig.Mounts, mount.Mount{
			Type: mount.TypeBind, Source: b.place(s.ID).SecretFiles(), Target: runtime.SecretsDir, ReadOnly: true,
		})
	}
	if s.Network.Mode == runtime.NetworkBridge {
		err = b.locked(func() error {
			at, err := b.joinNetwork(ctx, s.Network.Group)
			if err != nil {
				return err
			}
			if err := failpoint.Hit("docker.create.after-network"); err != nil {
				return err
			}
			hostConfig.NetworkMode = container.NetworkMode(at.network)
			if !perNetworkMAC(b.api.ClientVersion()) {
				//lint:ignore SA1019 daemons older than API 1.44 know no MAC per network, and later ones warn of this
				config.MacAddress = at.mac
			}
			return b.make(ctx, s, config, hostConfig, at.endpoint(b.api.ClientVersion()))
		})
	} else {
		hostConfig.NetworkMode = container.NetworkMode(s.Network.Mode)
		err = b.make(ctx, s, config, hostConfig, nil)
	}
	if err != nil {
		return err
	}
	if err := failpoint.Hit("docker.create.after-container"); err != nil {
		return err
	}
	if err := b.place(s.ID).DropSecrets(); err != nil {
		return err
	}
	return ctx.Err()
}

// able tells why the daemon can make no sandboxes.
func (b *Backend) able(info *system.Info) error {
	switch info.Driver {
	case "overlay2", "overlay", "overlayfs":
	default:
		return hint(fmt.Errorf("%w: the Docker daemon stores containers by the driver %s, and only an overlay has an upperdir", fault.ErrUnsupported, info.Driver),
			`Have it use overlay2: "storage-driver": "overlay2" in its daemon.json.`)
	}
	if _, ok := info.Runtimes[b.runtime]; !ok {
		return hint(fmt.Errorf("%w: the Docker daemon has no runtime named %s, which restores processes",
			fault.ErrUnsupported, b.runtime),
			"Register it: agentbox setup docker")
	}
	return nil
}

func (b *Backend) make(
	ctx context.Context, s runtime.Spec, config *container.Config, hostConfig *container.HostConfig,
	net *network.NetworkingConfig,
) error {
	// Asked for once, it is made, even if we do not wait for it.
	call, cancel := whole(ctx)
	defer cancel()
	made, err := b.api.ContainerCreate(call, config, hostConfig, net, nil, s.Name)
	switch {
	case cerrdefs.IsConflict(err):
		return hint(fmt.Errorf("the name %s: %w: a container of the Docker daemon has it", s.Name, fault.ErrExists),
			"Choose another name with --name.")
	case err != nil:
		return b.explain(call, err)
	}
	for _, w := range made.Warnings {
		b.log.Warn("docker: "+w, "sandbox", s.ID)
	}
	b.remember(s.ID, made.ID)
	return nil
}

const cgroupDir = "/sys/fs/cgroup"

// config translates a spec.
func (b *Backend) config(
	ctx context.Context, info *system.Info, s runtime.Spec,
) (*container.Config, *container.HostConfig, error) {
	text, err := json.Marshal(s)
	if err != nil {
		return nil, nil, err
	}
	labels := map[string]string{}
	for k, v := range s.Labels {
		labels[k] = v
	}
	labels[labelID], labels[labelRoot], labels[labelSpec] = s.ID, b.root, string(text)
	config := &container.Config{
		Hostname: s.Hostname, User: s.User, Env: s.Env, WorkingDir: s.Workdir, Labels: labels,
		// All of the command, so that nothing of the image's is added to it.
		Entrypoint: s.Args[:1], Cmd: s.Args[1:],
		Image: b.imageName(ctx, s), Tty: s.Terminal, OpenStdin: s.OpenStdin,
		// Without a terminal the input ends with the first client attached to it.
		StdinOnce:  s.OpenStdin && !s.Terminal,
		StopSignal: s.StopSignal, ExposedPorts: nat.PortSet{},
	}
	if s.Network.Mode == runtime.NetworkHost {
		config.Hostname = "" // the host's, by Docker's rules
	}
	hostConfig := &container.HostConfig{
		ContainerIDFile: proof(s.ID),
		Runtime:         b.runtime, ReadonlyRootfs: s.ReadOnly, PortBindings: nat.PortMap{}, Tmpfs: map[string]string{},
		Sysctls:     map[string]string{},
		MaskedPaths: policy.MaskedPaths, ReadonlyPaths: policy.ReadonlyPaths,
	}
	if s.Init {
		hostConfig.Init = &s.Init
	}
	if hostConfig.Memory = s.Resources.Memory; hostConfig.Memory > 0 {
		hostConfig.MemorySwap = bundle.TotalSwap(s.Resources)
	}
	hostConfig.NanoCPUs = int64(s.Resources.CPUs * 1e9)
	if s.Resources.Pids > 0 {
		hostConfig.PidsLimit = &s.Resources.Pids
	}
	if s.Resources.IO > 0 {
		disk, err := bundle.DiskOf(info.DockerRootDir)
		if err != nil {
			return nil, nil, err
		}
		limit := []*blkiodev.ThrottleDevice{{Path: disk.Path, Rate: uint64(s.Resources.IO)}}
		hostConfig.BlkioDeviceReadBps, hostConfig.BlkioDeviceWriteBps = limit, limit
	}
	for _, p := range s.Network.Ports {
		port, err := nat.NewPort(p.Protocol, fmt.Sprint(p.Sandbox))
		if err != nil {
			return nil, nil, fmt.Errorf("%w: port %d/%s: %w", fault.ErrInvalid, p.Sandbox, p.Protocol, err)
		}
		config.ExposedPorts[port] = struct{}{}
		hostConfig.PortBindings[port] = append(hostConfig.PortBindings[port],
			nat.PortBinding{HostIP: p.HostIP, HostPort: fmt.Sprint(p.Host)})
	}
	if info.CgroupVersion != "2" {
		// Under v1 a restore would bind the cgroups of the restoring process
		// there: a view of the host's.
		hostConfig.Tmpfs[cgroupDir] = "ro,size=4k,mode=755"
	}
	for _, m := range s.Mounts {
		if path.Clean(m.Target) == cgroupDir {
			delete(hostConfig.Tmpfs, cgroupDir)
		}
		switch m.Type {
		case "bind":
			hostConfig.Mounts = append(hostConfig.Mounts,
				mount.Mount{Type: mount.TypeBind, Source: m.Source, Target: m.Target, ReadOnly: m.ReadOnly})
		case "volume":
			hostConfig.Mounts = append(hostConfig.Mounts,
				mount.Mount{Type: mount.TypeVolume, Source: m.Source, Target: m.Target, ReadOnly: m.ReadOnly})
		case "tmpfs":
			opts := m.Options
			if m.ReadOnly {
				opts = strings.TrimPrefix(opts+",ro", ",")
			}
			hostConfig.Tmpfs[path.Clean(m.Target)] = opts
		case runtime.MountWorkspace:
			return nil, nil, &fault.Error{
				Err:  fmt.Errorf("%w: workspace %s: this backend has none", fault.ErrUnsupported, m.Source),
				Hint: "Choose --backend oci or containerd, or a volume over the directory: agentbox volume create NAME --from DIR",
			}
		default:
			return nil, nil, fmt.Errorf("%w: mount of type %q", fault.ErrInvalid, m.Type)
		}
	}
	if s.Network.Mode != runtime.NetworkHost && hasMPTCP() {
		// CRIU cannot dump Multipath TCP, which Go programs, for one, listen
		// with by default; without it they use TCP.
		hostConfig.Sysctls["net.mptcp.enabled"] = "0"
	}
	if slices.ContainsFunc(info.SecurityOptions, func(o string) bool { return strings.HasPrefix(o, "name=seccomp") }) {
		filter, err := syscallFilter(s.Security)
		if err != nil {
			return nil, nil, err
		}
		hostConfig.SecurityOpt = append(hostConfig.SecurityOpt, "seccomp="+filter)
	}
	switch profile := s.Security.AppArmor; {
	case slices.ContainsFunc(info.SecurityOptions, func(o string) bool {
		return strings.HasPrefix(o, "name=apparmor")
	}):
		if profile != "" {
			hostConfig.SecurityOpt = append(hostConfig.SecurityOpt, "apparmor="+profile)
		}
	case profile != "" && profile != apparmor.Unconfined:
		return nil, nil, fmt.Errorf("%w: the AppArmor profile %s: the Docker daemon has no AppArmor",
			fault.ErrUnsupported, profile)
	}
	if s.Security.NoNewPrivileges {
		hostConfig.SecurityOpt = append(hostConfig.SecurityOpt, "no-new-privileges")
	}
	hostConfig.CapDrop, hostConfig.CapAdd = []string{"ALL"}, s.Security.Capabilities
	if s.Security.Capabilities == nil {
		hostConfig.CapAdd = policy.DefaultCapabilities
	}
	return config, hostConfig, nil
}

// imageName is the image's name where it still means what the spec pinned, for
// `docker ps` to show; else its id.
func (b *Backend) imageName(ctx context.Context, s runtime.Spec) string {
	if img, err := b.api.ImageInspect(ctx, s.Image); err == nil && img.ID == s.ImageDigest {
		return s.Image
	}
	return s.ImageDigest
}

func hasMPTCP() bool {
	var st unix.Stat_t
	return unix.Stat("/proc/sys/net/mptcp/enabled", &st) == nil
}

// syscallFilter is bundle.SyscallFilter in the form that the daemon takes, which
// decides itself what of it holds on its machine.
func syscallFilter(sec runtime.Security) (string, error) {
	filter, isDefault := seccomp.DefaultProfile(), true
	if sec.SeccompProfile != "" {
		var err error
		if filter, err = policy.ParseSeccomp(sec.SeccompProfile); err != nil || sec.IOUring {
			return sec.SeccompProfile, err
		}
		isDefault = false
	} else if sec.Seccomp == policy.SeccompUnconfined {
		if sec.IOUring {
			return sec.Seccomp, nil
		}
		filter.DefaultAction, filter.DefaultErrnoRet, filter.Syscalls = specs.ActAllow, nil, nil
		isDefault = false
	}
	for _, call := range filter.Syscalls {
		//lint:ignore SA1019 profiles may have the older form
		if call.Name != "" {
			//lint:ignore SA1019 as above
			call.Name, call.Names = "", []string{call.Name}
		}
		call.Names = bundle.WithoutRings(call.Names)
		if isDefault {
			call.Names = bundle.WithoutSecrets(call.Names)
		}
	}
	filter.Syscalls = slices.DeleteFunc(filter.Syscalls, func(call *seccomp.Syscall) bool {
		return len(call.Names) == 0
	})
	filter.Syscalls = append(filter.Syscalls, &seccomp.Syscall{LinuxSyscall: bundle.RingRule(sec)})
	if isDefault {
		filter.Syscalls = append(filter.Syscalls, &seccomp.Syscall{LinuxSyscall: bundle.SecretRule()})
	}
	text, err := json.Marshal(filter)
	return string(text), err
}

// Remove has the daemon remove a container, with the volumes that are its
// alone, and frees what is kept beside it.
func (b *Backend) Remove(ctx context.Context, id string) error {
	if !record.IsID(id) {
		return nil // nothing is called that
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	c, err := b.find(ctx, id)
	if err != nil && !errors.Is(err, fault.ErrNotFound) && !errors.Is(err, fault.ErrCorrupt) {
		return err
	}
	if err == nil {
		if err := b.remove(ctx, c); err != nil {
			return err
		}
	}
	b.forget(id)
	if err := b.place(id).DropSecrets(); err != nil {
		return err
	}
	// It was made for them, unless the Engine has something there, too.
	if err := os.Remove(filepath.Join(b.run, id)); err != nil && !errors.Is(err, fs.ErrNotExist) &&
		!errors.Is(err, unix.ENOTEMPTY) {
		return err
	}
	if err := failpoint.Hit("docker.remove.after-container"); err != nil {
		return err
	}
	return b.locked(func() error { return b.pruneNetworks(ctx) })
}

func (b *Backend) remove(ctx context.Context, c box) error {
	call, cancel := whole(ctx)
	defer cancel()
	if c.status == runtime.Paused {
		// The daemon kills what it has thawed; a container that stays frozen is not removed.
		if err := b.end(call, c, runtime.StopOptions{}); err != nil {
			return err
		}
	}
	if err := failpoint.Hit("docker.remove.after-stop"); err != nil {
		return err
	}
	deadline := time.Now().Add(callTimeout / 2)
	for wait := 5 * time.Millisecond; ; wait = min(2*wait, 200*time.Millisecond) {
		err := b.api.ContainerRemove(call, c.ID, container.RemoveOptions{Force: true, RemoveVolumes: c.own()})
		if cerrdefs.IsNotFound(err) {
			break
		}
		// Another client may be removing it; done is done.
		busy := err != nil && strings.Contains(err.Error(), "already in progress")
		if err != nil && !busy || time.Now().After(deadline) {
			return b.explain(call, err)
		}
		select {
		case <-time.After(wait):
		case <-call.Done():
			return call.Err()
		}
		if err == nil {
			continue // to see that it is gone
		}
	}
	if err := stage.At(b.stageRun, c.ID).Clear(); err != nil {
		return err
	}
	if err := errors.Join(stage.At(b.stageRun, c.ID).Disarm(), stage.At(b.stageRun, c.ID).DropFiles()); err != nil {
		return err
	}
	return b.dropHandle(c.ID)
}
