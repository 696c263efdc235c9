package podman

import (
	"context"
	"io"
	"path/filepath"
	"strconv"
	"sync"
	"time"

	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/internal/kernel"
	"github.com/agentbox/agentbox/runtime/internal/streams"
)

// Logs reads the file that the monitor writes. A log in the journal is read by podman; where
// the container has both, the file is better: `podman logs` joins and cuts lines as it likes.
func (b *Backend) Logs(ctx context.Context, id string, opts runtime.LogOptions, stdout, stderr io.Writer) error {
	c, err := b.look(ctx, id)
	if err != nil {
		return err
	}
	log := c.HostConfig.LogConfig
	switch log.Type {
	case "k8s-file", "json-file":
	default:
		return b.podmanLogs(ctx, c, opts, stdout, stderr)
	}
	if log.Path == "" {
		log.Path = filepath.Join(c.StaticDir, "ctr.log")
	}
	if !opts.Follow || !c.live() {
		return streams.Print(ctx, log.Path, opts, stdout, stderr)
	}
	return streams.Follow(ctx, log.Path, opts, stdout, stderr, func(ctx context.Context) error {
		// Until the monitor, which writes the log, is gone.
		p, err := kernel.OpenProcess(c.State.ConmonPid)
		if kernel.Gone(err) {
			return nil
		}
		if err != nil {
			return err
		}
		defer p.Close()
		return p.Wait(ctx)
	})
}

func (b *Backend) podmanLogs(
	ctx context.Context, c container, opts runtime.LogOptions, stdout, stderr io.Writer,
) error {
	args := []string{"logs"}
	if opts.Follow {
		args = append(args, "--follow")
	}
	if opts.Tail >= 0 {
		args = append(args, "--tail", strconv.Itoa(opts.Tail))
	}
	if !opts.Since.IsZero() {
		args = append(args, "--since", opts.Since.Format(time.RFC3339Nano))
	}
	if opts.Timestamps {
		args = append(args, "--timestamps")
	}
	cmd, err := b.command(ctx, append(args, c.id())...)
	if err != nil {
		return err
	}
	// They may be the same, and are written to by two goroutines.
	var mu sync.Mutex
	last := &tail{to: &oneAtATime{&mu, stderr}}
	cmd.Stdout, cmd.Stderr = &oneAtATime{&mu, stdout}, last
	if err := cmd.Run(); err != nil {
		return explain(ctx, args, string(last.last), err)
	}
	return nil
}

// oneAtATime serialises writers that share a mutex.
type oneAtATime struct {
	mu *sync.Mutex
	to io.Writer // may be nil
}

func (w *oneAtATime) Write(p []byte) (int, error) {
	if w.to == nil {
		return len(p), nil
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.to.Write(p)
}
