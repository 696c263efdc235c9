package layer

import (
	"archive/tar"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/cptar/tree"
	"github.com/agentbox/agentbox/internal/fault"
)

// Verify proves that the layer in dir is what the stream of that diffID made: it
// makes the stream again, and compares each entry's metadata with what is on
// disk. A difference is ErrCorrupt and says where.
func Verify(ctx context.Context, dir *os.File, diffID string) error {
	r := Pack(ctx, dir)
	defer r.Close()
	sum := sha256.New()
	in := io.TeeReader(r, sum)
	v := verifier{want: map[string]*wanted{"": {}}}
	tr := tar.NewReader(in)
	for {
		hdr, err := tr.Next()
		if err == io.EOF {
			break
		}
		if err == nil {
			err = v.entry(hdr)
		}
		if err != nil {
			return err
		}
	}
	if _, err := io.Copy(io.Discard, in); err != nil {
		return err
	}
	if got := "sha256:" + hex.EncodeToString(sum.Sum(nil)); got != diffID {
		return fmt.Errorf("%w: the layer's digest is %s", fault.ErrCorrupt, got)
	}
	return v.walk(ctx, filepath.Join(dir.Name(), diffName))
}

// wanted is what should be on disk; names of one file share one.
type wanted struct {
	hdr      *tar.Header // nil: a directory without an entry, or a whiteout
	whiteout bool
	opaque   bool
	ino      uint64 // of the first name seen
}

func (w *wanted) dir() bool {
	return !w.whiteout && (w.hdr == nil || w.hdr.Typeflag == tar.TypeDir)
}

type verifier struct {
	want map[string]*wanted
}

func clean(name string) []string {
	list := strings.Split(name, "/")
	out := list[:0]
	for _, c := range list {
		if c != "" && c != "." {
			out = append(out, c)
		}
	}
	return out
}

// entry does to want what Unpack does to the tree.
func (v *verifier) entry(hdr *tar.Header) error {
	if hdr.Typeflag == tar.TypeXGlobalHeader || hdr.Typeflag == 'V' {
		return nil
	}
	parts := clean(hdr.Name)
	path := strings.Join(parts, "/")
	if len(parts) == 0 {
		v.want[""].hdr = hdr
		return nil
	}
	kind, at := tree.Mark(parts)
	if kind == tree.Ignored {
		return nil
	}
	parent := parts[:len(parts)-1]
	for i := range parent {
		p := strings.Join(parent[:i+1], "/")
		if have := v.want[p]; have == nil || have.whiteout {
			v.want[p] = &wanted{opaque: have != nil}
		}
	}
	old := v.want[path]
	switch {
	case kind == tree.Opaque:
		v.want[at].opaque = true
	case kind == tree.Whiteout:
		if have := v.want[at]; have == nil {
			v.want[at] = &wanted{whiteout: true}
		} else if have.dir() {
			have.opaque = true
		}
	case hdr.Typeflag == tar.TypeLink:
		target := strings.Join(clean(hdr.Linkname), "/")
		if v.want[target] == nil {
			return fmt.Errorf("%w: a link to %q", fault.ErrCorrupt, hdr.Linkname)
		}
		v.want[path] = v.want[target]
	case hdr.Typeflag == tar.TypeDir && old != nil && old.dir():
		old.hdr = hdr
	default:
		v.want[path] = &wanted{hdr: hdr, opaque: hdr.Typeflag == tar.TypeDir && old != nil && old.whiteout}
	}
	return nil
}

func (v *verifier) walk(ctx context.Context, top string) error {
	seen := 0
	var late error // what follows from other differences
	inodes := map[uint64]*wanted{}
	err := filepath.WalkDir(top, func(p string, _ fs.DirEntry, err error) error {
		if err == nil {
			err = ctx.Err()
		}
		if err != nil {
			return err
		}
		rel := strings.TrimPrefix(strings.TrimPrefix(p, top), "/")
		w := v.want[rel]
		if w == nil {
			return fmt.Errorf("%w: %q is not of the layer", fault.ErrCorrupt, rel)
		}
		seen++
		var st unix.Stat_t
		if err := unix.Lstat(p, &st); err != nil {
			return err
		}
		if !w.dir() {
			if other := inodes[st.Ino]; w.ino != 0 && w.ino != st.Ino || other != nil && other != w {
				return fmt.Errorf("%w: %q has other hard links", fault.ErrCorrupt, rel)
			}
			w.ino, inodes[st.Ino] = st.Ino, w
		}
		what, err := w.differs(p, &st)
		if err != nil {
			return fmt.Errorf("look at %q: %w", rel, err)
		}
		if what != "" {
			err = fmt.Errorf("%w: %s of %q has changed", fault.ErrCorrupt, what, rel)
		}
		if what == "the time" && w.dir() {
			late, err = cmp.Or(late, err), nil
		}
		return err
	})
	if err == nil && seen != len(v.want) {
		err = fmt.Errorf("%w: %d entries of the layer are gone", fault.ErrCorrupt, len(v.want)-seen)
	}
	return cmp.Or(err, late)
}

var kinds = map[byte]uint32{
	tar.TypeDir: unix.S_IFDIR, tar.TypeSymlink: unix.S_IFLNK, tar.TypeFifo: unix.S_IFIFO, tar.TypeChar: unix.S_IFCHR,
	tar.TypeBlock: unix.S_IFBLK,
}

// differs says what of the object at path is not as wanted.
func (w *wanted) differs(path string, st *unix.Stat_t) (string, error) {
	kind := st.Mode & unix.S_IFMT
	if w.whiteout {
		if kind != unix.S_IFCHR || st.Rdev != 0 {
			return "the type", nil
		}
		return "", nil
	}
	xattrs := map[string]string{}
	mode, uid, gid, mtime := uint32(0o755), 0, 0, unix.Timespec{}
	want := uint32(unix.S_IFDIR)
	if h := w.hdr; h != nil {
		var err error
		if xattrs, err = tree.Xattrs(h); err != nil {
			return "", err
		}
		mode, uid, gid, mtime = uint32(h.Mode)&0o7777, h.Uid, h.Gid,
			unix.Timespec{Sec: h.ModTime.Unix(), Nsec: int64(h.ModTime.Nanosecond())}
		var ok bool
		if want, ok = kinds[h.Typeflag]; !ok {
			want = unix.S_IFREG
		}
	}
	if w.opaque {
		xattrs[tree.OpaqueXattr] = "y"
	}
	have, err := tree.PathXattrs(path)
	switch {
	case err != nil:
		return "", err
	case kind != want:
		return "the type", nil
	case kind == unix.S_IFREG && st.Size != w.hdr.Size:
		return "the size", nil
	case kind != unix.S_IFLNK && st.Mode&0o7777 != mode:
		return "the mode", nil
	case st.Uid != uint32(uid) || st.Gid != uint32(gid):
		return "the owner", nil
	case st.Mtim != mtime:
		return "the time", nil
	case (kind == unix.S_IFCHR || kind == unix.S_IFBLK) &&
		st.Rdev != unix.Mkdev(uint32(w.hdr.Devmajor), uint32(w.hdr.Devminor)):
		return "the device number", nil
	case len(have) != len(xattrs):
		return "an attribute", nil
	}
	for name, value := range xattrs {
		if got, ok := have[name]; !ok || got != value {
			return "the attribute " + name, nil
		}
	}
	if kind == unix.S_IFLNK {
		if target, err := os.Readlink(path); err != nil || target != w.hdr.Linkname {
			return "the target", err
		}
	}
	return "", nil
}
