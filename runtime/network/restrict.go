package network

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"unsafe"

	"github.com/landlock-lsm/go-landlock/landlock"
	ll "github.com/landlock-lsm/go-landlock/landlock/syscall"
	"golang.org/x/sys/unix"
	"kernel.org/pub/linux/libs/security/libcap/psx"
)

// confine takes from this process, for good, what it does not need to be proxy
// and resolver: capabilities, new privileges, and, where the kernel has
// Landlock, all files but those of its events, which it may write, and those
// that say how names are looked up. It can start no program.
func (m *Manager) confine() error {
	if err := os.MkdirAll(m.EventsDir(), 0o700); err != nil {
		return err
	}
	const (
		read  = ll.AccessFSReadFile
		write = read | ll.AccessFSWriteFile | ll.AccessFSTruncate | ll.AccessFSMakeReg | ll.AccessFSRemoveFile
	)
	known := landlock.V6.BestEffort()
	if err := known.RestrictPaths(
		landlock.PathAccess(write, m.EventsDir()),
		landlock.PathAccess(read, lookupFiles()...).IgnoreIfMissing(),
	); err != nil {
		return fmt.Errorf("landlock: %w", err)
	}
	if err := known.RestrictScoped(); err != nil { // signals to others, abstract sockets
		return fmt.Errorf("landlock: %w", err)
	}
	if _, _, errno := psx.Syscall6(unix.SYS_PRCTL, unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0, 0); errno != 0 {
		return fmt.Errorf("no new privileges: %w", errno)
	}
	head := &unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	none := &[2]unix.CapUserData{}
	if _, _, errno := psx.Syscall3(unix.SYS_CAPSET, uintptr(unsafe.Pointer(head)),
		uintptr(unsafe.Pointer(none)), 0); errno != 0 {
		return fmt.Errorf("give up capabilities: %w", errno)
	}
	// Last, since to have all threads do the same takes calls that it refuses.
	if err := forbid(); err != nil {
		return fmt.Errorf("seccomp: %w", err)
	}
	return nil
}

// lookupFiles returns the files that Go's resolver reads, in directories where they can be: other
// programs replace them by renames, and Landlock knows only the file that was there.
func lookupFiles() []string {
	places := []string{"/etc", "/proc/sys/net/core/somaxconn"}
	for _, name := range []string{"/etc/resolv.conf", "/etc/hosts", "/etc/nsswitch.conf"} {
		real, err := filepath.EvalSymlinks(name)
		if err != nil || strings.HasPrefix(real, "/etc/") {
			continue
		}
		if dir := filepath.Dir(real); strings.Count(dir, "/") > 1 { // not all of /run
			real = dir
		}
		places = append(places, real)
	}
	return places
}
