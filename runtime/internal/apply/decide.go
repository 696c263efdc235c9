package apply

import (
	"bytes"
	"context"
	"errors"
	"io"
	"path"
	"slices"
	"time"

	"github.com/agentbox/agentbox/overlay"
	"github.com/agentbox/agentbox/runtime/internal/changes"
)

// judge reports whether the sandbox's version of a path comes, which is no directory.
func (m *merger) judge(ctx context.Context, rel string, s, b, f side) (take bool, err error) {
	own, err := differ(ctx, s, b)
	if err != nil || len(own) == 0 {
		return false, err
	}
	own = m.matters(own)
	still, err := differ(ctx, s, f)
	if err != nil {
		return false, err
	}
	if len(m.matters(still)) == 0 {
		return len(own) == 0 && slices.Contains(still, overlay.WhatMtime), nil
	}
	theirs, err := differ(ctx, f, b)
	switch {
	case err != nil:
		return false, err
	case len(m.matters(theirs)) == 0:
		if part, _ := gitPartOf(path.Join(m.From, rel)); part == gitHead {
			if torn, err := m.indexTorn(ctx, rel); err != nil || torn {
				m.conflict(rel)
				return m.theirs(), err
			}
		}
		return true, nil
	case len(own) == 0:
		return false, nil
	}
	return m.resolve(ctx, rel, s, b, f)
}

// matters leaves out what is no change of a file that counts.
func (m *merger) matters(what []string) []string {
	return slices.DeleteFunc(slices.Clone(what), func(s string) bool {
		return s == overlay.WhatMtime || s == overlay.WhatOwner && !m.opts.Owners
	})
}

func (m *merger) theirs() bool { return m.opts.Theirs || m.opts.Force }

// conflict notes a path that was changed on both sides.
func (m *merger) conflict(rel string) {
	m.out.Conflicts = append(m.out.Conflicts, path.Join(m.At, rel))
	if !m.opts.Ours && !m.theirs() {
		m.plan.conflicts = append(m.plan.conflicts, rel)
	}
}

// resolve decides about a path that was changed on both sides.
func (m *merger) resolve(ctx context.Context, rel string, s, b, f side) (take bool, err error) {
	part, ref := gitPartOf(path.Join(m.From, rel))
	switch part {
	case gitNote:
		return m.theirs(), nil
	case gitRef:
		if err := m.noteRef(ctx, rel, ref, s, f); err != nil {
			return false, err
		}
	}
	if part == gitOther && s.isFile() && f.isFile() && (b.isFile() || b.Entry == nil && m.opts.Markers) {
		text, clean, err := m.mergeTexts(ctx, s, b, f)
		if err != nil && !errors.Is(err, errNoText) {
			return false, err
		}
		if err == nil && (clean || m.opts.Markers) {
			to := &merged{text, f.Mode, now()}
			if b.Entry == nil || s.Mode != b.Mode {
				to.mode = s.Mode
			}
			if !clean {
				m.out.Conflicts = append(m.out.Conflicts, path.Join(m.At, rel))
			}
			m.out.Merged = append(m.out.Merged, path.Join(m.At, rel))
			m.plan.merged[rel] = to
			return true, nil
		}
	}
	if take, sure, err := m.resolveIndex(ctx, rel, s, b, f); sure || err != nil {
		return take, err
	}
	m.conflict(rel)
	return m.theirs(), nil
}

func (m *merger) mergeTexts(ctx context.Context, s, b, f side) (text []byte, clean bool, err error) {
	var texts [3][]byte
	for i, one := range []side{f, b, s} {
		if one.Entry == nil {
			continue
		}
		if texts[i], err = readText(ctx, one); err != nil {
			return nil, false, err
		}
		if m.text += len(texts[i]); m.text > maxMerged {
			return nil, false, errNoText
		}
	}
	return mergeText(ctx, texts[0], texts[1], texts[2], [3]string{"directory", "base", "sandbox"})
}

func now() overlay.Time {
	t := time.Now()
	return overlay.Time{Sec: t.Unix(), Nsec: int64(t.Nanosecond())}
}

// take has the sandbox's version of a path come.
func (m *merger) take(ctx context.Context, rel string, s side, f found) error {
	seen, whole := "", s
	made := m.plan.merged[rel]
	if m.shows() {
		seen = m.seen(rel, s, f, made)
		if err := m.check(rel, seen); err != nil {
			return err
		}
	}
	if pick := m.change.Picks[rel]; pick != nil && pick.parted() {
		var err error
		if made, err = m.someHunks(ctx, rel, s, f, made, pick); err != nil {
			return err
		}
		m.plan.merged[rel] = made
	}
	if s.Entry != nil {
		e := *s.Entry
		if made != nil {
			e.Mode, e.Size, e.Mtime = made.mode, int64(len(made.content)), made.mtime
			s = side{&e, func(context.Context) (io.ReadCloser, error) {
				return io.NopCloser(bytes.NewReader(made.content)), nil
			}}
		}
		if err := m.gate.comes(e); err != nil {
			return err
		}
	}
	m.gate.git(rel, f.kind(), s.kind())
	m.taken++
	at := len(m.out.Changes)
	if err := m.coming(ctx, rel, s, f); err != nil {
		return err
	}
	if err := m.show(ctx, at, seen, whole, f, made); err != nil {
		return err
	}
	m.op(rel, s, f)
	return nil
}

// op adds the rename of a path that comes, unless its directory comes as a whole.
func (m *merger) op(rel string, s side, f found) {
	if m.whole != "" {
		return
	}
	o := op{Kind: opSwap, Path: []byte(rel), At: []byte("new/" + rel), OldIno: f.ino, Old: f.print}
	switch {
	case s.Entry == nil:
		o.Kind = opRemove
	case f.Entry == nil:
		o.Kind = opPut
	}
	m.plan.Ops = append(m.plan.Ops, o)
}

// record adds a change to the list for the user.
func (m *merger) record(kind overlay.ChangeKind, rel string, old, new *overlay.Entry, what []string) {
	m.out.Changes = append(m.out.Changes, changes.Of(overlay.Change{
		Path: path.Join(m.At, rel)[1:], Kind: kind, Old: old, New: new, What: what,
	}))
}

// coming adds what comes of a path to the list, and what goes for it.
func (m *merger) coming(ctx context.Context, rel string, s side, f found) error {
	var to *overlay.Entry
	if s.Entry != nil {
		e := *s.Entry
		if own, ok := m.gate.owns[rel]; ok {
			e.UID, e.GID = own.uid, own.gid
		}
		to = &e
	}
	switch {
	case f.Entry == nil:
		m.record(overlay.Added, rel, nil, to, nil)
		return nil
	case to == nil:
		m.record(overlay.Deleted, rel, f.Entry, nil, nil)
		return nil
	case to.Type != f.Type:
		m.record(overlay.TypeChanged, rel, f.Entry, to, []string{overlay.WhatType})
		if f.isDir() {
			return m.listBelow(ctx, rel)
		}
		return nil
	}
	what, err := differ(ctx, f.side, side{to, s.open})
	if err == nil {
		m.record(overlay.Modified, rel, f.Entry, to, what)
	}
	return err
}

// listBelow lists what goes with a directory.
func (m *merger) listBelow(ctx context.Context, rel string) error {
	all := map[string]bool{}
	if err := m.below(ctx, rel, all); err != nil {
		return err
	}
	for p := range all {
		e, _, err := m.from.entry(p)
		if err != nil {
			return err
		}
		if e != nil {
			m.record(overlay.Deleted, p, e, nil, nil)
		}
	}
	return nil
}

// parents adds the directories of the host that something comes into or goes from: their times change,
// and an undo brings them back.
func (m *merger) parents() error {
	at := map[string]int{}
	for i, d := range m.plan.Dirs {
		at[string(d.Path)] = i
	}
	for _, o := range m.plan.Ops {
		rel := path.Dir(string(o.Path))
		i, ok := at[rel]
		if !ok {
			d, err := m.from.sub(rel)
			if err != nil {
				return err
			}
			have, err := attrsOf(d)
			if err := errors.Join(err, d.Close()); err != nil {
				return err
			}
			i = len(m.plan.Dirs)
			at[rel] = i
			m.plan.Dirs = append(m.plan.Dirs, dirOp{Path: []byte(rel), Old: have, New: have})
		}
		to := now()
		if j, ok := m.places[rel]; ok && m.list[j].Type == overlay.TypeDir {
			to = m.list[j].Mtime
		}
		m.plan.Dirs[i].New.Sec, m.plan.Dirs[i].New.Nsec = to.Sec, to.Nsec
	}
	slices.SortFunc(m.plan.Dirs, func(a, b dirOp) int { return overlay.ComparePaths(string(a.Path), string(b.Path)) })
	return nil
}

func bytesXattrs(set map[string]string) map[string][]byte {
	out := make(map[string][]byte, len(set))
	for name, value := range set {
		out[name] = []byte(value)
	}
	return out
}
