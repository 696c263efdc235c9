// Package idmap maps the user and group ids of a sandbox's user namespace to the host's, and
// the ids inside of extended attributes likewise. A nil *Map stands for ids that are the same on both sides.
package idmap

import (
	"errors"
	"fmt"
	"math"
	"os"
	"os/exec"
	"runtime"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/internal/guard"
)

// Map gives the user and group ids of a tree, 0 to Size-1, those of the host
// from Base on.
type Map struct {
	Base uint32 `json:"base"`
	Size uint32 `json:"size"`
}

// Check is ErrInvalid for a map that has root or a usual user of the host in it.
func (m Map) Check() error {
	if m.Base < 1<<16 || m.Size == 0 || uint64(m.Base)+uint64(m.Size) > math.MaxInt32 {
		return fmt.Errorf("ids %d+%d: %w", m.Base, m.Size, fault.ErrInvalid)
	}
	return nil
}

// Host is the id on the host of an id in the tree. Without a map they are the
// same.
func (m *Map) Host(id int) (int, error) {
	switch {
	case m == nil:
		return id, nil
	case id < 0 || id >= int(m.Size):
		return 0, fmt.Errorf("the sandbox has no user or group %d, only 0 to %d: %w", id, m.Size-1, fault.ErrInvalid)
	}
	return int(m.Base) + id, nil
}

// Has reports whether an id on the host is one of the tree's. Without a map all are.
func (m *Map) Has(id int) bool {
	return m == nil || id >= int(m.Base) && id < int(m.Base)+int(m.Size)
}

// Tree returns the id in the tree of an id on the host; one that the tree does not have is the
// overflow id.
func (m *Map) Tree(id int) int {
	switch {
	case m == nil:
		return id
	case !m.Has(id):
		return nobody
	}
	return id - int(m.Base)
}

// nobody is the overflow id, which the kernel shows for an id that a namespace does not have.
const nobody = 65534

// Namespace makes a user namespace with this map. It lasts for as long as the
// file is open or something is in it.
func (m Map) Namespace() (*os.File, error) {
	if err := m.Check(); err != nil {
		return nil, err
	}
	last.Lock()
	defer last.Unlock()
	if last.ns == nil || last.m != m {
		ns, err := m.make()
		if err != nil {
			return nil, err
		}
		if last.ns != nil {
			_ = last.ns.Close() // only looked at
		}
		last.m, last.ns = m, ns
	}
	fd, err := unix.FcntlInt(last.ns.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("user namespace: %w", err)
	}
	return os.NewFile(uintptr(fd), last.ns.Name()), nil
}

// last is the namespace that was made last: a start asks for it several times,
// and so does each of some forks.
var last struct {
	sync.Mutex
	m  Map
	ns *os.File
}

func (m Map) make() (_ *os.File, err error) {
	ids := []syscall.SysProcIDMap{{HostID: int(m.Base), Size: int(m.Size)}}
	// Stopped before its first instruction, it is there to be looked at only.
	cmd := exec.Command("/proc/self/exe")
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: syscall.CLONE_NEWUSER, UidMappings: ids, GidMappings: ids,
		Ptrace: true, Pdeathsig: syscall.SIGKILL,
	}
	runtime.LockOSThread() // its tracer is a thread
	defer runtime.UnlockOSThread()
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("make a user namespace: %w", err)
	}
	defer func() {
		if kerr := cmd.Process.Kill(); kerr != nil {
			err = errors.Join(err, kerr)
		}
		_ = cmd.Wait() // killed
	}()
	return os.Open(fmt.Sprintf("/proc/%d/ns/user", cmd.Process.Pid))
}

// AsRoot runs f on a thread that makes files as the map's root does, with all that the caller may
// do: in a tree with mapped ids no other user can make any. f must do its work itself and not
// hand it to other goroutines. Without a map AsRoot just runs f.
func (m *Map) AsRoot(f func() error) error {
	if m == nil {
		return f()
	}
	return <-guard.Start(func() error {
		runtime.LockOSThread() // without Unlock: the thread ends with the goroutine
		caps := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
		var sets [2]unix.CapUserData
		if err := unix.Capget(&caps, &sets[0]); err != nil {
			return err
		}
		for _, set := range []int{unix.SYS_SETFSGID, unix.SYS_SETFSUID} {
			// They report the former id and no error.
			_, _, _ = unix.RawSyscall(uintptr(set), uintptr(m.Base), 0, 0)
		}
		// The change of the user took those for files away.
		if err := unix.Capset(&caps, &sets[0]); err != nil {
			return err
		}
		return f()
	})
}
