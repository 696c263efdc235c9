package network

import (
	"bufio"
	"errors"
	"io"
	"net"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/runtime"
)

const established = 1 // TCP_ESTABLISHED

func tcpState(t *testing.T, c net.Conn) uint8 {
	t.Helper()
	raw, err := c.(*net.TCPConn).SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	var info *unix.TCPInfo
	if cerr := raw.Control(func(fd uintptr) {
		info, err = unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO)
	}); cerr != nil || err != nil {
		t.Fatal(cerr, err)
	}
	return info.State
}

// listen accepts one connection in the namespace at path.
func listen(t *testing.T, path, addr string) <-chan net.Conn {
	t.Helper()
	var l net.Listener
	if err := in(t, path, func() (err error) { l, err = net.Listen("tcp4", addr); return }); err != nil {
		t.Fatal(err)
	}
	got := make(chan net.Conn, 1)
	go func() {
		defer l.Close()
		if c, err := l.Accept(); err == nil {
			got <- c
		}
		close(got)
	}()
	t.Cleanup(func() { l.Close() })
	return got
}

// silent fails if the peer of c has heard of its end. It sends, too: the
// answer to that would be a reset.
func silent(t *testing.T, what string, c net.Conn) {
	t.Helper()
	if err := c.SetDeadline(time.Now().Add(300 * time.Millisecond)); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Write([]byte("are you there?\n")); err != nil {
		t.Errorf("%s: write: %v", what, err)
	}
	if n, err := c.Read(make([]byte, 1)); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("%s: read %d bytes, error %v, want silence", what, n, err)
	}
	if s := tcpState(t, c); s != established {
		t.Errorf("%s: the peer's connection is in state %d, want established", what, s)
	}
}

func TestIsolate(t *testing.T) {
	n := publish(runtime.Port{Host: 8080, Sandbox: 80, Protocol: "tcp"})
	w := open(t)

	t.Run("without", func(t *testing.T) { // or the others prove nothing
		w := &world{t, w.m}
		peer := listen(t, internet, ":95")
		_, kill := start(t, w.setup("a", n).Path, "dial "+internetAddress+":95")
		c := <-peer
		defer c.Close()
		kill()
		_ = c.SetReadDeadline(time.Now().Add(time.Minute))
		if _, err := c.Read(make([]byte, 1)); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("a killed process did not end its connection: %v", err)
		}
	})

	e := w.setup("a", n)
	outside := listen(t, internet, ":96")
	host := listen(t, "", ":97")
	_, kill1 := start(t, e.Path, "dial "+internetAddress+":96")
	_, kill2 := start(t, e.Path, "dial "+e.Gateway.String()+":97")
	_, kill3 := start(t, e.Path, "listen :80")
	conns := map[string]net.Conn{"to outside": <-outside, "to the host": <-host}
	var err error
	if conns["from the host"], err = net.Dial("tcp4", "127.0.0.1:8080"); err != nil {
		t.Fatal(err)
	}
	if err := in(t, internet, func() (err error) {
		conns["from outside"], err = net.Dial("tcp4", hostAddress+":8080")
		return
	}); err != nil {
		t.Fatal(err)
	}
	for name, c := range conns {
		defer c.Close()
		if strings.HasPrefix(name, "from") {
			if _, err := bufio.NewReader(c).ReadString('\n'); err != nil {
				t.Fatal(name, err)
			}
		}
	}
	if err := w.m.Isolate(t.Context(), "a"); err != nil {
		t.Fatal(err)
	}
	kill1()
	kill2()
	kill3()
	all := func(when string) {
		for name, c := range conns {
			silent(t, name+" "+when, c)
		}
	}
	all("after the kill")
	w.teardown("a")
	all("after Teardown")
	again, err := w.m.Prepare(t.Context(), "a", n)
	if err != nil || again.Address != e.Address {
		t.Fatalf("Prepare: %+v, %v; was %+v", again, err, e)
	}
	all("after Prepare")
	if err := w.m.Connect(t.Context(), "a"); err != nil {
		t.Fatal(err)
	}
	serve(t, again.Path, "tcp4", ":80")
	mustReach(t, "", "tcp4", "127.0.0.1:8080", "")
	serve(t, internet, "tcp4", ":98")
	mustReach(t, again.Path, "tcp4", internetAddress+":98", hostAddress)
	// The proof that Prepare was needed: now the peer is told, there is no such socket.
	c := conns["to outside"]
	_ = c.SetDeadline(time.Now().Add(time.Minute))
	if _, err := c.Read(make([]byte, 1)); !errors.Is(err, unix.ECONNRESET) {
		t.Errorf("after Connect: %v, want a reset", err)
	}
}

// While a sandbox is away its peers do not even learn that it is.
func TestAway(t *testing.T) {
	w := open(t)
	w.setup("b", bridged) // keeps the bridge running
	e := w.setup("a", bridged)
	w.teardown("a")
	_, err := ask(t, "", "tcp4", e.Address.String()+":80", 4*time.Second) // a look-up fails after three
	var timeout net.Error
	if !errors.As(err, &timeout) || !timeout.Timeout() {
		t.Errorf("%v, want a timeout", err)
	}
}

// After Isolate, Setup makes another namespace: orphaned sockets of the old
// one still try to send the end of their connections.
func TestSetupAfterIsolate(t *testing.T) {
	w := open(t)
	e := w.setup("a", bridged)
	peer := listen(t, internet, ":99")
	_, kill := start(t, e.Path, "dial "+internetAddress+":99")
	c := <-peer
	defer c.Close()
	if err := w.m.Isolate(t.Context(), "a"); err != nil {
		t.Fatal(err)
	}
	kill()
	w.setup("a", bridged)
	_ = c.SetReadDeadline(time.Now().Add(2 * time.Second)) // some retransmissions
	if n, err := c.Read(make([]byte, 1)); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("read %d bytes, error %v, want silence", n, err)
	}
}

// A connection goes on in the new namespace, over NAT both ways, as when its
// process is dumped and restored.
func TestConnectionSurvives(t *testing.T) {
	w := open(t)
	n := publish(runtime.Port{Host: 8080, Sandbox: 80, Protocol: "tcp"})
	e := w.setup("a", n)
	noTimestamps(t, e.Path)

	outside := listen(t, internet, ":100")
	var mine net.Conn
	if err := in(t, e.Path, func() (err error) {
		mine, err = net.Dial("tcp4", internetAddress+":100")
		return
	}); err != nil {
		t.Fatal(err)
	}
	inside := listen(t, e.Path, ":80")
	var client net.Conn
	if err := in(t, internet, func() (err error) {
		client, err = net.Dial("tcp4", hostAddress+":8080")
		return
	}); err != nil {
		t.Fatal(err)
	}
	ends := []struct{ box, peer net.Conn }{{mine, <-outside}, {<-inside, client}}
	for _, c := range ends {
		talk(t, c.box, c.peer)
	}

	if err := w.m.Isolate(t.Context(), "a"); err != nil {
		t.Fatal(err)
	}
	var images []socketImage
	for _, c := range ends {
		images = append(images, dumpSocket(t, c.box))
	}
	w.teardown("a")
	// Meanwhile the peers send, and get no answer.
	for _, c := range ends {
		if _, err := io.WriteString(c.peer, "meanwhile\n"); err != nil {
			t.Fatal(err)
		}
	}
	e, err := w.m.Prepare(t.Context(), "a", n)
	if err != nil {
		t.Fatal(err)
	}
	noTimestamps(t, e.Path)
	for i := range ends {
		ends[i].box = restoreSocket(t, e.Path, images[i])
	}
	if err := w.m.Connect(t.Context(), "a"); err != nil {
		t.Fatal(err)
	}
	for _, c := range ends {
		_ = c.box.SetDeadline(time.Now().Add(time.Minute))
		if line, err := bufio.NewReader(c.box).ReadString('\n'); err != nil || line != "meanwhile\n" {
			t.Fatalf("%q, %v", line, err)
		}
		talk(t, c.box, c.peer)
		c.box.Close()
		c.peer.Close()
	}
}

func noTimestamps(t *testing.T, path string) {
	t.Helper()
	if err := in(t, path, func() error {
		return errors.Join(sysctl("ipv4/tcp_timestamps", "0"), sysctl("ipv4/tcp_window_scaling", "0"),
			sysctl("ipv4/tcp_sack", "0"))
	}); err != nil {
		t.Fatal(err)
	}
}

func talk(t *testing.T, a, b net.Conn) {
	t.Helper()
	for _, c := range []struct{ from, to net.Conn }{{a, b}, {b, a}} {
		_ = c.from.SetDeadline(time.Now().Add(time.Minute))
		_ = c.to.SetDeadline(time.Now().Add(time.Minute))
		if _, err := io.WriteString(c.from, "hello"); err != nil {
			t.Fatal(err)
		}
		buf := make([]byte, 5)
		if _, err := io.ReadFull(c.to, buf); err != nil || string(buf) != "hello" {
			t.Fatalf("%q, %v", buf, err)
		}
	}
}

const ( // linux/tcp.h
	queueRecv = 1
	queueSend = 2
)

type socketImage struct {
	local, remote   netip.AddrPort
	sendSeq, rcvSeq int
}

func dumpSocket(t *testing.T, c net.Conn) (i socketImage) {
	t.Helper()
	i.local = c.LocalAddr().(*net.TCPAddr).AddrPort()
	i.remote = c.RemoteAddr().(*net.TCPAddr).AddrPort()
	raw, err := c.(*net.TCPConn).SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	if cerr := raw.Control(func(fd uintptr) {
		set := func(opt, v int) { err = errors.Join(err, unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, opt, v)) }
		seq := func() int {
			v, e := unix.GetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_QUEUE_SEQ)
			err = errors.Join(err, e)
			return v
		}
		set(unix.TCP_REPAIR, 1)
		set(unix.TCP_REPAIR_QUEUE, queueSend)
		i.sendSeq = seq()
		set(unix.TCP_REPAIR_QUEUE, queueRecv)
		i.rcvSeq = seq()
	}); cerr != nil || err != nil {
		t.Fatal(cerr, err)
	}
	c.Close() // under repair, without a word
	return i
}

func restoreSocket(t *testing.T, path string, i socketImage) net.Conn {
	t.Helper()
	var c net.Conn
	err := in(t, path, func() error {
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return err
		}
		f := os.NewFile(uintptr(fd), "tcp")
		defer f.Close()
		set := func(level, opt, v int) { err = errors.Join(err, unix.SetsockoptInt(fd, level, opt, v)) }
		set(unix.SOL_SOCKET, unix.SO_REUSEADDR, 1)
		set(unix.IPPROTO_TCP, unix.TCP_REPAIR, 1)
		set(unix.IPPROTO_TCP, unix.TCP_REPAIR_QUEUE, queueSend)
		set(unix.IPPROTO_TCP, unix.TCP_QUEUE_SEQ, i.sendSeq)
		set(unix.IPPROTO_TCP, unix.TCP_REPAIR_QUEUE, queueRecv)
		set(unix.IPPROTO_TCP, unix.TCP_QUEUE_SEQ, i.rcvSeq)
		if err != nil {
			return err
		}
		addr := func(a netip.AddrPort) unix.Sockaddr {
			return &unix.SockaddrInet4{Addr: a.Addr().Unmap().As4(), Port: int(a.Port())}
		}
		if err := unix.Bind(fd, addr(i.local)); err != nil {
			return err
		}
		if err := unix.Connect(fd, addr(i.remote)); err != nil {
			return err
		}
		if err := unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_REPAIR, 0); err != nil {
			return err
		}
		c, err = net.FileConn(f)
		return err
	})
	if err != nil {
		t.Fatalf("restore the socket %s - %s: %v", i.local, i.remote, err)
	}
	return c
}
