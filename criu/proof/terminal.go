package proof

import (
	"context"
	"fmt"
	"os"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/criu/freezer"
	"github.com/agentbox/agentbox/internal/proc"
)

// A process that opens /dev/tty has its terminal under another name. CRIU dumps that of a
// session's leader alone. So for the dump such a descriptor is a duplicate of one that the
// process has of the terminal itself, and it is /dev/tty again afterwards. Descriptors of
// /dev/tty that processes share have flags of their own from then on. If agentbox is killed in
// between, a descriptor stays a duplicate: it reads and writes as before. So it does after a
// restore, since CRIU gives a session's terminal to its leader alone, and a process without
// one cannot open /dev/tty.

// ownTerminal is what a process opens to have its controlling terminal.
const ownTerminal = "/dev/tty"

// HideTerminals has the descriptors of /dev/tty in a frozen container become duplicates of the
// terminals, and returns the record of that; ShowTerminals of r is the way back. A descriptor
// that an epoll watches stays as it is, since the epoll would lose it.
func (r Record) HideTerminals(ctx context.Context, c freezer.Container) (Record, error) {
	dumped := r
	dumped.Tasks = slices.Clone(r.Tasks)
	for i, task := range dumped.Tasks {
		hidden := task.ownTerminals()
		if len(hidden) == 0 {
			continue
		}
		fds := slices.Clone(task.FDs)
		for k := range fds {
			if slices.ContainsFunc(hidden, func(h FD) bool { return h.N == fds[k].N }) {
				terminal := task.terminal()
				fds[k].Target = terminal.Target
				fds[k].Flags = terminal.Flags&^unix.O_CLOEXEC | fds[k].Flags&unix.O_CLOEXEC
			}
		}
		dumped.Tasks[i].FDs = fds
	}
	return dumped, r.terminals(ctx, c, func(t *freezer.Tracee, fd, terminal FD) error {
		_, err := t.Call(unix.SYS_DUP3, uint64(terminal.N), uint64(fd.N), fd.Flags&unix.O_CLOEXEC)
		return err
	})
}

// ShowTerminals undoes HideTerminals. Processes that have ended are left out.
func (r Record) ShowTerminals(ctx context.Context, c freezer.Container) error {
	return r.terminals(ctx, c, func(t *freezer.Tracee, fd, _ FD) error { return fd.openTerminal(t) })
}

func (r Record) terminals(
	ctx context.Context, c freezer.Container, do func(t *freezer.Tracee, fd, terminal FD) error,
) error {
	tasks := map[int]Task{} // by the thread that makes the calls
	var threads []int
	for _, task := range r.Tasks {
		if len(task.Threads) == 0 || len(task.ownTerminals()) == 0 {
			continue
		}
		if st, err := proc.Read(task.host); err != nil || st.Ended() {
			continue
		}
		tid := task.Threads[0].host
		tasks[tid], threads = task, append(threads, tid)
	}
	if len(threads) == 0 {
		return nil
	}
	return c.Inject(ctx, threads, func(t *freezer.Tracee) error {
		task := tasks[t.ID()]
		for _, fd := range task.ownTerminals() {
			if err := do(t, fd, *task.terminal()); err != nil {
				return fmt.Errorf("descriptor %d (%s) of process %d: %w", fd.N, ownTerminal, task.Pid, err)
			}
		}
		return nil
	})
}

// ownTerminals lists the descriptors of /dev/tty that can be duplicates for a while.
func (t Task) ownTerminals() (list []FD) {
	if !freezer.CanInject || t.terminal() == nil {
		return nil
	}
	if _, err := os.Stat(fmt.Sprintf("/proc/%d/root%s", t.host, ownTerminal)); err != nil {
		return nil // it could not be opened again
	}
	for _, fd := range t.FDs {
		if fd.Target == ownTerminal && !fd.Watched && fd.Flags&unix.O_PATH == 0 {
			list = append(list, fd)
		}
	}
	return list
}

// terminal returns a descriptor of a process's controlling terminal under its own name; nil:
// it has none.
func (t Task) terminal() *FD {
	for i, fd := range t.FDs {
		if t.TTY != 0 && fd.TTY == t.TTY && fd.Target != ownTerminal && fd.Flags&unix.O_PATH == 0 {
			return &t.FDs[i]
		}
	}
	return nil
}

// withoutTerminal says which processes have no controlling terminal after a restore.
func (r Record) withoutTerminal() []string {
	var list []string
	for _, t := range r.Tasks {
		if t.TTY != 0 && t.Pid != t.Session && len(t.Threads) > 0 {
			list = append(list, fmt.Sprintf("%d (%s)", t.Pid, t.Threads[0].Name))
		}
	}
	const most = 3
	text := strings.Join(list[:min(len(list), most)], ", ")
	switch n := len(list); {
	case n == 0:
		return nil
	case n > most:
		text += fmt.Sprintf(" and %d more", n-most)
	}
	return []string{"after a restore only the leader of a session has its terminal: /dev/tty and job control fail in processes " + text}
}

// openTerminal has a process open /dev/tty as the descriptor.
func (fd FD) openTerminal(t *freezer.Tracee) error {
	at, err := t.Page(append([]byte(ownTerminal), 0))
	if err != nil {
		return err
	}
	const workingDirectory = ^uint64(99) // AT_FDCWD
	n, err := t.Call(unix.SYS_OPENAT, workingDirectory, at, fd.Flags|unix.O_CLOEXEC)
	if err != nil {
		return fmt.Errorf("open %s: %w", ownTerminal, err)
	}
	if _, err = t.Call(unix.SYS_DUP3, n, uint64(fd.N), fd.Flags&unix.O_CLOEXEC); err != nil {
		return err
	}
	_, err = t.Call(unix.SYS_CLOSE, n)
	return err
}
