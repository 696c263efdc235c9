package overlay

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/guard"
)

// treeDir is a directory with its place in the tree.
type treeDir struct {
	*dirFD
	path  string
	depth int
	still bool // its files need not be looked at
}

const (
	collectItems = 64
	collectBytes = 256 << 10
)

// collectBatch is a run of entries that one worker looks at.
type collectBatch struct {
	items []listed
	buf   []byte   // records and names of the items
	dirs  []*dirFD // held for the items
	done  chan struct{}

	// plain: every item is as its record says and has one name only, so that
	// buf is what is to be written, and sum what it counts.
	plain bool
	sum   Summary
}

type outcome int

const (
	stateListed outcome = iota // not looked at yet
	stateSame                  // as its record says
	stateFound                 // found holds it
	stateHole                  // left out
	stateGone                  // only its record is there; of a knownPlan
)

// listed is one entry on its way.
type listed struct {
	dir      *treeDir // that holds it; for a directory the directory itself
	isDir    bool
	state    outcome
	at, end  int   // of the name in batch.buf; a NUL follows
	rec, lim int   // of the record in batch.buf; equal: there is none
	pos      int64 // of the record in the cache
	found    *reading
	err      error
}

// reading is what was read of an entry.
type reading struct {
	key   inodeKey
	flags byte
	entry Entry
	fixed bool
}

func (b *collectBatch) record(it *listed) cacheRecord {
	if it.rec == it.lim {
		return nil
	}
	return cacheRecord(b.buf[it.rec:it.lim])
}

func (it *listed) name(b *collectBatch) string { return string(b.buf[it.at:it.end]) }

func (it *listed) path(b *collectBatch) string {
	if it.isDir {
		return it.dir.path
	}
	return joinPath(it.dir.path, it.name(b))
}

func (it *listed) depth() int {
	if it.isDir {
		return it.dir.depth
	}
	return it.dir.depth + 1
}

func (it *listed) key(b *collectBatch) *inodeKey {
	if it.state == stateFound {
		return &it.found.key
	}
	if rec := b.record(it); rec != nil {
		return rec.key()
	}
	return &inodeKey{}
}

func (b *collectBatch) release() {
	for _, d := range b.dirs {
		d.release()
	}
	b.dirs = b.dirs[:0]
}

// listing is a directory whose names are being handed out.
type listing struct {
	dir *treeDir
	// recorded: it has not changed, its names are those in the cache.
	recorded bool
	inCache  bool // the cache has it as a directory
	names    []dirent
}

// lister goes through directories and file cache side by side. Both are in the
// same order; the cache stands at what comes next in the innermost directory
// that it has.
type lister struct {
	c       *collector
	ctx     context.Context
	ordered chan<- *collectBatch
	work    chan<- *collectBatch
	cache   *recordReader      // nil: nothing
	differs bool               // something in the cache is gone; read once ordered is closed
	free    chan *collectBatch // that can be used again
	b       *collectBatch
	stack   []listing
	buf     []byte
}

var errEnded = errors.New("ended")

// list takes over the reference to root. A failure becomes the error of an item,
// so that it reaches the consumer in its place.
func (l *lister) list(root *treeDir) {
	l.b = l.fresh()
	l.buf = make([]byte, 64<<10)
	err := guard.Do(func() error { return l.all(root) })
	for _, f := range l.stack {
		f.dir.release()
	}
	if err == errEnded {
		return
	}
	if err != nil {
		l.b.items = append(l.b.items, listed{state: stateHole, err: err})
		l.b.plain = false
	}
	if len(l.b.items) > 0 {
		_ = l.send()
	}
}

func (l *lister) all(root *treeDir) error {
	if err := l.advance(); err != nil {
		root.release()
		return err
	}
	var rec cacheRecord
	if l.cache != nil {
		rec = l.cache.cur
	}
	if err := l.enter(root, rec); err != nil {
		return err
	}
	for len(l.stack) > 0 {
		f := &l.stack[len(l.stack)-1]
		d, rec, err := l.step(f)
		if err != nil {
			return err
		}
		if d.name == "" && rec == nil {
			f.dir.release()
			l.stack = l.stack[:len(l.stack)-1]
			continue
		}
		if err := l.handle(f, d, rec); err != nil {
			return err
		}
	}
	if l.cache != nil && l.cache.cur != nil {
		return errCache // it has something outside of "."
	}
	return nil
}

// advance moves on in the cache.
func (l *lister) advance() error {
	if l.cache == nil {
		return nil
	}
	if err := l.cache.next(); err != nil {
		return fmt.Errorf("%w: %w", errCache, err)
	}
	return nil
}

// pass moves on past the record that stands next and all below it.
func (l *lister) pass(depth int) error {
	for {
		if err := l.advance(); err != nil {
			return err
		}
		if rec := l.cache.cur; rec == nil || rec.depth() <= depth {
			return nil
		} else if err := l.gone(rec); err != nil {
			return err
		}
	}
}

// gone notes that what a record is of is not there.
func (l *lister) gone(rec cacheRecord) error {
	if rec.flags()&flagHole != 0 {
		return nil
	}
	l.differs = true
	if l.c.opts.plan != nil {
		it := listed{state: stateGone}
		l.place(&it, "", rec)
		l.b.plain = false
		return l.push(it)
	}
	return l.c.opts.witness.gone(rec)
}

// step returns what comes next in f: a name of the listing, a record, or both;
// of a directory that has not changed the record alone. Neither: f is done.
func (l *lister) step(f *listing) (dirent, cacheRecord, error) {
	for {
		var rec cacheRecord
		if f.inCache && l.cache.cur != nil && l.cache.cur.depth() == f.dir.depth+1 {
			rec = l.cache.cur
		}
		if f.recorded {
			return dirent{}, rec, nil
		}
		order := 0
		switch {
		case rec == nil && len(f.names) == 0:
			return dirent{}, nil, nil
		case rec == nil:
			order = -1
		case len(f.names) == 0:
			order = 1
		default:
			order = strings.Compare(f.names[0].name, string(rec.name()))
		}
		if order <= 0 {
			d := f.names[0]
			f.names = f.names[1:]
			if order < 0 {
				rec = nil
			}
			return d, rec, nil
		}
		if err := l.gone(rec); err != nil {
			return dirent{}, nil, err
		}
		if err := l.pass(rec.depth()); err != nil {
			return dirent{}, nil, err
		}
	}
}

// handle hands out one entry of f. rec is where the cache stands, or nil.
func (l *lister) handle(f *listing, d dirent, rec cacheRecord) error {
	if l.c.out == nil && f.dir.still && !rec.key().isDir() && rec.key().links() < 2 &&
		rec.flags()&(flagUntrusted|flagHole) == 0 {
		return l.advance() // not requested
	}
	it := listed{dir: f.dir}
	l.place(&it, d.name, rec)
	if rec != nil && d.name == "" {
		d.typ = byte(rec.key().mode() & unix.S_IFMT >> 12) // of a hole it is not known
	}
	depth := f.dir.depth + 1
	if l.c.opts.Skip != nil && l.c.opts.Skip(it.path(l.b)) {
		it.state = stateHole
		return l.leave(it, rec, depth)
	}
	if d.typ == unix.DT_UNKNOWN {
		d.typ = typeOf(f.dir.fd, it.name(l.b))
	}
	if d.typ != unix.DT_DIR {
		return l.leave(it, rec, depth)
	}
	path := it.path(l.b)
	fd, err := openAt(f.dir.fd, it.name(l.b), unix.O_DIRECTORY)
	if err != nil {
		if l.c.opts.Tolerant && passing(err) {
			it.state = stateHole
			return l.leave(it, rec, depth)
		}
		return pathError("open", path, err)
	}
	sub := &treeDir{dirFD: &dirFD{fd: fd}, path: path, depth: depth}
	sub.refs.Store(1)
	it.dir, it.isDir = sub, true
	return l.enterAs(it, rec)
}

// place copies name, or the record that has it, into the batch.
func (l *lister) place(it *listed, name string, rec cacheRecord) {
	b := l.b
	it.rec = len(b.buf)
	b.buf = append(b.buf, rec...)
	it.lim = len(b.buf)
	if rec != nil {
		it.pos = l.cache.at
		it.at = it.rec + recordHead
		it.end = it.at + rec.nameLen()
		return
	}
	it.at = len(b.buf)
	b.buf = append(b.buf, name...)
	it.end = len(b.buf)
	b.buf = append(b.buf, 0)
	b.plain = false
}

// leave adds an item that is not descended into.
func (l *lister) leave(it listed, rec cacheRecord, depth int) error {
	if it.state == stateHole {
		l.b.plain = false
	}
	if err := l.add(it); err != nil || rec == nil {
		return err
	}
	return l.pass(depth)
}

// enter takes over the reference to d.
func (l *lister) enter(d *treeDir, rec cacheRecord) error {
	it := listed{dir: d, isDir: true}
	l.place(&it, ".", rec)
	return l.enterAs(it, rec)
}

// enterAs looks at a directory and lists it. It takes over the reference to it.dir.
func (l *lister) enterAs(it listed, rec cacheRecord) error {
	d, c := it.dir, l.c
	f := listing{dir: d}
	l.stack = append(l.stack, f)
	if err := checkDepth(d.path, len(l.stack)); err != nil {
		return err
	}
	var st unix.Statx_t
	e := Entry{Path: d.path}
	if err := c.scan.origin.statx(d.fd, "", unix.AT_EMPTY_PATH, &st, &e); err != nil {
		return err
	}
	var key inodeKey
	key.set(&st)
	fixed, isFixed := c.opts.Fixed[d.path]
	if c.unchanged(rec, &key) && !isFixed {
		it.state, f.recorded = stateSame, true
		d.still = c.opts.witness.still(d.path)
	} else {
		names, err := readNames(d.fd, d.path, l.buf)
		if err != nil && c.opts.Tolerant && passing(err) { // removed since it was opened
			l.stack = l.stack[:len(l.stack)-1]
			it.state = stateHole
			l.hold(d)
			d.release()
			return l.leave(it, rec, d.depth)
		}
		if err != nil {
			return err
		}
		f.names = names
		it.found = &reading{key: key, entry: e}
		if c.isRacy(key.ctime()) {
			it.found.flags |= flagUntrusted
		}
		if isFixed {
			it.found.entry, it.found.flags, it.found.fixed = fixed, flagUntrusted, true
		}
		l.b.plain = false
	}
	if rec != nil {
		f.inCache = rec.key().isDir() && rec.flags()&flagHole == 0
		if f.inCache {
			if err := l.advance(); err != nil {
				return err
			}
		} else if err := l.pass(d.depth); err != nil {
			return err
		}
	}
	l.stack[len(l.stack)-1] = f
	return l.add(it)
}

// unchanged reports whether an entry may be taken from its record.
func (c *collector) unchanged(rec cacheRecord, key *inodeKey) bool {
	return rec != nil && *rec.key() == *key && rec.flags()&(flagUntrusted|flagHole) == 0 && !c.opts.Paranoid
}

// hold keeps d open for as long as the batch is under way.
func (l *lister) hold(d *treeDir) {
	if n := len(l.b.dirs); n == 0 || l.b.dirs[n-1] != d.dirFD {
		l.b.dirs = append(l.b.dirs, d.hold())
	}
}

func (l *lister) add(it listed) error {
	l.hold(it.dir)
	return l.push(it)
}

func (l *lister) push(it listed) error {
	l.b.items = append(l.b.items, it)
	if len(l.b.items) < collectItems && len(l.b.buf) < collectBytes {
		return nil
	}
	return l.send()
}

func (l *lister) send() error {
	select {
	case l.ordered <- l.b:
	case <-l.ctx.Done():
		l.b.release()
		return errEnded
	}
	l.work <- l.b // workers never wait for anything but work
	l.b = l.fresh()
	return nil
}

func (l *lister) fresh() *collectBatch {
	var b *collectBatch
	select {
	case b = <-l.free:
	default:
		b = &collectBatch{items: make([]listed, 0, collectItems), buf: make([]byte, 0, 24<<10)}
	}
	clear(b.items)
	b.items, b.buf, b.sum, b.plain = b.items[:0], b.buf[:0], Summary{}, true
	if cap(b.buf) > 4*collectBytes {
		b.buf = nil
	}
	b.done = make(chan struct{})
	return b
}
