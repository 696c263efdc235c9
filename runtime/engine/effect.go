package engine

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/agentbox/agentbox/internal/failpoint"
	"github.com/agentbox/agentbox/policy"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/store"
)

// Bounds of the ledger.
const (
	maxEffects        = 100 // of one sandbox, outstanding
	maxEffectArgs     = 64
	maxEffectText     = 8 << 10 // of a command, in bytes
	effectTimeout     = 30 * time.Second
	maxEffectTime     = 10 * time.Minute
	maxCompensation   = 30 * time.Minute // of all undo commands of a restore
	effectTries       = 3
	effectRetryPause  = time.Second
	maxEffectLabelLen = 256
)

// effectLog keeps the effects outside of a sandbox that a restore compensates.
type effectLog struct {
	*core

	events *eventLog
}

// outstanding reports whether an effect still has to be compensated.
func outstanding(f runtime.Effect) bool {
	return f.Status != runtime.EffectCompensated && f.Status != runtime.EffectRemoved
}

// effectName returns the name of an effect for messages.
func effectName(f runtime.Effect) string {
	if f.Label != "" {
		return fmt.Sprintf("%s (%s)", short(f.ID), f.Label)
	}
	return short(f.ID)
}

func effectView(row store.Effect) (f runtime.Effect, err error) {
	if err := json.Unmarshal(row.Data, &f); err != nil {
		return f, fmt.Errorf("effect %s: %w: %w", short(row.ID), runtime.ErrCorrupt, err)
	}
	f.ID, f.Sandbox, f.Head, f.Status, f.Created = row.ID, row.Sandbox, row.Head, row.Status, row.Created
	return f, nil
}

// ledger reads all effects of a sandbox, oldest first.
func (l *effectLog) of(ctx context.Context, id string) ([]runtime.Effect, error) {
	rows, err := l.store.Effects(ctx, id)
	list := make([]runtime.Effect, len(rows))
	for i, row := range rows {
		f, err := effectView(row)
		if err != nil {
			return nil, err
		}
		list[i] = f
	}
	return list, err
}

func (l *effectLog) set(ctx context.Context, f runtime.Effect) error {
	data, err := json.Marshal(f)
	if err != nil {
		return err
	}
	return l.store.SetEffect(ctx, f.ID, f.Status, data)
}

// AddEffect records an effect.
func (v hostVerbs) AddEffect(ctx context.Context, ref string, req runtime.EffectRequest) (runtime.Effect, error) {
	op := onSandbox("effect add", ref)
	if len(req.Command) > 0 {
		op.Program = req.Command[0]
	}
	return verb(ctx, v.e, op, func(ctx context.Context) (runtime.Effect, error) { return v.e.effects.add(ctx, ref, req) })
}

func (l *effectLog) add(ctx context.Context, ref string, req runtime.EffectRequest) (f runtime.Effect, err error) {
	f = runtime.Effect{ID: newID(), Group: req.Group, Label: req.Label, Command: slices.Clone(req.Command),
		OnFailure: cmp.Or(req.OnFailure, runtime.OnFailureAbort), Timeout: cmp.Or(req.Timeout, effectTimeout),
		Status: runtime.EffectOutstanding}
	if err := checkEffect(&f); err != nil {
		return runtime.Effect{}, err
	}
	// The effect has happened: wait for a checkpoint rather than fail to record it.
	sb, err := l.acquire(ctx, ref, "effect add", frozenWait)
	if err != nil {
		return runtime.Effect{}, err
	}
	defer sb.lock.Unlock()
	list, err := l.settle(ctx, sb.ID)
	if err != nil {
		return runtime.Effect{}, err
	}
	n := 0
	for _, old := range list {
		if outstanding(old) {
			n++
		}
	}
	if n >= maxEffects {
		return runtime.Effect{}, hint(fmt.Errorf("%w: %d effects are outstanding, and there is room for no more",
			runtime.ErrState, n),
			"Remove those that need not be compensated any more: agentbox effect rm "+sb.Name+" EFFECT...")
	}
	f.Sandbox, f.Head, f.Created = sb.ID, sb.Head, time.Now().UTC()
	data, err := json.Marshal(f)
	if err != nil {
		return runtime.Effect{}, err
	}
	if err := failpoint.Hit("effect.add.before-put"); err != nil {
		return runtime.Effect{}, err
	}
	if err := l.store.PutEffect(ctx, store.Effect{
		ID: f.ID, Sandbox: sb.ID, Head: f.Head, Status: f.Status, Created: f.Created, Data: data,
	}); err != nil {
		return runtime.Effect{}, err
	}
	l.log.Info("effect added", "sandbox", sb.ID, "effect", f.ID)
	return f, nil
}

// checkEffect completes an effect and refuses an undo command that could not run.
func checkEffect(f *runtime.Effect) error {
	switch f.OnFailure {
	case runtime.OnFailureAbort, runtime.OnFailureContinue, runtime.OnFailureRetry:
	default:
		return fmt.Errorf("%w: on failure %q: choose %s, %s or %s", runtime.ErrInvalid, f.OnFailure,
			runtime.OnFailureAbort, runtime.OnFailureContinue, runtime.OnFailureRetry)
	}
	if f.Timeout < 0 || f.Timeout > maxEffectTime {
		return fmt.Errorf("%w: a timeout of %s: it has to be more than 0, and at most %s", runtime.ErrInvalid,
			f.Timeout, maxEffectTime)
	}
	for what, s := range map[string]string{"label": f.Label, "group": f.Group} {
		if len(s) > maxEffectLabelLen || !utf8.ValidString(s) ||
			strings.ContainsFunc(s, func(r rune) bool { return !unicode.IsPrint(r) }) {
			return fmt.Errorf("%w: %s %.80q: at most %d bytes of printable text", runtime.ErrInvalid,
				what, s, maxEffectLabelLen)
		}
	}
	if len(f.Command) == 0 || f.Command[0] == "" || len(f.Command) > maxEffectArgs {
		return fmt.Errorf("%w: an undo command has a program and at most %d arguments",
			runtime.ErrInvalid, maxEffectArgs-1)
	}
	n := 0
	for _, arg := range f.Command {
		n += len(arg)
		if n > maxEffectText || strings.ContainsRune(arg, 0) || !utf8.ValidString(arg) {
			return fmt.Errorf("%w: the undo command: at most %d bytes of UTF-8 in all, without NUL",
				runtime.ErrInvalid, maxEffectText)
		}
	}
	program, err := lookHost(f.Command[0])
	if err != nil {
		return err
	}
	if _, err := policy.Trusted(program); err != nil {
		return fmt.Errorf("root runs undo commands, and %w", err)
	}
	f.Command[0] = program
	return nil
}

// lookHost finds a program of the host by its name or its absolute path.
func lookHost(name string) (string, error) {
	if filepath.IsAbs(name) {
		if _, err := exec.LookPath(name); err != nil {
			return "", fmt.Errorf("%w: %w", runtime.ErrInvalid, err)
		}
		return filepath.Clean(name), nil
	}
	if !strings.Contains(name, "/") {
		for _, dir := range filepath.SplitList(hostPath) {
			if path, err := exec.LookPath(filepath.Join(dir, name)); err == nil {
				return path, nil
			}
		}
	}
	return "", hint(fmt.Errorf("%w: no program %q in %s", runtime.ErrInvalid, name, hostPath),
		"Write it by its absolute path.")
}

// Effects lists the ledger of a sandbox, newest first.
func (v hostVerbs) Effects(ctx context.Context, ref string, all bool) ([]runtime.Effect, error) {
	return verb(ctx, v.e, reads(onSandbox("effect ls", ref)), func(ctx context.Context) ([]runtime.Effect, error) {
		return v.e.effects.list(ctx, ref, all)
	})
}

func (l *effectLog) list(ctx context.Context, ref string, all bool) (_ []runtime.Effect, err error) {
	sb, _, err := l.owner(ctx, ref)
	if err != nil {
		return nil, err
	}
	list, err := l.of(ctx, sb.ID)
	if slices.ContainsFunc(list, func(f runtime.Effect) bool { return f.Status == runtime.EffectRunning }) {
		// Settle it, unless a restore holds the lock and is at work on it.
		if lock, e2 := l.store.Lock(ctx, sb.ID, "effect ls", 0); e2 == nil {
			list, err = l.settle(ctx, sb.ID)
			lock.Unlock()
		}
	}
	if err != nil {
		return nil, err
	}
	slices.Reverse(list)
	if !all {
		list = slices.DeleteFunc(list, func(f runtime.Effect) bool { return !outstanding(f) })
	}
	return list, nil
}

// RemoveEffect removes an effect from the ledger. It stays on record as removed.
func (v hostVerbs) RemoveEffect(ctx context.Context, ref, effect string) error {
	op := onSandbox("effect rm", ref)
	op.To = effect
	return v.e.verb(ctx, op, func(ctx context.Context) error { return v.e.effects.remove(ctx, ref, effect) })
}

func (l *effectLog) remove(ctx context.Context, ref, effect string) (err error) {
	sb, _, err := l.owner(ctx, ref)
	if err != nil {
		return err
	}
	lock, err := l.lock(ctx, sb.ID, "effect rm", lockWait)
	if err != nil {
		return err
	}
	defer lock.Unlock()
	list, err := l.settle(ctx, sb.ID)
	if err != nil {
		return err
	}
	var found []runtime.Effect
	for _, f := range list {
		if outstanding(f) && (f.ID == effect || len(effect) >= 4 && strings.HasPrefix(f.ID, effect)) {
			found = append(found, f)
		}
	}
	switch {
	case len(found) == 0:
		return hint(fmt.Errorf("outstanding effect %.64q: %w", effect, runtime.ErrNotFound),
			"List what there is with: agentbox effect ls "+sb.Name)
	case len(found) > 1:
		return fmt.Errorf("%w: effect %q is ambiguous: %s, %s", runtime.ErrInvalid, effect, found[0].ID, found[1].ID)
	}
	found[0].Status = runtime.EffectRemoved
	return l.set(ctx, found[0])
}

// settleEffects reads the ledger of a sandbox whose lock is held. An undo command that the
// ledger has as running was killed with the agentbox that ran it.
func (l *effectLog) settle(ctx context.Context, id string) ([]runtime.Effect, error) {
	list, err := l.of(ctx, id)
	if err != nil {
		return nil, err
	}
	for i := range list {
		if f := &list[i]; f.Status == runtime.EffectRunning {
			if err := endMarked("AGENTBOX_EFFECT=" + f.ID); err != nil {
				return nil, err
			}
			f.Status, f.Error = runtime.EffectUnknown, "agentbox was killed while the undo command may have run"
			if err := l.set(ctx, *f); err != nil {
				return nil, err
			}
			l.note(*f)
		}
	}
	return list, nil
}

// noteEffect records the result of an undo command as an event.
func (l *effectLog) note(f runtime.Effect) {
	ev := runtime.Event{
		Time: time.Now(), Type: runtime.EventEffect, Effect: f.ID, Checkpoint: f.Checkpoint, Reason: f.Status,
	}
	if f.Label != "" {
		ev.Name = f.Label
	}
	if f.Error != "" {
		ev.Reason += ": " + f.Error
	}
	if err := l.events.note(f.Sandbox, ev); err != nil {
		l.log.Warn("event not recorded", "sandbox", f.Sandbox, "err", err)
	}
}
