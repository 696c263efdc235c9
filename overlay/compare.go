package overlay

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"iter"
	"maps"
	"slices"
	"time"

	"github.com/zeebo/blake3"
	"golang.org/x/sys/unix"
)

// Difference is one respect in which a tree is not as wanted.
type Difference struct {
	Path string `json:"path"`
	What string `json:"what"` // e.g. "mode 0644, want 0600"
}

func (d Difference) String() string { return fmt.Sprintf("%q: %s", d.Path, d.What) }

// CompareOptions modify Compare and Verify.
type CompareOptions struct {
	// Limit ends the comparison after so many differences; default 100.
	Limit int
	// Block is the unit in bytes in which holes are compared; default 4096,
	// and for Verify the filesystem's. Two files have equal holes when their
	// extents are equal once each is widened to whole blocks: a filesystem
	// cannot keep finer holes than that.
	Block int64

	// sameContent decides where two files have equal holes, but not equal
	// extents, so that their digests are over different bytes.
	sameContent func(want, got *Entry) (bool, error)
}

// Verify compares dir in every respect with the tree that a TreeWriter wrote,
// reading all of it. No difference and no error is proof of equality.
func Verify(ctx context.Context, dir string, tree io.Reader, opts CompareOptions) ([]Difference, error) {
	return VerifyEntries(ctx, dir, TreeEntries(tree), opts)
}

// VerifyEntries is Verify for a sequence of entries.
func VerifyEntries(
	ctx context.Context, dir string, want iter.Seq2[Entry, error], opts CompareOptions,
) ([]Difference, error) {
	if opts.Block == 0 {
		var fs unix.Statfs_t
		if err := unix.Statfs(dir, &fs); err != nil {
			return nil, fmt.Errorf("verify: %w", pathError("statfs", dir, err))
		}
		opts.Block = max(int64(fs.Bsize), 4096)
	}
	opts.sameContent = func(want, got *Entry) (bool, error) { return holdsContent(ctx, dir, want, got) }
	return Compare(want, DirEntries(ctx, dir, WalkOptions{Digest: true}), opts)
}

// Compare merges two sequences in the order of ComparePaths and tells where got
// is not as wanted. Equal holes with other extents and files of which one has a
// digest and the other has none count as different: they cannot be proven equal.
func Compare(want, got iter.Seq2[Entry, error], opts CompareOptions) ([]Difference, error) {
	if opts.Limit <= 0 {
		opts.Limit = 100
	}
	if opts.Block <= 0 {
		opts.Block = 4096
	}
	nextWant, stopWant := iter.Pull2(want)
	defer stopWant()
	nextGot, stopGot := iter.Pull2(got)
	defer stopGot()
	var diffs []Difference
	w, werr, wok := nextWant()
	g, gerr, gok := nextGot()
	for wok || gok {
		if werr != nil {
			return diffs, werr
		}
		if gerr != nil {
			return diffs, gerr
		}
		order := 0
		switch {
		case !gok:
			order = -1
		case !wok:
			order = 1
		default:
			order = ComparePaths(w.Path, g.Path)
		}
		switch {
		case order < 0:
			diffs = append(diffs, Difference{w.Path, "missing, want a " + string(w.Type)})
		case order > 0:
			diffs = append(diffs, Difference{g.Path, "a " + string(g.Type) + " that should not be there"})
		default:
			what, err := differ(&w, &g, &opts)
			if err != nil {
				return diffs, err
			}
			for _, s := range what {
				diffs = append(diffs, Difference{w.Path, s})
			}
		}
		if len(diffs) >= opts.Limit {
			return diffs[:opts.Limit], nil
		}
		if order <= 0 {
			w, werr, wok = nextWant()
		}
		if order >= 0 {
			g, gerr, gok = nextGot()
		}
	}
	return diffs, nil
}

// differ tells everything in which two entries of one path differ.
func differ(want, got *Entry, opts *CompareOptions) (what []string, err error) {
	add := func(format string, a ...any) { what = append(what, fmt.Sprintf(format, a...)) }
	if want.Hardlink != got.Hardlink {
		name := func(e *Entry) string {
			if e.Hardlink == "" {
				return "a " + string(e.Type) + " of its own"
			}
			return fmt.Sprintf("a hard link to %q", clip(e.Hardlink))
		}
		add("%s, want %s", name(got), name(want))
		return what, nil
	}
	if want.Type != got.Type {
		add("a %s, want a %s", got.Type, want.Type)
		return what, nil
	}
	if want.Mode != got.Mode {
		add("mode %04o, want %04o", got.Mode, want.Mode)
	}
	if want.UID != got.UID || want.GID != got.GID {
		add("owner %d:%d, want %d:%d", got.UID, got.GID, want.UID, want.GID)
	}
	if want.Mtime != got.Mtime {
		add("modified %s, want %s", got.Mtime, want.Mtime)
	}
	for _, name := range slices.Sorted(maps.Keys(want.Xattrs)) {
		v, ok := got.Xattrs[name]
		if !ok {
			add("attribute %q missing", name)
		} else if v != want.Xattrs[name] {
			add("attribute %q is %q, want %q", name, clip(v), clip(want.Xattrs[name]))
		}
	}
	for _, name := range slices.Sorted(maps.Keys(got.Xattrs)) {
		if _, ok := want.Xattrs[name]; !ok {
			add("attribute %q that should not be there", name)
		}
	}
	if want.Link != got.Link {
		add("link to %q, want %q", clip(got.Link), clip(want.Link))
	}
	if want.Major != got.Major || want.Minor != got.Minor {
		add("device %d:%d, want %d:%d", got.Major, got.Minor, want.Major, want.Minor)
	}
	if want.Type != TypeFile {
		return what, nil
	}
	if want.Size != got.Size {
		add("size %d, want %d", got.Size, want.Size)
		return what, nil
	}
	if !slices.Equal(widen(want, opts.Block), widen(got, opts.Block)) {
		add("data at %s, want %s", describe(got), describe(want))
		return what, nil
	}
	same := want.Digest == got.Digest
	if !slices.Equal(want.spans(), got.spans()) {
		same = false
		if opts.sameContent != nil && want.Digest != "" {
			if same, err = opts.sameContent(want, got); err != nil {
				return what, err
			}
		}
	}
	if !same {
		add("content %s, want %s", orNone(got.Digest), orNone(want.Digest))
	}
	return what, nil
}

func orNone(digest string) string {
	if digest == "" {
		return "without a digest"
	}
	return digest
}

// String shows a time as seconds since 1970; the date is added where it has one.
func (t Time) String() string {
	s := formatTime(t)
	if t.Sec > -1<<36 && t.Sec < 1<<36 {
		s += " (" + time.Unix(t.Sec, t.Nsec).UTC().Format(time.RFC3339Nano) + ")"
	}
	return s
}

// widen returns a file's extents grown to whole blocks.
func widen(e *Entry, unit int64) []Extent {
	var list []Extent
	for _, x := range e.spans() {
		start := x.Off - x.Off%unit
		end := x.Off + x.Len
		if over := end % unit; over != 0 {
			end = min(end+unit-over, e.Size)
		}
		if n := len(list); n > 0 && start <= list[n-1].Off+list[n-1].Len {
			list[n-1].Len = end - list[n-1].Off
		} else {
			list = append(list, Extent{start, end - start})
		}
	}
	return list
}

func describe(e *Entry) string {
	const most = 6
	list := e.spans()
	if len(list) <= most {
		return fmt.Sprint(list)
	}
	return fmt.Sprintf("%v and %d more", list[:most], len(list)-most)
}

// holdsContent reads the file at got's path the way want lays it out: want's
// extents must have its digest, and all else must be zero.
func holdsContent(ctx context.Context, dir string, want, got *Entry) (bool, error) {
	root, err := unix.Open(dir, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return false, pathError("open", dir, err)
	}
	defer unix.Close(root)
	parent, name := splitPath(got.Path)
	from := root
	if parent != "." {
		if from, err = openBeneath(root, parent); err != nil {
			return false, pathError("open", parent, err)
		}
		defer unix.Close(from)
	}
	fd, err := openAt(from, name, 0)
	if err != nil {
		return false, pathError("open", got.Path, err)
	}
	defer unix.Close(fd)
	return fdHoldsContent(ctx, fd, want, got)
}

// fdHoldsContent is holdsContent of an open file.
func fdHoldsContent(ctx context.Context, fd int, want, got *Entry) (bool, error) {
	h := blake3.New()
	err := inBuffers(want.data(), fileReader(ctx, fd, want), func(p []byte) error { _, _ = h.Write(p); return nil })
	if err != nil || hasherDigest(h) != want.Digest {
		return false, err
	}
	rest := Entry{Path: got.Path, Type: TypeFile, Size: got.Size, Extents: subtract(got.spans(), want.spans())}
	zero := true
	err = inBuffers(rest.data(), fileReader(ctx, fd, &rest), func(p []byte) error {
		zero = zero && len(bytes.Trim(p, "\x00")) == 0
		return nil
	})
	return zero, err
}

// subtract returns the parts of a that b does not cover.
func subtract(a, b []Extent) []Extent {
	rest := []Extent{}
	for _, x := range a {
		at, end := x.Off, x.Off+x.Len
		for len(b) > 0 && b[0].Off+b[0].Len <= at {
			b = b[1:]
		}
		for _, y := range b {
			if y.Off >= end {
				break
			}
			if y.Off > at {
				rest = append(rest, Extent{at, y.Off - at})
			}
			at = min(end, y.Off+y.Len)
		}
		if at < end {
			rest = append(rest, Extent{at, end - at})
		}
	}
	return rest
}
