package overlay

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/failpoint"
	"github.com/agentbox/agentbox/internal/fault"
)

// Apply makes dir equal to what is wanted. Nothing else may use dir: a sandbox's upperdir may
// still be mounted, but nothing may run in it. stage is what Stage made for this very update, on
// the same filesystem. Apply uses it up; on failure the caller deletes it.
//
// Apply touches only what differs: all other files keep their inodes, and so does a file of which
// only attributes differ. It touches nothing outside of dir and stage, whatever lies in dir; a
// hard link elsewhere to a file of dir sees its attributes change.
//
// A removed directory goes with all that is in it, including what Collect was told to skip.
//
// If dir is not in the state that was planned with, Apply stops with ErrState. After that, after
// any other error, the end of ctx, or a kill, dir is in between, and a new Collect, PlanUpdate,
// Stage and Apply complete it. Like a rename, the result is durable once the caller syncs the
// filesystem; a power failure before that is a kill at an earlier moment.
func (u *Update) Apply(ctx context.Context, dir, stage string) error {
	if err := u.apply(ctx, dir, stage, false); err != nil {
		return fmt.Errorf("update %s: %w", dir, err)
	}
	return nil
}

func (u *Update) apply(ctx context.Context, dir, stage string, displaces bool) error {
	if err := checkPrivilege(); err != nil {
		return err
	}
	a := updater{u: u, displaces: displaces, buf: newScratch(), root: -1, stage: -1}
	defer a.close()
	if err := a.open(dir, stage); err != nil {
		return err
	}
	if err := a.run(ctx); err != nil {
		return err
	}
	if err := failpoint.Hit("overlay.update.end"); err != nil || displaces {
		return err
	}
	return os.RemoveAll(stage)
}

// updater goes through the changes in the order of ComparePaths, the
// directories above the current one open. A directory gets its attributes and
// its time when it is left: all below it is done then, and nothing later comes
// back to it, for hard links lead from other directories only to here.
type updater struct {
	u           *Update
	displaces   bool // what goes is moved to the stage
	root, stage int
	at          []updateDir
	buf         *scratch
}

type updateDir struct {
	fd      int
	path    string
	want    *Entry // what it is to become, when it is not that yet
	touched bool   // a name in it was made, replaced or removed
}

func (a *updater) open(dir, stage string) error {
	var st [2]unix.Stat_t
	for i, x := range []struct {
		fd   *int
		path string
	}{{&a.root, dir}, {&a.stage, stage}} {
		fd, err := unix.Open(x.path, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
		if err == nil {
			*x.fd = fd
			err = unix.Fstat(fd, &st[i])
		}
		if err != nil {
			return found(pathError("open", x.path, err))
		}
	}
	if st[0].Dev != st[1].Dev {
		return fmt.Errorf("%s lies on another filesystem: %w", stage, fault.ErrInvalid)
	}
	a.at = append(a.at, updateDir{fd: a.root, path: "."})
	return nil
}

func (a *updater) close() {
	for i := len(a.at) - 1; i > 0; i-- {
		_ = unix.Close(a.at[i].fd)
	}
	for _, fd := range []int{a.root, a.stage} {
		if fd >= 0 {
			_ = unix.Close(fd)
		}
	}
}

func (a *updater) run(ctx context.Context) error {
	if err := a.sources(ctx); err != nil {
		return err
	}
	gone := "" // the last directory that was removed; what was in it went along
	err := a.u.all(func(i int, c *updateChange) error {
		if gone != "" && isAbove(gone, c.Path) {
			return nil
		}
		if err := a.reach(ctx, c.Path); err != nil {
			return err
		}
		if err := a.do(ctx, i, c); err != nil {
			return found(err)
		}
		if c.Old != nil && c.Old.Type == TypeDir && c.do != doDir {
			gone = c.Path
		}
		return nil
	})
	if err != nil {
		return err
	}
	for len(a.at) > 0 {
		if err := a.leave(ctx); err != nil {
			return err
		}
	}
	return nil
}

// sources looks up the inodes that get further names but do not change otherwise. The plan does
// not record them, so an inode that does not exist, as with a made-up tree, is detected here,
// before anything is touched.
func (a *updater) sources(ctx context.Context) error {
	l := &a.u.changes
	for i := range l.index {
		if l.index[i].do != doLink {
			continue
		}
		c, err := a.u.at(i)
		if err != nil {
			return err
		}
		if first, err := l.find(c.from); first >= 0 || err != nil {
			if err != nil {
				return err
			}
			continue
		}
		if err := ctx.Err(); err != nil {
			return err
		}
		if err := a.source(c, func(int, string) error { return nil }); err != nil {
			return found(err)
		}
	}
	return nil
}

// step stands before everything that changes the directory.
func step(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	return failpoint.Hit("overlay.update.op")
}

// reach makes the directory that path lies in the current one.
func (a *updater) reach(ctx context.Context, path string) error {
	if path == "." {
		return nil
	}
	for !isAbove(a.at[len(a.at)-1].path, path) {
		if err := a.leave(ctx); err != nil {
			return err
		}
	}
	for {
		d := &a.at[len(a.at)-1]
		rest := path
		if d.path != "." {
			rest = path[len(d.path)+1:]
		}
		name, _, more := strings.Cut(rest, "/")
		if !more {
			return nil
		}
		if err := a.enter(name, path[:len(path)-len(rest)+len(name)], nil); err != nil {
			return err
		}
	}
}

// enter opens a directory of the current one and makes it the current one.
func (a *updater) enter(name, path string, want *Entry) error {
	fd, err := openDirIn(a.at[len(a.at)-1].fd, name)
	if err != nil {
		return found(pathError("open", path, err))
	}
	a.at = append(a.at, updateDir{fd: fd, path: path, want: want})
	return nil
}

// leave finishes the current directory.
func (a *updater) leave(ctx context.Context) error {
	d := &a.at[len(a.at)-1]
	if d.want != nil || d.touched {
		if err := ctx.Err(); err != nil {
			return err
		}
		if err := failpoint.Hit("overlay.update.times"); err != nil {
			return err
		}
	}
	if d.want != nil {
		if err := a.settle(d.fd, d.want); err != nil {
			return err
		}
	} else if d.touched {
		t, ok := a.u.times[d.path]
		if !ok {
			return fmt.Errorf("the time of %q is not in the plan: %w", clip(d.path), fault.ErrInvalid)
		}
		if err := setTimes(d.fd, "", t, unix.AT_EMPTY_PATH); err != nil {
			return pathError("set times of", d.path, err)
		}
	}
	if d.fd != a.root {
		_ = unix.Close(d.fd)
	}
	a.at = a.at[:len(a.at)-1]
	return nil
}

// settle gives an open file or directory the attributes of e and no others.
func (a *updater) settle(fd int, e *Entry) error {
	set, err := a.buf.readFD(e.Path, fd)
	if err != nil {
		return err
	}
	for name := range set {
		if _, ok := e.Xattrs[name]; ok {
			continue
		}
		// A security module's own label cannot be removed, and a file that
		// is made anew has one as well.
		if err := unix.Fremovexattr(fd, name); err != nil && err != unix.ENODATA &&
			!strings.HasPrefix(name, "security.") {
			return pathError("remove attribute "+name+" of", e.Path, err)
		}
	}
	return finish(fd, e)
}

func (a *updater) do(ctx context.Context, i int, c *updateChange) error {
	if c.Path == "." {
		a.at[0].want = c.New
		return nil
	}
	d := &a.at[len(a.at)-1]
	_, name := splitPath(c.Path)
	if c.Old != nil {
		if err := expect(d.fd, name, c.Path, c.Old.Type); err != nil {
			return err
		}
	}
	if err := step(ctx); err != nil {
		return err
	}
	if c.do == doAttrs {
		return a.attrs(d.fd, name, c)
	}
	if c.do == doDir && c.Old != nil && c.Old.Type == TypeDir {
		return a.enter(name, c.Path, c.New)
	}
	d.touched = true
	switch {
	case a.displaces && c.Old != nil && (c.Old.Type == TypeDir || c.do == doRemove || c.do == doDir):
		if err := a.displace(i, d.fd, name, c.Path); err != nil {
			return err
		}
	case c.Old != nil && c.Old.Type == TypeDir:
		if err := a.removeDir(ctx, d.fd, name, c.Path); err != nil {
			return err
		}
	case c.Old != nil && (c.do == doRemove || c.do == doDir):
		if err := unix.Unlinkat(d.fd, name, 0); err != nil {
			return pathError("unlink", c.Path, err)
		}
	}
	// All but directories are made in the stage, which has no set-group-id bit and no default
	// ACL, and moved here when complete.
	if c.do == doRemove {
		return nil
	}
	if err := step(ctx); err != nil {
		return err
	}
	temp := strconv.Itoa(i)
	switch c.do {
	case doDir:
		if err := unix.Mkdirat(d.fd, name, 0o700); err != nil {
			return pathError("mkdir", c.Path, err)
		}
		return a.enter(name, c.Path, c.New)
	case doNode:
		if err := makeSpecial(a.stage, temp, c.New); err != nil {
			return err
		}
	case doLink:
		if err := a.link(temp, c); err != nil {
			return err
		}
	}
	if err := step(ctx); err != nil {
		return err
	}
	return a.move(temp, d.fd, name, c)
}

// move gives what lies complete in the stage its place. A rename replaces what
// is there, so that the name is never missing.
func (a *updater) move(temp string, dir int, name string, c *updateChange) error {
	if c.Old != nil && c.Old.Type != TypeDir {
		flags := uint(0)
		if a.displaces {
			flags = unix.RENAME_EXCHANGE
		}
		if err := a.rename(a.stage, temp, dir, name, flags); err != nil {
			return pathError("rename", c.Path, err)
		}
		return nil
	}
	err := a.rename(a.stage, temp, dir, name, unix.RENAME_NOREPLACE)
	if err == unix.EINVAL || err == unix.ENOSYS { // a filesystem that cannot promise it
		var st unix.Stat_t
		if err = unix.Fstatat(dir, name, &st, unix.AT_SYMLINK_NOFOLLOW); err == nil {
			err = unix.EEXIST
		} else if err == unix.ENOENT {
			err = unix.Renameat(a.stage, temp, dir, name)
		}
	}
	if err != nil {
		return pathError("rename", c.Path, err)
	}
	return nil
}

// attrs changes a file in place.
func (a *updater) attrs(dir int, name string, c *updateChange) error {
	// A path descriptor has no effect on what it is opened for, and what is
	// opened through it is the very inode that was looked at.
	p, err := unix.Openat(dir, name, unix.O_PATH|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return pathError("open", c.Path, err)
	}
	defer unix.Close(p)
	var st unix.Stat_t
	if err := unix.Fstat(p, &st); err != nil {
		return pathError("stat", c.Path, err)
	}
	if st.Mode&unix.S_IFMT != unix.S_IFREG {
		return unexpected(c.Path, &st, TypeFile)
	}
	var fd int
	err = retry(func() (err error) {
		fd, err = unix.Open(procFD(p), unix.O_RDONLY|unix.O_CLOEXEC, 0)
		return err
	})
	if err != nil {
		return pathError("open", c.Path, err)
	}
	defer unix.Close(fd)
	return a.settle(fd, c.inode)
}

// link makes a name in the stage of the inode that c.from has.
func (a *updater) link(temp string, c *updateChange) error {
	return a.source(c, func(dir int, name string) error {
		if err := unix.Linkat(dir, name, a.stage, temp, 0); err != nil {
			return pathError("link", c.Path, err)
		}
		return nil
	})
}

// source calls use with the directory and name of c.from, once it is known to
// be of the right type.
func (a *updater) source(c *updateChange, use func(dir int, name string) error) error {
	parent, name := splitPath(c.from)
	dir := a.root
	if parent != "." {
		fd, err := openBeneath(a.root, parent)
		if err != nil {
			return pathError("open", parent, err)
		}
		defer unix.Close(fd)
		dir = fd
	}
	if err := expect(dir, name, c.from, c.New.Type); err != nil {
		return err
	}
	return use(dir, name)
}

// removeDir removes a directory of dir and all that is in it, one step down
// through names only and never out of the filesystem. The stack is its own:
// what lies there may be as deep as paths can be.
func (a *updater) removeDir(ctx context.Context, dir int, name, path string) (err error) {
	type level struct {
		fd    int
		name  string // in the level above
		path  string
		names []dirent
	}
	var stack []level
	defer func() {
		for _, l := range stack {
			_ = unix.Close(l.fd)
		}
	}()
	buf := a.buf.list
	enter := func(dir int, name, path string) error {
		if len(stack) > maxDepth {
			return fmt.Errorf("%q lies more than %d levels deep: %w", clip(path), maxDepth, fault.ErrState)
		}
		fd, err := openDirIn(dir, name)
		if err != nil {
			return pathError("open", path, err)
		}
		stack = append(stack, level{fd: fd, name: name, path: path})
		stack[len(stack)-1].names, err = readNames(fd, path, buf)
		return err
	}
	if err := enter(dir, name, path); err != nil {
		return err
	}
	for len(stack) > 0 {
		l := &stack[len(stack)-1]
		if len(l.names) == 0 {
			above := dir
			if n := len(stack); n > 1 {
				above = stack[n-2].fd
			}
			if err := step(ctx); err != nil {
				return err
			}
			if err := unix.Unlinkat(above, l.name, unix.AT_REMOVEDIR); err != nil {
				return pathError("rmdir", l.path, err)
			}
			_ = unix.Close(l.fd)
			stack = stack[:len(stack)-1]
			continue
		}
		x := l.names[0]
		l.names = l.names[1:]
		p := joinPath(l.path, x.name)
		if x.typ == unix.DT_UNKNOWN {
			x.typ = typeOf(l.fd, x.name)
		}
		if x.typ == unix.DT_DIR {
			if err := enter(l.fd, x.name, p); err != nil {
				return err
			}
			continue
		}
		if err := step(ctx); err != nil {
			return err
		}
		if err := unix.Unlinkat(l.fd, x.name, 0); err != nil {
			return pathError("unlink", p, err)
		}
	}
	return nil
}

// openDirIn opens a directory by one name, not through a symlink and not on
// another mount.
func openDirIn(dir int, name string) (fd int, err error) {
	how := unix.OpenHow{
		Flags:   unix.O_RDONLY | unix.O_DIRECTORY | unix.O_NOFOLLOW | unix.O_CLOEXEC,
		Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_MAGICLINKS | unix.RESOLVE_NO_XDEV,
	}
	err = retry(func() (err error) { fd, err = unix.Openat2(dir, name, &how); return })
	return fd, err
}

// expect fails when name is not of the type that the plan was made with.
func expect(dir int, name, path string, t Type) error {
	var st unix.Stat_t
	if err := unix.Fstatat(dir, name, &st, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return pathError("stat", path, err)
	}
	if st.Mode&unix.S_IFMT == unix.S_IFDIR && t == TypeDir ||
		st.Mode&unix.S_IFMT != unix.S_IFDIR && typeOfStat(&st) == t {
		return nil
	}
	return unexpected(path, &st, t)
}

func unexpected(path string, st *unix.Stat_t, t Type) error {
	is := TypeDir
	if st.Mode&unix.S_IFMT != unix.S_IFDIR {
		is = typeOfStat(st)
	}
	return fmt.Errorf("%q is a %s, the plan was made with a %s: %w", clip(path), is, t, fault.ErrState)
}

// found adds ErrState to what can only mean that the directory is not what the
// plan was made with.
func found(err error) error {
	for _, e := range []error{
		unix.ENOENT, unix.ENOTDIR, unix.EISDIR, unix.ELOOP, unix.EEXIST, unix.ENOTEMPTY, unix.EXDEV, unix.EBUSY,
	} {
		if errors.Is(err, e) && !errors.Is(err, fault.ErrState) {
			return fmt.Errorf("%w: %w", fault.ErrState, err)
		}
	}
	return err
}
