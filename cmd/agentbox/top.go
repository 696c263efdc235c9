package main

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/docker/go-units"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"golang.org/x/term"

	"github.com/agentbox/agentbox/runtime"
)

// soonestTop is the shortest time between two samples; firstTop how long the first
// table waits at most: a share of the processors needs two samples.
const (
	soonestTop = 100 * time.Millisecond
	firstTop   = time.Second
)

type topOptions struct {
	All      bool
	NoStream bool
	NoDisk   bool
	Interval time.Duration
	Format   string
}

func (o *topOptions) addFlags(fl *pflag.FlagSet) {
	fl.BoolVarP(&o.All, "all", "a", false, "those that do not run, too")
	fl.BoolVar(&o.NoStream, "no-stream", false, "print it once, after a second at most")
	fl.BoolVar(&o.NoDisk, "no-disk", false, "do not count what files take")
	fl.DurationVar(&o.Interval, "interval", 2*time.Second, "look again each `DURATION`, 100ms at least")
	addFormat(fl, &o.Format, formatTable, formatJSON)
}

func newTopCommand(a *app) *cobra.Command {
	var opts topOptions
	cmd := &cobra.Command{
		Use:     "top [flags] [SANDBOX...]",
		Aliases: []string{"stats"},
		Short:   "Show what sandboxes use, live",
		Long: `Top, which is also stats, shows what each sandbox uses, the busiest first, until Ctrl-C or until
all that were named are removed: on a terminal one table that is drawn anew, as high as the
terminal, elsewhere a table for each look.

  CPU %        since the look before; 100% is one core. "-" when that was before its start
  MEM USAGE    without what is only cached of files that are not in use, as Docker counts it
  PIDS         processes and threads
  DISK         what its own files take, as --storage-size counts them. They are counted each
               10 seconds at most, and less often where that takes long: it costs 5% of a core
               at most. "-" when two seconds do not do for one sandbox. --no-disk leaves it out
  CHECKPOINT   when its newest one was taken

With --format json it prints one object a line for each sandbox and look: sandbox (its id),
name, status, time, started, cpu_ns (since then), cpu_percent (null: not known), memory,
memory_limit, pids, pids_limit, disk, storage_limit (bytes; a limit of 0: none), checkpoint.`,
		Example: `  agentbox top
  agentbox top --no-stream c d
  agentbox stats -a --no-stream --no-disk
  agentbox top --format json --interval 10s >>usage.jsonl`,
		Annotations:       exits(exitUsage, exitNotFound, exitDenied, exitSignal),
		Args:              args(0, -1),
		ValidArgsFunction: a.completeSandboxes(nil),
		RunE: func(cmd *cobra.Command, args []string) error {
			if opts.Interval < soonestTop {
				return usageErrorf("--interval %v: %v at least", opts.Interval, soonestTop)
			}
			return a.service(cmd.Context(), func(svc runtime.Service) error {
				return runTop(cmd.Context(), opts, args, svc, a.stdout, a.now)
			})
		},
	}
	opts.addFlags(cmd.Flags())
	completeFlags(cmd)
	return cmd
}

// usageLine is one line of --format json.
type usageLine struct {
	runtime.Stats
	CPUPercent *float64 `json:"cpu_percent"`
}

func runTop(
	ctx context.Context, opts topOptions, refs []string, svc runtime.Service, out io.Writer, now func() time.Time,
) (err error) {
	defer func() {
		// Ctrl-C is how one ends it; then there is nothing to tell.
		if stop := (signalError{}); errors.As(context.Cause(ctx), &stop) {
			if err = stop.status(); stop.sig == syscall.SIGINT && !opts.NoStream {
				err = nil
			}
		}
	}()
	ask := runtime.StatsOptions{Sandboxes: refs, All: opts.All}
	last, err := svc.Stats(ctx, ask)
	if err != nil {
		return err
	}
	ask.Disk = !opts.NoDisk
	wait := min(opts.Interval, firstTop)
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(wait):
		}
		stats, err := svc.Stats(ctx, ask)
		if errors.Is(err, runtime.ErrNotFound) && len(refs) > 0 {
			if ask.Sandboxes, err = still(ctx, ask.Sandboxes, svc); err != nil || len(ask.Sandboxes) == 0 {
				return err
			}
			continue
		}
		if err != nil {
			return err
		}
		if err := printTop(opts.Format, usageLines(last, stats), out, now()); err != nil || opts.NoStream {
			return err
		}
		last, wait = stats, opts.Interval
	}
}

// still are those of refs that are there.
func still(ctx context.Context, refs []string, svc runtime.Service) (there []string, err error) {
	for _, ref := range refs {
		if _, err := svc.Sandbox(ctx, ref); errors.Is(err, runtime.ErrNotFound) {
			continue
		} else if err != nil {
			return nil, err
		}
		there = append(there, ref)
	}
	return there, nil
}

// usageLines compares two samples, and has the busiest first.
func usageLines(last, stats []runtime.Stats) []usageLine {
	before := map[string]runtime.Stats{}
	for _, s := range last {
		before[s.Sandbox] = s
	}
	lines := make([]usageLine, len(stats))
	for i, s := range stats {
		lines[i].Stats = s
		b := before[s.Sandbox]
		if span := s.Time.Sub(b.Time); b.CPU > 0 && b.Started.Equal(s.Started) && s.CPU >= b.CPU && span > 0 {
			share := math.Round(float64(s.CPU-b.CPU)/float64(span)*1e4) / 100
			lines[i].CPUPercent = &share
		}
	}
	share := func(l usageLine) float64 {
		if l.CPUPercent == nil {
			return 0
		}
		return *l.CPUPercent
	}
	slices.SortStableFunc(lines, func(a, b usageLine) int { return cmp.Compare(share(b), share(a)) })
	return lines
}

// printTop prints one sample at once.
func printTop(format string, lines []usageLine, out io.Writer, now time.Time) error {
	var buf bytes.Buffer
	if format == formatJSON {
		enc := json.NewEncoder(&buf)
		enc.SetEscapeHTML(false)
		for _, l := range lines {
			if err := enc.Encode(l); err != nil {
				return err
			}
		}
	} else if err := topTable(lines, &buf, now); err != nil {
		return err
	}
	if isTerminalWriter(out) && format == formatTable {
		cols, rows, err := term.GetSize(int(out.(*os.File).Fd()))
		if err != nil {
			return err
		}
		text := frame(buf.String(), cols, rows)
		buf.Reset()
		buf.WriteString(text)
	}
	_, err := out.Write(buf.Bytes())
	return err
}

func topTable(lines []usageLine, out io.Writer, now time.Time) error {
	// As wide as most of what is below, lest the columns move with each look.
	t := newTable(out, "NAME", "CPU % ", "MEM USAGE / LIMIT  ", "PIDS", "DISK  ", "CHECKPOINT    ", "STATUS")
	for _, l := range lines {
		share, memory, pids, disk := "-", "-", "-", "-"
		if l.CPUPercent != nil {
			share = fmt.Sprintf("%.1f%%", *l.CPUPercent)
		}
		if l.Pids > 0 {
			memory, pids = units.BytesSize(float64(l.Memory))+" / ", fmt.Sprint(l.Pids)
			if l.MemoryLimit > 0 {
				memory += units.BytesSize(float64(l.MemoryLimit))
			} else {
				memory += "-"
			}
		}
		if l.Disk != nil {
			disk = sizeText(*l.Disk)
		}
		t.row(l.Name, share, memory, pids, disk, cmp.Or(ago(now, l.Checkpoint), "-"), string(l.Status))
	}
	return t.flush()
}

// frame has a table take the place of the one before on a screen: what does not
// fit is cut, lest it scroll.
func frame(table string, cols, rows int) string {
	lines := strings.Split(strings.TrimSuffix(table, "\n"), "\n")
	if room := max(rows-1, 2); rows > 0 && len(lines) > room {
		more := len(lines) - room + 1
		lines = append(lines[:room-1], fmt.Sprintf("and %d more", more))
	}
	var b strings.Builder
	b.WriteString("\x1b[H") // to the upper left corner
	for _, l := range lines {
		if r := []rune(l); cols > 0 && len(r) > cols {
			l = string(r[:cols])
		}
		b.WriteString(l + "\x1b[K\n") // and nothing behind it
	}
	b.WriteString("\x1b[J") // nor below
	return b.String()
}
