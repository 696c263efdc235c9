package test

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/agentbox/agentbox/criu"
	"github.com/agentbox/agentbox/internal/thorough"
	"github.com/agentbox/agentbox/runtime"
)

// tracks tells whether memory can be written ahead on this host.
func tracks(t *testing.T) bool {
	t.Helper()
	lacks, err := criu.DirtyTracking(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	if lacks != "" {
		t.Log(lacks)
	}
	return lacks == ""
}

const notAhead = "memory was not written ahead"

// A sandbox whose memory changes and moves all the time is checkpointed with
// --pre-dump, restored and forked: the process itself ends when any of its memory
// is not that of one instant. A kernel that cannot takes an ordinary checkpoint.
func TestPreDump(t *testing.T) {
	t.Parallel()
	mb, rounds := 128, 2
	if patience > 1 {
		mb, rounds = 64, 1
	}
	if thorough.Asked() {
		rounds = 20
	}
	b := newBox(t)
	b.ok("image", "import", "ahead", programRoot(b.T, "ahead"))
	b.start("m", "--network", "none", "ahead", "/ahead", strconv.Itoa(mb))
	grows := func(name string) {
		b.Helper()
		rounds := func() int { return strings.Count(b.ok("logs", name), "round ") }
		last := rounds()
		b.eventually(name+" goes on with its memory", func() bool {
			if s := b.inspect(name); s.Status != "running" {
				log := b.ok("logs", "--tail", "3", name)
				b.Fatalf("%s is %s: %s", name, s.Status, log)
			}
			return rounds() > last+1
		})
	}
	grows("m")
	can := tracks(t)
	take := func(args ...string) (runtime.Checkpoint, result) {
		b.Helper()
		r := b.try(nil, append(append([]string{"checkpoint", "--format", "json"}, args...), "m")...)
		if r.code != 0 {
			b.Fatal(r)
		}
		return decode[runtime.Checkpoint](b, r.out), r
	}
	for range rounds {
		plain, _ := take()
		grows("m")
		ck, r := take("--pre-dump")
		told := decode[[]runtime.Checkpoint](b, b.ok("checkpoint", "inspect", ck.ID))[0]
		switch {
		case ck.Status != "ready" || ck.Kind != runtime.KindFull || told.Ahead != ck.Ahead || told.Frozen != ck.Frozen:
			t.Errorf("%+v, and inspect: %+v", ck, told)
		case can && (ck.Ahead < int64(mb)<<20/2 || strings.Contains(r.err, "warning")):
			t.Errorf("%d bytes written ahead, of %d MB: %s", ck.Ahead, mb, r.err)
		case !can && (ck.Ahead != 0 || !strings.Contains(r.err, notAhead) || len(ck.Warnings) != 1):
			t.Errorf("what this kernel cannot: %d bytes, %s", ck.Ahead, r.err)
		}
		t.Logf("frozen %v; with --pre-dump %v, %d bytes written ahead", plain.Frozen, ck.Frozen, ck.Ahead)
		grows("m")
		b.ok("restore", "--no-undo", "m", ck.ID)
		grows("m")
		b.ok("checkpoint", "verify", ck.ID)
	}
	b.own("f")
	b.ok("fork", "--name", "f", "m")
	grows("f")

	// Where there is nothing to write ahead it says so.
	b.ok("pause", "m")
	if r := b.try(nil, "checkpoint", "--pre-dump", "m"); r.code != 0 || !strings.Contains(r.err, notAhead+": it stands still") {
		t.Error(r)
	}
	b.ok("unpause", "m")
	b.fails(2, "checkpoint", "--pre-dump", "--files-only", "m")
	if can {
		b.spoiltAhead("m")
		grows("m")
		b.killedAhead("m", grows)
	}
	b.ok("stop", "-t", "0", "m")
	if r := b.try(nil, "checkpoint", "--pre-dump", "m"); r.code != 0 || !strings.Contains(r.err, notAhead+": no processes") {
		t.Error(r)
	}
}

// spoiltAhead damages what was written ahead before it is used: the checkpoint is
// taken again, without.
func (b *box) spoiltAhead(name string) {
	b.Helper()
	cmd := b.command(context.Background(), "checkpoint", "--pre-dump", "--format", "json", name)
	cmd.Env = append(cmd.Env, failpoint("checkpoint.before-freeze", "stop")...)
	var out bytes.Buffer
	cmd.Stdout = &out
	if err := cmd.Start(); err != nil {
		b.Fatal(err)
	}
	var pages []string
	b.eventually("it is about to freeze", func() bool {
		stat := b.read(fmt.Sprintf("/proc/%d/stat", cmd.Process.Pid))
		pages, _ = filepath.Glob(filepath.Join(b.root, "checkpoints", "*", "ahead", "pages-*.img"))
		return strings.Contains(stat, ") T ") && len(pages) > 0
	})
	for _, p := range pages {
		if err := os.Truncate(p, 4096); err != nil {
			b.Error(err)
		}
	}
	ended := make(chan error)
	go func() { ended <- cmd.Wait() }()
	for {
		select {
		case err := <-ended:
			ck := decode[runtime.Checkpoint](b, out.String())
			if err != nil || ck.Ahead != 0 || len(ck.Warnings) != 1 || !strings.Contains(ck.Warnings[0], "written ahead could not be used") {
				b.Errorf("%v: %+v", err, ck)
			}
			b.ok("restore", "--no-undo", name, ck.ID)
			return
		case <-time.After(100 * time.Millisecond): // it stops each time that it tries
			_ = cmd.Process.Signal(syscall.SIGCONT)
		}
	}
}

// killedAhead kills agentbox while CRIU writes memory ahead, and later.
func (b *box) killedAhead(name string, grows func(string)) {
	b.Helper()
	for _, when := range []string{"ahead-work/dump.log", "ahead/pages-*.img", "ahead/inventory.img", "work/dump.log"} {
		cmd := b.command(context.Background(), "checkpoint", "--pre-dump", name)
		if err := cmd.Start(); err != nil {
			b.Fatal(err)
		}
		drafts := filepath.Join(b.root, "checkpoints", "*", when)
		for deadline := time.Now().Add(time.Minute * patience); ; time.Sleep(time.Millisecond) {
			if found, _ := filepath.Glob(drafts); len(found) > 0 {
				break
			}
			if time.Now().After(deadline) {
				b.Errorf("nothing ever is at %s", when)
				break
			}
		}
		if err := cmd.Process.Kill(); err != nil {
			b.Fatal(err)
		}
		_ = cmd.Wait()
		b.Logf("killed at %s: %s", when, b.ok("recover"))
		grows(name)
	}
	if left, _ := filepath.Glob(filepath.Join(b.root, "checkpoints", "*", "ahead*")); len(left) > 0 {
		b.Errorf("left: %v", left)
	}
}

// Calls that wait see neither of the two times that they stand still.
func TestPreDumpWaits(t *testing.T) {
	t.Parallel()
	limit := 8 * time.Second
	if tracks(t) {
		limit *= patience
	}
	waits(t, limit, "--pre-dump")
}
