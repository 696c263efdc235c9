package hostfile

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/fault"
)

// The actions of Put.
const (
	Same    = "same"
	Written = "put"
	Removed = "removed"
)

// Check returns what Put would do, and refuses what is certain to fail. It changes nothing, and
// verifies all the data that want has. A file of more than limit bytes is refused, too, if it
// would be replaced: Take could not keep it.
func (d *Dir) Check(ctx context.Context, name string, want State, limit int64) (action string, grows int64, err error) {
	have, err := d.look(ctx, name)
	if err != nil {
		return "", 0, err
	}
	defer have.close()
	same, err := want.is(ctx, have)
	if err != nil || same {
		return Same, 0, err
	}
	if have != nil && have.st.Size > limit {
		return "", 0, fmt.Errorf("%w: it has %d bytes now, at most %d can be kept for the undo",
			fault.ErrState, have.st.Size, limit)
	}
	if err := want.prove(ctx); err != nil {
		return "", 0, err
	}
	if err := d.writable(name, have); err != nil {
		return "", 0, err
	}
	if have != nil {
		grows = -have.st.Size
	}
	if want.Entry == nil {
		return Removed, grows, nil
	}
	return Written, grows + want.Entry.Size, nil
}

// writable refuses what root, too, cannot replace.
func (d *Dir) writable(name string, have *file) error {
	const fixed = unix.STATX_ATTR_IMMUTABLE | unix.STATX_ATTR_APPEND
	var x unix.Statx_t
	if err := unix.Statx(d.fd(), "", unix.AT_EMPTY_PATH, 0, &x); err == nil && x.Attributes&fixed != 0 {
		return fmt.Errorf("%w: %s is immutable or append-only", fault.ErrState, d.path)
	}
	if err := unix.Faccessat(d.fd(), ".", unix.W_OK, 0); err != nil {
		return fmt.Errorf("write to %s: %w", d.path, err)
	}
	if have == nil {
		return nil
	}
	switch err := unix.Statx(d.fd(), name, unix.AT_SYMLINK_NOFOLLOW, 0, &x); {
	case err != nil: // a kernel that does not tell
	case x.Attributes&fixed != 0:
		return fmt.Errorf("%w: it is immutable or append-only", fault.ErrState)
	case x.Attributes&unix.STATX_ATTR_MOUNT_ROOT != 0:
		return fmt.Errorf("%w: something is mounted over it", fault.ErrState)
	}
	return nil
}

// Put makes a file what want says, durably. A file that is neither that nor as was says is
// ErrChanged; with a nil was any file is replaced. New content is first written under the name
// temp, or that and a number if the name is taken; Put removes what a killed Put has left under
// these names. Before the file is replaced or removed, last is called, unless it is nil. With an
// error, an empty action says that the file was not touched.
func (d *Dir) Put(
	ctx context.Context, name, temp string, want State, was *State, last func() error,
) (action string, err error) {
	if last == nil {
		last = func() error { return nil }
	}
	if err := d.still(); err != nil {
		return "", err
	}
	_ = d.Clear(temp) // a leftover that cannot be removed is harmless
	have, err := d.look(ctx, name)
	if err != nil {
		return "", err
	}
	defer have.close()
	if have != nil {
		have.flush()
	}
	if same, err := want.is(ctx, have); err != nil {
		return "", err
	} else if same {
		return Same, nil
	}
	if was != nil {
		same, err := was.is(ctx, have)
		if err != nil {
			return "", err
		}
		if !same {
			return "", ErrChanged
		}
	}
	if want.Entry == nil {
		if err := errors.Join(last(), d.unmoved(name, have)); err != nil {
			return "", err
		}
		if err := unix.Unlinkat(d.fd(), name, 0); err != nil {
			return "", err
		}
		return Removed, d.sync()
	}
	defer func() {
		if err != nil {
			_ = d.Clear(temp) // its error would be the same, or of what is not ours
		}
	}()
	f, err := d.write(ctx, temp, want)
	if err != nil {
		return "", err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	if err := errors.Join(last(), d.unmoved(name, have), d.is(f.Name(), &f.st, same)); err != nil {
		return "", err
	}
	if err := d.rename(f.Name(), name, have != nil); err != nil {
		return "", err
	}
	return Written, errors.Join(d.is(name, &f.st, sameFile), d.sync())
}

// rename gives a temp its name. Where there was nothing there must be nothing still.
func (d *Dir) rename(temp, name string, over bool) error {
	if !over {
		err := unix.Renameat2(d.fd(), temp, d.fd(), name, unix.RENAME_NOREPLACE)
		if errors.Is(err, unix.EEXIST) {
			return ErrChanged
		}
		if !errors.Is(err, unix.EINVAL) { // else a filesystem that cannot
			return err
		}
	}
	return unix.Renameat(d.fd(), temp, d.fd(), name)
}

// sync makes the names in the directory durable, on a filesystem that can.
func (d *Dir) sync() error {
	err := d.f.Sync()
	if errors.Is(err, unix.EINVAL) {
		return nil
	}
	return err
}

// write makes the new file, durably. Only its owner can write to it yet.
func (d *Dir) write(ctx context.Context, temp string, want State) (_ *file, err error) {
	data, err := want.Data(ctx)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, data.Close()) }()
	out, err := d.create(temp)
	if err != nil {
		return nil, err
	}
	f := &file{File: out}
	err = fill(out, want.Entry, reader{ctx, data})
	if err == nil {
		err = out.Sync()
	}
	if err == nil {
		err = unix.Fstat(int(out.Fd()), &f.st)
	}
	if err != nil {
		return nil, errors.Join(err, out.Close())
	}
	return f, nil
}

// temps is how many names are tried for a new file.
const temps = 10

func tempName(temp string, i int) string {
	if i == 0 {
		return temp
	}
	return fmt.Sprintf("%s.%d", temp, i)
}

func (d *Dir) create(temp string) (*os.File, error) {
	for i := 0; ; i++ {
		name := tempName(temp, i)
		_ = d.clear(name) // else it is in the way, as is found now
		fd, err := unix.Openat(d.fd(), name,
			unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o600)
		if err == nil {
			return os.NewFile(uintptr(fd), name), nil
		}
		if !errors.Is(err, unix.EEXIST) || i == temps-1 {
			return nil, &fs.PathError{Op: "create", Path: d.path + "/" + name, Err: err}
		}
	}
}

// Clear removes what a killed Put has left. Anything but a regular file is not Put's, and stays.
func (d *Dir) Clear(temp string) error {
	var errs []error
	for i := range temps {
		errs = append(errs, d.clear(tempName(temp, i)))
	}
	return errors.Join(errs...)
}

func (d *Dir) clear(temp string) error {
	var st unix.Stat_t
	err := unix.Fstatat(d.fd(), temp, &st, unix.AT_SYMLINK_NOFOLLOW)
	if errors.Is(err, unix.ENOENT) {
		return nil
	}
	if err == nil && st.Mode&unix.S_IFMT != unix.S_IFREG {
		return fmt.Errorf("%w: %s/%s is in the way, which is %s", fault.ErrState, d.path, temp,
			kinds[st.Mode&unix.S_IFMT])
	}
	if err == nil {
		err = unix.Unlinkat(d.fd(), temp, 0)
	}
	return err
}

// is checks that name is still that of the inode that was written: any process that may write in
// the directory can have exchanged it.
func (d *Dir) is(name string, st *unix.Stat_t, same func(a, b *unix.Stat_t) bool) error {
	var now unix.Stat_t
	err := unix.Fstatat(d.fd(), name, &now, unix.AT_SYMLINK_NOFOLLOW)
	if errors.Is(err, unix.ENOENT) || err == nil && !same(st, &now) {
		return ErrChanged
	}
	return err
}

// unmoved checks, at the last moment, that name still is that of the file that was looked at.
func (d *Dir) unmoved(name string, have *file) error {
	var now unix.Stat_t
	err := unix.Fstatat(d.fd(), name, &now, unix.AT_SYMLINK_NOFOLLOW)
	if errors.Is(err, unix.ENOENT) && have == nil {
		return nil
	}
	if err == nil && (have == nil || !same(&have.st, &now)) || errors.Is(err, unix.ENOENT) {
		return ErrChanged
	}
	return err
}

// still proves that the path of the directory leads to it yet.
func (d *Dir) still() error {
	now, err := Open(d.path)
	if err != nil {
		return err
	}
	defer now.Close()
	var a, b unix.Stat_t
	if err := errors.Join(unix.Fstat(d.fd(), &a), unix.Fstat(now.fd(), &b)); err != nil {
		return err
	}
	if a.Dev != b.Dev || a.Ino != b.Ino {
		return fmt.Errorf("%w: %s is another directory than a moment ago", fault.ErrState, d.path)
	}
	return nil
}
