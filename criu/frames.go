package criu

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"
)

// The kernel marks a page that is written to (soft-dirty), and CRIU takes what
// is not marked from the memory that was written ahead. Where mremap moves whole
// page tables, as it does with what is aligned to 2 MB, the marks are those of the
// old place (move_normal_pmd in mm/mremap.c): memory that was there before would
// be restored in place of what was moved there, and nobody would be told.
//
// So it is noted which frame each page is in when its memory is written ahead. A
// page that is not marked later, and not in the frame it was in, is marked by
// writing to it what it has. That is few pages: of those that were moved, or that
// the kernel has put elsewhere.
//
// Marks can be taken away, too, by whoever writes to /proc/PID/clear_refs, the
// process itself included. So a page of each mapping is marked before the container
// goes on. When one is not marked any more, no mark is believed.

// framed is where the private memory of a process lies.
type framed struct {
	start    uint64 // of the process
	runs     []frameRun
	sentries map[uint64]uint64 // pages that are marked: address, frame
}

// frameRun is some pages in a row.
type frameRun struct {
	at     uint64   // address of the first
	frames []uint64 // as pagemap has them, without marks
}

// Bits of an entry of /proc/PID/pagemap.
const (
	markBit    = 1 << 55
	guardBit   = 1 << 57
	inRAM      = 1 << 63
	frameMask  = 1<<55 - 1
	placeMask  = frameMask | 1<<61 | 1<<62 | inRAM // in memory or swap, and where
	pagemapRow = 8
)

// Categories of PAGEMAP_SCAN (linux/fs.h), and the ioctl itself.
const (
	isFile      = 1 << 2
	isPresent   = 1 << 3
	isSwapped   = 1 << 4
	isZero      = 1 << 5
	isMarked    = 1 << 7
	pagemapScan = 0xc0606610
)

type scanArg struct {
	size, flags, start, end, walkEnd uint64
	vec                              unsafe.Pointer
	vecLen, maxPages                 uint64
	inverted, mask, anyOf, returned  uint64
}

type scanRegion struct{ start, end, categories uint64 }

// scan calls fn with the ranges of an address space, between two addresses, that
// have pages of their own in memory or swap; with clean, those that are not marked.
func scan(pagemap *os.File, from, to uint64, clean bool, fn func(start, end uint64) error) error {
	not := uint64(isFile | isZero)
	if clean {
		not |= isMarked
	}
	var regions [512]scanRegion
	for from < to {
		arg := scanArg{start: from, end: to, vec: unsafe.Pointer(&regions), vecLen: uint64(len(regions)),
			inverted: not, mask: not, anyOf: isPresent | isSwapped, returned: isPresent}
		arg.size = uint64(unsafe.Sizeof(arg))
		n, _, errno := unix.Syscall(unix.SYS_IOCTL, pagemap.Fd(), pagemapScan, uintptr(unsafe.Pointer(&arg)))
		if errno != 0 {
			return fmt.Errorf("scan memory: %w", errno)
		}
		for _, r := range regions[:n] {
			if err := fn(r.start, r.end); err != nil {
				return err
			}
		}
		if arg.walkEnd <= from {
			return errors.New("scan memory: the kernel does not go on")
		}
		from = arg.walkEnd
	}
	return nil
}

// framesLack tells what the kernel does not show that settle needs; empty: nothing.
func framesLack() (lacks string, err error) {
	f, err := os.Open("/proc/self/pagemap")
	if err != nil {
		return "", err
	}
	defer f.Close()
	page := make([]byte, pageSize)
	page[0] = 1
	at := uint64(uintptr(unsafe.Pointer(&page[0]))) &^ (pageSize - 1)
	if err := scan(f, at, at+pageSize, true, func(uint64, uint64) error { return nil }); err != nil {
		return "this kernel has no PAGEMAP_SCAN that tells which memory changes (Linux 6.8)", nil
	}
	err = entries(f, at, at+pageSize, func(_, entry uint64) error {
		if entry&inRAM != 0 && entry&frameMask == 0 {
			lacks = "this process is not shown where memory lies (CAP_SYS_ADMIN)"
		}
		return nil
	})
	return lacks, err
}

// entries calls fn with the pagemap's entry of each page of a range.
func entries(pagemap *os.File, start, end uint64, fn func(at, entry uint64) error) error {
	var buf [4096 * pagemapRow]byte
	for start < end {
		want := buf[:min(uint64(len(buf)), (end-start)/pageSize*pagemapRow)]
		if _, err := pagemap.ReadAt(want, int64(start/pageSize*pagemapRow)); err != nil {
			return fmt.Errorf("read where memory lies: %w", err)
		}
		for ; len(want) > 0; want = want[pagemapRow:] {
			if err := fn(start, binary.LittleEndian.Uint64(want)); err != nil {
				return err
			}
			start += pageSize
		}
	}
	return nil
}

// eachPrivate calls fn with the ranges of private memory of a process that CRIU would
// take from what was written ahead, were they not marked. The first of a writable
// mapping is told.
func eachPrivate(pid int, pagemap *os.File, clean bool, fn func(start, end uint64, first bool) error) error {
	maps, err := os.Open(filepath.Join("/proc", strconv.Itoa(pid), "maps"))
	if err != nil {
		return err
	}
	defer maps.Close()
	lines := bufio.NewScanner(maps)
	for lines.Scan() {
		// 7f0c3a600000-7f0c3a800000 rw-p 00000000 00:00 0   [heap]
		f := strings.Fields(lines.Text())
		if len(f) < 2 || len(f[1]) < 4 || f[1][0] != 'r' || f[1][3] != 'p' {
			continue // without PROT_READ it is always dumped
		}
		switch f[len(f)-1] {
		case "[vdso]", "[vsyscall]", "[vvar]", "[vvar_vclock]":
			continue // the kernel's
		}
		from, to, _ := strings.Cut(f[0], "-")
		start, err := strconv.ParseUint(from, 16, 64)
		end, e := strconv.ParseUint(to, 16, 64)
		if err := errors.Join(err, e); err != nil {
			return err
		}
		first := f[1][1] == 'w'
		err = scan(pagemap, start, end, clean, func(start, end uint64) error {
			is := first
			first = false
			return fn(start, end, is)
		})
		if err != nil {
			return err
		}
	}
	return lines.Err()
}

// framesOf notes where the memory of processes lies that stand still.
func framesOf(pids []int) (map[int]framed, error) {
	all := map[int]framed{}
	for _, pid := range pids {
		st, err := readStat(pid)
		if err != nil || st.state == 'Z' || st.state == 'X' {
			continue
		}
		one := framed{start: st.start, sentries: map[uint64]uint64{}}
		if err := one.note(pid); err != nil {
			return nil, fmt.Errorf("process %d: %w", pid, err)
		}
		all[pid] = one
	}
	return all, nil
}

func (now *framed) note(pid int) error {
	m, err := openMemory(pid)
	if err != nil {
		return err
	}
	defer m.close()
	return eachPrivate(pid, m.pagemap, false, func(start, end uint64, first bool) error {
		if first {
			if err := m.mark(start); err != nil {
				return err
			}
		}
		run := frameRun{start, make([]uint64, 0, (end-start)/pageSize)}
		err := entries(m.pagemap, start, end, func(_, entry uint64) error {
			run.frames = append(run.frames, entry&placeMask)
			return nil
		})
		if first && err == nil {
			now.sentries[start] = run.frames[0]
		}
		now.runs = append(now.runs, run)
		return err
	})
}

// memory is that of a process.
type memory struct{ pagemap, mem *os.File }

func openMemory(pid int) (m memory, err error) {
	dir := filepath.Join("/proc", strconv.Itoa(pid))
	if m.pagemap, err = os.Open(filepath.Join(dir, "pagemap")); err != nil {
		return m, err
	}
	if m.mem, err = os.OpenFile(filepath.Join(dir, "mem"), os.O_RDWR, 0); err != nil {
		_ = m.pagemap.Close()
	}
	return m, err
}

func (m memory) close() { _, _ = m.pagemap.Close(), m.mem.Close() }

// mark has the kernel mark a page as changed.
func (m memory) mark(at uint64) error {
	err := entries(m.pagemap, at, at+pageSize, func(_, entry uint64) error {
		if entry&guardBit != 0 {
			return errors.New("userfaultfd guards a page: who answers for it stands still")
		}
		return nil
	})
	if err != nil {
		return err
	}
	var b [1]byte
	if _, err = m.mem.ReadAt(b[:], int64(at)); err == nil {
		_, err = m.mem.WriteAt(b[:], int64(at))
	}
	if err != nil {
		return fmt.Errorf("mark a page: %w", err)
	}
	return entries(m.pagemap, at, at+pageSize, func(_, entry uint64) error {
		if entry&markBit == 0 {
			return errors.New("a page is not marked by writing to it")
		}
		return nil
	})
}

// settle has CRIU dump each page that the memory written ahead does not have as
// it is, marked by the kernel or not. The container stands still. It returns the
// way from the images of the dump to those written ahead.
func (a *Ahead) settle(imageDir string) (link string, err error) {
	for pid, was := range a.frames {
		st, err := readStat(pid)
		if err != nil || st.start != was.start || st.state == 'Z' || st.state == 'X' {
			continue // CRIU takes no other process for it
		}
		if err := was.settle(pid); err != nil {
			return "", fmt.Errorf("process %d: %w", pid, err)
		}
	}
	return filepath.Rel(imageDir, a.Dir)
}

func (was framed) settle(pid int) error {
	m, err := openMemory(pid)
	if err != nil {
		return err
	}
	defer m.close()
	runs, there := was.runs, false
	for at, frame := range was.sentries {
		err := entries(m.pagemap, at, at+pageSize, func(_, entry uint64) error {
			if entry&placeMask != frame {
				return nil // it is gone, or elsewhere
			}
			if there = true; entry&markBit == 0 {
				return errors.New("somebody else has cleared the marks of what memory changes (/proc/PID/clear_refs)")
			}
			return nil
		})
		if err != nil {
			return err
		}
	}
	if !there {
		runs = nil // it is another program, perhaps
	}
	var moved []uint64
	err = eachPrivate(pid, m.pagemap, true, func(start, end uint64, _ bool) error {
		return entries(m.pagemap, start, end, func(at, entry uint64) error {
			for len(runs) > 0 && at >= runs[0].at+uint64(len(runs[0].frames))*pageSize {
				runs = runs[1:]
			}
			if len(runs) == 0 || at < runs[0].at || runs[0].frames[(at-runs[0].at)/pageSize] != entry&placeMask {
				moved = append(moved, at)
			}
			return nil
		})
	})
	for _, at := range moved {
		if err == nil {
			err = m.mark(at)
		}
	}
	return err
}
