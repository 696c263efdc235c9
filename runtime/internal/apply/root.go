package apply

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"io/fs"
	"maps"
	"os"
	"path"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/overlay"
)

// Root is a directory below which files are reached by relative paths, one component after
// the other: no symlink is followed and no mount crossed, whatever another process puts
// there meanwhile.
type Root struct {
	*os.File
	mount    uint64
	dev, ino uint64
}

const dirFlags = unix.O_RDONLY | unix.O_DIRECTORY | unix.O_NOFOLLOW | unix.O_CLOEXEC

// OpenRoot opens a directory that is named by a path without symlinks.
func OpenRoot(dir string) (*Root, error) {
	slash, err := os.Open("/")
	if err != nil {
		return nil, err
	}
	at, err := walk(slash, strings.Trim(dir, "/"))
	if errors.Is(err, unix.ENOENT) {
		return nil, fmt.Errorf("directory %s: %w", dir, fault.ErrNotFound)
	}
	if errors.Is(err, unix.ENOTDIR) || errors.Is(err, unix.ELOOP) {
		return nil, &fault.Error{Err: fmt.Errorf("open %s: %w: a symlink or a file has taken its place: %w", dir,
			fault.ErrDenied, err), Hint: "Put the directory back where it was."}
	}
	if err != nil {
		return nil, fmt.Errorf("open %s: %w", dir, err)
	}
	return newRoot(at)
}

func newRoot(f *os.File) (*Root, error) {
	st, err := statAt(int(f.Fd()), "")
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return &Root{f, st.Mnt_id, unix.Mkdev(st.Dev_major, st.Dev_minor), st.Ino}, nil
}

// walk opens a directory below at, which it closes.
func walk(at *os.File, rel string) (*os.File, error) {
	for c := range strings.SplitSeq(rel, "/") {
		if c == "" || c == "." {
			continue
		}
		if c == ".." {
			return nil, errors.Join(unix.EINVAL, at.Close())
		}
		fd, err := unix.Openat(int(at.Fd()), c, dirFlags, 0)
		_ = at.Close() // only ever a handle
		if err != nil {
			return nil, err
		}
		at = os.NewFile(uintptr(fd), c)
	}
	return at, nil
}

// dir opens the directory at rel.
func (r *Root) dir(rel string) (*os.File, error) {
	fd, err := unix.Openat(int(r.Fd()), ".", dirFlags, 0)
	if err != nil {
		return nil, err
	}
	at, err := walk(os.NewFile(uintptr(fd), "."), rel)
	if err != nil {
		return nil, &fs.PathError{Op: "open", Path: rel, Err: err}
	}
	st, err := statAt(int(at.Fd()), "")
	if err == nil && st.Mnt_id != r.mount {
		err = mountPoint(rel)
	}
	if err != nil {
		return nil, errors.Join(err, at.Close())
	}
	return at, nil
}

func mountPoint(rel string) error {
	return fmt.Errorf("%w: %s is a mount point: what is mounted there is not part of what is applied",
		fault.ErrUnsupported, rel)
}

// parent opens the directory that rel lies in.
func (r *Root) parent(rel string) (*os.File, string, error) {
	d, err := r.dir(path.Dir(rel))
	return d, path.Base(rel), err
}

// sub opens the directory at rel as a root of its own.
func (r *Root) sub(rel string) (*Root, error) {
	d, err := r.dir(rel)
	if err != nil {
		return nil, err
	}
	return newRoot(d)
}

// Proc is a path to the directory, for calls that take no descriptor.
func (r *Root) Proc() string { return procFD(r.File) }

// at is a path to what lies below the root, for calls that take no descriptor.
func (r *Root) at(rel string) string { return r.Proc() + "/" + rel }

func procFD(f *os.File) string { return "/proc/self/fd/" + strconv.Itoa(int(f.Fd())) }

const statMask = unix.STATX_BASIC_STATS | unix.STATX_BTIME | unix.STATX_MNT_ID

func statAt(dir int, name string) (st unix.Statx_t, err error) {
	flags := unix.AT_SYMLINK_NOFOLLOW | unix.AT_NO_AUTOMOUNT
	if name == "" {
		flags |= unix.AT_EMPTY_PATH
	}
	err = unix.Statx(dir, name, flags, statMask, &st)
	return st, err
}

// stat looks at rel; nil: there is nothing.
func (r *Root) stat(rel string) (*unix.Statx_t, error) {
	d, name, err := r.parent(rel)
	if gone(err) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	defer d.Close()
	st, err := statAt(int(d.Fd()), name)
	if gone(err) {
		return nil, nil
	}
	if err != nil {
		return nil, &fs.PathError{Op: "stat", Path: rel, Err: err}
	}
	if st.Mnt_id != r.mount {
		return nil, mountPoint(rel)
	}
	return &st, nil
}

// gone reports whether an error means that a path leads to nothing.
func gone(err error) bool {
	return errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENOTDIR) || errors.Is(err, unix.ELOOP)
}

// move renames a to b, each below its own root.
func move(from *Root, a string, to *Root, b string, flags uint) error {
	da, na, err := from.parent(a)
	if err != nil {
		return err
	}
	defer da.Close()
	db, nb, err := to.parent(b)
	if err != nil {
		return err
	}
	defer db.Close()
	if err := unix.Renameat2(int(da.Fd()), na, int(db.Fd()), nb, flags); err != nil {
		return &os.LinkError{Op: "rename", Old: a, New: b, Err: err}
	}
	return nil
}

// isDir reports whether statx saw a directory.
func isDir(st *unix.Statx_t) bool { return st != nil && st.Mode&unix.S_IFMT == unix.S_IFDIR }

// attrs are the attributes of a directory.
type attrs struct {
	Mode   uint32            `json:"mode"`
	UID    uint32            `json:"uid"`
	GID    uint32            `json:"gid"`
	Sec    int64             `json:"sec"` // modification time
	Nsec   int64             `json:"nsec"`
	Xattrs map[string][]byte `json:"xattrs,omitempty"`
}

// The kernel hides its own attributes from the users of an overlay, and shows an attribute
// of such a name only if it is stored escaped.
const (
	overlayXattr = "trusted.overlay."
	escapedXattr = "trusted.overlay.overlay."
)

// visible returns an upperdir's attributes as a user of the mount sees them.
func visible(set map[string]string) map[string][]byte {
	out := map[string][]byte{}
	for name, value := range set {
		if rest, ok := strings.CutPrefix(name, escapedXattr); ok {
			out[overlayXattr+rest] = []byte(value)
		} else if !strings.HasPrefix(name, overlayXattr) {
			out[name] = []byte(value)
		}
	}
	return out
}

// escaped stores attributes in an upperdir so that a user of the mount sees them.
func escaped(set map[string]string) map[string]string {
	out := map[string]string{}
	for name, value := range set {
		if rest, ok := strings.CutPrefix(name, overlayXattr); ok {
			name = escapedXattr + rest
		}
		out[name] = value
	}
	return out
}

// attrsOf reads those of an open directory, as a user of a mount over it sees them.
func attrsOf(d *Root) (a attrs, err error) {
	st, err := statAt(int(d.Fd()), "")
	if err != nil {
		return a, err
	}
	a = attrs{Mode: uint32(st.Mode) & 0o7777, UID: st.Uid, GID: st.Gid, Sec: st.Mtime.Sec, Nsec: int64(st.Mtime.Nsec)}
	raw, err := xattrs(procFD(d.File), unix.Listxattr, unix.Getxattr)
	a.Xattrs = visible(raw)
	return a, err
}

// MakeUpper makes an empty upperdir whose root is as that of the directory below: an overlay shows
// the upper one's.
func MakeUpper(upper, below string) error {
	if err := os.Mkdir(upper, 0o700); err != nil {
		return err
	}
	return TakeAfter(upper, below)
}

// openBoth opens two directories, until close.
func openBoth(a, b string) (one, two *Root, close func(), err error) {
	if one, err = OpenRoot(a); err != nil {
		return nil, nil, nil, err
	}
	if two, err = OpenRoot(b); err != nil {
		_ = one.Close() // only ever a handle
		return nil, nil, nil, err
	}
	return one, two, func() { _, _ = one.Close(), two.Close() }, nil
}

// TakeAfter makes the root of an empty upperdir as that of the directory below, which it then hides
// nothing of.
func TakeAfter(upper, below string) error {
	from, to, close, err := openBoth(below, upper)
	if err != nil {
		return err
	}
	defer close()
	raw, err := xattrs(to.Proc(), unix.Listxattr, unix.Getxattr)
	if err != nil {
		return err
	}
	for name := range raw {
		if !strings.HasPrefix(name, overlayXattr) {
			continue
		}
		if err := unix.Fremovexattr(int(to.Fd()), name); err != nil {
			return fmt.Errorf("remove attribute %q: %w", name, err)
		}
	}
	want, err := attrsOf(from)
	if err != nil {
		return err
	}
	return want.put(to)
}

// attrsOfEntry are those of a directory of an upperdir.
func attrsOfEntry(e overlay.Entry) attrs {
	return attrs{Mode: e.Mode, UID: e.UID, GID: e.GID, Sec: e.Mtime.Sec, Nsec: e.Mtime.Nsec, Xattrs: visible(e.Xattrs)}
}

// equal compares all but the time, which changes with what is in a directory.
func (a attrs) equal(b attrs) bool {
	return a.Mode == b.Mode && a.UID == b.UID && a.GID == b.GID &&
		maps.EqualFunc(a.Xattrs, b.Xattrs, func(x, y []byte) bool { return string(x) == string(y) })
}

// put gives them to an open directory. A change of owner drops bits of the
// mode, an ACL and the mode are one, and the time comes last.
func (a attrs) put(d *Root) error {
	have, err := attrsOf(d)
	if err != nil {
		return err
	}
	if !have.equal(a) {
		if err := d.Chown(int(a.UID), int(a.GID)); err != nil {
			return err
		}
		for name := range have.Xattrs {
			if _, ok := a.Xattrs[name]; !ok {
				if err := unix.Fremovexattr(int(d.Fd()), name); err != nil {
					return fmt.Errorf("remove attribute %q: %w", name, err)
				}
			}
		}
		for name, value := range a.Xattrs {
			if err := unix.Fsetxattr(int(d.Fd()), name, value, 0); err != nil {
				return fmt.Errorf("set attribute %q: %w", name, err)
			}
		}
		if err := unix.Fchmod(int(d.Fd()), a.Mode); err != nil {
			return err
		}
	}
	return setTime(int(d.Fd()), ".", a.Sec, a.Nsec)
}

func setTime(dir int, name string, sec, nsec int64) error {
	ts := []unix.Timespec{{Nsec: unix.UTIME_OMIT}, {Sec: sec, Nsec: nsec}}
	return unix.UtimesNanoAt(dir, name, ts, unix.AT_SYMLINK_NOFOLLOW)
}

// xattrs reads all attributes of a path, by the calls that follow it or do not.
func xattrs(
	p string, list func(string, []byte) (int, error), get func(string, string, []byte) (int, error),
) (map[string]string, error) {
	names := make([]byte, 64<<10)
	n, err := list(p, names)
	if err == unix.EOPNOTSUPP {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("list attributes: %w", err)
	}
	out := map[string]string{}
	for name := range strings.SplitSeq(strings.TrimSuffix(string(names[:n]), "\x00"), "\x00") {
		if name == "" {
			continue
		}
		value := make([]byte, 64<<10)
		n, err := get(p, name, value)
		if err != nil {
			return nil, fmt.Errorf("read attribute %q: %w", name, err)
		}
		out[name] = string(value[:n])
	}
	return out, nil
}

// fingerprint sums up a file, or a directory with everything below it, so that a change by
// another process shows. It leaves out what a rename changes. It returns "" if rel does
// not exist.
func (r *Root) fingerprint(rel string) (string, error) {
	d, name, err := r.parent(rel)
	if gone(err) {
		return "", nil
	}
	if err != nil {
		return "", err
	}
	defer d.Close()
	p := printer{mount: r.mount}
	return p.sum(func() error { return p.add(d, name, rel, true) })
}

type printer struct {
	hash  hash.Hash
	mount uint64
	ctx   context.Context // of the fingerprint of a whole directory; nil: it is another one
}

// sum returns the fingerprint of what add adds; "": it is gone.
func (p *printer) sum(add func() error) (string, error) {
	p.hash = sha256.New()
	if err := add(); gone(err) {
		return "", nil
	} else if err != nil {
		return "", err
	}
	return hex.EncodeToString(p.hash.Sum(nil)), nil
}

func (p *printer) add(d *os.File, name, rel string, top bool) error {
	st, err := statAt(int(d.Fd()), name)
	if err != nil {
		return &fs.PathError{Op: "stat", Path: rel, Err: err}
	}
	if p.ctx != nil {
		if err := p.ctx.Err(); err != nil {
			return err
		}
		if st.Mnt_id != p.mount {
			return binary.Write(p.hash, binary.LittleEndian, st.Mnt_id)
		}
		if top { // a scratch directory changes its time
			st.Mtime = unix.StatxTimestamp{}
		}
	}
	if st.Mnt_id != p.mount {
		return mountPoint(rel)
	}
	dir := isDir(&st)
	rec := []any{uint16(st.Mode), st.Uid, st.Gid, st.Ino, st.Rdev_major, st.Rdev_minor, st.Mtime.Sec, st.Mtime.Nsec}
	if !dir {
		rec = append(rec, st.Size)
	}
	if !top && (dir || st.Nlink == 1) { // the rename of another name is a change, too
		rec = append(rec, st.Ctime.Sec, st.Ctime.Nsec)
	}
	for _, v := range rec {
		_ = binary.Write(p.hash, binary.LittleEndian, v) // a hash takes all
	}
	if !dir {
		return nil
	}
	fd, err := unix.Openat(int(d.Fd()), name, dirFlags|unix.O_NOATIME, 0)
	if err != nil {
		return &fs.PathError{Op: "open", Path: rel, Err: err}
	}
	sub := os.NewFile(uintptr(fd), name)
	defer sub.Close()
	names, err := sub.Readdirnames(-1)
	if err != nil {
		return err
	}
	if p.ctx != nil && top {
		names = slices.DeleteFunc(names, scratchPattern().MatchString)
	}
	slices.Sort(names)
	for _, n := range names {
		_ = binary.Write(p.hash, binary.LittleEndian, uint32(len(n)))
		_, _ = p.hash.Write([]byte(n))
		if err := p.add(sub, n, path.Join(rel, n), false); err != nil {
			return err
		}
	}
	_ = binary.Write(p.hash, binary.LittleEndian, uint32(len(names)))
	return nil
}
