package api

import (
	"context"
	"net/url"
	"strconv"

	"github.com/agentbox/agentbox/runtime"
)

func (h *Handler) effectRoutes() []route {
	const effects = "/v1/sandboxes/{sandbox}/effects"
	return []route{
		query(h, effects, "List what a sandbox has done outside of itself, newest first", func(ctx context.Context, r *request[None]) (Page[runtime.Effect], error) {
			list, err := h.svc.Effects(ctx, r.ref, isSet(r.URL.Query(), "all"))
			if err != nil {
				return Page[runtime.Effect]{}, err
			}
			return page(r.Request, list, func(f runtime.Effect) string { return f.ID })
		}, "all", "limit", "cursor"),
		verb(h, effects, "Record an effect, with how it is compensated", func(ctx context.Context, r *request[runtime.EffectRequest]) (runtime.Effect, error) {
			if err := unknown(r); err != nil { // twice on record it would be compensated twice
				return runtime.Effect{}, err
			}
			return h.svc.AddEffect(ctx, r.ref, r.in)
		}),
		verb(h, effects+"/{effect}/remove", "Take an effect off the ledger", func(ctx context.Context, r *request[None]) (None, error) {
			return noted(r, h.svc.RemoveEffect(ctx, r.ref, r.PathValue("effect")), runtime.ErrNotFound)
		}),
	}
}

// AddEffect records an effect.
func (c *Client) AddEffect(ctx context.Context, sandbox string, req runtime.EffectRequest) (runtime.Effect, error) {
	return do[runtime.Effect](ctx, c, at("sandboxes", sandbox, "effects"), req, nil)
}

// Effects lists the ledger of a sandbox.
func (c *Client) Effects(ctx context.Context, sandbox string, everything bool) ([]runtime.Effect, error) {
	return all[runtime.Effect](ctx, c, at("sandboxes", sandbox, "effects"), url.Values{"all": {strconv.FormatBool(everything)}})
}

// RemoveEffect takes one off the ledger.
func (c *Client) RemoveEffect(ctx context.Context, sandbox, effect string) error {
	return none(ctx, c, at("sandboxes", sandbox, "effects", effect, "remove"), None{})
}
