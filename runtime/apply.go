package runtime

import (
	"context"
	"errors"
	"fmt"

	"github.com/agentbox/agentbox/internal/failpoint"
	"github.com/agentbox/agentbox/runtime/store"
)

// ApplyOptions modify Apply.
type ApplyOptions struct {
	DryRun bool `json:"dry_run"` // only tell what would be done
	Undo   bool `json:"undo"`    // take the last Apply back
	Force  bool `json:"force"`   // overwrite what others changed in the original meanwhile
	// Owners takes over the owners that the sandbox gave. Without it what the
	// original has keeps its owner, and what is new gets that of its directory.
	Owners bool `json:"owners,omitempty"`
	// Allow are the paths of files that may come with set-id bits or capabilities.
	Allow []string `json:"allow,omitempty"`
}

// Applied is the documented JSON of `agentbox apply`; it only ever grows.
type Applied struct {
	Sandbox     string   `json:"sandbox"` // its id
	SandboxName string   `json:"sandbox_name"`
	Original    string   `json:"original"` // the directory
	DryRun      bool     `json:"dry_run"`
	Undone      bool     `json:"undone"`    // the last apply was taken back
	Changes     []Change `json:"changes"`   // A, M, D and T, by path; empty after an undo
	Conflicts   []string `json:"conflicts"` // what others changed in the original since the sandbox did

	Refused []Refusal `json:"refused"` // by a dry run; without it they are an error
}

// Refusal is one path that must not get into the original.
type Refusal struct {
	Path     string `json:"path"`
	PathB64  string `json:"path_b64,omitempty"`
	Reason   string `json:"reason"`
	MayAllow bool   `json:"may_allow"` // by ApplyOptions.Allow
}

// Apply brings what a sandbox changed into the directory that it was laid over.
func (e *Engine) Apply(ctx context.Context, ref string, opts ApplyOptions) (out Applied, err error) {
	defer func() { err = fail("apply", ref, err) }()
	if opts.DryRun && opts.Undo {
		return out, fmt.Errorf("%w: of an undo there is no dry run", ErrInvalid)
	}
	sb, err := e.acquire(ctx, ref, "apply", lockWait)
	if err != nil {
		return out, err
	}
	defer sb.lock.Unlock()
	if sb.host.Original == nil {
		return out, hint(fmt.Errorf("%w: backend %s has no directory to apply changes to", ErrUnsupported, sb.Backend), "Volumes have one: agentbox volume create NAME --from DIR")
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
		return out, hint(fmt.Errorf("%w: %s", ErrState, c.Busy), c.Remedy)
	}
	err = e.intent(ctx, store.Intent{Op: opApply, Sandbox: sb.ID}, nil, func(int64) error {
		if err := failpoint.Hit("apply.before-backend"); err != nil {
			return err
		}
		if err := apply(); err != nil {
			return err
		}
		return failpoint.Hit("apply.after-backend")
	})
	if err == nil {
		e.log.Info("applied", "sandbox", sb.ID, "original", out.Original, "changes", len(out.Changes), "undone", out.Undone)
	}
	return out, err
}

// finishApply brings an apply that was killed to its end: the original is as it
// was before, or as it was to become.
func (e *Engine) finishApply(ctx context.Context, in store.Intent, host Host) (string, error) {
	if host.Original == nil {
		return "", nil
	}
	did, err := host.Original.Settle(ctx, in.Sandbox)
	if errors.Is(err, ErrNotFound) {
		return "", nil // it was removed since
	}
	return did, err
}
