// Package tree moves whole directory trees: out into a tar stream (Pack), in
// from a tar stream (Extract), and from one directory to another (Clone).
//
// It is the machinery below images and internal/cptar. Archives and the trees
// themselves may be hostile: every name is walked component by component from
// a directory descriptor with O_NOFOLLOW, so nothing is read or written
// through a symlink, and metadata goes through the descriptor of the object
// that was just made, never through its name. What a sandbox's root means, and
// which symlinks may be followed on the way to it, is policy.Jail's business:
// here the starting directory is already open.
//
// All bytes of a name are allowed but NUL; times are in nanoseconds; holes stay
// holes.
package tree

import (
	"context"
	"fmt"
	"os"
	"strconv"
	"strings"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/fault"
)

// Report tells what was moved.
type Report struct {
	Entries int64 // of every type, the top directory included
	Bytes   int64 // of file contents, holes included
	// Skipped names what could not be carried over, one sentence per entry;
	// at most MaxSkipped of them, SkippedMore counts the others.
	Skipped     []string
	SkippedMore int64
	// Implicit are the directories that a fresh tree has only because
	// something lies in them; "" is the top.
	Implicit []string
	// Opaque says that a layer hides all that lies below it.
	Opaque bool
}

// MaxSkipped bounds Report.Skipped.
const MaxSkipped = 1000

func (r *Report) skip(name, why string) {
	if len(r.Skipped) >= MaxSkipped {
		r.SkippedMore++
		return
	}
	r.Skipped = append(r.Skipped, fmt.Sprintf("%q: %s", name, why))
}

const (
	maxPath = 4096 // bytes of a name in a tree; longer ones no program could open
	chunk   = 256 << 10
	// hole is the granularity at which runs of zeros become holes.
	hole = 32 << 10
)

var zeros [hole]byte

// xattr is one extended attribute.
type xattr struct{ name, value string }

// HostXattr reports whether an attribute belongs to the host's security modules and not to the
// tree: it is neither copied nor part of a digest.
func HostXattr(name string) bool {
	switch name {
	case "security.selinux", "security.ima", "security.evm", "security.apparmor", "security.SMACK64":
		return true
	}
	return false
}

// procPath names the object behind a descriptor. Through it the calls that know
// no O_PATH descriptors work, on symlinks too: a magic link is followed exactly
// once.
func procPath(f *os.File) string { return "/proc/self/fd/" + strconv.Itoa(int(f.Fd())) }

// openat opens one component, never through a symlink.
func openat(dir *os.File, base string, flags int, perm uint32) (*os.File, error) {
	for {
		fd, err := unix.Openat(int(dir.Fd()), base, flags|unix.O_NOFOLLOW|unix.O_CLOEXEC, perm)
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return nil, err
		}
		return os.NewFile(uintptr(fd), base), nil
	}
}

// handle opens base as O_PATH; that has no effect on devices and FIFOs.
func handle(dir *os.File, base string) (*os.File, error) {
	return openat(dir, base, unix.O_PATH, 0)
}

// reopen opens the object behind an O_PATH descriptor.
func reopen(h *os.File, flags int) (*os.File, error) {
	for {
		fd, err := unix.Open(procPath(h), flags|unix.O_CLOEXEC, 0)
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return nil, err
		}
		return os.NewFile(uintptr(fd), h.Name()), nil
	}
}

func fstat(f *os.File) (unix.Stat_t, error) {
	var st unix.Stat_t
	err := unix.Fstat(int(f.Fd()), &st)
	return st, err
}

func readlink(h *os.File) (string, error) {
	buf := make([]byte, maxPath+1)
	n, err := unix.Readlinkat(int(h.Fd()), "", buf)
	if err != nil {
		return "", err
	}
	if n > maxPath {
		return "", unix.ENAMETOOLONG
	}
	return string(buf[:n]), nil
}

// xattrs reads the attributes of the object behind h that keep wants.
func xattrs(h *os.File, keep func(string) bool) ([]xattr, error) {
	p := procPath(h)
	names, err := sized(func(b []byte) (int, error) { return unix.Listxattr(p, b) })
	if err == unix.ENOTSUP || len(names) == 0 && err == nil {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var list []xattr
	for name := range strings.SplitSeq(strings.TrimSuffix(string(names), "\x00"), "\x00") {
		if keep != nil && !keep(name) {
			continue
		}
		value, err := sized(func(b []byte) (int, error) { return unix.Getxattr(p, name, b) })
		if err == unix.ENODATA { // it went meanwhile
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("attribute %q: %w", name, err)
		}
		list = append(list, xattr{name, string(value)})
	}
	return list, nil
}

// PathXattrs reads the attributes of the object at a path, a final symlink not
// followed, but those of the host.
func PathXattrs(path string) (map[string]string, error) {
	h, err := os.OpenFile(path, unix.O_PATH|unix.O_NOFOLLOW, 0)
	if err != nil {
		return nil, err
	}
	defer h.Close()
	list, err := xattrs(h, func(name string) bool { return !HostXattr(name) })
	all := make(map[string]string, len(list))
	for _, x := range list {
		all[x.name] = x.value
	}
	return all, err
}

// sized calls fn with a buffer that is large enough. Attributes are at most
// 64 KiB for the kernel, so a small buffer is tried first.
func sized(fn func([]byte) (int, error)) ([]byte, error) {
	buf := make([]byte, 1024)
	for {
		n, err := fn(buf)
		if err == unix.ERANGE && len(buf) < 1<<20 {
			buf = make([]byte, 8*len(buf))
			continue
		}
		if err != nil {
			return nil, err
		}
		return buf[:n], nil
	}
}

// meta is what is set on a new object.
type meta struct {
	mode     uint32 // permission bits, 07777
	uid, gid int    // -1: leave
	mtime    unix.Timespec
	xattrs   []xattr
}

// apply sets m on the object behind h. The order is the kernel's: a change of
// owner clears setuid bits and file capabilities.
func (m meta) apply(h *os.File, symlink bool) error {
	if m.uid >= 0 || m.gid >= 0 {
		if err := unix.Fchownat(int(h.Fd()), "", m.uid, m.gid, unix.AT_EMPTY_PATH); err != nil {
			return fmt.Errorf("set owner: %w", err)
		}
	}
	if !symlink {
		if err := unix.Chmod(procPath(h), m.mode); err != nil {
			return fmt.Errorf("set mode: %w", err)
		}
	}
	if err := m.applyXattrs(h); err != nil {
		return err
	}
	return m.applyTime(h)
}

// applyOpen is apply for an object that is open for more than its path.
func (m meta) applyOpen(f *os.File) error {
	fd := int(f.Fd())
	if m.uid >= 0 || m.gid >= 0 {
		if err := unix.Fchown(fd, m.uid, m.gid); err != nil {
			return fmt.Errorf("set owner: %w", err)
		}
	}
	if err := unix.Fchmod(fd, m.mode); err != nil {
		return fmt.Errorf("set mode: %w", err)
	}
	for _, x := range m.xattrs {
		if err := unix.Fsetxattr(fd, x.name, []byte(x.value), 0); err != nil {
			return fmt.Errorf("set attribute %q: %w", x.name, err)
		}
	}
	times := [2]unix.Timespec{m.mtime, m.mtime}
	// No path at all means the descriptor, which x/sys cannot say.
	if _, _, errno := unix.Syscall6(unix.SYS_UTIMENSAT, uintptr(fd), 0,
		uintptr(unsafe.Pointer(&times)), 0, 0, 0); errno != 0 {
		return fmt.Errorf("set time: %w", errno)
	}
	return nil
}

func (m meta) applyXattrs(h *os.File) error {
	for _, x := range m.xattrs {
		if err := unix.Setxattr(procPath(h), x.name, []byte(x.value), 0); err != nil {
			return fmt.Errorf("set attribute %q: %w", x.name, err)
		}
	}
	return nil
}

func (m meta) applyTime(h *os.File) error {
	times := []unix.Timespec{m.mtime, m.mtime}
	if err := unix.UtimesNanoAt(unix.AT_FDCWD, procPath(h), times, 0); err != nil {
		return fmt.Errorf("set time: %w", err)
	}
	return nil
}

// extent is a run of data in a file.
type extent struct{ off, len int64 }

// extents lists the runs of data of f; whole is true when there are no holes,
// or too many to be worth it.
func extents(f *os.File, st *unix.Stat_t) (list []extent, whole bool, err error) {
	const most = 1 << 16
	if st.Blocks*512 >= st.Size {
		return nil, true, nil
	}
	for off := int64(0); off < st.Size; {
		data, err := unix.Seek(int(f.Fd()), off, unix.SEEK_DATA)
		if err == unix.ENXIO {
			break
		}
		if err == unix.EINVAL || err == unix.ENOTSUP {
			return nil, true, nil
		}
		if err != nil {
			return nil, false, err
		}
		if data >= st.Size {
			break
		}
		end, err := unix.Seek(int(f.Fd()), data, unix.SEEK_HOLE)
		if err != nil {
			return nil, false, err
		}
		end = min(end, st.Size)
		if len(list) == most {
			return nil, true, nil
		}
		list = append(list, extent{data, end - data})
		off = end
	}
	if len(list) == 1 && list[0] == (extent{0, st.Size}) {
		return nil, true, nil
	}
	return list, false, nil
}

// names lists the entries of an open directory, in the kernel's order.
func names(dir *os.File) ([]string, error) {
	list, err := dir.Readdirnames(-1)
	if err != nil {
		return nil, err
	}
	return list, nil
}

// wrap adds the entry's name and turns the errors with a remedy into ones that
// say it.
func wrap(verb, name string, err error) error {
	if err == nil || err == context.Canceled || err == context.DeadlineExceeded {
		return err
	}
	err = fmt.Errorf("%s %q: %w", verb, name, err)
	if errno, ok := asErrno(err); ok && (errno == unix.ENOSPC || errno == unix.EDQUOT) {
		return &fault.Error{
			Op: "write files", Hint: "Free some disk space and try again; nothing half-made is kept.", Err: err,
		}
	}
	return err
}

func asErrno(err error) (syscall.Errno, bool) {
	for e := err; e != nil; {
		if errno, ok := e.(syscall.Errno); ok {
			return errno, true
		}
		u, ok := e.(interface{ Unwrap() error })
		if !ok {
			break
		}
		e = u.Unwrap()
	}
	return 0, false
}
