package main

import (
	"context"
	"time"

	"github.com/agentbox/agentbox/runtime"
)

// fakeLeases is the part of fakeService that holds leases: it has one.
type fakeLeases struct {
	lease runtime.Lease
	terms runtime.LeaseTerms
	renew time.Duration
}

func (f *fakeLeases) CreateLease(_ context.Context, req runtime.LeaseRequest) (runtime.Lease, error) {
	f.lease = runtime.Lease{
		ID: "1ea5e0000000000000000000000000ff", Name: req.Name, State: "active",
		Owner: runtime.LeaseOwner{Kind: req.Owner, Pid: req.Pid, Interval: req.Interval}, For: req.For,
	}
	f.terms = req.LeaseTerms
	return f.lease, nil
}

func (f *fakeLeases) HoldLease(
	ctx context.Context, req runtime.LeaseRequest, fn func(context.Context, runtime.Lease) error,
) error {
	return fn(ctx, f.lease)
}

func (f *fakeLeases) Lease(_ context.Context, lease string) (runtime.Lease, error) {
	if lease != f.lease.Name && lease != f.lease.ID || lease == "" {
		return runtime.Lease{}, runtime.ErrNotFound
	}
	return f.lease, nil
}

func (f *fakeLeases) Leases(context.Context, bool) ([]runtime.Lease, error) {
	return []runtime.Lease{f.lease}, nil
}

func (f *fakeLeases) RenewLease(ctx context.Context, lease string, d time.Duration) (runtime.Lease, error) {
	f.renew = d
	return f.Lease(ctx, lease)
}

func (f *fakeLeases) TransferLease(ctx context.Context, lease string, t runtime.LeaseTerms) (runtime.Lease, error) {
	f.terms = t
	return f.Lease(ctx, lease)
}

func (f *fakeLeases) ReleaseLease(ctx context.Context, lease string) (runtime.Lease, error) {
	return f.Lease(ctx, lease)
}
