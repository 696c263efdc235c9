//go:build failpoint

package store

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"

	"github.com/agentbox/agentbox/internal/thorough"
)

// points lists every failpoint of this package, what reaches it, and whether
// the new checkpoint is to be there after a kill and a sweep.
var points = []struct {
	name, role string
	there      bool // "new" is ready (checkpoint), "old" is (remove)
}{
	{"store.begin.before-row", "checkpoint", false},
	{"store.begin.before-dir", "checkpoint", false},
	{"store.begin.after-dir", "checkpoint", false},
	{"store.commit.before-manifest", "checkpoint", false},
	{"store.commit.before-fsync", "checkpoint", false},
	{"store.commit.before-pack", "checkpoint", false},
	{"store.commit.after-pack", "checkpoint", false},
	{"store.commit.before-rename", "checkpoint", false},
	{"store.commit.after-rename", "checkpoint", true},
	{"store.commit.before-row", "checkpoint", true},
	{"store.commit.in-transaction", "checkpoint", true},
	{"store.commit.after-row", "checkpoint", true},
	{"store.abort.before-remove", "abort", false},
	{"store.abort.before-row", "abort", false},
	{"store.remove.before-mark", "remove", true},
	{"store.remove.before-rename", "remove", false},
	{"store.remove.before-row", "remove", false},
	{"store.remove.before-tree", "remove", false},
	{"store.sweep.before-ready", "sweep", true},
	{"store.sweep.before-discard", "sweep", false},
	{"store.sweep.before-pack", "sweep", false},
	{"store.sandbox.before-row", "put", false},
	{"store.sandbox.before-delete", "delete", false},
	{"store.journal.before-begin", "journal", false},
	{"store.journal.after-begin", "journal", false},
	{"store.journal.before-done", "journal", false},
}

// otherPoints are those that other test files reach; they add them in init.
var otherPoints = map[string]bool{}

// broken runs a role in another process with a failpoint set.
func broken(t *testing.T, role, root, point, action string, args ...string) (*exec.Cmd, error) {
	t.Helper()
	cmd := helper(t, role, root, args...)
	cmd.Env = append(cmd.Env, "AGENTBOX_FAILPOINT="+point+"="+action)
	cmd.Stderr = nil
	var out strings.Builder
	cmd.Stderr = &out
	err := cmd.Run()
	if action != "kill" && !strings.Contains(out.String(), "failpoint "+point) {
		t.Fatalf("%s did not fire: %v, %s", point, err, out.String())
	}
	return cmd, err
}

// actions are what a table's i-th point is tried with. A full disk is an error,
// too: unless all is to be tried, they take turns.
func actions(i int) []string {
	if thorough.Asked() {
		return []string{"kill", "error", "enospc"}
	}
	return []string{"kill", []string{"error", "enospc"}[i%2]}
}

func killed(err error) bool {
	var exit *exec.ExitError
	return errors.As(err, &exit) && exit.Sys().(syscall.WaitStatus).Signal() == syscall.SIGKILL
}

func TestFailpoints(t *testing.T) {
	ctx := context.Background()
	for i, p := range points {
		for _, action := range actions(i) {
			t.Run(p.name+"/"+action, func(t *testing.T) {
				root := t.TempDir()
				s := open(t, root)
				b := put(t, s, "box")
				old := taken(t, s, of(b, "old", KindFull), sample(1, 1000))
				child := of(b, "child", KindFiles)
				child.Parent = old.ID
				kept := taken(t, s, child, sample(2, 1000))
				if p.role == "sweep" {
					// Something to complete, or to discard.
					before := "store.commit.after-rename"
					if !p.there {
						before = "store.commit.before-rename"
					}
					if p.name == "store.sweep.before-pack" {
						before = "store.commit.after-pack"
					}
					if _, err := broken(t, "checkpoint", root, before, "kill"); !killed(err) {
						t.Fatalf("%s did not fire: %v", before, err)
					}
				}
				_, err := broken(t, p.role, root, p.name, action, old.ID)
				if action == "kill" && !killed(err) {
					t.Fatalf("%s did not fire: %v", p.name, err)
				}
				if action != "kill" && err == nil {
					t.Fatal("the error was lost")
				}
				if action != "kill" && p.role == "checkpoint" {
					// A caller that gets an error has no checkpoint, except the one that was ready
					// already, and nothing is left to sweep.
					if p.name != "store.commit.after-row" {
						if _, err := s.Checkpoint(ctx, "box@new"); err == nil {
							t.Fatal("the failed checkpoint is ready")
						}
						tidy(t, s)
					}
				}

				did, err := s.Sweep(ctx)
				must(t, err)
				tidy(t, s)
				intact(t, s)
				if again, err := s.Sweep(ctx); err != nil || len(again) > 0 {
					t.Fatalf("the second sweep had work: %v, %v", again, err)
				}
				_, newErr := s.Checkpoint(ctx, "box@new")
				_, oldErr := s.Checkpoint(ctx, "box@old")
				switch p.role {
				case "checkpoint", "abort", "sweep":
					there := p.there
					if p.role == "checkpoint" && action != "kill" {
						there = p.name == "store.commit.after-row"
					}
					if (newErr == nil) != there {
						t.Errorf("ready: %v, want %v (sweep: %q)", newErr, there, did)
					}
					if there {
						same(t, s, must1(s.Checkpoint(ctx, "box@new")).ID, sample(9, 3<<20))
					}
				case "remove":
					if (oldErr == nil) != p.there {
						t.Errorf("old: %v, want there %v", oldErr, p.there)
					}
					want := ""
					if p.there {
						want = old.ID
					}
					if c := must1(s.Checkpoint(ctx, kept.ID)); c.Parent != want {
						t.Errorf("parent of the child: %q, want %q", c.Parent, want)
					}
					must(t, s.RemoveCheckpoint(ctx, old.ID))
				case "put":
					if _, err := s.Sandbox(ctx, "other"); err == nil {
						t.Error("it is there")
					}
				case "delete":
					must1(s.Sandbox(ctx, "box"))
				case "journal":
					list, err := s.Intents(ctx)
					must(t, err)
					if (len(list) == 0) != (p.name == "store.journal.before-begin") {
						t.Errorf("%+v", list)
					}
				}
				if p.role != "remove" && oldErr != nil {
					t.Errorf("the old checkpoint is gone: %v", oldErr)
				}
				must(t, s.VerifyCheckpoint(ctx, kept.ID))
				// The name is free, or taken, as it should be, and work goes on.
				if newErr != nil {
					taken(t, s, of(b, "new", KindFull), sample(3, 10))
				}
			})
		}
	}
}

// Every failpoint in the sources is in the table.
func TestFailpointsListed(t *testing.T) {
	listed := map[string]bool{}
	for _, p := range points {
		listed[p.name] = true
	}
	for name := range otherPoints {
		listed[name] = true
	}
	entries, err := os.ReadDir(".")
	must(t, err)
	for _, e := range entries {
		if !strings.HasSuffix(e.Name(), ".go") || strings.HasSuffix(e.Name(), "_test.go") {
			continue
		}
		src, err := os.ReadFile(e.Name())
		must(t, err)
		for _, part := range strings.Split(string(src), `failpoint.Hit("`)[1:] {
			name, _, _ := strings.Cut(part, `"`)
			if !listed[name] {
				t.Errorf("%s is in no test", name)
			}
			delete(listed, name)
		}
	}
	if len(listed) > 0 {
		t.Errorf("nowhere in the sources: %v", listed)
	}
}
