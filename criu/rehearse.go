package criu

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	criucore "github.com/checkpoint-restore/go-criu/v7/crit/images/criu-core"
	"github.com/checkpoint-restore/go-criu/v7/crit/images/fdinfo"
	filelock "github.com/checkpoint-restore/go-criu/v7/crit/images/file-lock"
	"github.com/checkpoint-restore/go-criu/v7/crit/images/memfd"
	"github.com/checkpoint-restore/go-criu/v7/crit/images/mm"
	remap "github.com/checkpoint-restore/go-criu/v7/crit/images/remap-file-path"
	"github.com/checkpoint-restore/go-criu/v7/crit/images/vma"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"

	"github.com/agentbox/agentbox/internal/proc"
)

// Likeness is what restored processes have of what their images say.
type Likeness struct {
	Processes, Threads, Descriptors, Locks int   // compared
	Pages                                  int64 // of memory
	Differs                                []string
}

const maxDiffers = 100

// Compare compares restored processes, of which none has run yet, with the images that they were
// restored from: the tree, the open files, the locks and the memory. It leaves out what the
// kernel writes by itself (rseq areas, frames of signals, its own code).
func Compare(ctx context.Context, dir string, initPid int) (Likeness, error) {
	c := &comparison{judge: &judge{
		dir: dir, tasks: map[int]*task{}, threads: map[int]int{}, fds: map[uint32]map[uint32]uint32{},
	}}
	for _, step := range []func() error{c.readTree, c.readTasks, c.checkTree} {
		if err := step(); err != nil {
			return c.Likeness, err
		}
	}
	var err error
	if c.files, err = readOpened(dir); err == nil {
		err = c.readFds()
	}
	if err == nil {
		c.real, err = insidePids(initPid)
	}
	if err != nil {
		return c.Likeness, err
	}
	c.compareTree()
	for _, step := range []func() error{c.compareFiles, c.compareLocks, func() error { return c.compareMemory(ctx) }} {
		if err := step(); err != nil {
			return c.Likeness, err
		}
	}
	return c.Likeness, nil
}

type comparison struct {
	*judge
	Likeness
	real map[int]int // pid inside: pid here
}

func (c *comparison) differs(format string, args ...any) {
	switch n := len(c.Differs); {
	case n < maxDiffers:
		c.Differs = append(c.Differs, fmt.Sprintf(format, args...))
	case n == maxDiffers:
		c.Differs = append(c.Differs, "there is more")
	}
}

// insidePids maps the pids of a container's processes, as seen by its first one, to those here.
func insidePids(initPid int) (map[int]int, error) {
	members, err := Members(initPid)
	if err != nil {
		return nil, err
	}
	depth := nsDepth(initPid)
	pids := map[int]int{}
	for _, p := range members {
		if n := statusIDs(p, "NSpid", depth); n > 0 {
			pids[n] = p
		}
	}
	return pids, nil
}

// statusIDs reads an id of /proc/PID/status as it is at a depth of pid namespaces; 0: it is not there.
func statusIDs(pid int, field string, depth int) int {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return 0
	}
	_, rest, _ := strings.Cut(string(data), "\n"+field+":")
	line, _, _ := strings.Cut(rest, "\n")
	f := strings.Fields(line)
	if depth < 1 || len(f) < depth {
		return 0
	}
	n, _ := strconv.Atoi(f[depth-1])
	return n
}

func (c *comparison) compareTree() {
	inside := map[int]int{}
	for in, out := range c.real {
		inside[out] = in
	}
	depth := nsDepth(c.real[c.root.pid])
	for _, t := range c.order {
		c.Processes++
		p, is := c.real[t.pid]
		st, err := proc.Read(p)
		if !is || err != nil {
			c.differs("%v is not there", t)
			continue
		}
		if t != c.root && inside[st.Parent] != t.ppid {
			c.differs("the parent of %v is %d, not %d", t, inside[st.Parent], t.ppid)
		}
		if dead := st.Ended(); dead != t.dead {
			c.differs("%v has state %c", t, st.State)
		}
		if t.dead {
			continue
		}
		if comm, _ := os.ReadFile(fmt.Sprintf("/proc/%d/comm", p)); string(bytes.TrimSuffix(comm,
			[]byte("\n"))) != t.comm {
			c.differs("%v has the name %q", t, comm)
		}
		for _, id := range []struct {
			field, what string
			want        int
		}{{"NSpgid", "process group", t.pgid}, {"NSsid", "session", t.sid}} {
			if got := statusIDs(p, id.field, depth); got != id.want {
				c.differs("the %s of %v is %d, not %d", id.what, t, got, id.want)
			}
		}
		var threads []int
		tasks, _ := os.ReadDir(fmt.Sprintf("/proc/%d/task", p))
		for _, e := range tasks {
			if n, err := strconv.Atoi(e.Name()); err == nil {
				threads = append(threads, statusIDs(n, "NSpid", depth))
			}
		}
		c.Threads += len(t.threads)
		want := slices.Sorted(slices.Values(t.threads))
		if slices.Sort(threads); !slices.Equal(threads, want) {
			c.differs("the threads of %v are %v, not %v", t, threads, want)
		}
	}
	for in, p := range c.real {
		if c.tasks[in] == nil {
			c.differs("process %d (%s) is there, and not in the images", in, cmdline(p))
		}
	}
}

// compareFiles compares descriptors: their numbers, kinds, paths, positions and flags.
func (c *comparison) compareFiles() error {
	regular, moved := map[uint32]*fdinfo.FileEntry{}, map[uint32]bool{}
	err := optionalImage(c.dir, remapImage, magicRemap, func(data []byte) error {
		var e remap.RemapFilePathEntry
		err := proto.Unmarshal(data, &e)
		moved[e.GetOrigId()] = true
		return err
	})
	if err != nil {
		return err
	}
	err = optionalImage(c.dir, filesImage, magicFiles, func(data []byte) error {
		if kind, id, _ := typeAndID(data); kind == uint64(fdinfo.FdTypes_REG) {
			e := new(fdinfo.FileEntry)
			if err := proto.Unmarshal(data, e); err != nil {
				return err
			}
			regular[id] = e
		}
		return nil
	})
	if err != nil {
		return err
	}
	for _, t := range c.order {
		p, is := c.real[t.pid]
		if t.dead || !is {
			continue
		}
		links, err := descriptors(p)
		if err != nil {
			return err
		}
		want := c.fds[t.ids.GetFilesId()]
		for fd, id := range want {
			c.Descriptors++
			link, open := links[fd]
			if !open {
				c.differs("descriptor %d of %v is not open", fd, t)
				continue
			}
			if got := kindOf(link); kindNames[c.files.kinds[id]] != "" && got != kindNames[c.files.kinds[id]] {
				c.differs("descriptor %d of %v is %s, not %s", fd, t, link, kindNames[c.files.kinds[id]])
			}
			if reg := regular[id].GetReg(); reg != nil {
				if name := "/" + strings.TrimLeft(reg.GetName(), "/"); !moved[id] && link != name && !reg.GetExt() &&
					link != strings.TrimSuffix(name, "/") {
					c.differs("descriptor %d of %v is %s, not %s", fd, t, link, name)
				}
				c.comparePosition(t, p, fd, reg.GetPos(), uint64(reg.GetFlags()))
			}
		}
		for fd, link := range links {
			if _, is := want[fd]; !is {
				c.differs("descriptor %d of %v (%s) is not in the images", fd, t, link)
			}
		}
	}
	return nil
}

func (c *comparison) comparePosition(t *task, p int, fd uint32, pos, flags uint64) {
	const kept = unix.O_ACCMODE | unix.O_APPEND | unix.O_NONBLOCK | unix.O_DIRECTORY | unix.O_PATH
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/fdinfo/%d", p, fd))
	if err != nil {
		c.differs("descriptor %d of %v: %v", fd, t, err)
		return
	}
	for line := range strings.Lines(string(data)) {
		key, value, _ := strings.Cut(line, ":")
		value = strings.TrimSpace(value)
		switch key {
		case "pos":
			if got, _ := strconv.ParseUint(value, 10, 64); got != pos {
				c.differs("descriptor %d of %v is at %d, not at %d", fd, t, got, pos)
			}
		case "flags":
			if got, _ := strconv.ParseUint(value, 8, 64); got&kept != flags&kept {
				c.differs("descriptor %d of %v has the flags %#o, not %#o", fd, t, got&kept, flags&kept)
			}
		}
	}
}

var kindNames = map[uint64]string{
	uint64(fdinfo.FdTypes_PIPE): "pipe", uint64(fdinfo.FdTypes_INETSK): "socket",
	uint64(fdinfo.FdTypes_UNIXSK): "socket", uint64(fdinfo.FdTypes_NETLINKSK): "socket",
	uint64(fdinfo.FdTypes_PACKETSK): "socket", uint64(fdinfo.FdTypes_EVENTFD): "anon_inode",
	uint64(fdinfo.FdTypes_EVENTPOLL): "anon_inode",
	uint64(fdinfo.FdTypes_INOTIFY):   "anon_inode", uint64(fdinfo.FdTypes_SIGNALFD): "anon_inode",
	uint64(fdinfo.FdTypes_TIMERFD): "anon_inode", uint64(fdinfo.FdTypes_FANOTIFY): "anon_inode",
}

func kindOf(link string) string {
	kind, _, special := strings.Cut(link, ":")
	if !special || strings.HasPrefix(link, "/") {
		return "file"
	}
	return kind
}

func descriptors(pid int) (map[uint32]string, error) {
	dir := fmt.Sprintf("/proc/%d/fd", pid)
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	links := map[uint32]string{}
	for _, e := range entries {
		n, err := strconv.ParseUint(e.Name(), 10, 32)
		if err != nil {
			continue
		}
		if links[uint32(n)], err = os.Readlink(filepath.Join(dir, e.Name())); err != nil {
			return nil, err
		}
	}
	return links, nil
}

// compareLocks looks for each lock of the images among those of its descriptor.
func (c *comparison) compareLocks() error {
	kinds := map[uint32]string{1: "POSIX", 2: "FLOCK", 32: "LEASE", 1024: "OFDLCK"}
	return optionalImage(c.dir, "filelocks.img", magicLocks, func(data []byte) error {
		var e filelock.FileLockEntry
		if err := proto.Unmarshal(data, &e); err != nil {
			return err
		}
		c.Locks++
		t, p := c.tasks[int(e.GetPid())], c.real[int(e.GetPid())]
		if t == nil || p == 0 {
			return nil // it is told of already
		}
		kind, mode := kinds[e.GetFlag()&(1|2|32|1024)], "READ"
		if e.GetType()&0xf == unix.F_WRLCK {
			mode = "WRITE"
		}
		text, _ := os.ReadFile(fmt.Sprintf("/proc/%d/fdinfo/%d", p, e.GetFd()))
		for line := range strings.Lines(string(text)) {
			// lock:	1: FLOCK  ADVISORY  WRITE 359 00:13:11691 0 EOF
			f := strings.Fields(line)
			if len(f) >= 9 && f[0] == "lock:" && f[2] == kind && (f[4] == mode || kind == "LEASE") &&
				f[7] == strconv.FormatInt(e.GetStart(), 10) {
				return nil
			}
		}
		c.differs("%v does not hold its %s lock (%s, from %d) on descriptor %d", t, kind, strings.ToLower(mode),
			e.GetStart(), e.GetFd())
		return nil
	})
}

// compareMemory compares each page of the images with that of its process.
func (c *comparison) compareMemory(ctx context.Context) error {
	shared := map[uint32]bool{}
	segments, err := c.segments()
	if err != nil {
		return err
	}
	for _, t := range c.order {
		p, is := c.real[t.pid]
		if t.dead || !is {
			continue
		}
		if _, err := os.Lstat(filepath.Join(c.dir, fmt.Sprintf("pagemap-%d.img",
			t.pid))); errors.Is(err, fs.ErrNotExist) {
			continue // it shares the memory of another
		}
		own, err := c.ownAreas(t, p)
		if err == nil {
			err = c.comparePages(ctx, fmt.Sprintf("pagemap-%d.img", t.pid), t, p, own, func(at uint64) (uint64, bool) {
				return at, true
			})
		}
		if err == nil {
			err = c.compareShared(ctx, t, p, segments, shared)
		}
		if err != nil {
			return fmt.Errorf("memory of %v: %w", t, err)
		}
	}
	return nil
}

type area struct{ start, end uint64 }

// ownAreas are those of a process's memory that the kernel writes: its code and
// data for programs, and for each thread the area of restartable sequences and where
// frames of signals go.
func (c *comparison) ownAreas(t *task, p int) ([]area, error) {
	maps, err := os.ReadFile(fmt.Sprintf("/proc/%d/maps", p))
	if err != nil {
		return nil, err
	}
	var list []area
	for line := range strings.Lines(string(maps)) {
		if strings.HasSuffix(line, "[vdso]\n") || strings.Contains(line, "[vvar") {
			var a area
			if _, err := fmt.Sscanf(line, "%x-%x", &a.start, &a.end); err == nil {
				list = append(list, a)
			}
		}
	}
	for _, id := range t.threads {
		err := c.read(fmt.Sprintf("core-%d.img", id), magicCore, 1, func(data []byte) error {
			var e criucore.CoreEntry
			if err := proto.Unmarshal(data, &e); err != nil {
				return err
			}
			if r := e.GetThreadCore().GetRseqEntry(); r.GetRseqAbiPointer() != 0 {
				list = append(list, area{
					r.GetRseqAbiPointer(), r.GetRseqAbiPointer() + uint64(max(r.GetRseqAbiSize(), 32)),
				})
			}
			if sp := stackOf(&e); sp > redZone+maxFrame {
				list = append(list, area{sp - redZone - maxFrame, sp - redZone})
			}
			if sas := e.GetThreadCore().GetSas(); sas.GetSsSize() > 0 {
				list = append(list, area{sas.GetSsSp(), sas.GetSsSp() + sas.GetSsSize()})
			}
			return nil
		})
		if err != nil {
			return nil, err
		}
	}
	return list, nil
}

// A signal that was pending has the kernel write a frame below the stack of its
// thread, as soon as that is to run on. Programs have nothing there but for the red zone.
const (
	redZone  = 128
	maxFrame = 16 << 10 // with all registers of a processor
)

func stackOf(e *criucore.CoreEntry) uint64 {
	if regs := e.GetThreadInfo().GetGpregs(); regs != nil {
		return regs.GetSp()
	}
	return e.GetTiAarch64().GetGpregs().GetSp()
}

// segments maps files of memory alone (memfd, and what processes share without a
// file) to the ids that their pages go by.
func (c *comparison) segments() (map[uint32]uint32, error) {
	const magicMemfd = 0x48453499
	inodes := map[uint64]uint32{}
	err := optionalImage(c.dir, "memfd.img", magicMemfd, func(data []byte) error {
		var e memfd.MemfdInodeEntry
		err := proto.Unmarshal(data, &e)
		inodes[e.GetInodeId()] = e.GetShmid()
		return err
	})
	if err != nil {
		return nil, err
	}
	segments := map[uint32]uint32{}
	return segments, optionalImage(c.dir, filesImage, magicFiles, func(data []byte) error {
		if kind, id, _ := typeAndID(data); kind == uint64(fdinfo.FdTypes_MEMFD) {
			var e fdinfo.FileEntry
			if err := proto.Unmarshal(data, &e); err != nil {
				return err
			}
			if shmid, is := inodes[uint64(e.GetMemfd().GetInodeId())]; is {
				segments[id] = shmid
			}
		}
		return nil
	})
}

// compareShared compares memory of segments, once each, where t has them mapped.
func (c *comparison) compareShared(
	ctx context.Context, t *task, p int, segments map[uint32]uint32, done map[uint32]bool,
) error {
	const fileShared = 1 << 7
	var list []*vma.VmaEntry
	err := c.read(fmt.Sprintf("mm-%d.img", t.pid), magicMm, 1, func(data []byte) error {
		var e mm.MmEntry
		err := proto.Unmarshal(data, &e)
		list = e.GetVmas()
		return err
	})
	if err != nil {
		return err
	}
	for _, v := range list {
		shmid, is := segments[uint32(v.GetShmid())]
		if !is || v.GetStatus()&fileShared == 0 || v.GetProt()&unix.PROT_READ == 0 || done[shmid] {
			continue
		}
		image := fmt.Sprintf("pagemap-shmem-%d.img", shmid)
		if _, err := os.Lstat(filepath.Join(c.dir, image)); errors.Is(err, fs.ErrNotExist) {
			continue
		}
		done[shmid] = true
		err := c.comparePages(ctx, image, t, p, nil, func(offset uint64) (uint64, bool) {
			at := v.GetStart() + offset - v.GetPgoff()
			return at, offset >= v.GetPgoff() && at < v.GetEnd()
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// comparePages compares the pages of one page map; place tells where each is in the
// process, if it is.
func (c *comparison) comparePages(
	ctx context.Context, pagemap string, t *task, p int, own []area, place func(uint64) (uint64, bool),
) error {
	mem, err := os.Open(fmt.Sprintf("/proc/%d/mem", p))
	if err != nil {
		return err
	}
	defer mem.Close()
	var pages *os.File
	defer func() { pages.Close() }()
	first := true
	image, live := make([]byte, pageSize), make([]byte, pageSize)
	return c.read(pagemap, magicPagemap, maxPagemap, func(data []byte) error {
		if first {
			first = false
			id, _, _, err := descriptor(data) // of a head the first field is the id
			if err == nil {
				pages, err = os.Open(filepath.Join(c.dir, fmt.Sprintf("pages-%d.img", id)))
			}
			if errors.Is(err, fs.ErrNotExist) {
				err = nil // there are none
			}
			return err
		}
		n, err := presentPages(data)
		if err != nil || n == 0 {
			return err
		}
		key, err := pageAddress(data)
		if err != nil {
			return err
		}
		for ; n > 0; n, key = n-1, key+pageSize {
			if err := ctx.Err(); err != nil {
				return err
			}
			if _, err := io.ReadFull(pages, image); err != nil {
				return err
			}
			at, mapped := place(key)
			if !mapped {
				continue
			}
			c.Pages++
			if _, err := mem.ReadAt(live, int64(at)); err != nil {
				c.differs("the memory of %v at %#x cannot be read: %v", t, at, err)
				continue
			}
			for _, a := range own {
				for i := max(a.start, at); i < min(a.end, at+pageSize); i++ {
					live[i-at] = image[i-at]
				}
			}
			if !bytes.Equal(image, live) {
				i := 0
				for image[i] == live[i] {
					i++
				}
				c.differs("the memory of %v differs at %#x", t, at+uint64(i))
			}
		}
		return nil
	})
}

// pageAddress returns where the pages of a page map entry are.
func pageAddress(data []byte) (uint64, error) {
	var at uint64
	err := eachVarint(data, func(num int, v uint64) {
		if num == 1 {
			at = v
		}
	})
	return at, err
}
