package guard

import (
	"bytes"
	"context"
	"errors"
	"io/fs"
	"log/slog"
	"strings"
	"testing"
)

// logged is the log from now on.
func logged(t *testing.T) *bytes.Buffer {
	var log bytes.Buffer
	old := slog.Default()
	slog.SetDefault(slog.New(slog.NewTextHandler(&log, nil)))
	t.Cleanup(func() { slog.SetDefault(old) })
	return &log
}

func broken() error { panic(fs.ErrExist) }

func TestPanicIsAnError(t *testing.T) {
	group, ctx := WithContext(t.Context())
	group.SetLimit(1)
	zero := &Group{}
	for name, do := range map[string]func() error{
		"do":      func() error { return Do(broken) },
		"start":   func() error { return <-Start(broken) },
		"group":   func() error { zero.Go(broken); return zero.Wait() },
		"context": func() error { group.Go(broken); return group.Wait() },
		"twice":   func() error { return Do(func() error { return Do(broken) }) },
		"wait": func() error {
			return Do(func() error {
				var w WaitGroup
				ended := false
				w.Go(func() { ended = true })
				w.Go(func() { _ = broken() })
				defer func() {
					if !ended {
						t.Error("the other one had not ended")
					}
				}()
				w.Wait()
				t.Error("it goes on as if nothing were")
				return nil
			})
		},
	} {
		log, before := logged(t), Count()
		err := do()
		var p *Panic
		if !errors.As(err, &p) || errors.Is(err, fs.ErrExist) || !strings.Contains(string(p.Stack), "guard.broken") {
			t.Errorf("%s: %v", name, err)
		}
		if n := Count() - before; n != 1 || strings.Count(log.String(), "level=ERROR msg=panic") != 1 ||
			!strings.Contains(log.String(), "guard.broken") {
			t.Errorf("%s: counted %d times; the log: %s", name, n, log)
		}
	}
	if ctx.Err() != context.Canceled {
		t.Error("the others of a group go on")
	}
}

func TestNoPanic(t *testing.T) {
	logged(t)
	var w WaitGroup
	done := make(chan int, 2)
	w.Go(func() { done <- 1 })
	w.Wait()
	Go(func() { defer close(done); panic("of nobody") })
	for range done {
	}
	if err := errors.Join(Do(func() error { return nil }), <-Start(func() error { return nil })); err != nil {
		t.Error(err)
	}
	if err := <-Start(func() error { return fs.ErrClosed }); err != fs.ErrClosed {
		t.Error(err)
	}
}
