//go:build failpoint

package apply

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/agentbox/agentbox/runtime"
)

// points are the instants at which an apply is broken, and whether the directories have the new
// state afterwards.
var points = map[string]bool{
	"apply.before-stage":  false,
	"apply.after-copy":    false,
	"apply.after-stage":   false,
	"apply.before-write":  false,
	"apply.first-write":   false,
	"apply.mid-write":     false,
	"apply.before-canary": false,
	"apply.after-canary":  false,
	"apply.last-write":    false,
	"apply.after-dirs":    false,
	"apply.before-commit": false,
	"apply.after-commit":  true,
	"apply.after-upper":   true,
	"apply.before-end":    true,
}

// broken runs a role in another process, and breaks it at a point.
func broken(t *testing.T, root, role, point, action string) {
	t.Helper()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), "APPLY_TEST_ROLE="+role, "APPLY_TEST_ROOT="+root,
		"AGENTBOX_FAILPOINT="+point+"="+action)
	var out strings.Builder
	cmd.Stderr = &out
	err := cmd.Run()
	var exit *exec.ExitError
	switch {
	case !errors.As(err, &exit):
		t.Fatalf("%s did not fire: %v\n%s", point, err, out.String())
	case action == "kill" && exit.Sys().(syscall.WaitStatus).Signal() != syscall.SIGKILL:
		t.Fatalf("%s did not kill: %v\n%s", point, err, out.String())
	case action != "kill" && !strings.Contains(out.String(), "failpoint "+point):
		t.Fatalf("%s did not fire: %v\n%s", point, err, out.String())
	}
}

// TestBroken breaks an apply of two workspaces at every point: afterwards both directories are as they
// were, or both have all.
func TestBroken(t *testing.T) {
	for place := range places {
		for point, applied := range points {
			for _, action := range []string{"kill", "error", "enospc"} {
				t.Run(place+"/"+point+"/"+action, func(t *testing.T) {
					l, old, new := two(t, place)
					broken(t, l.root, "apply", point, action)
					_, err := Settle(l.home())
					must(t, err)
					want := old
					if applied {
						want = new
					}
					for i := range l.n {
						same(t, "the directory", files(t, l.from(i)), want[i])
						l.inside(t, i, func(dir string) { same(t, "the sandbox", files(t, dir), new[i]) })
						for _, g := range []string{l.from(i) + "/.agentbox-*", l.root + "/home/apply"} {
							if left, _ := filepath.Glob(g); len(left) > 0 {
								t.Errorf("left: %q", left)
							}
						}
					}
					notes, err := l.home().Notes()
					must(t, err)
					if len(notes) > 0 {
						t.Errorf("notes without one: %s", notes)
					}
					if !applied {
						_, err := l.run(runtime.ApplyOptions{}, nil)
						must(t, err)
					}
					for i := range l.n {
						same(t, "the directory in the end", files(t, l.from(i)), new[i])
					}
				})
			}
		}
	}
}

// TestBrokenEdited: what the owner has changed in a file, or added to a directory, that a killed apply
// or undo had brought is there afterwards, and so is what the apply had replaced.
func TestBrokenEdited(t *testing.T) {
	for place := range places {
		for _, role := range []string{"apply", "undo"} {
			t.Run(place+"/"+role, func(t *testing.T) {
				l, old, _ := two(t, place)
				if role == "apply" {
					broken(t, l.root, role, "apply.before-commit", "kill")
				} else {
					_, err := l.run(runtime.ApplyOptions{}, nil)
					must(t, err)
					broken(t, l.root, role, "apply.undo-mid-write", "kill")
				}
				edited := map[string]string{}
				for _, name := range []string{"a", "d/x", "n/deep/f"} { // of an undo, some are back already
					p := filepath.Join(l.from(0), name)
					if data, err := os.ReadFile(p); err == nil && (name == "n/deep/f" || strings.ToUpper(string(data)) == string(data)) {
						must(t, os.WriteFile(p, []byte("the owner's "+name), 0o644))
						edited[name] = "the owner's " + name
					}
				}
				if len(edited) == 0 {
					t.Fatal("nothing was left to edit")
				}
				_, err := Settle(l.home())
				must(t, err)
				got := map[string]string{}
				must(t, filepath.WalkDir(l.from(0), func(p string, e os.DirEntry, err error) error {
					if err != nil || e.IsDir() {
						return err
					}
					data, err := os.ReadFile(p)
					rel, _ := filepath.Rel(l.from(0), p)
					got[rel] = string(data)
					return err
				}))
				for name, text := range edited {
					if got[name] != text && got[name+".agentbox-0"] != text {
						t.Errorf("the edit of %s is lost: %q", name, got)
					}
				}
				for name, text := range map[string]string{"a": "a", "d/x": "x", "gone/z": "z"} {
					if !strings.HasPrefix(got[name], text) {
						t.Errorf("%s is %q, was %q", name, got[name], text)
					}
				}
				same(t, "the other directory", files(t, l.from(1)), old[1])
			})
		}
	}
}

// TestUndoBroken breaks an undo of two workspaces: it is finished, or was not begun.
func TestUndoBroken(t *testing.T) {
	for place := range places {
		for point, back := range map[string]bool{
			"apply.undo-before-write": false, "apply.undo-mid-write": true, "apply.after-rollback": true,
		} {
			for _, action := range []string{"kill", "error"} {
				t.Run(place+"/"+point+"/"+action, func(t *testing.T) {
					l, old, new := two(t, place)
					_, err := l.run(runtime.ApplyOptions{}, nil)
					must(t, err)
					broken(t, l.root, "undo", point, action)
					_, err = Settle(l.home())
					must(t, err)
					want := new
					if back {
						want = old
					}
					for i := range l.n {
						same(t, "the directory", files(t, l.from(i)), want[i])
						if left, _ := filepath.Glob(l.from(i) + "/.agentbox-*"); len(left) > 0 {
							t.Errorf("left: %q", left)
						}
					}
					if !back {
						_, err := Undo(t.Context(), l.home(), false)
						must(t, err)
					}
					for i := range l.n {
						same(t, "the directory in the end", files(t, l.from(i)), old[i])
						l.inside(t, i, func(dir string) { same(t, "the sandbox", files(t, dir), new[i]) })
					}
				})
			}
		}
	}
}
