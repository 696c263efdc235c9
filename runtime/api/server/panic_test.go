package server

import (
	"context"
	"errors"
	"io"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/agentbox/agentbox/images/image"
	"github.com/agentbox/agentbox/internal/guard"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/api"
)

// A panic is the failure of one request, whatever its kind: its caller is told, it counts,
// what it has left is put in order, and others are none the worse.
func TestPanics(t *testing.T) {
	broken := false
	defect := func() {
		if broken {
			panic("a defect")
		}
	}
	svc := &service{
		sandboxes: func(context.Context) ([]runtime.Sandbox, error) { defect(); return nil, nil },
		checkpoint: func(_ context.Context, _ string, _ runtime.CheckpointOptions) (runtime.Checkpoint, error) {
			defect()
			return runtime.Checkpoint{}, nil
		},
		create: func(r runtime.CreateRequest) (runtime.Sandbox, error) {
			defect()
			return runtime.Sandbox{}, nil
		},
		pause:    func() error { defect(); return nil },
		copyFrom: func(_ context.Context, w io.Writer) error { defect(); return nil },
		copyTo:   func(context.Context, io.Reader) error { defect(); return nil },
		exec: func(context.Context, runtime.Process, runtime.Streams) (int, error) {
			defect()
			return 0, nil
		},
		logs:    func(context.Context, io.Writer, io.Writer) error { defect(); return nil },
		sandbox: func() (runtime.Sandbox, error) { return runtime.Sandbox{}, nil },

		checkpoints: func(runtime.CheckpointFilter) ([]runtime.Checkpoint, error) { return nil, nil },
	}
	var settled atomic.Int64
	m := &Metrics{}
	c := client(t, serving(t, svc, Options{Metrics: m, Before: func(context.Context) error {
		settled.Add(1)
		return nil
	}}))
	for name, do := range map[string]func() error{
		"list":   func() error { _, err := c.Sandboxes(t.Context()); return err },
		"verb":   func() error { return c.Pause(t.Context(), "c") },
		"create": func() error { _, err := c.Create(t.Context(), runtime.CreateRequest{}); return err },
		"progress": func() error {
			_, err := c.Create(t.Context(),
				runtime.CreateRequest{Pull: image.PullOptions{Progress: func(image.Progress) {}}})
			return err
		},
		"key":  func() error { return c.Pause(api.WithKey(t.Context(), "one"), "c") },
		"from": func() error { return c.CopyFrom(t.Context(), "c", "/", io.Discard) },
		"to":   func() error { return c.CopyTo(t.Context(), "c", "/", strings.NewReader("")) },
		"detach": func() error {
			_, err := c.Exec(t.Context(), "c", runtime.Process{Detach: true}, runtime.Streams{})
			return err
		},
		"session": func() error {
			_, err := c.Exec(t.Context(), "c", runtime.Process{}, runtime.Streams{Stdout: io.Discard})
			return err
		},
		"stream": func() error { return c.Logs(t.Context(), "c", runtime.LogOptions{}, io.Discard, io.Discard) },
	} {
		broken = true
		panics, before := guard.Count(), settled.Load()
		err := do()
		if err == nil || !strings.Contains(err.Error(), "panic: a defect") {
			t.Errorf("%s: %v", name, err)
		}
		if guard.Count() != panics+1 {
			t.Errorf("%s: %d panics were counted", name, guard.Count()-panics)
		}
		// A verb puts in order what others have left before it begins, too.
		if n := settled.Load() - before; n < 1 && name != "list" || name == "verb" && n != 2 {
			t.Errorf("%s: put in order %d times", name, n)
		}
		broken = false
		if name != "key" {
			if err := do(); err != nil {
				t.Errorf("%s, afterwards: %v", name, err)
			}
		}
	}
	if err := c.Pause(api.WithKey(t.Context(), "one"), "c"); err != nil { // it may have been done, and is asked for again
		t.Error(err)
	}
	_, data := fetched(t, c, "/metrics")
	for _, want := range []string{
		`agentbox_requests_total{verb="sandboxes pause",outcome="internal"} 2`,
		`agentbox_requests_total{verb="get sandboxes",outcome="internal"} 1`, "agentbox_panics_total ",
	} {
		if !strings.Contains(string(data), want) {
			t.Errorf("no %s in\n%s", want, data)
		}
	}
}

// A partly written answer is cut off, never taken for the whole.
func TestPanicHalfway(t *testing.T) {
	svc := &service{copyFrom: func(_ context.Context, w io.Writer) error {
		_, err := w.Write(make([]byte, 1<<20))
		if err == nil {
			panic("a defect")
		}
		return err
	}}
	c := client(t, serving(t, svc, Options{}))
	if err := c.CopyFrom(t.Context(), "c", "/", io.Discard); err == nil || errors.Is(err, http.ErrAbortHandler) {
		t.Error(err)
	}
}
