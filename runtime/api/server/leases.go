package server

import (
	"context"
	"errors"
	"fmt"
	"net/http"

	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/api/wire"
)

func (h *Handler) leaseRoutes() []route {
	svc := h.svc
	return []route{
		query(h, "/v1/leases", "List leases, newest first",
			func(ctx context.Context, r *request[wire.None]) (wire.Page[runtime.Lease], error) {
				list, err := svc.Leases(ctx, isSet(r.URL.Query(), "all"))
				if err != nil {
					return wire.Page[runtime.Lease]{}, err
				}
				return page(r.Request, list, func(l runtime.Lease) string { return l.ID })
			}, "all", "limit", "cursor"),
		verb(h, "/v1/leases", "Make a lease",
			func(ctx context.Context, r *request[runtime.LeaseRequest]) (runtime.Lease, error) {
				if err := errors.Join(unknown(r), ownedBy(r.Request, &r.in.LeaseTerms)); err != nil {
					return runtime.Lease{}, err
				}
				return svc.CreateLease(ctx, r.in)
			}),
		verb(h, "/v1/leases/hold", "Make a lease that the connection holds; needs Accept: text/event-stream",
			func(ctx context.Context, r *request[runtime.LeaseRequest]) (wire.None, error) {
				if r.report == nil || r.rec != nil {
					return wire.None{}, fmt.Errorf("%w: to hold a lease takes Accept: %s and no %s", runtime.ErrInvalid,
						wire.EventStream, wire.HeaderKey)
				}
				// A lease held as long as the connection lasts must not keep the service from
				// ending.
				ctx, cancel := h.untilDrained(ctx)
				defer cancel()
				return wire.None{}, svc.HoldLease(ctx, r.in, func(ctx context.Context, l runtime.Lease) error {
					r.report(l)
					<-ctx.Done()
					return context.Cause(ctx)
				})
			}).withProgress(runtime.Lease{}),
		query(h, "/v1/leases/{lease}", "Describe a lease",
			func(ctx context.Context, r *request[wire.None]) (runtime.Lease, error) {
				return svc.Lease(ctx, r.ref)
			}),
		verb(h, "/v1/leases/{lease}/renew", "Tell that the owner of a lease is alive, or set its deadline",
			func(ctx context.Context, r *request[wire.RenewBody]) (runtime.Lease, error) {
				return svc.RenewLease(ctx, r.ref, r.in.For)
			}),
		verb(h, "/v1/leases/{lease}/transfer", "Give a lease another owner and deadline",
			func(ctx context.Context, r *request[runtime.LeaseTerms]) (runtime.Lease, error) {
				if err := ownedBy(r.Request, &r.in); err != nil {
					return runtime.Lease{}, err
				}
				return svc.TransferLease(ctx, r.ref, r.in)
			}),
		verb(h, "/v1/leases/{lease}/release", "End a lease",
			func(ctx context.Context, r *request[wire.None]) (runtime.Lease, error) {
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
		return fmt.Errorf("%w: a process of another host cannot be seen from here: name a heartbeat, or hold the lease",
			runtime.ErrInvalid)
	}
	if t.Pid != 0 {
		return nil
	}
	if t.Pid = int(peerOf(r).Pid); t.Pid == 0 {
		return fmt.Errorf("%w: your process cannot be seen from here: name a heartbeat, or hold the lease",
			runtime.ErrInvalid)
	}
	return nil
}
