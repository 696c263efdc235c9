package engine_test

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/agentbox/agentbox/policy"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/store"
)

// all lists the records of all checkpoints of a root.
func (r *rig) all(t testing.TB) []store.Checkpoint {
	t.Helper()
	rows, err := r.store.Checkpoints(ctx, store.Filter{All: true})
	if err != nil {
		t.Fatal(err)
	}
	return rows
}

// TestBase: a sandbox with a workspace begins with a checkpoint of its files, which no rule of prune
// removes as long as the sandbox is there, and which goes with it if it is the only one.
func TestBase(t *testing.T) {
	r := newRig(t, nil)
	dir := t.TempDir()
	if r.create(t, "plain"); len(r.all(t)) > 0 {
		t.Fatal("a sandbox without a workspace has a checkpoint")
	}
	put := func(dir, content string) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(dir, "a"), []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	put(dir, "mine")
	sb, upper := r.overWorkspace(t, "c", dir)
	base, err := r.CheckpointInfo(ctx, "c@HEAD")
	if err != nil {
		t.Fatal(err)
	}
	if base.Trigger != runtime.TriggerBase || base.Kind != runtime.KindFiles || base.ID != sb.Head || base.Parent != "" {
		t.Errorf("%+v", base)
	}

	// It is a way back, also over what the directory has become.
	put(upper, "the agent's")
	put(dir, "mine, too")
	if _, err := r.Restore(ctx, "c", runtime.RestoreOptions{Progress: func(runtime.Step) {}}); err != nil {
		t.Fatal(err)
	}
	if got := contents(t, upper)["a"]; got != "mine" {
		t.Errorf("after the restore a is %q", got)
	}

	r.take(t, "c", runtime.CheckpointOptions{})
	pruned, err := r.Prune(ctx, runtime.PruneOptions{KeepLast: 1})
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range pruned.Removed {
		if p.Checkpoint.ID == base.ID {
			t.Error("prune removed the base")
		}
	}
	if _, err := r.Checkpoint(ctx, "c", runtime.CheckpointOptions{Trigger: runtime.TriggerBase}); !errors.Is(err, runtime.ErrInvalid) {
		t.Errorf("its trigger for another checkpoint: %v", err)
	}
	if err := r.Remove(ctx, "c", runtime.RemoveOptions{}); err != nil {
		t.Fatal(err)
	}
	if rows := r.all(t); len(rows) != 2 {
		t.Errorf("%d checkpoints are left, want the base and the other", len(rows))
	}
	for _, row := range r.all(t) {
		if err := r.RemoveCheckpoint(ctx, row.ID); err != nil {
			t.Fatal(err)
		}
	}
	r.overWorkspace(t, "d", dir)
	if err := r.Remove(ctx, "d", runtime.RemoveOptions{}); err != nil {
		t.Fatal(err)
	}
	if rows := r.all(t); len(rows) > 0 {
		t.Errorf("left: %+v", rows)
	}
}

// TestBaseFails: a sandbox whose base cannot be taken is not created.
func TestBaseFails(t *testing.T) {
	for _, at := range []string{"store.commit.before-rename", "store.commit.after-row", "create.after-base"} {
		t.Run(at, func(t *testing.T) {
			r := newRig(t, nil)
			t.Setenv("AGENTBOX_FAILPOINT", at+"=error")
			_, err := r.Create(ctx, runtime.CreateRequest{Spec: runtime.Spec{
				Name: "c", Image: "base", Args: []string{"true"}, Network: runtime.Network{Mode: runtime.NetworkNone},
				Mounts: []runtime.Mount{{Type: runtime.MountWorkspace, Source: t.TempDir(), Target: "/work"}},
			}})
			if err == nil || !strings.Contains(err.Error(), "failpoint "+at) {
				t.Errorf("error %v (tests need the tag failpoint)", err)
			}
			if _, err := r.Sandbox(ctx, "c"); !errors.Is(err, runtime.ErrNotFound) {
				t.Errorf("the sandbox: %v", err)
			}
			if rows := r.all(t); len(rows) > 0 {
				t.Errorf("left: %+v", rows)
			}
			if left, err := r.store.Intents(ctx); err != nil || len(left) > 0 {
				t.Errorf("in the journal: %v, %v", left, err)
			}
		})
	}
}

// TestExecSteps: with a workspace each exec that has changed a file is followed by a checkpoint, which is
// called by the program or a message; what fails changes nothing of the exec.
func TestExecSteps(t *testing.T) {
	r := newRig(t, func(b runtime.Backend) runtime.Backend { return &stopping{Backend: b} })
	_, upper := r.overWorkspace(t, "c", t.TempDir())
	if _, err := r.Start(ctx, "c", nil); err != nil {
		t.Fatal(err)
	}
	exec := func(p runtime.Process) {
		t.Helper()
		if exit, err := r.Exec(ctx, "c", p, runtime.Streams{}); exit != 0 || err != nil {
			t.Fatalf("exit %d, %v", exit, err)
		}
	}
	head := func() runtime.Checkpoint {
		t.Helper()
		c, err := r.CheckpointInfo(ctx, "c@HEAD")
		if err != nil {
			t.Fatal(err)
		}
		return c
	}
	write := func(name string) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(upper, name), []byte(name), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	run := runtime.Process{Args: []string{"true", "secret"}}
	base := head()
	exec(run)
	if c := head(); c.ID != base.ID {
		t.Errorf("a step without a change: %+v", c)
	}
	write("a")
	exec(run)
	first := head()
	if first.Trigger != runtime.TriggerExec || first.Message != "true" || first.Labels["exec"] != "true" || first.Parent != base.ID {
		t.Errorf("%+v", first)
	}
	write("b")
	run.Message = "what it is"
	exec(run)
	if c := head(); c.Message != run.Message || c.Parent != first.ID {
		t.Errorf("%+v", c)
	}
	run.Message = "\x00"
	if _, err := r.Exec(ctx, "c", run, runtime.Streams{}); !errors.Is(err, runtime.ErrInvalid) {
		t.Errorf("a message that is none: %v", err)
	}
	run.Message = ""
	write("c")
	t.Setenv("AGENTBOX_FAILPOINT", "store.commit.before-rename=error")
	exec(run)
	t.Setenv("AGENTBOX_FAILPOINT", "")
	if c := head(); c.Message != "what it is" {
		t.Errorf("the step did not fail (tests need the tag failpoint): %+v", c)
	}
	if _, err := r.Checkpoint(ctx, "c", runtime.CheckpointOptions{Trigger: runtime.TriggerExec}); !errors.Is(err, runtime.ErrInvalid) {
		t.Errorf("the trigger of steps for another checkpoint: %v", err)
	}

	create := func(name, steps string, p *policy.Policy) error {
		_, err := r.Create(ctx, runtime.CreateRequest{Policy: p, Spec: runtime.Spec{
			Name: name, Image: "base", Args: []string{"true"}, Network: runtime.Network{Mode: runtime.NetworkNone},
			Steps: steps, Mounts: []runtime.Mount{{Type: runtime.MountWorkspace, Source: t.TempDir(), Target: "/work"}},
		}})
		return err
	}
	strict, err := r.opts.Policies.Find(policy.Default)
	if err != nil {
		t.Fatal(err)
	}
	own := *strict
	own.Rules.Triggers = nil
	if err := create("d", runtime.StepsOn, &own); !errors.Is(err, runtime.ErrDenied) {
		t.Errorf("steps under a policy without them: %v", err)
	}
	if err := create("d", "", &own); err != nil {
		t.Fatal(err)
	}
	if sb, err := r.Sandbox(ctx, "d"); err != nil || sb.Spec.TakesSteps() {
		t.Errorf("steps %q under a policy without them, %v", sb.Spec.Steps, err)
	}
	if err := create("e", "sometimes", nil); !errors.Is(err, runtime.ErrInvalid) {
		t.Errorf("steps that are none: %v", err)
	}
}
