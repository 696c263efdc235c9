package server

import (
	"context"

	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/api/wire"
)

func (h *Handler) effectRoutes() []route {
	const effects = "/v1/sandboxes/{sandbox}/effects"
	return []route{
		query(h, effects, "List what a sandbox has done outside of itself, newest first",
			func(ctx context.Context, r *request[wire.None]) (wire.Page[runtime.Effect], error) {
				list, err := h.svc.Effects(ctx, r.ref, isSet(r.URL.Query(), "all"))
				if err != nil {
					return wire.Page[runtime.Effect]{}, err
				}
				return page(r.Request, list, func(f runtime.Effect) string { return f.ID })
			}, "all", "limit", "cursor"),
		verb(h, effects, "Record an effect, with how it is compensated",
			func(ctx context.Context, r *request[runtime.EffectRequest]) (runtime.Effect, error) {
				if err := unknown(r); err != nil { // twice on record it would be compensated twice
					return runtime.Effect{}, err
				}
				return h.svc.AddEffect(ctx, r.ref, r.in)
			}),
		verb(h, effects+"/{effect}/remove", "Take an effect off the ledger",
			func(ctx context.Context, r *request[wire.None]) (wire.None, error) {
				return noted(r, h.svc.RemoveEffect(ctx, r.ref, r.PathValue("effect")), runtime.ErrNotFound)
			}),
	}
}
