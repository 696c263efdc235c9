package kernel

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/guard"
)

// Watcher tells that something changed in some directories or files: not what,
// since its users look for themselves.
type Watcher struct {
	f      *os.File // nil: one that says so again and again
	stop   func()
	Events chan struct{}
}

// every is how often a Watcher that is told of nothing says that something changed.
const every = 200 * time.Millisecond

// Watch begins to watch; what changed before is not told. The kernel gives each
// user 128 watchers, unless told otherwise; who gets none has to look again and again.
func Watch(paths ...string) (*Watcher, error) {
	w, err := notified(paths)
	if errors.Is(err, unix.EMFILE) || errors.Is(err, unix.ENFILE) || errors.Is(err, unix.ENOSPC) {
		return repeated(paths)
	}
	return w, err
}

func repeated(paths []string) (*Watcher, error) {
	for _, path := range paths {
		if _, err := os.Stat(path); err != nil {
			return nil, fmt.Errorf("watch %s: %w", path, err)
		}
	}
	w := &Watcher{Events: make(chan struct{}, 1)}
	ctx, stop := context.WithCancel(context.Background())
	w.stop = stop
	guard.Go(func() {
		tick := time.NewTicker(every)
		defer tick.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
				w.tell()
			}
		}
	})
	return w, nil
}

func notified(paths []string) (*Watcher, error) {
	fd, err := unix.InotifyInit1(unix.IN_NONBLOCK | unix.IN_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("inotify: %w", err)
	}
	w := &Watcher{f: os.NewFile(uintptr(fd), "inotify"), Events: make(chan struct{}, 1)}
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
		w.tell()
	}
}

func (w *Watcher) tell() {
	select {
	case w.Events <- struct{}{}:
	default: // one is waiting already
	}
}

// Close ends the watch.
func (w *Watcher) Close() {
	if w.f == nil {
		w.stop()
		return
	}
	_ = w.f.Close()
}
