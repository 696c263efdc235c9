package test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"
)

// podmanBox is a Podman with storage, network and /run of its own, and an
// agentbox that sees it.
type podmanBox struct {
	*testing.T
	dir string
	pid string // whose namespaces everything runs in
	env []string
}

func newPodman(t *testing.T) *podmanBox {
	t.Helper()
	// In memory: each command of Podman's waits for the disk several times.
	dir, err := os.MkdirTemp("/dev/shm", "abpm")
	if err != nil {
		t.Fatal(err)
	}
	p := &podmanBox{T: t, dir: dir}
	// Its log is a file: in its namespaces there is no journal of the host's.
	config := map[string]string{
		"storage.conf": fmt.Sprintf("[storage]\ndriver = \"overlay\"\ngraphroot = %q\nrunroot = \"/run/containers/storage\"\n", p.path("storage")),
		"containers.conf": "[containers]\nlog_driver = \"k8s-file\"\ndefault_ulimits = [\"nofile=1024:1024\", \"nproc=1024:1024\"]\n[engine]\nevents_logger = \"file\"\ncgroup_manager = \"cgroupfs\"\nruntime = \"runc\"\n" +
			fmt.Sprintf("[engine.runtimes]\nagentbox = [%q]\n", filepath.Join(bin, "agentbox-runtime")),
	}
	for name, text := range config {
		if err := os.WriteFile(p.path(name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	p.env = append(os.Environ(), "CONTAINERS_STORAGE_CONF="+p.path("storage.conf"),
		"CONTAINERS_CONF="+p.path("containers.conf"),
		"AGENTBOX_RUN=", "AGENTBOX_RUNTIME=", "AGENTBOX_ROOT="+p.path("root"))

	const setUp = `set -e
for d in /run /var/lib/cni /var/lib/containers /etc/containers /etc/cni; do mkdir -p $d; mount -t tmpfs tmpfs $d; done
echo '{"default":[{"type":"insecureAcceptAnything"}]}' > /etc/containers/policy.json
ip link set lo up
echo ready
exec cat > /dev/null`
	holder := exec.Command("unshare", "--net", "--mount", "--propagation", "private", "sh", "-c", setUp)
	// It ends with its input, and so with this process. A death signal would come at the end
	// of the thread that starts it.
	if _, err := holder.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	holder.Stderr = os.Stderr
	out, err := holder.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := holder.Start(); err != nil {
		t.Fatalf("namespaces for Podman: %v", err)
	}
	p.pid = strconv.Itoa(holder.Process.Pid)
	t.Cleanup(func() {
		p.close()
		_ = holder.Process.Kill()
		_ = holder.Wait()
		// Processes that Podman left to end by themselves are killed with their namespace, and
		// may write until then.
		err := os.RemoveAll(dir)
		for end := time.Now().Add(10 * time.Second); err != nil &&
			time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
			err = os.RemoveAll(dir)
		}
		if err != nil {
			t.Error(err)
		}
	})
	if line := make([]byte, 6); true {
		if _, err := out.Read(line); err != nil || string(line) != "ready\n" {
			t.Fatalf("namespaces for Podman: %q, %v", line, err)
		}
	}
	p.importImage()
	return p
}

func (p *podmanBox) path(name string) string { return filepath.Join(p.dir, name) }

// close removes what the test made, and looks for what it did not.
func (p *podmanBox) close() {
	for _, id := range strings.Fields(p.ok("agentbox", "checkpoint", "ls", "-a", "-q", "--no-trunc")) {
		p.ok("agentbox", "checkpoint", "rm", id)
	}
	p.ok("podman", "rm", "--all", "--force", "--time", "0")
	p.ok("agentbox", "recover")
	if left := p.ok("sh", "-c", "find /run/agentbox -type f -o -type l; ls -A /run/runc /run/crun 2>/dev/null | grep -v : || true"); left != "" {
		p.Errorf("left behind: %s", left)
	}
	p.ok("sh", "-c", "umount "+p.path("storage")+"/overlay || true")
}

// removePodmanGroups removes the cgroups that Podmans have in common, once none
// runs any more: one could be about to make its own in them.
func removePodmanGroups() {
	groups, _ := filepath.Glob("/sys/fs/cgroup/*/libpod_parent")
	for _, g := range append(groups, "/sys/fs/cgroup/libpod_parent") {
		for _, d := range []string{"conmon", ""} {
			_ = os.Remove(filepath.Join(g, d)) // empty ones only
		}
	}
}

// command is one in the namespaces.
func (p *podmanBox) command(name string, args ...string) *exec.Cmd {
	if name == "agentbox" {
		name = filepath.Join(bin, name)
	}
	cmd := exec.Command("nsenter", append([]string{"-t", p.pid, "--net", "--mount", "--", name}, args...)...)
	cmd.Env = p.env
	return cmd
}

func (p *podmanBox) try(name string, args ...string) (out, stderr string, err error) {
	p.Helper()
	cmd := p.command(name, args...)
	var stdout, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &errs
	err = cmd.Run()
	return strings.TrimSpace(stdout.String()), errs.String(), err
}

func (p *podmanBox) ok(name string, args ...string) string {
	p.Helper()
	out, stderr, err := p.try(name, args...)
	if err != nil {
		p.Fatalf("%s %q: %v: %s", name, args, err, stderr)
	}
	return out
}

// refused runs a command that must fail, and say so in these words.
func (p *podmanBox) refused(words []string, name string, args ...string) {
	p.Helper()
	_, stderr, err := p.try(name, args...)
	if err == nil {
		p.Errorf("%s %q went well", name, args)
	}
	for _, w := range words {
		if !strings.Contains(stderr, w) {
			p.Errorf("%s %q: %q is not in what it says: %s", name, args, w, stderr)
		}
	}
}

// reboot takes from Podman and agentbox what a reboot does, once nothing of theirs runs.
func (p *podmanBox) reboot() {
	p.Helper()
	p.ok("sh", "-c", "umount "+p.path("storage")+
		"/overlay; umount /run/netns/* /run/netns 2>/dev/null; rm -rf /run/* && test -z \"$(ls -A /run)\"")
}

func (p *podmanBox) eventually(what string, cond func() bool) {
	p.Helper()
	for end := time.Now().Add(2 * time.Minute); !cond(); time.Sleep(50 * time.Millisecond) {
		if time.Now().After(end) {
			p.Fatalf("gave up waiting until %s", what)
		}
	}
}

// importImage makes the image "bb" of a busybox.
func (p *podmanBox) importImage() {
	p.Helper()
	root := p.path("image")
	busybox, err := exec.LookPath("busybox")
	if err != nil {
		p.Fatalf("busybox is missing: scripts/install-deps.sh installs it")
	}
	script := fmt.Sprintf(`set -e; mkdir -p %[1]s/bin %[1]s/etc %[1]s/tmp %[1]s/root; cp %[2]s %[1]s/bin/busybox
for a in $(%[2]s --list); do test $a = busybox || ln -s busybox %[1]s/bin/$a; done
echo root:x:0:0::/root:/bin/sh > %[1]s/etc/passwd; tar -C %[1]s -cf %[1]s.tar .`, root, busybox)
	p.ok("sh", "-c", script)
	p.ok("podman", "import", p.path("image.tar"), "bb")
}

// inspect is what Podman says.
func (p *podmanBox) inspect(name, format string) string {
	p.Helper()
	return p.ok("podman", "container", "inspect", "--format", format, name)
}

func (p *podmanBox) count(name string) int {
	p.Helper()
	return p.reaches(name, 0)
}

func (p *podmanBox) reaches(name string, n int) (now int) {
	p.Helper()
	file := filepath.Join(p.inspect(name, "{{.GraphDriver.Data.UpperDir}}"), "count")
	p.eventually(fmt.Sprintf("the counter of %s is at %d", name, n), func() bool {
		data, _ := os.ReadFile(file)
		now, _ = strconv.Atoi(strings.TrimSpace(string(data)))
		return now >= n
	})
	return now
}

// printed are the numbers in the container's log.
func (p *podmanBox) printed(name string) (numbers []int) {
	p.Helper()
	for _, w := range strings.Fields(p.ok("podman", "logs", name)) {
		n, err := strconv.Atoi(w)
		if err != nil {
			p.Fatalf("the log of %s has %q", name, w)
		}
		numbers = append(numbers, n)
	}
	return numbers
}

// A container that was started with podman run is taken back and forth, and for Podman it is the
// same all along.
func TestPodman(t *testing.T) {
	t.Parallel()
	p := newPodman(t)
	p.ok("podman", "run", "-d", "--runtime", "agentbox", "--name", "c", "-p", "18080:80", "-m", "200m", "--pids-limit",
		"99", "-e", "MARK=1", "bb", "sh", "-c",
		"mkdir -p /work /www; echo precious > /work/file; echo served > /www/index.html; busybox httpd -h /www; "+
			counter)
	p.reaches("c", 10)
	served := func() string {
		out, _, _ := p.try("sh", "-c", `printf 'GET / HTTP/1.0\r\n\r\n' | busybox nc -w 5 `+
			p.inspect("c", "{{.NetworkSettings.IPAddress}}")+` 80 | tail -1`)
		return out
	}
	p.eventually("it serves", func() bool { return served() == "served" })
	address := p.inspect("c", "{{.NetworkSettings.IPAddress}} {{.NetworkSettings.MacAddress}}")
	p.ok("podman", "exec", "c", "sh", "-c", "echo 192.0.2.1 ours >> /etc/hosts")
	first := p.ok("agentbox", "checkpoint", "podman://c", "--name", "first")
	if out := p.ok("agentbox", "top", "--no-stream", "--format", "json", "podman://c"); !strings.Contains(out,
		`"memory_limit":209715200,"pids":`) || !strings.Contains(out, `"pids_limit":99,"disk":`) {
		t.Errorf("agentbox top: %s", out)
	}
	low := p.reaches("c", p.count("c"))
	p.reaches("c", low+20)
	p.ok("agentbox", "checkpoint", "podman://c", "--name", "second")
	middle := p.count("c")

	p.ok("podman", "exec", "c", "sh", "-c", "rm -rf /work /www; touch /work2; echo 192.0.2.1 theirs >> /etc/hosts")
	before := len(p.printed("c"))
	p.ok("agentbox", "restore", "podman://c", "first")
	if got := p.ok("podman", "exec", "c", "sh", "-c",
		"cat /work/file; ls /work2 2>&1; grep -c theirs /etc/hosts; grep -c ours /etc/hosts; tr '\\0' '\\n' < /proc/1/environ | grep ^MARK"); got !=
		"precious\nls: /work2: No such file or directory\n0\n1\nMARK=1" {
		t.Errorf("in the restored container: %s", got)
	}
	// Its output steps back once, to where it was at the checkpoint.
	back := func() (steps []int) {
		numbers := p.printed("c")
		for i := max(before, 1); i < len(numbers); i++ {
			if numbers[i] != numbers[i-1]+1 {
				steps = append(steps, numbers[i])
			}
		}
		return steps
	}
	p.eventually("the log goes on", func() bool { return len(back()) > 0 })
	if steps := back(); len(steps) != 1 || steps[0] < 10 || steps[0] > low+1 {
		t.Errorf("it went on with %d, and was at %d soon after the checkpoint", steps, low)
	}
	if got := p.inspect("c", "{{.NetworkSettings.IPAddress}} {{.NetworkSettings.MacAddress}}"); got != address {
		t.Errorf("its address was %s and is %s", address, got)
	}
	if got := served(); got != "served" {
		t.Errorf("the restored server says %q", got)
	}
	if got := p.ok("podman", "port", "c"); got != "80/tcp -> 0.0.0.0:18080" {
		t.Errorf("podman port: %s", got)
	}
	if got := p.ok("podman", "ps", "--format", "{{.Names}} {{.Status}}"); !strings.HasPrefix(got, "c Up ") {
		t.Errorf("podman ps: %s", got)
	}

	// The newer one; then, after a start of Podman's own, the older one again.
	p.reaches("c", middle+2) // so that it steps back
	p.ok("agentbox", "restore", "podman://c", "second")
	p.eventually("the log goes on again", func() bool { return len(back()) > 1 })
	if steps := back(); len(steps) != 2 || steps[1] < low || steps[1] > middle+1 {
		t.Errorf("after the restore of the second it went on with %d; the checkpoint was between %d and %d", steps,
			low+20, middle)
	}
	p.ok("podman", "restart", "-t", "0", "c")
	p.eventually("it starts afresh", func() bool { return len(back()) > 2 && back()[2] == 1 })
	if got := p.ok("podman", "exec", "c", "cat", "/etc/hosts"); strings.Contains(got, "ours") {
		t.Errorf("Podman's own start kept /etc/hosts: %s", got)
	}
	p.ok("podman", "stop", "-t", "0", "c")
	p.reboot()
	p.ok("agentbox", "restore", "podman://c", first)
	p.reaches("c", 10)
	if got := p.ok("podman", "exec", "c", "cat", "/etc/hosts"); !strings.Contains(got, "192.0.2.1 ours") ||
		strings.Contains(got, "theirs") {
		t.Errorf("after a reboot and a restore /etc/hosts is %s", got)
	}
	p.eventually("the log goes on from stopped", func() bool { return len(back()) > 3 })
	if steps := back(); len(steps) != 4 || steps[3] < 10 || steps[3] > low+1 {
		t.Errorf("it went on with %d, and was at %d soon after the checkpoint", steps, low)
	}
	if got := p.inspect("c", "{{.NetworkSettings.IPAddress}} {{.NetworkSettings.MacAddress}}"); got != address {
		t.Errorf("after a restore from stopped its address was %s and is %s", address, got)
	}

	var sandbox struct{ Name, Status, Backend, Address string }
	if err := json.Unmarshal([]byte(strings.Trim(p.ok("agentbox", "inspect", "podman://c"), "[]\n ")),
		&sandbox); err != nil ||
		sandbox.Name != "podman://c" || sandbox.Status != "running" || sandbox.Backend != "podman" ||
		sandbox.Address == "" {
		t.Errorf("agentbox inspect: %+v, %v", sandbox, err)
	}
	p.ok("agentbox", "checkpoint", "rm", first)
}

// A connection that was open goes on, for the peer was not told and the address
// is the same, which Podman would not have given again.
func TestPodmanConnection(t *testing.T) {
	t.Parallel()
	p := newPodman(t)
	p.ok("podman", "run", "-d", "--name", "first", "bb", "sleep", "1000") // makes the bridge
	gateway := p.inspect("first", "{{.NetworkSettings.Gateway}}")
	peer := p.command("busybox", "nc", "-l", "-p", "9000")
	heard := &bytes.Buffer{}
	peer.Stdout = heard
	if _, err := peer.StdinPipe(); err != nil { // whose end would be that of the connection
		t.Fatal(err)
	}
	if err := peer.Start(); err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() { done <- peer.Wait() }()
	t.Cleanup(func() { _ = peer.Process.Kill() })
	if net.ParseIP(gateway) == nil {
		t.Fatalf("gateway %q", gateway)
	}
	p.ok("podman", "run", "-d", "--runtime", "agentbox", "--restart", "always", "--name", "c", "bb", "sh", "-c",
		fmt.Sprintf("(until test -e /go; do sleep 0.05; done; echo hello) | nc %s 9000; echo $? > /ended; sleep 1000",
			gateway))
	established := func() bool {
		out, _, _ := p.try("podman", "exec", "c", "sh", "-c", "netstat -tn | grep -c ESTABLISHED")
		return out == "1"
	}
	p.eventually("it is connected", established)
	p.ok("agentbox", "checkpoint", "podman://c")
	address := p.inspect("c", "{{.NetworkSettings.IPAddress}}")
	// A start of Podman's own gives it another address; the peer does not hear of it.
	p.ok("nsenter", "-t", p.inspect("c", "{{.State.Pid}}"), "--net", "ip", "link", "set", "eth0", "down")
	p.ok("podman", "restart", "-t", "0", "c")
	if now := p.inspect("c", "{{.NetworkSettings.IPAddress}}"); now == address {
		t.Fatalf("after a restart its address is %s again", now)
	}
	for range 2 {
		p.ok("agentbox", "restore", "podman://c")
	}
	p.ok("podman", "exec", "c", "touch", "/go")
	select {
	case <-done:
	case <-time.After(2 * time.Minute):
		t.Fatalf("the peer has not heard the end of the connection: %s", p.ok("podman", "exec", "c", "netstat", "-tn"))
	}
	if heard.String() != "hello\n" {
		t.Errorf("the peer heard %q", heard.String())
	}
	// Its restart policy is still Podman's business.
	pid := p.inspect("c", "{{.State.Pid}}")
	p.ok("kill", "-KILL", pid)
	p.eventually("Podman starts it again", func() bool {
		now := p.inspect("c", "{{.State.Pid}}")
		return now != pid && now != "0"
	})
	// And a stop by agentbox is meant.
	p.ok("agentbox", "stop", "-t", "0", "podman://c")
	if got := p.inspect("c", "{{.State.Status}} {{.State.Pid}}"); got != "exited 0" {
		t.Errorf("after agentbox stop: %s", got)
	}
}

// The files that processes have open in a volume are verified before anything ends; a volume that
// was taken along comes back with its container, if no other container is in it.
func TestPodmanVolumes(t *testing.T) {
	t.Parallel()
	p := newPodman(t)
	p.ok("podman", "run", "-d", "--runtime", "agentbox", "--name", "c", "--network", "none", "-v", "ledger:/data", "-v",
		"/anonymous", "bb", "sh", "-c",
		"echo kept > /data/open; exec 3< /data/open; "+counter)
	p.reaches("c", 5)
	if out, stderr, err := p.try("agentbox", "checkpoint", "podman://c", "--name", "without"); err != nil ||
		!strings.Contains(out+stderr+p.ok("agentbox", "checkpoint", "inspect", "podman://c@without"),
			"/data is volume ledger and not part of the checkpoint") {
		t.Errorf("without volumes: %v: %s", err, stderr)
	}
	p.ok("podman", "exec", "c", "sh", "-c", "echo more than there was > /data/open")
	at := p.count("c")
	p.refused([]string{"/data/open", "a process of the checkpoint has open", "and had 5 then"}, "agentbox", "restore",
		"podman://c", "without")
	p.reaches("c", at+3)
	p.ok("podman", "exec", "c", "sh", "-c", "echo kept > /data/open; echo stays > /data/f")
	p.ok("agentbox", "restore", "podman://c", "without")
	if got := p.ok("podman", "exec", "c", "cat", "/data/f", "/proc/1/fd/3"); got != "stays\nkept" {
		t.Errorf("in a volume that is not part of the checkpoint: %q", got)
	}

	if _, stderr, err := p.try("agentbox", "checkpoint", "podman://c", "--name", "with",
		"--with-volumes"); err != nil || strings.Contains(stderr, "ledger") {
		t.Errorf("with volumes: %v: %s", err, stderr)
	}
	p.ok("podman", "exec", "c", "sh", "-c",
		"echo lost, and long > /data/open; echo lost > /data/g; rm /data/f; echo lost > /anonymous/f")
	p.ok("podman", "run", "-d", "--name", "other", "-v", "ledger:/d", "bb", "sleep", "1000")
	at = p.count("c")
	p.refused([]string{"volume ledger is in use by other", "Stop that first"}, "agentbox",
		"restore", "podman://c", "with")
	p.refused([]string{"volume ledger is in use by other"}, "agentbox", "checkpoint", "podman://c", "--with-volumes")
	p.reaches("c", at+3)
	p.ok("podman", "rm", "-f", "-t", "0", "other")
	for _, restore := range [][]string{
		{"restore", "podman://c", "with", "--verify"}, {"restore", "podman://c", "with", "--files-only"},
	} {
		p.ok("agentbox", restore...)
		if got := p.ok("podman", "exec", "c", "sh", "-c", "cat /data/*; ls /anonymous"); got != "stays\nkept" {
			t.Errorf("after %q the volumes have %q", restore, got)
		}
		p.ok("podman", "exec", "c", "sh", "-c", "echo lost > /data/g; rm /data/f; echo lost > /anonymous/f")
	}
	// Another directory took no place of its: Podman's volume is the one that is told of.
	if got, err := os.ReadFile(filepath.Join(
		p.ok("podman", "volume", "inspect", "--format", "{{.Mountpoint}}", "ledger"),
		"g")); err != nil || string(got) != "lost\n" {
		t.Errorf("what the container wrote is for Podman %q, %v", got, err)
	}
	p.ok("podman", "rm", "-f", "-t", "0", "c")
	p.ok("podman", "volume", "rm", "ledger")
}

// A container that was paused comes back paused.
func TestPodmanPaused(t *testing.T) {
	t.Parallel()
	p := newPodman(t)
	p.ok("podman", "run", "-d", "--runtime", "agentbox", "--name", "c", "--network", "none", "bb", "sh", "-c", counter)
	p.reaches("c", 5)
	p.ok("podman", "pause", "c")
	at := p.count("c")
	p.ok("agentbox", "checkpoint", "podman://c")
	if got := p.inspect("c", "{{.State.Status}}"); got != "paused" || p.count("c") != at {
		t.Errorf("after the checkpoint it is %s and counts %d, was at %d", got, p.count("c"), at)
	}
	p.ok("podman", "unpause", "c")
	p.reaches("c", at+5)
	p.ok("agentbox", "restore", "podman://c")
	if got := p.ok("agentbox", "inspect", "podman://c"); !strings.Contains(got, `"status": "paused"`) {
		t.Errorf("after the restore of a paused one: %s", got)
	}
	if got := p.inspect("c", "{{.State.Status}}"); got != "paused" {
		t.Errorf("for Podman it is %s", got)
	}
	time.Sleep(200 * time.Millisecond) // in which it must do nothing
	if n := p.count("c"); n != at {
		t.Errorf("it counts %d, was paused at %d", n, at)
	}
	p.ok("podman", "unpause", "c")
	p.reaches("c", at+5)
}

// An impossible request is refused, with what to do about it, and nothing is touched.
func TestPodmanRefusals(t *testing.T) {
	t.Parallel()
	p := newPodman(t)
	p.runsCommitted()
	p.ok("podman", "run", "-d", "--runtime", "runc", "--name", "plain", "bb", "sh", "-c", "echo old > /file; "+counter)
	p.reaches("plain", 5)
	p.ok("agentbox", "checkpoint", "podman://plain")
	p.ok("podman", "exec", "plain", "sh", "-c", "echo new > /file")
	at := p.count("plain")
	p.refused([]string{"only agentbox-runtime restores", "podman run --runtime agentbox", "--files-only"}, "agentbox",
		"restore", "podman://plain")
	p.reaches("plain", at+3)
	p.ok("agentbox", "restore", "--files-only", "podman://plain")
	if got := p.ok("podman", "exec", "plain", "cat", "/file"); got != "old" {
		t.Errorf("after a restore of the files: %s", got)
	}

	p.ok("podman", "run", "-d", "--rm", "--runtime", "agentbox", "--name", "fleeting", "bb", "sh", "-c", counter)
	p.ok("agentbox", "checkpoint", "podman://fleeting")
	p.refused([]string{"--rm"}, "agentbox", "restore", "podman://fleeting")
	if got := p.inspect("fleeting", "{{.State.Status}}"); got != "running" {
		t.Errorf("the --rm one is %s", got)
	}

	p.refused([]string{"backend podman tells of no image"}, "agentbox", "commit", "podman://plain", "x:1")
	p.refused([]string{"no such container"}, "agentbox", "checkpoint", "podman://nobody")
	p.refused([]string{"podman makes no sandboxes"}, "agentbox", "--backend", "podman", "run", "bb", "true")
}

// runsCommitted has Podman run what agentbox commits.
func (p *podmanBox) runsCommitted() {
	p.ok("agentbox", "run", "-d", "--name", "own", "--network", "none", "busybox", "sleep", "1000")
	p.ok("agentbox", "exec", "own", "sh", "-c", "echo own > /own; chmod 640 /own; chown 3:4 /own; rm /bin/vi")
	p.ok("agentbox", "commit", "-c", `CMD ["cat", "/own"]`, "own", "oci-archive:"+p.path("own.tar"))
	p.ok("agentbox", "rm", "-f", "own")
	if got := p.ok("podman", "run", "--rm", "oci-archive:"+p.path("own.tar")); got != "own" {
		p.Errorf("Podman runs it: %q", got)
	}
	if got := p.ok("podman", "run", "--rm", "oci-archive:"+p.path("own.tar"), "sh", "-c",
		"stat -c %a:%u:%g /own; ls /bin/vi 2>/dev/null || echo gone"); got != "640:3:4\ngone" {
		p.Errorf("Podman runs it: %q", got)
	}
}
