// Command ahead has memory of which it changes a little at a time, moves some of
// it from place to place, and ends with 1 as soon as any is not what it last
// wrote there:
//
//	ahead MB [move|clear]
//
// Each round it prints "round N". With "move" or "clear" it writes "ready" to the
// file /says instead, waits for the file /go, and writes "done ADDRESS": from there
// on are 4 MB of 'b', where 4 MB of 'a' were before; moved there, or written, and
// then all marks of what has changed are cleared.
package main

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"os"
	"runtime/debug"
	"strconv"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

const (
	page  = 4096
	large = 2 << 20 // page tables are moved as a whole
	area  = 2 * large
)

// reserve returns the address of a number of bytes, aligned, of which none are there.
func reserve(size uintptr) uintptr {
	at := mmap(0, size+large, unix.PROT_NONE, 0)
	return (at + large - 1) &^ (large - 1)
}

func mmap(at, size uintptr, prot int, flags int) uintptr {
	got, _, errno := unix.Syscall6(unix.SYS_MMAP, at, size, uintptr(prot), uintptr(unix.MAP_PRIVATE|unix.MAP_ANON|flags), ^uintptr(0), 0)
	check(errno)
	return got
}

func check(errno unix.Errno) {
	if errno != 0 {
		fmt.Println("failed:", errno)
		os.Exit(1)
	}
}

// own makes an area at an address, without huge pages, which have marks of their own.
func own(at uintptr) {
	mmap(at, area, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_FIXED)
	_, _, errno := unix.Syscall(unix.SYS_MADVISE, at, area, unix.MADV_NOHUGEPAGE)
	check(errno)
}

// move takes an area elsewhere, over whatever is there.
func move(from, to uintptr) {
	_, _, errno := unix.Syscall6(unix.SYS_MREMAP, from, area, area, unix.MREMAP_MAYMOVE|unix.MREMAP_FIXED, to, 0)
	check(errno)
}

// at is the memory of an area, which Go knows nothing of.
func at(address uintptr) []byte {
	return unsafe.Slice((*byte)(*(*unsafe.Pointer)(unsafe.Pointer(&address))), area)
}

func fill(b []byte, with byte) {
	for i := range b {
		b[i] = with
	}
}

func main() {
	debug.SetGCPercent(-1)
	mb, err := strconv.Atoi(os.Args[1])
	if err != nil {
		panic(err)
	}
	if len(os.Args) > 2 {
		once(os.Args[2] == "move")
	}
	memory := make([]byte, mb<<20)
	versions := make([]uint64, len(memory)/page)
	write := func(i int) { // what a page has at both ends, and in between
		versions[i]++
		for off := i * page; off < (i+1)*page; off += 8 {
			binary.LittleEndian.PutUint64(memory[off:], uint64(i)<<32|versions[i])
		}
	}
	for i := range versions {
		write(i)
	}
	// Areas in slots, one more of these than there are areas.
	const areas = 3
	slots := reserve((areas + 1) * area)
	in := [areas + 1]byte{}
	for i := range areas {
		own(slots + uintptr(i)*area)
		in[i] = byte('a' + i)
		fill(at(slots+uintptr(i)*area), in[i])
	}
	free := areas
	for round := 1; ; round++ {
		// In a part of it: the kernel marks huge pages as a whole.
		for range 8 {
			write(rand.IntN(max(1, len(versions)/16)))
		}
		from := (free + 1 + rand.IntN(areas)) % (areas + 1)
		move(slots+uintptr(from)*area, slots+uintptr(free)*area)
		in[free], in[from], free = in[from], 0, from
		for i, v := range versions {
			for _, off := range []int{i * page, (i+1)*page - 8} {
				if got := binary.LittleEndian.Uint64(memory[off:]); got != uint64(i)<<32|v {
					fmt.Printf("wrong: page %d is %x, not version %d\n", i, got, v)
					os.Exit(1)
				}
			}
		}
		for slot, want := range in {
			if want == 0 {
				continue
			}
			for off, b := range at(slots + uintptr(slot)*area) {
				if b != want {
					fmt.Printf("wrong: %q at %d of %q\n", b, off, want)
					os.Exit(1)
				}
			}
		}
		fmt.Println("round", round)
		time.Sleep(100 * time.Millisecond)
	}
}

func say(what string) {
	if err := os.WriteFile("/says", []byte(what+"\n"), 0o600); err != nil {
		panic(err)
	}
}

func once(moves bool) {
	slots := reserve(2 * area)
	a, b := slots, slots+area
	own(a)
	own(b)
	fill(at(a), 'a')
	fill(at(b), 'b')
	say("ready")
	for {
		if _, err := os.Stat("/go"); err == nil {
			break
		}
		time.Sleep(10 * time.Millisecond)
	}
	if moves {
		move(b, a)
	} else {
		fill(at(a), 'b')
		if err := os.WriteFile("/proc/self/clear_refs", []byte("4"), 0); err != nil {
			panic(err)
		}
	}
	say(fmt.Sprintf("done %x", a))
	for {
		time.Sleep(time.Hour)
	}
}
