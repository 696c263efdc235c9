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

// Watcher reports that something changed in some directories or files, but not what: its users
// look for themselves.
type Watcher struct {
	f      *os.File // nil: one that looks again and again
	stop   func()
	Events chan struct{}
}

// every is the polling interval of a Watcher without inotify.
const every = 200 * time.Millisecond

// Watch begins to watch; earlier changes are not reported. The kernel gives each user 128
// watchers by default; without one, Watch falls back to polling, which reports directories
// as changed each time.
func Watch(paths ...string) (*Watcher, error) {
	w, err := notified(paths)
	if errors.Is(err, unix.EMFILE) || errors.Is(err, unix.ENFILE) || errors.Is(err, unix.ENOSPC) {
		return repeated(paths)
	}
	return w, err
}

func repeated(paths []string) (*Watcher, error) {
	p := polled{}
	for _, path := range paths {
		now, err := sight(path)
		if err != nil {
			return nil, fmt.Errorf("watch %s: %w", path, err)
		}
		p.paths, p.last = append(p.paths, path), append(p.last, now)
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
				if p.changed() {
					w.tell()
				}
			}
		}
	})
	return w, nil
}

// polled holds polled paths, and their last state.
type polled struct {
	paths []string
	last  []seen
	again bool
}

// seen identifies a file and its content. It does not cover changes in the files of a
// directory.
type seen struct {
	dir          bool
	ino          uint64
	size         int64
	mtime, ctime unix.Timespec
}

func sight(path string) (seen, error) {
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		return seen{}, err
	}
	return seen{st.Mode&unix.S_IFMT == unix.S_IFDIR, st.Ino, st.Size, st.Mtim, st.Ctim}, nil
}

// changed reports whether something may have changed since the last call. It reports a changed
// file twice: a change within the same tick of the kernel's clock leaves its times alone.
func (p *polled) changed() bool {
	told := p.again
	p.again = false
	for i, path := range p.paths {
		now, err := sight(path)
		if err == nil && now.dir {
			told = true
			continue
		}
		if now != p.last[i] {
			told, p.again = true, true
		}
		p.last[i] = now
	}
	return told
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
