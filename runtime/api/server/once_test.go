package server

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/api"
)

var silent = slog.New(slog.NewTextHandler(io.Discard, nil))

func TestKeys(t *testing.T) {
	times := 0
	var fails error
	svc := &service{checkpoint: func(_ context.Context, _ string, o runtime.CheckpointOptions) (runtime.Checkpoint,
		error) {
		times++
		if fails != nil {
			return runtime.Checkpoint{}, fails
		}
		return runtime.Checkpoint{ID: fmt.Sprint(times), Labels: o.Labels}, nil
	}}
	dir := t.TempDir()
	c := client(t, serving(t, svc, Options{Requests: dir}))
	take := func(key, name string) (runtime.Checkpoint, error) {
		return c.Checkpoint(api.WithKey(t.Context(), key), "c", runtime.CheckpointOptions{Name: name})
	}
	first, err := take("k", "a")
	if err != nil || len(first.Labels[LabelRequest]) < 20 {
		t.Fatal(first, err)
	}
	if again, err := take("k", "a"); err != nil || again.ID != first.ID || times != 1 {
		t.Error(again, err, times)
	}
	if _, err := take("k", "b"); !errors.Is(err, fault.ErrInvalid) {
		t.Error(err)
	}
	// A failed verb has done nothing, and may be tried again.
	fails = fault.ErrBusy
	if _, err := take("l", "a"); !errors.Is(err, fault.ErrBusy) {
		t.Error(err)
	}
	fails = nil
	other, err := take("l", "a")
	if err != nil || other.Labels[LabelRequest] == first.Labels[LabelRequest] {
		t.Error(other, err)
	}
	if _, err := take(strings.Repeat("k", maxKey+1), "a"); !errors.Is(err, fault.ErrInvalid) {
		t.Error(err)
	}
	// After a day a key is as good as new.
	files, err := filepath.Glob(filepath.Join(dir, "*.json"))
	if err != nil || len(files) != 2 {
		t.Fatal(files, err)
	}
	for _, f := range files {
		if err := os.Chtimes(f, time.Time{}, time.Now().Add(-keepFor-time.Minute)); err != nil {
			t.Fatal(err)
		}
	}
	if late, err := take("k", "b"); err != nil || late.ID == first.ID {
		t.Error(late, err)
	}
}

// killed leaves a key's record as a service does that is killed in the middle of
// a verb, which do calls, and serves svc from there on.
func killed(t *testing.T, svc *service, opts Options, do func(context.Context, *caller)) *caller {
	t.Helper()
	opts.Requests = t.TempDir()
	whole := *svc
	svc.checkpoint = func(context.Context, string, runtime.CheckpointOptions) (runtime.Checkpoint, error) {
		panic(http.ErrAbortHandler)
	}
	svc.create = func(runtime.CreateRequest) (runtime.Sandbox, error) { panic(http.ErrAbortHandler) }
	svc.pause = func() error { panic(http.ErrAbortHandler) }
	c := client(t, serving(t, svc, opts))
	do(t.Context(), c)
	*svc = whole
	return c
}

// A second try finds what the first one made, and nothing that looks like it.
func TestKeyOfKilled(t *testing.T) {
	const key = "turn 1"
	var nonce string
	made := []runtime.Checkpoint{
		{ID: "by key", Sandbox: "c", Labels: map[string]string{LabelRequest: key}},
	}
	svc := &service{
		checkpoints: func(f runtime.CheckpointFilter) (found []runtime.Checkpoint, err error) {
			if f.Sandbox != "c" || f.All {
				t.Errorf("%+v", f)
			}
			for _, c := range made {
				if c.Labels[LabelRequest] == f.Labels[LabelRequest] {
					found = append(found, c)
				}
			}
			return found, nil
		},
		checkpoint: func(_ context.Context, ref string, o runtime.CheckpointOptions) (runtime.Checkpoint, error) {
			nonce = o.Labels[LabelRequest]
			return runtime.Checkpoint{ID: "new"}, nil
		},
	}
	take := func(ctx context.Context, c *caller) (runtime.Checkpoint, error) {
		return c.Checkpoint(api.WithKey(ctx, key), "c", runtime.CheckpointOptions{})
	}
	c := killed(t, svc, Options{}, func(ctx context.Context, c *caller) { _, _ = take(ctx, c) })
	if got, err := take(t.Context(), c); err != nil || got.ID != "new" || nonce == "" || nonce == key {
		t.Error(got, err, nonce)
	}

}

func TestKeyOfKilledCreate(t *testing.T) {
	const key, mine = "turn 1", "sandbox"
	boxes := []runtime.Sandbox{}
	svc := &service{
		sandboxes: func(context.Context) ([]runtime.Sandbox, error) { return boxes, nil },
		create: func(r runtime.CreateRequest) (runtime.Sandbox, error) {
			return runtime.Sandbox{ID: mine, Labels: r.Spec.Labels}, nil
		},
	}
	boxes = append(boxes, runtime.Sandbox{ID: "somebody's", Labels: map[string]string{LabelRequest: key}})
	build := func(ctx context.Context, c *caller) (runtime.Sandbox, error) {
		return c.Create(api.WithKey(ctx, key), runtime.CreateRequest{})
	}
	c := killed(t, svc, Options{}, func(ctx context.Context, c *caller) { _, _ = build(ctx, c) })
	if got, err := build(t.Context(), c); err != nil || got.ID != mine || got.Labels[LabelRequest] == key {
		t.Error(got, err)
	}
}

// The sandbox made by the first attempt is the answer, as it is described, not as lists have it.
func TestKeyOfKilledCreateDone(t *testing.T) {
	var boxes []runtime.Sandbox
	made := func(r runtime.CreateRequest) (runtime.Sandbox, error) {
		boxes = append(boxes, runtime.Sandbox{ID: fmt.Sprint(len(boxes)), Labels: r.Spec.Labels})
		return boxes[len(boxes)-1], nil
	}
	svc := &service{
		create:    made,
		sandboxes: func(context.Context) ([]runtime.Sandbox, error) { return boxes, nil },
		sandbox: func() (runtime.Sandbox, error) {
			whole := boxes[0]
			whole.Spec.Policy = &runtime.Policy{Name: "p", Rules: []byte(`{"privileged":false}`)}
			return whole, nil
		},
	}
	build := func(ctx context.Context, c *caller) (runtime.Sandbox, error) {
		return c.Create(api.WithKey(ctx, "turn 1"), runtime.CreateRequest{})
	}
	c := killed(t, svc, Options{}, func(ctx context.Context, c *caller) {
		svc.create = func(r runtime.CreateRequest) (runtime.Sandbox, error) {
			_, _ = made(r)
			panic(http.ErrAbortHandler)
		}
		_, _ = build(ctx, c)
	})
	if got, err := build(t.Context(), c); err != nil || got.ID != "0" || got.Spec.Policy == nil ||
		string(got.Spec.Policy.Rules) != `{"privileged":false}` || len(boxes) != 1 {
		t.Errorf("%+v, %v; %d were made", got, err, len(boxes))
	}
}

// While what was interrupted cannot be finished or undone, a second try is not
// done, and not forgotten.
func TestKeyUnrecovered(t *testing.T) {
	var stuck error = fault.ErrBusy
	boxes := 0
	svc := &service{
		sandboxes: func(context.Context) ([]runtime.Sandbox, error) { return nil, nil },
		create: func(runtime.CreateRequest) (runtime.Sandbox, error) {
			boxes++
			return runtime.Sandbox{ID: "x"}, nil
		},
	}
	build := func(ctx context.Context, c *caller, key string) error {
		_, err := c.Create(api.WithKey(ctx, key), runtime.CreateRequest{})
		return err
	}
	opts := Options{Before: func(context.Context) error { return stuck }}
	c := killed(t, svc, opts, func(ctx context.Context, c *caller) { _ = build(ctx, c, "k") })
	for range 2 {
		if err := build(t.Context(), c, "k"); !errors.Is(err, fault.ErrBusy) || boxes != 0 {
			t.Error(err, boxes)
		}
	}
	if err := build(t.Context(), c, "other"); err != nil || boxes != 1 {
		t.Error(err, boxes)
	}
	stuck = nil
	if err := build(t.Context(), c, "k"); err != nil || boxes != 2 {
		t.Error(err, boxes)
	}
}

// A second try has succeeded only where the sandbox is as it was to be.
func TestKeyOfState(t *testing.T) {
	for status, done := range map[runtime.Status]bool{runtime.Created: false, runtime.Paused: true} {
		t.Run(string(status), func(t *testing.T) {
			svc := &service{
				pause:   func() error { return fmt.Errorf("it is %s: %w", status, fault.ErrState) },
				sandbox: func() (runtime.Sandbox, error) { return runtime.Sandbox{Status: status}, nil },
			}
			pause := func(ctx context.Context, c *caller) error { return c.Pause(api.WithKey(ctx, "k"), "c") }
			c := killed(t, svc, Options{}, func(ctx context.Context, c *caller) { _ = pause(ctx, c) })
			if err := pause(t.Context(), c); done != (err == nil) || !done && !errors.Is(err, fault.ErrState) {
				t.Error(err)
			}
			if err := c.Pause(api.WithKey(t.Context(), "first try"), "c"); !errors.Is(err, fault.ErrState) {
				t.Error(err)
			}
		})
	}
}

// A fork that made some of its members is not made again, and neither is what
// panicked: its key is not busy for ever either.
func TestKeyHalfway(t *testing.T) {
	forks, panics := 0, 0
	svc := &service{
		fork: func(runtime.ForkOptions) ([]runtime.Forked, error) {
			forks++
			return []runtime.Forked{{}}, fault.ErrDenied
		},
		sandbox: func() (runtime.Sandbox, error) { return runtime.Sandbox{}, nil },
		exec: func(context.Context, runtime.Process, runtime.Streams) (int, error) {
			panics++
			panic(http.ErrAbortHandler)
		},
	}
	c := client(t, serving(t, svc, Options{}))
	ctx := api.WithKey(t.Context(), "k")
	if got, err := c.Fork(ctx, "c", runtime.ForkOptions{Count: 2}); !errors.Is(err, fault.ErrDenied) || len(got) != 1 {
		t.Error(got, err)
	}
	for range 2 {
		if _, err := c.Fork(ctx, "c", runtime.ForkOptions{Count: 2}); !errors.Is(err, fault.ErrState) || forks != 1 {
			t.Error(err, forks)
		}
	}
	ctx = api.WithKey(t.Context(), "l")
	run := func() error {
		_, err := c.Exec(ctx, "c", runtime.Process{Detach: true}, runtime.Streams{})
		return err
	}
	if err := run(); err == nil {
		t.Error("no error")
	}
	if err := run(); !errors.Is(err, fault.ErrState) || panics != 1 {
		t.Error(err, panics)
	}
}

// The records take so much room and no more, and a failure to remove old ones does not stop the
// service.
func TestRecords(t *testing.T) {
	dir := t.TempDir()
	s, err := openRequests(dir, silent)
	if err != nil {
		t.Fatal(err)
	}
	answer := strings.Repeat("x", maxAnswer-2)
	remember := func(key string) *record {
		rec, err := s.begin("0", key, "digest")
		if err != nil {
			t.Fatal(err)
		}
		if rec.Done {
			return rec
		}
		if err := s.finish(rec, answer, nil); err != nil {
			t.Fatal(err)
		}
		return rec
	}
	for i := range 2 * keepBytes / maxAnswer {
		remember(fmt.Sprint(i))
	}
	files, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	var size int64
	for _, f := range files {
		info, err := f.Info()
		if err != nil {
			t.Fatal(err)
		}
		size += info.Size()
	}
	if size > keepBytes+2*maxAnswer || size < keepBytes/2-2*maxAnswer {
		t.Error(size)
	}
	if rec := remember(fmt.Sprint(2*keepBytes/maxAnswer - 1)); !rec.Done {
		t.Error("the newest is forgotten")
	}
	// A directory where a file should be can be removed neither as one.
	old := filepath.Join(dir, "old", "deep")
	if err := os.MkdirAll(old, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.Chtimes(filepath.Dir(old), time.Time{}, time.Now().Add(-2*keepFor)); err != nil {
		t.Fatal(err)
	}
	if err := s.sweep(); err == nil {
		t.Fatal("the sweep did not fail")
	}
	s.begun = 0
	remember("in spite of that")

	// A key belongs to one user, and only one request with it runs at a time.
	if rec, err := s.begin("0", "m", "digest"); err != nil || rec.again {
		t.Fatal(rec, err)
	}
	if _, err := s.begin("0", "m", "digest"); !errors.Is(err, fault.ErrBusy) {
		t.Error(err)
	}
	if s, err = openRequests(dir, silent); err != nil {
		t.Fatal(err)
	}
	if rec, err := s.begin("0", "m", "digest"); err != nil || !rec.again {
		t.Error(rec, err)
	}
	if rec, err := s.begin("1", "m", "other"); err != nil || rec.again {
		t.Error(rec, err)
	}
}
