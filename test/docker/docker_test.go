package docker

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// TestDocker needs root, docker.io, containerd, criu and a static busybox. Its
// daemon has no experimental features.
func TestDocker(t *testing.T) {
	h := newHost(t, nil)
	if out := h.Docker(t, "version", "-f", "{{.Server.Experimental}}"); out != "false" {
		t.Fatalf("the daemon's experimental features: %s", out)
	}
	for _, c := range []struct {
		name string
		run  func(*box)
	}{
		{"checkpoint and restore", shows},
		{"older ones and files only", older},
		{"another run directory", elsewhere},
		{"connections survive", connections},
		{"restart policies", policies},
		{"paused by someone else", paused},
		{"removed during a checkpoint", removed},
		{"the daemon dies during a checkpoint", daemonInCheckpoint},
		{"the daemon dies during a restore", daemonInRestore},
		{"docker restart during a restore", restartInRestore},
		{"health checks", healthChecks},
		{"a read-only container", readOnly},
		{"an auto-removed container", autoRemoved},
		{"plain runc", plainRunc},
		{"volumes", volumes},
		{"hosts file", hostsFile},
		{"compose labels", composeLabels},
		{"names", names},
		{"sandboxes of its own", ownSandboxes},
		{"commits", commits},
		{"secrets", secrets},
		{"networks", networks},
		{"reaped", reaped},
		{"started by the docker client in the course of a restore", foreignStart},
		{"killed anywhere", killedAnywhere},
	} {
		t.Run(c.name, func(t *testing.T) { c.run(h.box(t)) })
	}
}

func shows(b *box) {
	b.run("web", "-p", "127.0.0.1:18080:80", "-m", "200m", "--pids-limit", "99", "bt", "sh", "-c",
		"mkdir -p /work /www; echo precious > /work/file; echo up > /www/index.html; httpd -p 80 -h /www; "+counting)
	get := func() string {
		client := http.Client{Timeout: 10 * time.Second}
		resp, err := client.Get("http://127.0.0.1:18080/")
		if err != nil {
			return err.Error()
		}
		defer resp.Body.Close()
		data, _ := io.ReadAll(resp.Body)
		return string(data)
	}
	b.eventually("the port answers", func() bool { return get() == "up\n" })
	b.counts("web")
	before := b.state("web", "{{json .NetworkSettings.Networks}}{{json .NetworkSettings.Ports}}")
	at := b.saved("web", "one")
	if out := b.ok("top", "--no-stream", "--format", "json",
		"docker://web"); !regexp.MustCompile(`"memory_limit":209715200,"pids":[23],"pids_limit":99,"disk":`).MatchString(out) || !strings.Contains(out, `"cpu_percent":`) {
		b.Errorf("agentbox top: %s", out)
	}
	b.Docker(b.T, "exec", "web", "rm", "-rf", "/work")
	b.Docker(b.T, "exec", "web", "sh", "-c", "echo new > /new")
	b.counts("web")
	for range 2 {
		b.ok("restore", "docker://web", "one")
		b.is("web", "running")
		if out := b.Docker(b.T, "exec", "web", "cat", "/work/file"); out != "precious" {
			b.Errorf("/work/file: %q", out)
		}
		if _, err := os.Stat(b.upper("web", "new")); err == nil {
			b.Error("a file made after the checkpoint is there")
		}
		b.counts("web")
		b.eventually("the port answers", func() bool { return get() == "up\n" })
	}
	b.contiguous("web", at, at)
	if out := b.Docker(b.T, "port", "web"); !strings.Contains(out, "80/tcp -> 127.0.0.1:18080") {
		b.Errorf("docker port: %s", out)
	}
	after := b.state("web", "{{json .NetworkSettings.Networks}}{{json .NetworkSettings.Ports}}")
	if strip(before) != strip(after) {
		b.Errorf("the network was\n%s\nand is\n%s", before, after)
	}
	if out := b.Docker(b.T, "exec", "web", "sh", "-c",
		"cat /proc/sys/net/ipv4/ip_unprivileged_port_start; ip -o link show lo | grep -c UP"); out != "0\n1" {
		b.Errorf("in the restored network: %q", out)
	}
	if out := b.ok("ps"); !strings.Contains(out, "docker://web") {
		b.Errorf("agentbox ps does not have it: %s", out)
	}
	b.Docker(b.T, "stop", "-t", "0", "web")
	b.is("web", "exited")
	// A later start is a fresh one.
	b.Docker(b.T, "start", "web")
	b.counts("web")
}

// strip takes what is new at every start out of a network's description: of
// Docker Engine 28, the MAC, too.
func strip(s string) string {
	return regexp.MustCompile(`"(EndpointID|MacAddress)":"[0-9a-f:]*"`).ReplaceAllString(s, "")
}

// elsewhere restores with another run directory than the daemon's: the wrapper
// finds nothing staged, and a fresh start is no restore.
func elsewhere(b *box) {
	b.counter("astray")
	saved := b.saved("astray", "one")
	b.Docker(b.T, "exec", "astray", "touch", "/new")
	r := b.try([]string{"AGENTBOX_RUN=" + b.T.TempDir()}, "restore", "docker://astray", "one")
	b.failed(r, "AGENTBOX_RUN")
	b.is("astray", "exited")
	if _, err := os.Stat(b.upper("astray", "new")); err != nil {
		b.Errorf("a file that was there before the failed restore: %v", err)
	}
	b.ok("restore", "docker://astray", "one")
	if _, err := os.Stat(b.upper("astray", "new")); err == nil {
		b.Error("a file made after the checkpoint is there")
	}
	b.counts("astray")
	b.eventually("it has gone on from the checkpoint", func() bool {
		steps := b.steps("astray")
		return len(steps) > 0 && saved.holds(steps[len(steps)-1])
	})
}

func older(b *box) {
	b.counter("old")
	var at, steps []span
	for i := range 3 {
		at = append(at, b.saved("old", fmt.Sprint("n", i)))
		b.counts("old")
	}
	for _, i := range []int{1, 0, 2} {
		// Past all of them, so that it goes back, and not to where it is.
		b.eventually("it has counted further", func() bool { return b.count("old") > at[i].high+2 })
		b.ok("restore", "docker://old", fmt.Sprint("n", i))
		if n := b.count("old"); n < at[i].low {
			b.Errorf("restored to n%d (%+v) it counts at %d", i, at[i], n)
		}
		b.counts("old")
		steps = append(steps, at[i])
	}
	b.ok("checkpoint", "docker://old", "--name", "files", "--files-only")
	b.Docker(b.T, "exec", "old", "sh", "-c", "echo x > /extra")
	b.ok("restore", "docker://old", "files")
	if _, err := os.Stat(b.upper("old", "extra")); err == nil {
		b.Error("a file made after the checkpoint is there")
	}
	b.counts("old")
	// And by stopping.
	b.ok("checkpoint", "docker://old", "--name", "stopped", "--stop")
	b.is("old", "exited")
	n := b.count("old")
	b.ok("restore", "docker://old", "stopped")
	if m := b.count("old"); m < n {
		b.Errorf("it went on at %d, and was stopped at %d", m, n)
	}
	b.counts("old")
	b.contiguous("old", append(steps, span{})...) // begun anew with the files only, and no step after the stop
}

// peer is one end of a connection whose other end echoes; it sends all the
// time and checks what comes back.
type peer struct {
	conn      net.Conn
	sent, got atomic.Int64 // lines
	sending   sync.Mutex   // held while nothing is to be sent
	fail      chan error
}

func talk(conn net.Conn) *peer {
	p := &peer{conn: conn, fail: make(chan error, 2)}
	go func() {
		for ; ; time.Sleep(2 * time.Millisecond) {
			p.sending.Lock()
			_, err := fmt.Fprintf(conn, "%08d\n", p.sent.Load())
			p.sent.Add(1)
			p.sending.Unlock()
			if err != nil {
				p.fail <- fmt.Errorf("send: %w", err)
				return
			}
		}
	}()
	go func() {
		for in := bufio.NewReader(conn); ; p.got.Add(1) {
			line, err := in.ReadString('\n')
			if err == nil && line != fmt.Sprintf("%08d\n", p.got.Load()) {
				err = fmt.Errorf("%q", line)
			}
			if err != nil {
				p.fail <- fmt.Errorf("receive after %d: %w", p.got.Load(), err)
				return
			}
		}
	}()
	return p
}

func connections(b *box) {
	b.run("srv", "bt", "nc", "-ll", "-p", "5000", "-e", "/bin/cat")
	address := b.state("srv", "{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}")
	var peers []*peer
	for range 8 {
		var conn net.Conn
		b.eventually("it takes a connection", func() (ok bool) {
			var err error
			conn, err = net.DialTimeout("tcp", net.JoinHostPort(address, "5000"), 10*time.Second)
			return err == nil
		})
		defer conn.Close()
		peers = append(peers, talk(conn))
	}
	// What peers send between the dump and the end of the old processes is
	// received by a kernel that forgets it; they are silent then, and have heard
	// all that they said. In the gap they talk.
	hush := func() {
		for _, p := range peers {
			p.sending.Lock()
		}
		for i, p := range peers {
			b.eventually(fmt.Sprintf("all of connection %d has come back", i), func() bool {
				select {
				case err := <-p.fail:
					b.Fatalf("connection %d: %v", i, err)
				default:
				}
				return p.got.Load() == p.sent.Load()
			})
		}
	}
	for range 3 {
		hush()
		b.ok("checkpoint", "docker://srv", "--name", "x", "--stop")
		for _, p := range peers {
			p.sending.Unlock()
		}
		b.ok("restore", "docker://srv", "x")
		b.ok("checkpoint", "rm", "docker://srv@x")
		for i, p := range peers {
			n := p.got.Load()
			b.eventually(fmt.Sprintf("connection %d goes on", i), func() bool { return p.got.Load() > n })
		}
	}
	hush()
	for _, p := range peers {
		p.sending.Unlock()
	}
}

func policies(b *box) {
	for _, policy := range []string{"always", "unless-stopped", "on-failure"} {
		name := "p-" + policy
		b.counter(name, "--restart", policy)
		at := b.saved(name, "one", "--stop")
		time.Sleep(500 * time.Millisecond) // the daemon restarts after 100 ms
		b.is(name, "exited")
		if n := b.state(name, "{{.RestartCount}}"); n != "0" {
			b.Errorf("%s: the daemon restarted it %s times", policy, n)
		}
		b.ok("restore", "docker://"+name, "one")
		b.counts(name)
		b.ok("restore", "docker://"+name, "one")
		b.counts(name)
		b.contiguous(name, at)
		if p := b.state(name, "{{.HostConfig.RestartPolicy.Name}}"); p != policy {
			b.Errorf("the policy is %s, and was %s", p, policy)
		}
		// Its purpose still works.
		if policy == "always" {
			b.Docker(b.T, "exec", "-d", name, "sh", "-c", "kill -9 -1; true")
		}
	}
}

func paused(b *box) {
	b.counter("calm")
	b.Docker(b.T, "pause", "calm")
	b.ok("checkpoint", "docker://calm", "--name", "one")
	b.is("calm", "paused")
	at := b.count("calm")
	time.Sleep(100 * time.Millisecond)
	if n := b.count("calm"); n != at {
		b.Errorf("it counted from %d to %d while paused", at, n)
	}
	b.Docker(b.T, "unpause", "calm")
	b.counts("calm")
	b.ok("restore", "docker://calm", "one")
	b.is("calm", "paused")
	if n := b.count("calm"); n != at {
		b.Errorf("restored and paused it is at %d, want %d", n, at)
	}
	b.Docker(b.T, "unpause", "calm")
	b.counts("calm")
	// Paused while its checkpoint is taken: by agentbox for the daemon, too.
	r := b.begin(stopAt("checkpoint.after-freeze"), "checkpoint", "docker://calm").stopped()
	b.is("calm", "paused")
	r.goOn()
	if r := r.wait(); r.code != 0 {
		b.Errorf("%+v", r)
	}
	b.is("calm", "running")
	b.counts("calm")
}

func removed(b *box) {
	for _, at := range []string{"checkpoint.after-freeze", "checkpoint.before-commit"} {
		b.counter("gone")
		r := b.begin(stopAt(at), "checkpoint", "docker://gone", "--name", "x").stopped()
		b.Docker(b.T, "rm", "-f", "gone")
		res := r.goOn().wait()
		if at == "checkpoint.after-freeze" {
			b.failed(res, "removed while it was being checkpointed")
		}
		b.ok("recover")
		if out := b.ok("ps", "-a", "-q"); out != "" {
			b.Errorf("agentbox ps has %s", out)
		}
	}
}

func daemonInCheckpoint(b *box) {
	b.counter("dd")
	r := b.begin(stopAt("checkpoint.after-freeze"), "checkpoint", "docker://dd", "--name", "x").stopped()
	b.Kill(b.T)
	res := r.goOn().wait()
	if res.code != 0 {
		b.Errorf("a checkpoint that the daemon has no part in: %+v", res)
	}
	b.Start(b.T)
	b.is("dd", "running")
	b.counts("dd")
	b.ok("restore", "docker://dd", "x")
	b.counts("dd")
	// Killed, with the daemon dead as well: the next command thaws it.
	r = b.begin(stopAt("checkpoint.after-freeze"), "checkpoint", "docker://dd", "--name", "y").stopped()
	b.Kill(b.T)
	if err := r.cmd.Process.Kill(); err != nil {
		b.Fatal(err)
	}
	r.wait()
	b.fails("does not answer", "checkpoint", "docker://dd")
	b.Start(b.T)
	b.ok("recover")
	b.is("dd", "running")
	b.counts("dd")
}

func daemonInRestore(b *box) {
	for _, at := range []string{
		"restore.before-stop", "restore.after-stop", "restore.after-apply", "restore.after-stage",
	} {
		b.counter("dr")
		saved := b.saved("dr", "x")
		b.counts("dr")
		r := b.begin(stopAt(at), "restore", "docker://dr", "x").stopped()
		b.Kill(b.T)
		res := r.goOn().wait()
		b.failed(res, "does not answer")
		b.Start(b.T)
		b.ok("recover")
		b.ok("restore", "docker://dr", "x")
		if n := b.count("dr"); n < saved.low {
			b.Errorf("%s: it went on at %d, the checkpoint is of %+v", at, n, saved)
		}
		b.counts("dr")
		b.eventually(at+": the log goes on from the checkpoint", func() bool {
			steps := b.steps("dr")
			return len(steps) > 0 && saved.holds(steps[len(steps)-1])
		})
		b.Docker(b.T, "rm", "-f", "dr")
	}
}

func restartInRestore(b *box) {
	// Each start makes files and removes some: of one that is restarted between
	// the look at its files and its stop none is as it was looked at.
	b.run("rr", "bt", "sh", "-c", "rm -rf /of.*; mkdir /of.$$.$(cat /proc/sys/kernel/random/uuid); echo > $(echo /of.*)/file; i=0; while :; do i=$((i+1)); echo $i; printf %08d $i 1<>/count; sleep 0.02; done")
	b.counts("rr")
	saved := b.saved("rr", "x")
	b.counts("rr")
	for i, at := range []string{
		"restore.before-stop", "restore.after-stop", "restore.after-apply", "restore.after-stage",
	} {
		r := b.begin(stopAt(at), "restore", "docker://rr", "x").stopped()
		out, err := b.Try("restart", "-t", "0", "rr")
		if at != "restore.before-stop" && at != "restore.after-stage" &&
			(err == nil || !strings.Contains(out, "being restored")) {
			b.Errorf("%s: docker restart: %v: %s", at, err, out)
		}
		if res := r.goOn().wait(); res.code != 0 {
			b.Errorf("%s: %+v", at, res)
		}
		if n := b.count("rr"); n < saved.low {
			b.Errorf("%s: it went on at %d, the checkpoint is of %+v", at, n, saved)
		}
		b.counts("rr")
		b.eventually(at+": each restore has gone on from the checkpoint", func() bool {
			restored := 0
			for _, n := range b.steps("rr") {
				if saved.holds(n) {
					restored++
				} else if n != 1 { // docker restart's
					b.Fatalf("%s: the log goes on with %d, the checkpoint is of %+v", at, n, saved)
				}
			}
			return restored == i+1
		})
	}
}

func healthChecks(b *box) {
	b.counter("hc", "--health-cmd", "test -e /count", "--health-interval", "100ms", "--health-timeout", "1m",
		"--health-retries", "1")
	health := func() string { return b.state("hc", "{{.State.Health.Status}}") }
	b.eventually("it is healthy", func() bool { return health() == "healthy" })
	for i := range 8 {
		b.ok("checkpoint", "docker://hc", "--name", fmt.Sprint("c", i))
	}
	// For the daemon a paused one is unhealthy until it was asked again; but
	// no check may have failed, or been held up.
	b.eventually("it is healthy again", func() bool { return health() == "healthy" })
	for line := range strings.Lines(b.state("hc",
		"{{range .State.Health.Log}}{{.ExitCode}} {{println .Output}}{{end}}")) {
		// The OCI runtime refuses one that comes an instant too late.
		if line = strings.TrimSpace(line); line != "" && line != "0" && !strings.Contains(line, "paused container") {
			b.Errorf("a check ended with %s", line)
		}
	}
	b.counts("hc")
	b.ok("restore", "docker://hc", "c3")
	b.eventually("it is healthy again", func() bool { return health() == "healthy" })
	b.counts("hc")
}

func readOnly(b *box) {
	b.run("ro", "--read-only", "--tmpfs", "/tmp", "bt", "sh", "-c",
		"i=0; while :; do i=$((i+1)); echo $i; echo $i > /tmp/new; mv /tmp/new /tmp/count; sleep 0.02; done")
	count := func() int {
		return countIn(filepath.Join("/proc", b.state("ro", "{{.State.Pid}}"), "root/tmp/count"))
	}
	b.eventually("it counts", func() bool { return count() > 5 })
	b.Docker(b.T, "pause", "ro")
	b.ok("checkpoint", "docker://ro", "--name", "x")
	at := count()
	b.Docker(b.T, "unpause", "ro")
	b.eventually("it counts on", func() bool { return count() > at })
	b.ok("restore", "docker://ro", "x")
	if n := count(); n != at {
		b.Errorf("its tmpfs says %d, the checkpoint was at %d", n, at)
	}
	b.Docker(b.T, "unpause", "ro")
	b.eventually("it counts on", func() bool { return count() > at })
	if out, err := b.Try("exec", "ro", "touch", "/x"); err == nil {
		b.Errorf("its root filesystem can be written to: %s", out)
	}
}

func autoRemoved(b *box) {
	b.counter("ar", "--rm")
	b.ok("checkpoint", "docker://ar", "--name", "x")
	b.fails("--rm|Start it again without", "restore", "docker://ar", "x")
	b.is("ar", "running")
	b.counts("ar")
	b.fails("", "restore", "docker://ar", "x", "--files-only")
	b.fails("--rm|Restart it by its engine", "restart", "docker://ar")
	b.is("ar", "running")
	b.counts("ar")
}

func plainRunc(b *box) {
	b.Docker(b.T, "run", "-d", "--name", "plain", "-p", "127.0.0.1:18081:80", "-v", b.root+":/mnt:ro",
		"bt", "sh", "-c", counting)
	b.counts("plain")
	b.ok("checkpoint", "docker://plain", "--name", "full")
	b.counts("plain")
	b.fails("restores nothing|docker run -d --runtime agentbox --name plain|-v "+b.root+
		":/mnt:ro|-p 127.0.0.1:18081:80/tcp|--files-only", "restore", "docker://plain", "full")
	b.is("plain", "running")
	b.counts("plain")
	b.Docker(b.T, "exec", "plain", "touch", "/extra")
	b.ok("restore", "docker://plain", "full", "--files-only")
	if _, err := os.Stat(b.upper("plain", "extra")); err == nil {
		b.Error("a file made after the checkpoint is there")
	}
	b.counts("plain")
}

func volumes(b *box) {
	b.Docker(b.T, "volume", "create", "ledger")
	b.Cleanup(func() { b.Docker(b.T, "rm", "-f", "-v", "vol"); b.Docker(b.T, "volume", "rm", "ledger") })
	b.counter("vol", "-v", "ledger:/data", "-v", "/anonymous", "-v", b.root+":/host:ro")
	r := b.try(nil, "checkpoint", "docker://vol", "--name", "x")
	if r.code != 0 || !strings.Contains(r.err+b.ok("checkpoint", "inspect", "docker://vol@x"),
		"/data is volume ledger and not part of the checkpoint") {
		b.Errorf("%+v", r)
	}
	b.Docker(b.T, "exec", "vol", "sh", "-c", "echo kept > /data/f")
	b.ok("restore", "docker://vol", "x")
	b.counts("vol")
	if out := b.Docker(b.T, "exec", "vol", "cat", "/data/f"); out != "kept" {
		b.Errorf("the volume: %s", out)
	}
	with := b.try(nil, "checkpoint", "docker://vol", "--name", "with", "--with-volumes")
	if with.code != 0 || strings.Contains(with.err, "ledger") {
		b.Errorf("with volumes: %+v", with)
	}
	b.Docker(b.T, "exec", "vol", "sh", "-c", "echo lost > /data/f; echo more > /data/g; echo lost > /anonymous/f")
	b.run("other", "-v", "ledger:/d", "bt", "sleep", "1000")
	b.fails("ledger is in use by other", "restore", "docker://vol", "with")
	b.fails("ledger is in use by other", "checkpoint", "docker://vol", "--with-volumes")
	b.counts("vol")
	b.run("bound", "-v", b.Docker(b.T, "volume", "inspect", "-f", "{{.Mountpoint}}", "ledger")+
		":/d", "bt", "sleep", "1000")
	b.fails("ledger is in use by bound, other", "restore", "docker://vol", "with")
	b.Docker(b.T, "rm", "-f", "other")
	b.fails("ledger is in use by bound", "restore", "docker://vol", "with")
	b.Docker(b.T, "rm", "-f", "bound")
	b.ok("restore", "docker://vol", "with", "--verify")
	b.counts("vol")
	if out := b.Docker(b.T, "exec", "vol", "sh", "-c", "cat /data/*; ls /anonymous"); out != "kept" {
		b.Errorf("the volumes: %q", out)
	}
}

func hostsFile(b *box) {
	b.counter("hf", "--add-host", "peer:10.1.2.3")
	hosts := func() string { return b.Docker(b.T, "exec", "hf", "cat", "/etc/hosts") }
	b.Docker(b.T, "exec", "hf", "sh", "-c", "echo 10.9.9.9 first >> /etc/hosts")
	then := hosts()
	b.ok("checkpoint", "docker://hf", "--name", "full")
	b.ok("checkpoint", "docker://hf", "--name", "files", "--files-only")
	for _, name := range []string{"full", "files"} {
		b.Docker(b.T, "exec", "hf", "sh", "-c",
			"echo 10.9.9.9 second >> /etc/hosts; echo nameserver 10.8.8.8 > /etc/resolv.conf")
		b.ok("restore", "docker://hf", name)
		if now := hosts(); now != then {
			b.Errorf("after the restore of %s /etc/hosts is\n%s\nand was\n%s", name, now, then)
		}
		if out := b.Docker(b.T, "exec", "hf", "cat", "/etc/resolv.conf"); strings.Contains(out, "10.8.8.8") {
			b.Errorf("after the restore of %s /etc/resolv.conf is %s", name, out)
		}
		// An ordinary start of agentbox's leaves what is the container's.
		b.ok("restart", "-t", "0", "docker://hf")
		if now := hosts(); now != then {
			b.Errorf("after a restart /etc/hosts is\n%s\nand was\n%s", now, then)
		}
	}
}

func composeLabels(b *box) {
	b.Docker(b.T, "run", "-d", "--name", "comp", "--label", "com.docker.compose.service=worker",
		"bt", "sh", "-c", counting)
	b.counts("comp")
	b.ok("checkpoint", "docker://comp", "--name", "x")
	b.fails(`runtime: agentbox|docker compose up -d worker`, "restore", "docker://comp", "x")
	b.is("comp", "running")
}

func names(b *box) {
	b.counter("nm")
	id := b.state("nm", "{{.Id}}")
	b.ok("checkpoint", "docker://nm", "--name", "one")
	// By its name, its id and a prefix, with and without the scheme.
	for _, ref := range []string{"docker://nm", "docker://" + id, "docker://" + id[:12], "nm", id[:12]} {
		if out := b.ok("checkpoint", "ls", "-q", ref); len(strings.Fields(out)) != 1 {
			b.Errorf("checkpoints of %s: %s", ref, out)
		}
	}
	b.fails("not found", "checkpoint", "docker://nobody")
	b.fails("not found", "checkpoint", "docker://../images")
	// Another container takes the name.
	b.Docker(b.T, "rm", "-f", "nm")
	b.fails("not found", "restore", "docker://nm", "one")
	b.counter("nm")
	b.ok("checkpoint", "docker://nm", "--name", "two")
	b.ok("restore", "docker://nm", "two")
	b.counts("nm")
}
