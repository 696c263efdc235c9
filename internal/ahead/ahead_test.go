package ahead

import (
	"errors"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// how is what a thread is scheduled by.
func how(t *testing.T, thread int) unix.SchedAttr {
	a, err := unix.SchedGetAttr(thread, 0)
	if err != nil {
		t.Error(err)
		return unix.SchedAttr{}
	}
	return unix.SchedAttr{Size: unix.SizeofSchedAttr, Policy: a.Policy, Flags: a.Flags & unix.SCHED_FLAG_RESET_ON_FORK, Nice: a.Nice, Priority: a.Priority}
}

// budgeted has a test with another budget, of so much.
func budgeted(t *testing.T, b *budget) {
	was := left
	left = b
	t.Cleanup(func() { left = was })
}

// refused reports whether this process may have no real time: on cgroup v1 a group has
// none before somebody gives it some.
func refused(t *testing.T) bool {
	t.Helper()
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	err := set(0, first)
	if e := set(0, ordinary); e != nil {
		t.Fatal(e)
	}
	return errors.Is(err, unix.EPERM)
}

func TestDo(t *testing.T) {
	ahead := first
	if refused(t) {
		ahead = nicer
	}
	for name, c := range map[string]struct {
		left *budget
		in   unix.SchedAttr
	}{
		"before all":    {&budget{rest: time.Hour}, ahead},
		"spent":         {&budget{rest: -time.Hour}, nicer},
		"one processor": {&budget{rest: time.Hour, none: true}, nicer},
	} {
		t.Run(name, func(t *testing.T) {
			budgeted(t, c.left)
			var all sync.WaitGroup
			for range 20 { // of which some are on threads that were ahead before
				all.Go(func() {
					Do(func() {
						if a := how(t, 0); a != c.in {
							t.Errorf("in it the thread has %+v", a)
						}
						var other sync.WaitGroup
						other.Go(func() {
							if a := how(t, 0); a != ordinary {
								t.Errorf("another goroutine has %+v", a)
							}
						})
						other.Wait()
						nice, err := exec.Command("nice").Output()
						if err != nil || string(nice) != "0\n" {
							t.Errorf("a child has %s, %v", nice, err)
						}
					})
					if a := how(t, 0); a != ordinary {
						t.Errorf("after it the thread has %+v", a)
					}
				})
			}
			all.Wait()
			func() {
				defer func() { _ = recover() }()
				Do(func() { panic("of f") })
			}()
			if a := how(t, 0); a != ordinary {
				t.Errorf("after a panic the thread has %+v", a)
			}
			for _, task := range tasks(t) {
				if a, err := unix.SchedGetAttr(task, 0); err == nil && (a.Policy != unix.SCHED_NORMAL || a.Nice != 0) {
					t.Errorf("thread %d has %+v", task, a)
				}
			}
		})
	}
}

// What takes long is not before all others for as long as that.
func TestLong(t *testing.T) {
	budgeted(t, &budget{rest: time.Hour})
	began := time.Now()
	Do(func() {
		for how(t, 0) == first && time.Since(began) < time.Minute {
		}
		if a := how(t, 0); a != nicer {
			t.Errorf("after %v it has %+v", time.Since(began), a)
		}
	})
	if a := how(t, 0); a != ordinary {
		t.Errorf("after it the thread has %+v", a)
	}
	if refused(t) {
		return
	}
	if spent := time.Hour - left.rest; spent < longest/4 || spent > time.Since(began) {
		t.Errorf("it has cost %v", spent)
	}
	// The thread is another's long before the time that the first had is over.
	Do(func() {})
	time.Sleep(2 * longest)
	for _, task := range tasks(t) {
		if a, err := unix.SchedGetAttr(task, 0); err == nil && (a.Policy != unix.SCHED_NORMAL || a.Nice != 0) {
			t.Errorf("thread %d has %+v", task, a)
		}
	}
}

func TestBudget(t *testing.T) {
	b := budget{rest: most}
	if !b.any() {
		t.Error("none at first")
	}
	b.spend(most + time.Hour/share)
	if b.any() {
		t.Error("it is not spent")
	}
	b.seen = b.seen.Add(-time.Hour + time.Minute)
	if b.any() {
		t.Error("it was given too early")
	}
	b.seen = b.seen.Add(-2 * time.Minute)
	if !b.any() {
		t.Error("it does not come back")
	}
	b.seen = b.seen.Add(-24 * time.Hour)
	if b.any(); b.rest != most {
		t.Errorf("after a day there is %v", b.rest)
	}
}

// Who is to be nice stays so.
func TestNice(t *testing.T) {
	if os.Getenv("AHEAD") != "" {
		Do(func() {
			if a := how(t, 0); a.Policy != unix.SCHED_NORMAL || a.Nice != 5 {
				t.Errorf("it has %+v", a)
			}
		})
		return
	}
	cmd := exec.Command("nice", "-n", "5", os.Args[0], "-test.run=^TestNice$", "-test.v")
	cmd.Env = append(os.Environ(), "AHEAD=1")
	if out, err := cmd.CombinedOutput(); err != nil || !strings.Contains(string(out), "PASS") {
		t.Errorf("%v: %s", err, out)
	}
}

func tasks(t *testing.T) (list []int) {
	entries, err := os.ReadDir("/proc/self/task")
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		n, err := strconv.Atoi(e.Name())
		if err != nil {
			t.Fatal(err)
		}
		list = append(list, n)
	}
	return list
}
