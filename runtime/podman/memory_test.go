package podman

import (
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"
)

// Concurrent notes of several processes are all kept.
func TestNotesTogether(t *testing.T) {
	const id, n, each = "c", 10, 20
	root := t.TempDir() + "/podman"
	var all sync.WaitGroup
	for i := range n {
		all.Go(func() {
			b := &Backend{root: root, log: slog.New(slog.NewTextHandler(io.Discard, nil))}
			for j := range each {
				now := addresses{
					Since:    time.Unix(int64(i*each+j), 0),
					Networks: map[string]address{"net": {IP: fmt.Sprintf("10.0.%d.%d", i, j)}},
				}
				if err := b.note(id, func(m *memory) bool { return m.add(now) }); err != nil {
					t.Error(err)
				}
			}
		})
	}
	all.Wait()
	b := &Backend{root: root, log: slog.Default()}
	had := map[string]bool{}
	for _, a := range b.remember(id).Addresses {
		had[a.Networks["net"].IP] = true
	}
	if len(had) != n*each {
		t.Errorf("%d addresses are remembered of %d: %v", len(had), n*each, had)
	}
}

// A note about a container that is gone by now brings nothing back.
func TestNotesOfGone(t *testing.T) {
	b := newBox(t, "bt", "sh", "-c", forever)
	c, err := b.look(b.ctx, b.id)
	must(t, err)
	c.State.Status = "running" // as in an earlier look
	must(t, b.noteAddresses(c))
	must(t, b.noteManaged(c))
	if m := b.remember(b.id); len(m.Addresses) != 1 || len(m.Managed) != 3 {
		t.Errorf("noted: %+v", m)
	}
	must(t, b.Remove(b.ctx, b.id))
	must(t, b.noteAddresses(c))
	must(t, b.noteManaged(c))
	if left, err := os.ReadDir(b.root); err != nil || len(left) > 0 {
		t.Errorf("left: %v, %v", left, err)
	}
	must(t, b.forget(b.id)) // again

	// Nor does it make a root that was purged.
	other := newBox(t, "bt", "sh", "-c", forever)
	must(t, os.RemoveAll(filepath.Dir(other.root)))
	other.inspect()
	must(t, other.forget(other.id))
	if _, err := os.Lstat(filepath.Dir(other.root)); !os.IsNotExist(err) {
		t.Errorf("the root is there again: %v", err)
	}
	if err := other.note(other.id, func(*memory) bool { return true }); err == nil {
		t.Error("what must be noted was not, and nobody told")
	}
}
