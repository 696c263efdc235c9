package portable

import (
	"archive/tar"
	"bufio"
	"encoding/hex"
	"errors"
	"io"
	"os"
	"slices"
	"strings"

	"github.com/zeebo/blake3"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/overlay"
)

const maxEntries = 10_000_000 // of one tree of another engine's

// gathered are the entries of another engine's tar, in the order they came.
// Their data is with the sink already; they themselves lie in a file, and only
// their paths are kept, for sorting.
type gathered struct {
	im    *importer
	spool *os.File
	sink  overlay.Sink

	list  []where
	links []link
}

type where struct {
	path string
	off  int64
	len  int
}

type link struct{ path, to string }

func (g *gathered) read(r io.Reader) error {
	tr := tar.NewReader(r)
	out := bufio.NewWriterSize(g.spool, 64<<10)
	var off int64
	var line []byte
	for {
		h, err := tr.Next()
		if err == io.EOF {
			break
		}
		if err != nil {
			return g.im.fail(err)
		}
		e, err := entryOf(h)
		if err != nil {
			return err
		}
		if len(g.list)+len(g.links) >= maxEntries {
			return corrupt("more than %d entries", maxEntries)
		}
		if e.Hardlink != "" {
			g.links = append(g.links, link{e.Path, e.Hardlink})
			continue
		}
		if err := g.content(&e, tr); err != nil {
			return err
		}
		line = e.AppendJSON(line[:0])
		if _, err := out.Write(line); err != nil {
			return err
		}
		g.list = append(g.list, where{e.Path, off, len(line)})
		off += int64(len(line))
	}
	return out.Flush()
}

// noData is the digest of a file without content, of which no chunk is stored.
var noData = func() string { d := blake3.Sum256(nil); return digestPrefix + hex.EncodeToString(d[:]) }()

func (g *gathered) content(e *overlay.Entry, r io.Reader) error {
	switch {
	case e.Type != overlay.TypeFile:
		return nil
	case e.Size == 0:
		e.Digest = noData
		return nil
	}
	g.im.res.Data += e.Size
	return g.im.content(g.sink, e, e.Size, &tarData{g.im, r})
}

// tarData reads an entry of a tar; that it ends too soon is the archive's fault.
type tarData struct {
	im *importer
	r  io.Reader
}

func (t *tarData) Read(p []byte) (int, error) {
	n, err := t.r.Read(p)
	if err != nil && err != io.EOF && !errors.Is(err, fault.ErrCorrupt) {
		err = t.im.fail(err)
	}
	return n, err
}

// entryOf makes an entry of a header from an untrusted archive.
func entryOf(h *tar.Header) (overlay.Entry, error) {
	name := strings.TrimPrefix(h.Name, "./")
	if name == "" || name == "." || name == "/" && h.Typeflag == tar.TypeDir {
		name = "."
	} else if h.Typeflag == tar.TypeDir {
		name = strings.TrimSuffix(name, "/")
	}
	e := overlay.Entry{
		Path: name, Mode: uint32(h.Mode) & 0o7777, UID: uint32(h.Uid), GID: uint32(h.Gid),
		Mtime: overlay.Time{Sec: h.ModTime.Unix(), Nsec: int64(h.ModTime.Nanosecond())},
	}
	if h.Uid < 0 || h.Gid < 0 || int64(h.Uid) > 1<<32-2 || int64(h.Gid) > 1<<32-2 {
		return e, corrupt("%.80q belongs to %d:%d", h.Name, h.Uid, h.Gid)
	}
	switch h.Typeflag {
	case tar.TypeReg:
		e.Type, e.Size = overlay.TypeFile, h.Size
	case tar.TypeDir:
		e.Type = overlay.TypeDir
	case tar.TypeSymlink:
		e.Type, e.Link, e.Mode = overlay.TypeSymlink, h.Linkname, 0o777
	case tar.TypeFifo:
		e.Type = overlay.TypeFifo
	case tar.TypeChar, tar.TypeBlock:
		e.Type = overlay.TypeChar
		if h.Typeflag == tar.TypeBlock {
			e.Type = overlay.TypeBlock
		}
		if h.Devmajor < 0 || h.Devmajor > 1<<12-1 || h.Devminor < 0 || h.Devminor > 1<<20-1 {
			return e, corrupt("%.80q is the device %d:%d", h.Name, h.Devmajor, h.Devminor)
		}
		e.Major, e.Minor = uint32(h.Devmajor), uint32(h.Devminor)
	case tar.TypeLink:
		e = overlay.Entry{Path: name, Type: overlay.TypeFile, Hardlink: strings.TrimPrefix(h.Linkname, "./")}
		// The target need not come first in our order; that is put right later.
		for _, p := range []string{e.Path, e.Hardlink} {
			if err := overlay.CheckEntry(overlay.Entry{Path: p, Type: overlay.TypeWhiteout}); err != nil {
				return e, err
			}
		}
		return e, nil
	default:
		return e, corrupt("%.80q is of the type %q", h.Name, h.Typeflag)
	}
	for key, value := range h.PAXRecords {
		if strings.HasPrefix(key, "GNU.sparse.") {
			return e, corrupt("%.80q has holes", h.Name)
		}
		attr, ok := strings.CutPrefix(key, "SCHILY.xattr.")
		if !ok {
			continue
		}
		// A container cannot set these, so no archive of one has them.
		if strings.HasPrefix(attr, "trusted.") || strings.HasPrefix(attr, "user.overlay.") {
			return e, corrupt("%.80q has the attribute %.80q", h.Name, attr)
		}
		if e.Xattrs == nil {
			e.Xattrs = make(map[string]string)
		}
		e.Xattrs[attr] = value
	}
	return e, overlay.CheckEntry(e)
}

// implied is the part of a tree that is not in its tar.
type implied struct {
	deleted []string // sorted; what is written is no longer in it
	lower   func(string) (overlay.Entry, error)
	created overlay.Time // for entries without a time of their own
	root    uint32       // mode of the root
}

// write puts the entries in order, adds what they imply, and writes a tree.
func (g *gathered) write(f *os.File, how implied) error {
	first, err := g.resolve()
	if err != nil {
		return err
	}
	slices.SortFunc(g.list, func(a, b where) int { return overlay.ComparePaths(a.path, b.path) })
	w := &treeMaker{g: g, out: overlay.NewTreeWriter(f), implied: how, first: first}
	for i, x := range g.list {
		if i > 0 && x.path == g.list[i-1].path {
			return corrupt("%.80q comes twice", x.path)
		}
		if err := w.add(x); err != nil {
			return err
		}
	}
	if err := w.end(); err != nil {
		return err
	}
	g.im.res.Entries += w.entries
	return w.out.Close()
}

// resolve gives each hard link group to its first path: the entry moves there,
// and all other paths of the group become links to it.
func (g *gathered) resolve() (map[string]string, error) {
	if len(g.links) == 0 {
		return nil, nil
	}
	group := map[string][]string{} // by target
	for _, l := range g.links {
		group[l.to] = append(group[l.to], l.path)
	}
	first := map[string]string{} // of every path of a group but the first
	for i := range g.list {
		to := g.list[i].path
		paths, ok := group[to]
		if !ok {
			continue
		}
		delete(group, to)
		paths = append(paths, to)
		slices.SortFunc(paths, overlay.ComparePaths)
		g.list[i].path = paths[0]
		for _, p := range paths[1:] {
			if _, twice := first[p]; twice {
				return nil, corrupt("%.80q comes twice", p)
			}
			first[p] = paths[0]
			g.list = append(g.list, where{path: p})
		}
	}
	for to := range group {
		return nil, corrupt("a hard link to %.80q, which is not there", to)
	}
	return first, nil
}

// treeMaker writes a tree from what was gathered, in order.
type treeMaker struct {
	implied
	g       *gathered
	out     *overlay.TreeWriter
	first   map[string]string
	types   map[string]overlay.Type // of the first of each group
	stack   []string                // directories above the last entry
	hiding  []bool                  // whether one of them is opaque
	any     bool
	last    string // entry
	entries int64
}

func (w *treeMaker) add(x where) error {
	if err := w.deletions(x.path); err != nil {
		return err
	}
	e, err := w.entry(x)
	if err != nil {
		return err
	}
	if err := w.parents(x.path); err != nil {
		return err
	}
	return w.put(e)
}

func (w *treeMaker) end() error {
	if err := w.deletions(""); err != nil {
		return err
	}
	return w.parents("x") // the root, when nothing had it
}

// entry reads an entry back.
func (w *treeMaker) entry(x where) (overlay.Entry, error) {
	if to, ok := w.first[x.path]; ok {
		t := w.types[to]
		if t == overlay.TypeDir || t == "" {
			return overlay.Entry{}, corrupt("%.80q is a hard link to %.80q, which cannot have one", x.path, to)
		}
		return overlay.Entry{Path: x.path, Type: t, Hardlink: to}, nil
	}
	line := make([]byte, x.len)
	if _, err := w.g.spool.ReadAt(line, x.off); err != nil {
		return overlay.Entry{}, err
	}
	e, err := overlay.ParseEntry(line)
	if err != nil {
		return e, err
	}
	e.Path = x.path // of the group
	if w.first != nil {
		if w.types == nil {
			w.types = map[string]overlay.Type{}
		}
		w.types[e.Path] = e.Type
	}
	return e, nil
}

// deletions writes whiteouts for what is deleted before p; "" is the end.
func (w *treeMaker) deletions(p string) error {
	for len(w.deleted) > 0 && (p == "" || overlay.ComparePaths(w.deleted[0], p) < 0) {
		d := w.deleted[0]
		if p != "" && strings.HasPrefix(p, d+"/") {
			return nil // something lies below: parents makes a directory of it
		}
		w.deleted = w.deleted[1:]
		if err := w.parents(d); err != nil {
			return err
		}
		if w.hiding[len(w.hiding)-1] {
			continue // hidden anyway
		}
		if err := w.put(overlay.Entry{Path: d, Type: overlay.TypeWhiteout, Mtime: w.created}); err != nil {
			return err
		}
		// Deletions below it are covered by its own.
		for len(w.deleted) > 0 && strings.HasPrefix(w.deleted[0], d+"/") {
			w.deleted = w.deleted[1:]
		}
	}
	return nil
}

// parents writes the directories above p that are not there yet, for an
// archive has them only when they are new.
func (w *treeMaker) parents(p string) error {
	if !w.any {
		if p == "." {
			return nil
		}
		e, err := w.directory(".")
		if err != nil {
			return err
		}
		if err := w.put(e); err != nil {
			return err
		}
	}
	if p == "." {
		return nil
	}
	for len(w.stack) > 1 && !strings.HasPrefix(p, w.stack[len(w.stack)-1]+"/") {
		w.stack, w.hiding = w.stack[:len(w.stack)-1], w.hiding[:len(w.hiding)-1]
	}
	for {
		top := w.stack[len(w.stack)-1]
		rest := p
		if top != "." {
			rest = p[len(top)+1:]
		}
		name, _, more := strings.Cut(rest, "/")
		if !more {
			return nil
		}
		dir := name
		if top != "." {
			dir = top + "/" + name
		}
		if dir == w.last {
			return corrupt("%.80q lies below what is no directory", p)
		}
		e, err := w.directory(dir)
		if err != nil {
			return err
		}
		if err := w.put(e); err != nil {
			return err
		}
	}
}

// directory is one that the archive does not have: the image's.
func (w *treeMaker) directory(p string) (overlay.Entry, error) {
	e := overlay.Entry{Path: p, Type: overlay.TypeDir, Mode: 0o755, Mtime: w.created}
	if w.lower != nil {
		got, err := w.lower(p)
		switch {
		case errors.Is(err, fault.ErrNotFound):
		case err != nil:
			return e, err
		case got.Type == overlay.TypeDir:
			e.Mode, e.UID, e.GID, e.Mtime = got.Mode, got.UID, got.GID, got.Mtime
			for name, value := range got.Xattrs {
				if strings.HasPrefix(name, "trusted.overlay.") || strings.HasPrefix(name, "user.overlay.") {
					continue
				}
				if e.Xattrs == nil {
					e.Xattrs = make(map[string]string)
				}
				e.Xattrs[name] = value
			}
		}
	}
	if p == "." {
		e.Mode = w.root
	}
	return e, nil
}

// put writes an entry.
func (w *treeMaker) put(e overlay.Entry) error {
	if len(w.deleted) > 0 && w.deleted[0] == e.Path && e.Type != overlay.TypeWhiteout {
		w.deleted = w.deleted[1:]
		if e.Type != overlay.TypeDir {
			return corrupt("%.80q is both there and deleted", e.Path)
		}
		// Deleted and made again: what the image has in it is gone.
		if e.Xattrs == nil {
			e.Xattrs = make(map[string]string)
		}
		e.Xattrs["trusted.overlay.opaque"] = "y"
	}
	if err := overlay.CheckEntry(e); err != nil {
		return err
	}
	if err := w.out.Write(e); err != nil {
		if errors.Is(err, fault.ErrInvalid) {
			return corrupt("%v", err)
		}
		return err
	}
	w.entries++
	w.any, w.last = true, e.Path
	if e.Type == overlay.TypeDir {
		hidden := len(w.hiding) > 0 && w.hiding[len(w.hiding)-1] || opaque(&e)
		w.stack, w.hiding = append(w.stack, e.Path), append(w.hiding, hidden)
	}
	return nil
}
