// Command moves has two areas of memory, and changes them when it is told to:
//
//	moves write|move
//
// It writes "ready" to the file /says, waits for the file /go, and makes the first
// area what the second one is: by writing, or by moving the second over it. Then it
// writes "done", waits for the file /look, and writes "right" or "wrong".
package main

import (
	"bytes"
	"os"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

const (
	large = 2 << 20 // page tables are moved as a whole
	area  = 2 * large
)

func mmap(at, size uintptr, prot, flags int) uintptr {
	got, _, errno := unix.Syscall6(unix.SYS_MMAP, at, size, uintptr(prot),
		uintptr(unix.MAP_PRIVATE|unix.MAP_ANON|flags), ^uintptr(0), 0)
	check(errno)
	return got
}

func check(errno unix.Errno) {
	if errno != 0 {
		panic(errno)
	}
}

// own makes an area at an address, full of one letter, without huge pages, which
// have marks of their own.
func own(address uintptr, letter byte) {
	mmap(address, area, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_FIXED)
	_, _, errno := unix.Syscall(unix.SYS_MADVISE, address, area, unix.MADV_NOHUGEPAGE)
	check(errno)
	fill(at(address), letter)
}

// at is the memory of an area, which Go knows nothing of.
func at(address uintptr) []byte {
	return unsafe.Slice((*byte)(*(*unsafe.Pointer)(unsafe.Pointer(&address))), area)
}

func fill(b []byte, letter byte) {
	for i := range b {
		b[i] = letter
	}
}

func say(what string) {
	if err := os.WriteFile("/says", []byte(what), 0o600); err != nil {
		panic(err)
	}
}

func await(name string) {
	for {
		if _, err := os.Stat(name); err == nil {
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
}

func main() {
	first := (mmap(0, 2*area+large, unix.PROT_NONE, 0) + large - 1) &^ (large - 1)
	second := first + area
	own(first, 'a')
	own(second, 'b')
	say("ready")
	await("/go")
	if os.Args[1] == "write" {
		fill(at(first), 'b')
	} else {
		_, _, errno := unix.Syscall6(unix.SYS_MREMAP, second, area, area,
			unix.MREMAP_MAYMOVE|unix.MREMAP_FIXED, first, 0)
		check(errno)
	}
	say("done")
	await("/look")
	if bytes.Count(at(first), []byte{'b'}) == area {
		say("right")
	} else {
		say("wrong")
	}
	select {}
}
