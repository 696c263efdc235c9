package engine_test

import (
	"crypto/rand"
	"database/sql"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/agentbox/agentbox/policy"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/store"
)

// automatic creates a sandbox with automatic checkpoints, under a policy; nil: the default
// one.
func (r *rig) automatic(t testing.TB, name, every string, p *policy.Policy) runtime.Sandbox {
	t.Helper()
	sb, err := r.Create(ctx, runtime.CreateRequest{Policy: p, Spec: runtime.Spec{
		Name: name, Image: "base", Args: []string{"true"}, Network: runtime.Network{Mode: runtime.NetworkNone},
		CheckpointEvery: every,
	}})
	if err != nil {
		t.Fatal(err)
	}
	return sb
}

func (r *rig) take(t testing.TB, sandbox string, opts runtime.CheckpointOptions) runtime.Checkpoint {
	t.Helper()
	c, err := r.Checkpoint(ctx, sandbox, opts)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// records are the rows of a rig's store.
type records struct {
	t  *testing.T
	db *sql.DB
}

func (r *rig) records(t *testing.T) records {
	t.Helper()
	db, err := sql.Open("sqlite", filepath.Join(r.root, "state.db"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { db.Close() })
	return records{t, db}
}

func (r records) change(query string, args ...any) {
	r.t.Helper()
	if _, err := r.db.Exec(query, args...); err != nil {
		r.t.Fatal(err)
	}
}

// taken changes the trigger and the time of a checkpoint.
func (r records) taken(id, trigger string, at time.Time) {
	r.t.Helper()
	r.change("UPDATE checkpoints SET trigger_name = ?, created = ? WHERE id = ?", trigger, at.UnixNano(), id)
}

// left returns the checkpoints of a sandbox, by their name in names or else by id, sorted.
func (r *rig) left(t testing.TB, sandbox string, names map[string]string) []string {
	t.Helper()
	rows, err := r.store.Checkpoints(ctx, store.Filter{SandboxID: sandbox})
	if err != nil {
		t.Fatal(err)
	}
	list := []string{}
	for _, row := range rows {
		if name, ok := names[row.ID]; ok {
			list = append(list, name)
		} else {
			list = append(list, row.ID)
		}
	}
	slices.Sort(list)
	return list
}

// TestAutomaticRetention takes one more automatic checkpoint of a sandbox with ten days of
// them: of the automatic ones the last 100 stay, and the newest of each of the last 24
// hours and 7 days that have one; all others stay.
func TestAutomaticRetention(t *testing.T) {
	r := newRig(t, nil)
	rows := r.records(t)
	sb := r.automatic(t, "s", "exec,1h", nil)
	names := map[string]string{}
	var want []string
	noon := time.Date(2026, 1, 20, 12, 0, 0, 0, time.UTC)
	triggers := []string{runtime.TriggerExec, runtime.TriggerInterval}
	add := func(at time.Time, stays bool) string {
		t.Helper()
		c := r.take(t, sb.ID, runtime.CheckpointOptions{})
		rows.taken(c.ID, triggers[len(names)%2], at)
		names[c.ID] = at.Format("02 15:04:05")
		if stays {
			want = append(want, names[c.ID])
		}
		return c.ID
	}
	// Checkpoints that are protected, all older than anything else.
	old := noon.AddDate(0, 0, -20)
	var kept []string
	for i := range 5 {
		kept = append(kept, add(old.Add(time.Duration(i)*time.Second), true))
	}
	if err := errors.Join(r.PinCheckpoint(ctx, kept[0], true), r.TagCheckpoint(ctx, kept[1], "good")); err != nil {
		t.Fatal(err)
	}
	rows.change("UPDATE checkpoints SET name = 'named' WHERE id = ?", kept[2])
	rows.change("UPDATE checkpoints SET pulled = 1 WHERE id = ?", kept[3])
	if _, err := r.Fork(ctx, "s", runtime.ForkOptions{
		Checkpoint: kept[4], Names: []string{"fork"}, NoStart: true,
	}); err != nil {
		t.Fatal(err)
	}
	for _, trigger := range []string{"manual", "mine", runtime.TriggerUndo, "fork"} {
		c := r.take(t, sb.ID, runtime.CheckpointOptions{})
		rows.taken(c.ID, trigger, old)
		names[c.ID] = trigger
		want = append(want, trigger)
	}
	add(old.Add(time.Minute), false)
	// One a day: of the newest four days, since the last three have others.
	for i := 11; i >= 2; i-- {
		add(noon.AddDate(0, 0, -i), i <= 5)
	}
	// Two an hour for 30 hours: the later one, of the last 22.
	for i := 30; i >= 1; i-- {
		h := noon.Add(-time.Duration(i) * time.Hour)
		add(h.Add(10*time.Minute), false)
		add(h.Add(40*time.Minute), i <= 22)
	}
	// And the last 99 of 110.
	for i := range 110 {
		add(noon.Add(time.Duration(i)*10*time.Second), i >= 11)
	}
	before := len(names)
	if got := len(r.left(t, sb.ID, names)); got != before {
		t.Fatalf("%d of %d checkpoints are there to begin with", got, before)
	}
	// A requested checkpoint removes nothing.
	by := r.take(t, sb.ID, runtime.CheckpointOptions{})
	names[by.ID], want = "by hand", append(want, "by hand")
	if got := len(r.left(t, sb.ID, names)); got != before+1 {
		t.Fatalf("%d of %d checkpoints are there after one by hand", got, before+1)
	}
	now := r.take(t, sb.ID, runtime.CheckpointOptions{Trigger: runtime.TriggerInterval, Automatic: true})
	names[now.ID], want = "now", append(want, "now")
	slices.Sort(want)
	if d := cmp.Diff(want, r.left(t, sb.ID, names)); d != "" {
		t.Errorf("-want +got:\n%s", d)
	}
	if sum, n := 5+4+1+1+99+22+4, len(want); n != sum {
		t.Errorf("the test wants %d, and not %d", n, sum)
	}
	// Automatic pruning agrees: nothing is left to remove, and all is listed.
	out, err := r.Prune(ctx, runtime.PruneOptions{Sandbox: sb.ID, DryRun: true})
	if err != nil || len(out.Removed) != 0 || len(out.Kept) != len(want) {
		t.Errorf("prune: %d removed, %d kept, %v", len(out.Removed), len(out.Kept), err)
	}
	// Once the fork stands elsewhere, its origin goes.
	r.take(t, "fork", runtime.CheckpointOptions{})
	r.take(t, sb.ID, runtime.CheckpointOptions{Trigger: runtime.TriggerExec, Automatic: true})
	if left := r.left(t, sb.ID, nil); slices.Contains(left, kept[4]) || !slices.Contains(left, kept[3]) {
		t.Errorf("origin of a fork that stands elsewhere, and one from elsewhere: %v", left)
	}
}

// TestAutomaticRules: which rules count for automatic checkpoints.
func TestAutomaticRules(t *testing.T) {
	r := newRig(t, nil)
	rows := r.records(t)
	under := func(text string) *policy.Policy {
		p, err := (policy.Finder{}).Resolve("p", []byte(text))
		if err != nil {
			t.Fatal(err)
		}
		return p
	}
	older := under("") // of a version that had no such rules
	older.Rules.Automatic = policy.Retention{}
	for i, c := range []struct {
		every  string
		p      *policy.Policy
		manual int // of 3
		auto   int // of 105, within the hour
	}{
		{"exec", under("checkpoints: {automatic: {keep_last: 2}}"), 3, 2},
		{"exec", under("checkpoints: {automatic: {keep_last: -1}}"), 3, 105},
		{"exec", under("checkpoints: {keep_last: -1}"), 3, 105},
		{"exec", under("checkpoints: {keep_last: 2}"), 1, 1},
		{"exec", under("checkpoints: {keep_last: 1, automatic: {keep_last: 3}}"), 1, 3},
		{"exec", under("checkpoints: {max_bytes: 1g}"), 3, 105},
		{"exec", older, 3, 105},
		{"exec", under("checkpoints: {every: 5m}"), 3, 101}, // the last 100, and the oldest
		{"1h", nil, 3, 105},                                 // its interval uses another trigger
		{"", under("checkpoints: {automatic: {keep_last: 2}}"), 3, 2},
	} {
		sb := r.automatic(t, fmt.Sprint("s", i), c.every, c.p)
		noon := time.Now().Truncate(time.Hour).Add(-48 * time.Hour)
		for n := range 104 {
			trigger := runtime.TriggerExec
			if c.every == "" {
				trigger = []string{runtime.TriggerMCP, runtime.TriggerTool}[n%2]
			}
			opts := runtime.CheckpointOptions{}
			if trigger == runtime.TriggerMCP { // a name that an agent gives keeps nothing
				opts.Name = fmt.Sprint("s", i, "-", n)
			}
			ck := r.take(t, sb.ID, opts)
			rows.taken(ck.ID, trigger, noon.Add(time.Duration(n)*time.Second))
		}
		var manual []string
		for range 3 {
			manual = append(manual, r.take(t, sb.ID, runtime.CheckpointOptions{}).ID)
		}
		last := runtime.CheckpointOptions{Trigger: runtime.TriggerExec, Automatic: true}
		if c.every == "" {
			last.Trigger = runtime.TriggerMCP
		}
		r.take(t, sb.ID, last)
		got := [2]int{}
		for _, id := range r.left(t, sb.ID, nil) {
			if slices.Contains(manual, id) {
				got[0]++
			} else {
				got[1]++
			}
		}
		if got != [2]int{c.manual, c.auto} {
			t.Errorf("%d: %d by hand and %d automatic are left, want %d and %d", i, got[0], got[1], c.manual, c.auto)
		}
	}
}

// TestOwnTrigger: Checkpoint refuses the triggers of automatic and of undo checkpoints.
func TestOwnTrigger(t *testing.T) {
	r := newRig(t, nil)
	r.automatic(t, "s", "exec,1h", nil)
	r.create(t, "without")
	for _, trigger := range []string{runtime.TriggerExec, runtime.TriggerInterval} {
		if _, err := r.Checkpoint(ctx, "s",
			runtime.CheckpointOptions{Trigger: trigger}); !errors.Is(err, runtime.ErrInvalid) {
			t.Errorf("%s: %v", trigger, err)
		}
		r.take(t, "without", runtime.CheckpointOptions{Trigger: trigger})
	}
	r.take(t, "s", runtime.CheckpointOptions{Trigger: "mine"})
	if _, err := r.Checkpoint(ctx, "without",
		runtime.CheckpointOptions{Trigger: runtime.TriggerUndo}); !errors.Is(err, runtime.ErrInvalid) {
		t.Errorf("undo: %v", err)
	}
}

// TestAtMost: the bound that needs no reading is never below the true size.
func TestAtMost(t *testing.T) {
	r := newRig(t, nil)
	sb, err := r.Sandbox(ctx, r.create(t, "s").ID)
	if err != nil {
		t.Fatal(err)
	}
	big := make([]byte, 64<<10) // which they have in common
	rand.Read(big)
	if err := os.WriteFile(filepath.Join(sb.Upperdir, "big"), big, 0o600); err != nil {
		t.Fatal(err)
	}
	var each int64
	for i := range 6 {
		if err := os.WriteFile(filepath.Join(sb.Upperdir, fmt.Sprint(i/2)),
			[]byte(rand.Text()+rand.Text()), 0o600); err != nil {
			t.Fatal(err)
		}
		each += r.take(t, sb.ID, runtime.CheckpointOptions{}).Bytes
	}
	rows, err := r.store.Checkpoints(ctx, store.Filter{SandboxID: sb.ID})
	if err != nil {
		t.Fatal(err)
	}
	sizes, err := r.store.Sizes(ctx)
	if err != nil {
		t.Fatal(err)
	}
	for n := range len(rows) + 1 {
		bound, err := r.store.AtMost(ctx, rows[:n])
		if is := sizes.Of(sizes.IDs()[:n]); err != nil || bound < is {
			t.Errorf("%d checkpoints take at most %d, and it is %d; %v", n, bound, is, err)
		}
		if n == len(rows) && bound >= each {
			t.Errorf("%d is no better than to add up %d", bound, each)
		}
	}
}

// BenchmarkInterval is a round of what takes checkpoints at an interval, of a
// sandbox that has made a file since, beside so many checkpoints.
func BenchmarkInterval(b *testing.B) {
	for _, n := range []int{10, 1000} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			r := newRig(b, nil)
			sb := r.automatic(b, "one", "1h", nil)
			sb, err := r.Sandbox(ctx, sb.ID)
			if err != nil {
				b.Fatal(err)
			}
			i := 0
			round := func(opts runtime.CheckpointOptions) {
				i++
				if err := os.WriteFile(filepath.Join(sb.Upperdir, fmt.Sprint(i)),
					[]byte(fmt.Sprint(i)), 0o600); err != nil {
					b.Fatal(err)
				}
				r.take(b, sb.ID, opts)
			}
			for range n {
				round(runtime.CheckpointOptions{})
			}
			for b.Loop() {
				if _, err := r.Sandbox(ctx, sb.ID); err != nil {
					b.Fatal(err)
				}
				round(runtime.CheckpointOptions{Trigger: runtime.TriggerInterval, Automatic: true})
			}
		})
	}
}
