package server

import (
	"context"
	"encoding/json"
	"net/http"
	"reflect"
	"time"

	"github.com/agentbox/agentbox/runtime/api/wire"
	"github.com/agentbox/agentbox/runtime/doctor"
)

// healthRoutes serve clients that look at status codes: probes, and Prometheus.
func (h *Handler) healthRoutes() []route {
	began := time.Now().UTC()
	return []route{
		query(h, "/healthz", "Tell that the service is alive",
			func(context.Context, *request[wire.None]) (wire.Health, error) {
				return wire.Health{Status: "ok", Version: h.opts.Info.Version, Started: began}, nil
			}),
		{
			method: http.MethodGet, path: "/readyz",
			summary: "Tell what /v1/ready tells, with the status 503 when this host cannot checkpoint",
			out:     reflect.TypeFor[doctor.Report](), serve: h.readyz,
		},
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
