package backendtest

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"time"

	"github.com/agentbox/agentbox/runtime"
)

func removeRunning(e *bench) {
	s := e.spec(sh("sleep 1000 & " + ticking)...)
	id := e.startSpec(s)
	upper := e.inspect(id).Upper
	if err := e.b.Remove(e.ctx, id); err != nil {
		e.Fatal(err)
	}
	if _, err := os.Lstat(upper); !errors.Is(err, os.ErrNotExist) {
		e.Errorf("the upperdir after Remove: %v", err)
	}
	e.removed(id)
}

// removed checks that nothing of a container is left.
func (e *bench) removed(id string) {
	e.Helper()
	_, err := e.b.Inspect(e.ctx, id)
	e.wantErr("Inspect after Remove", err, runtime.ErrNotFound)
	ids, err := e.b.List(e.ctx)
	if err != nil || slices.Contains(ids, id) {
		e.Errorf("List after Remove: %v, %v", ids, err)
	}
	e.leaks(snapshot())
}

func removePaused(e *bench) {
	id := e.start(sh(ticking)...)
	e.pause(id)
	if err := e.within("Remove of a paused one", func() error { return e.b.Remove(e.ctx, id) }); err != nil {
		e.Fatal(err)
	}
	e.removed(id)
}

func removeIdempotent(e *bench) {
	if err := e.b.Remove(e.ctx, newID()); err != nil {
		e.Errorf("Remove of an unknown id: %v", err)
	}
	id := e.create(e.spec("true"))
	for range 2 {
		if err := e.b.Remove(e.ctx, id); err != nil {
			e.Errorf("Remove: %v", err)
		}
	}
	e.removed(id)
}

func removeAgain(e *bench) {
	s := e.spec(sh("echo x >> /runs")...)
	for range 3 {
		id := e.startSpec(s)
		equal(e, "exit", e.wait(id), 0)
		equal(e, "files of this one alone", e.file(id, "runs"), "x\n")
		out, _ := e.logs(id, runtime.LogOptions{Tail: -1})
		equal(e, "log of this one alone", out, "")
		if err := e.b.Remove(e.ctx, id); err != nil {
			e.Fatal(err)
		}
	}
}

func removeCancelled(e *bench) {
	id := e.start("sleep", "1000")
	if err := e.b.Remove(cancelled(), id); err == nil {
		e.removed(id)
		return
	}
	for _, after := range []time.Duration{time.Millisecond, 10 * time.Millisecond} {
		ctx, cancel := context.WithTimeout(e.ctx, after)
		_ = e.b.Remove(ctx, id)
		cancel()
	}
	if err := e.b.Remove(e.ctx, id); err != nil {
		e.Fatalf("Remove after one that was cancelled: %v", err)
	}
	e.removed(id)
}

func listHolds(e *bench) {
	want := []string{
		e.create(e.spec("true")),
		e.start("sleep", "1000"),
		e.start("true"),
	}
	e.wait(want[2])
	got, err := e.b.List(e.ctx)
	if err != nil {
		e.Fatal(err)
	}
	slices.Sort(got)
	slices.Sort(want)
	if !slices.Equal(got, want) {
		e.Errorf("List = %v, want %v", got, want)
	}
}

func filesVisible(e *bench) {
	id := e.start(sh("mkdir /work; echo content > /work/file; chmod 640 /work/file; chown 1000:1000 /work/file; ln -s file /work/link; mkfifo /work/fifo; sleep 1000")...)
	e.eventually("the last file is there", func() bool {
		_, err := os.Lstat(e.upper(id, "work/fifo"))
		return err == nil
	})
	fi, err := os.Lstat(e.upper(id, "work/file"))
	if err != nil {
		e.Fatal(err)
	}
	st := fi.Sys().(*syscall.Stat_t)
	equal(e, "mode", fi.Mode(), os.FileMode(0o640))
	equal(e, "owner", [2]uint32{st.Uid, st.Gid}, [2]uint32{1000, 1000})
	equal(e, "content", e.file(id, "work/file"), "content\n")
	if link, err := os.Readlink(e.upper(id, "work/link")); link != "file" {
		e.Errorf("link: %q, %v", link, err)
	}
	fi, err = os.Lstat(e.upper(id, "work/fifo"))
	if err != nil || fi.Mode().Type() != os.ModeNamedPipe {
		e.Errorf("fifo: %v, %v", fi, err)
	}
}

func filesPut(e *bench) {
	id := e.start(sh("echo old > /given; exit")...)
	equal(e, "exit", e.wait(id), 0)
	e.stop(id)
	if err := os.WriteFile(e.upper(id, "given"), []byte("new\n"), 0o644); err != nil {
		e.Fatal(err)
	}
	// A whole other upperdir in its place, as a restore does it.
	upper := e.inspect(id).Upper
	if err := os.Rename(upper, upper+".old"); err != nil {
		e.Fatal(err)
	}
	if err := os.Mkdir(upper, 0o755); err != nil {
		e.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(upper, "other"), []byte("swapped\n"), 0o644); err != nil {
		e.Fatal(err)
	}
	if err := os.RemoveAll(upper + ".old"); err != nil {
		e.Fatal(err)
	}
	e.restart(id)
	equal(e, "exit", e.wait(id), 0)
	equal(e, "a file of the new upperdir", e.file(id, "other"), "swapped\n")
	equal(e, "what it wrote there", e.file(id, "given"), "old\n")
}

func filesWhiteouts(e *bench) {
	id := e.start(sh("if test -e /etc/base; then rm /etc/base; rm -r /srv/tree; mkdir /srv/tree; echo new > /srv/tree/c; else ls /srv/tree; fi")...)
	equal(e, "exit", e.wait(id), 0)
	e.stop(id)
	fi, err := os.Lstat(e.upper(id, "etc/base"))
	if err != nil {
		e.Fatalf("the whiteout of a file of the image: %v", err)
	}
	if st := fi.Sys().(*syscall.Stat_t); fi.Mode()&os.ModeCharDevice == 0 || st.Rdev != 0 {
		e.Errorf("the whiteout is %v, device %d", fi.Mode(), st.Rdev)
	}
	buf := make([]byte, 8)
	n, err := syscall.Getxattr(e.upper(id, "srv/tree"), "trusted.overlay.opaque", buf)
	if err != nil || string(buf[:n]) != "y" {
		e.Errorf("the opaque mark of a directory made anew: %q, %v", buf[:max(n, 0)], err)
	}
	e.restart(id)
	equal(e, "exit after the restart", e.wait(id), 0)
	out, _ := e.logs(id, runtime.LogOptions{Tail: -1})
	equal(e, "what the container sees after the restart", out, "c\n")
}

func filesQuiescent(e *bench) {
	id := e.start(sh(ticking)...)
	e.eventually("it counts", func() bool { return len(e.file(id, "ticks")) > 10 })
	e.stop(id)
	before, err := os.Stat(e.upper(id, "ticks"))
	if err != nil {
		e.Fatal(err)
	}
	time.Sleep(100 * time.Millisecond)
	after, err := os.Stat(e.upper(id, "ticks"))
	if err != nil {
		e.Fatal(err)
	}
	equal(e, "size", after.Size(), before.Size())
	equal(e, "mtime", after.ModTime(), before.ModTime())
}

// mounted reads and writes through Mount.
func mounted(e *bench, id, content string) {
	e.Helper()
	err := e.b.Mount(e.ctx, id, func(root string) error {
		for path, want := range map[string]string{"etc/base": "base\n", "own": content} {
			b, err := os.ReadFile(filepath.Join(root, path))
			if err != nil || string(b) != want {
				e.Errorf("%s through Mount: %q, %v, want %q", path, b, err, want)
			}
		}
		return e.f.IDs.AsRoot(func() error {
			return os.WriteFile(filepath.Join(root, "from-host"), []byte("hello\n"), 0o644)
		})
	})
	if err != nil {
		e.Fatalf("Mount: %v", err)
	}
	equal(e, "what was written through Mount, in the upperdir", e.file(id, "from-host"), "hello\n")
}

func mountRunning(e *bench) {
	id := e.start(sh("echo running > /own; sleep 1000")...)
	e.eventually("its file is there", func() bool { return e.file(id, "own") == "running\n" })
	mounted(e, id, "running\n")
	out, _ := e.exec(id, "cat", "/from-host")
	equal(e, "what was written through Mount, in the container", out, "hello\n")
}

func mountStopped(e *bench) {
	id := e.create(e.spec(sh("cat /from-host; sleep 1000")...))
	if err := os.WriteFile(e.upper(id, "own"), []byte("created\n"), 0o644); err != nil {
		e.Fatal(err)
	}
	mounted(e, id, "created\n")
	if m := mountsUnder(e.root); len(m) > 0 {
		e.Errorf("still mounted after Mount: %v", m)
	}
	e.restart(id)
	e.eventually("the container has what was written through Mount", func() bool {
		out, _ := e.logs(id, runtime.LogOptions{Tail: -1})
		return out == "hello\n"
	})
	e.stop(id)
	mounted(e, id, "created\n")
	if m := mountsUnder(e.root); len(m) > 0 {
		e.Errorf("still mounted after Mount: %v", m)
	}
}

func mountError(e *bench) {
	id := e.create(e.spec("sleep", "1000"))
	mine := errors.New("mine")
	for range 2 {
		e.wantErr("Mount", e.b.Mount(e.ctx, id, func(string) error { return mine }), mine)
		if m := mountsUnder(e.root); len(m) > 0 && e.inspect(id).Status != runtime.Running {
			e.Errorf("still mounted after Mount: %v", m)
		}
		if e.inspect(id).Status == runtime.Created {
			e.restart(id)
		}
	}
}

func mountUnknown(e *bench) {
	err := e.b.Mount(e.ctx, newID(), func(string) error { e.Error("the function was called"); return nil })
	e.wantErr("Mount", err, runtime.ErrNotFound)
}
