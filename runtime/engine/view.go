package engine

import (
	"context"
	"errors"
	"sync/atomic"

	"github.com/agentbox/agentbox/internal/guard"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/store"
)

// Sandbox describes one sandbox as it is now.
func (v sandboxVerbs) Sandbox(ctx context.Context, ref string) (runtime.Sandbox, error) {
	return verb(ctx, v.e, reads(onSandbox("inspect", ref)), func(ctx context.Context) (runtime.Sandbox, error) {
		return v.e.sandboxes.inspect(ctx, ref)
	})
}

func (bx *sandboxes) inspect(ctx context.Context, ref string) (runtime.Sandbox, error) {
	sb, err := bx.find(ctx, ref)
	if err != nil {
		return runtime.Sandbox{}, fail("inspect", ref, err)
	}
	out, c, err := bx.view(ctx, sb)
	if err == nil {
		out.Limits, err = bx.events.hits(sb.ID, c)
	}
	return out, fail("inspect", ref, err)
}

// viewsAtOnce is how many sandboxes a list inspects concurrently.
const viewsAtOnce = 4

// Sandboxes lists all sandboxes, newest first.
func (v sandboxVerbs) Sandboxes(ctx context.Context) ([]runtime.Sandbox, error) {
	return verb(ctx, v.e, reads(on("ps", "")), func(ctx context.Context) ([]runtime.Sandbox, error) {
		return v.e.sandboxes.list(ctx)
	})
}

func (bx *sandboxes) list(ctx context.Context) ([]runtime.Sandbox, error) {
	rows, err := bx.store.Sandboxes(ctx)
	if err != nil {
		return nil, fail("ps", "", err)
	}

	// Inspect a few concurrently: each needs a look at the kernel, or its engine.
	views, errs := make([]runtime.Sandbox, len(rows)), make([]error, len(rows))
	specs := bx.listed.of(rows, errs)
	var next atomic.Int64
	var all guard.WaitGroup
	for range min(viewsAtOnce, len(rows)) {
		all.Go(func() {
			for i := int(next.Add(1)) - 1; i < len(rows) && ctx.Err() == nil; i = int(next.Add(1)) - 1 {
				if errs[i] == nil {
					errs[i] = guard.Do(func() (err error) {
						views[i], _, err = bx.viewOf(ctx, rows[i], specs[i])
						return err
					})
				}
			}
		})
	}
	all.Wait()
	if ctx.Err() != nil {
		return nil, fail("ps", "", context.Cause(ctx))
	}
	list, work := views[:0], bx.atWork(ctx)
	for i, sb := range rows {
		out, err := views[i], errs[i]
		out.Work = work[sb.ID]
		if errors.Is(err, runtime.ErrNotFound) {
			// Removed since we read the row, or not created yet.
			continue
		}
		if errors.Is(err, runtime.ErrCorrupt) {
			return nil, fail("ps", sb.Name, err)
		}
		if err != nil {
			// Its engine does not answer; list the others anyway.
			bx.log.Warn("sandbox state unknown", "sandbox", sb.Name, "err", err)
			if out.ID == "" {
				out = runtime.Sandbox{
					ID: sb.ID, Name: sb.Name, Image: sb.Image, ImageDigest: sb.ImageDigest, Backend: sb.Backend,
					Created: sb.Created, Labels: map[string]string{},
				}
			}
			out.Status = runtime.Unknown
		}
		list = append(list, out)
	}
	return list, nil
}

// view combines a sandbox's record with its present state.
func (bx *sandboxes) view(ctx context.Context, sb store.Sandbox) (runtime.Sandbox, runtime.Container, error) {
	s, err := spec(sb)
	if err != nil {
		return runtime.Sandbox{}, runtime.Container{}, err
	}
	return bx.viewOf(ctx, sb, s)
}

func (bx *sandboxes) viewOf(
	ctx context.Context, sb store.Sandbox, s runtime.Spec,
) (_ runtime.Sandbox, c runtime.Container, err error) {
	labels := sb.Labels
	if labels == nil {
		labels = map[string]string{}
	}
	var again *runtime.Restarts
	if comesBack(s.Restart) {
		st, err := bx.restarts.of(sb.ID)
		if err != nil {
			return runtime.Sandbox{}, c, err
		}
		again = &st.Restarts
	}
	host, err := bx.host(sb.Backend)
	if err == nil {
		c, err = host.Inspect(ctx, sb.ID)
	}
	return runtime.Sandbox{
		ID: sb.ID, Name: sb.Name, Status: c.Status, Pid: c.Pid, ExitCode: c.ExitCode,
		Upperdir: c.Upper, Image: sb.Image, ImageDigest: sb.ImageDigest, Backend: sb.Backend,
		Head: sb.Head, Attempt: sb.Attempt, Created: sb.Created, Started: c.Started, Finished: c.Finished,
		Labels: labels, Address: c.Address, Kept: sb.Kept, Held: sb.Held, Lease: sb.Lease, Group: sb.Group,
		OOMKilled: c.OOMKilled, Spec: s,
		Expires: expiresAt(s.Lifetime), Expired: expired(s.Lifetime), Restarts: again,
	}, c, err
}
