package engine

import (
	"context"
	"math"
	"slices"
	"sync"
	"time"

	"github.com/agentbox/agentbox/overlay"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/internal/kernel"
)

const (
	// recountShare bounds the cost of counting files: the next count comes no sooner
	// than this many times the duration of the last.
	recountShare = 20
	// longestCount bounds the count of one sandbox's files.
	longestCount = 2 * time.Second
)

// Stats returns the usage of sandboxes, newest first, or in the order they are named. A
// sandbox that ends in the meantime is left out; an unknown name is ErrNotFound.
func (v sandboxVerbs) Stats(ctx context.Context, opts runtime.StatsOptions) ([]runtime.Stats, error) {
	return verb(ctx, v.e, reads(on("top", "")), func(ctx context.Context) ([]runtime.Stats, error) {
		return v.e.sandboxes.stats(ctx, opts)
	})
}

func (bx *sandboxes) stats(ctx context.Context, opts runtime.StatsOptions) (_ []runtime.Stats, err error) {
	boxes, err := bx.measured(ctx, opts)
	if err != nil {
		return nil, err
	}
	groups, err := kernel.Hierarchies()
	if err != nil {
		return nil, err
	}
	newest, err := bx.store.NewestCheckpoints(ctx)
	if err != nil {
		return nil, err
	}
	list := make([]runtime.Stats, 0, len(boxes))
	uppers := make([]string, 0, len(boxes))
	for _, sb := range boxes {
		s := runtime.Stats{
			Sandbox: sb.ID, Name: sb.Name, Status: sb.Status, Started: sb.Started,
			StorageLimit: sb.Spec.Resources.Storage, Checkpoint: newest[sb.ID], Time: time.Now(),
		}
		if sb.Pid != 0 {
			use, err := groups.UseOf(sb.Pid)
			if err != nil {
				continue // it has just ended
			}
			s.CPU, s.Memory, s.MemoryLimit, s.Pids, s.PidsLimit = use.CPU, use.Memory, use.MemoryLimit,
				use.Pids, use.PidsLimit
		}
		list, uppers = append(list, s), append(uppers, sb.Upperdir)
	}
	if opts.Disk {
		err = bx.counts.of(ctx, list, uppers)
	}
	return list, err
}

// measured returns the sandboxes that Stats is about, each once.
func (bx *sandboxes) measured(ctx context.Context, opts runtime.StatsOptions) (list []runtime.Sandbox, err error) {
	if len(opts.Sandboxes) == 0 {
		list, err = bx.list(ctx)
		return slices.DeleteFunc(list, func(sb runtime.Sandbox) bool {
			return !opts.All && sb.Status != runtime.Running && sb.Status != runtime.Paused
		}), err
	}
	seen := map[string]bool{}
	for _, ref := range opts.Sandboxes {
		row, err := bx.find(ctx, ref)
		if err != nil {
			return nil, fail("top", ref, err)
		}
		if seen[row.ID] {
			continue
		}
		seen[row.ID] = true
		sb, _, err := bx.view(ctx, row)
		if err != nil {
			return nil, fail("top", ref, err)
		}
		list = append(list, sb)
	}
	return list, nil
}

// fileCounts caches the disk usage of sandboxes' files. A caller that asks every second gets
// the same count for some seconds, because a count looks at every file.
type fileCounts struct {
	once sync.Once
	turn chan struct{} // held during a count; other callers wait and then find it done
	last map[string]fileCount
}

type fileCount struct {
	used int64
	err  error
	at   time.Time
	took time.Duration
}

// of fills in the disk usage of each of the upperdirs.
func (f *fileCounts) of(ctx context.Context, list []runtime.Stats, uppers []string) error {
	f.once.Do(func() { f.turn, f.last = make(chan struct{}, 1), map[string]fileCount{} })
	select {
	case f.turn <- struct{}{}:
	case <-ctx.Done():
		return ctx.Err()
	}
	defer func() { <-f.turn }()
	var all time.Duration
	for _, c := range f.last {
		all += c.took
	}
	old := max(recount, recountShare*all)
	for i := range list {
		s := &list[i]
		c, ok := f.last[s.Sandbox]
		if !ok || time.Since(c.at) > old {
			c = fileCount{at: time.Now()}
			bound, cancel := context.WithTimeout(ctx, longestCount)
			c.used, c.err = overlay.Usage(bound, uppers[i], math.MaxInt64)
			cancel()
			if ctx.Err() != nil {
				return ctx.Err()
			}
			c.took = time.Since(c.at)
			f.last[s.Sandbox] = c
		}
		if c.err == nil {
			s.Disk = &c.used
		}
	}
	for id, c := range f.last {
		if time.Since(c.at) > 2*old+time.Minute { // not requested any more
			delete(f.last, id)
		}
	}
	return nil
}
