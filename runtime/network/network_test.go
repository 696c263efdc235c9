package network

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/runtime"
)

var bridged = runtime.Network{Mode: runtime.NetworkBridge}

func group(name string) runtime.Network { return runtime.Network{Mode: "bridge", Group: name} }

func publish(ports ...runtime.Port) runtime.Network {
	return runtime.Network{Mode: "bridge", Ports: ports}
}

func TestNone(t *testing.T) {
	w := open(t)
	e := w.setup("a", runtime.Network{Mode: "none"})
	serve(t, e.Path, "tcp4", "127.0.0.1:80")
	mustReach(t, e.Path, "tcp4", "127.0.0.1:80", "127.0.0.1")
	mustNotReach(t, e.Path, "tcp4", internetAddress+":80")
	if err := in(t, e.Path, func() error {
		l, err := net.Listen("tcp6", "[::1]:0")
		if err == nil {
			l.Close()
		}
		return err
	}); err != nil {
		t.Errorf("::1: %v", err)
	}
	if again := w.setup("a", runtime.Network{Mode: "none"}); again.Path != e.Path {
		t.Errorf("second Setup: %s, want %s", again.Path, e.Path)
	}
	w.release("a")
	if left := leftovers(t, w.m.root); len(left) > 0 {
		t.Errorf("left: %q", left)
	}
}

func TestHost(t *testing.T) {
	w := open(t)
	w.setup("a", bridged)
	e := w.setup("a", runtime.Network{Mode: "host"}) // a change of mode frees what the other had
	if e.Path != "" || e.Address.IsValid() {
		t.Errorf("endpoint %+v, want none", e)
	}
	if err := w.m.Isolate(t.Context(), "a"); err != nil {
		t.Error(err)
	}
	if left := leftovers(t, w.m.root); len(left) > 0 {
		t.Errorf("left: %q", left)
	}
}

func TestBridge(t *testing.T) {
	w := open(t)
	e := w.setup("a", bridged)
	t.Run("host to sandbox", func(t *testing.T) {
		serve(t, e.Path, "tcp4", ":80")
		mustReach(t, "", "tcp4", e.Address.String()+":80", e.Gateway.String())
	})
	t.Run("sandbox to host", func(t *testing.T) {
		serve(t, "", "tcp4", ":81")
		mustReach(t, e.Path, "tcp4", e.Gateway.String()+":81", e.Address.String())
	})
	t.Run("sandbox to outside", func(t *testing.T) {
		serve(t, internet, "tcp4", ":82")
		serve(t, internet, "udp4", ":82")
		mustReach(t, e.Path, "tcp4", internetAddress+":82", hostAddress)
		mustReach(t, e.Path, "udp4", internetAddress+":82", hostAddress)
	})
	t.Run("outside to sandbox", func(t *testing.T) {
		serve(t, e.Path, "tcp4", ":83")
		route(t, internet, e.Prefix, hostAddress)
		mustNotReach(t, internet, "tcp4", e.Address.String()+":83")
	})
	t.Run("no IPv6", func(t *testing.T) {
		h, err := enter(e.Path)
		if err != nil {
			t.Fatal(err)
		}
		defer h.Close()
		addrs, err := h.AddrList(nil, netlink.FAMILY_V6)
		if err != nil {
			t.Fatal(err)
		}
		for _, a := range addrs {
			if !a.IP.IsLoopback() {
				t.Errorf("the sandbox has %s", a.IP)
			}
		}
	})
	t.Run("host loopback", func(t *testing.T) {
		// 127.0.0.1 of the host, by packets that the sandbox forges.
		w.setup("a", publish(runtime.Port{Host: 8084, Sandbox: 84, Protocol: "tcp"})) // sets route_localnet
		serve(t, "", "tcp4", "127.0.0.1:85")
		loopbackBy(t, e.Path, e.Gateway.String())
		mustNotReach(t, e.Path, "tcp4", "127.0.0.1:85")
	})
}

// route adds a route in the namespace at path.
func route(t *testing.T, path string, to netip.Prefix, via string) {
	t.Helper()
	h, err := enter(path)
	if err != nil {
		t.Fatal(err)
	}
	defer h.Close()
	eth, err := h.LinkByName("eth0")
	if err != nil {
		t.Fatal(err)
	}
	r := &netlink.Route{LinkIndex: eth.Attrs().Index, Dst: ipnet(to), Gw: netip.MustParseAddr(via).AsSlice()}
	if err := h.RouteReplace(r); err != nil {
		t.Fatal(err)
	}
}

func TestPublish(t *testing.T) { bothWays(t, testPublish) }

func testPublish(t *testing.T) {
	w := open(t)
	e := w.setup("a", publish(
		runtime.Port{Host: 8080, Sandbox: 80, Protocol: "tcp"},
		runtime.Port{Host: 8080, Sandbox: 80, Protocol: "udp"},
		runtime.Port{HostIP: "127.0.0.1", Host: 8081, Sandbox: 80, Protocol: "tcp"},
		runtime.Port{HostIP: hostAddress, Host: 8082, Sandbox: 80, Protocol: "tcp"},
	))
	serve(t, e.Path, "tcp4", ":80")
	serve(t, e.Path, "udp4", ":80")
	other := w.setup("b", bridged)
	peer := w.setup("c", group("g"))
	open := group("g")
	open.Ports = []runtime.Port{{Host: 8083, Sandbox: 80, Protocol: "tcp"}}
	serve(t, w.setup("d", open).Path, "tcp4", ":80")
	mustReach(t, "", "tcp4", "127.0.0.1:8083", "")
	mustReach(t, peer.Path, "tcp4", hostAddress+":8083", "")
	for _, network := range []string{"tcp4", "udp4"} {
		mustReach(t, "", network, "127.0.0.1:8080", e.Gateway.String())
		mustReach(t, "", network, hostAddress+":8080", "")
		mustReach(t, internet, network, hostAddress+":8080", internetAddress)
		for _, to := range []string{hostAddress, e.Gateway.String()} {
			mustNotReach(t, other.Path, network, to+":8080")
			mustNotReach(t, peer.Path, network, to+":8080")
		}
	}
	mustReach(t, "", "tcp4", "127.0.0.1:8081", "")
	mustNotReach(t, "", "tcp4", hostAddress+":8081")
	mustNotReach(t, internet, "tcp4", hostAddress+":8081")
	mustNotReach(t, other.Path, "tcp4", hostAddress+":8081")
	mustReach(t, internet, "tcp4", hostAddress+":8082", internetAddress)
	mustNotReach(t, "", "tcp4", "127.0.0.1:8082")

	// A host on the same link addresses it as 127.0.0.1.
	loopbackBy(t, internet, hostAddress)
	mustNotReach(t, internet, "tcp4", "127.0.0.1:8081")

	w.teardown("a")
	if _, err := ask(t, "", "tcp4", "127.0.0.1:8080", time.Minute); !errors.Is(err, unix.ECONNREFUSED) {
		t.Errorf("after Teardown: %v, want refused", err)
	}
}

// loopbackBy makes the namespace at path send what is for 127.0.0.0/8 to via.
func loopbackBy(t *testing.T, path, via string) {
	t.Helper()
	if err := in(t, path, func() error {
		// The second is for the answers, which come from what is its own address too.
		return errors.Join(sysctl("ipv4/conf/eth0/route_localnet", "1"), sysctl("ipv4/conf/eth0/accept_local", "1"))
	}); err != nil {
		t.Fatal(err)
	}
	h, err := enter(path)
	if err != nil {
		t.Fatal(err)
	}
	defer h.Close()
	routes, err := h.RouteListFiltered(netlink.FAMILY_V4, &netlink.Route{Table: unix.RT_TABLE_LOCAL},
		netlink.RT_FILTER_TABLE)
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range routes {
		if r.Dst != nil && r.Dst.IP.IsLoopback() {
			if err := h.RouteDel(&r); err != nil {
				t.Fatal(err)
			}
		}
	}
	route(t, path, netip.MustParsePrefix("127.0.0.0/8"), via)
}

// bothWays runs f with and without bridged packets passing the host's IPv4
// rules, as br_netfilter, which Docker loads, makes them.
func bothWays(t *testing.T, f func(t *testing.T)) {
	for _, on := range []string{"0", "1"} {
		t.Run("br_netfilter "+on, func(t *testing.T) {
			const path = "/proc/sys/net/bridge/bridge-nf-call-iptables"
			if _, err := os.Stat(path); errors.Is(err, os.ErrNotExist) {
				if on == "1" {
					t.Log("br_netfilter is not loaded here: this is the same as without")
					return
				}
			} else if err := os.WriteFile(path, []byte(on), 0); err != nil {
				t.Fatal(err)
			}
			f(t)
		})
	}
}

func TestReach(t *testing.T) { bothWays(t, testReach) }

func testReach(t *testing.T) {
	w := open(t)
	for _, c := range []struct {
		name   string
		a, b   runtime.Network
		reach  bool
		bridge bool // the same one
	}{
		{"no group", bridged, bridged, false, true},
		{"one group", group("g"), group("g"), true, true},
		{"two groups", group("g"), group("h"), false, false},
		{"group and none", group("g"), bridged, false, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := &world{t, w.m}
			a, b := w.setup("a", c.a), w.setup("b", c.b)
			if same := a.Prefix == b.Prefix; same != c.bridge {
				t.Fatalf("subnets %s and %s", a.Prefix, b.Prefix)
			}
			serve(t, b.Path, "tcp4", ":80")
			serve(t, b.Path, "udp4", ":80")
			if c.reach {
				mustReach(t, a.Path, "tcp4", b.Address.String()+":80", a.Address.String())
				mustReach(t, a.Path, "udp4", b.Address.String()+":80", a.Address.String())
				return
			}
			mustNotReach(t, a.Path, "tcp4", b.Address.String()+":80")
			mustNotReach(t, a.Path, "udp4", b.Address.String()+":80")
			// By the host, which would route it.
			route(t, a.Path, netip.PrefixFrom(b.Address, 32), a.Gateway.String())
			route(t, b.Path, netip.PrefixFrom(a.Address, 32), b.Gateway.String())
			mustNotReach(t, a.Path, "tcp4", b.Address.String()+":80")
			mustNotReach(t, a.Path, "udp4", b.Address.String()+":80")
		})
	}
}

func TestSpoof(t *testing.T) {
	w := open(t)
	a, b := w.setup("a", bridged), w.setup("b", bridged)
	got := make(chan string, 10)
	var l net.PacketConn
	if err := in(t, internet, func() (err error) { l, err = net.ListenPacket("udp4", ":90"); return }); err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	go func() {
		buf := make([]byte, 10)
		for {
			n, _, err := l.ReadFrom(buf)
			if err != nil {
				return
			}
			got <- string(buf[:n])
		}
	}()
	// a takes b's address in addition to its own and sends from both.
	h, err := enter(a.Path)
	if err != nil {
		t.Fatal(err)
	}
	defer h.Close()
	eth, err := h.LinkByName("eth0")
	if err != nil {
		t.Fatal(err)
	}
	if err := h.AddrAdd(eth, &netlink.Addr{IPNet: ipnet(netip.PrefixFrom(b.Address, 32))}); err != nil {
		t.Fatal(err)
	}
	send := func(from netip.Addr, text string) {
		t.Helper()
		if err := in(t, a.Path, func() error {
			c, err := (&net.Dialer{LocalAddr: net.UDPAddrFromAddrPort(netip.AddrPortFrom(from,
				0))}).Dial("udp4", internetAddress+":90")
			if err != nil {
				return err
			}
			defer c.Close()
			_, err = c.Write([]byte(text))
			return err
		}); err != nil {
			t.Fatal(err)
		}
	}
	send(b.Address, "forged")
	send(a.Address, "true")
	if s := <-got; s != "true" {
		t.Errorf("the first to arrive is the %s one", s)
	}
	// Nor with b's MAC, if the kernel can lock ports.
	gateway := &netlink.Neigh{
		LinkIndex: eth.Attrs().Index, State: netlink.NUD_PERMANENT, IP: a.Gateway.AsSlice(),
		HardwareAddr: mac(a.Gateway),
	}
	if err := h.LinkSetHardwareAddr(eth, mac(b.Address)); err != nil {
		t.Fatal(err)
	}
	if err := h.NeighSet(gateway); err != nil {
		t.Fatal(err)
	}
	send(b.Address, "forged")
	if err := h.LinkSetHardwareAddr(eth, mac(a.Address)); err != nil {
		t.Fatal(err)
	}
	if err := h.NeighSet(gateway); err != nil {
		t.Fatal(err)
	}
	send(a.Address, "true")
	if s := <-got; s != "true" {
		t.Errorf("with a forged MAC, the first to arrive is the %s one", s)
	}
	// a answers for b's address, but the answer is ignored.
	if err := w.m.Isolate(t.Context(), "b"); err != nil {
		t.Fatal(err)
	}
	serve(t, a.Path, "tcp4", ":92")
	mustReach(t, "", "tcp4", a.Address.String()+":92", "")
	mustNotReach(t, "", "tcp4", b.Address.String()+":92")
}

func TestSameAddress(t *testing.T) {
	w := open(t)
	w.setup("other", bridged)
	first := w.setup("a", bridged)
	w.setup("another", bridged)
	w.teardown("a")
	w.teardown("a")
	if _, err := os.Stat(first.Path); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("namespace after Teardown: %v", err)
	}
	w.setup("b", bridged)
	m, err := Open(w.m.root, w.m.run) // as another process would
	if err != nil {
		t.Fatal(err)
	}
	second, err := m.Setup(t.Context(), "a", bridged)
	if err != nil {
		t.Fatal(err)
	}
	if second.Address != first.Address || second.MAC != first.MAC || second.Gateway != first.Gateway {
		t.Errorf("endpoint %+v, was %+v", second, first)
	}
	serve(t, second.Path, "tcp4", ":80")
	mustReach(t, "", "tcp4", second.Address.String()+":80", "")
	// A released address is not the next one to be given out.
	w.release("a")
	if c := w.setup("c", bridged); c.Address == first.Address {
		t.Errorf("%s has a new owner at once", c.Address)
	}
}

func TestIdempotent(t *testing.T) {
	w := open(t)
	n := publish(runtime.Port{Host: 8080, Sandbox: 80, Protocol: "tcp"})
	e := w.setup("a", n)
	serve(t, e.Path, "tcp4", ":80")
	for range 3 {
		if again := w.setup("a", n); again.Path != e.Path || again.Address != e.Address {
			t.Errorf("endpoint %+v, was %+v", again, e)
		}
		mustReach(t, "", "tcp4", "127.0.0.1:8080", "") // the namespace is still the same one
	}
	// Damage from outside is repaired.
	h, err := openHost()
	if err != nil {
		t.Fatal(err)
	}
	defer h.Close()
	for name, harm := range map[string]func() error{
		"no veth":   func() error { return h.deleteLink(w.m.veth("a")) },
		"no bridge": func() error { return h.deleteLink(w.m.bridge + "0") },
		"no rules":  func() error { v := &verb{m: w.m}; return v.dropRules() },
	} {
		if err := harm(); err != nil {
			t.Fatal(name, err)
		}
		w.setup("a", n)
		mustReach(t, "", "tcp4", "127.0.0.1:8080", "")
		if t.Failed() {
			t.Fatal(name)
		}
	}
	for range 2 {
		w.release("a")
	}
	if left := leftovers(t, w.m.root); len(left) > 0 {
		t.Errorf("left: %q", left)
	}
}

func TestPortConflict(t *testing.T) {
	w := open(t)
	n := publish(runtime.Port{Host: 8080, Sandbox: 80, Protocol: "tcp"})
	w.setup("a", n)
	refused := func(w *world, n runtime.Network, word string) {
		t.Helper()
		_, err := w.m.Setup(t.Context(), "b", n)
		if !errors.Is(err, fault.ErrExists) || !strings.Contains(err.Error(), word) || len(fault.Hint(err)) == 0 {
			t.Errorf("error %v, want %v and %q and a hint", err, fault.ErrExists, word)
		}
		if ids, err := w.m.List(t.Context()); err != nil || slices.Contains(ids, "b") {
			t.Errorf("ids %v, error %v: b should have left nothing", ids, err)
		}
	}
	refused(w, n, "8080/tcp")
	refused(w, n, "sandbox a")
	refused(w, publish(runtime.Port{HostIP: "127.0.0.1", Host: 8080, Sandbox: 80, Protocol: "tcp"}), "8080/tcp")
	refused(open(t), n, "another agentbox root")

	l, err := net.Listen("tcp4", "127.0.0.1:8081")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	refused(w, publish(runtime.Port{Host: 8081, Sandbox: 80, Protocol: "tcp"}), "8081/tcp")
	c, err := net.ListenPacket("udp6", "[::]:8082")
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	_ = c
	w.setup("c", publish(runtime.Port{Host: 8080, Sandbox: 80, Protocol: "udp"},
		runtime.Port{Host: 8081, Sandbox: 80, Protocol: "udp"}))

	// A sandbox that is down holds no ports, and is told when it wants them back.
	w.teardown("a")
	w.setup("d", n)
	if _, err := w.m.Setup(t.Context(), "a", n); !errors.Is(err, fault.ErrExists) {
		t.Errorf("error %v, want %v", err, fault.ErrExists)
	}
	w.release("d")
	w.setup("a", n)
}

func TestConcurrent(t *testing.T) {
	root := t.TempDir()
	w := openAt(t, root)
	const n = 20
	var wg sync.WaitGroup
	ends := make([]Endpoint, n)
	for i := range n {
		wg.Go(func() {
			m, err := Open(root, filepath.Join(root, "run"))
			if err != nil {
				t.Error(err)
				return
			}
			network := bridged
			if i%4 == 0 {
				network = group(fmt.Sprint("g", i%3))
			}
			network.Ports = []runtime.Port{{Host: uint16(9000 + i), Sandbox: 80, Protocol: "tcp"}}
			if ends[i], err = m.Setup(t.Context(), fmt.Sprint("s", i), network); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if t.Failed() {
		t.FailNow()
	}
	seen := map[netip.Addr]bool{}
	for i, e := range ends {
		if seen[e.Address] {
			t.Errorf("%s twice", e.Address)
		}
		seen[e.Address] = true
		serve(t, e.Path, "tcp4", ":80")
		mustReach(t, "", "tcp4", fmt.Sprintf("127.0.0.1:%d", 9000+i), "")
	}
	if ids, err := w.m.List(t.Context()); err != nil || len(ids) != n {
		t.Errorf("ids %v, error %v", ids, err)
	}
	for i := range n {
		wg.Go(func() { w.release(fmt.Sprint("s", i)) })
	}
	wg.Wait()
	if left := leftovers(t, root); len(left) > 0 {
		t.Errorf("left: %q", left)
	}
}

func TestTwoRoots(t *testing.T) {
	v, w := open(t), open(t)
	n := publish(runtime.Port{Host: 8080, Sandbox: 80, Protocol: "tcp"})
	a := v.setup("same", n)
	n.Ports[0].Host = 8081
	b := w.setup("same", n)
	if a.Prefix.Overlaps(b.Prefix) {
		t.Fatalf("subnets %s and %s", a.Prefix, b.Prefix)
	}
	for i, e := range []Endpoint{a, b} {
		serve(t, e.Path, "tcp4", ":80")
		mustReach(t, "", "tcp4", fmt.Sprint("127.0.0.1:", 8080+i), "")
	}
	mustNotReach(t, a.Path, "tcp4", b.Address.String()+":80")
	mustNotReach(t, a.Path, "tcp4", hostAddress+":8081")
	v.release("same")
	mustReach(t, "", "tcp4", "127.0.0.1:8081", "")
	w.release("same")
	if left := append(leftovers(t, v.m.root), leftovers(t, w.m.root)...); len(left) > 0 {
		t.Errorf("left: %q", left)
	}
}

func BenchmarkSetup(b *testing.B) {
	w := open(b)
	w.setup("first", bridged)
	n := publish(runtime.Port{Host: 8080, Sandbox: 80, Protocol: "tcp"})
	for b.Loop() {
		w.setup("a", n)
		b.StopTimer()
		w.release("a")
		b.StartTimer()
	}
}

func BenchmarkTeardownSetup(b *testing.B) {
	w := open(b)
	for b.Loop() {
		w.setup("a", bridged)
		w.teardown("a")
	}
}

func BenchmarkIsolate(b *testing.B) {
	w := open(b)
	w.setup("a", bridged)
	for b.Loop() {
		if err := errors.Join(w.m.Isolate(b.Context(), "a"), w.m.Connect(b.Context(), "a")); err != nil {
			b.Fatal(err)
		}
	}
}
