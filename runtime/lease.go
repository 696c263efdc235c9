package runtime

import (
	"context"
	"time"
)

// A lease holds sandboxes and temporary checkpoints for as long as its owner
// lives, or until its deadline. Then they are removed, whether or not the process
// that created them still runs. engine/leaseend.go ends leases.

// LeaseService is the part of Service that manages leases. Its methods accept a
// lease's name, its id or a unique prefix of the id.
type LeaseService interface {
	CreateLease(ctx context.Context, req LeaseRequest) (Lease, error)
	// HoldLease creates a lease that is held while fn runs, or while the connection
	// lasts over which the service was called. If the lease ends earlier, the context
	// of fn is cancelled with the reason as its cause. A lease that was transferred
	// in the meantime outlives the call.
	HoldLease(ctx context.Context, req LeaseRequest, fn func(context.Context, Lease) error) error
	Lease(ctx context.Context, lease string) (Lease, error)
	// Leases lists the leases that have not ended, newest first; with all, also the
	// last ones that have.
	Leases(ctx context.Context, all bool) ([]Lease, error)
	// RenewLease records a heartbeat of the lease's owner. A deadline other than 0 is
	// counted from now and replaces the lease's own, for every kind of owner.
	RenewLease(ctx context.Context, lease string, deadline time.Duration) (Lease, error)
	// TransferLease gives a lease another owner and another deadline.
	TransferLease(ctx context.Context, lease string, terms LeaseTerms) (Lease, error)
	// ReleaseLease ends a lease and returns once its members are removed.
	ReleaseLease(ctx context.Context, lease string) (Lease, error)
}

// Kinds of owners of a lease.
const (
	OwnerNone       = "none"       // no owner: only the deadline ends it
	OwnerPid        = "pid"        // a process of this host
	OwnerHeartbeat  = "heartbeat"  // the processes that renew it
	OwnerConnection = "connection" // a connection to the service, or a call of HoldLease in process Pid
)

// LeaseTerms determine how long a lease is held.
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
	// The lease ends For after Since. Expires is that time by the wall clock, as long
	// as nothing sets the clock.
	For     time.Duration `json:"for_ns,omitempty"`
	Since   Moment        `json:"since,omitzero"`
	Expires time.Time     `json:"expires,omitzero"`
	// Set once the lease is ending or has ended.
	Reason string    `json:"reason,omitempty"`
	Over   time.Time `json:"over,omitzero"`
	// The members, sandboxes by name and checkpoints by id; of a lease that is ending
	// or has ended, those it had when it began to end.
	Sandboxes   []string `json:"sandboxes"`
	Checkpoints []string `json:"checkpoints"`
}

// LeaseOwner is the process, connection or heartbeat that keeps a lease alive.
type LeaseOwner struct {
	Kind string `json:"kind"`
	// For pid and connection: the process, identified also by its boot and its start
	// time (in hundredths of a second since boot), so that a reused pid does not match.
	Pid   int    `json:"pid,omitempty"`
	Start int64  `json:"start,omitempty"`
	Boot  string `json:"boot,omitempty"`
	// For heartbeat: the time within which it must be renewed, and the last renewal.
	Interval time.Duration `json:"interval_ns,omitempty"`
	Beat     Beat          `json:"beat,omitzero"`
}

// Beat is an instant on a clock that stops while the host sleeps, so that an owner
// that was suspended with the host has not missed a renewal.
type Beat struct {
	Time  time.Time     `json:"time"`
	Boot  string        `json:"boot"`
	Awake time.Duration `json:"awake_ns"` // since that boot, without time asleep
}
