package store

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/failpoint"
	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/internal/fsx"
	"github.com/agentbox/agentbox/internal/guard"
	"github.com/agentbox/agentbox/runtime/store/pack"
)

// recordWait bounds what is not given up any more: millions of rows.
const recordWait = 10 * time.Minute

// publishDir is the directory in the scratch directory in which the manifest is written; it becomes
// the checkpoint's directory.
const publishDir = "publish"

// Commit publishes the draft: when it returns nil, the checkpoint is on the
// disk, whole, and ready. Tree 0, one for each of m.Volumes and one for m.Attached
// must have been put, for a full checkpoint the images as well. A chunk that they name and that
// neither Sink was given nor the store has is ErrCorrupt: what the caller knew
// of the files is not true. On an error nothing is published, and Abort is still
// to be called. A context that ends before the rename stops it; later it does
// not matter any more. After a success only Close is left to do.
func (d *Draft) Commit(ctx context.Context, m Manifest) (Checkpoint, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := d.alive(ctx); err != nil {
		return Checkpoint{}, err
	}
	if err := d.fill(&m); err != nil {
		return Checkpoint{}, err
	}
	data, err := m.Encode()
	if err != nil {
		return Checkpoint{}, err
	}
	// Better a checkpoint that fails than one that cannot be read back.
	if m, err = ParseManifest(data); err != nil {
		return Checkpoint{}, err
	}
	need := d.need.list()
	if !d.brought(need) {
		// All that was added is of no use, or nothing was.
		if err := d.pack.Abort(); err != nil {
			return Checkpoint{}, err
		}
	}
	// The disk is waited for once, for both files at the same time.
	var g guard.Group
	var info pack.Info
	g.Go(func() (err error) { info, err = d.finish(need); return err })
	g.Go(func() error { return d.writeManifest(data, d.origin()) })
	stored, next, err := d.stored(ctx, need)
	if err := errors.Join(err, g.Wait()); err != nil {
		return Checkpoint{}, err
	}
	return d.publish(ctx, m, data, need, info, stored, next, false)
}

// CommitAs is Commit for a checkpoint that was made elsewhere: its manifest is published as it
// is. It must have the draft's id, sandbox, kind and parent. All that it needs must have been
// given to PutChunk, or be in the store; CommitAs proves this by reading its lists, and
// returns ErrCorrupt if anything is wrong.
func (d *Draft) CommitAs(ctx context.Context, m Manifest) (Checkpoint, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := d.alive(ctx); err != nil {
		return Checkpoint{}, err
	}
	if m.ID != d.row.ID || m.SandboxID != d.row.SandboxID || m.Kind != d.row.Kind ||
		len(d.trees) > 0 || d.images != nil {
		return Checkpoint{}, fmt.Errorf("checkpoint %s: its manifest is of another: %w", d.row.ID, fault.ErrInvalid)
	}
	data, err := m.Encode()
	if err != nil {
		return Checkpoint{}, err
	}
	if m, err = ParseManifest(data); err != nil {
		return Checkpoint{}, err
	}
	info, err := d.pack.Finish()
	if err != nil {
		return Checkpoint{}, err
	}
	p := newChunks(d.x)
	p.own = make(map[pack.ID]ownPlace, len(info.Blobs))
	for _, b := range info.Blobs {
		p.own[b.ID] = ownPlace{info.Temp, b}
	}
	r := d.s.newReader(m, data, p)
	defer r.Close()
	need, err := r.needs(ctx)
	if err != nil {
		return Checkpoint{}, err
	}
	stored, next, err := d.stored(ctx, need)
	if err != nil {
		return Checkpoint{}, err
	}
	if err := r.lengths(ctx); err != nil {
		return Checkpoint{}, err
	}
	if err := d.writeManifest(data, digestOf(data)); err != nil {
		return Checkpoint{}, err
	}
	return d.publish(ctx, m, data, need, info, stored, next, true)
}

func (d *Draft) alive(ctx context.Context) error {
	if d.ended {
		return fmt.Errorf("checkpoint %s has ended: %w", d.row.ID, fault.ErrState)
	}
	if err := ctx.Err(); err != nil {
		return context.Cause(ctx)
	}
	return nil
}

// fill completes the manifest with what is in the draft and its record.
func (d *Draft) fill(m *Manifest) error {
	m.Files, m.Volumes = make([]Tree, 1), slices.Clone(m.Volumes)
	if m.Attached != nil {
		own := *m.Attached
		m.Attached = &own
	}
	if need := len(m.trees()); len(d.trees) != need {
		return fmt.Errorf("checkpoint %s has %d trees, %d are needed: %w", d.row.ID, len(d.trees),
			need, fault.ErrInvalid)
	}
	for n, t := range m.trees() {
		put, ok := d.trees[n]
		if !ok {
			return fmt.Errorf("checkpoint %s has no tree %d: %w", d.row.ID, n, fault.ErrInvalid)
		}
		*t = put
	}
	switch {
	case d.row.Kind == KindFull && d.images == nil:
		return fmt.Errorf("a full checkpoint needs process images: %w", fault.ErrInvalid)
	case d.row.Kind == KindFull:
		p := Processes{}
		if m.Processes != nil {
			p = *m.Processes
		}
		if p.Images, p.Listed = d.images, d.listed; p.Listed != nil {
			p.Images = nil
		}
		m.Processes = &p
	case d.images != nil:
		return fmt.Errorf("a files-only checkpoint has process images: %w", fault.ErrInvalid)
	default:
		m.Processes = nil
	}
	c := d.row
	m.ID, m.Name, m.Kind = c.ID, c.Name, c.Kind
	m.SandboxID, m.SandboxName, m.Spec, m.ImageDigest = c.SandboxID, c.SandboxName, c.Spec, c.ImageDigest
	m.Parent, m.Labels, m.Trigger, m.Message = c.Parent, c.Labels, c.Trigger, c.Message
	m.Version = m.version()
	if m.Created.IsZero() {
		m.Created = c.Created
	}
	if m.Warnings == nil {
		m.Warnings = c.Warnings
	}
	return nil
}

// brought reports whether the draft's own pack has anything that is needed.
func (d *Draft) brought(need []pack.ID) bool {
	if n, _ := d.pack.Stats(); n == 0 {
		return false
	}
	return slices.ContainsFunc(need, d.pack.Has)
}

// finish makes the pack durable under its temporary name.
func (d *Draft) finish(need []pack.ID) (pack.Info, error) {
	if !d.brought(need) {
		return pack.Info{}, nil
	}
	return d.pack.Finish()
}

func (d *Draft) writeManifest(data []byte, origin string) error {
	if err := failpoint.Hit("store.commit.before-manifest"); err != nil {
		return err
	}
	dir := filepath.Join(d.dir, publishDir)
	if err := os.Mkdir(dir, 0o700); err != nil {
		return err
	}
	f, err := os.OpenFile(filepath.Join(dir, ManifestName), os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(data)
	if err == nil {
		err = setOrigin(f, origin)
	}
	if err == nil {
		err = f.Sync()
	}
	if err := errors.Join(err, f.Close()); err != nil {
		return err
	}
	if err := failpoint.Hit("store.commit.before-fsync"); err != nil {
		return err
	}
	return fsx.SyncDir(dir)
}

// publish makes the pack, then the manifest, then the rows visible to other processes.
func (d *Draft) publish(
	ctx context.Context, m Manifest, data []byte, need []pack.ID, info pack.Info, stored int64,
	next *indexCache, asIs bool,
) (Checkpoint, error) {
	if err := d.alive(ctx); err != nil {
		return Checkpoint{}, err
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), recordWait)
	defer cancel()
	p := published{manifest: m, digest: digestOf(data), bytes: int64(len(data)) + stored, asIs: asIs}
	var own, ownBytes int64 // needed chunks of the own pack
	if info.Name != "" {
		for i := range info.Blobs {
			if _, needed := slices.BinarySearchFunc(need, info.Blobs[i].ID, compareIDs); needed {
				own++
				ownBytes += int64(info.Blobs[i].Stored)
			}
		}
		p.bytes += ownBytes
		p.packs, p.lost = []pack.Info{info}, d.x.lost()
		if err := d.publishPack(info); err != nil {
			return Checkpoint{}, err
		}
	}
	d.need = idSet{} // the rows of a million chunks need its memory more
	if err := failpoint.Hit("store.commit.before-rename"); err != nil {
		return Checkpoint{}, err
	}
	from, to := filepath.Join(d.dir, publishDir), d.s.published(d.row.ID)
	if err := unix.Renameat2(unix.AT_FDCWD, from, unix.AT_FDCWD, to, unix.RENAME_NOREPLACE); err != nil {
		return Checkpoint{}, &os.LinkError{Op: "rename", Old: from, New: to, Err: err}
	}
	if err := failpoint.Hit("store.commit.after-rename"); err != nil {
		return Checkpoint{}, err
	}
	if err := fsx.SyncDir(d.s.checkpointsDir()); err != nil {
		return Checkpoint{}, err
	}
	if err := failpoint.Hit("store.commit.before-row"); err != nil {
		return Checkpoint{}, err
	}
	nums, err := d.s.setReady(ctx, d.row.ID, p)
	if err != nil {
		return Checkpoint{}, err
	}
	if next != nil && len(nums) > 0 {
		next.bytes += ownBytes
		next.packs[nums[0]] += own
	}
	if slices.Contains(nums, 0) {
		next = nil
	}
	d.keep(next) // as long as the store is held
	d.ended = true
	d.lock.Unlock()
	c := d.row
	c.Status, c.Digest, c.Bytes = Ready, p.digest, p.bytes
	c.Files, c.Warnings, c.Attached, c.Foreign = m.Files[0].Entries, m.Warnings, m.Attached.brief(), c.Foreign || asIs
	if asIs {
		c.Warnings = nil
	}
	c.Added, c.Unchanged = info.Bytes, info.Bytes == 0
	if m.Processes != nil {
		c.Processes = m.Processes.Count
	}
	// The checkpoint is there; only a test can want to hear otherwise.
	return c, failpoint.Hit("store.commit.after-row")
}

// publishPack gives a durable pack its name, durably.
func (d *Draft) publishPack(info pack.Info) error {
	if err := failpoint.Hit("store.commit.before-pack"); err != nil {
		return err
	}
	path := pack.Path(d.s.packsDir(), info.Name)
	if err := makeDir(filepath.Dir(path)); err != nil {
		return err
	}
	// From here on it may be there, and Abort removes it. An existing pack of this name is the
	// same pack, be it of a concurrent draft or of one that was killed.
	d.put = info.Name
	if err := os.Rename(info.Temp, path); err != nil {
		return err
	}
	if err := failpoint.Hit("store.commit.after-pack"); err != nil {
		return err
	}
	return fsx.SyncDir(filepath.Dir(path))
}

// makeDir creates a directory durably if it does not exist. The parent is synced even if
// the directory exists: another process may have created it and not synced it yet.
func makeDir(path string) error {
	if err := os.Mkdir(path, 0o700); err != nil && !errors.Is(err, os.ErrExist) {
		return err
	}
	return fsx.SyncDir(filepath.Dir(path))
}
