//go:build failpoint

package volume

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/agentbox/agentbox/overlay"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/internal/apply"
)

// points are the instants at which an apply is broken, and whether the original
// has the new state afterwards.
var points = []struct {
	name    string
	applied bool
}{
	{"apply.before-stage", false},
	{"apply.after-copy", false},
	{"apply.after-stage", false},
	{"apply.before-write", false},
	{"apply.first-write", false},
	{"apply.mid-write", false},
	{"apply.last-write", false},
	{"apply.after-dirs", false},
	{"apply.before-commit", false},
	{"apply.after-commit", true},
	{"apply.after-upper", true},
	{"apply.before-end", true},
}

// broken runs a role in another process, and breaks it at a point.
func broken(t *testing.T, root, role, point, action string) error {
	t.Helper()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), "VOLUME_TEST_ROLE="+role, "VOLUME_TEST_ROOT="+root,
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
	return err
}

// TestApplyBroken breaks an apply at every point: after the next command the
// original is all old or all new, and the volume shows what it showed.
func TestApplyBroken(t *testing.T) {
	ctx := context.Background()
	for place := range places {
		for _, p := range points {
			for _, action := range []string{"kill", "error", "enospc"} {
				t.Run(place+"/"+p.name+"/"+action, func(t *testing.T) {
					b := newBench(t, place)
					old, merged := b.scene(t)
					_ = broken(t, b.root, "apply", p.name, action)
					if action != "kill" && !p.applied {
						equalLook(t, "the original at once", old, look(t, b.from))
					}
					must(t, b.Sweep(ctx))
					want := old
					if p.applied {
						want = merged
					}
					equalLook(t, "the original", want, look(t, b.from))
					equalLook(t, "the volume", merged, b.view(t))
					for _, g := range []string{b.from + "/.agentbox-*", b.path("ws", apply.DirApply)} {
						if left, _ := filepath.Glob(g); len(left) > 0 {
							t.Errorf("left: %q", left)
						}
					}
					if p.applied {
						_, err := b.Apply(ctx, "ws", runtime.ApplyOptions{Undo: true})
						must(t, err)
						equalLook(t, "the original after an undo", undone(place, old), undone(place, look(t, b.from)))
					} else {
						_, err := b.Apply(ctx, "ws", runtime.ApplyOptions{Owners: true})
						must(t, err)
						equalLook(t, "the original after another apply", merged, look(t, b.from))
					}
				})
			}
		}
	}
}

// TestRollbackBroken kills the next command, too.
func TestRollbackBroken(t *testing.T) {
	for place := range places {
		t.Run(place, func(t *testing.T) {
			b := newBench(t, place)
			old, merged := b.scene(t)
			_ = broken(t, b.root, "apply", "apply.last-write", "kill")
			_ = broken(t, b.root, "settle", "apply.after-rollback", "kill")
			must(t, b.Sweep(context.Background()))
			equalLook(t, "the original", old, look(t, b.from))
			equalLook(t, "the volume", merged, b.view(t))
		})
	}
}

// TestUndoBroken breaks an undo: it is finished, or was not begun.
func TestUndoBroken(t *testing.T) {
	ctx := context.Background()
	for place := range places {
		for point, back := range map[string]bool{
			"apply.undo-before-write": false, "apply.undo-mid-write": true, "apply.after-rollback": true,
		} {
			for _, action := range []string{"kill", "error"} {
				t.Run(place+"/"+point+"/"+action, func(t *testing.T) {
					b := newBench(t, place)
					old, merged := b.scene(t)
					_, err := b.Apply(ctx, "ws", runtime.ApplyOptions{Owners: true})
					must(t, err)
					_ = broken(t, b.root, "undo", point, action)
					must(t, b.Sweep(ctx))
					want := merged
					if back {
						want = old
					}
					equalLook(t, "the original", undone(place, want), undone(place, look(t, b.from)))
					equalLook(t, "the volume", merged, b.view(t))
					if !back {
						_, err := b.Apply(ctx, "ws", runtime.ApplyOptions{Undo: true})
						must(t, err)
						equalLook(t, "the original after another undo", undone(place, old),
							undone(place, look(t, b.from)))
					}
					if left, _ := filepath.Glob(b.from + "/.agentbox-*"); len(left) > 0 {
						t.Errorf("left: %q", left)
					}
				})
			}
		}
	}
}

// TestKilledElsewhere kills the other verbs of volumes.
func TestKilledElsewhere(t *testing.T) {
	ctx := context.Background()
	t.Run("create", func(t *testing.T) {
		b := newBench(t, "near")
		_ = broken(t, b.root, "create", "volume.create.before-rename", "kill")
		must(t, b.Sweep(ctx))
		if list, err := os.ReadDir(b.dir); err != nil || len(list) > 0 {
			t.Errorf("left: %v, %v", list, err)
		}
	})
	t.Run("remove", func(t *testing.T) {
		b := newBench(t, "near")
		must(t, b.Volumes.Create(ctx, "ws", CreateOptions{}))
		_ = broken(t, b.root, "remove", "volume.remove.after-rename", "kill")
		must(t, b.Sweep(ctx))
		if list, err := os.ReadDir(b.dir); err != nil || len(list) > 0 {
			t.Errorf("left: %v, %v", list, err)
		}
	})
	for point, mounts := range map[string]int{"volume.mount.after-mount": 0, "volume.mount.after-refs": 1} {
		t.Run(point, func(t *testing.T) {
			b := newBench(t, "near")
			b.create(t)
			_ = broken(t, b.root, "mount", point, "kill")
			v, err := b.Volumes.Inspect(ctx, "ws")
			must(t, err)
			if v.Mounts != mounts || v.Mountpoint == "" {
				t.Errorf("%+v", v)
			}
			p, err := b.Volumes.Mount(ctx, "ws", "next")
			must(t, err)
			must(t, os.WriteFile(p+"/f", nil, 0o644))
			must(t, b.Unmount(ctx, "ws", "next"))
			must(t, b.Unmount(ctx, "ws", "child"))
			if on, err := overlay.Mounted(b.path("ws", "merged")); on || err != nil {
				t.Errorf("still mounted: %v, %v", on, err)
			}
		})
	}
	t.Run("unmount", func(t *testing.T) {
		b := newBench(t, "near")
		b.create(t)
		_, err := b.Volumes.Mount(ctx, "ws", "child")
		must(t, err)
		_ = broken(t, b.root, "unmount", "volume.unmount.before-refs", "kill")
		must(t, b.Unmount(ctx, "ws", "child"))
		must(t, b.Stop(ctx, "ws", runtime.StopOptions{}))
	})
}
