package kernel

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/guard"
)

// MountsFrom lists where a source is mounted in this mount namespace.
func MountsFrom(source string) ([]*mountinfo.Info, error) {
	return mountinfo.GetMounts(func(i *mountinfo.Info) (skip, stop bool) { return i.Source != source, false })
}

// DetachFrom takes all mounts of a source out of this mount namespace. A path of one may lead
// elsewhere by now: then that is left alone.
func DetachFrom(source string) error {
	infos, err := MountsFrom(source)
	errs := []error{err}
	for _, i := range infos {
		if err := detach(i); err != nil {
			errs = append(errs, fmt.Errorf("unmount %s: %w", i.Mountpoint, err))
		}
	}
	return errors.Join(errs...)
}

func detach(i *mountinfo.Info) error {
	f, err := os.OpenFile(i.Mountpoint, unix.O_PATH|unix.O_NOFOLLOW|unix.O_DIRECTORY, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	defer f.Close()
	var st unix.Statx_t
	if err := unix.Statx(int(f.Fd()), "", unix.AT_EMPTY_PATH, unix.STATX_MNT_ID, &st); err != nil {
		return err
	}
	if st.Mask&unix.STATX_MNT_ID == 0 || st.Mnt_id != uint64(i.ID) {
		return nil
	}
	return unix.Unmount(fmt.Sprintf("/proc/self/fd/%d", f.Fd()), unix.MNT_DETACH)
}

// AwaitMounts returns when over reports true, or fails, which is asked at each change of the mounts.
func AwaitMounts(ctx context.Context, over func() (bool, error)) error {
	table, err := unix.Open("/proc/self/mountinfo", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(table)
	r, w, err := os.Pipe()
	if err != nil {
		return err
	}
	defer r.Close()
	stop := context.AfterFunc(ctx, func() { _ = w.Close() }) // the end of the pipe wakes the poll
	defer func() {
		if stop() {
			_ = w.Close()
		}
	}()
	return <-guard.Start(func() error {
		for {
			if done, err := over(); done || err != nil {
				return err
			}
			fds := []unix.PollFd{{Fd: int32(table), Events: unix.POLLPRI}, {Fd: int32(r.Fd()), Events: unix.POLLIN}}
			if _, err := unix.Poll(fds, -1); err != nil && err != unix.EINTR {
				return err
			}
			if err := ctx.Err(); err != nil {
				return context.Cause(ctx)
			}
		}
	})
}
