package runtime

import (
	"context"
	"errors"
	"time"

	"github.com/agentbox/agentbox/criu"
	"github.com/agentbox/agentbox/criu/stage"
)

// instantTries is how often a dump is made again that met an instant in which a process
// cannot be dumped.
const instantTries = 4

// dumpAgain reports whether a dump that has failed is to be made again, with all that goes
// with it, because what it failed of is over in a moment.
func (e *Engine) dumpAgain(ctx context.Context, sb *locked, err error) bool {
	if !criu.Passing(err) || ctx.Err() != nil {
		return false
	}
	e.log.Warn("dump made again", "sandbox", sb.ID, "err", err)
	return true
}

// settle waits until no process of the sandbox, which was frozen at that time, is in an
// instant that cannot be dumped, and returns since when it stands still.
func (e *Engine) settle(ctx context.Context, k *making, since time.Time) (time.Time, error) {
	if k.row.Kind != KindFull {
		return since, nil
	}
	again, err := k.c.Runtime.Settle(ctx, k.c.Pid)
	if again.IsZero() {
		again = since
	}
	return again, err
}

// pause freezes a running sandbox so that it can be dumped as it stands.
func (e *Engine) pause(ctx context.Context, sb *locked, c Container) error {
	err := sb.host.Pause(ctx, sb.ID)
	if err != nil || c.Pid == 0 || sb.host.Properties().FilesOnly {
		return err
	}
	if _, err = c.Runtime.Settle(ctx, c.Pid); err == nil || ctx.Err() == nil && (criu.Passing(err) || errors.Is(err, ErrBusy)) {
		return nil // it is paused, which is what was asked for
	}
	return errors.Join(err, sb.host.Unpause(context.WithoutCancel(ctx), sb.ID))
}

// timeLeft bounds the restore of processes by its caller's time; 0: that has no end.
func (r *restoration) timeLeft() (time.Duration, error) {
	if r.caller == nil {
		return 0, nil
	}
	end, ok := r.caller.Deadline()
	if err := r.caller.Err(); err != nil || !ok {
		return 0, err
	}
	return max(time.Until(end), time.Second), nil
}

// callOff ends the restore of processes when its caller goes away, until the returned
// function is called.
func (r *restoration) callOff() (end func()) {
	if r.caller == nil {
		return func() {}
	}
	place := r.c.Stage
	stop := context.AfterFunc(r.caller, func() { _ = stage.CallOff(place.Run, place.ID) })
	return func() { stop() }
}
