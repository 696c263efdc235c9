package server

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/api"
)

// working is a service whose checkpoints last until they are told to end.
type working struct {
	service
	at  chan string // the sandbox of one that is at work
	end chan struct{}
}

func newWorking() *working {
	w := &working{at: make(chan string), end: make(chan struct{})}
	w.sandboxes = func(context.Context) ([]runtime.Sandbox, error) { return nil, nil }
	w.checkpoints = func(runtime.CheckpointFilter) ([]runtime.Checkpoint, error) { return nil, nil }
	w.exec = func(context.Context, runtime.Process, runtime.Streams) (int, error) { return 7, nil }
	w.checkpoint = func(ctx context.Context, ref string, _ runtime.CheckpointOptions) (runtime.Checkpoint, error) {
		w.at <- ref
		select {
		case <-w.end:
		case <-ctx.Done():
		}
		return runtime.Checkpoint{ID: ref}, ctx.Err()
	}
	return w
}

// waiters waits until so many requests wait for their turn, by what /metrics says.
func waiters(t *testing.T, c *caller, n int) {
	t.Helper()
	want := fmt.Sprintf(`agentbox_heavy_verbs{state="waiting"} %d`+"\n", n)
	for end := time.Now().Add(20 * time.Second); ; {
		_, data := fetched(t, c, "/metrics")
		if bytes.Contains(data, []byte(want)) {
			return
		}
		if time.Now().After(end) {
			t.Fatalf("no %q in\n%s", want, data)
		}
	}
}

// Heavy verbs take turns, in the order in which they came; others do not wait for them. A
// caller that gives up has had nothing done, and is out of the queue; one that comes when
// it is full is told when to come again.
func TestTurns(t *testing.T) {
	w := newWorking()
	c := client(t, serving(t, &w.service, Options{Turns: 1, Queue: 3}))
	var all sync.WaitGroup
	defer all.Wait()
	began := func(ctx context.Context, name string) <-chan error {
		ended := make(chan error, 1)
		all.Go(func() {
			_, err := c.Checkpoint(ctx, name, runtime.CheckpointOptions{})
			ended <- err
		})
		return ended
	}
	first := began(t.Context(), "1")
	if at := <-w.at; at != "1" {
		t.Fatal(at)
	}
	second := began(t.Context(), "2")
	waiters(t, c, 1)
	ctx, cancel := context.WithCancel(t.Context())
	third := began(ctx, "3")
	waiters(t, c, 2)
	fourth := began(t.Context(), "4")
	waiters(t, c, 3)

	resp, err := c.http.Post("http://agentbox/v1/sandboxes/5/checkpoints", "application/json", strings.NewReader("{}"))
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	if resp.StatusCode != http.StatusServiceUnavailable || resp.Header.Get("Retry-After") == "" ||
		resp.Header.Get("Retry-After") == "0" {
		t.Error(resp.StatusCode, resp.Header)
	}
	_, err = c.Checkpoint(t.Context(), "5", runtime.CheckpointOptions{})
	if !errors.Is(err, fault.ErrBusy) || len(fault.Hint(err)) != 1 ||
		!strings.Contains(err.Error(), "3 requests wait for their turn") {
		t.Error(err, fault.Hint(err))
	}
	// A verb that only reads, or waits for others, needs no turn.
	if _, err := c.Sandboxes(t.Context()); err != nil {
		t.Error(err)
	}
	if exit, err := c.Exec(t.Context(), "1", runtime.Process{}, runtime.Streams{}); exit != 7 || err != nil {
		t.Error(exit, err)
	}

	cancel()
	if err := <-third; !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	waiters(t, c, 2)
	{
		w.end <- struct{}{}
		if at := <-w.at; at != "2" {
			t.Error(at)
		}
		if err := <-first; err != nil {
			t.Error(err)
		}
	}
	w.end <- struct{}{}
	if at := <-w.at; at != "4" {
		t.Error(at)
	}
	w.end <- struct{}{}
	if err := errors.Join(<-second, <-fourth); err != nil {
		t.Error(err)
	}
	_, data := fetched(t, c, "/metrics")
	for _, want := range []string{
		`agentbox_heavy_verbs{state="at work"} 0`, "agentbox_heavy_verbs_refused_total 2",
		"agentbox_turn_wait_seconds_count 3",
	} {
		if !bytes.Contains(data, []byte(want+"\n")) {
			t.Errorf("no %q in\n%s", want, data)
		}
	}
}

// A verb that waits for a program of the host, which asks for verbs itself, does not block
// these, not even where there is one turn.
func TestTurnAside(t *testing.T) {
	var c *caller
	depth := 0
	svc := &service{}
	svc.checkpoint = func(ctx context.Context, ref string, _ runtime.CheckpointOptions) (runtime.Checkpoint, error) {
		if depth++; depth == 5 {
			return runtime.Checkpoint{ID: "deep"}, nil
		}
		defer runtime.Aside(ctx)()
		return c.Checkpoint(ctx, ref, runtime.CheckpointOptions{})
	}
	c = client(t, serving(t, svc, Options{Turns: 1, TurnTime: time.Hour}))
	for range 3 {
		depth = 0
		if got, err := c.Checkpoint(t.Context(), "c", runtime.CheckpointOptions{}); err != nil ||
			got.ID != "deep" || depth != 5 {
			t.Fatal(got, err, depth)
		}
	}
}

// A verb that goes on for long keeps its turn for so long only, and gives back no
// turn that is another's when it ends.
func TestTurnTime(t *testing.T) {
	w := newWorking()
	c := client(t, serving(t, &w.service, Options{Turns: 1, TurnTime: 20 * time.Millisecond}))
	var all sync.WaitGroup
	for i := range 4 {
		all.Go(func() {
			if _, err := c.Checkpoint(t.Context(), fmt.Sprint(i), runtime.CheckpointOptions{}); err != nil {
				t.Error(err)
			}
		})
	}
	for range 4 {
		<-w.at
	}
	for range 4 {
		w.end <- struct{}{}
	}
	all.Wait()
	waiters(t, c, 0)
}

// A caller that waits when the service is to end is refused, and verbs under way end.
func TestTurnsDrain(t *testing.T) {
	w := newWorking()
	socket, end := ending(t, &w.service, Options{Turns: 1, Requests: t.TempDir()})
	c := client(t, socket)
	first, second := make(chan error, 1), make(chan error, 1)
	go func() {
		_, err := c.Checkpoint(t.Context(), "1", runtime.CheckpointOptions{})
		first <- err
	}()
	<-w.at
	go func() {
		_, err := c.Checkpoint(t.Context(), "2", runtime.CheckpointOptions{})
		second <- err
	}()
	waiters(t, c, 1)
	var ended sync.WaitGroup
	ended.Go(end)
	if err := <-second; !errors.Is(err, fault.ErrBusy) || !strings.Contains(err.Error(), "about to end") {
		t.Error(err)
	}
	w.end <- struct{}{}
	if err := <-first; err != nil {
		t.Error(err)
	}
	ended.Wait()
}

// The second try of what may have been done, which finds no turn, is not forgotten.
func TestTurnsOfKilled(t *testing.T) {
	w := newWorking()
	forks := 0
	w.sandbox = func() (runtime.Sandbox, error) { return runtime.Sandbox{}, nil }
	w.fork = func(runtime.ForkOptions) ([]runtime.Forked, error) {
		if forks++; forks == 1 {
			panic(http.ErrAbortHandler)
		}
		return nil, nil
	}
	fork := func(ctx context.Context, c *caller) error {
		_, err := c.Fork(api.WithKey(ctx, "k"), "c", runtime.ForkOptions{Count: 1})
		return err
	}
	c := killed(t, &w.service, Options{Turns: 1, Queue: 1}, func(ctx context.Context, c *caller) { _ = fork(ctx, c) })
	var all sync.WaitGroup
	for i := range 2 {
		all.Go(func() {
			if _, err := c.Checkpoint(t.Context(), fmt.Sprint(i), runtime.CheckpointOptions{}); err != nil {
				t.Error(err)
			}
		})
	}
	<-w.at
	waiters(t, c, 1)
	if err := fork(t.Context(), c); !errors.Is(err, fault.ErrBusy) {
		t.Error(err)
	}
	w.end <- struct{}{}
	<-w.at
	w.end <- struct{}{}
	all.Wait()
	if err := fork(t.Context(), c); !errors.Is(err, fault.ErrState) || forks != 1 {
		t.Error(err, forks)
	}
}

// shared is a service with one turn, which is taken, and room for so many that wait.
func shared(room int) *turns {
	return &turns{time: time.Hour, room: room, metrics: &Metrics{}, ending: make(chan struct{})}
}

// by is a context of a verb that a user asks for.
func by(ctx context.Context, uid uint32) context.Context {
	return runtime.WithCaller(ctx, runtime.Caller{UID: uid})
}

// queued has a user wait for a turn, and says by what name it was served.
func queued(ctx context.Context, t *turns, uid uint32, name string, served chan<- string) <-chan error {
	t.mu.Lock()
	before := waiting(t)
	t.mu.Unlock()
	ended := make(chan error, 1)
	go func() {
		_, done, err := t.take(by(ctx, uid))
		if err == nil {
			served <- name
			done()
		}
		ended <- err
	}()
	for {
		t.mu.Lock()
		now := waiting(t)
		t.mu.Unlock()
		if now > before || len(ended) > 0 || before >= t.room {
			return ended
		}
		time.Sleep(time.Millisecond)
	}
}

func waiting(t *turns) (n int) {
	for _, q := range t.queues {
		n += len(q.turns)
	}
	return n
}

// A caller with many verbs delays another one by one verb only, and takes no place from it.
func TestTurnsOfCallers(t *testing.T) {
	of := shared(6)
	served := make(chan string, 10)
	var ended []<-chan error
	for _, name := range []string{"a1", "a2", "a3", "a4", "a5", "a6"} {
		ended = append(ended, queued(t.Context(), of, 1, name, served))
	}
	crowded := (*errCrowded)(nil)
	if err := <-queued(t.Context(), of, 1, "a7", served); !errors.As(err, &crowded) {
		t.Errorf("a caller that has all places: %v", err)
	}
	b1 := queued(t.Context(), of, 2, "b1", served)
	if err := <-ended[5]; !errors.As(err, &crowded) || !errors.Is(err, fault.ErrBusy) {
		t.Errorf("the last verb of the caller with most: %v", err)
	}
	b2 := queued(t.Context(), of, 2, "b2", served)
	<-ended[4]
	gone, cancel := context.WithCancel(t.Context())
	c1 := queued(gone, of, 3, "c1", served)
	<-ended[3]
	c2 := queued(t.Context(), of, 3, "c2", served)
	<-ended[2]
	if err := <-queued(t.Context(), of, 3, "c3", served); !errors.As(err, &crowded) {
		t.Errorf("a caller that has as many places as the others: %v", err)
	}
	cancel()
	if err := <-c1; !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	of.give()
	var order []string
	for range 5 {
		order = append(order, <-served)
	}
	if got := strings.Join(order, " "); got != "a1 b1 c2 a2 b2" {
		t.Error(got)
	}
	if err := errors.Join(<-b1, <-b2, <-c2); err != nil {
		t.Error(err)
	}
	if of.free != 1 || len(of.queues) != 0 {
		t.Errorf("%d free, %d queues", of.free, len(of.queues))
	}
}

// Each turn is given back, whatever ends the wait for it.
func TestTurnsGivenBack(t *testing.T) {
	of := &turns{free: 2, time: time.Hour, room: 20, metrics: &Metrics{}, ending: make(chan struct{})}
	var all sync.WaitGroup
	var mu sync.Mutex
	at, most := 0, 0
	for i := range 200 {
		all.Go(func() {
			ctx, cancel := context.WithTimeout(by(t.Context(), uint32(i%5)), time.Duration(i%7)*time.Millisecond)
			defer cancel()
			_, done, err := of.take(ctx)
			if err != nil {
				return
			}
			mu.Lock()
			at++
			most = max(most, at)
			mu.Unlock()
			time.Sleep(time.Millisecond)
			mu.Lock()
			at--
			mu.Unlock()
			done()
		})
	}
	all.Wait()
	if most > 2 || of.free != 2 || len(of.queues) != 0 {
		t.Errorf("%d at a time; %d free, %d queues", most, of.free, len(of.queues))
	}
}
