package engine

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/store"
)

// TestRestoreLetsGoOfLock: a restore that takes over a lock releases it, whatever refuses the
// restore.
func TestRestoreLetsGoOfLock(t *testing.T) {
	st, err := store.Open(t.Context(), t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	defer st.Close()
	e := New(Options{Run: t.TempDir(), Store: st, Open: func(string) (Host, error) { return Host{}, nil }})
	id := newID()
	s, err := json.Marshal(runtime.Spec{ID: id})
	if err != nil {
		t.Fatal(err)
	}
	if err := st.PutSandbox(t.Context(), store.Sandbox{ID: id, Name: "box", Spec: s}); err != nil {
		t.Fatal(err)
	}
	for _, opts := range []runtime.RestoreOptions{
		{Strategy: "nosuch"},
		{Undo: true, Checkpoint: "one"},
		{Trigger: "nosuch"},
		{Trigger: "turn", Checkpoint: "one"},
		{Checkpoint: "nosuch"},
	} {
		sb, err := e.acquire(t.Context(), id, "test", 0)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := e.restores.restoreLocked(t.Context(), id, sb, opts); err == nil {
			t.Errorf("%+v: no error", opts)
		}
		lock, err := st.Lock(t.Context(), id, "test", 0)
		if err != nil {
			t.Fatalf("%+v: %v", opts, err)
		}
		lock.Unlock()
	}
}

// TestUpkeepIsLogged: what keeps upkeep from its work is logged once, and not as an error if
// another process is at work.
func TestUpkeepIsLogged(t *testing.T) {
	for _, c := range []struct {
		err  error
		want string
	}{
		{fmt.Errorf("the store is %w", runtime.ErrBusy), `level=INFO msg="upkeep postponed" err="the store is `},
		{errors.New("broken"), `level=ERROR msg="upkeep failed" err=broken`},
	} {
		var log bytes.Buffer
		e := &core{log: slog.New(slog.NewTextHandler(&log, nil))}
		ctx, cancel := context.WithCancel(t.Context())
		n := 0
		e.repeat(ctx, time.Microsecond, true, func(context.Context) error {
			if n++; n == 2 {
				cancel()
			}
			return c.err
		})
		if !strings.Contains(log.String(), c.want) || strings.Count(log.String(), "\n") != 1 {
			t.Errorf("want one line with %s:\n%s", c.want, log.String())
		}
	}
}
