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

// A restore without an undo checkpoint still needs a way back in case it fails. If nothing
// runs in the sandbox and little changes, it makes no checkpoint for that: it moves the files
// that it replaces or removes aside, where they stay until the sandbox is restored. In the
// meantime these lie beside a tree:
//
//	DIR.old/before   entries that will change, as they were; written before the first change
//	DIR.old/new      the stage and, once it is applied, the displaced files
//	DIR.old/was-N    the same of earlier attempts

// aside returns where a restore keeps the displaced files.
func (t tree) aside() string { return t.Dir + ".old" }

func (t tree) before() string { return filepath.Join(t.aside(), "before") }

// keepStage keeps the files in the stage, which may be the way back.
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

// layAside stages a restore whose way back is the displaced files, if that is possible for
// it; otherwise nothing has changed.
func (e *Engine) layAside(ctx context.Context, r *restoration) (ok bool, err error) {
	if !r.data.NoUndo || r.data.Undo == "" || r.data.Salvage || len(r.data.Trees) != 1 || len(r.data.HostFiles) > 0 ||
		r.c.Status != runtime.Created && r.c.Status != runtime.Exited || r.sb.host.Properties().FilesOnly {
		return false, nil
	}
	t := &r.data.Trees[0]
	if r.together, err = sameFilesystem(t.Dir, e.store.Root()); err != nil {
		return false, err
	}
	// After a power cut the replaced files are the way back. They are made durable here or,
	// on the store's filesystem, by beginSwap before the first change.
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

// compare collects a tree that does not change and compares it with the checkpoint.
func (e *Engine) compare(ctx context.Context, r *restoration, t *tree) (*overlay.Update, error) {
	r.sb.steps.begin(runtime.PhaseLooking, 0)
	t.seen = e.knownIf(ctx, r.sb.ID, *t, false)
	if base, err := overlay.MemoryBase(t.seen, false); err == nil && base == r.row.ID && !r.verify {
		// Usually the last collection was of this very checkpoint.
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

// planKnown is plan for a tree whose file cache has exactly the checkpoint's files.
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

// beginSwap records that the files may be changed from here on. The files of the way back
// are durable by then.
func (e *Engine) beginSwap(ctx context.Context, seq int64, r *restoration) (err error) {
	defer func() { r.past = err != nil }() // nothing has changed
	r.data.Phase = phaseSwap
	t := r.data.Trees[0]
	if !t.Aside {
		return e.advance(ctx, seq, r.data, false)
	}
	if r.together {
		// One sync makes the old files, the stage and the record durable.
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

// untouched reports whether a restore that displaces files had not begun to before a power
// cut: its DIR.old/before did not reach the disk completely.
func (r *restoring) untouched() (bool, error) {
	if r.Phase != phaseSwap || len(r.Trees) == 0 || !r.Trees[0].Aside {
		return false, nil
	}
	_, err := overlay.Before(r.Trees[0].before(), nil)
	if errors.Is(err, os.ErrNotExist) || errors.Is(err, io.ErrUnexpectedEOF) {
		return true, nil
	}
	if errors.Is(err, runtime.ErrCorrupt) {
		err = nil // the restore may still be finished
	}
	return false, err
}

// putAsideBack puts the files back as they were before the restore, with the displaced
// files.
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
		return nil // a previous run has finished and removed the displaced files
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
	// No checkpoint has this collection, so it cannot become the file cache.
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

// asideSource reads displaced files, and takes the data of all others from the checkpoint.
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
