package overlay

import (
	"context"
	"errors"
	"maps"
	"slices"

	"github.com/zeebo/blake3"
	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/fault"
)

// The bounds of the search for renames; what lies beyond stays a deletion and
// an addition.
const (
	renameBytes = 1 << 30 // to read
	renameGroup = 64      // files of one size
)

// FindRenames turns pairs of a deleted and an added file into renames: both
// have the same content, and no other deleted or added file has it. Empty files
// and files with holes are no evidence. The changes are those of one Diff, soon
// after it; what is left of them keeps its order.
func FindRenames(ctx context.Context, changes []Change) ([]Change, error) {
	type group struct{ gone, come []int }
	sizes := map[int64]*group{}
	for i, c := range changes {
		e, gone := c.New, false
		switch c.Kind {
		case Deleted:
			e, gone = c.Old, true
		case Added:
		default:
			continue
		}
		if e.Type != TypeFile || e.Size == 0 || e.Sparse() {
			continue
		}
		g := sizes[e.Size]
		if g == nil {
			g = &group{}
			sizes[e.Size] = g
		}
		if gone {
			g.gone = append(g.gone, i)
		} else {
			g.come = append(g.come, i)
		}
	}
	budget := int64(renameBytes)
	origin := map[int]int{} // of an added one, the deleted one
	for _, size := range slices.Sorted(maps.Keys(sizes)) {
		g := sizes[size]
		if len(g.gone) == 0 || len(g.come) == 0 || len(g.gone)+len(g.come) > renameGroup {
			continue
		}
		digests := map[string]*group{}
		for _, i := range slices.Concat(g.gone, g.come) {
			c := &changes[i]
			e, at := c.New, c.newAt
			if c.Kind == Deleted {
				e, at = c.Old, c.oldAt
			}
			if e.Digest == "" {
				if at == "" || budget < size {
					continue
				}
				budget -= size
				var err error
				if e.Digest, err = digestBeneath(ctx, at, e); err != nil {
					return nil, err
				}
			}
			if e.Digest == "" {
				continue
			}
			same := digests[e.Digest]
			if same == nil {
				same = &group{}
				digests[e.Digest] = same
			}
			if c.Kind == Deleted {
				same.gone = append(same.gone, i)
			} else {
				same.come = append(same.come, i)
			}
		}
		for _, same := range digests {
			if len(same.gone) == 1 && len(same.come) == 1 {
				origin[same.come[0]] = same.gone[0]
			}
		}
	}
	if len(origin) == 0 {
		return changes, nil
	}
	moved := map[int]bool{}
	for _, i := range origin {
		moved[i] = true
	}
	var out []Change
	for i, c := range changes {
		if moved[i] {
			continue
		}
		if from, ok := origin[i]; ok {
			old := changes[from]
			c.Kind, c.From, c.Old, c.oldAt = Renamed, old.Path, old.Old, old.oldAt
			c.What = metadata(c.Old, c.New, maps.Equal(c.Old.Xattrs, c.New.Xattrs))
		}
		out = append(out, c)
	}
	return out, nil
}

// digestBeneath reads a file without holes. Empty: it is not that file any more.
func digestBeneath(ctx context.Context, dir string, e *Entry) (string, error) {
	root, err := unix.Open(dir, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return "", pathError("open", dir, err)
	}
	defer unix.Close(root)
	parent, name := splitPath(e.Path)
	from := root
	if parent != "." {
		if from, err = openBeneath(root, parent); vanished(err) {
			return "", nil
		}
		if err != nil {
			return "", pathError("open", parent, err)
		}
		defer unix.Close(from)
	}
	n := &node{Entry: *e, at: dir, dir: from, name: name, fd: -1}
	fd, err := openFile(n)
	if err == nil {
		defer unix.Close(fd)
		if n.Sparse() {
			return "", nil
		}
		h := blake3.New()
		if err = inBuffers(n.Size, fileReader(ctx, fd, &n.Entry), func(p []byte) error {
			_, _ = h.Write(p)
			return nil
		}); err == nil {
			return hasherDigest(h), nil
		}
	}
	if errors.Is(err, fault.ErrBusy) || vanished(err) {
		err = nil
	}
	return "", err
}
