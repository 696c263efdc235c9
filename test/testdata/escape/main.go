// Command escape does inside a sandbox what hostile code would. As
//
//	escape try PID MAJOR MINOR FILE
//
// it tries what is published, against a process, a block device and a file of the
// host, and prints a line for each: what it tried, a tab, and the error that it
// got, or "done". Where a try would do harm if it worked, it is made so that it
// would fail with another error. The other words begin what goes on for longer.
package main

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

func main() {
	runtime.LockOSThread()
	switch os.Args[1] {
	case "try":
		numbers := [3]int{}
		for i := range numbers {
			numbers[i], _ = strconv.Atoi(os.Args[2+i])
		}
		tryAll(numbers[0], uint32(numbers[1]), uint32(numbers[2]), os.Args[5])
	case "list":
		list()
	case "swap":
		swap(os.Args[2], os.Args[3])
	case "runtime":
		watchRuntime()
	case "memory":
		for all := [][]byte{}; ; {
			more := make([]byte, 1<<20)
			for i := 0; i < len(more); i += os.Getpagesize() {
				more[i] = 1
			}
			all = append(all, more)
		}
	case "files":
		exhaust()
	case "rings":
		rings()
	case "project":
		leaveProject(os.Args[2])
	}
}

// leaveProject gives a file project 0, which has no limit, and takes the mark from
// its directory by which what is made there has a project.
func leaveProject(path string) {
	const read, write, readFlags, writeFlags, inherit = 0x801c581f, 0x401c5820, 0x80086601, 0x40086602, 0x20000000
	f, err := os.Open(path)
	if err != nil {
		say("open", err)
		return
	}
	defer f.Close()
	var attr [7]uint32 // struct fsxattr
	ioctl := func(f *os.File, cmd uintptr, arg unsafe.Pointer) error {
		if _, _, e := unix.Syscall(unix.SYS_IOCTL, f.Fd(), cmd, uintptr(arg)); e != 0 {
			return e
		}
		return nil
	}
	if err := ioctl(f, read, unsafe.Pointer(&attr)); err != nil {
		say("read the project", err)
		return
	}
	attr[3] = 0
	say("set the project", ioctl(f, write, unsafe.Pointer(&attr)))
	dir, err := os.Open(filepath.Dir(path))
	if err != nil {
		say("open", err)
		return
	}
	defer dir.Close()
	var flags uint32
	if err := ioctl(dir, readFlags, unsafe.Pointer(&flags)); err != nil {
		say("read the flags", err)
		return
	}
	flags &^= inherit
	say("leave the project", ioctl(dir, writeFlags, unsafe.Pointer(&flags)))
}

// say prints one line of the report.
func say(what string, err error) {
	result := "done"
	var no unix.Errno
	switch {
	case errors.As(err, &no):
		result = unix.ErrnoName(no)
	case err != nil:
		result = err.Error()
	}
	fmt.Printf("%s\t%s\n", what, result)
}

// call makes a system call that a seccomp profile or a missing capability is to
// refuse.
func call(what string, number uintptr, args ...uintptr) {
	var a [6]uintptr
	copy(a[:], args)
	got, _, err := unix.RawSyscall6(number, a[0], a[1], a[2], a[3], a[4], a[5])
	if err == 0 && got == 0 && (number == unix.SYS_CLONE || number == unix.SYS_CLONE3) {
		unix.RawSyscall(unix.SYS_EXIT_GROUP, 0, 0, 0) // the child that should not be
	}
	if err == 0 {
		say(what, nil)
		return
	}
	say(what, err)
}

func text(s string) uintptr {
	p, _ := unix.BytePtrFromString(s)
	return uintptr(unsafe.Pointer(p))
}

func opens(what, path string, flags int) {
	fd, err := unix.Open(path, flags|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err == nil {
		_ = unix.Close(fd)
	}
	say(what, err)
}

func tryAll(pid int, major, minor uint32, file string) {
	var zero [256]byte
	nothing := uintptr(unsafe.Pointer(&zero))

	// Mounts and namespaces.
	for _, kind := range []string{"tmpfs", "proc", "sysfs", "cgroup", "cgroup2", "overlay", "devtmpfs"} {
		say("mount "+kind, unix.Mount("none", "/tmp", kind, 0, ""))
	}
	say("remount / writable", unix.Mount("", "/", "", unix.MS_REMOUNT|unix.MS_BIND, ""))
	say("bind /proc/sys elsewhere", unix.Mount("/proc/sys", "/tmp", "", unix.MS_BIND, ""))
	say("umount /proc/sys", unix.Unmount("/proc/sys", unix.MNT_DETACH))
	say("umount /proc/kcore", unix.Unmount("/proc/kcore", unix.MNT_DETACH))
	call("fsopen", unix.SYS_FSOPEN, text("tmpfs"), 0)
	call("open_tree", unix.SYS_OPEN_TREE, ^uintptr(99), text("/"), unix.OPEN_TREE_CLONE)
	call("move_mount", unix.SYS_MOVE_MOUNT, ^uintptr(0), text("/"), ^uintptr(0), text("/tmp"), 0)
	call("mount_setattr", unix.SYS_MOUNT_SETATTR, ^uintptr(99), text("/"), 0, nothing, 32)
	say("pivot_root", unix.PivotRoot("/tmp", "/tmp"))
	for _, ns := range []struct {
		name string
		flag int
	}{
		{"user", unix.CLONE_NEWUSER}, {"mnt", unix.CLONE_NEWNS}, {"net", unix.CLONE_NEWNET}, {"pid", unix.CLONE_NEWPID},
		{"ipc", unix.CLONE_NEWIPC}, {"uts", unix.CLONE_NEWUTS}, {"cgroup", unix.CLONE_NEWCGROUP},
	} {
		say("unshare "+ns.name, unix.Unshare(ns.flag))
		call("clone "+ns.name, unix.SYS_CLONE, uintptr(ns.flag)|uintptr(unix.SIGCHLD))
		fd, err := unix.Open("/proc/1/ns/"+ns.name, unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if err == nil {
			err = unix.Setns(fd, 0)
		}
		say("setns "+ns.name, err)
	}
	call("clone3", unix.SYS_CLONE3, nothing, 64)

	// The kernel's doors.
	call("add_key", unix.SYS_ADD_KEY, text("user"), text("k"), nothing, 1, ^uintptr(2))
	call("request_key", unix.SYS_REQUEST_KEY, text("user"), text("k"), 0, 0)
	call("keyctl", unix.SYS_KEYCTL, 0, ^uintptr(2), 1)
	call("bpf", unix.SYS_BPF, 5, nothing, 128)
	call("perf_event_open", unix.SYS_PERF_EVENT_OPEN, nothing, 0, ^uintptr(0), ^uintptr(0), 0)
	call("userfaultfd", unix.SYS_USERFAULTFD, 0)
	call("io_uring_setup", unix.SYS_IO_URING_SETUP, 1, nothing)
	call("io_uring_enter", unix.SYS_IO_URING_ENTER, ^uintptr(0), 0, 0, 0)
	call("io_uring_register", unix.SYS_IO_URING_REGISTER, ^uintptr(0), 0, 0, 0)
	call("init_module", unix.SYS_INIT_MODULE, 0, 0, text(""))
	call("finit_module", unix.SYS_FINIT_MODULE, ^uintptr(0), text(""), 0)
	call("delete_module", unix.SYS_DELETE_MODULE, text("no_such_module"), 0)
	call("kexec_load", unix.SYS_KEXEC_LOAD, ^uintptr(0), 99, nothing, ^uintptr(0))
	call("reboot", unix.SYS_REBOOT, 0, 0, 0)
	call("swapon", unix.SYS_SWAPON, text("/no/such/file"), 0)
	call("acct", unix.SYS_ACCT, text("/no/such/file"))
	call("settimeofday", unix.SYS_SETTIMEOFDAY, uintptr(unsafe.Pointer(&unix.Timeval{Usec: 2_000_000})), 0)
	call("syslog", unix.SYS_SYSLOG, 3, nothing, uintptr(len(zero)))
	call("sethostname", unix.SYS_SETHOSTNAME, text("escape"), 6)
	call("personality", unix.SYS_PERSONALITY, 0x0040000)
	call("open_by_handle_at", unix.SYS_OPEN_BY_HANDLE_AT, ^uintptr(99), nothing, 0)
	call("quotactl", unix.SYS_QUOTACTL, 0, 0, 0, 0)

	// Others' processes and files.
	say("signal a process of the host", unix.Kill(pid, 0))
	say("trace a process of the host", unix.PtraceAttach(pid))
	vec := unix.Iovec{Base: &zero[0], Len: 8}
	call("read a process of the host", unix.SYS_PROCESS_VM_READV, uintptr(pid), uintptr(unsafe.Pointer(&vec)), 1,
		uintptr(unsafe.Pointer(&vec)), 1, 0)
	call("pidfd of a process of the host", unix.SYS_PIDFD_OPEN, uintptr(pid), 0)
	opens("a file of the host", file, unix.O_RDONLY)
	opens("a file of the host by /proc/1/root", "/proc/1/root"+file, unix.O_RDONLY)
	opens("a file of the host by /proc/1/cwd", "/proc/1/cwd/../../../../../.."+file, unix.O_RDONLY)
	var leaked error = unix.ENOENT
	for fd := range 64 {
		if _, err := os.Stat("/proc/self/fd/" + strconv.Itoa(fd) + "/../../../../../../.." + file); err == nil {
			leaked = nil
		}
	}
	say("a file of the host by a leaked descriptor", leaked)

	// Devices.
	for _, path := range []string{"/dev/mem", "/dev/kmsg", "/dev/fuse", "/dev/kvm", "/dev/loop-control"} {
		opens(path, path, unix.O_RDWR)
	}
	_ = os.Remove("/disk")
	say("mknod of the host's disk", unix.Mknod("/disk", unix.S_IFBLK|0o600, int(unix.Mkdev(major, minor))))
	opens("open the host's disk", "/disk", unix.O_RDONLY)
	_ = os.Remove("/memory")
	_ = unix.Mknod("/memory", unix.S_IFCHR|0o600, int(unix.Mkdev(1, 1)))
	opens("open a device node of memory", "/memory", unix.O_RDWR)
	_, _, no := unix.RawSyscall(unix.SYS_IOCTL, 0, unix.TIOCSTI, nothing)
	say("TIOCSTI on stdin", no)

	// The network.
	for _, s := range []struct {
		name                   string
		domain, kind, protocol int
	}{
		{"raw", unix.AF_INET, unix.SOCK_RAW, unix.IPPROTO_ICMP}, {"packet", unix.AF_PACKET, unix.SOCK_RAW, 0},
		{"vsock", unix.AF_VSOCK, unix.SOCK_STREAM, 0}, {"alg", unix.AF_ALG, unix.SOCK_SEQPACKET, 0},
	} {
		fd, err := unix.Socket(s.domain, s.kind|unix.SOCK_CLOEXEC, s.protocol)
		if err == nil {
			_ = unix.Close(fd)
		}
		say(s.name+" socket", err)
	}
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err == nil {
		req, _ := unix.NewIfreq("lo")
		req.SetUint16(0)
		err = unix.IoctlIfreq(fd, unix.SIOCSIFFLAGS, req)
	}
	say("take lo down", err)

	// /proc and /sys.
	for _, path := range []string{
		"/proc/sys/kernel/core_pattern", "/proc/sys/kernel/modprobe", "/proc/sys/vm/panic_on_oom",
		"/proc/sys/fs/binfmt_misc/register", "/proc/sysrq-trigger", "/sys/kernel/uevent_helper",
		"/sys/kernel/mm/ksm/run", "/sys/fs/cgroup/release_agent",
	} {
		opens("write "+path, path, unix.O_WRONLY)
	}
	say("oom_score_adj below 0", os.WriteFile("/proc/self/oom_score_adj", []byte("-1000"), 0))
	for _, path := range []string{"/proc/kcore", "/proc/keys", "/proc/timer_list", "/proc/sched_debug", "/proc/kmsg"} {
		data := make([]byte, 64)
		f, err := os.Open(path)
		if err == nil {
			var n int
			if n, err = f.Read(data); n > 0 {
				err = nil
			}
			_ = f.Close()
		}
		say("read "+path, err)
	}
	say("files of /sys that open for writing", count("/sys"))
	say("files of /proc that open for writing", count("/proc"))

	// The way out of a chroot; it comes last, as it takes the root along.
	top, err := unix.Open("/", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	_ = unix.Mkdir("/jail", 0o700)
	err = errors.Join(err, unix.Chroot("/jail"), unix.Fchdir(top))
	for range 64 {
		err = errors.Join(err, unix.Chdir(".."))
	}
	if err = errors.Join(err, unix.Chroot(".")); err == nil {
		_, err = os.Stat(file)
	}
	say("a file of the host out of a chroot", err)
}

// count tells how many files below top can be opened for writing, and the first
// of them; processes' own files do not count, nor what hides others.
func count(top string) error {
	var found []string
	seen := 0
	_ = filepath.WalkDir(top, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return nil
		}
		if top == "/proc" && d.IsDir() && filepath.Dir(path) == top && strings.Trim(d.Name(), "0123456789") == "" {
			return fs.SkipDir
		}
		if seen++; seen > 200_000 {
			return fs.SkipAll
		}
		info, err := d.Info()
		if err != nil || !info.Mode().IsRegular() || info.Mode()&0o222 == 0 {
			return nil
		}
		if fd, err := unix.Open(path, unix.O_WRONLY|unix.O_NONBLOCK|unix.O_CLOEXEC|unix.O_NOFOLLOW, 0); err == nil {
			_ = unix.Close(fd)
			found = append(found, path)
		}
		return nil
	})
	if len(found) == 0 {
		return errors.New("none")
	}
	return errors.New(strings.Join(found[:min(len(found), 10)], " "))
}

// list prints what the sandbox is made of, as amicontained does.
func list() {
	status, _ := os.ReadFile("/proc/self/status")
	for line := range strings.Lines(string(status)) {
		key, value, _ := strings.Cut(strings.TrimSpace(line), ":")
		switch key {
		case "CapEff", "CapBnd", "Seccomp", "NoNewPrivs":
			fmt.Printf("%s\t%s\n", key, strings.TrimSpace(value))
		}
	}
	for _, ns := range []string{"cgroup", "ipc", "mnt", "net", "pid", "time", "user", "uts"} {
		id, _ := os.Readlink("/proc/self/ns/" + ns)
		fmt.Printf("ns %s\t%s\n", ns, id)
	}
	mounts, _ := os.ReadFile("/proc/self/mounts")
	var masked, fixed []string
	for line := range strings.Lines(string(mounts)) {
		f := strings.Fields(line)
		below := strings.HasPrefix(f[1], "/proc/") || strings.HasPrefix(f[1], "/sys/")
		switch {
		case f[1] == "/sys/fs/cgroup" || strings.HasPrefix(f[1], "/sys/fs/cgroup/"):
		case below && f[2] == "tmpfs" || strings.HasPrefix(f[1], "/proc/") && f[2] == "devtmpfs":
			masked = append(masked, f[1])
		case below && f[2] == "proc" && strings.HasPrefix(f[3], "ro"):
			fixed = append(fixed, f[1])
		case f[1] == "/sys":
			fmt.Printf("/sys\t%s\n", f[3])
		}
	}
	fmt.Printf("masked\t%s\nread-only\t%s\n", strings.Join(masked, " "), strings.Join(fixed, " "))
	var devices []string
	_ = filepath.WalkDir("/dev", func(path string, d fs.DirEntry, err error) error {
		if err != nil || strings.HasPrefix(path, "/dev/pts/") {
			return nil
		}
		// In a user namespace each is mounted on a plain file, as which it is listed.
		if fi, err := os.Lstat(path); err == nil && fi.Mode()&fs.ModeDevice != 0 {
			devices = append(devices, path)
		}
		return nil
	})
	fmt.Printf("devices\t%s\n", strings.Join(devices, " "))
	// But for what Go itself opens.
	var open []string
	for fd := range 256 {
		if to, err := os.Readlink("/proc/self/fd/" + strconv.Itoa(fd)); err == nil && fd > 2 &&
			!strings.HasPrefix(to, "anon_inode:") && !strings.HasPrefix(to, "/sys/fs/cgroup/") {
			open = append(open, to)
		}
	}
	fmt.Printf("open files\t%s\n", strings.Join(open, " "))
}

// swap exchanges two names, for as long as it runs.
func swap(a, b string) {
	for {
		if err := unix.Renameat2(unix.AT_FDCWD, a, unix.AT_FDCWD, b, unix.RENAME_EXCHANGE); err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
	}
}

// watchRuntime waits for programs of the host that come into the sandbox and
// tries to open them for writing, once they do not run any more. It never writes,
// and goes on until it is ended.
func watchRuntime() {
	own, _ := os.Readlink("/proc/self/exe")
	seen := map[string]bool{}
	for {
		dirs, _ := os.ReadDir("/proc")
		for _, d := range dirs {
			exe := "/proc/" + d.Name() + "/exe"
			if strings.Trim(d.Name(), "0123456789") != "" || seen[d.Name()] {
				continue
			}
			to, err := os.Readlink(exe)
			if errors.Is(err, fs.ErrPermission) { // as runc is made while it comes in
				seen[d.Name()] = true
				say("a program of the host", err)
			}
			if err != nil || to == own || strings.HasPrefix(to, "/bin/") {
				continue
			}
			fd, err := unix.Open(exe, unix.O_PATH|unix.O_CLOEXEC, 0)
			if err != nil {
				continue
			}
			seen[d.Name()] = true
			err = unix.ETXTBSY
			for late := time.Now().Add(time.Second); errors.Is(err, unix.ETXTBSY) && time.Now().Before(late); {
				var w int
				if w, err = unix.Open("/proc/self/fd/"+strconv.Itoa(fd), unix.O_WRONLY|unix.O_CLOEXEC, 0); err == nil {
					_, err = unix.FcntlInt(uintptr(w), unix.F_GET_SEALS, 0)
					if err == nil {
						err = errors.New("sealed")
					} else {
						err = nil
					}
					_ = unix.Close(w)
				}
			}
			_ = unix.Close(fd)
			say(to, err)
		}
	}
}

// exhaust opens files until no more can be opened, and keeps them for a while.
func exhaust() {
	n := 0
	for {
		if _, err := unix.Open("/dev/null", unix.O_RDONLY, 0); err != nil {
			say("files", err)
			fmt.Println(n)
			return
		}
		n++
	}
}

// rings is a program that would like io_uring and goes on without.
func rings() {
	var params [120]byte
	_, _, err := unix.RawSyscall(unix.SYS_IO_URING_SETUP, 4, uintptr(unsafe.Pointer(&params)), 0)
	say("io_uring_setup", err)
	for n := 1; ; n++ {
		_ = os.WriteFile("/count.new", []byte(strconv.Itoa(n)), 0o600)
		_ = os.Rename("/count.new", "/count")
		time.Sleep(20 * time.Millisecond)
	}
}
