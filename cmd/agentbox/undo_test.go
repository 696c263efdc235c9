package main

import (
	"reflect"
	"regexp"
	"strconv"
	"strings"
	"syscall"
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

// threeSteps is a history with a step forward and two back.
func threeSteps(f *fakeService) runtime.UndoList {
	step := func(id, message string, back int) runtime.UndoStep {
		return runtime.UndoStep{Back: back, Checkpoint: runtime.Checkpoint{
			ID: strings.Repeat(id, 32), Message: message, Kind: runtime.KindFull, Created: f.checkpoints[0].Created,
			Changes: &runtime.Changes{Added: 2, Modified: 1, Deleted: 3},
		}}
	}
	return runtime.UndoList{Sandbox: f.sandboxes[1].ID, SandboxName: "run", Steps: []runtime.UndoStep{
		step("a", "forward", -1), step("b", "present", 0), step("c", "make\x1b[31m test", 1), step("d", "the first", 2),
	}}
}

// TestUndoPicker chooses a step on a terminal, which is as it was afterwards.
func TestUndoPicker(t *testing.T) {
	begin := func() *ptyRun {
		t.Helper()
		p := onPty(t, "undo", "--list", "run")
		p.expect("What has changed since, and undo takes back:") // at the first step back
		p.expect("new file mode 100644")
		p.expect("up/down choose")
		if !p.raw() {
			t.Error("the terminal is not raw")
		}
		return p
	}
	end := func(p *ptyRun, code int) {
		t.Helper()
		p.expect(screenOff)
		p.end(code)
		if strings.Contains(p.seen.String(), "\x1b[31m test") || strings.Contains(p.seen.String(), "[31mtwo\xff") {
			t.Error("what came out of the sandbox drives the terminal")
		}
	}
	p := begin()
	p.write("\x1b[B") // the arrow down
	p.write("\r")
	p.expect("Undo 2 steps in run? [y/N]")
	p.write("n")
	p.write("kkk")
	p.expect("What redo to here brings:")
	p.write("j\r")
	p.expect("The sandbox is at this step.")
	p.resize(140, 30)
	p.expect("│")
	p.write("j\ry")
	p.expect("Undo 1 step in run? [y/N]") // an answer before the question is none
	p.write("y")
	p.expect("is at step")
	end(p, 0)

	p = begin()
	p.write("g\r")
	p.expect("Redo 1 step in run? [y/N]")
	p.write("y")
	p.expect("is at step")
	end(p, 0)

	for _, keys := range []string{"q", "\x03"} {
		p = begin()
		p.write(keys)
		end(p, 0)
		if strings.Contains(p.seen.String(), "is at step") {
			t.Errorf("%q goes somewhere", keys)
		}
	}
	p = begin()
	if err := p.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	end(p, 143)

	p = onPty(t, "undo", "--list", "--format", "name", "run")
	p.expect("STEP")
	p.end(0)
	if strings.Contains(p.seen.String(), "\x1b[?1049h") {
		t.Error("with --format, it is no list to choose from")
	}
}

func TestStepPickerKeys(t *testing.T) {
	var p stepPicker
	var got []string
	for _, typed := range []string{"j\x1b", "[", "A\x1bOBq", "\x1b[5", "~\x1bx"} {
		got = append(got, p.split([]byte(typed))...)
	}
	if want := []string{"j", "\x1b[A", "\x1bOB", "q", "\x1b[5~", "\x1b", "x"}; !reflect.DeepEqual(got, want) {
		t.Errorf("keys %q, want %q", got, want)
	}
}

// TestStepPickerFits: nothing is drawn outside of any terminal, and the step that is chosen is on it.
func TestStepPickerFits(t *testing.T) {
	list := runtime.UndoList{SandboxName: "run"}
	for i := range 50 {
		list.Steps = append(list.Steps, runtime.UndoStep{Back: i, Checkpoint: runtime.Checkpoint{Message: "step"}})
	}
	for _, size := range []runtime.Size{{Width: 40, Height: 10}, {Width: 80, Height: 24}, {Width: 200, Height: 60}} {
		p := &stepPicker{list: list, size: size, diffs: map[int][]string{}}
		for i := range list.Steps {
			p.diffs[i] = strings.Split(strings.Repeat("+line\n", 300), "\n")
		}
		for _, key := range strings.Split(strings.Repeat("j ", 60)+"b g G b k", " ") {
			p.press(key)
			screen := string(p.draw())
			for _, m := range regexp.MustCompile(`\x1b\[(\d+);(\d+)H`).FindAllStringSubmatch(screen, -1) {
				row, _ := strconv.Atoi(m[1])
				column, _ := strconv.Atoi(m[2])
				if row < 1 || row > int(size.Height) || column < 1 || column > int(size.Width) {
					t.Fatalf("%v: drawn at %d,%d", size, row, column)
				}
			}
			if n := strings.Count(screen, reversed); n != 2 { // the step and the keys
				t.Fatalf("%v: %d reversed lines after %q", size, n, key)
			}
		}
	}
}
