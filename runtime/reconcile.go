package runtime

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/agentbox/agentbox/criu"
	"github.com/agentbox/agentbox/criu/stage"
	"github.com/agentbox/agentbox/internal/failpoint"
	"github.com/agentbox/agentbox/runtime/store"
)

// Kinds of findings.
const (
	FoundInterrupted = "interrupted" // a verb that was cut off
	FoundStore       = "store"       // unfinished checkpoints and packs
	FoundEnded       = "ended"       // it ended, and nobody put that on record or freed what it held
	FoundGone        = "gone"        // a sandbox whose container is gone
	FoundStray       = "stray"       // what is left of a sandbox that is gone
	FoundLease       = "lease"       // a lease that is over, with what belongs to it
	FoundUnknown     = "unknown"     // a sandbox that is whole and not on record; it is left alone
	FoundWatch       = "watch"       // the process that holds a sandbox to its limits was dead
	FoundAuto        = "auto"        // the process that takes its checkpoints was dead
	FoundMonitor     = "monitor"     // the process that keeps its output and its exit code is dead
	FoundStaged      = "staged"      // a restore that nobody will start
	FoundHost        = "host"        // rules, bridges, helpers of all sandboxes
)

// Finding is one difference between what is recorded and what there is.
type Finding struct {
	Kind    string `json:"kind"`
	Sandbox string `json:"sandbox,omitempty"` // its id
	Action  string `json:"action,omitempty"`  // what was done about it, in a sentence
	Error   string `json:"error,omitempty"`   // why nothing could be
}

// ReconcileReport is the documented JSON of `agentbox recover`; it only ever grows.
type ReconcileReport struct {
	Actions   []string       `json:"actions"` // those of the findings
	Findings  []Finding      `json:"findings"`
	Counts    map[string]int `json:"counts"`    // findings by their kind
	Failed    int            `json:"failed"`    // of them: with an error
	Sandboxes int            `json:"sandboxes"` // looked at
	Took      time.Duration  `json:"took_ns"`
}

// Deeds are the actions by which something was changed.
func (r ReconcileReport) Deeds() (did []string) {
	for _, f := range r.Findings {
		if f.Action != "" && f.Kind != FoundUnknown {
			did = append(did, f.Action)
		}
	}
	return did
}

// Holder is a Backend that tells at one look at the kernel what its containers
// hold that only a start needs, so that those that are well cost nothing more.
type Holder interface {
	// Held lists, by id, what there is, a word each: processes, mounts, cgroups,
	// links, files of RUN, an end that is not on record. Containers of which
	// nothing else is left are among them; those of other roots never are.
	Held(ctx context.Context) (map[string][]string, error)
	// Tend repairs or frees what belongs to no single container: bridges, rules,
	// a proxy. It returns a sentence for each deed.
	Tend(ctx context.Context) (did []string, err error)
}

const (
	// HeldMonitor is the word for the process that keeps a container's output.
	HeldMonitor = "monitor"

	// reconcileLock keeps two reconcilers apart.
	reconcileLock = "reconcile"
	// settleTime bounds the work on one container.
	settleTime = time.Minute
	// endingTime is how long after an exit the monitor may be at work on it.
	endingTime = 10 * time.Second
	// monitorTime is how long a monitor may take to end when its container is gone.
	monitorTime, monitorAgain = 5 * time.Second, 500 * time.Millisecond
	// stagedAge is from when on a staged restore without a sandbox is nobody's.
	stagedAge = 10 * time.Minute
)

// reconciling is one Reconcile under way.
type reconciling struct {
	e      *Engine
	report ReconcileReport
	errs   []error
	rows   []store.Sandbox
	known  map[string]store.Sandbox
	staged map[string]bool // names that staged restores of sandboxes may have
	blind  bool            // an engine did not answer, or state.db lacks some: not all of these are known
	alone  map[string]bool // ids of sandboxes that are whole and not on record
}

// found takes a finding into the report, and puts it on record with its sandbox.
func (r *reconciling) found(kind, id, action string, err error) {
	f := Finding{Kind: kind, Sandbox: id, Action: action}
	if err != nil {
		f.Error = err.Error()
		r.report.Failed++
		r.errs = append(r.errs, err)
		r.e.log.Error("reconcile", "kind", kind, "sandbox", id, "err", err)
	}
	if action != "" {
		r.report.Actions = append(r.report.Actions, action)
	}
	if _, said := r.e.told.Load(id); action != "" && !(kind == FoundUnknown && said) {
		r.e.log.Warn("reconcile", "kind", kind, "sandbox", id, "action", action)
	}
	if kind == FoundUnknown {
		r.e.told.Store(id, true) // once is enough for a log
	}
	r.report.Findings = append(r.report.Findings, f)
	r.report.Counts[kind]++
}

// Reconcile compares what is recorded with the kernel and the engines, and
// repairs or frees what differs: records without a thing, things without a
// record. Before that it does what RecoverInterrupted does, after it what restart
// policies ask for. What a verb is at work on is left alone, as is whatever is not
// provably this root's. It is cheap when all is well; one that is under way
// already makes it ErrBusy.
func (e *Engine) Reconcile(ctx context.Context) (_ ReconcileReport, err error) {
	defer func() { err = fail("recover", "", err) }()
	began := time.Now()
	r := &reconciling{e: e, staged: map[string]bool{}, alone: map[string]bool{}, known: map[string]store.Sandbox{}, report: ReconcileReport{Actions: []string{}, Findings: []Finding{}, Counts: map[string]int{}}}
	lock, err := e.store.Lock(ctx, reconcileLock, "recover", lockWait)
	if err != nil {
		return r.report, err
	}
	defer lock.Unlock()
	done, err := e.RecoverInterrupted(ctx)
	for _, did := range done.Actions {
		r.found(FoundInterrupted, "", did, nil)
	}
	r.errs = append(r.errs, err, e.ReviveWatches(ctx))
	ended, err := e.EndLeases(ctx)
	for _, did := range ended {
		r.found(FoundLease, "", did, nil)
	}
	r.errs = append(r.errs, err)
	if err := failpoint.Hit("reconcile.before-store"); err != nil {
		return r.report, err
	}
	swept, err := e.store.Sweep(ctx)
	for _, did := range swept {
		r.found(FoundStore, "", did, nil)
	}
	r.errs = append(r.errs, err, criu.SweepTemp())
	if r.rows, err = e.store.Sandboxes(ctx); err != nil {
		return r.report, errors.Join(append(r.errs, err)...)
	}
	r.report.Sandboxes = len(r.rows)
	used := map[string]bool{e.first: true}
	for _, sb := range r.rows {
		used[sb.Backend], r.known[sb.ID] = true, sb
	}
	for _, name := range slices.Sorted(maps.Keys(used)) {
		if err := r.backend(ctx, name); err != nil {
			r.blind = true
			r.errs = append(r.errs, fmt.Errorf("backend %s: %w", name, err))
		}
	}
	if err := failpoint.Hit("reconcile.before-run"); err != nil {
		return r.report, err
	}
	r.errs = append(r.errs, r.run(ctx))
	r.report.Took = time.Since(began)
	return r.report, errors.Join(r.errs...)
}

// backend compares one backend's containers with the records.
func (r *reconciling) backend(ctx context.Context, name string) error {
	host, err := r.e.host(name)
	if err != nil {
		return err
	}
	holder, _ := host.Backend.(Holder)
	var held map[string][]string
	if holder != nil {
		if held, err = holder.Held(ctx); err != nil {
			return err
		}
	}
	listed, err := host.List(ctx)
	if err != nil {
		return err
	}
	lingering := map[string]bool{}
	ids := map[string]bool{}
	for _, id := range slices.Concat(listed, slices.Collect(maps.Keys(held))) {
		ids[id] = true
	}
	for _, sb := range r.rows {
		if sb.Backend == name {
			ids[sb.ID] = true
		}
	}
	for _, id := range slices.Sorted(maps.Keys(ids)) {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		sb, known := r.known[id]
		if known && sb.Backend != name {
			continue // backends share our run directory
		}
		if known {
			attend, err := r.look(ctx, host, sb, holder != nil, held[id])
			if err != nil {
				r.found(FoundEnded, id, "", fmt.Errorf("sandbox %s: %w", sb.Name, err))
			}
			if !attend || err != nil {
				continue
			}
		} else if slices.Equal(held[id], []string{HeldMonitor}) && !slices.Contains(listed, id) {
			lingering[id] = true // most likely it is about to end
			continue
		}
		soon, cancel := context.WithTimeout(ctx, settleTime)
		kind, did, err := r.settle(soon, host, id, held[id])
		cancel()
		if did != "" || err != nil {
			r.found(kind, id, did, err)
		}
	}
	if holder == nil {
		return nil
	}
	if len(lingering) > 0 {
		r.errs = append(r.errs, r.linger(ctx, host, holder, lingering))
	}
	did, err := holder.Tend(ctx)
	for _, said := range did {
		r.found(FoundHost, "", said, nil)
	}
	return err
}

// linger frees monitors of containers that are gone, which had the time to end.
func (r *reconciling) linger(ctx context.Context, host Host, holder Holder, ids map[string]bool) error {
	for deadline := time.Now().Add(monitorTime); ; {
		select {
		case <-time.After(monitorAgain):
		case <-ctx.Done():
			return context.Cause(ctx)
		}
		held, err := holder.Held(ctx)
		if err != nil {
			return err
		}
		for id := range ids {
			if !slices.Equal(held[id], []string{HeldMonitor}) {
				delete(ids, id)
			}
		}
		if len(ids) == 0 {
			return nil
		}
		if time.Now().After(deadline) {
			break
		}
	}
	for id := range ids {
		if kind, did, err := r.settle(ctx, host, id, []string{HeldMonitor}); did != "" || err != nil {
			r.found(kind, id, did, err)
		}
	}
	return nil
}

// look looks at a recorded sandbox, without its lock, and tells whether there is
// something to settle. One that runs gets back the processes beside it.
func (r *reconciling) look(ctx context.Context, host Host, sb store.Sandbox, holds bool, has []string) (settle bool, err error) {
	s, err := spec(sb)
	if err != nil {
		return false, err
	}
	c, err := host.Inspect(ctx, sb.ID)
	if errors.Is(err, ErrNotFound) {
		return true, nil
	}
	if err != nil {
		r.blind = true
		return false, err
	}
	r.staged[c.Stage.ID] = true
	if c.Status != Running && c.Status != Paused {
		if s.Adopted {
			return false, nil // its engine sees to the rest
		}
		if back, _, _, err := r.e.comesBack(ctx, sb, s, c); err != nil {
			return false, err
		} else if back {
			if alive, err := held(filepath.Join(r.e.marks(), sb.ID)); err != nil {
				return false, err
			} else if !alive {
				r.e.watchOver(s) // which starts it again
				return false, nil
			}
		}
		if c.Status == Exited && time.Since(c.Finished) < endingTime && slices.Contains(has, HeldMonitor) {
			return false, nil // its monitor is about to do it
		}
		return !holds || len(has) > 0, nil
	}
	if interval(s) && r.e.auto != nil {
		alive, err := held(r.e.autoPath(sb.ID))
		if err != nil {
			return false, err
		}
		if !alive {
			r.e.every(s)
			r.found(FoundAuto, sb.ID, fmt.Sprintf("checkpoints of sandbox %s are taken at its interval again", sb.Name), nil)
		}
	}
	if holds && !slices.Contains(has, HeldMonitor) {
		// It may have been started since the look at the kernel.
		if now, err := host.Inspect(ctx, sb.ID); err == nil && now.Pid == c.Pid && time.Since(c.Started) > settleTime {
			r.found(FoundMonitor, sb.ID, "", nil)
		}
	}
	return false, nil
}

// settle frees what one container holds without need. One that a verb works
// on is left alone.
func (r *reconciling) settle(ctx context.Context, host Host, id string, has []string) (kind, did string, err error) {
	e := r.e
	// As a reaper, for which other verbs wait.
	lock, err := e.store.Lock(ctx, id, opReap, 0)
	if errors.Is(err, ErrBusy) {
		return "", "", nil
	}
	if err != nil {
		return FoundEnded, "", err
	}
	defer lock.Unlock()
	if err := failpoint.Hit("reconcile.before-settle"); err != nil {
		return FoundEnded, "", err
	}
	// Others may have done it since the look.
	holder, holds := host.Backend.(Holder)
	if holds && len(has) > 0 {
		now, err := holder.Held(ctx)
		if err != nil {
			return FoundEnded, "", err
		}
		monitor := []string{HeldMonitor}
		if slices.Equal(now[id], monitor) && !slices.Equal(has, monitor) {
			return "", "", nil // it ends by itself; should it not, the next look finds it
		}
		has = now[id]
	}
	sb, err := e.store.Sandbox(ctx, id)
	if errors.Is(err, ErrNotFound) {
		if ids, err := host.List(ctx); err != nil || len(has) == 0 && !slices.Contains(ids, id) {
			return FoundStray, "", err
		}
		return r.stray(ctx, host, id, has)
	}
	if err != nil {
		return FoundEnded, "", err
	}
	cut, err := e.interruptedIn(ctx, id)
	if err != nil || cut { // that one could not be finished, which was said
		return FoundEnded, "", err
	}
	s, err := spec(sb)
	if err != nil {
		return FoundEnded, "", err
	}
	// Backends share our run directory, and one may take for its own what a
	// restore has left there for another's sandbox.
	if host, err = e.host(sb.Backend); err != nil {
		return FoundEnded, "", err
	}
	c, err := host.Inspect(ctx, id)
	if s.Adopted {
		if errors.Is(err, ErrNotFound) {
			did = fmt.Sprintf("forgot %s, whose container is gone; its checkpoints stay", sb.Name)
			return FoundGone, did, errors.Join(os.RemoveAll(filepath.Join(e.run, id)), e.dropEvents(id), e.store.DeleteSandbox(ctx, id))
		}
		return FoundEnded, "", err // its engine sees to the rest
	}
	if errors.Is(err, ErrNotFound) {
		// Removed through its engine. What else it had goes, too.
		return FoundGone, fmt.Sprintf("removed sandbox %s, whose container is gone; its checkpoints stay", sb.Name), e.finishRemove(ctx, host, id, false)
	}
	if err != nil || c.Status == Running || c.Status == Paused {
		return FoundEnded, "", err
	}
	e.keepHits(ctx, sb, c)
	if err := host.Stop(ctx, id, StopOptions{}); err != nil || len(has) == 0 {
		return FoundEnded, "", err
	}
	did = fmt.Sprintf("freed what sandbox %s held, which has not run%s", sb.Name, listed(has))
	if c.Status == Exited {
		did = fmt.Sprintf("freed what sandbox %s held, which has ended with exit code %d%s", sb.Name, c.ExitCode, listed(has))
		return FoundEnded, did, e.note(id, Event{Time: time.Now(), Type: EventReconciled, Exit: &c.ExitCode, Reason: did})
	}
	return FoundEnded, did, nil
}

// stray sees to what is there of a sandbox that is not in state.db.
func (r *reconciling) stray(ctx context.Context, host Host, id string, has []string) (kind, did string, err error) {
	did, whole, err := r.e.leaveUnknown(ctx, host, id)
	if whole || err != nil {
		// One that cannot be looked at may be whole.
		r.alone[id], r.blind = true, true // what is staged may be for it
		return FoundUnknown, did, err
	}
	err = errors.Join(os.RemoveAll(filepath.Join(r.e.run, id)), r.e.forgetRestarts(id))
	if err != nil {
		return FoundStray, "", err
	}
	return FoundStray, did + listed(has), nil
}

func listed(has []string) string {
	if len(has) == 0 {
		return ""
	}
	return " (" + strings.Join(has, ", ") + ")"
}

// run frees what is in RUN of sandboxes that are gone, and forgets their events.
func (r *reconciling) run(ctx context.Context) error {
	if err := r.e.forgetEvents(ctx, r.alone); err != nil {
		return err
	}
	names, err := stage.List(r.e.run)
	if err != nil {
		return err
	}
	var errs []error
	for _, name := range names {
		st, err := os.Stat(filepath.Join(r.e.run, "restore", name))
		// Engines call containers by names of their own.
		if err != nil || r.staged[name] || r.blind || time.Since(st.ModTime()) < stagedAge {
			continue
		}
		if err := stage.Clear(r.e.run, name); err != nil {
			errs = append(errs, err)
			continue
		}
		r.found(FoundStaged, "", fmt.Sprintf("removed a staged restore of %s, which is not there", short(name)), nil)
	}
	// Of a sandbox that was restored to its id meanwhile there is a row again.
	for _, dir := range []string{filepath.Join(r.e.run, "auto"), filepath.Join(r.e.run, "storage"), r.e.restartsDir()} {
		entries, err := os.ReadDir(dir)
		if ignoreMissing(err) != nil {
			errs = append(errs, err)
		}
		for _, entry := range entries {
			id, _, _ := strings.Cut(entry.Name(), ".")
			info, err := entry.Info()
			if _, known := r.known[id]; known || r.alone[id] || err != nil || time.Since(info.ModTime()) < settleTime {
				continue
			}
			path := filepath.Join(dir, entry.Name())
			if used, err := held(path); err != nil || used {
				continue
			}
			if _, err := r.e.store.Sandbox(ctx, id); errors.Is(err, ErrNotFound) {
				errs = append(errs, ignoreMissing(os.Remove(path)))
			}
		}
	}
	return errors.Join(errs...)
}
