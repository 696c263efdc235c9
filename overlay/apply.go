package overlay

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/fault"
)

// ApplyOptions modify Apply; a zero limit takes a generous default.
type ApplyOptions struct {
	// Entry is called for every entry that was created, in order, from the
	// calling goroutine, with what was really written and the digest of it:
	// the caller compares it with the tree it trusts. An error ends Apply and
	// is returned as it is.
	Entry func(Entry) error

	MaxEntries int64 // default 100 million
	MaxData    int64 // bytes of file data in all; default 16 TiB
	Sync       bool  // make all of it durable before returning
}

// Apply extracts an archive of Capture into dir, which must exist and be empty;
// dir itself gets the owner, mode, times and attributes of the archive's ".".
//
// A malformed archive is ErrCorrupt, and so is one that does not end with its
// end marker or goes on after it; r has been read to its end when Apply returns
// nil. Nothing outside of dir is touched, whatever the archive says. What the
// filesystem refuses comes back as its error (ENOSPC, EDQUOT, ...), or as
// ErrUnsupported where it cannot hold an attribute. On any error dir is left
// with part of the tree, for the caller to delete.
func Apply(ctx context.Context, r io.Reader, dir string, opts ApplyOptions) (sum Summary, err error) {
	if opts.MaxEntries <= 0 {
		opts.MaxEntries = 100_000_000
	}
	if opts.MaxData <= 0 {
		opts.MaxData = 16 << 40
	}
	a := &apply{opts: opts, tar: tarReader{r: bufio.NewReaderSize(r, 256<<10)}}
	defer func() {
		if err != nil && a.own == nil {
			err = fmt.Errorf("apply to %s: %w", dir, err)
		}
	}()
	if err := checkPrivilege(); err != nil {
		return sum, err
	}
	root, err := openEmpty(dir)
	if err != nil {
		return sum, err
	}
	a.root = root
	a.writers.start()
	err = a.run(ctx)
	// The writers are waited for on errors too: nothing writes into dir any
	// more once the caller has it back.
	if werr := a.writers.stop(); err == nil {
		err = werr
	}
	for len(a.stack) > 0 { // only after an error
		a.drop()
	}
	if err == nil && opts.Sync {
		if serr := unix.Syncfs(root); serr != nil {
			err = fmt.Errorf("sync: %w", serr)
		}
	}
	_ = unix.Close(root)
	a.sum.Archive = a.tar.n
	return a.sum, err
}

// openEmpty opens dir and makes of it what a fresh private directory is: the
// set-group-id bit and a default ACL would change what is created in it.
func openEmpty(dir string) (fd int, err error) {
	fd, err = unix.Open(dir, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, pathError("open", dir, err)
	}
	defer func() {
		if err != nil {
			_ = unix.Close(fd)
		}
	}()
	names, err := readNames(fd, dir, make([]byte, 64<<10))
	if err != nil {
		return -1, err
	}
	if len(names) > 0 {
		return -1, fmt.Errorf("the directory is not empty, it holds %q: %w", clip(names[0].name), fault.ErrExists)
	}
	set, err := newScratch().readFD(".", fd)
	if err != nil {
		return -1, err
	}
	for name := range set {
		if err := unix.Fremovexattr(fd, name); err != nil && !strings.HasPrefix(name, "security.") {
			return -1, pathError("remove attribute "+name+" of", ".", err)
		}
	}
	if err := unix.Fchown(fd, 0, 0); err != nil {
		return -1, pathError("chown", ".", err)
	}
	if err := unix.Fchmod(fd, 0o700); err != nil {
		return -1, pathError("chmod", ".", err)
	}
	return fd, nil
}

// apply is one extraction. This goroutine reads the archive and creates every name, so that no
// other goroutine changes a directory and each gets its times once its last name exists. Writers
// fill small files meanwhile.
type apply struct {
	opts    ApplyOptions
	tar     tarReader
	root    int
	stack   []openDir // the directories above the current entry
	order   orderCheck
	writers writers
	sum     Summary
	own     error // the caller's own, from opts.Entry
}

// openDir is a directory under construction: 0700 and root's until it is left.
type openDir struct {
	fd    int
	entry Entry
}

func (a *apply) run(ctx context.Context) error {
	for {
		if err := ctx.Err(); err != nil {
			return err
		}
		e, err := a.tar.next()
		if err == io.EOF {
			break
		}
		if err != nil {
			return err
		}
		if err := a.order.next(&e); err != nil {
			return err
		}
		if a.sum.add(&e); a.sum.Entries > a.opts.MaxEntries || a.sum.Data > a.opts.MaxData {
			return fmt.Errorf("%w: more than %d entries or %d bytes of data", fault.ErrCorrupt,
				a.opts.MaxEntries, a.opts.MaxData)
		}
		for len(a.stack) > 0 && !a.above(&e) {
			if err := a.leave(); err != nil {
				return err
			}
		}
		if err := a.create(ctx, e); err != nil {
			return err
		}
	}
	if len(a.order.dirs) == 0 {
		return corrupt("the archive is empty")
	}
	for len(a.stack) > 0 {
		if err := a.leave(); err != nil {
			return err
		}
	}
	return a.writers.drain(a.report)
}

// above reports whether the innermost open directory is the one that holds e.
func (a *apply) above(e *Entry) bool {
	parent, _ := splitPath(e.Path)
	return a.stack[len(a.stack)-1].entry.Path == parent
}

// report hands finished entries to the caller, in order.
func (a *apply) report(e *Entry) error {
	if a.opts.Entry != nil {
		a.own = a.opts.Entry(*e)
	}
	return a.own
}

// leave finishes the innermost directory.
func (a *apply) leave() error {
	d := &a.stack[len(a.stack)-1]
	err := finish(d.fd, &d.entry)
	a.drop()
	return err
}

func (a *apply) drop() {
	d := a.stack[len(a.stack)-1]
	a.stack = a.stack[:len(a.stack)-1]
	if d.fd != a.root {
		_ = unix.Close(d.fd)
	}
}

// create makes one entry in the innermost open directory.
func (a *apply) create(ctx context.Context, e Entry) error {
	if e.Path == "." {
		a.stack = append(a.stack, openDir{a.root, e})
		return a.writers.done(e, a.report)
	}
	dir := a.stack[len(a.stack)-1].fd
	_, name := splitPath(e.Path)
	switch {
	case e.Hardlink != "":
		if err := a.link(dir, name, &e); err != nil {
			return err
		}
	case e.Type == TypeDir:
		fd, err := makeDir(dir, name, e.Path)
		if err != nil {
			return err
		}
		a.stack = append(a.stack, openDir{fd, e})
	case e.Type == TypeFile:
		return a.file(ctx, dir, name, e)
	default:
		if err := makeSpecial(dir, name, &e); err != nil {
			return err
		}
	}
	return a.writers.done(e, a.report)
}

func makeDir(dir int, name, path string) (int, error) {
	if err := unix.Mkdirat(dir, name, 0o700); err != nil {
		return -1, createError("mkdir", path, err)
	}
	fd, err := unix.Openat(dir, name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, pathError("open", path, err)
	}
	return fd, nil
}

// file creates a file and has its content and attributes written, by a writer
// when it is small.
func (a *apply) file(ctx context.Context, dir int, name string, e Entry) error {
	var fd int
	err := retry(func() (err error) {
		fd, err = unix.Openat(dir, name, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o600)
		return err
	})
	if err != nil {
		return createError("create", e.Path, err)
	}
	if size := e.data(); size <= smallFile {
		p, err := a.writers.room(int(size), a.report)
		if err == nil {
			err = a.tar.data(p)
		}
		if err != nil {
			_ = unix.Close(fd)
			return err
		}
		a.writers.add(fd, e, p)
		return nil
	}
	w := newFileWriter(fd, &e)
	err = inBuffers(e.data(), func(p []byte) error {
		if err := ctx.Err(); err != nil {
			return err
		}
		return a.tar.data(p)
	}, w.write)
	if err == nil {
		err = w.end()
	}
	if cerr := unix.Close(fd); err == nil && cerr != nil {
		err = pathError("close", e.Path, cerr)
	}
	if err != nil {
		return err
	}
	return a.writers.done(e, a.report)
}

// link makes a further name for an entry that was created before. The path
// leads through directories of ours only, but it is the archive's, so the kernel
// is told to hold it to the tree.
func (a *apply) link(dir int, name string, e *Entry) error {
	parent, base := splitPath(e.Hardlink)
	from := a.root
	if parent != "." {
		fd, err := openBeneath(a.root, parent)
		if err != nil {
			if isPathProblem(err) {
				return corrupt("%q: hard link to %q: %v", clip(e.Path), clip(e.Hardlink), err)
			}
			return pathError("open", parent, err)
		}
		defer unix.Close(fd)
		from = fd
	}
	var st unix.Stat_t
	err := unix.Fstatat(from, base, &st, unix.AT_SYMLINK_NOFOLLOW)
	if err == nil && st.Mode&unix.S_IFMT == unix.S_IFDIR {
		err = unix.EISDIR
	}
	if err == nil {
		// The flags ask for no following: a symlink gets a second name.
		err = unix.Linkat(from, base, dir, name, 0)
	}
	if isPathProblem(err) {
		return corrupt("%q: hard link to %q: %v", clip(e.Path), clip(e.Hardlink), err)
	}
	if err != nil {
		return createError("link", e.Path, err)
	}
	e.Type = typeOfStat(&st)
	return nil
}

func typeOfStat(st *unix.Stat_t) Type {
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFLNK:
		return TypeSymlink
	case unix.S_IFIFO:
		return TypeFifo
	case unix.S_IFSOCK:
		return TypeSocket
	case unix.S_IFBLK:
		return TypeBlock
	case unix.S_IFCHR:
		if st.Rdev == 0 {
			return TypeWhiteout
		}
		return TypeChar
	}
	return TypeFile
}

func isPathProblem(err error) bool {
	for _, e := range []error{unix.ENOENT, unix.ENOTDIR, unix.ELOOP, unix.EXDEV, unix.EISDIR} {
		if errors.Is(err, e) {
			return true
		}
	}
	return false
}

// openBeneath opens a directory below root without leaving it and without
// following anything, in several steps where one call cannot take the path.
func openBeneath(root int, path string) (int, error) {
	how := unix.OpenHow{
		Flags:   unix.O_PATH | unix.O_DIRECTORY | unix.O_CLOEXEC,
		Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_MAGICLINKS | unix.RESOLVE_NO_XDEV,
	}
	at := root
	for {
		step, rest := path, ""
		if len(step) >= unix.PathMax {
			cut := strings.LastIndexByte(step[:unix.PathMax-1], '/')
			step, rest = path[:cut], path[cut+1:] // names are at most 255 bytes, so there is a cut
		}
		var fd int
		err := retry(func() (err error) { fd, err = unix.Openat2(at, step, &how); return })
		if at != root {
			_ = unix.Close(at)
		}
		if err != nil || rest == "" {
			return fd, err
		}
		at, path = fd, rest
	}
}

// createError tells an archive's fault from the filesystem's.
func createError(op, path string, err error) error {
	switch err {
	case unix.EEXIST, unix.ENAMETOOLONG, unix.EILSEQ:
		return fmt.Errorf("%w: %w", fault.ErrCorrupt, pathError(op, path, err))
	}
	return pathError(op, path, err)
}
