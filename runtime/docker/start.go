package docker

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/docker/docker/api/types/container"
	"github.com/docker/docker/client"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/criu/stage"
	"github.com/agentbox/agentbox/internal/failpoint"
	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/internal/undo"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/internal/bundle"
	"github.com/agentbox/agentbox/runtime/internal/kernel"
	"github.com/agentbox/agentbox/runtime/internal/streams"
)

// Start is the daemon's. The variables of this start and the files of /etc that are the
// sandbox's by now, for which the daemon has no parameter, are staged for the OCI runtime.
func (b *Backend) Start(ctx context.Context, id string, opts runtime.StartOptions) (wait func() error, err error) {
	c, err := b.find(ctx, id)
	if err != nil {
		return nil, err
	}
	if c.live() {
		return nil, fmt.Errorf("container %s is %s: %w", id, c.status, fault.ErrState)
	}
	info, err := b.info(ctx, false)
	if err != nil {
		return nil, err
	}
	staged, lerr := stage.At(b.stageRun, c.ID).Load()
	restores := !errors.Is(lerr, fault.ErrNotFound)
	_, wrapped := b.ociRuntime(c)
	var undo undo.Stack
	defer func() { undo.Run(ctx, &err) }()
	if err := b.putSecrets(ctx, c, id, opts.Secrets); err != nil {
		return nil, err
	}
	undo.Add(func(context.Context) error { return b.place(id).DropSecrets() })
	start := container.StartOptions{}
	var kept []string
	switch {
	case wrapped:
		s := stage.Start{Env: opts.Env}
		if s.Files, kept, err = b.keep(c, restores); err != nil {
			return nil, err
		}
		if s2, err := specOfLabel(c); c.own() && err == nil && s2.AutoRemove && b.self != "" {
			s.Reap = b.reaper(id)
		}
		if err := stage.At(b.stageRun, c.ID).PutStart(s); err != nil {
			return nil, err
		}
		undo.Add(func(context.Context) error { return stage.At(b.stageRun, c.ID).ClearStart() })
	case restores && restoresItself(info, c) != "":
		return nil, fmt.Errorf("container %s runs under the OCI runtime %s, which restores nothing, and %s: %w", id,
			c.HostConfig.Runtime, restoresItself(info, c), fault.ErrUnsupported)
	case restores:
		if start.CheckpointID, err = b.layOutCheckpoint(c); err != nil {
			return nil, err
		}
		undo.Add(func(context.Context) error { return b.dropCheckpoints(c) })
	}
	if err := failpoint.Hit("docker.start.after-stage"); err != nil {
		return nil, err
	}
	var a *streams.Attachment
	if opts.Streams != nil {
		if a, err = b.attach(ctx, c, *opts.Streams, true); err != nil {
			return nil, err
		}
		undo.Add(func(context.Context) error { a.Close(); return nil })
	}
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	undo.Add(func(ctx context.Context) error { return b.quell(ctx, c) })
	call, cancel := whole(ctx)
	defer cancel()
	if err := b.api.ContainerStart(call, c.ID, start); err != nil {
		if e := commandError(append([]string{c.Path}, c.Args...), err.Error()); e != nil && !restores {
			return nil, e
		}
		return nil, b.explain(call, err)
	}
	if err := failpoint.Hit("docker.start.after-start"); err != nil {
		return nil, err
	}
	if err := b.started(call, c, restores, kept, staged.Addresses); err != nil {
		return nil, err
	}
	if start.CheckpointID != "" {
		if err := errors.Join(stage.At(b.stageRun, c.ID).MarkRestored(), stage.At(b.stageRun, c.ID).ClearRestored(),
			b.dropCheckpoints(c)); err != nil {
			return nil, err
		}
	}
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	if a == nil {
		return nil, nil
	}
	a.AwaitSize()
	a.Serve()
	return a.Wait, nil
}

// putSecrets lays out the secrets of a container that is to start, and what a run
// that ended by itself left of them goes.
func (b *Backend) putSecrets(ctx context.Context, c box, id string, files []runtime.SecretFile) error {
	if !c.own() {
		return nil
	}
	s, err := specOfLabel(c)
	if err != nil || len(s.Secrets) == 0 {
		return err
	}
	var user bundle.User
	err = b.Mount(ctx, id, func(path string) error {
		root, err := kernel.OpenRoot(path)
		if err != nil {
			return err
		}
		user, err = bundle.LookUser(root, s.User)
		return errors.Join(err, root.Close())
	})
	if err != nil {
		return err
	}
	p := b.place(id)
	return errors.Join(p.DropSecrets(), p.PutSecrets(s, files, specs.User{UID: user.UID, GID: user.GID}))
}

// place returns the place of a container's secrets.
func (b *Backend) place(id string) bundle.Place {
	return bundle.Place{Secrets: filepath.Join(b.run, id, "secrets")}
}

// reaper is the command that sees to an --rm sandbox when it has exited. It
// begins with containerd's environment, which names no daemon.
func (b *Backend) reaper(id string) []string {
	args := []string{b.self, "--root", b.root, "reap", id}
	if env, err := exec.LookPath("env"); err == nil {
		args = append([]string{env, client.EnvOverrideHost + "=" + b.host, stage.Env + "=" + b.stageRun}, args...)
	}
	return args
}

// quell ends what a failed or abandoned start has begun.
func (b *Backend) quell(ctx context.Context, c box) error {
	now, err := b.inspect(ctx, c.ID)
	if errors.Is(err, fault.ErrNotFound) {
		return nil
	}
	if err != nil || !now.live() {
		return err
	}
	return b.end(ctx, now, runtime.StopOptions{})
}

// started does what is left when the processes run. Restored sockets are at
// some addresses.
func (b *Backend) started(ctx context.Context, c box, restores bool, kept []string, sockets []netip.Addr) error {
	if !restores && len(kept) == 0 && len(b.readNote(c).Kept) == 0 {
		return nil
	}
	now, err := b.inspect(ctx, c.ID)
	if errors.Is(err, fault.ErrNotFound) {
		return nil // it removes itself
	}
	if err != nil {
		return err
	}
	if err := keptAddresses(now, sockets); err != nil {
		return err
	}
	n := b.readNote(now)
	n.Kept, n.Started = kept, now.State.StartedAt
	if err := writeNote(now, n); err != nil {
		return err
	}
	if restores && now.State.Running && !now.State.Paused && now.status == runtime.Paused {
		// Restored as it was, frozen; the daemon is to know.
		if err := b.api.ContainerPause(ctx, c.ID); err != nil {
			return b.explain(ctx, err)
		}
	}
	return nil
}

// keptAddresses fails when the daemon has given a container other addresses than
// its sockets have. Daemons before version 28 do that before the restore, which
// then fails by itself.
func keptAddresses(c box, sockets []netip.Addr) error {
	if c.NetworkSettings == nil || !ownNetwork(c) || !c.live() {
		return nil
	}
	var has []netip.Addr
	for _, e := range c.NetworkSettings.Networks {
		for _, text := range []string{e.IPAddress, e.GlobalIPv6Address} {
			if a, err := netip.ParseAddr(text); err == nil {
				has = append(has, a)
			}
		}
	}
	for _, a := range sockets {
		if !slices.Contains(has, a) {
			return hint(fmt.Errorf("%w: container %s: sockets of its processes are at %s, and the daemon has given it %v this time", fault.ErrUnsupported, c.ID, a, has),
				"Give it a fixed address (docker run --ip, on a network with a subnet of its own), or restore the files alone.")
		}
	}
	return nil
}

// keep reads the managed files that were changed since the daemon last wrote
// them, in the sandbox or by a restore: it writes all of them at every start.
// For restored processes all are kept as they are.
func (b *Backend) keep(c box, restores bool) (files []stage.File, kept []string, err error) {
	n := b.readNote(c)
	begin := instant(c.State.StartedAt)
	for target, path := range managed(c) {
		f, at, err := readManaged(path)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, nil, fmt.Errorf("read %s of container %s: %w", target, c.ID, err)
		}
		ours := slices.Contains(n.Kept, target) && n.Started == c.State.StartedAt
		if begin.IsZero() && !restores || !restores && !ours && !at.After(begin) {
			continue
		}
		if !restores && !ours && unchanged(path, f.Data) {
			continue
		}
		if target == "/etc/hosts" && !restores {
			f.Host = c.Config.Hostname
		}
		files, kept = append(files, f), append(kept, target)
	}
	slices.Sort(kept)
	return files, kept, nil
}

// unchanged reports whether a file is as the daemon has written it: beside
// resolv.conf, which since version 28 is written after the start as the daemon
// has it on record, lies the digest of what it wrote.
func unchanged(path string, data []byte) bool {
	digest, err := os.ReadFile(path + ".hash")
	sum := sha256.Sum256(data)
	return err == nil && strings.Contains(string(digest), hex.EncodeToString(sum[:]))
}

const maxManaged = 1 << 20

func readManaged(path string) (out stage.File, at time.Time, err error) {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if err != nil {
		return out, at, err
	}
	defer f.Close()
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return out, at, err
	}
	if st.Mode&unix.S_IFMT != unix.S_IFREG || st.Size > maxManaged {
		return out, at, fmt.Errorf("%w: %s is not a small regular file", fault.ErrInvalid, path)
	}
	out = stage.File{Path: path, Mode: st.Mode & 0o7777, UID: st.Uid, GID: st.Gid}
	out.Data, err = io.ReadAll(io.LimitReader(f, maxManaged))
	return out, time.Unix(st.Mtim.Unix()), err
}

// startEnv is the environment of the first process that the OCI runtime was given beyond the
// container's configuration.
func startEnv(c box) []string {
	spec, err := bundleSpec(c)
	if err != nil || spec.Process == nil {
		return nil
	}
	known := map[string]bool{}
	for _, kv := range c.Config.Env {
		known[kv] = true
	}
	var env []string
	for _, kv := range spec.Process.Env {
		name, _, _ := strings.Cut(kv, "=")
		if !known[kv] && name != "TERM" && name != "HOSTNAME" && name != "PATH" && name != "HOME" {
			env = append(env, kv)
		}
	}
	return env
}
