package test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/agentbox/agentbox/internal/thorough"
)

// withHosts is a sandbox with a checkpoint that has two host files, both of which are
// others now.
func withHosts(t *testing.T) (b *box, one, two string) {
	b = memoryBox(t)
	dir := t.TempDir()
	one, two = filepath.Join(dir, "one"), filepath.Join(dir, "two")
	b.start("s", "--network", "none", "busybox", "sleep", "1000")
	b.sh("s", "echo then > /marker")
	write(b, "then", one, two)
	b.checkpoint("--name", "base", "--attach", one, "--attach", two, "s")
	write(b, "now", one, two)
	b.sh("s", "echo now > /marker")
	return b, one, two
}

func write(b *box, text string, paths ...string) {
	b.Helper()
	for _, path := range paths {
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			b.Fatal(err)
		}
	}
}

// tempOf is what a killed restore has left beside a host file.
func tempOf(b *box, path string) string {
	b.Helper()
	list, err := filepath.Glob(filepath.Join(filepath.Dir(path), ".*.agentbox-*"))
	if err != nil || len(list) != 1 {
		b.Fatalf("beside %s: %q, %v", path, list, err)
	}
	return list[0]
}

func (b *box) killedAt(point string, args ...string) {
	b.Helper()
	if r := b.try([]string{"AGENTBOX_FAILPOINT=" + point}, args...); !r.killed {
		b.Fatalf("not killed: %s", r)
	}
}

// areAll proves that host files and the marker inside are all at one state, and that nothing
// lies beside the files.
func areAll(b *box, text string, paths ...string) {
	b.Helper()
	for _, path := range paths {
		equal(b, path, readFile(b.T, path), text)
	}
	equal(b, "marker", b.file("s", "marker"), text)
	if list, err := os.ReadDir(filepath.Dir(paths[0])); err != nil || len(list) != len(paths) {
		b.Errorf("beside the host files: %v, %v", list, err)
	}
}

// recovers has the next command recover, and returns what is told of that.
func (b *box) recovers() string {
	b.Helper()
	r := b.try(nil, "recover")
	if r.code != 0 {
		b.Fatalf("%s", r)
	}
	return r.out + r.err
}

// TestAttachedKilled kills restores from where the sandbox is restored to their end: the next
// command goes forward, and all is the checkpoint's, whatever was needed of the undo
// checkpoint. It is killed at that once more.
func TestAttachedKilled(t *testing.T) {
	t.Parallel()
	points := []string{"restore.after-head", "restore.attached.before-put", "restore.attached.before-replace",
		"restore.attached.between", "restore.attached.after-put",
		"store.remove.before-mark", "store.remove.before-rename", "store.remove.before-row", "store.remove.before-tree",
		"store.journal.before-done"}
	for _, stopped := range []bool{false, true} {
		for _, flags := range [][]string{nil, {"--no-undo"}} {
			if stopped != (flags != nil) && !thorough.Asked() {
				continue
			}
			t.Run(fmt.Sprint("stopped ", stopped, flags), func(t *testing.T) {
				b, one, two := withHosts(t)
				name := "base"
				if stopped {
					b.ok("restore", "s", "base")
					b.ok("stop", "-t", "0", "s")
					b.checkpoint("--name", "still", "--attach", one, "--attach", two, "s")
					name = "still"
				}
				then := []string{
					"restore.attached.before-put", "restore.attached.between", "restore.attached.before-replace",
				}
				for n, point := range points {
					agains := append([]string{""}, then...)
					if !thorough.Asked() { // one of the three, each with another point
						agains = []string{"", then[n%len(then)]}
					}
					for _, again := range agains {
						if again != "" && !strings.HasPrefix(point, "restore.") {
							continue
						}
						if b.inspect("s").Status != "running" {
							b.ok("start", "s")
						}
						b.sh("s", "echo now > /marker")
						write(b, "now", one, two)
						r := b.try([]string{"AGENTBOX_FAILPOINT=" + point + "=kill"},
							slices.Concat([]string{"restore"}, flags, []string{"s", name})...)
						if !r.killed {
							b.Fatalf("%s: not killed: %s", point, r)
						}
						if again != "" {
							b.try([]string{"AGENTBOX_FAILPOINT=" + again + "=kill"}, "recover")
						}
						if said := b.recovers(); strings.Contains(said, "left as they are") {
							b.Errorf("%s, then %q: %s", point, again, said)
						}
						if said := b.recovers(); strings.Contains(said, "restore") {
							b.Errorf("%s, then %q: recovered twice: %s", point, again, said)
						}
						areAll(b, "then", one, two)
						want := "running"
						if stopped {
							want = "exited"
						}
						equal(b, "status", b.inspect("s").Status, want)
						if b.Failed() {
							b.Fatalf("killed at %s, then at %q", point, again)
						}
					}
				}
				b.ok("verify", "--all")
			})
		}
	}
}

// TestAttachedKilledReturning kills a restore that could not put all host files while it
// makes them what they were: the next command goes forward.
func TestAttachedKilledReturning(t *testing.T) {
	t.Parallel()
	b, one, two := withHosts(t)
	b.killedAt("restore.attached.after-put=error,restore.attached.before-return=kill", "restore", "s", "base")
	b.ok("recover")
	areAll(b, "then", one, two)
	b.ok("restore", "--undo", "s")
	areAll(b, "now", one, two)
}

// TestAttachedKilledEarlier kills a restore whose sandbox is not restored yet: no host file
// is touched before it is.
func TestAttachedKilledEarlier(t *testing.T) {
	t.Parallel()
	b, one, two := withHosts(t)
	for _, point := range []string{
		"restore.after-undo", "restore.after-stop", "restore.after-proof", "restore.after-start",
	} {
		b.sh("s", "echo now > /marker")
		write(b, "now", one, two)
		b.killedAt(point+"=kill", "restore", "s", "base")
		for _, path := range []string{one, two} {
			equal(b, point+": "+path, readFile(t, path), "now")
		}
		b.ok("recover")
		want := "then"
		if point == "restore.after-undo" {
			want = "now" // taken back
		}
		areAll(b, want, one, two)
	}
}

// TestAttachedPlanted has another process at work between a kill and the recovery: recovery goes
// through once, forward, and is done; the other's files stay, and are named.
func TestAttachedPlanted(t *testing.T) {
	t.Parallel()
	for what, plant := range map[string]func(b *box, temp, path string) error{
		"a directory in the way": func(b *box, temp, _ string) error {
			return errors.Join(os.Remove(temp), os.MkdirAll(temp+"/in", 0o700))
		},
		"a symlink in the way": func(b *box, temp, _ string) error {
			return errors.Join(os.Remove(temp), os.Symlink("/etc/passwd", temp))
		},
		"a changed file": func(b *box, _, path string) error {
			return os.WriteFile(path, []byte("theirs"), 0o600)
		},
		"a directory for a file": func(b *box, _, path string) error {
			return errors.Join(os.Remove(path), os.Mkdir(path, 0o700))
		},
		"no directory at all": func(b *box, _, path string) error { return os.RemoveAll(filepath.Dir(path)) },
	} {
		t.Run(what, func(t *testing.T) {
			b, one, two := withHosts(t)
			// "one" is put, "two" lies beside itself.
			b.ok("restore", "--no-attached", "s", "base")
			write(b, "then", one)
			b.sh("s", "echo now > /marker")
			b.killedAt("restore.attached.before-replace=kill", "restore", "--no-undo", "s", "base")
			equal(b, "one, which is the same", readFile(t, one), "then")
			if err := plant(b, tempOf(b, two), two); err != nil {
				t.Fatal(err)
			}
			passwd := readFile(t, "/etc/passwd")
			said := b.recovers()
			text, err := os.ReadFile(two)
			if strings.HasSuffix(what, "in the way") { // it is gone around
				equal(b, "two", string(text), "then")
				if _, err := os.Lstat(tempOf(b, two)); err != nil {
					t.Errorf("what is theirs: %v", err)
				}
			} else if !strings.Contains(said, two+" (") || !strings.Contains(said, "and is pinned") ||
				!strings.Contains(said, "agentbox checkpoint unpin ") {
				t.Errorf("two is %q, %v: %s", text, err, said)
			}
			if what == "a changed file" && string(text) != "theirs" {
				t.Errorf("two is %q, %v", text, err)
			}
			if what != "no directory at all" {
				equal(b, "one", readFile(t, one), "then")
			}
			equal(b, "/etc/passwd", readFile(t, "/etc/passwd") == passwd, true)
			equal(b, "status", b.inspect("s").Status, "running")
			equal(b, "marker", b.file("s", "marker"), "then")
			if said := b.recovers(); strings.Contains(said, "restore") {
				t.Errorf("the intent stayed: %s", said)
			}
			b.ok("checkpoint", "s") // no later verb is refused
			b.ok("restore", "--no-attached", "s", "base")
		})
	}
}

// TestAttachedKilledAgain kills a restore that makes a removed sandbox again: nothing knows
// what its host files were, so that those which are not put by then are left, and named.
func TestAttachedKilledAgain(t *testing.T) {
	t.Parallel()
	b, one, two := withHosts(t)
	b.ok("rm", "-f", "s")
	b.killedAt("restore.attached.between=kill", "restore", "--attached", "s", "base")
	equal(b, "one", readFile(t, one), "then")
	write(b, "edited", two)
	if said := b.recovers(); strings.Contains(said, one+" (") || !strings.Contains(said, two+" (") ||
		!strings.Contains(said, "agentbox restore --attached s ") {
		t.Error(said)
	}
	equal(b, "two", readFile(t, two), "edited")
	equal(b, "marker", b.file("s", "marker"), "then")
	equal(b, "status", b.inspect("s").Status, "running")
	b.ok("restore", "--attached", "s", "base")
	areAll(b, "then", one, two)

	// One that is removed for it is not made again unless its files can be put.
	b.sh("s", "echo now > /marker")
	write(b, "now", one, two)
	for _, point := range []string{"restore.recreate.after-remove", "restore.after-head", "restore.attached.between"} {
		b.killedAt(point+"=kill", "restore", "--strategy", "recreate", "s", "base")
		b.ok("recover")
		if point == "restore.recreate.after-remove" {
			for _, path := range []string{one, two} {
				equal(b, point+": "+path, readFile(t, path), "now")
			}
			b.ok("restore", "--attached", "s", "base")
		}
		areAll(b, "then", one, two)
		b.sh("s", "echo now > /marker")
		write(b, "now", one, two)
	}
}

// TestAttachedOpen restores processes that have a host file open, through a bind mount: it
// has to be what it was when they are, which is before host files are put.
func TestAttachedOpen(t *testing.T) {
	t.Parallel()
	b := newBox(t)
	dir := t.TempDir()
	file := filepath.Join(dir, "f")
	write(b, "then", file)
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	b.start("s", "--network", "none", "-v", dir+":/w", "busybox", "sh", "-c", "exec 3</w/f; "+counter)
	b.reaches("s", 2)
	b.checkpoint("--name", "base", "--attach", file, "s")
	write(b, "another length now", file)
	if said := b.fails(4, "restore", "s", "base"); !strings.Contains(said,
		"/w/f, which a process of the checkpoint has open") {
		t.Error(said)
	}
	// A dry run reports it beforehand.
	if said := b.fails(4, "restore", "--dry-run", "s", "base"); !strings.Contains(said,
		"/w/f, which a process of the checkpoint has open") {
		t.Error(said)
	}
	if said := b.ok("restore", "--dry-run", "--strategy", "auto", "s", "base"); !strings.Contains(said,
		"With its processes it cannot be restored now: ") || !strings.Contains(said, "/w/f, which a process") {
		t.Error(said)
	}
	equal(b, "status", b.inspect("s").Status, "running")
	equal(b, "the file", readFile(t, file), "another length now")
	b.ok("restore", "--dry-run", "--files-only", "s", "base")
	b.ok("restore", "--files-only", "s", "base")
	write(b, "then", file)
	b.ok("restore", "--dry-run", "s", "base")
	equal(b, "the file", readFile(t, file), "then")
	equal(b, "the file inside", b.sh("s", "cat /w/f"), "then")
}

// TestAttachedMCP has an agent restore a checkpoint that has host files: they are not its to
// put back, and it is told so in words that fit it.
func TestAttachedMCP(t *testing.T) {
	t.Parallel()
	b, one, two := withHosts(t)
	a := b.agent("s")
	text := a.does(`host files of the checkpoint \(2\) are left as they are: an agent does not put files of the host back`, "restore", args{"checkpoint": "base"})
	if strings.Contains(text, "--no-attached") {
		t.Error(text)
	}
	a.close()
	equal(b, "marker", b.file("s", "marker"), "then")
	for _, path := range []string{one, two} {
		equal(b, path, readFile(t, path), "now")
	}
}
