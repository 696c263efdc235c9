package engine

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/agentbox/agentbox/internal/failpoint"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/store"
)

// Apply copies a sandbox's changes into the directory that it is layered over.
func (v hostVerbs) Apply(ctx context.Context, ref string, opts runtime.ApplyOptions) (runtime.Applied, error) {
	return verb(ctx, v.e, onSandbox("apply", ref), func(ctx context.Context) (runtime.Applied, error) {
		return v.e.sandboxes.apply(ctx, ref, opts)
	})
}

func (bx *sandboxes) apply(
	ctx context.Context, ref string, opts runtime.ApplyOptions,
) (out runtime.Applied, err error) {
	if opts.DryRun && opts.Undo {
		return out, fmt.Errorf("%w: --dry-run cannot be combined with --undo", runtime.ErrInvalid)
	}
	sb, err := bx.acquire(ctx, ref, "apply", lockWait)
	if err != nil {
		return out, err
	}
	defer sb.lock.Unlock()
	if sb.host.Original == nil {
		if s, err := spec(sb.Sandbox); err == nil && slices.ContainsFunc(s.Mounts, func(m runtime.Mount) bool {
			return m.Type == runtime.MountWorkspace
		}) {
			return out, hint(fmt.Errorf("%w: the changes of a workspace cannot be applied by agentbox", runtime.ErrUnsupported),
				"Look at them with: agentbox diff --patch "+sb.Name+". Copy files with: agentbox cp "+sb.Name+":PATH .")
		}
		return out, hint(
			fmt.Errorf("%w: backend %s has no directory to apply changes to", runtime.ErrUnsupported, sb.Backend),
			"Volumes have one: agentbox volume create NAME --from DIR")
	}
	apply := func() (err error) {
		out, err = sb.host.Original.Apply(ctx, sb.ID, opts)
		out.Sandbox, out.SandboxName = sb.ID, sb.Name
		return err
	}
	if opts.DryRun {
		return out, apply()
	}
	c, err := sb.host.Inspect(ctx, sb.ID)
	if err != nil {
		return out, err
	}
	if c.Busy != "" {
		return out, hint(fmt.Errorf("%w: %s", runtime.ErrState, c.Busy), c.Remedy)
	}
	err = bx.intent(ctx, store.Intent{Op: opApply, Sandbox: sb.ID}, nil, func(int64) error {
		if err := failpoint.Hit("apply.before-backend"); err != nil {
			return err
		}
		if err := apply(); err != nil {
			return err
		}
		return failpoint.Hit("apply.after-backend")
	})
	if err == nil {
		bx.log.Info("changes applied", "sandbox", sb.ID, "original", out.Original, "changes",
			len(out.Changes), "undone", out.Undone)
	}
	return out, err
}

// finishApply finishes an Apply that was killed or rolls it back.
func finishApply(ctx context.Context, in store.Intent, host Host) (string, error) {
	if host.Original == nil {
		return "", nil
	}
	did, err := host.Original.Settle(ctx, in.Sandbox)
	if errors.Is(err, runtime.ErrNotFound) {
		return "", nil // the sandbox was removed since
	}
	return did, err
}
