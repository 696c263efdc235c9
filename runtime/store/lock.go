package store

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/internal/flock"
)

const (
	// openLock serialises Open; no name or id begins with a dot.
	openLock = ".open"
	// storeLock guards the packs: drafts and readers hold it shared, so that what they
	// found in the index stays where it is; a process that removes chunks holds it
	// exclusively.
	storeLock = "store"
	// removalLock is held shared while a checkpoint's directory is removed.
	removalLock = ".removals"
	storeWait   = time.Minute // exclusive holders need moments
)

// forkWindow is how long a lock may outlive its holder in a child that is
// just being started and has not closed what it must not inherit.
const forkWindow = 5 * time.Millisecond

// Lock is the right to change one sandbox. It belongs to an open file, not to
// a process: a child that was given File holds it too, until the last of them
// is gone, however it goes.
type Lock struct {
	h *flock.Handle
}

// holder is the content of a lock file: the process and verb that hold the lock.
type holder struct {
	Pid   int       `json:"pid"`
	Verb  string    `json:"verb"`
	Since time.Time `json:"since"`
}

// locks are the locks of sandboxes and of the store.
type locks struct {
	*records
}

// Lock takes the lock named id, usually a sandbox's id, for a verb. If the lock is held,
// Lock waits for at most wait (negative: until ctx ends), then returns ErrBusy with the
// holder in the text.
func (k *locks) Lock(ctx context.Context, id, verb string, wait time.Duration) (*Lock, error) {
	if err := plainName(id); err != nil {
		return nil, err
	}
	return k.flock(ctx, id, verb, wait)
}

// share takes the store's lock with others; nothing that is in a pack goes
// away until it is let go. Every call is a holder of its own, in one process too.
func (k *locks) share(ctx context.Context, verb string) (*Lock, error) {
	if err := k.pass(ctx); err != nil {
		return nil, err
	}
	return k.flockAs(ctx, storeLock, verb, storeWait, flock.Shared)
}

// exclude takes the store's lock exclusively: no process drafts or reads meanwhile.
func (k *locks) exclude(ctx context.Context, verb string, wait time.Duration) (*Lock, error) {
	return k.flockAs(ctx, storeLock, verb, wait, 0)
}

func (k *locks) flock(ctx context.Context, id, verb string, wait time.Duration) (*Lock, error) {
	return k.flockAs(ctx, id, verb, wait, 0)
}

func (k *locks) flockAs(ctx context.Context, id, verb string, wait time.Duration, how flock.How) (*Lock, error) {
	if wait >= 0 {
		wait = max(wait, forkWindow)
	}
	path := filepath.Join(k.locksDir(), id)
	deadline := time.Now().Add(wait)
	pause := time.Millisecond
	for {
		if err := ctx.Err(); err != nil {
			return nil, fmt.Errorf("wait for the lock of %s: %w", id, context.Cause(ctx))
		}
		h, err := flock.Try(path, how)
		if err == nil {
			l := &Lock{h}
			if how == flock.Shared { // one of many holders: not signed
				return l, nil
			}
			if err := l.sign(verb); err != nil {
				l.Unlock()
				return nil, fmt.Errorf("lock %s: %w", id, err)
			}
			return l, nil
		}
		if !errors.Is(err, flock.ErrHeld) {
			return nil, fmt.Errorf("lock %s: %w", id, denied(err))
		}
		left := time.Until(deadline)
		if wait >= 0 && left <= 0 {
			return nil, k.busy(ctx, id, path)
		}
		if wait >= 0 && left < pause {
			pause = left
		}
		// Not flock.Lock: after a wait of our own the error can name the holder.
		t := time.NewTimer(pause)
		select {
		case <-t.C:
		case <-ctx.Done():
			t.Stop()
		}
		pause = min(2*pause, 50*time.Millisecond)
	}
}

// sign writes this process and its verb into the lock file.
func (l *Lock) sign(verb string) error {
	b, err := json.Marshal(holder{Pid: os.Getpid(), Verb: verb, Since: time.Now()})
	if err != nil {
		return err
	}
	if _, err := l.h.File().WriteAt(append(b, '\n'), 0); err != nil {
		// A full disk must not prevent freeing space: the lock holds all the same, only its
		// holder stays unnamed.
		if errors.Is(err, syscall.ENOSPC) {
			return nil
		}
		return err
	}
	return l.h.File().Truncate(int64(len(b) + 1))
}

// dropLocks removes the lock files of a sandbox that is gone. A process waiting for one
// notices that the file lost its name and starts over; the next taker may hold a new one
// at once, so nothing of the sandbox may be touched after this.
func (k *locks) dropLocks(id string) {
	if !isID(id) {
		return
	}
	files, err := filepath.Glob(filepath.Join(k.locksDir(), id+".*"))
	if err != nil {
		return
	}
	for _, f := range append(files, filepath.Join(k.locksDir(), id)) {
		_ = os.Remove(f) // what stays is swept later
	}
}

// LockPath is the file of a lock.
func (d *dirs) LockPath(id string) string { return filepath.Join(d.locksDir(), id) }

// Holder returns the verb for which a lock was last taken, or "" if that is unknown. The
// lock may have been released since.
func (k *locks) Holder(id string) string {
	if plainName(id) != nil {
		return ""
	}
	return readHolder(filepath.Join(k.locksDir(), id)).Verb
}

// readHolder reads a lock file. It may be empty or half-written in the instant
// after the lock was taken.
func readHolder(path string) (h holder) {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NOFOLLOW, 0)
	if err != nil {
		return h
	}
	defer f.Close()
	if json.NewDecoder(io.LimitReader(f, 4096)).Decode(&h) != nil {
		return holder{}
	}
	return h
}

// busy returns an ErrBusy that names the holder of the lock, if it is known.
func (k *locks) busy(ctx context.Context, id, path string) error {
	what := "sandbox " + id
	if isID(id) && k.read != nil {
		if b, err := k.Sandbox(ctx, id); err == nil {
			what = "sandbox " + b.Name
		}
	} else if id == openLock {
		what = "the state directory"
	} else if id == storeLock {
		// The file names the last exclusive holder, not the current shared ones.
		return &fault.Error{Op: "the store is busy", Hint: "Wait for it to finish, or try again.",
			Err: fmt.Errorf("checkpoints are being made, read or reclaimed: %w", fault.ErrBusy)}
	}
	h := readHolder(path)
	if h.Pid <= 0 {
		return fmt.Errorf("%s is busy: %w", what, fault.ErrBusy)
	}
	by := fmt.Sprintf("pid %d", h.Pid)
	if errors.Is(unix.Kill(h.Pid, 0), unix.ESRCH) {
		by = fmt.Sprintf("a process that pid %d left behind", h.Pid)
	}
	return &fault.Error{Op: what + " is busy", ID: "", Hint: "Wait for it to finish, or try again.",
		Err: fmt.Errorf("%s by %s since %s: %w", h.Verb, by, h.Since.Local().Format("15:04:05"), fault.ErrBusy)}
}

// File is the locked file, to be passed to a child that must go on holding
// the lock when this process is gone.
func (l *Lock) File() *os.File { return l.h.Pass() }

// Unlock lets go of the lock; children that were given File keep it. Idempotent.
func (l *Lock) Unlock() { l.h.Unlock() }
