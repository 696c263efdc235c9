package mcp

import (
	"errors"
	goruntime "runtime"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/idmap"
	"github.com/agentbox/agentbox/runtime/internal/bundle"
)

// as runs fn with a user's rights to files: what it opens the kernel judges as
// that user's, and what it makes is that user's. Only this thread is changed, so
// fn must do its work itself and not hand it to other goroutines. The user's
// ids are those of the sandbox, which ids maps to the host's.
func as(u bundle.User, ids *idmap.Map, fn func() error) (err error) {
	if ids != nil && u.UID == 0 {
		return ids.AsRoot(fn)
	}
	if u, err = onHost(u, ids); err != nil {
		return err
	}
	goruntime.LockOSThread()
	groups, err := unix.Getgroups()
	if err != nil {
		goruntime.UnlockOSThread()
		return err
	}
	own := bundle.User{Groups: make([]uint32, len(groups))}
	for i, g := range groups {
		own.Groups[i] = uint32(g)
	}
	defer func() {
		// A thread that cannot be changed back stays locked, and ends with its
		// goroutine.
		back := rights(own)
		if back == nil {
			goruntime.UnlockOSThread()
		}
		err = errors.Join(err, back)
	}()
	if err := rights(u); err != nil {
		return err
	}
	return fn()
}

// onHost maps a user of a sandbox to its ids on the host.
func onHost(u bundle.User, ids *idmap.Map) (bundle.User, error) {
	var errs []error
	host := func(id uint32) uint32 {
		n, err := ids.Host(int(id))
		errs = append(errs, err)
		return uint32(n)
	}
	out := bundle.User{UID: host(u.UID), GID: host(u.GID)}
	for _, g := range u.Groups {
		out.Groups = append(out.Groups, host(g))
	}
	return out, errors.Join(errs...)
}

// rights changes what the calling thread's access to files is judged by. A user
// other than root loses root's capabilities on files with it, until root is back.
// The calls are raw, since those of the library change all threads.
func rights(u bundle.User) error {
	var first unsafe.Pointer
	if len(u.Groups) > 0 {
		first = unsafe.Pointer(&u.Groups[0])
	}
	if _, _, errno := unix.RawSyscall(unix.SYS_SETGROUPS, uintptr(len(u.Groups)), uintptr(first), 0); errno != 0 {
		return errno
	}
	if err := setfs(unix.SYS_SETFSGID, u.GID); err != nil {
		return err
	}
	return setfs(unix.SYS_SETFSUID, u.UID)
}

// setfs calls setfsuid or setfsgid, which return only the value before.
func setfs(call uintptr, id uint32) error {
	const none = 1<<32 - 1
	_, _, _ = unix.RawSyscall(call, uintptr(id), 0, 0)
	if now, _, _ := unix.RawSyscall(call, none, 0, 0); uint32(now) != id {
		return unix.EPERM
	}
	return nil
}
