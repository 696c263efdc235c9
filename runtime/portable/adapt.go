package portable

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"

	criucore "github.com/checkpoint-restore/go-criu/v7/crit/images/criu-core"
	"github.com/checkpoint-restore/go-criu/v7/crit/images/fdinfo"
	"github.com/checkpoint-restore/go-criu/v7/crit/images/mnt"
	"github.com/checkpoint-restore/go-criu/v7/crit/images/netdev"
	"github.com/checkpoint-restore/go-criu/v7/crit/images/regfile"
	"github.com/klauspost/compress/gzip"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"

	"github.com/agentbox/agentbox/internal/failpoint"
	"github.com/agentbox/agentbox/internal/fault"
)

// Magic numbers that begin CRIU's images: a common one, then the kind's.
const (
	magicCommon = 0x54564319
	magicFiles  = 0x56303138
	magicMounts = 0x55563928
	magicIDs    = 0x54432030
	magicNetns  = 0x55933752
	magicCore   = 0x55053847

	maxImageFile  = 256 << 20 // of the kinds that are read here
	maxImageEntry = 4 << 20
)

// externalNetns is runc's name for the network namespace that it is given.
const externalNetns = "extRootNetNS"

// dropped are mounts of other engines that a sandbox does not have. Without
// them in the images CRIU does not ask the runtime where they come from.
func dropped(target string) bool {
	return target == "/run/.containerenv" || target == "/run/secrets" || strings.HasPrefix(target, "/run/secrets/")
}

// adaptImages makes the process images of another engine such as a dump of a
// sandbox leaves them: /dev/shm is a tmpfs of the container's own, with what
// devshm-checkpoint.tar has; the engine's own files in /run and the control
// groups are not mounted, nor open; the network namespace is one from outside.
func adaptImages(dir string, shm *os.File, f Facts) (notes []string, err error) {
	root, err := os.OpenRoot(dir)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, root.Close()) }()
	names, err := imageNames(root, "mountpoints-*.img")
	if err != nil {
		return nil, err
	}
	if notes, err = withoutCgroups(root, names); err != nil {
		return notes, err
	}
	used, err := usedMounts(root)
	if err != nil {
		return notes, err
	}
	for _, name := range names {
		more, err := adaptMounts(root, name, shm, used)
		notes = append(notes, more...)
		if err != nil {
			return notes, err
		}
	}
	if err := failpoint.Hit("portable.import.after-mounts"); err != nil {
		return notes, err
	}
	if f.Network == "host" {
		return notes, nil
	}
	return notes, adaptNetwork(root)
}

// withoutCgroups gives processes /dev/null for the files of their cgroup that they
// have open. Every program of Go, since 1.25, has that with the limit of its CPU
// time, and goes by what it last read where there is nothing to read.
func withoutCgroups(root *os.Root, mounts []string) (notes []string, err error) {
	groups, dev := map[int32]bool{}, int32(-1)
	for _, name := range mounts {
		err := eachEntry(root, name, magicMounts, func(data []byte) error {
			e := &mnt.MntEntry{}
			if err := proto.Unmarshal(data, e); err != nil {
				return err
			}
			switch kind := mnt.Fstype(e.GetFstype()); {
			case kind == mnt.Fstype_CGROUP, kind == mnt.Fstype_CGROUP2:
				groups[int32(e.GetMntId())] = true
			case e.GetMountpoint() == "/dev":
				dev = int32(e.GetMntId())
			}
			return nil
		})
		if err != nil {
			return nil, err
		}
	}
	if len(groups) == 0 || dev < 0 {
		return nil, nil
	}
	var all []proto.Message
	var which []string
	err = eachEntry(root, "files.img", magicFiles, func(data []byte) error {
		e := &fdinfo.FileEntry{}
		if err := proto.Unmarshal(data, e); err != nil {
			return err
		}
		if r := e.GetReg(); r != nil && groups[r.GetMntId()] && r.GetMode()&unix.S_IFMT == unix.S_IFREG {
			if !slices.Contains(which, r.GetName()) {
				which = append(which, r.GetName())
			}
			e.Reg = &regfile.RegFileEntry{
				Id: r.Id, Flags: r.Flags, Pos: proto.Uint64(0), Fown: r.Fown, Name: proto.String("/dev/null"),
				MntId: proto.Int32(dev),
				Mode:  proto.Uint32(unix.S_IFCHR | 0o666),
			}
		}
		all = append(all, e)
		return nil
	})
	if err != nil || len(which) == 0 {
		return nil, err
	}
	slices.Sort(which)
	notes = []string{fmt.Sprintf("Processes have %q open, of their control group; restored, they have /dev/null there.",
		which)}
	return notes, replaceImage(root, "files.img", magicFiles, all)
}

func imageNames(root *os.Root, pattern string) ([]string, error) {
	d, err := root.Open(".")
	if err != nil {
		return nil, err
	}
	defer d.Close()
	all, err := d.Readdirnames(-1)
	if err != nil {
		return nil, err
	}
	all = slices.DeleteFunc(all, func(name string) bool { ok, _ := path.Match(pattern, name); return !ok })
	slices.Sort(all)
	return all, nil
}

// usedMounts are the ids of mounts that processes have files of.
func usedMounts(root *os.Root) (map[int32]bool, error) {
	used := map[int32]bool{}
	err := eachEntry(root, "files.img", magicFiles, func(data []byte) error {
		var e fdinfo.FileEntry
		if err := proto.Unmarshal(data, &e); err != nil {
			return err
		}
		if e.GetReg() != nil {
			used[e.GetReg().GetMntId()] = true
		}
		if e.GetUsk() != nil {
			used[e.GetUsk().GetMntId()] = true
		}
		return nil
	})
	return used, err
}

// rootMode is the mode of the root directory that processes know, if one has it
// open (each has, for its own root). CRIU compares it.
func rootMode(dir string) (mode uint32, ok bool, err error) {
	root, err := os.OpenRoot(dir)
	if err != nil {
		return 0, false, err
	}
	defer root.Close()
	err = eachEntry(root, "files.img", magicFiles, func(data []byte) error {
		var e fdinfo.FileEntry
		if err := proto.Unmarshal(data, &e); err != nil {
			return err
		}
		if r := e.GetReg(); r != nil && (r.GetName() == "/" || r.GetName() == ".") &&
			r.GetMode()&unix.S_IFMT == unix.S_IFDIR {
			mode, ok = r.GetMode()&0o7777, true
		}
		return nil
	})
	return mode, ok, err
}

func adaptMounts(root *os.Root, name string, shm *os.File, used map[int32]bool) (notes []string, err error) {
	var kept []proto.Message
	changed := false
	err = eachEntry(root, name, magicMounts, func(data []byte) error {
		e := &mnt.MntEntry{}
		if err := proto.Unmarshal(data, e); err != nil {
			return err
		}
		target := e.GetMountpoint()
		drop := dropped(target) || e.GetFstype() == uint32(mnt.Fstype_CGROUP) ||
			target == "/sys/fs/cgroup" && slices.Contains([]uint32{
				uint32(mnt.Fstype_TMPFS), uint32(mnt.Fstype_CGROUP2),
			}, e.GetFstype())
		switch {
		case drop && used[int32(e.GetMntId())]:
			notes = append(notes, fmt.Sprintf("A process has a file of %s open, which a sandbox does not have: it cannot be restored.", target))
		case drop:
			changed = true
			return nil
		case target == "/dev/shm" && e.GetExtKey() != "":
			changed = true
			e.ExtKey = nil
			if e.GetFstype() != uint32(mnt.Fstype_TMPFS) {
				e.Options = proto.String("size=65536k")
			}
			e.Fstype = proto.Uint32(uint32(mnt.Fstype_TMPFS))
			e.Source, e.Root = proto.String("shm"), proto.String("/")
			if err := writeShm(root, fmt.Sprintf("tmpfs-dev-%d.tar.gz.img", e.GetRootDev()), shm); err != nil {
				return err
			}
		}
		kept = append(kept, e)
		return nil
	})
	if err != nil || !changed {
		return notes, err
	}
	return notes, replaceImage(root, name, magicMounts, kept)
}

// writeShm makes the image of a tmpfs, which is what tar and gzip write.
func writeShm(root *os.Root, name string, shm *os.File) (err error) {
	f, err := root.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if errors.Is(err, os.ErrExist) {
		return corrupt("%s is there twice", name)
	}
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	z := gzip.NewWriter(f)
	if shm != nil {
		if _, err := shm.Seek(0, io.SeekStart); err != nil {
			return err
		}
		if _, err := io.Copy(z, shm); err != nil {
			return err
		}
	} else if _, err := z.Write(make([]byte, 1024)); err != nil { // an empty tar
		return err
	}
	return z.Close()
}

// adaptNetwork gives the processes the network namespace that they are
// restored into, where the dump took none along (--empty-ns).
func adaptNetwork(root *os.Root) error {
	have, err := imageNames(root, "netns-*.img")
	if err != nil || len(have) > 0 {
		return err
	}
	id := uint32(0)
	err = eachEntry(root, "ids-1.img", magicIDs, func(data []byte) error {
		var e criucore.TaskKobjIdsEntry
		if err := proto.Unmarshal(data, &e); err != nil {
			return err
		}
		id = e.GetNetNsId()
		return nil
	})
	if err != nil || id == 0 {
		return err
	}
	return replaceImage(root, fmt.Sprintf("netns-%d.img", id), magicNetns,
		[]proto.Message{&netdev.NetnsEntry{ExtKey: proto.String(externalNetns)}})
}

// eachEntry calls fn for the entries of an image; one that is not there has none.
func eachEntry(root *os.Root, name string, magic uint32, fn func(data []byte) error) (err error) {
	f, err := root.Open(name)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	data, err := io.ReadAll(io.LimitReader(f, maxImageFile+1))
	if err != nil {
		return err
	}
	return entriesOf(filepath.Base(name), data, magic, fn)
}

func entriesOf(name string, data []byte, magic uint32, fn func(data []byte) error) error {
	if len(data) > maxImageFile {
		return corrupt("%s is longer than %d bytes", name, maxImageFile)
	}
	if len(data) < 8 || binary.LittleEndian.Uint32(data) != magicCommon ||
		binary.LittleEndian.Uint32(data[4:]) != magic {
		return corrupt("%s is not such an image", name)
	}
	for data = data[8:]; len(data) > 0; {
		if len(data) < 4 {
			return corrupt("%s is cut off", name)
		}
		n := binary.LittleEndian.Uint32(data)
		if n > maxImageEntry || int(n) > len(data)-4 {
			return corrupt("%s has an entry of %d bytes", name, n)
		}
		if err := fn(data[4 : 4+n]); err != nil {
			if errors.Is(err, fault.ErrDenied) || errors.Is(err, fault.ErrCorrupt) {
				return err
			}
			return corrupt("%s: %v", name, err)
		}
		data = data[4+n:]
	}
	return nil
}

// replaceImage writes an image.
func replaceImage(root *os.Root, name string, magic uint32, list []proto.Message) error {
	out := binary.LittleEndian.AppendUint32(nil, magicCommon)
	out = binary.LittleEndian.AppendUint32(out, magic)
	for _, e := range list {
		data, err := proto.MarshalOptions{Deterministic: true}.Marshal(e)
		if err != nil {
			return err
		}
		out = binary.LittleEndian.AppendUint32(out, uint32(len(data)))
		out = append(out, data...)
	}
	return root.WriteFile(name, out, 0o600)
}
