package worktree

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
	"pgregory.net/rapid"

	"github.com/agentbox/agentbox/internal/thorough"
	"github.com/agentbox/agentbox/overlay"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/store"
)

// scribble does random things to a directory.
type scribble struct {
	rand *rand.Rand
	root string
}

func (s *scribble) path() string {
	p := s.root
	for range 1 + s.rand.IntN(3) {
		p = filepath.Join(p, []string{"a", "b", "c", "\xff", "d e"}[s.rand.IntN(5)])
	}
	return p
}

func (s *scribble) data() []byte {
	return bytes.Repeat([]byte{byte(s.rand.IntN(4)), byte(s.rand.IntN(4))}, s.rand.IntN(9000))
}

func (s *scribble) write(p string, flags int, at int64) {
	f, err := os.OpenFile(p, os.O_WRONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK|flags, os.FileMode(s.rand.IntN(0o1000)))
	if err == nil {
		_, _ = f.WriteAt(s.data(), at)
		_ = f.Close()
	}
}

// run does operations, of which many fail for good reasons.
func (s *scribble) run(t *rapid.T, name string, most int) {
	for _, seed := range rapid.SliceOfN(rapid.Uint64(), most/4, most).Draw(t, name) {
		s.rand = rand.New(rand.NewPCG(seed, 0))
		p := s.path()
		switch s.rand.IntN(12) {
		case 0, 1:
			_ = os.Mkdir(p, os.FileMode(s.rand.IntN(0o1000)))
		case 2, 3:
			s.write(p, os.O_CREATE|os.O_TRUNC, 0)
		case 4:
			s.write(p, 0, int64(s.rand.IntN(20))*4096)
		case 5:
			if info, err := os.Stat(filepath.Dir(p)); err == nil && info.IsDir() { // RemoveAll waits for a fifo
				_ = os.RemoveAll(p)
			}
		case 6:
			_ = os.Rename(p, s.path())
		case 7:
			_ = os.Link(p, s.path())
		case 8:
			_ = os.Symlink([]string{"a", "gone"}[s.rand.IntN(2)], p)
		case 9:
			_ = unix.Mknod(p, []uint32{unix.S_IFIFO, unix.S_IFCHR}[s.rand.IntN(2)]|0o600, 0)
		case 10:
			_ = unix.Lsetxattr(p, "trusted.x", s.data()[:0], 0)
			_ = unix.Lchown(p, s.rand.IntN(3), s.rand.IntN(3))
		case 11:
			_ = os.Truncate(p, int64(s.rand.IntN(100_000)))
			ns := []unix.Timespec{{Sec: 1}, {Sec: int64(s.rand.IntN(5)), Nsec: int64(s.rand.IntN(1e9))}}
			_ = unix.UtimesNanoAt(unix.AT_FDCWD, p, ns, unix.AT_SYMLINK_NOFOLLOW)
		}
	}
}

// dying ends a call that asks often enough whether it is to end.
type dying struct {
	context.Context
	left *int
}

func (d dying) Err() error {
	if *d.left--; *d.left < 0 {
		return context.Canceled
	}
	return d.Context.Err()
}

// bench is one sandbox with one tree.
type bench struct {
	t    *rapid.T
	home Home
	dir  string
}

func (b *bench) ok(err error) {
	if err != nil {
		b.t.Helper()
		b.t.Fatal(err)
	}
}

func (b *bench) tree() *Tree { return &Tree{Dir: b.dir, Home: b.home} }

// checkpoint makes a checkpoint of the tree, which becomes its file cache if remember is set.
func (b *bench) checkpoint(t *Tree, ahead, remember bool) *store.Reader {
	b.t.Helper()
	ctx := context.Background()
	draft, err := b.home.Store.BeginCheckpoint(ctx, store.Checkpoint{
		ID: store.NewID(), SandboxID: b.home.Sandbox, SandboxName: b.home.Sandbox, Kind: store.KindFiles,
		Trigger: "manual", ImageDigest: "sha256:1", Spec: json.RawMessage(`{}`),
	})
	b.ok(err)
	if t.Know(ctx); ahead {
		b.ok(t.ReadAhead(ctx, filepath.Join(draft.Dir(), "early"), draft.Sink(), false))
	}
	b.ok(t.Capture(ctx, draft.Sink(), overlay.CollectOptions{Base: draft.ID()}))
	b.ok(t.Put(ctx, draft, nil))
	row, err := draft.Commit(ctx, store.Manifest{Status: string(runtime.Exited)})
	b.ok(err)
	b.ok(draft.Close())
	if remember {
		b.ok(t.Remember())
	}
	r, err := b.home.Store.OpenCheckpoint(ctx, row.ID)
	b.ok(err)
	return r
}

// is fails unless the tree is exactly what a checkpoint has.
func (b *bench) is(r *store.Reader) {
	b.t.Helper()
	list, err := r.Tree(context.Background(), 0)
	b.ok(err)
	diffs, err := overlay.Verify(context.Background(), b.dir, list, overlay.CompareOptions{})
	b.ok(errors.Join(err, list.Close()))
	if len(diffs) > 0 {
		b.t.Fatalf("the tree differs: %v", diffs)
	}
}

// TestBecomes: between random states, whatever way a change goes, the tree is exactly what it
// is to become, or exactly what it was.
func TestBecomes(t *testing.T) {
	thorough.Checks(t, 60)
	ctx := context.Background()
	root := t.TempDir()
	st, err := store.Open(ctx, filepath.Join(root, "store"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = st.Close() })
	collection := map[string]int{}
	round := 0
	rapid.Check(t, func(rt *rapid.T) {
		round++
		dir := filepath.Join(root, fmt.Sprint(round))
		if err := os.Mkdir(dir, 0o755); err != nil {
			rt.Fatal(err)
		}
		b := &bench{rt, Home{Store: st, Sandbox: store.NewID(), Log: slog.New(slog.DiscardHandler)}, dir}
		sb := store.Sandbox{
			ID: b.home.Sandbox, Name: "s" + fmt.Sprint(round), Backend: "oci", Spec: json.RawMessage(`{}`),
		}
		b.ok(st.PutSandbox(ctx, sb))
		is := func(name string) bool { return rapid.Bool().Draw(rt, name) }

		// The target is a checkpoint of an earlier state.
		s := &scribble{root: dir}
		s.run(rt, "then", 40)
		then := b.checkpoint(b.tree(), is("read ahead"), is("then known"))
		defer then.Close()
		s.run(rt, "now", 12)
		target := Target{Reader: then}

		// The way back is a checkpoint of the present state, or the displaced files.
		tree, live := b.tree(), is("live")
		now := b.checkpoint(tree, is("read ahead again"), is("now known"))
		defer now.Close()
		if is("looked at") {
			scratch := filepath.Join(root, "scratch", fmt.Sprint(round))
			b.ok(os.MkdirAll(scratch, 0o700))
			c, err := b.tree().Plan(ctx, target, PlanOptions{Scratch: scratch})
			b.ok(err)
			b.ok(c.Close())
		}
		way, c := "plan", (*Change)(nil)
		switch rapid.IntRange(0, 2).Draw(rt, "way") {
		case 0:
			way, live, tree = "displace", false, b.tree()
			c, err = tree.PlanDisplacing(ctx, target, is("paranoid plan"))
			b.ok(err)
		case 1:
			way, c = "force", tree.Change(target)
		}
		if c == nil {
			c, err = tree.Plan(ctx, target, PlanOptions{Stale: is("stale"), Paranoid: is("paranoid plan")})
			b.ok(err)
			b.ok(c.Stage(ctx))
		}
		defer c.Close()
		collection[way]++
		b.is(now)
		began := false
		if way != "force" {
			b.ok(c.Begin(func(bool) error { began = true; return nil }))
			if !began {
				rt.Fatal("Begin has not recorded the change")
			}
		}

		// It may stop anywhere.
		left := 1 << 30
		if is("stops") {
			left = rapid.IntRange(0, 12).Draw(rt, "stops after")
		}
		do := c.Apply
		if way == "force" {
			do = c.Force
		}
		err := do(dying{ctx, &left})
		if err == nil && live { // processes change files as they die
			s.run(rt, "death", 2)
		}
		if err == nil {
			err = c.Verify(ctx, VerifyOptions{Still: !live, Paranoid: is("paranoid proof")})
			b.ok(err)
			c.Learn()
			b.is(then)
			collection["done"]++
		} else {
			collection["stopped"]++
		}
		switch {
		case err == nil && is("reverts although it is done"), err != nil && is("reverts"):
			b.ok(c.Revert(ctx, Target{Reader: now}))
			b.is(now)
			collection["reverted"]++
		case err != nil: // another process finishes it
			data, err := json.Marshal(tree)
			b.ok(err)
			again := &Tree{}
			b.ok(json.Unmarshal(data, again))
			again.Home = b.home
			if untouched, err := again.Untouched(); untouched || err != nil {
				rt.Fatalf("untouched: %v, %v", untouched, err)
			}
			c := again.Change(target)
			b.ok(c.Force(ctx))
			b.ok(c.Verify(ctx, VerifyOptions{}))
			b.is(then)
			b.ok(c.Close())
			collection["finished"]++
		}
		b.ok(c.Close())
		b.ok(tree.Clear(true))
		if beside, err := filepath.Glob(dir + ".*"); err != nil || len(beside) > 0 {
			rt.Fatalf("left beside the tree: %q, %v", beside, err)
		}

		// What the file cache says is true.
		last := b.checkpoint(b.tree(), false, true)
		b.is(last)
		b.ok(last.Close())
	})
	for _, what := range []string{"plan", "displace", "force", "done", "stopped", "reverted", "finished"} {
		if collection[what] == 0 && !t.Failed() {
			t.Errorf("never tried: %s", what)
		}
	}
}
