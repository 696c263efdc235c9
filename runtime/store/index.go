package store

import (
	"bytes"
	"cmp"
	"context"
	"database/sql"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/runtime/store/pack"
)

// place is the place of a chunk in the index.
type place struct {
	pack int64 // packs.num
	blob pack.Blob
	bad  bool // a verification has found it damaged
}

const (
	findColumns = "id, pack, off, stored, raw, packed, bad"
	findBatch   = 256 // ids in one query
	rowBatch    = 128 // rows in one insert
)

// packs are the files that chunks are in, and the rows of the database that say where.
type packs struct {
	*database
	find *sql.Stmt // asks for one chunk
}

// prepare compiles the query that is asked once per chunk.
func (x *packs) prepare(ctx context.Context) (err error) {
	x.find, err = x.read.PrepareContext(ctx, "SELECT "+findColumns+" FROM blobs WHERE id = ?")
	return cancelled(ctx, dbError("open", err))
}

// locate finds one chunk; not there is not an error.
func (x *packs) locate(ctx context.Context, id pack.ID) (p place, ok bool, err error) {
	err = p.scan(x.find.QueryRowContext(ctx, id[:]))
	switch {
	case errors.Is(err, sql.ErrNoRows):
		return place{}, false, nil
	case err != nil:
		return place{}, false, cancelled(ctx, dbError("find a piece", err))
	}
	return p, true, nil
}

func (p *place) scan(row interface{ Scan(...any) error }) error {
	var id []byte
	if err := row.Scan(&id, &p.pack, &p.blob.Off, &p.blob.Stored, &p.blob.Raw, &p.blob.Packed, &p.bad); err != nil {
		return err
	}
	if len(id) != len(p.blob.ID) {
		return fmt.Errorf("index: a piece is named by %d bytes: %w", len(id), fault.ErrCorrupt)
	}
	copy(p.blob.ID[:], id)
	return nil
}

// locateAll looks up many chunks, best sorted, and calls fn for each that exists. fn must not query
// the database.
func (x *packs) locateAll(ctx context.Context, ids []pack.ID, fn func(place) error) error {
	for part := range slices.Chunk(ids, findBatch) {
		if err := x.locatePart(ctx, part, fn); err != nil {
			return cancelled(ctx, dbError("find pieces", err))
		}
	}
	return nil
}

func (x *packs) locatePart(ctx context.Context, ids []pack.ID, fn func(place) error) error {
	args := make([]any, len(ids))
	for i := range ids {
		args[i] = ids[i][:]
	}
	q := "SELECT " + findColumns + " FROM blobs WHERE id IN (?" + strings.Repeat(",?", len(ids)-1) + ")"
	rows, err := x.read.QueryContext(ctx, q, args...)
	if err != nil {
		return err
	}
	defer rows.Close()
	for rows.Next() {
		var p place
		if err := p.scan(rows); err != nil {
			return err
		}
		if err := fn(p); err != nil {
			return err
		}
	}
	return rows.Err()
}

// locateKeys finds all chunks of which the keys in a sketch are given.
func (x *packs) locateKeys(ctx context.Context, keys []uint64) (list []place, err error) {
	for part := range slices.Chunk(keys, findBatch) {
		args := make([]any, 0, 2*len(part))
		for _, key := range part {
			from := pack.ID{}
			binary.BigEndian.PutUint64(from[:], key)
			to := from
			copy(to[8:], bytes.Repeat([]byte{0xff}, len(to)-8))
			args = append(args, from[:], to[:])
		}
		q := "WITH keys (a, b) AS (VALUES (?,?)" + strings.Repeat(",(?,?)", len(part)-1) + ") SELECT " + findColumns +
			" FROM keys CROSS JOIN blobs ON id BETWEEN a AND b"
		err := x.query(ctx, q, args, func(rows *sql.Rows) error {
			var p place
			err := p.scan(rows)
			list = append(list, p)
			return err
		})
		if err != nil {
			return nil, err
		}
	}
	return list, nil
}

// packRow is the row of a pack in the index.
type packRow struct {
	num   int64
	name  string
	bytes int64
}

func (x *packs) packRow(ctx context.Context, num int64) (p packRow, err error) {
	err = x.read.QueryRowContext(ctx, "SELECT num, name, bytes FROM packs WHERE num = ?",
		num).Scan(&p.num, &p.name, &p.bytes)
	if errors.Is(err, sql.ErrNoRows) {
		return packRow{}, fmt.Errorf("the index names a pack, %d, that it does not have: %w", num, fault.ErrCorrupt)
	}
	if err == nil && !validPackName(p.name) {
		err = fmt.Errorf("index: pack %.80q: %w", p.name, fault.ErrCorrupt)
	}
	return p, cancelled(ctx, dbError("find a pack", err))
}

// packRows is packRow for many at once, best sorted, without those that packRow
// has an error for.
func (x *packs) packRows(ctx context.Context, nums []int64, fn func(packRow) error) error {
	for part := range slices.Chunk(nums, findBatch) {
		args := make([]any, len(part))
		for i, n := range part {
			args[i] = n
		}
		q := "SELECT num, name, bytes FROM packs WHERE num IN (?" + strings.Repeat(",?", len(part)-1) + ")"
		err := x.query(ctx, q, args, func(rows *sql.Rows) error {
			var p packRow
			if err := rows.Scan(&p.num, &p.name, &p.bytes); err != nil || !validPackName(p.name) {
				return err
			}
			return fn(p)
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// validPackName holds a name against the form it must have before a path is
// made of it.
func validPackName(name string) bool { return len(name) == 64 && isHex(name) }

// addPack records a pack, which is durable under its name, and its chunks. A chunk that some
// pack has already stays there, unless that pack is among lost. It returns the number of the
// pack, or 0 if it does not have all of these chunks.
func (x *packs) addPack(ctx context.Context, tx *sql.Tx, info pack.Info, lost []int64) (int64, error) {
	path := pack.Path(x.packsDir(), info.Name)
	// A commit is undone, pack included, within a transaction, so a pack that exists now
	// stays.
	var st unix.Stat_t
	if err := unix.Lstat(path, &st); err != nil || st.Size != info.Bytes {
		return 0, fmt.Errorf("pack %s vanished while it was recorded (%v): %w", info.Name, err, fault.ErrState)
	}
	_, err := tx.ExecContext(ctx, "INSERT INTO packs (name, bytes, created) VALUES (?,?,?) ON CONFLICT (name) DO NOTHING", info.Name, info.Bytes, time.Now().UnixNano())
	if err != nil {
		return 0, err
	}
	var num int64
	if err := tx.QueryRowContext(ctx, "SELECT num FROM packs WHERE name = ?", info.Name).Scan(&num); err != nil {
		return 0, err
	}
	list := []string{"-1"}
	for _, n := range lost {
		list = append(list, strconv.FormatInt(n, 10))
	}
	conflict := " ON CONFLICT (id) DO UPDATE SET pack = excluded.pack, off = excluded.off, stored = excluded.stored, raw = excluded.raw, packed = excluded.packed, bad = 0" +
		" WHERE bad OR pack IN (" + strings.Join(list, ",") + ")"
	// In the order of the tree, an insert mostly hits a page that is at hand. A
	// pack may have a million chunks: the caller's list is sorted, not a copy.
	blobs := info.Blobs
	slices.SortFunc(blobs, func(a, b pack.Blob) int { return compareIDs(a.ID, b.ID) })
	var full *sql.Stmt
	var added int64
	for part := range slices.Chunk(blobs, rowBatch) {
		q := "INSERT INTO blobs (id, pack, off, stored, raw, packed) VALUES (?,?,?,?,?,?)" +
			strings.Repeat(",(?,?,?,?,?,?)", len(part)-1) + conflict
		args := make([]any, 0, 6*len(part))
		for i := range part {
			b := &part[i]
			args = append(args, b.ID[:], num, b.Off, b.Stored, b.Raw, b.Packed)
		}
		var res sql.Result
		if len(part) < rowBatch {
			res, err = tx.ExecContext(ctx, q, args...)
		} else {
			if full == nil {
				if full, err = tx.PrepareContext(ctx, q); err != nil {
					return 0, err
				}
				defer full.Close()
			}
			res, err = full.ExecContext(ctx, args...)
		}
		if err != nil {
			return 0, err
		}
		n, err := res.RowsAffected()
		if err != nil {
			return 0, err
		}
		added += n
	}
	if added != int64(len(blobs)) {
		return 0, nil
	}
	return num, nil
}

// dropPack undoes the publication of a pack unless it has been recorded: equal chunks in
// equal order make the same pack, so another commit may have recorded it.
func (x *packs) dropPack(ctx context.Context, name string) error {
	return x.release(ctx, "remove a pack", func(tx *sql.Tx) error {
		var n int
		if err := tx.QueryRowContext(ctx, "SELECT count(*) FROM packs WHERE name = ?",
			name).Scan(&n); err != nil || n > 0 {
			return err
		}
		if err := os.Remove(pack.Path(x.packsDir(), name)); err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
		return nil
	})
}

// packFiles calls fn for the name of every pack that lies there, recorded or not.
func (x *packs) packFiles(fn func(name string) error) error {
	dirs, err := os.ReadDir(x.packsDir())
	if err != nil {
		return err
	}
	for _, d := range dirs {
		if !d.IsDir() || len(d.Name()) != 2 || !isHex(d.Name()) {
			continue
		}
		entries, err := os.ReadDir(x.packsDir() + "/" + d.Name())
		if err != nil {
			return err
		}
		for _, e := range entries {
			if !validPackName(e.Name()) || e.Name()[:2] != d.Name() || !e.Type().IsRegular() {
				continue
			}
			if err := fn(e.Name()); err != nil {
				return err
			}
		}
	}
	return nil
}

// strayPacks lists the packs that lie there and are not recorded.
func (x *packs) strayPacks(ctx context.Context) (stray []string, err error) {
	// Files first: a pack gets its row after its name.
	var names []string
	if err := x.packFiles(func(name string) error { names = append(names, name); return nil }); err != nil {
		return nil, err
	}
	known := map[string]bool{}
	rows, err := x.read.QueryContext(ctx, "SELECT name FROM packs")
	if err != nil {
		return nil, cancelled(ctx, dbError("list packs", err))
	}
	defer rows.Close()
	for rows.Next() {
		var name string
		if err := rows.Scan(&name); err != nil {
			return nil, dbError("list packs", err)
		}
		known[name] = true
	}
	if err := rows.Err(); err != nil {
		return nil, cancelled(ctx, dbError("list packs", err))
	}
	for _, name := range names {
		if !known[name] {
			stray = append(stray, name)
		}
	}
	return stray, nil
}

// index is the view that one draft or reader has of the index. The store's lock,
// which it holds, keeps the packs where they are, so what it learned stays true.
type index struct {
	s  *packs
	mu sync.Mutex
	// whole reports for each pack that was looked up whether its file is there in full
	// length. Chunks of a pack whose file is not count as missing.
	whole map[int64]bool
	packs map[int64]packRow
}

func newIndex(s *packs) *index {
	return &index{s: s, whole: map[int64]bool{}, packs: map[int64]packRow{}}
}

// pack returns a pack's row, and whether its file is whole.
func (x *index) pack(ctx context.Context, num int64) (packRow, bool, error) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if row, ok := x.packs[num]; ok {
		return row, x.whole[num], nil
	}
	row, err := x.s.packRow(ctx, num)
	if errors.Is(err, fault.ErrCorrupt) {
		x.packs[num], x.whole[num] = packRow{num: num}, false
		return x.packs[num], false, nil
	}
	if err != nil {
		return packRow{}, false, err
	}
	err = x.look(row)
	return row, x.whole[num], err
}

// know has pack answer for many from memory: one question of the database, and
// not one for each of them.
func (x *index) know(ctx context.Context, nums []int64) error {
	x.mu.Lock()
	defer x.mu.Unlock()
	nums = slices.DeleteFunc(nums, func(n int64) bool { _, ok := x.packs[n]; return ok })
	slices.Sort(nums)
	return x.s.packRows(ctx, slices.Compact(nums), x.look)
}

// look sees whether the file of a pack is there in full length. The caller holds mu.
func (x *index) look(row packRow) error {
	path := pack.Path(x.s.packsDir(), row.name)
	var st unix.Stat_t
	err := unix.Lstat(path, &st)
	if err != nil && !errors.Is(err, unix.ENOENT) && !errors.Is(err, unix.ENOTDIR) {
		return &os.PathError{Op: "lstat", Path: path, Err: err}
	}
	x.packs[row.num], x.whole[row.num] = row, err == nil && st.Mode&unix.S_IFMT == unix.S_IFREG && st.Size == row.bytes
	return nil
}

// has reports whether a chunk is in a pack that is whole, and not known to be
// damaged: one that is not is stored anew, and those that need it are whole again.
func (x *index) has(ctx context.Context, id pack.ID) (bool, error) {
	p, ok, err := x.s.locate(ctx, id)
	if err != nil || !ok || p.bad {
		return false, err
	}
	_, ok, err = x.pack(ctx, p.pack)
	return ok, err
}

// hasAll is has for many chunks at once: those that are there.
func (x *index) hasAll(ctx context.Context, ids []pack.ID) (map[pack.ID]bool, error) {
	there := make(map[pack.ID]bool, len(ids))
	_, err := x.find(ctx, ids, func(p place) error { there[p.blob.ID] = !p.bad; return nil })
	return there, err
}

// find returns the places of many chunks, and those that are nowhere, or in a
// pack that is gone or cut.
func (x *index) find(ctx context.Context, ids []pack.ID, fn func(place) error) (missing []pack.ID, err error) {
	for part := range slices.Chunk(ids, 16*findBatch) {
		places := make([]place, 0, len(part))
		if err := x.s.locateAll(ctx, part, func(p place) error { places = append(places, p); return nil }); err != nil {
			return nil, err
		}
		nums := make([]int64, len(places))
		for i := range places {
			nums[i] = places[i].pack
		}
		if err := x.know(ctx, nums); err != nil {
			return nil, err
		}
		there := make(map[pack.ID]bool, len(places))
		for _, p := range places {
			_, ok, err := x.pack(ctx, p.pack)
			if err != nil {
				return nil, err
			}
			if !ok {
				continue
			}
			there[p.blob.ID] = true
			if err := fn(p); err != nil {
				return nil, err
			}
		}
		if len(there) == len(part) {
			continue
		}
		for _, id := range part {
			if !there[id] {
				missing = append(missing, id)
			}
		}
	}
	return missing, nil
}

// sound is find for what is new and may not count on a chunk that is known to be
// damaged: that is as good as nowhere.
func (x *index) sound(ctx context.Context, ids []pack.ID, fn func(place) error) (missing []pack.ID, err error) {
	var bad []pack.ID
	missing, err = x.find(ctx, ids, func(p place) error {
		if p.bad {
			bad = append(bad, p.blob.ID)
			return nil
		}
		return fn(p)
	})
	return append(missing, bad...), err
}

// lost lists the packs that were found not to be whole.
func (x *index) lost() (list []int64) {
	x.mu.Lock()
	defer x.mu.Unlock()
	for num, ok := range x.whole {
		if !ok {
			list = append(list, num)
		}
	}
	slices.Sort(list)
	return list
}

func compareIDs(a, b pack.ID) int {
	// They are hashes: the first bytes nearly always differ.
	if x, y := binary.BigEndian.Uint64(a[:]), binary.BigEndian.Uint64(b[:]); x != y {
		return cmp.Compare(x, y)
	}
	return bytes.Compare(a[:], b[:])
}

// idSet is a set of chunks that costs 32 bytes each.
type idSet struct {
	ids    []pack.ID
	sorted int // so many at the beginning are in order, each once
}

func (s *idSet) add(id pack.ID) {
	s.ids = append(s.ids, id)
	if len(s.ids) >= 2*s.sorted+4096 {
		s.list()
	}
}

// merge adds what is in o, which is of no use afterwards.
func (s *idSet) merge(o *idSet) {
	if len(o.ids) > len(s.ids) {
		*s, *o = *o, *s
	}
	for _, id := range o.ids {
		s.add(id)
	}
}

// list returns what is in the set, in order.
func (s *idSet) list() []pack.ID {
	slices.SortFunc(s.ids, compareIDs)
	s.ids = slices.Compact(s.ids)
	s.sorted = len(s.ids)
	return s.ids
}
