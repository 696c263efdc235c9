// Package images turns a reference into read-only lower directories and a
// configuration.
//
// An image is what the rest of the world takes for one: its identity is the
// digest of its configuration, which names its layers by the digests of their
// tars. A layer is unpacked once, below that digest, whatever images have it and
// whatever lies below it; the few directories that a tar leaves to the layer below
// get a layer of their own on top.
//
//	pull    source.Open -> for each layer that is not here: fetch -> decompress -> layer.Unpack -> digest -> rename -> record
//	import  tree.Extract or tree.Clone -> layer.Seal -> rename -> record
//
// Layers are made in tmp and published by one rename, once all of it is on disk and its digest is
// verified (one syncfs for all layers that wait); records and names follow. Until then nothing uses what a source has left. A sandbox
// pins the image's digest, so a name may come to mean another image while the sandbox exists.
//
// On disk, below ROOT/images, everything 0700:
//
//	index.json                whole name -> digest, when
//	configs/HEX.json          the configuration as it is elsewhere, byte by byte; HEX is its digest
//	records/HEX.json          manifest, where from, layers, what is mounted
//	layers/HEX/               a layer as package layer has it; HEX is its diffID
//	layers/HEX/layer.json     its sizes, and what of it depends on the layers below
//	layers/HEX/diff.largest-id the largest id that owns something in it, once requested
//	tmp/                      imports and pulls under way (each holds a flock) and leftovers
//	tmp/partial-HEX           the beginning of a blob, kept a day for the next pull
//	lock                      flock, held while any of the above is published
//
// The package knows directories, never sandboxes: the caller says which digests are in use.
package images

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"github.com/agentbox/agentbox/images/image"
	"github.com/agentbox/agentbox/internal/failpoint"
	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/internal/fsx"
)

// Store keeps the images of one root. It is safe for concurrent use, by several
// processes too.
type Store struct {
	// Progress, when set before use, is called now and then during imports.
	Progress func(image.Progress)
	// Default is the registry of names that have none, HOST[:PORT][/PREFIX];
	// empty: docker.io.
	Default string

	dir     string
	builtin sync.Mutex // one goroutine at a time makes the built-in image
}

// Open opens the image store below root, agentbox's state directory, and makes
// it if it is not there.
func Open(root string) (*Store, error) {
	root, err := filepath.Abs(root)
	if err != nil {
		return nil, err
	}
	s := &Store{dir: filepath.Join(root, "images")}
	for _, d := range []string{"configs", "records", "layers", "tmp"} {
		if err := os.MkdirAll(s.path(d), 0o700); err != nil {
			return nil, fmt.Errorf("open the image store: %w", err)
		}
	}
	return s.opened()
}

// OpenExisting is Open for a root that may be removed at any moment: nothing in it is made again.
func OpenExisting(root string) (*Store, error) {
	root, err := filepath.Abs(root)
	if err != nil {
		return nil, err
	}
	return (&Store{dir: filepath.Join(root, "images")}).opened()
}

func (s *Store) opened() (*Store, error) {
	// A root from elsewhere may have them lead out of it.
	if err := fsx.NoLinks(s.dir, "", "configs", "records", "layers", "tmp"); err != nil {
		return nil, &fault.Error{Op: "open the image store", ID: s.dir,
			Hint: "Put in its place what it leads to; another disk can be mounted there.",
			Err:  fmt.Errorf("%w: %w", fault.ErrDenied, err)}
	}
	return s, nil
}

// Resolve finds the image that ref means: NAME[:TAG], NAME@DIGEST, a digest or a unique prefix of
// one. A name wins over a prefix. The built-in busybox is made when it is first requested. For an
// image that is known and cannot be used the digest comes with the error.
func (s *Store) Resolve(ctx context.Context, ref string) (image.Image, error) {
	idx, err := s.index()
	if err != nil {
		return image.Image{}, err
	}
	name, digest, err := s.find(idx, ref)
	if errors.Is(err, fault.ErrNotFound) && isBusybox(ref) {
		return s.makeBusybox(ctx)
	}
	if err != nil {
		return image.Image{}, err
	}
	img, err := s.image(idx, name, digest)
	if errors.Is(err, fault.ErrCorrupt) && idx.Names[name].Builtin {
		return s.makeBusybox(ctx)
	}
	return img, err
}

// ResolveDigest finds the image of a complete digest, as a sandbox or a checkpoint pins it,
// whatever its name means by now. It waits for a removal that is under way: a caller that has
// recorded its need for the image knows afterwards that the image stays.
func (s *Store) ResolveDigest(_ context.Context, digest string) (img image.Image, err error) {
	if _, ok := hexOf(digest); !ok {
		return image.Image{}, fmt.Errorf("%w: %q is not an image digest", fault.ErrInvalid, digest)
	}
	err = s.locked(func() error {
		idx, err := s.index()
		if err != nil {
			return err
		}
		img, err = s.image(idx, "", digest)
		return err
	})
	return img, err
}

// List returns all images, by name; those that lost their name come last, with
// an empty one. One that cannot be used is among them, and says why.
func (s *Store) List(context.Context) ([]image.Image, error) {
	idx, err := s.index()
	if err != nil {
		return nil, err
	}
	var list []image.Image
	named := map[string]bool{}
	for _, name := range slices.SortedFunc(maps.Keys(idx.Names), func(a, b string) int {
		return strings.Compare(s.familiar(a), s.familiar(b))
	}) {
		named[idx.Names[name].Digest] = true
		img, err := s.image(idx, name, idx.Names[name].Digest)
		if useless(err) {
			img.Damaged, err = err.Error(), nil
		}
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
		if useless(err) {
			img.Damaged, err = err.Error(), nil
		}
		if err != nil {
			return nil, err
		}
		list = append(list, img)
	}
	return list, nil
}

// useless reports whether an image, which is known, cannot be used.
func useless(err error) bool {
	return errors.Is(err, fault.ErrCorrupt) || errors.Is(err, fault.ErrNotFound)
}

// Remove removes the name ref or, if ref is a digest or a prefix of one, the only name of the
// image. Files that no image needs any more go too, except those of a digest that inUse reports
// (nil: none is in use): they stay until GC finds them free. While inUse runs, no digest can be
// resolved.
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
			names := idx.namesOf(digest)
			switch {
			case len(names) > 1:
				return &fault.Error{Op: "remove image", ID: ref, Hint: "Remove each of its names.",
					Err: fmt.Errorf("%w: it has the names %q", fault.ErrInvalid, s.familiars(names))}
			case len(names) == 1:
				name = names[0]
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
	return gone, errors.Join(err, removeAll(doomed), s.sweep(partialAge))
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
	needed, err := s.pinned()
	if err != nil {
		return nil, err
	}
	all := false // layers are needed
	for _, d := range digests {
		hex, _ := hexOf(d)
		if !named[d] && !keep(d) {
			if err := os.Remove(s.path("records", hex+".json")); err != nil {
				return nil, err
			}
			if err := os.Remove(s.path("configs", hex+".json")); err != nil && !errors.Is(err, fs.ErrNotExist) {
				return nil, err
			}
			continue
		}
		rec, err := s.record(d)
		if errors.Is(err, fault.ErrCorrupt) { // it may need any layer
			all = true
			continue
		}
		if err != nil {
			return nil, err
		}
		for _, l := range rec.Layers {
			needed[l.DiffID] = true
		}
		for _, d := range rec.Lower {
			needed[d] = true
		}
	}
	if err := fsx.SyncDir(s.path("records")); err != nil {
		return nil, err
	}
	if err := failpoint.Hit("images.remove.before-layers"); err != nil {
		return nil, err
	}
	if all {
		return nil, nil
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
		to := s.path("tmp", tmpRemoved+random())
		if err := os.Rename(s.path("layers", l.Name()), to); err != nil {
			return doomed, err
		}
		doomed = append(doomed, to)
	}
	return doomed, fsx.SyncDir(s.path("layers"))
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

// Prune removes the images that inUse does not report: those without a name, or with all every
// one except the built-in image, and leftovers of failed pulls. It returns the images and how
// many bytes their layers took.
func (s *Store) Prune(
	ctx context.Context, all bool, inUse func(digest string) bool,
) (removed []image.Image, freed int64, err error) {
	used := func(d string) bool { return inUse != nil && inUse(d) }
	var doomed []string
	err = s.locked(func() error {
		idx, err := s.index()
		if err != nil {
			return err
		}
		digests, err := s.digests()
		if err != nil {
			return err
		}
		for _, d := range digests {
			names := idx.namesOf(d)
			builtin := slices.ContainsFunc(names, func(n string) bool { return idx.Names[n].Builtin })
			if used(d) || builtin || len(names) > 0 && !all {
				continue
			}
			img, err := s.image(idx, "", d)
			if errors.Is(err, fault.ErrCorrupt) { // then it is of no use
				err = nil
			}
			if err != nil {
				return err
			}
			removed = append(removed, img)
			for _, n := range names {
				delete(idx.Names, n)
			}
		}
		if err := s.writeJSON("index.json", idx); err != nil {
			return err
		}
		doomed, err = s.collect(idx, used)
		for _, dir := range doomed {
			var info layerInfo
			if err := readJSON(filepath.Join(dir, "layer.json"), &info); err == nil {
				freed += info.Bytes
			}
		}
		return err
	})
	return removed, freed, errors.Join(err, removeAll(doomed), s.sweep(0))
}
