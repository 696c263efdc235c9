package docker

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/docker/docker/api/types/container"
	"github.com/docker/docker/api/types/system"
	"github.com/moby/sys/mountinfo"

	"github.com/agentbox/agentbox/criu"
	"github.com/agentbox/agentbox/criu/host"
	"github.com/agentbox/agentbox/criu/stage"
	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/internal/record"
)

// Inspect describes the current state of a container.
func (b *Backend) Inspect(ctx context.Context, id string) (runtime.Container, error) {
	c, err := b.find(ctx, id)
	if err != nil {
		return runtime.Container{}, err
	}
	return b.describe(ctx, c)
}

// fresh are the directories that the daemon mounts empty at every start. By
// default a container's /dev/shm is its own, and CRIU's to keep.
func fresh(c box) []string {
	if c.HostConfig.IpcMode.IsShareable() {
		return []string{"/dev/shm"}
	}
	return nil
}

func (b *Backend) describe(ctx context.Context, c box) (runtime.Container, error) {
	if _, err := b.info(ctx, false); err != nil {
		return runtime.Container{}, err
	}
	out := runtime.Container{
		Status: c.status, Started: instant(c.State.StartedAt),
		Stage: stage.Slot{Run: b.stageRun, ID: c.ID}, AutoRemove: c.HostConfig.AutoRemove,
		EmptyNetwork: ownNetwork(c), Managed: managed(c), Address: address(c), Fresh: fresh(c),
	}
	switch {
	case c.live():
		out.Pid = c.State.Pid
	case c.status == runtime.Exited:
		out.ExitCode, out.OOMKilled, out.Finished = c.State.ExitCode, c.State.OOMKilled, instant(c.State.FinishedAt)
		if out.Finished.Before(out.Started) {
			out.Finished = out.Started // the daemon noted the start of a short command after its end
		}
	}
	var err error
	if out.Upper, out.Lower, err = b.layers(ctx, c); err != nil {
		return out, err
	}
	if out.Volumes, err = b.volumes(ctx, c); err != nil {
		return out, err
	}
	rt, wrapped := b.ociRuntime(c)
	out.Runtime = runtime.OCIRuntime(rt)
	out.NoRestore, out.Remedy, err = b.restorable(ctx, c, wrapped)
	return out, err
}

// layers finds a container's directories. The daemon's own storage drivers report them; with
// containerd's image store they are in the mount table, and are recorded for when the
// container is stopped. Before the first start containerd itself is asked.
func (b *Backend) layers(ctx context.Context, c box) (upper string, lower []string, err error) {
	driver := c.GraphDriver.Name
	if driver == "" {
		driver = c.Driver
	}
	switch driver {
	case "overlay2", "overlay", "overlayfs":
	default:
		return "", nil, hint(fmt.Errorf("%w: container %s is stored by the driver %s, and only an overlay has an upperdir", fault.ErrUnsupported, strings.TrimPrefix(c.Name, "/"), driver),
			`Have the daemon store containers by overlay2: "storage-driver": "overlay2" in its daemon.json.`)
	}
	if upper = c.GraphDriver.Data["UpperDir"]; upper != "" {
		return upper, filepath.SplitList(c.GraphDriver.Data["LowerDir"]), nil
	}
	if c.live() {
		shim, err := shimOf(c)
		if err != nil {
			return "", nil, err
		}
		if upper, lower, err = mountedLayers(fmt.Sprintf("/proc/%d/mountinfo", c.State.Pid),
			shim+"/mountinfo"); err != nil {
			return "", nil, fmt.Errorf("container %s: %w", c.ID, err)
		}
		b.keepLayers(c, layerDirs{upper, lower})
		return upper, lower, nil
	}
	if kept, ok := b.keptLayers(c); ok {
		return kept.Upper, kept.Lower, nil
	}
	if upper, lower, err = b.snapshotLayers(ctx, driver, c.ID); err != nil {
		return "", nil, hint(fmt.Errorf("%w: the daemon keeps the directories of container %s to itself while it is stopped (containerd's image store): %w", fault.ErrUnsupported, strings.TrimPrefix(c.Name, "/"), err),
			"Start it once: agentbox finds them in the mount table and remembers them.")
	}
	b.keepLayers(c, layerDirs{upper, lower})
	return upper, lower, nil
}

type layerDirs struct {
	Upper string   `json:"upper"`
	Lower []string `json:"lower"`
}

// mountedLayers reads the directories of the overlay that is the root of a container's process
// from the mount table of its shim. That of the process has them too, but can be its own: one
// that may mount in a user namespace lays an overlay over its root, and names directories as it
// likes, which mean others on the host.
func mountedLayers(process, shim string) (upper string, lower []string, err error) {
	roots, err := mountsIn(process, mountinfo.SingleEntryFilter("/"))
	if err != nil {
		return "", nil, err
	}
	if len(roots) == 0 {
		return "", nil, fmt.Errorf("it has no root filesystem: %w", fault.ErrState)
	}
	root := roots[len(roots)-1]
	if root.FSType != "overlay" {
		return "", nil, fmt.Errorf("%w: the root filesystem is %s, not an overlay", fault.ErrUnsupported, root.FSType)
	}
	infos, err := mountsIn(shim, func(i *mountinfo.Info) (skip, stop bool) {
		return i.FSType != "overlay" || i.Major != root.Major || i.Minor != root.Minor, false
	})
	if err != nil {
		return "", nil, err
	}
	if len(infos) == 0 {
		return "", nil, fmt.Errorf("%w: its root filesystem is not the one that the engine has mounted",
			fault.ErrUnsupported)
	}
	for _, i := range infos {
		opts := overlayOptions(i.VFSOptions)
		upper = opts["upperdir"]
		for _, dir := range splitEscaped(opts["lowerdir"], ':') {
			if dir != "" {
				lower = append(lower, unescape(dir))
			}
		}
		upper = unescape(upper)
	}
	if !filepath.IsAbs(upper) {
		return "", nil, fmt.Errorf("%w: the mount table names the upperdir %q, which leads nowhere",
			fault.ErrUnsupported, upper)
	}
	for i, dir := range lower {
		// Docker mounts many layers by names relative to its overlay2 directory,
		// in which the upperdir's parent is.
		if !filepath.IsAbs(dir) {
			lower[i] = filepath.Join(filepath.Dir(filepath.Dir(upper)), dir)
		}
	}
	return upper, lower, nil
}

func mountsIn(path string, filter mountinfo.FilterFunc) ([]*mountinfo.Info, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, fault.ErrState)
	}
	defer f.Close()
	return mountinfo.GetMountsFromReader(f, filter)
}

// overlayOptions splits an overlay's options: a comma that belongs to a path
// has a backslash before it.
func overlayOptions(s string) map[string]string {
	opts := map[string]string{}
	for _, o := range splitEscaped(s, ',') {
		key, value, _ := strings.Cut(o, "=")
		if key == "lowerdir+" { // one line for each, on newer kernels
			key = "lowerdir"
			if have := opts[key]; have != "" {
				value = have + ":" + strings.ReplaceAll(value, ":", `\:`)
			}
		}
		opts[key] = value
	}
	return opts
}

func splitEscaped(s string, sep byte) (parts []string) {
	begin := 0
	for i := 0; i < len(s); i++ {
		switch s[i] {
		case '\\':
			i++
		case sep:
			parts = append(parts, s[begin:i])
			begin = i + 1
		}
	}
	return append(parts, s[begin:])
}

// unescape takes a path out of the mount table: \054 for bytes that mean
// something there, a backslash before those that mean something to overlayfs.
func unescape(s string) string {
	var out []byte
	for i := 0; i < len(s); i++ {
		if s[i] == '\\' && i+3 < len(s) {
			if n, err := strconv.ParseUint(s[i+1:i+4], 8, 8); err == nil {
				out = append(out, byte(n))
				i += 3
				continue
			}
		}
		if s[i] == '\\' && i+1 < len(s) {
			i++
		}
		out = append(out, s[i])
	}
	return string(out)
}

// managed lists the files that the daemon writes and binds over the root
// filesystem, as far as no other mount hides them.
func managed(c box) map[string]string {
	files := map[string]string{}
	if c.HostConfig.NetworkMode.IsContainer() {
		return files // those of another container
	}
	for target, file := range map[string]string{
		"/etc/hosts": c.HostsPath, "/etc/hostname": c.HostnamePath, "/etc/resolv.conf": c.ResolvConfPath,
	} {
		hidden := slices.ContainsFunc(c.Mounts, func(m container.MountPoint) bool {
			at := path.Clean(m.Destination)
			return at == target || at == "/etc"
		})
		if _, tmpfs := c.HostConfig.Tmpfs["/etc"]; file != "" && !hidden && !tmpfs {
			files[target] = file
		}
	}
	return files
}

// ownNetwork reports whether a container has a network namespace that the OCI
// runtime makes and the daemon fills.
func ownNetwork(c box) bool {
	return !c.HostConfig.NetworkMode.IsHost() && !c.HostConfig.NetworkMode.IsContainer()
}

func address(c box) string {
	if c.NetworkSettings == nil {
		return ""
	}
	// Its first network's, if it is in several.
	first := string(c.HostConfig.NetworkMode)
	if first == "default" {
		first = "bridge"
	}
	if e := c.NetworkSettings.Networks[first]; e != nil && e.IPAddress != "" {
		return e.IPAddress
	}
	if e := c.NetworkSettings.Networks[first]; e != nil && e.IPAMConfig != nil && e.IPAMConfig.IPv4Address != "" {
		return e.IPAMConfig.IPv4Address
	}
	for _, e := range c.NetworkSettings.Networks {
		if e != nil && e.IPAddress != "" {
			return e.IPAddress
		}
	}
	return ""
}

const wrapperName = "agentbox-runtime"

// ociRuntime finds the real OCI runtime of a container, and whether
// agentbox-runtime stands before it. While it runs its shim knows best.
func (b *Backend) ociRuntime(c box) (rt criu.Runtime, wrapped bool) {
	binary, root, environ := "", "", []string(nil)
	if c.live() {
		binary, root, environ = shim(c)
	}
	if binary == "" {
		binary = b.registered(c.HostConfig.Runtime)
	}
	wrapped = isWrapper(binary)
	if wrapped || binary == "" {
		binary = "runc"
		for _, kv := range environ {
			if v, ok := strings.CutPrefix(kv, "AGENTBOX_RUNTIME="); ok && v != "" {
				binary = v
			}
		}
	}
	if !strings.Contains(binary, "/") {
		if found, err := host.Find(binary, nil); err == nil {
			binary = found
		}
	}
	if c.live() {
		root = runtimeRoot(c, root)
	}
	return criu.Runtime{Binary: binary, Root: root, ID: c.ID}, wrapped
}

// registered is the program of a runtime that the daemon knows by name.
func (b *Backend) registered(name string) string {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.facts == nil {
		return ""
	}
	if name == "" {
		name = b.facts.DefaultRuntime
	}
	return b.facts.Runtimes[name].Path
}

// isWrapper reports whether a program is agentbox-runtime, under whatever name.
func isWrapper(binary string) bool {
	if filepath.Base(binary) == wrapperName {
		return true
	}
	if !filepath.IsAbs(binary) {
		return false
	}
	real, err := filepath.EvalSymlinks(binary)
	return err == nil && filepath.Base(real) == wrapperName
}

// shim reads what containerd told the shim of a container, which is the parent
// of its first process and works in the container's bundle.
func shim(c box) (binary, root string, environ []string) {
	bundle, err := bundleDir(c)
	if err != nil {
		return "", "", nil
	}
	proc := filepath.Dir(bundle)
	name, _ := os.ReadFile(filepath.Join(bundle, "runtime"))
	binary = strings.TrimSpace(string(name))
	var opts struct {
		Binary string `json:"binary_name"`
		Root   string `json:"root"`
	}
	if data, err := os.ReadFile(filepath.Join(bundle, "options.json")); err == nil &&
		json.Unmarshal(data, &opts) == nil {
		binary, root = cmp.Or(binary, opts.Binary), opts.Root
	}
	if root != "" {
		// The runtime's root is the namespace's below it.
		args, _ := os.ReadFile(proc + "/cmdline")
		words := strings.Split(string(args), "\x00")
		for i, w := range words[:max(0, len(words)-1)] {
			if w == "-namespace" || w == "--namespace" {
				root = filepath.Join(root, words[i+1])
			}
		}
	}
	env, _ := os.ReadFile(proc + "/environ")
	return binary, root, strings.Split(string(env), "\x00")
}

// runtimeRoot finds where the OCI runtime keeps the state of a container that
// runs: where the container's directory is.
func runtimeRoot(c box, told string) string {
	roots := []string{told}
	runs := []string{"/run/docker", "/var/run/docker"}
	if c.NetworkSettings != nil && c.NetworkSettings.SandboxKey != "" {
		runs = append([]string{filepath.Dir(filepath.Dir(c.NetworkSettings.SandboxKey))}, runs...)
	}
	for _, run := range runs {
		roots = append(roots, filepath.Join(run, "runtime-"+c.HostConfig.Runtime, "moby"),
			filepath.Join(run, "runtime-runc", "moby"))
		more, _ := filepath.Glob(filepath.Join(run, "runtime-*", "moby"))
		roots = append(roots, more...)
	}
	for _, root := range roots {
		if root == "" {
			continue
		}
		if _, err := os.Stat(filepath.Join(root, c.ID)); err == nil {
			return root
		}
	}
	return told
}

// restorable says why processes of a container cannot be restored, if so.
func (b *Backend) restorable(ctx context.Context, c box, wrapped bool) (why, remedy string, err error) {
	info, err := b.info(ctx, false)
	if err != nil {
		return "", "", err
	}
	if !wrapped {
		wrapped = isWrapper(b.registered(c.HostConfig.Runtime))
	}
	name := strings.TrimPrefix(c.Name, "/")
	switch {
	case remapped(info) && !c.HostConfig.UsernsMode.IsHost():
		return fmt.Sprintf("the daemon remaps the users of container %s (userns-remap), and CRIU cannot read the images as the remapped root", name),
			"Run it with --userns host, or restore the files alone.", nil
	case wrapped:
		return "", "", nil
	}
	if why = restoresItself(info, c); why == "" {
		return "", "", nil
	}
	return fmt.Sprintf("container %s runs under the OCI runtime %s, which restores nothing, and %s", name,
			cmp.Or(c.HostConfig.Runtime, "runc"), why),
		b.again(info, c), nil
}

func remapped(info *system.Info) bool {
	return slices.ContainsFunc(info.SecurityOptions, func(s string) bool {
		return s == "name=userns" || strings.HasPrefix(s, "name=userns,")
	})
}

// again says how to make a container again so that it can be restored.
func (b *Backend) again(info *system.Info, c box) string {
	setup := ""
	if _, ok := info.Runtimes[b.runtime]; !ok {
		setup = "Register the runtime (agentbox setup docker). "
	}
	if service := c.Config.Labels["com.docker.compose.service"]; service != "" {
		return fmt.Sprintf(`%sThen give the service %s the line "runtime: %s" in its compose file, and: docker compose up -d %s`, setup, service, b.runtime, service)
	}
	return setup + "Then make it again: " + b.commandLine(c)
}

// commandLine is the `docker run` that makes a container again, as far as its
// ordinary options go.
func (b *Backend) commandLine(c box) string {
	words := []string{"docker", "run", "-d", "--runtime", b.runtime, "--name", strings.TrimPrefix(c.Name, "/")}
	s := specOf(c)
	for _, m := range s.Mounts {
		switch ro := ""; m.Type {
		case "tmpfs":
			words = append(words, "--tmpfs", strings.TrimSuffix(m.Target+":"+m.Options, ":"))
		default:
			if m.ReadOnly {
				ro = ":ro"
			}
			words = append(words, "-v", m.Source+":"+m.Target+ro)
		}
	}
	for _, p := range s.Network.Ports {
		at := fmt.Sprintf("%d:%d/%s", p.Host, p.Sandbox, p.Protocol)
		if p.HostIP != "" {
			at = p.HostIP + ":" + at
		}
		words = append(words, "-p", at)
	}
	if mode := string(c.HostConfig.NetworkMode); mode != "default" && mode != "bridge" {
		words = append(words, "--network", mode)
	}
	if p := c.HostConfig.RestartPolicy; !p.IsNone() {
		words = append(words, "--restart", string(p.Name))
	}
	words = append(words, c.Config.Image)
	words = append(words, c.Config.Cmd...)
	for i, w := range words {
		if w == "" || strings.ContainsAny(w, " \t\n'\"\\$&|;<>()*?[]#~`!") {
			words[i] = "'" + strings.ReplaceAll(w, "'", `'\''`) + "'"
		}
	}
	return strings.Join(words, " ")
}

// keepLayers records directories beside the daemon's files of a container, so that they go with
// it.
func (b *Backend) keepLayers(c box, dirs layerDirs) {
	n := b.readNote(c)
	if n.Layers.Upper == dirs.Upper {
		return
	}
	n.Layers = dirs
	if err := writeNote(c, n); err != nil {
		b.log.Warn("container directories not recorded", "container", c.ID, "err", err)
	}
}

func (b *Backend) keptLayers(c box) (layerDirs, bool) {
	dirs := b.readNote(c).Layers
	_, err := os.Stat(dirs.Upper)
	return dirs, dirs.Upper != "" && err == nil
}

// note is our record of a container beside the daemon's.
type note struct {
	// Kept are the managed files that the start at Started left as the sandbox
	// had them.
	Kept    []string  `json:"kept,omitempty"`
	Started string    `json:"started,omitempty"`
	Layers  layerDirs `json:"layers,omitzero"`
}

func notePath(c box) string {
	if c.HostnamePath == "" {
		return ""
	}
	return filepath.Join(filepath.Dir(c.HostnamePath), "agentbox.json")
}

// readNote returns what is there; what cannot be read is nothing.
func (b *Backend) readNote(c box) (n note) {
	if p := notePath(c); p != "" {
		if err := record.ReadJSON(p, &n); err != nil && !errors.Is(err, os.ErrNotExist) {
			b.log.Warn("container record not readable", "container", c.ID, "err", err)
		}
	}
	return n
}

func writeNote(c box, n note) error {
	p := notePath(c)
	if p == "" {
		return nil
	}
	return record.WriteJSON(p, n, true)
}
