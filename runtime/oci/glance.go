package oci

import (
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/internal/kernel"
)

// A list of sandboxes asks for the state of each, and of most of them nothing has
// changed since the last time: they run. What was found out of one that runs holds as
// long as the files that say so are the same, which three looks at the kernel's inodes
// tell, and its first process is still there; whether it is frozen is asked each time.
// So a list costs a third of what reading all of these files again would.

// settled is how long a file has to have been as it is: its time may be as coarse as
// the kernel's clock, and a change right after another one not be seen by it.
const settled = 2 * time.Second

// maxGlances bounds what is remembered, also of sandboxes that others have removed.
const maxGlances = 4096

type glances struct {
	mu   sync.Mutex
	byID map[string]glance
}

// glance is what was found out of a sandbox that runs.
type glance struct {
	files [3]inode // its record, its starts, and the start that runs
	view  view
}

// inode is what changes of a file when it does.
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

// files are those that say that a start runs.
func (b *Backend) files(id string, n int) (list [3]inode, ok bool) {
	for i, path := range []string{b.home.Dir(id, "container.json"), b.home.Dir(id, "runs"), b.home.Start(id, n)} {
		if list[i], ok = inodeOf(path); !ok {
			return list, false
		}
	}
	return list, true
}

// glance tells what is remembered of a sandbox, if that is so still.
func (b *Backend) glance(id string) (view, bool) {
	b.glances.mu.Lock()
	g, ok := b.glances.byID[id]
	b.glances.mu.Unlock()
	if !ok {
		return view{}, false
	}
	if files, ok := b.files(id, g.view.run.Number); !ok || files != g.files || !kernel.Member(g.view.pid, b.home.Cgroup(id)) {
		b.glances.mu.Lock()
		delete(b.glances.byID, id)
		b.glances.mu.Unlock()
		return view{}, false
	}
	v := g.view
	v.Lower = slices.Clone(v.Lower)
	v.status = runtime.Running
	if b.cgroups.Frozen(b.home.Cgroup(id)) {
		v.status = runtime.Paused
	}
	return v, true
}

// remember keeps what look has found out since began, if it will be of use.
func (b *Backend) remember(id string, v view, began time.Time) {
	if !v.live() || !v.noted || len(v.dirty) > 0 || v.run.Number == 0 {
		return
	}
	files, ok := b.files(id, v.run.Number)
	if !ok || slices.ContainsFunc(files[:], func(in inode) bool {
		// What has changed since before the look, or so lately that more may follow unseen.
		return began.Sub(time.Unix(in.ctime.Unix())) < settled
	}) {
		return
	}
	b.glances.mu.Lock()
	defer b.glances.mu.Unlock()
	if b.glances.byID == nil || len(b.glances.byID) >= maxGlances {
		b.glances.byID = map[string]glance{}
	}
	b.glances.byID[id] = glance{files, v}
}
