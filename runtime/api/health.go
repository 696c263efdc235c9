package api

import (
	"context"
	"encoding/json"
	"net/http"
	"reflect"
	"time"

	"github.com/agentbox/agentbox/runtime/doctor"
)

// Health says that the service is alive.
type Health struct {
	Status  string    `json:"status"` // "ok"
	Version string    `json:"version"`
	Started time.Time `json:"started"`
}

// healthRoutes serve clients that look at status codes: probes, and Prometheus.
func (h *Handler) healthRoutes() []route {
	began := time.Now().UTC()
	return []route{
		query(h, "/healthz", "Tell that the service is alive", func(context.Context, *request[None]) (Health, error) {
			return Health{Status: "ok", Version: h.opts.Info.Version, Started: began}, nil
		}),
		{method: http.MethodGet, path: "/readyz", summary: "Tell what /v1/ready tells, with the status 503 when this host cannot checkpoint", out: reflect.TypeFor[doctor.Report](), serve: h.readyz},
		h.metricsRoute(),
	}
}

func (h *Handler) readyz(w http.ResponseWriter, r *http.Request) {
	report, err := h.examine(r.Context())
	var data []byte
	if err == nil {
		data, err = json.Marshal(report)
	}
	if err != nil {
		writeProblem(w, err)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	if !report.OK {
		w.WriteHeader(http.StatusServiceUnavailable)
	}
	_, _ = w.Write(append(data, '\n')) // the caller may be gone
}

// Health checks that the service is alive.
func (c *Client) Health(ctx context.Context) (Health, error) {
	return get[Health](ctx, c, "/healthz", nil)
}
