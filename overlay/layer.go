package overlay

import (
	"context"
	"errors"
	"fmt"
	"io"
	"iter"
	"maps"
	"strings"

	"github.com/agentbox/agentbox/internal/fault"
)

// The marks of a layer archive, as the OCI image specification has them.
const (
	layerWhiteout = ".wh."
	layerOpaque   = ".wh..wh..opq"
)

const (
	// maxLayerHoles bounds the zeros of one layer: archives of layers have no
	// holes, and a file of the sandbox's may claim any size.
	maxLayerHoles = 16 << 30

	// maxLayerXattrs is what other programs read of one entry's attributes: Go's
	// archive/tar takes a megabyte of records, names and framing included.
	maxLayerXattrs = 900 << 10

	maxNotes = 20
)

// Layer tells what WriteLayer wrote.
type Layer struct {
	Summary
	// Notes are what a layer cannot hold and what was left out for that, a
	// sentence each, at most 20 and how many more there are.
	Notes []string
	more  int
}

// WriteLayer writes what an upperdir holds as an image layer: the tar archive that image tools
// read, with whiteouts and opaque marks as names. The same entries give the same bytes. An entry
// that a layer cannot express exactly is ErrUnsupported; sockets are left out and noted. It reads
// tree twice.
func WriteLayer(ctx context.Context, w io.Writer, tree func() iter.Seq2[Entry, error], data Source) (Layer, error) {
	l := layerWriter{tar: tarWriter{w: w}, first: map[string]*Entry{}, data: data}
	for e, err := range tree() {
		if err != nil {
			return Layer{}, err
		}
		if e.Hardlink != "" && e.Type != TypeSocket && e.Type != TypeWhiteout {
			l.first[e.Hardlink] = nil
		}
	}
	for e, err := range tree() {
		if err == nil {
			err = ctx.Err()
		}
		if err == nil {
			err = l.entry(ctx, e)
		}
		if err != nil {
			return Layer{}, err
		}
	}
	if err := l.tar.end(); err != nil {
		return Layer{}, err
	}
	l.out.Archive = l.tar.n
	if l.out.more > 0 {
		l.out.Notes = append(l.out.Notes, fmt.Sprintf("and %d more", l.out.more))
	}
	return l.out, nil
}

type layerWriter struct {
	tar   tarWriter
	data  Source
	first map[string]*Entry // the first names of hard links: image tools set what a further name's header says
	zeros int64
	out   Layer
}

func (l *layerWriter) note(format string, args ...any) {
	if len(l.out.Notes) < maxNotes {
		l.out.Notes = append(l.out.Notes, fmt.Sprintf(format, args...))
	} else {
		l.out.more++
	}
}

func (l *layerWriter) entry(ctx context.Context, e Entry) error {
	parent, name := splitPath(e.Path)
	if strings.HasPrefix(name, layerWhiteout) {
		return &fault.Error{Err: fmt.Errorf("%w: %q would mean a deletion in an image", fault.ErrUnsupported,
			clip(e.Path)), Hint: "Rename or delete it first."}
	}
	switch e.Type {
	case TypeWhiteout:
		l.out.add(&e)
		return l.tar.header(&Entry{Path: joinPath(parent, layerWhiteout+name), Type: TypeFile})
	case TypeSocket:
		l.note("%q is a socket, which an image cannot hold", clip(e.Path))
		return nil
	}
	if e.Hardlink != "" {
		return l.link(e)
	}
	opaque, err := l.attributes(&e)
	if err != nil {
		return err
	}
	if _, ok := l.first[e.Path]; ok {
		l.first[e.Path] = &Entry{Type: e.Type, Mode: e.Mode, UID: e.UID, GID: e.GID, Mtime: e.Mtime}
	}
	l.out.add(&e)
	if e.Type == TypeFile {
		return l.file(ctx, e)
	}
	if err := l.tar.header(&e); err != nil || !opaque {
		return err
	}
	return l.tar.header(&Entry{Path: joinPath(e.Path, layerOpaque), Type: TypeFile})
}

func (l *layerWriter) link(e Entry) error {
	first := l.first[e.Hardlink]
	if first == nil {
		return fmt.Errorf("write layer: %w: %q is a link to %q, which is not there", fault.ErrCorrupt,
			clip(e.Path), clip(e.Hardlink))
	}
	link := *first
	link.Path, link.Hardlink = e.Path, e.Hardlink
	l.out.add(&e)
	return l.tar.header(&link)
}

// attributes takes overlayfs' own attributes away, and reports whether they made
// a directory opaque.
func (l *layerWriter) attributes(e *Entry) (opaque bool, err error) {
	const own = "trusted.overlay."
	kept, size := maps.Clone(e.Xattrs), 0
	for name, value := range e.Xattrs {
		size += len(name) + len(value)
		mark, ours := strings.CutPrefix(name, own)
		switch {
		case !ours && strings.ContainsAny(name, "=%"):
			l.note("%q has the attribute %q, whose name an image cannot hold", clip(e.Path), clip(name))
		case !ours:
			continue
		case mark == "redirect" || mark == "metacopy":
			return false, fmt.Errorf("%w: %q is only half in the upperdir (%s): overlayfs was mounted with %s",
				fault.ErrUnsupported, clip(e.Path), name, mark)
		case mark == "opaque":
			opaque = value == "y"
		}
		delete(kept, name)
	}
	if size > maxLayerXattrs {
		return false, fmt.Errorf("%w: %q has %d bytes of attributes, more than programs read that unpack images",
			fault.ErrUnsupported, clip(e.Path), size)
	}
	if e.Xattrs = kept; len(kept) == 0 {
		e.Xattrs = nil
	}
	return opaque, nil
}

// file writes a file with its holes as zeros: sparse entries are not part of the
// format of layers.
func (l *layerWriter) file(ctx context.Context, e Entry) (err error) {
	l.zeros += e.Size - e.data()
	if l.zeros > maxLayerHoles {
		return &fault.Error{Err: fmt.Errorf("%w: %q is %d bytes long and has holes, which an image has to hold as zeros", fault.ErrUnsupported, clip(e.Path), e.Size),
			Hint: "Delete it first, or make it shorter."}
	}
	plain := e
	plain.Extents = nil
	if err := l.tar.header(&plain); err != nil || e.Size == 0 {
		return err
	}
	r, err := l.data.Data(ctx, e)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, r.Close()) }()
	buf := buffers.Get().(*[copyBuf]byte)
	defer buffers.Put(buf)
	at := int64(0)
	for _, x := range e.spans() {
		if err := l.hole(x.Off - at); err != nil {
			return err
		}
		for left := x.Len; left > 0; {
			p := buf[:min(left, copyBuf)]
			if _, err := io.ReadFull(r, p); err != nil {
				return fmt.Errorf("read %q: %w", clip(e.Path), err)
			}
			if err := l.tar.data(p); err != nil {
				return err
			}
			left -= int64(len(p))
		}
		at = x.Off + x.Len
	}
	return l.hole(e.Size - at)
}

func (l *layerWriter) hole(n int64) error {
	for n > 0 {
		p := zeroBlocks[:min(n, int64(len(zeroBlocks)))]
		if err := l.tar.data(p); err != nil {
			return err
		}
		n -= int64(len(p))
	}
	return nil
}
