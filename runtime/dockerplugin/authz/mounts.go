package authz

import (
	"os"
	"path"
	"slices"
	"strings"

	"github.com/docker/docker/api/types/container"
	"github.com/docker/docker/api/types/mount"

	"github.com/agentbox/agentbox/internal/fsx"
	"github.com/agentbox/agentbox/internal/lazy"
)

// engineSockets are what mounts.docker_socket guards: a process that can speak to one of
// these is root on the host. Directories stand for all that is in them.
var engineSockets = []string{
	"/run/docker.sock", "/var/run/docker.sock", "/run/docker", "/var/run/docker",
	"/run/containerd", "/run/podman", "/run/crio", "/run/buildkit",
}

// engineState is what mounts.engine_state guards: other containers' files, images, and the
// records that engines keep of them.
var engineState = []string{
	"/var/lib/docker", "/var/lib/containerd", "/var/lib/containers", "/var/lib/agentbox", "/run/agentbox",
	"/etc/docker", "/etc/containerd", "/etc/agentbox",
}

var volumeName = lazy.Regexp(`^[a-zA-Z0-9][a-zA-Z0-9_.-]*$`)

// plainOptions of a tmpfs volume; others (bind, remount, shared) turn a mount
// into one of another kind.
var plainOptions = []string{"size", "mode", "uid", "gid", "nr_inodes", "nr_blocks", "mpol", "ro", "rw",
	"noexec", "exec", "nosuid",
	"nodev", "noatime", "relatime", "nodiratime", "sync", "async", ""}

func (j *Judge) mounts(hc *container.HostConfig, f *findings) {
	if len(hc.Binds)+len(hc.Mounts) > maxPaths {
		f.add("host mount", "", "%d mounts in one container; %d are the most that the judge looks at",
			len(hc.Binds)+len(hc.Mounts), maxPaths)
		return
	}
	for _, bind := range hc.Binds {
		if f.full() {
			return
		}
		j.bind(bind, hc.VolumeDriver, f)
	}
	if hc.VolumeDriver != "" {
		j.volume(hc.VolumeDriver, nil, f)
	}
	for _, m := range hc.Mounts {
		if f.full() {
			return
		}
		j.mount(m, f)
	}
}

// bind judges [SOURCE:]TARGET[:MODE].
func (j *Judge) bind(bind, driver string, f *findings) {
	parts := strings.Split(bind, ":")
	if len(parts) > 3 || parts[0] == "" {
		f.add("host mount", "", "%s is not SOURCE:TARGET:MODE", quote(bind))
		return
	}
	if len(parts) == 1 { // a volume without a name
		j.volume(driver, nil, f)
		return
	}
	var mode []string
	if len(parts) == 3 {
		mode = strings.Split(parts[2], ",")
	}
	if !path.IsAbs(parts[0]) {
		if !volumeName().MatchString(parts[0]) {
			f.add("host mount", "", "%s is neither an absolute path nor the name of a volume", quote(parts[0]))
			return
		}
		j.volume(driver, nil, f)
		return
	}
	j.propagation(mode, bind, f)
	// A new SELinux label is a change on the host.
	labels := slices.Contains(mode, "z") || slices.Contains(mode, "Z")
	j.hostPath(parts[0], labels || !slices.Contains(mode, "ro"), "mount", f)
}

func (j *Judge) propagation(mode []string, what string, f *findings) {
	if (slices.Contains(mode, "shared") || slices.Contains(mode, "rshared")) && !j.policy.Mounts.Shared {
		f.add("host mount", "mounts.shared", "%s: mounts made in the container would appear on the host", quote(what))
	}
}

func (j *Judge) mount(m mount.Mount, f *findings) {
	switch m.Type {
	case mount.TypeBind:
		if m.BindOptions != nil {
			j.propagation([]string{string(m.BindOptions.Propagation)}, m.Source, f)
		}
		// below which mounts stay writable
		write := !m.ReadOnly || m.BindOptions != nil && m.BindOptions.ReadOnlyNonRecursive
		j.hostPath(m.Source, write, "mount", f)
	case mount.TypeVolume:
		if m.Source != "" && !volumeName().MatchString(m.Source) {
			f.add("host mount", "", "%s is not the name of a volume", quote(m.Source))
			return
		}
		if m.VolumeOptions != nil && m.VolumeOptions.DriverConfig != nil {
			j.volume(m.VolumeOptions.DriverConfig.Name, m.VolumeOptions.DriverConfig.Options, f)
			return
		}
		j.volume("", nil, f)
	case mount.TypeTmpfs, mount.TypeImage:
	default:
		f.add("host mount", "", "%s is no type of mount that the judge knows", quote(string(m.Type)))
	}
}

// volume judges the making, or use, of a volume.
func (j *Judge) volume(driver string, opts map[string]string, f *findings) {
	m := &j.policy.Mounts
	if !m.volumes() {
		f.add("volume", "mounts.volumes", "volumes are not allowed")
		return
	}
	switch driver {
	case "", "local":
		j.localVolume(opts, f)
	case j.driver:
		// A copy-on-write volume over a directory: containers read that
		// directory, and nothing reaches it from there.
		for _, key := range sorted(opts) {
			if key == "from" || strings.Contains(opts[key], "/") {
				j.hostPath(opts[key], false, "make a volume of", f)
			}
		}
	default:
		if !slices.Contains(m.VolumeDrivers, driver) {
			f.add("volume", "mounts.volume_drivers", "volumes of the driver %s are not allowed", quote(driver))
		}
	}
}

// localVolume: the local driver hands its options to mount(8)'s system call,
// and with bind among them, or an overlay's lowerdir, that is a host mount.
func (j *Judge) localVolume(opts map[string]string, f *findings) {
	kind, device := opts["type"], opts["device"]
	if kind == "" && device == "" && opts["o"] == "" {
		return
	}
	flags := strings.Split(opts["o"], ",")
	if slices.Contains(flags, "bind") || slices.Contains(flags, "rbind") {
		j.propagation(flags, device, f)
		j.hostPath(device, !slices.Contains(flags, "ro"), "make a volume of", f)
		return
	}
	if slices.Contains(j.policy.Mounts.VolumeTypes, kind) {
		return
	}
	if kind != "tmpfs" {
		f.add("volume", "mounts.volume_types",
			"volumes that mount a file system of the type %s are not allowed", quote(kind))
		return
	}
	for _, flag := range flags {
		name, _, _ := strings.Cut(flag, "=")
		if !slices.Contains(plainOptions, name) {
			f.add("volume", "", "%s is no option that the judge knows of a tmpfs volume", quote(flag))
		}
	}
}

// hostPath judges the use of a path of the host. The engine cleans most paths
// as text before it resolves them, and some not, which differ where ".."
// follows a symlink: both have to pass.
func (j *Judge) hostPath(p string, write bool, verb string, f *findings) {
	j.judgePath(p, write, verb, f)
	if clean := path.Clean(p); strings.Contains(p, "..") && clean != p {
		j.judgePath(clean, write, verb, f)
	}
}

func (j *Judge) judgePath(p string, write bool, verb string, f *findings) {
	const rule = "host mount"
	m := &j.policy.Mounts
	w, err := resolve(p)
	if err != nil {
		f.add(rule, "", "%s %s: %v", verb, quote(p), err)
		return
	}
	what := quote(p)
	if w.real != path.Clean(p) {
		what += ", which is " + quote(w.real) + ","
	}
	in, around := j.guards(j.sockets, w.real)
	if (in || around) && !m.DockerSocket {
		f.add(rule, "mounts.docker_socket", "%s %s: the socket of an engine is there", verb, what)
		return
	}
	opened := in // docker_socket opens the sockets by itself
	if in, around := j.guards(j.state, w.real); (in || around) && !m.EngineState {
		f.add(rule, "mounts.engine_state", "%s %s: the state of an engine is there", verb, what)
		return
	}
	if !opened && !anyCovers(j.allow, w.real) {
		if !anyCovers(j.readOnly, w.real) {
			f.add(rule, "mounts.allow", "%s %s: the policy does not list it", verb, what)
			return
		}
		if write {
			f.add(rule, "mounts.allow", "%s %s: the policy lists it as read-only", verb, what)
			return
		}
	}
	if m.Exchangeable {
		return
	}
	if why := w.exchangeable(j.canWrite); why != "" {
		f.add(rule, "mounts.exchangeable", "%s %s: %s", verb, what, why)
	}
}

// guards says whether real is one of the guarded paths or lies in one (in), or
// contains one (around).
func (j *Judge) guards(guarded []string, real string) (in, around bool) {
	for _, g := range guarded {
		// Under both names: a symlink made meanwhile must not unguard the path.
		names := []string{path.Clean(g)}
		if w, err := resolve(g); err == nil && w.real != names[0] {
			names = append(names, w.real)
		}
		for _, at := range names {
			in = in || fsx.Within(at, real) || sameFile(at, real)
			around = around || fsx.Within(real, at)
		}
	}
	return in, around
}

// canWrite says whether containers may be given the directory read-write.
func (j *Judge) canWrite(dir string) bool { return anyCovers(j.writable, dir) }

// sameFile finds a guarded socket under another name.
func sameFile(a, b string) bool {
	x, err := os.Stat(a)
	if err != nil || x.IsDir() {
		return false
	}
	y, err := os.Stat(b)
	return err == nil && os.SameFile(x, y)
}

func (j *Judge) device(p string, f *findings) {
	const rule = "device"
	w, err := resolve(p)
	if err != nil {
		f.add(rule, "", "%s: %v", quote(p), err)
		return
	}
	if !anyCovers(j.devices, w.real) {
		f.add(rule, "devices", "%s is not allowed", quote(p))
		return
	}
	if j.policy.Mounts.Exchangeable {
		return
	}
	if why := w.exchangeable(j.canWrite); why != "" {
		f.add(rule, "mounts.exchangeable", "%s: %s", quote(p), why)
	}
}
