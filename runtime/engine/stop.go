package engine

import (
	"context"
	"time"

	"github.com/agentbox/agentbox/internal/failpoint"
	"github.com/agentbox/agentbox/runtime"
)

// Stop ends the sandbox's processes. A stopped sandbox is left as it is.
func (v sandboxVerbs) Stop(ctx context.Context, ref string, timeout time.Duration) error {
	return v.e.verb(ctx, onSandbox("stop", ref), func(ctx context.Context) error {
		if timeout < 0 {
			timeout = stopTimeout
		}
		return v.e.sandboxes.stop(ctx, ref, runtime.StopOptions{Timeout: timeout})
	})
}

func (bx *sandboxes) stop(ctx context.Context, ref string, opts runtime.StopOptions) error {
	sb, err := bx.acquire(ctx, ref, "stop", lockWait)
	if err != nil {
		return err
	}
	defer sb.lock.Unlock()
	return bx.stopLocked(ctx, sb, opts)
}

func (bx *sandboxes) stopLocked(ctx context.Context, sb *locked, opts runtime.StopOptions) error {
	if err := bx.restarts.meant(sb.Sandbox); err != nil {
		return err
	}
	if err := failpoint.Hit("stop.before-backend"); err != nil {
		return err
	}
	if err := sb.host.Stop(ctx, sb.ID, opts); err != nil {
		return err
	}
	bx.log.Info("sandbox stopped", "sandbox", sb.ID)
	return nil
}

// stopFor stops a sandbox that is about to be started, and returns its container then.
func (bx *sandboxes) stopFor(ctx context.Context, sb *locked, opts runtime.StopOptions) (runtime.Container, error) {
	back := runtime.Aside(ctx) // until its processes have ended
	err := bx.stopLocked(ctx, sb, opts)
	back()
	if err != nil {
		return runtime.Container{}, err
	}
	return sb.host.Inspect(ctx, sb.ID)
}

// Restart stops a sandbox, if it runs, and starts it. It checks all that a start needs
// before the stop: a sandbox that could not be started again is not stopped.
func (v sandboxVerbs) Restart(ctx context.Context, ref string, timeout time.Duration) error {
	return v.e.verb(ctx, onSandbox("restart", ref), func(ctx context.Context) (err error) {
		if timeout < 0 {
			timeout = stopTimeout
		}
		sb, err := v.e.acquire(ctx, ref, "restart", lockWait)
		if err != nil {
			return err
		}
		_, err = v.e.sandboxes.launch(ctx, sb, nil, &runtime.StopOptions{Timeout: timeout})
		return err
	})
}

// hasMounts refuses a sandbox whose bind mounts have lost their sources. It leaves the mounts
// of an adopted container to its engine.
func hasMounts(s runtime.Spec) error {
	for _, m := range s.Mounts {
		if err := checkMount(m); err != nil && !s.Adopted {
			return err
		}
	}
	return nil
}
