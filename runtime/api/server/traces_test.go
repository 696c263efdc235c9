package server

import (
	"context"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	sdk "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"

	"github.com/agentbox/agentbox/runtime"
)

// tracedService answers all that TestTraced asks for.
type tracedService struct{ runtime.Service }

func (tracedService) Sandboxes(context.Context) ([]runtime.Sandbox, error) { return nil, nil }
func (tracedService) Sandbox(context.Context, string) (runtime.Sandbox, error) {
	return runtime.Sandbox{}, nil
}
func (tracedService) Diff(context.Context, runtime.DiffRequest) (runtime.Diff, error) {
	return runtime.Diff{}, nil
}
func (tracedService) Stats(context.Context, runtime.StatsOptions) ([]runtime.Stats, error) {
	return nil, nil
}
func (tracedService) PlanRestore(context.Context, string, runtime.RestoreOptions) (runtime.RestorePlan, error) {
	return runtime.RestorePlan{}, nil
}
func (tracedService) RenewLease(context.Context, string, time.Duration) (runtime.Lease, error) {
	return runtime.Lease{}, nil
}
func (tracedService) Pause(context.Context, string) error { return nil }

// A request that only looks is a span of its caller's trace, and begins none; which
// service this is, is in no trace.
func TestTraced(t *testing.T) {
	made := tracetest.NewSpanRecorder()
	socket := serving(t, tracedService{},
		Options{Tracer: sdk.NewTracerProvider(sdk.WithSpanProcessor(made)).Tracer("test")})
	c := &http.Client{Transport: &http.Transport{DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", socket)
		}}}
	const parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
	for _, ask := range []struct {
		method, path, upgrade string
		alone, under          string // the span of one without a parent, and of one with
	}{
		{"GET", "/v1/info", "", "", ""},
		{"GET", "/v1/sandboxes", "", "", "GET /v1/sandboxes"},
		{"HEAD", "/v1/sandboxes", "", "", "GET /v1/sandboxes"},
		{"GET", "/v1/sandboxes/c", "", "", "GET /v1/sandboxes/{sandbox}"},
		{"POST", "/v1/diff", "", "", "POST /v1/diff"},
		{"POST", "/v1/stats", "", "", "POST /v1/stats"},
		{"POST", "/v1/sandboxes/c/plan", "", "", "POST /v1/sandboxes/{sandbox}/plan"},
		{"POST", "/v1/leases/l/renew", "", "", "POST /v1/leases/{lease}/renew"},
		{
			"POST", "/v1/sandboxes/c/pause", "", "POST /v1/sandboxes/{sandbox}/pause",
			"POST /v1/sandboxes/{sandbox}/pause",
		},
		{
			"GET", "/v1/sandboxes/c/exec", "other", "GET /v1/sandboxes/{sandbox}/exec",
			"GET /v1/sandboxes/{sandbox}/exec",
		},
	} {
		for _, header := range []string{"", "nonsense", parent} {
			made.Reset()
			var body string
			if ask.method == "POST" {
				body = "{}"
			}
			r, err := http.NewRequestWithContext(t.Context(), ask.method, "http://agentbox"+ask.path,
				strings.NewReader(body))
			if err != nil {
				t.Fatal(err)
			}
			r.Header.Set("Content-Type", "application/json")
			if ask.upgrade != "" {
				r.Header.Set("Connection", "Upgrade")
				r.Header.Set("Upgrade", ask.upgrade)
			}
			want := ask.alone
			if header != "" {
				r.Header.Set("traceparent", header)
			}
			if header == parent {
				want = ask.under
			}
			resp, err := c.Do(r)
			if err != nil {
				t.Fatal(err)
			}
			resp.Body.Close()
			if resp.StatusCode != http.StatusOK && ask.upgrade == "" {
				t.Errorf("%s %s: %s", ask.method, ask.path, resp.Status)
			}
			var names []string
			for _, s := range made.Started() {
				names = append(names, s.Name())
				if s.Parent().IsValid() != (header == parent) {
					t.Errorf("%s below %v", s.Name(), s.Parent())
				}
			}
			if strings.Join(names, ", ") != want {
				t.Errorf("%s %s with traceparent %q makes the spans %q", ask.method, ask.path, header, names)
			}
		}
	}
}
