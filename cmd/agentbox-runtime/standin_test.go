package main

import (
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/agentbox/agentbox/criu/criutest"
	"github.com/agentbox/agentbox/criu/stage"
)

// chat has two processes talk over a connection between addresses of the network
// and one over loopback, and counts what has come back over both.
const chat = `nc -ll -p 5000 -e cat &
until [ "$(echo x | nc 10.77.0.2 5000)" = x ]; do sleep 0.05; done
n=0; while :; do n=$((n+1)); echo $n; sleep 0.05; done | nc 10.77.0.2 5000 | nc 127.0.0.1 5000 | while read i; do ` +
	criutest.Store + `; done`

// An engine that fills the network between create and start has its containers
// restored with their connections.
func TestNetworkFilledLate(t *testing.T) {
	b := newBox(t, []string{"sh", "-c", chat}, nil)
	ip := func(script string) string {
		t.Helper()
		out, err := exec.Command("nsenter", "-n", "-t", fmt.Sprint(b.Pid()), "sh", "-c", script).CombinedOutput()
		if err != nil {
			t.Fatalf("%s: %v: %s", script, err, out)
		}
		return string(out)
	}
	start := func() {
		t.Helper()
		if err := b.Cmd(nil, "create", "--bundle", b.Bundle, "--pid-file", filepath.Join(b.Work, "pid"),
			b.ID).Run(); err != nil {
			log, _ := os.ReadFile(filepath.Join(b.Work, "restore.log"))
			t.Fatalf("create: %v: %s", err, log)
		}
		if left := ip("ip -o link; ip route | sed s/^/route:/"); strings.Contains(left, standInLink) ||
			strings.Contains(left, standInPeer) || strings.Contains(left, "route:") {
			t.Errorf("after create it has the network %s", left)
		}
		ip("ip link set lo up; ip link add e0 type veth peer name e1; ip link set e0 up; ip link set e1 up; ip addr add 10.77.0.2/24 dev e0")
		if err := b.Cmd(nil, "start", b.ID).Run(); err != nil {
			t.Fatalf("start: %v", err)
		}
	}
	start()
	b.Until("it counts", func() bool { return b.Count() >= 5 })
	network := []string{"--tcp-established", "--empty-ns", "network"}
	b.dump(t, network...)
	at := b.Count()
	b.End()
	for range 2 {
		r := stage.Restore{
			Images: b.Images, Work: b.Work, Flags: append([]string{"--file-locks"}, network...),
			Addresses: []netip.Addr{netip.MustParseAddr("10.77.0.2")},
		}
		if err := stage.At(b.run, b.ID).Put(r); err != nil {
			t.Fatal(err)
		}
		start()
		b.Until("it counts on", func() bool { return b.Count() > at+5 })
		b.End()
	}
	noState(t, b.run)
}

// The stand-in has what sockets need, goes without a trace, and is never made
// where there is a network.
func TestStandIn(t *testing.T) {
	criutest.Root(t)
	sleep := exec.Command("unshare", "-n", "sleep", "1000")
	if err := sleep.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { _, _ = sleep.Process.Kill(), sleep.Wait() }()
	pid := sleep.Process.Pid
	own, err := os.Readlink("/proc/self/ns/net")
	if err != nil {
		t.Fatal(err)
	}
	criutest.Until(t, "it has a network of its own", func() bool {
		now, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/net", pid))
		return err == nil && now != own
	})
	inside := func(fn func() error) {
		t.Helper()
		if err := inNetwork(pid, fn); err != nil {
			t.Error(err)
		}
	}
	state := func() *strings.Reader { return strings.NewReader(fmt.Sprintf(`{"pid": %d}`, pid)) }
	if code := standIn(state(), []string{"192.0.2.7", "2001:db8::7"}); code != 0 {
		t.Fatalf("it ends with %d", code)
	}
	inside(func() error {
		for _, at := range []string{"127.0.0.1:0", "192.0.2.7:0", "[2001:db8::7]:0"} {
			l, err := net.Listen("tcp", at)
			if err != nil {
				return err
			}
			_ = l.Close()
		}
		// There is a route to anywhere, and no host there.
		d := net.Dialer{Timeout: 300 * time.Millisecond, LocalAddr: &net.TCPAddr{IP: net.ParseIP("192.0.2.7")}}
		if _, err := d.Dial("tcp", "198.51.100.1:80"); err == nil || !strings.Contains(err.Error(), "timeout") {
			return fmt.Errorf("a connection to nobody: %v", err)
		}
		return nil
	})
	for range 2 {
		if err := endStandIn(pid); err != nil {
			t.Fatal(err)
		}
	}
	inside(func() error {
		if list, err := links(); err != nil || len(list) != 1 {
			return fmt.Errorf("left: %v, %v", list, err)
		}
		return nil
	})
	// By now lo is up: the network has been set up.
	if code := standIn(state(), []string{"192.0.2.7"}); code != 0 {
		t.Fatalf("it ends with %d", code)
	}
	inside(func() error {
		if list, err := links(); err != nil || len(list) != 1 {
			return fmt.Errorf("a stand-in beside a network: %v, %v", list, err)
		}
		return nil
	})
	if code := standIn(state(), []string{"nonsense"}); code == 0 {
		t.Error("an address that is none is taken")
	}
}
