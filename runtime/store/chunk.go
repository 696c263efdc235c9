package store

import (
	"container/list"
	"context"
	"errors"
	"fmt"
	"os"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/internal/guard"
	"github.com/agentbox/agentbox/overlay"
	"github.com/agentbox/agentbox/runtime/store/pack"
)

const (
	maxOpenPacks = 64
	maxDecoded   = 64 << 20 // bytes of decoded chunks that are kept
	decodedCost  = 400      // bytes that each takes beside its data: those of a million tiny files are many
)

// chunks reads chunks through the index. It is safe for concurrent use. Packs
// stay open and decoded chunks stay at hand, the ones used last of each.
type chunks struct {
	x *index

	// own are the chunks of packs that are not in the index yet.
	own map[pack.ID]ownPlace

	mu      sync.Mutex
	places  map[pack.ID]place // see foresee
	files   map[string]*packFile
	opened  list.List // of *packFile, used last in front
	decoded map[pack.ID]*list.Element
	recent  list.List // of *decoded, used last in front
	bytes   int64
}

type ownPlace struct {
	path string
	blob pack.Blob
}

type packFile struct {
	path string
	f    *os.File
	uses int
	at   *list.Element // nil: to be closed by its last user
}

type decoded struct {
	id    pack.ID
	ready chan struct{}
	data  []byte // never changed
	err   error
}

func newChunks(x *index) *chunks {
	return &chunks{x: x, files: map[string]*packFile{}, decoded: map[pack.ID]*list.Element{}}
}

// read returns a chunk, proven. It returns ErrCorrupt for a chunk that is missing or
// damaged. Callers must not change the returned slice.
func (p *chunks) read(ctx context.Context, id pack.ID) ([]byte, error) {
	for {
		if err := ctx.Err(); err != nil {
			return nil, context.Cause(ctx)
		}
		p.mu.Lock()
		if e := p.decoded[id]; e != nil {
			p.recent.MoveToFront(e)
			d := e.Value.(*decoded)
			p.mu.Unlock()
			select {
			case <-d.ready:
			case <-ctx.Done():
				return nil, context.Cause(ctx)
			}
			if d.err != nil && errors.Is(d.err, context.Canceled) && ctx.Err() == nil {
				continue // the first caller gave up
			}
			return d.data, d.err
		}
		d := &decoded{id: id, ready: make(chan struct{})}
		p.decoded[id] = p.recent.PushFront(d)
		p.mu.Unlock()
		d.err = guard.Do(func() (err error) { // others wait for it
			d.data, err = p.load(ctx, id)
			return err
		})
		p.keep(d)
		close(d.ready)
		return d.data, d.err
	}
}

// keep makes room for a chunk that was just loaded, and drops a failure.
func (p *chunks) keep(d *decoded) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if d.err != nil {
		p.recent.Remove(p.decoded[d.id])
		delete(p.decoded, d.id)
		return
	}
	p.bytes += int64(len(d.data)) + decodedCost
	for e := p.recent.Back(); e != nil && p.bytes > maxDecoded; {
		old := e
		e = e.Prev()
		x := old.Value.(*decoded)
		if x == d {
			continue
		}
		select {
		case <-x.ready:
		default: // being loaded, and not counted yet
			continue
		}
		p.bytes -= int64(len(x.data)) + decodedCost
		p.recent.Remove(old)
		delete(p.decoded, x.id)
	}
}

// foresee asks the index at once for what is about to be read in many chunks.
func (p *chunks) foresee(ctx context.Context, segs []pack.Segment) error {
	ids := make([]pack.ID, len(segs))
	for i := range segs {
		ids[i] = segs[i].ID
	}
	places := make(map[pack.ID]place, len(ids))
	err := p.x.s.locateAll(ctx, ids, func(at place) error { places[at.blob.ID] = at; return nil })
	p.mu.Lock()
	defer p.mu.Unlock()
	p.places = places
	return err
}

func (p *chunks) load(ctx context.Context, id pack.ID) ([]byte, error) {
	p.mu.Lock()
	at, ok := p.places[id]
	p.mu.Unlock()
	var err error
	if !ok {
		if at, ok, err = p.x.s.locate(ctx, id); err != nil {
			return nil, err
		}
	}
	whole := false
	if ok {
		if _, whole, err = p.x.pack(ctx, at.pack); err != nil {
			return nil, err
		}
	}
	own, mine := p.own[id]
	switch {
	case mine && !whole:
		return p.loadBlob(own.path, own.blob, nil)
	case !ok:
		return nil, fmt.Errorf("piece %s is in no pack: %w", id, fault.ErrCorrupt)
	}
	return p.loadPlace(ctx, at, nil)
}

// loadPlace reads a chunk from where the index says that it is.
func (p *chunks) loadPlace(ctx context.Context, at place, dst []byte) ([]byte, error) {
	row, _, err := p.x.pack(ctx, at.pack)
	if err != nil {
		return nil, err
	}
	if row.name == "" {
		return nil, fmt.Errorf("piece %s is in a pack that the index does not have: %w", at.blob.ID, fault.ErrCorrupt)
	}
	b, err := p.loadBlob(pack.Path(p.x.s.packsDir(), row.name), at.blob, dst)
	if err != nil {
		return nil, fmt.Errorf("pack %s: %w", row.name, err)
	}
	return b, nil
}

func (p *chunks) loadBlob(path string, b pack.Blob, dst []byte) ([]byte, error) {
	f, err := p.open(path)
	if err != nil {
		return nil, missing("it", err)
	}
	defer p.done(f)
	return pack.ReadBlob(f.f, b, dst)
}

// open returns a pack's file; done gives it back.
func (p *chunks) open(path string) (*packFile, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if f := p.files[path]; f != nil {
		f.uses++
		p.opened.MoveToFront(f.at)
		return f, nil
	}
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if errors.Is(err, unix.ELOOP) {
		return nil, fmt.Errorf("it is a symbolic link: %w", fault.ErrCorrupt)
	}
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: path, Err: err}
	}
	file := os.NewFile(uintptr(fd), path)
	if info, err := file.Stat(); err != nil || !info.Mode().IsRegular() {
		_ = file.Close()
		if err == nil {
			err = fmt.Errorf("it is not a regular file: %w", fault.ErrCorrupt)
		}
		return nil, err
	}
	f := &packFile{path: path, f: file, uses: 1}
	f.at = p.opened.PushFront(f)
	p.files[path] = f
	if p.opened.Len() > maxOpenPacks {
		p.drop(p.opened.Back().Value.(*packFile))
	}
	return f, nil
}

func (p *chunks) done(f *packFile) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if f.uses--; f.uses == 0 && f.at == nil {
		_ = f.f.Close() // it was only read
	}
}

// drop closes a file, at once or by its last user.
func (p *chunks) drop(f *packFile) {
	p.opened.Remove(f.at)
	delete(p.files, f.path)
	if f.at = nil; f.uses == 0 {
		_ = f.f.Close() // it was only read
	}
}

// close lets go of everything. Reads that are under way still end well.
func (p *chunks) close() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, f := range p.files {
		p.drop(f)
	}
	p.decoded, p.bytes = map[pack.ID]*list.Element{}, 0
	p.recent.Init()
}

// segments are whole chunks one after the other.
func segments(list []overlay.Chunk) ([]pack.Segment, error) {
	s := make([]pack.Segment, len(list))
	for i, x := range list {
		id, err := pack.ParseID(x.Digest)
		if err != nil || x.Len <= 0 || x.Len > pack.MaxChunk {
			return nil, fmt.Errorf("piece %.80q of %d bytes: %w", x.Digest, x.Len, fault.ErrCorrupt)
		}
		s[i] = pack.Segment{ID: id, Len: uint32(x.Len)}
	}
	return s, nil
}

// missing turns "no such file" inside the store into what it is.
func missing(name string, err error) error {
	if errors.Is(err, os.ErrNotExist) || errors.Is(err, unix.ENOTDIR) {
		return fmt.Errorf("%s is missing: %w", name, fault.ErrCorrupt)
	}
	return err
}
