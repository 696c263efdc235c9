package apply

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/failpoint"
	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/internal/fsx"
	"github.com/agentbox/agentbox/internal/guard"
	"github.com/agentbox/agentbox/overlay"
	"github.com/agentbox/agentbox/runtime/internal/record"
)

// errPipe is the error of a writer that is no longer read.
var errPipe = unix.EPIPE

var errNotExist = fs.ErrNotExist

// apply carries a plan out. On error everything is as it was, except for what Settle has to take
// back.
func (t *txn) apply(ctx context.Context) (err error) {
	if err := os.RemoveAll(t.home.path(DirApply)); err != nil {
		return err
	}
	t.head.Version, t.head.Began = version, time.Now().UTC()
	for i, p := range t.parts {
		if err := os.Mkdir(p.dir, 0o700); err != nil {
			return err
		}
		p.Original, p.Dev, p.Ino = p.From, p.from.dev, p.from.ino
		if p.Root, err = attrsOf(p.from); err != nil {
			return err
		}
		near, err := p.near()
		if err != nil {
			return err
		}
		if !near {
			p.Scratch = scratchPrefix + newID()
		}
		if err := p.distinct(t.parts[:i]); err != nil {
			return err
		}
	}
	if err := t.put(phaseStage); err != nil {
		return err
	}
	committed := false
	defer func() {
		if err != nil && !committed {
			// The lock's next holder would do the same.
			did, e := settle(t.home)
			if did != "" {
				t.home.Log.Info("failed apply settled", "of", t.home.Name, "action", did)
			}
			err = errors.Join(err, e)
		}
	}()
	for _, p := range t.parts {
		if err := p.stage(ctx); err != nil {
			return fmt.Errorf("stage the changes of %s: %w", p.Name, err)
		}
		if err := record.WriteJSON(p.path(filePlan), p.plan, true); err != nil {
			return err
		}
	}
	if err := t.sync(); err != nil {
		return err
	}
	if err := failpoint.Hit("apply.before-write"); err != nil {
		return err
	}
	if err := errors.Join(t.still(ctx), ctx.Err()); err != nil {
		return err
	}
	if t.home.Begin != nil {
		if err := t.home.Begin(); err != nil {
			return err
		}
	}
	for _, p := range t.parts {
		if err := p.seal(false); err != nil {
			return err
		}
	}
	if err := t.put(phaseWrite); err != nil {
		return err
	}
	if err := t.write(ctx); err != nil {
		return err
	}
	if err := t.sync(); err != nil {
		return err
	}
	for _, p := range t.parts {
		if p.Scratch != "" {
			if err := p.keep(ctx); err != nil {
				return fmt.Errorf("keep what %s had: %w", p.From, err)
			}
		}
	}
	if err := failpoint.Hit("apply.before-commit"); err != nil {
		return err
	}
	if err := t.put(phaseDone); err != nil {
		return err
	}
	committed = true
	if err := failpoint.Hit("apply.after-commit"); err != nil {
		return err
	}
	// The directories are complete; the next apply finishes what fails from here on.
	if err := t.finish(); err != nil {
		return fmt.Errorf("the changes are applied, but: %w", err)
	}
	return nil
}

// seal marks directories of a workspace as hiding what is below: those that come as a whole, or those
// in the place of what an undo brings back. Nothing is there yet, and the kernel does not look
// again: what the sandbox removes in them later would come back with the next mount.
func (p *part) seal(undo bool) error {
	if p.Live == "" {
		return nil
	}
	upper, err := OpenRoot(p.Live)
	if err != nil {
		return err
	}
	defer upper.Close()
	for _, o := range p.plan.Ops {
		if undo != (o.Kind == opRemove) {
			continue
		}
		d, err := upper.dir(string(o.Path))
		if gone(err) {
			continue // no directory, or not any more
		}
		if err != nil {
			return err
		}
		err = unix.Fsetxattr(int(d.Fd()), overlayXattr+"opaque", []byte("y"), 0)
		if err := errors.Join(err, d.Close()); err != nil {
			return fmt.Errorf("mark %q: %w", o.Path, err)
		}
	}
	return nil
}

// distinct refuses a directory that is another part's, or has it in it: each would find the other's
// changes made by another program.
func (p *part) distinct(others []*part) error {
	for _, o := range others {
		if p.Ino == o.Ino && p.Dev == o.Dev || fsx.Within(p.From, o.From) || fsx.Within(o.From, p.From) {
			return &fault.Error{Err: fmt.Errorf("%w: %s lies over %s, and %s over %s", fault.ErrState, p.Name, p.From,
				o.Name, o.From), Hint: "Apply one after the other: --workspace PATH."}
		}
	}
	return nil
}

func (t *txn) sync() error {
	for _, p := range t.parts {
		if err := syncfs(p.from.File); err != nil {
			return err
		}
	}
	return nil
}

// near reports whether the home and the directory are on one mount, so that a rename leads from
// one to the other.
func (p *part) near() (bool, error) {
	own, err := OpenRoot(p.dir)
	if err != nil {
		return false, err
	}
	defer own.Close()
	return own.mount == p.from.mount, nil
}

// openScratch opens the scratch directory, making it if asked to.
func (p *part) openScratch(make bool) (err error) {
	at, name := p.from, p.Scratch
	if name == "" {
		if at, err = OpenRoot(p.dir); err != nil {
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
	p.scratch, err = at.sub(name)
	return err
}

// stage makes the scratch directory: in new/ what comes, in gone/ room for what is removed.
func (p *part) stage(ctx context.Context) error {
	if err := failpoint.Hit("apply.before-stage"); err != nil {
		return err
	}
	if err := p.openScratch(true); err != nil {
		return err
	}
	for _, d := range []string{"new", "gone"} {
		if err := os.Mkdir(p.scratch.at(d), 0o700); err != nil {
			return err
		}
	}
	err := throughPipe(func(w io.Writer) error { return p.archive(ctx, w, false) }, func(r io.Reader) error {
		_, err := overlay.Apply(ctx, r, p.scratch.at("new"), overlay.ApplyOptions{})
		return err
	})
	if err != nil {
		return err
	}
	if err := failpoint.Hit("apply.after-copy"); err != nil {
		return err
	}
	for i := range p.plan.Ops {
		o := &p.plan.Ops[i]
		if o.Kind == opRemove {
			o.At = fmt.Appendf(nil, "gone/%d", i)
			continue
		}
		st, err := p.scratch.stat(string(o.At))
		if err != nil {
			return err
		}
		if st == nil {
			return &fs.PathError{Op: "stage", Path: string(o.Path), Err: fs.ErrNotExist}
		}
		o.NewIno = st.Ino
		if o.New, err = p.scratch.fingerprint(string(o.At)); err != nil {
			return err
		}
	}
	return failpoint.Hit("apply.after-stage")
}

// archive writes what is staged; upper: for an upperdir, where the kernel hides its own attributes.
func (p *part) archive(ctx context.Context, w io.Writer, upper bool) error {
	out := bufio.NewWriterSize(w, 256<<10)
	t := overlay.NewTarWriter(out)
	for c, err := range p.staged() {
		if err == nil {
			err = ctx.Err()
		}
		if err == nil {
			if upper {
				c.Xattrs = escaped(c.Xattrs)
			}
			err = p.archiveOne(ctx, t, c)
		}
		if err != nil {
			return err
		}
	}
	return errors.Join(t.Close(), out.Flush())
}

func (p *part) archiveOne(ctx context.Context, t *overlay.TarWriter, c *comer) error {
	if err := t.Header(c.Entry); err != nil || c.Type != overlay.TypeFile || c.Hardlink != "" {
		return err
	}
	if c.data != nil || c.DataSize() == 0 {
		_, err := t.Write(c.data)
		return err
	}
	data, err := p.source.Data.Data(ctx, c.from)
	if err != nil {
		return err
	}
	n, err := io.Copy(t, io.LimitReader(data, c.DataSize()))
	if err == nil && n < c.DataSize() {
		err = fmt.Errorf("%q has become shorter: %w", c.Path, fault.ErrBusy)
	}
	return errors.Join(err, data.Close())
}

// deed is an op of a part.
type deed struct {
	*part
	op
}

// write carries out the plan, canaries first. Until it has ended, all of it can be taken back.
func (t *txn) write(ctx context.Context) error {
	var todo []deed
	for _, p := range t.parts {
		for _, o := range p.plan.Ops {
			todo = append(todo, deed{p, o})
		}
	}
	total, n := len(todo), 0
	do := func(d deed) error {
		if err := d.do(d.op); err != nil {
			return err
		}
		n++
		switch n - 1 {
		case total - 1:
			return failpoint.Hit("apply.last-write")
		case total / 2:
			return failpoint.Hit("apply.mid-write")
		case 0:
			return failpoint.Hit("apply.first-write")
		}
		return nil
	}
	for _, c := range t.home.Canaries {
		var rest []deed
		for _, d := range todo {
			takes, err := d.isOf(ctx, c)
			if err == nil && takes {
				err = do(d)
			}
			if err != nil {
				return err
			}
			if !takes {
				rest = append(rest, d)
			}
		}
		if len(rest) == len(todo) {
			continue
		}
		todo = rest
		if err := failpoint.Hit("apply.before-canary"); err != nil {
			return err
		}
		if err := c.Check(ctx); err != nil {
			return err
		}
		if err := failpoint.Hit("apply.after-canary"); err != nil {
			return err
		}
	}
	for _, d := range todo {
		if err := do(d); err != nil {
			return err
		}
	}
	for _, p := range t.parts {
		for i := len(p.plan.Dirs) - 1; i >= 0; i-- {
			if err := p.setDir(p.plan.Dirs[i], false); err != nil {
				return err
			}
		}
	}
	return failpoint.Hit("apply.after-dirs")
}

// isOf reports whether a canary takes the path of an op, or one below it that comes or goes with it.
func (d deed) isOf(ctx context.Context, c Canary) (bool, error) {
	rel := string(d.op.Path)
	if c.Takes(d.part.At, rel) {
		return true, nil
	}
	below := map[string]bool{}
	for _, tree := range []struct {
		root *Root
		at   string
	}{{d.from, rel}, {d.scratch, string(d.op.At)}} {
		m := merger{part: &part{from: tree.root}}
		all := map[string]bool{}
		if err := m.below(ctx, tree.at, all); err != nil {
			return false, err
		}
		for p := range all {
			below[path.Join(rel, strings.TrimPrefix(p, tree.at))] = true
		}
	}
	for p := range below {
		if c.Takes(d.part.At, p) {
			return true, nil
		}
	}
	return false, nil
}

// setDir gives a directory of both sides its new attributes, or its old ones
// back.
func (p *part) setDir(d dirOp, back bool) error {
	dir, err := p.from.sub(string(d.Path))
	if back && gone(err) {
		return nil // removed by another process
	}
	if err != nil {
		return p.changed(d.Path, err)
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
		return p.changed(d.Path, nil)
	}
	if err := d.New.put(dir); err != nil {
		return fmt.Errorf("%s: %w", path.Join("/", string(d.Path)), err)
	}
	return nil
}

// changed is the error of an apply during which another process changed the directory.
func (p *part) changed(rel []byte, err error) error {
	if err == nil {
		err = errors.New("it is not as it was a moment ago")
	}
	return &fault.Error{Err: fmt.Errorf("%w: %q was changed in %s by another program while it was being applied: %w",
		fault.ErrState, path.Join(p.At, string(rel)), p.From, err),
		Hint: "The directory is as it was. Apply again when it is at rest."}
}

// copyTree copies a directory into an empty one, in every respect.
func copyTree(ctx context.Context, from, to string) error {
	return throughPipe(func(w io.Writer) error {
		_, err := overlay.Capture(ctx, from, w, overlay.CaptureOptions{})
		return err
	}, func(r io.Reader) error {
		_, err := overlay.Apply(ctx, r, to, overlay.ApplyOptions{})
		return err
	})
}

// throughPipe has read read what write writes.
func throughPipe(write func(io.Writer) error, read func(io.Reader) error) error {
	r, w, err := os.Pipe()
	if err != nil {
		return err
	}
	written := guard.Start(func() error {
		err := guard.Do(func() error { return write(w) })
		return errors.Join(err, w.Close())
	})
	err = read(r)
	_ = r.Close() // ends a writer that is no longer read
	if e := <-written; e != nil && (err == nil || !errors.Is(e, errPipe)) {
		return e
	}
	return err
}

// do carries out one op. A file taken out of the original is checked once no other process
// can reach it by name: if it is not what the plan saw, the rollback puts it back.
func (p *part) do(o op) error {
	at, rel := string(o.At), string(o.Path)
	var err error
	switch o.Kind {
	case opPut:
		err = move(p.scratch, at, p.from, rel, unix.RENAME_NOREPLACE)
	case opSwap:
		err = move(p.scratch, at, p.from, rel, unix.RENAME_EXCHANGE)
	case opRemove:
		err = move(p.from, rel, p.scratch, at, unix.RENAME_NOREPLACE)
	default:
		return fmt.Errorf("%w: an apply with the step %q", fault.ErrCorrupt, o.Kind)
	}
	switch {
	case errors.Is(err, unix.EEXIST), gone(err):
		return p.changed(o.Path, err)
	case errors.Is(err, unix.EINVAL):
		return fmt.Errorf("%w: the filesystem of %s cannot exchange two files: %w",
			fault.ErrUnsupported, p.From, err)
	case err != nil:
		return err
	case o.Kind == opPut:
		return nil
	}
	now, err := p.scratch.fingerprint(at)
	if err != nil {
		return err
	}
	if now != o.Old {
		return p.changed(o.Path, nil) // the rollback puts it back
	}
	return nil
}
