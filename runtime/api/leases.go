package api

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"strconv"
	"time"

	"github.com/agentbox/agentbox/internal/guard"
	"github.com/agentbox/agentbox/runtime"
)

// renewBody is what a renewal may change.
type renewBody struct {
	For time.Duration `json:"for_ns"` // the new deadline, from now on; 0: it stays
}

func (h *Handler) leaseRoutes() []route {
	svc := h.svc
	return []route{
		query(h, "/v1/leases", "List leases, newest first", func(ctx context.Context, r *request[None]) (Page[runtime.Lease], error) {
			list, err := svc.Leases(ctx, isSet(r.URL.Query(), "all"))
			if err != nil {
				return Page[runtime.Lease]{}, err
			}
			return page(r.Request, list, func(l runtime.Lease) string { return l.ID })
		}, "all", "limit", "cursor"),
		verb(h, "/v1/leases", "Make a lease", func(ctx context.Context, r *request[runtime.LeaseRequest]) (runtime.Lease, error) {
			if err := errors.Join(unknown(r), ownedBy(r.Request, &r.in.LeaseTerms)); err != nil {
				return runtime.Lease{}, err
			}
			return svc.CreateLease(ctx, r.in)
		}),
		verb(h, "/v1/leases/hold", "Make a lease that the connection holds; needs Accept: text/event-stream", func(ctx context.Context, r *request[runtime.LeaseRequest]) (None, error) {
			if r.report == nil || r.rec != nil {
				return None{}, fmt.Errorf("%w: to hold a lease takes Accept: %s and no %s", runtime.ErrInvalid, eventStream, headerKey)
			}
			// A lease held as long as the connection lasts must not keep the service from
			// ending.
			ctx, cancel := h.untilDrained(ctx)
			defer cancel()
			return None{}, svc.HoldLease(ctx, r.in, func(ctx context.Context, l runtime.Lease) error {
				r.report(l)
				<-ctx.Done()
				return context.Cause(ctx)
			})
		}).withProgress(runtime.Lease{}),
		query(h, "/v1/leases/{lease}", "Describe a lease", func(ctx context.Context, r *request[None]) (runtime.Lease, error) {
			return svc.Lease(ctx, r.ref)
		}),
		verb(h, "/v1/leases/{lease}/renew", "Tell that the owner of a lease is alive, or set its deadline", func(ctx context.Context, r *request[renewBody]) (runtime.Lease, error) {
			return svc.RenewLease(ctx, r.ref, r.in.For)
		}),
		verb(h, "/v1/leases/{lease}/transfer", "Give a lease another owner and deadline", func(ctx context.Context, r *request[runtime.LeaseTerms]) (runtime.Lease, error) {
			if err := ownedBy(r.Request, &r.in); err != nil {
				return runtime.Lease{}, err
			}
			return svc.TransferLease(ctx, r.ref, r.in)
		}),
		verb(h, "/v1/leases/{lease}/release", "End a lease", func(ctx context.Context, r *request[None]) (runtime.Lease, error) {
			l, err := svc.ReleaseLease(ctx, r.ref)
			if r.again() && errors.Is(err, runtime.ErrState) {
				return svc.Lease(ctx, r.ref)
			}
			return l, err
		}),
	}
}

// ownedBy makes the caller's process the owner where none is named.
func ownedBy(r *http.Request, t *runtime.LeaseTerms) error {
	if t.Owner != runtime.OwnerPid && t.Pid == 0 {
		return nil
	}
	if peerOf(r).Address != "" {
		return fmt.Errorf("%w: a process of another host cannot be seen from here: name a heartbeat, or hold the lease", runtime.ErrInvalid)
	}
	if t.Pid != 0 {
		return nil
	}
	if t.Pid = int(peerOf(r).Pid); t.Pid == 0 {
		return fmt.Errorf("%w: your process cannot be seen from here: name a heartbeat, or hold the lease", runtime.ErrInvalid)
	}
	return nil
}

// CreateLease makes a lease.
func (c *Client) CreateLease(ctx context.Context, req runtime.LeaseRequest) (runtime.Lease, error) {
	return do[runtime.Lease](ctx, c, at("leases"), req, nil)
}

// errHeldEnough ends the request that holds a lease.
var errHeldEnough = errors.New("held for long enough")

// HoldLease holds a lease while fn runs, by a connection: if this process dies, the lease ends
// with it.
func (c *Client) HoldLease(ctx context.Context, req runtime.LeaseRequest, fn func(context.Context, runtime.Lease) error) error {
	ctx, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	var done <-chan error // of fn
	_, err := do[None](ctx, c, at("leases", "hold"), req, func(data []byte) error {
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
func (c *Client) Lease(ctx context.Context, lease string) (runtime.Lease, error) {
	return get[runtime.Lease](ctx, c, at("leases", lease), nil)
}

// Leases lists leases.
func (c *Client) Leases(ctx context.Context, ended bool) ([]runtime.Lease, error) {
	return all[runtime.Lease](ctx, c, at("leases"), url.Values{"all": {strconv.FormatBool(ended)}})
}

// RenewLease renews a lease. Its owner calls it while it is alive.
func (c *Client) RenewLease(ctx context.Context, lease string, deadline time.Duration) (runtime.Lease, error) {
	return do[runtime.Lease](ctx, c, at("leases", lease, "renew"), renewBody{deadline}, nil)
}

// TransferLease gives a lease another owner.
func (c *Client) TransferLease(ctx context.Context, lease string, terms runtime.LeaseTerms) (runtime.Lease, error) {
	return do[runtime.Lease](ctx, c, at("leases", lease, "transfer"), terms, nil)
}

// ReleaseLease ends a lease.
func (c *Client) ReleaseLease(ctx context.Context, lease string) (runtime.Lease, error) {
	return do[runtime.Lease](ctx, c, at("leases", lease, "release"), None{}, nil)
}
