package box

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/runtime"
)

// fake is a backend whose containers have no processes.
type fake struct {
	Hooks
	l     *Lifecycle
	freed func(id string) // seen by Free
	err   error           // of Free
	word  Exit            // left by the monitor
	made  int
}

func (f *fake) Look(ctx context.Context, id string) (View, error) { return f.l.Look(ctx, id) }
func (f *fake) Make(_ context.Context, spec runtime.Spec, lower []string) error {
	f.made++
	return f.l.Save(spec.ID, Container{Spec: spec, Lower: lower})
}
func (f *fake) MonitorExit(string, int) (Exit, bool, error)     { return f.word, f.word.Code != 0, nil }
func (f *fake) Monitored(string) (bool, error)                  { return false, nil }
func (f *fake) AwaitMonitor(context.Context, string, Run) error { return nil }
func (f *fake) KillStrays(context.Context, string) error        { return nil }
func (f *fake) Unmake(context.Context, string) error            { return nil }
func (f *fake) Launch(*Start) (Launched, error)                 { return nil, fault.ErrUnsupported }
func (f *fake) Free(_ context.Context, id string) error {
	if f.freed != nil {
		f.freed(id)
	}
	return f.err
}

func newFake(t *testing.T) *fake {
	t.Helper()
	dir := t.TempDir()
	f := &fake{}
	opts := Options{
		Root: filepath.Join(dir, "root"), Run: filepath.Join(dir, "run"), Log: slog.New(slog.DiscardHandler),
		Drain: time.Second, Hit: func(string) error { return nil },
	}
	l, err := Open(opts, f)
	must(t, err)
	f.l = l
	return f
}

func (f *fake) create(t *testing.T) (id string) {
	t.Helper()
	id = strings.Repeat("a", 32)
	spec := runtime.Spec{ID: id, Args: []string{"true"}, Network: runtime.Network{Mode: runtime.NetworkNone}}
	must(t, f.l.Create(t.Context(), spec, []string{"/"}))
	return id
}

// The end of a container is on record before what it held is freed, and stays there when that fails.
func TestEndRecordedFirst(t *testing.T) {
	f := newFake(t)
	id := f.create(t)
	must(t, f.l.makeStart(id, 1), f.l.NoteStart(id, 1, time.Now()))
	f.word = Exit{Code: 5, Finished: time.Now()}
	freed := 0
	f.freed = func(id string) {
		freed++
		if _, ok, err := f.l.RecordedExit(id, 1); !ok || err != nil {
			t.Errorf("freed, and its end is not on record: %v", err)
		}
	}
	f.err = errors.New("not freed")
	if err := f.l.Stop(t.Context(), id, runtime.StopOptions{}); !errors.Is(err, f.err) {
		t.Errorf("%v", err)
	}
	f.err = nil
	must(t, f.l.Stop(t.Context(), id, runtime.StopOptions{}))
	v, err := f.l.Look(t.Context(), id)
	if err != nil || v.Status != runtime.Exited || v.Exit.Code != 5 || freed != 2 {
		t.Errorf("%+v, %v; freed %d times", v, err, freed)
	}
}

// A start whose note was lost is exited once its end is on record, although the runtime has forgotten it.
func TestEndWithoutNote(t *testing.T) {
	f := newFake(t)
	id := f.create(t)
	must(t, f.l.makeStart(id, 1), f.l.recordExit(id, 1, Exit{Code: 7, Finished: time.Now()}))
	if v, err := f.l.Look(t.Context(), id); err != nil || v.Status != runtime.Exited || v.Exit.Code != 7 {
		t.Errorf("%+v, %v", v, err)
	}
	if exit, err := f.l.Wait(t.Context(), id); exit.Code != 7 || err != nil {
		t.Errorf("%+v, %v", exit, err)
	}
}

// A start that fails leaves no trace of itself, and a removed container only its exit.
func TestTakenBack(t *testing.T) {
	f := newFake(t)
	id := f.create(t)
	if err := f.l.Create(t.Context(), runtime.Spec{ID: id, Args: []string{"true"}}, []string{"/"}); !errors.Is(err,
		fault.ErrExists) || f.made != 1 {
		t.Errorf("%v, made %d times", err, f.made)
	}
	if _, err := f.l.Start(t.Context(), id, runtime.StartOptions{}); !errors.Is(err, fault.ErrUnsupported) {
		t.Errorf("%v", err)
	}
	v, err := f.l.Look(t.Context(), id)
	if starts, _ := f.l.Starts(id); err != nil || v.Status != runtime.Created || len(starts) != 0 {
		t.Errorf("%+v, %v, starts %v", v, err, starts)
	}
	must(t, f.l.makeStart(id, 1), f.l.recordExit(id, 1, Exit{Code: 3, Finished: time.Now(), OOM: true}))
	must(t, f.l.Remove(t.Context(), id))
	if exit, err := f.l.Wait(t.Context(), id); exit != (runtime.Exit{Code: 3, OOMKilled: true}) || err != nil {
		t.Errorf("%+v, %v", exit, err)
	}
	if _, err := os.Lstat(f.l.Dir(id)); err == nil || f.l.Exists(id) {
		t.Error("it is removed, and there")
	}
}
