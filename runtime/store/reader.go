package store

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"

	"github.com/agentbox/agentbox/internal/fault"
)

// Reader reads one checkpoint. Its manifest is proven when OpenCheckpoint
// returns; the rest is proven as it is read.
type Reader struct {
	path     string
	dir      *os.File
	manifest Manifest
	digest   string
	size     int64
}

// OpenCheckpoint opens a ready checkpoint by its id and holds its manifest
// against the recorded digest. One that is not ready is ErrState.
func (s *Store) OpenCheckpoint(ctx context.Context, id string) (*Reader, error) {
	list, err := s.checkpoints(ctx, "WHERE id = ?", id)
	if err != nil {
		return nil, err
	}
	if len(list) == 0 {
		return nil, fmt.Errorf("checkpoint %q: %w", id, fault.ErrNotFound)
	}
	c := list[0]
	switch c.Status {
	case Ready:
	case Failed:
		return nil, fmt.Errorf("checkpoint %s failed (%s): %w", id, c.Error, fault.ErrState)
	default:
		return nil, fmt.Errorf("checkpoint %s is %s: %w", id, c.Status, fault.ErrState)
	}
	r, err := openPublished(s.published(id), id)
	if err != nil {
		return nil, fmt.Errorf("checkpoint %s: %w", id, err)
	}
	if r.digest != c.Digest {
		return nil, errors.Join(fmt.Errorf("checkpoint %s: %s has digest %s, %s expected: %w", id, ManifestName, r.digest, c.Digest, fault.ErrCorrupt), r.Close())
	}
	return r, nil
}

// openPublished reads and parses a manifest; its digest is up to the caller.
func openPublished(path, id string) (*Reader, error) {
	dir, err := openDir(path)
	if err != nil {
		return nil, missing("its directory", err)
	}
	r := &Reader{path: path, dir: dir}
	if err := r.readManifest(); err != nil {
		return nil, errors.Join(err, dir.Close())
	}
	if r.manifest.ID != id {
		return nil, errors.Join(fmt.Errorf("%s is of checkpoint %s: %w", ManifestName, r.manifest.ID, fault.ErrCorrupt), dir.Close())
	}
	return r, nil
}

func (r *Reader) readManifest() error {
	f, _, err := openPlain(r.dir, ManifestName)
	if err != nil {
		return missing(ManifestName, err)
	}
	data, err := io.ReadAll(io.LimitReader(f, maxManifest+1))
	if err := errors.Join(err, f.Close()); err != nil {
		return err
	}
	r.digest = digestOf(data)
	if r.manifest, err = ParseManifest(data); err != nil {
		return err
	}
	r.size = r.manifest.size(int64(len(data)))
	return nil
}

// Manifest is the proven manifest.
func (r *Reader) Manifest() Manifest { return r.manifest }

// Files streams the archive, decompressed. Damage is ErrCorrupt: from Read,
// at the latest in place of io.EOF, or from Close, which reads on to the end
// for this unless ctx is over. Nobody may rely on what was read before that.
func (r *Reader) Files(ctx context.Context) (io.ReadCloser, error) {
	return newBlobReader(ctx, r.dir, r.manifest.Files.Archive)
}

// Tree streams the list of entries, likewise.
func (r *Reader) Tree(ctx context.Context) (io.ReadCloser, error) {
	return newBlobReader(ctx, r.dir, r.manifest.Files.Tree)
}

// VolumeFiles and VolumeTree are Files and Tree of the i-th volume in
// Manifest.Volumes.
func (r *Reader) VolumeFiles(ctx context.Context, i int) (io.ReadCloser, error) {
	return newBlobReader(ctx, r.dir, r.manifest.Volumes[i].Files.Archive)
}

// VolumeTree: see VolumeFiles.
func (r *Reader) VolumeTree(ctx context.Context, i int) (io.ReadCloser, error) {
	return newBlobReader(ctx, r.dir, r.manifest.Volumes[i].Files.Tree)
}

// CRIUDir is the directory of the process images, "" for a files-only
// checkpoint. VerifyImages proves them.
func (r *Reader) CRIUDir() string {
	if r.manifest.Processes == nil {
		return ""
	}
	return filepath.Join(r.path, ImagesName)
}

// VerifyImages reads all process images again. A damaged, missing or surplus
// file is ErrCorrupt and named.
func (r *Reader) VerifyImages(ctx context.Context) error {
	if r.manifest.Processes == nil {
		return nil
	}
	return verifyImages(ctx, r.dir, r.manifest.Processes.Images)
}

// Verify reads everything again.
func (r *Reader) Verify(ctx context.Context) error {
	names, err := readDir(r.dir)
	if err != nil {
		return err
	}
	blobs := r.manifest.blobs()
	for _, name := range names {
		known := slices.ContainsFunc(blobs, func(b *Blob) bool { return b.Name == name })
		if !known && name != ManifestName && (name != ImagesName || r.manifest.Processes == nil) {
			return fmt.Errorf("%s does not belong to the checkpoint: %w", name, fault.ErrCorrupt)
		}
	}
	for _, blob := range blobs {
		b, err := newBlobReader(ctx, r.dir, *blob)
		if err != nil {
			return err
		}
		if err := b.Close(); err != nil {
			return err
		}
	}
	return r.VerifyImages(ctx)
}

// Close releases the directory.
func (r *Reader) Close() error { return r.dir.Close() }

// VerifyCheckpoint reads all of a checkpoint again; ErrCorrupt names the damaged file.
func (s *Store) VerifyCheckpoint(ctx context.Context, id string) error {
	r, err := s.OpenCheckpoint(ctx, id)
	if err != nil {
		return err
	}
	defer r.Close()
	if err := r.Verify(ctx); err != nil {
		return fmt.Errorf("checkpoint %s: %w", id, err)
	}
	return nil
}
