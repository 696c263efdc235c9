package criu

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	"github.com/checkpoint-restore/go-criu/v7/crit/images/fdinfo"
	"github.com/checkpoint-restore/go-criu/v7/crit/images/memfd"
	"github.com/checkpoint-restore/go-criu/v7/crit/images/regfile"
	remap "github.com/checkpoint-restore/go-criu/v7/crit/images/remap-file-path"
	skopts "github.com/checkpoint-restore/go-criu/v7/crit/images/sk-opts"
	skunix "github.com/checkpoint-restore/go-criu/v7/crit/images/sk-unix"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"github.com/agentbox/agentbox/criu/proof"
	"github.com/agentbox/agentbox/internal/fault"
)

// opened is what Judge knows of the files of a dump.
type opened struct {
	kinds   map[uint32]uint64 // file: its type
	sockets []*skunix.UnixSkEntry
	named   map[uint32]*regfile.RegFileEntry // files with a path
	memfds  map[uint32]uint32                // of memfd_create: the inode
	seals   map[uint32]uint32                // by inodes of memfds
}

func (o *opened) has(id uint32) bool {
	_, is := o.kinds[id]
	return is
}

func readOpened(dir string) (*opened, error) {
	o := &opened{
		kinds: map[uint32]uint64{}, named: map[uint32]*regfile.RegFileEntry{}, memfds: map[uint32]uint32{},
		seals: map[uint32]uint32{},
	}
	err := optionalImage(dir, filesImage, magicFiles, func(data []byte) error {
		kind, id, ok := typeAndID(data)
		if !ok {
			return errors.New("it has an entry without type or id")
		}
		if o.has(id) {
			return fmt.Errorf("two files have the id %#x", id)
		}
		o.kinds[id] = kind
		return o.properties(id, kind, data)
	})
	if err != nil || len(o.memfds) == 0 {
		return o, err
	}
	return o, optionalImage(dir, "memfd.img", magicMemfd, func(data []byte) error {
		var e memfd.MemfdInodeEntry
		if err := proto.Unmarshal(data, &e); err != nil {
			return err
		}
		o.seals[uint32(e.GetInodeId())] = e.GetSeals()
		return nil
	})
}

// properties keeps what Judge asks for of a file.
func (o *opened) properties(id uint32, kind uint64, data []byte) error {
	switch fdinfo.FdTypes(kind) {
	case fdinfo.FdTypes_UNIXSK, fdinfo.FdTypes_REG, fdinfo.FdTypes_MEMFD:
	default:
		return nil
	}
	var e fdinfo.FileEntry
	if err := proto.Unmarshal(data, &e); err != nil {
		return err
	}
	switch {
	case e.GetUsk() != nil:
		o.sockets = append(o.sockets, e.GetUsk())
	case e.GetReg() != nil:
		o.named[id] = e.GetReg()
	case e.GetMemfd() != nil:
		o.memfds[id] = e.GetMemfd().GetInodeId()
	default:
		return fmt.Errorf("file %#x has no properties", id)
	}
	return nil
}

// typeAndID decodes by hand: types newer than go-criu's are no enum values of it.
func typeAndID(data []byte) (kind uint64, id uint32, ok bool) {
	seen := 0
	err := eachVarint(data, func(num int, v uint64) {
		switch num {
		case 1:
			kind = v
		case 2:
			id = uint32(v)
		}
		if num <= 2 {
			seen |= num
		}
	})
	return kind, id, err == nil && seen == 1|2
}

// readFds proves that each descriptor is of a file of its type.
func (j *judge) readFds() error {
	for _, t := range j.order {
		table := t.ids.GetFilesId()
		if t.dead || j.fds[table] != nil {
			continue
		}
		fds := map[uint32]uint32{}
		j.fds[table] = fds
		var bad error
		name := fmt.Sprintf("fdinfo-%d.img", table)
		if _, err := os.Lstat(filepath.Join(j.dir, name)); errors.Is(err, fs.ErrNotExist) && j.opensNothing(t) {
			continue // of a process that has closed all, CRIU writes none
		}
		err := j.read(name, magicFdinfo, maxFiles, func(data []byte) error {
			id, kind, fd, err := descriptor(data)
			if err != nil || bad != nil {
				return err
			}
			was, is := j.files.kinds[id]
			_, twice := fds[fd]
			switch {
			case !is:
				bad = &Unrestorable{fmt.Sprintf("the file of descriptor %d of %v is not in the images", fd, t), stopIt}
			case was != kind:
				bad = &Unrestorable{fmt.Sprintf("descriptor %d of %v is of another type than its file", fd, t), stopIt}
			case twice:
				bad = &Unrestorable{fmt.Sprintf("descriptor %d of %v is in the images twice", fd, t), stopIt}
			}
			fds[fd] = id
			return nil
		})
		if err = errors.Join(err, bad); err != nil {
			return err
		}
	}
	return nil
}

// opensNothing reports whether a process had no descriptor, by agentbox's record.
func (j *judge) opensNothing(t *task) bool {
	record, err := proof.Read(j.dir)
	if err != nil {
		return false
	}
	at := slices.IndexFunc(record.Tasks, func(r proof.Task) bool { return r.Pid == t.pid })
	return at >= 0 && len(record.Tasks[at].FDs) == 0
}

// checkThreadFiles judges files of /proc that belong to a thread which has ended. CRIU
// makes those of a process that has, but none of a thread.
func (j *judge) checkThreadFiles() error {
	for _, f := range j.files.named {
		var pid, tid int
		if n, _ := fmt.Sscanf(f.GetName(), "/proc/%d/task/%d", &pid, &tid); n != 2 {
			continue
		}
		t := j.tasks[pid]
		if t == nil || t.dead || tid == pid || slices.Contains(t.threads, tid) {
			continue
		}
		return &Unrestorable{fmt.Sprintf("a process has %s open, of a thread that has ended, which CRIU cannot restore",
			f.GetName()), "Have it close the file, then try again; --files-only takes the files alone."}
	}
	return nil
}

// descriptor decodes an entry of a table of descriptors.
func descriptor(data []byte) (id uint32, kind uint64, fd uint32, err error) {
	err = eachVarint(data, func(num int, v uint64) {
		switch num {
		case 1:
			id = uint32(v)
		case 3:
			kind = v
		case 4:
			fd = uint32(v)
		}
	})
	return id, kind, fd, err
}

// eachVarint calls fn with the number and value of each field that is a number.
func eachVarint(data []byte, fn func(num int, v uint64)) error {
	for len(data) > 0 {
		num, typ, n := protowire.ConsumeTag(data)
		if n < 0 {
			return protowire.ParseError(n)
		}
		data = data[n:]
		if typ == protowire.VarintType {
			var v uint64
			if v, n = protowire.ConsumeVarint(data); n >= 0 {
				fn(int(num), v)
			}
		} else {
			n = protowire.ConsumeFieldValue(num, typ, data)
		}
		if n < 0 {
			return protowire.ParseError(n)
		}
		data = data[n:]
	}
	return nil
}

// checkRemaps proves that CRIU has its copies of deleted files.
func (j *judge) checkRemaps() error {
	var bad error
	err := optionalImage(j.dir, remapImage, magicRemap, func(data []byte) error {
		var e remap.RemapFilePathEntry
		if err := proto.Unmarshal(data, &e); err != nil {
			return err
		}
		if bad != nil || e.RemapType == nil {
			return nil
		}
		switch e.GetRemapType() {
		case remap.RemapType_GHOST:
			name := fmt.Sprintf("ghost-file-%x.img", e.GetRemapId())
			if _, err := os.Lstat(filepath.Join(j.dir, name)); errors.Is(err, fs.ErrNotExist) {
				bad = fmt.Errorf("image %s is missing: %w", name, fault.ErrCorrupt)
			}
		case remap.RemapType_LINKED:
			if !j.files.has(e.GetRemapId()) {
				bad = &Unrestorable{fmt.Sprintf("the file that stands in for a deleted one (%#x) is not in the images",
					e.GetRemapId()), stopIt}
			}
		}
		return nil
	})
	return errors.Join(err, bad)
}

// checkSockets judges unix sockets: CRIU looks for the peer of each.
func (j *judge) checkSockets() error {
	const external, established = 1, 1
	held := map[uint32]bool{}
	for _, fds := range j.fds {
		for _, id := range fds {
			held[id] = true
		}
	}
	byInode, connected := map[uint32]bool{}, map[uint32]bool{}
	for _, s := range j.files.sockets {
		if byInode[s.GetIno()] {
			return fmt.Errorf("image %s: two unix sockets have the inode %d: %w", filesImage,
				s.GetIno(), fault.ErrCorrupt)
		}
		byInode[s.GetIno()] = true
		connected[s.GetPeer()] = true
	}
	for _, s := range j.files.sockets {
		name := "a unix socket"
		if len(s.GetName()) > 0 {
			name = unixSocket{name: string(s.GetName())}.address()
		}
		lone := s.GetPeer() == 0 && !connected[s.GetIno()] && s.GetUflags() == 0
		switch {
		case s.GetUflags()&external != 0:
			return &Unrestorable{fmt.Sprintf("a process is connected to a unix socket outside the sandbox (%s)", name),
				"Close the connection (a mounted docker.sock, X11, D-Bus or syslog socket, for example)."}
		case s.GetPeer() != 0 && !byInode[s.GetPeer()]:
			return &Unrestorable{fmt.Sprintf("the other end of %s, which a process has open, is not in the images",
				name), "Close the connection, then try again."}
		case lone && s.GetType() != unix.SOCK_DGRAM && s.GetState() == established &&
			s.GetShutdown() != skopts.SkShutdown_BOTH:
			return &Unrestorable{
				fmt.Sprintf("%s, which a process has open, is connected with nothing", name),
				"Close the connection, then try again.",
			}
		case lone && !held[s.GetId()] && (s.GetType() == unix.SOCK_DGRAM || s.GetState() == established):
			return &Unrestorable{fmt.Sprintf("%s is in flight from one process to another and has lost its peer, which CRIU cannot restore", name),
				"Have the process that it is sent to receive it, then try again."}
		case s.GetDeleted() && len(s.GetName()) == 0:
			return &Unrestorable{"a unix socket was deleted and has no name", "Close it, then try again."}
		}
	}
	return nil
}
