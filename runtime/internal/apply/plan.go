package apply

import (
	"bytes"
	"io"
	"io/fs"
	"iter"
	"maps"
	"os"
	"path"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/overlay"
	"github.com/agentbox/agentbox/runtime"
)

// The effect of an op on one path of the directory, and on all below it.
const (
	opPut    = "put"    // nothing is there: what is staged comes
	opSwap   = "swap"   // what is staged and what is there change places
	opRemove = "remove" // what is there goes
)

// op is one rename between the original and the scratch directory beside it. The scratch directory
// shows whether it has been done.
type op struct {
	Kind string `json:"kind"`
	Path []byte `json:"path"` // in the original; base64, since names are any bytes
	At   []byte `json:"at"`   // in the scratch directory
	// The old file is in the original, the new one is staged. A fingerprint holds
	// wherever the file is.
	OldIno uint64 `json:"old_ino,omitempty"`
	Old    string `json:"old,omitempty"`
	NewIno uint64 `json:"new_ino,omitempty"`
	New    string `json:"new,omitempty"`
}

// dirOp gives a directory that both sides have the attributes of the upper one.
type dirOp struct {
	Path []byte `json:"path"`
	Old  attrs  `json:"old"`
	New  attrs  `json:"new"`
}

// plan is the list of an apply's operations.
type plan struct {
	Ops  []op    `json:"ops"`  // in the order of overlay.ComparePaths; none lies below another
	Dirs []dirOp `json:"dirs"` // likewise

	conflicts []string
	refs      []runtime.AppliedRef // of the conflicts
	links     map[string]bool      // names in the upperdir that others are hard links to
	left      map[string]bool      // what does not come with the directory that it is in
	merged    map[string]*merged   // files that come otherwise than the upperdir has them
}

// planner turns the upperdir of a volume into a plan.
type planner struct {
	plan
	from, upper *Root
	gate        *gate
	done        string // all below this path is taken care of
	dirTimes    map[string]overlay.Time
}

const whiteoutXattr = overlayXattr + "whiteout"

// newPlan compares an upperdir with the directory below it. All that the upperdir has comes.
func newPlan(from *Root, entries iter.Seq2[overlay.Entry, error], upper *Root, g *gate) (*plan, error) {
	p := &planner{from: from, upper: upper, gate: g, dirTimes: map[string]overlay.Time{}}
	p.links = map[string]bool{}
	for e, err := range entries {
		if err == nil {
			err = p.add(e)
		}
		if err != nil {
			return nil, err
		}
	}
	return &p.plan, g.bare()
}

func (p *planner) add(e overlay.Entry) error {
	dir, white := e.Type == overlay.TypeDir, whiteout(&e)
	if e.Hardlink != "" {
		p.links[e.Hardlink] = true
	}
	if dir {
		p.dirTimes[e.Path] = e.Mtime
	}
	if p.done != "" && strings.HasPrefix(e.Path, p.done+"/") {
		if white {
			return nil
		}
		p.gate.git(e.Path, "", e.Type)
		return p.gate.comes(e)
	}
	if e.Path == "." {
		return p.merge(e)
	}
	low, err := p.from.stat(e.Path)
	if err != nil {
		return err
	}
	switch {
	case white:
		if low == nil {
			return nil
		}
		p.gate.git(e.Path, gitType(low), "")
		// The whiteout changed its directory, which nothing did since.
		parent := p.dirTimes[path.Dir(e.Path)]
		return p.op(opRemove, e.Path, low, since(low, unix.StatxTimestamp{Sec: parent.Sec, Nsec: uint32(parent.Nsec)}))
	case dir && isDir(low) && !opaque(&e):
		return p.merge(e)
	}
	if dir {
		p.done = e.Path
	}
	if low == nil {
		p.gate.git(e.Path, "", e.Type)
		if err := p.gate.comes(e); err != nil {
			return err
		}
		return p.op(opPut, e.Path, nil, false)
	}
	up, err := p.upper.stat(e.Path)
	if err != nil {
		return err
	}
	if up == nil {
		return &fs.PathError{Op: "stat", Path: e.Path, Err: unix.ENOENT}
	}
	if !dir && !isDir(low) {
		same, err := p.same(e, up, low)
		if err != nil || same {
			return err
		}
	}
	p.gate.git(e.Path, gitType(low), e.Type)
	if err := p.gate.comes(e); err != nil {
		return err
	}
	return p.op(opSwap, e.Path, low, up.Mask&unix.STATX_BTIME != 0 && since(low, up.Btime))
}

// gitType is the type of what a directory has, as far as git's gate asks: a directory, or anything else.
func gitType(st *unix.Statx_t) overlay.Type {
	if isDir(st) {
		return overlay.TypeDir
	}
	return overlay.TypeFile
}

// since reports whether something in the original surely appeared or changed after a given
// moment, at which the volume had its own in place. Timestamps set into the future are no
// evidence.
func since(low *unix.Statx_t, t unix.StatxTimestamp) bool {
	after := func(a, b unix.StatxTimestamp) bool {
		return a.Sec > b.Sec || a.Sec == b.Sec && a.Nsec > b.Nsec
	}
	return low.Mask&unix.STATX_BTIME != 0 && after(low.Btime, t) || after(low.Mtime, t) && !after(low.Mtime, low.Ctime)
}

func (p *planner) op(kind, rel string, low *unix.Statx_t, conflict bool) error {
	print, err := p.from.fingerprint(rel)
	if err != nil {
		return err
	}
	if conflict {
		p.conflicts = append(p.conflicts, rel)
	}
	p.plan.op(kind, rel, low, print)
	return nil
}

// op adds an operation on what is at a path, of which this is the fingerprint.
func (p *plan) op(kind, rel string, low *unix.Statx_t, print string) {
	o := op{Kind: kind, Path: []byte(rel), At: []byte("new/" + rel)}
	if low != nil {
		o.OldIno, o.Old = low.Ino, print
	}
	p.Ops = append(p.Ops, o)
}

// merge plans for a directory that both sides have.
func (p *planner) merge(e overlay.Entry) error {
	d, err := p.from.sub(e.Path)
	if err != nil {
		return err
	}
	defer d.Close()
	old, err := attrsOf(d)
	if err != nil {
		return err
	}
	to := attrsOfEntry(e)
	if !p.gate.owners {
		to.UID, to.GID = old.UID, old.GID
	}
	p.Dirs = append(p.Dirs, dirOp{Path: []byte(e.Path), Old: old, New: to})
	return nil
}

// same reports whether a file that was copied up has not been changed after all.
func (p *planner) same(e overlay.Entry, up, low *unix.Statx_t) (bool, error) {
	if up.Nlink != 1 || low.Nlink != 1 || up.Mode != low.Mode ||
		p.gate.owners && (up.Uid != low.Uid || up.Gid != low.Gid) || up.Size != low.Size ||
		up.Mtime.Sec != low.Mtime.Sec || up.Mtime.Nsec != low.Mtime.Nsec || up.Rdev_major != low.Rdev_major ||
		up.Rdev_minor != low.Rdev_minor {
		return false, nil
	}
	d, name, err := p.from.parent(e.Path)
	if err != nil {
		return false, err
	}
	defer d.Close()
	raw, err := xattrs(procFD(d)+"/"+name, unix.Llistxattr, unix.Lgetxattr)
	if err != nil {
		return false, err
	}
	if !maps.EqualFunc(visible(raw), visible(e.Xattrs), func(a, b []byte) bool { return bytes.Equal(a, b) }) {
		return false, nil
	}
	switch e.Type {
	case overlay.TypeFile:
		return p.sameContent(d, name, e)
	case overlay.TypeSymlink:
		buf := make([]byte, unix.PathMax)
		n, err := unix.Readlinkat(int(d.Fd()), name, buf)
		return err == nil && string(buf[:n]) == e.Link, err
	}
	return true, nil
}

func (p *planner) sameContent(d *os.File, name string, e overlay.Entry) (bool, error) {
	if e.Extents != nil {
		return false, nil // where the holes are is part of it
	}
	low, err := openFile(d, name)
	if err != nil {
		return false, err
	}
	defer low.Close()
	if hole, err := low.Seek(0, unix.SEEK_HOLE); err == nil && hole < e.Size {
		return false, nil
	}
	if _, err := low.Seek(0, io.SeekStart); err != nil {
		return false, err
	}
	ud, name, err := p.upper.parent(e.Path)
	if err != nil {
		return false, err
	}
	defer ud.Close()
	up, err := openFile(ud, name)
	if err != nil {
		return false, err
	}
	defer up.Close()
	return sameBytes(low, up)
}

func openFile(d *os.File, name string) (*os.File, error) {
	fd, err := unix.Openat(int(d.Fd()), name,
		unix.O_RDONLY|unix.O_NOFOLLOW|unix.O_CLOEXEC|unix.O_NONBLOCK|unix.O_NOATIME, 0)
	if err != nil {
		return nil, &fs.PathError{Op: "open", Path: name, Err: err}
	}
	return os.NewFile(uintptr(fd), name), nil
}
