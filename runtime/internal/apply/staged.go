package apply

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/overlay"
)

// Staged is what an apply is about to do to its directories.
type Staged struct{ t *txn }

// still refuses an apply whose directories are not what they were when they were judged.
func (t *txn) still(ctx context.Context) error {
	if !t.home.Judged {
		return nil
	}
	for _, p := range t.parts {
		now, err := p.from.print(ctx)
		if err != nil {
			return err
		}
		if now != p.seen {
			return &fault.Error{Err: fmt.Errorf("%w: %s was changed while the result of the apply was being judged",
				fault.ErrState, p.From), Hint: "Nothing was applied. Apply again when the directory is at rest."}
		}
	}
	return nil
}

// print is the fingerprint of all that a directory has, but for scratch directories of an apply. What
// is mounted below it counts as one thing.
func (r *Root) print(ctx context.Context) (string, error) {
	p := printer{ctx: ctx, mount: r.mount}
	sum, err := p.sum(func() error { return p.add(r.File, ".", ".", true) })
	if err == nil && sum == "" {
		err = fmt.Errorf("%w: %s is being changed", fault.ErrBusy, r.Name())
	}
	return sum, err
}

// Lay fills an empty upperdir over the directory of the place at a path: a mount of both shows the
// directory as the apply leaves it. The upperdir of a place that the apply does not change stays empty.
func (s *Staged) Lay(ctx context.Context, at, upper string) error {
	for _, p := range s.t.parts {
		if p.At == at {
			return p.lay(ctx, upper)
		}
	}
	return nil
}

func (p *part) lay(ctx context.Context, dir string) error {
	err := throughPipe(func(w io.Writer) error { return p.archive(ctx, w, true) }, func(r io.Reader) error {
		_, err := overlay.Apply(ctx, r, dir, overlay.ApplyOptions{})
		return err
	})
	if err != nil {
		return err
	}
	upper, err := OpenRoot(dir)
	if err != nil {
		return err
	}
	defer upper.Close()

	// The directories that both have show as the lower one has them, unless the plan says otherwise.
	both := map[string]*attrs{".": nil}
	lead := func(rel string) {
		for ; rel != "."; rel = path.Dir(rel) {
			if _, ok := both[rel]; !ok {
				both[rel] = nil
			}
		}
	}
	for _, o := range p.plan.Ops {
		lead(path.Dir(string(o.Path)))
	}
	for i := range p.plan.Dirs {
		d := &p.plan.Dirs[i]
		lead(string(d.Path))
		both[string(d.Path)] = &d.New
	}
	var list []string
	for rel := range both {
		list = append(list, rel)
	}
	slices.SortFunc(list, overlay.ComparePaths)
	for _, rel := range list {
		if rel == "." {
			continue
		}
		if err := os.Mkdir(upper.at(rel), 0o700); err != nil && !errors.Is(err, os.ErrExist) {
			return err
		}
	}
	for _, o := range p.plan.Ops {
		if err := upper.hide(o); err != nil {
			return fmt.Errorf("lay %q out: %w", o.Path, err)
		}
	}
	for _, rel := range slices.Backward(list) {
		if err := p.showDir(upper, rel, both[rel]); err != nil {
			return fmt.Errorf("lay %q out: %w", rel, err)
		}
	}
	return nil
}

// hide has an upperdir hide what the lower directory has at the path of an op.
func (r *Root) hide(o op) error {
	rel := string(o.Path)
	if o.Kind == opRemove {
		d, name, err := r.parent(rel)
		if err != nil {
			return err
		}
		defer d.Close()
		return unix.Mknodat(int(d.Fd()), name, unix.S_IFCHR, 0)
	}
	st, err := r.stat(rel)
	if err != nil || !isDir(st) {
		return err
	}
	d, err := r.dir(rel)
	if err != nil {
		return err
	}
	defer d.Close()
	return unix.Fsetxattr(int(d.Fd()), overlayXattr+"opaque", []byte("y"), 0)
}

// HideScratch has an upperdir hide what an apply that is under way has in the directory below for itself.
func HideScratch(upper, below string) error {
	from, to, close, err := openBoth(below, upper)
	if err != nil {
		return err
	}
	defer close()
	names, err := from.Readdirnames(-1)
	for _, name := range names {
		if scratchPattern().MatchString(name) {
			err = errors.Join(err, to.hide(op{Kind: opRemove, Path: []byte(name)}))
		}
	}
	return err
}

// showDir gives a directory of an upperdir the attributes of the lower one, or others.
func (p *part) showDir(upper *Root, rel string, to *attrs) error {
	d, err := upper.sub(rel)
	if err != nil {
		return err
	}
	defer d.Close()
	if to == nil {
		low, err := p.from.sub(rel)
		if err != nil {
			return err
		}
		defer low.Close()
		have, err := attrsOf(low)
		if err != nil {
			return err
		}
		to = &have
	}
	return to.put(d)
}
