package overlay

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"os"
	"reflect"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/fault"
)

// fixSums repairs the checksums of all blocks that look like headers, so that
// the fuzzer gets past them.
func fixSums(b []byte) []byte {
	b = bytes.Clone(b)
	for off := 0; off+block <= len(b); off += block {
		if string(b[off+257:off+262]) == "ustar" {
			resum(b, off)
		}
	}
	return b
}

// FuzzApply feeds anything to Apply: it must fail cleanly or leave a tree that
// is what it reports, and must touch nothing but its target.
func FuzzApply(f *testing.F) {
	for _, archive := range hostile(f) {
		if len(archive) < 1<<16 {
			f.Add(archive)
		}
	}
	f.Add(craft(f, rootDir(), aDir("d"), aFile("d/f", "content"), aHardlink("d/g", "d/f"), aLink("l", "d/f")))
	dir := f.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", unix.MS_NODEV|unix.MS_NOSUID, "size=64m,nr_inodes=20k"); err != nil {
		f.Fatal(err)
	}
	f.Cleanup(func() { must(f, Unmount(dir, UnmountOptions{})) })
	must(f, os.WriteFile(dir+"/escape", []byte("precious"), 0o600))
	must(f, os.Mkdir(dir+"/neighbour", 0o750))
	target := dir + "/target"
	want := outside(f, dir)
	f.Fuzz(func(t *testing.T, archive []byte) {
		must(t, os.Mkdir(target, 0o700))
		defer os.RemoveAll(target)
		var tree bytes.Buffer
		tw := NewTreeWriter(&tree)
		_, err := Apply(context.Background(), bytes.NewReader(fixSums(archive)), target, ApplyOptions{
			Entry: tw.Write, MaxEntries: 1000, MaxData: 1 << 20,
		})
		samePeek(t, "outside", want, outside(t, dir))
		if err != nil {
			var errno unix.Errno
			if !errors.Is(err, fault.ErrCorrupt) && !errors.Is(err, fault.ErrUnsupported) && !errors.As(err, &errno) {
				t.Fatalf("an error of no kind: %v", err)
			}
			return
		}
		must(t, tw.Close())
		diffs, err := Verify(context.Background(), target, &tree, CompareOptions{})
		if err != nil {
			t.Fatal(err)
		}
		for _, d := range diffs {
			// The kernel may know better about these: times that the
			// filesystem cannot hold, ACLs and attributes of its own.
			if !strings.Contains(d.What, "modified") && !strings.Contains(d.What, "attribute") {
				t.Fatalf("not what was reported: %v", d)
			}
		}
	})
}

// FuzzReadTree feeds anything to ReadTree: what it takes, it must write again
// in the same bytes.
func FuzzReadTree(f *testing.F) {
	for _, s := range treeSeeds {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, in []byte) {
		var out bytes.Buffer
		tw := NewTreeWriter(&out)
		err := ReadTree(bytes.NewReader(in), func(e Entry) error {
			var again Entry // by encoding/json, the other reader
			must(t, json.Unmarshal(e.AppendJSON(nil), &again))
			if !reflect.DeepEqual(e, again) {
				t.Fatalf("%+v is %+v to encoding/json", e, again)
			}
			return tw.Write(e)
		})
		if err != nil {
			if !errors.Is(err, fault.ErrCorrupt) {
				t.Fatalf("not refused as corrupt: %v", err)
			}
			return
		}
		must(t, tw.Close())
		if !bytes.Equal(in, out.Bytes()) {
			t.Fatalf("%q was read, and written as %q", in, out.Bytes())
		}
	})
}
