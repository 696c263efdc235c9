package store

import (
	"bufio"
	"bytes"
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

// A ledger is what the last commit for a sandbox has found in the index. The
// next one needs nearly the same pieces, and asks the database for the others
// alone. It lies beside the memories and is a cache like them: not durable, and
// not used when it is hurt in any way. What is in the index leaves its place
// only while the store is held alone, and whoever has it alone drops all
// ledgers first; who finds pieces damaged drops them afterwards.
//
//	16 bytes that name the format
//	records in the order of ids: id (32 bytes), number of the pack (uint64), bytes stored (uint32)
//	BLAKE3 of all that
const (
	ledgerMagic  = "agentbox ledger1"
	ledgerRecord = 32 + 8 + 4
	ledgerSum    = 32
	ledgerSuffix = ".pieces"
	ledgerNew    = ".new" // one that is being written
)

func (s *Store) ledgerPath(sandbox string) string {
	return filepath.Join(s.memoryDir(), sandbox+ledgerSuffix)
}

// dropLedgers forgets, durably, what is known of the index.
func (s *Store) dropLedgers() error {
	// Those that are being written first, which get the others' names.
	var files []string
	for _, suffix := range []string{ledgerSuffix + ledgerNew, ledgerSuffix} {
		found, err := filepath.Glob(filepath.Join(s.memoryDir(), "*"+suffix))
		if err != nil {
			return err
		}
		files = append(files, found...)
	}
	if len(files) == 0 {
		return nil
	}
	for _, f := range files {
		if err := os.Remove(f); err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
	}
	return fsx.SyncDir(s.memoryDir())
}

// errLedger: the ledger turned out not to be true, or not to be whole.
var errLedger = errors.New("the ledger is of no use")

// ledgerReader reads a ledger. Nothing that it says counts before finish.
type ledgerReader struct {
	f    *os.File
	r    *bufio.Reader  // of all but the sum
	sum  *blake3.Hasher // of what was read of the file
	left int64
	// total is how many records there are.
	total int64
	cur   []byte // the record that stands next; nil after the last
	err   error
}

func openLedger(path string) (*ledgerReader, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	l := &ledgerReader{f: f, sum: blake3.New()}
	head := make([]byte, len(ledgerMagic))
	info, err := f.Stat()
	size := int64(-1)
	if err == nil && info.Mode().IsRegular() {
		size = info.Size() - int64(len(ledgerMagic)) - ledgerSum
	}
	if size >= 0 {
		body := io.LimitReader(f, int64(len(ledgerMagic))+size)
		l.r = bufio.NewReaderSize(io.TeeReader(body, l.sum), 64<<10)
		_, err = io.ReadFull(l.r, head)
	}
	if err != nil || size < 0 || size%ledgerRecord != 0 || string(head) != ledgerMagic {
		return nil, errors.Join(errLedger, f.Close())
	}
	l.total = size / ledgerRecord
	l.left = l.total
	l.next()
	return l, nil
}

// next moves on to the next record.
func (l *ledgerReader) next() {
	if l.cur != nil {
		_, _ = l.r.Discard(ledgerRecord) // of what was peeked at
		l.cur = nil
	}
	if l.left == 0 || l.err != nil {
		return
	}
	l.left--
	l.cur, l.err = l.r.Peek(ledgerRecord)
	if l.err != nil {
		l.cur = nil
	}
}

// find moves on to a piece, or to where it would be. Ids come in their order.
func (l *ledgerReader) find(id pack.ID) (num int64, stored uint32, ok bool) {
	for l.cur != nil {
		switch bytes.Compare(l.cur[:32], id[:]) {
		case -1:
			l.next()
		case 0:
			return int64(binary.LittleEndian.Uint64(l.cur[32:])), binary.LittleEndian.Uint32(l.cur[40:]), true
		default:
			return 0, 0, false
		}
	}
	return 0, 0, false
}

// finish proves all that was read.
func (l *ledgerReader) finish() error {
	for l.cur != nil {
		l.next()
	}
	sum := make([]byte, ledgerSum)
	if _, err := io.ReadFull(l.f, sum); l.err != nil || err != nil || !bytes.Equal(sum, l.sum.Sum(nil)) {
		return errLedger
	}
	return nil
}

// ledgerWriter writes a ledger. It is a cache: one that cannot be written is none.
type ledgerWriter struct {
	f   *os.File
	w   *bufio.Writer // to both
	sum *blake3.Hasher
}

func createLedger(path string) *ledgerWriter {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_TRUNC|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return nil
	}
	l := &ledgerWriter{f: f, sum: blake3.New()}
	l.w = bufio.NewWriterSize(io.MultiWriter(l.sum, f), 64<<10)
	_, _ = l.w.WriteString(ledgerMagic) // an error comes again with Flush
	return l
}

func (l *ledgerWriter) add(id pack.ID, num int64, stored uint32) {
	rec := append(l.w.AvailableBuffer(), id[:]...)
	rec = binary.LittleEndian.AppendUint64(rec, uint64(num))
	_, _ = l.w.Write(binary.LittleEndian.AppendUint32(rec, stored)) // an error comes again with Flush
}

// end puts the ledger into its place, or, with drop, away.
func (l *ledgerWriter) end(path string, drop bool) {
	err := l.w.Flush()
	if err == nil {
		_, err = l.f.Write(l.sum.Sum(nil))
	}
	if err = errors.Join(err, l.f.Close()); err == nil && !drop {
		err = os.Rename(l.f.Name(), path)
	}
	if err != nil || drop {
		_ = os.Remove(l.f.Name()) // what stays is swept later
	}
}

// stored proves that every piece is in the draft's own pack or in the store,
// and returns how many bytes those of the store have there.
func (d *Draft) stored(ctx context.Context, need []pack.ID) (int64, error) {
	path := d.s.ledgerPath(d.row.SandboxID)
	old, err := openLedger(path)
	if err == nil {
		n, err := d.weigh(ctx, need, old, path)
		if err = errors.Join(err, old.f.Close()); !errors.Is(err, errLedger) {
			return n, err
		}
	}
	return d.weigh(ctx, need, nil, path)
}

// weigh is stored with what a ledger says, if there is one. It writes the next.
func (d *Draft) weigh(ctx context.Context, need []pack.ID, old *ledgerReader, path string) (n int64, err error) {
	out := createLedger(path + ledgerNew)
	same := false // as the ledger that is there
	if out != nil {
		defer func() { out.end(path, err != nil || same) }()
	}
	asked, found := 0, int64(0)
	packs := map[int64]bool{} // of which the ledger says that they are there
	var here []place
	var ask []pack.ID
	for part := range slices.Chunk(need, 16*findBatch) {
		here, ask = here[:0], ask[:0]
		for _, id := range part {
			if d.pack.Has(id) {
				continue
			}
			if old != nil {
				if num, stored, ok := old.find(id); ok {
					packs[num] = true
					found++
					here = append(here, place{pack: num, blob: pack.Blob{ID: id, Stored: stored}})
					continue
				}
			}
			ask = append(ask, id)
		}
		sorted := len(here)
		asked += len(ask)
		gone, err := d.x.sound(ctx, ask, func(p place) error { here = append(here, p); return nil })
		if err != nil {
			return 0, err
		}
		if len(gone) > 0 {
			return 0, fmt.Errorf("piece %s is not in the store, or damaged there, and was not given to it: %w", gone[0], fault.ErrCorrupt)
		}
		if len(here) > sorted {
			slices.SortFunc(here, func(a, b place) int { return compareIDs(a.blob.ID, b.blob.ID) })
		}
		for i := range here {
			n += int64(here[i].blob.Stored)
			if out != nil {
				out.add(here[i].blob.ID, here[i].pack, here[i].blob.Stored)
			}
		}
	}
	if old == nil {
		return n, nil
	}
	if err := d.x.know(ctx, slices.Collect(maps.Keys(packs))); err != nil {
		return 0, err
	}
	for num := range packs {
		if _, whole, err := d.x.pack(ctx, num); err != nil || !whole {
			return 0, errors.Join(err, errLedger)
		}
	}
	if err := old.finish(); err != nil {
		return 0, err
	}
	same = asked == 0 && found == old.total
	return n, nil
}
