package kernel

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/guard"
)

// Watcher tells that something changed in some directories or files: not what,
// since its users look for themselves.
type Watcher struct {
	f      *os.File
	Events chan struct{}
}

// Watch begins to watch; what changed before is not told.
func Watch(paths ...string) (*Watcher, error) {
	fd, err := unix.InotifyInit1(unix.IN_NONBLOCK | unix.IN_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("inotify: %w", err)
	}
	w := &Watcher{os.NewFile(uintptr(fd), "inotify"), make(chan struct{}, 1)}
	const mask = unix.IN_MODIFY | unix.IN_CREATE | unix.IN_MOVED_TO | unix.IN_DELETE | unix.IN_DELETE_SELF | unix.IN_MOVE_SELF | unix.IN_ATTRIB
	for _, path := range paths {
		if _, err := unix.InotifyAddWatch(fd, path, mask); err != nil {
			w.Close()
			return nil, fmt.Errorf("watch %s: %w", path, err)
		}
	}
	guard.Go(w.read)
	return w, nil
}

func (w *Watcher) read() {
	buf := make([]byte, 16<<10)
	for {
		if _, err := w.f.Read(buf); err != nil {
			return
		}
		select {
		case w.Events <- struct{}{}:
		default: // one is waiting already
		}
	}
}

// Close ends the watch.
func (w *Watcher) Close() { _ = w.f.Close() }
