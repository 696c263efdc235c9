// Package apply brings what was changed in an overlay into the directory that it lies over: all or
// nothing, also for several directories and over a kill, and back again.
//
// An apply stages what comes in a scratch directory on the mount of the directory, and then lets
// staged and old files change places by renames, one for every file or whole subtree that
// differs. Old files are not overwritten but end up in the scratch directory, so taking an
// apply back, be it that it failed, was killed, or is undone a week later, is the same renames
// once more.
//
//	DIR/apply/apply.json   the apply under way: how far it is
//	DIR/apply/plan.json    its renames; those of further directories are in DIR/apply/1, ...
//	DIR/apply/scratch      what comes, or came out; in the directory itself if that is on another mount
//	DIR/undo               the last one done
//	DIR/applied.json       the notes of those before
//
// Two planners say what comes. Of a volume all does (plan.go), and its upperdir is empty afterwards.
// A workspace goes on as it is: what it has changed is merged with what was changed in the directory
// meanwhile (merge.go).
package apply

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"path"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/internal/lazy"
	"github.com/agentbox/agentbox/overlay"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/internal/changes"
	"github.com/agentbox/agentbox/runtime/internal/record"
)

// Names in the directory of a Home.
const (
	DirApply    = "apply" // under way
	DirUndo     = "undo"  // the last one done
	fileApplied = "applied.json"
	fileHeader  = "apply.json"
	filePlan    = "plan.json"
	dirScratch  = "scratch"
	dirOld      = "upper" // the upperdir that was applied
)

// scratchPrefix begins the name of a scratch directory in the directory that is applied to.
const scratchPrefix = ".agentbox-"

var scratchPattern = lazy.Regexp(`^\.agentbox-[0-9a-f]{16}$`)

// Place is a directory of the host that is applied to.
type Place struct {
	From  string // the directory
	Name  string // what lies over it, for messages, as in "volume ws"
	At    string // where that has its files: what is put before paths in messages
	Upper string // its upperdir, which an apply leaves empty; "": it is left as it is
	Live  string // the upperdir of a workspace, which may be in use
}

// Home keeps the applies to some places. Its methods need a lock of the caller's.
type Home struct {
	Dir    string
	Name   string // for messages
	Places []Place
	Note   any // what Notes is to return of an apply
	Log    *slog.Logger

	// Review is asked once an apply is planned, and nothing is staged: its error ends the apply. Of a
	// dry run it is asked, too, if all could be applied. Nil: none.
	Review func(ctx context.Context, s *Staged) error
	// Judged says that Review judges the directories as a whole: a change since the plan refuses the
	// apply, also of files that it does not touch.
	Judged bool
	// Begin is called once what comes is staged, before a directory is touched; its error ends the
	// apply. Nil: nothing is called.
	Begin func() error
	// Canaries are the changes that are made first, in this order.
	Canaries []Canary
}

// Canary is a part of an apply that is made before the rest.
type Canary struct {
	// Takes reports whether a path, which is relative to the directory of the place at another one, is
	// part of it. What can only come or go as a whole with such a path is part of it, too.
	Takes func(at, rel string) bool
	// Check judges the directories with just this and earlier parts in them. Its error takes all back.
	// It is not called if there is nothing of the part.
	Check func(ctx context.Context) error
}

// OfWorkspaces is the Home of a sandbox's workspaces, which is kept in dir.
func OfWorkspaces(dir, sandbox string, list []runtime.Volume, log *slog.Logger) Home {
	if real, err := filepath.EvalSymlinks(dir); err == nil {
		dir = real
	}
	h := Home{Dir: dir, Name: "sandbox " + sandbox, Log: log}
	for _, v := range list {
		if v.Workspace() {
			h.Places = append(h.Places, Place{
				From: v.Lower, Name: "workspace " + v.Target, At: v.Target, Live: v.Path,
			})
		}
	}
	return h
}

// Change is what is applied to a place.
type Change struct {
	Place
	Source Source

	// Base tells what the files of a workspace were made of; nil: all of the upperdir comes.
	Base Base
	// Only are the paths in the workspace that are applied; empty: all.
	Only []string
	// Hidden are paths in the workspace that something else is mounted over.
	Hidden []string
	// Picks are what is chosen of a workspace's changes; nil: all. Taken is what has come of them.
	Picks Picks
	Taken Taken
}

// Phases of an apply. From phaseWrite on the directories may be touched.
const (
	phaseStage  = "stage"  // nothing but the scratch directory is made: delete it
	phaseWrite  = "write"  // take it back
	phaseRolled = "rolled" // it is taken back: delete the scratch directory
	phaseDone   = "done"   // finish it
)

// version is that of an apply's files.
const version = 1

// header is the content of apply.json.
type header struct {
	Version int       `json:"version"`
	Phase   string    `json:"phase"`
	Began   time.Time `json:"began"`
	site
	More    []*site         `json:"more,omitempty"`    // further places
	Undoing bool            `json:"undoing,omitempty"` // a done apply is being taken back
	Note    json.RawMessage `json:"note,omitempty"`    // the caller's
	// Later are the notes of applies since that had nothing to bring: an undo takes them along.
	Later []json.RawMessage `json:"later,omitempty"`
}

// site is a place in apply.json.
type site struct {
	Original string `json:"original"`
	Dev      uint64 `json:"dev"` // of the original
	Ino      uint64 `json:"ino"`
	Root     attrs  `json:"root"`              // of the original, when it began
	Scratch  string `json:"scratch,omitempty"` // its name in the original; empty: it is in the home
	Stray    string `json:"stray,omitempty"`   // one in the original that is not needed any more
	Upper    uint64 `json:"upper,omitempty"`   // inode of the upperdir that is applied
}

// txn is one apply, in memory.
type txn struct {
	home  Home
	head  header
	parts []*part
}

// part is an apply to one place.
type part struct {
	Place
	*site
	dir    string // where it keeps its files
	source Source
	plan   *plan
	gate   *gate
	merges bool   // of a workspace
	seen   string // the fingerprint of the directory when it was planned, for a review

	from, scratch *Root
}

func (h Home) path(rest ...string) string { return filepath.Join(append([]string{h.Dir}, rest...)...) }

func (p *part) path(name string) string { return filepath.Join(p.dir, name) }

// add begins a part.
func (t *txn) add(place Place) *part {
	p := &part{Place: place, site: &t.head.site, dir: t.home.path(DirApply)}
	if n := len(t.parts); n > 0 {
		p.site, p.dir = &site{}, filepath.Join(p.dir, strconv.Itoa(n))
		t.head.More = append(t.head.More, p.site)
	}
	t.parts = append(t.parts, p)
	return p
}

func (t *txn) put(phase string) error {
	t.head.Phase = phase
	return record.WriteJSON(t.home.path(DirApply, fileHeader), t.head, true)
}

func (t *txn) close() {
	for _, p := range t.parts {
		for _, r := range []*Root{p.from, p.scratch} {
			if r != nil {
				_ = r.Close()
			}
		}
	}
}

// names joins the directories, for messages.
func (t *txn) names() string {
	var list []string
	for _, p := range t.parts {
		list = append(list, p.From)
	}
	return strings.Join(list, ", ")
}

// Nothing is the result of an apply that has done nothing yet.
func Nothing(opts runtime.ApplyOptions) runtime.Applied {
	return runtime.Applied{
		DryRun: opts.DryRun, Undone: opts.Undo, Changes: []runtime.Change{}, Conflicts: []string{},
		Refused: []runtime.Refusal{},
	}
}

// Run applies changes to their places, all of them or none, and says in out what comes. On an error
// everything is as it was, except for what Settle has to take back.
func Run(
	ctx context.Context, h Home, list []Change, opts runtime.ApplyOptions, out *runtime.Applied,
) (err error) {
	if !opts.DryRun {
		if _, err := Settle(h); err != nil {
			return err
		}
	}
	t := &txn{home: h}
	defer t.close()
	for i := range list {
		if err := t.planFor(ctx, &list[i], opts, out); err != nil {
			return err
		}
	}
	if h.Note != nil { // it may tell what is Taken
		if t.head.Note, err = json.Marshal(h.Note); err != nil {
			return err
		}
	}
	if opts.DryRun {
		return t.dry(ctx, out, opts)
	}
	if err := refusal(t.names(), out.Refused); err != nil {
		return err
	}
	if err := t.conflicting(opts.Force || opts.Theirs); err != nil {
		return err
	}
	if t.idle(); len(t.parts) == 0 {
		return h.noted(t.head.Note)
	}
	if h.Review != nil {
		if err := h.Review(ctx, &Staged{t}); err != nil {
			return err
		}
	}
	return t.apply(ctx)
}

// dry has a dry run reviewed, unless it could not be applied as it is.
func (t *txn) dry(ctx context.Context, out *runtime.Applied, opts runtime.ApplyOptions) error {
	if t.home.Review == nil || len(out.Refused) > 0 || t.conflicting(opts.Force || opts.Theirs) != nil {
		return nil
	}
	if t.idle(); len(t.parts) == 0 {
		return nil
	}
	return t.home.Review(ctx, &Staged{t})
}

// idle leaves out the parts that have nothing to do.
func (t *txn) idle() {
	parts := t.parts
	uppers := make([]uint64, len(parts))
	for i, p := range parts {
		uppers[i] = p.site.Upper
	}
	t.parts, t.head.site, t.head.More = nil, site{}, nil
	for i, p := range parts {
		if len(p.plan.Ops) == 0 && len(p.plan.Dirs) == 0 {
			_ = p.from.Close() // only ever a handle
			continue
		}
		to := t.add(p.Place)
		p.site, p.dir = to.site, to.dir
		p.site.Upper = uppers[i]
		t.parts[len(t.parts)-1] = p
	}
}

// planFor plans what is done to one place.
func (t *txn) planFor(ctx context.Context, c *Change, opts runtime.ApplyOptions, out *runtime.Applied) (err error) {
	p := t.add(c.Place)
	p.source = c.Source
	if p.from, err = OpenRoot(c.From); err != nil {
		return err
	}
	if t.home.Judged && !opts.DryRun {
		if p.seen, err = p.from.print(ctx); err != nil {
			return err
		}
	}
	p.gate = newGate(p.from, c.Place, opts)
	if c.Base != nil {
		p.merges = true
		err = p.merge(ctx, c, opts, out)
	} else {
		err = p.planAll(ctx, out)
	}
	out.Refused = append(out.Refused, p.gate.refused...)
	return err
}

// planAll plans an apply of all that an upperdir has.
func (p *part) planAll(ctx context.Context, out *runtime.Applied) error {
	upper, err := OpenRoot(p.Place.Upper)
	if err != nil {
		return err
	}
	defer upper.Close()
	p.site.Upper = upper.ino
	if p.plan, err = newPlan(p.from, p.source.Entries, upper, p.gate); err != nil {
		return err
	}
	for _, c := range p.plan.conflicts {
		out.Conflicts = append(out.Conflicts, path.Join(p.At, c))
	}
	list, err := changesSince(ctx, p.From, p.Place.Upper)
	out.Changes = append(out.Changes, p.gate.show(list)...)
	return err
}

// conflicting is the error about paths that were changed on both sides.
func (t *txn) conflicting(force bool) error {
	var paths []string
	what := "since " + t.parts[0].Name + " changed it"
	hint := "Look at both, then apply with --force to have the volume's."
	for _, p := range t.parts {
		for _, c := range p.plan.conflicts {
			paths = append(paths, path.Join(p.At, c))
		}
		if p.merges {
			what = "and in the sandbox"
			hint = "Look at both sides. --markers writes both into the files, --ours keeps what the directory has, " +
				"--theirs takes what the sandbox has." + refsHint(p.plan.refs, strings.TrimPrefix(t.home.Name, "sandbox "))
		}
	}
	if len(paths) == 0 || force {
		return nil
	}
	return &fault.Error{Err: fmt.Errorf("%w: changed in %s %s: %s", fault.ErrState,
		t.names(), what, strings.Join(clip(paths, 50), ", ")), Hint: hint}
}

func clip(list []string, n int) []string {
	if len(list) > n {
		return append(list[:n:n], fmt.Sprintf("and %d more", len(list)-n))
	}
	return list
}

// changesSince lists what a user of the volume finds different from the original.
func changesSince(ctx context.Context, from, upper string) ([]runtime.Change, error) {
	list := []runtime.Change{}
	err := overlay.Diff(ctx, overlay.Side{}, overlay.Side{Dir: upper}, overlay.DiffOptions{Lower: []string{from}},
		func(c overlay.Change) error {
			list = append(list, changes.Of(c))
			return nil
		})
	return list, err
}

// Inside returns the path relative to top of a path that is there or below.
func Inside(top, p string) (rel string, ok bool) {
	if top == p {
		return ".", true
	}
	return strings.CutPrefix(p, strings.TrimSuffix(top, "/")+"/")
}

// Last returns when the last apply began that was not taken back; zero: there was none.
func (h Home) Last() time.Time {
	var head header
	if err := record.ReadJSON(h.path(DirUndo, fileHeader), &head); err != nil {
		return time.Time{}
	}
	return head.Began
}

// applied is the content of applied.json.
type applied struct {
	List []appliedNote `json:"list"` // the oldest first
}

type appliedNote struct {
	Began time.Time       `json:"began"`
	Note  json.RawMessage `json:"note"`
}

// maxApplied bounds how many applies are remembered.
const maxApplied = 1000

// Notes returns the notes of all applies that were not taken back, the oldest first.
func (h Home) Notes() ([]json.RawMessage, error) {
	all, err := h.applied()
	if err != nil {
		return nil, err
	}
	var head header
	if err := record.ReadJSON(h.path(DirUndo, fileHeader), &head); err == nil {
		all.add(head)
	}
	var list []json.RawMessage
	for _, n := range all.List {
		list = append(list, n.Note)
	}
	return list, nil
}

// noted keeps the note of an apply that had nothing to bring. The last one that had can still be
// undone.
func (h Home) noted(note json.RawMessage) error {
	var head header
	err := record.ReadJSON(h.path(DirUndo, fileHeader), &head)
	switch {
	case len(note) == 0:
		return nil
	case errors.Is(err, errNotExist):
		all, err := h.applied()
		if err == nil && all.add(header{Began: time.Now().UTC(), Note: note}) {
			err = record.WriteJSON(h.path(fileApplied), all, true)
		}
		return err
	case err != nil:
		return err
	}
	last := head.Note
	if n := len(head.Later); n > 0 {
		last = head.Later[n-1]
	}
	if sameJSON(last, note) || len(head.Later) >= maxApplied {
		return nil
	}
	head.Later = append(head.Later, note)
	return record.WriteJSON(h.path(DirUndo, fileHeader), head, true)
}

// sameJSON compares two notes, of which one may have been indented.
func sameJSON(a, b json.RawMessage) bool {
	var x, y bytes.Buffer
	return json.Compact(&x, a) == nil && json.Compact(&y, b) == nil && bytes.Equal(x.Bytes(), y.Bytes())
}

func (h Home) applied() (all applied, err error) {
	err = record.ReadJSON(h.path(fileApplied), &all)
	if errors.Is(err, errNotExist) {
		err = nil
	}
	return all, err
}

// add adds the notes of an apply, and reports whether one was not there yet. Of equal ones in a row the
// first is kept.
func (a *applied) add(head header) bool {
	if n := len(a.List); n > 0 && a.List[n-1].Began.Equal(head.Began) {
		return false
	}
	had := len(a.List)
	for _, note := range append([]json.RawMessage{head.Note}, head.Later...) {
		if n := len(a.List); len(note) > 0 && (n == 0 || !sameJSON(a.List[n-1].Note, note)) {
			a.List = append(a.List, appliedNote{head.Began, note})
		}
	}
	added := len(a.List) > had
	a.prune()
	return added
}

// forget deletes the last apply done, for which another one comes, and keeps its note.
func (h Home) forget() error {
	var head header
	if err := record.ReadJSON(h.path(DirUndo, fileHeader), &head); err == nil {
		all, err := h.applied()
		if err != nil {
			return err
		}
		if all.add(head) {
			if err := record.WriteJSON(h.path(fileApplied), all, true); err != nil {
				return err
			}
		}
	} else if !errors.Is(err, errNotExist) && !errors.Is(err, fault.ErrCorrupt) {
		return err
	}
	return discardApply(h.path(DirUndo))
}

// newID returns 64 random bits as 16 hex digits.
func newID() string {
	var b [8]byte
	_, _ = rand.Read(b[:]) // never fails
	return hex.EncodeToString(b[:])
}
