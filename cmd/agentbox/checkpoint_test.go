package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/agentbox/agentbox/runtime"
)

// A path with ".." leads where the kernel goes, also from a working directory that was
// reached through a symlink, and not to what looks shorter.
func TestHostPath(t *testing.T) {
	top, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	at := func(name string) string { return filepath.Join(top, name) }
	for _, dir := range []string{"data/project/infra", "home"} {
		if err := os.MkdirAll(at(dir), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink(at("data/project"), at("home/project")); err != nil {
		t.Fatal(err)
	}
	t.Chdir(at("home/project"))
	for path, want := range map[string]string{
		"../state":                          at("data/state"),
		"infra/../state":                    at("data/project/state"),
		at("home") + "/project/../state":    at("data/state"),
		at("home") + "/./project//../state": at("data/state"),
		"infra/state":                       at("home/project/infra/state"), // which a checkpoint resolves
		at("home/project/state"):            at("home/project/state"),
	} {
		if got, err := hostPath(path); err != nil || got != want {
			t.Errorf("%s is %s, want %s (%v)", path, got, want, err)
		}
	}
	for _, path := range []string{"..", "../", "../..", "../none/state", "none/../state"} {
		if got, err := hostPath(path); err == nil {
			t.Errorf("%s is %s", path, got)
		}
	}
}

func TestCheckpoint(t *testing.T) {
	f := boxes()
	r := try(t, f, "", strings.Fields("checkpoint --name n --files-only --stop --strict --label k=v --trigger t --tcp close --timeout 30s --paranoid run")...)
	r.want(t, 0, strings.Repeat("3f2a", 8)+"\n", "warning: an exec session is not part of it\n")
	want := runtime.CheckpointOptions{
		Name: "n", FilesOnly: true, Stop: true, Strict: true, Labels: map[string]string{"k": "v"}, Trigger: "t",
		TCP: runtime.TCPClose, Timeout: 30 * time.Second, Paranoid: true,
	}
	if d := cmp.Diff(want, f.ckOpts); d != "" {
		t.Error(d)
	}
	// A flag's value is not taken for a subcommand, and create is for sandboxes called like one.
	try(t, f, "", "checkpoint", "--name", "ls", "run").want(t, 0, strings.Repeat("3f2a", 8)+"\n", "warning")
	f.sandboxes[1].Name = "ls"
	try(t, f, "", "checkpoint", "create", "ls").want(t, 0, strings.Repeat("3f2a", 8)+"\n", "warning")

	got := checkpointSummary(runtime.Checkpoint{
		ID: strings.Repeat("3f2a", 8), SandboxName: "c", Kind: "full", Files: 1, Processes: 3, Bytes: 1_200_000,
		Frozen: 84 * time.Millisecond,
	})
	if want := "checkpoint 3f2a3f2a3f2a… of c: full, 1 file, 3 processes, 1.2MB, 0B added, frozen 84 ms"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
	got = checkpointSummary(runtime.Checkpoint{
		ID: "3f2a", SandboxName: "c", Kind: "files", Files: 2, Bytes: 1_200_000, Unchanged: true,
	})
	if want := "checkpoint 3f2a of c: files, 2 files, 1.2MB, unchanged"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
}

func TestCheckpointLs(t *testing.T) {
	f := boxes()
	try(t, f, "", "checkpoint", "ls", "--all", "--label", "k=v", "--trigger", "t", "run").want(t, 0,
		`ID             NAME     TAGS   SANDBOX   KIND   STATUS   TRIGGER   CREATED         FILES   PROCESSES   SIZE     ADDED
3f2a3f2a3f2a   before          run       full   ready    manual    3 seconds ago   12      3           1.23MB   0B
`)
	if d := cmp.Diff(runtime.CheckpointFilter{
		Sandbox: "run", All: true, Labels: map[string]string{"k": "v"}, Trigger: "t",
	}, f.filter); d != "" {
		t.Error(d)
	}
	try(t, f, "", "checkpoint", "ls", "-q").want(t, 0, "3f2a3f2a3f2a\n")
	f = history()
	f.checkpoints[0].Damaged = "a piece is gone"
	try(t, f, "", "checkpoint", "ls").want(t, 0,
		`ID             NAME     TAGS      SANDBOX   KIND   STATUS          TRIGGER   CREATED         FILES   PROCESSES   SIZE     ADDED
9abc9abc9abc                      run       full   damaged         undo      2 seconds ago   12      3           1.23MB   4.1kB
3f2a3f2a3f2a   before   good,v1   run       full   ready, pinned   manual    3 seconds ago   12      3           1.23MB   4.1kB
`)
}
