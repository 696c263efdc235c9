package overlay

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/idmap"
)

// Under systemd every mount is shared: what is mounted on a clone of one appears
// on the one it was cloned from, unless it is kept from that.
func TestMountMappedShared(t *testing.T) {
	m := layers(t, "mapped", 2)
	m.IDs = &idmap.Map{Base: 700_000, Size: 65536}
	dir := filepath.Dir(m.Target)
	must(t, unix.Mount(dir, dir, "", unix.MS_BIND, ""))
	t.Cleanup(func() { must(t, Unmount(dir, UnmountOptions{Lazy: true})) })
	// dir gets peers of its own even where / is shared: otherwise mounts made here would appear
	// there.
	must(t, unix.Mount("", dir, "", unix.MS_PRIVATE, ""))
	must(t, unix.Mount("", dir, "", unix.MS_SHARED, ""))
	must(t, os.Chmod(dir, 0o755))
	mounted(t, m, m.Mount)
	for _, d := range append(m.Lower, m.Upper, m.Work) {
		if on, err := Mounted(d); on || err != nil {
			t.Errorf("something is mounted on %s (%v)", filepath.Base(d), err)
		}
	}
	if _, err := os.Stat(filepath.Join(m.Target, "top")); err != nil {
		t.Error(err)
	}
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	must(t, err)
	var here []string
	for line := range strings.Lines(string(mounts)) {
		if strings.HasPrefix(strings.Fields(line)[4], dir) {
			here = append(here, line)
		}
	}
	if len(here) != 2 {
		t.Errorf("%d mounts, want the directory and the overlay:\n%s", len(here), here)
	}
}

// In a mounted tree with mapped ids files belong to unused ids of the host; on disk they belong
// to those of the tree.
func TestMountMapped(t *testing.T) {
	ids := idmap.Map{Base: 700_000, Size: 65536}
	m := layers(t, "mapped", 2)
	m.IDs = &ids
	theirs, gone := filepath.Join(m.Lower[1], "theirs"), filepath.Join(m.Lower[1], "gone")
	for _, name := range []string{theirs, gone} {
		must(t, os.WriteFile(name, []byte("x"), 0o640))
		must(t, os.Chown(name, 1000, 1001))
	}
	for dir := m.Target; dir != os.TempDir() && dir != "/"; dir = filepath.Dir(dir) {
		must(t, os.Chmod(dir, 0o755))
	}
	must(t, os.Chmod(m.Upper, 0o755))
	mounted(t, m, m.Mount)

	owner := func(path string) [2]uint32 {
		t.Helper()
		var st unix.Stat_t
		must(t, unix.Lstat(path, &st))
		return [2]uint32{st.Uid, st.Gid}
	}
	if got := owner(filepath.Join(m.Target, "theirs")); got != [2]uint32{701_000, 701_001} {
		t.Errorf("mounted, it belongs to %d", got)
	}
	sh := func(who int, script string) {
		t.Helper()
		cmd := exec.Command("/bin/sh", "-ec", script)
		cmd.Dir = m.Target
		cmd.SysProcAttr = &syscall.SysProcAttr{
			Cloneflags:  syscall.CLONE_NEWUSER,
			UidMappings: []syscall.SysProcIDMap{{HostID: int(ids.Base), Size: int(ids.Size)}},
			GidMappings: []syscall.SysProcIDMap{{HostID: int(ids.Base), Size: int(ids.Size)}},
			Credential:  &syscall.Credential{Uid: uint32(who), Gid: uint32(who)},
		}
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Errorf("as %d: %s: %v %s", who, script, err, out)
		}
	}
	sh(0, "echo root > made; rm gone; chown 33:33 from0; echo more >> theirs; mkdir dir; chmod 777 dir")
	sh(1000, "echo mine > dir/file; ! echo x >> made; ! rm made")
	for name, want := range map[string][2]uint32{
		"made": {}, "theirs": {1000, 1001}, "from0": {33, 33}, "dir/file": {1000, 1000},
	} {
		if got := owner(filepath.Join(m.Upper, name)); got != want {
			t.Errorf("on disk %s belongs to %d, want %d", name, got, want)
		}
	}
	var st unix.Stat_t
	must(t, unix.Lstat(filepath.Join(m.Upper, "gone"), &st))
	if st.Mode&unix.S_IFMT != unix.S_IFCHR || st.Rdev != 0 {
		t.Errorf("the whiteout of a removed file: mode %o", st.Mode)
	}
	if mounts, err := os.ReadFile("/proc/self/mounts"); err != nil || countMounts(string(mounts), m.Target) != 1 {
		t.Errorf("mounted on the target: %v\n%s", err, mounts)
	}
}

// countMounts counts the mounts on a target.
func countMounts(table, target string) (n int) {
	for line := range strings.Lines(table) {
		if f := strings.Fields(line); len(f) > 1 && f[1] == target {
			n++
		}
	}
	return n
}
