package wall

import (
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/fault"
)

// mount is one mount of a mount namespace, as an image or the kernel describes it.
type mount struct {
	id, parent uint32
	dev        uint64 // of its filesystem
	fstype     string
	flags      uint64 // MS_RDONLY and the like
	root       string // what of its filesystem it shows
	point      string
	source     string
	options    string
	external   string // in an image: what the OCI runtime gives CRIU for it
	group      uint32 // of mounts that share what is mounted there; 0: it is in none
	master     uint32 // the group whose mounts it gets
	live       bool   // the kernel reports it
}

// fstypes are the filesystems as images number them.
var fstypes = map[uint32]string{
	0: "", 1: "proc", 2: "sysfs", 3: "devtmpfs", 4: "binfmt_misc", 5: "tmpfs", 6: "devpts", 7: "simfs",
	8: "pstore", 9: "securityfs",
	10: "fusectl", 11: "debugfs", 12: "cgroup", 13: "aufs", 14: "mqueue", 15: "fuse", 16: "auto",
	17: "overlay", 18: "autofs",
	19: "tracefs", 23: "cgroup2",
}

// The flags that take something away from a mount.
const limiting = unix.MS_RDONLY | unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC

const maxMounts = 1 << 17

func (j *judge) mountpoints(name string) error {
	var list []mount
	err := j.each(name, magicMounts, maxMounts, func(data []byte) error {
		e, err := decode(name, "mnt_entry", data)
		if err != nil {
			return err
		}
		if err := e.only(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18); err != nil {
			return err
		}
		if err := e.once(fields(1, 2, 3, 4, 5, 10, 11, 12, 13, 15, 16, 17), fields(6, 7, 8, 9, 14, 18)); err != nil {
			return err
		}
		m := mount{
			id: e.number(2), parent: e.number(4), dev: uint64(e.number(3)), flags: uint64(e.number(5)),
			root: e.text(6), point: e.text(7),
			source: e.text(8), options: e.text(9), external: e.text(18), group: e.number(10), master: e.number(11),
		}
		kind, known := fstypes[e.number(1)]
		if !known {
			return refuse(name, m.field("fstype"), "%d is not known to this version of agentbox", e.number(1))
		}
		if m.fstype = kind; e.number(17)&unix.MS_RDONLY != 0 && kind == "sysfs" {
			m.flags |= unix.MS_RDONLY
		}
		if e.wide(16) != 0 { // it is deleted, and its name was marked so
			m.root = strings.TrimSuffix(m.root, "//deleted")
		}
		switch {
		case e.wide(12) != 0:
			return refuse(name, m.field("with_plugin"), "a plugin of CRIU's would make it")
		case e.wide(13) != 0:
			return refuse(name, m.field("ext_mount"), "it is found on the host by itself")
		case kind == "auto" && !j.spec.hostRoot():
			return refuse(name, m.field("fstype"), "a filesystem %s of the host's devices", quoted(e.text(14)))
		}
		list = append(list, m)
		return nil
	})
	j.mounts[name] = list
	return err
}

func (m mount) field(name string) string {
	return fmt.Sprintf("%s of the mount at %s", name, quoted(m.point))
}

// checkMounts judges the mounts of each namespace.
func (j *judge) checkMounts() error {
	if len(j.mounts) > 1 && !j.spec.mounter() {
		return refuse(slices.Sorted(maps.Keys(j.mounts))[1], "mount namespace",
			"there is a second one, which takes CAP_SYS_ADMIN")
	}
	for _, name := range slices.Sorted(maps.Keys(j.mounts)) {
		list := j.mounts[name]
		if err := j.spec.checkTree(name, list); err != nil {
			return err
		}
		if err := j.spec.checkMounts(name, list, nil); err != nil {
			return err
		}
		for _, m := range list {
			if err := j.checkLinks(name, m); err != nil {
				return err
			}
		}
	}
	return nil
}

// checkTree proves that mounts lie in each other.
func (s *Spec) checkTree(name string, list []mount) error {
	byID := map[uint32]mount{}
	for _, m := range list {
		if _, twice := byID[m.id]; twice {
			return fmt.Errorf("image %s: two mounts have the id %d: %w", name, m.id, fault.ErrCorrupt)
		}
		byID[m.id] = m
	}
	for _, m := range list {
		if p, is := byID[m.parent]; is && p.id != m.id && !below(m.point, p.point) {
			return refuse(name, m.field("parent_mnt_id"), "it is not below that, %s", quoted(p.point))
		}
	}
	return nil
}

// checkMounts holds mounts against those that a container of the spec has. image is where
// they stand; empty: they are the kernel's, and outside are the groups that the host's are in.
func (s *Spec) checkMounts(image string, list []mount, outside map[uint32]bool) error {
	roots := 0
	count := map[string]int{}
	for _, m := range list {
		if !clean(m.point) {
			return refuse(image, m.field("mountpoint"), "it is no clean path")
		}
		if !clean(m.root) && !(m.live && (strings.Contains(m.root, "//deleted") ||
			strings.HasPrefix(m.fstype, "cgroup") || m.fstype == "nsfs")) {
			return refuse(image, m.field("root"), "%s leads elsewhere", quoted(m.root))
		}
		if m.point == "/" {
			roots++
		}
		count[m.point]++
	}
	if roots == 0 {
		return refuse(image, "mountpoint", "there is no root")
	}
	if roots != 1 {
		return refuse(image, "mountpoint", "there are %d roots", roots)
	}
	want := s.wanted()
	for _, m := range list {
		if most := len(want[m.point]); count[m.point] > max(1, most) {
			return refuse(image, m.field("mountpoint"), "%d mounts lie on each other", count[m.point])
		}
		if err := s.checkMount(image, m, list, want); err != nil {
			return err
		}
		if err := s.checkSharing(image, m, outside); err != nil {
			return err
		}
	}
	return nil
}

// checkSharing proves that mounts of the container, or of the host, propagate to the other only
// where the spec says so. outside are the host's groups, where the kernel reports the mount.
func (s *Spec) checkSharing(image string, m mount, outside map[uint32]bool) error {
	if strings.HasSuffix(s.Linux.Propagation, "shared") {
		return nil
	}
	asked := ""
	for _, w := range s.Mounts {
		if at := s.inRoot(w.Destination); m.point == at || below(m.point, at) && slices.Contains(w.Options, "rbind") {
			asked = w.propagation()
		}
	}
	switch {
	case m.group != 0 && asked != "shared" && (outside[m.group] || !s.mounter()):
		return refuse(image, m.field("propagation"), "it is shared, and the container's is not")
	case m.live && outside[m.master] && (asked == "private" || asked == "unbindable"):
		return refuse(image, m.field("propagation"),
			"what the host mounts would be mounted there, and the container's is %s", asked)
	}
	return nil
}

// wanted lists what the OCI runtime mounts, by where: a pointer to a SpecMount, or masked, or
// readonly.
func (s *Spec) wanted() map[string][]any {
	want := map[string][]any{}
	for i, m := range s.Mounts {
		at := s.inRoot(m.Destination)
		want[at] = append(want[at], &s.Mounts[i])
	}
	for _, p := range s.Linux.MaskedPaths {
		want[filepath.Clean(p)] = append(want[filepath.Clean(p)], masked{})
	}
	for _, p := range s.Linux.ReadonlyPaths {
		want[filepath.Clean(p)] = append(want[filepath.Clean(p)], readonly{})
	}
	return want
}

type (
	masked   struct{}
	readonly struct{}
)

func (s *Spec) checkMount(image string, m mount, list []mount, want map[string][]any) error {
	if m.point == "/" {
		if s.Root.Readonly && m.live && m.flags&unix.MS_RDONLY == 0 {
			return refuse(image, m.field("flags"), "it is not read-only")
		}
		return nil
	}
	var err error
	for _, w := range want[m.point] {
		switch w := w.(type) {
		case *SpecMount:
			err = s.checkWanted(image, m, w)
		case masked:
			err = s.checkMasked(image, m)
		case readonly:
			err = s.checkReadonly(image, m, list)
		}
		if err == nil {
			return nil
		}
	}
	if err != nil {
		return err
	}
	return s.checkOther(image, m, list)
}

// checkWanted judges a mount of the spec.
func (s *Spec) checkWanted(image string, m mount, w *SpecMount) error {
	kind, asked := w.Type, w.flags()
	if kind == "cgroup" && m.fstype == "tmpfs" { // v1's are below, and this is not always made read-only
		kind, asked = "tmpfs", asked&^unix.MS_RDONLY
	}
	if lack := asked &^ m.flags & limiting; lack != 0 {
		return refuse(image, m.field("flags"), "it lacks %s, which the container's has", flagNames(lack))
	}
	switch {
	case w.bind():
		if !m.live && m.external != m.point {
			return refuse(image, m.field("ext_key"),
				"it is %s, and the container has a path of the host there", quoted(m.external))
		}
		return nil // which one the kernel will tell
	case m.external != "" && m.external != m.point:
		return refuse(image, m.field("ext_key"), "it is %s", quoted(m.external))
	case kind == "cgroup" && m.fstype == "cgroup2":
	case m.fstype != kind:
		return refuse(image, m.field("fstype"), "it is %s, and the container's is %s", m.fstype, w.Type)
	}
	if m.root != "/" && !strings.HasPrefix(m.fstype, "cgroup") {
		return refuse(image, m.field("root"),
			"it is %s, and the container's is all of its filesystem", quoted(m.root))
	}
	if !m.live && kind == "overlay" {
		for _, o := range w.Options {
			if k, _, is := strings.Cut(o, "="); is && strings.HasSuffix(k, "dir") &&
				!slices.Contains(strings.Split(m.options, ","), o) {
				return refuse(image, m.field("options"), "%s is not the container's", k)
			}
		}
	}
	return nil
}

func flagNames(flags uint64) string {
	var list []string
	for _, f := range []struct {
		bit  uint64
		name string
	}{{unix.MS_RDONLY, "ro"}, {unix.MS_NOSUID, "nosuid"}, {unix.MS_NODEV, "nodev"}, {unix.MS_NOEXEC, "noexec"}} {
		if flags&f.bit != 0 {
			list = append(list, f.name)
		}
	}
	return strings.Join(list, ",")
}

const null = "/dev/null"

// checkMasked judges what lies over a masked path: /dev/null, or an empty directory that is read-only.
func (s *Spec) checkMasked(image string, m mount) error {
	switch {
	case m.fstype == "tmpfs" && m.root == "/" && m.external == "" && m.flags&unix.MS_RDONLY != 0:
	case (m.fstype == "tmpfs" || m.fstype == "devtmpfs") && m.root == "/null" &&
		(m.external == null || m.external == "" || m.external == m.point):
	case m.live && filepath.Base(m.root) == "null":
	default:
		return refuse(image, m.field("root"), "the container has nothing to see there, and this would be %s of %s",
			quoted(m.root), m.fstype)
	}
	return nil
}

// checkReadonly judges a part of a mount that is made read-only.
func (s *Spec) checkReadonly(image string, m mount, list []mount) error {
	if m.flags&unix.MS_RDONLY == 0 {
		return refuse(image, m.field("flags"), "it is writable, and the container's is read-only")
	}
	over := holder(m, list)
	if over == nil || over.dev != m.dev || m.external != "" ||
		m.root != filepath.Join(over.root, strings.TrimPrefix(m.point, over.point)) {
		return refuse(image, m.field("root"), "it is another part of %s than what lies there", m.fstype)
	}
	return nil
}

// holder returns the mount that a mount's mountpoint lies in.
func holder(m mount, list []mount) *mount {
	var in *mount
	for i, o := range list {
		if o.id != m.id && o.point != m.point && below(m.point, o.point) &&
			(in == nil || len(o.point) > len(in.point)) {
			in = &list[i]
		}
	}
	return in
}

// harmless are filesystems that root of a user namespace can mount, and that show nothing of the host's.
var harmless = []string{"tmpfs", "devpts", "mqueue", "overlay", "cgroup2", "fuse", "nsfs"}

// checkOther judges a mount that the spec does not name.
func (s *Spec) checkOther(image string, m mount, list []mount) error {
	for _, w := range s.Mounts {
		at := s.inRoot(w.Destination)
		if m.point == at || !below(m.point, at) {
			continue
		}
		switch {
		case w.Type == "cgroup" && m.fstype == "cgroup" && (m.external == m.point || m.external == "") &&
			filepath.Dir(m.point) == at:
			if lack := w.flags() &^ m.flags & limiting; lack != 0 {
				return refuse(image, m.field("flags"), "it lacks %s, which the container's has", flagNames(lack))
			}
			return nil
		case w.bind() && slices.Contains(w.Options, "rbind"):
			// Mounts below it on the host come along.
			if m.live || m.external == m.point || m.fstype == "tmpfs" && m.external == "" {
				return nil
			}
		}
	}
	if s.deviceMount(m) {
		return nil
	}
	// Another engine, or another version, masks other things: that gives less.
	if (below(m.point, "/proc") || below(m.point, "/sys")) &&
		(s.checkMasked(image, m) == nil || s.checkReadonly(image, m, list) == nil) {
		return nil
	}
	if s.mounter() && m.external == "" {
		if slices.Contains(harmless, m.fstype) && (m.live || m.fstype != "overlay") {
			return nil
		}
		if s.hostRoot() && (m.fstype == "proc" || m.fstype == "sysfs") && m.root == "/" {
			return nil // of its own namespaces
		}
		// A part of what the container has.
		if slices.ContainsFunc(list, func(o mount) bool {
			return o.id != m.id && o.dev == m.dev && below(m.root, o.root) && o.flags&limiting&^m.flags == 0
		}) && m.fstype != "proc" && m.fstype != "sysfs" {
			return nil
		}
	}
	return refuse(image, m.field("mountpoint"), "the container has no mount there, and this would be %s of a %s",
		quoted(m.root), m.fstype)
}

// deviceMount reports whether a mount is a device node that the OCI runtime binds: of a
// container that cannot make nodes, and the console.
func (s *Spec) deviceMount(m mount) bool {
	if m.external != "" && m.external != m.point || m.fstype != "tmpfs" &&
		m.fstype != "devtmpfs" && m.fstype != "devpts" {
		return false
	}
	if m.fstype == "devpts" {
		return m.point == "/dev/console" && m.root != "/"
	}
	return slices.ContainsFunc(slices.Concat(devices, s.Linux.Devices), func(d Device) bool {
		return d.Path == m.point && filepath.Base(m.root) == filepath.Base(d.Path)
	})
}
