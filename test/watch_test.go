package test

import (
	"bytes"
	"encoding/binary"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"golang.org/x/sys/unix"
)

// TestWatchersSeeWhatDiffers restores a stopped sandbox while a process watches its upperdir with
// inotify: watches of what did not change go on, and report only what differs.
func TestWatchersSeeWhatDiffers(t *testing.T) {
	t.Parallel()
	b := memoryBox(t)
	b.start("s", "--network", "none", "busybox", "sleep", "1000")
	b.sh("s", "mkdir -p /same/deep /mixed; for f in same/file same/deep/file mixed/kept mixed/changed mixed/gone; do echo old > /$f; done")
	b.ok("stop", "-t", "0", "s")
	ck := b.checkpoint("s")
	b.ok("start", "s")
	b.sh("s", "echo new > /mixed/changed; rm /mixed/gone; echo new > /mixed/more")
	b.ok("stop", "-t", "0", "s")

	w := watchFiles(t, b.inspect("s").Upperdir, "same", "same/deep", "same/file",
		"same/deep/file", "mixed", "mixed/kept")
	b.ok("restore", "s", ck)
	equal(b, "the changed file", b.file("s", "mixed/changed"), "old")
	for _, name := range w.events() {
		if !slices.Contains([]string{"mixed", "mixed/changed", "mixed/gone", "mixed/more"}, name) {
			t.Errorf("an event at %s, which did not change", name)
		}
	}
	// The watches are alive, so these are the inodes of before.
	for _, name := range []string{"same/file", "same/deep/file", "mixed/kept"} {
		if err := os.Chmod(filepath.Join(w.dir, name), 0o640); err != nil {
			t.Fatal(err)
		}
		if got := w.events(); !slices.Contains(got, name) {
			t.Errorf("the watch of %s has heard of %q", name, got)
		}
	}
}

// watcher is an inotify instance over some paths below dir.
type watcher struct {
	*testing.T
	dir   string
	fd    int
	names map[int32]string
}

func watchFiles(t *testing.T, dir string, names ...string) *watcher {
	t.Helper()
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Close(fd) })
	w := &watcher{T: t, dir: dir, fd: fd, names: map[int32]string{}}
	for _, name := range names {
		// To look at a directory, as a comparison does, is no change.
		wd, err := unix.InotifyAddWatch(fd, filepath.Join(dir, name),
			unix.IN_ALL_EVENTS&^(unix.IN_ACCESS|unix.IN_OPEN|unix.IN_CLOSE_NOWRITE))
		if err != nil {
			t.Fatal(err)
		}
		w.names[int32(wd)] = name
	}
	return w
}

// events are the paths at which something was written since the last call. The
// kernel queues an event before the call that causes it returns.
func (w *watcher) events() (paths []string) {
	w.Helper()
	buf := make([]byte, 64<<10)
	for {
		n, err := unix.Read(w.fd, buf)
		if err == unix.EAGAIN {
			return paths
		}
		if err != nil {
			w.Fatal(err)
		}
		for at := buf[:n]; len(at) > 0; {
			name := w.names[int32(binary.NativeEndian.Uint32(at))]
			mask, size := binary.NativeEndian.Uint32(at[4:]), binary.NativeEndian.Uint32(at[12:])
			in := string(bytes.TrimRight(at[unix.SizeofInotifyEvent:unix.SizeofInotifyEvent+size], "\x00"))
			at = at[unix.SizeofInotifyEvent+size:]
			if mask&(unix.IN_IGNORED|unix.IN_DELETE_SELF|unix.IN_MOVE_SELF|unix.IN_Q_OVERFLOW) != 0 {
				w.Errorf("the watch of %q has ended, or is lost: mask %x", name, mask)
			}
			paths = append(paths, filepath.Join(name, in))
		}
	}
}
