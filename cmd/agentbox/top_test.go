package main

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/agentbox/agentbox/runtime"
)

// Two samples a second apart: one that is busy, one that idles, one that has been
// started again between them, one that has gone, and one that does not run.
func TestTop(t *testing.T) {
	disk := int64(1_234_567)
	f := newFake()
	n := 0
	f.stats = func(opts runtime.StatsOptions) []runtime.Stats {
		n++
		at := epoch.Add(time.Duration(n) * time.Second)
		idle := runtime.Stats{
			Sandbox: "1", Name: "idle", Status: runtime.Paused, Time: at, Started: epoch, CPU: time.Second,
			Memory: 3 << 20, Pids: 1,
		}
		busy := runtime.Stats{Sandbox: "2", Name: "busy", Status: runtime.Running, Time: at, Started: epoch,
			CPU:    time.Duration(n) * 1500 * time.Millisecond,
			Memory: 20 << 20, MemoryLimit: 64 << 20, Pids: 3, PidsLimit: 30, StorageLimit: 2 << 20,
			Checkpoint: epoch.Add(-2 * time.Minute)}
		again := runtime.Stats{
			Sandbox: "3", Name: "again", Status: runtime.Running, Time: at, Started: at, CPU: 5 * time.Second,
			Memory: 1 << 20, Pids: 1,
		}
		gone := runtime.Stats{
			Sandbox: "4", Name: "gone", Status: runtime.Running, Time: at, Started: epoch, CPU: time.Second, Pids: 1,
		}
		made := runtime.Stats{Sandbox: "5", Name: "made\x1b[2J", Status: runtime.Created, Time: at}
		if opts.Disk {
			idle.Disk, busy.Disk = &disk, &disk
		}
		list := []runtime.Stats{idle, busy, again, made}
		if n%2 == 1 {
			list = append(list, gone)
		}
		return list
	}
	r := try(t, f, "", "stats", "-a", "--no-stream", "--interval", "100ms")
	r.want(t, 0, `NAME       CPU %    MEM USAGE / LIMIT     PIDS   DISK     CHECKPOINT       STATUS
busy       150.0%   20MiB / 64MiB         3      1.23MB   2 minutes ago    running
idle       0.0%     3MiB / -              1      1.23MB   -                paused
again      -        1MiB / -              1      -        -                running
made�[2J   -        -                     -      -        -                created
`)
	r = try(t, f, "", "top", "--no-stream", "--interval", "100ms", "--format", "json", "--no-disk", "busy", "2")
	lines := strings.SplitAfter(strings.TrimSuffix(r.stdout, "\n"), "\n")
	const want = `{"sandbox":"2","name":"busy","status":"running","time":"2026-01-02T03:04:09.000006789Z","started":"2026-01-02T03:04:05.000006789Z","cpu_ns":6000000000,` +
		`"memory":20971520,"memory_limit":67108864,"pids":3,"pids_limit":30,"storage_limit":2097152,"checkpoint":"2026-01-02T03:02:05.000006789Z","cpu_percent":150}` + "\n"
	if r.code != 0 || len(lines) != 4 || lines[0] != want || !strings.Contains(lines[2], `"cpu_percent":null`) {
		t.Errorf("%d: %s%q", r.code, r.stderr, lines)
	}
	for _, l := range lines {
		if !json.Valid([]byte(l)) {
			t.Errorf("no JSON: %q", l)
		}
	}
	try(t, f, "", "top", "--interval", "10ms").want(t, exitUsage, "", "100ms at least")
	if want := []string{
		"Stats [] true false", "Stats [] true true", "Close", "Stats [busy 2] false false",
		"Stats [busy 2] false false", "Close",
	}; !slices.Equal(f.calls, want) {
		t.Errorf("calls %q, want %q", f.calls, want)
	}
}

// One that is named is followed until it is removed, the others go on.
func TestTopRemoved(t *testing.T) {
	f := boxes()
	f.stats = func(runtime.StatsOptions) []runtime.Stats {
		if len(f.calls) == 2 {
			f.fail["Stats"] = runtime.ErrNotFound
			f.sandboxes = slices.DeleteFunc(f.sandboxes, func(sb runtime.Sandbox) bool { return sb.Name == "run" })
		}
		return []runtime.Stats{{Sandbox: "1", Name: "run"}}
	}
	r := try(t, f, "", "top", "--interval", "100ms", "run")
	if r.code != 0 || strings.Count(r.stdout, "NAME") != 1 || r.stderr != "" {
		t.Errorf("%d: %s%s", r.code, r.stdout, r.stderr)
	}
	try(t, f, "", "top", "run").want(t, exitNotFound, "", "not found")
}

// A frame is never wider or higher than the screen.
func TestTopFrame(t *testing.T) {
	table := "NAME\n"
	for i := range 10_000 {
		table += fmt.Sprintf("sandbox-%d   0.0%%\n", i)
	}
	if got, want := frame(table, 12, 5),
		"\x1b[HNAME\x1b[K\nsandbox-0   \x1b[K\nsandbox-1   \x1b[K\nand 9998 mor\x1b[K\n\x1b[J"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
	if got := frame(table, 0, 0); strings.Count(got, "\n") != 10_001 {
		t.Errorf("without a size: %d lines", strings.Count(got, "\n"))
	}
}
