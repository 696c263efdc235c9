package source

import (
	"context"
	"os/exec"
	"strings"
	"testing"

	"github.com/agentbox/agentbox/runtime/traces/tracestest"
)

// Only the end of a talkative program's output is kept.
func TestTail(t *testing.T) {
	var said tail
	cmd := exec.Command("sh", "-c", "yes $(printf %01000d 0) | head -c 2000000 >&2; echo the end >&2")
	cmd.Stderr = &said
	if err := cmd.Run(); err != nil {
		t.Fatal(err)
	}
	if n := said.kept.Len(); n > 16<<10 || !strings.HasSuffix(said.said(), "the end") {
		t.Errorf("%d bytes are kept, ending in %q", n, said.said())
	}
}

// Requests to the daemon are in no span.
func TestNoSpans(t *testing.T) {
	tracestest.Quiet(t, func(ctx context.Context, host string) {
		t.Setenv("DOCKER_HOST", host)
		c, err := dockerClient()
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		if _, err := c.ImageSave(ctx, []string{"i"}); err == nil {
			t.Error("a daemon that answers with nothing is one")
		}
	})
}
