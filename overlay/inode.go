package overlay

import (
	"bytes"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"strconv"

	"github.com/zeebo/blake3"
	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/fault"
)

// retry repeats a system call that a signal interrupted; the Go runtime sends
// itself signals, and FUSE and network filesystems return EINTR for them.
func retry(call func() error) error {
	for {
		if err := call(); err != unix.EINTR {
			return err
		}
	}
}

// pathError names the operation and the entry; the path is relative to the
// upperdir, whose own path the caller puts in front.
func pathError(op, path string, err error) error {
	return &fs.PathError{Op: op, Path: clip(path), Err: err}
}

// procFD is a way to reach what an open descriptor means by path, for the calls
// on attributes that take no directory descriptor. The kernel jumps straight to
// the descriptor's object: nothing on the way can be exchanged.
func procFD(fd int) string { return "/proc/self/fd/" + strconv.Itoa(fd) }

// openAt opens name in dir, which is one name and never followed when it is a
// symlink. Without O_NOATIME reading would change what is read.
func openAt(dir int, name string, flags int) (fd int, err error) {
	flags |= unix.O_RDONLY | unix.O_NOFOLLOW | unix.O_CLOEXEC | unix.O_NONBLOCK
	err = retry(func() error {
		fd, err = unix.Openat(dir, name, flags|unix.O_NOATIME, 0)
		if err == unix.EPERM { // an owner that this user namespace does not map
			fd, err = unix.Openat(dir, name, flags, 0)
		}
		return err
	})
	return fd, err
}

const statxMask = unix.STATX_BASIC_STATS | unix.STATX_MNT_ID

// origin is where a walk began; all of it must lie on one mount.
type origin struct {
	major, minor uint32
	mount        uint64 // 0 where the kernel does not tell
	below        bool   // CollectOptions.Below
}

// statx reads an inode's attributes into the entry and checks that it lies on
// the walk's own mount and can be carried at all.
func (o *origin) statx(fd int, name string, flags int, st *unix.Statx_t, e *Entry) error {
	err := retry(func() error {
		return unix.Statx(fd, name, flags|unix.AT_SYMLINK_NOFOLLOW|unix.AT_NO_AUTOMOUNT, statxMask, st)
	})
	if err != nil {
		return pathError("stat", e.Path, err)
	}
	if !o.holds(st) {
		return fmt.Errorf("%q is a mount point (device %d:%d, the upperdir is on %d:%d): %w",
			clip(e.Path), st.Dev_major, st.Dev_minor, o.major, o.minor, fault.ErrUnsupported)
	}
	if st.Attributes&(unix.STATX_ATTR_IMMUTABLE|unix.STATX_ATTR_APPEND) != 0 && !o.below {
		return fmt.Errorf("%q is immutable or append-only (chattr +i, +a), which cannot be restored: %w",
			clip(e.Path), fault.ErrUnsupported)
	}
	return e.fill(st)
}

// holds reports whether an inode lies on the walk's own mount.
func (o *origin) holds(st *unix.Statx_t) bool {
	return st.Dev_major == o.major && st.Dev_minor == o.minor &&
		(o.mount == 0 || st.Mask&unix.STATX_MNT_ID == 0 || st.Mnt_id == o.mount)
}

// fill takes over what statx says about an inode.
func (e *Entry) fill(st *unix.Statx_t) error {
	e.Mode = uint32(st.Mode) & 0o7777
	e.UID, e.GID = st.Uid, st.Gid
	e.Mtime = Time{st.Mtime.Sec, int64(st.Mtime.Nsec)}
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFDIR:
		e.Type = TypeDir
	case unix.S_IFREG:
		e.Type = TypeFile
		e.Size = int64(st.Size)
	case unix.S_IFLNK:
		e.Type = TypeSymlink
	case unix.S_IFIFO:
		e.Type = TypeFifo
	case unix.S_IFSOCK:
		e.Type = TypeSocket
	case unix.S_IFCHR, unix.S_IFBLK:
		e.Type = TypeChar
		if st.Mode&unix.S_IFMT == unix.S_IFBLK {
			e.Type = TypeBlock
		} else if st.Rdev_major == 0 && st.Rdev_minor == 0 {
			e.Type = TypeWhiteout
		}
		e.Major, e.Minor = st.Rdev_major, st.Rdev_minor
	default:
		return fmt.Errorf("%q has the unknown file type %#o: %w", clip(e.Path),
			st.Mode&unix.S_IFMT, fault.ErrUnsupported)
	}
	return nil
}

// stillSame fails when the open file is not what it was at stat. Content and
// attributes cannot change without a new change time.
func stillSame(fd int, was *unix.Statx_t, path string) error {
	var now unix.Statx_t
	if err := unix.Statx(fd, "", unix.AT_EMPTY_PATH, statxMask, &now); err != nil {
		return pathError("stat", path, err)
	}
	if now.Ino != was.Ino || now.Size != was.Size || now.Mtime != was.Mtime || now.Ctime != was.Ctime {
		return errChanged(path)
	}
	return nil
}

func errChanged(path string) error {
	return fmt.Errorf("%q changed while it was read: %w", clip(path), fault.ErrBusy)
}

// scratch is the memory that one reader of inodes needs.
type scratch struct {
	list, value []byte
}

func newScratch() *scratch {
	return &scratch{list: make([]byte, 64<<10), value: make([]byte, maxXattr)}
}

// read returns all attributes that the two calls show; they are the f or the l
// variants bound to an inode. The buffers have the kernel's own largest sizes.
func (b *scratch) read(
	path string, list func([]byte) (int, error), value func(string, []byte) (int, error),
) (map[string]string, error) {
	var n int
	err := retry(func() (err error) { n, err = list(b.list); return })
	if err == unix.EOPNOTSUPP || n == 0 && err == nil {
		return nil, nil
	}
	if err != nil {
		return nil, pathError("list attributes", path, err)
	}
	set := make(map[string]string)
	for rest := b.list[:n]; len(rest) > 0; {
		i := bytes.IndexByte(rest, 0)
		if i < 0 {
			i = len(rest) - 1
		}
		name := string(rest[:i])
		rest = rest[i+1:]
		var m int
		err := retry(func() (err error) { m, err = value(name, b.value); return })
		if err != nil {
			return nil, pathError("read attribute "+name+" of", path, err)
		}
		set[name] = string(b.value[:m])
	}
	return set, nil
}

func (b *scratch) readFD(path string, fd int) (map[string]string, error) {
	return b.read(path,
		func(p []byte) (int, error) { return unix.Flistxattr(fd, p) },
		func(name string, p []byte) (int, error) { return unix.Fgetxattr(fd, name, p) })
}

// readAt reads the attributes of name in dir without following it.
func (b *scratch) readAt(path string, dir int, name string) (map[string]string, error) {
	p := procFD(dir) + "/" + name
	return b.read(path,
		func(buf []byte) (int, error) { return unix.Llistxattr(p, buf) },
		func(name string, buf []byte) (int, error) { return unix.Lgetxattr(p, name, buf) })
}

// extents asks the filesystem where a file of the given size has data; nil
// means everywhere. It moves the file offset.
func extents(fd int, size int64, path string) ([]Extent, error) {
	if size == 0 {
		return nil, nil
	}
	hole, err := unix.Seek(fd, 0, unix.SEEK_HOLE)
	if err == unix.EINVAL || err == unix.EOPNOTSUPP {
		return nil, nil // a filesystem that knows no holes
	}
	if err != nil {
		return nil, pathError("look for holes in", path, err)
	}
	if hole >= size {
		return nil, nil
	}
	list := []Extent{}
	if hole > 0 {
		list = append(list, Extent{0, hole})
	}
	for off := hole; off < size; {
		start, err := unix.Seek(fd, off, unix.SEEK_DATA)
		if err == unix.ENXIO || err == nil && start >= size {
			break // nothing but a hole up to the end
		}
		if err != nil {
			return nil, pathError("look for data in", path, err)
		}
		end, err := unix.Seek(fd, start, unix.SEEK_HOLE)
		if err != nil {
			return nil, pathError("look for holes in", path, err)
		}
		if end = min(end, size); end <= start || start < off {
			return nil, errChanged(path)
		}
		if last := len(list) - 1; last >= 0 && start == list[last].Off+list[last].Len {
			list[last].Len += end - start // a hole was filled in between
		} else {
			list = append(list, Extent{start, end - start})
		}
		if len(list) > maxExtents {
			return nil, fmt.Errorf("%q has more than %d pieces of data between holes: %w", clip(path),
				maxExtents, fault.ErrUnsupported)
		}
		off = end
	}
	return list, nil
}

// readFull fills p from off; less than that means that the file was cut.
func readFull(fd int, p []byte, off int64, path string) error {
	for len(p) > 0 {
		var n int
		err := retry(func() (err error) { n, err = unix.Pread(fd, p, off); return })
		if err != nil {
			return pathError("read", path, err)
		}
		if n == 0 {
			return errChanged(path)
		}
		p, off = p[n:], off+int64(n)
	}
	return nil
}

func digestOf(data []byte) string {
	sum := blake3.Sum256(data)
	return formatDigest(sum[:])
}

func formatDigest(sum []byte) string {
	var b [len(digestPrefix) + 64]byte
	copy(b[:], digestPrefix)
	hex.Encode(b[len(digestPrefix):], sum)
	return string(b[:])
}

func hasherDigest(h *blake3.Hasher) string {
	var sum [32]byte
	return formatDigest(h.Sum(sum[:0]))
}

// readlinkAt reads a symlink's target whole; the kernel cuts silently.
func readlinkAt(dir int, name, path string) (string, error) {
	buf := make([]byte, unix.PathMax)
	n, err := unix.Readlinkat(dir, name, buf)
	if err != nil {
		return "", pathError("readlink", path, err)
	}
	if n == len(buf) {
		return "", pathError("readlink", path, unix.ENAMETOOLONG)
	}
	return string(buf[:n]), nil
}

// errPrivilege is the refusal to work half-blind: without CAP_SYS_ADMIN of the
// first user namespace the kernel hides trusted.* attributes, opaque marks
// among them, and says nothing.
var errPrivilege = fmt.Errorf("reading an upperdir needs root with CAP_SYS_ADMIN, else the kernel hides trusted.* attributes: %w", fault.ErrDenied)

func checkPrivilege() error {
	hdr := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	if err := unix.Capget(&hdr, &data[0]); err != nil {
		return errors.Join(errPrivilege, err)
	}
	const bit = unix.CAP_SYS_ADMIN
	if data[bit/32].Effective&(1<<(bit%32)) == 0 {
		return errPrivilege
	}
	// In a user namespace of its own root has the capability and still sees
	// no trusted.* attributes. The first namespace has a fixed inode number.
	const firstUserNS = 0xEFFFFFFD
	var st unix.Stat_t
	if err := unix.Stat("/proc/self/ns/user", &st); err == nil && st.Ino != firstUserNS {
		return errPrivilege
	}
	return nil
}
