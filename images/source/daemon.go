package source

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"time"

	"github.com/containerd/errdefs"
	"github.com/docker/docker/client"
	"go.opentelemetry.io/otel/trace/noop"

	"github.com/agentbox/agentbox/images/image"
	"github.com/agentbox/agentbox/images/reference"
	"github.com/agentbox/agentbox/internal/fault"
)

// openDaemon takes an image out of the Docker daemon that DOCKER_HOST and the
// like name.
func openDaemon(ctx context.Context, ref reference.Reference, opts image.SourceOptions) (*opened, error) {
	ctx, cancel := bounded(ctx, opts.Timeout)
	defer cancel()
	c, err := dockerClient()
	if err != nil {
		return nil, err
	}
	defer c.Close()
	r, err := c.ImageSave(ctx, []string{ref.Image()})
	if err != nil {
		return nil, daemonError(err)
	}
	defer r.Close()
	t, err := spool(ctx, r, asWhole(opts.Progress), opts)
	if err != nil {
		return nil, err
	}
	return savedImage(ctx, t, ref, opts)
}

func dockerClient() (*client.Client, error) {
	c, err := client.NewClientWithOpts(client.FromEnv, client.WithAPIVersionNegotiation(),
		client.WithTraceProvider(noop.NewTracerProvider()))
	if err != nil {
		return nil, fmt.Errorf("the Docker daemon: %w: %w", fault.ErrInvalid, err)
	}
	return c, nil
}

func daemonError(err error) error {
	switch {
	case errdefs.IsNotFound(err):
		return fmt.Errorf("%w: %w", fault.ErrNotFound, err)
	case client.IsErrConnectionFailed(err):
		return &fault.Error{Hint: "Is the daemon running, and does DOCKER_HOST name it?", Err: err}
	}
	return err
}

// asWhole reports the progress of an image as a whole.
func asWhole(progress func(image.SourceProgress)) func(n int64) {
	if progress == nil {
		return nil
	}
	return func(n int64) { progress(image.SourceProgress{Done: n}) }
}

// openPodman takes an image out of Podman's storage.
func openPodman(ctx context.Context, ref reference.Reference, opts image.SourceOptions) (*opened, error) {
	ctx, cancel := bounded(ctx, opts.Timeout)
	defer cancel()
	id := strings.TrimPrefix(ref.Image(), "sha256:")
	r, err := podman(ctx, nil, "image", "save", "--quiet", "--format=docker-archive", "--", id)
	if err != nil {
		return nil, err
	}
	t, err := spool(ctx, r, asWhole(opts.Progress), opts)
	if e := r.Close(); e != nil { // the cause, should the archive be none
		if t != nil {
			e = errors.Join(e, t.Close())
		}
		if strings.Contains(r.stderr.String(), "image not known") {
			e = fmt.Errorf("%w: %w", fault.ErrNotFound, e)
		}
		return nil, e
	}
	if err != nil {
		return nil, err
	}
	return savedImage(ctx, t, ref, opts)
}

// command is a program whose output is read; Close returns how it ended.
type command struct {
	io.ReadCloser
	cmd      *exec.Cmd
	ctx      context.Context
	stderr   tail
	messages *os.File // where the program's messages go instead; nil: to stderr
	closed   bool
}

// tail keeps the end of a program's output. It embeds no buffer, because its ReadFrom would keep
// everything.
type tail struct{ kept bytes.Buffer }

func (t *tail) Write(p []byte) (int, error) {
	const most = 16 << 10
	n := len(p)
	if len(p) > most {
		p = p[len(p)-most:]
	}
	if over := t.kept.Len() + len(p) - most; over > 0 {
		t.kept.Next(over)
	}
	_, _ = t.kept.Write(p) // into memory
	return n, nil
}

func (t *tail) String() string { return t.kept.String() }

// said is the last lines of it, fit for a terminal.
func (t *tail) said() string {
	lines := strings.Split(strings.TrimSpace(t.String()), "\n")
	lines = lines[max(0, len(lines)-5):]
	return strings.Map(func(r rune) rune {
		if r < ' ' && r != '\n' || r == 0x7f {
			return ' '
		}
		return r
	}, strings.Join(lines, "\n"))
}

func start(ctx context.Context, cmd *exec.Cmd) (*command, error) {
	c := &command{cmd: cmd, ctx: ctx}
	if cmd.Stderr == nil {
		cmd.Stderr = &c.stderr
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	c.ReadCloser = out
	return c, cmd.Start()
}

// Close waits for the end of the program.
func (c *command) Close() error {
	if c.closed {
		return nil
	}
	c.closed = true
	_ = c.ReadCloser.Close()
	err := c.cmd.Wait()
	if c.messages != nil {
		size, e := c.messages.Seek(0, io.SeekEnd)
		_, e2 := io.Copy(&c.stderr, io.NewSectionReader(c.messages, max(0, size-maxMessages), maxMessages))
		err = errors.Join(err, e, e2, c.messages.Close())
	}
	if err != nil && c.ctx.Err() != nil {
		return context.Cause(c.ctx)
	}
	if err != nil {
		return fmt.Errorf("%s: %w: %s", c.cmd.Args[0], err, c.stderr.said())
	}
	return nil
}

// podman runs the command line of that name.
func podman(ctx context.Context, in io.Reader, args ...string) (*command, error) {
	bin, err := exec.LookPath("podman")
	if err != nil {
		return nil, &fault.Error{
			Hint: "Install Podman, or copy the image into an oci: directory where it is.",
			Err:  fmt.Errorf("containers-storage: %w: %w", fault.ErrUnsupported, err),
		}
	}
	cmd := exec.CommandContext(ctx, bin, args...)
	cmd.Stdin = in
	cmd.WaitDelay = 5 * time.Second
	return start(ctx, cmd)
}
