package criu

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	goruntime "runtime"
	"slices"
	"strconv"
	"strings"
	"unsafe"

	"github.com/checkpoint-restore/go-criu/v7/crit/images/fdinfo"
	"github.com/checkpoint-restore/go-criu/v7/crit/images/fown"
	ghostfile "github.com/checkpoint-restore/go-criu/v7/crit/images/ghost-file"
	"github.com/checkpoint-restore/go-criu/v7/crit/images/mm"
	"github.com/checkpoint-restore/go-criu/v7/crit/images/regfile"
	remap "github.com/checkpoint-restore/go-criu/v7/crit/images/remap-file-path"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"
)

// A mapping of a file of a lower layer stays one of that file when the first write copies it
// up, while every descriptor of it reads the copy from then on. By its name a restore would
// map the copy: a library that was overwritten in place would change below its program. So
// what such mappings show is taken along as a ghost of their own.

const magicMM = 0x57492820

// stale is a file of which mappings show what it was.
type stale struct {
	stat  unix.Stat_t
	mount int
	path  string
	maps  []mapping
}

// mapping is a part of a process's memory that shows a file.
type mapping struct {
	host, pid        int // of the process, on the host and in the container
	start, end, from uint64
	path             string
	lost             bool
}

func (m mapping) file() string {
	return fmt.Sprintf("/proc/%d/map_files/%x-%x", m.host, m.start, m.end)
}

// findStale compares what mappings show with what their files are now, where a file has
// been copied up.
func (c *completer) findStale() ([]*stale, error) {
	if c.upper == "" {
		return nil, nil
	}
	_, root, err := lookAt(fmt.Sprintf("/proc/%d/root", c.init))
	if err != nil {
		return nil, err
	}
	copied := map[string]bool{}
	isCopied := func(path string) bool {
		is, ok := copied[path]
		if !ok {
			is = copiedUp(filepath.Join(c.upper, path))
			copied[path] = is
		}
		return is
	}
	found := map[inodeOn]*stale{}
	var list []*stale
	for _, pid := range c.members {
		maps, err := mappings(pid, isCopied)
		if err != nil {
			return nil, err
		}
		for _, m := range maps {
			st, at, err := lookAt(m.file())
			if err != nil || at.mount != root.mount || at.filesystem != unix.OVERLAYFS_SUPER_MAGIC ||
				st.Mode&unix.S_IFMT != unix.S_IFREG || m.lost && st.Nlink > 0 {
				continue // one that has ended, or is of the layer alone
			}
			differs, err := m.differs()
			if err != nil {
				return nil, err
			}
			if !differs {
				continue
			}
			key := inodeOn{at.mount, st.Dev, st.Ino}
			if found[key] == nil {
				found[key] = &stale{stat: st, mount: at.mount, path: m.path}
				list = append(list, found[key])
			}
			found[key].maps = append(found[key].maps, m)
		}
	}
	return list, nil
}

// copiedUp reports whether a file in the upperdir was one of a lower layer.
func copiedUp(name string) bool {
	for _, attr := range []string{"trusted.overlay.origin", "user.overlay.origin"} {
		if _, err := unix.Lgetxattr(name, attr, nil); err == nil {
			return true
		}
	}
	return false
}

// mappings lists those of a process that show files which have been copied up, or deleted.
func mappings(pid int, copied func(path string) bool) (list []mapping, err error) {
	f, err := os.Open(fmt.Sprintf("/proc/%d/maps", pid))
	if err != nil {
		return nil, nil // it has ended
	}
	defer f.Close()
	in := pid
	if n, err := readStatus(pid); err == nil {
		in = n
	}
	lines := bufio.NewScanner(f)
	lines.Buffer(make([]byte, 64<<10), 1<<20)
	for lines.Scan() {
		line := lines.Text()
		at := strings.IndexByte(line, '/')
		if at < 0 {
			continue
		}
		m := mapping{host: pid, pid: in}
		m.path, m.lost = strings.CutSuffix(strings.ReplaceAll(line[at:], `\012`, "\n"), deletedSuffix)
		if !m.lost && !copied(m.path) {
			continue
		}
		var perms string
		if n, err := fmt.Sscanf(line[:at], "%x-%x %s %x", &m.start, &m.end, &perms, &m.from); n != 4 || err != nil {
			continue
		}
		if strings.HasSuffix(perms, "s") && strings.Contains(perms, "w") {
			continue // to open it for that has copied it up
		}
		list = append(list, m)
	}
	return list, lines.Err()
}

// pages calls fn with the pages of the file that a mapping shows, until it returns false. Pages
// that the process has written to, and has for itself, are not among them.
func (m mapping) pages(fn func(offset uint64, data []byte) (bool, error)) error {
	memory, err := os.Open(fmt.Sprintf("/proc/%d/mem", m.host))
	if err != nil {
		return err
	}
	defer memory.Close()
	table, err := os.Open(fmt.Sprintf("/proc/%d/pagemap", m.host))
	if err != nil {
		return err
	}
	defer table.Close()
	const present, swapped, ofFile = 1 << 63, 1 << 62, 1 << 61
	count := (m.end - m.start) / pageSize
	entries := make([]byte, 8*count)
	if _, err := table.ReadAt(entries, int64(m.start/pageSize*8)); err != nil && err != io.EOF {
		return fmt.Errorf("page map of process %d: %w", m.host, err)
	}
	data := make([]byte, pageSize)
	for i := range count {
		e := binary.LittleEndian.Uint64(entries[8*i:])
		if e&(present|swapped) != 0 && e&ofFile == 0 {
			continue
		}
		if _, err := memory.ReadAt(data, int64(m.start+i*pageSize)); err != nil {
			continue // past the end of the file
		}
		if more, err := fn(m.from+i*pageSize, data); err != nil || !more {
			return err
		}
	}
	return nil
}

// differs reports whether a mapping shows something else than its file has.
func (m mapping) differs() (bool, error) {
	f, err := os.Open(m.file())
	if err != nil {
		return false, nil // no file to read
	}
	defer f.Close()
	if m.shows(f) {
		return false, nil
	}
	is := make([]byte, pageSize)
	found := false
	err = m.pages(func(offset uint64, data []byte) (bool, error) {
		n, err := f.ReadAt(is, int64(offset))
		if err != nil && err != io.EOF {
			return false, err
		}
		clear(is[n:])
		found = string(is) != string(data) || n == 0
		return !found, nil
	})
	return found, err
}

// shows reports, by one page that both have, whether a mapping is of the file as it is now, and
// so need not be compared; the kernel shows that only to root.
func (m mapping) shows(f *os.File) bool {
	same := false
	_ = m.pages(func(offset uint64, _ []byte) (bool, error) {
		ours, err := unix.Mmap(int(f.Fd()), int64(offset), pageSize, unix.PROT_READ, unix.MAP_SHARED)
		if err != nil {
			return false, err
		}
		defer unix.Munmap(ours)
		if st, err := f.Stat(); err != nil || offset >= uint64(st.Size()) {
			return false, err // there is no such page
		}
		goruntime.KeepAlive(ours[0]) // it has a frame once it was read
		frame := func(pid string, addr uint64) (n uint64) {
			table, err := os.Open("/proc/" + pid + "/pagemap")
			if err != nil {
				return 0
			}
			defer table.Close()
			var e [8]byte
			if _, err := table.ReadAt(e[:], int64(addr/pageSize*8)); err != nil {
				return 0
			}
			return binary.LittleEndian.Uint64(e[:]) & (1<<55 - 1)
		}
		theirs := frame(strconv.Itoa(m.host), m.start+offset-m.from)
		same = theirs != 0 && theirs == frame("self", uint64(uintptr(unsafe.Pointer(&ours[0]))))
		return false, nil
	})
	return same
}

// stale gives mappings that show what a file was a ghost of that.
func (c *completer) stale() error {
	list, err := c.findStale()
	if err != nil {
		return err
	}
	changed := map[int]map[uint64]uint32{} // of a process, the start of a mapping: the id of its file
	for _, s := range list {
		c.ghosts++
		size, err := s.write(filepath.Join(c.dir, fmt.Sprintf("ghost-file-%x.img", c.ghosts)), c.init)
		if err != nil {
			return fmt.Errorf("file %s, which is mapped as it was: %w", s.path, err)
		}
		c.last++
		c.changed = true
		c.files = append(c.files, &fdinfo.FileEntry{Type: fdinfo.FdTypes_REG.Enum(), Id: proto.Uint32(c.last),
			Reg: &regfile.RegFileEntry{
				Id: proto.Uint32(c.last), Flags: proto.Uint32(unix.O_LARGEFILE), Pos: proto.Uint64(0),
				Name: proto.String(s.path), MntId: proto.Int32(int32(s.mount)),
				Size: proto.Uint64(size), Mode: proto.Uint32(s.stat.Mode),
				Fown: &fown.FownEntry{
					Uid: proto.Uint32(0), Euid: proto.Uint32(0), Signum: proto.Uint32(0),
					PidType: proto.Uint32(0), Pid: proto.Uint32(0),
				},
			}})
		c.remaps = append(c.remaps, &remap.RemapFilePathEntry{
			OrigId: proto.Uint32(c.last), RemapId: proto.Uint32(c.ghosts), RemapType: remap.RemapType_GHOST.Enum(),
		})
		for _, m := range s.maps {
			if changed[m.pid] == nil {
				changed[m.pid] = map[uint64]uint32{}
			}
			changed[m.pid][m.start] = c.last
		}
	}
	for pid, starts := range changed {
		if err := c.remapMemory(pid, starts); err != nil {
			return err
		}
	}
	return nil
}

// remapMemory gives mappings of a process other files.
func (c *completer) remapMemory(pid int, starts map[uint64]uint32) error {
	name := fmt.Sprintf("mm-%d.img", pid)
	var e *mm.MmEntry
	err := optionalImage(c.dir, name, magicMM, func(data []byte) error {
		e = &mm.MmEntry{}
		return proto.Unmarshal(data, e)
	})
	if err != nil || e == nil { // it came in from outside, and is not dumped
		return err
	}
	for _, v := range e.GetVmas() {
		if id, ok := starts[v.GetStart()]; ok {
			v.Shmid = proto.Uint64(uint64(id))
		}
	}
	return writeImage(filepath.Join(c.dir, name), magicMM, []proto.Message{e})
}

// write makes a ghost of what the mappings show, and returns the size of that file.
func (s *stale) write(to string, initPid int) (size uint64, err error) {
	pages := map[uint64][]byte{}
	for _, m := range s.maps {
		err := m.pages(func(offset uint64, data []byte) (bool, error) {
			if _, ok := pages[offset]; !ok {
				pages[offset] = slices.Clone(data)
				size = max(size, offset+pageSize)
			}
			if len(pages) > DefaultGhostLimit/pageSize {
				return false, errors.New("more of it is mapped than is taken along")
			}
			return true, nil
		})
		if err != nil {
			return 0, err
		}
	}
	f := &gone{stat: s.stat}
	f.stat.Size = int64(size)
	return size, f.writeAs(to, initPid, func(out *os.File) error {
		w := bufio.NewWriterSize(out, 1<<20)
		offsets := make([]uint64, 0, len(pages))
		for o := range pages {
			offsets = append(offsets, o)
		}
		slices.Sort(offsets)
		for _, o := range offsets {
			if err := writeEntry(w, &ghostfile.GhostChunkEntry{
				Len: proto.Uint64(pageSize), Off: proto.Uint64(o),
			}); err != nil {
				return err
			}
			if _, err := w.Write(pages[o]); err != nil {
				return err
			}
		}
		return w.Flush()
	})
}
