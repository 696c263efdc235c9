package oci

import (
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/runtime"
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

// maxGlances bounds the cached states, also of sandboxes that other processes have removed: each
// takes two descriptors, and most descriptors are for other uses.
func maxGlances() int {
	const most = 1024
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		return 0
	}
	return int(min(limit.Cur/8, most))
}

type glances struct {
	mu   sync.Mutex
	byID map[string]glance
}

// glance is the cached state of a running sandbox.
type glance struct {
	paths [3]string // of its record, its starts, and the start that runs
	files [3]inode
	view  view
	cold  *kernel.Freezer
}

func (g *glance) letGo() {
	g.view.letGo()
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
	return [3]string{b.home.Dir(id, "container.json"), b.home.Dir(id, "runs"), b.home.Start(id, n)}
}

func inodesOf(paths [3]string) (list [3]inode, ok bool) {
	for i, path := range paths {
		if list[i], ok = inodeOf(path); !ok {
			return list, false
		}
	}
	return list, true
}

// glance returns the cached state of a sandbox, if it still holds.
func (b *Backend) glance(id string) (view, bool) {
	b.glances.mu.Lock()
	g, ok := b.glances.byID[id]
	b.glances.mu.Unlock()
	if !ok {
		return view{}, false
	}
	// Should another look have let go of the process meanwhile, it does not count as alive.
	if files, ok := inodesOf(g.paths); !ok || files != g.files || !g.view.first.Alive() {
		b.forget(id)
		return view{}, false
	}
	frozen, err := g.cold.Frozen()
	if err != nil {
		b.forget(id)
		return view{}, false // the cgroup is gone, or the look fails of it, too, and says so
	}
	v := g.view
	v.Lower = slices.Clone(v.Lower)
	v.status = runtime.Running
	if frozen {
		v.status = runtime.Paused
	}
	return v, true
}

// forget drops the cached state of a sandbox.
func (b *Backend) forget(id string) {
	b.glances.mu.Lock()
	defer b.glances.mu.Unlock()
	g := b.glances.byID[id]
	g.letGo()
	delete(b.glances.byID, id)
}

// remember caches what hold has found out since began, if it will be of use.
func (b *Backend) remember(id string, v view, began time.Time) bool {
	if v.first == nil || !v.noted || len(v.dirty) > 0 || v.run.Number == 0 {
		return false
	}
	paths := b.paths(id, v.run.Number)
	files, ok := inodesOf(paths)
	if !ok || slices.ContainsFunc(files[:], func(in inode) bool {
		// A file changed since before the look, or so lately that more may follow unseen.
		return began.Sub(time.Unix(in.ctime.Unix())) < settled
	}) {
		return false
	}
	cold, err := b.cgroups.Freezer(b.home.Cgroup(id))
	if err != nil {
		return false
	}
	b.glances.mu.Lock()
	defer b.glances.mu.Unlock()
	if b.glances.byID == nil {
		b.glances.byID = map[string]glance{}
	}
	old, ok := b.glances.byID[id]
	most := maxGlances()
	if most == 0 {
		cold.Close()
		return false
	}
	if !ok && len(b.glances.byID) >= most {
		for id, g := range b.glances.byID { // any of them
			g.letGo()
			delete(b.glances.byID, id)
			break
		}
	}
	old.letGo()
	b.glances.byID[id] = glance{paths, files, v, cold}
	return true
}
