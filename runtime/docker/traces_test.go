package docker

import (
	"context"
	"testing"

	"github.com/agentbox/agentbox/runtime/traces/tracestest"
)

// Requests to the daemon are in no span.
func TestNoSpans(t *testing.T) {
	tracestest.Quiet(t, func(ctx context.Context, host string) {
		b, err := Open(Options{Host: host, Root: t.TempDir(), Run: t.TempDir()})
		if err != nil {
			t.Fatal(err)
		}
		defer b.api.Close()
		if _, err := b.info(ctx, true); err == nil {
			t.Error("a daemon that answers with nothing is one")
		}
	})
}
