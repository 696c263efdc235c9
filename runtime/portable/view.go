package portable

import (
	"archive/tar"
	"bytes"
	"encoding/json"
	"io"
	"path"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/agentbox/agentbox/overlay"
)

// view returns an entry as rootfs-diff.tar shows it; ok is false for an entry that it does not show.
// It depends on the entry alone, so that an import can check the two against each other.
func view(e overlay.Entry) (shown overlay.Entry, ok bool) {
	switch {
	case e.Path == ".", e.Type == overlay.TypeWhiteout, e.Type == overlay.TypeSocket:
		return e, false
	case e.Hardlink != "":
		return overlay.Entry{Path: e.Path, Type: overlay.TypeFile, Hardlink: e.Hardlink}, true
	}
	e.Digest, e.Chunks = "", nil
	var kept map[string]string
	for name, value := range e.Xattrs {
		if !common(name) {
			continue
		}
		if kept == nil {
			kept = make(map[string]string)
		}
		kept[name] = value
	}
	e.Xattrs = kept
	return e, true
}

// rootHeader returns the beginning of rootfs-diff.tar: the root directory. It has an absolute name,
// for Podman's storage passes over "./", leaves the root of every image at mode 0555, and CRIU then
// refuses processes that knew another.
func rootHeader(e overlay.Entry) ([]byte, error) {
	var buf bytes.Buffer
	err := tar.NewWriter(&buf).WriteHeader(&tar.Header{
		Typeflag: tar.TypeDir, Name: "/", Mode: int64(e.Mode), Uid: int(e.UID), Gid: int(e.GID),
		ModTime: time.Unix(e.Mtime.Sec, 0),
	})
	return buf.Bytes(), err
}

// common reports whether other programs know what to do with an attribute. The
// trusted ones are the overlay's and would turn a merged root upside down.
func common(name string) bool {
	switch {
	case strings.ContainsAny(name, "=%") || !utf8.ValidString(name):
		return false // no PAX record says it
	case strings.HasPrefix(name, "user.overlay."):
		return false
	case strings.HasPrefix(name, "user."):
		return true
	}
	return slices.Contains([]string{"security.capability", "system.posix_acl_access", "system.posix_acl_default"}, name)
}

// opaque reports whether a directory hides what the layers below have in it.
func opaque(e *overlay.Entry) bool {
	return e.Type == overlay.TypeDir && (e.Xattrs["trusted.overlay.opaque"] == "y" ||
		e.Xattrs["user.overlay.opaque"] == "y")
}

// deletions finds, in the entries of a tree in their order, the paths of the
// image that are gone.
type deletions struct {
	lower func(path string) ([]LowerEntry, error)
	emit  func(path string) error
	open  []hiding // the directories above the present entry that hide something
}

// hiding is a directory that hides what the image has in it.
type hiding struct {
	path string
	left []LowerEntry // of the image, sorted, not yet passed
}

func newDeletions(lower func(string) ([]LowerEntry, error), emit func(string) error) *deletions {
	return &deletions{lower: lower, emit: emit}
}

func (d *deletions) next(e overlay.Entry) error {
	if err := d.leave(e.Path); err != nil {
		return err
	}
	hides, merged := opaque(&e), false
	if n := len(d.open); n > 0 && path.Dir(e.Path) == d.open[n-1].path {
		h := &d.open[n-1]
		name := path.Base(e.Path)
		for len(h.left) > 0 && h.left[0].Name <= name {
			x := h.left[0]
			h.left = h.left[1:]
			if x.Name == name {
				merged = x.Dir
			} else if err := d.emit(path.Join(h.path, x.Name)); err != nil {
				return err
			}
		}
		// A directory in an opaque one hides the image's of that name whole.
		hides = e.Type == overlay.TypeDir && merged
	}
	if e.Type == overlay.TypeWhiteout {
		return d.emit(e.Path)
	}
	if !hides || d.lower == nil {
		return nil
	}
	list, err := d.lower(e.Path)
	if err != nil {
		return err
	}
	list = slices.Clone(list)
	slices.SortFunc(list, func(a, b LowerEntry) int { return strings.Compare(a.Name, b.Name) })
	d.open = append(d.open, hiding{e.Path, list})
	return nil
}

// leave ends the directories that p is not in; "" is in none.
func (d *deletions) leave(p string) error {
	for n := len(d.open); n > 0; n-- {
		h := &d.open[n-1]
		if p != "" && (h.path == "." || strings.HasPrefix(p, h.path+"/")) {
			return nil
		}
		for _, x := range h.left {
			if err := d.emit(path.Join(h.path, x.Name)); err != nil {
				return err
			}
		}
		d.open = d.open[:n-1]
	}
	return nil
}

func (d *deletions) end() error { return d.leave("") }

// deletedWriter writes deleted.files as Podman does. Its paths are absolute.
type deletedWriter struct {
	w io.Writer
	n int
}

func (d *deletedWriter) add(p string) error {
	if !utf8.ValidString(p) {
		return nil // JSON cannot say it
	}
	text, err := json.Marshal("/" + p)
	if err != nil {
		return err
	}
	before := ",\n  "
	if d.n == 0 {
		before = "[\n  "
	}
	d.n++
	_, err = io.WriteString(d.w, before+string(text))
	return err
}

func (d *deletedWriter) end() error {
	if d.n == 0 {
		return nil
	}
	_, err := io.WriteString(d.w, "\n]")
	return err
}
