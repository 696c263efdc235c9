package test

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"syscall"
	"testing"
)

func TestIdentity(t *testing.T) {
	b := newBox(t)
	const tell = `echo $AGENTBOX_SANDBOX $AGENTBOX_SANDBOX_NAME $AGENTBOX_WORKDIR $AGENTBOX_ATTEMPT`
	b.start("me", "--network", "none", "-w", "/work dir", "busybox", "sh", "-c", tell+" > /said; sleep 1000")
	b.eventually("it has told", func() bool { return b.file("me", "said") != "" })
	id := b.inspect("me").ID
	want := func(attempt int) string { return fmt.Sprintf("%s me /work dir %d", id, attempt) }
	equal(b, "the first process", b.file("me", "said"), want(1))
	equal(b, "exec", b.sh("me", tell), want(1))
	files := b.checkpoint("--files-only", "me")
	full := b.checkpoint("me")
	b.ok("restore", "me", files)
	b.eventually("it has told again", func() bool { return b.file("me", "said") == want(2) })
	equal(b, "exec after the first restore", b.sh("me", tell), want(2))
	b.ok("restore", "me", full)
	equal(b, "exec after the second restore", b.sh("me", tell), want(3))
	// Processes that go on keep what they were told when they began.
	equal(b, "the first process, restored", b.file("me", "said"), want(1))
}

func TestConcurrent(t *testing.T) {
	b := newBox(t)
	var all sync.WaitGroup
	try := func(what string, code int, args ...string) bool {
		r := b.try(nil, args...)
		if r.code != code {
			t.Errorf("%s: want exit %d: %s", what, code, r)
		}
		return r.code == code
	}
	// Different sandboxes do not disturb each other.
	for i := range 4 {
		name := fmt.Sprintf("c%d", i)
		all.Go(func() {
			_ = try(name, 0, "run", "-d", "--name", name, "--network", "none", "busybox", "sh", "-c",
				"echo "+name+" > /name; "+counter) &&
				try(name, 0, "checkpoint", "--name", "one", name) &&
				try(name, 0, "exec", name, "sh", "-c", "echo lost > /name") &&
				try(name, 0, "restore", name) &&
				try(name, 0, "exec", name, "grep", "-x", name, "/name") &&
				try(name, 0, "stop", "-t", "0", name) &&
				try(name, 0, "start", name) &&
				try(name, 0, "rm", "-f", "--checkpoints", name)
		})
	}
	all.Wait()
	// One of several that want one name gets it.
	var mu sync.Mutex
	codes := map[int]int{}
	for range 4 {
		all.Go(func() {
			r := b.try(nil, "create", "--name", "same", "--network", "none", "busybox", "sleep", "1000")
			mu.Lock()
			defer mu.Unlock()
			codes[r.code]++
		})
	}
	all.Wait()
	if codes[0] != 1 || codes[4] != 3 {
		t.Errorf("exit codes of four that wanted one name: %v", codes)
	}
	// Verbs on one sandbox take turns or say that it is busy; none breaks it.
	b.ok("start", "same")
	for i := range 6 {
		verb := []string{"checkpoint", "same"}
		if i%2 == 1 {
			verb = []string{"restore", "same"}
		}
		all.Go(func() {
			if r := b.try(nil, verb...); r.code != 0 && r.code != 5 && r.code != 3 {
				t.Errorf("%s", r)
			}
		})
	}
	all.Wait()
	equal(b, "status", b.inspect("same").Status, "running")
	for _, ck := range b.checkpoints("same") {
		equal(b, "status of a checkpoint", ck.Status, "ready")
		b.ok("checkpoint", "verify", ck.ID)
	}
}

// TestMonitorKilled: without its conmon a sandbox can still be looked at,
// stopped, brought back and removed.
func TestMonitorKilled(t *testing.T) {
	b := newBox(t)
	b.start("c", "--network", "none", "busybox", "sh", "-c", "echo one > /marker; "+counter)
	b.reaches("c", 3)
	b.checkpoint("c")
	b.sh("c", "echo two > /marker")
	kill := func() {
		for _, p := range b.monitors() {
			pid, _ := strconv.Atoi(p)
			if err := syscall.Kill(pid, syscall.SIGKILL); err != nil && err != syscall.ESRCH { // that of a command ends with it
				t.Fatal(err)
			}
			b.noProcess(pid)
		}
	}
	kill()
	b.ok("ps", "-a")
	b.ok("recover")
	b.ok("restore", "c")
	equal(b, "status after the restore", b.inspect("c").Status, "running")
	equal(b, "marker", b.file("c", "marker"), "one")
	n := b.count("c")
	b.reaches("c", n+1)
	kill()
	b.ok("stop", "-t", "0", "c")
	equal(b, "status after stop", b.inspect("c").Status, "exited")
	b.ok("start", "c")
	b.reaches("c", 1)
	// It ends, and no process is there to see it.
	kill()
	pid := b.inspect("c").Pid
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	b.noProcess(pid)
	first, _ := b.find("c")
	equal(b, "exit code that nobody knows", first.ExitCode, 255)
	if again, _ := b.find("c"); first.Finished.IsZero() || !again.Finished.Equal(first.Finished) {
		t.Errorf("it ended at %v, and then at %v", first.Finished, again.Finished)
	}
	b.ok("restore", "--no-undo", "c")
	equal(b, "status after the restore", b.inspect("c").Status, "running")
	kill()
	b.ok("rm", "-f", "c")
}

// TestModes: what is written is for its owner alone. The root of a sandbox's user
// namespace passes the directories above the sandbox's own, which list nothing.
func TestModes(t *testing.T) {
	b := newBox(t)
	b.start("c", "--network", "none", "busybox", "sleep", "1000")
	ck := b.checkpoint("c")
	packs, _ := filepath.Glob(filepath.Join(b.root, "packs/*/*"))
	if len(packs) != 1 {
		t.Fatalf("packs: %q", packs)
	}
	pack, err := filepath.Rel(b.root, packs[0])
	if err != nil {
		t.Fatal(err)
	}
	look := func(path string, others, group uint32) {
		var st syscall.Stat_t
		if err := syscall.Lstat(filepath.Join(b.root, path), &st); err != nil {
			t.Error(err)
		} else if st.Mode&syscall.S_IFMT != syscall.S_IFLNK &&
			(st.Mode&0o007&^others != 0 || st.Mode&0o070 != 0 && st.Gid != group) {
			t.Errorf("%s has mode %o and belongs to %d:%d", path, st.Mode, st.Uid, st.Gid)
		}
	}
	for _, path := range []string{
		"checkpoints/" + ck, "checkpoints/" + ck + "/manifest.json", filepath.Dir(pack), pack,
	} {
		look(path, 0, ^uint32(0))
	}
	passed := []string{"", "sandboxes", "run"}
	group := uint32(idsOf(b, "c").Base)
	for _, dir := range passed {
		if group == 0 {
			look(dir, 0, ^uint32(0))
		} else {
			look(dir, 0o001, 0)
		}
		list, err := os.ReadDir(filepath.Join(b.root, dir))
		if err != nil {
			t.Error(err)
		}
		for _, e := range list {
			if path := filepath.Join(dir, e.Name()); !slices.Contains(passed, path) {
				look(path, 0, group)
			}
		}
	}
}
