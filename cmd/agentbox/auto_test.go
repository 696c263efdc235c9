package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/agentbox/agentbox/runtime"
)

// An autoService is a sandbox to take checkpoints of.
type autoService struct {
	*fakeService
	mu      sync.Mutex
	status  runtime.Status  // empty: removed
	taken   []time.Duration // since begin
	begin   time.Time
	slow    time.Duration // how long one takes
	err     error
	exit    chan struct{} // ends Wait
	waiting int
}

func (s *autoService) Checkpoint(ctx context.Context, id string, opts runtime.CheckpointOptions) (runtime.Checkpoint, error) {
	if id != "id" || opts.Trigger != "interval" || opts.FilesOnly || opts.Stop {
		panic(fmt.Sprint(id, opts))
	}
	s.mu.Lock()
	s.taken = append(s.taken, time.Since(s.begin))
	slow, err := s.slow, s.err
	s.mu.Unlock()
	time.Sleep(slow) // without the lock: on synctest's clock no goroutine may wait for one
	return runtime.Checkpoint{}, err
}

func (s *autoService) Sandbox(context.Context, string) (runtime.Sandbox, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.status == "" {
		return runtime.Sandbox{}, fmt.Errorf("find: %w", runtime.ErrNotFound)
	}
	return runtime.Sandbox{ID: "id", Status: s.status}, nil
}

func (s *autoService) Wait(ctx context.Context, _ string) (int, error) {
	s.mu.Lock()
	s.waiting++
	s.mu.Unlock()
	select {
	case <-s.exit:
		return 0, nil
	case <-ctx.Done():
		return 0, ctx.Err()
	}
}

func (s *autoService) set(status runtime.Status, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.status, s.err = status, err
}

func (s *autoService) times() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return strings.Trim(fmt.Sprint(s.taken), "[]")
}

// auto runs fn beside runAuto, on a clock that goes only when all wait.
func auto(t *testing.T, fn func(s *autoService, cancel func())) (log string, err error) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		var out strings.Builder
		defer slog.SetDefault(slog.Default())
		slog.SetDefault(slog.New(slog.NewTextHandler(&out, nil)))
		s := &autoService{fakeService: newFake(), status: runtime.Running, begin: time.Now(), exit: make(chan struct{})}
		ctx, cancel := context.WithCancel(context.Background())
		defer cancel()
		done := make(chan error, 1)
		go func() { done <- runAuto(ctx, s, "id", time.Minute) }()
		fn(s, cancel)
		err = <-done
		cancel()
		synctest.Wait()
		log = out.String()
	})
	return log, err
}

func TestAuto(t *testing.T) {
	log, err := auto(t, func(s *autoService, _ func()) {
		time.Sleep(150 * time.Second)
		s.set(runtime.Paused, nil) // stands still: nothing to take
		time.Sleep(time.Minute)
		s.set(runtime.Running, nil)
		time.Sleep(time.Minute)
		// A restore: the sandbox exits, and is up again before the next look.
		s.exit <- struct{}{}
		time.Sleep(time.Minute)
		if s.waiting != 2 {
			t.Errorf("waited %d times", s.waiting)
		}
		s.set(runtime.Exited, nil)
		close(s.exit)
		synctest.Wait()
		if got, want := s.times(), "1m0s 2m0s 4m0s 5m0s"; got != want {
			t.Errorf("taken at %s, want %s", got, want)
		}
	})
	if err != nil || log != "" {
		t.Error(err, log)
	}
}

// It ends with the sandbox even when Wait tells nothing, and with its context.
func TestAutoEnds(t *testing.T) {
	for _, status := range []runtime.Status{"", runtime.Exited} {
		if _, err := auto(t, func(s *autoService, _ func()) { s.set(status, nil) }); err != nil {
			t.Errorf("%q: %v", status, err)
		}
	}
	if _, err := auto(t, func(_ *autoService, cancel func()) { cancel() }); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}

// Errors are told once for each cause and tried again; slow checkpoints do not
// queue up.
func TestAutoErrors(t *testing.T) {
	log, err := auto(t, func(s *autoService, _ func()) {
		s.set(runtime.Running, errors.New("disk full"))
		time.Sleep(210 * time.Second)
		s.set(runtime.Running, runtime.ErrBusy)
		time.Sleep(time.Minute)
		s.set(runtime.Running, nil)
		s.mu.Lock()
		s.slow = 100 * time.Second
		s.mu.Unlock()
		time.Sleep(5 * time.Minute)
		s.set("", nil)
		synctest.Wait()
		// That of 5m takes till 6m40s; after it comes a whole interval before the next.
		if got, want := s.times(), "1m0s 2m0s 3m0s 4m0s 5m0s 7m40s"; got != want {
			t.Errorf("taken at %s, want %s", got, want)
		}
	})
	if err != nil || strings.Count(log, "disk full") != 1 || strings.Count(log, "busy") != 1 || !strings.Contains(log, "sandbox=id") || !strings.Contains(log, "failed=4") {
		t.Error(err, log)
	}
}

func TestAutoLock(t *testing.T) {
	run := t.TempDir()
	ctx := t.Context()
	first, err := lockOne(ctx, filepath.Join(run, "auto"), "id")
	if err != nil || first == nil {
		t.Fatal(err)
	}
	other, err := lockOne(ctx, filepath.Join(run, "auto"), "other")
	if err != nil || other == nil {
		t.Fatal("another sandbox has its own", err)
	}
	other.unlock()
	// A second one waits for the handover and then leaves it to the first.
	start := time.Now()
	if second, err := lockOne(ctx, filepath.Join(run, "auto"), "id"); err != nil || second != nil || time.Since(start) < autoHandover {
		t.Errorf("%v after %v", err, time.Since(start))
	}
	// One that finds the first ending takes over, though that one unlinks the
	// file it waits for.
	got := make(chan *oneLock, 1)
	go func() {
		u, err := lockOne(ctx, filepath.Join(run, "auto"), "id")
		if err != nil {
			t.Error(err)
		}
		got <- u
	}()
	time.Sleep(2 * busyPoll)
	first.unlock()
	second := <-got
	if second == nil {
		t.Fatal("nobody has the lock")
	}
	if third, err := os.Stat(filepath.Join(run, "auto", "id")); err != nil {
		t.Error(third, err)
	}
	// Its log can be read beside the lock, and is bounded.
	for range maxLog/10 + 1 {
		if _, err := second.Write([]byte("0123456789")); err != nil {
			t.Fatal(err)
		}
	}
	if data, err := os.ReadFile(filepath.Join(run, "auto", "id")); err != nil || len(data) > 100 || len(data) == 0 {
		t.Error(len(data), err)
	}
	second.unlock()
	if left, err := os.ReadDir(run); err != nil || len(left) != 0 {
		t.Error("left behind:", left, err)
	}
}

func TestAutoVerb(t *testing.T) {
	f := boxes()
	try(t, f, "", "auto", "run").want(t, exitUsage, "", "has no interval of checkpoints")
	f.sandboxes[3].Spec.CheckpointEvery = "1m0s" // exited
	root := t.TempDir()
	try(t, f, "", "--root", root, "auto", "end").want(t, 0, "")
	if left, _ := filepath.Glob(filepath.Join(root, "run", "*")); len(left) != 0 {
		t.Error("left behind:", left)
	}
	try(t, f, "", "auto", "nope").want(t, exitNotFound, "", "not found", "hint")
}
