package criu

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/agentbox/agentbox/criu/criutest"
)

// netns makes a network namespace as an engine would: lo up, held by a mount.
// Multipath TCP, with which Go programs listen by default, is off: CRIU cannot
// dump it, and programs then use TCP.
func netns(t *testing.T, name string) (path string) {
	t.Helper()
	for _, args := range [][]string{
		{"netns", "add", name}, {"-n", name, "link", "set", "lo", "up"},
		{"netns", "exec", name, "sh", "-c", "echo 0 > /proc/sys/net/mptcp/enabled || test ! -e /proc/sys/net/mptcp"},
	} {
		if out, err := exec.Command("ip", args...).CombinedOutput(); err != nil {
			t.Fatalf("ip %v: %v: %s", args, err, out)
		}
	}
	t.Cleanup(func() { _ = exec.Command("ip", "netns", "del", name).Run() })
	return "/run/netns/" + name
}

// A live connection goes on after a restore, into a fresh network namespace
// too; or is closed, or refused, as asked.
func TestDumpTCP(t *testing.T) { eachBundle(t, testDumpTCP) }

func testDumpTCP(t *testing.T, edit func(*specs.Spec)) {
	ctx := context.Background()
	f, err := Check(ctx)
	if err != nil || !f.InetSockets {
		t.Fatalf("CRIU %s cannot dump sockets on this kernel (scripts/install-deps.sh installs one that can): %v",
			f.VersionString(), err)
	}
	name := fmt.Sprintf("abtest-%d", os.Getpid())
	ns := netns(t, name)
	b := criutest.New(t, []string{"ping"}, func(s *specs.Spec) {
		edit(s)
		for i := range s.Linux.Namespaces {
			if s.Linux.Namespaces[i].Type == specs.NetworkNamespace {
				s.Linux.Namespaces[i].Path = ns
			}
		}
	})
	build(t, filepath.Join(b.Files, "bin", "ping"), "ping")
	rt := Runtime{b.Binary, b.State, b.ID}
	b.Start(nil)
	broken := func() string { s, _ := os.ReadFile(filepath.Join(b.Files, "broken")); return string(s) }
	b.Until("the connection works", func() bool { return b.Count() > 3 })

	dump := func(tcp string, leave bool) error {
		if err := rt.Pause(ctx); err != nil {
			t.Fatal(err)
		}
		if err := os.RemoveAll(b.Images); err != nil {
			t.Fatal(err)
		}
		_, err := Dump(ctx, rt, DumpOptions{
			ImageDir: b.Images, WorkDir: b.Work, LeaveRunning: leave, Options: Options{TCP: tcp},
		})
		return err
	}
	var de *DumpError
	if err := dump(TCPRefuse, true); !errors.As(err, &de) || de.Code != "tcp" {
		t.Fatalf("refuse: %v", err)
	}
	goOn := func(at int) {
		t.Helper()
		b.Until("the connection goes on", func() bool { return b.Count() > at+3 || broken() != "" })
		if broken() != "" {
			t.Fatalf("the connection broke: %s", broken())
		}
	}
	resumed := func() {
		t.Helper()
		at := b.Count()
		if err := rt.Resume(ctx); err != nil {
			t.Fatal(err)
		}
		goOn(at)
	}
	resumed()

	// Left running, then killed: the images are still good, in a namespace
	// that did not exist then.
	if err := dump(TCPEstablished, true); err != nil {
		t.Fatal(err)
	}
	at := b.Count()
	putBack := b.Keep()
	resumed()
	b.End()
	if err := exec.Command("ip", "netns", "del", name).Run(); err != nil {
		t.Fatal(err)
	}
	netns(t, name)
	putBack()
	restore(t, b, rt, Options{})
	goOn(at)

	// Not left running, then back into the same namespace, which must not stay locked.
	if err := dump(TCPEstablished, false); err != nil {
		t.Fatal(err)
	}
	at = b.Count()
	restore(t, b, rt, Options{})
	goOn(at)
	if out, err := exec.Command("ip", "netns", "exec", name, "nft", "list", "ruleset").Output(); err != nil ||
		strings.Contains(string(out), "CRIU") {
		t.Errorf("rules left in the namespace: %v: %s", err, out)
	}

	if err := dump(TCPClose, true); err != nil {
		t.Fatal(err)
	}
	resumed() // closed in the image, not in the living
	b.End()
	restore(t, b, rt, Options{TCP: TCPClose})
	b.Until("the restored end sees its connection closed", func() bool { return broken() != "" })
}
