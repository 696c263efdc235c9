package test

import (
	"context"
	"errors"
	"strings"
	"testing"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/api"
)

// The service is killed in the middle of each verb. Its caller is told which service
// did not answer, and that the verb may have been done; the same request with the same
// key, sent to the next service and then once more, is done once, or is refused where
// that cannot be known.
func TestServiceKilledVerbs(t *testing.T) {
	t.Parallel()
	count := func(t *testing.T, c *api.Client, want int) {
		t.Helper()
		if list, err := c.Sandboxes(t.Context()); err != nil || len(list) != want {
			t.Errorf("%d sandboxes, not %d: %v", len(list), want, err)
		}
	}
	status := func(t *testing.T, c *api.Client, want runtime.Status) {
		t.Helper()
		if sb, err := c.Sandbox(t.Context(), "c"); err != nil || sb.Status != want {
			t.Errorf("%s, not %s: %v", sb.Status, want, err)
		}
	}
	for _, verb := range []struct {
		at    string
		do    func(context.Context, *api.Client) error
		again error // of the second try and the third
		check func(*testing.T, *api.Client)
	}{
		{at: "create.after-backend", do: func(ctx context.Context, c *api.Client) error {
			_, err := c.Create(ctx, runtime.CreateRequest{Spec: runtime.Spec{Name: "n", Image: "busybox"}})
			return err
		}, check: func(t *testing.T, c *api.Client) { count(t, c, 3) }},
		{at: "start.after-backend", do: func(ctx context.Context, c *api.Client) error {
			_, err := c.Start(ctx, "stopped", nil)
			return err
		}},
		{at: "restore.after-stop", do: func(ctx context.Context, c *api.Client) error {
			_, err := c.Restore(ctx, "c", runtime.RestoreOptions{Checkpoint: "one"})
			return err
		}, check: func(t *testing.T, c *api.Client) {
			status(t, c, runtime.Running)
			if err := command(t.Context(), c, "c", "[ ! -e /new ]"); err != nil {
				t.Error(err)
			}
		}},
		{at: "remove.after-backend", do: func(ctx context.Context, c *api.Client) error {
			return c.Remove(ctx, "c", runtime.RemoveOptions{Force: true})
		}, check: func(t *testing.T, c *api.Client) { count(t, c, 1) }},
		{at: "stop.before-backend", do: func(ctx context.Context, c *api.Client) error { return c.Stop(ctx, "c", 0) },
			check: func(t *testing.T, c *api.Client) { status(t, c, runtime.Exited) }},
		{at: "fork.before-thaw", again: runtime.ErrState, do: func(ctx context.Context, c *api.Client) error {
			_, err := c.Fork(ctx, "c", runtime.ForkOptions{Checkpoint: "one", Count: 1})
			return err
		}},
		{at: "oci.exec.after-start", again: runtime.ErrState, do: func(ctx context.Context, c *api.Client) error {
			_, err := c.Exec(ctx, "c", runtime.Process{Args: []string{"true"}, Detach: true}, runtime.Streams{})
			return err
		}},
	} {
		t.Run(verb.at, func(t *testing.T) {
			t.Parallel()
			b := memoryBox(t)
			b.start("c", "--network", "none", "busybox", "sleep", "1000")
			b.ok("create", "--name", "stopped", "--network", "none", "busybox", "sleep", "1000")
			b.ok("checkpoint", "--name", "one", "c")
			b.ok("exec", "c", "touch", "/new")
			cmd, socket := b.serve("AGENTBOX_FAILPOINT=" + verb.at + "=kill")
			c := api.Dial(socket)
			defer c.Close()
			ctx := api.WithKey(t.Context(), verb.at)
			err := verb.do(ctx, c)
			if err == nil || !strings.Contains(err.Error(), socket) || len(fault.Hint(err)) == 0 {
				t.Errorf("the error of a service that is killed: %v", err)
			}
			if err := cmd.Wait(); err == nil {
				t.Fatal("the service was not killed")
			}
			_, _ = b.serve()
			for try := range 2 {
				if err := verb.do(ctx, c); !errors.Is(err, verb.again) {
					t.Errorf("try %d: %v", try+2, err)
				}
			}
			if verb.check != nil {
				verb.check(t, c)
			}
		})
	}
}
