// Package cptar carries files into and out of a sandbox's root, and to and from
// the host, as tar streams with the habits of `docker cp`.
//
// A stream is made by From (in the sandbox) or TarPath (on the host) and taken
// by To (in the sandbox) or Untar (on the host). Neither end trusts the other:
// the sandbox's paths are resolved by a policy.Jail, so they stay in its root
// whatever runs there meanwhile, and archives are unpacked by package tree, so
// that no entry lands outside of the directory that was named.
//
// What cannot be carried (sockets, and to the host devices and attributes of
// privilege) is named in the Report or in a Partial error, never dropped in
// silence.
package cptar

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/cptar/tree"
	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/internal/idmap"
	"github.com/agentbox/agentbox/policy"
)

// Report tells what was copied, and what was not.
type Report = tree.Report

// Partial is the error of a copy that went through but for the entries that its
// report names as skipped: all else is where it should be.
type Partial struct{ Report Report }

func (e *Partial) Error() string {
	const most = 3
	n := int64(len(e.Report.Skipped)) + e.Report.SkippedMore
	s := strings.Join(e.Report.Skipped[:min(most, len(e.Report.Skipped))], "; ")
	if n > most {
		s += fmt.Sprintf("; and %d more", n-most)
	}
	return "not copied: " + s
}

func (e *Partial) Unwrap() error { return fault.ErrUnsupported }

// partial is the error of a finished copy.
func partial(r Report, err error) error {
	if err == nil && len(r.Skipped) > 0 {
		return &Partial{r}
	}
	return err
}

// Stat describes one path in a sandbox.
type Stat struct {
	Name string
	Mode uint32 // as io/fs.FileMode
	Size int64
	Link string // of a symlink: where it leads to, absolute inside the sandbox, existing or not
	Dir  bool
}

// StatPath describes p in the root directory root, a final symlink not followed
// unless p ends with a slash.
func StatPath(root, p string) (Stat, error) {
	j, err := policy.Open(root)
	if err != nil {
		return Stat{}, err
	}
	defer j.Close()
	fi, err := j.Lstat(p)
	if err != nil {
		return Stat{}, err
	}
	st := Stat{Name: path.Base(p), Mode: uint32(fi.Mode()), Size: fi.Size(), Dir: fi.IsDir()}
	if fi.Mode()&fs.ModeSymlink != 0 {
		if st.Link, _, err = j.Real(p); err != nil {
			return Stat{}, err
		}
	}
	return st, nil
}

// Xattr reports whether an attribute goes in and out of a sandbox: those do that its own
// processes could see and set. Overlay's are the mount's business.
func Xattr(name string) bool {
	switch name {
	case "security.capability", "system.posix_acl_access", "system.posix_acl_default":
		return true
	}
	return strings.HasPrefix(name, "user.")
}

// From writes p, a final symlink not followed unless p ends with a slash, and
// all below it as a tar stream. Entry names start with the base name of p, or
// with "." when p is the root or ends with "/.". As with `docker cp`, what the
// kernel makes up is not part of a copy that starts above it: of /dev, /proc,
// /sys and the like there is only the directory. Other mounts, volumes and
// tmpfs, are. Where only sockets, or unreadable files of /proc that was asked
// for, are missing from a stream that is otherwise whole, the error is *Partial.
func From(ctx context.Context, root string, ids *idmap.Map, p string, w io.Writer) error {
	j, err := policy.Open(root)
	if err != nil {
		return err
	}
	defer j.Close()
	dir, base, err := j.Parent(p)
	if err != nil {
		return err
	}
	defer dir.Close()
	name := base
	if base != "." && strings.HasSuffix(p, "/") {
		// "link/" means what the link leads to, under the link's name.
		d, err := j.Handle(p, true)
		if err != nil {
			return err
		}
		defer d.Close()
		dir, base = d, "."
	}
	whole := path.Clean("/"+p) == "/"
	leave := func(rel string, magic int64) bool {
		return tree.Pseudo(magic) || whole && rel == "dev"
	}
	rep, err := tree.Pack(ctx, dir, base, w, tree.PackOptions{Name: name, Xattr: Xattr, Leave: leave, IDs: ids})
	return partial(rep, found(err))
}

// To unpacks the tar stream r into p, which must be a directory; symlinks on
// the way to it are followed inside of root, those in the archive's names never.
// Owners and modes are the archive's. A directory and a non-directory do not
// replace each other (ErrExists); a file, a link or a device is replaced.
// Where only attributes that belong to the host could not be set, the error is
// *Partial.
func To(ctx context.Context, root string, ids *idmap.Map, p string, r io.Reader) error {
	return ids.AsRoot(func() error { return to(ctx, root, ids, p, r) })
}

func to(ctx context.Context, root string, ids *idmap.Map, p string, r io.Reader) error {
	j, err := policy.Open(root)
	if err != nil {
		return err
	}
	defer j.Close()
	dir, err := j.OpenFile(p, os.O_RDONLY|unix.O_DIRECTORY, 0)
	if err != nil {
		return err
	}
	defer dir.Close()
	return partial(tree.Extract(ctx, dir, r, tree.ExtractOptions{
		Owners: true, Privileged: true, Dirs: true, IDs: ids,
		Xattr: func(name string) (bool, error) { return Xattr(name), nil },
	}))
}

// Dress gives the directory at a path of the host the owner, mode, time and attributes of another one. A final
// symlink is not followed.
func Dress(like, path string) error {
	from, err := openDir(like)
	if err != nil {
		return err
	}
	defer from.Close()
	dir, err := openDir(path)
	if err != nil {
		return err
	}
	defer dir.Close()
	return tree.Dress(from, dir, Xattr)
}

func openDir(path string) (*os.File, error) {
	return os.OpenFile(path, os.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
}

// TarPath writes the host's hostPath, a final symlink not followed unless it
// ends with a slash, and all below it as a tar stream. rename is the top
// entry's name in it; empty means the base name, "." gives "./", "./a", ...
func TarPath(ctx context.Context, hostPath, rename string, w io.Writer) (Report, error) {
	hostPath, err := absolute(hostPath)
	if err != nil {
		return Report{}, err
	}
	parent, base := filepath.Split(hostPath)
	if base == "" || base == "." || base == ".." {
		parent, base = hostPath, "."
	}
	dir, err := os.OpenFile(parent, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return Report{}, found(err)
	}
	defer dir.Close()
	if rename == "" {
		rename = filepath.Base(hostPath)
		if rename == ".." || rename == "/" {
			rename = "."
		}
	}
	rep, err := tree.Pack(ctx, dir, base, w, tree.PackOptions{Name: rename, Xattr: Xattr})
	return rep, found(err)
}

// absolute is filepath.Abs, but leaves the name's own spelling, since "link/"
// and "a/link/.." mean something else once cleaned.
func absolute(p string) (string, error) {
	if p == "" {
		return "", fmt.Errorf("%w: an empty path", fault.ErrInvalid)
	}
	if filepath.IsAbs(p) {
		return p, nil
	}
	wd, err := os.Getwd()
	if err != nil {
		return "", err
	}
	return wd + "/" + p, nil
}

// UntarOptions modify Untar.
type UntarOptions struct {
	Rename string // replaces the top component of every name; ".": drops it
	// Archive keeps owners, setuid bits, attributes and devices, for a sandbox
	// that is trusted with them.
	Archive bool
}

// Untar unpacks the tar stream r, which a sandbox made and may be hostile, into
// the host's existing directory hostDir. Nothing is written outside of it, nor
// through a symlink below it, and directories that were there keep their mode.
// Files belong to the caller and carry no privilege unless Archive says so. A file
// appears when all of it is there, and takes the place of one that was there before.
func Untar(ctx context.Context, hostDir string, r io.Reader, opts UntarOptions) (Report, error) {
	dir, err := os.OpenFile(hostDir, os.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return Report{}, found(err)
	}
	defer dir.Close()
	x := tree.ExtractOptions{Rename: opts.Rename, Whole: true}
	if opts.Archive {
		x.Owners, x.Privileged = true, true
		x.Xattr = func(name string) (bool, error) { return Xattr(name), nil }
	} else {
		x.Xattr = func(name string) (bool, error) { return strings.HasPrefix(name, "user."), nil }
	}
	return tree.Extract(ctx, dir, r, x)
}

func found(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("%w: %w", fault.ErrNotFound, err)
	}
	return err
}

// Target is what a copy's destination is, for Place.
type Target struct{ Exists, Dir bool }

// Place decides where a copy lands, with the rules of `docker cp`: dst names
// the destination as the user wrote it, to says what is there (a symlink's
// target, when it is one), srcDir whether the source is a directory, and
// contents whether it was written with a final "/.". The stream is unpacked in
// dir, with rename for its top component: the rename of TarPath or of
// UntarOptions. Empty is the source's own name, "." puts a directory's content
// straight into dir.
func Place(dst string, to Target, srcDir, contents bool) (dir, rename string, err error) {
	slash := strings.HasSuffix(dst, "/") || strings.HasSuffix(dst, "/.")
	switch {
	case to.Exists && to.Dir && srcDir && contents:
		return dst, ".", nil
	case to.Exists && to.Dir:
		return dst, "", nil
	case to.Exists && srcDir:
		return "", "", fmt.Errorf("%w: a directory cannot be copied over the file %s", fault.ErrInvalid, dst)
	case to.Exists && slash:
		return "", "", fmt.Errorf("%w: %s is not a directory", fault.ErrInvalid, dst)
	case !to.Exists && !srcDir && slash:
		return "", "", fmt.Errorf("%w: the directory %s does not exist", fault.ErrNotFound, dst)
	}
	trimmed := strings.TrimRight(strings.TrimSuffix(dst, "/."), "/")
	dir, rename = trimmed[:strings.LastIndexByte(trimmed, '/')+1], path.Base(trimmed)
	if rename == "." || rename == ".." {
		return "", "", fmt.Errorf("%w: %q is not a name for a copy", fault.ErrInvalid, dst)
	}
	if dir == "" {
		dir = "."
	}
	return dir, rename, nil
}
