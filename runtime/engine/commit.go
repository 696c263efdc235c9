package engine

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"iter"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/agentbox/agentbox/images/build"
	"github.com/agentbox/agentbox/internal/failpoint"
	"github.com/agentbox/agentbox/overlay"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/engine/worktree"
	"github.com/agentbox/agentbox/runtime/store"
)

// Commit makes an image of a sandbox or of a checkpoint.
func (v imageVerbs) Commit(ctx context.Context, ref, to string, opts runtime.CommitOptions) (runtime.Committed, error) {
	op := onSandbox("commit", ref)
	op.To = to
	return verb(ctx, v.e, op, func(ctx context.Context) (runtime.Committed, error) {
		return v.e.checkpoints.commit(ctx, ref, to, opts)
	})
}

func (cs *checkpoints) commit(
	ctx context.Context, ref, to string, opts runtime.CommitOptions,
) (out runtime.Committed, err error) {
	dest, err := chosenDestination(to, opts.Source)
	if err != nil {
		return out, err
	}
	row, reader, err := cs.commitFrom(ctx, ref)
	if err != nil {
		return out, err
	}
	defer func() { err = errors.Join(err, reader.Close()) }()
	out = runtime.Committed{Base: row.ImageDigest, Sandbox: row.SandboxID, SandboxName: row.SandboxName}
	from, err := cs.imagesOf(row)
	if err != nil {
		return out, err
	}
	base, err := from.V1(ctx, row.ImageDigest)
	if err != nil {
		return out, fmt.Errorf("the image below: %w", err)
	}
	scratch, err := cs.store.Scratch()
	if err != nil {
		return out, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(scratch)) }()
	files := func() iter.Seq2[overlay.Entry, error] { return worktree.Entries(ctx, reader, 0) }
	var wrote overlay.Layer
	layer, err := build.Write(ctx, filepath.Join(scratch, "layer"), func(ctx context.Context, w io.Writer) (err error) {
		wrote, err = overlay.WriteLayer(ctx, w, files, reader.Source())
		return err
	})
	if err != nil {
		return out, err
	}
	if err := failpoint.Hit("commit.after-layer"); err != nil {
		return out, err
	}
	created := opts.Created
	if created.IsZero() {
		created = row.Created
	}
	changes := opts.Changes
	if row.Foreign {
		changes = slices.Concat([]string{"LABEL " + runtime.LabelForeign + "=true"}, changes)
	}
	img, err := build.New(base, layer, build.Options{
		Created: created, By: "agentbox commit", Author: opts.Author, Message: opts.Message, Changes: changes,
	})
	if err != nil {
		return out, err
	}
	made, manifest, err := cs.images.put(ctx, from, dest, img, opts.Source)
	if err != nil {
		return out, err
	}
	out.Reference, out.Manifest = made.Name, manifest
	id, err := img.ConfigName()
	if err != nil {
		return out, err
	}
	diffID, _ := layer.DiffID()
	out.Digest, out.Layer, out.LayerBytes = id.String(), diffID.String(), layer.Bytes()
	if dest.here {
		out.Digest = made.Digest // the store that keeps the image determines its id
	}
	out.LayerSize, _ = layer.Size()
	out.Notes = slices.Concat([]string{}, row.Warnings, wrote.Notes)
	if row.Trigger != triggerCommit {
		out.Checkpoint = row.ID
	}
	cs.log.Info("image committed", "sandbox", row.SandboxID, "image", out.Reference, "digest", out.Digest)
	return out, nil
}

// triggerCommit is the trigger of the checkpoint that Commit takes of a sandbox
// and removes again.
const triggerCommit = "commit"

// commitFrom opens the checkpoint that is to become an image: the one that ref names or,
// for a sandbox, a temporary one of its present state.
func (cs *checkpoints) commitFrom(ctx context.Context, ref string) (row store.Checkpoint, _ *store.Reader, err error) {
	missing := error(nil)
	if !strings.Contains(ref, "@") {
		sb, err := cs.find(ctx, ref)
		if err == nil {
			return cs.passing(ctx, sb.ID)
		}
		if missing = err; !errors.Is(err, runtime.ErrNotFound) {
			return row, nil, err
		}
	}
	if row, err = cs.checkpoint(ctx, ref); errors.Is(err, runtime.ErrNotFound) {
		return row, nil, cmp.Or(missing, err)
	}
	if err != nil {
		return row, nil, err
	}
	if err := checkDamage(row.SandboxName, row, false); err != nil {
		return row, nil, err
	}
	reader, err := cs.store.OpenCheckpoint(ctx, row.ID)
	return row, reader, err
}

// passing takes a checkpoint of a sandbox's files and removes it as soon as it is open. Its
// data stays until the reader is closed.
func (cs *checkpoints) passing(ctx context.Context, id string) (row store.Checkpoint, reader *store.Reader, err error) {
	sb, err := cs.acquire(ctx, id, "commit", lockWait)
	if err != nil {
		return row, nil, err
	}
	defer sb.lock.Unlock()
	if _, err := cs.imagesOf(store.Checkpoint{
		SandboxID: sb.ID, Spec: sb.Spec, ImageDigest: sb.ImageDigest,
	}); err != nil {
		return row, nil, err
	}
	in := store.Intent{Op: opCommit, Sandbox: sb.ID, Checkpoint: newID()}
	err = cs.intent(ctx, in, creating{Backend: sb.Backend}, func(int64) (err error) {
		if row, err = cs.checkpointOf(ctx, sb, runtime.CheckpointOptions{FilesOnly: true, Trigger: triggerCommit},
			in.Checkpoint); err != nil {
			return err
		}
		reader, err = cs.store.OpenCheckpoint(ctx, row.ID)
		return errors.Join(err, failpoint.Hit("commit.after-checkpoint"),
			cs.store.RemoveCheckpoint(context.WithoutCancel(ctx), row.ID))
	})
	if err != nil && reader != nil {
		return row, nil, errors.Join(err, reader.Close())
	}
	return row, reader, err
}

// finishCommit removes the checkpoint of a commit that was killed.
func (cs *checkpoints) finishCommit(ctx context.Context, in store.Intent) (string, error) {
	ready, err := cs.store.FinishPending(ctx, in.Checkpoint)
	if err == nil && ready {
		err = cs.store.RemoveCheckpoint(ctx, in.Checkpoint)
	}
	return unless(err, "took back the half-made commit of sandbox %s", short(in.Sandbox))
}

// imagesOf returns the image store that has the image of a checkpoint.
func (cs *checkpoints) imagesOf(row store.Checkpoint) (runtime.Images, error) {
	s, err := specOf(row.SandboxID, row.Spec)
	if err != nil {
		return nil, err
	}
	name := cmp.Or(s.Backend, cs.first)
	host, err := cs.host(name)
	if err == nil && (host.Images == nil || row.ImageDigest == "") {
		err = fmt.Errorf("%w: backend %s tells of no image that this lies over", runtime.ErrUnsupported, name)
	}
	return host.Images, err
}
