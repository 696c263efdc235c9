package overlay

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/zeebo/blake3"
)

// Most often a directory is made again what it was when it was collected last. Then
// its file cache is also the list of what is wanted:
//
//	ProveCache and PlanUpdateCached, side by side -> Stage -> Apply -> CheckCached -> CachePatch.Write

// ProveCache proves the file cache, and reports whether it holds the very tree of
// which wants are the chunks. One that is not there is ErrNotFound, a damaged one
// ErrCorrupt.
func ProveCache(cache string, wants []Chunk) (bool, error) {
	m, err := openCache(cache)
	if err != nil {
		return false, err
	}
	defer m.close()
	h := blake3.New()
	if _, err := io.Copy(h, io.NewSectionReader(m.f, 0, int64(cacheHeader))); err != nil {
		return false, fmt.Errorf("file cache: %w", err)
	}
	r := m.reader()
	body := io.TeeReader(io.NewSectionReader(m.f, int64(cacheHeader), m.end-int64(cacheHeader)), h)
	r.r.Reset(body)
	k := cachedTree{r: r, chunks: wants}
	for err == nil {
		err = k.next()
	}
	same := err == io.EOF
	if !same && err != errUneven {
		return false, err
	}
	if _, err := io.Copy(io.Discard, r.r); err != nil {
		return false, fmt.Errorf("file cache: %w", err)
	}
	if !bytes.Equal(h.Sum(nil), m.sum[:]) {
		return false, damaged("it is not what was written")
	}
	return same, nil
}

// cachedTree proves that the lines of a file cache are these chunks.
type cachedTree struct {
	r      *recordReader
	chunks []Chunk
	buf    []byte // of the current chunk
}

// next proves the next chunk.
func (k *cachedTree) next() error {
	k.buf = k.buf[:0]
	for {
		if err := k.r.next(); err != nil {
			return err
		}
		r := k.r.cur
		switch {
		case r != nil && r.flags()&flagHole != 0:
			continue
		case r == nil && len(k.chunks) == 0 && len(k.buf) == 0:
			return io.EOF
		case r == nil || len(k.chunks) == 0 || len(k.buf) > maxLine:
			return errUneven
		}
		k.buf = append(append(k.buf, r.line()...), '\n')
		if int64(len(k.buf)) < k.chunks[0].Len {
			continue
		}
		if digestOf(k.buf) != k.chunks[0].Digest {
			return errUneven
		}
		k.chunks = k.chunks[1:]
		return nil
	}
}

// PlanUpdateCached is a Collect of dir and PlanUpdate in one, for when the file cache
// of dir holds the very tree that is wanted, as ProveCache reports. What the cache says
// is believed. sink is as in Collect. When the cache cannot be used it fails; a Collect
// and PlanUpdateTree need no cache.
func PlanUpdateCached(ctx context.Context, dir, cache string, sink Sink) (*Update, error) {
	return planBy(ctx, cache, func(p *planner) error {
		k := &cachedPlan{p: p, again: map[string]bool{}}
		if _, err := collect(ctx, dir, "", sink, CollectOptions{Cache: cache, Trust: true, plan: k}); err != nil {
			return fmt.Errorf("collect %s: %w", dir, err)
		}
		p.u.cached, p.u.again = true, k.again
		return nil
	})
}

// cachedPlan is told, in order, what a Collect finds beside the records of a file cache
// that has what is wanted.
type cachedPlan struct {
	p     *planner
	again map[string]bool // see Update
}

// passed takes a batch in which all is as it was.
func (k *cachedPlan) passed(b *collectBatch) error {
	for i := range b.items {
		if it := &b.items[i]; it.isDir {
			if err := k.same(b.record(it)); err != nil {
				return err
			}
		}
	}
	return nil
}

// same takes an entry that is as it was. The planner needs to know of directories and of
// inodes with several names.
func (k *cachedPlan) same(rec cacheRecord) error {
	if !rec.key().isDir() && rec.key().links() < 2 {
		return nil
	}
	e, err := rec.entry()
	if err != nil {
		return fmt.Errorf("%w: %w", errCache, err)
	}
	return k.add(&e, &e)
}

// pair takes an entry that is not as its record says, has no record, or is gone.
func (k *cachedPlan) pair(rec cacheRecord, e *Entry) error {
	if rec == nil || rec.flags()&flagHole != 0 {
		return k.add(e, nil)
	}
	w, err := rec.entry()
	if err != nil {
		return fmt.Errorf("%w: %w", errCache, err)
	}
	if e != nil && k.again != nil {
		parent, _ := splitPath(e.Path)
		if k.again[parent] = true; len(k.again) > checkAtMost {
			k.again = nil
		}
	}
	return k.add(e, &w)
}

func (k *cachedPlan) add(have, want *Entry) error {
	p := k.p
	for _, side := range []struct {
		e     *Entry
		order *orderCheck
	}{{have, &p.haveOrder}, {want, &p.wantOrder}} {
		side.order.any = side.order.any || side.e != nil
	}
	return p.pair(have, want)
}

// CheckCached is Check of an update that PlanUpdateCached planned with cache. The caller knows that
// only Apply could write to dir since. CheckCached writes nothing: the patch that it returns brings
// the cache up to date later. Nil means that it cannot tell.
func (u *Update) CheckCached(ctx context.Context, dir, cache string, sink Sink) (*CachePatch, error) {
	w, err := u.witness(false)
	if w == nil || err != nil || !u.cached || u.again == nil {
		return nil, err
	}
	for path := range u.again {
		w.near[path] = true
	}
	// The update leads back to what the cache has, entry by entry.
	clear(w.left)
	_, err = collect(ctx, dir, "", sink, CollectOptions{Cache: cache, Trust: true, witness: w})
	if errors.Is(err, errCache) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("check %s: %w", dir, err)
	}
	if w.wrong {
		return nil, nil
	}
	return &CachePatch{cache, w.keys}, nil
}

// CachePatch holds the inode keys to rewrite in a file cache whose entries are otherwise
// valid again.
type CachePatch struct {
	cache string
	keys  []keyChange
}

// keyChange is the part of a record, from its flags to the end of its key, that is
// not as it was, and where that is in the cache.
type keyChange struct {
	at  int64
	now [72 - 4]byte
}

// rekeyed takes a record that is written in place of another.
func (w *witness) rekeyed(at int64, rec cacheRecord) {
	if w == nil {
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.keys = append(w.keys, keyChange{at + 4, [72 - 4]byte(rec[4:72])})
}

// Write writes p to the cache in place, and gives the cache another base. A process killed in
// the middle leaves a cache that is not used, because nothing in it is proven.
func (p *CachePatch) Write(base string) error {
	m, err := openCache(p.cache)
	if err != nil {
		return err
	}
	defer m.close()
	f, err := os.OpenFile(p.cache, os.O_WRONLY, 0)
	if err != nil {
		return fmt.Errorf("file cache: %w", err)
	}
	for i := range p.keys {
		if _, err := f.WriteAt(p.keys[i].now[:], p.keys[i].at); err != nil {
			return errors.Join(fmt.Errorf("file cache: %w", err), f.Close())
		}
	}
	h := blake3.New()
	if _, err := io.CopyBuffer(h, io.NewSectionReader(m.f, 0, m.end), make([]byte, cacheBuffer)); err != nil {
		return errors.Join(fmt.Errorf("file cache: %w", err), f.Close())
	}
	m.base, m.sum = base, [32]byte(h.Sum(nil))
	end := m.trailer.append(nil)
	_, err = f.WriteAt(end, m.end)
	if err == nil {
		err = f.Truncate(m.end + int64(len(end)))
	}
	if err = errors.Join(err, f.Close()); err != nil {
		return fmt.Errorf("file cache: %w", err)
	}
	return nil
}
