package engine

import (
	"bytes"
	"context"
	"crypto/sha1"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"path"
	"slices"
	"strings"

	udiff "github.com/aymanbagabas/go-udiff"

	"github.com/agentbox/agentbox/internal/fsx"
	"github.com/agentbox/agentbox/overlay"
	"github.com/agentbox/agentbox/runtime"
)

const (
	maxPatchFile = 1 << 20   // bytes of a file whose text is compared
	maxPatches   = 256 << 20 // bytes of all patches of one Diff
	patchContext = 3         // lines around each change, as diff -u has them
)

// openContent opens the data of a Change's regular file: the old data, or with newer the new.
// A file that does not exist any more is fs.ErrNotExist.
type openContent func(c runtime.Change, newer bool) (io.ReadCloser, error)

// fillPatches sets the Patch of the changes in list, from the first, and returns how many:
// fewer than all if their text exceeds maxPatches.
func fillPatches(ctx context.Context, list []runtime.Change, relative string, open openContent) (int, error) {
	var total int
	for i, c := range list {
		if err := ctx.Err(); err != nil {
			return i, context.Cause(ctx)
		}
		text, err := patchText(c, relative, open)
		if err != nil {
			return i, err
		}
		if total += len(text); total > maxPatches {
			return i, nil
		}
		list[i].Patch = text
	}
	return len(list), nil
}

// patchText returns one change as `git diff` prints it, and as `git apply` and `patch -p1`
// accept it. It is empty for changes that git cannot express (directories, devices, times,
// owners, attributes) and for a file that a running sandbox removed during the Diff. Names below
// the directory relative, if there is one, begin there.
func patchText(c runtime.Change, relative string, open openContent) (string, error) {
	from := c.From
	if c.Change != string(overlay.Renamed) {
		from = c.Path
	}
	p := patcher{c: c, open: open, old: below(relative, from), new: below(relative, c.Path)}
	var err error
	switch old, new := gitKnows(c.Old), gitKnows(c.New); {
	case old && new && c.Change != string(overlay.TypeChanged):
		err = p.section(c.Old, c.New)
	default:
		// To git, a file of another type is another file.
		if old {
			err = p.section(c.Old, nil)
		}
		if new && err == nil {
			err = p.section(nil, c.New)
		}
	}
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, runtime.ErrNotFound) {
		return "", nil
	}
	return p.text.String(), err
}

// below returns the path of a file from dir on if it is below it.
func below(dir, name string) string {
	if dir == "" || dir == "/" || !fsx.Within(dir, name) {
		return name
	}
	return strings.TrimPrefix(name, path.Clean(dir))
}

func gitKnows(f *runtime.FileState) bool {
	return f != nil && (f.Type == string(overlay.TypeFile) || f.Type == string(overlay.TypeSymlink))
}

// gitMode returns the file type and all permissions; git itself would only keep whether the
// owner may execute the file.
func gitMode(f *runtime.FileState) string {
	if f.Type == string(overlay.TypeSymlink) {
		return "120000"
	}
	return "10" + f.Mode
}

// patcher writes the patch of one change.
type patcher struct {
	c        runtime.Change
	open     openContent
	old, new string // paths
	text     strings.Builder
}

// section writes the change from old to new, either of which may be nil.
func (p *patcher) section(old, new *runtime.FileState) error {
	a, b := gitName("a", p.old), gitName("b", p.new)
	var head strings.Builder
	fmt.Fprintf(&head, "diff --git %s %s\n", a, b)
	bare := head.Len()
	differs := true
	switch {
	case old == nil:
		fmt.Fprintf(&head, "new file mode %s\n", gitMode(new))
		a = "/dev/null"
	case new == nil:
		fmt.Fprintf(&head, "deleted file mode %s\n", gitMode(old))
		b = "/dev/null"
	default:
		if gitMode(old) != gitMode(new) {
			fmt.Fprintf(&head, "old mode %s\nnew mode %s\n", gitMode(old), gitMode(new))
		}
		if p.c.Change == string(overlay.Renamed) {
			fmt.Fprintf(&head, "similarity index 100%%\nrename from %s\nrename to %s\n",
				gitName("", p.old), gitName("", p.new))
		}
		differs = slices.Contains(p.c.What, overlay.WhatContent) || slices.Contains(p.c.What, overlay.WhatTarget)
	}
	var body string
	if differs {
		was, plain, err := p.read(old, false)
		if err != nil {
			return err
		}
		is, plain2, err := p.read(new, true)
		if err != nil {
			return err
		}
		if plain && plain2 && (was != is || old == nil || new == nil) {
			fmt.Fprintf(&head, "index %s..%s", blobID(old, was), blobID(new, is))
			// Only this tells GNU patch that the file is a symlink.
			if old != nil && new != nil && gitMode(old) == gitMode(new) {
				head.WriteString(" " + gitMode(new))
			}
			head.WriteByte('\n')
		}
		switch {
		case !plain || !plain2:
			body = fmt.Sprintf("Binary files %s and %s differ\n", a, b)
		case was != is:
			if body, err = unified(a+tab(a), b+tab(b), was, is); err != nil {
				return err
			}
		}
	}
	if head.Len() > bare || body != "" {
		p.text.WriteString(head.String())
		p.text.WriteString(body)
	}
	return nil
}

// blobID returns git's object id of the data of f, abbreviated as git does.
func blobID(f *runtime.FileState, data string) string {
	if f == nil {
		return "0000000"
	}
	sum := sha1.Sum(fmt.Appendf(nil, "blob %d\x00%s", len(data), data))
	return hex.EncodeToString(sum[:])[:7]
}

func unified(a, b, was, is string) (string, error) {
	u, err := udiff.ToUnifiedDiff(a, b, was, udiff.Lines(was, is), patchContext)
	if err != nil {
		return "", err
	}
	// The library (v0.4.1) forgets the unchanged lines between two changes of
	// one hunk when it counts those of the new file.
	var more int
	for _, h := range u.Hunks {
		h.ToLine = h.FromLine + more
		for _, l := range h.Lines {
			switch l.Kind {
			case udiff.Insert:
				more++
			case udiff.Delete:
				more--
			}
		}
	}
	return u.String(), nil
}

// read returns the text of one side; plain reports whether it is text.
func (p *patcher) read(f *runtime.FileState, newer bool) (text string, plain bool, err error) {
	switch {
	case f == nil:
		return "", true, nil
	case f.Type == string(overlay.TypeSymlink):
		return f.Target, true, nil
	case f.Size > maxPatchFile:
		return "", false, nil
	}
	r, err := p.open(p.c, newer)
	if err != nil {
		return "", false, err
	}
	data, err := io.ReadAll(io.LimitReader(r, maxPatchFile+1))
	if e := r.Close(); err == nil {
		err = e
	}
	if err != nil {
		return "", false, err
	}
	if len(data) > maxPatchFile || bytes.IndexByte(data, 0) >= 0 {
		return "", false, nil
	}
	return string(data), true, nil
}

// tab returns the tab that must end a name with a space: without it GNU patch takes the text
// after the space for a time.
func tab(name string) string {
	if strings.Contains(name, " ") {
		return "\t"
	}
	return ""
}

// gitName quotes a path, prefix included, if git would.
func gitName(prefix, path string) string {
	if prefix == "" {
		path = strings.TrimPrefix(path, "/")
	}
	name := prefix + path
	plain := func(c byte) bool { return c >= ' ' && c < 0x7f && c != '"' && c != '\\' }
	quote := false
	for i := range len(name) {
		quote = quote || !plain(name[i])
	}
	if !quote {
		return name
	}
	var b strings.Builder
	b.WriteByte('"')
	for i := range len(name) {
		switch c := name[i]; {
		case plain(c):
			b.WriteByte(c)
		case c == '"' || c == '\\':
			b.WriteByte('\\')
			b.WriteByte(c)
		case c >= '\a' && c <= '\r':
			b.WriteByte('\\')
			b.WriteByte("abtnvfr"[c-'\a'])
		default:
			fmt.Fprintf(&b, "\\%03o", c)
		}
	}
	b.WriteByte('"')
	return b.String()
}
