package apply

import (
	"context"
	"encoding/json"
	"io"
	"path"
	"slices"

	"github.com/agentbox/agentbox/overlay"
	"github.com/agentbox/agentbox/runtime"
)

// Three sides decide what comes of a workspace: what the sandbox has, what that was made of (the
// base), and what the directory has now. What the sandbox has not changed stays as the directory has
// it. What it has changed comes if the directory still has the base; what both have changed is
// merged, or a conflict.

// Base finds what the sandbox's files at some paths were made of. A path without an entry had
// nothing.
type Base func(ctx context.Context, paths map[string]bool) (map[string]BaseEntry, error)

// BaseEntry is an entry and where its data is.
type BaseEntry struct {
	overlay.Entry
	Data overlay.Source
}

// merged is a file that comes otherwise than the sandbox has it.
type merged struct {
	content []byte
	mode    uint32
	mtime   overlay.Time
}

// side is what one side has at a path.
type side struct {
	*overlay.Entry                                              // nil: nothing
	open           func(context.Context) (io.ReadCloser, error) // the content of a file
}

func (s side) isDir() bool { return s.Entry != nil && s.Type == overlay.TypeDir }

func (s side) isFile() bool { return s.Entry != nil && s.Type == overlay.TypeFile }

func (s side) kind() overlay.Type {
	if s.Entry == nil {
		return ""
	}
	return s.Type
}

// found is what the directory has at a path. The fingerprint was taken first: a change since shows
// when it is renamed.
type found struct {
	side
	print string
	ino   uint64
}

// merger plans an apply of a workspace.
type merger struct {
	*part
	change *Change
	opts   runtime.ApplyOptions
	out    *runtime.Applied

	list   []overlay.Entry // the upperdir
	places map[string]int  // in the list
	base   map[string]BaseEntry
	whole  string // a directory that comes as a whole
	taken  int    // how many paths come
	text   int    // bytes that were merged

	way     map[string]bool // what is picked, and the directories that lead there; nil: all comes
	shown   int             // bytes of patches
	leftOut int             // bytes of text of which only a part comes
}

// merge plans what comes of a workspace.
func (p *part) merge(ctx context.Context, c *Change, opts runtime.ApplyOptions, out *runtime.Applied) error {
	m := &merger{part: p, change: c, opts: opts, out: out, places: map[string]int{}}
	p.plan = &plan{links: map[string]bool{}, left: map[string]bool{}, merged: map[string]*merged{}}
	for e, err := range c.Source.Entries {
		if err != nil {
			return err
		}
		if e.Hardlink != "" {
			p.plan.links[e.Hardlink] = true
		}
		m.places[e.Path] = len(m.list)
		m.list = append(m.list, e)
	}
	if len(m.list) == 0 {
		return nil
	}
	m.lead()
	paths, err := m.paths(ctx)
	if err != nil {
		return err
	}
	if m.base, err = c.Base(ctx, paths); err != nil {
		return err
	}
	changed := len(out.Changes)
	if err := m.both(ctx, 0, len(m.list), false); err != nil {
		return err
	}
	if err := m.picksUsed(); err != nil {
		return err
	}
	if err := m.gate.bare(); err != nil {
		return err
	}
	slices.SortFunc(p.plan.Ops, func(a, b op) int { return overlay.ComparePaths(string(a.Path), string(b.Path)) })
	slices.SortFunc(out.Changes[changed:], func(a, b runtime.Change) int {
		return overlay.ComparePaths(rawPath(a), rawPath(b))
	})
	return m.parents()
}

// paths lists the paths at which the base counts: all that the upperdir has, and all that it hides.
func (m *merger) paths(ctx context.Context) (map[string]bool, error) {
	all := make(map[string]bool, len(m.list))
	for i := range m.list {
		e := &m.list[i]
		all[e.Path] = true
		if e.Type == overlay.TypeDir && !opaque(e) {
			continue
		}
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		st, err := m.from.stat(e.Path)
		if err == nil && isDir(st) {
			err = m.below(ctx, e.Path, all)
		}
		if err != nil {
			return nil, err
		}
	}
	return all, nil
}

// below adds all that the directory has below a path.
func (m *merger) below(ctx context.Context, rel string, to map[string]bool) error {
	names, err := m.names(rel)
	if err != nil {
		return err
	}
	for _, name := range names {
		p := path.Join(rel, name)
		to[p] = true
		st, err := m.from.stat(p)
		if err == nil {
			err = ctx.Err()
		}
		if err == nil && isDir(st) {
			err = m.below(ctx, p, to)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// names lists a directory of the host, in order.
func (m *merger) names(rel string) ([]string, error) {
	d, err := m.from.dir(rel)
	if gone(err) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	defer d.Close()
	names, err := d.Readdirnames(-1)
	slices.Sort(names)
	return names, err
}

// wants reports whether a path is among those that are applied.
func (m *merger) wants(p string) bool {
	only := m.change.Only
	return len(only) == 0 || slices.ContainsFunc(only, func(top string) bool { return within(p, top) })
}

// leads reports whether one of the paths that are applied lies below a path.
func (m *merger) leads(p string) bool {
	return slices.ContainsFunc(m.change.Only, func(top string) bool { return within(top, p) })
}

// skips reports whether nothing at a path and below it is applied.
func (m *merger) skips(p string) bool {
	return !m.wants(p) && !m.leads(p) || m.way != nil && !m.way[p] ||
		slices.ContainsFunc(m.change.Hidden, func(top string) bool { return within(p, top) })
}

// upper returns what the sandbox has at a place in the list.
func (m *merger) upper(i int) side {
	e := m.list[i]
	if e.Hardlink != "" {
		if first, ok := m.places[e.Hardlink]; ok {
			name := e.Path
			e = m.list[first]
			e.Path = name
		}
	}
	if whiteout(&e) {
		return side{}
	}
	return sideOf(e, m.source.Data)
}

func sideOf(e overlay.Entry, data overlay.Source) side {
	raw := e
	e.Xattrs = textXattrs(visible(e.Xattrs))
	return side{&e, func(ctx context.Context) (io.ReadCloser, error) {
		d, err := data.Data(ctx, raw)
		if err != nil {
			return nil, err
		}
		return whole(&raw, d), nil
	}}
}

func (m *merger) baseOf(p string) side {
	b, ok := m.base[p]
	if !ok || whiteout(&b.Entry) {
		return side{}
	}
	return sideOf(b.Entry, b.Data)
}

// find looks at what the directory has. Of a directory it takes the fingerprint only if asked to.
func (m *merger) find(rel string, print bool) (f found, err error) {
	if m.whole != "" {
		return f, nil
	}
	st, err := m.from.stat(rel)
	if err != nil || st == nil {
		return f, err
	}
	if !isDir(st) || print {
		if f.print, err = m.from.fingerprint(rel); err != nil || f.print == "" {
			return f, err
		}
	}
	e, ino, err := m.from.entry(rel)
	if err != nil || e == nil {
		return found{}, err
	}
	f.ino = ino
	f.side = side{e, func(context.Context) (io.ReadCloser, error) { return m.from.open(rel) }}
	return f, nil
}

// end returns where the entries below a place end.
func (m *merger) end(i int) int {
	j := i + 1
	for j < len(m.list) && within(m.list[j].Path, m.list[i].Path) {
		j++
	}
	return j
}

// leave has nothing of the entries come.
func (m *merger) leave(i, end int) {
	for ; i < end; i++ {
		m.plan.left[m.list[i].Path] = true
	}
}

// node plans for a place in the list, and returns the next that is not below it. hides: the sandbox
// does not see what the host has there.
func (m *merger) node(ctx context.Context, i int, hides bool) (next int, err error) {
	if err := ctx.Err(); err != nil {
		return 0, err
	}
	rel, next := m.list[i].Path, m.end(i)
	if m.skips(rel) {
		m.leave(i, next)
		return next, nil
	}
	s, b := m.upper(i), m.baseOf(rel)
	f, err := m.find(rel, !s.isDir())
	switch {
	case err != nil:
		return 0, err
	case s.isDir() && f.isDir():
		return next, m.both(ctx, i, next, hides)
	case s.isDir():
		return next, m.newDir(ctx, i, next, s, b, f)
	case s.Entry == nil && f.isDir(), !m.wants(rel):
		m.leave(i, next)
		_, err = m.remove(ctx, rel)
		return next, err
	case !m.picked(rel):
		m.leave(i, next)
		return next, nil
	case f.isDir():
		return next, m.overDir(ctx, rel, s, b, f)
	}
	take, err := m.judge(ctx, rel, s, b, f.side)
	if err != nil {
		return 0, err
	}
	if !take {
		m.leave(i, next)
		return next, nil
	}
	return next, m.take(ctx, rel, s, f)
}

// both plans for a directory that both sides have.
func (m *merger) both(ctx context.Context, i, end int, hides bool) error {
	rel := m.list[i].Path
	hides = hides || opaque(&m.list[i])
	if m.wants(rel) && m.picked(rel) {
		if err := m.attrs(ctx, rel, m.upper(i), m.baseOf(rel)); err != nil {
			return err
		}
	}
	has := map[string]bool{}
	for j := i + 1; j < end; {
		has[m.list[j].Path] = true
		next, err := m.node(ctx, j, hides)
		if err != nil {
			return err
		}
		j = next
	}
	if !hides {
		return nil
	}
	names, err := m.names(rel)
	for _, name := range names {
		if p := path.Join(rel, name); err == nil && !has[p] {
			_, err = m.remove(ctx, p)
		}
	}
	return err
}

// attrs plans the attributes of a directory that both sides have.
func (m *merger) attrs(ctx context.Context, rel string, s, b side) error {
	d, err := m.from.sub(rel)
	if err != nil {
		return err
	}
	defer d.Close()
	have, err := attrsOf(d)
	if err != nil {
		return err
	}
	of := func(s side) attrs {
		a := attrsOfEntry(*s.Entry)
		a.Xattrs = bytesXattrs(s.Xattrs)
		if !m.opts.Owners {
			a.UID, a.GID = have.UID, have.GID
		}
		return a
	}
	to := of(s)
	if to.equal(have) || b.isDir() && to.equal(of(b)) {
		return nil
	}
	if (!b.isDir() || !have.equal(of(b))) && !m.theirs() {
		return nil // the directory's stay
	}
	old := overlay.Entry{
		Path: rel, Type: overlay.TypeDir, Mode: have.Mode, UID: have.UID, GID: have.GID,
		Mtime: overlay.Time{Sec: have.Sec, Nsec: have.Nsec}, Xattrs: textXattrs(have.Xattrs),
	}
	now := old
	now.Mode, now.UID, now.GID, now.Xattrs = to.Mode, to.UID, to.GID, s.Xattrs
	to.Sec, to.Nsec = have.Sec, have.Nsec
	was, _ := json.Marshal(have) // of numbers and bytes
	seen := m.seen(rel, side{Entry: &now}, found{print: string(was)}, nil)
	if err := m.check(rel, seen); err != nil {
		return err
	}
	m.plan.Dirs = append(m.plan.Dirs, dirOp{Path: []byte(rel), Old: have, New: to})
	what, err := differ(ctx, side{Entry: &old}, side{Entry: &now})
	if err != nil {
		return err
	}
	m.record(overlay.Modified, rel, &old, &now, what)
	return m.show(ctx, len(m.out.Changes)-1, seen, side{Entry: &now}, found{}, nil)
}

// newDir plans for a directory where the host's directory has none.
func (m *merger) newDir(ctx context.Context, i, end int, s, b side, f found) error {
	rel, outer := m.list[i].Path, m.whole
	if f.Entry != nil { // a file
		if !m.picked(rel) {
			m.leave(i, end)
			return nil
		}
		same, err := alike(ctx, f.side, b, m.opts.Owners)
		if err != nil {
			return err
		}
		if !same && !m.theirs() {
			changed, err := m.changedBelow(ctx, i, end)
			if err != nil || !changed {
				m.leave(i, end)
				return err
			}
			m.conflict(rel)
			m.leave(i, end)
			return nil
		}
	}
	if outer == "" {
		m.whole = rel
	}
	if err := m.gate.comes(*s.Entry); err != nil {
		return err
	}
	taken := m.taken
	seen := ""
	if m.shows() {
		seen = m.seen(rel, s, f, nil)
		if err := m.check(rel, seen); err != nil {
			return err
		}
	}
	if m.wants(rel) && m.picked(rel) && !b.isDir() {
		m.taken++
	}
	for j := i + 1; j < end; {
		next, err := m.node(ctx, j, true)
		if err != nil {
			return err
		}
		j = next
	}
	m.whole = outer
	if m.taken == taken { // the host's directory is gone, and nothing in the sandbox's was changed
		m.plan.left[rel] = true
		return nil
	}
	m.gate.git(rel, f.kind(), overlay.TypeDir)
	at := len(m.out.Changes)
	if err := m.coming(ctx, rel, s, f); err != nil {
		return err
	}
	if err := m.show(ctx, at, seen, s, f, nil); err != nil {
		return err
	}
	m.op(rel, s, f)
	return nil
}

// changedBelow reports whether the sandbox has changed any of these entries.
func (m *merger) changedBelow(ctx context.Context, i, end int) (bool, error) {
	for ; i < end; i++ {
		same, err := alike(ctx, m.upper(i), m.baseOf(m.list[i].Path), m.opts.Owners)
		if err != nil || !same {
			return !same, err
		}
	}
	return false, nil
}

// overDir plans for a file of the sandbox where the host has a directory.
func (m *merger) overDir(ctx context.Context, rel string, s, b side, f found) error {
	what, err := differ(ctx, s, b)
	if err != nil {
		return err
	}
	leave := func() { m.plan.left[rel] = true }
	if len(what) == 0 {
		leave()
		return nil
	}
	if !m.theirs() {
		clean := len(m.plan.conflicts)
		if !b.isDir() {
			m.conflict(rel)
		} else if _, err := m.intact(ctx, rel); err != nil {
			return err
		}
		if len(m.plan.conflicts) > clean || m.opts.Ours {
			leave()
			return nil
		}
	}
	return m.take(ctx, rel, s, f)
}

// intact proves that a directory of the host is as the base has it. What is not is a conflict.
func (m *merger) intact(ctx context.Context, rel string) (same bool, err error) {
	f, err := m.find(rel, false)
	if err != nil {
		return false, err
	}
	if same, err = alike(ctx, f.side, m.baseOf(rel), m.opts.Owners); err != nil {
		return false, err
	}
	if !same {
		m.conflict(rel)
	}
	if !same || !f.isDir() {
		return same, nil
	}
	names, err := m.names(rel)
	for _, name := range names {
		if err != nil {
			break
		}
		_, err = m.intact(ctx, path.Join(rel, name))
	}
	return same, err
}

// remove plans the removal of what the sandbox has no more. What the owner has added stays, and so do
// the directories that it is in: then all is false.
func (m *merger) remove(ctx context.Context, rel string) (all bool, err error) {
	if err := ctx.Err(); err != nil {
		return false, err
	}
	if m.skips(rel) {
		return false, nil
	}
	f, err := m.find(rel, true)
	if err != nil || f.Entry == nil {
		return err == nil, err
	}
	b := m.baseOf(rel)
	switch {
	case f.isDir() && (b.Entry == nil || b.isDir() || !m.wants(rel)):
		ops := len(m.plan.Ops)
		names, err := m.names(rel)
		if err != nil {
			return false, err
		}
		all = m.wants(rel) && b.isDir() && (len(names) > 0 || m.picked(rel))
		for _, name := range names {
			gone, err := m.remove(ctx, path.Join(rel, name))
			if err != nil {
				return false, err
			}
			all = all && gone
		}
		if !all {
			return false, nil
		}
		m.plan.Ops = m.plan.Ops[:ops] // it goes with all that is in it
		return true, m.take(ctx, rel, side{}, f)
	case b.Entry == nil || !m.wants(rel):
		return false, nil
	}
	take, err := m.judge(ctx, rel, side{}, b, f.side)
	if err != nil || !take {
		return false, err
	}
	return true, m.take(ctx, rel, side{}, f)
}
