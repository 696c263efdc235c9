package engine_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/agentbox/agentbox/internal/guard"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/engine"
)

// observe adds observers to the Engine of a rig, which is made anew over the same parts.
func (r *rig) observe(t *testing.T, observers ...runtime.Observer) {
	t.Helper()
	opts := r.opts
	opts.Observers = observers
	r.Engine = engine.New(opts)
}

// TestObservers: observers see a verb before it runs, and its result, the first outermost. An
// observer that refuses prevents the verb.
func TestObservers(t *testing.T) {
	r := newRig(t, nil)
	var seen []string
	var refusal error
	watch := func(who string) runtime.Observer {
		return func(ctx context.Context, op *runtime.Op, do func(context.Context) error) error {
			about := op.Subject(ctx)
			seen = append(seen, fmt.Sprintf("%s begin %s %s %s reads=%v", who, op.Verb, op.Ref, about.Name, op.Reads))
			if who == "inner" && refusal != nil {
				return refusal
			}
			err := do(ctx)
			made := ""
			if sb, ok := op.Result.(runtime.Sandbox); ok {
				made = sb.Name
			}
			seen = append(seen, fmt.Sprintf("%s end %s %q %v", who, op.Verb, made, err != nil))
			return err
		}
	}
	r.observe(t, watch("outer"), nil, watch("inner"))
	expect := func(want ...string) {
		t.Helper()
		if !slices.Equal(seen, want) {
			t.Errorf("seen:\n%s\nwant:\n%s", strings.Join(seen, "\n"), strings.Join(want, "\n"))
		}
		seen = nil
	}

	sb := r.create(t, "a")
	expect("outer begin create base  reads=false", "inner begin create base  reads=false", `inner end create "a" false`,
		`outer end create "a" false`)
	if _, err := r.Sandbox(ctx, sb.ID); err != nil {
		t.Fatal(err)
	}
	expect("outer begin inspect "+sb.ID+" a reads=true", "inner begin inspect "+sb.ID+" a reads=true",
		`inner end inspect "a" false`, `outer end inspect "a" false`)

	refusal = errors.New("no")
	if err := r.Remove(ctx, "a", runtime.RemoveOptions{}); !errors.Is(err, refusal) {
		t.Errorf("rm ends with %v", err)
	}
	expect("outer begin rm a a reads=false", "inner begin rm a a reads=false", `outer end rm "" true`)
	refusal = nil
	if _, err := r.Sandbox(ctx, "a"); err != nil {
		t.Errorf("it was refused, and done: %v", err)
	}
	seen = nil

	// What the sandbox was is known to the end, when it is not there any more.
	if err := r.Remove(ctx, "a", runtime.RemoveOptions{}); err != nil {
		t.Fatal(err)
	}
	expect("outer begin rm a a reads=false", "inner begin rm a a reads=false", `inner end rm "" false`,
		`outer end rm "" false`)
	if err := r.Remove(ctx, "a", runtime.RemoveOptions{}); !errors.Is(err, runtime.ErrNotFound) ||
		!strings.HasPrefix(err.Error(), "rm a: ") {
		t.Errorf("of one that is not there: %v", err)
	}
	expect("outer begin rm a  reads=false", "inner begin rm a  reads=false", `inner end rm "" true`,
		`outer end rm "" true`)
}

// TestObserversOfPanic: observers see a panic as the verb's error, too.
func TestObserversOfPanic(t *testing.T) {
	b := &defective{start: true}
	r := newRig(t, func(under runtime.Backend) runtime.Backend { b.Backend = under; return b })
	var ends []string
	r.observe(t, func(ctx context.Context, op *runtime.Op, do func(context.Context) error) error {
		err := do(ctx)
		var p *guard.Panic
		ends = append(ends, fmt.Sprint(op.Verb, " ", op.Own != nil, " ", errors.As(err, &p)))
		return err
	})
	sb := r.create(t, "a")
	var p *guard.Panic
	if _, err := r.Start(ctx, sb.ID, nil); !errors.As(err, &p) {
		t.Fatal(err)
	}
	if want := []string{"create false false", "start false true", "recover true false"}; !slices.Equal(ends, want) {
		t.Errorf("%q, want %q", ends, want)
	}
}
