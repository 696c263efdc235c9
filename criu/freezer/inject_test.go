//go:build amd64

package freezer_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/criu/freezer"
)

// A thread calls the kernel for its tracer and stands where it stood: the sleep that it
// was in goes on, and is not one instruction shorter. A stop that was sent meanwhile
// still comes.
func TestInject(t *testing.T) {
	ctx := context.Background()
	for version, hierarchy := range hierarchies(t) {
		t.Run(version, func(t *testing.T) {
			b := newBox(t, version, hierarchy,
				`begun=$(date +%s%N); sleep 1.5 && echo $(( ($(date +%s%N) - begun) / 1000000 )) > "$0"; while :; do sleep 1; done`)
			c := b.open(t)
			pid := 0
			for begun := time.Now(); pid == 0; {
				for _, p := range members(t, b) {
					if call, _ := os.ReadFile(fmt.Sprintf("/proc/%d/syscall", p)); strings.HasPrefix(string(call),
						"230 ") || strings.HasPrefix(string(call), "35 ") {
						pid = p
					}
				}
				if time.Since(begun) > time.Minute {
					t.Fatal("it does not sleep")
				}
			}
			if err := c.Inject(ctx, []int{pid}, nil); err == nil {
				t.Fatal("not frozen, and injected")
			}
			must(t, c.Freeze(ctx))
			status := func() string {
				data, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
				must(t, err)
				return string(data)
			}
			maps, err := os.ReadFile(fmt.Sprintf("/proc/%d/maps", pid))
			must(t, err)
			must(t, unix.Kill(pid, unix.SIGSTOP)) // is pending
			must(t, c.Inject(ctx, []int{pid, 1 << 22}, func(tracee *freezer.Tracee) error {
				got, err := tracee.Call(unix.SYS_GETPID)
				if err != nil || int(got) != pid || tracee.ID() != pid {
					t.Errorf("getpid of thread %d: %d, %v; want %d", tracee.ID(), got, err, pid)
				}
				if _, err := tracee.Call(unix.SYS_CLOSE, 1<<20); !errors.Is(err, unix.EBADF) {
					t.Errorf("close of what is not open: %v", err)
				}
				at, err := tracee.Page([]byte("/proc/self/comm\x00"))
				must(t, err)
				fd, err := tracee.Call(unix.SYS_OPEN, at, unix.O_RDONLY)
				must(t, err)
				_, err = tracee.Call(unix.SYS_CLOSE, fd)
				return err
			}))
			if now := status(); !isFrozen(t, c) || !strings.Contains(now, "\nTracerPid:\t0\n") ||
				!strings.Contains(now, "\nSigBlk:\t0000000000000000\n") {
				t.Errorf("frozen: %v, %s", isFrozen(t, c), now)
			}
			if now, _ := os.ReadFile(fmt.Sprintf("/proc/%d/maps", pid)); string(now) != string(maps) {
				t.Errorf("its memory is mapped otherwise: %s", now)
			}
			must(t, c.Thaw())
			for begun := time.Now(); !strings.Contains(status(), "\nState:\tT"); time.Sleep(time.Millisecond) {
				if time.Since(begun) > time.Minute {
					t.Fatal("it has not stopped")
				}
			}
			must(t, unix.Kill(pid, unix.SIGCONT))
			for begun := time.Now(); ; time.Sleep(time.Millisecond) {
				if data, _ := os.ReadFile(b.file); len(data) > 0 {
					var ms int
					if _, err := fmt.Sscan(string(data), &ms); err != nil || ms < 1500 {
						t.Errorf("it slept %d ms, %v", ms, err)
					}
					break
				}
				if time.Since(begun) > time.Minute {
					t.Fatal("the sleep has failed")
				}
			}
		})
	}
}
