package test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
)

// Where there is one turn for heavy verbs, a hook and an undo command that ask the
// service for such verbs while theirs has that turn get on with it, however many do
// so at once.
func TestNestedTurns(t *testing.T) {
	t.Parallel()
	b := memoryBox(t)
	b.serveArgs = []string{"--turns", "1"}
	_, socket := b.serve()
	nested := filepath.Join(b.root, "nested")
	script := fmt.Sprintf("#!/bin/sh\nAGENTBOX_HOST=unix://%s exec %s/agentbox checkpoint --files-only \"other-${1:-$AGENTBOX_SANDBOX_NAME}\"\n", socket, bin)
	dir := filepath.Join(b.root, "policies")
	err := errors.Join(os.WriteFile(nested, []byte(script), 0o700), os.Mkdir(dir, 0o700),
		os.WriteFile(filepath.Join(dir, "nested.yaml"), []byte("hooks: {before_checkpoint: [{run: ["+nested+
			"], timeout: 1m}]}\n"), 0o600))
	if err != nil {
		t.Fatal(err)
	}
	var all sync.WaitGroup
	for i := range 3 {
		all.Go(func() {
			name := fmt.Sprint("c", i)
			other := "other-" + name
			for _, args := range [][]string{
				{"run", "-d", "--name", other, "--network", "none", "busybox", "sleep", "1000"},
				{"run", "-d", "--name", name, "--policy", "nested", "--network", "none", "busybox", "sleep", "1000"},
				{"checkpoint", "--files-only", "--name", "one", name},
				{"effect", "add", name, "--", nested, name},
				{"restore", "--no-undo", name, "one"},
			} {
				if r := b.try(nil, args...); r.code != 0 {
					t.Errorf("%s", r)
					return
				}
			}
			if got := len(strings.Fields(b.ok("checkpoint", "ls", "-q", other))); got != 2 {
				t.Errorf("%s has %d checkpoints", other, got)
			}
		})
	}
	all.Wait()
}
