package engine_test

import (
	"bytes"
	"context"
	"errors"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/agentbox/agentbox/internal/guard"
	"github.com/agentbox/agentbox/runtime"
)

// told collects the progress of a verb.
type told struct {
	t     *testing.T
	mu    sync.Mutex
	steps []runtime.Step
	over  bool // the verb has returned
}

func (l *told) step(s runtime.Step) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.over {
		l.t.Errorf("%+v is told after the end", s)
	}
	l.steps = append(l.steps, s)
}

// end returns the last of each phase, in order, and holds the others against it.
func (l *told) end() (last []runtime.Step) {
	l.t.Helper()
	l.mu.Lock()
	defer l.mu.Unlock()
	l.over = true
	for i, s := range l.steps {
		if s.Total > 0 && s.Done > s.Total || !slices.Contains(runtime.Phases, s.Phase) {
			l.t.Errorf("%+v", s)
		}
		if i > 0 && l.steps[i-1].Phase == s.Phase {
			if s.Done < l.steps[i-1].Done {
				l.t.Errorf("%+v after %+v", s, l.steps[i-1])
			}
			last = last[:len(last)-1]
		}
		last = append(last, s)
	}
	return last
}

// fill writes a file that is counted while it is read, small ones, and one with a hole.
func fill(t *testing.T, dir string, seed uint64) (size int64) {
	t.Helper()
	r := rand.New(rand.NewPCG(seed, 1))
	write := func(name string, n int) *os.File {
		data := make([]byte, n)
		for i := range data {
			data[i] = byte(r.Uint32())
		}
		f, err := os.Create(filepath.Join(dir, name))
		if err == nil {
			_, err = f.Write(data)
		}
		if err != nil {
			t.Fatal(err)
		}
		size += int64(n)
		return f
	}
	for i := range 20 {
		write("small"+strconv.Itoa(i), 1000+i).Close()
	}
	write("large", 3<<20+5).Close()
	f := write("holes", 4096)
	defer f.Close()
	if err := f.Truncate(8 << 20); err != nil {
		t.Fatal(err)
	}
	return size
}

func TestSteps(t *testing.T) {
	r := newRig(t, nil)
	sb := r.create(t, "box")
	size := fill(t, sb.Upperdir, 1)
	log := &told{t: t}
	first, err := r.Checkpoint(ctx, "box", runtime.CheckpointOptions{Progress: log.step})
	if err != nil {
		t.Fatal(err)
	}
	want := []runtime.Step{
		{Phase: runtime.PhaseFiles, Done: size}, {Phase: runtime.PhaseStoring}, {Phase: runtime.PhaseSyncing},
	}
	if d := cmp.Diff(want, log.end()); d != "" {
		t.Error(d)
	}

	fill(t, sb.Upperdir, 2)
	if _, err := r.Start(ctx, "box", nil); err != nil {
		t.Fatal(err)
	}
	if _, err := r.Wait(ctx, "box"); err != nil { // what is in memory cannot be frozen
		t.Fatal(err)
	}
	log = &told{t: t}
	if _, err := r.Restore(ctx, "box", runtime.RestoreOptions{Checkpoint: first.ID, Progress: log.step}); err != nil {
		t.Fatal(err)
	}
	got := log.end()
	has := func(want runtime.Step) {
		t.Helper()
		if !slices.Contains(got, want) {
			t.Errorf("no %+v in %+v", want, got)
		}
	}
	has(runtime.Step{Phase: runtime.PhaseFiles, Done: size}) // those that it replaces
	has(runtime.Step{Phase: runtime.PhaseStaging, Done: size, Total: size})
	var phases []runtime.Phase
	for _, s := range got {
		phases = append(phases, s.Phase)
	}
	if d := cmp.Diff([]runtime.Phase{
		"files", "storing", "syncing", "staging", "stopping", "putting", "proving", "starting", "syncing",
	}, phases); d != "" {
		t.Error(d)
	}

	log = &told{t: t}
	if _, err := r.Fork(ctx, "box", runtime.ForkOptions{
		Checkpoint: first.ID, Count: 3, Progress: log.step,
	}); err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff([]runtime.Step{{
		Phase: runtime.PhaseForking, Done: 3 * size, Total: 3 * size,
	}}, log.end()); d != "" {
		t.Error(d)
	}
	log = &told{t: t}
	if _, err := r.Fork(ctx, "box", runtime.ForkOptions{Progress: log.step}); err != nil {
		t.Fatal(err)
	}
	got = log.end()
	has(runtime.Step{Phase: runtime.PhaseStoring})
	has(runtime.Step{Phase: runtime.PhaseForking, Done: size, Total: size})
}

// TestStepsAside: the progress of a restore of a stopped sandbox that displaces files.
func TestStepsAside(t *testing.T) {
	r := newRig(t, nil)
	sb := r.create(t, "box")
	fill(t, sb.Upperdir, 1)
	first, err := r.Checkpoint(ctx, "box", runtime.CheckpointOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(sb.Upperdir, "small1"), bytes.Repeat([]byte("x"), 5000), 0o600); err != nil {
		t.Fatal(err)
	}
	log := &told{t: t}
	if _, err := r.Restore(ctx, "box", runtime.RestoreOptions{
		Checkpoint: first.ID, NoUndo: true, Progress: log.step,
	}); err != nil {
		t.Fatal(err)
	}
	got := log.end()
	if len(got) == 0 || got[0].Phase != runtime.PhaseLooking || got[0].Done < 5000 {
		t.Errorf("%+v", got)
	}
	if want := (runtime.Step{Phase: runtime.PhaseStaging, Done: 1001, Total: 1001}); !slices.Contains(got, want) {
		t.Errorf("no %+v in %+v", want, got)
	}
}

// unstoppable is a backend that fails to stop sandboxes.
type unstoppable struct {
	runtime.Backend
	err error
}

func (b *unstoppable) Stop(ctx context.Context, id string, opts runtime.StopOptions) error {
	if b.err != nil {
		return b.err
	}
	return b.Backend.Stop(ctx, id, opts)
}

// TestStepsOfFailures: a verb that fails or is cancelled has reported its progress until then,
// and reports no more.
func TestStepsOfFailures(t *testing.T) {
	b := &unstoppable{}
	r := newRig(t, func(under runtime.Backend) runtime.Backend { b.Backend = under; return b })
	sb := r.create(t, "box")
	size := fill(t, sb.Upperdir, 1)
	first, err := r.Checkpoint(ctx, "box", runtime.CheckpointOptions{})
	if err != nil {
		t.Fatal(err)
	}
	fill(t, sb.Upperdir, 2)
	b.err = errors.New("no end")
	log := &told{t: t}
	if _, err := r.Restore(ctx, "box", runtime.RestoreOptions{
		Checkpoint: first.ID, Progress: log.step,
	}); !errors.Is(err, b.err) {
		t.Errorf("it is restored: %v", err)
	}
	got := log.end()
	if want := (runtime.Step{Phase: runtime.PhaseStaging, Done: size, Total: size}); !slices.Contains(got, want) {
		t.Errorf("no %+v in %+v", want, got)
	}
	if len(got) == 0 || got[len(got)-1].Phase != runtime.PhaseStopping {
		t.Errorf("%+v", got)
	}

	b.err = nil

	t.Setenv("AGENTBOX_FAILPOINT", "restore.after-apply=error")
	log = &told{t: t}
	if _, err := r.Restore(ctx, "box", runtime.RestoreOptions{Checkpoint: first.ID, Progress: log.step}); err == nil {
		t.Error("it is restored")
	}
	if got := log.end(); len(got) == 0 || got[len(got)-1].Phase != runtime.PhasePutting || got[len(got)-1].Done < size { // back
		t.Errorf("%+v", got)
	}
	t.Setenv("AGENTBOX_FAILPOINT", "")

	calling, off := context.WithCancel(ctx)
	off()
	log = &told{t: t}
	if _, err := r.Checkpoint(calling, "box",
		runtime.CheckpointOptions{Progress: log.step}); !errors.Is(err, context.Canceled) {
		t.Errorf("%v", err)
	}
	log.end()
	calling, off = context.WithCancel(ctx)
	log = &told{t: t}
	if _, err := r.Fork(calling, "box", runtime.ForkOptions{Progress: func(s runtime.Step) {
		off()
		log.step(s)
	}}); !errors.Is(err, context.Canceled) {
		t.Errorf("%v", err)
	}
	if got := log.end(); len(got) == 0 {
		t.Error("nothing is told")
	}
	if left, err := r.store.Intents(ctx); err != nil || len(left) > 0 {
		t.Errorf("left in the journal: %+v, %v", left, err)
	}
}

// TestStepsToNobody: a progress callback neither delays a verb nor breaks it.
func TestStepsToNobody(t *testing.T) {
	r := newRig(t, nil)
	sb := r.create(t, "box")
	fill(t, sb.Upperdir, 1)

	entered, leave := make(chan struct{}, 100), make(chan struct{})
	began := time.Now()
	first, err := r.Checkpoint(ctx, "box", runtime.CheckpointOptions{Progress: func(runtime.Step) {
		entered <- struct{}{}
		<-leave
	}})
	if err != nil || time.Since(began) > 30*time.Second {
		t.Fatalf("%v, after %v", err, time.Since(began))
	}
	if _, err := r.Restore(ctx, "box", runtime.RestoreOptions{Progress: func(runtime.Step) {
		entered <- struct{}{}
		<-leave
	}}); err != nil {
		t.Fatal(err)
	}
	close(leave)
	if n := len(entered); n != 2 {
		t.Errorf("%d calls of two that did not return", n)
	}

	panics, calls := guard.Count(), 0
	again, err := r.Checkpoint(ctx, "box", runtime.CheckpointOptions{Progress: func(runtime.Step) {
		calls++
		panic("a defect")
	}})
	if err != nil || again.ID == first.ID {
		t.Fatal(err)
	}
	if n := guard.Count() - panics; n != 1 || calls != 1 {
		t.Errorf("%d panics, %d calls", n, calls)
	}
}
