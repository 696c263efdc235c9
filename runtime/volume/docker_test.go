package volume

import (
	"context"
	"testing"

	"github.com/agentbox/agentbox/runtime/traces/tracestest"
)

// Requests to the daemon are in no span.
func TestNoSpans(t *testing.T) {
	tracestest.Quiet(t, func(ctx context.Context, host string) {
		t.Setenv("DOCKER_HOST", host)
		e, err := Docker()
		if err != nil {
			t.Fatal(err)
		}
		defer e.(docker).api.Close()
		if _, err := e.Using(ctx, "v", ""); err == nil {
			t.Error("a daemon that answers with nothing is one")
		}
	})
}
