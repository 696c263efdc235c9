package store

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"sync"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/internal/guard"
	"github.com/agentbox/agentbox/overlay"
	"github.com/agentbox/agentbox/runtime/store/pack"
)

// maxRecipe bounds the bytes of a recipe. It is in memory while it is used, which
// takes up to 14 times as much.
var maxRecipe int64 = 128 << 20

// Reader reads one checkpoint. Its manifest is proven when OpenCheckpoint returns; the rest is
// proven as it is read. Until Close no chunk of the store goes away. Its methods, except Close, are
// safe for concurrent use.
type Reader struct {
	s        *Store
	lock     *Lock // nil: the caller has it
	manifest Manifest
	digest   string
	size     int64 // of the manifest
	surplus  string
	chunks   *chunks
	writes   func(int64) // see CountImages; nil: not counted

	mu     sync.Mutex // guards what follows
	lists  map[int]treeList
	images *imageList // nil: not read yet, or the manifest names them
}

// OpenCheckpoint opens a ready checkpoint by its id and checks its manifest against the recorded
// digest. It returns ErrState for a checkpoint that is not ready.
func (s *Store) OpenCheckpoint(ctx context.Context, id string) (*Reader, error) {
	l, err := s.share(ctx, "read")
	if err != nil {
		return nil, err
	}
	r, err := s.openReady(ctx, id)
	if err != nil {
		l.Unlock()
		return nil, err
	}
	r.lock = l
	return r, nil
}

// openReady is OpenCheckpoint for a caller that already holds the store's lock.
func (s *Store) openReady(ctx context.Context, id string) (*Reader, error) {
	c, err := s.ready(ctx, id)
	if err != nil {
		return nil, err
	}
	r, err := s.openPublished(id)
	if err == nil && r.digest != c.Digest {
		err = fmt.Errorf("%s has digest %s, %s expected: %w", ManifestName, r.digest, c.Digest, fault.ErrCorrupt)
	}
	if err == nil {
		return r, nil
	}
	// Or it was just being removed.
	if _, gone := s.ready(ctx, id); gone != nil {
		return nil, gone
	}
	return nil, fmt.Errorf("checkpoint %s: %w", id, err)
}

func (s *Store) ready(ctx context.Context, id string) (Checkpoint, error) {
	list, err := s.checkpoints(ctx, "WHERE id = ?", id)
	if err != nil {
		return Checkpoint{}, err
	}
	if len(list) == 0 {
		return Checkpoint{}, fmt.Errorf("checkpoint %q: %w", id, fault.ErrNotFound)
	}
	switch c := list[0]; c.Status {
	case Ready:
		return c, nil
	case Failed:
		return Checkpoint{}, fmt.Errorf("checkpoint %s failed (%s): %w", id, c.Error, fault.ErrState)
	default:
		return Checkpoint{}, fmt.Errorf("checkpoint %s is %s: %w", id, c.Status, fault.ErrState)
	}
}

// openPublished reads and parses a manifest; its digest and the store's lock
// are up to the caller.
func (s *Store) openPublished(id string) (*Reader, error) {
	dir, err := openDir(s.published(id))
	if err != nil {
		return nil, missing("its directory", err)
	}
	defer dir.Close()
	f, _, err := openPlain(dir, ManifestName)
	if err != nil {
		return nil, missing(ManifestName, err)
	}
	data, err := io.ReadAll(io.LimitReader(f, maxManifest+1))
	if err := errors.Join(err, f.Close()); err != nil {
		return nil, err
	}
	m, err := ParseManifest(data)
	if err != nil {
		return nil, err
	}
	if m.ID != id {
		return nil, fmt.Errorf("%s is of checkpoint %s: %w", ManifestName, m.ID, fault.ErrCorrupt)
	}
	names, err := readDir(dir)
	if err != nil {
		return nil, err
	}
	r := s.newReader(m, data, newChunks(newIndex(s.packs)))
	for _, name := range names {
		if name != ManifestName {
			r.surplus = name
		}
	}
	return r, nil
}

func (s *Store) newReader(m Manifest, data []byte, p *chunks) *Reader {
	return &Reader{s: s, manifest: m, digest: digestOf(data), size: int64(len(data)), chunks: p}
}

// Manifest is the proven manifest.
func (r *Reader) Manifest() Manifest { return r.manifest }

// Digest is the manifest's.
func (r *Reader) Digest() string { return r.digest }

// Tree streams the n-th list of entries as JSON lines: 0 is the upperdir's, 1+i that of
// the i-th volume. Damage is ErrCorrupt, returned by Read, at the latest in place of
// io.EOF, or by Close, which reads on to the end to find it unless ctx is over. Callers
// must not rely on what they read until then.
func (r *Reader) Tree(ctx context.Context, n int) (io.ReadCloser, error) { return r.tree(ctx, n) }

func (r *Reader) tree(ctx context.Context, n int) (*proven, error) {
	list, err := r.list(ctx, n)
	if err != nil {
		return nil, err
	}
	t := r.manifest.trees()[n]
	segs, err := segments(list.lines)
	if err == nil {
		err = r.chunks.foresee(ctx, segs)
	}
	if err != nil {
		return nil, err
	}
	return newProven(ctx, r.chunks, fmt.Sprintf("list of files %d", n), segs, true, t.Digest, t.Bytes), nil
}

// TreeChunks are the chunks of the n-th list of entries, front to back.
func (r *Reader) TreeChunks(ctx context.Context, n int) ([]overlay.Chunk, error) {
	list, err := r.list(ctx, n)
	return list.lines, err
}

// TreePart streams some chunks, which follow each other, of the n-th list of
// entries. Each of them is proven.
func (r *Reader) TreePart(ctx context.Context, n, from, to int) (io.ReadCloser, error) {
	list, err := r.TreeChunks(ctx, n)
	if err != nil {
		return nil, err
	}
	if from < 0 || to < from || to > len(list) {
		return nil, fmt.Errorf("pieces %d to %d of tree %d: %w", from, to, n, fault.ErrInvalid)
	}
	segs, err := segments(list[from:to])
	if err != nil {
		return nil, err
	}
	return newStream(ctx, r.chunks, fmt.Sprintf("list of files %d", n), segs, true), nil
}

// Source has the data of the files of all trees.
func (r *Reader) Source() overlay.Source { return source{r} }

type source struct{ r *Reader }

// Data: see overlay.Source.
func (s source) Data(ctx context.Context, e overlay.Entry) (io.ReadCloser, error) {
	list := e.Chunks
	n := dataBytes(&e)
	if n == 0 {
		return io.NopCloser(bytes.NewReader(nil)), nil
	}
	if list == nil {
		list = []overlay.Chunk{{Digest: e.Digest, Len: n}}
	}
	segs, err := segments(list)
	if err != nil {
		return nil, fmt.Errorf("%q: %w", e.Path, err)
	}
	return newStream(ctx, s.r.chunks, fmt.Sprintf("%q", e.Path), segs, true), nil
}

// dataBytes returns how many bytes of data a file has.
func dataBytes(e *overlay.Entry) int64 {
	if e.Type != overlay.TypeFile || e.Hardlink != "" {
		return 0
	}
	if e.Extents == nil {
		return e.Size
	}
	var n int64
	for _, x := range e.Extents {
		n += x.Len
	}
	return n
}

// Image streams one process image, like Tree. A name that is not there is ErrNotFound.
func (r *Reader) Image(ctx context.Context, name string) (io.ReadCloser, error) {
	images, err := r.Images(ctx)
	if err != nil {
		return nil, err
	}
	for i := range images {
		if images[i].Name == name {
			return r.image(ctx, &images[i])
		}
	}
	return nil, fmt.Errorf("process image %q: %w", name, fault.ErrNotFound)
}

func (r *Reader) image(ctx context.Context, im *Image) (*proven, error) {
	segs, err := segments(im.Chunks)
	if err == nil && im.Recipe != nil {
		segs, err = r.recipe(ctx, im)
	}
	if err != nil {
		return nil, fmt.Errorf("process image %s: %w", im.Name, err)
	}
	return newProven(ctx, r.chunks, "process image "+im.Name, segs, im.Recipe == nil, im.Digest, im.Bytes), nil
}

// recipe reads how an image of pages is put together.
func (r *Reader) recipe(ctx context.Context, im *Image) ([]pack.Segment, error) {
	n, err := im.Recipe.bytes()
	if err != nil || n > maxRecipe {
		return nil, fmt.Errorf("recipe of %d bytes: %w (%v)", n, fault.ErrCorrupt, err)
	}
	segs, err := segments(im.Recipe)
	if err != nil {
		return nil, err
	}
	s := newStream(ctx, r.chunks, "recipe", segs, true)
	data, err := io.ReadAll(s)
	if err := errors.Join(err, s.Close()); err != nil {
		return nil, err
	}
	return pack.DecodeRecipe(data, im.Bytes)
}

// ExtractImages writes process images, all or those of some names that there are,
// proven, as files 0600 into the new directory dir, 0700. It is not durable. On an
// error dir is gone again.
func (r *Reader) ExtractImages(ctx context.Context, dir string, names ...string) (err error) {
	if r.manifest.Processes == nil {
		return fmt.Errorf("checkpoint %s has no process images: %w", r.manifest.ID, fault.ErrState)
	}
	images, err := r.Images(ctx)
	if err != nil {
		return err
	}
	if err := os.Mkdir(dir, 0o700); err != nil {
		return err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, os.RemoveAll(dir))
		}
	}()
	list := slices.Clone(images)
	if len(names) > 0 {
		list = slices.DeleteFunc(list, func(im Image) bool { return !slices.Contains(names, im.Name) })
	}
	slices.SortStableFunc(list, func(a, b Image) int { return int(max(-1, min(1, b.Bytes-a.Bytes))) })
	g, gctx := guard.WithContext(ctx)
	g.SetLimit(workers())
	for i := range list {
		g.Go(func() error { return r.extract(gctx, dir, &list[i]) })
	}
	return g.Wait()
}

// CountImages has ExtractImages call add with how many bytes it has written, again
// and again, from several goroutines. It is called before that.
func (r *Reader) CountImages(add func(n int64)) { r.writes = add }

func (r *Reader) extract(ctx context.Context, dir string, im *Image) (err error) {
	f, err := os.OpenFile(filepath.Join(dir, im.Name), os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	s, err := r.image(ctx, im)
	if err != nil {
		return err
	}
	out := io.Writer(f)
	if r.writes != nil {
		out = io.MultiWriter(f, counter(r.writes))
	}
	_, err = s.WriteTo(out)
	if closed := s.Close(); err == nil {
		err = closed
	}
	return err
}

// Chunks calls fn once for every chunk that the checkpoint needs, in the order of their digests:
// raw is its length. It returns ErrCorrupt if the store lacks a chunk.
func (r *Reader) Chunks(ctx context.Context, fn func(digest string, raw int64) error) error {
	ids, err := r.needs(ctx)
	if err != nil {
		return err
	}
	for part := range slices.Chunk(ids, 16*findBatch) {
		lens := make(map[pack.ID]int64, len(part))
		gone, err := r.chunks.x.find(ctx, part, func(p place) error { lens[p.blob.ID] = int64(p.blob.Raw); return nil })
		if err != nil {
			return err
		}
		if len(gone) > 0 {
			return fmt.Errorf("piece %s is not there: %w", gone[0], fault.ErrCorrupt)
		}
		for _, id := range part {
			if err := fn(id.String(), lens[id]); err != nil {
				return err
			}
		}
	}
	return nil
}

// Chunk reads one chunk of the store, proven.
func (r *Reader) Chunk(ctx context.Context, digest string) ([]byte, error) {
	id, err := pack.ParseID(digest)
	if err != nil {
		return nil, err
	}
	b, err := r.chunks.read(ctx, id)
	return slices.Clone(b), err
}

// needs returns every chunk that the checkpoint needs, in order. It reads, and
// proves, the lists of files and the recipes for this, and no data.
func (r *Reader) needs(ctx context.Context) ([]pack.ID, error) {
	var set idSet
	for n := range r.manifest.trees() {
		if err := r.needsOfTree(ctx, n, &set); err != nil {
			return nil, err
		}
	}
	images, err := r.needsOfImageList(ctx, &set)
	if err != nil {
		return nil, err
	}
	for i := range images {
		if err := r.needsOfImage(ctx, &images[i], &set); err != nil {
			return nil, err
		}
	}
	return set.list(), nil
}

func (r *Reader) needsOfTree(ctx context.Context, n int, set *idSet) error {
	t := r.manifest.trees()[n]
	list, err := r.list(ctx, n)
	if err != nil {
		return err
	}
	if err := errors.Join(addChunks(set, list.lists), addChunks(set, list.lines)); err != nil {
		return err
	}
	var entries, data int64
	err = r.entries(ctx, n, func(e overlay.Entry) error {
		entries++
		data += dataBytes(&e)
		return addEntry(set, &e)
	})
	if err == nil && (entries != t.Entries || data != t.Data) {
		err = fmt.Errorf("list of files %d has %d entries and %d bytes of data, %d and %d expected: %w", n, entries,
			data, t.Entries, t.Data, fault.ErrCorrupt)
	}
	return err
}

func (r *Reader) needsOfImage(ctx context.Context, im *Image, set *idSet) error {
	if err := errors.Join(addChunks(set, im.Chunks), addChunks(set, im.Recipe),
		addChunks(set, im.Pages)); err != nil || im.Recipe == nil {
		return err
	}
	segs, err := r.recipe(ctx, im)
	if err != nil {
		return fmt.Errorf("process image %s: %w", im.Name, err)
	}
	addSegments(set, segs)
	return nil
}

// entries reads one list of files.
func (r *Reader) entries(ctx context.Context, n int, fn func(overlay.Entry) error) error {
	t, err := r.tree(ctx, n)
	if err != nil {
		return err
	}
	err = overlay.ReadTree(t, fn)
	// An error of the stream explains what the parser stumbled over.
	if found := t.Close(); found != nil {
		err = found
	}
	return err
}

func addSegments(set *idSet, segs []pack.Segment) {
	for i := range segs {
		if i == 0 || segs[i].ID != segs[i-1].ID {
			set.add(segs[i].ID)
		}
	}
}

func addChunks(set *idSet, list []overlay.Chunk) error {
	for _, x := range list {
		id, err := pack.ParseID(x.Digest)
		if err != nil {
			return fmt.Errorf("%w: %v", fault.ErrCorrupt, err)
		}
		set.add(id)
	}
	return nil
}

// addEntry adds the chunks of a file's data.
func addEntry(set *idSet, e *overlay.Entry) error {
	if dataBytes(e) == 0 {
		return nil
	}
	list := e.Chunks
	if list == nil {
		list = []overlay.Chunk{{Digest: e.Digest}}
	}
	if err := addChunks(set, list); err != nil {
		return fmt.Errorf("%q: %w", e.Path, err)
	}
	return nil
}

// Close lets go of the store. Streams must be closed before.
func (r *Reader) Close() error {
	r.chunks.close()
	if r.lock != nil {
		r.lock.Unlock()
	}
	return nil
}
