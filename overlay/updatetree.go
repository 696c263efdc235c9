package overlay

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/agentbox/agentbox/internal/fault"
)

// PlanUpdateTree is PlanUpdate with a tree that a TreeWriter wrote. It is many
// times as fast where little differs: equal entries are equal lines, and a line
// that is the same on both sides need not be parsed. What have says is believed:
// this process wrote it a moment ago.
func PlanUpdateTree(ctx context.Context, have string, tree io.Reader) (*Update, error) {
	return planBy(ctx, have, func(p *planner) error {
		m, err := openCache(have)
		if err != nil {
			return err
		}
		defer m.close()
		t := treeMerge{p: p, have: m.reader(), left: -1, want: bufio.NewReaderSize(tree, cacheBuffer)}
		return t.run()
	})
}

// PlanUpdateChunks is PlanUpdateTree with trees of which the chunks are known:
// has are those of what is in have, wants those of the tree, of which read
// returns some that follow each other. What both have is not read. When it fails,
// PlanUpdateTree reports whether it is for the tree or for its chunks, which need
// not end where lines do.
func PlanUpdateChunks(
	ctx context.Context, have string, has, wants []Chunk, read func(from, to int) (io.ReadCloser, error),
) (*Update, error) {
	return planBy(ctx, have, func(p *planner) (err error) {
		m, err := openCache(have)
		if err != nil {
			return err
		}
		defer m.close()
		t := treeMerge{p: p, have: m.reader()}
		at := make(map[string]int, len(wants))
		for i, w := range wants {
			at[w.Digest] = i
		}
		i, j := 0, 0
		for i < len(has) || j < len(wants) {
			// The part that both have up to here, and then the part that only they have.
			for t.left = 0; i < len(has) && j < len(wants) && has[i] == wants[j]; i, j = i+1, j+1 {
				t.left += has[i].Len
			}
			t.same = true
			if err := t.run(); err != nil {
				return err
			}
			from := j
			for t.left, j = 0, len(wants); i < len(has); i++ {
				if k, ok := at[has[i].Digest]; ok && k >= from && wants[k] == has[i] {
					j = k
					break
				}
				t.left += has[i].Len
			}
			t.same = false
			if err := t.runChunks(from, j, read); err != nil {
				return err
			}
		}
		if err := t.have.next(); err != nil {
			return err
		}
		if t.have.cur != nil {
			return errUneven
		}
		return nil
	})
}

var errUneven = fmt.Errorf("a line does not end with its piece: %w", fault.ErrUnsupported)

func (t *treeMerge) runChunks(from, to int, read func(from, to int) (io.ReadCloser, error)) (err error) {
	var tree io.ReadCloser = io.NopCloser(strings.NewReader(""))
	if from < to {
		if tree, err = read(from, to); err != nil {
			return err
		}
	}
	defer func() { err = errors.Join(err, tree.Close()) }()
	t.want = bufio.NewReaderSize(tree, 64<<10)
	return t.run()
}

// treeMerge reads both sides line by line.
type treeMerge struct {
	p    *planner
	have *recordReader
	left int64 // bytes of lines that are still to be read of have; -1: all
	same bool  // the other side has the same
	want *bufio.Reader

	cur  cacheRecord // of have; nil after the last
	line []byte      // of the tree; nil after the last, valid until the next is read
	n    int         // its number
	h, w *Entry      // the current entries, once they are parsed

	passed []byte // the name of the last equal entry that was passed since one was parsed
	depth  int    // its depth
}

func (t *treeMerge) run() error {
	if err := t.nextHave(); err != nil {
		return err
	}
	if err := t.nextWant(); err != nil {
		return err
	}
	for t.cur != nil || t.line != nil {
		if t.equal() {
			t.passed, t.depth = append(t.passed[:0], t.cur.name()...), t.cur.depth()
			if t.p.n++; t.p.n%1024 == 0 && t.p.ctx.Err() != nil {
				return t.p.ctx.Err()
			}
			if err := t.nextHave(); err != nil {
				return err
			}
			if err := t.nextWant(); err != nil {
				return err
			}
			continue
		}
		if err := t.parse(); err != nil {
			return err
		}
		order := 0
		switch {
		case t.h == nil:
			order = 1
		case t.w == nil:
			order = -1
		default:
			order = ComparePaths(t.h.Path, t.w.Path)
		}
		h, w := t.h, t.w
		if order > 0 {
			h = nil
		}
		if order < 0 {
			w = nil
		}
		if err := t.p.pair(h, w); err != nil {
			return err
		}
		if h != nil {
			if err := t.nextHave(); err != nil {
				return err
			}
		}
		if w != nil {
			if err := t.nextWant(); err != nil {
				return err
			}
		}
	}
	return t.p.ctx.Err()
}

// equal reports whether both sides have the same entry, of a kind that is not
// needed for what comes after it.
func (t *treeMerge) equal() bool {
	r := t.cur
	return r != nil && t.line != nil && r.flags()&flagFurther == 0 && !r.key().isDir() && bytes.Equal(r.line(), t.line)
}

// parse parses what has not been parsed of the current entries.
func (t *treeMerge) parse() error {
	p := t.p
	if len(t.passed) > 0 {
		// Passed lines count for the order. Directories are never passed, so the one that holds
		// them is known.
		if t.depth > len(p.haveOrder.dirs) || t.depth < 1 {
			return damaged("a record at depth %d has no place", t.depth)
		}
		path := joinPath(p.haveOrder.dirs[t.depth-1], string(t.passed))
		p.haveOrder.last, p.wantOrder.last = path, path
		t.passed = t.passed[:0]
	}
	if t.h == nil && t.cur != nil {
		e, err := t.cur.entry()
		if err == nil {
			err = p.haveOrder.next(&e)
		}
		if err != nil {
			return fmt.Errorf("file cache: %w", err)
		}
		t.h = &e
	}
	if t.w == nil && t.line != nil {
		e, err := ParseEntry(t.line)
		if err == nil {
			err = p.wantOrder.next(&e)
		}
		if err != nil {
			return fmt.Errorf("read tree: line %d: %w", t.n, err)
		}
		t.w = &e
	}
	return nil
}

func (t *treeMerge) nextHave() error {
	t.h, t.cur = nil, nil
	for t.left != 0 {
		if err := t.have.next(); err != nil {
			return err
		}
		r := t.have.cur
		if r == nil && t.left < 0 {
			return nil
		}
		if r != nil && r.flags()&flagHole != 0 {
			continue
		}
		if t.left > 0 {
			if r == nil || int64(len(r.line())) >= t.left {
				return errUneven
			}
			t.left -= int64(len(r.line()) + 1)
		}
		t.cur = r
		return nil
	}
	return nil
}

func (t *treeMerge) nextWant() (err error) {
	t.w, t.n = nil, t.n+1
	if t.same {
		if t.line = nil; t.cur != nil {
			t.line = t.cur.line()
		}
		return nil
	}
	if t.line, err = readLine(t.want); err == io.EOF {
		t.line, err = nil, nil
	}
	if err != nil {
		return fmt.Errorf("read tree: line %d: %w", t.n, err)
	}
	return nil
}
