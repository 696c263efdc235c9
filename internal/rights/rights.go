// Package rights has a part of a program access files with a user's rights, as the kernel judges
// them: by ids and groups, modes, access lists and what else there is.
package rights

import (
	"errors"
	"io"
	"os"
	"runtime"
	"unsafe"

	"golang.org/x/sys/unix"
)

// User is a user of the host.
type User struct {
	UID, GID uint32
	Groups   []uint32
}

// As runs fn with a user's rights to files: what it opens the kernel judges as
// that user's, and what it makes is that user's. Only this thread is changed, so
// fn must do its work itself and not hand it to other goroutines. A process other than root's has
// no rights but its own user's.
func As(u User, fn func() error) (err error) {
	if uid := os.Geteuid(); uid != 0 && uint32(uid) == u.UID {
		return fn()
	}
	runtime.LockOSThread()
	groups, err := unix.Getgroups()
	if err != nil {
		runtime.UnlockOSThread()
		return err
	}
	own := User{UID: uint32(os.Geteuid()), GID: uint32(os.Getegid()), Groups: make([]uint32, len(groups))}
	for i, g := range groups {
		own.Groups[i] = uint32(g)
	}
	defer func() {
		// A thread that cannot be changed back stays locked, and ends with its
		// goroutine.
		back := set(own)
		if back == nil {
			runtime.UnlockOSThread()
		}
		err = errors.Join(err, back)
	}()
	if err := set(u); err != nil {
		return err
	}
	return fn()
}

// Lists opens a directory with a user's rights, following no symlink at its end, and begins to
// list it. Its error is the kernel's.
func Lists(u User, dir string) error {
	return As(u, func() error {
		f, err := os.OpenFile(dir, os.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
		if err != nil {
			return err
		}
		if _, err = f.Readdirnames(1); errors.Is(err, io.EOF) {
			err = nil
		}
		return errors.Join(err, f.Close())
	})
}

// set changes what the calling thread's access to files is judged by. A user
// other than root loses root's capabilities on files with it, until root is back.
// The calls are raw, since those of the library change all threads.
func set(u User) error {
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
