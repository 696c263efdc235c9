package server

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/doctor"
)

// healthFor is how long a report on the host is valid: making one runs programs, and probes ask
// often.
const healthFor = 10 * time.Second

// health is the last report on the host.
type health struct {
	mu     sync.Mutex
	report doctor.Report
	at     time.Time
}

// examine inspects the host, once for all concurrent callers.
func (h *Handler) examine(ctx context.Context) (doctor.Report, error) {
	if h.opts.Examine == nil {
		return doctor.Report{}, fmt.Errorf("%w: this service cannot look at its host", runtime.ErrUnsupported)
	}
	h.health.mu.Lock()
	defer h.health.mu.Unlock()
	if h.health.at.IsZero() || time.Since(h.health.at) > healthFor {
		report := h.opts.Examine(ctx)
		if err := ctx.Err(); err != nil { // an interrupted check proves nothing
			return report, err
		}
		h.health.report, h.health.at = report, time.Now()
	}
	return h.health.report, nil
}
