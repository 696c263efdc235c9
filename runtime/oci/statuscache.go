package oci

import (
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/internal/box"
	"github.com/agentbox/agentbox/runtime/internal/kernel"
)

// A list of sandboxes needs the state of each, and most of them run unchanged since the last
// list. The cached state of a running one holds as long as its files are unchanged, which
// takes three looks at the kernel's inodes, and its first process, which is held open, lives.
// Whether it is frozen is read each time from its cgroup, which is held open as well. So a
// list costs a fraction of reading all of these files again.

// settled is how long a file must be unchanged: its time may be as coarse as the kernel's clock, and
// a change right after another one not show in it.
const settled = 2 * time.Second

// maxCached bounds the cached states, also of sandboxes that other processes have removed: each
// takes two descriptors, and most descriptors are for other uses.
func maxCached() int {
	const most = 1024
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		return 0
	}
	return int(min(limit.Cur/8, most))
}

type statusCache struct {
	mu   sync.Mutex
	byID map[string]cached
}

// cached is the cached state of a running sandbox.
type cached struct {
	paths [3]string // of its record, its starts, and the start that runs
	files [3]inode
	view  box.View
	cold  *kernel.Freezer
}

func (g *cached) close() {
	g.view.Close()
	if g.cold != nil {
		g.cold.Close()
		g.cold = nil
	}
}

// inode is the metadata that changes when a file does.
type inode struct {
	dev, ino     uint64
	size         int64
	mtime, ctime unix.Timespec
}

func inodeOf(path string) (in inode, ok bool) {
	var st unix.Stat_t
	for {
		switch err := unix.Stat(path, &st); err {
		case nil:
			return inode{uint64(st.Dev), st.Ino, st.Size, st.Mtim, st.Ctim}, true
		case unix.EINTR:
		default:
			return inode{}, false
		}
	}
}

// paths are those of the files that say that a start runs.
func (b *Backend) paths(id string, n int) [3]string {
	return [3]string{b.box.Dir(id, "container.json"), b.box.Dir(id, "runs"), b.box.StartDir(id, n)}
}

func inodesOf(paths [3]string) (list [3]inode, ok bool) {
	for i, path := range paths {
		if list[i], ok = inodeOf(path); !ok {
			return list, false
		}
	}
	return list, true
}

// cachedView returns the cached state of a sandbox, if it still holds.
func (b *Backend) cachedView(id string) (box.View, bool) {
	b.cache.mu.Lock()
	g, ok := b.cache.byID[id]
	b.cache.mu.Unlock()
	if !ok {
		return box.View{}, false
	}
	// Should another look have let go of the process meanwhile, it does not count as alive.
	if files, ok := inodesOf(g.paths); !ok || files != g.files || !g.view.First.Alive() {
		b.uncache(id)
		return box.View{}, false
	}
	frozen, err := g.cold.Frozen()
	if err != nil {
		b.uncache(id)
		return box.View{}, false // the cgroup is gone, or the look fails of it, too, and says so
	}
	v := g.view
	v.Lower = slices.Clone(v.Lower)
	v.Status = runtime.Running
	if frozen {
		v.Status = runtime.Paused
	}
	return v, true
}

// uncache drops the cached state of a sandbox.
func (b *Backend) uncache(id string) {
	b.cache.mu.Lock()
	defer b.cache.mu.Unlock()
	g := b.cache.byID[id]
	g.close()
	delete(b.cache.byID, id)
}

// cacheView caches what a look has found out since began, if it will be of use.
func (b *Backend) cacheView(id string, v box.View, began time.Time) bool {
	if v.First == nil || !v.Noted || len(v.Stale) > 0 || v.Run.Number == 0 {
		return false
	}
	paths := b.paths(id, v.Run.Number)
	files, ok := inodesOf(paths)
	if !ok || slices.ContainsFunc(files[:], func(in inode) bool {
		// A file changed since before the look, or so lately that more may follow unseen.
		return began.Sub(time.Unix(in.ctime.Unix())) < settled
	}) {
		return false
	}
	cold, err := b.box.Cgroups.Freezer(b.box.Cgroup(id))
	if err != nil {
		return false
	}
	b.cache.mu.Lock()
	defer b.cache.mu.Unlock()
	if b.cache.byID == nil {
		b.cache.byID = map[string]cached{}
	}
	old, ok := b.cache.byID[id]
	most := maxCached()
	if most == 0 {
		cold.Close()
		return false
	}
	if !ok && len(b.cache.byID) >= most {
		for id, g := range b.cache.byID { // any of them
			g.close()
			delete(b.cache.byID, id)
			break
		}
	}
	old.close()
	b.cache.byID[id] = cached{paths, files, v, cold}
	return true
}
