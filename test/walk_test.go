package test

import (
	"crypto/sha256"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// tree describes every entry under dir, the directory itself included, in one
// line each. It shares no code with what it checks.
func (b *box) tree(dir string) map[string]string {
	b.Helper()
	all := map[string]string{}
	groups := map[[2]uint64][]string{} // device and inode -> names
	var walk func(rel string)
	walk = func(rel string) {
		path := filepath.Join(dir, rel)
		var st unix.Stat_t
		if err := unix.Lstat(path, &st); err != nil {
			b.Fatal(err)
		}
		line := fmt.Sprintf("mode %o owner %d:%d mtime %d.%09d", st.Mode, st.Uid, st.Gid, st.Mtim.Sec, st.Mtim.Nsec)
		switch st.Mode & unix.S_IFMT {
		case unix.S_IFREG:
			line += fmt.Sprintf(" size %d data %s", st.Size, content(b, path, st.Size))
		case unix.S_IFLNK:
			target, err := os.Readlink(path)
			if err != nil {
				b.Fatal(err)
			}
			line += fmt.Sprintf(" link %q", target)
		case unix.S_IFCHR, unix.S_IFBLK:
			line += fmt.Sprintf(" device %d:%d", unix.Major(st.Rdev), unix.Minor(st.Rdev))
		}
		if st.Mode&unix.S_IFMT != unix.S_IFDIR {
			key := [2]uint64{st.Dev, st.Ino}
			groups[key] = append(groups[key], rel)
		}
		for _, name := range xattrNames(b, path) {
			value := make([]byte, 64<<10)
			n, err := unix.Lgetxattr(path, name, value)
			if err != nil {
				b.Fatalf("%s: %s: %v", path, name, err)
			}
			line += fmt.Sprintf(" %s=%q", name, value[:n])
		}
		all[rel] = line
		if st.Mode&unix.S_IFMT == unix.S_IFDIR {
			entries, err := os.ReadDir(path)
			if err != nil {
				b.Fatal(err)
			}
			for _, e := range entries {
				walk(rel + "/" + e.Name())
			}
		}
	}
	walk("")
	// Not st_nlink: the kernel keeps one whiteout for all, with a name of its
	// own outside the upperdir.
	for _, names := range groups {
		if len(names) == 1 {
			continue
		}
		for _, name := range names {
			all[name] += fmt.Sprintf(" links %q", names)
		}
	}
	return all
}

// content lists where a file has data, as the filesystem tells, with a digest
// of all of it.
func content(b *box, path string, size int64) string {
	f, err := os.Open(path)
	if err != nil {
		b.Fatal(err)
	}
	defer f.Close()
	h := sha256.New()
	var list []string
	for at := int64(0); at < size; {
		data, err := unix.Seek(int(f.Fd()), at, unix.SEEK_DATA)
		if err != nil {
			break // no data up to the end
		}
		hole, err := unix.Seek(int(f.Fd()), data, unix.SEEK_HOLE)
		if err != nil {
			b.Fatal(err)
		}
		if _, err := io.Copy(h, io.NewSectionReader(f, data, hole-data)); err != nil {
			b.Fatal(err)
		}
		list = append(list, fmt.Sprintf("%d-%d", data, hole))
		at = hole
	}
	return fmt.Sprintf("%s digest %x", strings.Join(list, ","), h.Sum(nil)[:8])
}

func xattrNames(b *box, path string) []string {
	list := make([]byte, 64<<10)
	n, err := unix.Llistxattr(path, list)
	if err != nil {
		b.Fatalf("%s: list attributes: %v", path, err)
	}
	var names []string
	for _, name := range strings.Split(strings.TrimRight(string(list[:n]), "\x00"), "\x00") {
		if name != "" {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names
}

// sameTree fails with the first few differences.
func (b *box) sameTree(what string, got, want map[string]string) {
	b.Helper()
	var diffs []string
	for path, line := range want {
		if g, ok := got[path]; !ok {
			diffs = append(diffs, fmt.Sprintf("%q is gone", path))
		} else if g != line {
			diffs = append(diffs, fmt.Sprintf("%q is\n      %s\n and was\n      %s", path, g, line))
		}
	}
	for path := range got {
		if _, ok := want[path]; !ok {
			diffs = append(diffs, fmt.Sprintf("%q is new", path))
		}
	}
	slices.Sort(diffs)
	for i, d := range diffs {
		if i == 10 {
			b.Errorf("%s: and %d more", what, len(diffs)-i)
			break
		}
		b.Errorf("%s: %s", what, d)
	}
}
