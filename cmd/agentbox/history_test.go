package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/agentbox/agentbox/runtime"
)

// keysOf are the members of the JSON object, or of the first in the array,
// that a command prints.
func keysOf(t *testing.T, r result, code int) (keys []string, object map[string]any) {
	t.Helper()
	var v any
	if err := json.Unmarshal([]byte(r.stdout), &v); err != nil || r.code != code {
		t.Fatalf("%v: %+v", err, r)
	}
	if list, ok := v.([]any); ok {
		v = list[0]
	}
	object = v.(map[string]any)
	return slices.Sorted(maps.Keys(object)), object
}

func TestFork(t *testing.T) {
	f := history()
	try(t, f, "", strings.Fields("fork -n 2 --name w --files-only --no-start --label k=v run@before")...).want(t, 0,
		`NAME         ID             STATUS    ADDRESS     TOOK
run-fork-1   f0f0f0f0f0f0   running   10.88.0.7   42 ms
run-fork-2   f1f1f1f1f1f1   running   10.88.0.7   42 ms

made anew:
  host name
  /etc/machine-id

still shared with the origin:
  ssh host keys
`)
	want := runtime.ForkOptions{
		Checkpoint: "before", Count: 2, Names: []string{"w-1", "w-2"}, FilesOnly: true, NoStart: true,
		Labels: map[string]string{"k": "v"},
	}
	if d := cmp.Diff(want, f.forkOpts); d != "" {
		t.Error(d)
	}
	try(t, f, "", "fork", "-q", "run").want(t, 0, strings.Repeat("f0", 16)+"\n"+strings.Repeat("f1", 16)+"\n")
	if d := cmp.Diff(runtime.ForkOptions{Count: 1}, f.forkOpts); d != "" {
		t.Error(d)
	}
	try(t, f, "", "fork", "-q", "--name", "a", "--name", "b", "run")
	if d := cmp.Diff(runtime.ForkOptions{Count: 2, Names: []string{"a", "b"}}, f.forkOpts); d != "" {
		t.Error(d)
	}
	f.forks[1].Shared = nil
	if r := try(t, f, "", "fork", "run"); !strings.Contains(r.stdout,
		"\nrun-fork-1, still shared with the origin:\n  ssh host keys\n\nrun-fork-2, made anew:\n") {
		t.Error(r.stdout)
	}
	keys, fork := keysOf(t, try(t, f, "", "fork", "--format", "json", "run"), 0)
	if d := cmp.Diff([]string{"checkpoint", "reseeded", "sandbox", "shared", "took_ns"}, keys); d != "" ||
		fork["took_ns"] != 42e6 {
		t.Error(d, fork)
	}
	// Forks that exist in spite of an error must be reported.
	f.fail["Fork"] = runtime.ErrBusy
	if r := try(t, f, "", "fork", "-q", "run"); r.code != exitBusy || !strings.HasPrefix(r.stdout, "f0f0") {
		t.Error(r)
	}
	f.forks = nil
	try(t, f, "", "fork", "run").want(t, exitBusy, "", "busy")
}

func TestRestoreUndo(t *testing.T) {
	f := history()
	try(t, f, "", "restore", "run", "--undo").want(t, 0, "run\n")
	if want := (runtime.RestoreOptions{Undo: true, Pull: f.reOpts.Pull}); !reflect.DeepEqual(f.reOpts, want) {
		t.Error(f.reOpts)
	}
	try(t, f, "", "restore", "--no-undo", "--salvage", "run", "good").want(t, 0, "run\n")
	if want := (runtime.RestoreOptions{
		Checkpoint: "good", NoUndo: true, Salvage: true, Pull: f.reOpts.Pull,
	}); !reflect.DeepEqual(f.reOpts, want) {
		t.Error(f.reOpts)
	}
	try(t, f, "", "restore", "--undo", "run", "before").want(t, exitUsage, "", "exclude each other")
	f.lost = []string{"/usr/lib/x", "/evil\n\x1b[31m"}
	r := try(t, f, "", "restore", "--salvage", "run", "before")
	r.want(t, exitCorrupt, "run\n", "lost: /usr/lib/x\nlost: /evil \uFFFD[31m\n",
		"agentbox: restore run: 2 paths of checkpoint 3f2a3f2a3f2a could not be restored: corrupt\n")
	_, re := keysOf(t, try(t, f, "", "restore", "--salvage", "--format", "json", "run"), exitCorrupt)
	if fmt.Sprint(re["lost"]) == "[]" || re["lost"] == nil {
		t.Error(re)
	}
	// One whose host files could not be put tells all the same what was done.
	f.lost, f.attached, f.hostErr = nil, []runtime.RestoredFile{{Path: "/etc/plan", Action: runtime.AttachedReturned}},
		&runtime.Error{Op: "restore", ID: "run", Err: fmt.Errorf("the sandbox is restored, but: %w", runtime.ErrState)}
	try(t, f, "", "restore", "run").want(t, exitState, "", "the sandbox is restored, but: ")
	_, re = keysOf(t, try(t, f, "", "restore", "--format", "json", "run"), exitState)
	if got := fmt.Sprint(re["attached"]); got != "[map[action:returned path:/etc/plan]]" {
		t.Errorf("it tells %s", got)
	}
	f.attached, f.hostErr = nil, nil
	got := restoreSummary(runtime.Restored{Sandbox: f.sandboxes[1], Checkpoint: f.checkpoints[1], Undo: "9abc"})
	if want := "run is back at checkpoint 3f2a3f2a3f2a… (before): full, 12 files, 3 processes\nundo with: agentbox restore run --undo"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
}

func TestRestoreDryRun(t *testing.T) {
	f := history()
	try(t, f, "", "restore", "--dry-run", "--files-only", "run", "before").want(t, 0,
		`run would go back to checkpoint 3f2a3f2a3f2a (before): full, 12 files

CHANGE   PATH     SIZE           WHAT
A        /a b     - -> 1.5kB     
A        /d       -              dir
M        /etc/x   120B -> 140B   content mtime
3 paths changed, 2 added, 1 modified, +1.52kB
140B of file data to write

processes that end:
      1  sh -c loop
     12  evil `+"\uFFFD"+`[31m

processes that go on from the checkpoint:
      1  sh -c loop

effects:
  2 connections are closed
`)
	if want := (runtime.RestoreOptions{
		Checkpoint: "before", FilesOnly: true, Pull: f.reOpts.Pull,
	}); !reflect.DeepEqual(f.reOpts, want) {
		t.Error(f.reOpts)
	}
	if slices.ContainsFunc(f.calls, func(c string) bool { return strings.HasPrefix(c, "Restore") }) {
		t.Errorf("a dry run restores: %q", f.calls)
	}
	f.plan.Ends = nil
	keys, p := keysOf(t, try(t, f, "", "restore", "--dry-run", "--format", "json", "run"), 0)
	want := []string{
		"added", "begins", "bytes", "changes", "checkpoint", "compensates", "deleted", "effects", "ends", "modified",
		"recreates", "sandbox", "sandbox_name",
	}
	if d := cmp.Diff(want, keys); d != "" || fmt.Sprint(p["ends"]) != "[]" || p["added"] != 2.0 {
		t.Error(d, p)
	}
}

func TestPinAndTag(t *testing.T) {
	f := history()
	try(t, f, "", "checkpoint", "pin", "run@before", "9abc").want(t, 0, "run@before\n9abc\n")
	try(t, f, "", "checkpoint", "unpin", "run@before").want(t, 0, "run@before\n")
	try(t, f, "", "checkpoint", "tag", "run@before", "v2").want(t, 0, "")
	try(t, f, "", "checkpoint", "untag", "run@v2", "docker://x@v1").want(t, 0, "run@v2\ndocker://x@v1\n")
	want := []string{"PinCheckpoint run@before true", "PinCheckpoint 9abc true", "Close",
		"PinCheckpoint run@before false", "Close",
		"TagCheckpoint run@before v2", "Close", "UntagCheckpoint run@v2", "UntagCheckpoint docker://x@v1", "Close"}
	if d := cmp.Diff(want, f.calls); d != "" {
		t.Error(d)
	}
	f.fail["PinCheckpoint"] = runtime.ErrNotFound
	try(t, f, "", "checkpoint", "pin", "x", "y").want(t, exitNotFound, "", "not found\nagentbox: not found")
	try(t, f, "", "checkpoint", "tag", "run@before", "../x").want(t, exitUsage, "", "a name is")
	for _, bad := range []string{"v2", "@v2", "run@"} {
		try(t, f, "", "checkpoint", "untag", bad).want(t, exitUsage, "", "write SANDBOX@TAG")
	}
}

func TestVerify(t *testing.T) {
	f := history()
	try(t, f, "", "verify").want(t, 0, "2 checkpoints whole: 10 pieces, 1kB\n")
	try(t, f, "", "verify", "--all", "--read-data").want(t, 0, "2 checkpoints whole: 10 pieces, 1kB\n")
	if d := cmp.Diff([]runtime.VerifyOptions{{}, {ReadData: true}}, f.verifyOpts); d != "" {
		t.Error(d)
	}
	// A sandbox means its checkpoints, each looked at once, and all in one go.
	f.verifyOpts = nil
	f.checkpoints = append(f.checkpoints, runtime.Checkpoint{ID: "dead", Status: runtime.CheckpointFailed})
	undo, ck := f.checkpoints[0], f.checkpoints[1]
	try(t, f, "", "checkpoint", "verify", "before", "run").want(t, 0, "2 checkpoints whole: 10 pieces, 1kB\n")
	if d := cmp.Diff([]runtime.VerifyOptions{{Checkpoints: []string{ck.ID, undo.ID}, ReadData: true}},
		f.verifyOpts); d != "" {
		t.Error(d)
	}
	try(t, f, "", "verify", "nope", "before").want(t, exitNotFound, "1 checkpoint whole: 10 pieces, 1kB\n", "nope")
	try(t, f, "", "verify", "nope").want(t, exitNotFound, "", "nope")
	try(t, f, "", "verify", "--all", "run").want(t, exitUsage, "", "exclude each other")
	try(t, f, "", "verify", "--rehearse").want(t, exitUsage, "", "needs the names of checkpoints")
	f.checkpoints = f.checkpoints[:2]
	f.damaged = []runtime.Damaged{damaged(ck)}
	try(t, f, "", "verify").want(t, exitCorrupt,
		"damaged: 3f2a3f2a3f2a of run (before)\n  usr/lib/x : piece blake3:00\n1 checkpoint whole, 1 damaged: 10 pieces, 1kB\n",
		"agentbox: verify: 1 of 2 checkpoints damaged: corrupt\n", "hint: 'agentbox restore --salvage")
	keys, r := keysOf(t, try(t, f, "", "verify", "--format", "json"), exitCorrupt)
	if d := cmp.Diff([]string{"bytes", "checkpoints", "damaged", "notes", "pieces", "unrestorable"}, keys); d != "" ||
		fmt.Sprint(r["notes"]) != "[]" {
		t.Error(d, r)
	}
	f.fail["Verify"] = errors.New("broken disk")
	f.damaged = nil
	try(t, f, "", "verify", "run").want(t, exitFailure, "2 checkpoints whole: 10 pieces, 1kB\n", "broken disk")
	try(t, f, "", "store", "reindex").want(t, 0, "2 packs with 30 pieces; the records of 1 checkpoint made again\n",
		"warning: pack ab: cut off\n")
	try(t, f, "", "store", "frob").want(t, exitUsage, "", "unknown command")
}

func TestPrune(t *testing.T) {
	f := history()
	line := "prune --keep-last 1 --keep-within 1w2d12h --keep-hourly 2 --keep-daily 3 --keep-weekly 4 --max-bytes 10G --dry-run run"
	table := `ACTION   ID             NAME     SANDBOX   TRIGGER   CREATED         SIZE     REASONS
remove   9abc9abc9abc            run       undo      2 seconds ago   1.23MB   no rule keeps it
keep     3f2a3f2a3f2a   before   run       manual    3 seconds ago   1.23MB   pinned, last 1
`
	try(t, f, "", strings.Fields(line)...).want(t, 0, table+
		"dry run: 1 checkpoint removed, 1 kept, 3MB freed in 2 packs, 2MB left\n")
	want := runtime.PruneOptions{
		Sandbox: "run", KeepLast: 1, KeepWithin: (9*24 + 12) * time.Hour, KeepHourly: 2, KeepDaily: 3, KeepWeekly: 4,
		MaxBytes: 10 << 30, DryRun: true,
	}
	if d := cmp.Diff([]runtime.PruneOptions{want}, f.pruneOpts); d != "" {
		t.Error(d)
	}
	f.pruneOpts = nil
	try(t, f, "", "prune").want(t, 0, table+"1 checkpoint removed, 3MB freed in 2 packs, 2MB left\n")
	try(t, f, "", "prune", "--keep-last", "3").want(t, 0,
		table+"1 checkpoint removed, 1 kept, 3MB freed in 2 packs, 2MB left\n")
	if d := cmp.Diff([]runtime.PruneOptions{{}, {KeepLast: 3}}, f.pruneOpts); d != "" {
		t.Error(d)
	}
	try(t, f, "", "prune", "--keep-weekly", "-1")
	if got := f.pruneOpts[2]; got.KeepWeekly != -1 {
		t.Error(got)
	}
	f.pruned.Kept = nil
	keys, p := keysOf(t, try(t, f, "", "prune", "--format", "json"), 0)
	if d := cmp.Diff([]string{"after", "before", "dry_run", "freed", "kept", "packs", "removed"}, keys); d != "" ||
		fmt.Sprint(p["kept"]) != "[]" {
		t.Error(d, p)
	}
}

func TestDf(t *testing.T) {
	f := history()
	short := `TYPE          TOTAL   SIZE     RECLAIMABLE
Checkpoints   2       2.4MB    500kB (25%)
Sandboxes     1       3.15MB   
Images                3MB      
Other                 1MB      

1234 pieces in 3 packs; without the store the checkpoints would be 20MB, 10.0 times as much
9.5MB used, 10GB free at /var/lib/agentbox
`
	try(t, f, "", "df").want(t, 0, short)
	try(t, f, "", "df", "-v").want(t, 0, short+`
Checkpoints:

ID             NAME     SANDBOX   STATUS          CREATED         NEEDS   UNIQUE
9abc9abc9abc            run       ready           2 seconds ago   1.5MB   4.1kB
3f2a3f2a3f2a   before   run       ready, pinned   3 seconds ago   1MB     0B

Sandboxes:

ID             NAME   FILES
b20000000000   run    3MB
`)
	keys, _ := keysOf(t, try(t, f, "", "df", "--format", "json"), 0)
	if d := cmp.Diff([]string{
		"checkpoints", "disk", "free", "logical", "packs", "pieces", "raw", "root", "sandboxes", "stored", "waste",
	}, keys); d != "" {
		t.Error(d)
	}
	f.usage.Disk = runtime.DiskUsage{} // of an older service
	try(t, f, "", "df").want(t, 0, `TYPE          TOTAL   SIZE   RECLAIMABLE
Checkpoints   2       2MB    500kB (25%)
Sandboxes     1       3MB    

1234 pieces in 3 packs; without the store the checkpoints would be 20MB, 10.0 times as much
10GB free at /var/lib/agentbox
`)
	try(t, newFake(), "", "df").want(t, 0,
		"TYPE          TOTAL   SIZE   RECLAIMABLE\nCheckpoints   0       0B     0B\nSandboxes     0       0B     \n\n0B free at \n")
}

func TestExport(t *testing.T) {
	f := history()
	dir := t.TempDir()
	file := filepath.Join(dir, "c.tar")
	try(t, f, "", "checkpoint", "export", "run@before", "-").want(t, 0, "an archive of run@before")
	try(t, f, "", "checkpoint", "export", "--compress", "gzip", "-r", "age1x", "--recipient", "age1y",
		"3f2a", file).want(t, 0, "")
	if d := cmp.Diff(runtime.ExportOptions{Compress: "gzip", Recipients: []string{"age1x", "age1y"}},
		f.exportOpts); d != "" {
		t.Error(d)
	}
	is := func(want string) {
		t.Helper()
		data, err := os.ReadFile(file)
		fi, e := os.Stat(file)
		if err != nil || e != nil || string(data) != want || fi.Mode() != 0o600 {
			t.Errorf("%q %v %v %v", data, fi.Mode(), err, e)
		}
		if list, _ := os.ReadDir(dir); len(list) != 1 {
			t.Errorf("left behind: %v", list)
		}
	}
	is("an archive of 3f2a")
	// One that fails leaves what was there.
	f.fail["ExportCheckpoint"] = runtime.ErrCorrupt
	try(t, f, "", "checkpoint", "export", "9abc", file).want(t, exitCorrupt, "", "corrupt")
	is("an archive of 3f2a")
	delete(f.fail, "ExportCheckpoint")
	try(t, f, "", "checkpoint", "export", "-o", file, "9abc").want(t, 0, "")
	is("an archive of 9abc")
	if f.exportOpts.Compress != "zstd" {
		t.Error(f.exportOpts)
	}
	// A pipe or device is written to, a link followed.
	try(t, f, "", "checkpoint", "export", "9abc", "/dev/null").want(t, 0, "")
	if fi, err := os.Stat("/dev/null"); err != nil || fi.Mode().IsRegular() {
		t.Fatal("/dev/null is a file now")
	}
	link := filepath.Join(t.TempDir(), "link")
	if err := os.Symlink(file, link); err != nil {
		t.Fatal(err)
	}
	try(t, f, "", "checkpoint", "export", "3f2a", link).want(t, 0, "")
	is("an archive of 3f2a")
	try(t, f, "", "checkpoint", "export", "3f2a", filepath.Join(dir, "no", "x")).want(t,
		exitNotFound, "", "no such file")
	try(t, f, "", "checkpoint", "export", "3f2a", dir).want(t, exitFailure, "", "is a directory")
	for _, args := range [][]string{
		{"3f2a"}, {"-o", "x", "3f2a", "y"}, {"-r", "", "3f2a", "y"}, {"--compress", "lzma", "3f2a", "y"},
	} {
		try(t, f, "", append([]string{"checkpoint", "export"}, args...)...).want(t, exitUsage, "",
			"See 'agentbox checkpoint export --help'.")
	}
}

func TestImportPushPull(t *testing.T) {
	f := history()
	id := strings.Repeat("77ab", 8) + "\n"
	try(t, f, "an archive", "checkpoint", "import", "--name", "n", "--image", "busybox", "-i",
		"key.txt", "-").want(t, 0, id)
	wd, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	want := runtime.ImportOptions{Name: "n", Image: "busybox", Identities: filepath.Join(wd, "key.txt")}
	if d := cmp.Diff(want, f.importOpts); d != "" || string(f.stdin) != "an archive" {
		t.Error(d, string(f.stdin))
	}
	file := filepath.Join(t.TempDir(), "c.tar")
	if err := os.WriteFile(file, []byte("another one"), 0o600); err != nil {
		t.Fatal(err)
	}
	_, c := keysOf(t, try(t, f, "", "checkpoint", "import", "--format", "json", file), 0)
	if c["id"] != strings.TrimSpace(id) || c["kind"] != "full" || string(f.stdin) != "another one" {
		t.Error(c, string(f.stdin))
	}
	try(t, f, "", "checkpoint", "import", file+"x").want(t, exitNotFound, "", "no such file")
	try(t, f, "", "checkpoint", "import", "--name", "a/b", file).want(t, exitUsage, "", "a name is")

	ref := "reg.example.com/c:good"
	try(t, f, "", "checkpoint", "push", "--plain-http", "run@before", ref).want(t, 0,
		ref+"@sha256:"+strings.Repeat("ab", 32)+"\n")
	if !f.regOpts.PlainHTTP {
		t.Error(f.regOpts)
	}
	keys, _ := keysOf(t, try(t, f, "", "checkpoint", "push", "--format", "json", "run@before", ref), 0)
	if d := cmp.Diff([]string{"bytes", "reference", "skipped"}, keys); d != "" || f.regOpts.PlainHTTP {
		t.Error(d)
	}
	try(t, f, "", "checkpoint", "pull", ref).want(t, 0, id)
	f.fail["PullCheckpoint"] = runtime.ErrDenied
	try(t, f, "", "checkpoint", "pull", ref).want(t, exitDenied, "", "denied")
}

func TestHistoryUsage(t *testing.T) {
	for line, want := range map[string]string{
		"fork":                                    "SANDBOX[@CHECKPOINT] is missing",
		"fork run@":                               "names no checkpoint",
		"fork -n 0 run":                           "must be from 1 to 1000",
		"fork -n 1001 run":                        "must be from 1 to 1000",
		"fork -n 3 --name a --name b run":         "2 names for 3 forks",
		"fork --name a --name a run":              "given twice",
		"fork --name a/b run":                     "a name is",
		"fork -q --format json run":               "exclude each other",
		"prune --keep-last -2":                    "or -1 for all",
		"prune --keep-daily x":                    "not a number",
		"prune --keep-within 2":                   "not a duration",
		"prune --keep-within 0s":                  "not a duration",
		"prune --keep-within -1h":                 "not a duration",
		"prune --keep-within 2d-1h":               "not a duration",
		"prune --keep-within 99999w":              "not a duration",
		"prune --max-bytes lots":                  "not a size",
		"prune --max-bytes 0":                     "not a size",
		"checkpoint import":                       "FILE|- is missing",
		"checkpoint push x":                       "REFERENCE is missing",
		"create --checkpoint-every now busybox":   "write exec, a duration",
		"create --checkpoint-every 500ms busybox": "write exec, a duration",
		"create --checkpoint-every -5m busybox":   "write exec, a duration",
		"create --checkpoint-every 5m,1h busybox": "\"5m,1h\": write exec, a duration from 1s on, for example 5m, or both: exec,5m",
		"create --checkpoint-every exec, busybox": "write exec, a duration",
		"diff --patch --stat run":                 "exclude each other",
		"diff --patch -z run":                     "--null is for",
		"diff --color sometimes run":              "must be one of auto, always, never",
		"checkpoint export --compress x a b":      "must be one of zstd, gzip, none",
		"store reindex now":                       "takes no argument",
	} {
		f := history()
		r := try(t, f, "", strings.Fields(line)...)
		if r.code != exitUsage || !strings.Contains(r.stderr, want) || r.stdout != "" || len(f.calls) > 0 {
			t.Errorf("agentbox %s: %+v, want %q; called %q", line, r, want, f.calls)
		}
	}
}

func TestCheckpointEvery(t *testing.T) {
	for text, want := range map[string]string{
		"exec": "exec", "5m": "5m0s", "1s": "1s", "1d": "24h0m0s", "1w2d3h4m": "219h4m0s", "exec,10m": "exec,10m0s",
		"1d,exec": "exec,24h0m0s",
	} {
		f := newFake()
		r := try(t, f, "", "create", "--checkpoint-every", text, "busybox")
		if r.code != 0 || f.created[0].Spec.CheckpointEvery != want {
			t.Errorf("%s: %+v %q, want %q", text, r, f.created[0].Spec.CheckpointEvery, want)
		}
	}
	f := newFake()
	try(t, f, "", "run", "-d", "--checkpoint-every", "90s", "busybox")
	if got := f.created[0].Spec.CheckpointEvery; got != "1m30s" {
		t.Error(got)
	}
}

// patched has files with patches and changes that have none.
func patched() *fakeService {
	f := changed()
	f.diff.Changes = []runtime.Change{
		{Path: "/a b", Change: "A", Type: "file", New: &runtime.FileState{Type: "file", Mode: "0644"},
			Patch: "diff --git a/a b b/a b\nnew file mode 100644\n--- /dev/null\n+++ b/a b\t\n@@ -0,0 +1,2 @@\n+one\n+\x1b[31mtwo\xff\n"},
		{
			Path: "/d", Change: "M", Type: "dir", What: []string{"mode"},
			Old: &runtime.FileState{Type: "dir", Mode: "0755"}, New: &runtime.FileState{Type: "dir", Mode: "0711"},
		},
		{
			Path: "/f", Change: "M", Type: "file", What: []string{"content"},
			Patch: "diff --git a/f b/f\n--- a/f\n+++ b/f\n@@ -1,2 +1,2 @@\n same\n-old\n\\ No newline at end of file\n+new\n",
		},
		{Path: "/p", Change: "A", Type: "fifo", New: &runtime.FileState{Type: "fifo"}},
	}
	return f
}

func TestDiffPatch(t *testing.T) {
	f := patched()
	r := try(t, f, "", "diff", "--patch", "run@a", "@b")
	want := f.diff.Changes[0].Patch + "# M /d: mode 0755 -> 0711\n" + f.diff.Changes[2].Patch + "# A /p: fifo\n"
	r.want(t, 0, want)
	if !f.diffReq.Patch || f.diffReq.From != "a" {
		t.Error(f.diffReq)
	}
	// git takes it, the notes included.
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "f"), []byte("same\nold"), 0o644); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("git", "apply", "-")
	cmd.Dir, cmd.Stdin, cmd.Env = dir, strings.NewReader(r.stdout), append(os.Environ(), "GIT_DIR=/nonexistent")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	for name, want := range map[string]string{"f": "same\nnew\n", "a b": "one\n\x1b[31mtwo\xff\n"} {
		if data, err := os.ReadFile(filepath.Join(dir, name)); err != nil || string(data) != want {
			t.Errorf("%s: %q, %v", name, data, err)
		}
	}
	// In colour it is for eyes: nothing in a file drives the terminal.
	r = try(t, f, "", "diff", "-p", "--color", "always", "run")
	for _, s := range []string{
		"\x1b[1mdiff --git a/f b/f\x1b[m\n",
		"\x1b[36m@@ -1,2 +1,2 @@\x1b[m\n same\n\x1b[31m-old\x1b[m\n\\ No newline at end of file\n\x1b[32m+new\x1b[m\n",
		"\x1b[32m+\uFFFD[31mtwo\uFFFD\x1b[m\n",
	} {
		if !strings.Contains(r.stdout, s) {
			t.Errorf("no %q in %q", s, r.stdout)
		}
	}
	_, d := keysOf(t, try(t, f, "", "diff", "--patch", "--format", "json", "run"), 0)
	if s := d["changes"].([]any)[2].(map[string]any)["patch"]; s != f.diff.Changes[2].Patch {
		t.Error(s)
	}
}

func TestHistoryComplete(t *testing.T) {
	f := history()
	f.sandboxes[1].Head = f.checkpoints[1].ID
	for args, want := range map[string]string{
		"fork ":                         "new\tcreated\nrun\trunning\nice\tpaused\nend\texited\nrun@HEAD\twhere run was last, 3f2a3f2a3f2a\nrun@9abc9abc9abc\tfull\nrun@before\tfull\nrun@good\tfull\nrun@v1\tfull\n",
		"diff ":                         "new\tcreated\nrun\trunning\nice\tpaused\nend\texited\nrun@HEAD\twhere run was last, 3f2a3f2a3f2a\nrun@9abc9abc9abc\tfull\nrun@before\tfull\nrun@good\tfull\nrun@v1\tfull\n",
		"restore run ":                  "HEAD\twhere run was last, 3f2a3f2a3f2a\n9abc9abc9abc\tfull of run\nbefore\tfull of run\ngood\tfull of run\nv1\tfull of run\n",
		"checkpoint pin run@before ":    "9abc9abc9abc\tfull of run\nrun@good\tfull of run\nrun@v1\tfull of run\n",
		"checkpoint untag run@v1 ":      "run@good\ttag of 3f2a3f2a3f2a\n",
		"checkpoint tag x ":             "",
		"checkpoint import --image ":    "busybox\n",
		"checkpoint export --compress ": "zstd\ngzip\nnone\n",
		"prune ":                        "new\tcreated\nrun\trunning\nice\tpaused\nend\texited\n",
		"diff --color ":                 "auto\nalways\nnever\n",
	} {
		r := try(t, f, "", append([]string{"__complete"}, strings.Split(args, " ")...)...)
		got, _, _ := strings.Cut(r.stdout, ":")
		if got != want || r.code != 0 {
			t.Errorf("%q: %q, want %q (%s)", args, got, want, r.stderr)
		}
	}
}

// On a terminal prune asks, shows how far it is, and patches have colours.
func TestHistoryOnTerminal(t *testing.T) {
	const question = "Remove 1 checkpoint? [y/N] "
	p := onPty(t, "prune", "--keep-last", "1")
	p.expect("remove   9abc9abc9abc")
	p.expect(question)
	p.write("y\n")
	p.expect("\rprune:  50%  500kB of 1MB\x1b[K")
	p.expect("\r\x1b[K")
	p.expect("1 checkpoint removed, 1 kept")
	p.end(0)

	p = onPty(t, "prune", "--keep-last", "1")
	p.expect(question)
	p.write("\n")
	p.expect("nothing was removed")
	p.end(exitFailure)

	p = onPty(t, "prune", "--keep-last", "1")
	p.expect(question)
	p.write("\x03")
	p.expect("stopped by signal")
	p.end(130)

	// Without a rule it is a policy's that removes one.
	p = onPty(t, "prune")
	p.expect(question)
	p.write("y\n")
	p.expect("1 checkpoint removed")
	p.end(0)

	for _, args := range [][]string{
		{"prune", "-f", "--keep-last", "1"}, {"prune", "--dry-run", "--keep-last", "1"}, {"prune", "-f"},
	} {
		p = onPty(t, args...)
		p.expect("3MB freed")
		p.end(0)
		if strings.Contains(p.seen.String(), "[y/N]") {
			t.Errorf("%v asks", args)
		}
	}

	p = onPty(t, "diff", "--patch", "run")
	p.expect("\x1b[32m+new\x1b[m")
	p.end(0)
	p = onPty(t, "diff", "--patch", "--color", "never", "run")
	p.expect("+\uFFFD[31mtwo")
	p.expect("# A /p: fifo")
	p.end(0)
	if strings.Contains(p.seen.String(), "\x1b") {
		t.Errorf("%q", p.seen.String())
	}

	p = onPty(t, "checkpoint", "export", "run@before", "-")
	p.expect("stdout is a terminal")
	p.end(exitUsage)
	p = onPty(t, "checkpoint", "import", "-")
	p.expect("stdin is a terminal")
	p.end(exitUsage)
}
