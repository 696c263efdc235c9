package main

import (
	"bytes"
	"strings"
	"testing"

	"github.com/creack/pty"

	"github.com/agentbox/agentbox/runtime"
)

// The requests of a checkpoint from elsewhere are shown, and granted after a yes.
func TestTrustSpecAsks(t *testing.T) {
	c := runtime.Checkpoint{
		ID: strings.Repeat("3f2a", 8), Foreign: true, Command: []string{"sh", "-c", "\x1b[2J\nevil"},
		Asks: []string{"bind / at /host\r, read-write"},
	}
	for answer, yes := range map[string]bool{"y\n": true, "n\n": false, "\n": false} {
		ctrl, tty, err := pty.Open()
		if err != nil {
			t.Fatal(err)
		}
		if _, err := ctrl.WriteString(answer); err != nil {
			t.Fatal(err)
		}
		var out bytes.Buffer
		err = admitForeign(t.Context(), c, grantOptions{TrustSpec: true}, tty, &out)
		if (err == nil) != yes {
			t.Errorf("%q: %v", answer, err)
		}
		if s := out.String(); strings.ContainsAny(s, "\x1b\r") ||
			!strings.Contains(s, "evil\nits spec asks for:\n  bind / at /host") || !strings.HasSuffix(s, "[y/N] ") {
			t.Errorf("shown: %q", s)
		}
		_, _ = ctrl.Close(), tty.Close()
	}
	var out bytes.Buffer
	if err := admitForeign(t.Context(), c, grantOptions{}, nil, &out); err != nil ||
		!strings.Contains(out.String(), "its command: sh -c ") || strings.Contains(out.String(), "/host") {
		t.Errorf("%q, %v", out.String(), err)
	}
	out.Reset()
	c.Foreign = false
	if err := admitForeign(t.Context(), c, grantOptions{TrustSpec: true}, nil, &out); err != nil || out.Len() > 0 {
		t.Errorf("one of this host: %q, %v", out.String(), err)
	}
}
