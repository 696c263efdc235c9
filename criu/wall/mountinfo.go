package wall

import (
	"fmt"
	"io/fs"
	"os"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

func inode(st fs.FileInfo) uint64 {
	if s, ok := st.Sys().(*syscall.Stat_t); ok {
		return s.Ino
	}
	return 0
}

// readMounts reads the mounts of a process's namespace.
func readMounts(path string) (list []mount, err error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	for line := range strings.Lines(string(data)) {
		// ID PARENT MAJOR:MINOR ROOT POINT FLAGS [SHARING...] - TYPE SOURCE OPTIONS
		left, right, ok := strings.Cut(line, " - ")
		l, r := strings.Fields(left), strings.Fields(right)
		if !ok || len(l) < 6 || len(r) < 2 {
			return nil, fmt.Errorf("%s: %q makes no sense", path, line)
		}
		m := mount{root: unescape(l[3]), point: unescape(l[4]), fstype: r[0], source: unescape(r[1]), live: true}
		id, _ := strconv.ParseUint(l[0], 10, 32)
		parent, _ := strconv.ParseUint(l[1], 10, 32)
		m.id, m.parent = uint32(id), uint32(parent)
		major, minor, _ := strings.Cut(l[2], ":")
		a, _ := strconv.ParseUint(major, 10, 32)
		b, _ := strconv.ParseUint(minor, 10, 32)
		m.dev = unix.Mkdev(uint32(a), uint32(b))
		for o := range strings.SplitSeq(l[5], ",") {
			switch o {
			case "ro":
				m.flags |= unix.MS_RDONLY
			case "nosuid":
				m.flags |= unix.MS_NOSUID
			case "nodev":
				m.flags |= unix.MS_NODEV
			case "noexec":
				m.flags |= unix.MS_NOEXEC
			}
		}
		for _, o := range l[6:] {
			kind, n, _ := strings.Cut(o, ":")
			group, _ := strconv.ParseUint(n, 10, 32)
			switch kind {
			case "shared":
				m.group = uint32(group)
			case "master":
				m.master = uint32(group)
			}
		}
		if len(r) > 2 {
			m.options = r[2]
		}
		if m.fstype == "sysfs" && strings.HasPrefix(m.options+",", "ro,") {
			m.flags |= unix.MS_RDONLY
		}
		if strings.HasPrefix(m.fstype, "fuse.") {
			m.fstype = "fuse"
		}
		list = append(list, m)
	}
	return list, nil
}

// unescape undoes how the kernel writes blanks.
func unescape(s string) string {
	if !strings.Contains(s, `\`) {
		return s
	}
	return strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`, `\043`, "#").Replace(s)
}
