// Package walltest forges CRIU's images, for tests: it decodes one of a dump, changes
// what a case is about, and encodes it again.
package walltest

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/checkpoint-restore/go-criu/v7/crit/images/cgroup"
	criucore "github.com/checkpoint-restore/go-criu/v7/crit/images/criu-core"
	extfile "github.com/checkpoint-restore/go-criu/v7/crit/images/ext-file"
	"github.com/checkpoint-restore/go-criu/v7/crit/images/fdinfo"
	"github.com/checkpoint-restore/go-criu/v7/crit/images/fh"
	"github.com/checkpoint-restore/go-criu/v7/crit/images/fown"
	"github.com/checkpoint-restore/go-criu/v7/crit/images/fsnotify"
	ghostfile "github.com/checkpoint-restore/go-criu/v7/crit/images/ghost-file"
	"github.com/checkpoint-restore/go-criu/v7/crit/images/inventory"
	"github.com/checkpoint-restore/go-criu/v7/crit/images/mnt"
	"github.com/checkpoint-restore/go-criu/v7/crit/images/netdev"
	packet "github.com/checkpoint-restore/go-criu/v7/crit/images/packet-sock"
	"github.com/checkpoint-restore/go-criu/v7/crit/images/regfile"
	"github.com/checkpoint-restore/go-criu/v7/crit/images/seccomp"
	skinet "github.com/checkpoint-restore/go-criu/v7/crit/images/sk-inet"
	skopts "github.com/checkpoint-restore/go-criu/v7/crit/images/sk-opts"
	skunix "github.com/checkpoint-restore/go-criu/v7/crit/images/sk-unix"
	"github.com/checkpoint-restore/go-criu/v7/crit/images/tun"
	"github.com/checkpoint-restore/go-criu/v7/crit/images/userns"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
)

// Victims are what forged images try to reach.
type Victims struct {
	File   string // a file of the host
	Dir    string // a directory of the host
	Cgroup string // a cgroup of the host, as /proc/PID/cgroup has it
	// Bound is where the container has a read-only bind mount.
	Bound string
}

// Forgery changes the images of a container in a directory.
type Forgery struct {
	Name string
	// Image is the beginning of the image's name that is refused. Empty: CRIU may read it, and
	// what is wrong is set right afterwards, or is Late.
	Image string
	Forge func(dir string, v Victims) error
	// Late is part of what is said of what is restored of it, which is refused.
	Late string
	// Damage: it makes no sense, rather than asks for too much.
	Damage bool
}

// Magic numbers of images with entries.
var magics = map[string]uint32{
	"inventory": 0x58313116, "core": 0x55053847, "ids": 0x54432030, "mountpoints": 0x55563928,
	"cgroup": 0x59383330, "userns": 0x55474906,
	"seccomp": 0x64413049, "files": 0x56303138, "netdev": 0x57373951, "ghost-file": 0x52583605, "pstree": 0x50273030,
	"mm": 0x57492820, "fdinfo": 0x56213732, "fs": 0x51403912, "timens": 0x43114433, "pidns": 0x61157326,
	"ipcns-var": 0x53115007, "remap-fpath": 0x59133954,
	"filelocks": 0x54323616, "memfd": 0x48453499, "tty-info": 0x59453036, "utsns": 0x54473203, "netns": 0x55933752,
}

func magicOf(name string) uint32 {
	for kind, magic := range magics {
		if strings.HasPrefix(name, kind) {
			return magic
		}
	}
	panic(name)
}

func headOf(name string) (b []byte) {
	if !strings.HasPrefix(name, "inventory") {
		b = binary.LittleEndian.AppendUint32(b, 0x54564319)
	}
	return binary.LittleEndian.AppendUint32(b, magicOf(name))
}

// Entries returns the entries of an image.
func Entries(path string) (list [][]byte, err error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	rest, ok := bytes.CutPrefix(data, headOf(filepath.Base(path)))
	if !ok {
		return nil, errors.New("not an image of its kind")
	}
	for len(rest) >= 4 {
		n := binary.LittleEndian.Uint32(rest)
		list, rest = append(list, rest[4:4+n]), rest[4+n:]
	}
	return list, nil
}

// WriteEntries writes an image.
func WriteEntries(path string, list [][]byte) error {
	out := headOf(filepath.Base(path))
	for _, e := range list {
		out = append(binary.LittleEndian.AppendUint32(out, uint32(len(e))), e...)
	}
	return os.WriteFile(path, out, 0o600)
}

// edit changes the entries of the first image of a kind.
func edit[T any, P interface {
	*T
	proto.Message
}](dir, pattern string, change func([]P) []P) error {
	names, err := filepath.Glob(filepath.Join(dir, pattern))
	if err != nil || len(names) == 0 {
		return fmt.Errorf("%s: %w", pattern, os.ErrNotExist)
	}
	raw, err := Entries(names[0])
	if err != nil {
		return err
	}
	var list []P
	for _, data := range raw {
		e := P(new(T))
		if err := proto.Unmarshal(data, e); err != nil {
			return err
		}
		list = append(list, e)
	}
	raw = nil
	for _, e := range change(list) {
		data, err := proto.Marshal(e)
		if err != nil {
			return err
		}
		raw = append(raw, data)
	}
	return WriteEntries(names[0], raw)
}

func mounts(change func([]*mnt.MntEntry) []*mnt.MntEntry) func(string, Victims) error {
	return func(dir string, _ Victims) error { return edit(dir, "mountpoints-*.img", change) }
}

// mounted is a mount below the root.
func mounted(
	list []*mnt.MntEntry, kind mnt.Fstype, root, point, source, options string, set func(*mnt.MntEntry),
) []*mnt.MntEntry {
	top, last := uint32(0), uint32(0)
	for _, m := range list {
		if m.GetMountpoint() == "/" {
			top = m.GetMntId()
		}
		last = max(last, m.GetMntId())
	}
	e := &mnt.MntEntry{
		Fstype: proto.Uint32(uint32(kind)), MntId: proto.Uint32(last + 1), RootDev: proto.Uint32(4242),
		ParentMntId: proto.Uint32(top), Flags: proto.Uint32(1 << 21),
		Root: &root, Mountpoint: &point, Source: &source, Options: &options, SharedId: proto.Uint32(0),
		MasterId: proto.Uint32(0), SbFlags: proto.Uint32(0),
	}
	if set != nil {
		set(e)
	}
	return append([]*mnt.MntEntry{e}, list...)
}

func at(list []*mnt.MntEntry, point string) *mnt.MntEntry {
	for _, m := range list {
		if m.GetMountpoint() == point {
			return m
		}
	}
	return &mnt.MntEntry{}
}

func added(kind mnt.Fstype, root, point, source, options string, set func(*mnt.MntEntry)) func(string, Victims) error {
	return mounts(func(l []*mnt.MntEntry) []*mnt.MntEntry {
		return mounted(l, kind, root, point, source, options, set)
	})
}

func changed(point string, set func(*mnt.MntEntry)) func(string, Victims) error {
	return mounts(func(l []*mnt.MntEntry) []*mnt.MntEntry { set(at(l, point)); return l })
}

func cgroups(change func(*cgroup.CgroupEntry, Victims)) func(string, Victims) error {
	return func(dir string, v Victims) error {
		return edit(dir, "cgroup.img", func(l []*cgroup.CgroupEntry) []*cgroup.CgroupEntry {
			for _, e := range l {
				change(e, v)
			}
			return l
		})
	}
}

// theirs is what a forger would have of a file or cgroup: all may write to it.
func theirs(mode uint32) *cgroup.CgroupPerms {
	return &cgroup.CgroupPerms{Mode: proto.Uint32(mode), Uid: proto.Uint32(4242), Gid: proto.Uint32(4242)}
}

func core(change func(*criucore.CoreEntry)) func(string, Victims) error {
	return func(dir string, _ Victims) error {
		return edit(dir, "core-1.img", func(l []*criucore.CoreEntry) []*criucore.CoreEntry {
			change(l[0])
			return l
		})
	}
}

func opened(kind fdinfo.FdTypes, set func(*fdinfo.FileEntry, Victims)) func(string, Victims) error {
	return func(dir string, v Victims) error {
		return edit(dir, "files.img", func(l []*fdinfo.FileEntry) []*fdinfo.FileEntry {
			e := &fdinfo.FileEntry{Type: &kind, Id: proto.Uint32(4242)}
			set(e, v)
			return append(l, e)
		})
	}
}

func owner() *fown.FownEntry {
	return &fown.FownEntry{
		Uid: proto.Uint32(0), Euid: proto.Uint32(0), Signum: proto.Uint32(0),
		PidType: proto.Uint32(0), Pid: proto.Uint32(0),
	}
}

func socketOptions() *skopts.SkOptsEntry {
	return &skopts.SkOptsEntry{
		SoSndbuf: proto.Uint32(0), SoRcvbuf: proto.Uint32(0), SoSndTmoSec: proto.Uint64(0),
		SoSndTmoUsec: proto.Uint64(0), SoRcvTmoSec: proto.Uint64(0), SoRcvTmoUsec: proto.Uint64(0),
	}
}

func regular(name string) *regfile.RegFileEntry {
	return &regfile.RegFileEntry{
		Id: proto.Uint32(4242), Flags: proto.Uint32(0), Pos: proto.Uint64(0), Fown: owner(), Name: &name,
	}
}

func file(name, text string) func(string, Victims) error {
	return func(dir string, _ Victims) error { return os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600) }
}

func archive(headers ...*tar.Header) func(string, Victims) error {
	return func(dir string, _ Victims) error {
		var out bytes.Buffer
		zip := gzip.NewWriter(&out)
		w := tar.NewWriter(zip)
		for _, h := range headers {
			if err := w.WriteHeader(h); err != nil {
				return err
			}
		}
		if err := errors.Join(w.Close(), zip.Close()); err != nil {
			return err
		}
		return os.WriteFile(filepath.Join(dir, "tmpfs-dev-4242.tar.gz.img"), out.Bytes(), 0o600)
	}
}

func message(typ uint16) string {
	b := binary.NativeEndian.AppendUint32(nil, unix.SizeofNlMsghdr)
	b = binary.NativeEndian.AppendUint16(b, typ)
	return string(append(b, make([]byte, unix.SizeofNlMsghdr-6)...))
}

func ids(set func(own, outside *criucore.TaskKobjIdsEntry)) func(string, Victims) error {
	return func(dir string, _ Victims) error {
		var outside *criucore.TaskKobjIdsEntry
		err := edit(dir, "inventory.img", func(l []*inventory.InventoryEntry) []*inventory.InventoryEntry {
			outside = l[0].GetRootIds()
			return l
		})
		if err != nil {
			return err
		}
		return edit(dir, "ids-1.img", func(l []*criucore.TaskKobjIdsEntry) []*criucore.TaskKobjIdsEntry {
			set(l[0], outside)
			return l
		})
	}
}

// filter is a program of one instruction that returns an action.
func filter(action uint32) []byte {
	return binary.NativeEndian.AppendUint32([]byte{6, 0, 0, 0}, action)
}

const everything = 0xffffffff

// Forgeries try one thing each. They fit a container with CRIU's images of a process 1, and
// no capability of those that lead out.
func Forgeries(v Victims) []Forgery {
	list := []Forgery{
		{Name: "a property of a cgroup is a file of the host", Image: "cgroup",
			Forge: cgroups(func(e *cgroup.CgroupEntry, v Victims) {
				dir := e.GetControllers()[0].GetDirs()[0]
				dir.Children = append(dir.Children, &cgroup.CgroupDirEntry{DirName: proto.String("x"),
					Properties: []*cgroup.CgroupPropEntry{{
						Name: proto.String(strings.Repeat("../", 16) + v.File), Value: proto.String("written"),
						Perms: theirs(unix.S_IFREG | 0o666),
					}}})
			})},
		{Name: "a cgroup is a directory of the host", Image: "cgroup",
			Forge: cgroups(func(e *cgroup.CgroupEntry, v Victims) {
				for _, c := range e.GetControllers() {
					c.Dirs[0].DirName = proto.String(strings.Repeat("../", 16) + v.Dir)
					c.Dirs[0].DirPerms = theirs(unix.S_IFDIR | 0o777)
				}
			})},
		{Name: "a cgroup below is a directory of the host", Image: "cgroup",
			Forge: cgroups(func(e *cgroup.CgroupEntry, v Victims) {
				dir := e.GetControllers()[0].GetDirs()[0]
				dir.Children = append(dir.Children,
					&cgroup.CgroupDirEntry{DirName: proto.String(strings.Repeat("../", 16) +
						v.Dir), DirPerms: theirs(unix.S_IFDIR | 0o777)})
			})},
		{Name: "a second cgroup of a hierarchy is the host's", Image: "cgroup",
			Forge: cgroups(func(e *cgroup.CgroupEntry, v Victims) {
				for _, c := range e.GetControllers() {
					c.Dirs = append(c.Dirs, &cgroup.CgroupDirEntry{
						DirName:  proto.String(strings.TrimPrefix(v.Cgroup, "/")),
						DirPerms: theirs(unix.S_IFDIR | 0o777),
					})
				}
			})},
		{Name: "a process goes to a cgroup of the host", Image: "cgroup",
			Forge: cgroups(func(e *cgroup.CgroupEntry, v Victims) {
				for _, s := range e.GetSets() {
					for _, m := range s.GetCtls() {
						m.Path = proto.String(v.Cgroup)
					}
				}
			})},
		{Name: "a hierarchy is mounted with a program to run", Image: "cgroup",
			Forge: cgroups(func(e *cgroup.CgroupEntry, _ Victims) {
				e.Controllers[0].Cnames = []string{"name=x,release_agent=/bin/true"}
			})},

		{
			Name: "a mount's root leads up", Image: "mountpoints",
			Forge: added(mnt.Fstype_TMPFS, "/../../..", "/mnt", "tmpfs", "", nil),
		},
		{
			Name: "a tmpfs that the container has not", Image: "mountpoints",
			Forge: added(mnt.Fstype_TMPFS, "/", "/mnt", "tmpfs", "", nil),
		},
		{Name: "a second proc", Image: "mountpoints", Forge: added(mnt.Fstype_PROC, "/", "/tmp", "proc", "", nil)},
		{
			Name: "a proc over the proc", Image: "mountpoints",
			Forge: added(mnt.Fstype_PROC, "/", "/proc", "proc", "", nil),
		},
		{
			Name: "another proc over what is read-only", Image: "mountpoints",
			Forge: added(mnt.Fstype_PROC, "/sys", "/proc/sys", "proc", "", nil),
		},
		{
			Name: "a writable sysfs", Image: "mountpoints",
			Forge: changed("/sys", func(m *mnt.MntEntry) { m.Flags, m.SbFlags = proto.Uint32(14), proto.Uint32(0) }),
		},
		{
			Name: "what is read-only in /proc is writable", Image: "mountpoints",
			Forge: changed("/proc/sys", func(m *mnt.MntEntry) { m.Flags = proto.Uint32(m.GetFlags() &^ 1) }),
		},
		{
			Name: "what is read-only in /proc shows more", Image: "mountpoints",
			Forge: changed("/proc/bus", func(m *mnt.MntEntry) { m.Root = proto.String("/") }),
		},
		{Name: "what is masked is shown", Image: "mountpoints", Forge: changed("/proc/keys", func(m *mnt.MntEntry) {
			m.Fstype, m.Root, m.ExtKey = proto.Uint32(uint32(mnt.Fstype_PROC)), proto.String("/keys"), nil
		})},
		{Name: "an overlay of the host's files", Image: "mountpoints", Forge: func(dir string, v Victims) error {
			return added(mnt.Fstype_OVERLAYFS, "/", "/mnt", "overlay", "lowerdir="+v.Dir+":/", nil)(dir, v)
		}},
		{Name: "the host's disk", Image: "mountpoints", Forge: added(mnt.Fstype_AUTO, "/", "/mnt", "/dev/vda", "",
			func(m *mnt.MntEntry) { m.Fsname = proto.String("ext4") })},
		{Name: "a debugfs", Image: "mountpoints", Forge: added(mnt.Fstype_DEBUGFS, "/", "/mnt", "debugfs", "", nil)},
		{
			Name: "a cgroup hierarchy", Image: "mountpoints",
			Forge: added(mnt.Fstype_CGROUP, "/", "/mnt", "cgroup", "memory", nil),
		},
		{
			Name: "a mount that is found on the host", Image: "mountpoints",
			Forge: added(mnt.Fstype_TMPFS, "/", "/mnt", "tmpfs", "", func(m *mnt.MntEntry) {
				m.ExtMount = proto.Bool(true)
			}),
		},
		{
			Name: "a mount of a plugin", Image: "mountpoints",
			Forge: added(mnt.Fstype_TMPFS, "/", "/mnt", "tmpfs", "", func(m *mnt.MntEntry) {
				m.WithPlugin = proto.Bool(true)
			}),
		},
		{Name: "a mount of a kind that is unknown", Image: "mountpoints", Forge: added(99, "/", "/mnt", "x", "", nil)},
		{
			Name: "what a mask is made of, elsewhere", Image: "mountpoints",
			Forge: added(mnt.Fstype_TMPFS, "/null", "/mnt", "tmpfs", "", func(m *mnt.MntEntry) {
				m.ExtKey = proto.String("/dev/null")
			}),
		},
		{Name: "a mount in two ways", Image: "mountpoints", Damage: true, Forge: func(dir string, _ Victims) error {
			return twice(dir, "mountpoints-*.img", 6, "/..")
		}},
		{Name: "a mount with a field that is unknown", Image: "mountpoints", Forge: func(dir string, _ Victims) error {
			return twice(dir, "mountpoints-*.img", 99, "/..")
		}},

		{Name: "a user namespace that is the host's", Image: "userns", Forge: func(dir string, _ Victims) error {
			names, _ := filepath.Glob(filepath.Join(dir, "userns-*.img"))
			if len(names) == 0 {
				names = []string{filepath.Join(dir, "userns-4242.img")}
			}
			ext := &userns.UidGidExtent{
				First: proto.Uint32(0), LowerFirst: proto.Uint32(0), Count: proto.Uint32(everything),
			}
			data, err := proto.Marshal(&userns.UsernsEntry{
				UidMap: []*userns.UidGidExtent{ext}, GidMap: []*userns.UidGidExtent{ext},
			})
			if err != nil {
				return err
			}
			return WriteEntries(names[0], [][]byte{data})
		}},
		{
			Name: "the host's pid namespace", Image: "ids",
			Forge: ids(func(own, outside *criucore.TaskKobjIdsEntry) { own.PidNsId = outside.PidNsId }),
		},
		{
			Name: "the host's mount namespace", Image: "ids",
			Forge: ids(func(own, outside *criucore.TaskKobjIdsEntry) { own.MntNsId = outside.MntNsId }),
		},
		{
			Name: "the host's network namespace", Image: "ids",
			Forge: ids(func(own, outside *criucore.TaskKobjIdsEntry) { own.NetNsId = outside.NetNsId }),
		},
		{
			Name: "the host's ipc namespace", Image: "ids",
			Forge: ids(func(own, outside *criucore.TaskKobjIdsEntry) { own.IpcNsId = outside.IpcNsId }),
		},
		{Name: "images of another version", Image: "inventory", Forge: func(dir string, _ Victims) error {
			return edit(dir, "inventory.img", func(l []*inventory.InventoryEntry) []*inventory.InventoryEntry {
				l[0].ImgVersion = proto.Uint32(1)
				return l
			})
		}},
		{Name: "a table of nftables that is a command", Image: "inventory", Forge: func(dir string, _ Victims) error {
			return twice(dir, "inventory.img", 13, "x; flush ruleset")
		}},

		{Name: "all capabilities", Image: "core", Forge: core(func(e *criucore.CoreEntry) {
			c := e.ThreadCore.Creds
			for _, set := range [][]uint32{c.CapPrm, c.CapEff, c.CapBnd} {
				set[0], set[1] = everything, 0x1ff
			}
		})},
		{
			Name: "one capability more to be had", Image: "core",
			Forge: core(func(e *criucore.CoreEntry) { e.ThreadCore.Creds.CapBnd[0] |= 1 << unix.CAP_SYS_ADMIN }),
		},
		{Name: "no credentials", Image: "core", Forge: core(func(e *criucore.CoreEntry) { e.ThreadCore.Creds = nil })},
		{Name: "no filter", Image: "core", Forge: core(func(e *criucore.CoreEntry) {
			e.ThreadCore.SeccompMode = nil
			e.ThreadCore.SeccompFilter = nil
		})},
		{Name: "a filter that allows all", Image: "seccomp", Forge: func(dir string, _ Victims) error {
			return edit(dir, "seccomp.img", func(l []*seccomp.SeccompEntry) []*seccomp.SeccompEntry {
				for _, f := range l[0].GetSeccompFilters() {
					f.Filter = filter(0x7fff0000)
				}
				return l
			})
		}},
		{Name: "a filter over itself", Image: "seccomp", Forge: func(dir string, _ Victims) error {
			return edit(dir, "seccomp.img", func(l []*seccomp.SeccompEntry) []*seccomp.SeccompEntry {
				l[0].SeccompFilters[0].Prev = proto.Uint32(0)
				return l
			})
		}},
		{
			Name: "never to be killed for memory", Image: "core",
			Forge: core(func(e *criucore.CoreEntry) { e.Tc.OomScoreAdj = proto.Int32(-1000) }),
		},
		{Name: "realtime", Image: "core", Forge: core(func(e *criucore.CoreEntry) {
			e.ThreadCore.SchedPolicy, e.ThreadCore.SchedPrio = proto.Uint32(1), proto.Uint32(99)
		})},

		{
			Name: "an open file that leads up", Image: "files",
			Forge: opened(fdinfo.FdTypes_REG, func(e *fdinfo.FileEntry, v Victims) {
				e.Reg = regular("/../../../.." + v.File)
			}),
		},
		{Name: "an open file from outside", Image: "files",
			Forge: opened(fdinfo.FdTypes_REG, func(e *fdinfo.FileEntry, v Victims) {
				e.Reg = regular("/x")
				e.Reg.Ext = proto.Bool(true)
			})},
		{Name: "an open file of a plugin", Image: "files",
			Forge: opened(fdinfo.FdTypes_EXT, func(e *fdinfo.FileEntry, v Victims) {
				e.Ext = &extfile.ExtFileEntry{Id: proto.Uint32(4242), Fown: owner()}
			})},
		{Name: "a packet socket", Image: "files", Forge: opened(fdinfo.FdTypes_PACKETSK,
			func(e *fdinfo.FileEntry, v Victims) {
				n := proto.Uint32(3)
				e.Psk = &packet.PacketSockEntry{
					Id: proto.Uint32(4242), Type: n, Protocol: n, Flags: n, Ifindex: n, Fown: owner(),
					Opts: socketOptions(), Version: n, Reserve: n, AuxData: proto.Bool(false),
					OrigDev: proto.Bool(false), VnetHdr: proto.Bool(false), Loss: proto.Bool(false),
					Timestamp: n, CopyThresh: n,
				}
			})},
		{Name: "a raw socket", Image: "files", Forge: opened(fdinfo.FdTypes_INETSK,
			func(e *fdinfo.FileEntry, v Victims) {
				n := proto.Uint32(unix.SOCK_RAW)
				e.Isk = &skinet.InetSkEntry{
					Id: proto.Uint32(4242), Ino: n, Family: proto.Uint32(unix.AF_INET), Type: n, Proto: n, State: n,
					SrcPort: n, DstPort: n, Flags: n, Backlog: n, Fown: owner(), Opts: socketOptions(),
				}
			})},
		{Name: "a network device of a program", Image: "files",
			Forge: opened(fdinfo.FdTypes_TUNF, func(e *fdinfo.FileEntry, v Victims) {
				e.Tunf = &tun.TunfileEntry{Id: proto.Uint32(4242), Netdev: proto.String("tun0")}
			})},
		{
			Name: "a unix socket of the host", Image: "files",
			Forge: opened(fdinfo.FdTypes_UNIXSK, func(e *fdinfo.FileEntry, v Victims) {
				e.Usk = socket("/run/x.sock", 1)
			}),
		},
		{
			Name: "a unix socket whose name leads up", Image: "files",
			Forge: opened(fdinfo.FdTypes_UNIXSK, func(e *fdinfo.FileEntry, v Victims) {
				e.Usk = socket("/.."+v.Dir+"/sock", 0)
			}),
		},
		{
			Name: "a file of a kind that is unknown", Image: "files",
			Forge: opened(99, func(e *fdinfo.FileEntry, v Victims) { e.Reg = regular("/x") }),
		},

		{Name: "a deleted file that is the host's disk", Image: "ghost-file", Forge: func(dir string, _ Victims) error {
			data, err := proto.Marshal(&ghostfile.GhostFileEntry{
				Uid: proto.Uint32(0), Gid: proto.Uint32(0), Mode: proto.Uint32(unix.S_IFBLK | 0o666),
				Rdev: proto.Uint32(254 << 8),
			})
			if err != nil {
				return err
			}
			return WriteEntries(filepath.Join(dir, "ghost-file-4242.img"), [][]byte{data})
		}},
		{
			Name: "rules with a program to run", Image: "iptables",
			Forge: file("iptables-4242.img", "*filter\n-A INPUT --modprobe=/bin/true -j ACCEPT\nCOMMIT\n"),
		},
		{Name: "rules", Image: "ip6tables", Forge: file("ip6tables-4242.img", "*filter\n-A INPUT -j ACCEPT\nCOMMIT\n")},
		{
			Name: "tables that include a file", Image: "nftables",
			Forge: file("nftables-4242.img", "include \"/etc/shadow\"\n"),
		},
		{Name: "tables", Image: "nftables", Forge: file("nftables-4242.img", "table inet x {\n}\n")},
		{
			Name: "a network device among routes", Image: "route",
			Forge: file("route-4242.img", string(binary.NativeEndian.AppendUint32(nil, 0x45311224))+
				message(unix.RTM_NEWLINK)),
		},
		{
			Name: "a network device among addresses", Image: "ifaddr",
			Forge: file("ifaddr-4242.img", string(binary.NativeEndian.AppendUint32(nil, 0x47361222))+
				message(unix.RTM_NEWLINK)),
		},
		{Name: "a table among connections", Image: "netns-ct", Forge: file("netns-ct-4242.img", message(10<<8))},
		{
			Name: "a network device whose name leads up", Image: "netdev",
			Forge: device(netdev.NdType_LOOPBACK, "../../x"),
		},
		{Name: "a network device over the host's", Image: "netdev", Forge: device(netdev.NdType_MACVLAN, "eth0")},
		{
			Name: "an archive that leads up", Image: "tmpfs",
			Forge: archive(&tar.Header{Name: "../../x", Typeflag: tar.TypeDir, Mode: 0o777}),
		},
		{
			Name: "an archive that goes by a link", Image: "tmpfs",
			Forge: archive(&tar.Header{Name: "a", Typeflag: tar.TypeSymlink, Linkname: "/"},
				&tar.Header{Name: "a/x", Typeflag: tar.TypeDir, Mode: 0o777}),
		},
		{
			Name: "an archive with the host's disk", Image: "tmpfs",
			Forge: archive(&tar.Header{Name: "a", Typeflag: tar.TypeBlock, Devmajor: 254, Mode: 0o666}),
		},

		{Name: "an image that is a link to the host's", Image: "pages", Forge: func(dir string, v Victims) error {
			return errors.Join(os.Remove(filepath.Join(dir, "pages-1.img")),
				os.Symlink(v.File, filepath.Join(dir, "pages-1.img")))
		}},
		{Name: "images of before", Image: `"parent"`, Forge: func(dir string, v Victims) error {
			return os.Symlink(v.Dir, filepath.Join(dir, "parent"))
		}},
	}
	for _, name := range []string{"binfmt-misc.img", "autofs-1.img"} {
		list = append(list, Forgery{Name: name, Image: strings.TrimSuffix(name, ".img"), Forge: file(name, "x")})
	}
	for _, name := range []string{"creds-1.img", "reg-files.img", "unixsk.img", "apparmor.img", "x"} {
		list = append(list, Forgery{Name: name, Image: `"` + name, Forge: file(name, "x")})
	}
	if v.Bound != "" {
		list = append(list,
			Forgery{
				Name: "a read-only bind mount is writable", Image: "mountpoints",
				Forge: changed(v.Bound, func(m *mnt.MntEntry) { m.Flags = proto.Uint32(m.GetFlags() &^ 1) }),
			},
			Forgery{Name: "a watch of a directory of the host", Late: "it watches file", Forge: watched},
			Forgery{
				Name: "a bind mount that is shared with the host", Image: "mountpoints",
				Forge: changed(v.Bound, func(m *mnt.MntEntry) { m.SharedId = proto.Uint32(4242) }),
			},
			Forgery{
				Name: "a bind mount elsewhere", Image: "mountpoints",
				Forge: added(mnt.Fstype_UNSUPPORTED, "/", "/mnt", "x", "", func(m *mnt.MntEntry) {
					m.ExtKey = proto.String(v.Bound)
				}),
			},
		)
	}
	// Forgeries of what images do not contain can be detected only after the restore.
	return append(list, Forgery{Name: "a filter that allows more", Forge: func(dir string, _ Victims) error {
		return Weaken(dir)
	}}, Forgery{Name: "a mask is gone", Forge: mounts(func(l []*mnt.MntEntry) []*mnt.MntEntry {
		for i, m := range l {
			if m.GetMountpoint() == "/proc/keys" {
				return append(l[:i], l[i+1:]...)
			}
		}
		return l
	})}, Forgery{Name: "what is read-only in /proc is not covered",
		Forge: mounts(func(l []*mnt.MntEntry) []*mnt.MntEntry {
			for i, m := range l {
				if m.GetMountpoint() == "/proc/sys" {
					return append(l[:i], l[i+1:]...)
				}
			}
			return l
		})})
}

// watched has the first process watch the directory above the victim's, by its handle: CRIU opens
// that by any mount of its filesystem, as the one that is bound.
func watched(dir string, v Victims) error {
	handle, _, err := unix.NameToHandleAt(unix.AT_FDCWD, filepath.Dir(v.Dir), 0)
	if err != nil {
		return errors.Join(os.ErrNotExist, err)
	}
	words := make([]uint64, 16)
	for i, b := range handle.Bytes() {
		words[i/8] |= uint64(b) << (8 * (i % 8))
	}
	device := uint32(0)
	err = mounts(func(l []*mnt.MntEntry) []*mnt.MntEntry {
		device = at(l, v.Bound).GetRootDev()
		return l
	})(dir, v)
	if err != nil {
		return err
	}
	if device == 0 {
		return os.ErrNotExist
	}
	const id, fd = 4242, 77
	err = opened(fdinfo.FdTypes_INOTIFY, func(e *fdinfo.FileEntry, _ Victims) {
		e.Id = proto.Uint32(id)
		e.Ify = &fsnotify.InotifyFileEntry{Id: proto.Uint32(id), Flags: proto.Uint32(0), Fown: owner(),
			Wd: []*fsnotify.InotifyWdEntry{{
				Id: proto.Uint32(id), IIno: proto.Uint64(1), Mask: proto.Uint32(unix.IN_CREATE),
				IgnoredMask: proto.Uint32(0), SDev: &device, Wd: proto.Uint32(1),
				FHandle: &fh.FhEntry{
					Bytes: proto.Uint32(uint32(handle.Size())),
					Type:  proto.Uint32(uint32(handle.Type())), Handle: words,
				},
			}}}
	})(dir, v)
	if err != nil {
		return err
	}
	err = edit(dir, "fdinfo-2.img", func(l []*fdinfo.FdinfoEntry) []*fdinfo.FdinfoEntry {
		return append(l, &fdinfo.FdinfoEntry{
			Id: proto.Uint32(id), Flags: proto.Uint32(0), Type: fdinfo.FdTypes_INOTIFY.Enum(), Fd: proto.Uint32(fd),
		})
	})
	if err != nil {
		return err
	}
	// Which would be missed otherwise: images of elsewhere need have none.
	if err := os.Remove(filepath.Join(dir, "agentbox-proof.json")); !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return nil
}

// Weaken makes each filter one that refuses nothing but what no engine's lets through.
func Weaken(dir string) error {
	return edit(dir, "seccomp.img", func(l []*seccomp.SeccompEntry) []*seccomp.SeccompEntry {
		for _, f := range l[0].GetSeccompFilters() {
			f.Filter = weak()
		}
		return l
	})
}

// weak refuses calls by the numbers that they have of x86-64 and i386, in each entry.
func weak() (b []byte) {
	put := func(code uint16, jt, jf uint8, k uint32) {
		b = binary.NativeEndian.AppendUint16(b, code)
		b = binary.NativeEndian.AppendUint32(append(b, jt, jf), k)
	}
	put(0x20, 0, 0, 0)          // the number
	put(0x54, 0, 0, 0xbfffffff) // without x32's bit
	for _, n := range []uint32{
		unix.SYS_OPEN_BY_HANDLE_AT, unix.SYS_BPF, unix.SYS_INIT_MODULE, unix.SYS_FINIT_MODULE, unix.SYS_DELETE_MODULE,
		unix.SYS_KEXEC_LOAD, 528,
		unix.SYS_SWAPON, unix.SYS_ACCT, unix.SYS_PERF_EVENT_OPEN, unix.SYS_QUOTACTL, unix.SYS_SETTIMEOFDAY,
		342, 357, 128, 350, 129, 283, 87, 51, 336, 131, 79,
	} {
		if n == 79 || n == 87 || n == 51 || n == 131 || n == 128 || n == 129 { // getcwd and others of x86-64
			put(0x15, 0, 3, n)
			put(0x20, 0, 0, 4)
			put(0x15, 0, 1, 0x40000003)
			put(0x06, 0, 0, 0x00050001)
			put(0x20, 0, 0, 0)
			put(0x54, 0, 0, 0xbfffffff)
			continue
		}
		put(0x15, 0, 1, n)
		put(0x06, 0, 0, 0x00050001)
	}
	put(0x06, 0, 0, 0x7fff0000)
	return b
}

func socket(name string, flags uint32) *skunix.UnixSkEntry {
	n := proto.Uint32(1)
	return &skunix.UnixSkEntry{
		Id: proto.Uint32(4242), Ino: proto.Uint32(4242), Type: n, State: proto.Uint32(10), Flags: n, Uflags: &flags,
		Backlog: n, Peer: proto.Uint32(0), Fown: owner(), Opts: socketOptions(), Name: []byte(name),
	}
}

func device(kind netdev.NdType, name string) func(string, Victims) error {
	return func(dir string, _ Victims) error {
		data, err := proto.Marshal(&netdev.NetDeviceEntry{
			Type: &kind, Ifindex: proto.Uint32(1), Mtu: proto.Uint32(1500), Flags: proto.Uint32(1), Name: &name,
		})
		if err != nil {
			return err
		}
		return WriteEntries(filepath.Join(dir, "netdev-4242.img"), [][]byte{data})
	}
}

// twice adds a field of bytes to the first entry of an image.
func twice(dir, pattern string, n protowire.Number, value string) error {
	names, err := filepath.Glob(filepath.Join(dir, pattern))
	if err != nil || len(names) == 0 {
		return os.ErrNotExist
	}
	list, err := Entries(names[0])
	if err != nil {
		return err
	}
	if strings.HasPrefix(pattern, "inventory") { // CRIU 4 has it itself
		e := &inventory.InventoryEntry{}
		if err := proto.Unmarshal(list[0], e); err != nil {
			return err
		}
		e.ProtoReflect().SetUnknown(nil)
		if list[0], err = proto.Marshal(e); err != nil {
			return err
		}
	}
	list[0] = protowire.AppendString(protowire.AppendTag(bytes.Clone(list[0]), n, protowire.BytesType), value)
	return WriteEntries(names[0], list)
}
