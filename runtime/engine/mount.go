package engine

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/failpoint"
	"github.com/agentbox/agentbox/internal/flock"
	"github.com/agentbox/agentbox/internal/fsx"
	"github.com/agentbox/agentbox/internal/rights"
	"github.com/agentbox/agentbox/overlay"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/internal/kernel"
	"github.com/agentbox/agentbox/runtime/internal/record"
)

// A mount is what Mount makes: a read-only overlay of the image's layers and of what a checkpoint has
// beside them, which is laid out in ROOT/mounts/ID for as long as the mount lasts. The process that
// serves it holds the lock of that directory. The next recovery
// frees what a killed process leaves.
type mount struct {
	*core
	id   string
	lock *flock.Handle
}

// mounted is the record of a mount, mount.json in its directory.
type mounted struct {
	State string `json:"state"`
	At    string `json:"at"`    // where it is mounted
	Image string `json:"image"` // its digest: its layers must stay
}

// Mount mounts the files of a checkpoint, or of the image, until it is unmounted or ctx ends.
func (v sandboxVerbs) Mount(ctx context.Context, ref, dir string, shown func(runtime.Mounted)) error {
	op := onState("mount", ref)
	op.To = dir
	return v.e.verb(ctx, op, func(ctx context.Context) error {
		return v.e.checkpoints.mount(ctx, ref, dir, shown)
	})
}

func (cs *checkpoints) mount(ctx context.Context, ref, dir string, shown func(runtime.Mounted)) (err error) {
	state, ok := splitState(ref)
	if !ok {
		return hint(fmt.Errorf("%w: the files of %s change as long as they are in use, and cannot be mounted",
			runtime.ErrInvalid, ref), fmt.Sprintf("Mount a checkpoint of it: agentbox mount %s@HEAD DIR", ref))
	}
	at, path, err := cs.mountpoint(ctx, dir)
	if err != nil {
		return err
	}
	defer at.Close()
	m, err := cs.newMount()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, m.free()) }()
	if err := cs.layOut(ctx, m, state, mounted{State: ref, At: path}, at); err != nil {
		return err
	}
	if err := failpoint.Hit("mount.after-mount"); err != nil {
		return err
	}
	shown(runtime.Mounted{Dir: path})
	err = kernel.AwaitMounts(ctx, func() (bool, error) {
		left, err := kernel.MountsFrom(m.source())
		return len(left) == 0, err
	})
	if ctx.Err() != nil {
		return nil // the usual end
	}
	return err
}

// mountpoint opens a directory that something is to be mounted on: an empty one of the caller's.
func (cs *checkpoints) mountpoint(ctx context.Context, dir string) (*os.File, string, error) {
	if !filepath.IsAbs(dir) {
		return nil, "", fmt.Errorf("%w: %q is not an absolute path", runtime.ErrInvalid, dir)
	}
	c, foreign := runtime.CallerOf(ctx)
	if c.Address != "" {
		return nil, "", fmt.Errorf("%w: a mount on the host of the service is of no use to a caller elsewhere",
			runtime.ErrUnsupported)
	}
	if foreign {
		if err := sameMounts(c.Pid); err != nil {
			return nil, "", err
		}
	}
	f, err := openEmpty(c, dir)
	if err != nil {
		return nil, "", fmt.Errorf("mount on %s: %w", dir, err)
	}
	path, err := os.Readlink(fmt.Sprintf("/proc/self/fd/%d", f.Fd()))
	if err == nil {
		for _, own := range []string{cs.store.Root(), cs.run} {
			if own, err = filepath.EvalSymlinks(own); err == nil && fsx.Within(own, path) {
				err = fmt.Errorf("%w: mount on %s: agentbox keeps its state in %s", runtime.ErrInvalid, path, own)
			}
			if err != nil {
				break
			}
		}
	}
	if err != nil {
		f.Close()
		return nil, "", err
	}
	return f, path, nil
}

// sameMounts refuses a caller in another mount namespace: it would not see the mount.
func sameMounts(pid int) error {
	var st [2]unix.Stat_t
	for i, who := range []string{"self", fmt.Sprint(pid)} {
		if err := unix.Stat("/proc/"+who+"/ns/mnt", &st[i]); err != nil {
			return fmt.Errorf("look at the mount namespace of the caller: %w", err)
		}
	}
	if st[0].Ino != st[1].Ino || st[0].Dev != st[1].Dev {
		return hint(fmt.Errorf("%w: the service runs in another mount namespace, so that its mounts do not show here",
			runtime.ErrUnsupported), "Run the command as root without the service: AGENTBOX_HOST=none.")
	}
	return nil
}

// openEmpty opens an empty directory with the rights of a caller. The caller must own it, or be root.
func openEmpty(c runtime.Caller, dir string) (f *os.File, err error) {
	open := func() (err error) {
		if f, err = os.OpenFile(dir, os.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0); err != nil {
			return err
		}
		names, err := f.Readdirnames(1)
		var st unix.Stat_t
		switch {
		case len(names) > 0:
			err = hint(fmt.Errorf("%w: it is not empty", runtime.ErrInvalid), "Use an empty directory.")
		case errors.Is(err, io.EOF):
			err = unix.Fstat(int(f.Fd()), &st)
		}
		if err == nil && c.UID != 0 && st.Uid != c.UID {
			err = fmt.Errorf("%w: it is not yours", runtime.ErrDenied)
		}
		if err != nil {
			f.Close()
		}
		return err
	}
	if c.UID == 0 {
		err = open()
	} else {
		err = rights.As(rights.User{UID: c.UID, GID: c.GID, Groups: c.Groups}, open)
	}
	switch {
	case errors.Is(err, fs.ErrNotExist):
		err = hint(fmt.Errorf("%w: there is no such directory", runtime.ErrNotFound), "Create it: mkdir "+dir)
	case errors.Is(err, unix.ENOTDIR), errors.Is(err, unix.ELOOP):
		err = fmt.Errorf("%w: it is not a directory", runtime.ErrInvalid)
	case errors.Is(err, fs.ErrPermission):
		err = fmt.Errorf("%w: as user %d: %w", runtime.ErrDenied, c.UID, err)
	}
	return f, err
}

func (e *core) mountsDir() string { return filepath.Join(e.store.Root(), "mounts") }

// newMount makes the directory of a mount, and locks it.
func (e *core) newMount() (*mount, error) {
	m := &mount{core: e, id: newID()}
	if err := os.Mkdir(e.mountsDir(), 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return nil, err
	}
	for {
		if err := os.Mkdir(m.dir(), 0o700); err != nil {
			return nil, err
		}
		var err error
		m.lock, err = flock.Lock(context.Background(), m.dir(), flock.Dir)
		if !errors.Is(err, fs.ErrNotExist) { // else a recovery has taken it for one that was left behind
			return m, err
		}
	}
}

func (m *mount) dir(names ...string) string {
	return filepath.Join(append([]string{m.mountsDir(), m.id}, names...)...)
}

// source is the source of the mount in the table of mounts.
func (m *mount) source() string { return "agentbox:" + m.id }

// free unmounts it, if it still is mounted, and removes what is laid out for it.
func (m *mount) free() error {
	defer m.lock.Unlock()
	if err := kernel.DetachFrom(m.source()); err != nil {
		return err
	}
	left, err := kernel.MountsFrom(m.source())
	if err != nil {
		return err
	}
	if len(left) > 0 { // it has to keep its files
		return hint(fmt.Errorf("%w: it is still mounted on %s, where something else is mounted over it", runtime.ErrBusy,
			left[0].Mountpoint), "umount "+left[0].Mountpoint)
	}
	if err := failpoint.Hit("mount.after-detach"); err != nil {
		return err
	}
	return os.RemoveAll(m.dir())
}

// freeMounts frees the mounts that killed processes have left.
func (e *core) freeMounts() (did []string, err error) {
	left, err := os.ReadDir(e.mountsDir())
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	errs := []error{err}
	for _, one := range left {
		m := &mount{core: e, id: one.Name()}
		m.lock, err = flock.Try(m.dir(), flock.Dir)
		if errors.Is(err, flock.ErrHeld) || errors.Is(err, fs.ErrNotExist) {
			continue
		}
		var is mounted
		if err == nil {
			_ = record.ReadJSON(m.dir("mount.json"), &is) // for the message alone
			err = m.free()
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("free the mount %s: %w", one.Name(), err))
		} else {
			did = append(did, fmt.Sprintf("freed a mount of %s that was left on %s",
				cmp.Or(is.State, "a checkpoint"), cmp.Or(is.At, "a directory")))
		}
	}
	return did, errors.Join(errs...)
}

// mountedImages lists, by digest, where an image is needed for a mount.
func (e *core) mountedImages() (map[string][]string, error) {
	users := map[string][]string{}
	all, err := os.ReadDir(e.mountsDir())
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	for _, one := range all {
		var is mounted
		err := record.ReadJSON(filepath.Join(e.mountsDir(), one.Name(), "mount.json"), &is)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, err
		}
		users[is.Image] = append(users[is.Image], "the mount on "+is.At)
	}
	return users, nil
}

// layOut lays out what a recorded state has beside the layers of the image, and mounts all of it.
func (cs *checkpoints) layOut(ctx context.Context, m *mount, ref recordedState, is mounted, at *os.File) error {
	return cs.onFiles(ctx, ref, func(v *overlay.View, opts overlay.ViewOptions, image string) error {
		is.Image = image
		if err := record.WriteJSON(m.dir("mount.json"), is, false); err != nil {
			return err
		}
		lower := slices.Clone(opts.Lower)
		if opts.Tree != nil {
			if err := m.layer(ctx, "files", &lower, func(w *overlay.TarWriter) error { return writeTree(ctx, opts, w) }); err != nil {
				return err
			}
		}
		over := overMounts{ctx: ctx, v: v, opts: opts}
		if err := over.collect(); err != nil {
			return err
		}
		if err := m.layer(ctx, "mounts", &lower, over.write); err != nil {
			return err
		}
		if err := over.fill(m.dir("mounts")); err != nil {
			return err
		}
		if err := failpoint.Hit("mount.after-layout"); err != nil {
			return err
		}
		return overlay.Mount{
			Lower: lower, ReadOnly: true, Guarded: true, Source: m.source(),
			Target: is.At, Open: at,
		}.Mount()
	})
}

// layer lays out one more layer on top of others.
func (m *mount) layer(
	ctx context.Context, name string, lower *[]string, write func(*overlay.TarWriter) error,
) error {
	if err := os.Mkdir(m.dir(name), 0o700); err != nil {
		return err
	}
	*lower = append([]string{m.dir(name)}, *lower...)
	return applyTar(ctx, m.dir(name), write)
}
