package bundle

import (
	"bytes"
	"crypto/sha256"
	"debug/elf"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/netip"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/internal/record"
	"github.com/agentbox/agentbox/runtime/network"
)

// mounts lists everything that is mounted over the root filesystem. Sources
// of binds stay under the same path for the sandbox's whole life, because CRIU
// looks for them there when it restores.
func (p Place) mounts(s runtime.Spec) ([]specs.Mount, error) {
	list := []specs.Mount{
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
			Destination: "/dev/shm", Type: "tmpfs", Source: "shm",
			Options: []string{"nosuid", "noexec", "nodev", "mode=1777", "size=67108864"},
		},
	}
	// Under v1 a restore would bind the cgroups of the restoring process there:
	// a view of the host's.
	if p.Cgroups.Unified() {
		list = append(list, specs.Mount{
			Destination: "/sys/fs/cgroup", Type: "cgroup", Source: "cgroup",
			Options: []string{"nosuid", "noexec", "nodev", "relatime", "ro"},
		})
	}
	for _, name := range etcNames {
		list = append(list, specs.Mount{
			Destination: "/etc/" + name, Type: "bind", Source: filepath.Join(p.Dir, "etc", name),
			Options: []string{"rbind", "rprivate"},
		})
	}
	if s.Init {
		// Where our root is on a filesystem without them (/dev/shm, a hardened /var), a
		// user namespace may not have them either.
		list = append(list, specs.Mount{
			Destination: InitPath, Type: "bind", Source: filepath.Join(p.Dir, "init"),
			Options: []string{"bind", "ro", "nosuid", "nodev", "rprivate"},
		})
	}
	own, err := p.userMounts(s)
	if err != nil {
		return nil, err
	}
	if len(s.Secrets) > 0 {
		own = append(own, p.secretsMount())
		outerFirst(own)
	}
	// A user's mount takes the place of a standard one at the same path.
	list = slices.DeleteFunc(list, func(m specs.Mount) bool {
		return slices.ContainsFunc(own, func(o specs.Mount) bool { return o.Destination == m.Destination })
	})
	return append(list, own...), nil
}

// userMounts checks and converts the spec's mounts, outer ones first, so that
// none hides another.
func (p Place) userMounts(s runtime.Spec) ([]specs.Mount, error) {
	var list []specs.Mount
	workspaces := p.Workspaces(s)
	for _, m := range s.Mounts {
		target := path.Clean(m.Target)
		if !path.IsAbs(target) || target == "/" {
			return nil, fmt.Errorf("%w: mount target %q must be an absolute path other than /",
				fault.ErrInvalid, m.Target)
		}
		out := specs.Mount{Destination: target, Type: m.Type}
		switch m.Type {
		case "bind":
			if _, err := os.Stat(m.Source); errors.Is(err, fs.ErrNotExist) {
				return nil, fmt.Errorf("bind source %s: %w", m.Source, fault.ErrNotFound)
			} else if err != nil {
				return nil, fmt.Errorf("bind source: %w", err)
			}
			out.Source, out.Options = m.Source, []string{"rbind", "rprivate"}
			if m.ReadOnly {
				out.Options = append(out.Options, readOnly())
			}
		case runtime.MountWorkspace:
			out.Type, out.Source, out.Options = "bind", workspaces[0].Target, []string{"bind", "rprivate"}
			if workspaces = workspaces[1:]; m.ReadOnly {
				out.Options = append(out.Options, "ro")
			}
		case "tmpfs":
			opts, err := tmpfsOptions(m)
			if err != nil {
				return nil, err
			}
			out.Source, out.Options = "tmpfs", opts
		default:
			if m.Type == "volume" {
				return nil, &fault.Error{Err: fmt.Errorf("%w: named volume %s: this backend has none",
					fault.ErrUnsupported, m.Source),
					Hint: "Bind a directory: --volume ./" + m.Source + ":" + m.Target + ", or choose --backend docker."}
			}
			return nil, fmt.Errorf("%w: mount type %q", fault.ErrInvalid, m.Type)
		}
		list = append(list, out)
	}
	outerFirst(list)
	return list, nil
}

func outerFirst(list []specs.Mount) {
	slices.SortStableFunc(list, func(a, b specs.Mount) int {
		return strings.Count(a.Destination, "/") - strings.Count(b.Destination, "/")
	})
}

// etcNames are the files of /etc that we write and bind over the root filesystem.
var etcNames = []string{"resolv.conf", "hostname", "hosts"}

// Managed lists the files that we write, as far as no mount of the user's hides
// them.
func (p Place) Managed(s runtime.Spec) map[string]string {
	files := map[string]string{}
	for _, name := range etcNames {
		if !slices.ContainsFunc(s.Mounts, func(m runtime.Mount) bool {
			target := path.Clean(m.Target)
			return target == "/etc" || target == "/etc/"+name
		}) {
			files["/etc/"+name] = filepath.Join(p.Dir, "etc", name)
		}
	}
	return files
}

// readOnly is the mount option that reaches the mounts below a bind's source
// too, where the kernel has it (5.12).
var readOnly = sync.OnceValue(func() string {
	err := unix.MountSetattr(-1, "", unix.AT_EMPTY_PATH, &unix.MountAttr{})
	if errors.Is(err, unix.ENOSYS) {
		return "ro"
	}
	return "rro"
})

// tmpfsFlags and tmpfsKeys are the options that a tmpfs mount may carry.
var (
	tmpfsFlags = []string{
		"ro", "rw", "exec", "noexec", "suid", "nosuid", "dev", "nodev", "atime", "noatime", "diratime", "nodiratime",
		"relatime", "norelatime", "strictatime", "sync", "async",
	}
	tmpfsKeys = []string{"size", "nr_blocks", "nr_inodes", "mode", "uid", "gid"}
)

func tmpfsOptions(m runtime.Mount) ([]string, error) {
	opts := []string{"noexec", "nosuid", "nodev"}
	if m.ReadOnly {
		opts = append(opts, "ro")
	}
	for opt := range strings.SplitSeq(m.Options, ",") {
		if opt == "" {
			continue
		}
		key, value, pair := strings.Cut(opt, "=")
		if !pair && !slices.Contains(tmpfsFlags, opt) || pair && (value == "" || !slices.Contains(tmpfsKeys, key)) {
			return nil, fmt.Errorf("%w: tmpfs option %q", fault.ErrInvalid, opt)
		}
		opts = append(opts, opt)
	}
	return opts, nil
}

// generatedFile lists, in a container's etc directory, the digests of what we have written
// there, newest last, to distinguish it from what the sandbox wrote.
const (
	generatedFile = ".generated"
	maxGenerated  = 64
)

// writeEtc writes the files that give a container its name and its resolver. It leaves alone a
// file that was changed since we last wrote it: its content is the sandbox's. It also leaves
// alone any existing file when processes are restored, which may have it open, and a
// resolv.conf while the host, which may just have booted, has no resolvers.
func (p Place) writeEtc(s runtime.Spec, e network.Endpoint, restores bool) error {
	dir := filepath.Join(p.Dir, "etc")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	files := map[string][]byte{
		"hostname":    []byte(s.Hostname + "\n"),
		"hosts":       hosts(s, e),
		"resolv.conf": resolver(e),
	}
	var known []string
	if err := record.ReadJSON(filepath.Join(dir, generatedFile), &known); err != nil &&
		!errors.Is(err, fs.ErrNotExist) && !errors.Is(err, fault.ErrCorrupt) {
		return err
	}
	write := map[string][]byte{}
	learned := false
	for _, name := range etcNames {
		want := files[name]
		have, there, err := readEtc(filepath.Join(dir, name))
		if err != nil {
			return err
		}
		same := there && bytes.Equal(have, want)
		ours := slices.Contains(known, digest(name, have)) || name == "hosts" && ownHosts(s, have)
		if there && !same && (restores || !ours || name == "resolv.conf" && len(e.Nameservers) == 0) {
			continue
		}
		if id := digest(name, want); !slices.Contains(known, id) {
			known, learned = append(known, id), true
		}
		if !same {
			write[name] = want
		}
	}
	// First the record: what is written and not on it would count as changed.
	if learned {
		if err := record.WriteJSON(filepath.Join(dir, generatedFile),
			known[max(0, len(known)-maxGenerated):], false); err != nil {
			return err
		}
	}
	for name, data := range write {
		if err := record.Write(filepath.Join(dir, name), data, 0o644, false); err != nil {
			return err
		}
	}
	if s.IDs == nil {
		return nil
	}
	// Its root writes them. It may have given them to others.
	for _, name := range etcNames {
		var st unix.Stat_t
		path := filepath.Join(dir, name)
		if err := unix.Lstat(path, &st); err != nil {
			return &os.PathError{Op: "lstat", Path: path, Err: err}
		}
		if s.IDs.Has(int(st.Uid)) && s.IDs.Has(int(st.Gid)) {
			continue
		}
		if err := os.Lchown(path, int(s.IDs.Base), int(s.IDs.Base)); err != nil {
			return err
		}
	}
	return nil
}

func digest(name string, data []byte) string {
	return fmt.Sprintf("%s %x", name, sha256.Sum256(data))
}

// readEtc reads a file that a sandbox may have written. Nothing longer than
// what we write ourselves is worth reading to its end.
func readEtc(path string) (data []byte, there bool, err error) {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, false, nil
	}
	if err != nil {
		return nil, true, err
	}
	defer f.Close()
	data, err = io.ReadAll(io.LimitReader(f, record.Limit))
	return data, true, err
}

// ownHosts reports whether data is what we would write for another address of the
// sandbox. A sandbox that a restore has made again may have got a new one.
func ownHosts(s runtime.Spec, data []byte) bool {
	lines := bytes.Split(bytes.TrimSuffix(data, []byte("\n")), []byte("\n"))
	old, _, _ := bytes.Cut(lines[len(lines)-1], []byte("\t"))
	address, err := netip.ParseAddr(string(old))
	return err == nil && s.Network.Mode != runtime.NetworkHost &&
		bytes.Equal(data, hosts(s, network.Endpoint{Address: address}))
}

func hosts(s runtime.Spec, e network.Endpoint) []byte {
	if s.Network.Mode == runtime.NetworkHost {
		data, _, err := record.Read("/etc/hosts")
		if err == nil {
			return data
		}
	}
	address := "127.0.1.1"
	if e.Address.IsValid() {
		address = e.Address.String()
	}
	return fmt.Appendf(nil, "127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n"+
		"fe00::\tip6-localnet\nff00::\tip6-mcastprefix\nff02::1\tip6-allnodes\nff02::2\tip6-allrouters\n%s\t%s\n",
		address, s.Hostname)
}

func resolver(e network.Endpoint) []byte {
	var out []byte
	if len(e.Search) > 0 {
		out = fmt.Appendf(out, "search %s\n", strings.Join(e.Search, " "))
	}
	for _, server := range e.Nameservers {
		out = fmt.Appendf(out, "nameserver %s\n", server)
	}
	if len(e.Options) > 0 {
		out = fmt.Appendf(out, "options %s\n", strings.Join(e.Options, " "))
	}
	return out
}

// copyInit gives a sandbox its own copy of the init: a bind mount's source
// that an upgrade of agentbox does not change under a checkpoint.
func (p Place) copyInit() (err error) {
	src, err := os.Open(p.Init)
	if err != nil {
		return err
	}
	defer src.Close()
	if err := static(src); err != nil {
		return err
	}
	dst, err := os.OpenFile(filepath.Join(p.Dir, "init"), os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o755)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, dst.Close()) }()
	// Shares the blocks where the filesystem can.
	if unix.IoctlFileClone(int(dst.Fd()), int(src.Fd())) == nil {
		return nil
	}
	if _, err = io.Copy(dst, src); err != nil {
		return err
	}
	return dst.Sync()
}

// static refuses a program that wants a loader, which not every sandbox has.
func static(f *os.File) error {
	program, err := elf.NewFile(f)
	if err != nil {
		return fmt.Errorf("%s: %w", f.Name(), err)
	}
	for _, part := range program.Progs {
		if part.Type == elf.PT_INTERP {
			return &fault.Error{Err: fmt.Errorf("%w: %s is linked dynamically, so it cannot be the first process of a sandbox", fault.ErrUnsupported, f.Name()),
				Hint: "Build it with CGO_ENABLED=0, as make build does; or do without --init."}
		}
	}
	return nil
}
