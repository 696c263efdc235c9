package oci

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/internal/guard"
	"github.com/agentbox/agentbox/overlay"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/internal/userns"
)

// A sandbox in a user namespace of its own has its root filesystem mounted with mapped ids, and
// a network namespace that belongs to that user namespace: only the OCI runtime can make it,
// and after a restore only CRIU. So its network is made by a hook, which names the process in
// the namespace to the waiting start.

// fillVerb is how the hook calls the wrapper: with the path of a socket.
const fillVerb = "agentbox-fill"

// letThrough lets the root of a sandbox's user namespace get to what is mounted
// into it: the OCI runtime mounts the root filesystem, and CRIU all else, with
// no more rights than that user has.
func (b *Backend) letThrough(s runtime.Spec) error {
	if s.IDs == nil {
		return nil
	}
	// Only root and the sandbox's group may enter its directories. Those above can be passed,
	// not listed.
	for _, dir := range []string{b.box.Dir(s.ID), b.box.RunDir(s.ID)} {
		if err := os.Chown(dir, 0, int(s.IDs.Base)); err != nil {
			return err
		}
		if err := os.Chmod(dir, 0o710); err != nil {
			return err
		}
	}
	for _, own := range []string{filepath.Dir(b.box.Dir(s.ID)), b.box.Base, b.box.Run, b.box.Stage} {
		if err := os.Chmod(own, 0o711); err != nil {
			return err
		}
	}
	shut, err := userns.PrivateParent(b.box.Base, b.box.Stage)
	if err == nil && shut != "" {
		err = &fault.Error{
			Err:  fmt.Errorf("%w: a user namespace does not get through %s, and the sandbox's files are mounted below it", fault.ErrUnsupported, shut),
			Hint: "Let others pass (chmod o+x " + shut + ").",
		}
	}
	return err
}

// mapBinds mounts what is bound into a sandbox with the ids of its user namespace: the
// sandbox's root owns there what the host's root owns. The spec that it returns binds these.
func (b *Backend) mapBinds(s runtime.Spec) (runtime.Spec, error) {
	if s.IDs == nil {
		return s, nil
	}
	if err := b.unmapBinds(s.ID); err != nil {
		return s, err
	}
	s.Mounts = slices.Clone(s.Mounts)
	for i, m := range s.Mounts {
		if m.Type != "bind" {
			continue
		}
		source, err := filepath.EvalSymlinks(m.Source)
		if err != nil {
			return s, err
		}
		st, err := os.Stat(source)
		if err != nil {
			return s, err
		}
		// CRIU looks for it there when it restores.
		target := b.box.Dir(s.ID, "binds", strconv.Itoa(i))
		if err := os.MkdirAll(filepath.Dir(target), 0o711); err != nil {
			return s, err
		}
		if st.IsDir() {
			err = os.Mkdir(target, 0o700)
		} else {
			err = os.WriteFile(target, nil, 0o600)
		}
		if err == nil {
			err = overlay.Bind(source, target, *s.IDs)
		}
		if errors.Is(err, fault.ErrUnsupported) {
			err = &fault.Error{Err: err, Hint: "Do without --volume " + m.Source + "."}
		}
		if err != nil {
			return s, fmt.Errorf("volume %s: %w", m.Source, err)
		}
		s.Mounts[i].Source = target
	}
	return s, nil
}

// unmapBinds is the reverse of mapBinds.
func (b *Backend) unmapBinds(id string) error {
	dir := b.box.Dir(id, "binds")
	list, err := os.ReadDir(dir)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	errs := []error{err}
	for _, f := range list {
		path := filepath.Join(dir, f.Name())
		err := overlay.Unmount(path, overlay.UnmountOptions{Lazy: true})
		if err == nil {
			err = os.Remove(path) // not what is in it
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// filler waits for the hook and makes the network.
type filler struct {
	socket *net.UnixListener
	ended  <-chan error
}

// filler adds the hook to a bundle. The socket's directory is root's.
func (b *Backend) filler(ctx context.Context, s runtime.Spec, bundle *specs.Spec) (*filler, error) {
	path := b.box.RunDir(s.ID, "fill.sock")
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	// A socket's path has at most 107 bytes, and this process its descriptors.
	dir, err := os.Open(filepath.Dir(path))
	if err != nil {
		return nil, err
	}
	defer dir.Close()
	socket, err := net.ListenUnix("unix", &net.UnixAddr{Name: fmt.Sprintf("/proc/self/fd/%d/%s",
		dir.Fd(), filepath.Base(path))})
	if err != nil {
		return nil, err
	}
	socket.SetUnlinkOnClose(false)
	bundle.Hooks = &specs.Hooks{CreateRuntime: []specs.Hook{{
		Path: b.box.Wrapper, Args: []string{b.box.Wrapper, fillVerb, path},
	}}}
	f := &filler{socket: socket}
	f.ended = guard.Start(func() error { return f.serve(ctx, b, s) })
	return f, nil
}

// done ends the wait and says how it went.
func (f *filler) done() error {
	if f == nil {
		return nil
	}
	_ = f.socket.Close()
	return <-f.ended
}

// serve answers the hook, once. That none came is no error: then there is
// another, which kept it from coming.
func (f *filler) serve(ctx context.Context, b *Backend, s runtime.Spec) error {
	conn, err := f.socket.AcceptUnix()
	if err != nil {
		return nil
	}
	defer conn.Close()
	err = func() error {
		text, err := io.ReadAll(io.LimitReader(conn, 32))
		if err != nil {
			return err
		}
		pid, err := strconv.Atoi(strings.TrimSpace(string(text)))
		if err != nil {
			return err
		}
		ns, err := os.Open(fmt.Sprintf("/proc/%d/ns/net", pid))
		if err != nil {
			return err
		}
		defer ns.Close()
		_, err = b.box.Net.Fill(ctx, s.ID, s.Network, ns)
		return err
	}()
	if err != nil {
		_, _ = fmt.Fprint(conn, err) // the same error is ours to return
		return err
	}
	_, err = conn.Write([]byte("ok"))
	return err
}
