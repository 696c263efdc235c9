package test

import (
	"context"
	"errors"
	"strconv"
	"testing"

	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/api"
	"github.com/agentbox/agentbox/runtime/session"
)

// A session of a Go program: a counter is put back to the later and to the earlier
// of two checkpoints, and nothing of it is left but what was to be kept.
func TestSession(t *testing.T) {
	t.Parallel()
	b := memoryBox(t)
	_, socket := b.serve()
	c := api.Dial(socket)
	defer c.Close()
	ctx, cancel := context.WithCancel(t.Context())
	req := func(name string) runtime.CreateRequest {
		return runtime.CreateRequest{Spec: runtime.Spec{
			Name: name, Image: "busybox", Args: []string{"sh", "-c", counter},
			Network: runtime.Network{Mode: runtime.NetworkNone},
		}}
	}
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	if r, err := c.Ready(ctx); err != nil || !r.OK {
		t.Fatalf("%+v, %v", r, err)
	}
	b.start("other", "--network", "none", "busybox", "sleep", "1000")
	s := session.New(c)
	_, err := s.Open(ctx, req("c"), runtime.RestoreOptions{Trigger: "at-10"}) // fresh
	must(err)
	for _, at := range []int{10, 20} {
		b.reaches("c", at)
		_, err := s.Checkpoint(ctx, "c", at == 10, runtime.CheckpointOptions{Trigger: "at-" + strconv.Itoa(at)})
		must(err)
	}
	b.reaches("c", 30)
	for _, r := range []struct{ at, below int }{{20, 30}, {10, 20}} {
		_, err := c.Restore(ctx, "c", runtime.RestoreOptions{Trigger: "at-" + strconv.Itoa(r.at)})
		must(err)
		must(c.Pause(ctx, "c"))
		if n := b.count("c"); n < r.at || n >= r.below {
			t.Errorf("at %d the counter goes on from %d", r.at, n)
		}
		must(c.Unpause(ctx, "c"))
	}
	if _, err := s.Open(ctx, req("c"), runtime.RestoreOptions{Trigger: "never"}); !errors.Is(err, runtime.ErrExists) {
		t.Error(err)
	}
	_, err = s.Fork(ctx, "other", runtime.ForkOptions{Count: 2})
	must(err)
	cancel() // its end is sure to come
	must(s.Close(ctx))
	left := func(sandbox, trigger string) {
		t.Helper()
		sandboxes, err := c.Sandboxes(t.Context())
		must(err)
		list, err := c.Checkpoints(t.Context(), runtime.CheckpointFilter{All: true})
		must(err)
		if len(sandboxes) != 1 || sandboxes[0].Name != sandbox || len(list) != 1 || list[0].Trigger != trigger {
			t.Fatalf("there are %+v and %+v", sandboxes, list)
		}
	}
	left("other", "at-10")

	// The next session goes on with what was kept.
	s = session.New(c)
	sb, err := s.Open(t.Context(), req("c"), runtime.RestoreOptions{Trigger: "at-10"})
	if err != nil || sb.Name != "c" || sb.Status != runtime.Running {
		t.Fatal(sb, err)
	}
	must(s.Close(t.Context()))
	left("other", "at-10")
}
