package test

import (
	"context"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

// hang begins a verb and stops the CRIU that it runs, by SIGSTOP. The result comes when the
// verb has ended.
func (b *box) hang(args ...string) <-chan result {
	b.Helper()
	done := make(chan result, 1)
	go func() { done <- b.try(nil, args...) }()
	for end := time.Now().Add(time.Minute * patience); time.Now().Before(end); {
		if pid := b.criu(); pid != 0 && syscall.Kill(pid, syscall.SIGSTOP) == nil {
			return done
		}
		select {
		case r := <-done: // it was quicker than we
			b.ok("ps")
			go func() { done <- b.try(nil, args...) }()
			if r.code != 0 {
				b.Fatalf("%v: %s", args, r)
			}
		default:
		}
	}
	b.Fatalf("%v runs no CRIU", args)
	return nil
}

// criu finds a CRIU that works for this root, by what it has open.
func (b *box) criu() int {
	comms, _ := filepath.Glob("/proc/[0-9]*/comm")
	for _, comm := range comms {
		if data, _ := os.ReadFile(comm); strings.TrimSpace(string(data)) != "criu" {
			continue
		}
		fds, _ := filepath.Glob(filepath.Dir(comm) + "/fd/*")
		for _, fd := range fds {
			if link, _ := os.Readlink(fd); strings.HasPrefix(link, b.root+"/") && strings.HasSuffix(link, ".log") {
				pid, _ := strconv.Atoi(filepath.Base(filepath.Dir(comm)))
				return pid
			}
		}
	}
	return 0
}

// TestHangingCRIU has a CRIU that does not go on: the verb ends by its timeout, says where
// CRIU stood, and the sandbox goes on, or is as it was.
func TestHangingCRIU(t *testing.T) {
	b := newBox(t)
	b.start("s", "--network", "none", "busybox", "sh", "-c", counter)
	b.reaches("s", 3)
	goesOn := func(when string) {
		b.Helper()
		n := b.count("s")
		b.eventually(when+": it counts on", func() bool { return b.count("s") > n })
	}
	ended := func(what string, done <-chan result) result {
		b.Helper()
		select {
		case r := <-done:
			if r.code == 0 || !strings.Contains(r.err, "CRIU") {
				b.Errorf("%s: %s", what, r)
			}
			return r
		case <-time.After(time.Minute * patience):
			b.Fatalf("%s has not ended", what)
			return result{}
		}
	}
	done := b.hang("checkpoint", "s", "--timeout", "3s")
	b.eventually("ps says what goes on", func() bool { return strings.Contains(b.ok("ps"), "Checkpointing") })
	ended("a checkpoint", done)
	goesOn("after a checkpoint that hung")
	one := b.checkpoint("s")

	ended("a restore", b.hang("restore", "s", one, "--no-undo", "--timeout", "3s"))
	if status := b.inspect("s").Status; status != "exited" && status != "running" {
		t.Errorf("after a restore that hung it is %s", status)
	}
	b.ok("restore", "s", one)
	goesOn("after the restore")

	done = b.hang("checkpoint", "s")
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute*patience)
	defer cancel()
	if out, err := b.command(ctx, "rm", "-f", "s").CombinedOutput(); err != nil {
		t.Errorf("rm -f of a sandbox whose checkpoint hangs: %v: %s", err, out)
	}
	ended("the checkpoint of a removed sandbox", done)
}
