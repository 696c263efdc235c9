package apply

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"path"
	"slices"

	udiff "github.com/aymanbagabas/go-udiff"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/overlay"
	"github.com/agentbox/agentbox/runtime"
)

// A user can choose from what a dry run has shown: whole files, and hunks of a text.
// A choice holds for exactly what was shown. What is left out can come later: once a part of a file has
// come, the base of the file is the sandbox's text without the part that was left out.

// Picks are what is chosen in a workspace, by path.
type Picks map[string]*Pick

// Pick is one path that comes.
type Pick struct {
	runtime.ApplyPick
	used bool
}

// Taken is what an apply has brought of a workspace's Picks.
type Taken struct {
	Whole [][]byte `json:"whole,omitempty"` // paths
	Parts []Part   `json:"parts,omitempty"`
}

// Part is a text of which only some hunks have come.
type Part struct {
	Path []byte `json:"path"`
	// Edits make of what the sandbox has what remains without the hunks that were left out.
	Edits []Edit `json:"edits"`
	Mode  uint32 `json:"mode"` // that of the base
}

// Edit replaces a range of bytes in a text.
type Edit struct {
	Start int    `json:"start"`
	End   int    `json:"end"`
	New   []byte `json:"new,omitempty"`
}

// maxLeft bounds the text that one apply leaves out of files, which is kept.
const maxLeft = 1 << 20

// maxNotes bounds the notes that are kept.
const maxNotes = 4 << 20

// prune drops the oldest notes beyond the bounds: what they tell of has an older base then, and more
// conflicts.
func (a *applied) prune() {
	total := 0
	for i, n := range slices.Backward(a.List) {
		if total += len(n.Note); len(a.List)-i > maxApplied || total > maxNotes && i < len(a.List)-1 {
			a.List = slices.Delete(a.List, 0, i+1)
			return
		}
	}
}

// Base is what the text was made of that remains to come, of what the sandbox has.
func (p Part) Base(of BaseEntry) BaseEntry {
	b := of
	b.Mode, b.Extents, b.Digest, b.Chunks, b.Hardlink = p.Mode, nil, "", nil, ""
	for _, e := range p.Edits {
		b.Size += int64(len(e.New) - (e.End - e.Start))
	}
	b.Data = edited{of, p}
	return b
}

// edited is the data of a Part's base.
type edited struct {
	of   BaseEntry
	part Part
}

// Data implements overlay.Source.
func (e edited) Data(ctx context.Context, _ overlay.Entry) (io.ReadCloser, error) {
	text, err := readText(ctx, sideOf(e.of.Entry, e.of.Data))
	if errors.Is(err, errNoText) {
		err = fmt.Errorf("%w: %q, of which a part was applied, is no text", fault.ErrCorrupt, e.part.Path)
	}
	if err != nil {
		return nil, err
	}
	var edits []udiff.Edit
	for _, one := range e.part.Edits {
		edits = append(edits, udiff.Edit{Start: one.Start, End: one.End, New: string(one.New)})
	}
	base, err := splice(string(text), edits)
	if err != nil {
		return nil, fmt.Errorf("%w: what was applied of %q: %w", fault.ErrCorrupt, e.part.Path, err)
	}
	return io.NopCloser(bytes.NewReader([]byte(base))), nil
}

// lead notes the directories that lead to what is picked.
func (m *merger) lead() {
	if m.change.Picks == nil {
		return
	}
	m.way = map[string]bool{".": true}
	for p := range m.change.Picks {
		for ; !m.way[p]; p = path.Dir(p) {
			m.way[p] = true
		}
	}
}

// picked reports whether a path itself comes if it has changed.
func (m *merger) picked(rel string) bool { return m.change.Picks == nil || m.change.Picks[rel] != nil }

// shows reports whether what comes is to be shown, or compared with what was.
func (m *merger) shows() bool { return m.opts.Patch || m.change.Picks != nil }

// seen sums up what comes of a path and what is there. made: the text of a merge.
func (m *merger) seen(rel string, s side, f found, made *merged) string {
	h := sha256.New()
	put := func(v any) {
		text, _ := json.Marshal(v) // of numbers, strings and maps of them
		_ = binary.Write(h, binary.LittleEndian, uint64(len(text)))
		_, _ = h.Write(text) // a hash takes all
	}
	put([]byte(rel))
	put(f.print)
	if s.Entry != nil {
		put([]any{s.Type, s.Mode, s.UID, s.GID, s.Link, s.Major, s.Minor, s.Size, s.Digest})
		for _, name := range slices.Sorted(maps.Keys(s.Xattrs)) {
			put([][]byte{[]byte(name), []byte(s.Xattrs[name])})
		}
		if made != nil {
			put(made.content)
		} else if s.Digest == "" {
			put(s.Mtime)
		}
	}
	return hex.EncodeToString(h.Sum(nil)[:16])
}

// check returns an error unless what comes at a path is what was shown.
func (m *merger) check(rel, seen string) error {
	pick := m.change.Picks[rel]
	if pick == nil {
		return nil
	}
	if pick.Seen != seen {
		return m.notAsShown(rel)
	}
	pick.used = true
	return nil
}

func (m *merger) notAsShown(rel string) error {
	return &fault.Error{Err: fmt.Errorf("%w: nothing was applied: %q has changed since it was shown",
		fault.ErrState, path.Join(m.At, rel)), Hint: "Look at the changes, and choose again."}
}

// picksUsed returns an error unless all picks come.
func (m *merger) picksUsed() error {
	for _, rel := range slices.Sorted(maps.Keys(m.change.Picks)) {
		if pick := m.change.Picks[rel]; !pick.used && !m.opts.DryRun {
			return m.notAsShown(rel)
		} else if pick.used && !pick.parted() {
			m.change.Taken.Whole = append(m.change.Taken.Whole, []byte(rel))
		}
	}
	return nil
}

func (p *Pick) parted() bool { return p.Hunks != nil }

// texts returns the text in the directory and the one that comes, if both are texts.
func (m *merger) texts(ctx context.Context, s, f side, made *merged) (old, new string, ok bool, err error) {
	if old, ok, err = m.textOf(ctx, f, nil); err == nil && ok {
		new, ok, err = m.textOf(ctx, s, made)
	}
	return old, new, ok, err
}

// textOf returns a text of which hunks can be chosen. made: the text of a merge.
func (m *merger) textOf(ctx context.Context, s side, made *merged) (text string, ok bool, err error) {
	if made != nil {
		return string(made.content), len(made.content) <= maxHunkText, nil
	}
	if !s.isFile() || s.Size > maxHunkText {
		return "", false, nil
	}
	data, err := readText(ctx, s)
	if errors.Is(err, errNoText) {
		return "", false, nil
	}
	return string(data), err == nil && len(data) <= maxHunkText, err
}

// someHunks has only the picked hunks of a file come.
func (m *merger) someHunks(
	ctx context.Context, rel string, s side, f found, made *merged, pick *Pick,
) (*merged, error) {
	to := s
	if made != nil {
		e := *s.Entry
		e.Mode, e.Mtime = made.mode, made.mtime
		to.Entry = &e
	}
	old, new, ok, err := m.texts(ctx, s, f.side, made)
	if err != nil {
		return nil, err
	}
	if !ok || !m.divides(s, f) {
		return nil, fmt.Errorf("%w: hunks of %q cannot be chosen one by one", fault.ErrInvalid, path.Join(m.At, rel))
	}
	edits, err := subset(lineEdits(old, new), pick.Hunks)
	if err == nil && len(edits) == 0 && (!pick.Mode || to.Mode == f.Mode) {
		err = errors.New("neither a hunk nor the mode is picked")
	}
	var text string
	if err == nil {
		text, err = splice(old, edits)
	}
	if err != nil {
		return nil, fmt.Errorf("%w: %q: %w", fault.ErrInvalid, path.Join(m.At, rel), err)
	}
	out := &merged{content: []byte(text), mode: f.Mode, mtime: now()}
	left := f.Mode
	if b := m.baseOf(rel); b.isFile() {
		left = b.Mode
	}
	if pick.Mode {
		out.mode = to.Mode
	}
	if pick.Mode || to.Mode == f.Mode {
		left = s.Mode
	}
	return out, m.remains(ctx, rel, s, []byte(new), out.content, left)
}

// remains notes what is left of a file of which a part comes. new: all of it, part: what comes.
func (m *merger) remains(ctx context.Context, rel string, s side, new, part []byte, mode uint32) error {
	own, err := readText(ctx, s)
	if err != nil {
		return err
	}
	base := part
	if !bytes.Equal(own, new) { // merged: what the owner has changed is not the sandbox's
		text, clean, err := mergeText(ctx, own, new, part, [3]string{"sandbox", "all", "part"})
		if err != nil && !errors.Is(err, errNoText) {
			return err
		}
		if err != nil || !clean {
			return nil // the base stays the older one
		}
		base = text
	}
	p := Part{Path: []byte(rel), Mode: mode}
	for _, e := range lineEdits(string(own), string(base)) {
		p.Edits = append(p.Edits, Edit{e.Start, e.End, []byte(e.New)})
		if m.leftOut += len(e.New) + 64; m.leftOut > maxLeft { // with what an edit takes beside its text
			return fmt.Errorf("%w: more than %d MiB of text is left out; choose fewer parts of files, and whole ones",
				fault.ErrUnsupported, maxLeft>>20)
		}
	}
	m.change.Taken.Parts = append(m.change.Taken.Parts, p)
	return nil
}

// show adds to a recorded change what a user needs to choose from it.
func (m *merger) show(ctx context.Context, at int, seen string, s side, f found, made *merged) error {
	if !m.opts.Patch {
		return nil
	}
	c := &m.out.Changes[at]
	c.Seen = seen
	var old, new string
	ok := true
	var err error
	switch {
	case s.isFile() && f.isFile():
		old, new, ok, err = m.texts(ctx, s, f.side, made)
	case s.isFile() && f.Entry == nil:
		new, ok, err = m.textOf(ctx, s, made)
	case f.isFile() && s.Entry == nil:
		old, ok, err = m.textOf(ctx, f.side, nil)
	}
	if err != nil || !ok || old == new {
		return err
	}
	edits := lineEdits(old, new)
	text := unifiedHunks(old, edits)
	if m.shown += len(text); m.shown > maxShown {
		return nil
	}
	c.Patch = text
	if c.Change == string(overlay.Modified) && m.divides(s, f) {
		c.Hunks = len(edits)
	}
	return nil
}

// divides reports whether hunks of a text can come without the rest.
func (m *merger) divides(s side, f found) bool {
	return maps.Equal(s.Xattrs, f.Xattrs) && (!m.opts.Owners || s.UID == f.UID && s.GID == f.GID)
}
