package images

import (
	"context"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/failpoint"
	"github.com/agentbox/agentbox/internal/guard"
)

// publisher makes unpacked layers visible once they are on disk. Layers that arrive while the
// disk is busy share the next call: one for the whole file system instead of one per file or per
// layer.
type publisher struct {
	s    *Store
	ctx  context.Context
	in   chan unpacked
	done chan struct{}
}

type unpacked struct {
	dir    string
	hold   *os.File
	diffID string
	result chan error
}

func (s *Store) publisher(ctx context.Context) *publisher {
	p := &publisher{s: s, ctx: ctx, in: make(chan unpacked), done: make(chan struct{})}
	guard.Go(p.run)
	return p
}

func (p *publisher) close() {
	close(p.in)
	<-p.done
}

// publish returns when the layer in dir is durable and visible.
func (p *publisher) publish(dir string, hold *os.File, diffID string) error {
	u := unpacked{dir, hold, diffID, make(chan error, 1)}
	p.in <- u
	return <-u.result
}

func (p *publisher) run() {
	defer close(p.done)
	for u := range p.in {
		batch := []unpacked{u}
		for more := true; more; {
			select {
			case next, ok := <-p.in:
				if more = ok; ok {
					batch = append(batch, next)
				}
			default:
				more = false
			}
		}
		err := guard.Do(func() error { return p.sync(u) })
		for _, u := range batch {
			if err != nil {
				u.result <- err
				continue
			}
			u.result <- guard.Do(func() error { return p.show(u) })
		}
	}
}

func (p *publisher) sync(u unpacked) error {
	if err := failpoint.Hit("images.pull.before-sync"); err != nil {
		return err
	}
	if err := p.ctx.Err(); err != nil {
		return err
	}
	if err := unix.Syncfs(int(u.hold.Fd())); err != nil {
		return fmt.Errorf("write the layer to disk: %w", err)
	}
	return nil
}

func (p *publisher) show(u unpacked) error {
	return p.s.locked(func() error {
		if err := failpoint.Hit("images.pull.before-rename"); err != nil {
			return err
		}
		if err := p.s.place(u.dir, u.diffID); err != nil {
			return err
		}
		return failpoint.Hit("images.pull.after-rename")
	})
}
