package policy

import (
	"fmt"
	"slices"
	"strings"
	"time"
)

// MinEvery keeps checkpoints from following each other without a pause.
const MinEvery = time.Second

// Every says when checkpoints are taken without being asked for; the zero value:
// never. It is written "exec", a duration, or both with a comma between them.
type Every struct {
	Exec     bool          // before each exec
	Interval time.Duration // 0: at none
}

// ParseEvery reads what Every's String wrote, or a person; nothing is the zero value.
func ParseEvery(s string) (e Every, err error) {
	if s == "" {
		return e, nil
	}
	bad := fmt.Errorf("%.40q: write exec, a duration from %v on, for example 5m, or both: exec,5m", s, MinEvery)
	for part := range strings.SplitSeq(s, ",") {
		if part == TriggerExec {
			if e.Exec {
				return Every{}, bad
			}
			e.Exec = true
			continue
		}
		d, err := ParseDuration(part)
		if err != nil || d < MinEvery || e.Interval != 0 {
			return Every{}, bad
		}
		e.Interval = d
	}
	return e, nil
}

func (e Every) String() string {
	parts := []string{}
	if e.Exec {
		parts = append(parts, TriggerExec)
	}
	if e.Interval > 0 {
		parts = append(parts, e.Interval.String())
	}
	return strings.Join(parts, ",")
}

// Triggers are those of the checkpoints that are taken.
func (e Every) Triggers() []string {
	list := []string{}
	if e.Exec {
		list = append(list, TriggerExec)
	}
	if e.Interval > 0 {
		list = append(list, TriggerInterval)
	}
	return list
}

// allowsEvery reports whether every trigger in an Every is allowed, and otherwise returns the
// first that is not.
func (r *Rules) allowsEvery(every string) (trigger string, ok bool) {
	e, err := ParseEvery(every)
	if err != nil {
		return every, false // its parser reports what is wrong
	}
	for _, t := range e.Triggers() {
		if !slices.Contains(r.Triggers, t) {
			return t, false
		}
	}
	return "", true
}
