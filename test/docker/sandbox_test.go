package docker

import (
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/enginetest"
)

func ownSandboxes(b *box) {
	if out := b.ok("run", "--rm", "bt", "echo", "hello"); out != "hello" {
		b.Errorf("run: %q", out)
	}
	b.ok("run", "-d", "--name", "mine", "-p", "127.0.0.1:18082:80", "-v", b.root+":/host:ro", "bt", "sh", "-c",
		"httpd -p 80 -h /etc; "+counting)
	b.counts("mine")
	address := b.state("mine", "{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}")
	if out := b.ok("exec", "mine", "sh", "-c", "echo $AGENTBOX_SANDBOX_NAME $AGENTBOX_ATTEMPT"); out != "mine 1" {
		b.Errorf("its identity: %q", out)
	}
	b.ok("checkpoint", "mine", "--name", "one")
	b.ok("exec", "mine", "sh", "-c", "echo x > /extra; rm /etc/base")
	b.ok("restore", "mine", "one", "--verify")
	b.counts("mine")
	if out := b.ok("exec", "mine", "sh", "-c",
		"echo $AGENTBOX_SANDBOX_NAME $AGENTBOX_ATTEMPT; cat /etc/base; ls /extra 2>/dev/null; true"); out != "mine 2\nbase" {
		b.Errorf("after the restore: %q", out)
	}
	b.eventually("its port answers", func() bool {
		conn, err := net.DialTimeout("tcp", "127.0.0.1:18082", 10*time.Second)
		if err == nil {
			conn.Close()
		}
		return err == nil
	})
	if now := b.state("mine", "{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}"); now != address {
		b.Errorf("its address was %s and is %s", address, now)
	}
	if out := b.ok("exec", "mine", "ls", "-A", "/sys/fs/cgroup"); b.Docker(b.T, "info", "-f",
		"{{.CgroupVersion}}") == "1" && out != "" {
		b.Errorf("it sees cgroups: %s", out)
	}
	// Gone, behind agentbox's back, and made again by a restore.
	b.Docker(b.T, "rm", "-f", "mine")
	b.ok("restore", "mine", "one")
	b.counts("mine")
	if now := b.state("mine", "{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}"); now != address {
		b.Logf("its address was %s and is %s", address, now)
	}
	b.fails("already exists", "create", "--name", "mine", "bt")
	b.Docker(b.T, "create", "--name", "theirs", "bt")
	b.fails("already exists|theirs", "create", "--name", "theirs", "bt")
	b.ok("rm", "-f", "mine")
	b.Docker(b.T, "rm", "theirs")
	if out := b.Docker(b.T, "network", "ls", "-q", "--filter", "label=agentbox.root"); out != "" {
		b.Errorf("networks are left: %s", out)
	}
	b.fails("not found|load it", "run", "--rm", "nobody/nothing:1", "true")
}

func networks(b *box) {
	serve := "while :; do echo hello | nc -l -p 5000; done"
	address := map[string]string{}
	for name, group := range map[string]string{"g1": "g", "g2": "g", "h1": "h", "lone": "", "alone": ""} {
		args := []string{"run", "-d", "--name", name}
		if group != "" {
			args = append(args, "--network-group", group)
		}
		b.ok(append(args, "bt", "sh", "-c", serve)...)
		address[name] = b.state(name, "{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}")
	}
	reaches := func(from, to string) bool {
		return strings.Contains(b.try(nil, "exec", from, "nc", "-w", "1", address[to], "5000").out, "hello")
	}
	b.eventually("one of the group reaches the other", func() bool { return reaches("g1", "g2") })
	for _, pair := range [][2]string{{"g1", "h1"}, {"g1", "lone"}, {"lone", "alone"}, {"alone", "g2"}} {
		if reaches(pair[0], pair[1]) {
			b.Errorf("%s reaches %s", pair[0], pair[1])
		}
	}
	seen := map[string]bool{}
	for name, a := range address {
		if seen[a] || a == "" {
			b.Errorf("the address of %s, %s, is empty or another's too", name, a)
		}
		seen[a] = true
	}
	// Its address is its own while it is away, too.
	b.ok("stop", "-t", "0", "g1")
	b.ok("run", "-d", "--name", "g3", "--network-group", "g", "bt", "sh", "-c", serve)
	if a := b.state("g3", "{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}"); a == address["g1"] {
		b.Errorf("a newcomer has the address of a stopped one, %s", a)
	}
	b.ok("start", "g1")
	if a := b.state("g1", "{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}"); a != address["g1"] {
		b.Errorf("after a restart its address is %s, and was %s", a, address["g1"])
	}
	b.ok("rm", "-f", "g1", "g2", "g3", "h1", "lone", "alone")
}

func reaped(b *box) {
	b.ok("run", "-d", "--rm", "--name", "brief", "bt", "sleep", "0.3")
	b.eventually("it is reaped", func() bool {
		out, err := b.Try("ps", "-aq", "--filter", "name=brief")
		return err == nil && out == "" && b.ok("ps", "-a", "-q") == ""
	})
	// Ended by the docker client.
	b.ok("run", "-d", "--rm", "--name", "ended", "bt", "sleep", "1000")
	b.Docker(b.T, "stop", "-t", "0", "ended")
	b.eventually("it is reaped", func() bool { return b.ok("ps", "-a", "-q") == "" })
	// Not by a restore, which ends it on its way.
	b.ok("run", "-d", "--rm", "--name", "back", "bt", "sh", "-c", counting)
	b.counts("back")
	b.ok("checkpoint", "back", "--name", "x")
	b.ok("restore", "back", "x")
	time.Sleep(300 * time.Millisecond)
	b.counts("back")
	b.ok("kill", "back")
	b.eventually("it is reaped", func() bool { return b.ok("ps", "-a", "-q") == "" })
}

// foreignStart: a start by another program restores what is staged.
func foreignStart(b *box) {
	b.counter("fs")
	saved := b.saved("fs", "x")
	b.counts("fs")
	r := b.begin(stopAt("restore.after-stage"), "restore", "docker://fs", "x").stopped()
	b.Docker(b.T, "start", "fs")
	if n := b.count("fs"); n < saved.low {
		b.Errorf("it went on at %d, the checkpoint is of %+v", n, saved)
	}
	b.counts("fs")
	if res := r.goOn().wait(); res.code != 0 {
		b.Errorf("%+v", res)
	}
	b.counts("fs")
	b.contiguous("fs", saved)
}

// killedAnywhere: killed at each of its instants, the next command puts things
// right.
func killedAnywhere(b *box) {
	for _, c := range []struct {
		at   string
		args []string
	}{
		{"docker.create.after-network", []string{"create", "--name", "kk", "bt", "sh", "-c", counting}},
		{"docker.create.after-container", []string{"create", "--name", "kk", "bt", "sh", "-c", counting}},
		{"docker.start.after-stage", []string{"start", "kk"}},
		{"docker.start.after-start", []string{"start", "kk"}},
		{"docker.stop.after-isolate", []string{"stop", "-t", "0", "kk"}},
		{"docker.stop.after-kill", []string{"stop", "-t", "0", "kk"}},
		{"docker.remove.after-stop", []string{"rm", "-f", "kk"}},
		{"docker.remove.after-container", []string{"rm", "-f", "kk"}},
	} {
		if c.args[0] != "create" {
			b.ok("create", "--name", "kk", "bt", "sh", "-c", counting)
			if c.args[0] != "start" {
				b.ok("start", "kk")
				b.counts("kk")
			}
		}
		if r := b.try(killAt(c.at), c.args...); !r.killed {
			b.Errorf("%s did not kill %q: %+v", c.at, c.args, r)
		}
		b.ok("recover")
		switch out := b.ok("ps", "-a", "-q"); c.args[0] {
		case "create", "rm":
			if out != "" {
				b.Errorf("%s: there is still %s", c.at, out)
			}
			if out := b.Docker(b.T, "ps", "-aq"); out != "" {
				b.Errorf("%s: a container is left", c.at)
			}
		default:
			if c.args[0] == "stop" {
				b.ok(c.args...) // what was killed may not have ended yet
			}
			b.try(nil, "start", "kk")
			b.counts("kk")
			b.ok("checkpoint", "kk", "--name", "x")
			b.ok("restore", "kk", "x")
			b.counts("kk")
			b.ok("rm", "-f", "--checkpoints", "kk")
		}
		if out := b.Docker(b.T, "network", "ls", "-q", "--filter", "label=agentbox.root"); out != "" {
			b.Errorf("%s: networks are left: %s", c.at, out)
		}
	}
}

// TestExperimental needs what TestDocker does. Its daemon has its experimental
// features on.
func TestExperimental(t *testing.T) {
	h := newHost(t, map[string]any{"experimental": true})
	network := "bridge"
	if enginetest.DockerMajor(t) >= 28 {
		network = "host"
		t.Run("plain runc with a network of its own", func(t *testing.T) {
			b := h.box(t)
			b.Docker(t, "run", "-d", "--name", "plain", "bt", "sh", "-c", counting)
			b.counts("plain")
			b.ok("checkpoint", "docker://plain", "--name", "x")
			b.fails("since version 28|--runtime agentbox|--files-only", "restore", "docker://plain", "x")
			b.is("plain", "running")
			b.counts("plain")
		})
	}
	t.Run("plain runc", func(t *testing.T) {
		b := h.box(t)
		b.Docker(t, "run", "-d", "--name", "plain", "--network", network, "bt", "sh", "-c", counting)
		b.counts("plain")
		saved := b.saved("plain", "x")
		b.counts("plain")
		b.Docker(t, "exec", "plain", "touch", "/extra")
		b.ok("restore", "docker://plain", "x")
		b.counts("plain")
		if _, err := os.Stat(b.upper("plain", "extra")); err == nil {
			t.Error("a file made after the checkpoint is there")
		}
		b.contiguous("plain", saved)
		b.ok("restore", "docker://plain", "x")
		b.counts("plain")
	})
}

// TestStorageDriver needs what TestDocker does.
func TestStorageDriver(t *testing.T) {
	h := newHost(t, map[string]any{"storage-driver": "vfs"})
	b := h.box(t)
	b.Docker(t, "run", "-d", "--name", "flat", "bt", "sleep", "1000")
	b.fails("driver vfs|overlay2", "checkpoint", "docker://flat")
	b.fails("driver vfs|overlay2", "run", "-d", "bt", "sleep", "1000")
	b.is("flat", "running")
}

// TestRemappedUsers needs what TestDocker does. Its daemon remaps the users of
// containers.
func TestRemappedUsers(t *testing.T) {
	for _, file := range []string{"/etc/subuid", "/etc/subgid"} {
		ids := filepath.Join(enginetest.Dir(t), "ids")
		if err := os.WriteFile(ids, []byte("daemon:100000:65536\n"), 0o644); err != nil {
			t.Fatal(err)
		}
		if _, err := os.Stat(file); err != nil {
			t.Fatalf("this test binds a file over %s: install the package uidmap or login: %v", file, err)
		}
		// In the mount namespace of the tests alone.
		if err := unix.Mount(ids, file, "", unix.MS_BIND, ""); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = unix.Unmount(file, unix.MNT_DETACH) })
	}
	h := newHost(t, map[string]any{"userns-remap": "daemon:daemon"})
	t.Run("files only", func(t *testing.T) {
		b := h.box(t)
		b.counter("far")
		b.ok("checkpoint", "docker://far", "--name", "full")
		b.Docker(t, "exec", "far", "sh", "-c", "echo x > /extra; chown 1000 /etc/base")
		b.fails("remaps the users|--userns host|--files-only", "restore", "docker://far", "full")
		b.is("far", "running")
		b.counts("far")
		b.ok("restore", "docker://far", "full", "--files-only")
		b.counts("far")
		if out := b.Docker(t, "exec", "far", "sh", "-c",
			"stat -c %u /etc/base /count; ls /extra 2> /dev/null; true"); out != "0\n0" {
			t.Errorf("owners: %q", out)
		}
	})
	t.Run("the host's users", func(t *testing.T) {
		b := h.box(t)
		b.counter("near", "--userns", "host")
		saved := b.saved("near", "full")
		b.counts("near")
		b.ok("restore", "docker://near", "full")
		b.counts("near")
		b.contiguous("near", saved)
	})
}
