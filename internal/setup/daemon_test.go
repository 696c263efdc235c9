package setup

import (
	"context"
	"testing"

	"github.com/agentbox/agentbox/runtime/traces/tracestest"
)

// Requests to the daemon are in no span.
func TestNoSpans(t *testing.T) {
	tracestest.Quiet(t, func(ctx context.Context, host string) {
		c, err := (&daemon{host: host}).client()
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		if _, err := c.Info(ctx); err == nil {
			t.Error("a daemon that answers with nothing is one")
		}
	})
}
