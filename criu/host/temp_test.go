package host

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func TestSweepTemp(t *testing.T) {
	dir := t.TempDir()
	left, full, other := filepath.Join(dir, ".criu.mntns.abc123"), filepath.Join(dir, ".criu.mntns.file"), filepath.Join(dir, "other")
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
	sleep, err := exec.LookPath("sleep")
	if err != nil {
		t.Fatal(err)
	}
	running := filepath.Join(dir, "criu")
	if err := os.Symlink(sleep, running); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(running, "60")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	err = sweepTemp(dir)
	if _, e := os.Stat(left); err != nil || e != nil {
		t.Errorf("swept while a CRIU runs: %v, %v", err, e)
	}
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait()
	// Others on this machine may run CRIU, too, and tests stop one for minutes.
	for end := time.Now().Add(10 * time.Minute); ; time.Sleep(5 * time.Millisecond) {
		err := sweepTemp(dir)
		if _, e := os.Stat(left); os.IsNotExist(e) {
			if !errors.Is(err, unix.EBUSY) || !strings.Contains(err.Error(), foreign) || strings.Contains(err.Error(), mounted) {
				t.Errorf("of a mount that is not CRIU's: %v", err)
			}
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		if time.Now().After(end) {
			t.Fatal("it is left")
		}
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

func TestNamedCRIU(t *testing.T) {
	for comm, want := range map[string]bool{"criu": true, "criu-4.2": true, "criu-ns": true, "criu.test": false, "criuhelper": false, "sh": false, "": false} {
		if got := namedCRIU(comm); got != want {
			t.Errorf("namedCRIU(%q) = %t", comm, got)
		}
	}
}
