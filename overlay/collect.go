package overlay

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	goruntime "runtime"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/internal/guard"
)

// Sink takes the data of files in. It is called from several goroutines at a
// time.
type Sink interface {
	// Data takes the size bytes that r has and returns their digest and, when they were cut into
	// more than one chunk, the chunks. An error of r is returned as it is (errors.Is). The data
	// before the error belongs to no file.
	Data(ctx context.Context, size int64, r io.Reader) (digest string, chunks []Chunk, err error)
}

// CollectOptions modify Collect.
type CollectOptions struct {
	// Cache is the path of the file cache that an earlier Collect of this directory
	// wrote. An entry of which inode, type, size, mode, owner, links, mtime and ctime
	// are as recorded is not read; it is recorded again as it was. A cache that is
	// missing, damaged, or of another format, filesystem or era is not used.
	Cache string
	// Trust says that Cache was written by this process a moment ago: it is
	// not checked for damage first.
	Trust bool
	// Base is what the caller wants to be told again by CacheBase, e.g. the
	// id of the checkpoint that has all chunks of the recorded files. At most 4096 bytes.
	Base string
	// Tolerant is for a directory in use: what vanishes or changes while it is
	// read is left out, or recorded as not to be trusted, instead of failing. A
	// file that was cut again and again while it was read is recorded without a
	// digest. The next Collect, of the directory at rest, reads all such entries.
	Tolerant bool
	// Paranoid reads every file, whatever the cache has.
	Paranoid bool

	// Below is for a directory that an overlay is laid over: it is collected as the overlay
	// has it, without what is mounted on directories in it, and it is never to be restored in
	// place, so that immutable files in it are as good as others.
	Below bool

	// Skip leaves an entry, and all below it, out, as CaptureOptions.Skip. It
	// is called from another goroutine, one call at a time.
	Skip func(path string) bool
	// Fixed are directories that are recorded so, whatever has become of them
	// since, as CaptureOptions.Fixed.
	Fixed map[string]Entry

	witness *witness    // of Update.Check
	plan    *cachedPlan // of PlanUpdateCached
}

// Collected tells what a Collect did.
type Collected struct {
	Summary         // of all entries; Archive is 0
	Read      int64 // files whose data was read
	ReadBytes int64
	// Same: a cache was used, every entry is as the cache has it, and none is
	// gone. A file that was written anew as it was is the same.
	Same bool
}

// errCache: Cache turned out to be damaged in the middle.
var errCache = errors.New("the file cache is damaged")

// Collect walks dir, passes the data of every file that is not in the cache to sink (nil: it is only
// hashed), and writes its findings, with what is needed to recognize each entry later, to the new
// file out, which Collection reads. On error out does not exist.
//
// The entries are those of Walk with digests, and with Chunks as sink returned them; what cannot
// be carried whole is refused as Capture refuses it. The kernel's change time vouches for entries
// that are not read again. It proves nothing where a change follows a look within one tick of the
// kernel's clock, nor where a process writes through a mapping that it has already written
// through. Entries that changed just before Collect began, and files that are open for writing,
// are therefore recorded as untrusted and read the next time.
//
// Memory use depends on the longest directory and on the number of inodes with several names, not
// on the number of entries.
func Collect(ctx context.Context, dir, out string, sink Sink, opts CollectOptions) (Collected, error) {
	got, err := collect(ctx, dir, out, sink, opts)
	if errors.Is(err, errCache) {
		opts.Cache = ""
		got, err = collect(ctx, dir, out, sink, opts)
	}
	if err != nil {
		return Collected{}, fmt.Errorf("collect %s: %w", dir, err)
	}
	return got, nil
}

func collect(ctx context.Context, dir, out string, sink Sink, opts CollectOptions) (got Collected, err error) {
	if len(opts.Base) > maxBase {
		return got, fmt.Errorf("base of %d bytes, at most %d are possible: %w", len(opts.Base),
			maxBase, fault.ErrInvalid)
	}
	if err := checkPrivilege(); err != nil {
		return got, err
	}
	c := &collector{sink: sink, opts: opts, links: make(map[uint64]*linked)}
	if err := c.begin(); err != nil {
		return got, err
	}
	c.scan.below = opts.Below
	root, err := c.scan.open(dir)
	if err != nil {
		return got, err
	}
	cache := c.openCache()
	if cache != nil {
		defer cache.close()
	}
	if out == "" {
		if cache == nil {
			root.release()
			return got, errCache
		}
		err := c.run(ctx, &treeDir{dirFD: root, path: ".", depth: 0}, cache)
		return Collected{Summary: c.sum, Read: c.read.Load(), ReadBytes: c.readBytes.Load()}, err
	}
	f, err := os.OpenFile(out, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		root.release()
		return got, fmt.Errorf("file cache: %w", err)
	}
	defer func() {
		if err = errors.Join(err, f.Close()); err != nil {
			_ = os.Remove(out)
		}
	}()
	c.out = newCacheWriter(f, c.scan.origin.major, c.scan.origin.minor)
	if err := c.run(ctx, &treeDir{dirFD: root, path: ".", depth: 0}, cache); err != nil {
		return got, err
	}
	if err := c.out.finish(opts.Base); err != nil {
		return got, err
	}
	return Collected{
		Summary: c.sum, Read: c.read.Load(), ReadBytes: c.readBytes.Load(), Same: cache != nil && !c.differs,
	}, nil
}

// collector is one Collect. A lister goes through directories and file cache side by
// side (collectlist.go), workers look at inodes and read what is not cached
// (collectread.go), and the caller's goroutine writes all of it in order.
type collector struct {
	scan scan // what is shared with Capture and Walk: origin, readers of directories and specials
	sink Sink
	opts CollectOptions
	out  *cacheWriter // nil: what is found goes to opts.plan or opts.witness only
	line []byte       // the last record that went nowhere else
	sum  Summary

	racy    Time // a change time from here on is not to be trusted
	racySec int64

	differs   bool // from Cache; the lister has its own
	read      atomic.Int64
	readBytes atomic.Int64

	mu    sync.Mutex
	links map[uint64]*linked // inodes with several names
}

// linked is an inode of which not all names have been seen.
type linked struct {
	ctime Time
	mode  uint32
	first string // path of the first name; empty before it was seen
	left  uint32 // names not seen

	// The worker that comes to it first reads it; the first name may be another's.
	claimed bool
	done    chan struct{} // closed once found is there
	found   *reading
	err     error
}

// begin notes the time. A change from now on gets a change time of at least the kernel's coarse
// clock; one granule is for clocks read on another processor.
func (c *collector) begin() error {
	var now, granule unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_REALTIME_COARSE, &now); err != nil {
		return fmt.Errorf("clock: %w", err)
	}
	if err := unix.ClockGetres(unix.CLOCK_REALTIME_COARSE, &granule); err != nil {
		return fmt.Errorf("clock: %w", err)
	}
	c.racySec = now.Sec - 1
	c.racy = Time{now.Sec - granule.Sec, now.Nsec - granule.Nsec}
	if c.racy.Nsec < 0 {
		c.racy.Sec, c.racy.Nsec = c.racy.Sec-1, c.racy.Nsec+1e9
	}
	return nil
}

// isRacy reports whether an inode could change once more without a new change time.
func (c *collector) isRacy(t Time) bool {
	if t.Nsec == 0 { // perhaps a filesystem that keeps whole seconds
		return t.Sec >= c.racySec
	}
	return t.Sec > c.racy.Sec || t.Sec == c.racy.Sec && t.Nsec >= c.racy.Nsec
}

// openCache opens the file cache; nil: there is none to use.
func (c *collector) openCache() *fileCache {
	if c.opts.Cache == "" {
		return nil
	}
	m, err := openCache(c.opts.Cache)
	if err != nil {
		return nil
	}
	at := &c.scan.origin
	if m.major != at.major || m.minor != at.minor || m.era != eraOf(at.major, at.minor) ||
		!c.opts.Trust && m.verify() != nil {
		m.close()
		return nil
	}
	return m
}

// run takes over the reference to root.
func (c *collector) run(ctx context.Context, root *treeDir, cache *fileCache) (err error) {
	workers := min(max(goruntime.GOMAXPROCS(0), 2), 8)
	ordered := make(chan *collectBatch, 4*workers)
	work := make(chan *collectBatch, 4*workers)
	ctx, cancel := context.WithCancel(ctx)
	var wg guard.WaitGroup
	defer wg.Wait()
	l := &lister{c: c, ctx: ctx, ordered: ordered, work: work, free: make(chan *collectBatch, cap(ordered))}
	if cache != nil {
		l.cache = cache.reader()
	}
	wg.Go(func() {
		defer close(ordered)
		defer close(work)
		l.list(root)
	})
	for range workers {
		wg.Go(func() {
			r := newReaderOf(c)
			for b := range work {
				if err := guard.Do(func() error { r.batch(ctx, b); return nil }); err != nil {
					b.items[0].err, b.plain = err, false // there is one: nothing panics over none
				}
				close(b.done)
			}
		})
	}
	// However the loop below ends early, the lister sees the context, and the directories of
	// batches under way are closed.
	defer func() {
		cancel()
		for b := range ordered {
			<-b.done
			b.release()
		}
	}()
	late := newReaderOf(c)
	for b := range ordered {
		<-b.done
		err := ctx.Err()
		if err == nil {
			err = c.write(ctx, b, late)
		}
		b.release()
		if err != nil {
			return err
		}
		select {
		case l.free <- b:
		default:
		}
	}
	c.differs = c.differs || l.differs
	return ctx.Err()
}

// write puts a batch into the file cache.
func (c *collector) write(ctx context.Context, b *collectBatch, late *reader) error {
	if b.plain {
		c.sum.Entries += b.sum.Entries
		c.sum.Files += b.sum.Files
		c.sum.Data += b.sum.Data
		if c.opts.plan != nil {
			return c.opts.plan.passed(b)
		}
		return c.copied(b.buf, len(b.items))
	}
	for i := range b.items {
		it := &b.items[i]
		if it.err != nil {
			return it.err
		}
		if err := c.item(ctx, b, it, late); err != nil {
			return err
		}
	}
	return nil
}

func (c *collector) item(ctx context.Context, b *collectBatch, it *listed, late *reader) error {
	rec, key := b.record(it), it.key(b)
	if it.state == stateGone {
		return c.opts.plan.pair(rec, nil)
	}
	if it.state != stateHole && key.links() > 1 && !key.isDir() {
		path := it.path(b)
		if first := c.joinLinks(key, path); first != "" {
			e := Entry{Path: path, Type: typeOfKey(key), Hardlink: first}
			flags := byte(0)
			if it.state == stateFound {
				flags = it.found.flags
			}
			return c.emit(b, it, flags, key, &e)
		}
		if err := c.firstName(ctx, b, it, late); err != nil {
			return err
		}
		key = it.key(b)
	}
	switch it.state {
	case stateSame:
		rec.count(&c.sum)
		if c.opts.plan != nil {
			return c.opts.plan.same(rec)
		}
		return c.copied(rec, 1)
	case stateHole:
		if c.out == nil {
			return errCache // nothing was to be left out
		}
		if rec == nil || rec.flags()&flagHole == 0 {
			c.differs = true
		}
		_, err := c.out.entry(flagHole|flagUntrusted, it.depth(), &inodeKey{}, it.name(b), nil)
		return err
	}
	return c.emit(b, it, it.found.flags, key, &it.found.entry)
}

// copied writes n records as they are.
func (c *collector) copied(p []byte, n int) error {
	if c.out == nil {
		return nil
	}
	return c.out.records(p, n)
}

// firstName makes it the entry of its inode: from the record, from what a worker
// found under this name or another, or by reading now.
func (c *collector) firstName(ctx context.Context, b *collectBatch, it *listed, late *reader) error {
	if it.state == stateSame && b.record(it).flags()&flagFurther == 0 {
		return nil
	}
	// The record of a name that was a further one says no more than that.
	key, path := *it.key(b), it.path(b)
	own, mine := c.claim(&key, true)
	if mine {
		own.found, own.err = late.patiently(ctx, it.dir.fd, it.name(b), path, b.record(it))
		close(own.done)
	}
	<-own.done
	switch {
	case own.err != nil:
		return own.err
	case own.found == nil: // gone in the meantime; another name may be the first
		it.state = stateHole
		c.mu.Lock()
		delete(c.links, key.ino())
		c.mu.Unlock()
	default:
		copied := *own.found
		copied.entry.Path = path
		it.found, it.state = &copied, stateFound
	}
	return nil
}

// joinLinks counts a name of an inode with several, and returns the path of the
// first, or nothing when this is the first.
func (c *collector) joinLinks(key *inodeKey, path string) (first string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	ino := key.ino()
	n := c.links[ino]
	if n != nil && n.first != "" && (n.ctime != key.ctime() || n.mode != key.mode()) {
		n = nil // in a directory in use: the number was given to another file
	}
	switch {
	case n == nil:
		c.links[ino] = &linked{ctime: key.ctime(), mode: key.mode(), first: path, left: key.links() - 1}
		return ""
	case n.first == "":
		n.first, n.left = path, key.links()-1
		n.ctime, n.mode = key.ctime(), key.mode()
		return ""
	}
	first = n.first
	if n.left--; n.left == 0 {
		delete(c.links, ino)
	}
	return first
}

// emit writes the record of an entry that is not copied.
func (c *collector) emit(b *collectBatch, it *listed, flags byte, key *inodeKey, e *Entry) error {
	was := b.record(it)
	if c.opts.plan != nil {
		return c.opts.plan.pair(was, e)
	}
	var rec cacheRecord
	if c.out != nil {
		var err error
		if rec, err = c.out.entry(flags, it.depth(), key, it.name(b), e); err != nil {
			return err
		}
	} else {
		c.line = appendRecord(c.line[:0], flags, it.depth(), key, it.name(b), e)
		rec = c.line
		c.opts.witness.rekeyed(it.pos, rec)
	}
	rec.count(&c.sum)
	if !c.differs {
		c.differs = was == nil || !sameLine(was.line(), rec.line())
	}
	if was == nil || !bytes.Equal(was.line(), rec.line()) {
		c.opts.witness.saw(e.Path, rec.line())
	}
	return nil
}

// sameLine reports whether the JSON of two entries is equal, apart from chunks.
func sameLine(a, b []byte) bool {
	if string(a) == string(b) {
		return true
	}
	x, err := ParseEntry(a)
	if err != nil {
		return false
	}
	y, err := ParseEntry(b)
	if err != nil {
		return false
	}
	x.Chunks, y.Chunks = nil, nil
	return string(x.AppendJSON(nil)) == string(y.AppendJSON(nil))
}
