package runtime

import (
	"context"
	"time"
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
