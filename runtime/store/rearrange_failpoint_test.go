//go:build failpoint

package store

import (
	"context"
	"fmt"
	"maps"
	"strings"
	"testing"
)

func init() {
	roles["reindex"] = reindexOnce
	for _, name := range rearrangePoints {
		if !strings.HasPrefix(name, "store.pack.") { // whose sources are elsewhere
			otherPoints[name] = true
		}
	}
}

func reindexOnce(ctx context.Context, root string, _ []string) error {
	s, err := Open(ctx, root)
	if err != nil {
		return err
	}
	defer s.Close()
	_, err = s.Reindex(ctx)
	return err
}

// rearrangePoints are the failpoints of Reclaim and Reindex, and of the packs
// that Reclaim writes.
var rearrangePoints = []string{
	"store.reclaim.before-drop",
	"store.reclaim.before-rows",
	"store.reclaim.between-rows",
	"store.reclaim.after-rows",
	"store.reclaim.before-remove",
	"store.reclaim.before-copy",
	"store.pack.before-create",
	"store.pack.before-write",
	"store.pack.before-footer",
	"store.pack.before-fsync",
	"store.pack.after-fsync",
	"store.reclaim.before-rename",
	"store.reclaim.before-row",
	"store.reclaim.before-switch",
	"store.reclaim.in-switch",
	"store.reclaim.after-switch",
	"store.reindex.in-transaction",
	"store.reindex.before-checkpoint",
}

func TestReclaimFailpoints(t *testing.T) {
	ctx := context.Background()
	for i, point := range rearrangePoints[:len(rearrangePoints)-2] {
		for _, action := range actions(i) {
			for _, draft := range []bool{false, true} {
				t.Run(fmt.Sprintf("%s/%s/%v", point, action, draft), func(t *testing.T) {
					root := t.TempDir()
					s := open(t, root)
					b, list, data := history(t, s)
					// One pack is half in use then, one not at all.
					must(t, s.RemoveCheckpoint(ctx, list[0].ID))
					must(t, s.RemoveCheckpoint(ctx, list[2].ID))
					_, err := broken(t, "reclaim", root, point, action)
					if action == "kill" && !killed(err) || err == nil {
						t.Fatalf("%s did not fire: %v", point, err)
					}
					look := func() {
						t.Helper()
						rep := must1(s.VerifyAll(ctx, VerifyOptions{ReadData: true}))
						if len(rep.Damaged) > 0 {
							t.Fatalf("%+v", rep)
						}
						same(t, s, list[1].ID, data[1])
					}
					look()
					back := map[string]content{}
					if draft { // of what was about to go, before the sweep
						for _, i := range []int{0, 2} {
							c := of(b, fmt.Sprintf("back%d", i), KindFull)
							back[taken(t, s, c, data[i]).ID] = data[i]
						}
					}
					must1(s.Sweep(ctx))
					look()
					must1(s.Reclaim(ctx, ReclaimOptions{MaxWaste: 1e-9}))
					look()
					for id, want := range back {
						same(t, s, id, want)
					}
					tidy(t, s)
					intact(t, s)
					if u := must1(s.Usage(ctx)); u.Waste != 0 || u.Stored != packsSize(t, s) {
						t.Errorf("not all was freed: %+v", u)
					}
				})
			}
		}
	}
}

func TestReindexFailpoints(t *testing.T) {
	ctx := context.Background()
	for _, point := range rearrangePoints[len(rearrangePoints)-2:] {
		for _, action := range []string{"kill", "error", "enospc"} {
			t.Run(point+"/"+action, func(t *testing.T) {
				root := t.TempDir()
				s := open(t, root)
				_, list, data := history(t, s)
				right := rowsOf(t, s)
				_, err := s.db.Exec("DELETE FROM blobs WHERE raw % 2 = 0; DELETE FROM checkpoints")
				must(t, err)
				wrong := rowsOf(t, s)
				_, err = broken(t, "reindex", root, point, action)
				if action == "kill" && !killed(err) || err == nil {
					t.Fatalf("%s did not fire: %v", point, err)
				}
				if now := rowsOf(t, s); !maps.Equal(now, right) && !maps.Equal(now, wrong) {
					t.Error("the index is something in between")
				}
				must1(s.Sweep(ctx))
				must1(s.Reindex(ctx))
				if !maps.Equal(rowsOf(t, s), right) {
					t.Error("the index is not what it was")
				}
				for i := range list {
					same(t, s, list[i].ID, data[i])
				}
				tidy(t, s)
				intact(t, s)
			})
		}
	}
}
