package stage

import (
	"errors"
	"os"
	"path/filepath"
	gosync "sync"
	"sync/atomic"
	"testing"

	"github.com/agentbox/agentbox/internal/fault"
)

func TestLock(t *testing.T) {
	run := t.TempDir()
	unlock, err := At(run, "c1").Lock()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := At(run, "c1").Lock(); !errors.Is(err, fault.ErrBusy) {
		t.Fatalf("a second one: %v, want ErrBusy", err)
	}
	other, err := At(run, "c2").Lock()
	if err != nil {
		t.Fatal(err)
	}
	other()
	unlock()
	if left, _ := os.ReadDir(filepath.Join(run, "lock")); len(left) != 0 {
		t.Fatalf("left behind: %v", left)
	}
	var inside, most atomic.Int32
	var group gosync.WaitGroup
	for range 8 {
		group.Go(func() {
			for range 200 {
				unlock, err := At(run, "c1").Lock()
				if err != nil {
					if !errors.Is(err, fault.ErrBusy) {
						t.Error(err)
					}
					continue
				}
				if n := inside.Add(1); n > most.Load() {
					most.Store(n)
				}
				inside.Add(-1)
				unlock()
			}
		})
	}
	group.Wait()
	if most.Load() != 1 {
		t.Fatalf("%d had it at once", most.Load())
	}
}
