package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	goruntime "runtime"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/criu/host"
)

// The main thread is what /proc/self shows. It stays where it is: no other goroutine
// than main's runs in it, so none that goes to a container's namespaces.
func init() { goruntime.LockOSThread() }

// readOnly makes the root filesystem of a restored container read-only if its
// bundle says so. CRIU puts what it mounts itself back as it was, but before 4.2 leaves
// the root as the runtime has bound it for CRIU, which is for writing.
func readOnly(c call) error {
	data, err := os.ReadFile(filepath.Join(c.bundle(), "config.json"))
	if err != nil {
		return err
	}
	var spec struct {
		Root struct{ Readonly bool }
	}
	if err := json.Unmarshal(data, &spec); err != nil {
		return fmt.Errorf("bundle: %w", err)
	}
	if !spec.Root.Readonly {
		return nil
	}
	pid, err := c.pid()
	if err != nil {
		return err
	}
	err = sealRoot(pid)
	if errors.Is(err, fs.ErrNotExist) {
		return nil // its first process has ended already
	}
	return err
}

// sealRoot makes the root of a process's mount namespace read-only, if it is not.
func sealRoot(pid int) error {
	err := host.InMountsOf(pid, func() error {
		var st unix.Statfs_t
		if err := unix.Statfs("/", &st); err != nil || st.Flags&unix.ST_RDONLY != 0 {
			return err
		}
		// A remount drops flags that are not given, except those for access times.
		keep := uintptr(st.Flags) & (unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC)
		return unix.Mount("", "/", "", unix.MS_REMOUNT|unix.MS_BIND|unix.MS_RDONLY|keep, "")
	})
	if err != nil {
		return fmt.Errorf("make the root filesystem read-only again: %w", err)
	}
	return nil
}
