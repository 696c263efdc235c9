package main

import (
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/agentbox/agentbox/runtime"
)

func TestUndo(t *testing.T) {
	f := history()
	f.stepped = runtime.Restored{Sandbox: f.sandboxes[1], Checkpoint: f.checkpoints[1], Redo: 2}
	try(t, f, "", "undo", "--files", "--no-effects", "--no-attached", "--timeout", "3s", "run", "3").want(t, 0, "run\n")
	if want := (runtime.UndoOptions{
		Steps: 3, FilesOnly: true, NoEffects: true, NoAttached: true, Timeout: 3 * time.Second,
	}); !reflect.DeepEqual(f.undoOpts, want) {
		t.Errorf("options %+v, want %+v", f.undoOpts, want)
	}
	try(t, f, "", "redo", "run").want(t, 0, "run\n")
	if want := (runtime.UndoOptions{Steps: 1, Redo: true}); !reflect.DeepEqual(f.undoOpts, want) {
		t.Errorf("options %+v, want %+v", f.undoOpts, want)
	}
	for call, says := range map[string]string{
		"undo": "SANDBOX is missing", "undo run 0": "from 1 on", "redo run x": "from 1 on", "undo run 1 2": "unexpected",
		"undo --list run 2": "goes to none", "undo --list --dry-run run": "goes to none",
		"redo --timeout -1s run": "must not be negative",
	} {
		try(t, f, "", strings.Fields(call)...).want(t, exitUsage, "", says)
	}
	f.fail["Undo"] = &runtime.Error{Op: "undo", ID: "run", Err: runtime.ErrState, Hint: "There is nothing before it."}
	try(t, f, "", "undo", "run").want(t, exitState, "", "undo run: ", "nothing before")

	want := "run is at step 3f2a3f2a3f2a… (before), 2 steps back; redo with: agentbox redo run"
	if got := stepSummary(f.stepped); got != want {
		t.Errorf("%q, want %q", got, want)
	}
	f.stepped.Redo, f.stepped.Checkpoint.Name = 0, ""
	f.stepped.Checkpoint.Message = "pip install flask\nand more"
	if got, want := stepSummary(f.stepped), "run is at step 3f2a3f2a3f2a… (pip install flask…)"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
}

func TestUndoList(t *testing.T) {
	f := history()
	step := func(id, message, trigger string, back int) runtime.UndoStep {
		return runtime.UndoStep{Back: back, Checkpoint: runtime.Checkpoint{
			ID: strings.Repeat(id, 32), Message: message, Trigger: trigger, Kind: runtime.KindFull,
			Created: f.checkpoints[0].Created, Changes: &runtime.Changes{Added: 2, Modified: 1, Deleted: 3},
		}}
	}
	f.undoList = runtime.UndoList{Sandbox: "x", SandboxName: "run", Steps: []runtime.UndoStep{
		step("a", "", runtime.TriggerUndo, -2), step("b", "a message that is far too long for the table", "exec", -1),
		step("c", "", "exec", 0), step("d", "\x1b[31mred", "manual", 1), step("e", "", runtime.TriggerBase, 2),
	}}
	r := try(t, f, "", "undo", "--list", "run")
	for _, line := range []string{
		"redo 2   aaaaaaaaaaaa   before undo", "redo 1   bbbbbbbbbbbb   a message that is far too…   +2 ~1 -3   full",
		"now      cccccccccccc   exec", "2        eeeeeeeeeeee   base",
	} {
		if !strings.Contains(r.stdout, line) {
			t.Errorf("no line %q in\n%s", line, r.stdout)
		}
	}
	for line := range strings.Lines(r.stdout) {
		if n := len([]rune(strings.TrimSuffix(line, "\n"))); n > 80 || strings.Contains(line, "\x1b") {
			t.Errorf("%d columns: %q", n, line)
		}
	}
	f.undoList.Steps = f.undoList.Steps[3:]
	f.undoList.Changed = true
	if r := try(t, f, "", "redo", "--list", "run"); !strings.Contains(r.stdout, "now    -              files have changed since") {
		t.Errorf("the present is not in\n%s", r.stdout)
	}
	keys, _ := keysOf(t, try(t, f, "", "undo", "--list", "--format", "json", "run"), 0)
	if got := strings.Join(keys, " "); got != "changed sandbox sandbox_name steps" {
		t.Errorf("keys %s", got)
	}
	f.plan.SandboxName = "run"
	try(t, f, "", "redo", "--dry-run", "run")
	if !f.undoOpts.Redo {
		t.Error("it is not the plan of redo")
	}
}
