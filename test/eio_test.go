package test

import (
	"context"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"

	fusefs "github.com/hanwen/go-fuse/v2/fs"
	"github.com/hanwen/go-fuse/v2/fuse"
)

// faults makes one operation of a filesystem fail.
type faults struct {
	mu    sync.Mutex
	op    string
	left  int  // that one, counted from 1
	all   bool // and all after it
	fired int
}

func (f *faults) arm(op string, n int, all bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.op, f.left, f.all, f.fired = op, n, all, 0
}

// hit returns EIO when it is time, and how often it did since arm.
func (f *faults) hit(op string) syscall.Errno {
	f.mu.Lock()
	defer f.mu.Unlock()
	if op != f.op {
		return 0
	}
	f.left--
	if f.left == 0 || f.left < 0 && f.all {
		f.fired++
		return syscall.EIO
	}
	return 0
}

func (f *faults) disarm() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.op = ""
	return f.fired
}

// brittle passes everything on to another directory, but for the faults.
type brittle struct {
	fusefs.LoopbackNode
	faults *faults
}

// WrapChild makes every file below one that can fail, too.
func (n *brittle) WrapChild(_ context.Context, ops fusefs.InodeEmbedder) fusefs.InodeEmbedder {
	return &brittle{fusefs.LoopbackNode{RootData: ops.(*fusefs.LoopbackNode).RootData}, n.faults}
}

type brittleFile struct {
	*fusefs.LoopbackFile
	faults *faults
}

func (n *brittle) wrap(h fusefs.FileHandle) fusefs.FileHandle {
	if f, ok := h.(*fusefs.LoopbackFile); ok {
		return &brittleFile{f, n.faults}
	}
	return h
}

func (n *brittle) Open(ctx context.Context, flags uint32) (fusefs.FileHandle, uint32, syscall.Errno) {
	h, fuseFlags, errno := n.LoopbackNode.Open(ctx, flags)
	return n.wrap(h), fuseFlags, errno
}

func (n *brittle) Create(
	ctx context.Context, name string, flags, mode uint32, out *fuse.EntryOut,
) (*fusefs.Inode, fusefs.FileHandle, uint32, syscall.Errno) {
	if errno := n.faults.hit("create"); errno != 0 {
		return nil, nil, 0, errno
	}
	inode, h, fuseFlags, errno := n.LoopbackNode.Create(ctx, name, flags, mode, out)
	return inode, n.wrap(h), fuseFlags, errno
}

func (n *brittle) Mkdir(
	ctx context.Context, name string, mode uint32, out *fuse.EntryOut,
) (*fusefs.Inode, syscall.Errno) {
	if errno := n.faults.hit("create"); errno != 0 {
		return nil, errno
	}
	return n.LoopbackNode.Mkdir(ctx, name, mode, out)
}

func (n *brittle) Rename(
	ctx context.Context, name string, parent fusefs.InodeEmbedder, to string, flags uint32,
) syscall.Errno {
	if errno := n.faults.hit("rename"); errno != 0 {
		return errno
	}
	if p, ok := parent.(*brittle); ok {
		parent = &p.LoopbackNode
	}
	return n.LoopbackNode.Rename(ctx, name, parent, to, flags)
}

func (f *brittleFile) Read(ctx context.Context, buf []byte, off int64) (fuse.ReadResult, syscall.Errno) {
	if errno := f.faults.hit("read"); errno != 0 {
		return nil, errno
	}
	return f.LoopbackFile.Read(ctx, buf, off)
}

func (f *brittleFile) Write(ctx context.Context, data []byte, off int64) (uint32, syscall.Errno) {
	if errno := f.faults.hit("write"); errno != 0 {
		return 0, errno
	}
	return f.LoopbackFile.Write(ctx, data, off)
}

func (f *brittleFile) Fsync(ctx context.Context, flags uint32) syscall.Errno {
	if errno := f.faults.hit("fsync"); errno != 0 {
		return errno
	}
	return f.LoopbackFile.Fsync(ctx, flags)
}

// PassthroughFd keeps the kernel from going past us.
func (f *brittleFile) PassthroughFd() (int, bool) { return 0, false }

// brittleAt mounts a brittle filesystem over a new directory of the root.
func brittleAt(t *testing.T, dir string, f *faults) {
	t.Helper()
	below := dir + "-below"
	var st syscall.Stat_t
	for _, d := range []string{dir, below} {
		if err := os.MkdirAll(d, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	if err := syscall.Stat(below, &st); err != nil {
		t.Fatal(err)
	}
	root := &fusefs.LoopbackRoot{Path: below, Dev: st.Dev}
	top := &brittle{fusefs.LoopbackNode{RootData: root}, f}
	root.RootNode = top
	server, err := fusefs.Mount(dir, top,
		&fusefs.Options{MountOptions: fuse.MountOptions{DirectMountStrict: true, FsName: "brittle"}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := server.Unmount(); err != nil {
			t.Error(err)
		}
	})
}

// brittleBox is a box whose store can be made to fail.
func brittleBox(t *testing.T) (*box, *faults) {
	t.Helper()
	root, err := os.MkdirTemp("/dev/shm", "ab")
	if err != nil {
		t.Fatal(err)
	}
	f := &faults{}
	t.Cleanup(func() {
		if err := os.RemoveAll(root); err != nil {
			t.Error(err)
		}
	})
	for _, dir := range []string{"packs", "checkpoints"} {
		brittleAt(t, filepath.Join(root, dir), f)
	}
	b := &box{T: t, root: root}
	t.Cleanup(b.empty)
	return b, f
}

// TestIOErrors has each single write, fsync, rename, new file and read of a
// store fail, and all from there on. A checkpoint then is ready and whole, or
// it is reported failed and its space is free again; a restore says so too and
// leaves the files as they were, or as they should be; and what comes after
// works.
func TestIOErrors(t *testing.T) {
	t.Parallel()
	b, f := brittleBox(t)
	b.ok("create", "--name", "s", "--network", "none", "busybox", "true")
	upper := b.inspect("s").Upperdir
	n := 0
	change := func() {
		n++
		for i := range 3 {
			text := strings.Repeat(fmt.Sprintln(n, i), 20_000)
			if err := os.WriteFile(filepath.Join(upper, fmt.Sprint("f", i)), []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
		}
	}
	change()
	base := b.checkpoint("--name", "base", "s")
	atBase := b.tree(upper)
	for _, op := range []string{"create", "write", "fsync", "rename"} {
		fired := 0
		for at := 1; at <= 25; at++ {
			what := fmt.Sprintf("%s %d", op, at)
			change()
			want, before := b.tree(upper), b.storeFiles()
			f.arm(op, at, at%2 == 0)
			r := b.try(nil, "checkpoint", "--name", "new", "s")
			hits := f.disarm()
			if hits == 0 {
				equal(b, what+": without a fault", r.code, 0)
			}
			fired += min(hits, 1)
			b.ok("ps")
			b.ok("recover")
			b.sameTree(what, b.tree(upper), want)
			id := ""
			for _, c := range b.checkpoints("s") {
				if c.Name != "new" {
					continue
				}
				switch {
				case c.Status == "ready":
					id = c.ID
				case c.Status == "failed" && r.code != 0:
					b.ok("checkpoint", "rm", c.ID)
				default:
					b.Errorf("%s: checkpoint %+v after: %s", what, c, r)
				}
			}
			if r.code == 0 && id == "" {
				b.Errorf("%s: no checkpoint, and no error: %s", what, r)
			}
			if r.code != 0 && !strings.Contains(r.err, "input/output error") {
				b.Errorf("%s: the error does not tell why: %s", what, r)
			}
			b.ok("verify", "--all", "--read-data")
			if id == "" {
				if after := b.storeFiles(); !maps.Equal(after, before) {
					b.Errorf("%s: the store was %v and is %v", what, before, after)
				}
				id = b.checkpoint("--name", "new", "s")
			}
			b.ok("restore", "--no-undo", "s", base)
			b.ok("restore", "--no-undo", "--verify", "s", id)
			b.sameTree(what+", restored", b.tree(upper), want)
			b.ok("checkpoint", "rm", id)
			b.ok("prune", "-f")
			if hits == 0 {
				break
			}
		}
		t.Logf("%d times %s", fired, op)
		if fired == 0 {
			t.Errorf("%s never failed", op)
		}
	}
	fired := 0
	for at := 1; at <= 25; at++ {
		what := fmt.Sprintf("read %d", at)
		change()
		before := b.tree(upper)
		f.arm("read", at, at%2 == 0)
		r := b.try(nil, "restore", "s", base)
		hits := f.disarm()
		fired += min(hits, 1)
		b.ok("ps")
		now := b.tree(upper)
		switch {
		case maps.Equal(now, atBase) || r.code != 0 && maps.Equal(now, before):
		case r.code == 0:
			b.sameTree(what, now, atBase)
		default:
			b.sameTree(what, now, before)
		}
		b.ok("verify", "--all", "--read-data")
		if damaged := b.ok("checkpoint", "ls"); strings.Contains(damaged, "damaged") {
			b.Errorf("%s: %s", what, damaged)
		}
		b.ok("restore", "--no-undo", "s", base)
		b.sameTree(what+", again", b.tree(upper), atBase)
		if hits == 0 {
			break
		}
	}
	t.Logf("%d times read", fired)
	if fired == 0 {
		t.Error("read never failed")
	}
}

// TestIOErrorsFull does the same to full checkpoints, of which CRIU writes a
// part: whatever fails, the processes go on, and the next one works.
func TestIOErrorsFull(t *testing.T) {
	t.Parallel()
	b, f := brittleBox(t)
	b.start("s", "--network", "none", "busybox", "sh", "-c", counter)
	b.reaches("s", 2)
	pid := b.inspect("s").Pid
	for _, op := range []string{"create", "write", "fsync", "rename", "read"} {
		fired := 0
		for at := 1; at <= 64; at *= 2 {
			what := fmt.Sprintf("%s %d", op, at)
			f.arm(op, at, at > 2)
			r := b.try(nil, "checkpoint", "--name", "new", "s")
			if f.disarm() == 0 {
				equal(b, what+": without a fault", r.code, 0)
				b.ok("checkpoint", "rm", "s@new")
				break
			}
			fired++
			b.ok("ps")
			b.ok("recover")
			for _, c := range b.checkpoints("s") {
				if c.Status != "failed" && (c.Status != "ready" || r.code != 0) {
					b.Errorf("%s: checkpoint %+v after: %s", what, c, r)
				}
				b.ok("verify", "--read-data")
				b.ok("checkpoint", "rm", c.ID)
			}
			equal(b, what+": pid", b.inspect("s").Pid, pid)
			b.reaches("s", b.count("s")+1)
			b.ok("prune", "-f")
			if left := b.storeFiles(); len(left) > 0 {
				b.Errorf("%s: left in the store: %v", what, left)
			}
		}
		t.Logf("%d times %s", fired, op)
		if fired == 0 && op != "read" {
			t.Errorf("%s never failed", op)
		}
	}
	ck := b.checkpoint("s")
	b.ok("restore", "--verify", "s", ck)
	b.reaches("s", b.count("s")+1)
}

// storeFiles are the files of the store, with their sizes.
func (b *box) storeFiles() map[string]int64 {
	all := map[string]int64{}
	for _, dir := range []string{"packs", "checkpoints"} {
		err := filepath.WalkDir(filepath.Join(b.root, dir), func(path string, d fs.DirEntry, err error) error {
			if err != nil || d.IsDir() {
				return err
			}
			info, err := d.Info()
			all[path] = info.Size()
			return err
		})
		if err != nil {
			b.Fatal(err)
		}
	}
	return all
}
