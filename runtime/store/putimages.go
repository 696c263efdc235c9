package store

import (
	"bytes"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/zeebo/blake3"
	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/internal/guard"
	"github.com/agentbox/agentbox/overlay"
	"github.com/agentbox/agentbox/runtime/store/pack"
)

// PutImages stores the files that CRIU wrote to CRIUDir; anything but plain files is refused.
// From images of pages it stores only those pages that the parent checkpoint's do not have.
// The files are not needed afterwards.
func (d *Draft) PutImages(ctx context.Context) error {
	d.mu.Lock()
	again := d.images != nil || d.ended
	d.mu.Unlock()
	if again {
		return fmt.Errorf("process images are put only once: %w", fault.ErrInvalid)
	}
	dir, err := openDir(filepath.Join(d.dir, ImagesName))
	if err != nil {
		return err
	}
	defer dir.Close()
	list, err := listImages(dir)
	if err != nil {
		return err
	}
	if len(list) == 0 {
		return fmt.Errorf("a full checkpoint needs process images: %w", fault.ErrInvalid)
	}
	old, err := d.knownPages(ctx)
	if err != nil {
		return err
	}
	// Images of pages use all processors by themselves, and the memory that
	// goes with it; they come one by one, the small ones beside them.
	var g guard.Group
	g.Go(func() error {
		for i := range list {
			if isPages(list[i].Name) {
				if err := d.putPages(ctx, dir, &list[i], old); err != nil {
					return err
				}
			}
		}
		return nil
	})
	g.Go(func() error {
		for i := range list {
			if !isPages(list[i].Name) {
				if err := d.putImage(ctx, dir, &list[i]); err != nil {
					return err
				}
			}
		}
		return nil
	})
	if err := g.Wait(); err != nil {
		return err
	}
	slices.SortFunc(list, func(a, b Image) int { return strings.Compare(a.Name, b.Name) })
	listed, err := d.putImageList(ctx, list)
	if err != nil {
		return err
	}
	d.mu.Lock()
	d.images, d.listed = list, listed
	d.mu.Unlock()
	return nil
}

// CountImages has PutImages call add with how many bytes of the images it has read,
// again and again, from two goroutines. It is called before that.
func (d *Draft) CountImages(add func(n int64)) { d.reads = add }

// counted counts what is read of an image.
func (d *Draft) counted(r io.Reader) io.Reader {
	if d.reads == nil {
		return r
	}
	return io.TeeReader(r, counter(d.reads))
}

// counter is a writer that counts.
type counter func(n int64)

func (c counter) Write(p []byte) (int, error) {
	c(int64(len(p)))
	return len(p), nil
}

// isPages reports whether an image is one of memory pages, of which CRIU makes one for each
// address space.
func isPages(name string) bool {
	return strings.HasPrefix(name, "pages-") && strings.HasSuffix(name, ".img")
}

// listImages returns the files of a directory, the largest first. Anything but
// plain files is refused.
func listImages(dir *os.File) ([]Image, error) {
	names, err := readDir(dir)
	if err != nil {
		return nil, err
	}
	if len(names) == maxImages {
		return nil, fmt.Errorf("more than %d process images: %w", maxImages, fault.ErrUnsupported)
	}
	list := make([]Image, 0, len(names))
	for _, name := range names {
		var st unix.Stat_t
		if err := unix.Fstatat(int(dir.Fd()), name, &st, unix.AT_SYMLINK_NOFOLLOW); err != nil {
			return nil, fmt.Errorf("process image %s: %w", name, err)
		}
		if st.Mode&unix.S_IFMT != unix.S_IFREG {
			return nil, fmt.Errorf("process image %s is not a regular file: %w", name, fault.ErrCorrupt)
		}
		list = append(list, Image{Name: name, Bytes: st.Size})
	}
	slices.SortFunc(list, func(a, b Image) int { return int(max(-1, min(1, b.Bytes-a.Bytes))) })
	return list, nil
}

func (d *Draft) putImage(ctx context.Context, dir *os.File, im *Image) (err error) {
	f, info, err := openPlain(dir, im.Name)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	im.Bytes = info.Size()
	var list []overlay.Chunk
	if im.Bytes > 0 {
		im.Digest, list, err = cut(ctx, im.Bytes, d.counted(f), func(raw []byte) (pack.ID, error) {
			return d.addNeeded(ctx, raw)
		})
	} else {
		im.Digest = digestOf(nil)
	}
	if err == nil {
		err = ends(f)
	}
	if err != nil {
		return fmt.Errorf("process image %s: %w", im.Name, err)
	}
	im.Chunks = list
	return nil
}

// ends wants a file to have no more to read.
func ends(f *os.File) error {
	if n, err := f.Read(make([]byte, 1)); n != 0 || !errors.Is(err, io.EOF) {
		return fmt.Errorf("it is still being written (%v): %w", err, fault.ErrState)
	}
	return nil
}

func (d *Draft) putPages(ctx context.Context, dir *os.File, im *Image, old pageSource) (err error) {
	f, info, err := openPlain(dir, im.Name)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	if info.Size() == 0 {
		im.Digest = digestOf(nil)
		return nil
	}
	h := blake3.New()
	pages, err := pack.CutPages(io.TeeReader(d.counted(f), h), old.index, func(raw []byte) (pack.ID, error) {
		return d.addNeeded(ctx, raw)
	})
	if err != nil {
		return fmt.Errorf("process image %s: %w", im.Name, err)
	}
	if pages.Size != info.Size() {
		return fmt.Errorf("process image %s is still being written: %w", im.Name, fault.ErrState)
	}
	im.Bytes, im.Digest = pages.Size, sum(h)
	recipe := pack.EncodeRecipe(pages.Segments)
	if int64(len(recipe)) > maxRecipe {
		if old.index == nil {
			return fmt.Errorf("process image %s needs a recipe of %d bytes, %d are handled: %w", im.Name, len(recipe),
				maxRecipe, fault.ErrUnsupported)
		}
		// After very many changes it lies in very many places: time to begin anew.
		return d.putPages(ctx, dir, im, pageSource{})
	}
	d.mu.Lock()
	addSegments(&d.need, pages.Segments)
	d.mu.Unlock()

	_, im.Recipe, err = cut(ctx, int64(len(recipe)), bytes.NewReader(recipe), func(raw []byte) (pack.ID, error) {
		return d.addNeeded(ctx, raw)
	})
	if err != nil {
		return err
	}
	var table Chunks
	if !pages.Fresh {
		table = slices.Clone(old.table)
	}
	for part := range slices.Chunk(pages.Table, pack.MaxChunk) {
		id, err := d.addNeeded(ctx, part)
		if err != nil {
			return err
		}
		table = append(table, overlay.Chunk{Digest: id.String(), Len: int64(len(part))})
	}
	im.Pages = table
	d.mu.Lock()
	defer d.mu.Unlock()
	return addChunks(&d.need, table)
}

// pageSource is what may be referred to instead of being stored again: the pages of all images of
// the parent checkpoint. CRIU numbers the images anew in each dump, so their names mean
// nothing.
type pageSource struct {
	index *pack.PageIndex // nil: nothing
	table Chunks          // that it was loaded from
}

// knownPages loads the page index of the parent checkpoint. A parent that cannot be read
// counts as none. So does one whose manifest was made elsewhere, for the hashes in its page
// tables are not checked against the pages, and a damaged one, which would damage this
// checkpoint too.
func (d *Draft) knownPages(ctx context.Context) (pageSource, error) {
	if d.row.Parent == "" {
		return pageSource{}, nil
	}
	var foreign, damaged bool
	var digest string
	err := d.s.read.QueryRowContext(ctx,
		"SELECT pulled, damaged <> '', digest FROM checkpoints WHERE id = ? AND status = 'ready'",
		d.row.Parent).Scan(&foreign, &damaged, &digest)
	if errors.Is(err, sql.ErrNoRows) || damaged {
		return pageSource{}, nil
	}
	if err != nil {
		return pageSource{}, cancelled(ctx, dbError("find the parent", err))
	}
	if foreign {
		if origin, err := d.s.Origin(d.row.Parent); err != nil || madeElsewhere(origin, digest) {
			return pageSource{}, nil
		}
	}
	k, err := d.loadPages(ctx)
	for _, e := range []error{fault.ErrCorrupt, fault.ErrNotFound, fault.ErrState, fault.ErrUnsupported} {
		if errors.Is(err, e) {
			return pageSource{}, nil
		}
	}
	return k, err
}

func (d *Draft) loadPages(ctx context.Context) (pageSource, error) {
	r, err := d.s.openReady(ctx, d.row.Parent)
	if err != nil {
		return pageSource{}, err
	}
	defer r.Close()
	r.chunks.x = d.x
	var k pageSource
	var recipe []pack.Segment
	var need idSet
	have := map[string]bool{}
	images, err := r.Images(ctx)
	if err != nil {
		return pageSource{}, err
	}
	for i := range images {
		im := &images[i]
		if len(im.Pages) == 0 {
			continue
		}
		segs, err := r.recipe(ctx, im)
		if err != nil {
			return pageSource{}, err
		}
		recipe = append(recipe, segs...)
		addSegments(&need, segs)
		for _, x := range im.Pages {
			if !have[x.Digest] {
				have[x.Digest] = true
				k.table = append(k.table, x)
			}
		}
	}
	if len(k.table) == 0 {
		return pageSource{}, nil
	}
	// All that it refers to must be there: what is referred to again is not
	// stored again.
	gone, err := d.x.sound(ctx, need.list(), func(place) error { return nil })
	if err != nil {
		return pageSource{}, err
	}
	if len(gone) > 0 {
		return pageSource{}, fmt.Errorf("piece %s is not there: %w", gone[0], fault.ErrCorrupt)
	}
	segs, err := segments(k.table)
	if err != nil {
		return pageSource{}, err
	}
	// A record never crosses the parts of a table, but a part may be cut in two
	// chunks anywhere, so that they are read as one.
	s := newStream(ctx, r.chunks, "table of pages", segs, true)
	k.index, err = pack.LoadPageIndex(s, recipe, len(k.table))
	return k, errors.Join(err, s.Close())
}
