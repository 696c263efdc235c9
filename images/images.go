// Package images turns a reference into read-only lower directories and a
// configuration.
//
// An import unpacks its source into a temporary directory, digests what came
// out, and publishes it in one rename as a layer under that digest; a record
// (layers and configuration, again named by its digest) and an entry in the
// index of names follow. A sandbox pins the record's digest, so a name may be
// imported anew under its feet. Until the rename, a source has left nothing
// that anybody would use, and what a killed import left is swept by the next.
//
// On disk, below ROOT/images, everything 0700:
//
//	index.json               name -> digest, when
//	records/HEX.json         layers, configuration, size; immutable
//	layers/HEX/diff          the unpacked tree, a lower directory for overlayfs
//	layers/HEX/layer.json    its size
//	tmp/                     imports under way (each holds a flock) and leftovers
//	lock                     flock, held while any of the above is published
//
// The package knows directories, never sandboxes: who uses a digest is the
// caller's to say.
package images

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/copy/tree"
	"github.com/agentbox/agentbox/internal/failpoint"
	"github.com/agentbox/agentbox/internal/fault"
)

// Image is a resolved image.
type Image struct {
	Name    string // without ":latest"; empty when no name has it any more
	Digest  string // "sha256:" and 64 hex digits, of its layers' digests and its configuration
	Created time.Time
	Bytes   int64 // unpacked
	Builtin bool
	Lower   []string // absolute directories, top first
	Config  Config
}

// Config is what an image says about the processes that run in it.
type Config struct {
	Entrypoint   []string          `json:"entrypoint,omitempty"`
	Cmd          []string          `json:"cmd,omitempty"`
	Env          []string          `json:"env,omitempty"`
	User         string            `json:"user,omitempty"`
	Workdir      string            `json:"workdir,omitempty"`
	StopSignal   string            `json:"stop_signal,omitempty"`
	Labels       map[string]string `json:"labels,omitempty"`
	Volumes      []string          `json:"volumes,omitempty"`
	ExposedPorts []string          `json:"exposed_ports,omitempty"`
}

// Progress tells how far an import is.
type Progress struct {
	Entries int64
	Bytes   int64 // unpacked
}

// Store keeps the images of one root. It is safe for concurrent use, by several
// processes too.
type Store struct {
	// Progress, when set before use, is called now and then during imports.
	Progress func(Progress)

	dir     string
	builtin sync.Mutex // one goroutine at a time makes the built-in image
}

// manifest is what an image's digest covers.
type manifest struct {
	Version int      `json:"version"`
	Layers  []string `json:"layers"` // bottom first
	Config  Config   `json:"config"`
}

type record struct {
	Manifest manifest  `json:"manifest"`
	Created  time.Time `json:"created"`
	Bytes    int64     `json:"bytes"`
}

type layer struct {
	Digest  string `json:"digest"`
	Bytes   int64  `json:"bytes"`
	Entries int64  `json:"entries"`
}

type entry struct {
	Digest  string    `json:"digest"`
	Created time.Time `json:"created"`
	Builtin bool      `json:"builtin,omitempty"`
}

type index struct {
	Version int              `json:"version"`
	Names   map[string]entry `json:"names"`
}

// Open opens the image store below root, agentbox's state directory, and makes
// it if it is not there.
func Open(root string) (*Store, error) {
	root, err := filepath.Abs(root)
	if err != nil {
		return nil, err
	}
	s := &Store{dir: filepath.Join(root, "images")}
	for _, d := range []string{"records", "layers", "tmp"} {
		if err := os.MkdirAll(s.path(d), 0o700); err != nil {
			return nil, fmt.Errorf("open the image store: %w", err)
		}
	}
	return s, nil
}

func (s *Store) path(parts ...string) string {
	return filepath.Join(append([]string{s.dir}, parts...)...)
}

// Resolve finds the image that ref means: NAME[:TAG], NAME@DIGEST, a digest or
// a unique prefix of one. A name wins over a prefix. The built-in busybox is
// made when it is first asked for.
func (s *Store) Resolve(ctx context.Context, ref string) (Image, error) {
	idx, err := s.index()
	if err != nil {
		return Image{}, err
	}
	name, digest, err := s.find(idx, ref)
	if errors.Is(err, fault.ErrNotFound) && isBusybox(ref) {
		return s.makeBusybox(ctx)
	}
	if err != nil {
		return Image{}, err
	}
	img, err := s.image(idx, name, digest)
	if errors.Is(err, fault.ErrCorrupt) && idx.Names[name].Builtin {
		return s.makeBusybox(ctx)
	}
	return img, err
}

// ResolveDigest finds the image of a whole digest, whatever its name means by
// now: what a sandbox or a checkpoint has pinned.
func (s *Store) ResolveDigest(_ context.Context, digest string) (Image, error) {
	idx, err := s.index()
	if err != nil {
		return Image{}, err
	}
	if _, ok := hexOf(digest); !ok {
		return Image{}, fmt.Errorf("%w: %q is not an image digest", fault.ErrInvalid, digest)
	}
	return s.image(idx, "", digest)
}

// image reads a record; name is the index entry that it was found by, if any.
func (s *Store) image(idx index, name, digest string) (Image, error) {
	rec, err := s.record(digest)
	if err != nil {
		return Image{}, err
	}
	if name == "" {
		for _, n := range slices.Sorted(maps.Keys(idx.Names)) {
			if idx.Names[n].Digest == digest {
				name = n
				break
			}
		}
	}
	img := Image{Name: familiar(name), Digest: digest, Created: rec.Created, Bytes: rec.Bytes, Config: rec.Manifest.Config}
	if e, ok := idx.Names[name]; ok {
		img.Created, img.Builtin = e.Created, e.Builtin
	}
	for _, l := range slices.Backward(rec.Manifest.Layers) {
		hex, ok := hexOf(l)
		dir := s.path("layers", hex, "diff")
		if fi, err := os.Lstat(dir); !ok || err != nil || !fi.IsDir() {
			return Image{}, &fault.Error{Op: "open image", ID: digest, Hint: "Import the image again.",
				Err: fmt.Errorf("%w: its layer %s is gone", fault.ErrCorrupt, l)}
		}
		img.Lower = append(img.Lower, dir)
	}
	return img, nil
}

func (s *Store) record(digest string) (record, error) {
	var rec record
	hex, ok := hexOf(digest)
	if !ok {
		return rec, fmt.Errorf("%w: %q is not an image digest", fault.ErrInvalid, digest)
	}
	err := readJSON(s.path("records", hex+".json"), &rec)
	if errors.Is(err, fs.ErrNotExist) {
		return rec, &fault.Error{Op: "find image", ID: digest, Hint: "Import the same files again: equal files have the same digest.",
			Err: fmt.Errorf("%w: no image has this digest", fault.ErrNotFound)}
	}
	if err == nil && digestOf(rec.Manifest) != digest {
		err = fmt.Errorf("%w: the record of image %s does not match its digest", fault.ErrCorrupt, digest)
	}
	return rec, err
}

// List returns all images, by name; those that lost their name come last, with
// an empty one.
func (s *Store) List(context.Context) ([]Image, error) {
	idx, err := s.index()
	if err != nil {
		return nil, err
	}
	var list []Image
	named := map[string]bool{}
	for _, name := range slices.SortedFunc(maps.Keys(idx.Names), func(a, b string) int { return strings.Compare(familiar(a), familiar(b)) }) {
		named[idx.Names[name].Digest] = true
		img, err := s.image(idx, name, idx.Names[name].Digest)
		if err != nil {
			return nil, err
		}
		list = append(list, img)
	}
	digests, err := s.digests()
	if err != nil {
		return nil, err
	}
	for _, d := range digests {
		if named[d] {
			continue
		}
		img, err := s.image(idx, "", d)
		if errors.Is(err, fault.ErrNotFound) { // removed meanwhile
			continue
		}
		if err != nil {
			return nil, err
		}
		list = append(list, img)
	}
	return list, nil
}

// Remove takes the name ref away, or, when ref is a digest or a prefix of one,
// the only name that the image has. Files that no image needs any more go too,
// but not those of a digest that inUse reports (nil: none is in use): these
// stay until GC finds them free.
func (s *Store) Remove(_ context.Context, ref string, inUse func(digest string) bool) error {
	var doomed []string
	err := s.locked(func() error {
		idx, err := s.index()
		if err != nil {
			return err
		}
		name, digest, err := s.find(idx, ref)
		if err != nil {
			return err
		}
		if name == "" {
			var names []string
			for n, e := range idx.Names {
				if e.Digest == digest {
					names = append(names, familiar(n))
				}
			}
			slices.Sort(names)
			switch {
			case len(names) > 1:
				return &fault.Error{Op: "remove image", ID: ref, Hint: "Remove each of its names.",
					Err: fmt.Errorf("%w: it has the names %q", fault.ErrInvalid, names)}
			case len(names) == 1:
				name, _ = canonical(names[0])
			case inUse != nil && inUse(digest):
				return fmt.Errorf("%w: image %s is in use", fault.ErrState, digest)
			}
		}
		if name != "" {
			delete(idx.Names, name)
			if err := s.writeJSON("index.json", idx); err != nil {
				return err
			}
			if err := failpoint.Hit("images.remove.after-index"); err != nil {
				return err
			}
		}
		doomed, err = s.collect(idx, func(d string) bool { return d != digest || inUse != nil && inUse(d) })
		return err
	})
	return errors.Join(err, removeAll(doomed))
}

// GC removes every image without a name that inUse does not report, layers that
// no image has, and what killed imports left. It returns the digests removed.
func (s *Store) GC(_ context.Context, inUse func(digest string) bool) ([]string, error) {
	var doomed, gone []string
	err := s.locked(func() error {
		idx, err := s.index()
		if err != nil {
			return err
		}
		before, err := s.digests()
		if err != nil {
			return err
		}
		if doomed, err = s.collect(idx, func(d string) bool { return inUse != nil && inUse(d) }); err != nil {
			return err
		}
		after, err := s.digests()
		for _, d := range before {
			if !slices.Contains(after, d) {
				gone = append(gone, d)
			}
		}
		return err
	})
	return gone, errors.Join(err, removeAll(doomed), s.sweep())
}

// collect drops the records that have no name and that keep does not want, then
// the layers that no record has. It returns the directories to delete; the
// lock must be held.
func (s *Store) collect(idx index, keep func(digest string) bool) (doomed []string, err error) {
	named := map[string]bool{}
	for _, e := range idx.Names {
		named[e.Digest] = true
	}
	digests, err := s.digests()
	if err != nil {
		return nil, err
	}
	needed := map[string]bool{}
	for _, d := range digests {
		hex, _ := hexOf(d)
		if !named[d] && !keep(d) {
			if err := os.Remove(s.path("records", hex+".json")); err != nil {
				return nil, err
			}
			continue
		}
		rec, err := s.record(d)
		if err != nil {
			return nil, err // it may need any layer
		}
		for _, l := range rec.Manifest.Layers {
			needed[l] = true
		}
	}
	if err := syncDir(s.path("records")); err != nil {
		return nil, err
	}
	if err := failpoint.Hit("images.remove.before-layers"); err != nil {
		return nil, err
	}
	layers, err := os.ReadDir(s.path("layers"))
	if err != nil {
		return nil, err
	}
	for _, l := range layers {
		if needed["sha256:"+l.Name()] {
			continue
		}
		// Renamed first: a layer is whole or not there.
		to := s.path("tmp", "removed-"+l.Name()+"-"+random())
		if err := os.Rename(s.path("layers", l.Name()), to); err != nil {
			return doomed, err
		}
		doomed = append(doomed, to)
	}
	return doomed, syncDir(s.path("layers"))
}

// digests lists all records.
func (s *Store) digests() ([]string, error) {
	files, err := os.ReadDir(s.path("records"))
	if err != nil {
		return nil, err
	}
	var list []string
	for _, f := range files {
		if d := "sha256:" + trimExt(f.Name()); filepath.Ext(f.Name()) == ".json" {
			if _, ok := hexOf(d); ok {
				list = append(list, d)
			}
		}
	}
	return list, nil
}

// Verify reads all files of an image again. A difference from its digest is
// ErrCorrupt.
func (s *Store) Verify(ctx context.Context, digest string) error {
	rec, err := s.record(digest)
	if err != nil {
		return err
	}
	for _, l := range rec.Manifest.Layers {
		hex, ok := hexOf(l)
		if !ok {
			return fmt.Errorf("%w: image %s has the layer %q", fault.ErrCorrupt, digest, l)
		}
		top, err := os.Open(s.path("layers", hex, "diff"))
		if err != nil {
			return fmt.Errorf("%w: layer %s of image %s: %w", fault.ErrCorrupt, l, digest, err)
		}
		got, _, err := tree.Hash(ctx, top)
		top.Close()
		if err != nil {
			return err
		}
		if got != hex {
			return &fault.Error{Op: "verify image", ID: digest, Hint: "Something wrote to " + s.path("layers", hex) + ": remove the image and import it again.",
				Err: fmt.Errorf("%w: the files of layer %s have changed", fault.ErrCorrupt, l)}
		}
	}
	return nil
}

func (s *Store) index() (index, error) {
	idx := index{Version: 1, Names: map[string]entry{}}
	err := readJSON(s.path("index.json"), &idx)
	if errors.Is(err, fs.ErrNotExist) {
		err = nil
	}
	if err == nil && idx.Version != 1 {
		err = fmt.Errorf("%w: %s was written by a newer agentbox", fault.ErrUnsupported, s.path("index.json"))
	}
	if idx.Names == nil {
		idx.Names = map[string]entry{}
	}
	return idx, err
}

// locked runs fn while no other process publishes. It blocks; all holders are
// quick.
func (s *Store) locked(fn func() error) error {
	f, err := os.OpenFile(s.path("lock"), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return err
	}
	defer f.Close() // releases the lock
	if err := flock(f, unix.LOCK_EX); err != nil {
		return fmt.Errorf("lock the image store: %w", err)
	}
	return fn()
}

func flock(f *os.File, how int) error {
	for {
		if err := unix.Flock(int(f.Fd()), how); err != unix.EINTR {
			return err
		}
	}
}

func readJSON(path string, v any) error {
	b, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	if err := json.Unmarshal(b, v); err != nil {
		return fmt.Errorf("%w: %s: %w", fault.ErrCorrupt, path, err)
	}
	return nil
}
