package engine

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/guard"
	"github.com/agentbox/agentbox/policy"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/internal/kernel"
	"github.com/agentbox/agentbox/runtime/store"
)

// leases creates, renews and ends leases, and removes the members of ended ones.
type leases struct {
	*core

	events     *eventLog
	marks      *marks
	sandboxes  *sandboxes
	supervisor *supervisor
	recovery   *recovery
	upkeep     *upkeep
}

func thisBeat() runtime.Beat {
	var ts unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts) // every supported kernel has this clock
	return runtime.Beat{Time: time.Now().UTC().Round(0), Boot: bootID(), Awake: time.Duration(ts.Nano())}
}

// own returns the owner that terms ask for.
func own(t runtime.LeaseTerms) (o runtime.LeaseOwner, err error) {
	o.Kind = cmp.Or(t.Owner, runtime.OwnerNone)
	switch {
	case t.For < 0:
		return o, fmt.Errorf("%w: the deadline (%v) is negative", runtime.ErrInvalid, t.For)
	case t.Interval < 0:
		return o, fmt.Errorf("%w: the interval of the heartbeat (%v) is negative", runtime.ErrInvalid, t.Interval)
	case t.For > 0 && t.For < policy.MinLifetime:
		return o, fmt.Errorf("%w: a deadline in %v: the least is %v", runtime.ErrInvalid, t.For, policy.MinLifetime)
	case t.Interval > 0 && t.Owner != runtime.OwnerHeartbeat, t.Pid != 0 && t.Owner != runtime.OwnerPid:
		return o, fmt.Errorf("%w: an interval is for the owner heartbeat, a pid for the owner pid", runtime.ErrInvalid)
	}
	switch o.Kind {
	case runtime.OwnerNone:
		if t.For == 0 {
			return o, hint(
				fmt.Errorf("%w: a lease without an owner and without a deadline would never end", runtime.ErrInvalid),
				"Name an owner or a deadline, or both.")
		}
	case runtime.OwnerHeartbeat:
		if t.Interval < policy.MinLifetime {
			return o, fmt.Errorf("%w: a heartbeat each %v: the least is %v", runtime.ErrInvalid,
				t.Interval, policy.MinLifetime)
		}
		o.Interval, o.Beat = t.Interval, thisBeat()
	case runtime.OwnerPid:
		o.Pid = cmp.Or(t.Pid, os.Getpid())
	case runtime.OwnerConnection:
		o.Pid = os.Getpid()
	default:
		return o, fmt.Errorf("%w: owner %.20q: choose %s, %s or %s", runtime.ErrInvalid, o.Kind, runtime.OwnerPid,
			runtime.OwnerHeartbeat, runtime.OwnerNone)
	}
	if o.Pid != 0 {
		o.Boot = bootID()
		if o.Start, err = kernel.StartTicks(o.Pid); errors.Is(err, os.ErrNotExist) || errors.Is(err, unix.ESRCH) {
			err = fmt.Errorf("process %d: %w", o.Pid, runtime.ErrNotFound)
		}
		if err == nil {
			var alive bool
			if alive, err = ownerAlive(o); err == nil && !alive {
				err = fmt.Errorf("%w: process %d has ended", runtime.ErrState, o.Pid)
			}
		}
	}
	return o, err
}

// ownerAlive reports whether the owner's process is alive, and not another with its pid.
func ownerAlive(o runtime.LeaseOwner) (bool, error) {
	p, err := openOwner(o)
	if p == nil {
		return false, err
	}
	defer p.Close()
	return p.Alive(), nil
}

// openOwner opens the owner's process, so that its pid is not reused; nil: it has ended.
func openOwner(o runtime.LeaseOwner) (*kernel.Process, error) {
	p, err := kernel.OpenProcess(o.Pid)
	if kernel.Gone(err) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	start, err := kernel.StartTicks(o.Pid) // read after OpenProcess: of this process, or an error
	if err == nil && start == o.Start {
		return p, nil
	}
	p.Close()
	if kernel.Gone(err) {
		err = nil
	}
	return nil, err
}

// decodeLease reads a record.
func decodeLease(row store.Lease) (l runtime.Lease, err error) {
	if err := json.Unmarshal(row.Data, &l); err != nil {
		return l, fmt.Errorf("lease %s: %w: %w", short(row.ID), runtime.ErrCorrupt, err)
	}
	l.ID, l.Name, l.State, l.Created = row.ID, row.Name, row.State, row.Created
	return l, nil
}

// encodeLease returns the record of a lease.
func encodeLease(l runtime.Lease) (json.RawMessage, error) {
	l.Expires = time.Time{}
	if l.State == store.LeaseActive {
		l.Sandboxes, l.Checkpoints = nil, nil
	}
	return json.Marshal(l)
}

// CreateLease creates a lease.
func (v leaseVerbs) CreateLease(ctx context.Context, req runtime.LeaseRequest) (runtime.Lease, error) {
	return verb(ctx, v.e, on("lease create", req.Name), func(ctx context.Context) (_ runtime.Lease, err error) {
		if req.Owner == runtime.OwnerConnection {
			return runtime.Lease{}, hint(fmt.Errorf("%w: a connection holds a lease as long as the call lasts that makes it", runtime.ErrInvalid), "Use HoldLease, or POST /v1/leases/hold.")
		}
		return v.e.leases.createLease(ctx, req)
	})
}

func (ls *leases) createLease(ctx context.Context, req runtime.LeaseRequest) (runtime.Lease, error) {
	if req.Name != "" {
		if err := store.ValidName(req.Name); err != nil {
			return runtime.Lease{}, err
		}
	}
	l := runtime.Lease{ID: newID(), Name: req.Name, State: store.LeaseActive, Created: time.Now().UTC()}
	if err := setLease(&l, req.LeaseTerms); err != nil {
		return runtime.Lease{}, err
	}
	data, err := encodeLease(l)
	if err != nil {
		return runtime.Lease{}, err
	}
	row := store.Lease{ID: l.ID, Name: l.Name, Data: data, Created: l.Created}
	err = ls.store.PutLease(ctx, row)
	if errors.Is(err, runtime.ErrExists) {
		// The lease of that name may have ended unnoticed.
		if _, e2 := ls.endDue(ctx); e2 != nil {
			ls.log.Warn("ended leases not cleaned up", "err", e2)
		}
		err = ls.store.PutLease(ctx, row)
	}
	if err != nil {
		return runtime.Lease{}, err
	}
	ls.log.Info("lease created", "lease", l.ID, "name", l.Name, "owner", l.Owner.Kind, "pid", l.Owner.Pid, "for", l.For)
	ls.superviseLeases()
	return ls.lease(context.WithoutCancel(ctx), l.ID)
}

// setLease sets the terms of a lease, from now on.
func setLease(l *runtime.Lease, t runtime.LeaseTerms) error {
	o, err := own(t)
	if err != nil {
		return err
	}
	l.Owner, l.For, l.Since = o, t.For, runtime.Moment{}
	if t.For > 0 {
		l.Since = thisMoment()
	}
	return nil
}

// Lease describes a lease.
func (v leaseVerbs) Lease(ctx context.Context, ref string) (runtime.Lease, error) {
	return verb(ctx, v.e, errorsNamed(reads(on("lease inspect", ref))), func(ctx context.Context) (runtime.Lease, error) {
		return v.e.leases.lease(ctx, ref)
	})
}

func (ls *leases) lease(ctx context.Context, ref string) (_ runtime.Lease, err error) {
	defer func() { err = fail("lease", ref, err) }()
	row, err := ls.store.Lease(ctx, ref)
	if err != nil {
		return runtime.Lease{}, err
	}
	return ls.leaseView(ctx, row)
}

// Leases lists leases.
func (v leaseVerbs) Leases(ctx context.Context, all bool) ([]runtime.Lease, error) {
	return verb(ctx, v.e, reads(on("lease ls", "")), func(ctx context.Context) (_ []runtime.Lease, err error) {
		rows, err := v.e.store.Leases(ctx, all)
		if err != nil {
			return nil, err
		}
		list := make([]runtime.Lease, len(rows))
		for i, row := range rows {
			if list[i], err = v.e.leases.leaseView(ctx, row); err != nil {
				return nil, err
			}
		}
		return list, nil
	})
}

func (ls *leases) leaseView(ctx context.Context, row store.Lease) (runtime.Lease, error) {
	l, err := decodeLease(row)
	if err != nil {
		return l, err
	}
	if l.State == store.LeaseActive {
		m, err := ls.store.LeaseMembers(ctx, l.ID)
		if err != nil {
			return l, err
		}
		listLease(&l, m)
		l.Expires = expiresAt(runtime.Lifetime{TTL: l.For, Begun: l.Since})
	}
	if l.Sandboxes == nil {
		l.Sandboxes = []string{}
	}
	if l.Checkpoints == nil {
		l.Checkpoints = []string{}
	}
	return l, nil
}

// listLease sets the members of a lease.
func listLease(l *runtime.Lease, m store.LeaseMembers) {
	l.Sandboxes, l.Checkpoints = nil, nil
	for _, sb := range m.Sandboxes {
		l.Sandboxes = append(l.Sandboxes, sb.Name)
	}
	for _, c := range m.Checkpoints {
		l.Checkpoints = append(l.Checkpoints, c.ID)
	}
}

// RenewLease records a heartbeat of the owner, or sets the deadline.
func (v leaseVerbs) RenewLease(ctx context.Context, ref string, deadline time.Duration) (runtime.Lease, error) {
	return verb(ctx, v.e, &runtime.Op{Verb: "lease renew", Ref: ref, Reads: deadline == 0},
		func(ctx context.Context) (runtime.Lease, error) {
			return v.e.leases.renewLease(ctx, ref, deadline)
		})
}

func (ls *leases) renewLease(ctx context.Context, ref string, deadline time.Duration) (_ runtime.Lease, err error) {
	return ls.changeLease(ctx, ref, deadline == 0, func(l *runtime.Lease) error {
		if l.Owner.Kind == runtime.OwnerHeartbeat {
			l.Owner.Beat = thisBeat()
		} else if deadline == 0 {
			return hint(fmt.Errorf("%w: its owner is no heartbeat", runtime.ErrInvalid),
				"Say until when: agentbox lease renew --for DURATION")
		}
		if deadline == 0 {
			return nil
		}
		if deadline < policy.MinLifetime {
			return fmt.Errorf("%w: a deadline in %v: the least is %v", runtime.ErrInvalid, deadline, policy.MinLifetime)
		}
		l.For, l.Since = deadline, thisMoment()
		return nil
	})
}

// TransferLease gives a lease another owner.
func (v leaseVerbs) TransferLease(ctx context.Context, ref string, terms runtime.LeaseTerms) (runtime.Lease, error) {
	return verb(ctx, v.e, on("lease transfer", ref), func(ctx context.Context) (_ runtime.Lease, err error) {
		if terms.Owner == runtime.OwnerConnection {
			return runtime.Lease{}, fmt.Errorf("%w: no lease can be given to a connection", runtime.ErrInvalid)
		}
		return v.e.leases.changeLease(ctx, ref, false, func(l *runtime.Lease) error { return setLease(l, terms) })
	})
}

// changeLease changes an active lease. A lease that has ended unnoticed begins to end
// instead.
func (ls *leases) changeLease(
	ctx context.Context, ref string, lazy bool, fn func(*runtime.Lease) error,
) (runtime.Lease, error) {
	row, err := ls.store.Lease(ctx, ref)
	if err != nil {
		return runtime.Lease{}, err
	}
	if row.State != store.LeaseActive {
		return runtime.Lease{}, over(row)
	}
	if err := ls.endIfOver(ctx, row.ID); err != nil {
		return runtime.Lease{}, err
	}
	err = ls.store.ChangeLease(ctx, row.ID, lazy, func(row *store.Lease) error {
		if row.State != store.LeaseActive {
			return over(*row)
		}
		l, err := decodeLease(*row)
		if err != nil {
			return err
		}
		if err := fn(&l); err != nil {
			return err
		}
		row.Data, err = encodeLease(l)
		return err
	})
	if err != nil {
		return runtime.Lease{}, err
	}
	if !lazy { // a heartbeat only has it end later
		ls.superviseLeases()
	}
	return ls.lease(ctx, row.ID)
}

// over returns the error of a verb that needs an active lease.
func over(row store.Lease) error {
	l, err := decodeLease(row)
	if err != nil {
		return err
	}
	return fmt.Errorf("%w: lease %s has ended: %s", runtime.ErrState, cmp.Or(l.Name, short(l.ID)), l.Reason)
}

// ReleaseLease ends a lease.
func (v leaseVerbs) ReleaseLease(ctx context.Context, ref string) (runtime.Lease, error) {
	return verb(ctx, v.e, on("lease release", ref), func(ctx context.Context) (runtime.Lease, error) {
		return v.e.leases.releaseLease(ctx, ref)
	})
}

func (ls *leases) releaseLease(ctx context.Context, ref string) (_ runtime.Lease, err error) {
	row, err := ls.store.Lease(ctx, ref)
	if err != nil {
		return runtime.Lease{}, err
	}
	if row.State == store.LeaseEnded {
		return runtime.Lease{}, over(row)
	}
	if err := ls.beginEnd(ctx, row.ID, func(runtime.Lease) (string, error) {
		return "it was released", nil
	}); err != nil {
		return runtime.Lease{}, err
	}
	if err := ls.freeLease(ctx, row.ID, ""); err != nil {
		return runtime.Lease{}, err
	}
	return ls.lease(ctx, row.ID)
}

// activeLease finds the active lease that a new member will belong to; empty: none.
func (ls *leases) activeLease(ctx context.Context, ref string) (id string, err error) {
	if ref == "" {
		return "", nil
	}
	row, err := ls.store.Lease(ctx, ref)
	if err == nil && row.State == store.LeaseActive {
		if err = ls.endIfOver(ctx, row.ID); err == nil {
			row, err = ls.store.Lease(ctx, row.ID)
		}
	}
	if err == nil && row.State != store.LeaseActive {
		err = over(row)
	}
	return row.ID, err
}

// leaseOf returns the lease that a checkpoint will belong to. An automatic checkpoint belongs
// to its sandbox's lease.
func (ls *leases) leaseOf(ctx context.Context, sb store.Sandbox, opts runtime.CheckpointOptions) (string, error) {
	switch {
	case opts.Lease != "":
		return ls.activeLease(ctx, opts.Lease)
	case opts.Temporary && sb.Lease == "":
		return "", hint(
			fmt.Errorf("%w: a temporary checkpoint of a sandbox that belongs to no lease", runtime.ErrInvalid),
			"Name a lease.")
	case opts.Temporary, opts.Trigger == runtime.TriggerExec, opts.Trigger == runtime.TriggerInterval:
		return sb.Lease, nil
	}
	return "", nil
}

// HoldLease holds a lease while fn runs.
func (v leaseVerbs) HoldLease(
	ctx context.Context, req runtime.LeaseRequest, fn func(context.Context, runtime.Lease) error,
) error {
	op := on("lease hold", req.Name)
	return v.e.verb(ctx, op, func(ctx context.Context) error {
		return v.e.leases.holdLease(ctx, req, func(ctx context.Context, l runtime.Lease) error {
			op.Result = l
			return fn(ctx, l)
		})
	})
}

func (ls *leases) holdLease(
	ctx context.Context, req runtime.LeaseRequest, fn func(context.Context, runtime.Lease) error,
) (err error) {
	if req.Owner != "" && req.Owner != runtime.OwnerConnection || req.Pid != 0 || req.Interval != 0 {
		return fmt.Errorf("%w: its owner is the connection", runtime.ErrInvalid)
	}
	req.Owner = runtime.OwnerConnection
	l, err := ls.createLease(ctx, req)
	if err != nil {
		return err
	}
	held, stop := context.WithCancelCause(ctx)
	var watch guard.WaitGroup
	watch.Go(func() {
		tick := time.NewTicker(followEvery)
		defer tick.Stop()
		for {
			select {
			case <-held.Done():
				return
			case <-tick.C:
			}
			if row, err := ls.store.Lease(held, l.ID); err == nil && row.State != store.LeaseActive {
				stop(over(row))
			}
		}
	})
	err = fn(held, l)
	if early := context.Cause(held); early != nil && ctx.Err() == nil && errors.Is(err, context.Canceled) {
		err = early // the lease ended before fn
	}
	stop(nil)
	watch.Wait()
	done, cancel := context.WithTimeout(context.WithoutCancel(ctx), releaseWait)
	defer cancel()
	end := ls.beginEnd(done, l.ID, func(l runtime.Lease) (string, error) {
		switch {
		case l.Owner.Kind != runtime.OwnerConnection: // it was transferred
			return "", nil
		case ctx.Err() != nil:
			return "the connection that held it has ended", nil
		}
		return "it was released", nil
	})
	return errors.Join(err, end, ls.freeLease(done, l.ID, ""))
}
