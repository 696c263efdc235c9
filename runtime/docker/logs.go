package docker

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"
	"time"

	"github.com/docker/docker/api/types/container"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/runtime"
)

// Logs writes what the daemon's log driver has kept.
//
// For the daemon a message is at most 16 KiB, so that a long line is several:
// its own tail counts messages, and its timestamps stand in the middle of long
// lines. Both are put right here.
func (b *Backend) Logs(ctx context.Context, id string, opts runtime.LogOptions, stdout, stderr io.Writer) error {
	c, err := b.find(ctx, id)
	if err != nil {
		return err
	}
	ask := container.LogsOptions{
		ShowStdout: true, ShowStderr: true, Timestamps: opts.Timestamps, Follow: opts.Follow && c.live(), Tail: "all",
	}
	if !opts.Since.IsZero() {
		ask.Since = fmt.Sprintf("%d.%09d", opts.Since.Unix(), opts.Since.Nanosecond())
		if opts.Since.After(time.Now()) && !ask.Follow {
			return nil // the daemon takes a time to come for none
		}
	}
	if opts.Tail >= 0 {
		n, err := b.messages(ctx, c, opts.Tail, ask)
		if err != nil {
			return err
		}
		ask.Tail = strconv.Itoa(n)
	}
	p := &printer{timestamps: opts.Timestamps, out: [2]io.Writer{orDiscard(stdout), orDiscard(stderr)}}
	return b.readLog(ctx, c, ask, p.print, p.out[0])
}

// readLog passes a log's messages on; a terminal's go to raw as they are.
func (b *Backend) readLog(
	ctx context.Context, c box, ask container.LogsOptions, fn func(stderr bool, message []byte) error, raw io.Writer,
) error {
	r, err := b.api.ContainerLogs(ctx, c.ID, ask)
	if err != nil {
		err = b.explain(ctx, err)
		if strings.Contains(err.Error(), "does not support reading") {
			return hint(fmt.Errorf("%w: %w", fault.ErrUnsupported, err),
				"The daemon has another place for this container's log (docker inspect -f '{{.HostConfig.LogConfig.Type}}').")
		}
		return err
	}
	defer r.Close()
	if c.Config.Tty {
		_, err = io.Copy(raw, r)
	} else {
		err = frames(r, fn)
	}
	if ctx.Err() != nil {
		return ctx.Err()
	}
	if errors.Is(err, io.ErrUnexpectedEOF) && ask.Follow {
		return nil // the container was removed
	}
	return err
}

// messages counts the daemon's messages that the last lines are made of.
func (b *Backend) messages(ctx context.Context, c box, lines int, ask container.LogsOptions) (int, error) {
	if lines == 0 || c.Config.Tty {
		return lines, nil
	}
	ask.Follow, ask.Timestamps = false, false
	// One line more than wanted shows whether the first of them is whole.
	for want := lines + 1; ; want *= 4 {
		ask.Tail = strconv.Itoa(want)
		var ends []bool // of lines
		err := b.readLog(ctx, c, ask, func(_ bool, m []byte) error {
			ends = append(ends, bytes.HasSuffix(m, []byte("\n")))
			return nil
		}, io.Discard)
		if err != nil {
			return 0, err
		}
		found, n := 0, 0
		for i := len(ends) - 1; i >= 0; i-- {
			if (ends[i] || i == len(ends)-1) && found == lines {
				return n, nil
			}
			if ends[i] || i == len(ends)-1 {
				found++
			}
			n++
		}
		if len(ends) < want {
			return n, nil // that is all there is
		}
	}
}

// printer writes messages as what was printed.
type printer struct {
	timestamps bool
	out        [2]io.Writer
	mid        [2]bool // the stream is within a line
}

func (p *printer) print(stderr bool, m []byte) error {
	i := 0
	if stderr {
		i = 1
	}
	if p.timestamps && p.mid[i] {
		_, m, _ = bytes.Cut(m, []byte(" "))
	}
	p.mid[i] = !bytes.HasSuffix(m, []byte("\n"))
	_, err := p.out[i].Write(m)
	return err
}
