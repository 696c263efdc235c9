// Command waits makes one system call that waits in each of many processes,
// and says what every one of them returned, and after how long:
//
//	waits SECONDS [CALL...]    all calls, or those named
//
// Each is made by the first thread of a process, and by another of a second
// process. Calls whose name ends in "-fed" wait without a limit and are given
// what they wait for after that time; "signal" sleeps, and a handler runs then.
// The lines are: call, thread (first, other), result, milliseconds.
package main

import (
	"bufio"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"runtime"
	"runtime/debug"
	"strconv"
	"sync"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

func init() { runtime.LockOSThread() }

var limit time.Duration

// call does a system call and returns what it returned.
func call(nr uintptr, args ...uintptr) string {
	var a [6]uintptr
	copy(a[:], args)
	r, _, errno := syscall.Syscall6(nr, a[0], a[1], a[2], a[3], a[4], a[5])
	if errno != 0 {
		return unix.ErrnoName(errno)
	}
	return strconv.Itoa(int(r))
}

// after runs fn when the calls that wait without a limit are to end.
func after(fn func()) {
	go func() {
		// A wait of many short ones, which no interruption makes shorter.
		for end := time.Now().Add(limit); time.Now().Before(end); {
			time.Sleep(20 * time.Millisecond)
		}
		fn()
	}()
}

func span() *unix.Timespec {
	ts := unix.NsecToTimespec(int64(limit))
	return &ts
}

func at(clock int32) *unix.Timespec {
	var now unix.Timespec
	must(unix.ClockGettime(clock, &now))
	ts := unix.NsecToTimespec(now.Nano() + int64(limit))
	return &ts
}

func pointer[T any](p *T) uintptr { return uintptr(unsafe.Pointer(p)) }

// keep holds what the kernel has pointers to.
var keep []any

func kept[T any](p *T) uintptr {
	keep = append(keep, p)
	return pointer(p)
}

func pipe() (r, w int) {
	var p [2]int
	must(unix.Pipe(p[:]))
	return p[0], p[1]
}

func feed(w int) func() { return func() { _, err := unix.Write(w, []byte("x")); must(err) } }

func epoll(fd int) uintptr {
	ep, err := unix.EpollCreate1(0)
	must(err)
	must(unix.EpollCtl(ep, unix.EPOLL_CTL_ADD, fd, &unix.EpollEvent{Events: unix.EPOLLIN}))
	return uintptr(ep)
}

func socket() int {
	p, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM, 0)
	must(err)
	tv := unix.NsecToTimeval(int64(limit))
	must(unix.SetsockoptTimeval(p[0], unix.SOL_SOCKET, unix.SO_RCVTIMEO, &tv))
	return p[0]
}

func millis() uintptr { return uintptr(limit.Milliseconds()) }

const (
	futexWait   = 0
	futexWake   = 1
	futexBitset = 9
	anyBit      = 0xffffffff
	none        = ^uintptr(0) // -1
)

var word uint32

type wait struct {
	name string
	do   func() string
}

var waits = []wait{
	{"nanosleep", func() string { ts := kept(span()); return call(unix.SYS_NANOSLEEP, ts, ts) }},
	{"nanosleep-no-rest", func() string { return call(unix.SYS_NANOSLEEP, kept(span()), 0) }},
	{"nanosleep-other-rest", func() string { return call(unix.SYS_NANOSLEEP, kept(span()), kept(new(unix.Timespec))) }},
	{"clock_nanosleep", func() string {
		ts := kept(span())
		return call(unix.SYS_CLOCK_NANOSLEEP, unix.CLOCK_MONOTONIC, 0, ts, ts)
	}},
	{"clock_nanosleep-realtime", func() string {
		ts := kept(span())
		return call(unix.SYS_CLOCK_NANOSLEEP, unix.CLOCK_REALTIME, 0, ts, ts)
	}},
	{"clock_nanosleep-no-rest", func() string {
		return call(unix.SYS_CLOCK_NANOSLEEP, unix.CLOCK_MONOTONIC, 0, kept(span()), 0)
	}},
	{"clock_nanosleep-until", func() string {
		return call(unix.SYS_CLOCK_NANOSLEEP, unix.CLOCK_MONOTONIC, unix.TIMER_ABSTIME,
			kept(at(unix.CLOCK_MONOTONIC)), 0)
	}},
	{"poll", func() string {
		r, _ := pipe()
		return call(unix.SYS_POLL, kept(&unix.PollFd{Fd: int32(r), Events: unix.POLLIN}), 1, millis())
	}},
	{"poll-fed", func() string {
		r, w := pipe()
		after(feed(w))
		return call(unix.SYS_POLL, kept(&unix.PollFd{Fd: int32(r), Events: unix.POLLIN}), 1, none)
	}},
	{"ppoll", func() string {
		r, _ := pipe()
		return call(unix.SYS_PPOLL, kept(&unix.PollFd{Fd: int32(r), Events: unix.POLLIN}), 1, kept(span()), 0, 8)
	}},
	{"select", func() string {
		tv := unix.NsecToTimeval(int64(limit))
		return call(unix.SYS_SELECT, 0, 0, 0, 0, kept(&tv))
	}},
	{"pselect6", func() string { return call(unix.SYS_PSELECT6, 0, 0, 0, 0, kept(span()), 0) }},
	{"futex", func() string { return call(unix.SYS_FUTEX, pointer(&word), futexWait, 0, kept(span())) }},
	{"futex-until", func() string {
		return call(unix.SYS_FUTEX, pointer(&word), futexBitset, 0, kept(at(unix.CLOCK_MONOTONIC)), 0, anyBit)
	}},
	{"futex-fed", func() string {
		after(func() { call(unix.SYS_FUTEX, pointer(&word), futexWake, 1) })
		return call(unix.SYS_FUTEX, pointer(&word), futexWait, 0, 0)
	}},
	{"epoll_wait", func() string {
		r, _ := pipe()
		return call(unix.SYS_EPOLL_WAIT, epoll(r), kept(new(unix.EpollEvent)), 1, millis())
	}},
	{"epoll_wait-fed", func() string {
		r, w := pipe()
		ep := epoll(r)
		after(feed(w))
		return call(unix.SYS_EPOLL_WAIT, ep, kept(new(unix.EpollEvent)), 1, none)
	}},
	{"rt_sigtimedwait", func() string {
		set := uint64(1) << (unix.SIGUSR2 - 1)
		return call(unix.SYS_RT_SIGTIMEDWAIT, kept(&set), 0, kept(span()), 8)
	}},
	{"recvfrom-timeout", func() string { return call(unix.SYS_RECVFROM, uintptr(socket()), kept(new([8]byte)), 8) }},
	{"read-fed", func() string {
		r, w := pipe()
		after(feed(w))
		return call(unix.SYS_READ, uintptr(r), kept(new([8]byte)), 8)
	}},
	{"semtimedop-fed", func() string {
		set, _, errno := syscall.Syscall(unix.SYS_SEMGET, 0, 1, 0o600) // IPC_PRIVATE
		if errno != 0 {
			panic(errno)
		}
		type operation struct {
			number     uint16
			add, flags int16
		}
		after(func() { call(unix.SYS_SEMOP, set, kept(&operation{add: 1}), 1) })
		return call(unix.SYS_SEMTIMEDOP, set, kept(&operation{add: -1}), 1, 0)
	}},
	{"signal", func() string {
		signals := make(chan os.Signal, 1)
		signal.Notify(signals, unix.SIGUSR1)
		tid := unix.Gettid()
		after(func() { must(unix.Tgkill(os.Getpid(), tid, unix.SIGUSR1)) })
		ts := unix.NsecToTimespec(int64(limit) * 100)
		return call(unix.SYS_NANOSLEEP, kept(&ts), 0)
	}},
}

func main() {
	debug.SetGCPercent(-1) // which sends signals
	seconds, err := strconv.ParseFloat(os.Args[1], 64)
	must(err)
	limit = time.Duration(seconds * float64(time.Second))
	if len(os.Args) == 4 && (os.Args[3] == "first" || os.Args[3] == "other") {
		one(os.Args[2], os.Args[3])
		return
	}
	names := os.Args[2:]
	if len(names) == 0 {
		for _, w := range waits {
			names = append(names, w.name)
		}
	}
	var begun, returned, ended sync.WaitGroup
	var lines sync.Mutex
	end := make(chan struct{})
	for _, name := range names {
		for _, who := range []string{"first", "other"} {
			cmd := exec.Command("/proc/self/exe", os.Args[1], name, who)
			cmd.Stderr = os.Stderr
			cmd.Env = append(os.Environ(), "GODEBUG=asyncpreemptoff=1")
			in, err := cmd.StdinPipe()
			must(err)
			out, err := cmd.StdoutPipe()
			must(err)
			must(cmd.Start())
			begun.Add(1)
			returned.Add(1)
			ended.Go(func() {
				says := bufio.NewReader(out)
				_, _ = says.ReadString('\n')
				begun.Done()
				line, err := says.ReadString('\n')
				if err != nil {
					line = fmt.Sprintf("%s %s: said nothing: %v\n", name, who, err)
				}
				lines.Lock()
				os.Stdout.WriteString(line)
				lines.Unlock()
				returned.Done()
				// None ends before all have returned: a process that ends as soon
				// as it is restored can fail the restore.
				<-end
				must(in.Close())
				must(cmd.Wait())
			})
		}
	}
	begun.Wait()
	fmt.Println("all have begun")
	returned.Wait()
	fmt.Println("all have returned")
	close(end)
	ended.Wait()
	for {
		time.Sleep(time.Hour)
	}
}

func one(name, who string) {
	for _, w := range waits {
		if w.name != name {
			continue
		}
		run := func() {
			fmt.Println("begins")
			start := time.Now()
			got := w.do()
			fmt.Printf("%s %s %s %d\n", name, who, got, time.Since(start).Milliseconds())
			_, _ = os.Stdin.Read(make([]byte, 1))
			os.Exit(0)
		}
		if who == "other" {
			go func() { runtime.LockOSThread(); run() }()
			select {}
		}
		run()
	}
	fmt.Println("no such call: " + name)
	os.Exit(2)
}

func must(err error) {
	if err != nil {
		panic(err)
	}
}
