package images

import (
	"context"
	"fmt"
	"os"
	"slices"
	"time"

	"github.com/agentbox/agentbox/images/image"
	"github.com/agentbox/agentbox/images/layer"
	"github.com/agentbox/agentbox/internal/fault"
)

// Tag gives the image that ref means one more name, which moves if it meant
// another one.
func (s *Store) Tag(_ context.Context, ref, name string) error {
	canon, err := s.canonical(name)
	if err != nil {
		return err
	}
	return s.locked(func() error {
		idx, err := s.index()
		if err != nil {
			return err
		}
		from, digest, err := s.find(idx, ref)
		if err != nil {
			return err
		}
		if _, err := s.image(idx, from, digest); err != nil {
			return err
		}
		idx.Names[canon] = entry{Digest: digest, Created: time.Now().UTC()}
		return s.writeJSON("index.json", idx)
	})
}

// Inspect returns all that is known of an image.
func (s *Store) Inspect(_ context.Context, ref string) (image.Details, error) {
	idx, err := s.index()
	if err != nil {
		return image.Details{}, err
	}
	name, digest, err := s.find(idx, ref)
	if err != nil {
		return image.Details{}, err
	}
	img, err := s.image(idx, name, digest)
	if err != nil {
		return image.Details{}, err
	}
	rec, err := s.record(digest)
	if err != nil {
		return image.Details{}, err
	}
	d := image.Details{
		Image: img, Names: s.familiars(idx.namesOf(digest)), Source: rec.Source, Manifest: rec.Manifest,
		ManifestType: rec.ManifestType,
	}
	if rec.Manifest != nil {
		d.ManifestDigest = digestOf(rec.Manifest)
	}
	for _, l := range rec.Layers {
		hex, _ := hexOf(l.DiffID)
		l.Dir = s.path("layers", hex, "diff")
		d.LayerList = append(d.LayerList, l)
	}
	if rec.Old != nil {
		return d, nil
	}
	if d.RawConfig, err = s.config(digest); err != nil {
		return image.Details{}, err
	}
	f, _, err := parseConfig(d.RawConfig)
	if err != nil {
		return image.Details{}, err
	}
	next := 0
	for _, h := range f.History {
		step := image.History{
			Created: h.Created.Time, CreatedBy: h.CreatedBy, Author: h.Author, Comment: h.Comment, Empty: h.EmptyLayer,
		}
		if !h.EmptyLayer && next < len(rec.Layers) {
			step.DiffID, step.Bytes = rec.Layers[next].DiffID, rec.Layers[next].Bytes
			next++
		}
		d.History = append(d.History, step)
	}
	for _, l := range rec.Layers[next:] { // a history need not be there, or whole
		d.History = append(d.History, image.History{DiffID: l.DiffID, Bytes: l.Bytes})
	}
	return d, nil
}

// Verify proves an image: its configuration by its digest, and every layer by
// making its tar again from the files and comparing these with the headers. A
// difference is ErrCorrupt.
func (s *Store) Verify(ctx context.Context, digest string) error {
	rec, err := s.record(digest)
	if err == nil {
		err = rec.errOld(digest)
	}
	if err != nil {
		return err
	}
	if _, err := s.config(digest); err != nil {
		return fmt.Errorf("%w: %w", fault.ErrCorrupt, err)
	}
	var all []string
	for _, l := range rec.Layers {
		all = append(all, l.DiffID)
	}
	all = append(all, rec.Lower...)
	slices.Sort(all)
	for _, d := range slices.Compact(all) {
		hex, ok := hexOf(d)
		if !ok {
			return fmt.Errorf("%w: image %s has the layer %q", fault.ErrCorrupt, digest, d)
		}
		dir, err := os.Open(s.path("layers", hex))
		if err != nil {
			return fmt.Errorf("%w: layer %s of image %s: %w", fault.ErrCorrupt, d, digest, err)
		}
		err = layer.Verify(ctx, dir, d)
		dir.Close()
		if err != nil {
			return &fault.Error{Op: "verify image", ID: digest, Err: fmt.Errorf("layer %s: %w", d, err),
				Hint: "Something wrote to " + s.path("layers", hex) +
					": remove the image, and pull or import it again."}
		}
	}
	return nil
}
