//go:build amd64

package freezer_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// A sleep that was ended with EINTR, as a dump does it, goes on: on cgroups of
// both versions registers are read and set while nothing runs.
func TestTrap(t *testing.T) {
	ctx := context.Background()
	for version, hierarchy := range hierarchies(t) {
		t.Run(version, func(t *testing.T) {
			b := newBox(t, version, hierarchy,
				`while :; do i=$((i+1)); done & sleep 1.5 && echo slept > "$0"; while :; do sleep 1; done`)
			c := b.open(t)
			sleeper := func() int {
				for _, pid := range members(t, b) {
					call, _ := os.ReadFile(fmt.Sprintf("/proc/%d/syscall", pid))
					if strings.HasPrefix(string(call), "35 ") || strings.HasPrefix(string(call), "230 ") {
						return pid
					}
				}
				return 0
			}
			pid := 0
			for begun := time.Now(); pid == 0; pid = sleeper() {
				if time.Since(begun) > time.Minute {
					t.Fatal("it does not sleep")
				}
			}
			if err := c.Trap(ctx, []int{pid}, nil); err == nil {
				t.Fatal("not frozen, and trapped")
			}
			must(t, c.Freeze(ctx))
			set := func(rax uint64) {
				t.Helper()
				calls := 0
				must(t, c.Trap(ctx, []int{pid, 1 << 22}, func(tid int) error {
					calls++
					var regs unix.PtraceRegs
					if err := unix.PtraceGetRegs(tid, &regs); err != nil {
						return err
					}
					regs.Rax = rax
					return unix.PtraceSetRegs(tid, &regs)
				}))
				if calls != 1 || !isFrozen(t, c) {
					t.Fatalf("%d calls, frozen: %v", calls, isFrozen(t, c))
				}
			}
			set(^uint64(4) + 1)
			broken := errors.New("broken")
			if err := c.Trap(ctx, []int{pid}, func(int) error {
				return broken
			}); !errors.Is(err, broken) || !isFrozen(t, c) {
				t.Fatalf("%v, frozen: %v", err, isFrozen(t, c))
			}
			for _, p := range members(t, b) {
				status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", p))
				must(t, err)
				if !strings.Contains(string(status), "\nTracerPid:\t0\n") {
					t.Errorf("process %d is traced", p)
				}
			}
			set(^uint64(514) + 1)
			thawed := time.Now()
			must(t, c.Thaw())
			for {
				if data, _ := os.ReadFile(b.file); string(data) == "slept\n" {
					break
				}
				if time.Since(thawed) > time.Minute {
					t.Fatal("the sleep has failed")
				}
				time.Sleep(time.Millisecond)
			}
		})
	}
}

func members(t *testing.T, b *box) (pids []int) {
	t.Helper()
	data, err := os.ReadFile(filepath.Join(b.cgroup, "cgroup.procs"))
	must(t, err)
	for _, f := range strings.Fields(string(data)) {
		pid, err := strconv.Atoi(f)
		must(t, err)
		pids = append(pids, pid)
	}
	return pids
}
