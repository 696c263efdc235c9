package engine

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
	"github.com/agentbox/agentbox/internal/guard"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/store"
)

const (
	// reconcileLock allows one Reconcile at a time.
	reconcileLock = "reconcile"
	// settleTime bounds the work on one container.
	settleTime = time.Minute
	// endingTime is how long after an exit its monitor may still work on it;
	// stuckTime is the same in a background Reconcile.
	endingTime, stuckTime = 10 * time.Second, 2 * time.Minute
	// monitorTime is how long a monitor may take to end once its container is gone:
	// it waits for its exit command, an agentbox process, to notice that.
	monitorTime, monitorAgain = 30 * time.Second, 250 * time.Millisecond
	// stagedAge is the age from which a staged restore without a sandbox is stale.
	stagedAge = 10 * time.Minute
)

// reconciling is one Reconcile under way.
type reconciling struct {
	e      *recovery
	report runtime.ReconcileReport
	causes []error // of its findings' errors
	errs   []error
	rows   []store.Sandbox
	known  map[string]store.Sandbox
	staged map[string]bool // names that staged restores of sandboxes may have
	blind  bool            // an engine did not answer, or state.db lacks rows: staged is incomplete
	alone  map[string]bool // ids of intact sandboxes that are not on record
	began  time.Time

	// unasked: a background Reconcile. It repairs nothing that rests only on something
	// missing: an engine that was given another data root, or a disk that was not
	// mounted at boot, looks as if all its containers were gone.
	unasked bool
	// ending is the uptime at which each idle monitor was first seen.
	ending map[string]time.Duration
	said   map[runtime.Finding]bool
}

// reconciled is what an Engine remembers about its last Reconcile.
type reconciled struct {
	said   map[runtime.Finding]bool
	ending map[string]time.Duration
}

// found adds a finding to the report, and to the log if it is new.
func (r *reconciling) found(kind, id, action string, err error) {
	r.add(runtime.Finding{Kind: kind, Sandbox: id, Action: action}, err)
}

// leave is found for a finding that only the owner can resolve.
func (r *reconciling) leave(kind, id, advice string, err error) {
	r.add(runtime.Finding{Kind: kind, Sandbox: id, Action: advice, Left: true}, err)
}

func (r *reconciling) add(f runtime.Finding, err error) {
	if err != nil {
		f.Error = err.Error()
		r.report.Failed++
		r.errs = append(r.errs, err)
	}
	r.said[f] = true
	if f.Again = r.e.lastReconciled().said[f]; !f.Again && (r.unasked || err != nil) { // otherwise the caller reads the report
		r.e.log.Warn("reconcile incomplete", "kind", f.Kind, "sandbox", f.Sandbox, "action", f.Action, "err", f.Error)
	}
	if f.Action != "" {
		r.report.Actions = append(r.report.Actions, f.Action)
	}
	r.report.Findings, r.causes = append(r.report.Findings, f), append(r.causes, err)
	r.report.Counts[f.Kind]++
}

func (rec *recovery) lastReconciled() reconciled {
	rec.mu.Lock()
	defer rec.mu.Unlock()
	return rec.last
}

// Reconcile compares the records with the kernel and the engines, and repairs or frees
// what differs: records without an object, and orphans without a record. Before that it
// does the work of RecoverInterrupted, and it restarts sandboxes as their restart policies
// say. It leaves alone what a verb is at work on and what is not provably this root's. It is
// cheap when nothing differs; while another Reconcile is under way it returns ErrBusy.
func (v hostVerbs) Reconcile(ctx context.Context) (runtime.ReconcileReport, error) {
	return verb(ctx, v.e, on("recover", ""), func(ctx context.Context) (runtime.ReconcileReport, error) {
		return v.e.recovery.reconcile(ctx, false)
	})
}

func (rec *recovery) reconcile(ctx context.Context, unasked bool) (_ runtime.ReconcileReport, err error) {
	defer func() { err = fail("recover", "", err) }()
	r := &reconciling{
		e: rec, unasked: unasked, began: time.Now(), said: map[runtime.Finding]bool{},
		ending: map[string]time.Duration{}, staged: map[string]bool{}, alone: map[string]bool{},
		known: map[string]store.Sandbox{}, report: runtime.ReconcileReport{
			Actions: []string{}, Findings: []runtime.Finding{}, Counts: map[string]int{},
		},
	}
	lock, err := rec.store.Lock(ctx, reconcileLock, "recover", lockWait)
	if err != nil {
		return r.report, err
	}
	defer lock.Unlock()
	defer func() {
		rec.mu.Lock()
		defer rec.mu.Unlock()
		if !unasked { // a requested one has waited for them instead
			r.ending = rec.last.ending
		}
		rec.last = reconciled{r.said, r.ending}
	}()
	defer r.record(ctx)
	done, err := rec.recoverFor(ctx, runtime.Own{Alone: unasked})
	for _, did := range done.Actions {
		r.found(runtime.FoundInterrupted, "", did, nil)
	}
	r.errs = append(r.errs, err)
	ended, err := rec.leases.endDue(ctx)
	for _, did := range ended {
		r.found(runtime.FoundLease, "", did, nil)
	}
	r.errs = append(r.errs, err, rec.supervisor.revive(ctx))
	if err := failpoint.Hit("reconcile.before-store"); err != nil {
		return r.report, err
	}
	swept, err := rec.store.Sweep(ctx)
	for _, did := range swept {
		r.found(runtime.FoundStore, "", did, nil)
	}
	r.errs = append(r.errs, err, criu.Sweep())
	if r.rows, err = rec.store.Sandboxes(ctx); err != nil {
		return r.report, errors.Join(append(r.errs, err)...)
	}
	r.report.Sandboxes = len(r.rows)
	used := map[string]bool{rec.first: true}
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
	r.report.Took = time.Since(r.began)
	return r.report, errors.Join(r.errs...)
}

// backend compares one backend's containers with the records.
func (r *reconciling) backend(ctx context.Context, name string) error {
	host, err := r.e.host(name)
	if err != nil {
		return err
	}
	holder, _ := host.Backend.(runtime.Holder)
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
			continue // backends share the run directory
		}
		if known {
			attend := false
			err := guard.Do(func() (err error) {
				attend, err = r.look(ctx, host, sb, holder != nil, held[id])
				return err
			})
			if err != nil {
				r.found(runtime.FoundEnded, id, "", fmt.Errorf("sandbox %s: %w", sb.Name, err))
			}
			if !attend || err != nil {
				continue
			}
		}
		if r.settle(ctx, host, id, held[id], false) {
			lingering[id] = true
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
		r.found(runtime.FoundHost, "", said, nil)
	}
	return err
}

// linger ends monitors of containers that are gone, if they had time to end by
// themselves. A removal does not wait for them: conmon ends once its exit command has
// found the sandbox gone, or its lock held by the removal. A requested Reconcile waits
// up to monitorTime for them; a background one leaves recent ones to the next run.
func (r *reconciling) linger(ctx context.Context, host Host, holder runtime.Holder, ids map[string]bool) error {
	for deadline := time.Now().Add(monitorTime); !r.unasked && time.Now().Before(deadline); {
		select {
		case <-time.After(monitorAgain):
		case <-ctx.Done():
			return context.Cause(ctx)
		}
		held, err := holder.Held(ctx)
		if err != nil {
			return err
		}
		maps.DeleteFunc(ids, func(id string, _ bool) bool { return !onlyMonitor(held[id]) })
		if len(ids) == 0 {
			return nil
		}
	}
	for id := range ids {
		if !r.unasked || r.lasts(id) {
			r.settle(ctx, host, id, []string{runtime.HeldMonitor}, true)
		}
	}
	return nil
}

func onlyMonitor(has []string) bool { return slices.Equal(has, []string{runtime.HeldMonitor}) }

// lasts reports whether a monitor has been idle for stuckTime.
func (r *reconciling) lasts(id string) bool {
	now := uptime()
	since, ok := r.e.lastReconciled().ending[id]
	if !ok {
		since = now
	}
	r.ending[id] = since
	return now-since >= stuckTime
}

// look inspects a recorded sandbox, without its lock, and reports whether there is
// something to settle. It has a sandbox supervised that should be, and is not.
func (r *reconciling) look(
	ctx context.Context, host Host, sb store.Sandbox, holds bool, has []string,
) (settle bool, err error) {
	s, err := spec(sb)
	if err != nil {
		return false, err
	}
	c, err := host.Inspect(ctx, sb.ID)
	if errors.Is(err, runtime.ErrNotFound) {
		return true, nil
	}
	if err != nil {
		r.blind = true
		return false, err
	}
	r.staged[c.Stage.ID] = true
	if c.Status != runtime.Running && c.Status != runtime.Paused {
		if s.Adopted {
			return false, nil // its engine does the rest
		}
		if back, _, err := r.e.supervisor.comesBack(ctx, sb, s, c); err != nil {
			return false, err
		} else if back {
			if now, err := r.supervised(s); now || err != nil { // the supervisor restarts it
				return false, err
			}
		}
		if c.Status == runtime.Exited && slices.Contains(has, runtime.HeldMonitor) {
			// Its monitor is about to settle it, or waits for a reader of its output
			// or its exit code.
			if r.unasked && !r.lasts(sb.ID) || !r.unasked && time.Since(c.Finished) < endingTime {
				return false, nil
			}
		}
		return !holds || len(has) > 0, nil
	}
	if _, err := r.supervised(s); err != nil {
		return false, err
	}
	if holds && !slices.Contains(has, runtime.HeldMonitor) {
		// It may have been started since Held was read.
		if now, err := host.Inspect(ctx, sb.ID); err == nil && now.Pid == c.Pid && time.Since(c.Started) > settleTime {
			r.leave(runtime.FoundMonitor, sb.ID,
				fmt.Sprintf("left sandbox %s alone, which runs without the process that keeps its output and its exit code: to have them again: agentbox stop %s, agentbox start %s", sb.Name, sb.Name, sb.Name), nil)
		}
	}
	return false, nil
}

// supervised has a sandbox supervised that lacks its mark, and reports whether it did.
func (r *reconciling) supervised(s runtime.Spec) (now bool, err error) {
	if !supervised(s) {
		return false, nil
	}
	if _, marked, err := r.e.marks.read(s.ID); marked || err != nil {
		return false, err
	}
	r.e.supervisor.superviseFromNow(s)
	return true, nil
}

// settle frees what one container holds without need, unless a verb is at work on it. If
// only the monitor of a removed sandbox is left, settle reports that it lingers; late says
// that the monitor has had the time to end, and frees it.
func (r *reconciling) settle(ctx context.Context, host Host, id string, has []string, late bool) (lingers bool) {
	ctx, cancel := context.WithTimeout(ctx, settleTime)
	defer cancel()
	f := runtime.Finding{Kind: runtime.FoundEnded}
	err := guard.Do(func() (err error) {
		f, err = r.free(ctx, host, id, has, late)
		return err
	})
	if errors.Is(err, errLingers) {
		return true
	}
	if f.Action != "" || err != nil {
		f.Sandbox = id
		r.add(f, err)
	}
	return false
}

// errLingers: only the monitor is left of a sandbox that is gone.
var errLingers = errors.New("its monitor is about to end")

// free does the work of settle; its finding says what was done.
//
// Every verb that creates or removes part of a sandbox, under any id, holds that
// sandbox's lock from before its first trace (an intent, a row, a directory, a cgroup, a link, a staged
// restore) until record and container agree: create, fork, import, removal, a restore
// of a removed sandbox, and a child of a killed verb that is still at work. So nothing
// that is seen under the lock is work in progress, with four exceptions that take no
// lock: a copy out of a stopped sandbox (Holder.Busy), commands in a running one (which
// is left alone), the monitor and its exit command after a removal (errLingers), and
// both after an exit (look).
func (r *reconciling) free(
	ctx context.Context, host Host, id string, has []string, late bool,
) (f runtime.Finding, err error) {
	e := r.e
	f.Kind = runtime.FoundEnded
	// Lock as the reaper, for which other verbs wait.
	lock, err := e.store.Lock(ctx, id, opReap, 0)
	if errors.Is(err, runtime.ErrBusy) {
		return f, nil
	}
	if err != nil {
		return f, err
	}
	defer lock.Unlock()
	if err := failpoint.Hit("reconcile.before-settle"); err != nil {
		return f, err
	}

	// Another process may have settled it since look.
	holder, holds := host.Backend.(runtime.Holder)
	if holds && holder.Busy(id) {
		return f, nil
	}

	if holds && len(has) > 0 {
		now, err := holder.Held(ctx)
		if err != nil {
			return f, err
		}
		if onlyMonitor(now[id]) && !onlyMonitor(has) {
			if _, err := e.store.Sandbox(ctx, id); err == nil {
				return f, nil // it ends by itself; otherwise the next Reconcile finds it
			}
		}
		if has = now[id]; holder.Busy(id) { // what it holds may belong to that work
			return f, nil
		}
	}
	sb, err := e.store.Sandbox(ctx, id)
	if errors.Is(err, runtime.ErrNotFound) {
		if onlyMonitor(has) && !late {
			return f, errLingers
		}
		f.Kind = runtime.FoundStray
		if ids, err := host.List(ctx); err != nil || len(has) == 0 && !slices.Contains(ids, id) {
			return f, err
		}
		return r.stray(ctx, host, id, has)
	}
	if err != nil {
		return f, err
	}
	cut, err := e.interruptedIn(ctx, id)
	if err != nil || cut { // recovery could not finish that verb, and has said so
		return f, err
	}
	s, err := spec(sb)
	if err != nil {
		return f, err
	}

	return r.freeEnded(ctx, sb, s, has)
}

// freeEnded is free for a sandbox with a record, whose lock is held.
func (r *reconciling) freeEnded(
	ctx context.Context, sb store.Sandbox, s runtime.Spec, has []string,
) (f runtime.Finding, err error) {
	e, id := r.e, sb.ID
	f.Kind = runtime.FoundEnded

	// Backends share our run directory. One may mistake for its own what a restore has
	// left there for a sandbox of another.
	host, err := e.host(sb.Backend)
	if err != nil {
		return f, err
	}
	c, err := host.Inspect(ctx, id)
	if errors.Is(err, runtime.ErrNotFound) {
		return r.gone(ctx, host, sb, s)
	}
	if err != nil || s.Adopted || c.Status == runtime.Running || c.Status == runtime.Paused {
		return f, err // its engine sees to what was adopted
	}
	e.events.keepHits(ctx, sb, c)
	if err := host.Stop(ctx, id, runtime.StopOptions{}); errors.Is(err, runtime.ErrBusy) {
		return f, nil // a copy out of it has just begun
	} else if err != nil || len(has) == 0 {
		return f, err
	}
	f.Action = fmt.Sprintf("freed what sandbox %s held, which has not run%s", sb.Name, listed(has))
	if c.Status == runtime.Exited {
		f.Action = fmt.Sprintf("freed what sandbox %s held, which has ended with exit code %d%s", sb.Name,
			c.ExitCode, listed(has))
		return f, e.events.note(id, runtime.Event{
			Time: time.Now(), Type: runtime.EventReconciled, Exit: &c.ExitCode, Reason: f.Action,
		})
	}
	return f, nil
}

// gone handles a sandbox whose container its engine has removed.
func (r *reconciling) gone(
	ctx context.Context, host Host, sb store.Sandbox, s runtime.Spec,
) (f runtime.Finding, err error) {
	f.Kind = runtime.FoundGone
	switch {
	case r.unasked:
		f.Left = true
		f.Action = fmt.Sprintf("left sandbox %s alone, of which backend %s has no container any more: if that is to be so, agentbox recover takes it off the records, with its undo checkpoints; other checkpoints stay", sb.Name, sb.Backend)
	case s.Adopted:
		f.Action = fmt.Sprintf("forgot %s, whose container is gone; its checkpoints stay", sb.Name)
		err = errors.Join(os.RemoveAll(filepath.Join(r.e.run, sb.ID)), r.e.events.drop(sb.ID),
			r.e.store.DeleteSandbox(ctx, sb.ID))
	default:
		// Remove the rest of it, too.
		f.Action = fmt.Sprintf("removed sandbox %s, whose container is gone; its checkpoints stay", sb.Name)
		err = r.e.sandboxes.finishRemove(ctx, host, sb.ID, false)
	}
	if err != nil {
		f.Action = "" // not yet
	}
	return f, err
}

// stray handles a container or leftovers without a record in state.db.
func (r *reconciling) stray(ctx context.Context, host Host, id string, has []string) (f runtime.Finding, err error) {
	f.Kind = runtime.FoundStray
	did, whole, err := r.e.sandboxes.leaveUnknown(ctx, host, id)
	if whole || err != nil {
		// A sandbox that cannot be inspected may be intact.
		r.alone[id], r.blind = true, true // a staged restore may be for it
		return runtime.Finding{Kind: runtime.FoundUnknown, Action: did, Left: true}, err
	}
	if err = errors.Join(os.RemoveAll(filepath.Join(r.e.run, id)), r.e.restarts.forget(id)); err == nil {
		f.Action = did + listed(has)
	}
	return f, err
}

func listed(has []string) string {
	if len(has) == 0 {
		return ""
	}
	return " (" + strings.Join(has, ", ") + ")"
}

// run frees the files in RUN of sandboxes that are gone, and removes their events.
func (r *reconciling) run(ctx context.Context) error {
	if err := r.e.events.prune(ctx, r.alone); err != nil {
		return err
	}
	names, err := stage.List(r.e.run)
	if err != nil {
		return err
	}
	var errs []error
	for _, name := range names {
		st, err := os.Stat(filepath.Join(r.e.run, "restore", name))
		// Engines have their own names for containers.
		if err != nil || r.staged[name] || r.blind || r.began.Sub(st.ModTime()) < stagedAge {
			continue
		}
		// A sandbox has its row before a restore of it is staged, so it would be in staged.
		if err := stage.At(r.e.run, name).Clear(); err != nil {
			errs = append(errs, err)
			continue
		}
		r.found(runtime.FoundStaged, "",
			fmt.Sprintf("removed a staged restore of %s, which is not there", short(name)), nil)
	}
	// A sandbox that was restored to its id in the meantime has a row again.
	autos := filepath.Join(r.e.run, "auto") // of older versions
	for _, dir := range []string{autos, filepath.Join(r.e.run, "storage"), r.e.restarts.dir()} {
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
			errs = append(errs, r.forget(ctx, id, filepath.Join(dir, entry.Name())))
		}
	}
	return errors.Join(errs...)
}

// maxRecorded bounds the audit records of one Reconcile. Further actions share one.
const maxRecorded = 64

// record reports the actions of a Reconcile to the observers, except those that were
// reported when they were done: recovered verbs and ended leases.
func (r *reconciling) record(ctx context.Context) {
	ctx = context.WithoutCancel(ctx)
	rest := runtime.Own{Why: fmt.Sprintf("found: more than %d things", maxRecorded), Past: true, Alone: r.unasked}
	n := 0
	for i, f := range r.report.Findings {
		if f.Action == "" || f.Left || f.Kind == runtime.FoundInterrupted || f.Kind == runtime.FoundLease {
			continue
		}
		if n++; n > maxRecorded {
			rest.Did = append(rest.Did, f.Action)
			if f.Sandbox != "" {
				rest.Made = append(rest.Made, f.Sandbox)
			}
			continue
		}
		own := runtime.Own{Why: "found: " + f.Kind, Did: []string{f.Action}, Past: true, Alone: r.unasked}
		op := runtime.ByItself("recover", runtime.Subject{Sandbox: f.Sandbox, Name: r.known[f.Sandbox].Name}, own)
		_ = r.e.observed(ctx, op, func(context.Context) error { return r.causes[i] })
	}
	if len(rest.Did) > 0 {
		_ = r.e.observed(ctx, runtime.ByItself("recover", runtime.Subject{}, rest), func(context.Context) error {
			return nil
		})
	}
}
