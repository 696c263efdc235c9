// Package proc parses /proc/PID/stat: Read for a process, ReadThread for a thread. The file
// contains the name of the process, which the process itself chooses; the parser does not
// trust it.
package proc

import (
	"bytes"
	"fmt"
	"os"
	"strconv"
)

// Stat is what the kernel says of a process, or of a thread.
type Stat struct {
	State  byte // R, S, D, T (stopped), t (traced), Z, X
	Parent int
	TTY    uint64 // the device of the controlling terminal; 0: none
	Forked bool   // it has executed nothing since it was forked
	Ending bool   // it is on its way out of the kernel, which frees what it has
	Used   uint64 // of a processor, in ticks
	Start  uint64 // in ticks since the boot; with the pid it names a process within one boot
	Exit   int    // of a zombie, as wait has it; 0 also where the reader may not know
}

// Ended reports whether the process has ended and only waits to be reaped.
func (s Stat) Ended() bool { return s.State == 'Z' || s.State == 'X' }

// Read reads that of a process. One that does not exist is fs.ErrNotExist, or ESRCH.
func Read(pid int) (Stat, error) { return read("/proc/" + strconv.Itoa(pid) + "/stat") }

// ReadThread reads that of a single thread. The kernel adds up nothing for it, where the
// stat of a process costs as much as that has threads.
func ReadThread(tid int) (Stat, error) {
	id := strconv.Itoa(tid)
	return read("/proc/" + id + "/task/" + id + "/stat")
}

func read(path string) (Stat, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return Stat{}, err
	}
	s, err := parse(data)
	if err != nil {
		return Stat{}, fmt.Errorf("%s: %w", path, err)
	}
	return s, nil
}

// parse takes the fields behind the name, which stands in brackets and may hold anything,
// brackets and blanks too: they are counted from the last bracket. proc(5) numbers the
// first of them 3.
func parse(data []byte) (s Stat, err error) {
	end := bytes.LastIndexByte(data, ')')
	f := bytes.Fields(data[end+1:])
	if end < 0 || len(f) < 20 || len(f[0]) != 1 {
		return Stat{}, fmt.Errorf("%.300q makes no sense", data)
	}
	number := func(field int) (n uint64) {
		n, e := strconv.ParseUint(string(f[field-3]), 10, 64)
		if e != nil && err == nil {
			err = fmt.Errorf("field %d: %w", field, e)
		}
		return n
	}
	const exiting, forkNoExec = 0x4, 0x40 // PF_EXITING, PF_FORKNOEXEC
	flags := number(9)
	s = Stat{
		State: f[0][0], Parent: int(number(4)), TTY: number(7), Forked: flags&forkNoExec != 0,
		Ending: flags&exiting != 0, Used: number(14) + number(15), Start: number(22),
	}
	if len(f) > 52-3 {
		s.Exit = int(number(52))
	}
	if err != nil {
		return Stat{}, err
	}
	return s, nil
}
