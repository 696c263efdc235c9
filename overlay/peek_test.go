package overlay

import (
	"bytes"
	"crypto/sha256"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"sort"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// peek is the judge: a second, plain reading of a directory that shares no code
// with the package. It describes every entry in one line.
func peek(t tb, root string) map[string]string {
	t.Helper()
	seen := map[string]string{}
	groups := map[uint64][]string{}
	err := filepath.Walk(root, func(path string, info os.FileInfo, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(root, path)
		if err != nil {
			return err
		}
		st := info.Sys().(*syscall.Stat_t)
		s := fmt.Sprintf("mode %o uid %d gid %d mtime %d.%09d", st.Mode, st.Uid, st.Gid, st.Mtim.Sec, st.Mtim.Nsec)
		if !info.IsDir() && st.Nlink > 1 {
			groups[st.Ino] = append(groups[st.Ino], rel)
		}
		switch st.Mode & syscall.S_IFMT {
		case syscall.S_IFREG:
			s += peekFile(t, path, st.Size)
		case syscall.S_IFLNK:
			target, err := os.Readlink(path)
			if err != nil {
				return err
			}
			s += fmt.Sprintf(" -> %q", target)
		case syscall.S_IFCHR, syscall.S_IFBLK:
			s += fmt.Sprintf(" rdev %#x", st.Rdev)
		}
		seen[rel] = s + peekXattrs(t, path)
		return nil
	})
	must(t, err)
	for _, g := range groups {
		if len(g) < 2 {
			continue // its other names are elsewhere: the kernel links whiteouts to one in the work directory
		}
		sort.Strings(g)
		for _, rel := range g {
			seen[rel] += fmt.Sprintf(" group %q", g)
		}
	}
	return seen
}

func peekFile(t tb, path string, size int64) string {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NOATIME, 0)
	must(t, err)
	defer f.Close()
	holes := ""
	for off := int64(0); off < size; {
		data, err := f.Seek(off, unix.SEEK_DATA)
		if err != nil {
			break // ENXIO: the rest is a hole
		}
		hole, err := f.Seek(data, unix.SEEK_HOLE)
		must(t, err)
		holes += fmt.Sprintf("%d-%d,", data, hole)
		off = hole
	}
	h := sha256.New()
	if size < 1<<28 {
		_, err = f.Seek(0, io.SeekStart)
		must(t, err)
		_, err = io.Copy(h, f)
		must(t, err)
	}
	return fmt.Sprintf(" size %d data %s sha %x", size, holes, h.Sum(nil)[:8])
}

func peekXattrs(t tb, path string) string {
	list := make([]byte, 1<<16)
	n, err := unix.Llistxattr(path, list)
	must(t, err)
	names := strings.Split(strings.TrimSuffix(string(list[:n]), "\x00"), "\x00")
	if n == 0 {
		return ""
	}
	sort.Strings(names)
	var b bytes.Buffer
	for _, name := range names {
		v := make([]byte, 1<<16)
		n, err := unix.Lgetxattr(path, name, v)
		must(t, err)
		fmt.Fprintf(&b, " %q=%q", name, v[:n])
	}
	return b.String()
}

// samePeek compares two readings and names what differs.
func samePeek(t tb, what string, want, got map[string]string) {
	t.Helper()
	bad := 0
	for p, w := range want {
		if g, ok := got[p]; !ok {
			t.Errorf("%s: %q is missing", what, p)
			bad++
		} else if g != w {
			t.Errorf("%s: %q\n got %s\nwant %s", what, p, g, w)
			bad++
		}
	}
	for p := range got {
		if _, ok := want[p]; !ok {
			t.Errorf("%s: %q should not be there", what, p)
			bad++
		}
	}
	if bad > 0 {
		t.Fatalf("%s: %d entries differ", what, bad)
	}
}
