package volume

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/criu/stage"
	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/overlay"
	"github.com/agentbox/agentbox/runtime"
)

func TestNames(t *testing.T) {
	for name, ok := range map[string]bool{
		"ws": true, "0a": true, "a.b_c-d": true, strings.Repeat("f", 64): true, strings.Repeat("a", 128): true,
		"": false, ".": false, "..": false, ".new-1": false, "a/b": false, "a\x00": false, "-a": false,
		strings.Repeat("a", 129): false, "é": false, "a\n": false,
	} {
		if err := ValidName(name); (err == nil) != ok {
			t.Errorf("%q: %v", name, err)
		}
	}
}

func TestCreate(t *testing.T) {
	ctx := context.Background()
	b := newBench(t, "near")
	link := t.TempDir() + "/link"
	must(t, os.Symlink(b.from, link))
	must(t, os.Symlink(b.root, link+"2"))
	for from, want := range map[string]error{
		"relative": fault.ErrInvalid, b.from + "/missing": fault.ErrNotFound, "/": fault.ErrDenied,
		b.root:     fault.ErrDenied,
		link + "2": fault.ErrDenied, b.root + "/..": fault.ErrDenied, "/etc/hostname": fault.ErrInvalid,
	} {
		if err := b.Volumes.Create(ctx, "no", CreateOptions{From: from}); !errors.Is(err, want) {
			t.Errorf("from %s: %v, want %v", from, err, want)
		}
	}
	must(t, os.Chmod(b.from, 0o2751))
	must(t, os.Chown(b.from, 7, 8))
	must(t, b.Volumes.Create(ctx, "ws", CreateOptions{From: link}))
	v, err := b.Volumes.Inspect(ctx, "ws")
	must(t, err)
	if v.From != b.from || len(v.ID) != 32 {
		t.Errorf("%+v", v)
	}
	equalLook(t, "a new volume", look(t, b.from), b.view(t))
	must(t, b.Volumes.Create(ctx, "ws", CreateOptions{From: b.from})) // again
	if err := b.Volumes.Create(ctx, "ws", CreateOptions{}); !errors.Is(err, fault.ErrExists) {
		t.Errorf("another of that name: %v", err)
	}
	if byID, err := b.Volumes.Inspect(ctx, v.ID); err != nil || byID.Name != "ws" {
		t.Errorf("by id: %+v, %v", byID, err)
	}
	must(t, b.Volumes.Remove(ctx, "ws"))
	must(t, b.Volumes.Remove(ctx, "ws")) // again
	must(t, b.Volumes.Create(ctx, "ws", CreateOptions{From: b.from}))
	if again, err := b.Volumes.Inspect(ctx, "ws"); err != nil || again.ID == v.ID {
		t.Errorf("made anew: %+v, %v", again, err)
	}
	must(t, b.Volumes.Create(ctx, "ro", CreateOptions{From: b.from, ReadOnly: true}))
	must(t, b.With(ctx, "ro", func(p string) error {
		if err := os.WriteFile(p+"/f", nil, 0o600); !errors.Is(err, unix.EROFS) {
			t.Errorf("write to a read-only volume: %v", err)
		}
		return nil
	}))
}

// TestReferences has several callers, one of them twice.
func TestReferences(t *testing.T) {
	ctx := context.Background()
	b := newBench(t, "near")
	b.create(t)
	mounted := func(want bool) {
		t.Helper()
		if on, err := overlay.Mounted(b.path("ws", "merged")); on != want || err != nil {
			t.Fatalf("mounted: %v, %v; want %v", on, err, want)
		}
	}
	for _, id := range []string{"a", "b", "a"} {
		_, err := b.Volumes.Mount(ctx, "ws", id)
		must(t, err)
	}
	must(t, b.Unmount(ctx, "ws", "a"))
	must(t, b.Unmount(ctx, "ws", "b"))
	must(t, b.Unmount(ctx, "ws", "b"))
	must(t, b.Unmount(ctx, "ws", "stranger"))
	mounted(true)
	if err := b.Stop(ctx, "ws", runtime.StopOptions{}); !errors.Is(err, fault.ErrState) {
		t.Errorf("stop in use: %v", err)
	}
	if err := b.Volumes.Remove(ctx, "ws"); !errors.Is(err, fault.ErrState) {
		t.Errorf("remove in use: %v", err)
	}
	must(t, b.Unmount(ctx, "ws", "a"))
	mounted(false)

	// Callers of another boot do not count, nor do those of dead processes and those that no
	// container came to use.
	_, err := b.Volumes.Mount(ctx, "ws", "old")
	must(t, err)
	have, err := b.refs("ws")
	must(t, err)
	have.Boot = "another"
	must(t, b.putRefs("ws", have))
	must(t, b.Stop(ctx, "ws", runtime.StopOptions{}))
	mounted(false)
	_, err = b.mountFor(ctx, "ws", ref{ID: "dead", Pid: os.Getpid(), Start: 1})
	must(t, err)
	must(t, b.Stop(ctx, "ws", runtime.StopOptions{}))
	mounted(false)
	_, err = b.Volumes.Mount(ctx, "ws", "lost")
	must(t, err)
	have, err = b.refs("ws")
	must(t, err)
	have.List[0].Since = time.Now().Add(-2 * young)
	must(t, b.putRefs("ws", have))
	must(t, b.Stop(ctx, "ws", runtime.StopOptions{}))
	mounted(false)
}

// TestKernelKnowsBetter has a user of the volume in a mount namespace of its own, which
// refs.json does not list.
func TestKernelKnowsBetter(t *testing.T) {
	ctx := context.Background()
	b := newBench(t, "near")
	rec := b.create(t)
	p, err := b.Volumes.Mount(ctx, "ws", "x")
	must(t, err)
	where := t.TempDir()
	cmd := exec.Command("unshare", "-m", "sh", "-c", "mount --bind "+p+" "+where+" && echo ready && read line")
	in, err := cmd.StdinPipe()
	must(t, err)
	out, err := cmd.StdoutPipe()
	must(t, err)
	must(t, cmd.Start())
	_, err = out.Read(make([]byte, 10))
	must(t, err)
	must(t, b.Unmount(ctx, "ws", "x"))
	c, err := b.Inspect(ctx, rec.ID)
	must(t, err)
	if c.Status != runtime.Running || c.Busy == "" {
		t.Errorf("%+v", c)
	}
	if err := b.Stop(ctx, "ws", runtime.StopOptions{}); !errors.Is(err, fault.ErrState) {
		t.Errorf("stop: %v", err)
	}
	if _, err := b.Volumes.Mount(ctx, "ws", "y"); !errors.Is(err, fault.ErrState) {
		t.Errorf("a second overlay over one upperdir: %v", err)
	}
	if err := b.Pause(ctx, rec.ID); !errors.Is(err, fault.ErrState) ||
		!strings.Contains(err.Error(), "in no container") {
		t.Errorf("pause of what no engine knows: %v", err)
	}
	if b.isPaused("ws") {
		t.Error("it stays paused")
	}
	must(t, in.Close())
	_ = cmd.Wait()
	must(t, b.Stop(ctx, "ws", runtime.StopOptions{}))
}

// TestHeld has Mount wait for a restore and for a checkpoint.
func TestHeld(t *testing.T) {
	ctx := context.Background()
	b := newBench(t, "near")
	rec := b.create(t)
	must(t, stage.At(b.run, rec.ID).BlockCreate())
	short, cancel := context.WithTimeout(ctx, 50*time.Millisecond)
	defer cancel()
	if _, err := b.Volumes.Mount(short, "ws", "x"); !errors.Is(err, fault.ErrBusy) {
		t.Errorf("mount while held: %v", err)
	}
	b.recover = func(context.Context) error { return stage.At(b.run, rec.ID).Clear() }
	_, err := b.Volumes.Mount(ctx, "ws", "x")
	must(t, err)
	b.users = []User{
		{ID: "1", Name: "one", Pid: os.Getpid(), Mounts: 1}, {ID: "2", Name: "two", Mounts: 1, Paused: true},
	}
	must(t, b.Pause(ctx, rec.ID))
	must(t, b.Pause(ctx, rec.ID))
	if c, err := b.Inspect(ctx, rec.ID); err != nil || c.Status != runtime.Paused ||
		!strings.Contains(c.Busy, "2 containers (one, two)") {
		t.Errorf("%+v, %v", c, err)
	}
	got := make(chan error, 1)
	go func() { _, err := b.Volumes.Mount(ctx, "ws", "y"); got <- err }()
	select {
	case err := <-got:
		t.Fatalf("mount while paused: %v", err)
	case <-time.After(50 * time.Millisecond):
	}
	must(t, b.Unpause(ctx, rec.ID))
	must(t, <-got)
	if b.users[0].Paused || !b.users[1].Paused {
		t.Errorf("who was paused stays so: %+v", b.users)
	}
	must(t, b.Unpause(ctx, rec.ID))
	b.users = nil
	must(t, b.Unmount(ctx, "ws", "x"))
	must(t, b.Unmount(ctx, "ws", "y"))
	if err := b.Pause(ctx, rec.ID); !errors.Is(err, fault.ErrState) {
		t.Errorf("pause of a volume that nobody uses: %v", err)
	}
	if b.isPaused("ws") {
		t.Error("it stays paused")
	}
}

func TestUnescape(t *testing.T) {
	for in, want := range map[string]string{
		`a\040b`: "a b", `\134`: `\`, `a\`: `a\`, `\9`: `\9`, `\x41z`: `\x41z`, "plain": "plain",
	} {
		if got := unescape(in); got != want {
			t.Errorf("%q: %q", in, got)
		}
	}
}
