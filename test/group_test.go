package test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/api"
	"github.com/agentbox/agentbox/runtime/group"
)

// Whatever fails in a group, and whatever ends it: no member is left, and the caller gets the
// first error of the work, or else of the cleaning up.
func TestGroupFailures(t *testing.T) {
	t.Parallel()
	b := memoryBox(t)
	_, socket := b.serve()
	b.start("c", "--network", "none", "busybox", "sleep", "1000")
	b.checkpoint("--files-only", "--name", "ready", "c")
	svc := api.Dial(socket)
	defer svc.Close()

	broken := func(what string, m group.Member) error { return fmt.Errorf("%s of %d broke", what, m.Number) }
	for name, c := range map[string]struct {
		opts     group.Options
		cancel   bool // by the caller, from the first member's work
		first    string
		errors   int // at least
		outcomes []string
		scored   []int
		cleaned  int // how many members the cleanup handler saw
	}{
		"all is well": {
			outcomes: []string{group.Passed, group.Passed, group.Passed}, scored: []int{1, 2, 3}, cleaned: 3,
		},
		"the work fails": {
			opts: group.Options{Parallel: 1, Work: func(_ context.Context, m group.Member) error {
				return broken("work", m)
			}},
			first: "member g-1: run: work of 1 broke", errors: 1,
			outcomes: []string{group.Failed, group.Cancelled, group.Cancelled}, cleaned: 1,
		},
		"the work of one fails, the others go on": {
			opts: group.Options{NoStop: true, Work: func(_ context.Context, m group.Member) error {
				if m.Number == 2 {
					return broken("work", m)
				}
				return nil
			}},
			first: "member g-2: run: work of 2 broke", errors: 1,
			outcomes: []string{group.Passed, group.Failed, group.Passed}, scored: []int{1, 3}, cleaned: 3,
		},
		"scoring fails": {
			opts: group.Options{
				Parallel: 1, KeepFor: time.Hour, Score: func(_ context.Context, m group.Member) (string, error) {
					return "", broken("score", m)
				},
			},
			first: "member g-1: score: score of 1 broke", errors: 1,
			outcomes: []string{group.Failed, group.Cancelled, group.Cancelled}, cleaned: 1,
		},
		"gathering fails, before they are handed over": {
			opts: group.Options{KeepFor: time.Hour, Gather: func(context.Context, []group.Result) error {
				return errors.New("gather broke")
			}},
			first: "group g: gather: gather broke", errors: 1,
			outcomes: []string{group.Passed, group.Passed, group.Passed}, scored: []int{1, 2, 3}, cleaned: 3,
		},
		"the hand-over fails": {
			opts: group.Options{KeepFor: time.Hour, Gather: func(ctx context.Context, members []group.Result) error {
				_, err := svc.ReleaseLease(ctx, "g") // another caller takes the group away
				return err
			}},
			first: "group g: hand-over: lease transfer", errors: 1,
			outcomes: []string{group.Passed, group.Passed, group.Passed}, scored: []int{1, 2, 3}, cleaned: 3,
		},
		"cleaning up fails": {
			opts: group.Options{Parallel: 1, Cleanup: func(_ context.Context, m group.Member) error {
				return broken("cleanup", m)
			}},
			first: "member g-1: cleanup: cleanup of 1 broke", errors: 3,
			outcomes: []string{group.Passed, group.Passed, group.Passed}, scored: []int{1, 2, 3}, cleaned: 3,
		},
		"the work fails, and cleaning up": {
			opts: group.Options{NoStop: true, Parallel: 1, Cleanup: func(_ context.Context, m group.Member) error {
				return broken("cleanup", m)
			},
				Work: func(_ context.Context, m group.Member) error {
					if m.Number == 3 {
						return broken("work", m)
					}
					return nil
				}},
			first: "member g-3: run: work of 3 broke", errors: 4,
			outcomes: []string{group.Passed, group.Passed, group.Failed}, scored: []int{1, 2}, cleaned: 3,
		},
		"the caller goes": {
			opts: group.Options{}, cancel: true,
			first: "group g: the caller went", errors: 1,
			outcomes: []string{group.Cancelled, group.Cancelled, group.Cancelled}, cleaned: -1,
		},
	} {
		t.Run(name, func(t *testing.T) {
			ctx, cancel := context.WithCancelCause(t.Context())
			defer cancel(nil)
			var mu sync.Mutex
			var scored, cleaned []int
			opts := c.opts
			opts.Name, opts.Count, opts.Sandbox, opts.Fork = "g", 3, "c", runtime.ForkOptions{Checkpoint: "ready"}
			if work := opts.Work; c.cancel {
				opts.Work = func(ctx context.Context, m group.Member) error {
					cancel(errors.New("the caller went"))
					_, err := svc.Exec(ctx, m.ID, runtime.Process{Args: []string{"sleep", "1000"}}, runtime.Streams{})
					return err
				}
			} else if work == nil {
				opts.Work = func(ctx context.Context, m group.Member) error {
					exit, err := svc.Exec(ctx, m.ID, runtime.Process{Args: []string{
						"sh", "-c", "test $AGENTBOX_MEMBER = $0 && test $AGENTBOX_ATTEMPT = 1", fmt.Sprint(m.Number),
					}, Env: m.Env}, runtime.Streams{})
					if err == nil && exit != 0 {
						err = &group.ExitError{Code: exit}
					}
					return err
				}
			}
			if score := opts.Score; score == nil {
				opts.Score = func(_ context.Context, m group.Member) (string, error) {
					mu.Lock()
					defer mu.Unlock()
					scored = append(scored, m.Number)
					return fmt.Sprint(m.Number * 10), nil
				}
			}
			handler := opts.Cleanup
			opts.Cleanup = func(ctx context.Context, m group.Member) error {
				mu.Lock()
				cleaned = append(cleaned, m.Number)
				mu.Unlock()
				if handler != nil {
					return handler(ctx, m)
				}
				return ctx.Err()
			}
			rep, err := group.Run(ctx, svc, opts)
			if (err == nil) != (c.first == "") || err != nil && !strings.HasPrefix(err.Error(), c.first) {
				t.Errorf("the error is %v, want %q", err, c.first)
			}
			if len(rep.Errors) < c.errors || err != nil && rep.Errors[0] != err.Error() {
				t.Errorf("errors: %q", rep.Errors)
			}
			var outcomes []string
			for _, m := range rep.Members {
				outcomes = append(outcomes, m.Outcome)
				if m.Kept {
					t.Errorf("said to be kept: %+v", m)
				}
			}
			slices.Sort(scored)
			if !slices.Equal(outcomes, c.outcomes) || !slices.Equal(scored, c.scored) ||
				c.cleaned >= 0 && len(cleaned) != c.cleaned {
				t.Errorf("outcomes %v, scored %v, cleaned %v: %+v", outcomes, scored, cleaned, rep)
			}
			list, err := svc.Sandboxes(t.Context())
			if err != nil || len(list) != 1 || list[0].Name != "c" {
				t.Errorf("left: %+v, %v", list, err)
			}
			if l, err := svc.Lease(t.Context(), "g"); err != nil || l.State != "ended" {
				t.Errorf("its lease: %+v, %v", l, err)
			}
		})
	}
}

// The command line: what passed is kept when asked to, and goes by itself.
func TestGroupRun(t *testing.T) {
	t.Parallel()
	b := memoryBox(t)
	b.start("c", "--network", "none", "busybox", "sh", "-c", counter)
	b.reaches("c", 3)
	ready := b.checkpoint("--name", "ready", "c")
	dir := t.TempDir()
	r := b.try(nil, "group", "run", "-n", "3", "--name", "g", "--from", "c@ready", "--fail-fast=false", "--keep-for",
		"1h", "--score", "cat /score", "--output-dir", dir, "--format", "json",
		"--", "sh", "-c", `echo "member $AGENTBOX_MEMBER of $AGENTBOX_MEMBERS in $AGENTBOX_GROUP, attempt $AGENTBOX_ATTEMPT"; echo $((AGENTBOX_MEMBER * 7)) > /score; exit $((AGENTBOX_MEMBER == 2 ? 9 : 0))`)
	if r.code != 1 || !strings.Contains(r.err, "member g-2: run: its command ended with code 9") {
		t.Fatal(r)
	}
	rep := decode[group.Report](b, r.out)
	for i, m := range rep.Members {
		n := i + 1
		out, err := os.ReadFile(filepath.Join(dir, m.Name+".out"))
		if want := fmt.Sprintf("member %d of 3 in g, attempt 1\n", n); err != nil || string(out) != want {
			t.Errorf("%s printed %q, want %q: %v", m.Name, out, want, err)
		}
		if n == 2 {
			if m.Kept || m.Outcome != group.Failed || m.Exit == nil || *m.Exit != 9 || m.Score != "" {
				t.Errorf("%+v", m)
			}
			continue
		}
		if !m.Kept || m.Outcome != group.Passed || m.Exit == nil || *m.Exit != 0 || m.Score != fmt.Sprint(7*n) {
			t.Errorf("%+v", m)
		}
		b.reaches(m.Name, 4) // it is a fork that goes on
	}
	if got := strings.Fields(b.ok("ps", "-q", "--filter", "group=g")); len(got) != 2 {
		t.Errorf("kept: %v", got)
	}
	if got := strings.Fields(b.ok("ps", "-q", "--filter", "lease=g", "--filter", "group=h")); len(got) != 0 {
		t.Errorf("of another group: %v", got)
	}
	b.ok("group", "rm", "g")
	if got := b.ok("ps", "-a", "--format", "json", "--filter", "group=g"); got != "[]" {
		t.Errorf("left: %s", got)
	}
	b.ok("lease", "create", "--name", "g", "--for", "1h")
	b.fails(3, "group", "rm", "g")
	b.ok("lease", "release", "g") // which that has left alone
	// Checkpoints taken for the group go with it, those that were there stay.
	if r := b.try(nil, "group", "run", "-n", "2", "--from", "c", "--", "true"); r.code != 0 ||
		!strings.Contains(r.out, "2 passed, 0 failed") {
		t.Error(r)
	}
	if list := b.checkpoints(); len(list) != 1 || list[0].ID != ready {
		t.Errorf("checkpoints: %+v", list)
	}
}

// A group whose caller is killed, and one whose caller is interrupted, leave nothing.
func TestGroupCallerEnds(t *testing.T) {
	t.Parallel()
	for _, service := range []bool{false, true} {
		t.Run(fmt.Sprintf("service %v", service), func(t *testing.T) {
			b := memoryBox(t)
			if service {
				b.serve()
			}
			for _, sig := range []syscall.Signal{syscall.SIGKILL, syscall.SIGINT} {
				cmd := b.command(t.Context(), "group", "run", "-n", "3", "--name", "g", "--image",
					"busybox", "--", "sleep", "1000")
				if err := cmd.Start(); err != nil {
					t.Fatal(err)
				}
				b.awaitSandboxes(3)
				if err := cmd.Process.Signal(sig); err != nil {
					t.Fatal(err)
				}
				if err := cmd.Wait(); err == nil || sig == syscall.SIGINT && cmd.ProcessState.ExitCode() != 130 {
					t.Errorf("%v: %v", sig, err)
				}
				if sig == syscall.SIGKILL {
					b.awaitSandboxes(0) // no command is called: the supervisor sees to it
				}
				if got := b.ok("ps", "-aq"); got != "" {
					t.Errorf("after %v: left %s", sig, got)
				}
			}
		})
	}
}
