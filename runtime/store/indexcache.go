package store

import (
	"bytes"
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"

	"github.com/zeebo/blake3"
	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/internal/fsx"
	"github.com/agentbox/agentbox/runtime/store/pack"
)

// An index cache is the set of chunks of the last checkpoint of a sandbox, all of which were found in
// the index or recorded there. The next checkpoint needs nearly the same chunks, and asks the
// database for the others alone. The index cache does not list the chunks: its sketch, with that of
// the next checkpoint's chunks, gives the difference of the two sets, and its sum proves this. If
// the difference is more than a sketch can give, all chunks are looked up.
//
// It lies beside the file caches and is a cache like them: not durable, and not used when it is
// damaged in any way. A chunk leaves its place in the index only while the store is held
// exclusively, and all index caches are dropped before anything else is done then; a verification that
// finds chunks damaged drops them afterwards.
//
//	16 bytes that name the format
//	number of chunks, and of the bytes they have in packs (uint64 each)
//	BLAKE3 of their ids, in order
//	cells of the sketch: key (uint64), check (uint16)
//	for each pack, in order: how far it is from the one before, how many of the chunks it has (uvarint each)
//	BLAKE3 of all that
type indexCache struct {
	chunks int64
	bytes  int64
	sum    [32]byte
	cells  sketch
	packs  map[int64]int64 // number of a pack -> chunks in it
}

const (
	indexCacheMagic  = "agentbox ledger2"
	indexCacheSum    = 32
	indexCacheSuffix = ".pieces"
	indexCacheNew    = ".new" // one that is going to be written

	// maxIndexCache bounds an index cache: beside the sketch, 3.3 kB, there is room for thousands of packs.
	maxIndexCache = 16 << 10
)

func (d *dirs) indexCachePath(sandbox string) string {
	return filepath.Join(d.cacheDir(), sandbox+indexCacheSuffix)
}

// dropIndexCaches removes all index caches durably.
func (d *dirs) dropIndexCaches() error {
	dropped := false
	// First those about to be written, which are renamed to the others; and again, for a commit
	// that read one of the others meanwhile.
	for _, suffix := range []string{
		indexCacheSuffix + indexCacheNew, indexCacheSuffix, indexCacheSuffix + indexCacheNew,
	} {
		files, err := filepath.Glob(filepath.Join(d.cacheDir(), "*"+suffix))
		if err != nil {
			return err
		}
		for _, f := range files {
			if err := os.Remove(f); err != nil && !errors.Is(err, os.ErrNotExist) {
				return err
			}
			dropped = true
		}
	}
	if !dropped {
		return nil
	}
	return fsx.SyncDir(d.cacheDir())
}

// errIndexCache: the index cache is wrong or incomplete, or differs by more than the sketch can give.
var errIndexCache = errors.New("the index cache is of no use")

func readIndexCache(path string) (*indexCache, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil || !info.Mode().IsRegular() || info.Size() > maxIndexCache {
		return nil, errors.Join(errIndexCache, err)
	}
	data, err := io.ReadAll(io.LimitReader(f, maxIndexCache))
	if err != nil {
		return nil, err
	}
	return parseIndexCache(data)
}

func parseIndexCache(data []byte) (*indexCache, error) {
	l := &indexCache{packs: map[int64]int64{}}
	body := len(data) - indexCacheSum
	if body < len(indexCacheMagic)+8+8+len(l.sum)+len(l.cells)*cellSize ||
		!bytes.HasPrefix(data, []byte(indexCacheMagic)) {
		return nil, errIndexCache
	}
	if sum := blake3.Sum256(data[:body]); !bytes.Equal(sum[:], data[body:]) {
		return nil, errIndexCache
	}
	data = data[len(indexCacheMagic):body]
	l.chunks, l.bytes = int64(binary.LittleEndian.Uint64(data)), int64(binary.LittleEndian.Uint64(data[8:]))
	data = data[16+copy(l.sum[:], data[16:]):]
	for i := range l.cells {
		l.cells[i] = cell{binary.LittleEndian.Uint64(data), binary.LittleEndian.Uint16(data[8:])}
		data = data[cellSize:]
	}
	var num, chunks int64
	for len(data) > 0 {
		far, n := binary.Uvarint(data)
		count, m := binary.Uvarint(data[max(n, 0):])
		if n <= 0 || m <= 0 {
			return nil, errIndexCache
		}
		data = data[n+m:]
		num += int64(far)
		chunks += int64(count)
		l.packs[num] = int64(count)
	}
	if chunks != l.chunks {
		return nil, errIndexCache
	}
	return l, nil
}

func (l *indexCache) encode() []byte {
	b := append([]byte(nil), indexCacheMagic...)
	b = binary.LittleEndian.AppendUint64(b, uint64(l.chunks))
	b = binary.LittleEndian.AppendUint64(b, uint64(l.bytes))
	b = append(b, l.sum[:]...)
	for _, c := range l.cells {
		b = binary.LittleEndian.AppendUint16(binary.LittleEndian.AppendUint64(b, c.key), c.check)
	}
	var last int64
	for _, num := range slices.Sorted(maps.Keys(l.packs)) {
		b = binary.AppendUvarint(binary.AppendUvarint(b, uint64(num-last)), uint64(l.packs[num]))
		last = num
	}
	sum := blake3.Sum256(b)
	return append(b, sum[:]...)
}

// add counts a chunk that is in a pack of the store.
func (l *indexCache) add(p *place) {
	l.bytes += int64(p.blob.Stored)
	l.packs[p.pack]++
}

// remove is add undone. False: the chunk is not among those of the index cache.
func (l *indexCache) remove(p *place) bool {
	l.bytes -= int64(p.blob.Stored)
	if l.packs[p.pack]--; l.packs[p.pack] > 0 {
		return true
	}
	left := l.packs[p.pack]
	delete(l.packs, p.pack)
	return left == 0
}

// claim makes the file that an index cache is going to be written to. dropIndexCaches removes
// it as well, so that what was found before that does not count afterwards.
func (d *Draft) claim() {
	f, err := os.OpenFile(d.newIndexCache(), os.O_WRONLY|os.O_CREATE|os.O_TRUNC|unix.O_NOFOLLOW, 0o600)
	if err == nil {
		_ = f.Close() // nothing was written
	}
}

func (d *Draft) newIndexCache() string { return d.s.indexCachePath(d.row.SandboxID) + indexCacheNew }

// keep writes an index cache; nil: the existing one stays. A failed write only loses
// it.
func (d *Draft) keep(l *indexCache) {
	err := errIndexCache
	if l != nil {
		err = d.writeIndexCache(l)
	}
	if err != nil {
		_ = os.Remove(d.newIndexCache()) // what stays is swept later
	}
}

func (d *Draft) writeIndexCache(l *indexCache) error {
	data := l.encode()
	if len(data) > maxIndexCache {
		return errIndexCache
	}
	f, err := os.OpenFile(d.newIndexCache(), os.O_WRONLY|os.O_TRUNC|unix.O_NOFOLLOW, 0)
	if err != nil {
		return err // it was dropped
	}
	_, err = f.Write(data)
	if err := errors.Join(err, f.Close()); err != nil {
		return err
	}
	return os.Rename(d.newIndexCache(), d.s.indexCachePath(d.row.SandboxID))
}

// stored proves that every chunk is in the draft's own pack or in the store, and returns how many
// bytes those of the store have there. next is the index cache of all these chunks, except those in
// the own pack; nil: the existing one is unchanged.
func (d *Draft) stored(ctx context.Context, need []pack.ID) (n int64, next *indexCache, err error) {
	d.claim() // before anything is read
	old, err := readIndexCache(d.s.indexCachePath(d.row.SandboxID))
	if err == nil {
		n, next, err := d.compare(ctx, need, old)
		if !errors.Is(err, errIndexCache) {
			return n, next, err
		}
	}
	next = &indexCache{chunks: int64(len(need)), sum: sumOf(need, nil, nil), packs: map[int64]int64{}}
	next.cells.flipAll(need)
	var ask []pack.ID
	for part := range slices.Chunk(need, 16*findBatch) {
		ask = ask[:0]
		for _, id := range part {
			if !d.pack.Has(id) {
				ask = append(ask, id)
			}
		}
		if err := d.ask(ctx, ask, next); err != nil {
			return 0, nil, err
		}
	}
	return next.bytes, next, nil
}

// ask adds chunks to an index cache, which must be in the store.
func (d *Draft) ask(ctx context.Context, ids []pack.ID, to *indexCache) error {
	gone, err := d.x.sound(ctx, ids, func(p place) error { to.add(&p); return nil })
	if err == nil && len(gone) > 0 {
		err = fmt.Errorf("piece %s is not in the store, or damaged there, and was not given to it: %w",
			gone[0], fault.ErrCorrupt)
	}
	return err
}

// compare is stored with what an index cache says.
func (d *Draft) compare(ctx context.Context, need []pack.ID, old *indexCache) (int64, *indexCache, error) {
	own := d.own(need)
	next := &indexCache{chunks: int64(len(need)), sum: sumOf(need, nil, nil), bytes: old.bytes, packs: old.packs}
	if next.sum == old.sum && len(own) == 0 {
		return old.bytes, nil, d.allWhole(ctx, old)
	}
	next.cells.flipAll(need)
	differ := next.cells
	differ.flipAll(own)
	differ.combine(&old.cells)
	keys, ok := differ.keys()
	if !ok {
		return 0, nil, errIndexCache
	}
	var more []pack.ID // than the index cache has
	var less []uint64
	for _, key := range keys {
		i, _ := slices.BinarySearchFunc(need, key, func(id pack.ID, key uint64) int {
			return cmp.Compare(keyOf(&id), key)
		})
		if i < len(need) && keyOf(&need[i]) == key && !d.pack.Has(need[i]) {
			more = append(more, need[i])
		} else {
			less = append(less, key)
		}
	}
	places, err := d.s.locateKeys(ctx, less)
	if err != nil {
		return 0, nil, err
	}
	var was []pack.ID
	for i := range places {
		was = append(was, places[i].blob.ID)
		if !next.remove(&places[i]) {
			return 0, nil, errIndexCache
		}
	}
	slices.SortFunc(was, compareIDs)
	without := slices.Concat(own, more)
	slices.SortFunc(without, compareIDs)
	if sumOf(need, without, was) != old.sum {
		return 0, nil, errIndexCache
	}
	if err := d.ask(ctx, more, next); err != nil {
		return 0, nil, err
	}
	return next.bytes, next, d.allWhole(ctx, next)
}

// own returns those chunks that are in the draft's own pack.
func (d *Draft) own(need []pack.ID) (list []pack.ID) {
	if n, _ := d.pack.Stats(); n == 0 {
		return nil
	}
	for _, id := range need {
		if d.pack.Has(id) {
			list = append(list, id)
		}
	}
	return list
}

// allWhole wants all packs of an index cache to be there.
func (d *Draft) allWhole(ctx context.Context, l *indexCache) error {
	if err := d.x.know(ctx, slices.Collect(maps.Keys(l.packs))); err != nil {
		return err
	}
	for num := range l.packs {
		if _, whole, err := d.x.pack(ctx, num); err != nil || !whole {
			return errors.Join(err, errIndexCache)
		}
	}
	return nil
}
