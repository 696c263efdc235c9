package portable

import (
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/checkpoint-restore/go-criu/v7/crit/images/fdinfo"
	"github.com/checkpoint-restore/go-criu/v7/crit/images/fown"
	"github.com/checkpoint-restore/go-criu/v7/crit/images/mnt"
	"github.com/checkpoint-restore/go-criu/v7/crit/images/regfile"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"
)

// An open file of a process's cgroup, as every program of Go has, becomes /dev/null in a sandbox,
// with a note; an open directory of it cannot be restored, with another note.
func TestCgroupFiles(t *testing.T) {
	root, err := os.OpenRoot(t.TempDir())
	must(t, err)
	defer root.Close()
	mount := func(id, parent int, kind mnt.Fstype, target string) proto.Message {
		return &mnt.MntEntry{
			Fstype: proto.Uint32(uint32(kind)), MntId: proto.Uint32(uint32(id)), RootDev: proto.Uint32(1),
			ParentMntId: proto.Uint32(uint32(parent)),
			Flags:       proto.Uint32(0), Root: proto.String("/"), Mountpoint: proto.String(target),
			Source: proto.String("x"), Options: proto.String(""),
		}
	}
	file := func(id uint32, mount int32, name string, mode uint32) *fdinfo.FileEntry {
		return &fdinfo.FileEntry{Type: fdinfo.FdTypes_REG.Enum(), Id: &id, Reg: &regfile.RegFileEntry{
			Id: &id, Flags: proto.Uint32(unix.O_CLOEXEC), Pos: proto.Uint64(4), Name: &name, MntId: &mount,
			Size: proto.Uint64(0), Mode: &mode,
			Fown: &fown.FownEntry{
				Uid: proto.Uint32(0), Euid: proto.Uint32(0), Signum: proto.Uint32(0),
				PidType: proto.Uint32(0), Pid: proto.Uint32(0),
			},
		}}
	}
	must(t, replaceImage(root, "mountpoints-9.img", magicMounts, []proto.Message{
		mount(1, 0, mnt.Fstype_OVERLAYFS, "/"), mount(2, 1, mnt.Fstype_TMPFS, "/dev"),
		mount(3, 1, mnt.Fstype_SYSFS, "/sys"),
		mount(4, 3, mnt.Fstype_CGROUP2, "/sys/fs/cgroup"),
	}))
	kept, limit, group := file(1, 1, "/log", unix.S_IFREG|0o644),
		file(2, 4, "/sys/fs/cgroup/cpu.max", unix.S_IFREG|0o644), file(3, 4, "/sys/fs/cgroup", unix.S_IFDIR|0o755)
	must(t, replaceImage(root, "files.img", magicFiles, []proto.Message{kept, limit, group}))
	notes, err := adaptImages(root.Name(), nil, Facts{})
	must(t, err)
	if len(notes) != 2 || !strings.Contains(notes[0], `"/sys/fs/cgroup/cpu.max"`) ||
		!strings.Contains(notes[0], "/dev/null") || !strings.Contains(notes[1], "cannot be restored") {
		t.Errorf("notes: %q", notes)
	}
	var got []*regfile.RegFileEntry
	must(t, eachEntry(root, "files.img", magicFiles, func(data []byte) error {
		e := &fdinfo.FileEntry{}
		must(t, proto.Unmarshal(data, e))
		got = append(got, e.GetReg())
		return nil
	}))
	null := proto.Clone(limit.Reg).(*regfile.RegFileEntry)
	null.Name, null.MntId, null.Mode, null.Pos, null.Size = proto.String("/dev/null"), proto.Int32(2),
		proto.Uint32(unix.S_IFCHR|0o666), proto.Uint64(0), nil
	if !slices.EqualFunc(got, []*regfile.RegFileEntry{kept.Reg, null, group.Reg},
		func(a, b *regfile.RegFileEntry) bool { return proto.Equal(a, b) }) {
		t.Errorf("files: %v", got)
	}
}
