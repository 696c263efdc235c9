package criu

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"

	"github.com/checkpoint-restore/go-criu/v7/rpc"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"

	"github.com/agentbox/agentbox/criu/host"
	"github.com/agentbox/agentbox/internal/guard"
)

// Ahead is memory of a container that was written while it ran.
type Ahead struct {
	Dir         string // of its images
	Bytes       int64  // of memory
	Interrupted error  // as that of DumpResult
	frames      map[int]framed
}

// letGoLine is what CRIU logs in a pre-dump once it has let go of all processes.
// It writes what it has of their memory, by reference, in pipes only then.
const letGoLine = "Pre-dumping tasks' memory"

// PreDump writes the memory of a paused container to images for DumpOptions.Ahead.
//
// The container may go on as soon as CRIU has let go of it, long before all is
// written: letGo is called then, once. An error that comes before leaves that to
// the caller. Once begun it runs to its end, whatever becomes of ctx, as Dump.
func PreDump(ctx context.Context, rt Runtime, opts DumpOptions, letGo func() error) (*Ahead, error) {
	members, extra, err := rt.ready(ctx, "pre-dump", &opts)
	if err != nil {
		return nil, err
	}
	extra.flags = append(extra.flags, "--pre-dump")
	if err := ctx.Err(); err != nil { // the last moment at which giving up is free
		return nil, fmt.Errorf("pre-dump %s: %w", rt.ID, err)
	}
	log := filepath.Join(opts.WorkDir, dumpLog)
	watch := watchLog(log)
	defer watch.close()
	d, err := startDump(rt, opts, extra)
	if err != nil {
		return nil, err
	}
	var said string
	var failed error
	ended := make(chan struct{})
	guard.Go(func() {
		defer close(ended)
		said, failed = d.wait()
	})
	if !watch.await(letGoLine, ended) || func() bool { pid, _ := traced(members); return pid != 0 }() {
		<-ended
	}
	a := &Ahead{Dir: opts.ImageDir}
	// CRIU has begun to freeze it as it found it, and does not wait for that.
	if err = rt.Pause(context.WithoutCancel(ctx)); err == nil {
		a.frames, err = framesOf(members)
		a.Interrupted = rt.continueWaits(context.WithoutCancel(ctx), members)
	}
	err = errors.Join(err, letGo())
	<-ended
	if failed != nil {
		return nil, errors.Join(explainDump(rt, log, said, failed), err)
	}
	if err == nil {
		err = CheckImages(a.Dir)
	}
	if err != nil {
		return nil, fmt.Errorf("pre-dump %s: %w", rt.ID, err)
	}
	a.Bytes, err = pagesIn(a.Dir)
	return a, err
}

// pagesIn returns how long the images of pages in a directory are together.
func pagesIn(dir string) (sum int64, err error) {
	files, err := filepath.Glob(filepath.Join(dir, "pages-*.img"))
	for _, f := range files {
		st, e := os.Stat(f)
		if e != nil {
			return 0, e
		}
		sum += st.Size()
	}
	return sum, err
}

// logWatch waits for a line in a log that another process writes.
type logWatch struct {
	path    string
	changes *os.File // inotify's
	changed chan struct{}
}

// watchLog begins to watch; where that cannot be, await waits for the end.
func watchLog(path string) *logWatch {
	w := &logWatch{path: path, changed: make(chan struct{}, 1)}
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	if err != nil {
		return w
	}
	w.changes = os.NewFile(uintptr(fd), "inotify")
	if _, err := unix.InotifyAddWatch(fd, filepath.Dir(path), unix.IN_CREATE|unix.IN_MODIFY); err != nil {
		return w
	}
	guard.Go(func() {
		buf := make([]byte, 64<<10)
		for {
			if _, err := w.changes.Read(buf); err != nil {
				return // closed
			}
			select {
			case w.changed <- struct{}{}:
			default:
			}
		}
	})
	return w
}

func (w *logWatch) close() {
	if w.changes != nil {
		_ = w.changes.Close()
	}
}

// await tells whether the log has the line, before ended is closed.
func (w *logWatch) await(line string, ended <-chan struct{}) bool {
	var log *os.File
	defer func() {
		if log != nil {
			_ = log.Close()
		}
	}()
	var text []byte
	buf := make([]byte, 64<<10)
	for {
		if log == nil {
			log, _ = os.Open(w.path)
		}
		for log != nil {
			n, err := log.Read(buf)
			if text = append(text, buf[:n]...); bytes.Contains(text, []byte(line)) {
				return true
			}
			text = text[max(0, len(text)-len(line)):]
			if err != nil {
				break
			}
		}
		select {
		case <-w.changed:
		case <-ended:
			return false
		}
	}
}

// tracking is what DirtyTracking has found out.
var tracking struct {
	sync.Mutex
	known bool
	lacks string
}

// DirtyTracking tells what this host lacks for PreDump; empty: nothing. It asks
// CRIU once.
func DirtyTracking(ctx context.Context) (lacks string, err error) {
	tracking.Lock()
	defer tracking.Unlock()
	if tracking.known {
		return tracking.lacks, nil
	}
	path, err := host.Find("criu", nil)
	if err != nil {
		return "", err
	}
	resp, err := swrk(ctx, path, &rpc.CriuReq{Type: rpc.CriuReqType_FEATURE_CHECK.Enum(), Features: &rpc.CriuFeatures{MemTrack: proto.Bool(true)}})
	switch {
	case ctx.Err() != nil:
		return "", ctx.Err()
	case err != nil || !resp.GetFeatures().GetMemTrack():
		lacks = "this kernel does not track which memory changes (CONFIG_MEM_SOFT_DIRTY)"
	default:
		if lacks, err = framesLack(); err != nil {
			return "", err
		}
	}
	tracking.known, tracking.lacks = true, lacks
	return lacks, nil
}
