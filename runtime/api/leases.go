package api

import (
	"context"
	"encoding/json"
	"errors"
	"net/url"
	"strconv"
	"time"

	"github.com/agentbox/agentbox/internal/guard"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/api/wire"
)

// CreateLease makes a lease.
func (c leaseCalls) CreateLease(ctx context.Context, req runtime.LeaseRequest) (runtime.Lease, error) {
	return do[runtime.Lease](ctx, c.conn, at("leases"), req, nil)
}

// errHeldEnough ends the request that holds a lease.
var errHeldEnough = errors.New("held for long enough")

// HoldLease holds a lease while fn runs, by a connection: if this process dies, the lease ends
// with it.
func (c leaseCalls) HoldLease(
	ctx context.Context, req runtime.LeaseRequest, fn func(context.Context, runtime.Lease) error,
) error {
	ctx, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	var done <-chan error // of fn
	_, err := do[wire.None](ctx, c.conn, at("leases", "hold"), req, func(data []byte) error {
		var l runtime.Lease
		if err := json.Unmarshal(data, &l); err != nil || done != nil {
			return err
		}
		done = guard.Start(func() error {
			defer stop(errHeldEnough)
			return fn(ctx, l)
		})
		return nil
	})
	if done == nil {
		return err
	}
	stop(err) // the lease ended before fn did, if that has not
	ferr := <-done
	if context.Cause(ctx) == errHeldEnough && errors.Is(err, context.Canceled) {
		err = nil // that is how it is released
	}
	if errors.Is(ferr, context.Canceled) && err != nil {
		return err
	}
	return errors.Join(ferr, err)
}

// Lease describes a lease.
func (c leaseCalls) Lease(ctx context.Context, lease string) (runtime.Lease, error) {
	return get[runtime.Lease](ctx, c.conn, at("leases", lease), nil)
}

// Leases lists leases.
func (c leaseCalls) Leases(ctx context.Context, ended bool) ([]runtime.Lease, error) {
	return all[runtime.Lease](ctx, c.conn, at("leases"), url.Values{"all": {strconv.FormatBool(ended)}})
}

// RenewLease renews a lease. Its owner calls it while it is alive.
func (c leaseCalls) RenewLease(ctx context.Context, lease string, deadline time.Duration) (runtime.Lease, error) {
	return do[runtime.Lease](ctx, c.conn, at("leases", lease, "renew"), wire.RenewBody{For: deadline}, nil)
}

// TransferLease gives a lease another owner.
func (c leaseCalls) TransferLease(ctx context.Context, lease string, terms runtime.LeaseTerms) (runtime.Lease, error) {
	return do[runtime.Lease](ctx, c.conn, at("leases", lease, "transfer"), terms, nil)
}

// ReleaseLease ends a lease.
func (c leaseCalls) ReleaseLease(ctx context.Context, lease string) (runtime.Lease, error) {
	return do[runtime.Lease](ctx, c.conn, at("leases", lease, "release"), wire.None{}, nil)
}
