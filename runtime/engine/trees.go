package engine

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/failpoint"
	"github.com/agentbox/agentbox/overlay"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/engine/worktree"
	"github.com/agentbox/agentbox/runtime/store"
)

// home returns what the trees of a sandbox share.
func (cs *checkpoints) home(sb *locked) worktree.Home {
	return worktree.Home{Store: cs.store, Sandbox: sb.ID, Steps: sb.steps, Log: cs.log}
}

// readAhead reads what has changed since the last checkpoint while the sandbox still runs.
func (k *making) readAhead(ctx context.Context, draft *store.Draft) error {
	return worktree.Each(ctx, k.trees, func(ctx context.Context, t *worktree.Tree) error {
		if k.c.Status != runtime.Running { // it does not change anyway
			t.Know(ctx)
			return nil
		}
		return t.ReadAhead(ctx, filepath.Join(draft.Dir(), "early-"+strconv.Itoa(t.Number)),
			draft.Sink(), k.opts.Paranoid)
	})
}

// readBelow captures the directories that workspaces lie over, as they are before the sandbox is
// frozen: the sandbox does not change them.
func (k *making) readBelow(ctx context.Context, draft *store.Draft) error {
	for i := range k.below {
		t := &k.below[i]
		t.Know(ctx)
		if err := k.readBusy(ctx, draft, t); err != nil {
			return fmt.Errorf("read %s, below workspace %s: %w", t.Dir, k.parts.Volumes[t.Number-1].Name, err)
		}
	}
	return nil
}

// belowWait bounds for how long a directory is read again that other programs write to without a
// pause: an editor saves files, `git gc` deletes thousands.
const belowWait = 30 * time.Second

// readBusy captures a directory that other programs may write to. Where they do, it first reads
// all that lies there, which the further attempts then need not read.
func (k *making) readBusy(ctx context.Context, draft *store.Draft, t *worktree.Tree) error {
	opts := overlay.CollectOptions{Base: k.row.ID, Paranoid: k.opts.Paranoid}
	end := time.Now().Add(belowWait)
	pause := 5 * time.Millisecond
	for try := 0; ; try++ {
		err := t.Capture(ctx, draft.Sink(), opts)
		if !changedMeanwhile(err) {
			return err
		}
		if _, gone := os.Stat(t.Dir); errors.Is(gone, fs.ErrNotExist) {
			return hint(fmt.Errorf("%w: the directory is not there any more", runtime.ErrNotFound),
				"The sandbox goes on with it where it was moved to; move it back, and try again.")
		}
		if time.Now().After(end) {
			return hint(err, "Other programs write to the directory without a pause; end them, or try again.")
		}
		ahead := filepath.Join(draft.Dir(), fmt.Sprintf("below-%d-%d", t.Number, try%2)) // not the one read before
		if err := os.Remove(ahead); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		if err := t.ReadAhead(ctx, ahead, draft.Sink(), k.opts.Paranoid); err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(pause):
			pause = min(2*pause, 500*time.Millisecond)
		}
	}
}

// changedMeanwhile reports whether a directory could not be read because something in it was
// changed, replaced or removed just then.
func changedMeanwhile(err error) bool {
	return errors.Is(err, runtime.ErrBusy) || errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ESTALE) ||
		errors.Is(err, unix.ENOTDIR) || errors.Is(err, unix.ELOOP)
}

// collect captures the trees of a stopped or frozen sandbox.
func (k *making) collect(ctx context.Context, draft *store.Draft, opts overlay.CollectOptions) error {
	for i := range k.trees {
		t := &k.trees[i]
		now := overlay.CollectOptions{}
		if t.Number == 0 {
			now = opts
		}
		now.Base, now.Paranoid = k.row.ID, k.opts.Paranoid && k.c.Status != runtime.Running
		if err := t.Capture(ctx, draft.Sink(), now); err != nil {
			if t.Number > 0 {
				return fmt.Errorf("volume %s: %w", k.parts.Volumes[t.Number-1].Name, err)
			}
			return fmt.Errorf("capture files: %w", err)
		}
	}
	return failpoint.Hit("checkpoint.after-capture")
}

// put stores what was captured. The sandbox may run again by then.
func (k *making) put(ctx context.Context, draft *store.Draft) error {
	if k.row.Kind == runtime.KindFull {
		k.sb.steps.Begin(runtime.PhaseStoring, k.sb.steps.Sizes(draft.CRIUDir()))
		draft.CountImages(k.sb.steps.Adder(runtime.PhaseStoring))
	} else {
		k.sb.steps.Begin(runtime.PhaseStoring, 0)
	}
	for i := range k.trees {
		t, like := &k.trees[i], k.like
		if t.Number > 0 {
			like = nil
		}
		if err := t.Put(ctx, draft, like); err != nil {
			return err
		}
	}
	for i := range k.below {
		if err := k.below[i].Put(ctx, draft, nil); err != nil {
			return err
		}
	}
	if k.row.Kind != runtime.KindFull {
		return nil
	}
	return draft.PutImages(ctx)
}

// keepCaches makes the collections of a checkpoint the file caches.
func (cs *checkpoints) keepCaches(k *making) {
	if k.aside {
		return // the caches stay those of the earlier checkpoint
	}
	for _, t := range k.all() {
		if err := t.Remember(); err != nil {
			cs.log.Warn("file cache not kept; files will be read again", "sandbox", k.sb.ID, "err", err)
		}
	}
}

// dropCaches deletes the sandbox's file caches.
func (k *making) dropCaches() error {
	var errs []error
	for _, t := range k.all() {
		errs = append(errs, t.Forget())
	}
	return errors.Join(errs...)
}

// all returns all trees of a checkpoint.
func (k *making) all() (list []*worktree.Tree) {
	for _, trees := range [][]worktree.Tree{k.trees, k.below} {
		for i := range trees {
			list = append(list, &trees[i])
		}
	}
	return list
}
