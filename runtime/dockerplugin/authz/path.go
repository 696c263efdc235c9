package authz

import (
	"errors"
	"fmt"
	"os"
	"path"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

const (
	maxPath = 4096 // PATH_MAX
	// maxLinks is the kernel's own bound on symlinks in one resolution.
	maxLinks = 40
	// maxSteps and maxPaths bound the work that one call can ask for: every
	// caller waits for the plugin.
	maxSteps = 256
	maxPaths = 1000
)

// A way is what the resolution of a path went through.
type way struct {
	real string // without symlinks; what does not exist is taken as written
	dirs []step // every existing directory in which a component was looked up
}

type step struct {
	dir   string // its own real path
	mode  uint32
	uid   uint32
	child string
	// childUID is the owner of the component, or -1 if there is none.
	childUID int64
}

// resolve follows p as the kernel would for root in dockerd's place. Links of
// /proc are an error: they lead wherever their process stands, and "self" is
// another one for dockerd than for the judge.
func resolve(p string) (way, error) {
	var w way
	if len(p) > maxPath || strings.ContainsRune(p, 0) {
		return w, fmt.Errorf("not a path that the kernel takes")
	}
	if !strings.HasPrefix(p, "/") {
		return w, fmt.Errorf("not an absolute path")
	}
	var done []string
	todo := strings.Split(p, "/")
	links, missing := 0, 0 // missing: how many of done do not exist
	for len(todo) > 0 {
		c := todo[0]
		todo = todo[1:]
		switch c {
		case "", ".":
			continue
		case "..":
			if len(done) > 0 {
				done = done[:len(done)-1]
				missing = max(missing-1, 0)
			}
			continue
		}
		dir := "/" + strings.Join(done, "/")
		done = append(done[:len(done):len(done)], c)
		if missing > 0 {
			missing++
			continue
		}
		link, err := w.look(dir, c)
		switch {
		case errors.Is(err, unix.ENOENT):
			missing++
			continue
		case err != nil:
			return w, err
		case link == "":
			continue
		}
		if links++; links > maxLinks {
			return w, unix.ELOOP
		}
		done = done[:len(done)-1]
		if path.IsAbs(link) {
			done = nil
		}
		todo = append(strings.Split(link, "/"), todo...)
		if len(todo) > maxPath {
			return w, unix.ENAMETOOLONG
		}
	}
	w.real = "/" + strings.Join(done, "/")
	return w, nil
}

// look notes dir as passed through and returns where its entry c links to, ""
// if that is no symlink.
func (w *way) look(dir, c string) (link string, err error) {
	var st unix.Stat_t
	if err := unix.Lstat(dir, &st); err != nil {
		return "", err
	}
	if st.Mode&unix.S_IFMT != unix.S_IFDIR {
		return "", unix.ENOTDIR
	}
	if len(w.dirs) == maxSteps {
		return "", fmt.Errorf("its way is longer than %d directories", maxSteps)
	}
	s := step{dir: dir, mode: uint32(st.Mode), uid: st.Uid, child: c, childUID: -1}
	at := path.Join(dir, c)
	err = unix.Lstat(at, &st)
	if err == nil {
		s.childUID = int64(st.Uid)
	}
	w.dirs = append(w.dirs, s)
	if err != nil || st.Mode&unix.S_IFMT != unix.S_IFLNK {
		return "", err
	}
	var fs unix.Statfs_t
	if err := unix.Statfs(dir, &fs); err != nil {
		return "", err
	}
	if fs.Type == unix.PROC_SUPER_MAGIC {
		return "", fmt.Errorf("it goes through %s, a link of /proc, which leads elsewhere for every process", at)
	}
	return os.Readlink(at)
}

// exchangeable describes how the path could be led elsewhere later, or returns "".
// writable reports which directories containers can be given read-write.
func (w *way) exchangeable(writable func(dir string) bool) string {
	for _, s := range w.dirs {
		switch trusted := s.uid == 0 || int(s.uid) == os.Geteuid(); {
		case writable(s.dir):
			return fmt.Sprintf("containers can be given %s read-write and could put a link in place of %q", s.dir,
				s.child)
		case !trusted:
			return "uid " + strconv.Itoa(int(s.uid)) + " owns " + s.dir +
				" and could put a link in place of " + strconv.Quote(s.child)
		case s.mode&0o022 == 0:
		case s.mode&unix.S_ISVTX != 0 && (s.childUID == 0 || s.childUID == int64(os.Geteuid())):
		default:
			return fmt.Sprintf("others than root can write to %s and could put a link in place of %q", s.dir, s.child)
		}
	}
	return ""
}

// settle resolves symlinks (/var/run) in each pattern before its first wildcard. But a
// pattern must not mean more tomorrow because of a new symlink in its way, so one that goes
// through directories that others can change stays as it is written, and then matches
// nothing behind a symlink. wide is every form that a pattern might have: what containers
// may be able to write to.
func settle(patterns, writable []string, anyway bool) (settled, wide []string) {
	ways := make([]way, len(patterns))
	for i, pattern := range patterns {
		wide = append(wide, pattern)
		fixed, rest := literal(pattern)
		w, err := resolve(fixed)
		if err != nil {
			w = way{real: path.Clean(fixed)}
		}
		ways[i] = w
		if real := path.Join(w.real, rest); real != path.Clean(pattern) {
			wide = append(wide, real)
		}
	}
	for i, pattern := range patterns {
		_, rest := literal(pattern)
		changeable := ways[i].exchangeable(func(dir string) bool {
			return anyCovers(wide, dir) || anyCovers(writable, dir)
		}) != ""
		if anyway || !changeable {
			pattern = path.Join(ways[i].real, rest)
		}
		settled = append(settled, pattern)
	}
	return settled, wide
}

// literal splits a pattern before its first component with a wildcard.
func literal(pattern string) (fixed, rest string) {
	parts := split(pattern)
	n := 0
	for n < len(parts) && !strings.ContainsAny(parts[n], `*?[\`) {
		n++
	}
	return "/" + strings.Join(parts[:n], "/"), strings.Join(parts[n:], "/")
}

// covers says whether a pattern stands for the real path p.
func covers(pattern, p string) bool {
	parts, names := split(pattern), split(p)
	for i, part := range parts {
		if part == "**" && i == len(parts)-1 {
			return true
		}
		if i >= len(names) {
			return false
		}
		if ok, err := path.Match(part, names[i]); err != nil || !ok {
			return false
		}
	}
	return len(parts) == len(names)
}

func anyCovers(patterns []string, p string) bool {
	for _, pattern := range patterns {
		if covers(pattern, p) {
			return true
		}
	}
	return false
}

// split returns the components of a path, none for "/".
func split(p string) []string {
	var parts []string
	for c := range strings.SplitSeq(p, "/") {
		if c != "" {
			parts = append(parts, c)
		}
	}
	return parts
}
