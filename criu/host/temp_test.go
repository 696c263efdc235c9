package host

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

func TestSweepTemp(t *testing.T) {
	dir := t.TempDir()
	left, full, other := filepath.Join(dir, ".criu.mntns.abc123"), filepath.Join(dir, ".criu.mntns.file"),
		filepath.Join(dir, "other")
	tried := filepath.Join(dir, ".criu.move_mount_set_group.abc123")
	for _, d := range []string{left, tried, other} {
		if err := os.Mkdir(d, 0o777); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(full, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	// A killed CRIU's mount where / is shared, and a mount that is not CRIU's.
	mounted, foreign := filepath.Join(dir, ".criu.mntns.mounted"), filepath.Join(dir, ".criu.mntns.foreign")
	for path, mount := range map[string]func(string) error{
		mounted: func(p string) error { return unix.Mount("none", p, "tmpfs", 0, "") },
		foreign: func(p string) error { return unix.Mount(other, p, "", unix.MS_BIND, "") },
	} {
		if err := os.Mkdir(path, 0o777); err != nil {
			t.Fatal(err)
		}
		if err := mount(path); err != nil {
			t.Fatalf("this test must be run as root: %v", err)
		}
		t.Cleanup(func() { _ = unix.Unmount(path, unix.MNT_DETACH) })
	}
	below := filepath.Join(mounted, "subdir")
	if err := os.Mkdir(below, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount(below, below, "", unix.MS_BIND, ""); err != nil {
		t.Fatal(err)
	}
	runs := true
	running := func() (bool, error) { return runs, nil }
	err := sweepTemp(dir, running)
	if _, e := os.Stat(left); err != nil || e != nil {
		t.Errorf("swept while a CRIU runs: %v, %v", err, e)
	}
	runs = false
	err = sweepTemp(dir, running)
	if !errors.Is(err, unix.EBUSY) || !strings.Contains(err.Error(), foreign) ||
		strings.Contains(err.Error(), mounted) {
		t.Errorf("of a mount that is not CRIU's: %v", err)
	}
	if _, err := os.Stat(left); !os.IsNotExist(err) {
		t.Errorf("a killed CRIU's directory is left: %v", err)
	}
	if _, err := os.Stat(mounted); !os.IsNotExist(err) {
		t.Errorf("a tmpfs of CRIU's is left: %v", err)
	}
	if _, err := os.Stat(tried); !os.IsNotExist(err) {
		t.Errorf("what CRIU tries at its start is left: %v", err)
	}
	for _, kept := range []string{full, other, foreign} {
		if _, err := os.Stat(kept); err != nil {
			t.Error(err)
		}
	}
}

// TestCRIURuns asks for one process alone: other tests may run CRIU at any time.
func TestCRIURuns(t *testing.T) {
	sleep, err := exec.LookPath("sleep")
	if err != nil {
		t.Fatal(err)
	}
	program := filepath.Join(t.TempDir(), "criu")
	if err := os.Symlink(sleep, program); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(program, "60")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	pid := cmd.Process.Pid
	defer func() { _ = cmd.Wait() }()
	defer func() { _ = cmd.Process.Kill() }()
	if !mayUseTemp(pid) {
		t.Error("it runs, and is taken for ended")
	}
	if runs, err := criuRuns(); err != nil || !runs {
		t.Errorf("one runs, and none is found: %v", err)
	}
	if mayUseTemp(os.Getpid()) {
		t.Error("this test is taken for a CRIU")
	}
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	// Until it has ended; it stays a zombie.
	var info unix.Siginfo
	if err := unix.Waitid(unix.P_PID, pid, &info, unix.WEXITED|unix.WNOWAIT, nil); err != nil {
		t.Fatal(err)
	}
	if mayUseTemp(pid) {
		t.Error("a zombie is taken for a CRIU that runs")
	}
}

func TestNamedCRIU(t *testing.T) {
	for comm, want := range map[string]bool{
		"criu": true, "criu-4.2": true, "criu-ns": true, "criu.test": false, "criuhelper": false,
		"sh": false, "": false,
	} {
		if got := namedCRIU(comm); got != want {
			t.Errorf("namedCRIU(%q) = %t", comm, got)
		}
	}
}
