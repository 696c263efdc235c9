package runtime

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
	"github.com/agentbox/agentbox/runtime/internal/kernel"
	"github.com/agentbox/agentbox/runtime/store"
)

// A lease holds sandboxes, and checkpoints that are not to stay, for as long as
// its owner lives, or until its deadline. Then they are removed, whatever has
// become of whoever made them. leaseend.go ends them.

// LeaseService is the part of Service that holds sandboxes for somebody. A lease is
// named by its name, its id or a unique prefix of that.
type LeaseService interface {
	CreateLease(ctx context.Context, req LeaseRequest) (Lease, error)
	// HoldLease makes a lease that is held as long as fn runs, or the connection
	// to the service lasts over which it is called. The context of fn ends, with
	// the reason as its cause, when the lease ends before that. A lease that was
	// transferred meanwhile stays.
	HoldLease(ctx context.Context, req LeaseRequest, fn func(context.Context, Lease) error) error
	Lease(ctx context.Context, lease string) (Lease, error)
	// Leases lists those that have not ended, newest first, or, with all, the
	// last ones that have as well.
	Leases(ctx context.Context, all bool) ([]Lease, error)
	// RenewLease tells that the owner of a lease with a heartbeat is alive. With
	// a time it sets the deadline, from now on, whoever the owner is.
	RenewLease(ctx context.Context, lease string, deadline time.Duration) (Lease, error)
	// TransferLease gives a lease another owner and another deadline.
	TransferLease(ctx context.Context, lease string, terms LeaseTerms) (Lease, error)
	// ReleaseLease ends a lease, and returns when all that belonged to it is gone.
	ReleaseLease(ctx context.Context, lease string) (Lease, error)
}

// Kinds of owners of a lease.
const (
	OwnerNone       = "none"       // only the deadline counts
	OwnerPid        = "pid"        // a process of this host
	OwnerHeartbeat  = "heartbeat"  // whoever renews it
	OwnerConnection = "connection" // to the service, or a call of HoldLease in Pid
)

// LeaseTerms say for how long a lease is held.
type LeaseTerms struct {
	Owner    string        `json:"owner"`       // a kind; empty: none
	Pid      int           `json:"pid"`         // of the owner pid; 0: the caller
	Interval time.Duration `json:"interval_ns"` // of the owner heartbeat
	For      time.Duration `json:"for_ns"`      // until the deadline; 0: there is none
}

// LeaseRequest asks for a lease.
type LeaseRequest struct {
	Name string `json:"name"` // unique among those that have not ended; empty: none
	LeaseTerms
}

// Lease is the documented JSON of `agentbox lease inspect`; it only ever grows.
type Lease struct {
	ID      string     `json:"id"`
	Name    string     `json:"name,omitempty"`
	State   string     `json:"state"` // active, ending or ended
	Owner   LeaseOwner `json:"owner"`
	Created time.Time  `json:"created"`
	// Deadline: it ends For after Since. Expires is when the clock will show that,
	// as far as it stays.
	For     time.Duration `json:"for_ns,omitempty"`
	Since   Moment        `json:"since,omitzero"`
	Expires time.Time     `json:"expires,omitzero"`
	// Of one that ends or has ended.
	Reason string    `json:"reason,omitempty"`
	Over   time.Time `json:"over,omitzero"`
	// What belongs to it by name and by id, or did when it began to end.
	Sandboxes   []string `json:"sandboxes"`
	Checkpoints []string `json:"checkpoints"`
}

// LeaseOwner is who has to live for a lease to be held.
type LeaseOwner struct {
	Kind string `json:"kind"`
	// Of pid and connection: the process, by when it began (in hundredths of a
	// second since the boot) and in which boot, so that no other is taken for it.
	Pid   int    `json:"pid,omitempty"`
	Start int64  `json:"start,omitempty"`
	Boot  string `json:"boot,omitempty"`
	// Of heartbeat: within which time it has to be renewed, and when it was last.
	Interval time.Duration `json:"interval_ns,omitempty"`
	Beat     Beat          `json:"beat,omitzero"`
}

// Beat is an instant of the time in which the host is awake: who sleeps with it
// has not missed to renew.
type Beat struct {
	Time  time.Time     `json:"time"`
	Boot  string        `json:"boot"`
	Awake time.Duration `json:"awake_ns"` // since that boot, sleep left out
}

func thisBeat() Beat {
	var ts unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts) // no kernel that we run on is without
	return Beat{time.Now().UTC().Round(0), bootID(), time.Duration(ts.Nano())}
}

// own is the owner that terms ask for.
func own(t LeaseTerms) (o LeaseOwner, err error) {
	o.Kind = cmp.Or(t.Owner, OwnerNone)
	switch {
	case t.For < 0 || t.Interval < 0:
		return o, fmt.Errorf("%w: a time is negative", ErrInvalid)
	case t.For > 0 && t.For < policy.MinLifetime:
		return o, fmt.Errorf("%w: a deadline in %v: the least is %v", ErrInvalid, t.For, policy.MinLifetime)
	case t.Interval > 0 && t.Owner != OwnerHeartbeat, t.Pid != 0 && t.Owner != OwnerPid:
		return o, fmt.Errorf("%w: an interval is for the owner heartbeat, a pid for the owner pid", ErrInvalid)
	}
	switch o.Kind {
	case OwnerNone:
		if t.For == 0 {
			return o, hint(fmt.Errorf("%w: a lease without an owner and without a deadline would never end", ErrInvalid), "Name an owner or a deadline, or both.")
		}
	case OwnerHeartbeat:
		if t.Interval < policy.MinLifetime {
			return o, fmt.Errorf("%w: a heartbeat each %v: the least is %v", ErrInvalid, t.Interval, policy.MinLifetime)
		}
		o.Interval, o.Beat = t.Interval, thisBeat()
	case OwnerPid:
		o.Pid = cmp.Or(t.Pid, os.Getpid())
	case OwnerConnection:
		o.Pid = os.Getpid()
	default:
		return o, fmt.Errorf("%w: owner %.20q: choose %s, %s or %s", ErrInvalid, o.Kind, OwnerPid, OwnerHeartbeat, OwnerNone)
	}
	if o.Pid != 0 {
		o.Boot = bootID()
		if o.Start, err = kernel.StartTicks(o.Pid); errors.Is(err, os.ErrNotExist) || errors.Is(err, unix.ESRCH) {
			err = fmt.Errorf("process %d: %w", o.Pid, ErrNotFound)
		}
		if err == nil {
			var alive bool
			if alive, err = ownerAlive(o); err == nil && !alive {
				err = fmt.Errorf("%w: process %d has ended", ErrState, o.Pid)
			}
		}
	}
	return o, err
}

// ownerAlive tells of a process whether it is, and still the same.
func ownerAlive(o LeaseOwner) (bool, error) {
	p, err := openOwner(o)
	if p == nil {
		return false, err
	}
	defer p.Close()
	return p.Alive(), nil
}

// openOwner pins the owner's process; nil: it has ended.
func openOwner(o LeaseOwner) (*kernel.Process, error) {
	p, err := kernel.OpenProcess(o.Pid)
	if kernel.Gone(err) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	start, err := kernel.StartTicks(o.Pid) // pinned before: it is that of this process, or there is none
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
func decodeLease(row store.Lease) (l Lease, err error) {
	if err := json.Unmarshal(row.Data, &l); err != nil {
		return l, fmt.Errorf("lease %s: %w: %w", short(row.ID), ErrCorrupt, err)
	}
	l.ID, l.Name, l.State, l.Created = row.ID, row.Name, row.State, row.Created
	return l, nil
}

// encodeLease is what is recorded of a lease.
func encodeLease(l Lease) (json.RawMessage, error) {
	l.Expires = time.Time{}
	if l.State == store.LeaseActive {
		l.Sandboxes, l.Checkpoints = nil, nil
	}
	return json.Marshal(l)
}

// CreateLease makes a lease.
func (e *Engine) CreateLease(ctx context.Context, req LeaseRequest) (_ Lease, err error) {
	defer func() { err = fail("lease create", req.Name, err) }()
	if req.Owner == OwnerConnection {
		return Lease{}, hint(fmt.Errorf("%w: a connection holds a lease as long as the call lasts that makes it", ErrInvalid), "Use HoldLease, or POST /v1/leases/hold.")
	}
	return e.createLease(ctx, req)
}

func (e *Engine) createLease(ctx context.Context, req LeaseRequest) (Lease, error) {
	if req.Name != "" {
		if err := store.ValidName(req.Name); err != nil {
			return Lease{}, err
		}
	}
	l := Lease{ID: newID(), Name: req.Name, State: store.LeaseActive, Created: time.Now().UTC()}
	if err := setLease(&l, req.LeaseTerms); err != nil {
		return Lease{}, err
	}
	data, err := encodeLease(l)
	if err != nil {
		return Lease{}, err
	}
	row := store.Lease{ID: l.ID, Name: l.Name, Data: data, Created: l.Created}
	err = e.store.PutLease(ctx, row)
	if errors.Is(err, ErrExists) {
		// The owner of the one with the name may have ended, and nobody has looked.
		if _, e2 := e.EndLeases(ctx); e2 != nil {
			e.log.Warn("leases that have ended", "err", e2)
		}
		err = e.store.PutLease(ctx, row)
	}
	if err != nil {
		return Lease{}, err
	}
	e.log.Info("lease", "lease", l.ID, "name", l.Name, "owner", l.Owner.Kind, "pid", l.Owner.Pid, "for", l.For)
	e.wakeKeeper()
	return e.Lease(context.WithoutCancel(ctx), l.ID)
}

// setLease gives a lease its terms, from now on.
func setLease(l *Lease, t LeaseTerms) error {
	o, err := own(t)
	if err != nil {
		return err
	}
	l.Owner, l.For, l.Since = o, t.For, Moment{}
	if t.For > 0 {
		l.Since = thisMoment()
	}
	return nil
}

// Lease describes one.
func (e *Engine) Lease(ctx context.Context, ref string) (_ Lease, err error) {
	defer func() { err = fail("lease", ref, err) }()
	row, err := e.store.Lease(ctx, ref)
	if err != nil {
		return Lease{}, err
	}
	return e.leaseView(ctx, row)
}

// Leases lists them.
func (e *Engine) Leases(ctx context.Context, all bool) (_ []Lease, err error) {
	defer func() { err = fail("lease ls", "", err) }()
	rows, err := e.store.Leases(ctx, all)
	if err != nil {
		return nil, err
	}
	list := make([]Lease, len(rows))
	for i, row := range rows {
		if list[i], err = e.leaseView(ctx, row); err != nil {
			return nil, err
		}
	}
	return list, nil
}

func (e *Engine) leaseView(ctx context.Context, row store.Lease) (Lease, error) {
	l, err := decodeLease(row)
	if err != nil {
		return l, err
	}
	if l.State == store.LeaseActive {
		m, err := e.store.LeaseMembers(ctx, l.ID)
		if err != nil {
			return l, err
		}
		listLease(&l, m)
		l.Expires = expiresAt(Lifetime{TTL: l.For, Begun: l.Since})
	}
	if l.Sandboxes == nil {
		l.Sandboxes = []string{}
	}
	if l.Checkpoints == nil {
		l.Checkpoints = []string{}
	}
	return l, nil
}

// listLease notes what belongs to it.
func listLease(l *Lease, m store.LeaseMembers) {
	l.Sandboxes, l.Checkpoints = nil, nil
	for _, sb := range m.Sandboxes {
		l.Sandboxes = append(l.Sandboxes, sb.Name)
	}
	for _, c := range m.Checkpoints {
		l.Checkpoints = append(l.Checkpoints, c.ID)
	}
}

// RenewLease tells that the owner is alive, or sets the deadline.
func (e *Engine) RenewLease(ctx context.Context, ref string, deadline time.Duration) (_ Lease, err error) {
	defer func() { err = fail("lease renew", ref, err) }()
	return e.changeLease(ctx, ref, deadline == 0, func(l *Lease) error {
		if l.Owner.Kind == OwnerHeartbeat {
			l.Owner.Beat = thisBeat()
		} else if deadline == 0 {
			return hint(fmt.Errorf("%w: its owner is no heartbeat", ErrInvalid), "Say until when: agentbox lease renew --for DURATION")
		}
		if deadline == 0 {
			return nil
		}
		if deadline < policy.MinLifetime {
			return fmt.Errorf("%w: a deadline in %v: the least is %v", ErrInvalid, deadline, policy.MinLifetime)
		}
		l.For, l.Since = deadline, thisMoment()
		return nil
	})
}

// TransferLease gives a lease another owner.
func (e *Engine) TransferLease(ctx context.Context, ref string, terms LeaseTerms) (_ Lease, err error) {
	defer func() { err = fail("lease transfer", ref, err) }()
	if terms.Owner == OwnerConnection {
		return Lease{}, fmt.Errorf("%w: no lease can be given to a connection", ErrInvalid)
	}
	return e.changeLease(ctx, ref, false, func(l *Lease) error { return setLease(l, terms) })
}

// changeLease changes one that is held. One that is not any more, and nobody has
// noticed, begins to end instead.
func (e *Engine) changeLease(ctx context.Context, ref string, lazy bool, fn func(*Lease) error) (Lease, error) {
	row, err := e.store.Lease(ctx, ref)
	if err != nil {
		return Lease{}, err
	}
	if row.State != store.LeaseActive {
		return Lease{}, over(row)
	}
	if err := e.endIfOver(ctx, row.ID); err != nil {
		return Lease{}, err
	}
	err = e.store.ChangeLease(ctx, row.ID, lazy, func(row *store.Lease) error {
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
		return Lease{}, err
	}
	e.wakeKeeper()
	return e.Lease(ctx, row.ID)
}

// over is the error of what needs a lease that is held.
func over(row store.Lease) error {
	l, err := decodeLease(row)
	if err != nil {
		return err
	}
	return fmt.Errorf("%w: lease %s has ended: %s", ErrState, cmp.Or(l.Name, short(l.ID)), l.Reason)
}

// ReleaseLease ends a lease.
func (e *Engine) ReleaseLease(ctx context.Context, ref string) (_ Lease, err error) {
	defer func() { err = fail("lease release", ref, err) }()
	row, err := e.store.Lease(ctx, ref)
	if err != nil {
		return Lease{}, err
	}
	if row.State == store.LeaseEnded {
		return Lease{}, over(row)
	}
	if err := e.beginEnd(ctx, row.ID, func(Lease) (string, error) { return "it was released", nil }); err != nil {
		return Lease{}, err
	}
	if err := e.freeLease(ctx, row.ID, ""); err != nil {
		return Lease{}, err
	}
	return e.Lease(ctx, row.ID)
}

// activeLease finds the lease that something is to belong to; empty: none.
func (e *Engine) activeLease(ctx context.Context, ref string) (id string, err error) {
	if ref == "" {
		return "", nil
	}
	row, err := e.store.Lease(ctx, ref)
	if err == nil && row.State == store.LeaseActive {
		if err = e.endIfOver(ctx, row.ID); err == nil {
			row, err = e.store.Lease(ctx, row.ID)
		}
	}
	if err == nil && row.State != store.LeaseActive {
		err = over(row)
	}
	return row.ID, err
}

// leaseOf is the lease that a checkpoint is to belong to. What nobody has asked
// for belongs to its sandbox's.
func (e *Engine) leaseOf(ctx context.Context, sb store.Sandbox, opts CheckpointOptions) (string, error) {
	switch {
	case opts.Lease != "":
		return e.activeLease(ctx, opts.Lease)
	case opts.Temporary && sb.Lease == "":
		return "", hint(fmt.Errorf("%w: a temporary checkpoint of a sandbox that belongs to no lease", ErrInvalid), "Name a lease.")
	case opts.Temporary, opts.Trigger == TriggerExec, opts.Trigger == TriggerInterval:
		return sb.Lease, nil
	}
	return "", nil
}

// HoldLease holds a lease while fn runs.
func (e *Engine) HoldLease(ctx context.Context, req LeaseRequest, fn func(context.Context, Lease) error) (err error) {
	defer func() { err = fail("lease hold", req.Name, err) }()
	if req.Owner != "" && req.Owner != OwnerConnection || req.Pid != 0 || req.Interval != 0 {
		return fmt.Errorf("%w: its owner is the connection", ErrInvalid)
	}
	req.Owner = OwnerConnection
	l, err := e.createLease(ctx, req)
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
			if row, err := e.store.Lease(held, l.ID); err == nil && row.State != store.LeaseActive {
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
	end := e.beginEnd(done, l.ID, func(l Lease) (string, error) {
		switch {
		case l.Owner.Kind != OwnerConnection: // it was transferred
			return "", nil
		case ctx.Err() != nil:
			return "the connection that held it has ended", nil
		}
		return "it was released", nil
	})
	return errors.Join(err, end, e.freeLease(done, l.ID, ""))
}
