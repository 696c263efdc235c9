package kernel

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// The cgroup mounts that CRIU makes for a restore are none of the host's hierarchies: a monitor
// that was moved there in its last instant left files in its place.
func TestHierarchiesOfARestore(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Fatal("this test mounts cgroup filesystems: run it as root")
	}
	before, err := hierarchies()
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	for _, name := range []string{".criu.cgyard.abc/unified", "again"} {
		at := filepath.Join(dir, name)
		if err := os.MkdirAll(at, 0o700); err != nil {
			t.Fatal(err)
		}
		if err := unix.Mount("none", at, "cgroup2", 0, ""); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = unix.Unmount(at, unix.MNT_DETACH) })
	}
	after, err := hierarchies()
	if err != nil {
		t.Fatal(err)
	}
	if len(after) == 0 || len(before) != len(after) {
		t.Fatalf("%d hierarchies, then %d", len(before), len(after))
	}
	for _, m := range after {
		if strings.HasPrefix(m.Path, dir) {
			t.Errorf("it lists %s", m.Path)
		}
	}
}

// A cgroup with a process that waits for a filesystem that does not answer cannot be frozen
// as a whole; its other processes are frozen, and the process that froze them may have been
// killed.
func TestHalfFrozen(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Fatal("this test mounts a filesystem: run it as root")
	}
	groups, err := Hierarchies()
	must(t, err)
	fuse, err := os.OpenFile("/dev/fuse", os.O_RDWR, 0)
	must(t, err)
	defer fuse.Close()
	dir := t.TempDir()
	must(t, unix.Mount("none", dir, "fuse", 0, fmt.Sprintf("fd=%d,rootmode=40000,user_id=0,group_id=0", fuse.Fd())))
	defer func() { _ = unix.Unmount(dir, unix.MNT_FORCE|unix.MNT_DETACH) }()

	path := fmt.Sprintf("/abkernel-%d", os.Getpid())
	is := func() bool {
		frozen, err := groups.Frozen(path)
		must(t, err)
		return frozen
	}
	for _, m := range groups {
		if !m.Freezer {
			continue
		}
		at := filepath.Join(m.Path, path)
		must(t, os.Mkdir(at, 0o755))
		defer func() { must(t, groups.Empty(t.Context(), path), groups.Remove(t.Context(), path)) }()
		// The second waits for the directory's lock, which nothing interrupts.
		cmd := exec.Command("sh", "-c", "echo $$ > "+at+"/cgroup.procs; cat "+dir+"/a & touch "+dir+"/b & wait")
		must(t, cmd.Start())
		defer func() { _ = cmd.Wait() }()
		defer func() { must(t, unix.Unmount(dir, unix.MNT_FORCE|unix.MNT_DETACH)) }() // ends the waiting
		for end := time.Now().Add(20 * time.Second); !waiting(at); time.Sleep(time.Millisecond) {
			if time.Now().After(end) {
				t.Fatal("they do not get to wait")
			}
		}
		if is() {
			t.Error("it is frozen before it was told to")
		}
		file, value := "freezer.state", "FROZEN"
		if m.V2 {
			file, value = "cgroup.freeze", "1"
		}
		must(t, os.WriteFile(filepath.Join(at, file), []byte(value), 0))
		if !is() {
			t.Error("nobody would thaw it")
		}
		must(t, groups.Thaw(path))
		if is() {
			t.Error("it is frozen after it was thawed")
		}
	}
}

func TestChain(t *testing.T) {
	v1 := Cgroups{{Path: "/1", Freezer: true}, {Path: "/2", V2: true}}
	v2 := Cgroups{{Path: "/2", V2: true, Freezer: true}}
	for _, c := range []struct {
		groups    Cgroups
		told, top string
		want      []string
	}{
		{v2, "0::/m/s\n", "/m/s", []string{"/m/s"}},
		{v2, "0::/m/s/container\n", "/m/s", []string{"/m/s/container", "/m/s"}},
		{v2, "0::/m/s/container/init.scope\n", "/m/s", []string{"/m/s/container/init.scope", "/m/s/container", "/m/s"}},
		{v2, "0::/m/other\n", "/m/s", []string{"/m/s"}},
		{v2, "0::/m/sibling\n", "/m/s", []string{"/m/s"}},
		{v2, "", "/m/s", []string{"/m/s"}},
		{v1, "5:cpu,cpuacct:/m/s/cpu\n4:freezer:/m/s/in\n0::/m/s/v2\n", "/m/s", []string{"/m/s/in", "/m/s"}},
	} {
		if got := c.groups.chain(c.told, c.top); !slices.Equal(got, c.want) {
			t.Errorf("in %q below %s: %q, want %q", c.told, c.top, got, c.want)
		}
	}
}

// waiting reports whether two processes of a cgroup wait for what is not a signal.
func waiting(cgroup string) bool {
	n := 0
	pids, _ := members(cgroup)
	for _, pid := range pids {
		stat, _ := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
		if s := string(stat); strings.Contains(s, "(cat) D") || strings.Contains(s, "(touch) D") {
			n++
		}
	}
	return n == 2
}

func must(t *testing.T, errs ...error) {
	t.Helper()
	for _, err := range errs {
		if err != nil {
			t.Fatal(err)
		}
	}
}

func TestUnified(t *testing.T) {
	for _, c := range []struct {
		list Cgroups
		want bool
	}{
		{Cgroups{{Path: "/sys/fs/cgroup", V2: true}}, true},
		{Cgroups{{Path: "/sys/fs/cgroup", V2: true}, {Path: "/sys/fs/cgroup/net_cls"}}, true},
		{Cgroups{{Path: "/sys/fs/cgroup/memory"}, {Path: "/sys/fs/cgroup/unified", V2: true}}, false},
		{Cgroups{{Path: "/sys/fs/cgroup/memory"}}, false},
	} {
		if got := c.list.Unified(); got != c.want {
			t.Errorf("%+v: %v", c.list, got)
		}
	}
}
