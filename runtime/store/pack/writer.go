package pack

import (
	"bufio"
	"context"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"os"
	"path/filepath"
	goruntime "runtime"
	"sync"

	"github.com/klauspost/compress/zstd"
	"github.com/zeebo/blake3"
	"golang.org/x/sync/semaphore"
	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/failpoint"
	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/internal/guard"
)

// TempPrefix begins the names of packs that are being written.
const TempPrefix = "tmp-"

const (
	maxWorkers = 8
	maxQueued  = 2 * MaxChunk // raw bytes that were taken and are not yet written
	writeback  = 16 << 20     // bytes after which the kernel is asked to begin to write
)

// Info describes a finished pack.
type Info struct {
	Temp  string // where it lies; the caller moves it to its name. Empty: there was no chunk, and there is no file
	Name  string // 64 hex digits
	Bytes int64  // size of the file
	Blobs []Blob // in the order of offsets; a caller that changes it can no longer query the Writer
}

// Writer writes a pack. Its methods are safe for concurrent use. Finish and Abort end it;
// after that Add returns ErrState.
type Writer struct {
	dir   string
	room  *semaphore.Weighted
	queue chan job
	work  guard.WaitGroup

	adding sync.WaitGroup // adders between the check of ended and the queue

	mu    sync.Mutex
	ended bool
	blobs blobSet // in the order of adding; where a chunk lies is known once it is written
	err   error   // the first one; it ends all further work

	out  sync.Mutex // what follows; never taken together with mu
	f    *os.File
	w    *bufio.Writer
	enc  *zstd.Encoder
	off  int64
	sent int64 // bytes that the kernel was asked to write
}

type job struct {
	n      int // in blobs
	blob   Blob
	raw    *[]byte // or, with stored set,
	stored bool    // the bytes as they are to lie in the pack
}

// Create returns a Writer for a pack in the directory dir. No file is made
// before the first Add.
func Create(dir string) (*Writer, error) {
	info, err := os.Stat(dir)
	if err != nil {
		return nil, err
	}
	if !info.IsDir() {
		return nil, &os.PathError{Op: "create pack", Path: dir, Err: unix.ENOTDIR}
	}
	return &Writer{dir: dir, room: semaphore.NewWeighted(maxQueued)}, nil
}

// Add takes a chunk, of which id is the Sum; the caller has computed it, so Add does not. raw may be
// reused when Add returns. A chunk that was added already is left out. An error may be that of an
// earlier chunk, and after one the pack cannot be finished.
func (w *Writer) Add(id ID, raw []byte) error {
	return w.add(Blob{ID: id, Raw: uint32(min(len(raw), MaxChunk+1))}, raw, false)
}

// AddStored takes a chunk as it lies in another pack: the b.Stored bytes that
// b describes. They are proven first; ErrCorrupt means that they are not it.
func (w *Writer) AddStored(b Blob, stored []byte) error {
	if b.Off = int64(len(headMagic)); len(stored) != int(b.Stored) {
		return fmt.Errorf("piece %s: %d bytes in place of %d: %w", b.ID, len(stored), b.Stored, fault.ErrInvalid)
	}
	if err := b.check(); err != nil {
		return err
	}
	if w.Has(b.ID) {
		return nil
	}
	if !b.Packed {
		if err := prove(b, stored); err != nil {
			return err
		}
	} else {
		raw := borrow(int(b.Raw))
		_, err := unpack(b, stored, (*raw)[:0:b.Raw])
		buffers.Put(raw)
		if err != nil {
			return err
		}
	}
	return w.add(b, stored, true)
}

func (w *Writer) add(b Blob, p []byte, stored bool) error {
	if b.Raw == 0 || b.Raw > MaxChunk {
		return fmt.Errorf("a piece of %d bytes; 1 to %d are possible: %w", len(p), MaxChunk, fault.ErrInvalid)
	}
	w.mu.Lock()
	err := w.err
	if err == nil && w.ended {
		err = fmt.Errorf("the pack has ended: %w", fault.ErrState)
	}
	if err != nil || w.blobs.find(b.ID) >= 0 {
		w.mu.Unlock()
		return err
	}
	if w.queue == nil {
		if err := w.start(); err != nil {
			w.err = err
			w.mu.Unlock()
			return err
		}
	}
	n := w.blobs.add(b)
	w.adding.Add(1)
	w.mu.Unlock()
	defer w.adding.Done()

	_ = w.room.Acquire(context.Background(), int64(len(p))) // cannot fail: that is at most what there is
	buf := borrow(len(p))
	copy(*buf, p)
	w.queue <- job{n, b, buf, stored}
	return nil
}

// start makes the file and the workers.
func (w *Writer) start() error {
	if err := failpoint.Hit("store.pack.before-create"); err != nil {
		return err
	}
	f, err := os.CreateTemp(w.dir, TempPrefix+"*")
	if err != nil {
		return err
	}
	w.f, w.w = f, bufio.NewWriterSize(f, 256<<10)
	_, _ = w.w.WriteString(headMagic) // a failure stays in the bufio.Writer
	w.off = int64(len(headMagic))
	n := min(goruntime.GOMAXPROCS(0), maxWorkers)
	if w.enc, err = newEncoder(zstd.SpeedFastest, n); err != nil {
		return errors.Join(err, f.Close(), os.Remove(f.Name()))
	}
	w.queue = make(chan job, 2*n)
	for range n {
		w.work.Go(func() {
			var room []byte
			for j := range w.queue {
				if err := guard.Do(func() error { room = w.do(j, room); return nil }); err != nil {
					w.fail(err)
				}
			}
		})
	}
	return nil
}

// do stores one chunk. It returns room for the next one's frame.
func (w *Writer) do(j job, room []byte) []byte {
	p := *j.raw
	defer w.room.Release(int64(len(p)))
	if !j.stored {
		if room, j.blob.Packed = compress(w.enc, p, room); j.blob.Packed {
			p = room
		}
		j.blob.Stored = uint32(len(p))
	}
	err := w.put(&j.blob, p)
	buffers.Put(j.raw)
	w.mu.Lock()
	w.blobs.list[j.n] = j.blob
	w.mu.Unlock()
	w.fail(err)
	return room
}

// fail keeps the first error.
func (w *Writer) fail(err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.err == nil {
		w.err = err
	}
}

func (w *Writer) put(b *Blob, p []byte) error {
	w.out.Lock()
	defer w.out.Unlock()
	if err := failpoint.Hit("store.pack.before-write"); err != nil {
		return err
	}
	if _, err := w.w.Write(p); err != nil {
		return err
	}
	b.Off = w.off
	w.off += int64(len(p))
	if w.off-w.sent >= writeback {
		// Finish then finds little left to wait for. A filesystem that cannot
		// do it early does it then.
		_ = unix.SyncFileRange(int(w.f.Fd()), w.sent, w.off-w.sent, unix.SYNC_FILE_RANGE_WRITE)
		w.sent = w.off
	}
	return nil
}

// Has reports whether the chunk was added.
func (w *Writer) Has(id ID) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.blobs.find(id) >= 0
}

// Stats returns how many chunks were added, and how many bytes of the file are written.
func (w *Writer) Stats() (chunks int, bytes int64) {
	w.mu.Lock()
	chunks = len(w.blobs.list)
	w.mu.Unlock()
	w.out.Lock()
	defer w.out.Unlock()
	return chunks, w.off
}

// Finish waits for the workers, writes the footer and makes the file durable.
// The directory is the caller's to sync, after it has moved the file to its
// name. Without any chunk there is no file, and Info is empty. On an error
// Abort is still to be called.
func (w *Writer) Finish() (Info, error) {
	if err := w.end(); err != nil {
		return Info{}, err
	}
	if w.f == nil {
		return Info{}, nil
	}
	if err := failpoint.Hit("store.pack.before-footer"); err != nil {
		return Info{}, err
	}
	w.mu.Lock()
	w.blobs.sort()
	blobs := w.blobs.list
	w.mu.Unlock()
	sum, n, err := writeFooter(w.w, blobs)
	if err != nil {
		return Info{}, err
	}
	if err := w.w.Flush(); err != nil {
		return Info{}, err
	}
	if err := failpoint.Hit("store.pack.before-fsync"); err != nil {
		return Info{}, err
	}
	if err := w.f.Sync(); err != nil {
		return Info{}, err
	}
	if err := failpoint.Hit("store.pack.after-fsync"); err != nil {
		return Info{}, err
	}
	name := w.f.Name()
	if err := w.f.Close(); err != nil {
		return Info{}, err
	}
	return Info{Temp: name, Name: sum, Bytes: w.off + n, Blobs: blobs}, nil
}

// end stops the workers.
func (w *Writer) end() error {
	w.mu.Lock()
	if w.ended {
		w.mu.Unlock()
		return fmt.Errorf("the pack has ended: %w", fault.ErrState)
	}
	w.ended = true
	queue := w.queue
	w.mu.Unlock()
	if queue != nil {
		w.adding.Wait()
		close(queue)
		w.work.Wait()
		_ = w.enc.Close() // it holds no stream
	}
	return w.err
}

// Abort removes the file, if it still lies under its temporary name. It may be
// called at any time, also after Finish, and again.
func (w *Writer) Abort() error {
	_ = w.end()
	if w.f == nil {
		return nil
	}
	_ = w.f.Close() // what was written to it does not matter any more
	if err := os.Remove(w.f.Name()); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return nil
}

// newEncoder returns an encoder of frames as they lie in packs. The IDs prove
// the chunks: no checksum of zstd's own.
func newEncoder(level zstd.EncoderLevel, workers int) (*zstd.Encoder, error) {
	return zstd.NewWriter(nil, zstd.WithEncoderLevel(level), zstd.WithEncoderConcurrency(workers),
		zstd.WithEncoderCRC(false),
		zstd.WithSingleSegment(true), zstd.WithLowerEncoderMem(true))
}

// compress makes the frame of a chunk, in room if it is enough, and reports whether to store it
// in place of the chunk: a gain of less than a sixteenth is not worth the time of every
// reader.
func compress(enc *zstd.Encoder, raw, room []byte) (frame []byte, packed bool) {
	frame = enc.EncodeAll(raw, room[:0])
	frame = binary.LittleEndian.AppendUint32(frame, crc32.Checksum(frame, castagnoli))
	return frame, len(frame) <= len(raw)-len(raw)/16 && len(frame) < len(raw)
}

// writeFooter writes the end of a pack. It returns the pack's name and how many
// bytes it wrote.
func writeFooter(w io.Writer, blobs []Blob) (name string, n int64, err error) {
	h := blake3.New()
	footer := io.MultiWriter(w, h)
	var rec [recordLen]byte
	for i := range blobs {
		b := &blobs[i]
		copy(rec[:], b.ID[:])
		binary.LittleEndian.PutUint32(rec[32:], b.Stored)
		binary.LittleEndian.PutUint32(rec[36:], b.Raw)
		rec[40] = 0
		if b.Packed {
			rec[40] = 1
		}
		if _, err := footer.Write(rec[:]); err != nil {
			return "", 0, err
		}
	}
	if _, err := footer.Write(binary.LittleEndian.AppendUint64(nil, uint64(len(blobs)))); err != nil {
		return "", 0, err
	}
	sum := h.Sum(nil)
	_, err = w.Write(append(sum[:len(sum):len(sum)], tailMagic...))
	return hex.EncodeToString(sum), int64(len(blobs))*recordLen + tailLen, err
}

// Path returns where below dir the pack of this name lies: in one of 256
// directories, so that none grows large.
func Path(dir, name string) string { return filepath.Join(dir, name[:2], name) }
