package criu

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"

	criucore "github.com/checkpoint-restore/go-criu/v7/crit/images/criu-core"
	"github.com/checkpoint-restore/go-criu/v7/crit/images/pagemap"
	"github.com/checkpoint-restore/go-criu/v7/crit/images/pstree"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"github.com/agentbox/agentbox/internal/fault"
)

// Process is one process of a dump, numbered as inside the container.
type Process struct {
	Pid     int    `json:"pid"`
	Ppid    int    `json:"ppid"` // 0: the init
	Comm    string `json:"comm"`
	Threads []int  `json:"threads"` // ids, its own among them
	Stopped bool   `json:"stopped"` // by a signal, such as SIGSTOP or Ctrl-Z
}

// Bounds for images, which may come from anywhere. go-criu's own reader has
// none (and panics on a tree without a root), so only its types are used.
const (
	maxEntry     = 1 << 20
	maxProcesses = 1 << 16
	maxPagemap   = 1 << 26 // entries of one process's page map
	pageSize     = 4096
)

// States of a process, CRIU's TASK_DEAD, TASK_STOPPED and TASK_ZOMBIE.
const (
	taskDead    = 2
	taskStopped = 3
	taskZombie  = 6
)

// Magic numbers that begin an image file: a common one, then its kind's.
const (
	magicCommon  = 0x54564319
	magicPstree  = 0x50273030
	magicCore    = 0x55053847
	magicPagemap = 0x56084025

	magicInventory = 0x58313116
	magicIDs       = 0x54432030
	magicFdinfo    = 0x56213732
	magicMm        = 0x57492820
	magicFs        = 0x51403912
	magicMnts      = 0x55563928
	magicLocks     = 0x54323616
	magicGhost     = 0x52583605
	magicShm       = 0x46283044
	magicMemfd     = 0x48453499
)

// Processes lists the processes of a dump, in the order of the images.
// Images that make no sense are ErrCorrupt.
func Processes(dir string) ([]Process, error) {
	var list []Process
	err := readImage(filepath.Join(dir, "pstree.img"), magicPstree, maxProcesses, func(data []byte) error {
		var e pstree.PstreeEntry
		if err := proto.Unmarshal(data, &e); err != nil {
			return err
		}
		p := Process{Pid: int(e.GetPid()), Ppid: int(e.GetPpid())}
		for _, t := range e.GetThreads() {
			p.Threads = append(p.Threads, int(t))
		}
		list = append(list, p)
		return nil
	})
	if err != nil {
		return nil, err
	}
	for i := range list {
		path := filepath.Join(dir, fmt.Sprintf("core-%d.img", list[i].Pid))
		err := readImage(path, magicCore, 1, func(data []byte) error {
			var e criucore.CoreEntry
			if err := proto.Unmarshal(data, &e); err != nil {
				return err
			}
			list[i].Comm = e.GetTc().GetComm()
			switch e.GetTc().GetTaskState() {
			case taskStopped:
				list[i].Stopped = true
			case taskDead, taskZombie:
				// For the thread of a process that was not reaped yet, CRIU writes whatever its
				// memory happens to hold.
				list[i].Threads = []int{list[i].Pid}
			}
			return nil
		})
		if err != nil {
			return nil, err
		}
	}
	if len(list) == 0 {
		return nil, fmt.Errorf("%s: no processes: %w", dir, fault.ErrCorrupt)
	}
	return list, nil
}

var pagemapName = regexp.MustCompile(`^pagemap(-shmem)?-\d+\.img$`)

// Flags of a page map entry: the pages are in the parent's images, or in the page image.
const (
	pageInParent = 1 << 0
	pagePresent  = 1 << 2
)

// CheckImages proves that the page images are as long as the page maps say.
// Given shorter ones CRIU loops for ever in the restore, writing its log.
func CheckImages(dir string) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return fmt.Errorf("images: %w", err)
	}
	want := map[uint32]int64{} // pages image: bytes
	for _, e := range entries {
		if !pagemapName.MatchString(e.Name()) {
			continue
		}
		first, id := true, uint32(0)
		err := readImage(filepath.Join(dir, e.Name()), magicPagemap, maxPagemap, func(data []byte) error {
			if first {
				first = false
				var head pagemap.PagemapHead
				if err := proto.Unmarshal(data, &head); err != nil {
					return err
				}
				id = head.GetPagesId()
				want[id] += 0
				return nil
			}
			pages, err := presentPages(data)
			want[id] += pages * pageSize
			if err != nil || want[id] < 0 {
				return errors.Join(err, errors.New("page map makes no sense"))
			}
			return nil
		})
		if err != nil {
			return err
		}
	}
	for id, size := range want {
		path := filepath.Join(dir, fmt.Sprintf("pages-%d.img", id))
		st, err := os.Lstat(path)
		switch {
		case errors.Is(err, fs.ErrNotExist) && size == 0:
			continue
		case err != nil:
			return fmt.Errorf("images: %w", err)
		case st.Size() < size:
			return fmt.Errorf("image pages-%d.img has %d bytes where its page map promises %d: %w", id, st.Size(),
				size, fault.ErrCorrupt)
		}
	}
	return nil
}

// presentPages returns how many pages of the page image a page map entry
// stands for. It decodes by hand, because go-criu's type lacks the 64-bit
// count that CRIU 4.2 writes, and a large process has millions of entries.
func presentPages(data []byte) (int64, error) {
	const compatPages, inParent, flags, nrPages = 2, 3, 4, 5
	var v [6]uint64
	var has [6]bool
	for len(data) > 0 {
		num, typ, n := protowire.ConsumeTag(data)
		if n < 0 {
			return 0, protowire.ParseError(n)
		}
		data = data[n:]
		if typ != protowire.VarintType || int(num) >= len(v) {
			if n = protowire.ConsumeFieldValue(num, typ, data); n < 0 {
				return 0, protowire.ParseError(n)
			}
			data = data[n:]
			continue
		}
		v[num], n = protowire.ConsumeVarint(data)
		if n < 0 {
			return 0, protowire.ParseError(n)
		}
		has[num] = true
		data = data[n:]
	}
	if !has[flags] && v[inParent] == 0 {
		v[flags] = pagePresent // as older versions of CRIU mean it
	}
	if v[flags]&pagePresent == 0 || v[flags]&pageInParent != 0 || v[inParent] != 0 {
		return 0, nil
	}
	pages := v[compatPages]
	if has[nrPages] {
		pages = v[nrPages]
	}
	if pages > 1<<50/pageSize {
		return 0, fmt.Errorf("%d pages in a row", pages)
	}
	return int64(pages), nil
}

// readImage calls fn with each entry of an image file. The bytes are valid
// until fn returns.
func readImage(path string, magic uint32, maxEntries int, fn func([]byte) error) error {
	fail := func(err error) error {
		if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
			return fmt.Errorf("image %s is cut off: %w", filepath.Base(path), fault.ErrCorrupt)
		}
		return fmt.Errorf("image %s: %w: %w", filepath.Base(path), err, fault.ErrCorrupt)
	}
	f, err := os.Open(path)
	if err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("image %s is missing: %w", filepath.Base(path), fault.ErrCorrupt)
		}
		return fmt.Errorf("image: %w", err)
	}
	defer f.Close()
	in := bufio.NewReader(f)
	var word [4]byte
	next := func() (uint32, error) {
		_, err := io.ReadFull(in, word[:])
		return binary.LittleEndian.Uint32(word[:]), err
	}
	magics := []uint32{magicCommon, magic}
	if magic == magicInventory {
		magics = magics[1:] // it says what version the others are
	}
	for _, want := range magics {
		got, err := next()
		if err != nil {
			return fail(err)
		}
		if got != want {
			return fail(fmt.Errorf("magic %#x, want %#x", got, want))
		}
	}
	buf := make([]byte, 0, 4096)
	for n := 0; ; n++ {
		size, err := next()
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return fail(err)
		}
		if size > maxEntry || n == maxEntries {
			return fail(fmt.Errorf("entry %d of %d bytes is past all bounds", n, size))
		}
		if cap(buf) < int(size) {
			buf = make([]byte, size)
		}
		buf = buf[:size]
		if _, err := io.ReadFull(in, buf); err != nil {
			return fail(io.ErrUnexpectedEOF)
		}
		if err := fn(buf); err != nil {
			return fail(err)
		}
	}
}
