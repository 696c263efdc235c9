package runtime

import (
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/runtime/store"
)

// The clock that people set counts only from one boot to another, and what it
// says then never ends a life that has not begun.
func TestMoment(t *testing.T) {
	now := thisMoment()
	set := now // the clock was put forward by a day since
	set.Time = set.Time.Add(-24 * time.Hour)
	l := Lifetime{TTL: time.Hour, Begun: set}
	if l.expired() {
		t.Error("a clock put forward ends it early")
	}
	if d := time.Until(l.expires()) - time.Hour; d.Abs() > time.Minute {
		t.Errorf("it is said to expire at %v, %v off", l.expires(), d)
	}
	l.Begun = now
	l.Begun.Up -= 2 * time.Hour
	l.Begun.Time = l.Begun.Time.Add(24 * time.Hour) // and back
	if !l.expired() {
		t.Error("a clock put back makes it longer")
	}
	for ago, expired := range map[time.Duration]bool{-24 * time.Hour: false, time.Minute: false, 2 * time.Hour: true} {
		l.Begun = Moment{Time: time.Now().Add(-ago), Boot: "another", Up: now.Up}
		if l.expired() != expired {
			t.Errorf("made %v ago, before a reboot: expired %v", ago, l.expired())
		}
	}
	if (Lifetime{Begun: Moment{}}).expired() || !(Lifetime{}).expires().IsZero() {
		t.Error("what has no end expires")
	}
}

// TestRebootForgets has files whose data are not what their times say, as after a
// power cut: a checkpoint of an earlier boot does not believe the times.
func TestRebootForgets(t *testing.T) {
	var up unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &up); err != nil {
		t.Fatal(err)
	}
	booted := time.Now().Add(-time.Duration(up.Nano()))
	for _, test := range []struct {
		created time.Time
		vouched bool
	}{{booted.Add(-time.Minute), false}, {booted.Add(time.Minute), true}} {
		got, err := vouched(store.Checkpoint{Created: test.created})
		if err != nil || got.IsZero() == test.vouched {
			t.Errorf("created %v, booted %v: %v, %v", test.created, booted, got, err)
		}
	}
}
