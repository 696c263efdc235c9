package criu

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"iter"
	"os"
	"path/filepath"

	"github.com/checkpoint-restore/go-criu/v7/crit/images/pagemap"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"github.com/agentbox/agentbox/internal/fault"
)

// parentLink is what CRIU makes in the directory of images that are not whole
// without those of a parent, and follows.
const parentLink = "parent"

// Flatten makes the images of a dump, which has only what changed since a, an
// ordinary dump: with every page, and without a, whose images are removed. It
// returns how many bytes of the dump are of a. What a was to have and has not is
// ErrCorrupt; the images are of no use then.
func (a *Ahead) Flatten(ctx context.Context, imageDir string) (taken int64, err error) {
	names, err := pagemaps(imageDir)
	if err != nil {
		return 0, err
	}
	// Most processes have changed something; page maps of no memory are left alone.
	of, partial := map[uint32]string{}, map[string]uint32{}
	for _, name := range names {
		parts := false
		id, err := readPages(filepath.Join(imageDir, name), func(_ []byte, e pageEntry) error {
			parts = parts || e.inParent
			return nil
		})
		if err != nil {
			return 0, err
		}
		if other, shared := of[id]; shared {
			return 0, fmt.Errorf("images %s and %s are of the same pages: %w", name, other, fault.ErrCorrupt)
		}
		if of[id] = name; parts {
			partial[name] = id
		}
	}
	for name, id := range partial {
		if err := ctx.Err(); err != nil {
			return taken, err
		}
		n, err := flatten(imageDir, a.Dir, name, id)
		if taken += n; err != nil {
			return taken, err
		}
	}
	if err := os.Remove(filepath.Join(imageDir, parentLink)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return taken, err
	}
	return taken, errors.Join(os.RemoveAll(a.Dir), CheckImages(imageDir))
}

// pagemaps lists the page maps in a directory.
func pagemaps(dir string) (names []string, err error) {
	list, err := os.ReadDir(dir)
	for _, e := range list {
		if pagemapName.MatchString(e.Name()) {
			names = append(names, e.Name())
		}
	}
	return names, err
}

// pageEntry is an entry of a page map.
type pageEntry struct {
	at, pages uint64 // address of the first
	present   bool   // in the page image
	inParent  bool
	long      bool // it has a count of 64 bits
	flagged   bool
	rest      []byte // fields that are not known here
}

// Numbers of the fields of a page map entry.
const (
	fieldAt       = 1
	fieldPages    = 2 // 0 where there is fieldLong
	fieldInParent = 3
	fieldFlags    = 4
	fieldLong     = 5
)

// parsePages decodes a page map entry. It does so by hand, because go-criu's type
// lacks the 64-bit count that CRIU 4.2 writes, and a large process has millions of
// entries.
func parsePages(data []byte) (e pageEntry, err error) {
	var v [6]uint64
	var has [6]bool
	for len(data) > 0 {
		num, typ, n := protowire.ConsumeTag(data)
		if n < 0 {
			return e, protowire.ParseError(n)
		}
		if typ != protowire.VarintType || int(num) >= len(v) {
			m := protowire.ConsumeFieldValue(num, typ, data[n:])
			if m < 0 {
				return e, protowire.ParseError(m)
			}
			e.rest = append(e.rest, data[:n+m]...)
			data = data[n+m:]
			continue
		}
		data = data[n:]
		if v[num], n = protowire.ConsumeVarint(data); n < 0 {
			return e, protowire.ParseError(n)
		}
		has[num] = true
		data = data[n:]
	}
	e.at, e.pages, e.long, e.flagged = v[fieldAt], v[fieldPages], has[fieldLong], has[fieldFlags]
	if e.long {
		e.pages = v[fieldLong]
	}
	e.inParent = v[fieldFlags]&pageInParent != 0 || v[fieldInParent] != 0
	// Without flags it is as older versions of CRIU mean it.
	e.present = !e.inParent && (v[fieldFlags]&pagePresent != 0 || !e.flagged)
	if (e.present || e.inParent) && e.pages > 1<<50/pageSize {
		return e, fmt.Errorf("%d pages in a row", e.pages)
	}
	return e, nil
}

// end is the address after the last page.
func (e pageEntry) end() uint64 { return e.at + e.pages*pageSize }

// encode writes an entry of present pages.
func (e pageEntry) encode() []byte {
	var b []byte
	field := func(num protowire.Number, v uint64) {
		b = protowire.AppendVarint(protowire.AppendTag(b, num, protowire.VarintType), v)
	}
	field(fieldAt, e.at)
	if e.long {
		field(fieldPages, 0)
	} else {
		field(fieldPages, e.pages)
	}
	if e.flagged {
		field(fieldFlags, pagePresent)
	}
	if e.long {
		field(fieldLong, e.pages)
	}
	return append(b, e.rest...)
}

// flatten makes one page map, and its page image, whole. The page image of the
// parent is removed: at most one is there twice.
func flatten(dir, parentDir, name string, id uint32) (taken int64, err error) {
	bad := func(format string, args ...any) error {
		return fmt.Errorf("image %s: %w: %w", name, fmt.Errorf(format, args...), fault.ErrCorrupt)
	}
	path := filepath.Join(dir, name)
	pages := fmt.Sprintf("pages-%d.img", id)
	own, err := os.Open(filepath.Join(dir, pages))
	if err != nil {
		return 0, err
	}
	defer own.Close()
	parent, err := openParent(parentDir, name)
	if err != nil {
		return 0, err
	}
	defer parent.close()
	out, err := newPageWriter(path, filepath.Join(dir, pages), id)
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, out.discard()) }()

	var offset, last uint64
	_, err = readPages(path, func(data []byte, e pageEntry) error {
		if e.at < last || e.end() < e.at || e.at%pageSize != 0 {
			return bad("its entries are in no order")
		}
		last = e.at
		switch {
		case e.present:
			size := e.pages * pageSize
			if err := errors.Join(out.entry(data), out.pages(own, offset, size)); err != nil {
				return err
			}
			offset += size
			return nil
		case !e.inParent:
			return out.entry(data)
		}
		for at := e.at; at < e.end(); {
			from, n, err := parent.find(at)
			if err != nil {
				return err
			}
			if n == 0 {
				return bad("the page at %#x is in no image", at)
			}
			piece := e
			piece.at, piece.pages = at, min(n, (e.end()-at)/pageSize)
			size := piece.pages * pageSize
			if err := errors.Join(out.entry(piece.encode()), out.pages(parent.data, from, size)); err != nil {
				return err
			}
			taken += int64(size)
			at = piece.end()
		}
		return nil
	})
	if err != nil {
		return 0, err
	}
	return taken, errors.Join(out.publish(), os.Remove(parent.data.Name()))
}

// readPages calls fn with each entry of a page map, as it is and decoded, and
// returns the number of its page image.
func readPages(path string, fn func(data []byte, e pageEntry) error) (id uint32, err error) {
	first := true
	err = readImage(path, magicPagemap, maxPagemap, func(data []byte) error {
		if first {
			first = false
			var head pagemap.PagemapHead
			err := proto.Unmarshal(data, &head)
			id = head.GetPagesId()
			return err
		}
		e, err := parsePages(data)
		if err != nil {
			return err
		}
		return fn(data, e)
	})
	return id, err
}

// parentPages finds pages in the images of a parent, in the order of their addresses.
type parentPages struct {
	name    string
	data    *os.File // its page image
	next    func() (pageEntry, error, bool)
	stop    func()
	now     pageEntry
	offset  uint64 // of now, in data
	ordered uint64
}

func openParent(dir, name string) (*parentPages, error) {
	path := filepath.Join(dir, name)
	id, err := readPages(path, func([]byte, pageEntry) error { return nil })
	if err != nil {
		return nil, fmt.Errorf("written ahead: %w", err)
	}
	data, err := os.Open(filepath.Join(dir, fmt.Sprintf("pages-%d.img", id)))
	if errors.Is(err, fs.ErrNotExist) {
		err = fmt.Errorf("image %s written ahead has no pages: %w", name, fault.ErrCorrupt)
	}
	if err != nil {
		return nil, err
	}
	p := &parentPages{name: name, data: data}
	stop := errors.New("stop")
	p.next, p.stop = iter.Pull2(func(yield func(pageEntry, error) bool) {
		_, err := readPages(path, func(_ []byte, e pageEntry) error {
			if !yield(e, nil) {
				return stop
			}
			return nil
		})
		if err != nil && !errors.Is(err, stop) {
			yield(pageEntry{}, err)
		}
	})
	return p, nil
}

// find returns where in the page image the page at an address is, and how many
// follow each other from there; 0: it is not there. Addresses only grow.
func (p *parentPages) find(at uint64) (offset, pages uint64, err error) {
	for p.now.pages == 0 || at >= p.now.end() {
		if p.now.present {
			p.offset += p.now.pages * pageSize
		}
		e, err, ok := p.next()
		if err != nil || !ok {
			return 0, 0, err
		}
		if e.at < p.ordered || e.end() < e.at || e.at%pageSize != 0 {
			return 0, 0, fmt.Errorf("image %s written ahead: its entries are in no order: %w", p.name, fault.ErrCorrupt)
		}
		p.now, p.ordered = e, e.end()
	}
	if at < p.now.at || !p.now.present {
		return 0, 0, nil
	}
	return p.offset + (at - p.now.at), (p.now.end() - at) / pageSize, nil
}

func (p *parentPages) close() {
	p.stop()
	_ = p.data.Close()
}

// pageWriter writes a page map and its page image, which then take the place of
// those that are there.
type pageWriter struct {
	path, data string
	mapFile    *os.File
	dataFile   *os.File
	entries    *bufio.Writer
	src        *os.File // of what is still to be copied
	from, size uint64
}

const newSuffix = ".new"

func newPageWriter(path, data string, id uint32) (*pageWriter, error) {
	w := &pageWriter{path: path, data: data}
	var err error
	if w.mapFile, err = os.OpenFile(path+newSuffix, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600); err != nil {
		return nil, err
	}
	if w.dataFile, err = os.OpenFile(data+newSuffix, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600); err != nil {
		return nil, errors.Join(err, w.discard())
	}
	w.entries = bufio.NewWriter(w.mapFile)
	head, err := proto.Marshal(&pagemap.PagemapHead{PagesId: &id})
	if err != nil {
		return nil, errors.Join(err, w.discard())
	}
	var magic []byte
	for _, word := range []uint32{magicCommon, magicPagemap} {
		magic = binary.LittleEndian.AppendUint32(magic, word)
	}
	_, _ = w.entries.Write(magic) // an error stays with the writer
	return w, w.entry(head)
}

func (w *pageWriter) entry(data []byte) error {
	_, _ = w.entries.Write(binary.LittleEndian.AppendUint32(nil, uint32(len(data))))
	_, err := w.entries.Write(data)
	return err
}

// pages copies pages. Those that follow each other are copied at once.
func (w *pageWriter) pages(src *os.File, from, size uint64) error {
	if w.src == src && w.from+w.size == from {
		w.size += size
		return nil
	}
	err := w.flush()
	w.src, w.from, w.size = src, from, size
	return err
}

func (w *pageWriter) flush() error {
	if w.size == 0 {
		return nil
	}
	_, err := w.src.Seek(int64(w.from), io.SeekStart)
	if err == nil {
		_, err = io.CopyN(w.dataFile, w.src, int64(w.size)) // by the kernel, or not at all where it shares
	}
	if errors.Is(err, io.EOF) {
		err = fmt.Errorf("image %s is shorter than its page map promises: %w", filepath.Base(w.src.Name()), fault.ErrCorrupt)
	}
	w.size = 0
	return err
}

func (w *pageWriter) publish() error {
	err := errors.Join(w.flush(), w.entries.Flush(), w.mapFile.Close(), w.dataFile.Close())
	w.mapFile, w.dataFile = nil, nil
	if err == nil {
		err = errors.Join(os.Rename(w.path+newSuffix, w.path), os.Rename(w.data+newSuffix, w.data))
	}
	return err
}

// discard gives up what was not published.
func (w *pageWriter) discard() error {
	var errs []error
	for _, f := range []*os.File{w.mapFile, w.dataFile} {
		if f != nil {
			errs = append(errs, f.Close(), os.Remove(f.Name()))
		}
	}
	w.mapFile, w.dataFile = nil, nil
	return errors.Join(errs...)
}
