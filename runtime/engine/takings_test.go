package engine

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/agentbox/agentbox/runtime"
)

// taking is a sandbox of which checkpoints are taken.
type taking struct {
	mu     sync.Mutex
	status runtime.Status  // empty: removed
	taken  []time.Duration // since begin
	begin  time.Time
	slow   time.Duration // how long one takes
	err    error
}

func (s *taking) take(context.Context) error {
	s.mu.Lock()
	s.taken = append(s.taken, time.Since(s.begin))
	slow, err := s.slow, s.err
	s.mu.Unlock()
	time.Sleep(slow) // without the lock: on synctest's clock no goroutine may wait for one
	return err
}

func (s *taking) is(context.Context) (runtime.Status, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.status, nil
}

func (s *taking) set(status runtime.Status, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.status, s.err = status, err
}

func (s *taking) times() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return strings.Trim(fmt.Sprint(s.taken), "[]")
}

// takingRounds runs fn beside rounds of a minute, on a clock that goes only when all wait, and
// returns the log. It returns once the rounds have ended.
func takingRounds(t *testing.T, fn func(s *taking, cancel func())) (log string) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		var out strings.Builder
		s := &taking{status: runtime.Running, begin: time.Now()}
		ctx, cancel := context.WithCancel(context.Background())
		defer cancel()
		done := make(chan struct{})
		go func() {
			defer close(done)
			log := slog.New(slog.NewTextHandler(&out, nil)).With("sandbox", "id")
			rounds{every: time.Minute, status: s.is, take: s.take, log: log}.run(ctx)
		}()
		fn(s, cancel)
		<-done
		log = out.String()
	})
	return log
}

func TestRounds(t *testing.T) {
	log := takingRounds(t, func(s *taking, _ func()) {
		time.Sleep(150 * time.Second)
		s.set(runtime.Paused, nil) // stands still: nothing to take
		time.Sleep(time.Minute)
		s.set(runtime.Running, nil)
		time.Sleep(2 * time.Minute)
		s.set(runtime.Exited, nil)
		time.Sleep(time.Minute)
		synctest.Wait()
		if got, want := s.times(), "1m0s 2m0s 4m0s 5m0s"; got != want {
			t.Errorf("taken at %s, want %s", got, want)
		}
	})
	if log != "" {
		t.Error(log)
	}
}

// TestRoundsEnd: the rounds end with the sandbox, and with their context.
func TestRoundsEnd(t *testing.T) {
	for _, status := range []runtime.Status{"", runtime.Exited} {
		takingRounds(t, func(s *taking, _ func()) { s.set(status, nil) })
	}
	takingRounds(t, func(_ *taking, cancel func()) { cancel() })
}

// TestRoundsFail: errors are logged once for each cause and tried again; slow checkpoints do
// not queue up.
func TestRoundsFail(t *testing.T) {
	log := takingRounds(t, func(s *taking, _ func()) {
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
	if strings.Count(log, "disk full") != 1 || strings.Count(log, "busy") != 1 ||
		!strings.Contains(log, "sandbox=id") || !strings.Contains(log, "failed=4") {
		t.Error(log)
	}
}
