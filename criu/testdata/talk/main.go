// Command talk is two ends of unix sockets of all kinds: "talk serve", which is
// dumped, and "talk call", which is not. Files tell how far each is; /result is what
// the server finds in its ends once /go is there.
package main

import (
	"fmt"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

func main() {
	switch os.Args[1] {
	case "serve":
		serve()
	case "lock":
		copy(must(unix.Mmap(-1, 0, 1<<20, unix.PROT_READ|unix.PROT_WRITE,
			unix.MAP_SHARED|unix.MAP_ANONYMOUS)), "shared by all")
		must(0, unix.Flock(must(unix.Open("/lock", unix.O_RDWR|unix.O_CREAT, 0o600)), unix.LOCK_EX))
	default:
		call()
	}
	for {
		time.Sleep(time.Hour)
	}
}

func serve() {
	stream, abstract, packets, files := listen("/s", unix.SOCK_STREAM), listen("@a", unix.SOCK_STREAM),
		listen("/q", unix.SOCK_SEQPACKET), listen("/fds", unix.SOCK_STREAM)
	listen("/late", unix.SOCK_STREAM)
	tcp := must(unix.Socket(unix.AF_INET, unix.SOCK_STREAM, 0))
	must(0, unix.Bind(tcp, &unix.SockaddrInet4{Port: 7777, Addr: [4]byte{127, 0, 0, 1}}))
	must(0, unix.Listen(tcp, 5))
	touch("/listening")
	ends := map[string]int{
		"stream": accept(stream), "abstract": accept(abstract), "packets": accept(packets), "files": accept(files),
	}
	ends["pair"] = receive(ends["files"])[0]
	accept(tcp)
	wait("/called")
	ends["dialed"], ends["unaccepted"] = dial("/r", unix.SOCK_STREAM), dial("/r2", unix.SOCK_STREAM)
	ends["datagram"] = dial("/dg", unix.SOCK_DGRAM)
	must(0, unix.Sendto(ends["stream"], []byte("welcome"), 0, nil))
	touch("/ready")
	wait("/go")
	var out strings.Builder
	for _, fd := range receive(ends["files"]) {
		fmt.Fprintf(&out, "flown: %s\n", drain(fd))
	}
	for _, name := range []string{
		"stream", "abstract", "packets", "files", "pair", "dialed", "unaccepted", "datagram",
	} {
		fmt.Fprintf(&out, "%s: %s", name, drain(ends[name]))
		err := unix.Sendto(ends[name], []byte("x"), unix.MSG_NOSIGNAL, nil)
		fmt.Fprintf(&out, " (%v)\n", err)
	}
	must(0, os.WriteFile("/result.new", []byte(out.String()), 0o644))
	must(0, os.Rename("/result.new", "/result"))
}

func call() {
	in, _ := listen("/r", unix.SOCK_STREAM), listen("/r2", unix.SOCK_STREAM)
	datagrams := must(unix.Socket(unix.AF_UNIX, unix.SOCK_DGRAM, 0))
	must(0, unix.Bind(datagrams, &unix.SockaddrUnix{Name: "/dg"}))
	stream := dial("/s", unix.SOCK_STREAM)
	send(stream, "hello")
	send(dial("@a", unix.SOCK_STREAM), "hidden")
	packets := dial("/q", unix.SOCK_SEQPACKET)
	send(packets, "one")
	send(packets, "two")
	files := dial("/fds", unix.SOCK_STREAM)
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_DGRAM, 0)
	must(0, err)
	must(0, unix.Sendmsg(files, []byte("."), unix.UnixRights(pair[1]), nil, 0))
	must(0, unix.Close(pair[1]))
	send(pair[0], "datagram")
	flown, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM, 0)
	must(0, err)
	note := must(unix.Open("/note", unix.O_RDONLY, 0))
	must(0, unix.Sendmsg(files, []byte("."), unix.UnixRights(note, flown[1]), nil, 0))
	must(0, unix.Close(flown[1]))
	send(flown[0], "in flight")
	dial("/late", unix.SOCK_STREAM)
	must(0, unix.Connect(must(unix.Socket(unix.AF_INET, unix.SOCK_STREAM, 0)),
		&unix.SockaddrInet4{Port: 7777, Addr: [4]byte{127, 0, 0, 1}}))
	touch("/called")
	send(accept(in), "dialed")
	wait("/live")
	if got := read(stream); got != "welcome" {
		panic(got)
	}
	send(stream, "on")
	send(pair[0], "on")
	send(flown[0], "on")
	touch("/lived")
}

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

func listen(name string, kind int) int {
	fd := must(unix.Socket(unix.AF_UNIX, kind, 0))
	must(0, unix.Bind(fd, &unix.SockaddrUnix{Name: name}))
	must(0, unix.Listen(fd, 5))
	return fd
}

func dial(name string, kind int) int {
	fd := must(unix.Socket(unix.AF_UNIX, kind, 0))
	must(0, unix.Connect(fd, &unix.SockaddrUnix{Name: name}))
	return fd
}

func accept(l int) int {
	fd, _, err := unix.Accept(l)
	return must(fd, err)
}

func send(fd int, what string) { must(unix.Write(fd, []byte(what))) }

func read(fd int) string {
	buf := make([]byte, 100)
	return string(buf[:must(unix.Read(fd, buf))])
}

// receive takes the descriptors of one message.
func receive(fd int) []int {
	buf, oob := make([]byte, 1), make([]byte, 100)
	_, n, _, _, err := unix.Recvmsg(fd, buf, oob, 0)
	must(0, err)
	msgs := must(unix.ParseSocketControlMessage(oob[:n]))
	return must(unix.ParseUnixRights(&msgs[0]))
}

// drain reads until the end, or until nothing comes.
func drain(fd int) string {
	must(0, unix.SetNonblock(fd, true))
	var got []string
	for {
		buf := make([]byte, 100)
		n, err := unix.Read(fd, buf)
		switch {
		case err != nil:
			return fmt.Sprint(got, " ", err)
		case n == 0:
			return fmt.Sprint(got, " end")
		}
		got = append(got, string(buf[:n]))
	}
}

func touch(path string) { must(0, os.WriteFile(path, nil, 0o644)) }

func wait(path string) {
	for {
		if _, err := os.Stat(path); err == nil {
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
}
