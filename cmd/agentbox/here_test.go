package main

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/agentbox/agentbox/runtime"
)

// overDir returns a service with a sandbox for each of names, with a workspace over dir.
func overDir(dir string, names ...string) *fakeService {
	f := newFake()
	f.checkpoints = boxes().checkpoints
	for _, name := range names {
		sb := runtime.Sandbox{ID: strings.Repeat(name[:1], 32), Name: name, Status: runtime.Running}
		sb.Spec.Mounts = []runtime.Mount{{Type: runtime.MountWorkspace, Source: dir, Target: "/work"}}
		f.sandboxes = append(f.sandboxes, sb)
	}
	return f
}

// TestHereStates: a checkpoint is looked into without SANDBOX, too; relative paths are those of the directory.
func TestHereStates(t *testing.T) {
	dir := inProject(t)
	for args, want := range map[string]string{
		"ls @before":            "List box@before /work/src",
		"ls @before x/y":        "List box@before /work/src/x/y",
		"ls @HEAD~1 /etc":       "List box@HEAD~1 /etc",
		"find @before ..":       "List box@before /work",
		"cat @before:x":         "Stat /work/src/x",
		"cp @before:../x /none": "Stat /work/x",
		"mount @before d":       "Mount box@before " + dir + "/src/d",
		"fork @before":          "Fork box",
	} {
		f := overDir(dir, "box")
		f.fail["Fork"] = runtime.ErrNotFound // the fake makes none
		_ = try(t, f, "", strings.Fields(args)...)
		if !slices.ContainsFunc(f.calls, func(call string) bool { return strings.HasPrefix(call, want) }) {
			t.Errorf("%s: calls %q, want %q", args, f.calls, want)
		}
	}
}

// inProject makes a directory, and stands in its directory src.
func inProject(t *testing.T) (dir string) {
	t.Helper()
	dir, err := filepath.EvalSymlinks(t.TempDir())
	if err == nil {
		err = os.Mkdir(dir+"/src", 0o755)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Chdir(dir + "/src")
	return dir
}

// TestHere: in the directory of a workspace SANDBOX may be left out.
func TestHere(t *testing.T) {
	dir := inProject(t)
	if err := os.Mkdir(dir+"/src/deep", 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(dir+"/src", dir+"/link"); err != nil {
		t.Fatal(err)
	}
	for _, at := range []string{"", "/src", "/link/deep"} {
		t.Chdir(dir + at)
		for _, c := range []struct{ args, sandbox, checkpoint string }{
			{"restore", "box", ""},
			{"restore @before", "box", "@before"},
			{"restore HEAD~2", "box", "HEAD~2"},
			{"restore @{5m}", "box", "@{5m}"},
			{"restore other", "other", ""},
			{"restore other HEAD~1", "other", "HEAD~1"},
			{"restore other @x", "other", "@x"},
		} {
			f := overDir(dir, "box")
			f.sandboxes = append(f.sandboxes, runtime.Sandbox{ID: "0123", Name: "other", Status: runtime.Running})
			r := try(t, f, "", strings.Fields(c.args)...)
			if r.code != 0 || r.stdout != c.sandbox+"\n" || f.reOpts.Checkpoint != c.checkpoint {
				t.Errorf("%s in %q: code %d, %q, checkpoint %q: %s", c.args, at, r.code, r.stdout, f.reOpts.Checkpoint, r.stderr)
			}
		}
		for _, c := range []struct {
			args, sandbox string
			steps         int
		}{
			{"undo", "box", 1}, {"undo 3", "box", 3}, {"redo 2", "box", 2}, {"undo other", "other", 1}, {"undo other 12", "other", 12},
		} {
			f := overDir(dir, "box")
			f.sandboxes = append(f.sandboxes, runtime.Sandbox{ID: "0123", Name: "other", Status: runtime.Running})
			r := try(t, f, "", strings.Fields(c.args)...)
			if r.code != 0 || f.undoOpts.Steps != c.steps ||
				!slices.ContainsFunc(f.calls, func(call string) bool { return strings.Contains(call, "do "+c.sandbox) }) {
				t.Errorf("%s in %q: code %d, %d steps, %q: %s", c.args, at, r.code, f.undoOpts.Steps, f.calls, r.stderr)
			}
		}
		f := overDir(dir, "box")
		r := try(t, f, "", "undo", "--path", "x", "--path", "/etc/y")
		want := []string{filepath.Join("/work", strings.Replace(at, "link", "src", 1), "x"), "/etc/y"}
		if r.code != 0 || !slices.Equal(f.undoOpts.Paths, want) {
			t.Errorf("undo --path in %q: code %d, %q: %s", at, r.code, f.undoOpts.Paths, r.stderr)
		}
		try(t, overDir(dir, "box"), "", "undo", "--path", "x", "box").want(t, exitUsage, "", "must be an absolute path")
		for _, verb := range []string{"log", "checkpoint", "attach", "diff"} {
			f := overDir(dir, "box")
			f.program = func(context.Context, runtime.Streams, <-chan string) (int, error) { return 0, nil }
			f.exits[f.sandboxes[0].ID] = make(chan int, 1)
			if r := try(t, f, "", verb); r.code != 0 {
				t.Errorf("%s in %q: code %d: %s", verb, at, r.code, r.stderr)
			}
			if !slices.ContainsFunc(f.calls, func(call string) bool { return strings.Contains(call, "box") }) {
				t.Errorf("%s in %q: the service was called: %q", verb, at, f.calls)
			}
		}
	}
	t.Chdir(dir)
	try(t, overDir(dir, "b", "a"), "", "restore").want(t, exitUsage, "",
		"SANDBOX is missing, and 2 sandboxes have a workspace over "+dir+": a, b")
	try(t, overDir(dir+"/src", "b"), "", "restore").want(t, exitUsage, "",
		"SANDBOX is missing, and no sandbox has a workspace over "+dir)
	try(t, overDir(dir, "b"), "", "restore", "").want(t, exitUsage, "", "SANDBOX is empty")
	inner := overDir(dir+"/src", "inner")
	inner.sandboxes = append(inner.sandboxes, overDir(dir, "outer").sandboxes...)
	t.Chdir(dir + "/src/deep")
	try(t, inner, "", "restore").want(t, 0, "inner\n")
}

// TestHereApply: apply, too, and its paths may be relative.
func TestHereApply(t *testing.T) {
	dir := inProject(t)
	for args, want := range map[string]struct {
		ref   string
		paths []string
	}{
		"apply":                  {ref: "box"},
		"apply @before":          {ref: "box@before"},
		"apply HEAD~1 -- x ../y": {ref: "box@HEAD~1", paths: []string{"/work/src/x", "/work/y"}},
		"apply box -- /work/src": {ref: "box", paths: []string{"/work/src"}},
	} {
		f := overDir(dir, "box")
		if r := try(t, f, "", strings.Fields(args)...); r.code != 0 {
			t.Errorf("%s: code %d: %s", args, r.code, r.stderr)
		}
		if !slices.ContainsFunc(f.calls, func(call string) bool { return strings.HasPrefix(call, "Apply "+want.ref+" ") }) ||
			!slices.Equal(f.applyOpts.Paths, want.paths) {
			t.Errorf("%s: paths %q, calls %q", args, f.applyOpts.Paths, f.calls)
		}
	}
	f := overDir(dir, "box")
	f.applied = runtime.Applied{
		Checkpoint: "3f2a", Changes: []runtime.Change{{Path: "/work/src/x", Change: "A", Type: "file"}},
		Workspaces: []runtime.AppliedWorkspace{{Path: "/work", Original: dir}},
	}
	try(t, f, "", "apply").want(t, 0, "A src/x\n")
}

// TestHereDiff: a diff of a sandbox with workspaces is about these.
func TestHereDiff(t *testing.T) {
	dir := inProject(t)
	for _, c := range []struct {
		args string
		want runtime.DiffRequest
	}{
		{"diff", runtime.DiffRequest{Sandbox: "box", Paths: []string{"/work"}, Relative: "/work"}},
		{"diff box", runtime.DiffRequest{Sandbox: "box", Paths: []string{"/work"}, Relative: "/work"}},
		{"diff HEAD~1 @HEAD", runtime.DiffRequest{Sandbox: "box", From: "HEAD~1", To: "HEAD",
			Paths: []string{"/work"}, Relative: "/work"}},
		{"diff @a", runtime.DiffRequest{Sandbox: "box", From: "a", Paths: []string{"/work"}, Relative: "/work"}},
		{"diff --all", runtime.DiffRequest{Sandbox: "box"}},
		{"diff -- main.c ../doc", runtime.DiffRequest{Sandbox: "box",
			Paths: []string{"/work/src/main.c", "/work/doc"}, Relative: "/work"}},
		{"diff -- ../..", runtime.DiffRequest{Sandbox: "box", Paths: []string{"/"}}},
		{"diff box -- /work/src", runtime.DiffRequest{Sandbox: "box", Paths: []string{"/work/src"}}},
	} {
		f := overDir(dir, "box")
		if r := try(t, f, "", strings.Fields(c.args)...); r.code != 0 {
			t.Errorf("%s: code %d: %s", c.args, r.code, r.stderr)
		}
		if d := cmp.Diff(c.want, f.diffReq); d != "" {
			t.Errorf("%s: %s", c.args, d)
		}
	}
	f := overDir(dir, "box")
	f.diff.Changes = []runtime.Change{
		{Path: "/work", Change: "M", Type: "dir"},
		{Path: "/work/b", Change: "R", From: "/work/a", Type: "file"},
		{Path: "/work/src/x", Change: "A", Type: "file"},
	}
	try(t, f, "", "diff").want(t, 0, "M .\nR a -> b\nA src/x\n")
	try(t, f, "", "diff", "--all").want(t, 0, "M /work\nR /work/a -> /work/b\nA /work/src/x\n")
	try(t, f, "", "diff", "box", "--", "main.c").want(t, exitUsage, "", "is not absolute")
	try(t, f, "", "diff", "--all", "--", "x").want(t, exitUsage, "", "exclude each other")
}
