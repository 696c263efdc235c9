package engine

import (
	"testing"
	"time"

	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/store"
)

// TestMoment: the wall clock counts only from one boot to another, and never ends a lifetime
// that has not begun.
func TestMoment(t *testing.T) {
	now := thisMoment()
	set := now // the clock was put forward by a day since
	set.Time = set.Time.Add(-24 * time.Hour)
	l := runtime.Lifetime{TTL: time.Hour, Begun: set}
	if expired(l) {
		t.Error("a clock put forward ends it early")
	}
	if d := time.Until(expiresAt(l)) - time.Hour; d.Abs() > time.Minute {
		t.Errorf("it is said to expire at %v, %v off", expiresAt(l), d)
	}
	l.Begun = now
	l.Begun.Up -= 2 * time.Hour
	l.Begun.Time = l.Begun.Time.Add(24 * time.Hour) // and back
	if !expired(l) {
		t.Error("a clock put back makes it longer")
	}
	for ago, want := range map[time.Duration]bool{-24 * time.Hour: false, time.Minute: false, 2 * time.Hour: true} {
		l.Begun = runtime.Moment{Time: time.Now().Add(-ago), Boot: "another", Up: now.Up}
		if expired(l) != want {
			t.Errorf("made %v ago, before a reboot: expired %v", ago, expired(l))
		}
	}
	if expired((runtime.Lifetime{Begun: runtime.Moment{}})) || !expiresAt((runtime.Lifetime{})).IsZero() {
		t.Error("what has no end expires")
	}
}

// TestRebootForgets: the times of a file show that it is unchanged only within one boot.
func TestRebootForgets(t *testing.T) {
	booted := time.Now().Add(-uptime())
	for created, want := range map[time.Time]bool{booted.Add(-time.Minute): false, booted.Add(time.Minute): true} {
		if got := vouched(store.Checkpoint{Created: created}); got.IsZero() == want {
			t.Errorf("created %v, booted %v: %v", created, booted, got)
		}
	}
}
