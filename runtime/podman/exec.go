package podman

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"syscall"

	"github.com/creack/pty"
	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/criu"
	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/internal/guard"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/internal/kernel"
	"github.com/agentbox/agentbox/runtime/internal/streams"
)

// connect opens a connection to the container's first process, at its monitor.
func (c container) connect(ctx context.Context, ends runtime.Streams, size *runtime.Size) (*streams.Attachment, error) {
	resize := func(s runtime.Size) {
		f, err := os.OpenFile(filepath.Join(c.StaticDir, "ctl"), os.O_WRONLY|unix.O_NONBLOCK, 0)
		if err != nil {
			return // the process has ended
		}
		defer f.Close()
		_, _ = fmt.Fprintf(f, "1 %d %d\n", s.Height, s.Width)
	}
	return streams.Connect(ctx, filepath.Join(c.StaticDir, "attach"), ends, c.Config.Tty, size, resize)
}

// Attach connects streams to a running container's first process.
func (b *Backend) Attach(ctx context.Context, id string, ends runtime.Streams) error {
	c, err := b.look(ctx, id)
	if err != nil {
		return err
	}
	if !c.live() {
		return fmt.Errorf("container %s is %s: %w", c.Name, c.status, fault.ErrState)
	}
	var size *runtime.Size
	if c.Config.Tty {
		size = streams.FirstSize(ctx, ends.Resize)
	}
	a, err := c.connect(ctx, ends, size)
	if errors.Is(err, os.ErrNotExist) || errors.Is(err, syscall.ECONNREFUSED) {
		return fmt.Errorf("container %s: its monitor is gone: %w", c.Name, fault.ErrState)
	}
	if err != nil {
		return err
	}
	a.Serve()
	return a.Wait()
}

// mark identifies an exec among a container's processes: Podman does not say which one it
// started.
const mark = "AGENTBOX_EXEC"

// Exec is `podman exec`. If ctx ends while the caller is attached, the process is killed; a
// detached one goes on.
func (b *Backend) Exec(ctx context.Context, id string, p runtime.Process, ends runtime.Streams) (exit int, err error) {
	c, err := b.look(ctx, id)
	if err != nil {
		return 0, err
	}
	if c.status != runtime.Running {
		return 0, runtime.Unstarted(fmt.Errorf("container %s is %s: %w", c.Name, c.status, fault.ErrState))
	}
	if len(p.Args) == 0 {
		return 0, fmt.Errorf("no command: %w", fault.ErrInvalid)
	}
	var random [8]byte
	_, _ = rand.Read(random[:])
	token := mark + "=" + hex.EncodeToString(random[:])

	args := []string{"exec"}
	if m := b.remember(id); m.Started.Equal(c.State.StartedAt) {
		p.Env = append(append([]string{}, m.Env...), p.Env...)
	}
	for _, kv := range append(p.Env, token) {
		args = append(args, "--env", kv)
	}
	if p.Workdir != "" {
		args = append(args, "--workdir", p.Workdir)
	}
	if p.User != "" {
		args = append(args, "--user", p.User)
	}
	if p.Detach {
		args = append(append(args, "--detach", c.id()), p.Args...)
		return 0, commandError(p.Args, b.do(ctx, args...))
	}
	if ends.Stdin != nil {
		args = append(args, "--interactive")
	}
	if p.Terminal {
		args = append(args, "--tty", "--detach-keys=")
	}
	cmd, err := b.command(context.WithoutCancel(ctx), append(append(args, c.id()), p.Args...)...)
	if err != nil {
		return 0, err
	}
	var last *tail
	if p.Terminal {
		last, err = terminal(ctx, cmd, ends)
	} else {
		last, err = pipes(ctx, cmd, ends)
	}
	switch {
	case errors.Is(err, runtime.ErrDetached):
		_ = cmd.Process.Kill() // podman's, which only watches
		guard.Start(cmd.Wait)
		return 0, err
	case ctx.Err() != nil:
		c.killMarked(token)
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		return 0, ctx.Err()
	}
	var failed *exec.ExitError
	if err == nil || !errors.As(err, &failed) {
		return 0, err
	}
	code := failed.ExitCode()
	if code < 125 || code > 127 || !bytes.Contains(last.last, []byte("Error: ")) {
		return code, nil
	}
	// The code is podman's own, or the command's.
	told := explain(ctx, args, string(bytes.ReplaceAll(last.last, []byte("\r"), nil)), failed)
	if cerr := commandError(p.Args, told); cerr != told {
		return 0, cerr
	}
	if code == 125 {
		return 0, told
	}
	return code, nil
}

// pipes runs podman between the streams and waits for it.
func pipes(ctx context.Context, cmd *exec.Cmd, ends runtime.Streams) (*tail, error) {
	// Both may be the same writer, and are written to by two goroutines.
	var mu sync.Mutex
	last := &tail{to: &oneAtATime{&mu, ends.Stderr}}
	cmd.Stdout, cmd.Stderr = &oneAtATime{&mu, ends.Stdout}, last
	var stdin io.WriteCloser
	if ends.Stdin != nil {
		var err error
		if stdin, err = cmd.StdinPipe(); err != nil {
			return last, err
		}
	}
	if err := cmd.Start(); err != nil {
		return last, err
	}
	if stdin != nil {
		guard.Go(func() { // until the next read returns, since a read cannot be called off
			defer stdin.Close()
			_, _ = io.Copy(stdin, ends.Stdin)
		})
	}
	done := guard.Start(cmd.Wait)
	select {
	case err := <-done:
		return last, err
	case <-ctx.Done():
		return last, ctx.Err()
	}
}

// terminal runs podman in a terminal of its own.
func terminal(ctx context.Context, cmd *exec.Cmd, ends runtime.Streams) (*tail, error) {
	last := &tail{to: ends.Stdout}
	size := streams.FirstSize(ctx, ends.Resize)
	if size == nil {
		size = &runtime.Size{Width: 80, Height: 24}
	}
	cmd.SysProcAttr = nil // pty makes the session
	master, err := pty.StartWithSize(cmd, &pty.Winsize{Rows: size.Height, Cols: size.Width})
	if err != nil {
		return last, err
	}
	defer master.Close()
	ended, detached, done := make(chan struct{}), make(chan struct{}), make(chan struct{})
	defer close(done)
	guard.Go(func() { // until podman has closed its end, which is EIO
		defer close(ended)
		_, _ = io.Copy(last, master)
	})
	if ends.Stdin != nil {
		guard.Go(func() {
			keys := streams.Detacher{Keys: ends.DetachKeys}
			buf := make([]byte, 8<<10)
			for {
				n, err := ends.Stdin.Read(buf)
				out, left := keys.Filter(buf[:n])
				if _, werr := master.Write(out); werr != nil {
					return
				}
				if left {
					close(detached)
					return
				}
				if err != nil {
					_, _ = master.Write(append(keys.Rest(), 4)) // end of input, as a terminal has it
					return
				}
			}
		})
	}
	if ends.Resize != nil {
		guard.Go(func() {
			for {
				select {
				case s, ok := <-ends.Resize:
					if !ok {
						return
					}
					_ = pty.Setsize(master, &pty.Winsize{Rows: s.Height, Cols: s.Width})
				case <-done:
					return
				}
			}
		})
	}
	select {
	case <-ended:
		return last, cmd.Wait()
	case <-detached:
		return last, runtime.ErrDetached
	case <-ctx.Done():
		return last, ctx.Err()
	}
}

// killMarked kills the process that an exec started. Its children live on.
func (c container) killMarked(token string) {
	pids, _ := criu.Members(c.State.Pid)
	for _, pid := range pids {
		p, err := kernel.OpenProcess(pid)
		if err != nil {
			continue
		}
		env, err := os.ReadFile(fmt.Sprintf("/proc/%d/environ", pid))
		if err == nil && bytes.Contains(append([]byte{0}, env...), []byte("\x00"+token+"\x00")) {
			_ = p.Kill(unix.SIGKILL)
		}
		p.Close()
	}
}

// Mount makes the root filesystem reachable: by Podman, which counts how often
// it has mounted it.
func (b *Backend) Mount(ctx context.Context, id string, fn func(root string) error) error {
	c, err := b.look(ctx, id)
	if err != nil {
		return err
	}
	if c.live() {
		// With all that is mounted in it.
		p, err := kernel.OpenProcess(c.State.Pid)
		if err != nil && !kernel.Gone(err) {
			return err
		}
		if err != nil {
			return fmt.Errorf("container %s has ended: %w", c.Name, fault.ErrState)
		}
		defer p.Close()
		root, err := p.Root()
		if err != nil {
			return err
		}
		defer root.Close()
		// Under our pid, so that programs which fn starts find it as well.
		return fn(fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), root.Fd()))
	}
	out, err := b.ask(context.WithoutCancel(ctx), "mount", c.id())
	if err != nil {
		return err
	}
	root := string(bytes.TrimSpace(out))
	if !filepath.IsAbs(root) {
		err = fmt.Errorf("podman mount named %q: %w", root, fault.ErrUnsupported)
	} else {
		err = fn(root)
	}
	return errors.Join(err, b.do(context.WithoutCancel(ctx), "unmount", c.id()))
}
