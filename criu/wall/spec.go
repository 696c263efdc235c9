package wall

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// Spec is what Judge and Inspect take from a bundle's config.json.
type Spec struct {
	Process struct {
		NoNewPrivileges bool `json:"noNewPrivileges"`
		Capabilities    struct {
			Bounding []string `json:"bounding"`
		} `json:"capabilities"`
		Rlimits []struct {
			Type string `json:"type"`
			Hard uint64 `json:"hard"`
		} `json:"rlimits"`
		OOMScoreAdj *int `json:"oomScoreAdj"`
	} `json:"process"`
	Root struct {
		Path     string `json:"path"`
		Readonly bool   `json:"readonly"`
	} `json:"root"`
	Mounts []SpecMount `json:"mounts"`
	Linux  struct {
		UIDMappings   []IDs       `json:"uidMappings"`
		GIDMappings   []IDs       `json:"gidMappings"`
		Namespaces    []Namespace `json:"namespaces"`
		Devices       []Device    `json:"devices"`
		MaskedPaths   []string    `json:"maskedPaths"`
		ReadonlyPaths []string    `json:"readonlyPaths"`
		Propagation   string      `json:"rootfsPropagation"`
		Seccomp       *Seccomp    `json:"seccomp"`
		Resources     struct {
			Devices []DeviceRule `json:"devices"`
		} `json:"resources"`
	} `json:"linux"`
}

// SpecMount is a mount of a spec.
type SpecMount struct {
	Destination string   `json:"destination"`
	Type        string   `json:"type"`
	Source      string   `json:"source"`
	Options     []string `json:"options"`
}

// IDs is a range of a user namespace's map.
type IDs struct {
	Container uint32 `json:"containerID"`
	Host      uint32 `json:"hostID"`
	Size      uint32 `json:"size"`
}

// Namespace is one that the container has of its own, or joins by Path.
type Namespace struct {
	Type string `json:"type"`
	Path string `json:"path"`
}

// Device is a device node.
type Device struct {
	Path  string `json:"path"`
	Type  string `json:"type"`
	Major int64  `json:"major"`
	Minor int64  `json:"minor"`
}

// DeviceRule allows or denies devices.
type DeviceRule struct {
	Allow bool   `json:"allow"`
	Type  string `json:"type"`
	Major *int64 `json:"major"`
	Minor *int64 `json:"minor"`
}

// Seccomp is a filter of system calls.
type Seccomp struct {
	DefaultAction string   `json:"defaultAction"`
	DefaultErrno  *uint32  `json:"defaultErrnoRet"`
	Architectures []string `json:"architectures"`
	Syscalls      []struct {
		Names  []string          `json:"names"`
		Action string            `json:"action"`
		Errno  *uint32           `json:"errnoRet"`
		Args   []json.RawMessage `json:"args"`
	} `json:"syscalls"`
}

const maxSpec = 64 << 20

// Read reads the spec of a bundle.
func Read(bundle string) (*Spec, error) {
	path := filepath.Join(bundle, "config.json")
	st, err := os.Stat(path)
	if err != nil {
		return nil, err
	}
	if st.Size() > maxSpec {
		return nil, fmt.Errorf("%s: %d bytes are too many", path, st.Size())
	}
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	s := &Spec{}
	if err := json.Unmarshal(data, s); err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	if !filepath.IsAbs(s.Root.Path) {
		s.Root.Path = filepath.Join(bundle, s.Root.Path)
	}
	return s, nil
}

// namespace returns the namespace of a type that the container has of its own, or joins; nil:
// it has the host's.
func (s *Spec) namespace(typ string) *Namespace {
	for i, n := range s.Linux.Namespaces {
		if n.Type == typ {
			return &s.Linux.Namespaces[i]
		}
	}
	return nil
}

var capabilities = []string{
	"CHOWN", "DAC_OVERRIDE", "DAC_READ_SEARCH", "FOWNER", "FSETID", "KILL", "SETGID", "SETUID",
	"SETPCAP", "LINUX_IMMUTABLE",
	"NET_BIND_SERVICE", "NET_BROADCAST", "NET_ADMIN", "NET_RAW", "IPC_LOCK", "IPC_OWNER", "SYS_MODULE",
	"SYS_RAWIO", "SYS_CHROOT",
	"SYS_PTRACE", "SYS_PACCT", "SYS_ADMIN", "SYS_BOOT", "SYS_NICE", "SYS_RESOURCE", "SYS_TIME",
	"SYS_TTY_CONFIG", "MKNOD", "LEASE",
	"AUDIT_WRITE", "AUDIT_CONTROL", "SETFCAP", "MAC_OVERRIDE", "MAC_ADMIN", "SYSLOG", "WAKE_ALARM",
	"BLOCK_SUSPEND", "AUDIT_READ",
	"PERFMON", "BPF", "CHECKPOINT_RESTORE",
}

// Limits are the capabilities that a process of the container can have at most, as bits, and
// whether it may take no new privileges: what Judge leaves of those of the images.
func (s *Spec) Limits() (capabilities uint64, noNewPrivileges bool) {
	return s.bounding(), s.Process.NoNewPrivileges
}

// bounding is the most that a process of the container can have, as bits.
func (s *Spec) bounding() (bits uint64) {
	for _, name := range s.Process.Capabilities.Bounding {
		if i := slices.Index(capabilities, strings.TrimPrefix(strings.ToUpper(name), "CAP_")); i >= 0 {
			bits |= 1 << i
		}
	}
	return bits
}

func (s *Spec) can(capability string) bool {
	return s.bounding()&(1<<slices.Index(capabilities, capability)) != 0
}

// mounter reports whether a process of the container can mount, if only in its user namespace.
func (s *Spec) mounter() bool { return s.can("SYS_ADMIN") }

// hostRoot reports whether the container is as good as the host's root.
func (s *Spec) hostRoot() bool { return s.mounter() && s.namespace("user") == nil }

// filtered reports whether each process of the container has a seccomp filter.
func (s *Spec) filtered() bool {
	f := s.Linux.Seccomp
	return f != nil && (len(f.Syscalls) > 0 || f.DefaultAction != "SCMP_ACT_ALLOW" && f.DefaultAction != "")
}

// bind reports whether a mount is one of a path of the host.
func (m SpecMount) bind() bool {
	return m.Type == "bind" || slices.Contains(m.Options, "bind") || slices.Contains(m.Options, "rbind")
}

// propagation is the last that the options name.
func (m SpecMount) propagation() (is string) {
	for _, o := range m.Options {
		switch o = strings.TrimPrefix(o, "r"); o {
		case "shared", "slave", "private", "unbindable":
			is = o
		}
	}
	return is
}

// flags are those that the options ask for and that take something away.
func (m SpecMount) flags() (set uint64) {
	for _, o := range m.Options {
		switch o {
		case "ro", "rro":
			set |= unix.MS_RDONLY
		case "rw", "rrw":
			set &^= unix.MS_RDONLY
		case "nosuid", "rnosuid":
			set |= unix.MS_NOSUID
		case "suid", "rsuid":
			set &^= unix.MS_NOSUID
		case "nodev", "rnodev":
			set |= unix.MS_NODEV
		case "dev", "rdev":
			set &^= unix.MS_NODEV
		case "noexec", "rnoexec":
			set |= unix.MS_NOEXEC
		case "exec", "rexec":
			set &^= unix.MS_NOEXEC
		}
	}
	return set
}

// Devices that every container has.
var devices = []Device{
	{"/dev/null", "c", 1, 3}, {"/dev/zero", "c", 1, 5}, {"/dev/full", "c", 1, 7}, {"/dev/random", "c", 1, 8},
	{"/dev/urandom", "c", 1, 9}, {"/dev/tty", "c", 5, 0}, {"/dev/console", "c", 5, 1}, {"/dev/ptmx", "c", 5, 2},
}

const ptsFirst, ptsLast = 136, 143 // majors of pseudo-terminals

// device reports whether the container may use a device.
func (s *Spec) device(block bool, major, minor uint32) bool {
	typ := "c"
	if block {
		typ = "b"
	}
	if !block && major >= ptsFirst && major <= ptsLast {
		return true
	}
	for _, d := range slices.Concat(devices, s.Linux.Devices) {
		is := d.Type == typ || d.Type == "u" && typ == "c"
		if is && d.Major == int64(major) && d.Minor == int64(minor) {
			return true
		}
	}
	may := false
	for _, r := range s.Linux.Resources.Devices {
		is := r.Type == "" || r.Type == "a" || r.Type == typ
		if is && (r.Major == nil || *r.Major < 0 || *r.Major == int64(major)) &&
			(r.Minor == nil || *r.Minor < 0 || *r.Minor == int64(minor)) {
			may = r.Allow
		}
	}
	return may
}

// inRoot resolves a path in the container's root filesystem as the OCI runtime does, following
// only that filesystem's links.
func (s *Spec) inRoot(path string) string {
	const most = 255
	done, links := "/", 0
	rest := strings.Split(filepath.Clean("/"+path), "/")
	for len(rest) > 0 {
		part := rest[0]
		rest = rest[1:]
		switch part {
		case "", ".":
			continue
		case "..":
			done = filepath.Dir(done)
			continue
		}
		next := filepath.Join(done, part)
		to, err := os.Readlink(filepath.Join(s.Root.Path, next))
		if err != nil || links == most {
			done = next
			continue
		}
		links++
		if filepath.IsAbs(to) {
			done = "/"
		}
		rest = append(strings.Split(to, "/"), rest...)
	}
	return done
}

// clean reports whether a path of an image is absolute and leads nowhere but down.
func clean(path string) bool {
	return filepath.IsAbs(path) && filepath.Clean(path) == path && !strings.ContainsRune(path, 0)
}

func below(path, dir string) bool {
	return path == dir || strings.HasPrefix(path, strings.TrimSuffix(dir, "/")+"/")
}
