package criu

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"
)

// TestSettleWalker: a process that walks a tree is let go on until it is through.
func TestSettleWalker(t *testing.T) {
	defer func(limit time.Duration) { youngLimit = limit }(youngLimit)
	youngLimit = time.Minute
	ctx := context.Background()
	b, rt := start(t, []string{"sh", "-c", "while :; do until [ -e /go ]; do :; done; rm /go; rm -r /tmp/tree; done"}, nil)
	tree := filepath.Join(b.Files, "tmp", "tree")
	for try := range 10 {
		files(t, tree, 20000)
		if err := os.WriteFile(filepath.Join(b.Files, "go"), nil, 0o600); err != nil {
			t.Fatal(err)
		}
		b.Until("it removes the tree", func() bool {
			_, err := os.Stat(tree)
			return err != nil || walks(t, b.Pid())
		})
		if err := rt.Pause(ctx); err != nil {
			t.Fatal(err)
		}
		caught := walks(t, b.Pid())
		if caught {
			if _, err := rt.Settle(ctx, b.Pid()); err != nil {
				t.Fatal(err)
			}
			// Its last step, between closing the directory and removing it, is not seen.
			if list, err := os.ReadDir(tree); len(list) > 0 || err != nil && !os.IsNotExist(err) {
				t.Errorf("the tree has %d files: %v", len(list), err)
			}
			if s := b.Status(); s != "paused" {
				t.Errorf("afterwards it is %s", s)
			}
			return
		}
		t.Logf("try %d: rm was through before the freeze", try)
		if err := rt.Resume(ctx); err != nil {
			t.Fatal(err)
		}
		b.Until("the tree is gone", func() bool { _, err := os.Stat(tree); return err != nil })
	}
	t.Error("rm was never frozen at work")
}

// TestSettleIdleWalker: a process that has begun to read a directory and waits for something
// else is not waited for.
func TestSettleIdleWalker(t *testing.T) {
	defer func(limit time.Duration) { youngLimit = limit }(youngLimit)
	youngLimit = time.Minute
	ctx := context.Background()
	b, rt := start(t, []string{"sh", "-c", "until [ -e /go ]; do :; done; exec /bin/busybox find /tmp/tree -mindepth 1 -exec sh -c 'echo >/up; exec sleep 1000' ';'"}, nil)
	files(t, filepath.Join(b.Files, "tmp", "tree"), 3)
	if err := os.WriteFile(filepath.Join(b.Files, "go"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	b.Until("find has begun", func() bool { return walks(t, b.Pid()) })
	if err := rt.Pause(ctx); err != nil {
		t.Fatal(err)
	}
	if _, err := rt.Settle(ctx, b.Pid()); err != nil {
		t.Fatal(err)
	}
	if !walks(t, b.Pid()) {
		t.Error("find is through")
	}
}

// TestReadsDirectory: what counts is a directory on the root's mount that is open as such, and
// of which something was read.
func TestReadsDirectory(t *testing.T) {
	fill := t.TempDir()
	files(t, fill, 3)
	for _, c := range []struct {
		dir   string
		flags int
		read  bool
		want  bool
	}{
		{fill, 0o200000, true, true},
		{fill, 0o200000, false, false},
		{fill, 0, true, false},
		{"/proc", 0o200000, true, false},
	} {
		f, err := os.OpenFile(c.dir, os.O_RDONLY|c.flags, 0)
		if err != nil {
			t.Fatal(err)
		}
		if c.read {
			if _, err := f.Readdirnames(1); err != nil {
				t.Fatal(err)
			}
		}
		left := walkerTotal
		if got := readsDirectory(os.Getpid(), &left); got != c.want {
			t.Errorf("%+v: %t", c, got)
		}
		if left == walkerTotal {
			t.Error("the look has cost nothing")
		}
		f.Close()
	}
}

// walks reports whether a process of a box has a directory open that it has begun to read.
func walks(t *testing.T, initPid int) bool {
	t.Helper()
	members, err := Members(initPid)
	if err != nil {
		t.Fatal(err)
	}
	left := walkerTotal
	for _, p := range members {
		if readsDirectory(p, &left) {
			return true
		}
	}
	return false
}

func files(t *testing.T, dir string, n int) {
	t.Helper()
	if err := os.MkdirAll(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	for i := range n {
		if err := os.WriteFile(filepath.Join(dir, fmt.Sprint(i)), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
}
