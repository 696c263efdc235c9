package network

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/nftables"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/runtime"
)

const (
	roleEnv = "AGENTBOX_NETWORK_TEST_ROLE"

	hostAddress     = "198.51.100.1" // of the host towards the internet
	internetAddress = "198.51.100.2"
)

// TestMain runs the tests in network and mount namespaces of their own: they
// serve as the host, and all that a test might leave goes away with them.
func TestMain(m *testing.M) {
	role, arg, _ := strings.Cut(os.Getenv(roleEnv), " ")
	switch role {
	case "":
		os.Exit(reexec())
	case "host":
		if err := prepareHost(arg); err != nil {
			fmt.Fprintln(os.Stderr, "prepare the test host:", err)
			os.Exit(1)
		}
		os.Exit(m.Run())
	default:
		if err := act(role, arg); err != nil {
			fmt.Fprintln(os.Stderr, role, arg, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
}

func reexec() int {
	if os.Geteuid() != 0 {
		fmt.Fprintln(os.Stderr, "The tests of this package make network namespaces and rules: run them as root.")
		return 1
	}
	dir, err := os.MkdirTemp("", "agentbox-network-")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer os.RemoveAll(dir)
	signal.Ignore(syscall.SIGINT) // the child gets it too and ends
	cmd := exec.Command("/proc/self/exe", os.Args[1:]...)
	cmd.Env = append(os.Environ(), roleEnv+"=host "+dir)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Unshareflags: syscall.CLONE_NEWNS | syscall.CLONE_NEWNET, Pdeathsig: syscall.SIGKILL,
	}
	var exit *exec.ExitError
	if err := cmd.Run(); errors.As(err, &exit) {
		return max(exit.ExitCode(), 1)
	} else if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

// act is what processes inside sandboxes do. They talk over stdout and end
// when they are killed.
func act(role, arg string) error {
	switch role {
	case "dial": // ADDRESS: connect, say so, hold the connection
		c, err := net.Dial("tcp4", arg)
		if err != nil {
			return err
		}
		fmt.Println("connected", c.LocalAddr())
	case "listen": // ADDRESS: accept connections and hold them
		l, err := net.Listen("tcp4", arg)
		if err != nil {
			return err
		}
		fmt.Println("listening")
		var held []net.Conn
		for {
			c, err := l.Accept()
			if err != nil {
				return err
			}
			//lint:ignore SA4010 what is referred to is not closed by the garbage collector
			held = append(held, c)
			fmt.Fprintln(c, "hello")
		}
	case "setup", "teardown", "release": // ROOT ID: one verb, for the tests that kill it
		root, id, _ := strings.Cut(arg, " ")
		m, err := Open(root, filepath.Join(root, "run"))
		if err != nil {
			return err
		}
		switch role {
		case "teardown":
			return m.Teardown(context.Background(), id)
		case "release":
			return m.Release(context.Background(), id)
		}
		_, err = m.Setup(context.Background(), id, crashNetwork)
		return err
	case "egress": // ROOT: the proxy of filtered sandboxes
		m, err := Open(arg, filepath.Join(arg, "run"))
		if err != nil {
			return err
		}
		return m.Serve(context.Background())
	case "confined": // ROOT: what the worker can do of what it should not
		m, err := Open(arg, filepath.Join(arg, "run"))
		if err != nil {
			return err
		}
		if err := m.confine(); err != nil {
			return err
		}
		return tryAll(m)
	default:
		return fmt.Errorf("unknown role %q", role)
	}
	// Not select {}: without cgo Go calls that a deadlock.
	return unix.Pause()
}

var crashNetwork = runtime.Network{Ports: []runtime.Port{{Host: 8099, Sandbox: 80, Protocol: "tcp"}}}

// internet is a namespace behind a link of the host that knows no way to any sandbox.
var internet string

func prepareHost(dir string) error {
	h, err := openHost()
	if err != nil {
		return err
	}
	defer h.Close()
	lo, err := h.LinkByName("lo")
	if err != nil {
		return err
	}
	if err := h.LinkSetUp(lo); err != nil {
		return err
	}
	v := &verb{m: &Manager{run: dir}}
	if err := v.makeNamespace("internet", nil); err != nil {
		return err
	}
	internet = v.m.namespace("internet")
	f, err := os.Open(internet)
	if err != nil {
		return err
	}
	defer f.Close()
	a := netlink.NewLinkAttrs()
	a.Name = "up0"
	if err := h.LinkAdd(&netlink.Veth{
		LinkAttrs: a, PeerName: "eth0", PeerNamespace: netlink.NsFd(f.Fd()),
	}); err != nil {
		return err
	}
	in, err := enter(internet)
	if err != nil {
		return err
	}
	defer in.Close()
	if err := address4(h, "up0", hostAddress); err != nil {
		return err
	}
	return address4(in, "eth0", internetAddress)
}

func address4(h *handle, link, addr string) error {
	l, err := h.LinkByName(link)
	if err != nil {
		return err
	}
	if err := h.AddrAdd(l, &netlink.Addr{IPNet: ipnet(netip.PrefixFrom(netip.MustParseAddr(addr), 24))}); err != nil {
		return err
	}
	return h.LinkSetUp(l)
}

// in runs f on a thread in the namespace at path; "" is the host.
func in(t testing.TB, path string, f func() error) error {
	t.Helper()
	if path == "" {
		return f()
	}
	ns, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer ns.Close()
	return onThread(func() error {
		if err := unix.Setns(int(ns.Fd()), unix.CLONE_NEWNET); err != nil {
			return err
		}
		return f()
	})
}

// world is a root under test.
type world struct {
	testing.TB
	m *Manager
}

func open(t testing.TB) *world {
	t.Helper()
	return openAt(t, t.TempDir())
}

func openAt(t testing.TB, root string) *world {
	t.Helper()
	m, err := Open(root, filepath.Join(root, "run"))
	if err != nil {
		t.Fatal(err)
	}
	w := &world{t, m}
	t.Cleanup(func() {
		ids, err := m.List(context.Background())
		if err != nil && !t.Failed() {
			t.Error(err)
		}
		for _, id := range ids {
			w.release(id)
		}
	})
	return w
}

func (w *world) setup(id string, n runtime.Network) Endpoint {
	w.Helper()
	e, err := w.m.Setup(w.Context(), id, n)
	if err != nil {
		w.Fatalf("Setup %s: %v", id, err)
	}
	return e
}

func (w *world) release(id string) {
	w.Helper()
	if err := w.m.Release(context.Background(), id); err != nil {
		w.Errorf("Release %s: %v", id, err)
	}
}

func (w *world) teardown(id string) {
	w.Helper()
	if err := w.m.Teardown(w.Context(), id); err != nil {
		w.Fatalf("Teardown %s: %v", id, err)
	}
}

// serve answers tcp or udp in the namespace at path with the address it saw.
func serve(t testing.TB, path, network, addr string) {
	t.Helper()
	var err error
	if network == "udp4" {
		var c net.PacketConn
		err = in(t, path, func() (err error) { c, err = net.ListenPacket(network, addr); return })
		if err == nil {
			t.Cleanup(func() { c.Close() })
			go func() {
				buf := make([]byte, 100)
				for {
					_, from, err := c.ReadFrom(buf)
					if err != nil {
						return
					}
					_, _ = c.WriteTo([]byte(from.String()+"\n"), from)
				}
			}()
		}
	} else {
		var l net.Listener
		err = in(t, path, func() (err error) { l, err = net.Listen(network, addr); return })
		if err == nil {
			t.Cleanup(func() { l.Close() })
			go func() {
				for {
					c, err := l.Accept()
					if err != nil {
						return
					}
					fmt.Fprintln(c, c.RemoteAddr())
					c.Close()
				}
			}()
		}
	}
	if err != nil {
		t.Fatalf("serve %s %s: %v", network, addr, err)
	}
}

// ask connects from the namespace at path and returns the IP it was seen as.
func ask(t testing.TB, path, network, addr string, patience time.Duration) (string, error) {
	t.Helper()
	var seen string
	err := in(t, path, func() error {
		c, err := net.DialTimeout(network, addr, patience)
		if err != nil {
			return err
		}
		defer c.Close()
		if err := c.SetDeadline(time.Now().Add(patience)); err != nil {
			return err
		}
		if network == "udp4" {
			if _, err := io.WriteString(c, "?"); err != nil {
				return err
			}
		}
		line, err := bufio.NewReader(c).ReadString('\n')
		if err != nil {
			return err
		}
		seen, _, err = net.SplitHostPort(strings.TrimSpace(line))
		return err
	})
	return seen, err
}

func mustReach(t testing.TB, path, network, addr, as string) {
	t.Helper()
	seen, err := ask(t, path, network, addr, time.Minute)
	if err != nil {
		t.Errorf("%s %s: %v", network, addr, err)
	} else if as != "" && seen != as {
		t.Errorf("%s %s: was seen as %s, want %s", network, addr, seen, as)
	}
}

func mustNotReach(t testing.TB, path, network, addr string) {
	t.Helper()
	if seen, err := ask(t, path, network, addr, 200*time.Millisecond); err == nil {
		t.Errorf("%s %s: reached, seen as %s", network, addr, seen)
	}
}

// start runs this binary in a role inside the namespace at path and returns
// once it has printed a line.
func start(t testing.TB, path, role string) (line string, kill func()) {
	t.Helper()
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), roleEnv+"="+role)
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := in(t, path, cmd.Start); err != nil {
		t.Fatal(err)
	}
	dead := false
	kill = func() {
		if !dead {
			dead = true
			_ = cmd.Process.Kill()
			_ = cmd.Wait()
		}
	}
	t.Cleanup(kill)
	line, err = bufio.NewReader(out).ReadString('\n')
	if err != nil {
		t.Fatalf("%s: %v", role, err)
	}
	return strings.TrimSpace(line), kill
}

// leftovers are the links, tables, rules and mounts that this package may make.
func leftovers(t testing.TB, root string) []string {
	t.Helper()
	h, err := openHost()
	if err != nil {
		t.Fatal(err)
	}
	defer h.Close()
	links, err := h.links()
	if err != nil {
		t.Fatal(err)
	}
	var left []string
	for _, l := range links {
		if n := l.Attrs().Name; n != "lo" && n != "up0" {
			left = append(left, "link "+n)
		}
	}
	c, err := nftables.New()
	if err != nil {
		t.Fatal(err)
	}
	tables, err := c.ListTables()
	if err != nil {
		t.Fatal(err)
	}
	for _, table := range tables {
		left = append(left, "table "+table.Name)
	}
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(mounts)) {
		if strings.Contains(line, root) {
			left = append(left, "mount "+line)
		}
	}
	err = filepath.WalkDir(root, func(path string, d os.DirEntry, err error) error {
		if err == nil && path != root && path != filepath.Join(root, "run") &&
			path != filepath.Join(root, "network.lock") {
			left = append(left, "file "+path)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return left
}
