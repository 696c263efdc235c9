package server

import (
	"context"

	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/api/wire"
)

func (h *Handler) approvalRoutes() []route {
	svc := h.svc
	return []route{
		query(h, "/v1/approvals", "List the applies that a person has to approve, newest first",
			func(ctx context.Context, r *request[wire.None]) (wire.Page[runtime.Approval], error) {
				list, err := svc.Approvals(ctx)
				if err != nil {
					return wire.Page[runtime.Approval]{}, err
				}
				return page(r.Request, list, func(a runtime.Approval) string { return a.ID })
			}, "limit", "cursor"),
		verb(h, "/v1/approvals/{approval}/approve", "Let an apply pass, once",
			func(ctx context.Context, r *request[wire.None]) (runtime.Approval, error) {
				return svc.Approve(ctx, r.ref)
			}),
	}
}
