package podman

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/criu/stage"
	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/internal/streams"
)

// Start is `podman start`, with a restore when one is staged. Podman makes the
// managed files, the network namespace and, as a rule, the addresses anew for
// every start; what must not be new is put in their place.
//
// Without agentbox-runtime the environment that is asked for reaches only the
// processes that Exec adds.
func (b *Backend) Start(ctx context.Context, id string, opts runtime.StartOptions) (wait func() error, err error) {
	c, err := b.look(ctx, id)
	if err != nil {
		return nil, err
	}
	if c.live() {
		return nil, fmt.Errorf("container %s is %s: %w", c.Name, c.status, fault.ErrState)
	}
	program, err := b.program(ctx, c)
	if err != nil {
		return nil, err
	}
	restore, err := stage.At(b.run, c.ID).Load()
	restores := err == nil
	switch {
	case err != nil && !errors.Is(err, fault.ErrNotFound):
		return nil, err
	case restores && !wraps(program):
		why, remedy := c.obstacle(program)
		return nil, &fault.Error{Err: fmt.Errorf("%s: %w", why, fault.ErrUnsupported), Hint: remedy}
	}
	if c, err = b.mend(ctx, c); err != nil {
		return nil, err
	}
	var fixed []string
	defer func() {
		if err != nil && !restores {
			fixed = c.taken(b.remember(id), err)
		}
		if err != nil {
			err = errors.Join(err, b.unfix(context.WithoutCancel(ctx), id, fixed))
		}
	}()
	if restores {
		if fixed, err = b.fixAddresses(ctx, c, restore); err != nil {
			return nil, err
		}
	}
	m := b.remember(id)
	kept, files, err := c.changed(b.managed(c), m, restores)
	if err != nil {
		return nil, err
	}
	if err := b.begin(ctx, c, program, stage.Start{Env: opts.Env, Files: files}, opts.Streams, &wait); err != nil {
		if restores {
			return nil, err // Podman takes any file that is missing for the command
		}
		return nil, commandError(append([]string{c.Path}, c.Args...), err)
	}
	if restores && restore.Paused {
		// It is, but Podman does not know.
		if err := b.do(context.WithoutCancel(ctx), "pause", id); err != nil {
			b.log.Warn("Podman not informed that the container is paused", "sandbox", id, "err", err)
		}
	}
	// It runs. A failure to record that must not undo it.
	now, err := b.look(context.WithoutCancel(ctx), id)
	if err == nil {
		err = b.note(id, func(m *memory) bool {
			m.Started, m.Env, m.Kept = now.State.StartedAt, opts.Env, kept
			return true
		})
	}
	if err == nil {
		err = b.noteManaged(now)
	}
	if err == nil && now.live() {
		err = b.noteAddresses(now)
	}
	if err != nil {
		b.log.Warn("start parameters of the container not recorded", "sandbox", id, "err", err)
	}
	return wait, nil
}

// begin starts a container with what s asks for.
func (b *Backend) begin(
	ctx context.Context, c container, program string, s stage.Start, ends *runtime.Streams, wait *func() error,
) (err error) {
	inPlace := s.Files
	if wraps(program) {
		inPlace = nil
		if err := stage.At(b.run, c.ID).PutStart(s); err != nil {
			return err
		}
		// Used up by now, unless Podman did not get as far.
		defer func() { err = errors.Join(err, stage.At(b.run, c.ID).ClearStart()) }()
	}
	if ends == nil && len(inPlace) == 0 {
		return b.do(ctx, "start", c.id())
	}
	if err := b.do(ctx, "init", c.id()); err != nil {
		return err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, b.do(context.WithoutCancel(ctx), "container", "cleanup", c.id()))
		}
	}()
	for _, f := range inPlace {
		if err := overwrite(f); err != nil {
			return err
		}
	}
	if ends == nil {
		return b.do(ctx, "start", c.id())
	}
	var size *runtime.Size
	if c.Config.Tty {
		size = streams.FirstSize(ctx, ends.Resize)
	}
	a, err := c.connect(ctx, *ends, size)
	if err != nil {
		return err
	}
	a.Serve()
	if err := b.do(ctx, "start", c.id()); err != nil {
		a.Close()
		return err
	}
	*wait = a.Wait
	return nil
}

// changed returns the managed files that the coming start is to leave as they are: those
// changed since Podman made them, by the sandbox or a restore, and for a restore all of
// them, for its processes know them so.
func (c container) changed(
	managed map[string]string, m memory, all bool,
) (paths []string, files []stage.File, err error) {
	if c.State.StartedAt.IsZero() {
		return nil, nil, nil
	}
	for path, host := range managed {
		f, changed, err := readManaged(host)
		if errors.Is(err, os.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, nil, fmt.Errorf("read %s: %w", path, err)
		}
		// Podman makes them before the start, never after.
		if ours := m.Started.Equal(c.State.StartedAt) && slices.Contains(m.Kept, path); ours ||
			changed.After(c.State.StartedAt) {
			paths = append(paths, path)
		} else if !all {
			continue
		}
		files = append(files, f)
	}
	return paths, files, nil
}

// maxManaged bounds what is read of a managed file.
const maxManaged = 1 << 20

// readManaged reads a managed file, whose content and mode are the sandbox's
// to choose.
func readManaged(path string) (f stage.File, changed time.Time, err error) {
	r, err := os.OpenFile(path, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if err != nil {
		return f, changed, err
	}
	defer r.Close()
	var st unix.Stat_t
	if err := unix.Fstat(int(r.Fd()), &st); err != nil {
		return f, changed, err
	}
	if st.Mode&unix.S_IFMT != unix.S_IFREG {
		return f, changed, fmt.Errorf("%s is not a regular file: %w", path, fault.ErrInvalid)
	}
	f = stage.File{Path: path, Mode: st.Mode & 0o7777, UID: st.Uid, GID: st.Gid}
	f.Data, err = io.ReadAll(io.LimitReader(r, maxManaged+1))
	if err == nil && len(f.Data) > maxManaged {
		err = fmt.Errorf("%s has more than %d bytes: %w", path, maxManaged, fault.ErrInvalid)
	}
	return f, time.Unix(st.Mtim.Unix()), err
}

// overwrite puts a file back under the mount that Podman has made of it.
func overwrite(f stage.File) (err error) {
	w, err := os.OpenFile(f.Path, os.O_WRONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, w.Close()) }()
	st, err := w.Stat()
	if err != nil {
		return err
	}
	if !st.Mode().IsRegular() {
		return fmt.Errorf("%s is not a regular file: %w", f.Path, fault.ErrInvalid)
	}
	if err := w.Truncate(0); err != nil {
		return err
	}
	if _, err := w.Write(f.Data); err != nil {
		return err
	}
	if err := w.Chown(int(f.UID), int(f.GID)); err != nil {
		return err
	}
	return unix.Fchmod(int(w.Fd()), f.Mode)
}
