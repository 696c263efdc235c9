// Command state takes on all that the kernel keeps of a process and a checkpoint has to
// bring back. Once /go is there it looks at what it has, and stores what it finds in
// /report. "state locks" says which of its locks another process meets.
package main

import (
	"encoding/binary"
	"fmt"
	"net"
	"os"
	"os/signal"
	"runtime"
	"strings"
	"sync/atomic"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

var lockFiles = []string{"plain", "mapped-read", "mapped-write", "two-descriptors", "flock", "ofd"}

func must[T any](v T, err error) T {
	check(err)
	return v
}

func check(err error) {
	if err != nil {
		panic(err)
	}
}

func main() {
	if len(os.Args) > 1 && os.Args[1] == "locks" {
		locks()
		return
	}
	runtime.LockOSThread()
	lock()
	check(unix.SchedSetaffinity(0, &unix.CPUSet{1}))
	check(unix.Prctl(unix.PR_SET_TIMERSLACK, 123_456, 0, 0, 0))
	check(os.WriteFile("/proc/self/oom_score_adj", []byte("321"), 0))
	unix.Umask(0o27)
	check(unix.Setpriority(unix.PRIO_PROCESS, 0, 4))
	semaphore := must(unix.Eventfd(5, unix.EFD_SEMAPHORE|unix.EFD_NONBLOCK))
	twin := must(unix.Dup(semaphore))
	pipe := make([]int, 2)
	check(unix.Pipe(pipe))
	check(unix.Fchown(pipe[0], 1000, 1000))
	timers := map[string]func() uint64{}
	for _, ms := range []int{1, 20, 400} {
		for name, clock := range map[string]int{"monotonic": unix.CLOCK_MONOTONIC, "realtime": unix.CLOCK_REALTIME} {
			timers[fmt.Sprintf("timerfd %s %d ms", name, ms)] = timerfd(clock, ms)
		}
	}
	timers["setitimer 30 ms"] = itimer()
	timers["timer_create 30 ms"] = posixTimer()
	disarmed := must(unix.TimerfdCreate(unix.CLOCK_MONOTONIC, unix.TFD_NONBLOCK))
	check(unix.TimerfdSettime(disarmed, 0, &unix.ItimerSpec{Interval: unix.NsecToTimespec(1e6)}, nil))
	listener := must(net.Listen("tcp4", "127.0.0.1:7001"))
	client := must(net.Dial("tcp4", "127.0.0.1:7001"))
	must(client.Write([]byte("asked before")))
	ended := must(net.Dial("tcp4", "127.0.0.1:7001"))
	must(ended.Write([]byte("and ended")))
	check(ended.(*net.TCPConn).CloseWrite())
	var datagrams []*net.UDPConn
	for _, host := range []string{"127.0.0.1", "::1"} {
		to := must(net.ListenUDP("udp", &net.UDPAddr{IP: net.ParseIP(host), Port: 7002}))
		from := must(net.ListenUDP("udp", &net.UDPAddr{IP: net.ParseIP(host), Port: 7003}))
		for _, text := range []string{"one", "", "three"} {
			must(from.WriteToUDP([]byte(text), to.LocalAddr().(*net.UDPAddr)))
		}
		datagrams = append(datagrams, to)
	}
	pair := must(unix.Socketpair(unix.AF_UNIX, unix.SOCK_DGRAM, 0))
	for _, text := range []string{"one", "", "three"} {
		check(unix.Send(pair[0], []byte(text), 0))
	}
	told := sockets(client.(*net.TCPConn), listener.(*net.TCPListener))
	var waiting unix.Sigset_t
	waiting.Val[0] = 1<<(unix.SIGUSR1-1) | 1<<(40-1)
	check(unix.PthreadSigmask(unix.SIG_BLOCK, &waiting, nil))
	check(unix.Tgkill(unix.Getpid(), unix.Gettid(), unix.SIGUSR1))
	check(unix.Tgkill(unix.Getpid(), unix.Gettid(), 40))
	check(os.WriteFile("/ready", nil, 0o644))
	for _, err := os.Stat("/go"); err != nil; _, err = os.Stat("/go") {
		time.Sleep(10 * time.Millisecond)
	}

	var report strings.Builder
	say := func(format string, args ...any) { fmt.Fprintf(&report, format+"\n", args...) }
	for _, line := range told() {
		say("%s", line)
	}
	status := string(must(os.ReadFile("/proc/thread-self/status")))
	_, pending, _ := strings.Cut(status, "SigPnd:\t")
	say("pending %s", pending[:16])
	var word [8]byte
	for _, fd := range []int{semaphore, twin} {
		must(unix.Read(fd, word[:]))
		say("eventfd read %d", binary.NativeEndian.Uint64(word[:]))
	}
	for range 3 {
		buf := make([]byte, 100)
		n, _, err := unix.Recvfrom(pair[1], buf, unix.MSG_DONTWAIT)
		say("message %q %v", buf[:max(n, 0)], err)
	}
	var st unix.Stat_t
	check(unix.Fstat(pipe[0], &st))
	say("pipe of %d:%d", st.Uid, st.Gid)
	for name, count := range timers {
		begun, first := time.Now(), count()
		for count() == first && time.Since(begun) < 10*time.Second {
			time.Sleep(time.Millisecond)
		}
		if count() == first {
			say("%s stands", name)
		}
	}
	if _, err := unix.Read(disarmed, word[:]); err != unix.EAGAIN {
		say("a timer that was not armed ticks: %v", err)
	}
	for range 2 {
		check(listener.(*net.TCPListener).SetDeadline(time.Now().Add(10 * time.Second)))
		c, err := listener.Accept()
		if err != nil {
			say("accept: %v", err)
			break
		}
		buf := make([]byte, 100)
		check(c.SetReadDeadline(time.Now().Add(10 * time.Second)))
		n, err := c.Read(buf)
		say("accepted %q %v", buf[:n], err)
		if c.RemoteAddr().String() == ended.LocalAddr().String() {
			_, err := c.Read(buf)
			say("then %v", err)
			continue
		}
		must(c.Write([]byte("answer")))
		check(client.SetReadDeadline(time.Now().Add(10 * time.Second)))
		n, err = client.Read(buf)
		say("answered %q %v", buf[:n], err)
	}
	for _, d := range datagrams {
		for range 3 {
			buf := make([]byte, 100)
			check(d.SetReadDeadline(time.Now().Add(10 * time.Second)))
			n, from, err := d.ReadFromUDP(buf)
			say("datagram %q from %v %v", buf[:n], from, err)
		}
	}
	check(os.WriteFile("/report.new", []byte(report.String()), 0o644))
	check(os.Rename("/report.new", "/report"))
	select {}
}

// sockets sets options that CRIU has no place for. The returned function reads them.
func sockets(client *net.TCPConn, listener *net.TCPListener) (told func() []string) {
	numbers := []struct {
		name                 string
		fd, level, option, n int
	}{
		{"TCP_USER_TIMEOUT", descriptor(client), unix.SOL_TCP, unix.TCP_USER_TIMEOUT, 12345},
		{"TCP_NOTSENT_LOWAT", descriptor(client), unix.SOL_TCP, unix.TCP_NOTSENT_LOWAT, 4096},
		{"IP_TOS", descriptor(client), unix.SOL_IP, unix.IP_TOS, 0x10},
		{"SO_PRIORITY", descriptor(client), unix.SOL_SOCKET, unix.SO_PRIORITY, 3},
		{
			"TCP_DEFER_ACCEPT", must(unix.Socket(unix.AF_INET, unix.SOCK_STREAM, 0)), unix.SOL_TCP,
			unix.TCP_DEFER_ACCEPT, 7,
		},
		{"TCP_FASTOPEN", descriptor(listener), unix.SOL_TCP, unix.TCP_FASTOPEN, 5},
	}
	udp := map[int]int{unix.AF_INET: 0, unix.AF_INET6: 0}
	for domain := range udp {
		fd := must(unix.Socket(domain, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0))
		udp[domain] = fd
		check(unix.Bind(fd, map[int]unix.Sockaddr{
			unix.AF_INET: &unix.SockaddrInet4{Port: 7010}, unix.AF_INET6: &unix.SockaddrInet6{Port: 7011},
		}[domain]))
	}
	for i, o := range []int{unix.IP_MULTICAST_TTL, unix.IP_MULTICAST_LOOP, unix.IP_RECVERR, unix.IP_MTU_DISCOVER} {
		numbers = append(numbers, struct {
			name                 string
			fd, level, option, n int
		}{fmt.Sprintf("IP option %d", o), udp[unix.AF_INET], unix.SOL_IP, o, []int{9, 0, 1, 3}[i]})
	}
	for _, o := range numbers {
		check(unix.SetsockoptInt(o.fd, o.level, o.option, o.n))
	}
	check(unix.SetsockoptString(descriptor(client), unix.SOL_TCP, unix.TCP_CONGESTION, "reno"))
	lo := must(net.InterfaceByName("lo"))
	four := unix.IPMreqn{Multiaddr: [4]byte{239, 1, 2, 3}, Ifindex: int32(lo.Index)}
	check(unix.SetsockoptIPMreqn(udp[unix.AF_INET], unix.SOL_IP, unix.IP_ADD_MEMBERSHIP, &four))
	check(sourceGroup(udp[unix.AF_INET]))
	six := unix.IPv6Mreq{Multiaddr: [16]byte{0xff, 0x12, 15: 9}, Interface: uint32(lo.Index)}
	check(unix.SetsockoptIPv6Mreq(udp[unix.AF_INET6], unix.SOL_IPV6, unix.IPV6_JOIN_GROUP, &six))
	return func() (list []string) {
		for _, o := range numbers {
			n, err := unix.GetsockoptInt(o.fd, o.level, o.option)
			list = append(list, fmt.Sprintf("%s %d %v", o.name, n, err))
		}
		name, err := unix.GetsockoptString(descriptor(client), unix.SOL_TCP, unix.TCP_CONGESTION)
		list = append(list, fmt.Sprintf("TCP_CONGESTION %q %v", name, err))
		// A member cannot become one again, and sources are added to what is there.
		return append(list,
			fmt.Sprint("joined: ", unix.SetsockoptIPMreqn(udp[unix.AF_INET], unix.SOL_IP,
				unix.IP_ADD_MEMBERSHIP, &four)),
			fmt.Sprint("joined: ", unix.SetsockoptIPv6Mreq(udp[unix.AF_INET6], unix.SOL_IPV6,
				unix.IPV6_JOIN_GROUP, &six)),
			fmt.Sprint("from its source: ", sourceGroup(udp[unix.AF_INET])))
	}
}

// sourceGroup joins 239.1.2.4 for what comes from 127.0.0.5 (struct ip_mreq_source).
func sourceGroup(fd int) error {
	return unix.SetsockoptString(fd, unix.SOL_IP, unix.IP_ADD_SOURCE_MEMBERSHIP,
		string([]byte{239, 1, 2, 4, 127, 0, 0, 1, 127, 0, 0, 5}))
}

func descriptor(c syscall.Conn) (n int) {
	check(must(c.SyscallConn()).Control(func(fd uintptr) { n = int(fd) }))
	return n
}

// lock takes locks of every kind.
func lock() {
	for _, name := range lockFiles {
		fd := must(unix.Open("/lock-"+name, unix.O_RDWR|unix.O_CREAT|unix.O_CLOEXEC, 0o644))
		check(unix.Ftruncate(fd, 8192))
		l := unix.Flock_t{Type: unix.F_WRLCK, Start: 100, Len: 28}
		switch name {
		case "mapped-read":
			l = unix.Flock_t{Type: unix.F_RDLCK, Start: 7} // to the end
		case "flock":
			check(unix.Flock(fd, unix.LOCK_EX))
			continue
		case "ofd":
			check(unix.FcntlFlock(uintptr(fd), unix.F_OFD_SETLK, &l))
			continue
		}
		check(unix.FcntlFlock(uintptr(fd), unix.F_SETLK, &l))
		if strings.HasPrefix(name, "mapped") {
			must(unix.Mmap(fd, 0, 8192, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED))
		}
		if name == "two-descriptors" {
			must(unix.Open("/lock-"+name, unix.O_RDONLY|unix.O_CLOEXEC, 0))
		}
	}
}

// locks prints which locks another process meets.
func locks() {
	for _, name := range lockFiles {
		fd := must(unix.Open("/lock-"+name, unix.O_RDWR, 0))
		if name == "flock" {
			fmt.Println(name, unix.Flock(fd, unix.LOCK_SH|unix.LOCK_NB) != nil)
			continue
		}
		l := unix.Flock_t{Type: unix.F_WRLCK}
		check(unix.FcntlFlock(uintptr(fd), unix.F_GETLK, &l))
		fmt.Println(name, map[int16]string{
			unix.F_RDLCK: "read", unix.F_WRLCK: "write", unix.F_UNLCK: "free",
		}[l.Type], l.Start, l.Len)
	}
}

func timerfd(clock, ms int) func() uint64 {
	fd := must(unix.TimerfdCreate(clock, unix.TFD_NONBLOCK))
	every := unix.NsecToTimespec(int64(ms) * 1e6)
	check(unix.TimerfdSettime(fd, 0, &unix.ItimerSpec{Interval: every, Value: every}, nil))
	total := uint64(0)
	return func() uint64 {
		var word [8]byte
		if n, _ := unix.Read(fd, word[:]); n == 8 {
			total += binary.NativeEndian.Uint64(word[:])
		}
		return total
	}
}

func itimer() func() uint64 {
	count := counter(syscall.SIGALRM)
	every := unix.Timeval{Usec: 30_000}
	must(unix.Setitimer(unix.ITIMER_REAL, unix.Itimerval{Interval: every, Value: every}))
	return count
}

func posixTimer() func() uint64 {
	count := counter(syscall.SIGUSR2)
	event := struct {
		value          uint64
		signal, notify int32
		_              [48]byte
	}{signal: int32(syscall.SIGUSR2)}
	var id int32
	if _, _, errno := unix.Syscall(unix.SYS_TIMER_CREATE, unix.CLOCK_MONOTONIC, uintptr(unsafe.Pointer(&event)),
		uintptr(unsafe.Pointer(&id))); errno != 0 {
		panic(errno)
	}
	every := unix.NsecToTimespec(30e6)
	spec := unix.ItimerSpec{Interval: every, Value: every}
	if _, _, errno := unix.Syscall6(unix.SYS_TIMER_SETTIME, uintptr(id), 0,
		uintptr(unsafe.Pointer(&spec)), 0, 0, 0); errno != 0 {
		panic(errno)
	}
	return count
}

func counter(sig os.Signal) func() uint64 {
	var n atomic.Uint64
	c := make(chan os.Signal, 100)
	signal.Notify(c, sig)
	go func() {
		for range c {
			n.Add(1)
		}
	}()
	return n.Load
}
