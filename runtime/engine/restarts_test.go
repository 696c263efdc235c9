package engine

import (
	"testing"
	"time"

	"github.com/agentbox/agentbox/runtime"
)

// TestRestartPause: setting the clock does not lengthen the pause before a restart, and
// after a failed restart only the host's uptime counts.
func TestRestartPause(t *testing.T) {
	now := time.Now()
	ended := func(ago, ran time.Duration) runtime.Container {
		return runtime.Container{Status: runtime.Exited, Finished: now.Add(-ago), Started: now.Add(-ago - ran)}
	}
	here := func(row int) restarts { return restarts{Row: row, Boot: bootID()} }
	failed := here(1)
	failed.Tried = thisMoment()
	failed.Tried.Time = now.Add(-24 * time.Hour) // the clock was set forward since
	const slack = 5 * time.Second
	for _, c := range []struct {
		what     string
		st       restarts
		c        runtime.Container
		seen     time.Duration
		min, max time.Duration
	}{
		{"the first, at once", here(0), ended(0, 0), 0, 0, firstRestart},
		{"the eighth", here(7), ended(0, 0), 0, 128*firstRestart - slack, 128 * firstRestart},
		{"one of very many", here(1 << 30), ended(0, 0), 0, lastRestart - slack, lastRestart},
		{"after it ran for long", here(9), ended(0, steady), 0, 0, firstRestart},
		{"whose time is over", here(3), ended(time.Hour, 0), 0, 0, 0},
		{"the clock was set back by an hour", here(10), ended(-time.Hour, 0), 0, lastRestart, lastRestart},
		{"and then the minute is over", here(10), ended(-time.Hour, 0), lastRestart, 0, 0},
		{"that failed, and the clock was set forward", failed, ended(time.Hour, 0), time.Hour, 1, 2 * firstRestart},
		{"of another boot", restarts{Row: 10, Boot: "another"}, ended(0, 0), 0, 0, 0},
	} {
		if got := c.st.pause(c.c, c.seen); got < c.min || got > c.max {
			t.Errorf("%s: %v, want %v to %v", c.what, got, c.min, c.max)
		}
	}
}
