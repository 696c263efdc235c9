//go:build failpoint

package store

import (
	"context"
	"testing"
)

// A kill in the commit of a deep list leaves the old checkpoint, or the new one, whole.
func TestDeepListKilled(t *testing.T) {
	ctx := context.Background()
	for _, point := range []string{
		"store.commit.before-manifest", "store.commit.after-pack", "store.commit.before-rename",
		"store.commit.after-rename", "store.commit.in-transaction",
	} {
		t.Run(point, func(t *testing.T) {
			root := t.TempDir()
			s := open(t, root)
			b := put(t, s, "box")
			c, list := deep(t, s, b, 0)
			if _, err := broken(t, "deep", root, point, "kill"); !killed(err) {
				t.Fatalf("it did not fire: %v", err)
			}
			_, err := s.Sweep(ctx)
			must(t, err)
			treeIs(t, s, c.ID, list)
			tidy(t, s)
			ready, err := s.Checkpoints(ctx, Filter{})
			must(t, err)
			if len(ready) == 2 {
				treeIs(t, s, ready[0].ID, many(3000))
			}
		})
	}
}
