package proof

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/criu/freezer"
)

// Mend sets what can be set in the restored processes of a frozen container, so that they are as
// want has them, and names what it set. Compare finds the rest.
func Mend(ctx context.Context, c freezer.Container, want, got Record) (mended []string, err error) {
	calls := map[int][]func(t *freezer.Tracee) error{} // by the thread that makes them
	for _, w := range want.Tasks {
		at := slices.IndexFunc(got.Tasks, func(g Task) bool { return g.Pid == w.Pid })
		if at < 0 || w.Zombie || got.Tasks[at].Zombie {
			continue
		}
		g := got.Tasks[at]
		mended = append(mended, outside(w, g)...)
		mended = append(mended, mendSockets(w, g)...)
		if len(g.Threads) == 0 {
			continue
		}
		tid := g.Threads[0].host
		for _, l := range missing(w, g) {
			calls[tid] = append(calls[tid], l.take)
			mended = append(mended, fmt.Sprintf("process %d: %s", w.Pid, l))
		}
		for _, same := range semaphores(want, w, g) {
			calls[tid] = append(calls[tid], same.remake)
			mended = append(mended, fmt.Sprintf("process %d: semaphore of file descriptor %d", w.Pid, same[0].N))
		}
	}
	if !freezer.CanInject || len(calls) == 0 {
		return mended, nil
	}
	var threads []int
	for tid := range calls {
		threads = append(threads, tid)
	}
	err = c.Inject(ctx, threads, func(t *freezer.Tracee) error {
		for _, call := range calls[t.ID()] {
			if err := call(t); err != nil {
				return err
			}
		}
		return nil
	})
	return mended, err
}

// outside sets what needs no call of the process's own. Failures show later.
func outside(w, g Task) (mended []string) {
	did := func(what string, err error) {
		if err == nil {
			mended = append(mended, fmt.Sprintf("process %d: %s", w.Pid, what))
		}
	}
	if w.OOM != g.OOM {
		did("oom_score_adj", os.WriteFile(fmt.Sprintf("/proc/%d/oom_score_adj", g.host), []byte(w.OOM), 0))
	}
	if w.Core != g.Core && w.Core != "" {
		did("coredump_filter", os.WriteFile(fmt.Sprintf("/proc/%d/coredump_filter", g.host), []byte("0x"+w.Core), 0))
	}
	for _, wf := range w.FDs {
		at := slices.IndexFunc(g.FDs, func(gf FD) bool { return gf.N == wf.N })
		if at < 0 || wf.Owner == "" || g.FDs[at].Owner == wf.Owner || g.FDs[at].Target != wf.Target {
			continue
		}
		user, group, _ := strings.Cut(wf.Owner, ":")
		uid, _ := strconv.Atoi(user)
		gid, _ := strconv.Atoi(group)
		did("owner of "+wf.Target, os.Chown(fmt.Sprintf("/proc/%d/fd/%d", g.host, wf.N), uid, gid))
	}
	for _, wt := range w.Threads {
		at := slices.IndexFunc(g.Threads, func(gt Thread) bool { return gt.Tid == wt.Tid })
		if at < 0 {
			continue
		}
		gt := g.Threads[at]
		if wt.CPUs != gt.CPUs {
			set, err := processors(wt.CPUs)
			if err == nil {
				err = unix.SchedSetaffinity(gt.host, &set)
			}
			did("set of processors", err)
		}
		if wt.IO != gt.IO {
			const whoThread = 1 // IOPRIO_WHO_PROCESS
			_, _, errno := unix.Syscall(unix.SYS_IOPRIO_SET, whoThread, uintptr(gt.host), uintptr(wt.IO))
			var err error
			if errno != 0 {
				err = errno
			}
			did("I/O priority", err)
		}
		if wt.Slack != gt.Slack && wt.Slack != "" {
			did("timer slack", os.WriteFile(fmt.Sprintf("/proc/%d/timerslack_ns", gt.host), []byte(wt.Slack), 0))
		}
	}
	return mended
}

// processors reads a mask in the kernel's form, words of 32 bits in hex, the highest first.
func processors(mask string) (set unix.CPUSet, err error) {
	words := strings.Split(mask, ",")
	slices.Reverse(words)
	for i, word := range words {
		bits, err := strconv.ParseUint(word, 16, 32)
		if err != nil {
			return set, err
		}
		for b := range 32 {
			if bits&(1<<b) != 0 {
				set.Set(32*i + b)
			}
		}
	}
	return set, nil
}

// take has a process lock as it had: CRIU closes a descriptor of each file that it has
// mapped, by which the process loses its POSIX locks of the file.
func (l Lock) take(t *freezer.Tracee) error {
	kind := uint16(unix.F_RDLCK)
	if l.Write {
		kind = unix.F_WRLCK
	}
	var err error
	switch l.Kind {
	case "POSIX", "OFDLCK":
		length := uint64(0) // to the end
		if l.End >= 0 {
			length = uint64(l.End - l.Start + 1)
		}
		flock := binary.LittleEndian.AppendUint16(nil, kind)
		flock = append(flock, make([]byte, 6)...) // from the beginning of the file
		flock = binary.LittleEndian.AppendUint64(flock, uint64(l.Start))
		flock = binary.LittleEndian.AppendUint64(flock, length)
		flock = append(flock, make([]byte, 8)...)
		var at uint64
		if at, err = t.Page(flock); err != nil {
			break
		}
		command := uint64(unix.F_SETLK)
		if l.Kind == "OFDLCK" {
			command = unix.F_OFD_SETLK
		}
		_, err = t.Call(unix.SYS_FCNTL, uint64(l.FD), command, at)
	case "FLOCK":
		how := uint64(unix.LOCK_SH | unix.LOCK_NB)
		if l.Write {
			how = unix.LOCK_EX | unix.LOCK_NB
		}
		_, err = t.Call(unix.SYS_FLOCK, uint64(l.FD), how)
	case "LEASE":
		_, err = t.Call(unix.SYS_FCNTL, uint64(l.FD), unix.F_SETLEASE, uint64(kind))
	default:
		return nil // Compare finds it
	}
	if errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.EACCES) || errors.Is(err, unix.EWOULDBLOCK) {
		return fmt.Errorf("%s: another process has it by now", l)
	}
	if err != nil {
		return fmt.Errorf("%s: %w", l, err)
	}
	return nil
}

// semaphore is an eventfd that counts down by one, by all descriptors that it has.
type semaphore []FD

// semaphores lists those of a process that came back as ordinary eventfds and can be
// made anew: one process has them, and no epoll watches them.
func semaphores(want Record, w, g Task) (list []semaphore) {
	seen := map[int]bool{}
	for _, wf := range w.FDs {
		at := slices.IndexFunc(g.FDs, func(gf FD) bool { return gf.N == wf.N })
		if !wf.Semaphore || at < 0 || g.FDs[at].Semaphore || seen[wf.Object] || !want.lone(w, wf) {
			continue
		}
		seen[wf.Object] = true
		var same semaphore
		for _, o := range w.FDs {
			if o.Object == wf.Object {
				same = append(same, o)
			}
		}
		list = append(list, same)
	}
	return list
}

// lone reports whether an eventfd is that of one process, and no epoll watches it.
func (r Record) lone(task Task, fd FD) bool {
	for _, t := range r.Tasks {
		for _, o := range t.FDs {
			if o.Object == fd.Object && (t.Pid != task.Pid || o.Watched) {
				return false
			}
		}
	}
	return true
}

// Lost says, in a sentence each, what a restore will not bring back.
func (r Record) Lost() []string {
	list := slices.Concat(r.Queues.Lost, r.withoutTerminal())
	seen := map[int]bool{}
	for _, t := range r.Tasks {
		for _, fd := range t.FDs {
			if !fd.Semaphore || seen[fd.Object] || freezer.CanInject && r.lone(t, fd) {
				continue
			}
			seen[fd.Object] = true
			list = append(list, fmt.Sprintf("eventfd %d of process %d is shared or watched, and loses EFD_SEMAPHORE by a restore: a read of it takes the whole count", fd.N, t.Pid))
		}
	}
	return list
}

// remake puts a new eventfd in the place of the old one.
func (s semaphore) remake(t *freezer.Tracee) error {
	count, err := strconv.ParseUint(s[0].Count, 16, 64)
	if err != nil {
		return err
	}
	made, err := t.Call(unix.SYS_EVENTFD2, 0, unix.EFD_SEMAPHORE|s[0].Flags&unix.O_NONBLOCK)
	if err != nil {
		return fmt.Errorf("eventfd: %w", err)
	}
	if count > 0 {
		at, err := t.Page(binary.LittleEndian.AppendUint64(nil, count))
		if err == nil {
			_, err = t.Call(unix.SYS_WRITE, made, at, 8)
		}
		if err != nil {
			return fmt.Errorf("eventfd: %w", err)
		}
	}
	for _, fd := range s {
		if _, err := t.Call(unix.SYS_DUP3, made, uint64(fd.N), fd.Flags&unix.O_CLOEXEC); err != nil {
			return fmt.Errorf("eventfd: %w", err)
		}
	}
	_, err = t.Call(unix.SYS_CLOSE, made)
	return err
}
