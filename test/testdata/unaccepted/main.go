// Command unaccepted leaves connections of unix sockets in backlogs until it is told to
// accept them, and then reports what they hold.
package main

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

func main() {
	if len(os.Args) > 1 {
		others[os.Args[1]]()
		return
	}
	var report strings.Builder
	say := func(format string, args ...any) { fmt.Fprintf(&report, format+"\n", args...) }
	var steps []func()

	// One with data, and one without, that is watched and answered.
	for _, name := range []string{"/one", "@abstract"} {
		l := listen(unix.SOCK_STREAM, name, 5)
		c := dial(unix.SOCK_STREAM, name)
		write(c, "asked before")
		epoll := must(unix.EpollCreate1(0))
		check(unix.EpollCtl(epoll, unix.EPOLL_CTL_ADD, c, &unix.EpollEvent{Events: unix.EPOLLIN, Fd: 77, Pad: 88}))
		check(unix.SetNonblock(c, true))
		must(unix.FcntlInt(uintptr(c), unix.F_SETFD, unix.FD_CLOEXEC))
		check(unix.SetsockoptInt(c, unix.SOL_SOCKET, unix.SO_PASSCRED, 1))
		steps = append(steps, func() {
			write(c, " and after")
			a := accept(l)
			cred := must(unix.GetsockoptUcred(a, unix.SOL_SOCKET, unix.SO_PEERCRED))
			say("%s: %q from process %v of user %d", name, read(a), int(cred.Pid) == os.Getpid(), cred.Uid)
			write(a, "answer")
			var events [2]unix.EpollEvent
			n := must(unix.EpollWait(epoll, events[:], 5000))
			say("%s: %d events %#x %d %d", name, n, events[0].Events, events[0].Fd, events[0].Pad)
			say("%s: answered %q", name, read(c))
			flags, _ := unix.FcntlInt(uintptr(c), unix.F_GETFL, 0)
			cloexec, _ := unix.FcntlInt(uintptr(c), unix.F_GETFD, 0)
			creds, _ := unix.GetsockoptInt(c, unix.SOL_SOCKET, unix.SO_PASSCRED)
			say("%s: nonblocking %v, close-on-exec %d, SO_PASSCRED %d, at its end %d", name, flags&unix.O_NONBLOCK != 0,
				cloexec, creds, accept(l))
		})
	}

	// Several, in order, each in another state.
	l := listen(unix.SOCK_STREAM, "/several", 20)
	var several []int
	for i := range 6 {
		c := dial(unix.SOCK_STREAM, "/several")
		several = append(several, c)
		if i != 0 && i != 3 {
			write(c, fmt.Sprintf("data of %d", i))
		}
	}
	check(unix.Close(several[1]))
	check(unix.Shutdown(several[2], unix.SHUT_WR))
	check(unix.Close(several[3]))
	large := bytes.Repeat([]byte("0123456789abcdef"), 9000)
	write(several[5], string(large))
	steps = append(steps, func() {
		write(several[0], "data of 0")
		for range several {
			a := accept(l)
			text := read(a)
			if rest, is := strings.CutPrefix(text, "data of 5"); is {
				text = fmt.Sprintf("all of 5 %v", rest == string(large))
			}
			n, err := unix.Read(a, make([]byte, 10))
			say("several: %q, then %d %v", text, n, err)
			check(unix.Close(a))
		}
	})

	// Two without data.
	empty := listen(unix.SOCK_STREAM, "/empty", 5)
	first, second := dial(unix.SOCK_STREAM, "/empty"), dial(unix.SOCK_STREAM, "/empty")
	steps = append(steps, func() {
		write(second, "second")
		write(first, "first")
		say("empty: %q", read(accept(empty)))
		say("empty: %q", read(accept(empty)))
	})

	// Messages.
	packets := listen(unix.SOCK_SEQPACKET, "/packets", 5)
	sender := dial(unix.SOCK_SEQPACKET, "/packets")
	for _, text := range []string{"one", "", "three"} {
		write(sender, text)
	}
	steps = append(steps, func() {
		write(sender, "four")
		a := accept(packets)
		for range 4 {
			say("packets: %q", read(a))
		}
	})

	// Descriptors on their way.
	passing := listen(unix.SOCK_STREAM, "/passing", 5)
	passer := dial(unix.SOCK_STREAM, "/passing")
	check(os.WriteFile("/file", []byte("in the file"), 0o644))
	f := must(os.Open("/file"))
	check(unix.Sendmsg(passer, []byte("take"), unix.UnixRights(int(f.Fd())), nil, 0))
	check(f.Close())
	write(passer, " this")
	steps = append(steps, func() {
		a := accept(passing)
		buf, oob := make([]byte, 100), make([]byte, 100)
		n, used, _, _, err := unix.Recvmsg(a, buf, oob, 0)
		say("passing: %q %v", buf[:max(n, 0)], err)
		for _, m := range must(unix.ParseSocketControlMessage(oob[:used])) {
			for _, fd := range must(unix.ParseUnixRights(&m)) {
				n, err := unix.Pread(fd, buf, 0)
				say("passing: %q %v", buf[:max(n, 0)], err)
			}
		}
		say("passing: %q", read(a))
	})

	// A backlog that is full.
	full := listen(unix.SOCK_STREAM, "/full", 1)
	for i := range 2 {
		write(dial(unix.SOCK_STREAM, "/full"), fmt.Sprintf("full %d", i))
	}
	steps = append(steps, func() {
		say("full: %v", connect(must(unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_NONBLOCK, 0)), "/full"))
		for range 2 {
			say("full: %q", read(accept(full)))
		}
	})

	// A client that another process has, too.
	shared := listen(unix.SOCK_STREAM, "/shared", 5)
	both := dial(unix.SOCK_STREAM, "/shared")
	write(both, "of both")
	cmd := exec.Command("/unaccepted", "child")
	cmd.ExtraFiles = []*os.File{os.NewFile(uintptr(both), "both")}
	check(cmd.Start())
	check(cmd.ExtraFiles[0].Close())
	steps = append(steps, func() {
		a := accept(shared)
		say("shared: %q", read(a))
		write(a, "answer")
		for range 500 {
			if data, err := os.ReadFile("/child"); err == nil {
				say("shared: the other process has %q", data)
				return
			}
			time.Sleep(10 * time.Millisecond)
		}
		say("shared: no answer")
	})

	datagrams := must(unix.Socketpair(unix.AF_UNIX, unix.SOCK_DGRAM, 0))
	write(datagrams[0], "datagram")
	steps = append(steps, func() { say("%q", read(datagrams[1])) })

	// For a client that comes later.
	late := listen(unix.SOCK_STREAM, "/late", 5)
	steps = append(steps, func() {
		a := accept(late)
		if a < 0 {
			say("late: none")
			return
		}
		text := read(a)
		n, err := unix.Read(a, make([]byte, 10))
		say("late: %q, then %d %v", text, n, err)
		write(a, "answer")
	})

	check(os.WriteFile("/ready", nil, 0o644))
	await("/go")
	for _, step := range steps {
		step()
	}
	open := must(os.ReadDir("/proc/self/fd"))
	say("%d descriptors", len(open))
	check(os.WriteFile("/report.new", []byte(report.String()), 0o644))
	check(os.Rename("/report.new", "/report"))
	time.Sleep(1000 * time.Hour)
}

// others are the commands of other processes.
var others = map[string]func(){"child": child, "client": client, "named": named}

// client connects to a listener that exists already, and tells what it is answered.
func client() {
	c := dial(unix.SOCK_STREAM, "/late")
	write(c, "late")
	check(os.WriteFile("/client", nil, 0o644))
	text := read(c)
	check(os.WriteFile("/client.new", []byte(text), 0o644))
	check(os.Rename("/client.new", "/answered"))
	time.Sleep(1000 * time.Hour)
}

// named leaves a connection in a backlog whose client has a name.
func named() {
	listen(unix.SOCK_STREAM, "/named", 5)
	c := must(unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM, 0))
	check(unix.Bind(c, &unix.SockaddrUnix{Name: "/own"}))
	check(connect(c, "/named"))
	write(c, "data")
	check(os.WriteFile("/ready", nil, 0o644))
	time.Sleep(1000 * time.Hour)
}

// child reads what answers the client that it has inherited.
func child() {
	text := read(3)
	check(os.WriteFile("/child.new", []byte(text), 0o644))
	check(os.Rename("/child.new", "/child"))
	time.Sleep(1000 * time.Hour)
}

func await(name string) {
	for _, err := os.Stat(name); err != nil; _, err = os.Stat(name) {
		time.Sleep(10 * time.Millisecond)
	}
}

func listen(kind int, name string, backlog int) int {
	fd := must(unix.Socket(unix.AF_UNIX, kind|unix.SOCK_NONBLOCK, 0))
	check(unix.Bind(fd, &unix.SockaddrUnix{Name: name}))
	check(unix.Listen(fd, backlog))
	return fd
}

func dial(kind int, name string) int {
	fd := must(unix.Socket(unix.AF_UNIX, kind, 0))
	check(connect(fd, name))
	return fd
}

func connect(fd int, name string) error { return unix.Connect(fd, &unix.SockaddrUnix{Name: name}) }

// accept returns minus the error when there is none.
func accept(l int) int {
	fd, _, err := unix.Accept(l)
	var errno unix.Errno
	if errors.As(err, &errno) {
		return -int(errno)
	}
	check(unix.SetNonblock(fd, true))
	return fd
}

func write(fd int, text string) {
	if err := unix.Send(fd, []byte(text), unix.MSG_NOSIGNAL); err != nil {
		fmt.Println("write", err)
	}
}

// read returns all that waits in a socket, of one that keeps messages apart the first.
func read(fd int) string {
	kind, _ := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_TYPE)
	var text []byte
	buf := make([]byte, 64<<10)
	for {
		n, err := unix.Read(fd, buf)
		if err == unix.EINTR {
			continue
		}
		text = append(text, buf[:max(n, 0)]...)
		blocks, _ := unix.FcntlInt(uintptr(fd), unix.F_GETFL, 0)
		if n <= 0 || kind != unix.SOCK_STREAM || blocks&unix.O_NONBLOCK == 0 {
			return string(text)
		}
	}
}

func must[T any](v T, err error) T {
	check(err)
	return v
}

func check(err error) {
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
}
