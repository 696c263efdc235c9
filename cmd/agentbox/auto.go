package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"time"

	"github.com/spf13/cobra"

	"github.com/agentbox/agentbox/internal/flock"
	"github.com/agentbox/agentbox/internal/guard"
	"github.com/agentbox/agentbox/policy"
	"github.com/agentbox/agentbox/runtime"
)

// autoHandover is how long a new auto waits for an old one: that may just be
// ending, after a look at the sandbox as it was before it was started again.
const autoHandover = 3 * time.Second

// newAutoCommand is the process that takes a sandbox's checkpoints for
// --checkpoint-every with a duration; the start of the sandbox starts it.
func newAutoCommand(a *app) *cobra.Command {
	return &cobra.Command{
		Use:         "auto ID",
		Short:       "Take a sandbox's checkpoints at its interval (started with the sandbox)",
		Hidden:      true,
		Annotations: exits(exitUsage, exitNotFound, exitDenied),
		Args:        args(1, 1),
		RunE: func(cmd *cobra.Command, args []string) error {
			a.globals.by = "auto"
			g, err := a.globals.resolve()
			if err != nil {
				return err
			}
			return a.engine(cmd.Context(), func(svc runtime.Service) error {
				sb, err := svc.Sandbox(cmd.Context(), args[0])
				if err != nil {
					return err
				}
				every, err := policy.ParseEvery(sb.Spec.CheckpointEvery)
				if err != nil || every.Interval == 0 {
					return fmt.Errorf("sandbox %s has no interval of checkpoints: %q: %w", sb.Name, sb.Spec.CheckpointEvery, runtime.ErrInvalid)
				}
				_, run := g.dirs()
				lock, err := lockOne(cmd.Context(), filepath.Join(run, "auto"), sb.ID)
				if err != nil || lock == nil {
					return err
				}
				defer lock.unlock()
				slog.SetDefault(slog.New(slog.NewTextHandler(lock, nil)))
				return runAuto(cmd.Context(), svc, sb.ID, every.Interval)
			})
		},
	}
}

// runAuto takes a checkpoint of a sandbox at each interval, until it has
// exited or is removed. What fails is logged, once for each cause in a row, and
// tried again at the next interval.
func runAuto(ctx context.Context, svc runtime.Service, id string, every time.Duration) error {
	log := slog.With("sandbox", id)
	await := func() <-chan error {
		return guard.Start(func() error {
			_, err := svc.Wait(ctx, id)
			return err
		})
	}
	exited := await()
	tick := time.NewTicker(every)
	defer tick.Stop()
	said, times := "", 0
	for {
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case err := <-exited:
			if ctx.Err() != nil {
				return context.Cause(ctx)
			}
			// A restore ends the processes, too, and then it runs again.
			status, e := statusOf(ctx, svc, id)
			if e != nil || ended(status) {
				return e
			}
			if err != nil {
				// Not at once: whatever keeps Wait from waiting may last.
				log.Warn("sandbox not waited for", "err", err)
				select {
				case <-tick.C:
				case <-ctx.Done():
				}
			}
			exited = await()
			continue
		case <-tick.C:
		}
		status, err := statusOf(ctx, svc, id)
		if err != nil || ended(status) {
			return err
		}
		if status == runtime.Paused {
			continue // it stands still: nothing has changed since
		}
		_, err = svc.Checkpoint(ctx, id, runtime.CheckpointOptions{Trigger: runtime.TriggerInterval, Automatic: true})
		// A tick that came meanwhile is dropped: where a checkpoint takes longer
		// than the interval, the sandbox is to run, and others to have their turn.
		tick.Reset(every)
		switch {
		case err == nil:
			if times > 1 {
				log.Info("interval checkpoints resumed", "failed", times)
			}
			said, times = "", 0
			continue
		case ctx.Err() != nil:
			return context.Cause(ctx)
		}
		if status, e := statusOf(ctx, svc, id); e != nil || ended(status) {
			return e
		}
		times++
		if said != err.Error() {
			said = err.Error()
			log.Warn("interval checkpoint failed; retrying at the next interval", "every", every, "err", err)
		}
	}
}

// statusOf is empty for a sandbox that is not there any more.
func statusOf(ctx context.Context, svc runtime.Service, id string) (runtime.Status, error) {
	sb, err := svc.Sandbox(ctx, id)
	if errors.Is(err, runtime.ErrNotFound) {
		return "", nil
	}
	return sb.Status, err
}

func ended(s runtime.Status) bool {
	return s == "" || s == runtime.Exited || s == runtime.Created
}

// maxLog is how long a oneLock's log may get before it begins anew.
const maxLog = 1 << 20 // bytes

// A oneLock is RUN/auto/ID: the lock of a sandbox's auto, which the kernel
// frees when that is killed, and its log while it lives. ROOT/watch/ID is its
// watch's.
type oneLock struct {
	*flock.Handle
	size int
}

func (l *oneLock) Write(p []byte) (int, error) {
	if l.size += len(p); l.size > maxLog {
		l.size = len(p)
		if err := l.File().Truncate(0); err != nil {
			return 0, err
		}
	}
	return l.File().Write(p)
}

func (l *oneLock) unlock() {
	_ = l.Remove()
	_ = os.Remove(filepath.Dir(l.File().Name())) // stays while there are others
}

// lockOne sees to it that a sandbox has one process of a kind, whose directory
// that is. It returns nil when there is one that goes on.
func lockOne(ctx context.Context, dir, id string) (*oneLock, error) {
	path := filepath.Join(dir, id)
	deadline := time.Now().Add(autoHandover)
	for {
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			return nil, err
		}
		l, err := flock.Try(path, flock.Append)
		switch {
		case err == nil:
			return &oneLock{Handle: l}, l.File().Truncate(0)
		case errors.Is(err, os.ErrNotExist):
			continue // the last holder took the directory away
		case !errors.Is(err, flock.ErrHeld):
			return nil, err
		}
		if time.Now().After(deadline) {
			return nil, nil
		}
		select {
		case <-time.After(busyPoll):
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
}
