package store

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/failpoint"
	"github.com/agentbox/agentbox/internal/fault"
)

// Commit publishes the draft: when it returns nil, the checkpoint is on the
// disk, whole, and ready. Both streams must be closed; a full checkpoint has
// at least one process image, a files-only one has none. On an error nothing
// is published, and Abort is still to be called. A context that ends before
// the rename stops it; later it does not matter any more.
//
// The sandbox usually stands frozen meanwhile, so this waits for the disk
// once, for everything at the same time.
func (d *Draft) Commit(ctx context.Context, m Manifest) (Checkpoint, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.ended {
		return Checkpoint{}, fmt.Errorf("checkpoint %s has ended: %w", d.row.ID, fault.ErrState)
	}
	if len(m.Volumes) > maxVolumes {
		return Checkpoint{}, fmt.Errorf("checkpoint %s has %d volumes, %d are allowed: %w", d.row.ID, len(m.Volumes), maxVolumes, fault.ErrInvalid)
	}
	m.Volumes = slices.Clone(m.Volumes)
	for i := range m.Volumes {
		f := &m.Volumes[i].Files
		f.Archive.Name, f.Tree.Name = volumeArchive(i), volumeTree(i)
	}
	m.Files.Archive.Name, m.Files.Tree.Name = ArchiveName, TreeName
	for _, b := range m.blobs() {
		if d.blobs[b.Name] == nil {
			return Checkpoint{}, fmt.Errorf("checkpoint %s has no %s: %w", d.row.ID, b.Name, fault.ErrInvalid)
		}
	}
	if len(d.blobs) != len(m.blobs()) {
		return Checkpoint{}, fmt.Errorf("checkpoint %s has a stream that its manifest does not name: %w", d.row.ID, fault.ErrInvalid)
	}
	if err := ctx.Err(); err != nil {
		return Checkpoint{}, context.Cause(ctx)
	}
	if err := failpoint.Hit("store.commit.before-images"); err != nil {
		return Checkpoint{}, err
	}
	if err := d.tidy(); err != nil {
		return Checkpoint{}, err
	}
	if err := d.seal(ctx, &m); err != nil {
		return Checkpoint{}, err
	}
	digest, size, err := d.describe(&m)
	if err != nil {
		return Checkpoint{}, err
	}
	if err := failpoint.Hit("store.commit.before-fsync"); err != nil {
		return Checkpoint{}, err
	}
	if err := syncDir(d.dir); err != nil {
		return Checkpoint{}, err
	}
	if err := ctx.Err(); err != nil {
		return Checkpoint{}, context.Cause(ctx)
	}
	if err := failpoint.Hit("store.commit.before-rename"); err != nil {
		return Checkpoint{}, err
	}

	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoWait)
	defer cancel()
	if err := unix.Renameat2(unix.AT_FDCWD, d.dir, unix.AT_FDCWD, d.s.published(d.row.ID), unix.RENAME_NOREPLACE); err != nil {
		return Checkpoint{}, &os.LinkError{Op: "rename", Old: d.dir, New: d.s.published(d.row.ID), Err: err}
	}
	if err := failpoint.Hit("store.commit.after-rename"); err != nil {
		return Checkpoint{}, err
	}
	if err := syncDir(d.s.checkpointsDir()); err != nil {
		return Checkpoint{}, err
	}
	if err := failpoint.Hit("store.commit.before-row"); err != nil {
		return Checkpoint{}, err
	}
	if err := d.s.setReady(ctx, m, digest, size); err != nil {
		return Checkpoint{}, err
	}
	d.ended = true
	d.release()
	c := d.row
	c.Status, c.Digest, c.Bytes = Ready, digest, size
	c.Files, c.Warnings = m.Files.Entries, m.Warnings
	if m.Processes != nil {
		c.Processes = m.Processes.Count
	}
	// The checkpoint is there; only a test can want to hear otherwise.
	return c, failpoint.Hit("store.commit.after-row")
}

// tidy removes the scratch files: what is published is exactly what the
// manifest names.
func (d *Draft) tidy() error {
	entries, err := os.ReadDir(d.dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		path := filepath.Join(d.dir, e.Name())
		if d.blobs[e.Name()] != nil {
			continue
		}
		if e.Name() == ImagesName {
			if d.row.Kind == KindFull {
				continue
			}
			if err := os.Remove(path); err != nil {
				return fmt.Errorf("a files-only checkpoint has process images: %w: %w", fault.ErrInvalid, err)
			}
			continue
		}
		if err := os.RemoveAll(path); err != nil {
			return err
		}
	}
	return nil
}

// seal waits until both streams and all images are hashed and durable.
func (d *Draft) seal(ctx context.Context, m *Manifest) error {
	if d.watch != nil {
		d.watch.end()
	}
	var g errgroup.Group
	for _, b := range m.blobs() {
		g.Go(func() (err error) { *b, err = d.blobs[b.Name].wait(); return err })
	}
	if d.row.Kind == KindFull {
		if m.Processes == nil {
			m.Processes = &Processes{}
		}
		p := *m.Processes
		m.Processes = &p
		g.Go(func() (err error) {
			p.Images, err = sealImages(ctx, filepath.Join(d.dir, ImagesName), d.watch)
			if err == nil && len(p.Images) == 0 {
				err = fmt.Errorf("a full checkpoint needs process images: %w", fault.ErrInvalid)
			}
			return err
		})
	} else {
		m.Processes = nil
	}
	if err := g.Wait(); err != nil {
		return err
	}
	return nil
}

// describe completes the manifest and writes it durably.
func (d *Draft) describe(m *Manifest) (digest string, size int64, err error) {
	c := d.row
	m.Version, m.ID, m.Name, m.Kind = Version, c.ID, c.Name, c.Kind
	m.SandboxID, m.SandboxName, m.Spec, m.ImageDigest = c.SandboxID, c.SandboxName, c.Spec, c.ImageDigest
	m.Parent, m.Created, m.Labels, m.Trigger = c.Parent, c.Created, c.Labels, c.Trigger
	if m.Warnings == nil {
		m.Warnings = c.Warnings
	}
	data, err := m.Encode()
	if err != nil {
		return "", 0, err
	}
	// Better a checkpoint that fails than one that cannot be read back.
	if _, err := ParseManifest(data); err != nil {
		return "", 0, err
	}
	if err := failpoint.Hit("store.commit.before-manifest"); err != nil {
		return "", 0, err
	}
	f, err := os.OpenFile(filepath.Join(d.dir, ManifestName), os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return "", 0, err
	}
	_, err = f.Write(data)
	if err == nil {
		err = f.Sync()
	}
	if err := errors.Join(err, f.Close()); err != nil {
		return "", 0, err
	}
	return digestOf(data), m.size(int64(len(data))), nil
}

// size is what a checkpoint takes at rest.
func (m *Manifest) size(manifest int64) int64 {
	n := manifest
	for _, b := range m.blobs() {
		n += b.Bytes
	}
	if m.Processes != nil {
		for _, im := range m.Processes.Images {
			n += im.Bytes
		}
	}
	return n
}
