package overlay

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/fault"
)

// sealed makes a file cache around anything: its sums are right, whatever is in it.
func sealed(dir string, records []byte, count uint64) []byte {
	var st unix.Stat_t
	_ = unix.Stat(dir, &st)
	var b bytes.Buffer
	w := newCacheWriter(&b, unix.Major(st.Dev), unix.Minor(st.Dev))
	_ = w.records(records, 0)
	w.count = count
	_ = w.finish("sealed")
	return b.Bytes()
}

func smallTree(t tb, dir string) {
	t.Helper()
	must(t, os.MkdirAll(dir+"/a/b", 0o755))
	must(t, os.WriteFile(dir+"/a/b/c", []byte("content"), 0o644))
	must(t, os.Link(dir+"/a/b/c", dir+"/z"))
	must(t, os.Symlink("nowhere", dir+"/link"))
}

// TestCacheDamage damages a file cache at every byte.
func TestCacheDamage(t *testing.T) {
	base := t.TempDir()
	src := base + "/src"
	smallTree(t, src)
	settle(t)
	collectDir(t, src, base+"/good", nil, CollectOptions{Base: "the base"})
	good, err := os.ReadFile(base + "/good")
	must(t, err)
	bad, out := base+"/bad", base+"/out"
	check := func(what string, b []byte) {
		t.Helper()
		must(t, os.WriteFile(bad, b, 0o600))
		if base, err := CacheBase(bad, true); !errors.Is(err, fault.ErrCorrupt) {
			t.Errorf("%s: base %q, %v", what, base, err)
		}
		err := Collection(bad, func(Entry) error { t.Errorf("%s: an entry is read", what); return nil })
		if !errors.Is(err, fault.ErrCorrupt) {
			t.Errorf("%s: read: %v", what, err)
		}
	}
	for i := range good {
		b := bytes.Clone(good)
		b[i] ^= 1 << (i % 8)
		check(fmt.Sprintf("byte %d of %d", i, len(good)), b)
		if i%50 == 0 {
			if got := collectDir(t, src, out, nil, CollectOptions{Cache: bad}); got.Same || got.Read == 0 {
				t.Errorf("byte %d: damage was believed: %+v", i, got)
			}
			must(t, os.Remove(out))
		}
	}
	for i := range good {
		check(fmt.Sprintf("cut to %d", i), good[:i])
		if i%50 == 0 {
			if got := collectDir(t, src, out, nil, CollectOptions{Cache: bad, Trust: true}); got.Same || got.Read == 0 {
				t.Errorf("cut to %d: damage was believed: %+v", i, got)
			}
			must(t, os.Remove(out))
		}
	}
	check("more behind it", append(bytes.Clone(good), 0))
	check("another format", bytes.Replace(good, []byte("memory2"), []byte("memory1"), 1))
	if _, err := CacheBase(base+"/none", true); !errors.Is(err, fault.ErrNotFound) {
		t.Error(err)
	}
	if err := Collection(base+"/none", nil); !errors.Is(err, fault.ErrNotFound) {
		t.Error(err)
	}
	own := errors.New("own")
	if err := Collection(base+"/good", func(Entry) error { return own }); err != own {
		t.Error(err)
	}
	if names, _ := filepath.Glob(base + "/*"); len(names) != 3 { // src, good, bad
		t.Errorf("left behind: %q", names)
	}
}

// FuzzMemory reads anything as records, with sums that are right: it is refused
// as damaged or read as a tree, and Collect sees what is there whatever it was told.
func FuzzCache(f *testing.F) {
	base := f.TempDir()
	src := base + "/src"
	smallTree(f, src)
	want := walkTree(f, src)
	seed := func(edit func(records []byte) []byte) {
		must(f, os.RemoveAll(base+"/seed"))
		collectDir(f, src, base+"/seed", nil, CollectOptions{})
		m, err := openCache(base + "/seed")
		must(f, err)
		defer m.close()
		b, err := os.ReadFile(base + "/seed")
		must(f, err)
		b = b[cacheHeader:m.end]
		for off := 0; off < len(b); off += int(binary.LittleEndian.Uint32(b[off:])) {
			b[off+8] ^= 0xff // the inode number: nothing is cached
		}
		f.Add(edit(b), m.count)
	}
	seed(func(b []byte) []byte { return b })
	seed(func(b []byte) []byte { return b[:len(b)-1] })
	seed(func(b []byte) []byte { return append(b, b...) })
	seed(func(b []byte) []byte { return bytes.ReplaceAll(b, []byte("link\x00"), []byte("l/nk\x00")) })
	seed(func(b []byte) []byte { return bytes.Replace(b, []byte("a\x00"), []byte("~\x00"), 1) })
	seed(func(b []byte) []byte { copy(b, "\xff\xff\xff\x05"); return b })
	f.Fuzz(func(t *testing.T, records []byte, count uint64) {
		mem, out := base+"/mem", base+"/out"
		must(t, os.WriteFile(mem, sealed(src, records, count), 0o600))
		var order orderCheck
		err := Collection(mem, func(e Entry) error {
			must(t, e.check())
			return order.next(&e)
		})
		if err != nil && !errors.Is(err, fault.ErrCorrupt) {
			t.Fatalf("not refused as corrupt: %v", err)
		}
		defer os.Remove(out)
		_, err = Collect(context.Background(), src, out, nil, CollectOptions{Cache: mem, Trust: true})
		must(t, err)
		if got := collectedTree(t, out, nil); got != want {
			t.Fatalf("told wrong, it sees\n%s", differingLines(want, got))
		}
	})
}

// TestMemorySize: what a record says of its size is not believed before it is there.
func TestCacheSize(t *testing.T) {
	base := t.TempDir()
	b := appendRecord(nil, flagHole, 0, &inodeKey{}, ".", nil)
	binary.LittleEndian.PutUint32(b, 90<<20)
	must(t, os.WriteFile(base+"/m", sealed(base, b, 1), 0o600))
	allocated := testing.Benchmark(func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			if err := Collection(base+"/m", nil); !errors.Is(err, fault.ErrCorrupt) {
				b.Fatal(err)
			}
		}
	}).AllocedBytesPerOp()
	if allocated > 4<<20 {
		t.Errorf("%d bytes for a record that is not there", allocated)
	}
}

// TestMemoryOfAnotherEra changes a file and keeps its times, as a power cut may: only
// within the boot, or the life of the disk, do times vouch for it.
func TestCacheOfAnotherEra(t *testing.T) {
	base := t.TempDir()
	src := base + "/src"
	smallTree(t, src)
	settle(t)
	collectDir(t, src, base+"/first", nil, CollectOptions{})
	read := func(out string) int64 {
		t.Helper()
		got, err := Collect(t.Context(), src, base+"/"+out, nil, CollectOptions{Cache: base + "/first", Trust: true})
		must(t, err)
		return got.Read
	}
	if n := read("second"); n != 0 {
		t.Errorf("%d files are read again in one boot", n)
	}
	defer func(was func() string) { bootID = was }(bootID)
	bootID = func() string { return "another" }
	if n := read("third"); n != 1 {
		t.Errorf("%d files are read again after another boot, want 1", n)
	}
	if u, err := PlanUpdateCached(t.Context(), src, base+"/first", nil); err == nil {
		t.Errorf("an update is planned by it: %v", u.Close())
	}
}
