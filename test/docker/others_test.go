package docker

import (
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// TestOthers is about what is not agentbox's, or goes wrong for reasons outside agentbox. It
// needs what TestDocker needs.
func TestOthers(t *testing.T) {
	h := newHost(t, nil)
	for _, c := range []struct {
		name string
		run  func(*box)
	}{
		{"a container of a sandbox's image", committed},
		{"the daemon is gone when it is to stop one", daemonInStop},
		{"a paused container has the volume", pausedUser},
		{"a bind mount of a symlink", linkedSource},
		{"the address is another's by now", addressTaken},
	} {
		t.Run(c.name, func(t *testing.T) { c.run(h.box(t)) })
	}
}

// `docker commit` gives a sandbox's labels to an image, and the image to its containers, which
// are not agentbox's for all that.
func committed(b *box) {
	b.ok("run", "-d", "--name", "box", "bt", "sh", "-c", "sleep 1000")
	b.Docker(b.T, "commit", "box", "taken")
	defer b.Docker(b.T, "rmi", "taken")
	theirs := b.Docker(b.T, "run", "-d", "--name", "theirs", "--entrypoint", "sh", "taken", "-c",
		"echo precious > /file; sleep 1000")
	defer b.Docker(b.T, "rm", "-f", "theirs")
	b.ok("recover")
	b.is("box", "running")
	b.ok("rm", "-f", "box")
	b.ok("recover")
	b.is("theirs", "running")
	if out := b.ok("checkpoint", "docker://theirs"); out == "" {
		b.Error("it has no checkpoint")
	}
	if list := b.ok("ps", "-q", "--no-trunc"); list != theirs[:32] {
		b.Errorf("sandboxes: %q, want the adopted one", list)
	}
}

// A container that cannot be stopped goes on, with its network.
func daemonInStop(b *box) {
	b.counter("cc")
	b.ok("checkpoint", "--name", "a", "docker://cc")
	r := b.begin(stopAt("docker.stop.after-isolate"), "restore", "docker://cc", "a").stopped()
	b.Dockerd.Kill(b.T)
	b.failed(r.goOn().wait(), "does not answer")
	b.Dockerd.Start(b.T)
	b.is("cc", "running")
	b.counts("cc")
	if out := b.Docker(b.T, "exec", "cc", "ip", "route"); !strings.Contains(out, "default via") {
		b.Errorf("its routes are gone: %q", out)
	}
	gateway := b.state("cc", "{{range .NetworkSettings.Networks}}{{.Gateway}}{{end}}")
	b.Docker(b.T, "exec", "cc", "ping", "-c", "1", "-W", "5", gateway)
	b.ok("restore", "docker://cc", "a")
	b.counts("cc")
}

// A restore replaces the directory of a volume; a container that is paused with the volume would
// go on in one that is gone.
func pausedUser(b *box) {
	b.Docker(b.T, "volume", "create", "shared")
	defer func() {
		b.Docker(b.T, "rm", "-f", "cc", "other")
		b.Docker(b.T, "volume", "rm", "shared")
	}()
	b.counter("cc", "-v", "shared:/data")
	b.ok("checkpoint", "--with-volumes", "--name", "a", "docker://cc")
	b.Docker(b.T, "run", "-d", "--name", "other", "-v", "shared:/data", "bt", "sleep", "1000")
	b.Docker(b.T, "pause", "other")
	b.fails("in use by other", "restore", "docker://cc", "a")
	b.is("cc", "running")
	b.Docker(b.T, "unpause", "other")
	b.Docker(b.T, "exec", "other", "sh", "-c", "echo kept > /data/file")
	if out := b.Docker(b.T, "exec", "cc", "cat", "/data/file"); out != "kept" {
		b.Errorf("the volume has %q", out)
	}
}

// A connection ends at an address: where the daemon has given that to another container, a
// restore fails, and says so, until it is free again.
func addressTaken(b *box) {
	address := func(name string) string {
		return b.state(name, "{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}")
	}
	b.run("cc", "bt", "nc", "-ll", "-p", "5000", "-e", "/bin/cat")
	was := address("cc")
	// No keepalives while it is away: the container with its address would end the connection.
	dialer := net.Dialer{Timeout: 10 * time.Second, KeepAlive: -1}
	var conn net.Conn
	b.eventually("it takes a connection", func() (ok bool) {
		var err error
		conn, err = dialer.Dial("tcp", net.JoinHostPort(was, "5000"))
		return err == nil
	})
	defer conn.Close()
	says := func() {
		b.Helper()
		_ = conn.SetDeadline(time.Now().Add(time.Minute))
		got := make([]byte, 4)
		if _, err := conn.Write([]byte("word")); err != nil {
			b.Fatal(err)
		}
		if _, err := io.ReadFull(conn, got); err != nil || string(got) != "word" {
			b.Fatalf("it says %q, %v", got, err)
		}
	}
	says()
	b.ok("checkpoint", "--name", "a", "--stop", "docker://cc")
	b.run("thief", "bt", "sleep", "1000")
	if now := address("thief"); now != was {
		b.Fatalf("the address %s was to be taken, the other has %s", was, now)
	}
	r := b.try(nil, "restore", "docker://cc", "a")
	b.failed(r, "address")
	b.is("cc", "exited")
	b.Docker(b.T, "rm", "-f", "thief")
	b.ok("restore", "docker://cc", "a")
	says()
}

func linkedSource(b *box) {
	dir := b.TempDir()
	link := filepath.Join(b.TempDir(), "link")
	if err := os.Symlink(dir, link); err != nil {
		b.Fatal(err)
	}
	b.counter("cc", "-v", link+":/mnt")
	b.ok("checkpoint", "--name", "a", "docker://cc")
	b.ok("restore", "docker://cc", "a")
	b.counts("cc")
}
