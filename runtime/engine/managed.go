package engine

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/fsx"
	"github.com/agentbox/agentbox/internal/idmap"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/store"
)

// Managed files are those like /etc/hosts that a backend writes for a sandbox
// and binds over its root filesystem (Container.Managed). They are not in the
// upperdir, but processes in the sandbox see ordinary files, so a checkpoint
// stores them in its manifest and a restore puts them back.

// oldSuffix names the copy of a managed file that a restore under way has replaced.
const oldSuffix = ".old"

// takeManaged reads the managed files into the manifest. The sandbox is frozen.
func (k *making) takeManaged() error {
	for _, path := range slices.Sorted(maps.Keys(k.c.Managed)) {
		f, err := readManaged(k.c.Managed[path], k.spec.IDs)
		switch {
		case errors.Is(err, fs.ErrNotExist): // never started
		case errors.Is(err, errTooLarge):
			k.parts.Warnings = append(slices.Clone(k.parts.Warnings),
				fmt.Sprintf("%s is %v and not part of the checkpoint", path, err))
		case err != nil:
			return fmt.Errorf("read %s: %w", path, err)
		default:
			if k.parts.Managed == nil {
				k.parts.Managed = map[string]store.Managed{}
			}
			k.parts.Managed[path] = f
		}
	}
	return nil
}

var errTooLarge = fmt.Errorf("larger than %d bytes", store.MaxManaged)

// readManaged reads one managed file, whose owner is one of ids. The sandbox controls its
// contents and mode.
func readManaged(path string, ids *idmap.Map) (m store.Managed, err error) {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if err != nil {
		return m, err
	}
	defer f.Close()
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return m, err
	}
	if st.Mode&unix.S_IFMT != unix.S_IFREG {
		return m, fmt.Errorf("%w: %s is not a regular file", runtime.ErrInvalid, path)
	}
	m = store.Managed{Mode: st.Mode & 0o7777, UID: uint32(ids.Tree(int(st.Uid))), GID: uint32(ids.Tree(int(st.Gid)))}
	m.Data, err = io.ReadAll(io.LimitReader(f, store.MaxManaged+1))
	if err == nil && len(m.Data) > store.MaxManaged {
		err = errTooLarge
	}
	return m, err
}

// putManaged puts a checkpoint's managed files back, and keeps what it replaces for
// revertManaged. It is idempotent. The sandbox is stopped; the caller syncs the filesystem.
func putManaged(files map[string]string, manifest store.Manifest, ids *idmap.Map) error {
	if runtime.Status(manifest.Status) == runtime.Created {
		// The sandbox had none yet; its first start makes them.
		for _, host := range files {
			if err := keepManaged(host); err != nil {
				return err
			}
			if err := os.Remove(host); err != nil && !errors.Is(err, fs.ErrNotExist) {
				return err
			}
		}
		return nil
	}
	for path, want := range manifest.Managed {
		host, ok := files[path]
		if !ok {
			continue
		}
		if ids != nil && ids.Has(int(want.UID)) && ids.Has(int(want.GID)) { // older versions recorded the owner's ids on the host
			want.UID, want.GID = uint32(ids.Tree(int(want.UID))), uint32(ids.Tree(int(want.GID)))
		}
		have, err := readManaged(host, ids)
		if err == nil && bytes.Equal(have.Data, want.Data) && have.Mode == want.Mode &&
			have.UID == want.UID && have.GID == want.GID {
			continue
		}
		if err := keepManaged(host); err != nil {
			return err
		}
		if err := writeManaged(host, want, ids); err != nil {
			return fmt.Errorf("put %s back: %w", path, err)
		}
	}
	return nil
}

// managedPart is the managed files of a restore.
type managedPart struct {
	noWork
	*restoration
	put bool
}

func (r *managedPart) check(context.Context) error {
	r.warnings = append(slices.Clone(r.warnings), r.unplaced()...)
	return nil
}

// prepare deletes copies that an earlier restore has left: from here on they are this one's.
func (r *managedPart) prepare(context.Context) error {
	if r.resumed {
		return nil
	}
	return forgetManaged(r.c.Managed)
}

func (r *managedPart) arrange(context.Context) error {
	r.put = true
	if err := putManaged(r.c.Managed, r.reader.Manifest(), r.spec.IDs); err != nil {
		return err
	}
	if r.resumed || r.restart { // no caller reads its warnings
		for _, text := range r.unplaced() {
			r.e.log.Warn(text, "sandbox", r.sb.ID)
		}
	}
	return nil
}

func (r *managedPart) settle(context.Context) error { return forgetManaged(r.c.Managed) }

// revert puts back what the restore has replaced, also before it was killed.
func (r *managedPart) revert(context.Context) error {
	if !r.put && !r.resumed {
		return nil
	}
	return revertManaged(r.c.Managed)
}

// unplaced warns of the checkpoint's managed files that the container has no place for.
func (r *managedPart) unplaced() (list []string) {
	manifest := r.reader.Manifest()
	if runtime.Status(manifest.Status) == runtime.Created {
		return nil
	}
	for _, path := range slices.Sorted(maps.Keys(manifest.Managed)) {
		if r.c.Managed[path] == "" {
			list = append(list, fmt.Sprintf("%s is not as in the checkpoint: backend %s does not tell where it has that file", path, r.sb.Backend))
		}
	}
	return list
}

// keepManaged keeps a file that is about to be replaced. A copy that exists already is the
// original, kept by this restore before it was killed.
func keepManaged(host string) error {
	err := os.Link(host, host+oldSuffix)
	if errors.Is(err, fs.ErrExist) || errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

func writeManaged(host string, m store.Managed, ids *idmap.Map) (err error) {
	uid, uerr := ids.Host(int(m.UID))
	gid, gerr := ids.Host(int(m.GID))
	if err := errors.Join(uerr, gerr); err != nil {
		return err
	}
	return fsx.Create(host, fsx.Options{Volatile: true}, func(f *os.File) error {
		_, err := f.Write(m.Data)
		if err == nil {
			err = f.Chown(uid, gid)
		}
		if err == nil { // after the change of owner, which clears bits
			err = unix.Fchmod(int(f.Fd()), m.Mode)
		}
		return err
	})
}

// revertManaged undoes putManaged.
func revertManaged(files map[string]string) error {
	var errs []error
	for _, host := range files {
		if err := os.Rename(host+oldSuffix, host); err != nil && !errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// forgetManaged deletes the copies that putManaged kept, of this restore or an earlier one.
func forgetManaged(files map[string]string) error {
	var errs []error
	for _, host := range files {
		if err := os.Remove(host + oldSuffix); err != nil && !errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}
