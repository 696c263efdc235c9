package cut

import (
	"errors"
	"fmt"
	"net"
	"os"
	goruntime "runtime"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// A cut namespace answers no packets, not even with a reset; over lo it goes on, and with the
// cut's end all is as before.
func TestCut(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Fatal("this test makes network namespaces and must be run as root")
	}
	// Their threads end with this one's goroutine.
	goruntime.LockOSThread()
	inside := namespace(t)
	namespace(t) // the test's own
	must(t, netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "out"}, PeerName: "in"}))
	in, err := netlink.LinkByName("in")
	must(t, err)
	must(t, netlink.LinkSetNsFd(in, int(inside.Fd())))
	h, err := netlink.NewHandleAt(netns.NsHandle(inside.Fd()))
	must(t, err)
	defer h.Close()
	out, err := netlink.LinkByName("out")
	must(t, err)
	lo, err := h.LinkByName("lo")
	must(t, err)
	must(t, h.LinkSetUp(lo))
	ours, _ := netlink.ParseAddr("192.0.2.1/24")
	theirs, _ := netlink.ParseAddr("192.0.2.2/24")
	must(t, netlink.AddrAdd(out, ours))
	must(t, h.AddrAdd(in, theirs))
	must(t, netlink.LinkSetUp(out))
	must(t, h.LinkSetUp(in))

	if !Possible() {
		t.Fatal("this kernel has no nf_tables")
	}
	// Nothing listens: a reset is the answer, once the kernel has taken up the links.
	for deadline := time.Now().Add(time.Minute); ; {
		err := connect("192.0.2.2")
		if errors.Is(err, unix.ECONNREFUSED) {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("before: %v", err)
		}
	}
	must(t, Begin(inside))
	if err := connect("192.0.2.2"); !errors.Is(err, unix.EAGAIN) {
		t.Errorf("cut off: %v, want no answer", err)
	}
	must(t, netns.Set(netns.NsHandle(inside.Fd())))
	if err := connect("127.0.0.1"); !errors.Is(err, unix.ECONNREFUSED) {
		t.Errorf("over lo: %v", err)
	}
	must(t, End(inside))
	must(t, End(inside)) // none
	if err := connect("192.0.2.1"); !errors.Is(err, unix.ECONNREFUSED) {
		t.Errorf("afterwards: %v", err)
	}
}

// connect connects from this thread's network namespace, within half a second.
func connect(ip string) error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	err = unix.Connect(fd, &unix.SockaddrInet4{Port: 9, Addr: [4]byte(net.ParseIP(ip).To4())})
	if !errors.Is(err, unix.EINPROGRESS) {
		return err
	}
	n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLOUT}},
		int((500 * time.Millisecond).Milliseconds()))
	if err != nil || n == 0 {
		return errors.Join(err, unix.EAGAIN)
	}
	code, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_ERROR)
	if err != nil || code == 0 {
		return err
	}
	return unix.Errno(code)
}

// namespace makes a network namespace, and this thread's the new one.
func namespace(t *testing.T) *os.File {
	t.Helper()
	must(t, unix.Unshare(unix.CLONE_NEWNET))
	f, err := os.Open(fmt.Sprintf("/proc/self/task/%d/ns/net", unix.Gettid()))
	must(t, err)
	t.Cleanup(func() { _ = f.Close() })
	return f
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
