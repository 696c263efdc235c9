package engine

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/agentbox/agentbox/criu/stage"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/store"
)

// standing is a backend whose only container is as it is, or cannot be looked at.
type standing struct {
	runtime.Backend
	status runtime.Status
	err    error
}

func (s standing) Inspect(context.Context, string) (runtime.Container, error) {
	return runtime.Container{Status: s.status}, s.err
}

// TestFailedStartIsNoRestore: a start that failed because the sandbox runs already counts as a
// restore only if another start has used the stage, and the sandbox does run.
func TestFailedStartIsNoRestore(t *testing.T) {
	state := errors.Join(errors.New("its end could not be awaited"), fmt.Errorf("it is running: %w", runtime.ErrState))
	other := errors.New("no such command")
	for _, c := range []struct {
		start   error
		used    bool
		kind    string
		now     standing
		want    error // nil: it is restored
		because string
	}{
		{state, true, runtime.KindFull, standing{status: runtime.Running}, nil, "another program started it"},
		{
			state, true, runtime.KindFull, standing{status: runtime.Paused}, nil,
			"another program started it, and it was paused at the checkpoint",
		},
		{
			state, true, runtime.KindFull, standing{status: runtime.Exited}, runtime.ErrState,
			"it was restored, and is gone again",
		},
		{state, true, runtime.KindFull, standing{status: runtime.Created}, runtime.ErrState, "it does not run"},
		{
			state, true, runtime.KindFull, standing{status: runtime.Running, err: errors.New("no answer")},
			runtime.ErrState, "it is not known whether it runs",
		},
		{state, true, runtime.KindFull, standing{err: runtime.ErrNotFound}, runtime.ErrState, "it was removed"},
		{
			state, false, runtime.KindFull, standing{status: runtime.Running}, runtime.ErrState,
			"what runs is not the checkpoint",
		},
		{other, true, runtime.KindFull, standing{status: runtime.Running}, other, "the start failed otherwise"},
		{nil, true, runtime.KindFull, standing{}, nil, "it was restored"},
		{
			nil, false, runtime.KindFull, standing{status: runtime.Running}, runtime.ErrUnsupported,
			"it was started afresh",
		},
		{nil, false, runtime.KindFiles, standing{}, nil, "it was to be started afresh"},
		{
			state, true, runtime.KindFiles, standing{status: runtime.Running}, runtime.ErrState,
			"there was nothing to restore",
		},
	} {
		sb := &locked{Sandbox: store.Sandbox{ID: newID()}, host: Host{Backend: c.now}}
		r := &processesPart{restoration: &restoration{sb: sb, row: store.Checkpoint{Kind: c.kind}}}
		r.c.Stage = stage.Slot{Run: t.TempDir(), ID: "theirs"}
		if !c.used {
			if err := r.c.Stage.Put(stage.Restore{Images: t.TempDir(), Work: t.TempDir()}); err != nil {
				t.Fatal(err)
			}
		}
		if err := r.judge(t.Context(), c.start); !errors.Is(err, c.want) || c.want == nil && err != nil {
			t.Errorf("%s: got %v, want %v", c.because, err, c.want)
		}
	}
}
