package policy

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/agentbox/agentbox/internal/fault"
)

// Retention says which checkpoints are kept, as `restic forget` does. A
// checkpoint is kept when at least one rule wants it; without any rule all
// are. The calendar is UTC's, weeks are those of ISO 8601 (Monday to Sunday).
//
// A count of n keeps the newest checkpoint of each of the n newest hours (days,
// weeks) that have one; -1 stands for all of them. When fewer than n are
// there, the oldest checkpoint is kept too, so that the history does not get
// shorter before it must.
type Retention struct {
	KeepLast   int           // the n newest; -1: all
	KeepWithin time.Duration // those made less than this before the newest
	KeepHourly int
	KeepDaily  int
	KeepWeekly int
	// MaxBytes bounds what all checkpoints need together, at rest. It is
	// stronger than the rules: the oldest go until the rest fits, all but those
	// that are pinned or protected. 0: no bound.
	MaxBytes int64
}

// Kept is what Apply has to know of a checkpoint.
type Kept struct {
	ID      string
	Group   string // the rules count within each group by itself: the sandbox
	Created time.Time
	Pinned  bool
	// Protected says why it has to stay whatever the rules say, e.g. "head",
	// "tag good"; empty: it has not.
	Protected []string
	// Automatic says that it was taken without being asked for.
	Automatic bool
}

// Decision is what becomes of a checkpoint, and because of what. A reason to
// keep names the rule and, for rules that count, which one this is: "last 1",
// "hourly 3", "oldest daily", "within 2h".
type Decision struct {
	ID      string
	Keep    bool
	Reasons []string // never empty
}

// Reasons that come from no count.
const (
	reasonPinned = "pinned"
	reasonNoRule = "no rule"     // keeps: there are none
	reasonUnkept = "not kept"    // removes: no rule wants it
	reasonBudget = "over budget" // removes: MaxBytes
)

// Validate returns ErrInvalid if the rules make no sense.
func (r Retention) Validate() error {
	for _, c := range []struct {
		name string
		n    int
	}{
		{"keep-last", r.KeepLast}, {"keep-hourly", r.KeepHourly}, {"keep-daily", r.KeepDaily},
		{"keep-weekly", r.KeepWeekly},
	} {
		if c.n < -1 {
			return fmt.Errorf("%s %d: %w: a count, or -1 for all", c.name, c.n, fault.ErrInvalid)
		}
	}
	if r.KeepWithin < 0 {
		return fmt.Errorf("keep-within %s: %w: it is negative", r.KeepWithin, fault.ErrInvalid)
	}
	if r.MaxBytes < 0 {
		return fmt.Errorf("max-bytes %d: %w: it is negative", r.MaxBytes, fault.ErrInvalid)
	}
	return nil
}

func (r Retention) hasRule() bool {
	return r.KeepLast != 0 || r.KeepWithin != 0 || r.KeepHourly != 0 || r.KeepDaily != 0 || r.KeepWeekly != 0
}

// Apply decides over list; the decisions are in its order. A checkpoint from
// after now is not the newest that KeepWithin counts from, and is within it.
//
// size returns the bytes that the checkpoints with these ids need together, at
// rest, and must not grow when ids are left out; it is called a few times, and
// only when there is a MaxBytes. When even what has to stay is over the
// bound, all else goes and that is not an error.
func (r Retention) Apply(now time.Time, list []Kept, size func(ids []string) (int64, error)) ([]Decision, error) {
	return r.apply(now, list, size, false)
}

// apply is Apply; asListed has KeepLast count in the order of list, and not by time.
func (r Retention) apply(
	now time.Time, list []Kept, size func(ids []string) (int64, error), asListed bool,
) ([]Decision, error) {
	if err := r.Validate(); err != nil {
		return nil, err
	}
	order := newestFirst(list)
	out := make([]Decision, len(list))
	groups := map[string][]int{}
	for _, i := range order {
		out[i].ID = list[i].ID
		if list[i].Pinned {
			out[i].Reasons = append(out[i].Reasons, reasonPinned)
		}
		out[i].Reasons = append(out[i].Reasons, list[i].Protected...)
		groups[list[i].Group] = append(groups[list[i].Group], i)
	}
	for _, members := range groups {
		r.applyRules(now, list, members, out, asListed)
	}
	for i := range out {
		out[i].Keep = len(out[i].Reasons) > 0
		switch {
		case out[i].Keep:
		case r.hasRule():
			out[i].Reasons = []string{reasonUnkept}
		default:
			out[i].Keep, out[i].Reasons = true, []string{reasonNoRule}
		}
	}
	return out, r.applyBudget(list, order, out, size)
}

// newestFirst are the places of list; ids decide between namesakes in time, so
// that the answer does not depend on the order of list.
func newestFirst(list []Kept) []int {
	order := make([]int, len(list))
	for i := range order {
		order[i] = i
	}
	slices.SortStableFunc(order, func(a, b int) int {
		return cmp.Or(list[b].Created.Compare(list[a].Created), strings.Compare(list[b].ID, list[a].ID))
	})
	return order
}

// Keeping is all that a policy says of the checkpoints of its sandboxes.
type Keeping struct {
	All       Retention
	Automatic Retention // if it has a rule, those that are Automatic go by it, and not by the rules of All
}

// Apply is Retention's. Where automatic checkpoints have rules of their own, they
// are not counted by those of the others, and have to be listed newest first, as
// they were taken: what a clock that was set back says of them makes none of the
// last ones go. MaxBytes is of all together.
func (k Keeping) Apply(now time.Time, list []Kept, size func(ids []string) (int64, error)) ([]Decision, error) {
	if !k.Automatic.hasRule() {
		return k.All.Apply(now, list, size)
	}
	var own, others []Kept
	for _, c := range list {
		if c.Automatic {
			own = append(own, c)
		} else {
			others = append(others, c)
		}
	}
	counted := k.All
	counted.MaxBytes = 0
	a, err := k.Automatic.apply(now, own, nil, true)
	if err != nil {
		return nil, err
	}
	b, err := counted.Apply(now, others, nil)
	if err != nil {
		return nil, err
	}
	decided := map[string]Decision{}
	for _, d := range append(a, b...) {
		decided[d.ID] = d
	}
	out, order := make([]Decision, len(list)), newestFirst(list)
	for i := range list {
		out[i] = decided[list[i].ID]
	}
	return out, k.All.applyBudget(list, order, out, size)
}

// applyRules adds the reasons of the counting rules to the members of one
// group, which are sorted, newest first.
func (r Retention) applyRules(now time.Time, list []Kept, members []int, out []Decision, asListed bool) {
	rules := []struct {
		name  string
		count int // left; -1: no end
		slot  func(t time.Time) int
		taken int
		last  int
	}{
		{name: "hourly", count: r.KeepHourly, slot: func(t time.Time) int { return day(t)*24 + t.Hour() }},
		{name: "daily", count: r.KeepDaily, slot: day},
		{name: "weekly", count: r.KeepWeekly, slot: func(t time.Time) int { y, w := t.ISOWeek(); return y*100 + w }},
	}
	nth, inOrder := make(map[int]int, len(members)), members
	if asListed {
		inOrder = slices.Sorted(slices.Values(members))
	}
	for n, i := range inOrder {
		nth[i] = n
	}
	var newest time.Time // of those that are not in the future
	for _, i := range members {
		if !list[i].Created.After(now) {
			newest = list[i].Created
			break
		}
	}
	for n, i := range members {
		t := list[i].Created.UTC()
		d := &out[i]
		// With all in the future newest is the year 1, and all are within.
		if r.KeepWithin > 0 && t.After(newest.Add(-r.KeepWithin)) {
			d.Reasons = append(d.Reasons, "within "+short(r.KeepWithin))
		}
		if r.KeepLast < 0 || nth[i] < r.KeepLast {
			d.Reasons = append(d.Reasons, fmt.Sprintf("last %d", nth[i]+1))
		}
		for k := range rules {
			rule := &rules[k]
			if rule.count == 0 {
				continue
			}
			slot := rule.slot(t)
			fresh := rule.taken == 0 || slot != rule.last
			if !fresh && n != len(members)-1 {
				continue
			}
			if fresh {
				rule.taken++
				d.Reasons = append(d.Reasons, fmt.Sprintf("%s %d", rule.name, rule.taken))
			} else {
				d.Reasons = append(d.Reasons, "oldest "+rule.name)
			}
			rule.last = slot
			if rule.count > 0 {
				rule.count--
			}
		}
	}
}

// applyBudget takes the oldest away until the rest fits.
func (r Retention) applyBudget(list []Kept, order []int, out []Decision, size func(ids []string) (int64, error)) error {
	if r.MaxBytes == 0 {
		return nil
	}
	var may []int // go, oldest first
	for _, i := range slices.Backward(order) {
		if out[i].Keep && !list[i].Pinned && len(list[i].Protected) == 0 {
			may = append(may, i)
		}
	}
	// fits reports whether it is enough to remove the n oldest of may. Since pieces are shared,
	// the sizes of checkpoints cannot be added up: size is called for whole sets, and by
	// bisection, because each call is costly.
	fits := func(n int) (bool, error) {
		gone := make(map[int]bool, n)
		for _, i := range may[:n] {
			gone[i] = true
		}
		ids := []string{}
		for i := range out {
			if out[i].Keep && !gone[i] {
				ids = append(ids, out[i].ID)
			}
		}
		total, err := size(ids)
		return total <= r.MaxBytes, err
	}
	if ok, err := fits(0); ok || err != nil { // mostly
		return measured(err)
	}
	low, high := min(1, len(may)), len(may) // len(may) is the answer even when it does not fit
	for low < high {
		mid := (low + high) / 2
		ok, err := fits(mid)
		if err != nil {
			return measured(err)
		}
		if ok {
			high = mid
		} else {
			low = mid + 1
		}
	}
	for _, i := range may[:low] {
		out[i].Keep, out[i].Reasons = false, []string{reasonBudget}
	}
	return nil
}

func measured(err error) error {
	if err != nil {
		return fmt.Errorf("measure checkpoints: %w", err)
	}
	return nil
}

// day numbers the days of the calendar of t.
func day(t time.Time) int { return t.Year()*1000 + t.YearDay() }

// short leaves the zero units out: 2h instead of 2h0m0s.
func short(d time.Duration) string {
	s := d.String()
	if strings.HasSuffix(s, "m0s") {
		s = strings.TrimSuffix(s, "0s")
	}
	if strings.HasSuffix(s, "h0m") {
		s = strings.TrimSuffix(s, "0m")
	}
	return s
}
