package test

import (
	"os"
	"path/filepath"
	"syscall"
	"testing"
)

// TestUnchangedStay restores a running sandbox: what did not change keeps its inode and its
// ctime, so it was not written to.
func TestUnchangedStay(t *testing.T) {
	t.Parallel()
	b := memoryBox(t)
	b.start("s", "--network", "none", "busybox", "sh", "-c", "exec 3< /etc/passwd; sleep 1000")
	b.sh("s", "mkdir /d; echo same > /d/same; echo old > /d/changed; ln /d/same /d/linked; ln -s same /d/soft")
	upper := b.inspect("s").Upperdir
	stat := func(name string) (st syscall.Stat_t) {
		t.Helper()
		if err := syscall.Lstat(filepath.Join(upper, name), &st); err != nil {
			t.Fatal(err)
		}
		return st
	}
	before := map[string]syscall.Stat_t{}
	for _, name := range []string{"d/same", "d/linked", "d/soft"} {
		before[name] = stat(name)
	}
	ck := b.checkpoint("s")
	for _, how := range [][]string{
		{"restore", "s", ck}, {"restore", "--files-only", "s", ck}, {"restore", "--verify", "s", ck},
	} {
		b.sh("s", "echo new > /d/changed; echo more > /d/more")
		b.ok(how...)
		equal(b, "the changed file", b.file("s", "d/changed"), "old")
		if _, err := os.Lstat(upper + "/d/more"); err == nil {
			t.Error("a file made since is there")
		}
		for name, was := range before {
			if now := stat(name); now.Ino != was.Ino || now.Ctim != was.Ctim {
				t.Errorf("%q: %s has inode %d, ctime %v; had %d, %v", how, name, now.Ino, now.Ctim, was.Ino, was.Ctim)
			}
		}
	}
}
