package podman

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
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
	m := b.remember(id)
	restore, err := stage.Load(b.run, c.ID)
	restores := err == nil
	var fixed []string
	switch {
	case err != nil && !errors.Is(err, fault.ErrNotFound):
		return nil, err
	case restores && !wraps(program):
		why, remedy := c.obstacle(program)
		return nil, &fault.Error{Err: fmt.Errorf("%s: %w", why, fault.ErrUnsupported), Hint: remedy}
	case restores:
		m, fixed, err = b.fixAddresses(ctx, c, m, restore)
		defer func() {
			if err != nil {
				err = errors.Join(err, b.unfix(context.WithoutCancel(ctx), c, m, fixed))
			}
		}()
		if err != nil {
			return nil, err
		}
	}
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
			b.log.Warn("Podman was not told that the container is paused", "sandbox", id, "err", err)
		}
	}
	// It runs. What is not remembered now must not undo that.
	now, err := b.look(context.WithoutCancel(ctx), id)
	if err == nil {
		m.Started, m.Env, m.Kept = now.State.StartedAt, opts.Env, kept
		err = b.keep(id, m)
	}
	if err == nil {
		err = b.noteManaged(now)
	}
	if err == nil && now.live() {
		err = b.noteAddresses(now)
	}
	if err != nil {
		b.log.Warn("what a container was started with is not noted", "sandbox", id, "err", err)
	}
	return wait, nil
}

// begin starts a container with what s asks for.
func (b *Backend) begin(ctx context.Context, c container, program string, s stage.Start, ends *runtime.Streams, wait *func() error) (err error) {
	inPlace := s.Files
	if wraps(program) {
		inPlace = nil
		if err := stage.PutStart(b.run, c.ID, s); err != nil {
			return err
		}
		// Used up by now, unless Podman did not get as far.
		defer func() { err = errors.Join(err, stage.ClearStart(b.run, c.ID)) }()
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

// changed are the managed files that the coming start is to leave as they are:
// those that somebody, the sandbox or a restore, has changed since Podman made
// them, and for a restore all, for its processes know them so.
func (c container) changed(managed map[string]string, m memory, all bool) (paths []string, files []stage.File, err error) {
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
		if ours := m.Started.Equal(c.State.StartedAt) && slices.Contains(m.Kept, path); ours || changed.After(c.State.StartedAt) {
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

// fixAddresses has Podman give the container the addresses that it had at the
// time of a dump: its processes are bound to them, and Podman gives new ones at
// every start. They are the container's own from then on, unless the start fails:
// fixed are the networks of those to give up then.
func (b *Backend) fixAddresses(ctx context.Context, c container, m memory, r stage.Restore) (_ memory, fixed []string, err error) {
	for name, want := range m.at(r.Taken) {
		if _, connected := c.NetworkSettings.Networks[name]; !connected || m.Fixed[name] == want {
			continue
		}
		if err := b.reconnect(ctx, c, name, want); err != nil {
			return m, fixed, fmt.Errorf("give the container its address %s back: %w", want.IP, err)
		}
		b.log.Info("address fixed", "sandbox", c.id(), "network", name, "address", want.IP)
		// What its maker has asked for stays.
		if !slices.ContainsFunc(c.Config.CreateCommand, func(arg string) bool {
			return want.IP != "" && strings.Contains(arg, want.IP) || want.IP6 != "" && strings.Contains(arg, want.IP6)
		}) {
			fixed = append(fixed, name)
		}
		if m.Fixed == nil {
			m.Fixed = map[string]address{}
		}
		m.Fixed[name] = want
		if err := b.keep(c.id(), m); err != nil {
			return m, fixed, err
		}
	}
	return m, fixed, nil
}

// unfix has Podman choose addresses again. One that somebody else has by now would
// keep the container from any start.
func (b *Backend) unfix(ctx context.Context, c container, m memory, fixed []string) (err error) {
	if len(fixed) == 0 {
		return nil
	}
	if now, lerr := b.look(ctx, c.id()); lerr != nil || now.live() {
		return lerr // it was started after all, and is not to lose its network
	}
	for _, name := range fixed {
		if rerr := b.reconnect(ctx, c, name, address{}); rerr != nil {
			err = errors.Join(err, fmt.Errorf("take the address %s of the container back: %w", m.Fixed[name].IP, rerr))
			continue
		}
		delete(m.Fixed, name)
	}
	return errors.Join(err, b.keep(c.id(), m))
}

// reconnect connects a stopped container to its network again, with an address or,
// at zero, with whatever Podman will give it.
func (b *Backend) reconnect(ctx context.Context, c container, name string, with address) error {
	args := []string{"network", "connect"}
	flag := func(name, value string) {
		if value != "" {
			args = append(args, name, value)
		}
	}
	for _, alias := range c.NetworkSettings.Networks[name].Aliases {
		if alias != c.ID[:12] { // Podman's own
			flag("--alias", alias)
		}
	}
	plain := slices.Clip(append(slices.Clone(args), name, c.id()))
	flag("--ip", with.IP)
	flag("--ip6", with.IP6)
	flag("--mac-address", with.MAC)
	if err := b.do(ctx, "network", "disconnect", name, c.id()); err != nil {
		return err
	}
	ctx = context.WithoutCancel(ctx)
	err := b.do(ctx, append(args, name, c.id())...)
	if err != nil && with != (address{}) {
		err = errors.Join(err, b.do(ctx, plain...))
	}
	return err
}
