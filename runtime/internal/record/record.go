// Package record keeps the small files in which a backend records what the kernel does not know:
// published whole by a rename, read within a bound, and serialised by a lock on the directory
// that holds them.
package record

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/internal/flock"
	"github.com/agentbox/agentbox/internal/fsx"
)

// Limit bounds what is read of a small file.
const Limit = 16 << 20

// ReadJSON decodes a small file of ours; what does not decode is ErrCorrupt.
func ReadJSON(path string, v any) error {
	data, _, err := Read(path)
	if err != nil {
		return err
	}
	if err := json.Unmarshal(data, v); err != nil {
		return fmt.Errorf("%s: %w: %w", path, fault.ErrCorrupt, err)
	}
	return nil
}

// Read reads a small file and returns when it was written. It goes without os.File, which asks
// the kernel for three times as much: a list of sandboxes reads several files of each.
func Read(path string) (data []byte, written time.Time, err error) {
	failed := func(op string, err error) ([]byte, time.Time, error) {
		return nil, time.Time{}, &fs.PathError{Op: op, Path: path, Err: err}
	}
	fd, err := again(func() (int, error) { return unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC, 0) })
	if err != nil {
		return failed("open", err)
	}
	defer unix.Close(fd) //nolint:errcheck // nothing was written
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return failed("stat", err)
	}
	// One byte more than its size, so that one read finds its end; files of /proc have none.
	data = make([]byte, 0, max(min(st.Size, Limit)+1, 512))
	for {
		n, err := again(func() (int, error) { return unix.Read(fd, data[len(data):cap(data)]) })
		if err != nil {
			return failed("read", err)
		}
		data = data[:len(data)+n]
		if n == 0 || len(data) >= Limit || st.Size > 0 && int64(len(data)) == st.Size {
			return data[:min(len(data), Limit)], time.Unix(st.Mtim.Unix()), nil
		}
		if len(data) == cap(data) {
			data = slices.Grow(data, len(data))
		}
	}
}

// again repeats what a signal has interrupted.
func again(call func() (int, error)) (int, error) {
	for {
		if n, err := call(); err != unix.EINTR {
			return n, err
		}
	}
}

// WriteJSON publishes v; see Write.
func WriteJSON(path string, v any, durable bool) error {
	data, err := json.MarshalIndent(v, "", "  ")
	if err != nil {
		return err
	}
	return Write(path, append(data, '\n'), 0o600, durable)
}

// Write publishes a file whole or not at all, and durably if asked to.
func Write(path string, data []byte, mode os.FileMode, durable bool) error {
	return fsx.Write(path, data, fsx.Options{Mode: mode, Volatile: !durable})
}

// Lock serialises verbs, across processes, by a lock on a directory of theirs:
// it goes when that goes. what names the holder's business in errors. A
// directory that is not there is ErrNotFound.
func Lock(ctx context.Context, dir, what string) (unlock func(), err error) {
	l, err := flock.Lock(ctx, dir, flock.Dir)
	switch {
	case err == nil:
		return l.Unlock, nil
	case errors.Is(err, fs.ErrNotExist):
		return nil, fmt.Errorf("%s: %w", what, fault.ErrNotFound)
	case err == ctx.Err():
		return nil, fmt.Errorf("%s: %w: %w", what, fault.ErrBusy, err)
	}
	return nil, err
}

// Locked reports whether a verb holds Lock on a directory.
func Locked(dir string) bool {
	held, _ := flock.Held(dir, flock.Dir|flock.Shared)
	return held
}

// Same reports whether an open file is the one that a path names now.
func Same(f *os.File, path string) bool {
	a, err := f.Stat()
	if err != nil {
		return false
	}
	b, err := os.Stat(path)
	return err == nil && os.SameFile(a, b)
}
