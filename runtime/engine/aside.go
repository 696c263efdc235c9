package engine

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/failpoint"
	"github.com/agentbox/agentbox/internal/guard"
	"github.com/agentbox/agentbox/overlay"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/store"
)

// A restore that is to keep no undo checkpoint needs a way back nevertheless,
// for when it fails. Where nothing runs and little changes it makes no checkpoint
// for that: whatever it replaces or removes is moved aside and stays there until
// the sandbox is as it should be. Beside a tree lies, meanwhile,
//
//	DIR.old/before   what the tree had where it changes, written before the first change
//	DIR.old/new      what was staged, and, once it is applied, what it has replaced
//	DIR.old/was-N    the same of tries that ended

// aside is where what a restore replaces lies.
func (t tree) aside() string { return t.Dir + ".old" }

func (t tree) before() string { return filepath.Join(t.aside(), "before") }

// keepStage keeps what lies in the stage, which may be the way back.
func (t tree) keepStage() error {
	if err := os.Mkdir(t.aside(), 0o700); err != nil && !errors.Is(err, os.ErrExist) {
		return err
	}
	for i := 1; ; i++ {
		to := filepath.Join(t.aside(), "was-"+strconv.Itoa(i))
		switch err := os.Rename(t.stage(), to); {
		case errors.Is(err, os.ErrNotExist):
			return nil
		case errors.Is(err, os.ErrExist): // a directory that is not empty
		default:
			return err
		}
	}
}

// layAside lays a restore out whose way back is what it replaces, if it is one
// for that. When it is not, nothing has changed.
func (e *Engine) layAside(ctx context.Context, r *restoration) (ok bool, err error) {
	if !r.data.NoUndo || r.data.Undo == "" || r.data.Salvage || len(r.data.Trees) != 1 || len(r.data.HostFiles) > 0 ||
		r.c.Status != runtime.Created && r.c.Status != runtime.Exited || r.sb.host.Properties().FilesOnly {
		return false, nil
	}
	t := &r.data.Trees[0]
	if r.together, err = sameFilesystem(t.Dir, e.store.Root()); err != nil {
		return false, err
	}
	// The files that are replaced are what is left after a power cut: before the first
	// change beginSwap makes them durable, where it does not begin here.
	var durable guard.Group
	if !r.together {
		durable.Go(func() error { return syncfs(t.Dir) })
	}
	u, err := e.compare(ctx, r, t)
	if err := errors.Join(err, durable.Wait()); err != nil {
		return false, errors.Join(err, u.Close())
	}
	r.updates = []*overlay.Update{u}
	defer func() {
		if !ok {
			err = errors.Join(err, u.Close())
			r.updates, t.seen, t.known, t.Aside = nil, "", false, false
		}
	}()
	t.Aside = true
	if err := discard(t.aside()); err != nil {
		return false, err
	}
	if err := os.Mkdir(t.aside(), 0o700); err != nil {
		return false, err
	}
	defer func() {
		if !ok {
			err = errors.Join(err, discard(t.aside()))
		}
	}()
	if fits, err := u.Aside(t.aside()); err != nil || !fits {
		return false, err
	}
	if r.changed = u.Len(); !u.Empty() {
		r.sb.steps.begin(runtime.PhaseStaging, u.Bytes())
		if err := u.Stage(ctx, t.Dir, t.stage(), r.sb.steps.source(runtime.PhaseStaging, r.reader.Source())); err != nil {
			return false, err
		}
	}
	if err := u.WriteBefore(t.before()); err != nil {
		return false, err
	}
	if err := failpoint.Hit("restore.aside.laid"); err != nil {
		return false, err
	}
	r.data.Undo = ""
	return true, nil
}

// compare looks at a tree that stands still and compares it with the checkpoint.
func (e *Engine) compare(ctx context.Context, r *restoration, t *tree) (*overlay.Update, error) {
	r.sb.steps.begin(runtime.PhaseLooking, 0)
	t.seen = e.knownIf(ctx, r.sb.ID, *t, false)
	if base, err := overlay.MemoryBase(t.seen, false); err == nil && base == r.row.ID && !r.verify {
		// Most often it was at this very checkpoint when it was looked at last.
		u, err := t.planKnown(ctx, r.reader)
		if err == nil || ctx.Err() != nil {
			return u, err
		}
		e.log.Debug("files compared with the checkpoint's list", "sandbox", r.sb.ID, "why", err)
	}
	if t.seen != "" {
		t.seen = e.known(ctx, r.sb.ID, *t) // which proves it
	}
	if err := e.look(ctx, r.sb.ID, t, overlay.CollectOptions{Paranoid: r.verify}); err != nil {
		return nil, err
	}
	return t.plan(ctx, r.reader, nil)
}

// planKnown is plan for a tree of which exactly that is known what the checkpoint has.
func (t *tree) planKnown(ctx context.Context, r *store.Reader) (*overlay.Update, error) {
	proof := guard.Start(func() error {
		list, err := r.TreePieces(ctx, t.Number)
		if err != nil {
			return err
		}
		same, err := overlay.ProveKnown(t.seen, list)
		if err == nil && !same {
			err = fmt.Errorf("the checkpoint has another list than what is known: %w", runtime.ErrState)
		}
		return err
	})
	u, err := overlay.PlanUpdateKnown(ctx, t.Dir, t.seen, t.steps.reading())
	if err := errors.Join(<-proof, err); err != nil {
		return nil, errors.Join(err, u.Close())
	}
	t.known = true
	return u, nil
}

// beginSwap records that the files may be changed from here on. What lies aside
// is durable by then.
func (e *Engine) beginSwap(ctx context.Context, seq int64, r *restoration) (err error) {
	defer func() { r.past = err != nil }() // nothing has changed
	r.data.Phase = phaseSwap
	t := r.data.Trees[0]
	if !t.Aside {
		return e.advance(ctx, seq, r.data, false)
	}
	if r.together {
		// The disk is waited for once, for what was before, what lies beside it, and the record.
		return errors.Join(e.advance(ctx, seq, r.data, true), syncfs(t.Dir))
	}
	var group guard.Group
	for _, path := range []string{t.before(), t.aside(), filepath.Dir(t.aside())} {
		group.Go(func() error { return fsync(path) })
	}
	return errors.Join(e.advance(ctx, seq, r.data, false), group.Wait())
}

func sameFilesystem(a, b string) (bool, error) {
	var st [2]unix.Stat_t
	if err := errors.Join(unix.Stat(a, &st[0]), unix.Stat(b, &st[1])); err != nil {
		return false, fmt.Errorf("look at %s and %s: %w", a, b, err)
	}
	return st[0].Dev == st[1].Dev, nil
}

// fsync makes a file or directory durable.
func fsync(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	return errors.Join(f.Sync(), f.Close())
}

// untouched tells of a restore that was to move aside what it replaces that a
// power cut kept it from beginning to: what was before has not all reached the disk.
func (r *restoring) untouched() (bool, error) {
	if r.Phase != phaseSwap || len(r.Trees) == 0 || !r.Trees[0].Aside {
		return false, nil
	}
	_, err := overlay.Before(r.Trees[0].before(), nil)
	if errors.Is(err, os.ErrNotExist) || errors.Is(err, io.ErrUnexpectedEOF) {
		return true, nil
	}
	if errors.Is(err, runtime.ErrCorrupt) {
		err = nil // the way forward may be whole
	}
	return false, err
}

// putAsideBack makes the files what they were before the restore, with what that
// has moved aside.
func (e *Engine) putAsideBack(ctx context.Context, r *restoration) (err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("put the files back: %w (%w)", err, errUnfinished)
		}
	}()
	t := &r.data.Trees[0]
	if err := t.keepStage(); err != nil {
		return err
	}
	was, err := overlay.Before(t.before(), wanted(ctx, r.reader, *t, nil))
	if errors.Is(err, os.ErrNotExist) {
		return nil // it had come to its end, and what was aside is gone
	}
	if err != nil {
		return err
	}
	kept, err := overlay.OpenAside(ctx, t.aside())
	if err != nil {
		return err
	}
	t.seen = ""
	if err := e.look(ctx, r.sb.ID, t, overlay.CollectOptions{}); err != nil {
		return err
	}
	u, err := overlay.PlanUpdate(ctx, t.seen, was)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, u.Close()) }()
	if !u.Empty() {
		if err := u.Stage(ctx, t.Dir, t.stage(), asideSource{kept, r.reader.Source()}); err != nil {
			return err
		}
		if err := u.Apply(ctx, t.Dir, t.stage()); err != nil {
			return err
		}
	}
	if err := e.look(ctx, r.sb.ID, t, overlay.CollectOptions{}); err != nil {
		return err
	}
	diffs, err := overlay.Compare(was, entries(t.seen), overlay.CompareOptions{Limit: 1})
	if err == nil && len(diffs) > 0 {
		err = fmt.Errorf("%w: the files differ from what they were: %v", runtime.ErrCorrupt, diffs[0])
	}
	if err != nil {
		return err
	}
	// No checkpoint has what was seen of the files now.
	if err := errors.Join(e.unsee(r.sb.ID, *t), syncfs(t.Dir)); err != nil {
		return err
	}
	if err := failpoint.Hit("restore.aside.back"); err != nil {
		return err
	}
	if err := discard(t.aside()); err != nil {
		return err
	}
	t.Aside = false
	return nil
}

// asideSource has the data of what lies aside, and of what nothing has touched
// or a restore has brought.
type asideSource struct {
	kept  *overlay.Aside
	other overlay.Source
}

func (s asideSource) Data(ctx context.Context, entry overlay.Entry) (io.ReadCloser, error) {
	data, err := s.kept.Data(ctx, entry)
	if errors.Is(err, runtime.ErrNotFound) {
		return s.other.Data(ctx, entry)
	}
	return data, err
}

var _ overlay.Source = asideSource{}
