package criu

import (
	"encoding/binary"
	"fmt"
	"path/filepath"
	"slices"

	corex86 "github.com/checkpoint-restore/go-criu/v7/crit/images/core-x86"
	criucore "github.com/checkpoint-restore/go-criu/v7/crit/images/criu-core"
	"github.com/checkpoint-restore/go-criu/v7/crit/images/siginfo"
	"google.golang.org/protobuf/proto"

	"github.com/agentbox/agentbox/criu/host"
	"github.com/agentbox/agentbox/internal/fault"
)

// CRIU stops every thread, which interrupts the system call that it waits in.
// Most calls the kernel or CRIU makes again. Those that the kernel would go on
// with by restart_syscall, which CRIU cannot take along, it ends with EINTR, as
// if a signal's handler had run; and some, like epoll_wait, the kernel itself
// ends so at every stop, that of a cgroup included. No program that sleeps
// expects EINTR where it has no handler: the sleep of busybox ends.
//
// So calls are made again that end with EINTR and no signal. That they do is
// known for sure: until a thread that was interrupted is back in its program,
// its registers say which call it comes from (orig_ax). Neither a handler,
// entered or returned from, nor a program that runs on has that together with
// EINTR as the result.

// wait is a system call of x86-64, as the registers of a thread have it.
type wait struct{ nr, di, si, dx, r10 uint64 }

// Numbers of system calls of x86-64.
const (
	sysPoll           = 7
	sysNanosleep      = 35
	sysSemop          = 65
	sysSigtimedwait   = 128
	sysFutex          = 202
	sysRestart        = 219
	sysSemtimedop     = 220
	sysClockNanosleep = 230
	sysEpollWait      = 232
	sysEpollPwait     = 281
	sysEpollPwait2    = 441
)

// eintr is -EINTR as a register has it.
const eintr = ^uint64(4) + 1

// codeOf64 is the code segment of programs of 64 bits. A process of 32 has other numbers.
const codeOf64 = 0x33

// lowest is an address below which no program has memory (vm.mmap_min_addr).
const lowest = 0x10000

// again reports whether the call, made once more with the same arguments, resumes its wait, and
// returns its number. Exact: it ends when it would have.
//
// A call with a timeout of its own is not made again: it would start over, and one that
// checkpoints interrupt often enough would never end. Its caller can measure how long it took;
// EINTR is what epoll_wait returns after any stop, and poll after any signal. A sleep is
// different, because its caller takes any return for the end: it starts over where the kernel did
// not record the time left. Where the caller had that time stored elsewhere, it means to continue
// the sleep itself.
func (w wait) again() (nr uint64, exact, ok bool) {
	endless := func(timeout uint64) (uint64, bool, bool) { return w.nr, true, int32(timeout) < 0 }
	sleep := func(time, rest uint64) (uint64, bool, bool) { return w.nr, rest == time, rest == time || rest == 0 }
	switch w.nr {
	case sysNanosleep:
		return sleep(w.di, w.si)
	case sysClockNanosleep:
		nr, exact, ok = sleep(w.dx, w.r10)
		return nr, exact, ok && w.si&1 == 0 // until an instant: the kernel makes it again
	case sysPoll:
		return endless(w.dx)
	case sysFutex:
		const op, bitset = 0x7f, 9 // its timeout is an instant
		return w.nr, true, w.si&op == bitset
	case sysEpollWait, sysEpollPwait:
		return endless(w.r10)
	case sysEpollPwait2, sysSemtimedop:
		return w.nr, true, w.r10 == 0
	case sysSemop:
		return w.nr, true, true
	case sysSigtimedwait:
		return w.nr, true, w.dx == 0
	case sysRestart:
		nr = w.restarted()
		return nr, true, nr != 0
	}
	return 0, false, false
}

// restarted returns which call it is that the kernel has gone on with by
// restart_syscall, after an earlier stop; 0: its arguments, all that is left
// of it, could be another's. Those are nanosleep, clock_nanosleep, poll, futex.
func (w wait) restarted() uint64 {
	switch {
	case w.di >= lowest && w.si == w.di:
		return sysNanosleep // no poll has so many files, no futex has such an operation
	case w.di < 16 && w.si == 0 && w.dx >= lowest && w.r10 == w.dx:
		return sysClockNanosleep // by a clock, and there is no memory so low
	case w.di >= lowest && w.si > 0 && w.si < lowest && w.si&^0x180 != 0 && w.si&^0x180 != 9 && int32(w.dx) < 0:
		return sysPoll // of some files, in a number that is no operation of a futex
	}
	return 0
}

// blocks reports whether the kernel goes on with the call by restart_syscall,
// until the instant it has noted in the thread.
func (w wait) blocks() bool {
	switch w.nr {
	case sysPoll, sysNanosleep, sysRestart:
		return true
	case sysClockNanosleep:
		return w.si&1 == 0
	case sysFutex:
		const op, wait, bitset = 0x7f, 0, 9
		return w.si&op == wait || w.si&op == bitset
	}
	return false
}

// ContinueWaits changes images that are about to be restored so that their
// threads make the calls again that the dump has interrupted; see the top of
// this file. A thread for which a signal is pending is left as it is: its
// handler may be what the call is to end by. Done twice it is done once.
// Images of other machines than x86-64 are left alone.
func ContinueWaits(dir string) error {
	list, err := Processes(dir)
	if err != nil {
		return err
	}
	for _, p := range list {
		var shared *siginfo.SignalQueueEntry
		threads := append([]int{p.Pid}, slices.DeleteFunc(slices.Clone(p.Threads), func(t int) bool {
			return t == p.Pid
		})...)
		for _, t := range threads {
			path := filepath.Join(dir, fmt.Sprintf("core-%d.img", t))
			var core criucore.CoreEntry
			err := readImage(path, magicCore, 1, func(data []byte) error { return proto.Unmarshal(data, &core) })
			if err != nil {
				return err
			}
			if t == p.Pid {
				shared = core.GetTc().GetSignalsS()
			}
			if !interrupted(&core, shared) || !makeAgain(core.GetThreadInfo().GetGpregs()) {
				continue
			}
			if err := writeCore(path, &core); err != nil {
				return err
			}
		}
	}
	return nil
}

// interrupted reports whether no signal is pending that the thread would take.
func interrupted(core *criucore.CoreEntry, shared *siginfo.SignalQueueEntry) bool {
	blocked := core.GetThreadCore().GetBlkSigset()
	if core.GetThreadCore() == nil || core.ThreadCore.BlkSigset == nil {
		blocked = core.GetTc().GetBlkSigset()
	}
	for _, queue := range []*siginfo.SignalQueueEntry{shared, core.GetThreadCore().GetSignalsP()} {
		for _, s := range queue.GetSignals() {
			if len(s.GetSiginfo()) < 4 {
				return false
			}
			number := binary.LittleEndian.Uint32(s.GetSiginfo())
			if number < 1 || number > 64 || blocked&(1<<(number-1)) == 0 {
				return false
			}
		}
	}
	return true
}

// makeAgain changes the registers of an image so that they make their interrupted call again, and
// reports whether it did.
func makeAgain(r *corex86.UserX86RegsEntry) bool {
	if r == nil || r.GetMode() != corex86.UserX86RegsMode_NATIVE || r.GetCs() != codeOf64 || r.GetAx() != eintr {
		return false
	}
	nr, _, ok := wait{r.GetOrigAx(), r.GetDi(), r.GetSi(), r.GetDx(), r.GetR10()}.again()
	if !ok {
		return false
	}
	const instruction = 2 // bytes of `syscall`
	r.Ax, r.Ip = proto.Uint64(nr), proto.Uint64(r.GetIp()-instruction)
	return true
}

// writeCore replaces a core image.
func writeCore(path string, core *criucore.CoreEntry) (err error) {
	data, err := proto.MarshalOptions{AllowPartial: true}.Marshal(core)
	if err != nil {
		return fmt.Errorf("image %s: %w: %w", filepath.Base(path), err, fault.ErrCorrupt)
	}
	head := make([]byte, 0, 12+len(data))
	for _, word := range []uint32{magicCommon, magicCore, uint32(len(data))} {
		head = binary.LittleEndian.AppendUint32(head, word)
	}
	// Not through what may be a link, and never half.
	if err := host.Replace(path, append(head, data...)); err != nil {
		return fmt.Errorf("image: %w", err)
	}
	return nil
}
