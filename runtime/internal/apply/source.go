package apply

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"iter"
	"os"
	"slices"
	"strings"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/overlay"
)

// Source is an upperdir that is applied.
type Source struct {
	Entries iter.Seq2[overlay.Entry, error] // in the order of overlay.ComparePaths; read more than once
	Data    overlay.Source
}

// Upperdir is the Source of an upperdir that nothing uses.
func Upperdir(ctx context.Context, dir *Root) Source {
	return Source{Entries: overlay.DirEntries(ctx, dir.Proc(), overlay.WalkOptions{}), Data: dirData{dir}}
}

// dirData has the data of the files below a directory.
type dirData struct{ *Root }

// Data implements overlay.Source.
func (d dirData) Data(_ context.Context, e overlay.Entry) (io.ReadCloser, error) {
	f, err := d.open(e.Path)
	if err != nil || e.Extents == nil {
		return f, err
	}
	var parts []io.Reader
	for _, x := range e.Extents {
		parts = append(parts, io.NewSectionReader(f, x.Off, x.Len))
	}
	return readCloser{io.MultiReader(parts...), f}, nil
}

// open opens a file to read it.
func (r *Root) open(rel string) (*os.File, error) {
	d, name, err := r.parent(rel)
	if err != nil {
		return nil, err
	}
	defer d.Close()
	return openFile(d, name)
}

type readCloser struct {
	io.Reader
	io.Closer
}

// whole returns the content of a file, holes included, of its data.
func whole(e *overlay.Entry, data io.ReadCloser) io.ReadCloser {
	if e.Extents == nil {
		return data
	}
	var parts []io.Reader
	at := int64(0)
	for _, x := range e.Extents {
		parts = append(parts, io.LimitReader(zeros{}, x.Off-at), io.LimitReader(data, x.Len))
		at = x.Off + x.Len
	}
	return readCloser{io.MultiReader(append(parts, io.LimitReader(zeros{}, e.Size-at))...), data}
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) {
	clear(p)
	return len(p), nil
}

// comer is an entry that is staged.
type comer struct {
	overlay.Entry
	from overlay.Entry // of the source: what has its data
	data []byte        // unless that is this
}

// staged yields what an apply stages: what comes, as it is to be, and the directories that lead
// there.
func (p *part) staged() iter.Seq2[*comer, error] {
	return func(yield func(*comer, error) bool) {
		puts := slices.DeleteFunc(slices.Clone(p.plan.Ops), func(o op) bool { return o.Kind == opRemove })
		firsts := map[string]*comer{} // what comes of the names that others are hard links to
		for e, err := range p.source.Entries {
			if err != nil {
				yield(nil, err)
				return
			}
			for len(puts) > 0 && overlay.ComparePaths(string(puts[0].Path), e.Path) < 0 &&
				!within(e.Path, string(puts[0].Path)) {
				puts = puts[1:]
			}
			if len(puts) == 0 && e.Path != "." {
				return
			}
			c := &comer{Entry: e, from: e}
			if p.plan.links[e.Path] {
				firsts[e.Path] = &comer{from: e}
			}
			switch {
			case e.Path == "." || within(string(puts[0].Path), e.Path) && string(puts[0].Path) != e.Path:
				c.Entry = overlay.Entry{Path: e.Path, Type: overlay.TypeDir, Mode: 0o700}
			case !within(e.Path, string(puts[0].Path)), whiteout(&e), p.plan.left[e.Path]:
				continue
			default:
				if err := p.dress(c, firsts); err != nil {
					yield(nil, err)
					return
				}
			}
			if !yield(c, nil) {
				return
			}
		}
	}
}

// within reports whether a path is another one or lies below it.
func within(p, top string) bool { return p == top || top == "." || strings.HasPrefix(p, top+"/") }

// dress makes an entry of an upperdir what it is to be in the directory. Of several names of a file,
// the first that comes is the file.
func (p *part) dress(c *comer, firsts map[string]*comer) error {
	name, m := c.Path, p.plan.merged[c.Path]
	first := firsts[cmp.Or(c.Hardlink, name)]
	if c.Hardlink != "" {
		if first == nil {
			return fmt.Errorf("%w: %q is a hard link to %q, which is not there", fault.ErrCorrupt, name, c.Hardlink)
		}
		if m == nil && first.Path != "" {
			c.Hardlink = first.Path
			return nil
		}
		c.Entry, c.from = first.from, first.from
		c.Path = name
	}
	if m == nil && first != nil {
		first.Path = name
	}
	c.Xattrs = textXattrs(visible(c.Xattrs))
	if to, ok := p.gate.owns[name]; ok {
		c.UID, c.GID = to.uid, to.gid
	}
	if m != nil {
		c.data = m.content
		c.Size, c.Extents, c.Digest, c.Chunks = int64(len(m.content)), nil, "", nil
		c.Mode, c.Mtime = m.mode, m.mtime
	}
	return nil
}

// whiteout reports whether an entry of an upperdir hides what is below.
func whiteout(e *overlay.Entry) bool {
	_, marked := e.Xattrs[whiteoutXattr]
	return e.Type == overlay.TypeWhiteout || e.Type == overlay.TypeFile && marked && e.Size == 0
}

// opaque reports whether a directory of an upperdir hides all that the one below has.
func opaque(e *overlay.Entry) bool { return e.Xattrs[overlayXattr+"opaque"] == "y" }

func textXattrs(set map[string][]byte) map[string]string {
	if len(set) == 0 {
		return nil
	}
	out := make(map[string]string, len(set))
	for name, value := range set {
		out[name] = string(value)
	}
	return out
}
