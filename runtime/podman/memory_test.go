package podman

import (
	"fmt"
	"io"
	"log/slog"
	"sync"
	"testing"
	"time"
)

// Of what several processes find out at once nothing is lost.
func TestNotesTogether(t *testing.T) {
	const id, n, each = "c", 10, 20
	root := t.TempDir() + "/podman"
	var all sync.WaitGroup
	for i := range n {
		all.Go(func() {
			b := &Backend{root: root, log: slog.New(slog.NewTextHandler(io.Discard, nil))}
			for j := range each {
				now := addresses{Since: time.Unix(int64(i*each+j), 0), Networks: map[string]address{"net": {IP: fmt.Sprintf("10.0.%d.%d", i, j)}}}
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
