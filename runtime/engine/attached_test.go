package engine_test

import (
	"bytes"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"log"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-containerregistry/pkg/registry"
	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/internal/hostfile"
	"github.com/agentbox/agentbox/policy"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/store"
)

// TestAttachedWords: the actions of hostfile are those of package runtime, which does not
// import it.
func TestAttachedWords(t *testing.T) {
	for word, want := range map[string]string{
		hostfile.Written: runtime.AttachedPut, hostfile.Removed: runtime.AttachedRemoved,
		hostfile.Same: runtime.AttachedSame,
	} {
		if word != want {
			t.Errorf("hostfile says %q, and package runtime %q", word, want)
		}
	}
}

// hosts is a sandbox with files of the host: "state" and "plan" in two directories, and
// "later", which does not exist at the checkpoint.
type hosts struct {
	*rig
	t     *testing.T
	sb    runtime.Sandbox
	paths []string
	then  runtime.Checkpoint
}

func newHosts(t *testing.T, wrap func(runtime.Backend) runtime.Backend, started bool) *hosts {
	t.Helper()
	if wrap == nil {
		wrap = func(under runtime.Backend) runtime.Backend { return &stopping{Backend: under} }
	}
	h := &hosts{rig: newRig(t, wrap), t: t}
	sb, err := h.Create(ctx, runtime.CreateRequest{Spec: runtime.Spec{
		Name: "box", Image: "base", Args: []string{"sleep", "1000"},
		Network: runtime.Network{Mode: runtime.NetworkNone},
	}})
	if err == nil && started {
		_, err = h.Start(ctx, sb.ID, nil)
	}
	h.sb = sb
	a, b := t.TempDir(), t.TempDir()
	h.paths = []string{filepath.Join(a, "state"), filepath.Join(b, "plan"), filepath.Join(a, "later")}
	h.must(err, os.WriteFile(h.paths[0], []byte("state then"), 0o640),
		os.WriteFile(h.paths[1], []byte("plan then"), 0o600), os.WriteFile(h.inside(), []byte("then"), 0o600))
	h.then, err = h.Checkpoint(ctx, "box", runtime.CheckpointOptions{Attach: h.paths, FilesOnly: true})
	h.must(err)
	h.change()
	return h
}

func (h *hosts) inside() string { return filepath.Join(h.sb.Upperdir, "f") }

func (h *hosts) must(list ...error) {
	h.t.Helper()
	for _, err := range list {
		if err != nil {
			h.t.Fatal(err)
		}
	}
}

// change changes all files to their state "now".
func (h *hosts) change() {
	h.t.Helper()
	h.must(os.WriteFile(h.paths[0], []byte("state now"), 0o640), os.Chmod(h.paths[0], 0o600), os.RemoveAll(h.paths[1]),
		os.WriteFile(h.paths[2], []byte("later now"), 0o644), os.WriteFile(h.inside(), []byte("now"), 0o600))
}

// are checks the state of all files: those of the host, and of the sandbox.
func (h *hosts) are(host, inside string) {
	h.t.Helper()
	want := map[string][]string{
		"then": {"state then 640", "plan then 600", ""}, "now": {"state now 600", "", "later now 644"},
	}[host]
	for i, path := range h.paths {
		got := ""
		if info, err := os.Lstat(path); err == nil {
			text, _ := os.ReadFile(path)
			got = fmt.Sprintf("%s %o", text, info.Mode())
		}
		if got != want[i] {
			h.t.Errorf("%s is %q, want %q", path, got, want[i])
		}
		list, err := filepath.Glob(filepath.Join(filepath.Dir(path), ".*"))
		if h.must(err); len(list) > 0 {
			h.t.Errorf("left beside it: %q", list)
		}
	}
	if text, err := os.ReadFile(h.inside()); string(text) != inside {
		h.t.Errorf("in the sandbox is %q, want %q (%v)", text, inside, err)
	}
}

// settled checks that nothing is left to recover.
func (h *hosts) settled() {
	h.t.Helper()
	if left, err := h.store.Intents(ctx); err != nil || len(left) > 0 {
		h.t.Errorf("left in the journal: %+v, %v", left, err)
	}
}

func actions(list []runtime.RestoredFile) (out []string) {
	for _, f := range list {
		out = append(out, f.Action)
	}
	return out
}

// TestAttached: a restore, by each strategy, puts host files back, its undo brings back their
// previous contents, and the plan shows what is done.
func TestAttached(t *testing.T) {
	put := []string{"put", "put", "removed"}
	for _, opts := range []runtime.RestoreOptions{
		{}, {FilesOnly: true}, {NoUndo: true}, {Strategy: "auto"}, {Strategy: "recreate"}, {Verify: true},
	} {
		for _, started := range []bool{true, false} {
			h := newHosts(t, nil, started)
			if d := cmp.Diff([]runtime.AttachedFile{
				{Path: h.paths[0], Size: 10}, {Path: h.paths[1], Size: 9}, {Path: h.paths[2], Absent: true},
			}, h.then.Attached); d != "" {
				t.Error(d)
			}
			if list, err := h.Checkpoints(ctx, runtime.CheckpointFilter{}); err != nil ||
				!cmp.Equal(list[0].Attached, h.then.Attached) {
				t.Errorf("listed: %+v, %v", list, err)
			}
			plan, err := h.PlanRestore(ctx, "box", opts)
			if h.must(err); !slices.Equal(actions(plan.Attached), put) {
				t.Errorf("planned: %+v", plan.Attached)
			}
			h.are("now", "now")
			out, err := h.Restore(ctx, "box", opts)
			if err != nil {
				t.Fatalf("%+v: %v", opts, err)
			}
			if !slices.Equal(actions(out.Attached), put) || len(out.Warnings) > 0 || (out.Undo == "") != opts.NoUndo {
				t.Errorf("%+v: %+v", opts, out)
			}
			h.are("then", "then")
			h.must(h.VerifyCheckpoint(ctx, h.then.ID))
			if again, err := h.Restore(ctx, "box", runtime.RestoreOptions{
				Checkpoint: h.then.ID, NoUndo: true,
			}); err != nil || !slices.Equal(actions(again.Attached), []string{"same", "same", "same"}) {
				t.Errorf("again: %+v, %v", again.Attached, err)
			}
			if !opts.NoUndo {
				_, err := h.Restore(ctx, "box", runtime.RestoreOptions{Undo: true})
				h.must(err)
				h.are("now", "now")
				_, err = h.Restore(ctx, "box", runtime.RestoreOptions{Undo: true})
				h.must(err)
				h.are("then", "then")
			}
			h.settled()
		}
	}
}

// TestAttachedRefused: foreseeable failures are found before anything ends.
func TestAttachedRefused(t *testing.T) {
	h := newHosts(t, nil, true)
	before, err := h.Sandbox(ctx, "box")
	h.must(err)
	for what, in := range map[string]struct {
		spoil func() error
		mend  func() error
		says  string
		is    error
	}{
		"a directory": {func() error { return os.Mkdir(h.paths[1], 0o700) }, func() error {
			return os.Remove(h.paths[1])
		}, "a directory", runtime.ErrState},
		"a symlink": {func() error { return os.Symlink(h.paths[0], h.paths[1]) }, func() error {
			return os.Remove(h.paths[1])
		}, "a symlink", runtime.ErrState},
		"hard links": {func() error { return os.Link(h.paths[0], h.paths[0]+"2") }, func() error {
			return os.Remove(h.paths[0] + "2")
		}, "2 hard links", runtime.ErrState},
		"no directory": {func() error { return os.Rename(filepath.Dir(h.paths[1]), filepath.Dir(h.paths[1])+"x") },
			func() error { return os.Rename(filepath.Dir(h.paths[1])+"x", filepath.Dir(h.paths[1])) },
			"no such file", os.ErrNotExist},
		"read-only": {func() error {
			d := filepath.Dir(h.paths[1])
			return errors.Join(unix.Mount(d, d, "", unix.MS_BIND, ""),
				unix.Mount("", d, "", unix.MS_REMOUNT|unix.MS_BIND|unix.MS_RDONLY, ""))
		}, func() error { return unix.Unmount(filepath.Dir(h.paths[1]), unix.MNT_DETACH) }, "read-only", unix.EROFS},
	} {
		h.must(in.spoil())
		for _, strategy := range []string{"", "auto", "recreate"} {
			_, err := h.Restore(ctx, "box", runtime.RestoreOptions{Strategy: strategy})
			if !errors.Is(err, in.is) || !strings.Contains(err.Error(), in.says) ||
				!strings.Contains(fmt.Sprint(fault.Hint(err)), "--no-attached") {
				t.Errorf("%s, strategy %q: %v %q", what, strategy, err, fault.Hint(err))
			}
		}
		if now, err := h.Sandbox(ctx, "box"); err != nil || now.Pid != before.Pid || now.Status != runtime.Running ||
			!now.Started.Equal(before.Started) {
			t.Errorf("%s: %+v, %v", what, now, err)
		}
		h.must(in.mend())
		h.are("now", "now")
		h.settled()
	}
	out, err := h.Restore(ctx, "box", runtime.RestoreOptions{NoAttached: true})
	if h.must(err); !slices.Equal(actions(out.Attached), []string{"left", "left", "left"}) ||
		!strings.Contains(fmt.Sprint(out.Warnings), "host files of the checkpoint (3)") {
		t.Errorf("%+v", out)
	}
	h.are("now", "then")
	_, err = h.Restore(ctx, "box", runtime.RestoreOptions{Undo: true})
	h.must(err)
	h.are("now", "now")
}

func TestAttachInvalid(t *testing.T) {
	h := newHosts(t, nil, false)
	dir := t.TempDir()
	at := func(name string) string { return filepath.Join(dir, name) }
	h.must(os.WriteFile(at("f"), nil, 0o600), os.Symlink("f", at("link")), os.Symlink(dir, at("dir")),
		os.WriteFile(at("a"), nil, 0o600), os.Link(at("a"), at("b")),
		unix.Mkfifo(at("fifo"), 0o600), os.WriteFile(at("large"), nil, 0o600),
		os.Truncate(at("large"), store.MaxAttached+1))
	var many []string
	for i := range store.MaxAttachedFiles + 1 {
		many = append(many, at(fmt.Sprint("many", i)))
	}
	for says, paths := range map[string][]string{
		"absolute path": {"f"}, "given twice": {at("f"), at("dir/f")}, "a symlink": {at("link")}, "a directory": {dir},
		"2 hard links": {at("a")},
		"a fifo":       {at("fifo")}, "at most 67108864": {at("large")}, "at most 32": many,
		"beneath /proc": {"/proc/self/status"}, "beneath /dev": {"/dev/null"},
		"beneath " + h.root: {filepath.Join(h.root, "state.db")}, "beneath /sys": {"/sys/power/state"},
		"its directory": {at("none/f")},
	} {
		before, err := h.store.Checkpoints(ctx, store.Filter{})
		h.must(err)
		_, err = h.Checkpoint(ctx, "box", runtime.CheckpointOptions{Attach: paths})
		if err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%q: %v", paths, err)
		}
		if after, err := h.store.Checkpoints(ctx, store.Filter{}); err != nil || len(after) != len(before) {
			t.Errorf("%q: %d checkpoints, and were %d: %v", paths, len(after), len(before), err)
		}
	}
	// A path through a symlink is resolved once.
	c, err := h.Checkpoint(ctx, "box", runtime.CheckpointOptions{Attach: []string{at("dir/f"), at("none")}})
	if h.must(err); c.Attached[0].Path != at("f") || !c.Attached[1].Absent {
		t.Errorf("%+v", c.Attached)
	}
	c2, err := h.Checkpoint(ctx, "box", runtime.CheckpointOptions{Attach: []string{at("dir/f"), at("none")}})
	if h.must(err); !c2.Unchanged {
		t.Errorf("the same again: %+v", c2)
	}
}

// TestAttachPolicy: a policy judges host files as writable mounts, when they are attached and
// when they are put back.
func TestAttachPolicy(t *testing.T) {
	h := newHosts(t, nil, false)
	dir := t.TempDir()
	p, err := policy.Finder{}.Resolve("p.yaml", []byte("mounts: {read_write: ["+dir+"/in]}\n"))
	h.must(err, os.Mkdir(filepath.Join(dir, "in"), 0o700), os.Mkdir(filepath.Join(dir, "out"), 0o700))
	_, err = h.Create(ctx, runtime.CreateRequest{
		Policy: p, Spec: runtime.Spec{
			Name: "held", Image: "base", Args: []string{"true"}, Network: runtime.Network{Mode: runtime.NetworkNone},
		},
	})
	h.must(err)
	_, err = h.Checkpoint(ctx, "held", runtime.CheckpointOptions{Attach: []string{filepath.Join(dir, "in", "f")}})
	h.must(err)
	h.must(os.Symlink(filepath.Join(dir, "out"), filepath.Join(dir, "in", "away")))
	_, err = h.Checkpoint(ctx, "held",
		runtime.CheckpointOptions{Attach: []string{filepath.Join(dir, "in", "away", "f")}})
	if !errors.Is(err, runtime.ErrDenied) || !strings.Contains(err.Error(), filepath.Join(dir, "out", "f")) {
		t.Errorf("elsewhere: %v", err)
	}
}

// TestAttachedElsewhere has host files put back only on request where the checkpoint was
// made elsewhere, so that its author cannot decide what is written here, and where the
// sandbox was removed, because it has no undo checkpoint.
func TestAttachedElsewhere(t *testing.T) {
	h := newHosts(t, nil, false)
	var archive bytes.Buffer
	h.must(h.ExportCheckpoint(ctx, h.then.ID, &archive, runtime.ExportOptions{}))
	c, err := h.ImportCheckpoint(ctx, &archive, runtime.ImportOptions{Name: "copy"})
	if h.must(err); len(c.Attached) != 3 {
		t.Errorf("%+v", c)
	}
	h.must(h.Remove(ctx, "box", runtime.RemoveOptions{Force: true}))
	for name, why := range map[string]string{"copy": "comes from elsewhere", "box": "made again"} {
		for _, again := range []string{"", why} {
			plan, err := h.PlanRestore(ctx, name, runtime.RestoreOptions{Foreign: true})
			out, e2 := h.Restore(ctx, name, runtime.RestoreOptions{Foreign: true})
			h.must(err, e2)
			left := name == "copy" || again == ""
			if got := strings.Contains(fmt.Sprint(out.Warnings), why) &&
				strings.Contains(fmt.Sprint(plan.Effects), why); got != left {
				t.Errorf("%s: warned %v: %q, %q", name, got, out.Warnings, plan.Effects)
			}
			want := "now"
			if !left {
				want = "then"
			}
			h.sb = out.Sandbox
			h.are(want, "then")
			h.change()
		}
		h.must(h.Remove(ctx, name, runtime.RemoveOptions{Force: true}))
		out, err := h.Restore(ctx, name, runtime.RestoreOptions{Foreign: true, Attached: true})
		h.must(err)
		if h.sb = out.Sandbox; !out.Recreated {
			t.Errorf("%s: %+v", name, out)
		}
		h.are("then", "then")
		h.change()
		list, err := h.Fork(ctx, name, runtime.ForkOptions{Checkpoint: out.Checkpoint.ID})
		if h.must(err); !strings.Contains(fmt.Sprint(list[0].Shared), "host files of the checkpoint (3)") {
			t.Errorf("forked: %+v", list[0].Shared)
		}
		h.are("now", "now")
	}
}

// TestAttachedDamaged: a damaged copy of a host file, or a file that is too large for the undo
// checkpoint, calls a restore off before anything ends: no other strategy would help.
func TestAttachedDamaged(t *testing.T) {
	h := newHosts(t, nil, true)
	random := make([]byte, 200_000)
	_, _ = rand.Read(random)
	h.must(os.WriteFile(h.paths[0], random, 0o600))
	before, err := filepath.Glob(filepath.Join(h.root, "packs/*/*"))
	h.must(err)
	_, err = h.Checkpoint(ctx, "box", runtime.CheckpointOptions{Name: "random", FilesOnly: true, Attach: h.paths[:1]})
	h.must(err)
	after, err := filepath.Glob(filepath.Join(h.root, "packs/*/*"))
	h.must(err)
	for _, pack := range after {
		if !slices.Contains(before, pack) {
			data, err := os.ReadFile(pack)
			h.must(err)
			data[len(data)/2] ^= 1
			h.must(os.WriteFile(pack, data, 0o600))
		}
	}
	h.change()
	pid := func() int {
		sb, err := h.Sandbox(ctx, "box")
		if h.must(err); sb.Status != runtime.Running || sb.Held != "" {
			t.Errorf("%+v", sb)
		}
		return sb.Pid
	}
	was := pid()
	refused := func(name string, is error, says string) {
		t.Helper()
		_, err := h.Restore(ctx, "box", runtime.RestoreOptions{Checkpoint: name, Strategy: runtime.StrategyAuto})
		if !errors.Is(err, is) || !strings.Contains(err.Error(), h.paths[0]+": ") ||
			!strings.Contains(err.Error(), says) || !strings.Contains(fmt.Sprint(fault.Hint(err)), "--no-attached") {
			t.Errorf("%v %q", err, fault.Hint(err))
		}
		if now := pid(); now != was {
			t.Errorf("pid %d, and was %d", now, was)
		}
	}
	refused("random", runtime.ErrCorrupt, "")
	h.are("now", "now")
	h.must(os.Truncate(h.paths[0], store.MaxAttached+1))
	plan, err := h.PlanRestore(ctx, "box", runtime.RestoreOptions{Checkpoint: h.then.ID})
	if !errors.Is(err, runtime.ErrState) || !strings.Contains(fmt.Sprint(fault.Hint(err)), "--no-attached") {
		t.Errorf("planned: %+v, %v", plan.Attached, err)
	}
	refused(h.then.ID, runtime.ErrState, "at most")
	h.settled()
	_, err = h.Restore(ctx, "box", runtime.RestoreOptions{Checkpoint: "random", NoAttached: true})
	h.must(err)
}

// TestAttachedPulled: a pulled checkpoint is foreign too, though its manifest is unchanged.
func TestAttachedPulled(t *testing.T) {
	h := newHosts(t, nil, false)
	server := httptest.NewServer(registry.New(registry.Logger(log.New(io.Discard, "", 0))))
	defer server.Close()
	ref, opts := strings.TrimPrefix(server.URL, "http://")+"/x:y", runtime.RegistryOptions{PlainHTTP: true}
	_, err := h.PushCheckpoint(ctx, h.then.ID, ref, opts)
	h.must(err)
	h.must(h.RemoveCheckpoint(ctx, h.then.ID))
	_, err = h.PullCheckpoint(ctx, ref, opts)
	h.must(err)
	out, err := h.Restore(ctx, "box", runtime.RestoreOptions{Foreign: true})
	if h.must(err); !strings.Contains(fmt.Sprint(out.Warnings), "comes from elsewhere") ||
		!slices.Equal(actions(out.Attached), []string{"left", "left", "left"}) {
		t.Errorf("%+v", out)
	}
	h.are("now", "then")
	_, err = h.Restore(ctx, "box", runtime.RestoreOptions{Foreign: true, Attached: true})
	h.must(err)
	h.are("then", "then")
	_, err = h.Restore(ctx, "box", runtime.RestoreOptions{Undo: true}) // which was made here
	h.must(err)
	h.are("now", "then")
}

// TestAttachedVersion: a checkpoint with host files has a manifest version that an agentbox
// without them refuses as unsupported, not as damaged.
func TestAttachedVersion(t *testing.T) {
	h := newHosts(t, nil, false)
	r, err := h.store.OpenCheckpoint(ctx, h.then.ID)
	h.must(err)
	defer r.Close()
	m := r.Manifest()
	if m.Version != 3 {
		t.Errorf("version %d", m.Version)
	}
	for _, v := range []int{2, store.VersionMessage + 1} {
		m.Version = v
		data, err := m.Encode()
		h.must(err)
		if _, err = store.ParseManifest(data); errors.Is(err, fault.ErrUnsupported) != (v != 2) ||
			errors.Is(err, fault.ErrCorrupt) != (v == 2) {
			t.Errorf("version %d: %v", v, err)
		}
	}
	plain, err := h.Checkpoint(ctx, "box", runtime.CheckpointOptions{})
	h.must(err)
	p, err := h.store.OpenCheckpoint(ctx, plain.ID)
	h.must(err)
	defer p.Close()
	if v := p.Manifest().Version; v != 2 {
		t.Errorf("without any: version %d", v)
	}
}

// TestAttachedReindex: without state.db the manifests still list the host files, and Reindex
// still knows that the checkpoint was made here.
func TestAttachedReindex(t *testing.T) {
	h := newHosts(t, nil, false)
	h.must(h.Close())
	list, err := filepath.Glob(filepath.Join(h.root, "state.db*"))
	h.must(err)
	for _, path := range list {
		h.must(os.Remove(path))
	}
	st, err := store.Open(ctx, h.root)
	h.must(err)
	defer st.Close()
	_, err = st.Reindex(ctx)
	h.must(err)
	c, err := st.Checkpoint(ctx, h.then.ID)
	if h.must(err); c.Foreign || c.Attached == nil || len(c.Attached.Paths) != 3 ||
		c.Attached.Paths[0].Path != h.paths[0] {
		t.Errorf("%+v", c)
	}
	h.must(st.VerifyCheckpoint(ctx, c.ID))
}
