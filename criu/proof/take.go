package proof

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/proc"
)

// Take records processes, given by their pids on the host. They stand still. first is
// the container's first process.
func Take(first int, pids []int) (Record, error) {
	t := taking{depth: depthOf(first), inner: map[int]int{}, objects: map[string]int{}}
	if t.depth == 0 {
		return Record{}, fmt.Errorf("process %d: %w", first, fs.ErrNotExist)
	}
	var root unix.Stat_t
	if unix.Stat(fmt.Sprintf("/proc/%d/root", first), &root) == nil {
		t.root = root.Dev
	}
	stats := map[int]status{}
	for _, pid := range pids {
		s, err := readStatus(fmt.Sprintf("/proc/%d/status", pid))
		if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ESRCH) {
			continue // reaped meanwhile, by a parent outside
		}
		if err != nil {
			return Record{}, err
		}
		inside, ok := s.inner("NSpid", t.depth)
		if !ok {
			continue
		}
		stats[pid], t.inner[pid] = s, inside
	}
	pids = slices.DeleteFunc(slices.Clone(pids), func(pid int) bool { return t.inner[pid] == 0 })
	slices.SortFunc(pids, func(a, b int) int { return t.inner[a] - t.inner[b] })
	var err error
	if t.groups, err = joined(first); err != nil {
		return Record{}, err
	}
	r := Record{Version: version}
	for _, pid := range pids {
		task, err := t.task(pid, stats[pid])
		if err != nil {
			return Record{}, fmt.Errorf("process %d: %w", pid, err)
		}
		r.Tasks = append(r.Tasks, task)
	}
	return r, nil
}

// taking is a Take under way.
type taking struct {
	depth   int         // of the container's pid namespace
	inner   map[int]int // pids in the container by those on the host
	objects map[string]int
	fds     int
	groups  []Membership // of the container's network
	root    uint64       // the device of the container's root filesystem; 0: not known
}

// directory returns the inode number of a directory of the root filesystem; 0: it is none.
func (t *taking) directory(st *unix.Stat_t) uint64 {
	if st.Mode&unix.S_IFMT != unix.S_IFDIR || st.Dev != t.root {
		return 0
	}
	return st.Ino
}

func (t *taking) task(pid int, s status) (task Task, err error) {
	parent, _ := strconv.Atoi(s["PPid"])
	task = Task{
		host: pid, Pid: t.inner[pid], Parent: t.inner[parent], Ignored: s["SigIgn"], Caught: s["SigCgt"],
		Umask: s["Umask"], Pending: s["ShdPnd"],
	}
	task.Group, _ = s.inner("NSpgid", t.depth)
	task.Session, _ = s.inner("NSsid", t.depth)
	switch s["State"][:1] {
	case "Z", "X":
		return Task{
			host: pid, Pid: task.Pid, Parent: task.Parent, Group: task.Group, Session: task.Session, Zombie: true,
		}, nil
	case "T":
		task.Stopped = true
	}
	dir := fmt.Sprintf("/proc/%d/", pid)
	for name, to := range map[string]*string{"cwd": &task.Cwd, "root": &task.Root, "exe": &task.Exe} {
		*to, _ = os.Readlink(dir + name)
	}
	if st, err := proc.Read(pid); err == nil && unix.Major(st.TTY) == ptyMajor {
		task.TTY = st.TTY
	}
	var cwd unix.Stat_t
	if unix.Stat(dir+"cwd", &cwd) == nil {
		task.CwdIno = t.directory(&cwd)
	}
	task.OOM, task.Core, task.Persona = oneLine(dir+"oom_score_adj"), oneLine(dir+"coredump_filter"),
		oneLine(dir+"personality")
	task.THP = s["THP_enabled"]
	if task.Limits, err = limits(dir + "limits"); err != nil {
		return task, err
	}
	task.Timers = timers(dir + "timers")
	if err := t.threads(pid, &task); err != nil {
		return task, err
	}
	return task, t.descriptors(pid, &task)
}

func (t *taking) threads(pid int, task *Task) error {
	dir := fmt.Sprintf("/proc/%d/task", pid)
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		s, err := readStatus(filepath.Join(dir, e.Name(), "status"))
		if err != nil {
			return err
		}
		tid, ok := s.inner("NSpid", t.depth)
		if !ok || strings.HasPrefix(s["State"], "Z") || strings.HasPrefix(s["State"], "X") {
			continue
		}
		th := Thread{
			Tid: tid, Name: s["Name"], Uids: s["Uid"], Gids: s["Gid"], Groups: s["Groups"], NoPrivs: s["NoNewPrivs"],
			Caps:    strings.Join([]string{s["CapInh"], s["CapPrm"], s["CapEff"], s["CapBnd"], s["CapAmb"]}, " "),
			Seccomp: s["Seccomp"] + " " + s["Seccomp_filters"], Blocked: s["SigBlk"], Pending: s["SigPnd"],
			CPUs:  s["Cpus_allowed"],
			Slack: oneLine("/proc/" + e.Name() + "/timerslack_ns"),
		}
		th.host, _ = strconv.Atoi(e.Name())
		if masked(filepath.Join(dir, e.Name(), "syscall")) {
			th.Blocked = ""
		}
		if th.Priority, th.Nice, th.Policy, err = scheduling(filepath.Join(dir, e.Name(), "stat")); err != nil {
			return err
		}
		const whoThread = 1 // IOPRIO_WHO_PROCESS
		if io, _, errno := unix.Syscall(unix.SYS_IOPRIO_GET, whoThread, uintptr(th.host), 0); errno == 0 {
			th.IO = int(io)
		}
		task.Threads = append(task.Threads, th)
	}
	slices.SortFunc(task.Threads, func(a, b Thread) int { return a.Tid - b.Tid })
	return nil
}

// descriptors records what a process has open, and the locks that it holds by it.
func (t *taking) descriptors(pid int, task *Task) error {
	dir := fmt.Sprintf("/proc/%d/", pid)
	entries, err := os.ReadDir(dir + "fd")
	if err != nil {
		return err
	}
	if t.fds += len(entries); t.fds > maxFDs {
		return fmt.Errorf("the container has more than %d files open", maxFDs)
	}
	watched := map[int]bool{}
	for _, e := range entries {
		n, _ := strconv.Atoi(e.Name())
		target, err := os.Readlink(dir + "fd/" + e.Name())
		if err != nil {
			return err
		}
		info, err := os.ReadFile(dir + "fdinfo/" + e.Name())
		if err != nil {
			return err
		}
		fd := FD{N: n, Target: target}
		var st unix.Stat_t
		if err := unix.Stat(dir+"fd/"+e.Name(), &st); err != nil {
			return err
		}
		fd.Ino = t.directory(&st)
		if st.Mode&unix.S_IFMT == unix.S_IFCHR && unix.Major(st.Rdev) == ptyMajor {
			fd.TTY = st.Rdev
		}
		locks, watches, event := fd.info(string(info))
		for _, n := range watches {
			watched[n] = true
		}
		object := ""
		if kind, _, is := strings.Cut(target, ":["); is && !strings.HasPrefix(target, "/") && kind != "anon_inode" {
			if fd.Target = kind; kind == "pipe" || kind == "socket" {
				object, fd.Owner = target, fmt.Sprintf("%d:%d", st.Uid, st.Gid)
			}
		} else if event != "" {
			object = "eventfd " + event
		}
		if object != "" {
			if t.objects[object] == 0 {
				t.objects[object] = len(t.objects) + 1
				if fd.Target == "socket" {
					if fd.Socket, err = t.socket(pid, n); err != nil {
						return err
					}
				}
			}
			fd.Object = t.objects[object]
		}
		if st.Mode&unix.S_IFMT != unix.S_IFREG || strings.HasPrefix(target, "anon_inode:") {
			fd.Pos = 0
		}
		task.FDs = append(task.FDs, fd)
		task.addLocks(fd, locks)
	}
	for i := range task.FDs {
		task.FDs[i].Watched = watched[task.FDs[i].N]
	}
	slices.SortFunc(task.FDs, func(a, b FD) int { return a.N - b.N })
	slices.SortFunc(task.Locks, func(a, b Lock) int { return strings.Compare(a.key(), b.key()) })
	return nil
}

// socket asks a socket for what setsockopt has told it; nil: the kernel does not let us.
func (t *taking) socket(pid, n int) (*Socket, error) {
	fd, err := socket{pid, n, t.inner[pid]}.open()
	if errors.Is(err, unix.ENOSYS) || errors.Is(err, unix.EPERM) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	defer unix.Close(fd)
	return &Socket{Options: takeOptions(fd), Groups: takeGroups(fd, t.groups)}, nil
}

// ptyMajor is the device number of terminals in /dev/pts.
const ptyMajor = 136

// keptFlags are those of an open file that say what can be done with it now. The others
// say how it was opened.
const keptFlags = unix.O_ACCMODE | unix.O_APPEND | unix.O_NONBLOCK | unix.O_SYNC | unix.O_ASYNC | unix.O_DIRECT | unix.O_NOATIME | unix.O_PATH | unix.O_CLOEXEC

// info takes from the text of fdinfo. It returns the locks in it, the descriptors that
// an epoll watches, and the kernel's number of an eventfd.
func (fd *FD) info(text string) (locks []string, watches []int, event string) {
	for line := range strings.Lines(text) {
		k, v, _ := strings.Cut(line, ":")
		v = strings.TrimSpace(v)
		switch k {
		case "pos":
			fd.Pos, _ = strconv.ParseInt(v, 10, 64)
		case "flags":
			fd.Flags, _ = strconv.ParseUint(v, 8, 64)
			fd.Flags &= keptFlags
		case "eventfd-semaphore":
			fd.Semaphore = v == "1"
		case "eventfd-count":
			fd.Count = v
		case "eventfd-id":
			event = v
		case "tfd":
			v, _, _ = strings.Cut(v, " ")
			n, _ := strconv.Atoi(v)
			watches = append(watches, n)
		case "sigmask":
			fd.Mask = v
		case "clockid":
			fd.Clock = v
		case "lock":
			locks = append(locks, v)
		}
	}
	return locks, watches, event
}

// addLocks adds locks in the kernel's words, "1: POSIX  ADVISORY  WRITE 7 00:27:9 5 14".
// The same one shows at each descriptor of its file.
func (task *Task) addLocks(fd FD, lines []string) {
	for _, line := range lines {
		f := strings.Fields(line)
		if len(f) < 8 {
			continue
		}
		f = f[len(f)-7:] // kind, advisory, mode, pid, inode, start, end
		l := Lock{FD: fd.N, Kind: f[0], Write: f[2] == "WRITE", End: -1, Path: fd.Target}
		l.Start, _ = strconv.ParseInt(f[5], 10, 64)
		if f[6] != "EOF" {
			l.End, _ = strconv.ParseInt(f[6], 10, 64)
		}
		// It takes a file open for writing, or reading, to have it again.
		mode := fd.Flags & unix.O_ACCMODE
		fits := l.Kind == "FLOCK" || mode == unix.O_RDWR || l.Write == (mode == unix.O_WRONLY)
		at := slices.IndexFunc(task.Locks, func(o Lock) bool { return o.key() == l.key() })
		switch {
		case at < 0:
			task.Locks = append(task.Locks, l)
		case fits && fd.Target == l.Path:
			task.Locks[at].FD = fd.N
		}
	}
}

// key identifies a lock among those of its process.
func (l Lock) key() string {
	if l.Kind != "POSIX" { // it belongs to the open file
		return fmt.Sprintf("%s %d %v %d %d", l.Kind, l.FD, l.Write, l.Start, l.End)
	}
	return fmt.Sprintf("%s %s %v %d %d", l.Kind, l.Path, l.Write, l.Start, l.End)
}

// status is /proc/PID/status.
type status map[string]string

func readStatus(path string) (status, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	s := status{}
	for line := range strings.Lines(string(data)) {
		k, v, _ := strings.Cut(line, ":")
		s[k] = strings.TrimSpace(v)
	}
	if s["State"] == "" {
		return nil, fmt.Errorf("%s makes no sense", path)
	}
	return s, nil
}

// inner returns an id as the container's pid namespace has it.
func (s status) inner(key string, depth int) (int, bool) {
	f := strings.Fields(s[key])
	if len(f) < depth {
		return 0, false
	}
	n, err := strconv.Atoi(f[depth-1])
	return n, err == nil
}

func depthOf(pid int) int {
	s, err := readStatus(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return 0
	}
	return len(strings.Fields(s["NSpid"]))
}

func oneLine(path string) string {
	data, _ := os.ReadFile(path)
	return strings.TrimSpace(string(data))
}

func limits(path string) ([]string, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	var list []string
	for line := range strings.Lines(string(data)) {
		list = append(list, strings.Join(strings.Fields(line), " "))
	}
	return list, nil
}

func timers(path string) (list []string) {
	data, _ := os.ReadFile(path)
	var one []string
	for line := range strings.Lines(string(data)) {
		k, v, _ := strings.Cut(strings.TrimSpace(line), ":")
		if k == "ID" && one != nil {
			list, one = append(list, strings.Join(one, " ")), nil
		}
		switch k {
		case "signal": // the number, and an address
			v, _, _ = strings.Cut(v, "/")
		case "notify": // how, and a thread of the host
			v, _, _ = strings.Cut(v, ".")
		}
		one = append(one, k+" "+strings.TrimSpace(v))
	}
	if one != nil {
		list = append(list, strings.Join(one, " "))
	}
	slices.Sort(list)
	return list
}

// scheduling reads the priority, the nice value and the policy of a thread.
func scheduling(path string) (priority, nice, policy string, err error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return "", "", "", err
	}
	f := strings.Fields(string(data[strings.LastIndexByte(string(data), ')')+1:])) // from the third field on
	if len(f) < 39 {
		return "", "", "", fmt.Errorf("%s makes no sense", path)
	}
	return f[15], f[16], f[38], nil
}

// masked reports whether a thread waits in a call that blocks other signals than the
// thread does as a rule. The numbers are x86-64's.
func masked(path string) bool {
	nr, _, _ := strings.Cut(oneLine(path), " ")
	switch nr {
	case "128", "130", "270", "271", "281", "426", "441": // sigtimedwait, sigsuspend, pselect6, ppoll, epoll_pwait, io_uring_enter, epoll_pwait2
		return true
	}
	return false
}
