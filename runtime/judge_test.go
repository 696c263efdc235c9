package runtime

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/agentbox/agentbox/criu/stage"
	"github.com/agentbox/agentbox/runtime/store"
)

// standing is a backend whose only container is as it is, or cannot be looked at.
type standing struct {
	Backend
	status Status
	err    error
}

func (s standing) Inspect(context.Context, string) (Container, error) {
	return Container{Status: s.status}, s.err
}

// A start that failed because the sandbox runs already is a restore if somebody else's
// start has used it, and if it runs indeed.
func TestFailedStartIsNoRestore(t *testing.T) {
	state := errors.Join(errors.New("its end could not be awaited"), fmt.Errorf("it is running: %w", ErrState))
	other := errors.New("no such command")
	for _, c := range []struct {
		start   error
		used    bool
		kind    string
		now     standing
		want    error // nil: it is restored
		because string
	}{
		{state, true, KindFull, standing{status: Running}, nil, "somebody else started it"},
		{state, true, KindFull, standing{status: Paused}, nil, "somebody else started it, and it was paused at the checkpoint"},
		{state, true, KindFull, standing{status: Exited}, ErrState, "it was restored, and is gone again"},
		{state, true, KindFull, standing{status: Created}, ErrState, "it does not run"},
		{state, true, KindFull, standing{status: Running, err: errors.New("no answer")}, ErrState, "nobody knows whether it runs"},
		{state, true, KindFull, standing{err: ErrNotFound}, ErrState, "it was removed"},
		{state, false, KindFull, standing{status: Running}, ErrState, "what runs is not the checkpoint"},
		{other, true, KindFull, standing{status: Running}, other, "the start failed otherwise"},
		{nil, true, KindFull, standing{}, nil, "it was restored"},
		{nil, false, KindFull, standing{status: Running}, ErrUnsupported, "it was started afresh"},
		{nil, false, KindFiles, standing{}, nil, "it was to be started afresh"},
		{state, true, KindFiles, standing{status: Running}, ErrState, "there was nothing to restore"},
	} {
		r := &restoration{sb: &locked{Sandbox: store.Sandbox{ID: newID()}, host: Host{Backend: c.now}}, row: store.Checkpoint{Kind: c.kind}}
		r.c.Stage = stage.Slot{Run: t.TempDir(), ID: "theirs"}
		if !c.used {
			if err := stage.Put(r.c.Stage.Run, r.c.Stage.ID, stage.Restore{Images: t.TempDir(), Work: t.TempDir()}); err != nil {
				t.Fatal(err)
			}
		}
		if err := r.judge(t.Context(), c.start); !errors.Is(err, c.want) || c.want == nil && err != nil {
			t.Errorf("%s: got %v, want %v", c.because, err, c.want)
		}
	}
}
