package engine

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"unicode"

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
	e, err := every(s)
	if err != nil || opts.Automatic || !slices.Contains(e.Triggers(), opts.Trigger) {
		return err
	}
	return hint(fmt.Errorf("%w: trigger %q is that of the checkpoints which are taken of this sandbox by themselves",
		runtime.ErrInvalid, opts.Trigger),
		"Choose another --trigger, or leave it away.")
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
func (cs *checkpoints) beforeExec(ctx context.Context, sb store.Sandbox, p runtime.Process) error {
	s, err := spec(sb)
	if err != nil {
		return err
	}
	if on, err := every(s); err != nil || !on.Exec {
		return err
	}
	_, err = cs.takeCheckpoint(ctx, sb.ID, runtime.CheckpointOptions{
		// Only the program: arguments may be secrets.
		Trigger: runtime.TriggerExec, Automatic: true, Labels: map[string]string{"exec": clipLabel(p.Args[0])},
	})
	if err != nil {
		return fmt.Errorf("the checkpoint before it failed, so that nothing was run: %w", err)
	}
	return nil
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
