package traces

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/traces/tracestest"
)

// An action of agentbox's own is a trace of its own, and a step of a verb part of the verb's; one
// that fails each second is one span until its outcome differs.
func TestOwn(t *testing.T) {
	c := tracestest.New(t)
	environment(t, prefix+"ENDPOINT="+c.URL)
	tr := opened(t, Options{})
	observe := tr.Observer("service")
	ctx, end := tr.Command(t.Context(), "agentbox checkpoint")
	about := runtime.Subject{Sandbox: "0123456789abcdef", Name: "box"}
	why := "lease 1b9e: its deadline has passed"
	removal := runtime.ByItself("rm", about, runtime.Own{By: runtime.ByKeeper, Why: why})
	failed := fmt.Errorf("a mount: %w", runtime.ErrBusy)
	for _, err := range []error{failed, failed, failed, nil} {
		if got := observe(ctx, removal, func(context.Context) error { return err }); !errors.Is(got, err) {
			t.Errorf("%v, want %v", got, err)
		}
	}
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Error(err)
		}
	}
	nothing := func(context.Context) error { return nil }
	must(observe(ctx, runtime.ByItself("prune", about, runtime.Own{
		Why: "retention of policy p", Made: []string{"1", "2"}, Past: true,
	}), nothing))
	restore := runtime.ByItself("restore", about, runtime.Own{By: runtime.ByWatch, Why: "restart policy always"})
	must(observe(ctx, restore, func(context.Context) error {
		restore.Result = runtime.Restored{Checkpoint: runtime.Checkpoint{
			ID: "c1", Sandbox: about.Sandbox, SandboxName: about.Name,
		}, Changed: 3}
		return nil
	}))
	must(observe(t.Context(), runtime.ByItself("recover", about,
		runtime.Own{Why: "found: gone", Did: []string{"freed it"}, Past: true, Alone: true}), nothing))
	end(0, "")
	tr.Close()

	verb := c.One(t, "agentbox checkpoint")
	var removals []string
	for _, s := range c.Spans() {
		if s.Name == verb.Name {
			continue
		}
		if s.Attrs["agentbox.sandbox.id"] != about.Sandbox || s.Attrs["agentbox.sandbox.name"] != about.Name ||
			s.Attrs["agentbox.why"] == "" || s.Attrs["agentbox.by"] == nil {
			t.Errorf("%+v", s)
		}
		if of := s.Trace == verb.Trace; of != (s.Name == "agentbox.prune") || of != (s.Parent == verb.ID) ||
			!of && s.Parent != "" {
			t.Errorf("it is part of another trace: %+v", s)
		}
		if s.Name == "agentbox.rm" {
			removals = append(removals, fmt.Sprint(s.Error, s.Attrs["error.type"], s.Attrs["agentbox.by"],
				s.Attrs["agentbox.why"]))
		}
	}
	if want := fmt.Sprintf("[busybusykeeper%[1]s <nil>keeper%[1]s]", why); fmt.Sprint(removals) != want {
		t.Errorf("removals: %v, want %s", removals, want)
	}
	if s := c.One(t, "agentbox.prune"); s.Attrs["agentbox.by"] != "service" || s.Attrs["agentbox.count"] != int64(2) {
		t.Errorf("%+v", s)
	}
	if s := c.One(t, "agentbox.restore"); s.Attrs["agentbox.checkpoint.id"] != "c1" ||
		s.Attrs["agentbox.restore.changed"] != int64(3) {
		t.Errorf("%+v", s)
	}
	if c.One(t, "agentbox.recover"); c.Contains("freed it") {
		t.Error("what was done is in a span")
	}
}
