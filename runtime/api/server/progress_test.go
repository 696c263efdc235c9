package server

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/agentbox/agentbox/images/image"
	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/runtime"
)

// A verb of several phases reports each of them before its result, or its error, and nothing once
// it has ended.
func TestSteps(t *testing.T) {
	steps := []runtime.Step{
		{Phase: runtime.PhaseFiles, Done: 5}, {Phase: runtime.PhaseFiles, Done: 7},
		{Phase: runtime.PhaseStoring, Done: 3, Total: 9},
	}
	layer := image.Progress{Layer: "sha256:1", Stage: image.StagePulling, Done: 1, Total: 2}
	late := make(chan runtime.Steps, 10)
	var fails error
	report := func(fn runtime.Steps) {
		if fn == nil {
			return
		}
		for _, s := range steps {
			fn(s)
		}
		late <- fn
	}
	svc := &service{
		sandbox: func() (runtime.Sandbox, error) { return runtime.Sandbox{}, nil },
		checkpoint: func(_ context.Context, _ string, o runtime.CheckpointOptions) (runtime.Checkpoint, error) {
			report(o.Progress)
			return runtime.Checkpoint{ID: "made"}, fails
		},
		fork: func(o runtime.ForkOptions) ([]runtime.Forked, error) {
			report(o.Progress)
			return []runtime.Forked{{Took: 1}}, fails
		},
		restore: func(_ context.Context, o runtime.RestoreOptions) (runtime.Restored, error) {
			if o.Pull.Progress != nil {
				o.Pull.Progress(layer)
			}
			report(o.Progress)
			return runtime.Restored{Changed: 4}, fails
		},
	}
	c := client(t, serving(t, svc, Options{}))
	for _, fails = range []error{nil, fault.ErrState} {
		var got []runtime.Step
		fn := func(s runtime.Step) { got = append(got, s) }
		told := func(verb string, err error) {
			t.Helper()
			if !errors.Is(err, fails) {
				t.Errorf("%s: %v, want %v", verb, err, fails)
			}
			if d := cmp.Diff(steps, got); d != "" {
				t.Errorf("%s: %s", verb, d)
			}
			got = nil
			(<-late)(runtime.Step{Phase: "late"}) // the stream has ended
		}
		made, err := c.Checkpoint(t.Context(), "c", runtime.CheckpointOptions{Progress: fn})
		told("checkpoint", err)
		forks, err := c.Fork(t.Context(), "c", runtime.ForkOptions{Progress: fn})
		told("fork", err)
		if len(forks) != 1 {
			t.Errorf("%+v", forks)
		}
		back, err := c.Restore(t.Context(), "c", runtime.RestoreOptions{Progress: fn})
		told("restore", err)
		if fails == nil && (made.ID != "made" || back.Changed != 4) {
			t.Errorf("%+v, %+v", made, back)
		}
		var layers []image.Progress
		opts := runtime.RestoreOptions{Progress: fn}
		opts.Pull.Progress = func(p image.Progress) { layers = append(layers, p) }
		_, err = c.Restore(t.Context(), "c", opts)
		told("restore with a pull", err)
		opts.Progress = nil
		if _, err = c.Restore(t.Context(), "c", opts); !errors.Is(err, fails) {
			t.Error(err)
		}
		<-late
		if d := cmp.Diff([]image.Progress{layer, layer}, layers); d != "" {
			t.Error(d)
		}
		if _, err = c.Checkpoint(t.Context(), "c", runtime.CheckpointOptions{}); !errors.Is(err,
			fails) || len(late) > 0 {
			t.Errorf("%v, and told though nobody asked: %v", err, len(late) > 0)
		}
	}
}

// A cancelled verb reports until it has ended.
func TestStepsCancelled(t *testing.T) {
	undone := make(chan struct{})
	svc := &service{checkpoint: func(ctx context.Context, _ string, o runtime.CheckpointOptions) (runtime.Checkpoint,
		error) {
		o.Progress(runtime.Step{Phase: runtime.PhaseFiles})
		<-ctx.Done()
		close(undone)
		return runtime.Checkpoint{}, context.Cause(ctx)
	}}
	c := client(t, serving(t, svc, Options{}))
	ctx, cancel := context.WithCancel(t.Context())
	_, err := c.Checkpoint(ctx, "c", runtime.CheckpointOptions{Progress: func(runtime.Step) { cancel() }})
	if !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	<-undone
}

// A caller that does not read its progress delays no verb.
func TestStepsNotTaken(t *testing.T) {
	done := make(chan struct{}, 2)
	svc := &service{checkpoint: func(_ context.Context, _ string, o runtime.CheckpointOptions) (runtime.Checkpoint,
		error) {
		for i := 0; o.Progress != nil && i < 1000; i++ {
			o.Progress(runtime.Step{Phase: runtime.Phase(strings.Repeat("x", 64<<10))})
		}
		done <- struct{}{}
		return runtime.Checkpoint{}, nil
	}}
	socket := serving(t, svc, Options{Turns: 1})
	conn, err := net.Dial("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if _, err := io.WriteString(conn,
		"POST /v1/sandboxes/c/checkpoints HTTP/1.1\r\nHost: agentbox\r\nAccept: text/event-stream\r\nContent-Length: 2\r\n\r\n{}"); err != nil {
		t.Fatal(err)
	}
	<-done
	ctx, cancel := context.WithTimeoutCause(t.Context(), 5*time.Second, fmt.Errorf("it has no turn"))
	defer cancel()
	if _, err := client(t, socket).Checkpoint(ctx, "other", runtime.CheckpointOptions{}); err != nil {
		t.Error(err)
	}
}
