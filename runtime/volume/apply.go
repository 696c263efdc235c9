package volume

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"strings"
	"time"

	"github.com/agentbox/agentbox/internal/failpoint"
	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/internal/guard"
	"github.com/agentbox/agentbox/internal/lazy"
	"github.com/agentbox/agentbox/overlay"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/internal/changes"
	"github.com/agentbox/agentbox/runtime/internal/record"
)

// An apply stages a copy of the upperdir beside the original, on the same mount, and then lets
// staged and old files change places by renames, one for every file or whole subtree that
// differs. Old files are not overwritten but end up in the scratch directory, so taking an
// apply back, be it that it failed, was killed, or is undone a week later, is the same renames
// once more.
//
// The scratch directory is apply/scratch of the volume if that is on the original's mount;
// otherwise it is in the original for as long as the apply runs, and what came out of it is
// copied to the volume when it is done.

// Files of an apply, and its directories.
const (
	dirApply   = "apply" // under way
	dirUndo    = "undo"  // the last one done
	fileHeader = "apply.json"
	filePlan   = "plan.json"
	dirScratch = "scratch"
	dirOld     = "upper" // the upperdir that was applied
)

// scratchPrefix begins the name of a scratch directory in the original.
const scratchPrefix = ".agentbox-"

var scratchPattern = lazy.Regexp(`^\.agentbox-[0-9a-f]{16}$`)

// Phases of an apply. From phaseWrite on the original may be touched.
const (
	phaseStage  = "stage"  // nothing but the scratch directory is made: delete it
	phaseWrite  = "write"  // take it back
	phaseRolled = "rolled" // it is taken back: delete the scratch directory
	phaseDone   = "done"   // finish it
)

// header is the content of apply.json.
type header struct {
	Version  int       `json:"version"`
	Phase    string    `json:"phase"`
	Began    time.Time `json:"began"`
	Original string    `json:"original"`
	Dev      uint64    `json:"dev"` // of the original
	Ino      uint64    `json:"ino"`
	Root     attrs     `json:"root"`              // of the original, when it began
	Scratch  string    `json:"scratch,omitempty"` // its name in the original; empty: it is the volume's
	Stray    string    `json:"stray,omitempty"`   // one in the original that is not needed any more
	Upper    uint64    `json:"upper"`             // inode of the upperdir that is applied
	Undoing  bool      `json:"undoing,omitempty"` // a done apply is being taken back
}

// txn is one apply, in memory.
type txn struct {
	v    *Volumes
	rec  stored
	head header
	plan *plan
	gate *gate

	from    *root
	scratch *root
}

func (t *txn) path(rest ...string) string {
	return t.v.path(t.rec.Name, append([]string{dirApply}, rest...)...)
}

func (t *txn) put(phase string) error {
	t.head.Phase = phase
	return record.WriteJSON(t.path(fileHeader), t.head, true)
}

func (t *txn) putPlan() error { return record.WriteJSON(t.path(filePlan), t.plan, true) }

func (t *txn) close() {
	for _, r := range []*root{t.from, t.scratch} {
		if r != nil {
			_ = r.Close()
		}
	}
}

// Apply implements runtime.Original.
func (b Backend) Apply(ctx context.Context, id string, opts runtime.ApplyOptions) (out runtime.Applied, err error) {
	rec, unlock, err := b.locked(ctx, id)
	if err != nil {
		return out, err
	}
	defer unlock()
	out = runtime.Applied{
		Original: rec.From, DryRun: opts.DryRun, Undone: opts.Undo, Changes: []runtime.Change{}, Conflicts: []string{},
		Refused: []runtime.Refusal{},
	}
	if rec.From == "" {
		return out, fmt.Errorf("volume %s: %w: it lies over no directory that could take its changes",
			rec.Name, fault.ErrUnsupported)
	}
	if !opts.DryRun {
		if err := b.idle(ctx, rec); err != nil {
			return out, err
		}
	}
	t := &txn{v: b.Volumes, rec: rec}
	defer t.close()
	if t.from, err = openRoot(rec.From); err != nil {
		return out, err
	}
	t.gate = newGate(t.from, opts)
	if opts.Undo {
		return out, t.undo(ctx, opts.Force)
	}
	upper, err := openRoot(b.path(rec.Name, "upper"))
	if err != nil {
		return out, err
	}
	defer upper.Close()
	if t.plan, err = newPlan(ctx, t.from, upper, b.path(rec.Name, "upper"), t.gate); err != nil {
		return out, err
	}
	out.Refused = append(out.Refused, t.gate.refused...)
	for _, c := range t.plan.conflicts {
		out.Conflicts = append(out.Conflicts, path.Join("/", c))
	}
	if out.Changes, err = changesSince(ctx, rec.From, b.path(rec.Name, "upper")); err != nil {
		return out, err
	}
	if out.Changes = t.gate.show(out.Changes); opts.DryRun {
		return out, nil
	}
	if err := t.gate.refusal(rec.From); err != nil {
		return out, err
	}
	if n := len(out.Conflicts); n > 0 && !opts.Force {
		return out, &fault.Error{Err: fmt.Errorf("%w: changed in %s since the volume changed it: %s", fault.ErrState,
			rec.From, strings.Join(clip(out.Conflicts, 10), ", ")),
			Hint: "Look at both, then apply with --force to have the volume's."}
	}
	return out, t.apply(ctx, upper)
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

// apply carries a plan out. On error everything is as it was, except for what the next
// holder of the lock has to roll back.
func (t *txn) apply(ctx context.Context, upper *root) (err error) {
	if err := os.RemoveAll(t.path()); err != nil {
		return err
	}
	if err := os.Mkdir(t.path(), 0o700); err != nil {
		return err
	}
	t.head = header{
		Version: version, Began: time.Now().UTC(), Original: t.rec.From, Dev: t.from.dev,
		Ino: t.from.ino, Upper: upper.ino,
	}
	if t.head.Root, err = attrsOf(t.from); err != nil {
		return err
	}
	near, err := t.near()
	if err != nil {
		return err
	}
	if !near {
		t.head.Scratch = scratchPrefix + newID()[:16]
	}
	if err := t.put(phaseStage); err != nil {
		return err
	}
	committed := false
	defer func() {
		if err != nil && !committed {
			// The lock's next holder would do the same.
			_, e := t.v.settle(t.rec.Name)
			err = errors.Join(err, e)
		}
	}()
	if err := t.stage(ctx); err != nil {
		return fmt.Errorf("stage the changes of volume %s: %w", t.rec.Name, err)
	}
	if err := t.putPlan(); err != nil {
		return err
	}
	if err := syncfs(t.from.File); err != nil {
		return err
	}
	if err := failpoint.Hit("volume.apply.before-write"); err != nil {
		return err
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	if err := t.put(phaseWrite); err != nil {
		return err
	}
	if err := t.write(); err != nil {
		return err
	}
	if err := syncfs(t.from.File); err != nil {
		return err
	}
	if t.head.Scratch != "" {
		if err := t.keep(ctx); err != nil {
			return fmt.Errorf("keep what %s had: %w", t.rec.From, err)
		}
	}
	if err := failpoint.Hit("volume.apply.before-commit"); err != nil {
		return err
	}
	if err := t.put(phaseDone); err != nil {
		return err
	}
	committed = true
	if err := failpoint.Hit("volume.apply.after-commit"); err != nil {
		return err
	}
	// The original is complete; the next apply finishes what fails from here on.
	if err := t.finish(); err != nil {
		return fmt.Errorf("the changes are applied, but: %w", err)
	}
	return nil
}

// near reports whether the volume's directory and the original are on one mount,
// so that a rename leads from one to the other.
func (t *txn) near() (bool, error) {
	own, err := openRoot(t.path())
	if err != nil {
		return false, err
	}
	defer own.Close()
	return own.mount == t.from.mount, nil
}

// openScratch opens the scratch directory, making it if asked to.
func (t *txn) openScratch(make bool) (err error) {
	at, name := t.from, t.head.Scratch
	if name == "" {
		if at, err = openRoot(t.path()); err != nil {
			return err
		}
		defer at.Close()
		name = dirScratch
	}
	if make {
		if err := os.Mkdir(at.at(name), 0o700); err != nil {
			return err
		}
	}
	t.scratch, err = at.sub(name)
	return err
}

// stage makes the scratch directory: in new/ a copy of the upperdir without
// what only overlayfs understands, in gone/ room for what is removed.
func (t *txn) stage(ctx context.Context) error {
	if err := failpoint.Hit("volume.apply.before-stage"); err != nil {
		return err
	}
	if err := t.openScratch(true); err != nil {
		return err
	}
	for _, d := range []string{"new", "gone"} {
		if err := os.Mkdir(t.scratch.at(d), 0o700); err != nil {
			return err
		}
	}
	if err := copyTree(ctx, t.v.path(t.rec.Name, "upper"), t.scratch.at("new")); err != nil {
		return err
	}
	if err := failpoint.Hit("volume.apply.after-copy"); err != nil {
		return err
	}
	staged, err := t.scratch.sub("new")
	if err != nil {
		return err
	}
	defer staged.Close()
	if err := t.gate.chown(staged); err != nil {
		return err
	}
	for i := len(t.plan.fixes) - 1; i >= 0; i-- { // what is in a directory before it
		if err := t.plan.fixes[i].do(staged); err != nil {
			return err
		}
	}
	for i := range t.plan.Ops {
		o := &t.plan.Ops[i]
		if o.Kind == opRemove {
			o.At = fmt.Appendf(nil, "gone/%d", i)
			continue
		}
		st, err := t.scratch.stat(string(o.At))
		if err != nil {
			return err
		}
		if st == nil {
			return &fs.PathError{Op: "stage", Path: string(o.Path), Err: fs.ErrNotExist}
		}
		o.NewIno = st.Ino
		if o.New, err = t.scratch.fingerprint(string(o.At)); err != nil {
			return err
		}
	}
	return failpoint.Hit("volume.apply.after-stage")
}

// write carries out the plan.
func (t *txn) write() error {
	for i, o := range t.plan.Ops {
		err := t.do(o)
		if err == nil {
			switch i {
			case len(t.plan.Ops) - 1:
				err = failpoint.Hit("volume.apply.last-write")
			case len(t.plan.Ops) / 2:
				err = failpoint.Hit("volume.apply.mid-write")
			case 0:
				err = failpoint.Hit("volume.apply.first-write")
			}
		}
		if err != nil {
			return err
		}
	}
	for i := len(t.plan.Dirs) - 1; i >= 0; i-- {
		if err := t.setDir(t.plan.Dirs[i], false); err != nil {
			return err
		}
	}
	return failpoint.Hit("volume.apply.after-dirs")
}

// setDir gives a directory of both sides its new attributes, or its old ones
// back.
func (t *txn) setDir(d dirOp, back bool) error {
	dir, err := t.from.sub(string(d.Path))
	if back && gone(err) {
		return nil // removed by another process
	}
	if err != nil {
		return conflict(d.Path, err)
	}
	defer dir.Close()
	if back {
		return d.Old.put(dir)
	}
	now, err := attrsOf(dir)
	if err != nil {
		return err
	}
	if !now.equal(d.Old) {
		return conflict(d.Path, nil)
	}
	if err := d.New.put(dir); err != nil {
		return fmt.Errorf("%s: %w", path.Join("/", string(d.Path)), err)
	}
	return nil
}

// conflict is the error of an apply during which another process changed the original.
func conflict(rel []byte, err error) error {
	if err == nil {
		err = errors.New("it is not as it was a moment ago")
	}
	return &fault.Error{Err: fmt.Errorf("%w: %q was changed in the original by another program while it was being applied: %w", fault.ErrState, path.Join("/", string(rel)), err),
		Hint: "The original is as it was. Apply again when it is at rest."}
}

// copyTree copies a directory into an empty one, in every respect.
func copyTree(ctx context.Context, from, to string) error {
	r, w, err := os.Pipe()
	if err != nil {
		return err
	}
	captured := guard.Start(func() error {
		err := guard.Do(func() error {
			_, err := overlay.Capture(ctx, from, w, overlay.CaptureOptions{})
			return err
		})
		return errors.Join(err, w.Close())
	})
	_, err = overlay.Apply(ctx, r, to, overlay.ApplyOptions{})
	_ = r.Close() // ends a capture that is no longer read
	if e := <-captured; e != nil && (err == nil || !errors.Is(e, errPipe)) {
		return e
	}
	return err
}
