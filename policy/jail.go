package policy

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"strconv"
	"strings"
	"sync/atomic"

	pathrs "github.com/cyphar/filepath-securejoin/pathrs-lite"
	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/fault"
)

// Jail resolves paths under one root directory as a process whose root it is
// would: "/" and ".." stop at the root, absolute symlinks start there, and the
// magic links of /proc, which jump anywhere, are refused.
//
// The kernel resolves in one step (openat2 with RESOLVE_IN_ROOT), so a hostile
// process that swaps directories for symlinks meanwhile wins nothing. Kernels
// without openat2 get a component-wise walk over descriptors. A Jail is safe
// for concurrent use.
type Jail struct {
	root *os.File
}

const (
	inRoot = unix.RESOLVE_IN_ROOT | unix.RESOLVE_NO_MAGICLINKS
	// maxLinks is the kernel's own bound on symlinks in one resolution.
	maxLinks = 40
	// maxRaces bounds how often a resolution is tried again when a rename
	// inside the jail disturbed it; only an attacker keeps that up.
	maxRaces = 1000
	maxPath  = 4096
)

// noOpenat2 is set once the kernel (or a seccomp filter) has said that it does
// not know the call.
var noOpenat2 atomic.Bool

// Open makes a jail of the directory root, for example a mount point or
// /proc/PID/root. Root itself is trusted and resolved as any host path.
func Open(root string) (*Jail, error) {
	f, err := os.OpenFile(root, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("open the root of a jail: %w", err)
	}
	return &Jail{root: f}, nil
}

// Close releases the root. Files opened through the jail stay open.
func (j *Jail) Close() error { return j.root.Close() }

// OpenFile opens an existing regular file or directory, or with O_CREAT makes
// a regular file. flags are os.O_* flags; with O_NOFOLLOW a final symlink is
// an error. Devices, FIFOs and sockets are ErrDenied: opening one can block,
// and acts on things outside of the jail.
func (j *Jail) OpenFile(name string, flags int, perm os.FileMode) (*os.File, error) {
	flags |= unix.O_CLOEXEC
	target := name
	for range maxLinks {
		f, err := j.openExisting(name, target, flags)
		if err == nil || flags&os.O_CREATE == 0 || !errors.Is(err, unix.ENOENT) {
			return f, err
		}
		dir, base, err := j.Parent(target)
		if err != nil {
			return nil, fail("open", name, err)
		}
		// O_EXCL, since without it the call would follow a symlink that a
		// process inside has just put there, out of the jail.
		fd, err := openat(dir, base,
			flags&^(os.O_TRUNC|unix.O_DIRECTORY)|os.O_EXCL|unix.O_NOFOLLOW, uint32(perm.Perm()))
		if err == nil {
			dir.Close()
			return os.NewFile(uintptr(fd), name), nil
		}
		if err != unix.EEXIST || flags&(os.O_EXCL|unix.O_NOFOLLOW) != 0 {
			dir.Close()
			return nil, fail("open", name, err)
		}
		// A dangling symlink: the file is made where it points to.
		link, err := readlinkat(dir, base)
		dir.Close()
		switch {
		case err == nil && path.IsAbs(link):
			target = link
		case err == nil:
			target = dirOf(target) + link
		case err == unix.EINVAL || err == unix.ENOENT: // it changed meanwhile
		default:
			return nil, fail("open", name, err)
		}
	}
	return nil, fail("open", name, unix.ELOOP)
}

func (j *Jail) openExisting(name, target string, flags int) (*os.File, error) {
	h, err := j.resolve(target, flags&unix.O_NOFOLLOW == 0)
	if err != nil {
		return nil, fail("open", name, err)
	}
	defer h.Close()
	if flags&os.O_CREATE != 0 && flags&os.O_EXCL != 0 {
		return nil, fail("open", name, unix.EEXIST)
	}
	info, err := h.Stat()
	if err != nil {
		return nil, fail("open", name, err)
	}
	switch mode := info.Mode(); {
	case mode.IsRegular(), mode.IsDir():
	case mode&fs.ModeSymlink != 0:
		return nil, fail("open", name, unix.ELOOP)
	default:
		return nil, irregular("open", name, mode)
	}
	if info.IsDir() && flags&(os.O_WRONLY|os.O_RDWR|os.O_CREATE) != 0 {
		return nil, fail("open", name, unix.EISDIR)
	}
	f, err := Reopen(h, flags&^(os.O_CREATE|os.O_EXCL|unix.O_NOFOLLOW))
	if err != nil {
		return nil, fail("open", name, err)
	}
	return f, nil
}

// Handle returns an O_PATH descriptor of what name is: for *at calls, Stat and
// Reopen. A final symlink is followed only when follow says so.
func (j *Jail) Handle(name string, follow bool) (*os.File, error) {
	h, err := j.resolve(name, follow)
	if err != nil {
		return nil, fail("open", name, err)
	}
	return h, nil
}

// Reopen opens the very object that h, an O_PATH descriptor, stands for.
func Reopen(h *os.File, flags int) (*os.File, error) {
	p := "/proc/self/fd/" + strconv.Itoa(int(h.Fd()))
	for {
		fd, err := unix.Open(p, flags|unix.O_CLOEXEC, 0)
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return nil, err
		}
		return os.NewFile(uintptr(fd), h.Name()), nil
	}
}

// Lstat describes name, a final symlink not followed unless name ends with a
// slash.
func (j *Jail) Lstat(name string) (fs.FileInfo, error) { return j.stat(name, false) }

// Stat describes what name leads to.
func (j *Jail) Stat(name string) (fs.FileInfo, error) { return j.stat(name, true) }

func (j *Jail) stat(name string, follow bool) (fs.FileInfo, error) {
	h, err := j.resolve(name, follow)
	if err != nil {
		return nil, fail("stat", name, err)
	}
	defer h.Close()
	info, err := h.Stat()
	if err != nil {
		return nil, fail("stat", name, err)
	}
	return info, nil
}

// Readlink returns the target of the symlink name, as it is written.
func (j *Jail) Readlink(name string) (string, error) {
	dir, base, err := j.Parent(name)
	if err != nil {
		return "", fail("readlink", name, err)
	}
	defer dir.Close()
	link, err := readlinkat(dir, base)
	if err != nil {
		return "", fail("readlink", name, err)
	}
	return link, nil
}

// Parent resolves all of name but its last component. It returns the
// directory, as an O_PATH descriptor, and that component, for *at calls, which
// must not follow it. Base is "." when name means a directory by itself: "/",
// or a name that ends with "." or "..".
func (j *Jail) Parent(name string) (dir *os.File, base string, err error) {
	if name == "" {
		return nil, "", fail("open", name, unix.ENOENT)
	}
	head, base := dirOf(name), path.Base(name)
	if base == "." || base == ".." || base == "/" {
		head, base = name, "."
	}
	dir, err = j.resolve(head+"/.", true)
	if err != nil {
		return nil, "", fail("open", name, err)
	}
	return dir, base, nil
}

// MkdirAll makes the directory name and the missing ones above it, symlinks
// followed inside of the jail. An existing directory is no error.
func (j *Jail) MkdirAll(name string, perm os.FileMode) error {
	if name == "" {
		return fail("mkdir", name, unix.ENOENT)
	}
	prefix := "/"
	for c := range strings.SplitSeq(name, "/") {
		if c == "" || c == "." {
			continue
		}
		prefix += c
		if err := j.mkdir(prefix, perm); err != nil {
			return fail("mkdir", name, err)
		}
		prefix += "/"
	}
	return nil
}

func (j *Jail) mkdir(name string, perm os.FileMode) error {
	for range maxRaces {
		h, err := j.resolve(name+"/.", true)
		if err == nil {
			return h.Close()
		}
		if err != unix.ENOENT {
			return err
		}
		dir, base, err := j.Parent(name)
		if err != nil {
			return err
		}
		err = unix.Mkdirat(int(dir.Fd()), base, uint32(perm.Perm()))
		dir.Close()
		if err == nil {
			return nil
		}
		if err != unix.EEXIST {
			return err
		}
		// There is something that leads nowhere, unless it has just appeared.
		if h, err := j.resolve(name, false); err == nil {
			info, err := h.Stat()
			h.Close()
			if err == nil && !info.IsDir() {
				return unix.ENOTDIR
			}
		}
	}
	return unix.EAGAIN
}

// Real returns where name lies once every symlink is resolved: an absolute path as the sandbox
// sees it, free of links. A part of name that does not exist yet is taken as written, so the
// deepest existing ancestor decides where a new file would land; a part that the caller may not
// look at is treated the same way. exists says whether all of name exists.
//
// The answer is for judging and for messages. Code that acts on the file must still go through
// the jail, since the files may have changed since.
func (j *Jail) Real(name string) (real string, exists bool, err error) {
	if name == "" || len(name) > maxPath {
		return "", false, fail("resolve", name, unix.ENAMETOOLONG)
	}
	var done []string
	todo := strings.Split(name, "/")
	exists = true
	for links := 0; len(todo) > 0; {
		c := todo[0]
		todo = todo[1:]
		switch c {
		case "", ".":
			continue
		case "..":
			if len(done) > 0 {
				done = done[:len(done)-1]
			}
			continue
		}
		at := "/" + strings.Join(append(done[:len(done):len(done)], c), "/")
		h, err := j.resolve(at, false)
		if err == unix.ENOENT || err == unix.EACCES {
			exists = false
			done = append(done, c)
			continue
		}
		if err != nil {
			return "", false, fail("resolve", name, err)
		}
		link, err := readlinkat(h, "")
		h.Close()
		if err != nil { // not a symlink
			done = append(done, c)
			continue
		}
		if links++; links > maxLinks {
			return "", false, fail("resolve", name, unix.ELOOP)
		}
		if path.IsAbs(link) {
			done = nil
		}
		todo = append(strings.Split(link, "/"), todo...)
	}
	return "/" + strings.Join(done, "/"), exists, nil
}

// resolve returns an O_PATH descriptor or a bare errno.
func (j *Jail) resolve(name string, follow bool) (*os.File, error) {
	if name == "" {
		return nil, unix.ENOENT
	}
	if noOpenat2.Load() {
		return j.walk(name, follow)
	}
	how := unix.OpenHow{Flags: unix.O_PATH | unix.O_CLOEXEC, Resolve: inRoot}
	if !follow {
		how.Flags |= unix.O_NOFOLLOW
	}
	for range maxRaces {
		fd, err := unix.Openat2(int(j.root.Fd()), name, &how)
		switch err {
		case nil:
			return os.NewFile(uintptr(fd), name), nil
		case unix.EINTR, unix.EAGAIN: // EAGAIN: a rename raced with a ".."
			continue
		case unix.ENOSYS:
			noOpenat2.Store(true)
			return j.walk(name, follow)
		}
		return nil, err
	}
	return nil, unix.EAGAIN
}

// walk is resolve for kernels without openat2.
func (j *Jail) walk(name string, follow bool) (*os.File, error) {
	base := path.Base(name)
	if follow || base == "." || base == ".." || base == "/" || strings.HasSuffix(name, "/") {
		dir := strings.HasSuffix(name, "/") || strings.HasSuffix(name, "/.")
		h, err := pathrs.OpenatInRoot(j.root, name)
		if err != nil {
			return nil, bare(err)
		}
		if info, err := h.Stat(); err == nil && dir && !info.IsDir() {
			h.Close()
			return nil, unix.ENOTDIR
		}
		return h, nil
	}
	dir, err := pathrs.OpenatInRoot(j.root, dirOf(name)+".")
	if err != nil {
		return nil, bare(err)
	}
	defer dir.Close()
	fd, err := openat(dir, base, unix.O_PATH|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	return os.NewFile(uintptr(fd), name), nil
}

// dirOf is everything before the last component, with its slash, not cleaned:
// cleaning would drop "link/.." pairs, which the kernel resolves differently.
func dirOf(name string) string {
	name = strings.TrimRight(name, "/")
	dir := name[:strings.LastIndexByte(name, '/')+1]
	if dir == "" {
		return "/"
	}
	return dir
}

func openat(dir *os.File, base string, flags int, perm uint32) (int, error) {
	for {
		fd, err := unix.Openat(int(dir.Fd()), base, flags, perm)
		if err != unix.EINTR {
			return fd, err
		}
	}
}

func readlinkat(dir *os.File, base string) (string, error) {
	buf := make([]byte, maxPath)
	n, err := unix.Readlinkat(int(dir.Fd()), base, buf)
	if err != nil {
		return "", err
	}
	return string(buf[:n]), nil
}

func bare(err error) error {
	var errno unix.Errno
	if errors.As(err, &errno) {
		return errno
	}
	return err
}

// fail dresses err as an error on the path that the caller named.
func fail(op, name string, err error) error {
	if err == nil {
		return nil
	}
	if pe := (*fs.PathError)(nil); errors.As(err, &pe) {
		err = pe.Err
	}
	e := &fs.PathError{Op: op, Path: name, Err: err}
	switch err {
	case unix.ENOENT, unix.ENOTDIR:
		return &jailError{e, fault.ErrNotFound}
	case unix.EEXIST:
		return &jailError{e, fault.ErrExists}
	case unix.EXDEV:
		return &jailError{e, fault.ErrDenied}
	case unix.ELOOP, unix.ENAMETOOLONG, unix.EISDIR, unix.EINVAL:
		return &jailError{e, fault.ErrInvalid}
	}
	return e
}

// jailError matches both the errno and the sentinel that it means.
type jailError struct {
	*fs.PathError
	sentinel error
}

func (e *jailError) Unwrap() []error { return []error{e.PathError, e.sentinel} }
