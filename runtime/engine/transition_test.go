package engine

import (
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"path/filepath"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/agentbox/agentbox/criu/stage"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/store"
)

// noting is a part, and the backend of a sandbox that stands still, that note what they are
// asked for.
type noting struct {
	runtime.Backend
	noWork
	name  string
	calls *[]string
	fail  string // the call that fails
}

var errNoted = errors.New("a failure")

func (n noting) note(step string) error {
	call := n.name + " " + step
	*n.calls = append(*n.calls, call)
	if call == n.fail {
		return errNoted
	}
	return nil
}

func (n noting) check(context.Context) error   { return n.note("check") }
func (n noting) prepare(context.Context) error { return n.note("prepare") }
func (n noting) commit(context.Context) error  { return n.note("commit") }
func (n noting) arrange(context.Context) error { return n.note("arrange") }
func (n noting) settle(context.Context) error  { return n.note("settle") }
func (n noting) revert(context.Context) error  { return n.note("revert") }
func (n noting) close() error                  { return n.note("close") }

func (n noting) Properties() runtime.Properties { return runtime.Properties{} }

func (n noting) Inspect(context.Context, string) (runtime.Container, error) {
	return runtime.Container{Status: runtime.Exited}, nil
}

func (n noting) Stop(context.Context, string, runtime.StopOptions) error { return n.note("stop") }

// TestTransition has each step of each part fail: no later step is taken, all parts take back
// what they did, the last one first, and all are closed.
func TestTransition(t *testing.T) {
	ctx := t.Context()
	st, err := store.Open(ctx, t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	defer st.Close()
	e := New(Options{Store: st, Run: t.TempDir(), Log: slog.New(slog.DiscardHandler)})
	forward := []string{
		"a prepare", "b prepare", "it stop", "a commit", "b commit", "a arrange", "b arrange", "b settle", "a settle",
	}
	back, closing := []string{"b revert", "a revert"}, []string{"a close", "b close"}
	for _, fail := range append(forward, "") {
		t.Run(fail, func(t *testing.T) {
			sb := store.Sandbox{ID: newID(), Backend: "oci", Spec: json.RawMessage(`{}`)}
			sb.Name = "s" + sb.ID[:8]
			if err := st.PutSandbox(ctx, sb); err != nil {
				t.Fatal(err)
			}
			seq, err := st.Begin(ctx, store.Intent{Op: opRestore, Sandbox: sb.ID, Data: []byte(`{"phase": "swap"}`)})
			if err != nil {
				t.Fatal(err)
			}
			var calls []string
			named := func(name string) noting { return noting{name: name, calls: &calls, fail: fail} }
			r := e.restores.newRestoration(&locked{Sandbox: sb, host: Host{Backend: named("it")}},
				restoring{Phase: phaseSwap})
			r.resumed, r.seq, r.reader = true, seq, &store.Reader{}
			r.c.Stage = stage.Slot{Run: filepath.Join(t.TempDir(), "run"), ID: "it"}
			r.parts = []part{named("a"), named("b")}
			err = r.run(ctx)
			want := slices.Concat(forward, closing)
			if at := slices.Index(forward, fail); at >= 0 {
				want = slices.Clone(forward[:at+1])
				if at < slices.Index(forward, "b settle") {
					want = append(want, back...)
				}
				want = append(want, closing...)
			}
			if d := cmp.Diff(want, calls); d != "" {
				t.Error(d)
			}
			if errors.Is(err, errNoted) != (fail != "") {
				t.Errorf("it fails with %v", err)
			}
			if done := fail == "a settle" || fail == "b settle"; errors.Is(err, errUnfinished) != done {
				t.Errorf("the sandbox is restored: %v, and the error is %v", done, err)
			}
			phase := phaseProven
			if at := slices.Index(forward, fail); at >= 0 && at <= slices.Index(forward, "b commit") {
				phase = phaseSwap
			}
			in, _, err := e.recovery.pending(ctx, seq)
			got, e2 := decode[restoring](in.Data)
			if got.Phase != phase || err != nil || e2 != nil {
				t.Errorf("the journal has it at %q, want %q (%v, %v)", got.Phase, phase, err, e2)
			}
		})
	}
}
