package server

import (
	"cmp"
	"context"
	"net/http"
	"strings"

	"go.opentelemetry.io/otel/attribute"
	otelcodes "go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/trace"
)

// Traces go on across a connection by W3C trace context: the headers traceparent and
// tracestate. Baggage does not travel: nothing here reads it.
var traceContext propagation.TraceContext

// looksBy are the routes that only look, though they are asked with POST. A heartbeat
// counts as one.
var looksBy = map[string]bool{
	"/v1/diff": true, "/v1/stats": true, "/v1/sandboxes/{sandbox}/plan": true, "/v1/leases/{lease}/renew": true,
}

// looks reports whether a request only reads. A request that becomes a session, such as that
// of exec, does more.
func looks(r *http.Request, route string) bool {
	reads := r.Method == http.MethodGet || r.Method == http.MethodHead
	return reads && r.Header.Get("Upgrade") == "" || looksBy[route]
}

// traced begins the span of a request, if there is to be one: a request that only reads
// begins no trace, and /v1/info, which clients ask for before all else, is in none. The
// span has the route, not the path or the query, which may hold confidential data.
func (h *Handler) traced(ctx context.Context, r *http.Request) (_ context.Context, end func(*statusWriter)) {
	none := func(*statusWriter) {}
	if h.opts.Tracer == nil {
		return ctx, none
	}
	_, pattern := h.mux.Handler(r)
	_, route, _ := strings.Cut(pattern, " ")
	if !h.verbs[pattern] || !strings.HasPrefix(route, "/v1/") || route == "/v1/info" {
		return ctx, none
	}
	ctx = traceContext.Extract(ctx, propagation.HeaderCarrier(r.Header))
	if looks(r, route) && !trace.SpanContextFromContext(ctx).IsValid() {
		return ctx, none
	}
	ctx, span := h.opts.Tracer.Start(ctx, pattern, trace.WithSpanKind(trace.SpanKindServer),
		trace.WithAttributes(attribute.String("http.request.method", r.Method), attribute.String("http.route", route)))
	return ctx, func(w *statusWriter) {
		status := cmp.Or(w.status, http.StatusOK)
		span.SetAttributes(attribute.Int("http.response.status_code", status))
		if w.code != "" {
			span.SetAttributes(attribute.String("error.type", w.code))
		}
		if status >= 500 { // what the caller did wrong is an error of the caller's span
			span.SetStatus(otelcodes.Error, w.code)
		}
		span.End()
	}
}
