package runtime

import (
	"context"
	"fmt"
	"path/filepath"
	"strings"
	"time"
	"unicode"

	"github.com/agentbox/agentbox/runtime/store"
)

// EveryExec, as Spec.CheckpointEvery, asks for a checkpoint before each Exec.
const EveryExec = "exec"

// Triggers of the checkpoints that Spec.CheckpointEvery asks for.
const (
	TriggerExec     = "exec"
	TriggerInterval = "interval"
)

// opInterval is what a checkpoint at an interval holds the sandbox's lock for.
const opInterval = "interval checkpoint"

// minEvery keeps a sandbox from being frozen more than it runs.
const minEvery = time.Second

// checkEvery refuses a Spec.CheckpointEvery that means nothing.
func checkEvery(every string) error {
	if every == "" || every == EveryExec {
		return nil
	}
	d, err := time.ParseDuration(every)
	if err != nil || d < minEvery {
		return fmt.Errorf("%w: a checkpoint every %q: give %q or a time of at least %s, like 5m", ErrInvalid, every, EveryExec, minEvery)
	}
	return nil
}

// beforeExec takes the checkpoint that is to precede an exec. Without it the
// exec is refused: the way back comes first.
func (e *Engine) beforeExec(ctx context.Context, sb store.Sandbox, p Process) error {
	s, err := spec(sb)
	if err != nil || s.CheckpointEvery != EveryExec {
		return err
	}
	_, err = e.Checkpoint(ctx, sb.ID, CheckpointOptions{
		// The program alone: arguments can be secrets.
		Trigger: TriggerExec, Labels: map[string]string{"exec": clipLabel(p.Args[0])},
	})
	if err != nil {
		return fmt.Errorf("the checkpoint before it failed, so that nothing was run: %w", err)
	}
	return nil
}

// clipLabel makes a label's value of any text.
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

// interval tells whether a sandbox asks for checkpoints at intervals.
func interval(s Spec) bool { return s.CheckpointEvery != "" && s.CheckpointEvery != EveryExec }

// autoPath is the lock of the process that takes them.
func (e *Engine) autoPath(id string) string { return filepath.Join(e.run, "auto", id) }

// every has checkpoints taken at intervals, if the sandbox asks for it.
func (e *Engine) every(s Spec) {
	if !interval(s) || e.auto == nil {
		return
	}
	if err := e.auto(s.ID); err != nil {
		e.log.Error("no checkpoints at intervals", "sandbox", s.ID, "err", err)
	}
}
