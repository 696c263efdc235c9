package test

import (
	"strings"
	"testing"
	"time"

	"github.com/agentbox/agentbox/runtime"
)

type usageLine struct {
	runtime.Stats
	CPUPercent *float64 `json:"cpu_percent"`
}

// Sandboxes use about what they were made to use, and their limits are exactly what they were
// given, with and without the service; a user at a terminal sees one table, and ends it.
func TestTop(t *testing.T) {
	t.Parallel()
	b := memoryBox(t)
	b.start("busy", "-m", "96m", "--pids-limit", "30", "--storage-size", "50m", "--network",
		"none", "busybox", "sh", "-c",
		"dd if=/dev/zero of=/dev/shm/held bs=1M count=24; dd if=/dev/zero of=/kept bs=1M count=5; sleep 1000 & touch /ready; while :; do :; done")
	b.start("idle", "--network", "none", "busybox", "sleep", "1000")
	b.eventually("it has taken all it takes", func() bool {
		return b.try(nil, "exec", "busy", "test", "-e", "/ready").code == 0
	})
	b.ok("checkpoint", "--files-only", "busy")
	b.ok("create", "--name", "made", "busybox", "true")
	b.own("made")
	b.ok("pause", "idle")
	look := func() {
		t.Helper()
		got := map[string]usageLine{}
		text := b.ok("top", "-a", "--no-stream", "--format", "json")
		for line := range strings.Lines(text) {
			l := decode[usageLine](b, line)
			got[l.Name] = l
		}
		busy, idle, made := got["busy"], got["idle"], got["made"]
		if len(got) != 3 || busy.CPUPercent == nil || idle.CPUPercent == nil || made.CPUPercent != nil {
			t.Fatalf("%s", text)
		}
		// Others want the processors, too, and there may be dozens of them.
		if share := *busy.CPUPercent; share < 0.5 || share > 150 || *idle.CPUPercent > 0.1 ||
			busy.CPU < 10*time.Millisecond {
			t.Errorf("CPU: %s", text)
		}
		const mib = 1 << 20
		if busy.Memory < 24*mib || busy.Memory > 48*mib || idle.Memory <= 0 ||
			idle.Memory > 16*mib || made.Memory != 0 {
			t.Errorf("memory: %s", text)
		}
		if busy.MemoryLimit != 96*mib || busy.PidsLimit != 30 || busy.StorageLimit != 50*mib || idle.MemoryLimit != 0 {
			t.Errorf("limits: %s", text)
		}
		if busy.Pids != 2 || idle.Pids != 1 || made.Pids != 0 {
			t.Errorf("processes: %s", text)
		}
		if busy.Disk == nil || *busy.Disk < 5*mib || *busy.Disk > 6*mib || idle.Disk == nil ||
			*idle.Disk > mib || made.Disk == nil {
			t.Errorf("disk: %s", text)
		}
		if since := busy.Time.Sub(busy.Checkpoint); since <= 0 || since > time.Hour || !idle.Checkpoint.IsZero() {
			t.Errorf("checkpoints: %s", text)
		}
		if busy.Status != runtime.Running || idle.Status != runtime.Paused || made.Status != runtime.Created {
			t.Errorf("status: %s", text)
		}
		b.fails(3, "top", "nobody")

		m := b.terminal("stats", "--interval", "200ms", "busy", "idle")
		const top = "\x1b[HNAME   CPU %"
		m.shows(top)
		b.eventually("it is drawn again", func() bool { return strings.Count(m.screen(), top) > 2 })
		m.enter("\x03")
		if code := m.ends(); code != 0 || strings.Contains(m.screen(), "made") ||
			!strings.Contains(m.screen(), " / 96MiB ") || !strings.Contains(m.screen(), " 5.24MB ") {
			t.Errorf("exit %d: %q", code, m.screen())
		}
	}
	look()
	cmd, _ := b.serve()
	look()
	// One that goes does not end it for the other.
	m := b.terminal("top", "--interval", "200ms", "busy", "made")
	m.shows("made")
	b.ok("rm", "made")
	before := len(m.screen())
	b.eventually("made is gone from the table", func() bool {
		frames := strings.Split(m.screen()[before:], "\x1b[H")
		return len(frames) > 2 && strings.Contains(frames[len(frames)-2], "busy") &&
			!strings.Contains(frames[len(frames)-2], "made")
	})
	b.ok("rm", "-f", "--checkpoints", "busy")
	if code := m.ends(); code != 0 {
		t.Errorf("exit %d: %q", code, m.screen())
	}
	if cmd.ProcessState != nil {
		t.Error("the service has ended")
	}
}
