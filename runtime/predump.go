package runtime

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/agentbox/agentbox/criu"
	"github.com/agentbox/agentbox/runtime/store"
)

// Where in a draft what is written ahead lies, and CRIU's log of it.
const (
	aheadDir     = "ahead"
	aheadWorkDir = "ahead-work"
)

// ordinary is how a warning ends that a checkpoint is not what --pre-dump asks for.
const ordinary = "; this is an ordinary checkpoint"

// canAhead warns when memory cannot be written ahead.
func (k *making) canAhead(ctx context.Context) {
	if !k.opts.PreDump {
		return
	}
	why := ""
	switch {
	case k.row.Kind != KindFull:
		why = "no processes are part of it"
	case k.c.Status != Running:
		why = "it stands still"
	default:
		lacks, err := criu.DirtyTracking(ctx)
		switch {
		case err != nil:
			why = err.Error()
		case lacks != "":
			why = lacks
		default:
			k.pre = true
			return
		}
	}
	k.row.Warnings = append(k.row.Warnings, "memory was not written ahead: "+why+ordinary)
}

// ahead has CRIU write memory while the sandbox runs, so that little of it is
// left to write once it stands frozen for good. It stands still for a moment;
// how long is returned. What fails is no failure of the checkpoint: it is made
// without.
func (e *Engine) ahead(ctx context.Context, k *making, draft *store.Draft) (stood time.Duration, err error) {
	if !k.pre {
		return 0, nil
	}
	dir := filepath.Join(draft.Dir(), aheadDir)
	begun := time.Now()
	k.thawn = false
	if err := k.sb.host.Pause(ctx, k.sb.ID); err != nil {
		return 0, err
	}
	went := false
	goOn := func() error {
		if went {
			return nil
		}
		err := e.thaw(context.WithoutCancel(ctx), k)
		stood, went = time.Since(begun), err == nil
		return err
	}
	opts := e.dumpOptions(ctx, k, draft)
	opts.ImageDir, opts.WorkDir = dir, filepath.Join(draft.Dir(), aheadWorkDir)
	k.written, err = criu.PreDump(ctx, k.c.Runtime, opts, goOn)
	if thaw := goOn(); thaw != nil {
		return stood, thaw
	}
	if err == nil {
		e.log.Info("memory written ahead", "sandbox", k.sb.ID, "checkpoint", k.row.ID, "bytes", k.written.Bytes, "frozen", stood, "took", time.Since(begun))
		e.noteInterrupted(k, k.written.Interrupted)
		return stood, nil
	}
	if ctx.Err() != nil {
		return stood, errors.Join(ctx.Err(), err)
	}
	k.without(err)
	return stood, os.RemoveAll(dir)
}

// without goes on without what was written ahead.
func (k *making) without(why error) {
	k.written = nil
	k.row.Warnings = append(k.row.Warnings, fmt.Sprintf("memory was not written ahead: %v", why)+ordinary)
	k.parts.Warnings = k.row.Warnings
}

// flatten makes what was written ahead and what was dumped one ordinary dump.
func (k *making) flatten(ctx context.Context, draft *store.Draft) error {
	if k.written == nil {
		return nil
	}
	var err error
	if k.early, err = k.written.Flatten(ctx, draft.CRIUDir()); err != nil {
		return fmt.Errorf("put together what was written ahead: %w", err)
	}
	return nil
}

// behind tells whether a checkpoint may have failed for what was written ahead,
// so that it is worth taking without. CRIU that misses a page there says so in
// words that it has for other things, too.
func (k *making) behind(err error) bool {
	var refused *criu.DumpError
	return k != nil && k.written != nil && (errors.As(err, &refused) || errors.Is(err, ErrCorrupt))
}
