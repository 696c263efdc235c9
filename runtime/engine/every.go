package engine

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"unicode"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/policy"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/store"
)

// opInterval and opPrompt are the verbs under which checkpoints that no command asked for hold a
// sandbox's lock: other verbs wait for them.
const (
	opInterval = "interval checkpoint"
	opPrompt   = "prompt checkpoint"
)

// every parses when automatic checkpoints of a sandbox are taken.
func every(s runtime.Spec) (policy.Every, error) {
	e, err := policy.ParseEvery(s.CheckpointEvery)
	if err != nil {
		return e, fmt.Errorf("%w: a checkpoint every %w", runtime.ErrInvalid, err)
	}
	return e, nil
}

// ownTrigger refuses a requested checkpoint with the trigger of automatic ones, because
// agentbox also removes those automatically.
func ownTrigger(s runtime.Spec, opts runtime.CheckpointOptions) error {
	if opts.Trigger == runtime.TriggerUndo {
		return hint(fmt.Errorf("%w: trigger %q is that of what a restore replaces, which goes with the next restore",
			runtime.ErrInvalid, opts.Trigger),
			"Choose another --trigger, or leave it away.")
	}
	if opts.Trigger == runtime.TriggerBase {
		return hint(fmt.Errorf("%w: trigger %q is that of the checkpoint with which a sandbox begins",
			runtime.ErrInvalid, opts.Trigger),
			"Choose another --trigger, or leave it away.")
	}
	own, err := ownTriggers(s)
	if err != nil || opts.Automatic || !slices.Contains(own, opts.Trigger) {
		return err
	}
	return hint(fmt.Errorf("%w: trigger %q is that of the checkpoints which are taken of this sandbox by themselves",
		runtime.ErrInvalid, opts.Trigger),
		"Choose another --trigger, or leave it away.")
}

// ownTriggers returns the triggers of the checkpoints that are taken of a sandbox by themselves.
func ownTriggers(s runtime.Spec) ([]string, error) {
	e, err := every(s)
	own := e.Triggers()
	if s.TakesSteps() && !e.Exec {
		own = append(own, runtime.TriggerExec)
	}
	return own, err
}

// settleSteps decides whether steps are taken of a new sandbox: unless asked for, with a workspace,
// where its policy allows them.
func settleSteps(s *runtime.Spec, p *policy.Policy) error {
	allowed := slices.Contains(p.Rules.Triggers, policy.TriggerExec)
	switch s.Steps {
	case "", runtime.StepsOff:
		if s.TakesSteps() && !allowed {
			s.Steps = runtime.StepsOff
		}
		return nil
	case runtime.StepsOn:
		if allowed {
			return nil
		}
		return hint(fmt.Errorf("%w: policy %s allows no checkpoint by itself with an exec (checkpoints.triggers)",
			runtime.ErrDenied, p.Name), "Leave --steps=on away, or use another policy.")
	}
	return fmt.Errorf("%w: steps %.20q: choose %s or %s", runtime.ErrInvalid, s.Steps, runtime.StepsOn, runtime.StepsOff)
}

// isBase reports whether a checkpoint is the one with which its sandbox began.
func isBase(c store.Checkpoint) bool { return c.Trigger == runtime.TriggerBase && !c.Foreign }

// takeBase takes the checkpoint with which a sandbox begins, as part of its creation: the
// directories below its workspaces are on record, and it has a head from the start.
func (cs *checkpoints) takeBase(ctx context.Context, sb *locked, id string) error {
	c, err := sb.host.Inspect(ctx, sb.ID)
	if err != nil {
		return err
	}
	k, err := cs.prepare(ctx, sb, c, runtime.CheckpointOptions{
		FilesOnly: true, Trigger: runtime.TriggerBase, TCP: runtime.TCPEstablished,
	})
	if err != nil {
		return err
	}
	k.row.ID = id
	if _, err := cs.record(ctx, k); err != nil {
		return fmt.Errorf("the checkpoint of what it begins with: %w", err)
	}
	return cs.store.SetHead(ctx, sb.ID, id, sb.Attempt)
}

// beforeExec takes the checkpoint that must precede an exec. If it fails, the exec is
// refused: the way back comes first.
func (cs *checkpoints) beforeExec(ctx context.Context, sb store.Sandbox, s runtime.Spec, p runtime.Process) error {
	on, err := every(s)
	if err != nil || !on.Exec {
		return err
	}
	if _, err = cs.takeCheckpoint(ctx, sb.ID, forExec(p)); err != nil {
		return fmt.Errorf("the checkpoint before it failed, so that nothing was run: %w", err)
	}
	return nil
}

// afterExec takes the step that follows an exec, if that has changed a file. Its failure does not
// change what has become of the exec.
func (cs *checkpoints) afterExec(ctx context.Context, sb store.Sandbox, s runtime.Spec, p runtime.Process) {
	if !s.TakesSteps() || p.NoStep || p.Detach || ctx.Err() != nil {
		return
	}
	opts := forExec(p)
	opts.IfChanged, opts.Message = true, p.Message
	if opts.Message == "" {
		opts.Message = clipLabel(p.Args[0])
	}
	_, err := cs.takeCheckpoint(ctx, sb.ID, opts)
	if err != nil && ctx.Err() == nil && !errors.Is(err, runtime.ErrBusy) && !errors.Is(err, unix.ENOSPC) {
		// Its processes cannot be dumped, perhaps, but its files can be brought back.
		cs.log.Info("step limited to files", "sandbox", sb.ID, "err", err)
		opts.FilesOnly = true
		_, err = cs.takeCheckpoint(ctx, sb.ID, opts)
	}
	switch {
	case err == nil || ctx.Err() != nil || errors.Is(err, runtime.ErrNotFound): // it went with what was run
	case errors.Is(err, runtime.ErrBusy): // the verb that is at work, or the next exec, has what this one did
		cs.log.Info("no step after an exec", "sandbox", sb.ID, "err", err)
	default:
		cs.log.Warn("no step after an exec; it cannot be undone by itself", "sandbox", sb.ID, "err", err)
	}
}

// forExec are the options of a checkpoint because of an exec.
func forExec(p runtime.Process) runtime.CheckpointOptions {
	return runtime.CheckpointOptions{
		// Only the program: arguments may be secrets.
		Trigger: runtime.TriggerExec, Automatic: true, Labels: map[string]string{"exec": clipLabel(p.Args[0])},
	}
}

// clipLabel turns any text into a label's value.
func clipLabel(s string) string {
	const most = 200
	if len(s) > most {
		s = s[:most]
	}
	return strings.Map(func(r rune) rune {
		if !unicode.IsPrint(r) || r == '\uFFFD' {
			return ' '
		}
		return r
	}, s)
}

// interval reports whether a sandbox asks for checkpoints at intervals. Create has refused
// an invalid value.
func interval(s runtime.Spec) bool {
	e, err := every(s)
	return err == nil && e.Interval > 0
}
