package test

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/api"
)

// killAll ends every process of a root with SIGKILL, the sandboxes' own too, and
// waits until there is none.
func (b *box) killAll() {
	b.Helper()
	b.eventually("all processes of the root are gone", func() bool {
		found := processesOf(b.root)
		for _, id := range b.ids() {
			for _, pid := range insiders(id) {
				found = append(found, "process "+pid+":")
			}
		}
		for _, line := range found {
			var pid int
			if n, _ := fmt.Sscanf(line, "process %d", &pid); n == 1 {
				_ = unix.Kill(pid, unix.SIGKILL)
			}
		}
		return len(found) == 0
	})
}

// powerCut leaves of a root what a reboot leaves.
func (b *box) powerCut() {
	b.Helper()
	b.killAll()
	for range 5 { // mounts on mounts
		for _, m := range mountsUnder(b.root) {
			_ = unix.Unmount(strings.TrimPrefix(m, "mount "), unix.MNT_DETACH)
		}
	}
	_ = filepath.WalkDir("/sys/fs/cgroup", func(path string, d os.DirEntry, err error) error {
		if err == nil && d.IsDir() {
			for _, id := range b.ids() {
				if strings.Contains(d.Name(), id) {
					_ = unix.Rmdir(path)
					return filepath.SkipDir
				}
			}
		}
		return nil
	})
	for _, l := range b.netLeft() {
		if name, ok := strings.CutPrefix(l, "network device "); ok {
			_ = exec.Command("ip", "link", "del", name).Run()
		}
	}
	sum := sha256.Sum256([]byte(b.root))
	_ = exec.Command("nft", "delete", "table", "ip", "agentbox_"+hex.EncodeToString(sum[:6])).Run()
	if err := os.RemoveAll(filepath.Join(b.root, "run")); err != nil {
		b.Fatal(err)
	}
	// Another boot than the one that is on record.
	files, _ := filepath.Glob(filepath.Join(b.root, "restarts", "*"))
	for _, f := range files {
		text := b.read(f)
		i := strings.Index(text, `"boot": "`)
		if i < 0 {
			b.Fatalf("%s: %s", f, text)
		}
		if err := os.WriteFile(f, []byte(text[:i+9]+"another"+text[i+9:]), 0o600); err != nil {
			b.Fatal(err)
		}
	}
	marks, _ := filepath.Glob(filepath.Join(b.root, "supervised", "*"))
	for _, f := range marks {
		if err := os.WriteFile(f, []byte("another"+b.read(f)), 0o600); err != nil {
			b.Fatal(err)
		}
	}
}

// The host goes down with everything, and comes up: what comes back is what its
// restart policy says, the rest is stopped, with its files and checkpoints, and
// nothing is left of what they held.
func TestReconcileAfterReboot(t *testing.T) {
	t.Parallel()
	for _, wiped := range []bool{false, true} {
		t.Run(fmt.Sprintf("wiped=%v", wiped), func(t *testing.T) {
			t.Parallel()
			b := memoryBox(t)
			serve, _ := b.serve()
			b.start("plain", "--network", "bridge", "busybox", "sh", "-c", counter)
			b.start("always", "--network", "none", "--restart", "always", "busybox", "sh", "-c", counter)
			b.start("stopped", "--network", "none", "--restart", "always", "busybox", "sh", "-c", counter)
			b.start("unless", "--network", "none", "--restart", "unless-stopped", "busybox", "sh", "-c", counter)
			b.start("failing", "--network", "none", "--restart", "on-failure:3", "busybox", "sh", "-c", counter)
			b.start("head", "--network", "none", "--restart", "unless-stopped", "--restart-from", "head",
				"busybox", "sh", "-c", counter)
			b.start("every", "--network", "none", "--checkpoint-every", "1h", "busybox", "sh", "-c", counter)
			b.sh("plain", "echo precious > /work")
			b.reaches("head", 5)
			at := b.count("head")
			ck := b.checkpoint("head")
			b.reaches("head", at+3)
			b.ok("stop", "-t", "0", "stopped")
			b.ok("stop", "-t", "0", "unless")
			if wiped {
				b.powerCut()
			} else {
				b.killAll()
			}
			_ = serve.Wait()
			before := b.ids()
			_, socket := b.serve()
			c := api.Dial(socket)
			defer c.Close()
			want := map[string]string{
				"plain": "exited", "always": "running", "stopped": "exited", "unless": "exited", "failing": "running",
				"head": "running", "every": "exited",
			}
			if wiped { // the end of the host is no failure, and always means always
				want["failing"], want["stopped"] = "exited", "running"
			}
			b.eventually("all are as they are to be", func() bool {
				for name, status := range want {
					if b.inspect(name).Status != status {
						return false
					}
				}
				return true
			})
			if n := b.count("head"); n < at {
				t.Errorf("head is at %d, its checkpoint %s at %d", n, ck, at)
			}
			equal(b, "exit code of one whose end nobody saw", b.inspect("plain").ExitCode, 255)
			if got := b.ok("events", "--type", "reconciled", "plain"); !wiped &&
				!strings.Contains(got, "exit code 255") {
				t.Errorf("events of plain: %q", got)
			}
			if got := b.ok("events", "--type", "restarted", "always"); !strings.Contains(got, "restart 1") {
				t.Errorf("events of always: %q", got)
			}
			b.ok("start", "plain")
			equal(b, "the file", strings.TrimSpace(b.file("plain", "work")), "precious")
			b.ok("recover")
			report := decode[runtime.ReconcileReport](b, b.ok("recover", "--format", "json"))
			if len(report.Findings) > 0 || report.Sandboxes != len(want) {
				t.Errorf("recover once more: %+v", report)
			}
			equal(b, "ids", len(before) >= len(want), true)
		})
	}
}

// A leftover that looks like a sandbox of this root and has no record is freed; one that belongs
// to another root is not.
func TestReconcileStrays(t *testing.T) {
	t.Parallel()
	b, other := memoryBox(t), memoryBox(t)
	b.start("a", "--network", "bridge", "busybox", "sleep", "1000")
	other.start("o", "--network", "bridge", "busybox", "sleep", "1000")
	id := b.inspect("a").ID
	groups, _ := filepath.Glob("/sys/fs/cgroup/*/agentbox/" + id + "-*")
	unified, _ := filepath.Glob("/sys/fs/cgroup/agentbox/" + id + "-*")
	if groups = append(groups, unified...); len(groups) == 0 {
		t.Fatal("no cgroups")
	}
	stray := strings.Repeat("5a", 16)
	sleep := exec.Command("sleep", "1000")
	if err := sleep.Start(); err != nil {
		t.Fatal(err)
	}
	group := strings.Replace(groups[0], id, stray, 1)
	if err := os.Mkdir(group, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(group, "cgroup.procs"), fmt.Append(nil, sleep.Process.Pid), 0); err != nil {
		t.Fatal(err)
	}
	mounted := filepath.Join(b.root, "sandboxes", strings.Repeat("5b", 16), "merged")
	if err := os.MkdirAll(mounted, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("x", mounted, "tmpfs", 0, ""); err != nil {
		t.Fatal(err)
	}
	sum := sha256.Sum256([]byte(b.root))
	table := "agentbox_" + hex.EncodeToString(sum[:6])
	if out, err := exec.Command("nft", "delete", "table", "ip", table).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	if err := exec.Command("ip", "link", "add", "abx"+table[9:15]+"-77", "type", "bridge").Run(); err != nil {
		t.Fatal(err)
	}
	pid, theirs := b.inspect("a").Pid, other.inspect("o").Pid
	report := decode[runtime.ReconcileReport](b, b.ok("recover", "--format", "json"))
	if report.Counts[runtime.FoundStray] != 2 || report.Counts[runtime.FoundHost] != 2 || report.Failed > 0 ||
		len(report.Findings) != 4 {
		t.Errorf("%+v", report)
	}
	err := sleep.Wait()
	var exit *exec.ExitError
	if !errors.As(err, &exit) || exit.Sys().(syscall.WaitStatus).Signal() != syscall.SIGKILL {
		t.Errorf("the stray process: %v", err)
	}
	equal(b, "pid of a", b.inspect("a").Pid, pid)
	equal(b, "what other finds", other.ok("recover"), "nothing to recover")
	equal(b, "pid of o", other.inspect("o").Pid, theirs)
	if out, err := exec.Command("nft", "list", "table", "ip", table).CombinedOutput(); err != nil {
		t.Errorf("the rules are not there again: %v: %s", err, out)
	}
	equal(b, "once more", b.ok("recover"), "nothing to recover")
}

// The records are compared with what there is, again and again, while others use
// every verb: no sandbox is harmed, and nothing is found that is not so.
func TestReconcileRace(t *testing.T) {
	t.Parallel()
	b := memoryBox(t)
	_, socket := b.serve("AGENTBOX_FAILPOINT=")
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	found := make(chan error, 1)
	go func() {
		c := api.Dial(socket)
		defer c.Close()
		for ctx.Err() == nil {
			report, err := c.Reconcile(ctx)
			for _, f := range report.Findings {
				if f.Kind != runtime.FoundEnded || f.Error != "" {
					err = errors.Join(err, fmt.Errorf("%+v", f))
				}
			}
			if err != nil && ctx.Err() == nil && !errors.Is(err, runtime.ErrBusy) {
				found <- err
				return
			}
		}
		found <- nil
	}()
	var all sync.WaitGroup
	for i := range 4 {
		all.Go(func() {
			c := api.Dial(socket)
			defer c.Close()
			for n := range 4 {
				if err := cycle(ctx, c, fmt.Sprintf("w%d-%d", i, n)); err != nil {
					t.Errorf("worker %d, cycle %d: %v", i, n, err)
					return
				}
			}
		})
	}
	all.Wait()
	cancel()
	if err := <-found; err != nil {
		t.Error(err)
	}
}

// patient repeats fn while another command is at work.
func patient(ctx context.Context, fn func() error) (err error) {
	for range 200 {
		if err = fn(); !errors.Is(err, runtime.ErrBusy) || ctx.Err() != nil {
			return err
		}
		time.Sleep(time.Duration(50+rand.IntN(50)) * time.Millisecond)
	}
	return err
}

// cycle runs a sandbox, takes a checkpoint, changes it, restores it, proves it and
// removes it with all that was made of it.
func cycle(ctx context.Context, c *api.Client, name string) error {
	return leasedCycle(ctx, c, name, "")
}

// leasedCycle is cycle of a sandbox that belongs to a lease.
func leasedCycle(ctx context.Context, c *api.Client, name, lease string) error {
	sb, err := c.Create(ctx, runtime.CreateRequest{Lease: lease, Spec: runtime.Spec{
		Name: name, Image: "busybox", Args: []string{"sh", "-c", "echo one > /f; while :; do sleep 0.1; done"},
		Network: runtime.Network{Mode: runtime.NetworkNone},
	}})
	if err != nil {
		return fmt.Errorf("create: %w", err)
	}
	steps := []struct {
		verb string
		do   func() error
	}{
		{"start", func() error { _, err := c.Start(ctx, sb.ID, nil); return err }},
		{"write", func() error { return command(ctx, c, sb.ID, "echo two > /f") }},
		{"checkpoint", func() error {
			_, err := c.Checkpoint(ctx, sb.ID, runtime.CheckpointOptions{Temporary: lease != ""})
			return err
		}},
		{"change", func() error { return command(ctx, c, sb.ID, "echo three > /f; echo new > /new") }},
		{"restore", func() error { _, err := c.Restore(ctx, sb.ID, runtime.RestoreOptions{}); return err }},
		{"proof", func() error { return command(ctx, c, sb.ID, `[ "$(cat /f)" = two ] && [ ! -e /new ]`) }},
		{"rm", func() error {
			return c.Remove(ctx, sb.ID, runtime.RemoveOptions{Force: true, Checkpoints: true})
		}},
	}
	for _, step := range steps {
		if err := patient(ctx, step.do); err != nil {
			return fmt.Errorf("%s of %s: %w", step.verb, sb.ID, err)
		}
	}
	return nil
}

func command(ctx context.Context, c *api.Client, id, script string) error {
	code, err := c.Exec(ctx, id, runtime.Process{Args: []string{"sh", "-c", script}}, runtime.Streams{})
	if err == nil && code != 0 {
		err = fmt.Errorf("%s: exit code %d", script, code)
	}
	return err
}

// Checkpoints at an interval of what does not change add next to nothing, those of
// files nothing at all, and
// where the process that takes them has died, recover has it started again.
func TestServiceUpkeep(t *testing.T) {
	t.Parallel()
	b := memoryBox(t)
	_, _ = b.serve()
	b.start("s", "--network", "none", "--checkpoint-every", "1s", "busybox", "sleep", "1000")
	b.eventually("its checkpoints are taken", func() bool { return len(b.checkpoints("s")) >= 2 })
	// Unchanged data costs nothing: one checkpoint has what they all need.
	packs := func() (n int64) {
		files, _ := filepath.Glob(filepath.Join(b.root, "packs", "*", "*"))
		for _, f := range files {
			if st, err := os.Stat(f); err == nil {
				n += st.Size()
			}
		}
		return n
	}
	n, size := len(b.checkpoints("s")), packs()
	b.eventually("more checkpoints are taken", func() bool { return len(b.checkpoints("s")) >= n+2 })
	if taken := int64(len(b.checkpoints("s")) - n + 1); packs()-size > taken*(4<<10) { // what CRIU says of clocks
		t.Errorf("%d checkpoints of what did not change cost %d bytes", taken, packs()-size)
	}
	// A child that has not become its program yet looks like another one.
	b.eventually("one process takes its checkpoints", func() bool {
		return len(matching(processesOf(b.root), " supervise ")) == 1
	})
	b.killSupervisor()
	b.ok("recover")
	b.awaitSupervisor(true)
	n = len(b.checkpoints("s"))
	b.eventually("they are taken again", func() bool { return len(b.checkpoints("s")) > n })

	b.start("f", "--network", "none", "busybox", "sleep", "1000")
	b.checkpoint("--files-only", "f")
	b.ok("stop", "-t", "0", "s")
	b.awaitSupervisor(false)
	size = packs()
	b.checkpoint("--files-only", "f")
	equal(b, "bytes that a checkpoint of unchanged files costs", packs()-size, 0)
}

// TestServicePrunes has the service killed on the way to freeing space; the next
// does it.
func TestServicePrunes(t *testing.T) {
	t.Parallel()
	b := memoryBox(t)
	policy := filepath.Join(t.TempDir(), "short.yaml")
	if err := os.WriteFile(policy, []byte("checkpoints: {keep_last: 1}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	b.start("s", "--network", "none", "--policy", policy, "busybox", "sleep", "1000")
	for i := range 3 {
		b.sh("s", fmt.Sprintf("dd if=/dev/urandom of=/f%d bs=64k count=16 2>/dev/null; rm -f /f%d", i, i-1))
		b.checkpoint("--files-only", "s")
	}
	waste := decode[runtime.Usage](b, b.ok("df", "--format", "json")).Stored
	b.serveArgs = []string{"--prune", "50ms", "--prune-rate", "1m"}
	killed, _ := b.serve("AGENTBOX_FAILPOINT=prune.before-reclaim=kill")
	_ = killed.Wait()
	equal(b, "checkpoints", len(b.checkpoints("s")), 1)
	_, _ = b.serve()
	b.eventually("the space is free", func() bool {
		return decode[runtime.Usage](b, b.ok("df", "--format", "json")).Stored < waste/2
	})
	b.ok("verify", "--all", "--read-data")
	if left := b.checkpoints("s"); len(left) != 1 || !slices.ContainsFunc(left, func(c checkpoint) bool {
		return c.Status == "ready"
	}) {
		t.Errorf("%+v", left)
	}
}
