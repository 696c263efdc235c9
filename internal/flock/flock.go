// Package flock is the one lock between processes: flock(2) on a file, or on a directory,
// that has a name.
//
// A name may be unlinked, or given to another file, while a process waits for the lock of
// the old one. Such a lock excludes none of those that come by the name, so a lock is
// granted only if the name still leads to the locked file afterwards, and is otherwise
// asked for anew. This makes it safe to delete a lock file, by Remove, while others wait.
//
// A lock belongs to the open file, not to the process: it ends when the last descriptor of
// it is closed, however the process ends. Descriptors are close-on-exec; Pass is for a
// child that is to hold the lock, too.
package flock

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// How a lock is taken. Zero: alone, of a regular file, which is made with mode 0600 where
// there is none.
type How uint

const (
	Shared   How = 1 << iota // with others that take it so
	Append                   // what is written to the file goes to its end
	Existing                 // the file, or directory, is not made; it is opened for reading only
	Follow                   // a symbolic link by this name is followed

	Dir = Existing | Follow // a directory
)

// ErrHeld says that another open file has the lock.
var ErrHeld = errors.New("the lock is held")

// poll bounds how long a waiting Lock pauses before it tries again.
const poll = 10 * time.Millisecond

// A Handle holds the lock until Unlock or Remove.
type Handle struct {
	f      *os.File
	passed bool
}

// Lock waits for the lock of path. An error of the context is returned as it is, that of
// an open as a *fs.PathError.
func Lock(ctx context.Context, path string, how How) (*Handle, error) {
	if ctx.Done() == nil {
		return take(path, how, 0)
	}

	// No context interrupts a thread that waits in flock(2).
	for pause := time.Millisecond; ; pause = min(2*pause, poll) {
		l, err := Try(path, how)
		if !errors.Is(err, ErrHeld) {
			return l, err
		}
		t := time.NewTimer(pause)
		select {
		case <-t.C:
		case <-ctx.Done():
			t.Stop()
			return nil, ctx.Err()
		}
	}
}

// Try takes the lock of path if it is free; otherwise it is ErrHeld.
func Try(path string, how How) (*Handle, error) { return take(path, how, unix.LOCK_NB) }

// Held reports whether Try would be ErrHeld. It makes no file: a lock without one is free.
// To find out it holds a free lock for an instant, in which another Try may fail; with
// Shared it sees only those that hold the lock alone, and so no other Held.
func Held(path string, how How) (bool, error) {
	l, err := Try(path, how&(Shared|Follow)|Existing)
	switch {
	case err == nil:
		l.Unlock()
		return false, nil
	case errors.Is(err, ErrHeld):
		return true, nil
	case errors.Is(err, os.ErrNotExist):
		return false, nil
	}
	return false, err
}

// Passed takes over the lock of path that the parent process holds and has passed on, by
// Pass, as descriptor fd. It is fs.ErrNotExist if fd is not the file of this name.
func Passed(fd int, path string) (*Handle, error) {
	var mine, there unix.Stat_t
	if unix.Fstat(fd, &mine) != nil || unix.Lstat(path, &there) != nil || mine.Dev != there.Dev ||
		mine.Ino != there.Ino {
		return nil, &os.PathError{Op: "lock passed for", Path: path, Err: os.ErrNotExist}
	}
	unix.CloseOnExec(fd)
	f := os.NewFile(uintptr(fd), path)
	err := lock(f, 0, unix.LOCK_NB)
	if err == nil {
		return &Handle{f: f}, nil
	}
	_ = f.Close()
	if err == unix.EWOULDBLOCK {
		return nil, fmt.Errorf("%s: %w", path, ErrHeld)
	}
	return nil, fmt.Errorf("lock %s: %w", path, err)
}

// take opens and locks until the name leads to what is locked.
func take(path string, how How, wait int) (*Handle, error) {
	for {
		f, err := open(path, how)
		if err != nil {
			return nil, err
		}
		if err := lock(f, how, wait); err != nil {
			_ = f.Close()
			if err == unix.EWOULDBLOCK {
				return nil, fmt.Errorf("%s: %w", path, ErrHeld)
			}
			return nil, fmt.Errorf("lock %s: %w", path, err)
		}

		named, err := isNamed(f, path, how)
		if named {
			return &Handle{f: f}, nil
		}
		_ = f.Close()
		if err != nil {
			return nil, err
		}
	}
}

func open(path string, how How) (*os.File, error) {
	flag := os.O_RDWR | os.O_CREATE
	if how&Existing != 0 {
		flag = os.O_RDONLY | unix.O_NONBLOCK // a FIFO would be waited for
	}
	if how&Follow == 0 {
		flag |= unix.O_NOFOLLOW
	}
	if how&Append != 0 {
		flag |= os.O_APPEND
	}
	return os.OpenFile(path, flag|unix.O_CLOEXEC, 0o600)
}

func lock(f *os.File, how How, wait int) error {
	op := unix.LOCK_EX
	if how&Shared != 0 {
		op = unix.LOCK_SH
	}
	for {
		if err := unix.Flock(int(f.Fd()), op|wait); err != unix.EINTR {
			return err
		}
	}
}

// isNamed reports whether path leads to f. A name that is gone is no error.
func isNamed(f *os.File, path string, how How) (bool, error) {
	look := os.Lstat
	if how&Follow != 0 {
		look = os.Stat
	}
	mine, err := f.Stat()
	if err != nil {
		return false, err
	}
	there, err := look(path)
	if errors.Is(err, os.ErrNotExist) {
		return false, nil
	}
	return err == nil && os.SameFile(mine, there), err
}

// Named reports whether the name of the lock still leads to it: if not, the lock excludes none
// of those that come by the name.
func (l *Handle) Named() bool {
	named, err := isNamed(l.f, l.f.Name(), 0)
	return named || err != nil
}

// File is the locked file.
func (l *Handle) File() *os.File { return l.f }

// Pass is the locked file for a child process, which holds the lock after an Unlock here
// as long as it lives.
func (l *Handle) Pass() *os.File {
	l.passed = true
	return l.f
}

// Unlock lets go of the lock. It may be called again, and after Remove.
func (l *Handle) Unlock() {
	// Closing alone could leave it held a moment longer: a child that another goroutine
	// is starting has every descriptor of this process until its exec. Unlocking takes it
	// from a child that is to keep it, too.
	if !l.passed {
		_ = unix.Flock(int(l.f.Fd()), unix.LOCK_UN) // fails on a closed file only, whose Fd is -1
	}
	_ = l.f.Close() // the file's content is no business of the lock
}

// Remove deletes the lock file and lets go of the lock.
func (l *Handle) Remove() error {
	err := os.Remove(l.f.Name())
	l.Unlock()
	return err
}
