package main

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	goruntime "runtime"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// The root of the process's mount namespace is read-only, and nothing else is.
func TestSealRoot(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Fatal("this test makes mount namespaces and must be run as root")
	}
	cmd := exec.Command("cat")
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWNS}
	if err := cmd.Start(); err != nil { // it ends with its input, so with this test
		t.Fatal(err)
	}
	root := func(pid string) (options string) {
		data, err := os.ReadFile("/proc/" + pid + "/mountinfo")
		if err != nil {
			t.Fatal(err)
		}
		for line := range strings.Lines(string(data)) {
			if f := strings.Fields(line); f[4] == "/" {
				options = f[5]
			}
		}
		return options
	}
	pid, before := cmd.Process.Pid, root("self")
	if !strings.HasPrefix(before, "rw") {
		t.Fatalf("the root of this host is mounted %s", before)
	}
	for range 2 {
		if err := sealRoot(pid); err != nil {
			t.Fatal(err)
		}
		if got, want := root(fmt.Sprint(pid)), "ro"+before[2:]; got != want {
			t.Errorf("its root is %s, want %s", got, want)
		}
	}
	if got := root("self"); got != before {
		t.Errorf("the host's root is %s, was %s", got, before)
	}
	_ = in.Close()
	if err := cmd.Wait(); err != nil {
		t.Fatal(err)
	}
	if err := sealRoot(pid); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("of a process that has ended: %v", err)
	}
}

// A number that a process of the host has by now is no container's.
func TestSealRootSpares(t *testing.T) {
	said := make(chan error)
	go func() {
		goruntime.LockOSThread() // without Unlock: the thread, and with it the namespace, ends with the goroutine
		said <- func() error {
			// A host of its own, should it not be spared.
			if err := errors.Join(unix.Unshare(unix.CLONE_FS), unix.Unshare(unix.CLONE_NEWNS),
				unix.Mount("", "/", "", unix.MS_PRIVATE|unix.MS_REC, "")); err != nil {
				t.Error(err)
			}
			return sealRoot(unix.Gettid())
		}()
	}()
	if err := <-said; !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a process of the host: %v", err)
	}
}
