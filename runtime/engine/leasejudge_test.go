package engine

import (
	"strings"
	"testing"
	"time"

	"github.com/agentbox/agentbox/runtime"
)

// TestLeaseJudged: what ends a lease, by every clock. Setting the clock or suspending the host
// does not end one early; a reboot ends leases whose owner lived on the host.
func TestLeaseJudged(t *testing.T) {
	t0 := time.Date(2026, 5, 1, 12, 0, 0, 0, time.UTC)
	at := func(boot string, up time.Duration) runtime.Moment {
		return runtime.Moment{Time: t0, Boot: boot, Up: up}
	}
	process := runtime.LeaseOwner{Kind: runtime.OwnerPid, Pid: 7, Start: 1, Boot: "a"}
	beating := runtime.LeaseOwner{
		Kind: runtime.OwnerHeartbeat, Interval: time.Minute, Beat: runtime.Beat{Time: t0, Boot: "a", Awake: time.Hour},
	}
	hour := runtime.Lease{
		Owner: runtime.LeaseOwner{Kind: runtime.OwnerNone}, For: time.Hour, Since: at("a", 10*time.Hour),
	}
	for name, c := range map[string]struct {
		lease runtime.Lease
		now   runtime.Moment
		awake time.Duration
		dead  bool
		ends  string // part of the reason; empty: it is held
		again time.Duration
	}{
		"a process": {
			lease: runtime.Lease{Owner: process}, now: at("a", 20*time.Hour), again: latest,
		},
		"a process that has ended": {
			lease: runtime.Lease{Owner: process}, now: at("a", 20*time.Hour), dead: true, ends: "process 7, has ended",
		},
		"a process of an earlier boot": {
			lease: runtime.Lease{Owner: process}, now: at("b", time.Second), ends: "with the host",
		},
		"a deadline ahead":  {lease: hour, now: at("a", 11*time.Hour-time.Second), again: time.Second},
		"a deadline passed": {lease: hour, now: at("a", 11*time.Hour), ends: "deadline"},
		"the clock leaps ahead": {lease: hour, now: runtime.Moment{
			Time: t0.AddDate(10, 0, 0), Boot: "a", Up: 10*time.Hour + time.Second,
		}, again: latest},
		"the clock goes back": {lease: hour, now: runtime.Moment{
			Time: t0.AddDate(-10, 0, 0), Boot: "a", Up: 11 * time.Hour,
		}, ends: "deadline"},
		"a boot, the deadline ahead": {lease: hour, now: runtime.Moment{
			Time: t0.Add(30 * time.Minute), Boot: "b", Up: time.Minute,
		}, again: latest},
		"a boot, the deadline passed": {lease: hour, now: runtime.Moment{
			Time: t0.Add(time.Hour), Boot: "b", Up: time.Minute,
		}, ends: "deadline"},
		"a boot with a clock of before": {lease: hour, now: runtime.Moment{
			Time: t0.AddDate(-50, 0, 0), Boot: "b", Up: time.Minute,
		}, again: latest},
		"a heart that beats": {
			lease: runtime.Lease{Owner: beating}, now: at("a", time.Hour),
			awake: time.Hour + 59*time.Second, again: time.Second,
		},
		"a heart that has stopped": {
			lease: runtime.Lease{Owner: beating}, now: at("a", time.Hour), awake: time.Hour + time.Minute,
			ends: "not renewed within 1m0s",
		},
		"a heart, and a night's sleep": {
			lease: runtime.Lease{Owner: beating}, now: at("a", 20*time.Hour),
			awake: time.Hour + time.Second, again: latest,
		},
		"a heart, and a leap": {
			lease: runtime.Lease{Owner: beating}, now: runtime.Moment{
				Time: t0.AddDate(1, 0, 0), Boot: "a", Up: time.Hour,
			}, awake: time.Hour + time.Second, again: latest,
		},
		"a heart, just after a boot": {
			lease: runtime.Lease{Owner: beating}, now: at("b", 59*time.Second),
			awake: 59 * time.Second, again: time.Second,
		},
		"a heart that a boot has ended": {
			lease: runtime.Lease{Owner: beating}, now: at("b", time.Minute), awake: time.Minute, ends: "not renewed",
		},
		"a process, its deadline passed": {
			lease: runtime.Lease{Owner: process, For: time.Hour, Since: at("a", 0)},
			now:   at("a", time.Hour), ends: "deadline",
		},
	} {
		reason, again, err := judgeLease(c.lease, c.now,
			runtime.Beat{Time: c.now.Time, Boot: c.now.Boot, Awake: c.awake},
			func(runtime.LeaseOwner) (bool, error) { return !c.dead, nil })
		if err != nil || (reason != "") != (c.ends != "") || !strings.Contains(reason, c.ends) || again != c.again {
			t.Errorf("%s: %q, again in %v, %v; want %q, %v", name, reason, again, err, c.ends, c.again)
		}
	}
}
