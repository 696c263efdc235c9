package overlay

import (
	"fmt"
	"iter"
	"os"
	"runtime/debug"
	"testing"
)

// TestUpdateFreshCache fills a directory with very many entries. The memory
// must stay small.
func TestUpdateFreshCache(t *testing.T) {
	const files = 100_000
	base := tmpfs(t, "size=1g,nr_inodes=0")
	dir, fileCache := base+"/dir", base+"/memory"
	must(t, os.Mkdir(dir, 0o755))
	_, err := Collect(t.Context(), dir, fileCache, nil, CollectOptions{})
	must(t, err)
	want := func(yield func(Entry, error) bool) {
		more := yield(Entry{Path: ".", Type: TypeDir, Mode: 0o755}, nil)
		for i := 0; i < files && more; i++ {
			sub := fmt.Sprintf("a-directory-%03d", i/1000)
			if i%1000 == 0 {
				more = yield(Entry{Path: sub, Type: TypeDir, Mode: 0o755}, nil)
			}
			e := Entry{
				Path: fmt.Sprintf("%s/a-name-of-common-length-%03d", sub, i%1000), Type: TypeFile,
				Mode: 0o644, Digest: digestOf(nil),
			}
			if i%100 == 99 {
				e = Entry{
					Path: e.Path, Type: TypeFile,
					Hardlink: fmt.Sprintf("%s/a-name-of-common-length-%03d", sub, i%1000-1),
				}
			}
			more = more && yield(e, nil)
		}
	}
	defer debug.SetGCPercent(debug.SetGCPercent(20))
	peak := watchMemory()
	u, err := PlanUpdate(t.Context(), fileCache, want)
	must(t, err)
	must(t, u.Stage(t.Context(), dir, dir+".stage", nil))
	must(t, u.Apply(t.Context(), dir, dir+".stage"))
	used := peak()
	must(t, u.Close())
	if used > 30<<20 {
		t.Errorf("took %d MiB", used>>20)
	}
	t.Logf("peak %d MiB", used>>20)
	left, err := os.ReadDir(base)
	if len(left) != 2 || err != nil {
		t.Errorf("left behind: %v %v", left, err)
	}
	must(t, os.Remove(fileCache))
	_, err = Collect(t.Context(), dir, fileCache, nil, CollectOptions{})
	must(t, err)
	if u, err = PlanUpdate(t.Context(), fileCache, want); err != nil || !u.Empty() {
		t.Errorf("%d changes are left: %v", u.Len(), err)
	}
}

// TestPlanMemory has a million entries of which ten differ.
func TestPlanMemory(t *testing.T) {
	many := func(change int) iter.Seq2[Entry, error] {
		return func(yield func(Entry, error) bool) {
			if !yield(Entry{Path: ".", Type: TypeDir}, nil) {
				return
			}
			for i := range 1_000_000 {
				dir := fmt.Sprintf("d%03d", i/1000)
				if i%1000 == 0 && !yield(Entry{Path: dir, Type: TypeDir, Mode: 0o755}, nil) {
					return
				}
				e := Entry{
					Path: fmt.Sprintf("%s/%03d", dir, i%1000), Type: TypeFile, Size: 1,
					Mode: 0o644, Digest: digestOf(nil),
				}
				if i%10 == 9 { // a hundred thousand are further names
					e = Entry{Path: e.Path, Type: TypeFile, Hardlink: fmt.Sprintf("%s/%03d", dir, i%1000-1)}
				}
				if i%100_000 == change {
					e.Mode = 0o600
				}
				if !yield(e, nil) {
					return
				}
			}
		}
	}
	defer debug.SetGCPercent(debug.SetGCPercent(20))
	peak := watchMemory()
	u, err := plan(t.Context(), many(0), many(1))
	used := peak()
	must(t, err)
	if u.Len() != 20 {
		t.Errorf("%q", kinds(t, u))
	}
	if used > 50<<20 {
		t.Errorf("took %d MiB", used>>20)
	}
	t.Logf("peak %d MiB", used>>20)
}
