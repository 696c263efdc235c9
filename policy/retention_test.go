package policy

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/agentbox/agentbox/internal/fault"
)

// at makes a checkpoint that is called by its time.
func at(when string) Kept {
	t, err := time.Parse("2006-01-02 15:04", when)
	if err != nil {
		panic(err)
	}
	return Kept{ID: when, Created: t}
}

func all(whens ...string) (list []Kept) {
	for _, w := range whens {
		list = append(list, at(w))
	}
	return list
}

// sundays are the twelve of the example in restic's manual ("Removing
// snapshots according to a policy").
var sundays = all(
	"2019-09-01 11:00", "2019-09-08 11:00", "2019-09-15 11:00", "2019-09-22 11:00",
	"2019-09-29 11:00", "2019-10-06 11:00",
	"2019-10-13 11:00", "2019-10-20 11:00", "2019-10-27 11:00", "2019-11-03 11:00",
	"2019-11-10 11:00", "2019-11-17 11:00")

// busy: January 8 is a Monday, so the days before it are of another week.
var busy = all(
	"2024-01-08 10:50", "2024-01-08 10:10", "2024-01-08 09:59", "2024-01-08 00:00",
	"2024-01-07 23:59", "2024-01-07 08:00", "2024-01-01 12:00", "2023-12-31 12:00")

var late = time.Date(2030, 1, 1, 0, 0, 0, 0, time.UTC)

func TestRetentionTable(t *testing.T) {
	for _, c := range []struct {
		name string
		r    Retention
		now  time.Time
		list []Kept
		want []string // "id: reason, reason" of those kept, newest first
	}{
		{"no rules keep all", Retention{}, late, all("2024-01-01 00:00", "2023-01-01 00:00"),
			[]string{"2024-01-01 00:00: no rule", "2023-01-01 00:00: no rule"}},

		{"restic's example: daily 4 of twelve Sundays", Retention{KeepDaily: 4}, late, sundays,
			[]string{
				"2019-11-17 11:00: daily 1", "2019-11-10 11:00: daily 2", "2019-11-03 11:00: daily 3",
				"2019-10-27 11:00: daily 4",
			}},

		{"last 2", Retention{KeepLast: 2}, late, busy,
			[]string{"2024-01-08 10:50: last 1", "2024-01-08 10:10: last 2"}},

		{"hours are those of the clock, and only those with a checkpoint count", Retention{KeepHourly: 3}, late, busy,
			[]string{"2024-01-08 10:50: hourly 1", "2024-01-08 09:59: hourly 2", "2024-01-08 00:00: hourly 3"}},

		{"the same hour of another day is another hour", Retention{KeepHourly: 2}, late,
			all("2024-01-08 10:00", "2024-01-07 10:00", "2024-01-06 10:00"),
			[]string{"2024-01-08 10:00: hourly 1", "2024-01-07 10:00: hourly 2"}},

		{"a day ends at midnight", Retention{KeepDaily: 2}, late, busy,
			[]string{"2024-01-08 10:50: daily 1", "2024-01-07 23:59: daily 2"}},

		{"a week begins on Monday, also over the year's end", Retention{KeepWeekly: 3}, late, busy,
			[]string{"2024-01-08 10:50: weekly 1", "2024-01-07 23:59: weekly 2", "2023-12-31 12:00: weekly 3"}},

		{"rules are ORed", Retention{KeepLast: 1, KeepHourly: 2, KeepDaily: 2}, late, busy,
			[]string{
				"2024-01-08 10:50: last 1, hourly 1, daily 1", "2024-01-08 09:59: hourly 2",
				"2024-01-07 23:59: daily 2",
			}},

		{"the oldest stays while a count is left", Retention{KeepDaily: 5}, late,
			all("2024-01-02 12:00", "2024-01-02 11:00", "2024-01-01 12:00", "2024-01-01 11:00", "2024-01-01 10:00"),
			[]string{"2024-01-02 12:00: daily 1", "2024-01-01 12:00: daily 2", "2024-01-01 10:00: oldest daily"}},

		{"the oldest goes when none is left", Retention{KeepDaily: 2}, late,
			all("2024-01-02 12:00", "2024-01-01 12:00", "2024-01-01 10:00"),
			[]string{"2024-01-02 12:00: daily 1", "2024-01-01 12:00: daily 2"}},

		{"-1 is all", Retention{KeepDaily: -1}, late, busy,
			[]string{
				"2024-01-08 10:50: daily 1", "2024-01-07 23:59: daily 2", "2024-01-01 12:00: daily 3",
				"2023-12-31 12:00: daily 4",
			}},

		{"within counts from the newest, not from now, and its end is outside",
			Retention{KeepWithin: 50 * time.Minute}, late,
			all("2024-01-08 10:50", "2024-01-08 10:01", "2024-01-08 10:00"),
			[]string{"2024-01-08 10:50: within 50m", "2024-01-08 10:01: within 50m"}},

		{"one from the future does not move within, and stays", Retention{KeepWithin: 2 * time.Hour},
			at("2024-01-08 12:00").Created,
			all("2024-06-01 00:00", "2024-01-08 11:00", "2024-01-08 09:30", "2024-01-08 08:00"),
			[]string{"2024-06-01 00:00: within 2h", "2024-01-08 11:00: within 2h", "2024-01-08 09:30: within 2h"}},

		{"all from the future", Retention{KeepWithin: time.Hour}, at("2020-01-01 00:00").Created,
			all("2024-01-08 11:00", "2024-01-08 09:00"),
			[]string{"2024-01-08 11:00: within 1h", "2024-01-08 09:00: within 1h"}},

		{"pins and protected ones stay and are counted like others", Retention{KeepLast: 2}, late, []Kept{
			{ID: "d", Created: late.Add(-1), Pinned: true}, {ID: "c", Created: late.Add(-2)},
			{ID: "b", Created: late.Add(-3)}, {
				ID: "a", Created: late.Add(-4), Pinned: true, Protected: []string{"head", "tag good"},
			}},
			[]string{"d: pinned, last 1", "c: last 2", "a: pinned, head, tag good"}},

		{"each group by itself", Retention{KeepLast: 1}, late, []Kept{
			{ID: "x2", Group: "x", Created: late.Add(-1)}, {ID: "x1", Group: "x", Created: late.Add(-2)},
			{ID: "y2", Group: "y", Created: late.Add(-3)}, {ID: "y1", Group: "y", Created: late.Add(-4)}},
			[]string{"x2: last 1", "y2: last 1"}},

		{"other zones' hours are UTC's", Retention{KeepDaily: 1}, late, []Kept{
			{ID: "b", Created: time.Date(2024, 1, 2, 0, 30, 0, 0, time.FixedZone("", 3600))}, // 23:30 UTC of the 1st
			{ID: "a", Created: time.Date(2024, 1, 1, 12, 0, 0, 0, time.UTC)}},
			[]string{"b: daily 1"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			reverse := slices.Clone(c.list)
			slices.Reverse(reverse)
			for _, list := range [][]Kept{c.list, reverse} {
				got, err := c.r.Apply(c.now, list, nil)
				if err != nil {
					t.Fatal(err)
				}
				if d := cmp.Diff(c.want, summary(list, got)); d != "" {
					t.Errorf("-want +got:\n%s", d)
				}
			}
		})
	}
}

// summary lists what is kept, newest first.
func summary(list []Kept, got []Decision) []string {
	created := map[string]time.Time{}
	for _, k := range list {
		created[k.ID] = k.Created
	}
	got = slices.Clone(got)
	slices.SortFunc(got, func(a, b Decision) int { return created[b.ID].Compare(created[a.ID]) })
	out := []string{}
	for _, d := range got {
		if d.Keep {
			out = append(out, d.ID+": "+strings.Join(d.Reasons, ", "))
		}
	}
	return out
}

// shared sizes sets of checkpoints that share pieces: each is 1 << k for the
// pieces k it has.
func shared(pieces map[string]uint) func([]string) (int64, error) {
	return func(ids []string) (int64, error) {
		var union uint
		for _, id := range ids {
			union |= pieces[id]
		}
		return int64(union), nil
	}
}

func TestRetentionBudget(t *testing.T) {
	list := all("2024-01-05 00:00", "2024-01-04 00:00", "2024-01-03 00:00", "2024-01-02 00:00", "2024-01-01 00:00")
	five, four, three, two, one := list[0].ID, list[1].ID, list[2].ID, list[3].ID, list[4].ID
	// One and five share 16, so one's going frees only 1.
	size := shared(map[string]uint{one: 16 + 1, two: 2, three: 4, four: 8, five: 16})
	for _, c := range []struct {
		name string
		r    Retention
		pin  string
		want map[string]string // removed: why
	}{
		{"it fits", Retention{MaxBytes: 31}, "", map[string]string{}},
		{"one is enough", Retention{MaxBytes: 30}, "", map[string]string{one: reasonBudget}},
		{"no more than must", Retention{MaxBytes: 28}, "", map[string]string{one: reasonBudget, two: reasonBudget}},
		{
			"a pin is passed over", Retention{MaxBytes: 26}, two,
			map[string]string{one: reasonBudget, three: reasonBudget},
		},
		{"stronger than the rules", Retention{KeepLast: 3, MaxBytes: 16}, "", map[string]string{
			one: reasonUnkept, two: reasonUnkept, three: reasonBudget, four: reasonBudget}},
		{"even what stays is too much", Retention{MaxBytes: 1}, three, map[string]string{
			one: reasonBudget, two: reasonBudget, four: reasonBudget, five: reasonBudget}},
	} {
		t.Run(c.name, func(t *testing.T) {
			list := slices.Clone(list)
			for i := range list {
				if list[i].ID == c.pin {
					list[i].Protected = []string{"head"}
				}
			}
			got, err := c.r.Apply(late, list, size)
			if err != nil {
				t.Fatal(err)
			}
			removed := map[string]string{}
			for _, d := range got {
				if !d.Keep {
					removed[d.ID] = strings.Join(d.Reasons, ", ")
				}
			}
			if d := cmp.Diff(c.want, removed); d != "" {
				t.Errorf("-want +got:\n%s", d)
			}
		})
	}
	cause := errors.New("no size")
	if _, err := (Retention{MaxBytes: 1}).Apply(late, list, func([]string) (int64, error) {
		return 0, cause
	}); !errors.Is(err, cause) {
		t.Errorf("the error of size: %v", err)
	}
}

func TestRetentionInvalid(t *testing.T) {
	for _, r := range []Retention{
		{KeepLast: -2}, {KeepHourly: -2}, {KeepDaily: -3}, {KeepWeekly: -9}, {KeepWithin: -1}, {MaxBytes: -1},
	} {
		if _, err := r.Apply(late, nil, nil); !errors.Is(err, fault.ErrInvalid) {
			t.Errorf("%+v: %v", r, err)
		}
	}
}

func TestShort(t *testing.T) {
	for d, want := range map[time.Duration]string{
		2 * time.Hour: "2h", 90 * time.Minute: "1h30m", 10 * time.Minute: "10m", 40 * time.Second: "40s",
		time.Hour + time.Second: "1h0m1s", 10 * time.Second: "10s", 100 * time.Hour: "100h", 20 * time.Hour: "20h",
	} {
		if got := short(d); got != want {
			t.Errorf("%s: %q, want %q", d, got, want)
		}
	}
}

var base = time.Date(2024, 1, 1, 0, 0, 0, 0, time.UTC)

func genRetention(t *rapid.T) Retention {
	count := rapid.IntRange(-1, 6)
	return Retention{
		KeepLast:   rapid.OneOf(rapid.Just(0), count).Draw(t, "last"),
		KeepHourly: rapid.OneOf(rapid.Just(0), count).Draw(t, "hourly"),
		KeepDaily:  rapid.OneOf(rapid.Just(0), count).Draw(t, "daily"),
		KeepWeekly: rapid.OneOf(rapid.Just(0), count).Draw(t, "weekly"),
		KeepWithin: time.Duration(rapid.OneOf(rapid.Just(0), rapid.IntRange(0, 100)).Draw(t, "within")) * time.Hour,
		MaxBytes:   rapid.OneOf(rapid.Just(int64(0)), rapid.Int64Range(0, 1<<12)).Draw(t, "max"),
	}
}

func genList(t *rapid.T) ([]Kept, map[string]uint) {
	n := rapid.IntRange(0, 30).Draw(t, "n")
	list, pieces := make([]Kept, n), map[string]uint{}
	for i := range list {
		k := Kept{
			ID:    fmt.Sprintf("c%02d", i),
			Group: rapid.SampledFrom([]string{"a", "b"}).Draw(t, "group"),
			// Coarse, so that hours, days and instants are shared.
			Created: base.Add(time.Duration(rapid.IntRange(0, 3000).Draw(t, "t")) * 20 * time.Minute),
			Pinned:  rapid.IntRange(0, 7).Draw(t, "pin") == 0,
		}
		if rapid.IntRange(0, 7).Draw(t, "protect") == 0 {
			k.Protected = []string{"head"}
		}
		list[i] = k
		pieces[k.ID] = uint(rapid.IntRange(0, 1<<12-1).Draw(t, "pieces"))
	}
	return list, pieces
}

func genNow(t *rapid.T) time.Time {
	return base.Add(time.Duration(rapid.IntRange(0, 1200).Draw(t, "now")) * time.Hour)
}

func keeps(t *rapid.T, r Retention, now time.Time, list []Kept, pieces map[string]uint) map[string]bool {
	got, err := r.Apply(now, list, shared(pieces))
	if err != nil {
		t.Fatal(err)
	}
	if len(got) != len(list) {
		t.Fatalf("%d decisions over %d", len(got), len(list))
	}
	out := map[string]bool{}
	for i, d := range got {
		if d.ID != list[i].ID || len(d.Reasons) == 0 {
			t.Fatalf("decision %d is %+v, about %s", i, d, list[i].ID)
		}
		if d.Keep {
			out[d.ID] = true
		}
	}
	return out
}

func only(list []Kept, ids map[string]bool) (out []Kept) {
	for _, k := range list {
		if ids[k.ID] {
			out = append(out, k)
		}
	}
	return out
}

func TestRetentionProperties(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		r, now := genRetention(t), genNow(t)
		list, pieces := genList(t)
		kept := keeps(t, r, now, list, pieces)

		for _, k := range list {
			if (k.Pinned || len(k.Protected) > 0) && !kept[k.ID] {
				t.Fatalf("%+v does not keep %+v", r, k)
			}
		}
		again := keeps(t, r, now, only(list, kept), pieces)
		if d := cmp.Diff(kept, again); d != "" {
			t.Fatalf("not idempotent, %+v: %s", r, d)
		}
		if got := keeps(t, r, now, rapid.Permutation(list).Draw(t, "order"), pieces); !cmp.Equal(kept, got) {
			t.Fatalf("the order of the list matters: %v, %v", kept, got)
		}

		// The budget holds, or nothing is left that may go; and it took no more
		// than it had to: the newest that went does not fit.
		if r.MaxBytes > 0 {
			rules := r
			rules.MaxBytes = 0
			before := keeps(t, rules, now, list, pieces)
			size := func(set map[string]bool) (n int64) {
				ids := []string{}
				for id := range set {
					ids = append(ids, id)
				}
				n, _ = shared(pieces)(ids)
				return n
			}
			var newest *Kept
			for i, k := range list {
				if before[k.ID] && !kept[k.ID] && (newest == nil || k.Created.After(newest.Created) ||
					k.Created.Equal(newest.Created) && k.ID > newest.ID) {
					newest = &list[i]
				}
				if kept[k.ID] && !k.Pinned && len(k.Protected) == 0 && size(kept) > r.MaxBytes {
					t.Fatalf("%s is kept over the budget", k.ID)
				}
			}
			if newest != nil {
				more := map[string]bool{newest.ID: true}
				for id := range kept {
					more[id] = true
				}
				if size(more) <= r.MaxBytes {
					t.Fatalf("%s went without need", newest.ID)
				}
			}
		}
	})
}

// More generous rules keep no less.
func TestRetentionMonotone(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		r, now := genRetention(t), genNow(t)
		list, pieces := genList(t)
		more := r
		if rapid.Bool().Draw(t, "budget") && r.MaxBytes > 0 {
			more.MaxBytes += rapid.Int64Range(0, 1<<12).Draw(t, "more bytes")
		} else {
			// A generous rule may fill the budget with newer ones, so the rules
			// are compared without.
			r.MaxBytes, more.MaxBytes = 0, 0
			for _, n := range []*int{&more.KeepLast, &more.KeepHourly, &more.KeepDaily, &more.KeepWeekly} {
				if *n > 0 {
					*n += rapid.IntRange(0, 3).Draw(t, "more")
				}
				if *n > 0 && rapid.IntRange(0, 5).Draw(t, "all") == 0 {
					*n = -1
				}
			}
			if more.KeepWithin > 0 {
				more.KeepWithin += time.Duration(rapid.IntRange(0, 50).Draw(t, "longer")) * time.Hour
			}
		}
		less := keeps(t, r, now, list, pieces)
		for id := range less {
			if !keeps(t, more, now, list, pieces)[id] {
				t.Fatalf("%+v keeps %s, %+v does not", r, id, more)
			}
		}
	})
}

// Removals are final when newer checkpoints come: the rules never keep tomorrow what they removed
// today.
func TestRetentionNewer(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		r := genRetention(t)
		r.MaxBytes = 0
		list, pieces := genList(t)
		kept := keeps(t, r, late, list, pieces)
		newer := slices.Clone(list)
		for i := range rapid.IntRange(1, 5).Draw(t, "newer") {
			newer = append(newer, Kept{
				ID: fmt.Sprintf("n%d", i), Group: "a", Created: base.Add(time.Duration(3000*20+
					rapid.IntRange(0, 5000).Draw(t, "t")) * time.Minute),
			})
		}
		after := keeps(t, r, late, newer, pieces)
		for _, k := range list {
			if after[k.ID] && !kept[k.ID] {
				t.Fatalf("%s was removed and would be kept later", k.ID)
			}
		}
	})
}

// TestKeeping: automatic checkpoints go by rules of their own, and no other is
// counted, or goes, by them.
func TestKeeping(t *testing.T) {
	auto := func(when string) Kept { c := at(when); c.Automatic = true; return c }
	list := []Kept{ // newest first, as they were taken
		auto("2024-01-03 10:30"), at("2024-01-03 10:20"), auto("2024-01-03 10:10"), auto("2024-01-03 10:00"),
		at("2024-01-02 10:00"), auto("2024-01-01 23:00"), auto("2024-01-01 22:00"), at("2024-01-01 10:00"),
	}
	pinned := slices.Clone(list)
	pinned[6].Pinned = true
	pinned[3].Protected = []string{"head"}
	// The clock was two days ahead until it was set right.
	ahead := []Kept{
		auto("2024-01-01 10:02"), auto("2024-01-01 10:01"), auto("2024-01-03 10:00"), auto("2024-01-03 09:59"),
	}
	for _, c := range []struct {
		name string
		k    Keeping
		list []Kept
		want []string
	}{
		{"without rules of their own they go by those of all", Keeping{All: Retention{KeepLast: 2}}, list,
			[]string{"2024-01-03 10:30: last 1", "2024-01-03 10:20: last 2"}},
		{"the others all stay", Keeping{Automatic: Retention{KeepLast: 2, KeepDaily: 2}}, list, []string{
			"2024-01-03 10:30: last 1, daily 1", "2024-01-03 10:20: no rule", "2024-01-03 10:10: last 2",
			"2024-01-02 10:00: no rule", "2024-01-01 23:00: daily 2", "2024-01-01 10:00: no rule"}},
		{"or go by theirs", Keeping{All: Retention{KeepLast: 1}, Automatic: Retention{KeepLast: 1}}, list,
			[]string{"2024-01-03 10:30: last 1", "2024-01-03 10:20: last 1"}},
		{"-1 keeps all of them", Keeping{
			All: Retention{KeepLast: 1}, Automatic: Retention{KeepLast: -1},
		}, list, []string{
			"2024-01-03 10:30: last 1", "2024-01-03 10:20: last 1", "2024-01-03 10:10: last 2",
			"2024-01-03 10:00: last 3",
			"2024-01-01 23:00: last 4", "2024-01-01 22:00: last 5"}},
		{"pins and heads stay", Keeping{Automatic: Retention{KeepLast: 1}}, pinned, []string{
			"2024-01-03 10:30: last 1", "2024-01-03 10:20: no rule", "2024-01-03 10:00: head",
			"2024-01-02 10:00: no rule", "2024-01-01 22:00: pinned", "2024-01-01 10:00: no rule"}},
		{"the last ones are those taken last, whatever the clock said",
			Keeping{Automatic: Retention{KeepLast: 2}}, ahead,
			[]string{"2024-01-01 10:02: last 1", "2024-01-01 10:01: last 2"}},
		{"the bytes are of all, and the oldest go", Keeping{
			All: Retention{MaxBytes: 4}, Automatic: Retention{KeepLast: 3},
		}, list, []string{
			"2024-01-03 10:30: last 1", "2024-01-03 10:20: no rule", "2024-01-03 10:10: last 2",
			"2024-01-03 10:00: last 3"}},
	} {
		got, err := c.k.Apply(late, c.list, func(ids []string) (int64, error) { return int64(len(ids)), nil })
		if err != nil {
			t.Fatal(err)
		}
		want := slices.Clone(c.want)
		slices.Sort(want)
		have := summary(c.list, got)
		slices.Sort(have)
		if d := cmp.Diff(want, have); d != "" {
			t.Errorf("%s: -want +got:\n%s", c.name, d)
		}
		for i, d := range got {
			if d.ID != c.list[i].ID || len(d.Reasons) == 0 {
				t.Errorf("%s: decision %d is %+v", c.name, i, d)
			}
		}
	}
	for _, k := range []Keeping{
		{Automatic: Retention{KeepLast: -2}}, {All: Retention{KeepDaily: -2}, Automatic: Retention{KeepLast: 1}},
	} {
		if _, err := k.Apply(late, list, nil); !errors.Is(err, fault.ErrInvalid) {
			t.Errorf("%+v: %v", k, err)
		}
	}
}
