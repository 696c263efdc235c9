package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/criu/host"
	"github.com/agentbox/agentbox/criu/stage"
)

// CRIU restores processes into a time namespace, whose monotonic clock goes on from
// the dump. runc 1.1 does not enter it for `exec`: what it starts has another
// clock than its siblings, and a checkpoint with both cannot be restored. So
// the wrapper enters it for `exec`, and only for that.
//
// setns(2) takes only processes with one thread for it, which no Go program is: the
// wrapper becomes nsenter, which becomes the wrapper again, inside, which becomes the
// runtime. All of them are one process, so that signals, descriptors and the end of a
// parent reach whichever it is.
//
// /proc shows the start times of processes by the clock of the reader. Inside, runc
// would not recognize the container's first process by the one that it has noted. So it
// is shown a copy of its state with the time as it is inside: on a tmpfs over
// the container's state directory, in a mount namespace of its own, which the
// kernel removes with the process, however that ends.

// insideVerb is how the wrapper is called inside; a descriptor of the first process's
// directory in /proc, the container's state directory and the runtime's arguments
// follow.
const insideVerb = "agentbox-inside"

const stateFile = "state.json"

// runcState is what the wrapper reads of runc's state of a container.
type runcState struct {
	Pid    int    `json:"init_process_pid"`
	Start  uint64 `json:"init_process_start"`
	Config struct {
		Namespaces []struct {
			Type string `json:"type"`
		} `json:"namespaces"`
	} `json:"config"`
}

// exec has the runtime execute a process in a container, in its time namespace.
func (w wrapper) exec(c call, args []string) int {
	state, err := readState(c)
	if err != nil {
		return w.execRuntime(args) // another runtime's, which all enter it; or the runtime says what is wrong
	}
	// The directory stays that of the process, whichever gets its pid.
	first, err := os.Open(fmt.Sprintf("/proc/%d", state.Pid))
	if err != nil {
		return w.execRuntime(args)
	}
	defer first.Close()
	if start, err := startTime(first); err != nil || start != state.Start {
		return w.execRuntime(args)
	}
	giveExec(c, first)
	if !state.outside(first) {
		return w.execRuntime(args)
	}
	err = enterTime(c, first, args)
	return w.fail(c, fmt.Errorf("exec in %s: enter the time namespace that it was restored into: %w. Install util-linux 2.36 or newer, which has nsenter, or runc 1.3 or newer", c.id, err))
}

// readState reads what runc has noted of a container.
func readState(c call) (s runcState, err error) {
	data, err := os.ReadFile(filepath.Join(c.root, c.id, stateFile))
	if err != nil {
		return s, err
	}
	err = json.Unmarshal(data, &s)
	if err == nil && s.Pid <= 0 {
		err = fmt.Errorf("%s names no process", stateFile)
	}
	return s, err
}

// outside reports whether a first process is in another time namespace than this
// one, and the runtime will not enter it: runc notes that it will.
func (s runcState) outside(first *os.File) bool {
	for _, ns := range s.Config.Namespaces {
		if ns.Type == "NEWTIME" {
			return false
		}
	}
	theirs, err := os.Readlink(under(first, "ns/time"))
	if err != nil {
		return false // the kernel has none
	}
	ours, err := os.Readlink("/proc/self/ns/time")
	return err == nil && theirs != ours
}

// named finds the container of an `exec` whose command line parse gave up on.
func (w wrapper) named(c call, args []string) (string, bool) {
	for _, arg := range args[len(c.globals)+1:] {
		if !stage.Valid(arg) {
			continue
		}
		if _, err := os.Stat(filepath.Join(c.root, arg, stateFile)); err == nil {
			return arg, true
		}
	}
	return "", false
}

// enterTime becomes this program in the time namespace of a first process. It returns
// only on failure.
func enterTime(c call, first *os.File, args []string) error {
	nsenter, err := host.Find("nsenter", nil)
	if err != nil {
		return err
	}
	self, err := os.Executable()
	if err != nil {
		return err
	}
	if _, err := unix.FcntlInt(first.Fd(), unix.F_SETFD, 0); err != nil {
		return err
	}
	call := []string{nsenter, "--no-fork", "--time=" + under(first, "ns/time"), "--", self,
		insideVerb, strconv.Itoa(int(first.Fd())), filepath.Join(c.root, c.id)}
	return fmt.Errorf("exec %s: %w", nsenter, syscall.Exec(nsenter, append(call, args...), os.Environ()))
}

// inside is what the wrapper does in a container's time namespace.
func (w wrapper) inside(args []string) int {
	fd, err := strconv.Atoi(args[0])
	dir, args := args[1], args[2:]
	if err == nil {
		unix.CloseOnExec(fd)
		err = showStart(dir, os.NewFile(uintptr(fd), "the first process"))
	}
	if err != nil {
		c, _ := parse(args)
		return w.fail(c, fmt.Errorf("exec in %s: enter its time namespace: %w", filepath.Base(dir), err))
	}
	return w.execRuntime(args)
}

// showStart shows this process, and what it becomes, a container's state with the
// start of its first process as it is seen from here.
func showStart(dir string, first *os.File) error {
	start, err := startTime(first)
	if errors.Is(err, unix.ESRCH) || errors.Is(err, fs.ErrNotExist) {
		return nil // it has ended, and the runtime says so
	}
	if err != nil {
		return err
	}
	data, err := os.ReadFile(filepath.Join(dir, stateFile))
	if err != nil {
		return err
	}
	state := object{}
	if err := json.Unmarshal(data, &state); err != nil {
		return fmt.Errorf("%s: %w", stateFile, err)
	}
	state["init_process_start"] = json.RawMessage(strconv.FormatUint(start, 10))
	if data, err = marshal(state); err != nil {
		return err
	}
	// This affects the main thread, which becomes the runtime.
	if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
		return fmt.Errorf("a mount namespace: %w", err)
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_SLAVE, ""); err != nil {
		return fmt.Errorf("a mount namespace: %w", err)
	}
	if err := unix.Mount("tmpfs", dir, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "mode=0700"); err != nil {
		return fmt.Errorf("mount over %s: %w", dir, err)
	}
	return os.WriteFile(filepath.Join(dir, stateFile), data, 0o600)
}

// startTime is when a process was started, by the clock of this process.
func startTime(process *os.File) (uint64, error) {
	data, err := os.ReadFile(under(process, "stat"))
	if err != nil {
		return 0, err
	}
	// The name, in parentheses, may hold anything.
	fields := strings.Fields(string(data[strings.LastIndexByte(string(data), ')')+1:]))
	const starttime = 22 - 3 // the first one after the name is the third
	if len(fields) <= starttime {
		return 0, fmt.Errorf("no start time in the stat of a process: %q", data)
	}
	return strconv.ParseUint(fields[starttime], 10, 64)
}

// under is the path of a file below an open directory.
func under(dir *os.File, name string) string {
	return fmt.Sprintf("/proc/self/fd/%d/%s", dir.Fd(), name)
}
