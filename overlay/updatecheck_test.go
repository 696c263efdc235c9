package overlay

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"reflect"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/fault"
)

// checkedPlan plans, and returns what holds Check of that plan against a Collect
// once the directory is as wanted.
func checkedPlan(t tb, dir, want string) func() {
	t.Helper()
	cache, out, whole := dir+".known", dir+".checked", dir+".whole"
	_, err := Collect(context.Background(), dir, cache, nil, CollectOptions{})
	must(t, err)
	u, err := PlanUpdate(context.Background(), cache, digested(want))
	must(t, err)
	return func() {
		t.Helper()
		defer u.Close()
		for _, all := range []bool{false, true} {
			ok, err := u.Check(context.Background(), dir, cache, out, nil, "base", all)
			must(t, err)
			if !ok {
				t.Fatalf("Check (all %v) does not know %q again", all, kinds(t, u))
			}
			base, err := CacheBase(out, true)
			must(t, err)
			_, err = Collect(context.Background(), dir, whole, nil, CollectOptions{})
			must(t, err)
			if got, all := recorded(t, out), recorded(t, whole); base != "base" || !reflect.DeepEqual(got, all) {
				t.Fatalf("Check wrote %v, base %q, Collect %v", got, base, all)
			}
			must(t, os.Remove(out))
			must(t, os.Remove(whole))
		}
		must(t, os.Remove(cache))
	}
}

func recorded(t tb, fileCache string) (list []Entry) {
	t.Helper()
	must(t, Collection(fileCache, func(e Entry) error { list = append(list, e); return nil }))
	return list
}

// afterApply are changes of what an update has made of checkTree.
var afterApply = map[string]func(dir string) error{
	"replaced file":            func(d string) error { return os.WriteFile(d+"/a/changed", []byte("xnew"), 0o644) },
	"its mode":                 func(d string) error { return os.Chmod(d+"/a/changed", 0o600) },
	"neighbour":                func(d string) error { return os.WriteFile(d+"/a/same", []byte("not"), 0o644) },
	"neighbour is gone":        func(d string) error { return os.Remove(d + "/a/same") },
	"neighbour is new":         func(d string) error { return os.WriteFile(d+"/a/other", nil, 0o644) },
	"removed file is back":     func(d string) error { return os.WriteFile(d+"/a/gone", nil, 0o644) },
	"added file is gone":       func(d string) error { return os.Remove(d + "/a/added") },
	"time of the directory":    func(d string) error { return touch(d+"/a", 1, 1) },
	"far away: new":            func(d string) error { return os.WriteFile(d+"/b/other", nil, 0o644) },
	"far away: gone":           func(d string) error { return os.Remove(d + "/b/same") },
	"far away: replaced":       func(d string) error { return os.Rename(d+"/b/same2", d+"/b/same") },
	"far away: mode":           func(d string) error { return os.Chmod(d+"/b", 0o700) },
	"far away: an attribute":   func(d string) error { return unix.Lsetxattr(d+"/b", "trusted.x", []byte("1"), 0) },
	"far away: a directory":    func(d string) error { return os.Mkdir(d+"/b/deep/dir", 0o755) },
	"far away: hard link":      func(d string) error { return os.Link(d+"/b/same", d+"/b/link") },
	"name of an inode of many": func(d string) error { return os.WriteFile(d+"/b/two", []byte("not"), 0o644) },
}

// checkTree makes the i-th of two trees.
func checkTree(t tb, d string, i int) {
	t.Helper()
	for _, sub := range []string{"", "/a", "/b", "/b/deep"} {
		must(t, os.Mkdir(d+sub, 0o755))
	}
	for _, f := range []string{
		"/a/same", "/a/changed", "/b/same", "/b/same2", "/b/one", "/b/deep/f", []string{"/a/gone", "/a/added"}[i],
	} {
		data := f
		if f == "/a/changed" {
			data += fmt.Sprint(i)
		}
		must(t, os.WriteFile(d+f, []byte(data), 0o644))
		must(t, touch(d+f, 1000, 0))
	}
	must(t, os.Link(d+"/b/one", d+"/b/two"))
	for _, sub := range []string{"/b/deep", "/b", "/a", ""} {
		must(t, touch(d+sub, 1000, 0))
	}
}

// TestCheckNotices changes what an update has made.
func TestCheckNotices(t *testing.T) {
	for name, change := range afterApply {
		t.Run(name, func(t *testing.T) {
			base := t.TempDir()
			dir, want := base+"/dir", base+"/want"
			checkTree(t, dir, 0)
			checkTree(t, want, 1)
			cache := base + "/known"
			settle(t)
			_, err := Collect(context.Background(), dir, cache, nil, CollectOptions{})
			must(t, err)
			u, err := PlanUpdate(context.Background(), cache, digested(want))
			must(t, err)
			must(t, u.Stage(context.Background(), dir, base+"/stage", &dirSource{dir: want}))
			must(t, u.Apply(context.Background(), dir, base+"/stage"))
			must(t, change(dir))
			if ok, err := u.Check(context.Background(), dir, cache, base+"/out", nil, "", false); ok || err != nil {
				t.Errorf("Check: %v, %v", ok, err)
			}
			if _, err := os.Lstat(base + "/out"); !os.IsNotExist(err) {
				t.Errorf("out: %v", err)
			}
		})
	}
}

// TestCheckCached makes a tree again what a file cache has, which then has it as a
// Collect does, and changes what was made.
func TestCheckCached(t *testing.T) {
	ctx := context.Background()
	changes := maps.Clone(afterApply)
	changes["nothing"] = func(string) error { return nil }
	for name, change := range changes {
		t.Run(name, func(t *testing.T) {
			base := t.TempDir()
			dir, want, cache := base+"/dir", base+"/want", base+"/known"
			checkTree(t, dir, 1)
			checkTree(t, want, 1)
			settle(t)
			_, err := Collect(ctx, dir, cache, nil, CollectOptions{Base: "old"})
			must(t, err)
			for _, err := range []error{
				os.WriteFile(dir+"/a/changed", []byte("0"), 0o600), os.Remove(dir + "/a/added"),
				os.WriteFile(dir+"/a/gone", nil, 0o644),
				os.RemoveAll(dir + "/b/deep"), os.WriteFile(dir+"/b/deep", nil, 0o644), // a file where a directory was
				os.Chmod(dir+"/b/same2", 0o600), os.Chmod(dir+"/b/same2", 0o644), // as it was, but read anew
				touch(dir+"/b/deep", 1, 1),
			} {
				must(t, err)
			}
			u, err := PlanUpdateCached(ctx, dir, cache, nil)
			must(t, err)
			defer u.Close()
			must(t, u.Stage(ctx, dir, base+"/stage", &dirSource{dir: want}))
			must(t, u.Apply(ctx, dir, base+"/stage"))
			settle(t)
			must(t, change(dir))
			got, err := u.CheckCached(ctx, dir, cache, nil)
			must(t, err)
			if (got != nil) != (name == "nothing") {
				t.Fatalf("CheckKnown: %v", got)
			}
			if got == nil {
				return
			}
			must(t, got.Write("another base"))
			if b, err := CacheBase(cache, true); b != "another base" || err != nil {
				t.Errorf("base %q, %v", b, err)
			}
			again, whole := base+"/again", base+"/whole"
			c, err := Collect(ctx, dir, again, nil, CollectOptions{Cache: cache, Base: "another base"})
			must(t, err)
			if c.Read != 0 || !c.Same {
				t.Errorf("with the patched cache %d files are read, same: %v", c.Read, c.Same)
			}
			_, err = Collect(ctx, dir, whole, nil, CollectOptions{Base: "another base"})
			must(t, err)
			a, err := os.ReadFile(cache)
			must(t, err)
			b, err := os.ReadFile(whole)
			must(t, err)
			if !bytes.Equal(a, b) {
				t.Error("the patched cache is not what a Collect writes")
			}

			// Killed while it was written.
			a[cacheHeader+20] ^= 1
			must(t, os.WriteFile(cache, a, 0o600))
			if _, err := CacheBase(cache, true); !errors.Is(err, fault.ErrCorrupt) {
				t.Errorf("half-written: %v", err)
			}
			// An unusable cache is an error, and no plan.
			must(t, os.Truncate(cache, int64(cacheHeader)))
			if u, err := PlanUpdateCached(ctx, dir, cache, nil); err == nil || u != nil {
				t.Errorf("a plan by a cache that is cut off: %v", err)
			}
		})
	}
}
