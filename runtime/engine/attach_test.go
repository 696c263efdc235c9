package engine_test

import (
	"bytes"
	"context"
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
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/registry"
	fusefs "github.com/hanwen/go-fuse/v2/fs"
	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/overlay"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/engine"
	"github.com/agentbox/agentbox/runtime/store"
)

// freezer is a backend that calls a function when it has frozen a sandbox.
type freezer struct {
	stopping
	then func()
}

func (b *freezer) Pause(ctx context.Context, id string) error {
	err := b.stopping.Pause(ctx, id)
	if do := b.then; do != nil {
		do()
	}
	return err
}

// attached are the attached files of a checkpoint, and what is in them.
func (h *hosts) attached(id string) (files []overlay.Entry, texts []string) {
	h.t.Helper()
	r, err := h.store.OpenCheckpoint(ctx, id)
	h.must(err)
	defer r.Close()
	m := r.Manifest()
	list, err := r.Tree(ctx, m.AttachedTree())
	h.must(err)
	h.must(overlay.ReadTree(list, func(e overlay.Entry) error {
		if e.Type != overlay.TypeFile {
			return nil
		}
		d, err := r.Source().Data(ctx, e)
		if err != nil {
			return err
		}
		text, err := io.ReadAll(d)
		files, texts = append(files, e), append(texts, string(text))
		return errors.Join(err, d.Close())
	}), list.Close())
	return files, texts
}

// TestAttachFrozen: host files are captured as they are when the sandbox is frozen, and files
// that have not changed since they were read ahead are not opened again.
func TestAttachFrozen(t *testing.T) {
	b := &freezer{}
	h := newHosts(t, func(under runtime.Backend) runtime.Backend { b.Backend = under; return b }, true)
	large := make([]byte, 3<<20)
	_, _ = rand.Read(large)
	h.must(os.WriteFile(h.paths[1], large, 0o600))
	info, err := os.Stat(h.paths[0])
	h.must(err)
	frozen := 0
	b.then = func() {
		frozen++
		h.must(os.WriteFile(h.paths[0], []byte("FROZEN!!!"), 0o600),
			os.Chtimes(h.paths[0], info.ModTime(), info.ModTime()), os.Remove(h.paths[2]))
		f, err := os.OpenFile(h.paths[1], os.O_RDWR, 0)
		h.must(err)
		t.Cleanup(func() { f.Close() })
		_, err = unix.FcntlInt(f.Fd(), unix.F_SETLEASE, unix.F_WRLCK) // so that it cannot be opened
		h.must(err)
	}
	many := slices.Clone(h.paths)
	for i := range 12 { // more than ten: their names do not come in the order of numbers
		many = append(many, filepath.Join(filepath.Dir(h.paths[0]), fmt.Sprint("more", i)))
		h.must(os.WriteFile(many[len(many)-1], []byte(fmt.Sprint("more", i)), 0o600))
	}
	c, err := h.Checkpoint(ctx, "box", runtime.CheckpointOptions{Attach: many, FilesOnly: true})
	h.must(err)
	if frozen != 1 || c.Attached[0].Size != 9 || c.Attached[1].Size != 3<<20 || !c.Attached[2].Absent ||
		c.Attached[14].Path != many[14] {
		t.Errorf("frozen %d times: %+v", frozen, c.Attached)
	}
	_, texts := h.attached(c.ID)
	want := []string{
		"FROZEN!!!", string(large), "more7", "more8", "more9", "more10", "more11", "more0", "more1", "more2", "more3",
		"more4", "more5", "more6",
	}
	if !slices.Equal(texts, want) {
		t.Errorf("%.300q", texts)
	}
	h.must(h.VerifyCheckpoint(ctx, c.ID))
}

// TestAttachBeforeFreeze: a file that is too large is refused while the sandbox runs.
func TestAttachBeforeFreeze(t *testing.T) {
	b := &freezer{}
	h := newHosts(t, func(under runtime.Backend) runtime.Backend { b.Backend = under; return b }, true)
	b.then = func() { t.Error("it was frozen") }
	h.must(os.Truncate(h.paths[0], store.MaxAttached+1))
	_, err := h.Checkpoint(ctx, "box", runtime.CheckpointOptions{Attach: h.paths, FilesOnly: true})
	if !errors.Is(err, runtime.ErrInvalid) || !strings.Contains(err.Error(), h.paths[0]) {
		t.Errorf("%v", err)
	}
}

// TestAttachWritten: a file to which a process of the sandbox keeps writing is captured while
// the sandbox is frozen.
func TestAttachWritten(t *testing.T) {
	b := &freezer{}
	h := newHosts(t, func(under runtime.Backend) runtime.Backend { b.Backend = under; return b }, true)
	size := 8 << 20
	h.must(os.WriteFile(h.paths[0], make([]byte, size), 0o600))
	stop, stopped, last := make(chan struct{}), make(chan struct{}), byte(0)
	f, err := os.OpenFile(h.paths[0], os.O_WRONLY, 0)
	h.must(err)
	defer f.Close()
	go func() {
		defer close(stopped)
		for {
			select {
			case <-stop:
				return
			default:
				last++
				_, _ = f.WriteAt([]byte{last}, int64(size-1))
			}
		}
	}()
	b.then = func() { close(stop); <-stopped }
	c, err := h.Checkpoint(ctx, "box", runtime.CheckpointOptions{Attach: h.paths[:1], FilesOnly: true})
	h.must(err)
	if _, texts := h.attached(c.ID); len(texts) != 1 || len(texts[0]) != size || texts[0][size-1] != last {
		t.Errorf("%d files", len(texts))
	}
}

// TestAttachUnclean: a path that would name another file once cleaned is refused.
func TestAttachUnclean(t *testing.T) {
	h := newHosts(t, nil, false)
	dir := t.TempDir()
	h.must(os.Mkdir(filepath.Join(dir, "d"), 0o700), os.WriteFile(filepath.Join(dir, "f"), nil, 0o600))
	for _, path := range []string{
		dir + "/", dir + "/d/", dir + "/f/", dir + "//f", dir + "/./f", dir + "/d/../f", dir + "/.",
		dir + "/..", "/", "//",
	} {
		_, err := h.Checkpoint(ctx, "box", runtime.CheckpointOptions{Attach: []string{path}})
		if !errors.Is(err, runtime.ErrInvalid) || !strings.Contains(err.Error(), "without a slash") {
			t.Errorf("%q: %v", path, err)
		}
	}
}

// TestAttachExact: a file is recorded exactly, even if the store's filesystem does not
// support its attributes or its time.
func TestAttachExact(t *testing.T) {
	h := newHosts(t, nil, false)
	at := t.TempDir()
	h.must(unix.Mount("tmpfs", at, "tmpfs", 0, "size=8m"))
	t.Cleanup(func() { h.must(unix.Unmount(at, 0)) })
	name, value := filepath.Join(at, "f"), bytes.Repeat([]byte("x"), 20_000)
	old := time.Date(1902, 3, 4, 5, 6, 7, 123456789, time.UTC) // before what most disks know
	then := func() {
		h.must(os.WriteFile(name, []byte("then"), 0o600), unix.Setxattr(name, "trusted.big", value, 0),
			os.Chtimes(name, old, old))
	}
	then()
	if info, err := os.Stat(name); err != nil || !info.ModTime().Equal(old) {
		t.Fatalf("%v, %v", info, err)
	}
	c, err := h.Checkpoint(ctx, "box", runtime.CheckpointOptions{Attach: []string{name}})
	h.must(err)
	files, texts := h.attached(c.ID)
	if len(files) != 1 || texts[0] != "then" || files[0].Mtime != (overlay.Time{Sec: old.Unix(), Nsec: 123456789}) ||
		files[0].Xattrs["trusted.big"] != string(value) {
		t.Errorf("%.300v %q", files, texts)
	}
	h.must(os.Remove(name), os.WriteFile(name, []byte("now"), 0o600))
	out, err := h.Restore(ctx, "box", runtime.RestoreOptions{Checkpoint: c.ID})
	if h.must(err); !slices.Equal(actions(out.Attached), []string{"put"}) {
		t.Errorf("%+v", out.Attached)
	}
	got := make([]byte, len(value))
	n, err := unix.Getxattr(name, "trusted.big", got)
	h.must(err)
	if info, err := os.Stat(name); err != nil || !info.ModTime().Equal(old) || !bytes.Equal(got[:n], value) {
		t.Errorf("%v, %d bytes, %v", info, n, err)
	}
}

// TestAttachPullKilled: a pulled checkpoint is foreign even if the pull was killed once its
// manifest was stored, and completed later.
func TestAttachPullKilled(t *testing.T) {
	h := newHosts(t, nil, false)
	server := httptest.NewServer(registry.New(registry.Logger(log.New(io.Discard, "", 0))))
	defer server.Close()
	ref, opts := strings.TrimPrefix(server.URL, "http://")+"/x:y", runtime.RegistryOptions{PlainHTTP: true}
	_, err := h.PushCheckpoint(ctx, h.then.ID, ref, opts)
	h.must(err)
	h.must(h.RemoveCheckpoint(ctx, h.then.ID))
	t.Setenv("AGENTBOX_FAILPOINT", "store.commit.before-row=error,store.abort.before-remove=error,store.abort.before-row=error")
	if _, err = h.PullCheckpoint(ctx, ref, opts); err == nil {
		t.Fatal("tests need the tag failpoint")
	}
	t.Setenv("AGENTBOX_FAILPOINT", "")
	ready, err := h.store.FinishPending(ctx, h.then.ID)
	c, e2 := h.store.Checkpoint(ctx, h.then.ID)
	if h.must(err, e2); !ready || !c.Foreign || c.Attached == nil {
		t.Fatalf("ready %v: %+v", ready, c)
	}
	out, err := h.Restore(ctx, "box", runtime.RestoreOptions{Checkpoint: h.then.ID})
	if h.must(err); !strings.Contains(fmt.Sprint(out.Warnings), "comes from elsewhere") ||
		!slices.Equal(actions(out.Attached), []string{"left", "left", "left"}) {
		t.Errorf("%+v", out)
	}
	h.are("now", "then")
}

// TestAttachLeased attaches a file on which a process has a lease: no sandbox is frozen for it.
func TestAttachLeased(t *testing.T) {
	b := &freezer{}
	h := newHosts(t, func(under runtime.Backend) runtime.Backend { b.Backend = under; return b }, true)
	f, err := os.OpenFile(h.paths[0], os.O_RDWR, 0)
	h.must(err)
	defer f.Close()
	_, err = unix.FcntlInt(f.Fd(), unix.F_SETLEASE, unix.F_WRLCK)
	h.must(err)
	b.then = func() { t.Error("it was frozen") }
	_, err = h.Checkpoint(ctx, "box", runtime.CheckpointOptions{Attach: h.paths, FilesOnly: true})
	if !errors.Is(err, runtime.ErrBusy) || !strings.Contains(err.Error(), "another process holds a lease on it") {
		t.Errorf("%v", err)
	}
}

// stuck is a filesystem that does not answer while its gate is locked.
type stuck struct {
	fusefs.LoopbackNode
	gate *sync.RWMutex
}

func (n *stuck) Lookup(ctx context.Context, name string, out *fuse.EntryOut) (*fusefs.Inode, syscall.Errno) {
	n.gate.RLock()
	defer n.gate.RUnlock()
	return n.LoopbackNode.Lookup(ctx, name, out)
}

// stuck makes a file on a filesystem that does not answer while the gate is locked, and returns
// also its path in the underlying directory.
func (h *hosts) stuck() (file, below string, gate *sync.RWMutex) {
	h.t.Helper()
	dir, at := h.t.TempDir(), h.t.TempDir()
	h.must(os.WriteFile(filepath.Join(dir, "f"), []byte("x"), 0o600))
	var st unix.Stat_t
	h.must(unix.Stat(dir, &st))
	gate = &sync.RWMutex{}
	server, err := fusefs.Mount(at, &stuck{
		fusefs.LoopbackNode{RootData: &fusefs.LoopbackRoot{Path: dir, Dev: st.Dev}}, gate,
	},
		&fusefs.Options{MountOptions: fuse.MountOptions{DirectMountStrict: true}})
	h.must(err)
	h.t.Cleanup(func() { h.must(server.Unmount()) })
	return filepath.Join(at, "f"), filepath.Join(dir, "f"), gate
}

// TestAttachedStuck: recovery, with which every command begins, does not wait forever for a
// filesystem that does not answer. It leaves and names the file, does not replace it once the
// filesystem answers, and puts the other files.
func TestAttachedStuck(t *testing.T) {
	h := newHosts(t, nil, true)
	engine.ShortenHostAnswer(t, time.Second)
	file, below, gate := h.stuck()
	_, err := h.Checkpoint(ctx, "box", runtime.CheckpointOptions{Attach: []string{file, h.paths[0]}, FilesOnly: true})
	h.must(err, os.WriteFile(below, []byte("now"), 0o600), os.WriteFile(h.paths[0], []byte("later"), 0o640))
	h.leave("restore.after-head", runtime.RestoreOptions{})
	gate.Lock()
	told := make(chan string, 1)
	go func() {
		done, err := h.RecoverInterrupted(ctx)
		told <- fmt.Sprint(done.Actions, err)
	}()
	select {
	case got := <-told:
		gate.Unlock()
		if !strings.Contains(got, file+" (") || !strings.Contains(got, "has not answered for 1s") ||
			strings.Contains(got, h.paths[0]) || !strings.Contains(got, "is pinned") {
			t.Error(got)
		}
	case <-time.After(20 * time.Second):
		gate.Unlock()
		t.Fatalf("it waits for as long as that stands still: %s", <-told)
	}
	h.settled()
	if text, err := os.ReadFile(h.paths[0]); string(text) != "state now" {
		t.Errorf("the other one is %q, %v", text, err)
	}
	// That lets go of the directory once it is answered, which this waits for.
	_, err = h.Restore(ctx, "box", runtime.RestoreOptions{NoUndo: true, Attached: true, Checkpoint: h.undos()[0].ID})
	h.must(err)
	if text, err := os.ReadFile(below); string(text) != "now" {
		t.Errorf("it is %q, %v", text, err)
	}
}

// TestAttachStuck: a filesystem that does not answer while the sandbox is frozen, for example
// because it is served from within, keeps it frozen no longer than the caller or the engine
// waits.
func TestAttachStuck(t *testing.T) {
	b := &freezer{}
	h := newHosts(t, func(under runtime.Backend) runtime.Backend { b.Backend = under; return b }, true)
	file, _, gate := h.stuck()
	opts := runtime.CheckpointOptions{Attach: []string{file}, FilesOnly: true}
	_, err := h.Checkpoint(ctx, "box", opts)
	h.must(err)
	var frozen time.Time
	b.then = func() { frozen = time.Now(); gate.Lock() }
	opts.Timeout = 3 * time.Second
	_, err = h.Checkpoint(ctx, "box", opts)
	stood := time.Since(frozen)
	sb, e2 := h.Sandbox(ctx, "box")
	gate.Unlock()
	if h.must(e2); !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), opts.Attach[0]) ||
		stood > 8*time.Second || sb.Status != runtime.Running {
		t.Errorf("%v, frozen for %v, then %s", err, stood, sb.Status)
	}
	b.then = nil
	_, err = h.Checkpoint(ctx, "box", opts)
	h.must(err)
	h.settled()
}
