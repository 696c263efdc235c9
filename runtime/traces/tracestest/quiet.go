package tracestest

import (
	"context"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"

	sdk "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
)

// Quiet fails if ask, which is to ask the Docker daemon at host for something, makes
// spans of its own below that of ctx: they would have in them what is asked for.
func Quiet(t *testing.T, ask func(ctx context.Context, host string)) {
	t.Helper()
	dir, err := os.MkdirTemp("", "quiet") // a socket's path has to be short
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	socket := filepath.Join(dir, "s")
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	var asked atomic.Int64
	daemon := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		asked.Add(1)
		w.WriteHeader(http.StatusTeapot)
	}))
	daemon.Listener.Close()
	daemon.Listener = l
	daemon.Start()
	defer daemon.Close()

	made := tracetest.NewSpanRecorder()
	ctx, span := sdk.NewTracerProvider(sdk.WithSpanProcessor(made)).Tracer("test").Start(t.Context(), "above")
	ask(ctx, "unix://"+socket)
	span.End()
	if asked.Load() == 0 {
		t.Error("the daemon was not asked")
	}
	for _, s := range made.Ended() {
		if s.Name() != "above" {
			t.Errorf("a span %q with %v", s.Name(), s.Attributes())
		}
	}
}
