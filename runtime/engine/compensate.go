package engine

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/agentbox/agentbox/internal/failpoint"
	"github.com/agentbox/agentbox/runtime"
)

// A restore compensates the effects that came after its checkpoint once all that it needs
// is proven and staged, while the sandbox is frozen and before any process of it ends. By
// then little can fail any more, no process in the sandbox uses what is being undone, and an
// effect that cannot be compensated can still call the restore off.
//
// An undo command runs at most once automatically. A command that was killed half-way, by
// its timeout or with agentbox, runs again only with OnFailureRetry, whose commands may run
// more than once.

// calledOff is the error of a restore that an effect or a host file has called off: no
// other strategy would help. Its text is that of the error that it wraps.
type calledOff struct{ error }

func (e calledOff) Unwrap() error { return e.error }

// isCalledOff reports whether an effect or a host file has called the restore off.
func isCalledOff(err error) bool {
	_, off := errors.AsType[calledOff](err)
	return off
}

// past returns the outstanding effects from after a checkpoint, in the order of their
// compensation, and the number of earlier effects that were compensated since.
func past(list []runtime.Effect, newest string) (due []runtime.Effect, gone int) {
	// The newest effect that the checkpoint knows, if any.
	at := slices.IndexFunc(list, func(f runtime.Effect) bool { return newest != "" && f.ID == newest })
	for _, f := range list[:at+1] {
		if f.Status == runtime.EffectCompensated {
			gone++
		}
	}
	// Last in, first out; a whole group takes the place of its newest effect.
	rank := map[string]int{}
	for i, f := range list {
		if f.Group != "" && outstanding(f) {
			rank[f.Group] = i
		}
	}
	type placed struct {
		runtime.Effect
		rank, at int
	}
	var sorted []placed
	for i, f := range list[at+1:] {
		i += at + 1
		if !outstanding(f) {
			continue
		}
		p := placed{f, i, i}
		if f.Group != "" {
			p.rank = rank[f.Group]
		}
		sorted = append(sorted, p)
	}
	slices.SortFunc(sorted, func(a, b placed) int {
		if a.rank != b.rank {
			return b.rank - a.rank
		}
		return b.at - a.at
	})
	for _, p := range sorted {
		due = append(due, p.Effect)
	}
	return due, gone
}

// effectsPart is the effects that a restore compensates.
type effectsPart struct {
	noWork
	*restoration
	off         bool             // they are left alone
	settled     bool             // undo commands were run, by this attempt or an earlier one
	commanded   bool             // an earlier attempt ran some
	compensated []runtime.Effect // those whose undo commands were run, with their results
}

// due is past for the restore; the lock of its sandbox is held.
func (r *effectsPart) due(ctx context.Context) (due []runtime.Effect, gone int, err error) {
	list, err := r.e.effects.settle(ctx, r.sb.ID)
	if err != nil {
		return nil, 0, err
	}
	due, gone = past(list, r.reader.Manifest().Effect)
	return due, gone, nil
}

// prepare runs the undo commands of the effects from after the checkpoint. It is the last
// that is done beside the present state, because it cannot be taken back.
func (r *effectsPart) prepare(ctx context.Context) (err error) {
	if r.resumed || r.settled {
		return nil // they were run before it was killed, or by an earlier attempt
	}
	defer func() { r.settled = err == nil }()
	due, gone, err := r.due(ctx)
	if err != nil {
		return err
	}
	say := func(format string, args ...any) {
		r.told = append(r.told, fmt.Sprintf(format, args...))
	}
	if gone > 0 {
		say("compensated since this checkpoint, and not applied again: %s", effects(gone))
	}
	if len(due) > 0 && r.off {
		say("not compensated, by --no-effects: %s", effects(len(due)))
		return nil
	}
	until := time.Now().Add(maxCompensation)
	for _, f := range due {
		if f.Status == runtime.EffectUnknown && f.OnFailure != runtime.OnFailureRetry {
			err := fmt.Errorf("%w: the undo command of effect %s may have run before: %s", runtime.ErrState,
				effectName(f), f.Error)
			if f.OnFailure == runtime.OnFailureAbort {
				return hint(calledOff{err},
					fmt.Sprintf("Look whether it has, then take it off the ledger (agentbox effect rm %s %s), and add it anew if it has to be run.", r.sb.Name, short(f.ID)))
			}
			say("effect %s is not compensated: its undo command may have run before, and is not run again: %s",
				effectName(f), f.Error)
			continue
		}
		r.sb.steps.At(runtime.PhaseEffects)
		err := r.undoEffect(ctx, &f, until)
		r.compensated = append(r.compensated, f)
		switch {
		case err == nil:
		case f.OnFailure == runtime.OnFailureContinue && ctx.Err() == nil && f.Status != runtime.EffectRunning:
			say("%v", err)
		default:
			return hint(calledOff{err},
				fmt.Sprintf("Mend what fails and restore again, or leave effects alone with: agentbox restore --no-effects %s %s", r.sb.Name, short(r.row.ID)))
		}
	}
	return failpoint.Hit("effect.after-all")
}

// undoEffect runs an undo command, more than once where that is allowed, and records the
// result.
func (r *effectsPart) undoEffect(ctx context.Context, f *runtime.Effect, until time.Time) error {
	for try := 1; ; try++ {
		err := r.runEffect(ctx, f, until)
		if err == nil || f.OnFailure != runtime.OnFailureRetry || try == effectTries ||
			f.Status == runtime.EffectRunning || ctx.Err() != nil || time.Now().After(until) {
			return err
		}
		r.e.log.Warn("undo command failed; retrying", "sandbox", r.sb.ID, "effect", f.ID, "err", err)
		select {
		case <-time.After(time.Duration(try) * effectRetryPause):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// runEffect runs an undo command once. It records that the command may run before the run,
// and the result before anything else is done.
func (r *effectsPart) runEffect(ctx context.Context, f *runtime.Effect, until time.Time) error {
	failed := func(err error) error { return fmt.Errorf("effect %s is not compensated: %w", effectName(*f), err) }
	timeout := min(f.Timeout, time.Until(until))
	if timeout <= 0 {
		return failed(fmt.Errorf("%w: all undo commands together have taken %s", runtime.ErrState, maxCompensation))
	}
	before := *f
	if err := failpoint.Hit("effect.before-mark"); err != nil {
		return failed(err)
	}
	f.Status, f.Tries, f.Checkpoint, f.Error, f.Output, f.Ended = runtime.EffectRunning, f.Tries+1,
		r.row.ID, "", "", time.Time{}
	if err := r.e.effects.set(ctx, *f); err != nil {
		*f = before
		return failed(err)
	}
	if err := failpoint.Hit("effect.after-mark"); err != nil {
		*f = before
		return failed(errors.Join(err, r.e.effects.set(context.WithoutCancel(ctx), *f)))
	}
	env := append([]string{
		"AGENTBOX_SANDBOX=" + r.sb.ID, "AGENTBOX_CHECKPOINT=" + r.row.ID, "AGENTBOX_EFFECT=" + f.ID,
	}, r.e.rootEnv()...)
	said, err := hostRun(ctx, f.Command, env, nil, timeout)
	f.Output, f.Ended = strings.ToValidUTF8(said, "\uFFFD"), time.Now().UTC()
	switch {
	case err == nil:
		f.Status = runtime.EffectCompensated
	case errors.Is(err, errKilled):
		// Processes that have left its process group end, too.
		err = errors.Join(err, endMarked("AGENTBOX_EFFECT="+f.ID))
		f.Status, f.Error = runtime.EffectUnknown, err.Error()
	default:
		f.Status, f.Error = runtime.EffectFailed, err.Error()
	}
	unrecorded := failpoint.Hit("effect.after-run")
	if unrecorded == nil { // on record even if the caller disconnects
		unrecorded = r.e.effects.set(context.WithoutCancel(ctx), *f)
	}
	if unrecorded != nil {
		f.Status = runtime.EffectRunning // its outcome cannot be known any more
		return failed(fmt.Errorf("what came of its undo command is not on record: %w", unrecorded))
	}
	r.e.effects.note(*f)
	r.e.log.Info("undo command run", "sandbox", r.sb.ID, "effect", f.ID, "status", f.Status, "checkpoint", r.row.ID)
	if err != nil {
		return failed(saying(err, said))
	}
	return failpoint.Hit("effect.after-record")
}

// compensatedText says, for an error, what was compensated before it.
func compensatedText(list []runtime.Effect) string {
	var names []string
	for _, f := range list {
		if f.Status == runtime.EffectCompensated {
			names = append(names, effectName(f))
		}
	}
	if len(names) == 0 {
		return ""
	}
	return fmt.Sprintf("Compensated before that, and it stays so: %s.", strings.Join(names, ", "))
}

func effects(n int) string {
	if n == 1 {
		return "1 effect"
	}
	return fmt.Sprintf("%d effects", n)
}

// unsureEffects settles undo commands that a killed restore left running, and names them.
func (l *effectLog) unsureEffects(ctx context.Context, id string) (string, error) {
	list, err := l.of(ctx, id)
	if err != nil {
		return "", err
	}
	text := ""
	for _, f := range list {
		if f.Status == runtime.EffectRunning {
			text += fmt.Sprintf("; the undo command of effect %s may have run", effectName(f))
		}
	}
	_, err = l.settle(ctx, id)
	return text, err
}
