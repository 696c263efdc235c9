package criu

import (
	"bufio"
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	criucore "github.com/checkpoint-restore/go-criu/v7/crit/images/criu-core"
	"github.com/checkpoint-restore/go-criu/v7/crit/images/fdinfo"
	"github.com/checkpoint-restore/go-criu/v7/crit/images/fown"
	ghostfile "github.com/checkpoint-restore/go-criu/v7/crit/images/ghost-file"
	"github.com/checkpoint-restore/go-criu/v7/crit/images/regfile"
	remap "github.com/checkpoint-restore/go-criu/v7/crit/images/remap-file-path"
	criutime "github.com/checkpoint-restore/go-criu/v7/crit/images/time"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"

	"github.com/agentbox/agentbox/internal/fsx"
)

// linkName begins the names that LinkBack makes. CRIU removes them once it has
// restored from them.
const linkName = ".agentbox-link."

// complete writes into the images of a dump what CRIU has left out of them.
func (g *goneFiles) complete(dir, upper string) error {
	c := &completer{goneFiles: g, dir: dir, upper: upper}
	if err := c.read(); err != nil {
		return err
	}
	if len(g.files) > 0 {
		if err := c.names(); err != nil {
			return err
		}
	}
	if err := c.stale(); err != nil {
		return err
	}
	c.places()
	c.order()
	if !c.changed {
		return nil
	}
	files := make([]proto.Message, len(c.files))
	for i, f := range c.files {
		files[i] = f
	}
	remaps := make([]proto.Message, len(c.remaps))
	for i, r := range c.remaps {
		remaps[i] = r
	}
	return errors.Join(writeImage(filepath.Join(dir, filesImage), magicFiles, files),
		writeImage(filepath.Join(dir, remapImage), magicRemap, remaps))
}

type completer struct {
	*goneFiles
	dir, upper string
	files      []*fdinfo.FileEntry
	remaps     []*remap.RemapFilePathEntry
	last       uint32 // id of a file
	ghosts     uint32 // the last id
	by         map[uint32]holderOf
	changed    bool
}

type holderOf struct{ pid, fd int }

func (c *completer) read() error {
	err := optionalImage(c.dir, filesImage, magicFiles, func(data []byte) error {
		e := &fdinfo.FileEntry{}
		if err := proto.Unmarshal(data, e); err != nil {
			return err
		}
		c.files, c.last = append(c.files, e), max(c.last, e.GetId())
		return nil
	})
	if err != nil {
		return err
	}
	return optionalImage(c.dir, remapImage, magicRemap, func(data []byte) error {
		e := &remap.RemapFilePathEntry{}
		if err := proto.Unmarshal(data, e); err != nil {
			return err
		}
		if c.remaps = append(c.remaps, e); e.GetRemapType() == remap.RemapType_GHOST {
			c.ghosts = max(c.ghosts, e.GetRemapId())
		}
		return nil
	})
}

// names gives the files that were external their names, and says where those that have none
// come from.
func (c *completer) names() error {
	for i := 0; i < len(c.files); i++ {
		reg := c.files[i].GetReg()
		if reg == nil || !reg.GetExt() {
			continue
		}
		f := c.goneFiles.files[reg.GetName()]
		if f == nil {
			continue // external by the runtime
		}
		h, err := c.holder(f, reg.GetId())
		if err != nil {
			return err
		}
		reg.Ext, reg.Name, reg.MntId = nil, proto.String(h.path), proto.Int32(int32(f.mount))
		c.changed = true
		if !h.gone {
			continue
		}
		if err := c.remap(f, reg.GetId()); err != nil {
			return fmt.Errorf("file %s, which was deleted: %w", f.lost, err)
		}
	}
	return nil
}

// holder finds by which name the file of an image was held.
func (c *completer) holder(f *gone, id uint32) (holder, error) {
	same := func(h holder) bool { return h.path == f.held[0].path && h.gone == f.held[0].gone }
	if len(f.held) == 0 {
		return holder{}, fmt.Errorf("file %s: the processes that hold it are gone", f.lost)
	}
	if slices.IndexFunc(f.held, func(h holder) bool { return !same(h) }) < 0 {
		return f.held[0], nil
	}
	if c.by == nil {
		if err := c.descriptors(); err != nil {
			return holder{}, err
		}
	}
	by, ok := c.by[id]
	for _, h := range f.held {
		if ok && h.fd == by.fd && h.pid == by.pid || !ok && h.fd < 0 {
			return h, nil
		}
	}
	return f.held[0], nil
}

// descriptors reads which descriptors the files are those of.
func (c *completer) descriptors() error {
	c.by = map[uint32]holderOf{}
	list, err := Processes(c.dir)
	if err != nil {
		return err
	}
	for _, p := range list {
		ids, err := taskFiles(c.dir, p.Pid)
		if err != nil {
			return err
		}
		err = optionalImage(c.dir, fmt.Sprintf("fdinfo-%d.img", ids), magicFdinfo, func(data []byte) error {
			var e fdinfo.FdinfoEntry
			if err := proto.Unmarshal(data, &e); err != nil {
				return err
			}
			if _, ok := c.by[e.GetId()]; !ok {
				c.by[e.GetId()] = holderOf{p.Pid, int(e.GetFd())}
			}
			return nil
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// remap says where a file of which the name is gone comes from.
func (c *completer) remap(f *gone, id uint32) error {
	if !f.asked {
		f.asked = true
		if f.stat.Mode&unix.S_IFMT != unix.S_IFDIR {
			f.other = c.nameLeft(f)
		}
		if f.other == "" {
			c.ghosts++
			if err := f.write(filepath.Join(c.dir, fmt.Sprintf("ghost-file-%x.img", c.ghosts)), c.init); err != nil {
				return err
			}
			f.ghost = c.ghosts
		} else {
			// The link, and what it is to be a link to.
			f.link = c.last + 1
			c.last += 2
			c.files = append(c.files,
				fileEntry(f.link, path.Join("/", path.Dir(f.other), fmt.Sprintf("%s%d", linkName, f.link))),
				fileEntry(c.last, "/"+f.other))
		}
	}
	e := &remap.RemapFilePathEntry{
		OrigId: proto.Uint32(id), RemapId: proto.Uint32(f.ghost), RemapType: remap.RemapType_GHOST.Enum(),
	}
	if f.link != 0 {
		e.RemapId, e.RemapType = proto.Uint32(f.link), remap.RemapType_LINKED.Enum()
	}
	c.remaps = append(c.remaps, e)
	return nil
}

func fileEntry(id uint32, name string) *fdinfo.FileEntry {
	return &fdinfo.FileEntry{Type: fdinfo.FdTypes_REG.Enum(), Id: proto.Uint32(id), Reg: &regfile.RegFileEntry{
		Id: proto.Uint32(id), Flags: proto.Uint32(0), Pos: proto.Uint64(0), Name: proto.String(name),
		Fown: &fown.FownEntry{
			Uid: proto.Uint32(0), Euid: proto.Uint32(0), Signum: proto.Uint32(0),
			PidType: proto.Uint32(0), Pid: proto.Uint32(0),
		},
	}}
}

// nameLeft looks in the upperdir for another name of a file: it is to be the same file as
// that after a restore. A file of a lower layer has none there.
func (c *completer) nameLeft(f *gone) (name string) {
	if c.upper == "" {
		return ""
	}
	found := errors.New("found")
	_ = filepath.WalkDir(c.upper, func(p string, d os.DirEntry, err error) error {
		if err != nil || d.IsDir() || d.Type().IsRegular() != (f.stat.Mode&unix.S_IFMT == unix.S_IFREG) {
			return nil
		}
		var st unix.Stat_t
		if unix.Lstat(p, &st) != nil || st.Size != f.stat.Size || st.Mode != f.stat.Mode || st.Mtim != f.stat.Mtim {
			return nil
		}
		rel, err := filepath.Rel(c.upper, p)
		if err != nil || unix.Lstat(fmt.Sprintf("/proc/%d/root/%s", c.init, rel), &st) != nil ||
			st.Dev != f.stat.Dev || st.Ino != f.stat.Ino {
			return nil
		}
		name = rel
		return found
	})
	return name
}

// places gives what CRIU makes by its name one that can be made. A directory has to be
// free of its name, which another may have by now, where a file can be given another by
// CRIU; and above either may be what is no directory any more.
func (c *completer) places() {
	named := map[string]uint32{}
	byID := map[uint32]*regfile.RegFileEntry{}
	for _, f := range c.files {
		if f.GetReg() != nil {
			byID[f.GetId()] = f.GetReg()
		}
	}
	for _, r := range c.remaps {
		reg := byID[r.GetOrigId()]
		if reg == nil || r.GetRemapType() == remap.RemapType_PROCFS {
			continue
		}
		isDir := reg.GetMode()&unix.S_IFMT == unix.S_IFDIR
		base := c.reachable(reg.GetName(), isDir)
		name := base
		for n := 1; isDir; n++ {
			ghost, ok := named[name]
			if ok && ghost == r.GetRemapId() || !ok && !c.there(name, nil) {
				named[name] = r.GetRemapId()
				break
			}
			name = fmt.Sprintf("%s.cr_link%d", base, n)
		}
		if !isDir && r.GetRemapType() == remap.RemapType_GHOST {
			name = fits(name)
		}
		if name != reg.GetName() {
			reg.Name, c.changed = proto.String(name), true
		}
	}
}

// order sorts what CRIU makes of deleted files: directories come last, the deepest first. CRIU
// removes it all in the order in which it was made, and a directory with something in it could
// not be removed. A file whose directory is not there is made in the one above.
func (c *completer) order() {
	dirs := map[uint32]string{}
	for _, f := range c.files {
		if reg := f.GetReg(); reg != nil && reg.GetMode()&unix.S_IFMT == unix.S_IFDIR {
			dirs[f.GetId()] = reg.GetName()
		}
	}
	depth := func(r *remap.RemapFilePathEntry) int {
		name, isDir := dirs[r.GetOrigId()]
		if !isDir || r.GetRemapType() != remap.RemapType_GHOST {
			return math.MaxInt
		}
		return strings.Count(path.Clean(name), "/")
	}
	sorted := slices.Clone(c.remaps)
	slices.SortStableFunc(sorted, func(a, b *remap.RemapFilePathEntry) int { return cmp.Compare(depth(b), depth(a)) })
	if !slices.Equal(sorted, c.remaps) {
		c.remaps, c.changed = sorted, true
	}
}

// fits cuts the last name of a path where CRIU's addition to it would make it too long.
func fits(name string) string {
	const addition = len(".cr.ffffffff.ghost")
	base := path.Base(name)
	if len(base) <= unix.NAME_MAX-addition {
		return name
	}
	return name[:len(name)-len(base)] + strings.ToValidUTF8(base[:unix.NAME_MAX-addition], "")
}

// there reports whether the sandbox has a path.
func (c *completer) there(name string, st *unix.Stat_t) bool {
	if st == nil {
		st = &unix.Stat_t{}
	}
	return unix.Lstat(fmt.Sprintf("/proc/%d/root%s", c.init, name), st) == nil
}

// reachable leaves out of a path what is no directory, and all above the name from there on. CRIU
// makes the directories that are gone; those above a directory it leaves behind.
func (c *completer) reachable(name string, isDir bool) string {
	for i := 1; i < len(name); i++ {
		var st unix.Stat_t
		if name[i] != '/' {
			continue
		}
		there := c.there(name[:i], &st)
		if !there && !isDir {
			return name
		}
		if !there || st.Mode&unix.S_IFMT != unix.S_IFDIR {
			return path.Join(path.Dir(name[:i]), path.Base(name))
		}
	}
	return name
}

// write makes a ghost: an image with all that the file is.
func (f *gone) write(to string, initPid int) error {
	return f.writeAs(to, initPid, func(out *os.File) error {
		in, err := os.Open(f.held[0].proc)
		if err != nil {
			return err
		}
		defer in.Close()
		return copyChunks(out, in, f.stat.Size)
	})
}

// writeAs is write for a file whose data comes from elsewhere.
func (f *gone) writeAs(to string, initPid int, data func(out *os.File) error) (err error) {
	st := &f.stat
	uid, err := inside(initPid, "uid_map", st.Uid)
	if err != nil {
		return err
	}
	gid, err := inside(initPid, "gid_map", st.Gid)
	if err != nil {
		return err
	}
	e := &ghostfile.GhostFileEntry{
		Uid: &uid, Gid: &gid, Mode: &st.Mode,
		Dev: proto.Uint32(unix.Major(st.Dev)<<20 | unix.Minor(st.Dev)), Ino: &st.Ino,
		Atim: timeval(st.Atim), Mtim: timeval(st.Mtim),
	}
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFREG:
		e.Chunks, e.Size = proto.Bool(true), proto.Uint64(uint64(st.Size))
	case unix.S_IFCHR, unix.S_IFBLK:
		e.Rdev = proto.Uint32(unix.Major(st.Rdev)<<20 | unix.Minor(st.Rdev))
	case unix.S_IFLNK:
		fd, err := unix.Open(f.held[0].proc, unix.O_PATH|unix.O_CLOEXEC, 0)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		target := make([]byte, unix.PathMax)
		n, err := unix.Readlinkat(fd, "", target)
		if err != nil {
			return err
		}
		e.SymlnkTarget = proto.String(string(target[:n]))
	}
	out, err := os.OpenFile(to, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, out.Close()) }()
	if err := beginImage(out, magicGhost); err != nil {
		return err
	}
	if err := writeEntry(out, e); err != nil || e.Chunks == nil {
		return err
	}
	return data(out)
}

func timeval(t unix.Timespec) *criutime.Timeval {
	return &criutime.Timeval{TvSec: proto.Uint64(uint64(t.Sec)), TvUsec: proto.Uint64(uint64(t.Nsec / 1000))}
}

// copyChunks writes the data of a file, without its holes.
func copyChunks(out, in *os.File, size int64) error {
	for at := int64(0); at < size; {
		from, err := unix.Seek(int(in.Fd()), at, unix.SEEK_DATA)
		if errors.Is(err, unix.ENXIO) {
			return nil // a hole to the end
		}
		to := size
		if err != nil { // a filesystem that cannot tell
			from = at
		} else if to, err = unix.Seek(int(in.Fd()), from, unix.SEEK_HOLE); err != nil {
			to = size
		}
		to = min(to, size)
		if to <= from {
			return nil
		}
		if err := writeEntry(out, &ghostfile.GhostChunkEntry{
			Len: proto.Uint64(uint64(to - from)), Off: proto.Uint64(uint64(from)),
		}); err != nil {
			return err
		}
		if n, err := io.Copy(out, io.NewSectionReader(in, from, to-from)); err != nil || n < to-from {
			return errors.Join(err, fmt.Errorf("%d of %d bytes read", n, to-from))
		}
		at = to
	}
	return nil
}

// inside returns what an id of the host is in the user namespace of a process.
func inside(pid int, which string, id uint32) (uint32, error) {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/%s", pid, which))
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(data)) {
		var n [3]uint64
		f := strings.Fields(line)
		for i := range min(len(f), 3) {
			if n[i], err = strconv.ParseUint(f[i], 10, 64); err != nil {
				return 0, err
			}
		}
		if in, out, count := n[0], n[1], n[2]; uint64(id) >= out && uint64(id) < out+count {
			return uint32(in + uint64(id) - out), nil
		}
	}
	return 0, fmt.Errorf("owner %d is none of its user namespace", id)
}

func beginImage(w io.Writer, magic uint32) error {
	return binary.Write(w, binary.LittleEndian, []uint32{magicCommon, magic})
}

func writeEntry(w io.Writer, m proto.Message) error {
	data, err := proto.Marshal(m)
	if err != nil {
		return err
	}
	if err := binary.Write(w, binary.LittleEndian, uint32(len(data))); err != nil {
		return err
	}
	_, err = w.Write(data)
	return err
}

// writeImage writes an image in place of another.
func writeImage(name string, magic uint32, entries []proto.Message) error {
	return fsx.Create(name, fsx.Options{Temp: name + ".new", Volatile: true}, func(f *os.File) error {
		w := bufio.NewWriter(f)
		err := beginImage(w, magic)
		for _, e := range entries {
			err = errors.Join(err, writeEntry(w, e))
		}
		return errors.Join(err, w.Flush())
	})
}

// taskFiles returns the number of the image that has the descriptors of a process.
func taskFiles(dir string, pid int) (id uint32, err error) {
	const magicIDs = 0x54432030
	err = optionalImage(dir, fmt.Sprintf("ids-%d.img", pid), magicIDs, func(data []byte) error {
		var e criucore.TaskKobjIdsEntry
		err := proto.Unmarshal(data, &e)
		id = e.GetFilesId()
		return err
	})
	return id, err
}
