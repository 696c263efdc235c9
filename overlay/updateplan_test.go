package overlay

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"iter"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/fault"
)

// plan is PlanUpdate of any two sequences.
func plan(ctx context.Context, have, want iter.Seq2[Entry, error]) (*Update, error) {
	file := filepath.Join(os.TempDir(), fmt.Sprintf("overlay-test-%d", os.Getpid()))
	return planBy(ctx, file, func(p *planner) error { return p.merge(have, want) })
}

// inOrder is all that an update does something about.
func inOrder(t tb, u *Update) (list []*updateChange) {
	t.Helper()
	must(t, u.all(func(_ int, c *updateChange) error { list = append(list, c); return nil }))
	return list
}

// planDirs plans in every way there is, which must be one plan.
func planDirs(t tb, dir, want string) *Update {
	t.Helper()
	u, err := plan(context.Background(), digested(dir), digested(want))
	must(t, err)
	fileCache := dir + ".memory"
	defer os.Remove(fileCache)
	_, err = Collect(context.Background(), dir, fileCache, nil, CollectOptions{})
	must(t, err)
	defer func(n int) { spillAt = n }(spillAt)
	spillAt = 1000
	second, err := PlanUpdate(context.Background(), fileCache, digested(want))
	must(t, err)
	third, err := PlanUpdateTree(context.Background(), fileCache, bytes.NewReader(treeOf(t, want)))
	must(t, err)
	fourth := planChunks(t, fileCache, treeOf(t, want))
	fifth := u
	if sameDevice(t, dir, want) { // a cache of the one is good for the other
		fifth = planCached(t, dir, want)
	}
	t.Cleanup(func() { must(t, errors.Join(u.Close(), second.Close(), third.Close(), fourth.Close(), fifth.Close())) })
	for name, v := range map[string]*Update{
		"PlanUpdate": second, "PlanUpdateTree": third, "PlanUpdateChunks": fourth, "PlanUpdateCached": fifth,
	} {
		if !reflect.DeepEqual(inOrder(t, u), inOrder(t, v)) || !reflect.DeepEqual(u.times, v.times) ||
			u.Bytes() != v.Bytes() {
			t.Fatalf("%s has another plan: %q, want %q", name, kinds(t, v), kinds(t, u))
		}
	}
	if second.changes.file != nil {
		return second
	}
	return u
}

// planChunks plans with both lists in chunks of a few lines.
func planChunks(t tb, fileCache string, tree []byte) *Update {
	t.Helper()
	var have []byte
	must(t, CollectionLines(fileCache, func(l Line) error { have = append(append(have, l.JSON...), '\n'); return nil }))
	has, _ := inFewLines(have)
	wants, parts := inFewLines(tree)
	u, err := PlanUpdateChunks(context.Background(), fileCache, has, wants, func(from, to int) (io.ReadCloser, error) {
		for _, p := range wants[from:to] {
			if slices.Contains(has, p) {
				t.Fatalf("a chunk that both have is read")
			}
		}
		return io.NopCloser(bytes.NewReader(bytes.Join(parts[from:to], nil))), nil
	})
	must(t, err)
	return u
}

// inFewLines cuts a list into chunks.
func inFewLines(list []byte) (chunks []Chunk, parts [][]byte) {
	var part []byte
	for line := range bytes.Lines(list) {
		part = append(part, line...)
		if crc32.ChecksumIEEE(line)%3 == 0 {
			parts, part = append(parts, part), nil
		}
	}
	if len(part) > 0 {
		parts = append(parts, part)
	}
	for _, p := range parts {
		chunks = append(chunks, Chunk{Digest: digestOf(p), Len: int64(len(p))})
	}
	return chunks, parts
}

// planCached plans with a file cache of what is wanted, of which another chunk than
// what was recorded is refused.
func planCached(t tb, dir, want string) *Update {
	t.Helper()
	known := want + ".known"
	_, err := Collect(context.Background(), want, known, nil, CollectOptions{})
	must(t, err)
	defer os.Remove(known)
	chunks, _ := inFewLines(treeOf(t, want))
	u, err := PlanUpdateCached(context.Background(), dir, known, nil)
	must(t, err)
	other := slices.Clone(chunks)
	other[len(other)-1].Digest = digestOf([]byte("another"))
	for i, list := range [][]Chunk{chunks, other, chunks[:len(chunks)-1], append(slices.Clone(chunks), chunks[0])} {
		if same, err := ProveCache(known, list); same != (i == 0) || err != nil {
			t.Fatalf("list %d is what is cached: %v, %v", i, same, err)
		}
	}
	whole, err := os.ReadFile(known)
	must(t, err)
	whole[cacheHeader+8] ^= 1 // an inode's number
	must(t, os.WriteFile(known, whole, 0o600))
	if _, err := ProveCache(known, chunks); !errors.Is(err, fault.ErrCorrupt) {
		t.Fatalf("a damaged cache: %v", err)
	}
	return u
}

func sameDevice(t tb, a, b string) bool {
	t.Helper()
	var st [2]unix.Stat_t
	must(t, errors.Join(unix.Stat(a, &st[0]), unix.Stat(b, &st[1])))
	return st[0].Dev == st[1].Dev
}

func treeOf(t tb, dir string) []byte {
	t.Helper()
	var tree bytes.Buffer
	tw := NewTreeWriter(&tree)
	for e, err := range digested(dir) {
		must(t, err)
		must(t, tw.Write(e))
	}
	must(t, tw.Close())
	return tree.Bytes()
}

// TestPlanRefuses has trees that cannot be.
func TestPlanRefuses(t *testing.T) {
	root := Entry{Path: ".", Type: TypeDir}
	digest := digestOf(nil)
	file := func(p string) Entry { return Entry{Path: p, Type: TypeFile, Digest: digest} }
	link := func(p, to string) Entry { return Entry{Path: p, Type: TypeFile, Hardlink: to} }
	own := errors.New("own")
	for name, c := range map[string]struct {
		have, want []Entry
		err        error
	}{
		"nothing wanted":    {[]Entry{root}, nil, fault.ErrInvalid},
		"nothing there":     {nil, []Entry{root}, fault.ErrInvalid},
		"out of order":      {[]Entry{root}, []Entry{root, file("b"), file("a")}, fault.ErrCorrupt},
		"no parent":         {[]Entry{root}, []Entry{root, file("a/b")}, fault.ErrCorrupt},
		"have out of order": {[]Entry{root, file("b"), file("a")}, []Entry{root}, fault.ErrCorrupt},
		"up":                {[]Entry{root}, []Entry{root, file("..")}, fault.ErrInvalid},
		"no digest":         {[]Entry{root}, []Entry{root, {Path: "a", Type: TypeFile}}, fault.ErrInvalid},
		"link to a link": {[]Entry{root}, []Entry{
			root, file("a"), link("b", "a"), link("c", "b"),
		}, fault.ErrInvalid},
		"link to another type": {[]Entry{root}, []Entry{
			root, {Path: "a", Type: TypeFifo}, link("b", "a"),
		}, fault.ErrInvalid},
		"link to what goes": {[]Entry{root, file("a")}, []Entry{root, link("b", "a")}, fault.ErrInvalid},
	} {
		t.Run(name, func(t *testing.T) {
			if _, err := plan(t.Context(), seqOf(c.have), seqOf(c.want)); !errors.Is(err, c.err) {
				t.Errorf("want %v, got %v", c.err, err)
			}
		})
	}
	bad := func(yield func(Entry, error) bool) { _ = yield(root, nil) && yield(Entry{}, own) }
	if _, err := plan(t.Context(), bad, seqOf([]Entry{root})); !errors.Is(err, own) {
		t.Error(err)
	}
	if _, err := plan(t.Context(), seqOf([]Entry{root}), bad); !errors.Is(err, own) {
		t.Error(err)
	}
	if _, err := plan(t.Context(), seqOf([]Entry{root, file("a")}), bad); !errors.Is(err, own) {
		t.Error(err)
	}
}

func seqOf(list []Entry) iter.Seq2[Entry, error] {
	return func(yield func(Entry, error) bool) {
		for _, e := range list {
			if !yield(e, nil) {
				return
			}
		}
	}
}
