package engine

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/agentbox/agentbox/internal/failpoint"
	"github.com/agentbox/agentbox/internal/guard"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/store"
)

// A lease ends in two steps. First it is recorded as ending, with its members: from
// there on it accepts no more members, even across a crash. Then its members are
// removed, in as many attempts as that takes. Every command makes one (EndLeases), and
// so does the supervisor (keepLeases), which waits for the deaths of their owners.

// lockLeases is held while members of leases are removed.
const lockLeases = "leases"

// releaseWait bounds how long a release waits for other verbs on the members.
const releaseWait = 2 * time.Minute

// errNoBoot: an unknown boot cannot be told from another one.
var errNoBoot = errors.New("which boot of the host this is cannot be told")

// judgeLease returns why a lease has ended or, if it has not, how soon to check again.
// It depends on its arguments only: the time by each clock, and whether an owner is
// alive.
func judgeLease(
	l runtime.Lease, now runtime.Moment, beat runtime.Beat, alive func(runtime.LeaseOwner) (bool, error),
) (reason string, again time.Duration, err error) {
	again = latest
	if now.Boot == "" || beat.Boot == "" {
		return "", again, errNoBoot
	}
	switch o := l.Owner; o.Kind {
	case runtime.OwnerPid, runtime.OwnerConnection:
		what := fmt.Sprintf("its owner, process %d,", o.Pid)
		if o.Kind == runtime.OwnerConnection {
			what = "the service that its connection was to"
		}
		if o.Boot != now.Boot {
			return what + " has ended with the host", 0, nil
		}
		is, err := alive(o)
		if err != nil {
			return "", again, err
		}
		if !is {
			return what + " has ended", 0, nil
		}
	case runtime.OwnerHeartbeat:
		silent := beat.Awake // all of this boot, if it has not been renewed in it
		if o.Beat.Boot == beat.Boot {
			silent -= o.Beat.Awake
		}
		if silent >= o.Interval {
			return fmt.Sprintf("it was not renewed within %v", o.Interval), 0, nil
		}
		again = min(again, o.Interval-silent)
	}
	if l.For > 0 {
		left := l.For - ageAt(l.Since, now)
		if left <= 0 {
			return fmt.Sprintf("its deadline, after %v, has passed", l.For), 0, nil
		}
		again = min(again, left)
	}
	return "", again, nil
}

// endIfOver marks a lease as ending if it is not held any more.
func (ls *leases) endIfOver(ctx context.Context, id string) error {
	return ls.beginEnd(ctx, id, func(l runtime.Lease) (string, error) {
		reason, _, err := judgeLease(l, thisMoment(), thisBeat(), ownerAlive)
		return reason, err
	})
}

// errHeld leaves a lease unchanged.
var errHeld = errors.New("held")

// beginEnd records, if why returns a reason, that a lease is ending, and its members.
func (ls *leases) beginEnd(ctx context.Context, id string, why func(runtime.Lease) (string, error)) error {
	m, err := ls.store.LeaseMembers(ctx, id)
	if err != nil {
		return err
	}
	var l runtime.Lease
	err = ls.store.ChangeLease(ctx, id, false, func(row *store.Lease) (err error) {
		if row.State != store.LeaseActive {
			return errHeld
		}
		if l, err = decodeLease(*row); err != nil {
			return err
		}
		if l.Reason, err = why(l); err == nil && l.Reason == "" {
			err = errHeld
		}
		if err != nil {
			return err
		}
		row.State, l.State, l.Over = store.LeaseEnding, store.LeaseEnding, time.Now().UTC()
		listLease(&l, m)
		row.Data, err = encodeLease(l)
		return err
	})
	if errors.Is(err, errHeld) {
		return nil
	}
	if err != nil {
		return err
	}
	ls.log.Info("lease ending", "lease", id, "name", l.Name, "reason", l.Reason)
	if err := failpoint.Hit("lease.end.after-mark"); err != nil {
		return err
	}

	// Nothing can join it any more. List what has joined since the first look, too.
	if m, err = ls.store.LeaseMembers(ctx, id); err != nil {
		return err
	}
	return ls.store.ChangeLease(ctx, id, true, func(row *store.Lease) (err error) {
		if row.State == store.LeaseEnding {
			listLease(&l, m)
			row.Data, err = encodeLease(l)
		}
		return err
	})
}

// EndLeases ends the leases that are not held any more and removes their members. It is
// quick when there is nothing to do, and every command calls it first. A member that
// another verb is at work on is left to the next call.
func (e *Engine) EndLeases(ctx context.Context) (did []string, err error) {
	return e.leases.endDue(ctx)
}

// endDue is EndLeases; leases that go on are supervised from here.
func (ls *leases) endDue(ctx context.Context) (did []string, err error) {
	did, left, err := ls.endLeases(ctx)
	if len(left) > 0 && ls.supervisor.start != nil {
		if m, _, _ := ls.marks.read(leasesMark); !m.current() { // a killed command has created them, or an earlier boot
			err = errors.Join(err, ls.marks.set(leasesMark, bootID()))
		}
	}
	return did, err
}

// endLeases is EndLeases; left are the leases that have not ended.
func (ls *leases) endLeases(ctx context.Context) (did []string, left []runtime.Lease, err error) {
	rows, err := ls.store.Leases(ctx, false)
	if err != nil {
		return nil, nil, fail("leases", "", err)
	}
	var errs []error
	now, beat := thisMoment(), thisBeat()
	for _, row := range rows {
		l, err := decodeLease(row)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		if l.State == store.LeaseActive {
			reason, _, err := judgeLease(l, now, beat, ownerAlive)
			if err == nil && reason != "" {
				// which judges again; no renewal can intervene
				err = guard.Do(func() error { return ls.endIfOver(ctx, l.ID) })
				if now, e2 := ls.store.Lease(ctx, l.ID); err == nil && e2 == nil {
					l.State = now.State
				}
			}
			if err != nil {
				errs = append(errs, fail("lease", cmp.Or(l.Name, short(l.ID)), err))
			}
		}
		if l.State != store.LeaseEnding {
			left = append(left, l)
			continue
		}
		err = guard.Do(func() error { return ls.freeLease(ctx, l.ID, runtime.ByKeeper) })
		switch {
		case err == nil:
			did = append(did, fmt.Sprintf("removed what belonged to lease %s", cmp.Or(l.Name, short(l.ID))))
			continue
		case !errors.Is(err, runtime.ErrBusy):
			errs = append(errs, fail("lease", cmp.Or(l.Name, short(l.ID)), err))
		}
		left = append(left, l)
	}
	return did, left, errors.Join(errs...)
}

// freeLease removes the members of a lease that is ending. A failure with one member does
// not stop it. by is as in Own: only a verb (empty) waits for members that are busy.
func (ls *leases) freeLease(ctx context.Context, id, by string) error {
	patience, wait := time.Duration(0), by == ""
	if wait {
		patience = -1
	}
	once := func() error { // other processes may end other leases between two attempts
		lock, err := ls.store.Lock(ctx, lockLeases, "lease", patience)
		if err != nil {
			return err
		}
		defer lock.Unlock()
		return ls.freeMembers(ctx, id, by)
	}
	deadline := time.Now().Add(releaseWait)
	for {
		err := once()
		if !wait || !errors.Is(err, runtime.ErrBusy) || time.Now().After(deadline) {
			return err
		}
		select {
		case <-time.After(busyAgain):
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// busyAgain is the pause before a busy member is tried again.
const busyAgain = 100 * time.Millisecond

func (ls *leases) freeMembers(ctx context.Context, id, by string) error {
	row, err := ls.store.Lease(ctx, id)
	if errors.Is(err, runtime.ErrNotFound) || err == nil && row.State != store.LeaseEnding {
		return nil // another process has ended it, or it is active
	}
	if err != nil {
		return err
	}
	l, err := decodeLease(row)
	if err != nil {
		return err
	}
	m, err := ls.store.LeaseMembers(ctx, id)
	if err != nil {
		return err
	}
	if len(m.Sandboxes) > 0 {
		if err := ls.recovery.recoverBy(ctx, by); err != nil {
			ls.log.Error("recovery failed", "err", err) // free the members anyway
		}
	}
	var mu sync.Mutex
	var errs []error
	group := new(guard.Group)
	group.SetLimit(4) // removals wait for the kernel, not only for a CPU
	for _, sb := range m.Sandboxes {
		group.Go(func() error {
			if err := guard.Do(func() error { return ls.freeSandbox(ctx, sb, l, by) }); err != nil {
				ls.notFreed(err, "sandbox", sb.ID, "lease", id)
				mu.Lock()
				defer mu.Unlock()
				errs = append(errs, fmt.Errorf("sandbox %s: %w", sb.Name, err))
			}
			return nil
		})
	}
	_ = group.Wait() // the errors are in errs
	for _, c := range m.Checkpoints {
		if err := ls.freeCheckpoint(ctx, c, l, by); err != nil {
			ls.notFreed(err, "checkpoint", c.ID, "lease", id)
			errs = append(errs, fmt.Errorf("checkpoint %s: %w", short(c.ID), err))
		}
	}
	if len(errs) > 0 {
		return errors.Join(errs...)
	}
	if err := failpoint.Hit("lease.end.after-members"); err != nil {
		return err
	}
	var end *runtime.Op // nil for a verb, which is on record itself
	if by != "" {
		end = runtime.ByItself("lease end", runtime.Subject{}, runtime.Own{By: by, Why: l.Reason})
		end.Ref, end.To = l.Name, id
	}
	err = ls.observed(ctx, end, func(ctx context.Context) error {
		return ls.store.ChangeLease(ctx, id, false, func(row *store.Lease) error {
			row.State = store.LeaseEnded
			return nil
		})
	})
	if err == nil {
		ls.log.Info("lease ended", "lease", id, "name", l.Name, "reason", l.Reason, "sandboxes", len(l.Sandboxes),
			"checkpoints", len(l.Checkpoints))
		defer ls.upkeep.tidy(ctx)
		if _, marked, _ := ls.marks.read(leasesMark); marked {
			if err := ls.marks.set(leasesMark, bootID()); err != nil { // there may be none left
				ls.log.Warn("end of the lease not reported to the supervisor", "lease", id, "err", err)
			}
		}
		err = failpoint.Hit("lease.end.after-end")
	}
	return err
}

// notFreed logs that a member was not removed. A busy member is not a failure.
func (ls *leases) notFreed(err error, what ...any) {
	if !errors.Is(err, runtime.ErrBusy) {
		ls.log.Error("lease member not removed", append(what, "err", err)...)
	}
}

func (ls *leases) freeSandbox(ctx context.Context, sb store.Sandbox, l runtime.Lease, by string) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	if err := failpoint.Hit("lease.end.before-sandbox"); err != nil {
		return err
	}
	// Tell followers of its events why it is removed.
	if err := ls.events.note(sb.ID, runtime.Event{
		Time: time.Now(), Type: runtime.EventLease, Name: cmp.Or(l.Name, short(l.ID)), Reason: l.Reason,
	}); err != nil {
		ls.log.Warn("end of the lease not reported", "sandbox", sb.ID, "err", err)
	}
	err := ls.sandboxes.removeAs(ctx, sb.ID, runtime.ByItself("rm", subjectOf(sb),
		runtime.Own{By: by, Why: ofLease(l)}), runtime.RemoveOptions{Force: true})
	if errors.Is(err, runtime.ErrNotFound) {
		return nil
	}
	if err == nil {
		ls.log.Info("lease member removed", "sandbox", sb.ID, "name", sb.Name, "lease", l.ID)
	}
	return err
}

// freeCheckpoint removes a checkpoint unless it is pinned. If its sandbox is locked, as
// while the checkpoint is being taken, a later attempt removes it.
func (ls *leases) freeCheckpoint(ctx context.Context, c store.Checkpoint, l runtime.Lease, by string) error {
	lock, err := ls.lock(ctx, c.SandboxID, "checkpoint rm", lockWait)
	if err != nil {
		return err
	}
	defer lock.Unlock()
	if err := failpoint.Hit("lease.end.before-checkpoint"); err != nil {
		return err
	}
	var op *runtime.Op
	if !c.Pinned { // else it stays
		op = runtime.ByItself("checkpoint rm", runtime.Subject{
			Sandbox: c.SandboxID, Name: c.SandboxName, Checkpoint: c.ID,
		}, runtime.Own{By: by, Why: ofLease(l)})
	}
	err = ls.observed(ctx, op, func(ctx context.Context) error {
		removed, err := ls.store.RemoveUnpinned(ctx, c.ID)
		if err == nil && !removed {
			err = errPinned // since we looked
		}
		return err
	})
	if errors.Is(err, errPinned) {
		err = nil
	}
	return err
}

var errPinned = fmt.Errorf("%w: it is pinned", runtime.ErrState)

// superviseLeases has the supervisor look at the leases now. Without one it starts it.
func (ls *leases) superviseLeases() {
	if ls.supervisor.start == nil {
		return
	}
	err := ls.marks.set(leasesMark, bootID())
	if err == nil {
		err = ls.supervisor.startSupervisor()
	}
	if err != nil {
		ls.log.Error("supervisor not started; leases end only with the next command", "err", err)
	}
}

// noLeases removes the mark of leases if there are none, unless the mark was written again
// since it was m.
func (ls *leases) noLeases(ctx context.Context, m mark) (none bool, err error) {
	if now, ok, err := ls.marks.read(leasesMark); err != nil || ok && now != m {
		return false, err
	}
	rows, err := ls.store.Leases(ctx, false)
	if err != nil || len(rows) > 0 {
		return false, err
	}
	if err := ls.marks.remove(leasesMark); err != nil {
		return false, err
	}
	// One may have been created meanwhile, whose mark is gone now.
	rows, err = ls.store.Leases(ctx, false)
	if len(rows) > 0 {
		err = ls.marks.set(leasesMark, bootID())
	}
	return len(rows) == 0, err
}

// keepLeases ends leases as soon as they are not held any more, until there are none.
func (ls *leases) keepLeases(ctx context.Context, news <-chan struct{}) {
	ended := make(chan struct{}, 1)
	waiting := map[runtime.LeaseOwner]context.CancelFunc{}
	defer func() {
		for _, stop := range waiting {
			stop()
		}
	}()
	var failed failures
	for {
		var left []runtime.Lease
		m, marked, err := ls.marks.read(leasesMark)
		if err == nil && !marked {
			return
		}
		if err == nil {
			err = guard.Do(func() (err error) { _, left, err = ls.endLeases(ctx); return err })
		}
		if err == nil && len(left) == 0 {
			var none bool
			if none, err = ls.noLeases(ctx, m); none {
				return
			}
		}
		if ctx.Err() != nil {
			return
		}

		wait := latest
		now, beat := thisMoment(), thisBeat()
		for _, l := range left {
			again := busyAgain
			if l.State == store.LeaseActive {
				_, again, _ = judgeLease(l, now, beat, func(o runtime.LeaseOwner) (bool, error) { return true, nil })
				await(ctx, l.Owner, waiting, ended)
			}
			wait = min(wait, max(again, time.Millisecond))
		}
		wait = max(wait, failed.pause(ls.log, err, "supervision of leases"))
		for o, stop := range waiting {
			if !slices.ContainsFunc(left, func(l runtime.Lease) bool { return l.Owner == o }) {
				stop()
				delete(waiting, o)
			}
		}

		select {
		case <-time.After(wait):
		case <-news:
		case <-ended:
		case <-ctx.Done():
			return
		}
	}
}

// await sends to ended when the process of an owner ends. A process that cannot be
// waited for is checked now and then.
func await(
	ctx context.Context, o runtime.LeaseOwner, waiting map[runtime.LeaseOwner]context.CancelFunc, ended chan<- struct{},
) {
	if o.Pid == 0 || waiting[o] != nil {
		return
	}
	ctx, cancel := context.WithCancel(ctx)
	waiting[o] = cancel
	guard.Go(func() {
		p, err := openOwner(o)
		if err != nil {
			return
		}
		if p != nil {
			err = p.Wait(ctx)
			p.Close()
		}
		if err == nil {
			select {
			case ended <- struct{}{}:
			default: // a message is pending already
			}
		}
	})
}

// ofLease says why something is removed with a lease.
func ofLease(l runtime.Lease) string {
	if l.Name == "" {
		return fmt.Sprintf("lease %s: %s", short(l.ID), l.Reason)
	}
	return fmt.Sprintf("lease %s (%s): %s", short(l.ID), l.Name, l.Reason)
}
