package ahead

import (
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"
)

// nice is that of the calling thread.
func nice(t *testing.T) int {
	n, err := unix.Getpriority(unix.PRIO_PROCESS, 0)
	if err != nil {
		t.Fatal(err)
	}
	return 20 - n
}

func TestDo(t *testing.T) {
	var all sync.WaitGroup
	for range 20 { // of which some are on threads that were ahead before
		all.Go(func() {
			Do(func() {
				if n := nice(t); n != -by {
					t.Errorf("in it the thread has %d", n)
				}
				var other sync.WaitGroup
				other.Go(func() {
					if n := nice(t); n != 0 {
						t.Errorf("another goroutine has %d", n)
					}
				})
				other.Wait()
			})
			if n := nice(t); n != 0 {
				t.Errorf("after it the thread has %d", n)
			}
		})
	}
	all.Wait()
	func() {
		defer func() { _ = recover() }()
		Do(func() { panic("of f") })
	}()
	if n := nice(t); n != 0 {
		t.Errorf("after a panic the thread has %d", n)
	}
	for _, task := range tasks(t) {
		if n, err := unix.Getpriority(unix.PRIO_PROCESS, task); err == nil && n != 20 {
			t.Errorf("thread %d has %d", task, 20-n)
		}
	}
}

// Who is to be nice stays so.
func TestNice(t *testing.T) {
	if os.Getenv("AHEAD") != "" {
		Do(func() {
			if n := nice(t); n != 5 {
				t.Errorf("it has %d", n)
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
