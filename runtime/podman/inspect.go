package podman

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/agentbox/agentbox/criu"
	"github.com/agentbox/agentbox/criu/host"
	"github.com/agentbox/agentbox/criu/stage"
	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/internal/kernel"
	"github.com/agentbox/agentbox/runtime/internal/record"
)

// container is the output of `podman container inspect`, as far as we need it and the versions of
// Podman agree.
type container struct {
	ID          string `json:"Id"`
	Name        string
	Path        string
	Args        []string
	ImageName   string
	Image       string
	ImageDigest string
	Rootfs      string
	IsInfra     bool
	OCIRuntime  string
	StaticDir   string
	Driver      string
	State       struct {
		Status     string
		Pid        int
		ConmonPid  int
		ExitCode   int
		OOMKilled  bool
		StartedAt  time.Time
		FinishedAt time.Time
		CgroupPath string
	}
	ResolvConfPath, HostnamePath, HostsPath string
	GraphDriver                             struct {
		Name string
		Data map[string]string
	}
	Mounts          []mount
	NetworkSettings struct {
		SandboxKey string
		Networks   map[string]struct {
			IPAddress         string
			GlobalIPv6Address string
			MacAddress        string
			Aliases           []string
		}
		Ports map[string][]struct{ HostIp, HostPort string }
	}
	Config struct {
		Hostname, User, WorkingDir string
		Tty, OpenStdin             bool
		Env                        []string
		Labels                     map[string]string
		StopSignal                 any // a number, or since Podman 5 a name
		CreateCommand              []string
	}
	HostConfig struct {
		NetworkMode    string
		UsernsMode     string
		ReadonlyRootfs bool
		AutoRemove     bool
		IpcMode        string
		Init           bool
		Memory         int64
		NanoCpus       int64
		PidsLimit      int64
		Tmpfs          map[string]string
		LogConfig      struct{ Type, Path string }
	}

	status runtime.Status // from the kernel too
}

type mount struct {
	Type, Name, Source, Destination, Driver, SubPath string
	RW                                               bool
}

// live reports whether it has processes.
func (c container) live() bool { return c.status == runtime.Running || c.status == runtime.Paused }

// id is the sandbox's. Podman takes it for the container too.
func (c container) id() string { return c.ID[:idLen] }

const idLen = 32

// look finds a container by the id of its sandbox.
func (b *Backend) look(ctx context.Context, id string) (container, error) {
	if !record.IsID(id) {
		return container{}, fmt.Errorf("container id %q: %w", id, fault.ErrInvalid)
	}
	c, err := b.find(ctx, id)
	if err == nil && c.id() != id { // another one has that for its name
		err = fmt.Errorf("container %s: %w", id, fault.ErrNotFound)
	}
	return c, err
}

// find finds a container by whatever Podman takes for one.
func (b *Backend) find(ctx context.Context, ref string) (container, error) {
	if ref == "" || ref[0] == '-' {
		return container{}, fmt.Errorf("container %q: %w", ref, fault.ErrInvalid)
	}
	c, err := b.told(ctx, ref)
	if err == nil && c.status == runtime.Exited && c.thoughtLive() {
		// It ended just now: what it ended with, Podman knows when asked again.
		c, err = b.told(ctx, ref)
	}
	return c, err
}

// inspected returns Podman's description of containers. A single unknown one fails all.
func (b *Backend) inspected(ctx context.Context, refs ...string) (all []container, err error) {
	out, err := b.ask(ctx, append([]string{"container", "inspect", "--"}, refs...)...)
	if err != nil {
		return nil, err
	}
	if err := json.Unmarshal(out, &all); err != nil {
		return nil, fmt.Errorf("podman inspect: %w", err)
	}
	return all, nil
}

// told returns Podman's description, corrected by what the kernel knows.
func (b *Backend) told(ctx context.Context, ref string) (container, error) {
	all, err := b.inspected(ctx, ref)
	if err != nil {
		return container{}, err
	}
	if len(all) != 1 || len(all[0].ID) < idLen || !record.IsID(all[0].id()) {
		return container{}, fmt.Errorf("podman inspect of %s told of %d containers: %w", ref,
			len(all), fault.ErrUnsupported)
	}
	c := all[0]
	c.status, err = c.state()
	return c, err
}

// thoughtLive reports whether Podman believes that it has processes.
func (c container) thoughtLive() bool {
	switch c.State.Status {
	case "running", "paused", "stopping", "initialized":
		return true
	}
	return false
}

// state corrects Podman's status, which is as old as the last podman command, by what the
// kernel knows.
func (c container) state() (runtime.Status, error) {
	switch c.State.Status {
	case "created", "configured":
		return runtime.Created, nil
	}
	if !c.thoughtLive() || c.State.Pid == 0 {
		return runtime.Exited, nil
	}
	p, err := kernel.OpenProcess(c.State.Pid)
	if kernel.Gone(err) {
		return runtime.Exited, nil
	}
	if err != nil {
		return "", err
	}
	defer p.Close()
	if !p.Alive() {
		return runtime.Exited, nil
	}
	if c.State.Status == "initialized" {
		return runtime.Created, nil
	}
	frozen := c.State.Status == "paused"
	if groups, err := kernel.Hierarchies(); err == nil && c.State.CgroupPath != "" {
		if frozen, err = c.frozen(groups); err != nil {
			return "", err
		}
	}
	if frozen {
		return runtime.Paused, nil
	}
	return runtime.Running, nil
}

// frozen reports whether the container's cgroup, or one in it that its first process is in, is to
// be frozen.
func (c container) frozen(groups kernel.Cgroups) (bool, error) {
	chain, err := groups.Chain(c.State.Pid, c.State.CgroupPath)
	for _, at := range chain {
		frozen, err := groups.Frozen(at)
		if frozen || err != nil {
			return frozen, err
		}
	}
	return false, err
}

// thaw lets go on what frozen finds.
func (c container) thaw(groups kernel.Cgroups) error {
	chain, err := groups.Chain(c.State.Pid, c.State.CgroupPath)
	for _, at := range chain {
		err = errors.Join(err, groups.Thaw(at))
	}
	return err
}

// Inspect describes the current state.
func (b *Backend) Inspect(ctx context.Context, id string) (runtime.Container, error) {
	c, err := b.look(ctx, id)
	if err != nil {
		return runtime.Container{}, err
	}
	out := runtime.Container{
		Status: c.status, Started: c.State.StartedAt, Address: c.address(),
		Stage: stage.Slot{Run: b.run, ID: c.ID}, AutoRemove: c.HostConfig.AutoRemove,
		Managed: b.managed(c), Fresh: c.fresh(),
	}
	if err := b.noteManaged(c); err != nil {
		b.log.Warn("Podman's files of the container not recorded", "sandbox", id, "err", err)
	}
	switch c.status {
	case runtime.Running, runtime.Paused:
		out.Pid = c.State.Pid
		// A restore needs them when they are no more to be found.
		if err := b.noteAddresses(c); err != nil {
			b.log.Warn("container addresses not recorded", "sandbox", id, "err", err)
		}
	case runtime.Exited:
		out.ExitCode, out.OOMKilled, out.Finished = c.State.ExitCode, c.State.OOMKilled, c.State.FinishedAt
		if out.Finished.Before(out.Started) { // Podman looks at the clock when a start is over
			out.Started = out.Finished
		}
	}
	if out.Upper, out.Lower, err = c.layers(); err != nil {
		return out, err
	}
	if out.Volumes, err = b.volumes(ctx, c); err != nil {
		return out, err
	}
	program, err := b.program(ctx, c)
	if err != nil {
		return out, err
	}
	out.Runtime = runtime.OCIRuntime(c.runtime(program))
	out.NoRestore, out.Remedy = c.obstacle(program)
	return out, nil
}

// layers are the directories of its overlay.
func (c container) layers() (upper string, lower []string, err error) {
	if c.Rootfs != "" {
		return "", nil, &fault.Error{
			Err: fmt.Errorf("container %s runs on the directory %s itself (--rootfs): %w", c.Name,
				c.Rootfs, fault.ErrUnsupported),
			Hint: "Run it with --rootfs " + c.Rootfs + ":O, or from an image: podman import.",
		}
	}
	upper = c.GraphDriver.Data["UpperDir"]
	if c.GraphDriver.Name != "overlay" || upper == "" {
		return "", nil, &fault.Error{
			Err: fmt.Errorf("container %s is on Podman's storage driver %q, which has no upperdir: %w", c.Name,
				cmp.Or(c.GraphDriver.Name, c.Driver), fault.ErrUnsupported),
			Hint: `Set driver = "overlay" in storage.conf and make the container again.`,
		}
	}
	return upper, filepath.SplitList(c.GraphDriver.Data["LowerDir"]), nil
}

// managed returns the files that Podman makes at every start and binds over the root
// filesystem; told reports whether Podman listed any.
func (c container) managed() (files map[string]string, told bool) {
	files = map[string]string{}
	for target, source := range map[string]string{
		"/etc/hosts": c.HostsPath, "/etc/resolv.conf": c.ResolvConfPath, "/etc/hostname": c.HostnamePath,
	} {
		hidden := slices.ContainsFunc(c.Mounts, func(m mount) bool {
			at := path.Clean(m.Destination)
			return at == target || at == "/etc"
		})
		told = told || source != ""
		// Files shared with another container belong to that one.
		if source != "" && !hidden && strings.Contains(source, c.ID) {
			files[target] = source
		}
	}
	return files, told
}

// fresh are the directories that Podman mounts empty at every start. Others may
// share the IPC namespace of a container by default, and its /dev/shm with it.
func (c container) fresh() []string {
	own := slices.ContainsFunc(c.Mounts, func(m mount) bool { return path.Clean(m.Destination) == "/dev/shm" })
	if _, tmpfs := c.HostConfig.Tmpfs["/dev/shm"]; own || tmpfs || c.HostConfig.IpcMode == "none" {
		return nil
	}
	return []string{"/dev/shm"}
}

func (c container) address() string {
	// With several networks take the first by name, so that it is always the same one.
	names := make([]string, 0, len(c.NetworkSettings.Networks))
	for name := range c.NetworkSettings.Networks {
		names = append(names, name)
	}
	slices.Sort(names)
	for _, name := range names {
		if ip := c.NetworkSettings.Networks[name].IPAddress; ip != "" {
			return ip
		}
	}
	return ""
}

// wrapper is the base name of the OCI runtime that restores.
const wrapper = "agentbox-runtime"

func wraps(program string) bool {
	real, err := filepath.EvalSymlinks(program)
	return filepath.Base(program) == wrapper || err == nil && filepath.Base(real) == wrapper
}

// program is the container's OCI runtime. Podman notes what it was called on
// its command line; a name means what the configuration says now.
func (b *Backend) program(ctx context.Context, c container) (string, error) {
	if filepath.IsAbs(c.OCIRuntime) {
		return c.OCIRuntime, nil
	}
	out, err := b.ask(ctx, "--runtime", c.OCIRuntime, "info", "--format", "{{.Host.OCIRuntime.Path}}")
	if path := strings.TrimSpace(string(out)); err == nil && filepath.IsAbs(path) {
		return path, nil
	}
	return "", &fault.Error{
		Err: fmt.Errorf("container %s was made with the OCI runtime %q, which Podman does not know any more: %w",
			c.Name, c.OCIRuntime, errors.Join(fault.ErrUnsupported, err)),
		Hint: "Register it again in containers.conf; agentbox's own: agentbox setup podman.",
	}
}

// runtime is the real OCI runtime and where it has the container.
func (c container) runtime(program string) criu.Runtime {
	rt := criu.Runtime{Binary: program, ID: c.ID}
	roots := []string{"/run/runc", "/run/crun"}
	if args, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", c.State.ConmonPid)); err == nil &&
		c.State.ConmonPid > 0 {
		// Podman has flags for the runtime of its own (--runtime-flag), which
		// it passes on by conmon's --runtime-arg.
		words := strings.Split(string(args), "\x00")
		var flags []string
		for i, w := range words {
			if w == "--runtime-arg" && i+1 < len(words) {
				flags = append(flags, words[i+1])
			} else if w, ok := strings.CutPrefix(w, "--runtime-arg="); ok {
				flags = append(flags, w)
			}
		}
		for i, f := range flags {
			if root, ok := strings.CutPrefix(f, "--root="); ok {
				roots = []string{root}
			} else if f == "--root" && i+1 < len(flags) {
				roots = []string{flags[i+1]}
			}
		}
	}
	if strings.HasPrefix(filepath.Base(program), "crun") {
		slices.Reverse(roots)
	}
	rt.Root = roots[0]
	for _, root := range roots {
		if _, err := os.Stat(filepath.Join(root, c.ID)); err == nil {
			rt.Root = root
			break
		}
	}
	if wraps(program) {
		// The wrapper runs runc: Podman passes it no AGENTBOX_RUNTIME.
		if real, err := host.Find("runc", nil); err == nil && !wraps(real) {
			rt.Binary = real
		}
	}
	return rt
}

// obstacle says why a start does not restore processes.
func (c container) obstacle(program string) (why, remedy string) {
	if !wraps(program) {
		return fmt.Sprintf("container %s runs under the OCI runtime %s, and only agentbox-runtime restores", c.Name,
				program),
			fmt.Sprintf("Make it again under agentbox-runtime: podman run --runtime agentbox --name %s ... (once before: agentbox setup podman).", c.Name)
	}
	if c.sharesNetwork() {
		// Its end could not be kept from the peers of its connections without
		// cutting the others off, too.
		return fmt.Sprintf("container %s has its network from another, as those of a pod do (%s), and its processes cannot be put back there", c.Name, c.HostConfig.NetworkMode),
			"Make it again with a network of its own, outside the pod, or restore the files alone."
	}
	if mode := c.HostConfig.UsernsMode; mode != "" && mode != "host" {
		return fmt.Sprintf("the users of container %s are not the host's (user namespace: %s), and CRIU cannot read the images as the remapped root", c.Name, mode),
			"Make it again without --userns, --uidmap and --gidmap, or restore the files alone."
	}
	return "", ""
}

// sharesNetwork reports whether it was put into a network namespace that was there
// before it and stays when it ends: another container's, as a pod's is, or one on the host.
func (c container) sharesNetwork() bool {
	kind, _, named := strings.Cut(c.HostConfig.NetworkMode, ":")
	return named && (kind == "container" || kind == "ns")
}

// Adopt describes a container, found by name or id.
func (b *Backend) Adopt(ctx context.Context, ref string) (runtime.Spec, error) {
	c, err := b.find(ctx, ref)
	if err != nil {
		return runtime.Spec{}, err
	}
	if c.IsInfra {
		return runtime.Spec{}, fmt.Errorf("container %s holds the namespaces of a pod and nothing else: %w",
			c.Name, fault.ErrUnsupported)
	}
	s := runtime.Spec{
		ID: c.id(), Name: c.Name, Image: cmp.Or(c.ImageName, c.Rootfs),
		ImageDigest: cmp.Or(c.ImageDigest, prefixed(c.Image)),
		Args:        append([]string{c.Path}, c.Args...), Env: c.Config.Env,
		Workdir: path.Clean("/" + c.Config.WorkingDir), User: c.Config.User,
		Hostname: c.Config.Hostname, Terminal: c.Config.Tty, OpenStdin: c.Config.OpenStdin, Init: c.HostConfig.Init,
		ReadOnly: c.HostConfig.ReadonlyRootfs, AutoRemove: c.HostConfig.AutoRemove, StopSignal: c.stopSignal(),
		Labels:  c.Config.Labels,
		Network: runtime.Network{Mode: c.networkMode(), Ports: c.ports()},
		Resources: runtime.Resources{
			Memory: c.HostConfig.Memory, CPUs: float64(c.HostConfig.NanoCpus) / 1e9,
			Pids: max(c.HostConfig.PidsLimit, 0),
		},
		Adopted: true, Backend: "podman",
	}
	for _, m := range c.Mounts {
		mount := runtime.Mount{Type: m.Type, Source: m.Source, Target: m.Destination, ReadOnly: !m.RW}
		switch m.Type {
		case "volume":
			mount.Source = m.Name
		case "bind":
		default: // an image's, say
			continue
		}
		s.Mounts = append(s.Mounts, mount)
	}
	for target, options := range c.HostConfig.Tmpfs {
		s.Mounts = append(s.Mounts, runtime.Mount{Type: "tmpfs", Target: target, Options: options})
	}
	slices.SortFunc(s.Mounts, func(a, b runtime.Mount) int { return strings.Compare(a.Target, b.Target) })
	return s, nil
}

func prefixed(id string) string {
	if id == "" {
		return ""
	}
	return "sha256:" + strings.TrimPrefix(id, "sha256:")
}

func (c container) stopSignal() string {
	switch s := c.Config.StopSignal.(type) {
	case float64:
		return strconv.Itoa(int(s))
	case string:
		return s
	}
	return ""
}

func (c container) networkMode() string {
	switch c.HostConfig.NetworkMode {
	case "host", "none":
		return c.HostConfig.NetworkMode
	}
	return runtime.NetworkBridge
}

func (c container) ports() (ports []runtime.Port) {
	for inside, bindings := range c.NetworkSettings.Ports {
		number, proto, _ := strings.Cut(inside, "/")
		to, err := strconv.ParseUint(number, 10, 16)
		if err != nil {
			continue
		}
		for _, at := range bindings {
			from, err := strconv.ParseUint(at.HostPort, 10, 16)
			if err != nil {
				continue
			}
			if ip, err := netip.ParseAddr(at.HostIp); err == nil && ip.IsUnspecified() {
				at.HostIp = ""
			}
			ports = append(ports, runtime.Port{
				HostIP: at.HostIp, Host: uint16(from), Sandbox: uint16(to), Protocol: cmp.Or(proto, "tcp"),
			})
		}
	}
	slices.SortFunc(ports, func(a, b runtime.Port) int { return int(a.Host) - int(b.Host) })
	return ports
}
