package wall_test

import (
	"debug/elf"
	"flag"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// The test's program is also what runs in a container: with an argument it takes hold of what it
// names, says so by a file, and waits.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 && holds[os.Args[1]] != nil {
		if err := holds[os.Args[1]](); err != nil {
			_ = os.WriteFile("/failed", []byte(err.Error()), 0o644)
			os.Exit(1)
		}
		if err := os.WriteFile("/up", nil, 0o644); err != nil {
			os.Exit(1)
		}
		for {
			time.Sleep(time.Hour)
		}
	}
	flag.Parse()
	os.Exit(m.Run())
}

var kept []any // what a finalizer would close

var holds = map[string]func() error{
	"all":     holdAll,
	"maps":    func() error { return holdMaps(2000) },
	"map":     func() error { return holdMap("/bound/x") },
	"watches": func() error { return holdWatches("/etc", "/bound", "/bound/x", "/proc/self", "/dev/shm") },
}

// holdWatches watches files.
func holdWatches(paths ...string) error {
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC)
	if err != nil {
		return err
	}
	for _, p := range paths {
		if _, err := unix.InotifyAddWatch(fd, p, unix.IN_CREATE); err != nil {
			return err
		}
	}
	return nil
}

// holdMaps maps as many parts of as many files.
func holdMaps(n int) error {
	for i := range n {
		path := fmt.Sprintf("/tmp/%d", i)
		if err := os.WriteFile(path, make([]byte, 4096), 0o600); err != nil {
			return err
		}
		if err := holdMap(path); err != nil {
			return err
		}
	}
	return nil
}

// holdMap maps a file, by which it can be written.
func holdMap(path string) error {
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	_, err = unix.Mmap(int(f.Fd()), 0, 4096, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	return err
}

// holdAll has one of each thing that CRIU writes an image of.
func holdAll() error {
	debug.SetGCPercent(-1)
	var fds [2]int
	syscalls := []struct {
		name string
		do   func() error
	}{
		{"deleted file", func() error {
			f, err := os.Create("/tmp/deleted")
			if err != nil {
				return err
			}
			kept = append(kept, f)
			return os.Remove(f.Name())
		}},
		{"pipe", func() error {
			if err := unix.Pipe(fds[:]); err != nil {
				return err
			}
			_, err := unix.Write(fds[1], []byte("x"))
			return err
		}},
		{"fifo", func() error {
			if err := unix.Mkfifo("/tmp/fifo", 0o600); err != nil {
				return err
			}
			fd, err := unix.Open("/tmp/fifo", unix.O_RDWR, 0)
			if err == nil {
				_, err = unix.Write(fd, []byte("x"))
			}
			return err
		}},
		{"unix sockets", func() error {
			if fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM, 0); err != nil {
				return err
			} else if _, err = unix.Write(fds[0], []byte("x")); err != nil {
				return err
			}
			l, err := net.Listen("unix", "/tmp/sock")
			kept = append(kept, l)
			return err
		}},
		{"connection", func() error {
			l, err := net.Listen("tcp4", "127.0.0.1:4242")
			if err != nil {
				return err
			}
			c, err := net.Dial("tcp4", "127.0.0.1:4242")
			if err != nil {
				return err
			}
			a, err := l.Accept()
			if err == nil {
				_, err = io.WriteString(a, "x")
			}
			kept = append(kept, l, c, a)
			return err
		}},
		{"datagrams", func() error { _, err := unix.Socket(unix.AF_INET6, unix.SOCK_DGRAM, 0); return err }},
		{"netlink", func() error { _, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW, 0); return err }},
		{"eventfd", func() error { _, err := unix.Eventfd(1, 0); return err }},
		{"timerfd", func() error { _, err := unix.TimerfdCreate(unix.CLOCK_MONOTONIC, 0); return err }},
		{"signalfd", func() error { _, err := unix.Signalfd(-1, &unix.Sigset_t{}, 0); return err }},
		{"memfd", func() error { _, err := unix.MemfdCreate("x", 0); return err }},
		{"inotify", func() error { return holdWatches("/etc") }},
		{"lock", func() error {
			f, err := os.Create("/tmp/lock")
			if err != nil {
				return err
			}
			kept = append(kept, f)
			return unix.Flock(int(f.Fd()), unix.LOCK_EX)
		}},
		{"terminal", func() error {
			fd, err := unix.Open("/dev/ptmx", unix.O_RDWR|unix.O_NOCTTY, 0)
			if err == nil {
				_, err = unix.Write(fd, []byte("x"))
			}
			return err
		}},
		{"shared memory", func() error {
			id, err := unix.SysvShmGet(unix.IPC_PRIVATE, 4096, unix.IPC_CREAT|0o600)
			if err == nil {
				_, err = unix.SysvShmAttach(id, 0, 0)
			}
			return err
		}},
		{"queue", func() error {
			id, _, no := unix.Syscall(unix.SYS_MSGGET, 0, unix.IPC_CREAT|0o600, 0)
			if no != 0 {
				return no
			}
			msg := struct {
				typ  int64
				text [8]byte
			}{1, [8]byte{'x'}}
			if _, _, no := unix.Syscall6(unix.SYS_MSGSND, id, uintptr(unsafe.Pointer(&msg)), 8, 0, 0, 0); no != 0 {
				return no
			}
			runtime.KeepAlive(&msg)
			return nil
		}},
		{"semaphores", func() error {
			if _, _, no := unix.Syscall(unix.SYS_SEMGET, 0, 2, unix.IPC_CREAT|0o600); no != 0 {
				return no
			}
			return nil
		}},
		{"shared mapping", func() error {
			_, err := unix.Mmap(-1, 0, 4096, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_ANONYMOUS)
			return err
		}},
	}
	for _, s := range syscalls {
		if err := s.do(); err != nil {
			return fmt.Errorf("%s: %w", s.name, err)
		}
	}
	return nil
}

// installed puts the test's program into a container's files.
func installed(t testing.TB, files string) {
	t.Helper()
	self, err := os.Executable()
	must(t, err)
	program, err := elf.Open(self)
	must(t, err)
	defer program.Close()
	if libraries, err := program.ImportedLibraries(); err != nil || len(libraries) > 0 {
		t.Fatalf("this test's program needs %q, which the container does not have (%v): build it with CGO_ENABLED=0",
			libraries, err)
	}
	data, err := os.ReadFile(self)
	must(t, err)
	must(t, os.WriteFile(filepath.Join(files, "bin", "hold"), data, 0o755))
}

// install puts a filter over this thread.
func install(program []unix.SockFilter) error {
	runtime.LockOSThread()
	const setFilter, allThreads = 1, 1
	fprog := unix.SockFprog{Len: uint16(len(program)), Filter: &program[0]}
	_, _, no := unix.Syscall(unix.SYS_SECCOMP, setFilter, allThreads, uintptr(unsafe.Pointer(&fprog)))
	runtime.KeepAlive(program)
	if no != 0 {
		return no
	}
	return nil
}
