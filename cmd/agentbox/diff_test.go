package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/agentbox/agentbox/runtime"
)

func changed() *fakeService {
	f := boxes()
	file := func(size int64) *runtime.FileState {
		return &runtime.FileState{Type: "file", Mode: "0644", Size: size}
	}
	f.diff = runtime.Diff{Sandbox: f.sandboxes[1].ID, SandboxName: "run",
		From: runtime.DiffState{Kind: runtime.DiffOfImage}, To: runtime.DiffState{Kind: runtime.DiffOfNow},
		Changes: []runtime.Change{
			{Path: "/a b", Change: "A", Type: "file", New: file(1500)},
			{Path: "/d", Change: "A", Type: "dir", New: &runtime.FileState{Type: "dir"}},
			{
				Path: "/etc/x", Change: "M", Type: "file", What: []string{"content", "mtime"},
				Old: file(120), New: file(140),
			},
			{Path: "/evil\n\x1b[31m", Change: "D", Type: "file", Old: file(7)},
			{
				Path: "/l\uFFFD", PathB64: "L2z/", Change: "T", Type: "symlink", What: []string{"type"}, Old: file(0),
				New: &runtime.FileState{Type: "symlink"},
			},
			{Path: "/new", From: "/old", Change: "R", Type: "file", What: []string{"mode"}, Old: file(9), New: file(9)},
		}}
	return f
}

func TestDiffOutput(t *testing.T) {
	try(t, changed(), "", "diff", "run").want(t, 0, `A /a b
A /d
M /etc/x
D "/evil\n\x1b[31m"
T "/l\xff"
R /old -> /new
`)
	try(t, changed(), "", "diff", "--name-only", "run").want(t, 0,
		"/a b\n/d\n/etc/x\n\"/evil\\n\\x1b[31m\"\n\"/l\\xff\"\n/new\n")
	try(t, changed(), "", "diff", "-z", "run").want(t, 0,
		"A /a b\x00A /d\x00M /etc/x\x00D /evil\n\x1b[31m\x00T /l\xff\x00R /old\x00/new\x00")
	try(t, changed(), "", "diff", "--stat", "run").want(t, 0, `CHANGE   PATH                SIZE           WHAT
A        /a b                - -> 1.5kB     
A        /d                  -              dir
M        /etc/x              120B -> 140B   content mtime
D        "/evil\n\x1b[31m"   7B -> -        
T        "/l\xff"            0B -> -        file -> symlink
R        /old -> /new        9B             mode
6 paths changed, 2 added, 1 modified, 1 deleted, 1 of another type, 1 renamed, +1.52kB, -7B
`)
	try(t, boxes(), "", "diff", "--stat", "run").want(t, 0, "0 paths changed\n")
	try(t, boxes(), "", "diff", "run").want(t, 0, "")
	more := changed()
	more.diff.Truncated = true
	if r := try(t, more, "", "diff", "--name-only", "run"); r.code != 0 ||
		r.stderr != "warning: only the first 6 changes are listed\n" {
		t.Errorf("%+v", r)
	}
}

func TestDiffJSON(t *testing.T) {
	var got map[string]any
	r := try(t, changed(), "", "diff", "--format", "json", "run")
	if err := json.Unmarshal([]byte(r.stdout), &got); err != nil || r.code != 0 {
		t.Fatal(err, r)
	}
	if d := cmp.Diff([]string{"changes", "from", "sandbox", "sandbox_name", "to", "truncated"},
		slices.Sorted(maps.Keys(got))); d != "" {
		t.Error(d)
	}
	change := got["changes"].([]any)[2].(map[string]any)
	if d := cmp.Diff([]string{"change", "new", "old", "path", "type", "what"},
		slices.Sorted(maps.Keys(change))); d != "" {
		t.Error(d)
	}
	if d := cmp.Diff([]string{"gid", "mode", "size", "type", "uid"},
		slices.Sorted(maps.Keys(change["old"].(map[string]any)))); d != "" {
		t.Error(d)
	}
	if r := try(t, boxes(), "", "diff", "--format", "json", "run"); !strings.Contains(r.stdout, `"changes": []`) {
		t.Error(r.stdout)
	}
}

func TestDiffExitCode(t *testing.T) {
	try(t, changed(), "", "diff", "--quiet", "run").want(t, 1, "")
	try(t, boxes(), "", "diff", "--quiet", "run").want(t, 0, "")
	try(t, changed(), "", "diff", "--exit-code", "--name-only", "run").want(t, 1,
		try(t, changed(), "", "diff", "--name-only", "run").stdout)
	try(t, boxes(), "", "diff", "--exit-code", "run").want(t, 0, "")
	f := changed()
	f.fail["Diff"] = errors.New("broken disk")
	try(t, f, "", "diff", "run").want(t, 1, "", "agentbox: broken disk")
	try(t, f, "", "diff", "--exit-code", "run").want(t, exitAgentbox, "", "agentbox: broken disk")
	f.fail["Diff"] = fmt.Errorf("tree: %w", runtime.ErrCorrupt)
	try(t, f, "", "diff", "--exit-code", "run").want(t, exitCorrupt, "", "agentbox: tree: corrupt")
	try(t, boxes(), "", "diff", "-q", "nope").want(t, exitNotFound, "", "not found", "hint")
}

func TestDiffArguments(t *testing.T) {
	for line, want := range map[string]runtime.DiffRequest{
		"run":                    {Sandbox: "run"},
		"run@before":             {Sandbox: "run", From: "before"},
		"run@before @after":      {Sandbox: "run", From: "before", To: "after"},
		"run@before after":       {Sandbox: "run", From: "before", To: "after"},
		"run run@after":          {Sandbox: "run", To: "after"},
		"run@image other@x":      {Sandbox: "run", From: "image", To: "other@x"},
		"--paranoid run":         {Sandbox: "run", Paranoid: true},
		"--no-renames run":       {Sandbox: "run", NoRenames: true},
		"--quiet run":            {Sandbox: "run", NoRenames: true, Limit: 1},
		"run -- /a /b/c":         {Sandbox: "run", Paths: []string{"/a", "/b/c"}},
		"run@a @b -- /a":         {Sandbox: "run", From: "a", To: "b", Paths: []string{"/a"}},
		"docker://run@a @b":      {Sandbox: "docker://run", From: "a", To: "b"},
		"docker://r docker://r@": {},
	} {
		f := changed()
		f.sandboxes = append(f.sandboxes, runtime.Sandbox{ID: "e5", Name: "docker://run"})
		r := try(t, f, "", append([]string{"diff"}, strings.Fields(line)...)...)
		if want.Sandbox == "" {
			if r.code != exitUsage {
				t.Errorf("%s: %+v", line, r)
			}
			continue
		}
		if d := cmp.Diff(want, f.diffReq); d != "" {
			t.Errorf("%s: %s %s", line, d, r.stderr)
		}
	}
	for _, line := range []string{
		"run -- a", "-- /a", "@a", "run@", "run @", "--stat --quiet run", "--name-only --format json run", "-z --stat run",
	} {
		try(t, changed(), "", append([]string{"diff"}, strings.Fields(line)...)...).want(t, exitUsage, "",
			"See 'agentbox diff --help'.")
	}
	try(t, changed(), "", "diff", "run", "").want(t, exitUsage, "", "B is empty")
}

func ckpt(id, name, parent string, more ...func(*runtime.HistoryEntry)) runtime.HistoryEntry {
	c := runtime.HistoryEntry{Checkpoint: runtime.Checkpoint{ID: strings.Repeat(id, 8), Name: name,
		Kind: runtime.KindFull, Status: runtime.CheckpointReady,
		Trigger: "manual", Created: epoch.Add(-time.Minute), Files: 12, Processes: 3,
		Bytes: 1_234_567, SandboxName: "run"}}
	if parent != "" {
		c.Parent = strings.Repeat(parent, 8)
	}
	for _, m := range more {
		m(&c)
	}
	return c
}

func TestLog(t *testing.T) {
	f := boxes()
	f.history = []runtime.HistoryEntry{
		ckpt("aaa6", "six", "aaa1", func(c *runtime.HistoryEntry) { c.Head = true }),
		ckpt("aaa5", "", "aaa3"),
		ckpt("aaa4", "four", "aaa2", func(c *runtime.HistoryEntry) { c.ParentDeleted = true }),
		ckpt("aaa3", "three", "aaa2"),
		ckpt("aaa2", "two", "aaa1"),
		ckpt("aaa1", "one", ""),
	}
	const want = `CHECKPOINT                                  WHAT     KIND   AGE
* aaa6aaa6aaa6 (HEAD, six)                  manual   full   1m
│ * aaa5aaa5aaa5                            manual   full   1m
│ │ * aaa4aaa4aaa4 (four, parent deleted)   manual   full   1m
│ * │ aaa3aaa3aaa3 (three)                  manual   full   1m
│ ├─╯
│ * aaa2aaa2aaa2 (two)                      manual   full   1m
├─╯
* aaa1aaa1aaa1 (one)                        manual   full   1m
`
	try(t, f, "", "log", "run").want(t, 0, want)
	r := try(t, f, "", "log", "-n", "2", "--no-trunc", "run")
	if r.code != 0 || strings.Count(r.stdout, "\n") != 3 || !strings.Contains(r.stdout, f.history[0].ID+" (HEAD, six)") {
		t.Error(r)
	}
	var got []map[string]any
	if err := json.Unmarshal([]byte(try(t, f, "", "log", "--format", "json", "run").stdout),
		&got); err != nil || len(got) != 6 {
		t.Fatal(err, got)
	}
	keys := []string{
		"added", "bytes", "children", "created", "digest", "files", "forks", "frozen_ns", "head", "id", "image_digest",
		"kind", "labels", "name", "parent", "parent_deleted", "pinned", "processes", "sandbox", "sandbox_name",
		"status", "trigger", "unchanged",
	}
	if d := cmp.Diff(keys, slices.Sorted(maps.Keys(got[0]))); d != "" || got[0]["head"] != true ||
		fmt.Sprint(got[0]["children"]) != "[]" {
		t.Error(d, got[0])
	}
	f.history[1].Status, f.history[2].Status = runtime.CheckpointFailed, runtime.CheckpointPending
	r = try(t, f, "", "log", "--all", "run")
	if !strings.Contains(r.stdout, "│ x aaa5") || !strings.Contains(r.stdout, "│ │ o aaa4") ||
		!strings.Contains(r.stdout, "failed\n") {
		t.Error(r.stdout)
	}
	f.history = nil
	try(t, f, "", "log", "run").want(t, 0, "")
	try(t, f, "", "log", "--format", "json", "run").want(t, 0, "[]\n")
	try(t, f, "", "log", "-n", "-3", "run").want(t, exitUsage, "", "must not be negative")
	f.fail["History"] = runtime.ErrNotFound
	try(t, f, "", "log", "nope").want(t, exitNotFound, "", "not found")
}

// Marks, tags, and forks: in its own log one names where it comes from, in that of
// its origin a line names it there.
func TestLogMarks(t *testing.T) {
	f := boxes()
	f.history = []runtime.HistoryEntry{
		ckpt("aaa3", "", "aaa2", func(c *runtime.HistoryEntry) {
			c.Trigger, c.Added, c.Damaged = runtime.TriggerUndo, 4096, "a piece is gone"
		}),
		ckpt("aaa2", "two", "aaa1", func(c *runtime.HistoryEntry) {
			c.Head, c.Pinned, c.Tags = true, true, []string{"good", "v1"}
		}),
		ckpt("aaa1", "one", "3f2a"),
	}
	try(t, f, "", "log", "run").want(t, 0,
		`CHECKPOINT                                     WHAT          KIND   AGE
u aaa3aaa3aaa3 (DAMAGED)                       before undo   full   1m
* aaa2aaa2aaa2 (HEAD, two, good, v1, PINNED)   manual        full   1m
* aaa1aaa1aaa1 (one, from run@before)          manual        full   1m
`)
	f.history[1].Forks = []runtime.ForkedInto{
		{Sandbox: "b", SandboxName: "run-fork-1"}, {Sandbox: "c", SandboxName: "other"},
	}
	f.history[2].Forks = []runtime.ForkedInto{{Sandbox: "d", SandboxName: "third"}}
	f.history[0].Parent = strings.Repeat("aaa1", 8)
	r := try(t, f, "", "log", "run")
	var left []string
	for line := range strings.Lines(r.stdout) {
		left = append(left, strings.TrimSpace(line[:min(len(line), 44)]))
	}
	want := []string{
		"u aaa3aaa3aaa3", "│ * aaa2aaa2aaa2", "│ │   forked into run-fork-1, other", "├─╯",
		"* aaa1aaa1aaa1", "forked into third",
	}
	for i, w := range want {
		if len(left) != len(want)+1 || !strings.HasPrefix(left[i+1], w) {
			t.Fatalf("%q\n%s", w, r.stdout)
		}
	}
}

// Lanes end in the middle, three at once, and are used again.
func TestGraph(t *testing.T) {
	var g graph
	var out []string
	for _, n := range []string{"f a", "e c", "d a", "g c", "c a", "h b", "b a", "a", "z y", "y"} {
		id, parent, _ := strings.Cut(n, " ")
		join, row := g.add(id, parent, id)
		if join != "" {
			out = append(out, join)
		}
		out = append(out, row)
	}
	want := []string{
		"f",
		"│ e",
		"│ │ d",
		"│ │ │ g",
		"│ ├─┼─╯",
		"│ c │",
		"│ │ │ h",
		"│ │ │ b",
		"├─┴─┴─╯",
		"a",
		"z",
		"y",
	}
	if d := cmp.Diff(want, out); d != "" {
		t.Error(d)
	}
}
