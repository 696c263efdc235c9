package apply

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/failpoint"
	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/internal/fsx"
	"github.com/agentbox/agentbox/runtime/internal/record"
)

// done reports whether an op has been carried out and not been taken back.
func (p *part) done(o op) (bool, error) {
	st, err := p.scratch.stat(string(o.At))
	if err != nil {
		return false, err
	}
	switch o.Kind {
	case opPut:
		return st == nil, nil
	case opSwap:
		return st != nil && st.Ino != o.NewIno, nil
	}
	return st != nil, nil
}

// back takes one op back. It never removes what another process has put in the place
// meanwhile, nor what one has changed in what the apply brought.
func (p *part) back(o op, log *slog.Logger) error {
	done, err := p.done(o)
	if err == nil && done {
		err = p.takeBack(o, log)
	}
	if err != nil || o.Kind == opRemove {
		return err
	}
	return p.returnEdit(o, log)
}

func (p *part) takeBack(o op, log *slog.Logger) error {
	at, rel := string(o.At), string(o.Path)
	now, err := p.from.stat(rel)
	if err != nil {
		return err
	}
	ours := now != nil && now.Ino == o.NewIno
	switch {
	case o.Kind == opPut && now == nil:
		return nil // removed by another process: it is as it was
	case o.Kind == opPut && ours:
		return move(p.from, rel, p.scratch, at, unix.RENAME_NOREPLACE)
	case o.Kind == opPut:
		return nil
	case o.Kind == opSwap && ours:
		return move(p.scratch, at, p.from, rel, unix.RENAME_EXCHANGE)
	case now == nil:
		return move(p.scratch, at, p.from, rel, unix.RENAME_NOREPLACE)
	}
	return p.backBeside(at, rel, log)
}

// returnEdit puts what the apply had brought back into the directory if another process has changed it
// since. It looks once no process can reach it by its name.
func (p *part) returnEdit(o op, log *slog.Logger) error {
	at, rel := string(o.At), string(o.Path)
	now, err := p.scratch.fingerprint(at)
	if err != nil || now == "" || now == o.New {
		return err
	}
	err = move(p.scratch, at, p.from, rel, unix.RENAME_NOREPLACE)
	if errors.Is(err, unix.EEXIST) {
		return p.backBeside(at, rel, log)
	}
	if err == nil {
		log.Warn("file changed by another program since it was applied: it stays", "path", path.Join(p.From, rel))
	}
	return err
}

// backBeside puts something back beside its place, where another process has made something of that
// name since, or where the file is that the apply had replaced.
func (p *part) backBeside(at, rel string, log *slog.Logger) error {
	for i := range 100 {
		beside := fmt.Sprintf("%s.agentbox-%d", rel, i)
		err := move(p.scratch, at, p.from, beside, unix.RENAME_NOREPLACE)
		if errors.Is(err, unix.EEXIST) {
			continue
		}
		if err == nil {
			log.Warn("another program has changed a file while an apply was taken back: there are two now",
				"path", path.Join(p.From, rel), "other", path.Join(p.From, beside))
		}
		return err
	}
	return fmt.Errorf("%w: %q has a hundred files beside it", fault.ErrState, path.Join(p.At, rel))
}

// rollback takes back what was written, whatever that is, and records when all of it is.
func (t *txn) rollback() error {
	var errs []error
	for k := len(t.parts) - 1; k >= 0; k-- {
		p := t.parts[k]
		if p.scratch == nil {
			if err := p.openScratch(false); err != nil {
				errs = append(errs, err)
				continue
			}
		}
		for i := len(p.plan.Ops) - 1; i >= 0; i-- {
			errs = append(errs, p.back(p.plan.Ops[i], t.home.Log))
			if t.head.Undoing && k == 0 && i == len(p.plan.Ops)/2 {
				errs = append(errs, failpoint.Hit("apply.undo-mid-write"))
			}
		}
	}
	if err := errors.Join(errs...); err != nil {
		return err
	}
	for _, p := range t.parts {
		if err := p.upperBack(); err != nil {
			return err
		}
	}
	if err := t.sync(); err != nil {
		return err
	}
	if err := t.put(phaseRolled); err != nil {
		return err
	}
	return failpoint.Hit("apply.after-rollback")
}

// upperBack gives the volume the upperdir that was applied, if it lost it.
func (p *part) upperBack() error {
	if p.Place.Upper == "" {
		return nil
	}
	var st unix.Stat_t
	if err := unix.Lstat(p.path(dirOld), &st); err != nil || st.Ino != p.site.Upper {
		if errors.Is(err, unix.ENOENT) {
			return nil
		}
		return err
	}
	return exchange(p.Place.Upper, p.path(dirOld))
}

// exchange swaps two directories and makes it last.
func exchange(a, b string) error {
	if err := unix.Renameat2(unix.AT_FDCWD, a, unix.AT_FDCWD, b, unix.RENAME_EXCHANGE); err != nil {
		return fmt.Errorf("exchange %s and %s: %w", a, b, err)
	}
	return errors.Join(fsx.SyncDir(path.Dir(a)), fsx.SyncDir(path.Dir(b)))
}

// clear ends an apply that is taken back, or was never begun.
func (t *txn) clear() error {
	for _, p := range t.parts {
		if err := p.clear(t.head.Phase == phaseRolled); err != nil {
			return err
		}
	}
	// The header goes first: without it the directory belongs to no apply.
	return discardApply(t.home.path(DirApply))
}

func (p *part) clear(rolled bool) error {
	for _, name := range []string{p.Scratch, p.Stray} {
		if err := p.drop(name); err != nil {
			return err
		}
	}
	if p.plan != nil && rolled {
		for i := len(p.plan.Dirs) - 1; i >= 0; i-- {
			if err := p.setDir(p.plan.Dirs[i], true); err != nil {
				return err
			}
		}
	}
	if p.Scratch != "" || p.Stray != "" {
		return p.rootTime(false) // the scratch directory came and went
	}
	return nil
}

// rootTime gives the directory itself the time that it had, or is to have.
func (p *part) rootTime(after bool) error {
	to := p.Root
	for _, d := range p.planDirs() {
		if string(d.Path) == "." {
			if to = d.Old; after {
				to = d.New
			}
		}
	}
	return setTime(int(p.from.Fd()), ".", to.Sec, to.Nsec)
}

func (p *part) planDirs() []dirOp {
	if p.plan == nil {
		return nil
	}
	return p.plan.Dirs
}

// discardApply deletes the directory of an apply, so that a part of it is never
// taken for one.
func discardApply(dir string) error {
	if err := os.Remove(dir + "/" + fileHeader); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return os.RemoveAll(dir)
}

// drop deletes a scratch directory in the directory that is applied to.
func (p *part) drop(name string) error {
	if name == "" {
		return nil
	}
	return os.RemoveAll(p.from.at(name))
}

// finish ends an apply whose changes are all in their directories: a volume gets an empty upperdir,
// and what is needed to undo it is kept. Every step finds out whether it was done before.
func (t *txn) finish() error {
	for _, p := range t.parts {
		if err := p.emptyUpper(); err != nil {
			return err
		}
	}
	if err := failpoint.Hit("apply.after-upper"); err != nil {
		return err
	}
	strays := false
	for _, p := range t.parts {
		if p.Stray == "" {
			continue
		}
		if err := errors.Join(p.drop(p.Stray), p.rootTime(true)); err != nil {
			return err
		}
		p.Stray, strays = "", true
	}
	if strays {
		if err := t.put(phaseDone); err != nil {
			return err
		}
	}
	if err := t.home.forget(); err != nil {
		return err
	}
	if err := failpoint.Hit("apply.before-end"); err != nil {
		return err
	}
	if err := os.Rename(t.home.path(DirApply), t.home.path(DirUndo)); err != nil {
		return err
	}
	return fsx.SyncDir(t.home.Dir)
}

// emptyUpper gives a volume an empty upperdir.
func (p *part) emptyUpper() error {
	if p.Place.Upper == "" {
		return nil
	}
	var st unix.Stat_t
	if err := unix.Lstat(p.Place.Upper, &st); err != nil || st.Ino != p.site.Upper {
		return err
	}
	if err := os.RemoveAll(p.path(dirOld)); err != nil {
		return err
	}
	if err := MakeUpper(p.path(dirOld), p.From); err != nil {
		return err
	}
	return exchange(p.Place.Upper, p.path(dirOld))
}

// keep copies what came out of the directory from the scratch directory there
// to the home. With the commit, that in the directory is not needed any more.
func (p *part) keep(ctx context.Context) error {
	if err := os.Mkdir(p.path(dirScratch), 0o700); err != nil {
		return err
	}
	if err := copyTree(ctx, p.scratch.at("."), p.path(dirScratch)); err != nil {
		return err
	}
	own, err := os.Open(p.dir)
	if err != nil {
		return err
	}
	if err := errors.Join(syncfs(own), own.Close()); err != nil {
		return err
	}
	p.Stray, p.Scratch = p.Scratch, ""
	return nil
}

func syncfs(f *os.File) error {
	if err := unix.Syncfs(int(f.Fd())); err != nil {
		return fmt.Errorf("sync %s: %w", f.Name(), err)
	}
	return nil
}

// Undo takes the last apply back, and gives a volume its changes back. It returns where that was.
func Undo(ctx context.Context, h Home, force bool) (places []Place, err error) {
	if _, err := Settle(h); err != nil {
		return nil, err
	}
	t := &txn{home: h}
	defer t.close()
	if err := t.load(DirUndo); errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("%s: %w: nothing was applied that could be undone", h.Name, fault.ErrState)
	} else if err != nil {
		return nil, err
	}
	if err := t.open(); err != nil {
		return nil, err
	}
	for _, p := range t.parts {
		places = append(places, p.Place)
		if err := p.unchanged(force); err != nil {
			return places, err
		}
	}
	return places, t.undo(ctx, force)
}

func (t *txn) undo(ctx context.Context, force bool) (err error) {
	h := t.home
	if err := os.Rename(h.path(DirUndo), h.path(DirApply)); err != nil {
		return err
	}
	defer func() {
		if err != nil && t.head.Phase == phaseDone {
			_, e := Settle(h) // back to where it was kept
			err = errors.Join(err, e)
		}
	}()
	for _, p := range t.parts {
		near, err := p.near()
		if err != nil {
			return err
		}
		if !near {
			if p.Root, err = attrsOf(p.from); err != nil {
				return err
			}
			if err := t.restage(ctx, p); err != nil {
				return err
			}
		}
	}
	for _, p := range t.parts {
		if p.Stray != "" {
			p.Scratch, p.Stray = p.Stray, ""
			if err := p.openScratch(false); err != nil {
				return err
			}
		}
	}
	if err := failpoint.Hit("apply.undo-before-write"); err != nil {
		return err
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	for _, p := range t.parts {
		if err := p.seal(true); err != nil {
			return err
		}
		if force { // what it goes by has changed
			if err := record.WriteJSON(p.path(filePlan), p.plan, true); err != nil {
				return err
			}
		}
	}
	t.head.Undoing = true
	if err := t.put(phaseWrite); err != nil {
		return err
	}
	if err := t.rollback(); err != nil {
		return err
	}
	return t.clear()
}

// restage copies what an apply took out of the directory back beside it. A copy
// shares no inode with names that the apply left where they were.
func (t *txn) restage(ctx context.Context, p *part) error {
	p.Stray = scratchPrefix + newID()
	if err := t.put(phaseDone); err != nil {
		return err
	}
	if err := os.Mkdir(p.from.at(p.Stray), 0o700); err != nil {
		return err
	}
	if err := copyTree(ctx, p.path(dirScratch), p.from.at(p.Stray)); err != nil {
		return err
	}
	return syncfs(p.from.File)
}

// unchanged proves that an undo takes away nothing but what the apply brought. With force it takes
// what others have made of that since, as it is now.
func (p *part) unchanged(force bool) error {
	for i, o := range p.plan.Ops {
		now, err := p.from.fingerprint(string(o.Path))
		if err != nil {
			return err
		}
		if o.Kind == opRemove && now == "" || o.Kind != opRemove && now == o.New {
			continue
		}
		if force && o.Kind != opRemove {
			if st, err := p.from.stat(string(o.Path)); err == nil && (st == nil || st.Ino == o.NewIno) {
				p.plan.Ops[i].New = now
				continue // still the file, or directory, that the apply brought
			}
		}
		e := &fault.Error{Err: fmt.Errorf("%w: %q was changed in %s since the apply", fault.ErrState,
			path.Join(p.At, string(o.Path)), p.From),
			Hint: "Look at it; to lose that change too, add --force."}
		if force {
			e.Hint = "It has been replaced: move it elsewhere first."
		}
		return e
	}
	return nil
}

// load reads an apply from the disk: that in DirApply or in DirUndo.
func (t *txn) load(name string) error {
	head := header{}
	dir := t.home.path(name)
	if err := record.ReadJSON(filepath.Join(dir, fileHeader), &head); err != nil {
		return err
	}
	if head.Version > version {
		return fmt.Errorf("%s: %w: a newer agentbox applied it", t.home.Name, fault.ErrUnsupported)
	}
	more := head.More
	head.More = nil
	t.head = head
	for i := range 1 + len(more) {
		at := dir
		if i > 0 {
			at = filepath.Join(dir, strconv.Itoa(i))
		}
		p := t.add(Place{})
		if i > 0 {
			*p.site = *more[i-1]
		}
		for _, name := range []string{p.Scratch, p.Stray} {
			if name != "" && !scratchPattern().MatchString(name) { // it is removed in the directory
				return fmt.Errorf("%s: %w: an apply by way of %.80q", t.home.Name, fault.ErrCorrupt, name)
			}
		}
		p.plan = &plan{}
		err := readPlan(filepath.Join(at, filePlan), p.plan)
		if errors.Is(err, fs.ErrNotExist) && t.head.Phase == phaseStage {
			p.plan, err = nil, nil
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// maxPlan bounds what is read of a plan. It is as long as the list of paths
// that an apply touches.
const maxPlan = 4 << 30

// readPlan reads a plan of ours.
func readPlan(path string, p *plan) (err error) {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	if st, err := f.Stat(); err != nil || st.Size() > maxPlan {
		return errors.Join(err, fmt.Errorf("%s: %w: too large", path, fault.ErrCorrupt))
	}
	if err := json.NewDecoder(f).Decode(p); err != nil {
		return fmt.Errorf("%s: %w: %w", path, fault.ErrCorrupt, err)
	}
	return nil
}

// open opens the directories of an apply that was read from the disk, and proves that they are those
// that it was about.
func (t *txn) open() error {
	for _, p := range t.parts {
		i := slices.IndexFunc(t.home.Places, func(have Place) bool { return have.From == p.Original })
		if i < 0 {
			return fmt.Errorf("%s: %w: an apply to %.200q, which it does not lie over", t.home.Name, fault.ErrState,
				p.Original)
		}
		p.Place = t.home.Places[i]
		var err error
		if p.from, err = OpenRoot(p.From); err != nil {
			return err
		}
		if p.from.ino != p.Ino {
			return &fault.Error{Err: fmt.Errorf("%w: %s is not the directory that %s was applied to", fault.ErrState,
				p.From, p.Name),
				Hint: "Put that directory back in its place, then run: agentbox recover"}
		}
	}
	return nil
}

// Unfinished reports whether an apply is half-done: it could not be taken back.
func (h Home) Unfinished() bool {
	_, err := os.Lstat(h.path(DirApply))
	return err == nil
}

// Settle brings an apply that was killed to its end, and says what it did.
func Settle(h Home) (did string, err error) {
	if did, err = settle(h); did != "" {
		h.Log.Warn("interrupted apply settled", "of", h.Name, "action", did)
	}
	return did, err
}

// settle is Settle without the log.
func settle(h Home) (did string, err error) {
	dir := h.path(DirApply)
	if _, err := os.Lstat(dir); err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			err = nil
		}
		return "", err
	}
	t := &txn{home: h}
	defer t.close()
	err = t.load(DirApply)
	if errors.Is(err, fs.ErrNotExist) {
		return "", os.RemoveAll(dir) // it had not begun, or was at its end
	}
	if err != nil {
		return "", fmt.Errorf("the apply of %s: %w", h.Name, err)
	}
	if err = t.open(); err != nil {
		return "", fmt.Errorf("an apply of %s is unfinished: %w", h.Name, err)
	}
	did = fmt.Sprintf("took back the half-done apply of %s: %s is as it was", h.Name, t.names())
	if t.head.Undoing {
		did = fmt.Sprintf("finished the undo of the apply of %s to %s", h.Name, t.names())
	}
	switch t.head.Phase {
	case phaseWrite:
		if err = t.rollback(); err == nil {
			err = t.clear()
		}
	case phaseStage, phaseRolled:
		err = t.clear()
	case phaseDone:
		did = fmt.Sprintf("finished the apply of %s to %s", h.Name, t.names())
		err = t.finish()
	default:
		err = fmt.Errorf("%w: phase %q", fault.ErrCorrupt, t.head.Phase)
	}
	if err != nil {
		return "", fmt.Errorf("an apply of %s is unfinished: %w", h.Name, err)
	}
	return did, nil
}
