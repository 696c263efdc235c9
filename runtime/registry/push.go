package registry

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/remote/transport"
	"github.com/google/go-containerregistry/pkg/v1/types"

	"github.com/agentbox/agentbox/internal/failpoint"
	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/internal/remote"
	"github.com/agentbox/agentbox/runtime/store/pack"
)

// Checkpoint is the source of Push; a *store.Reader is one.
type Checkpoint interface {
	// Chunks calls fn for every chunk that the checkpoint needs, once, with
	// its raw bytes.
	Chunks(ctx context.Context, fn func(digest string, raw int64) error) error
	// Chunk returns a chunk, proven.
	Chunk(ctx context.Context, digest string) ([]byte, error)
}

// About describes the checkpoint that the chunks belong to.
type About struct {
	ID       string // the checkpoint's, 12 or more hex digits
	Manifest []byte // manifest.json as it lies in the store
	// Ancestors are the ids of the checkpoints before it, the parent first. The
	// first one that is in the repository shares its packs.
	Ancestors []string
	// Image is the digest of the manifest of the image below, sha256:HEX; when
	// the repository has it, the artifact refers to it.
	Image string
	// Annotations of the artifact. They are for people who inspect it; no code reads them.
	Annotations map[string]string
}

// Pushed is the result of Push.
type Pushed struct {
	Reference string // HOST/NAME@sha256:HEX
	Bytes     int64  // that travelled
	Skipped   int64  // of blobs that were there already
}

const (
	maxAncestors = 32 // that are asked for
	maxReused    = 64 // packs of others in one artifact; above, those that give least are pushed anew as one
	minUse       = 4  // a pack is used again when at least 1/minUse of it is needed
)

// Tag returns the tag of a checkpoint's artifact, besides the tag that it was pushed as.
func Tag(id string) string { return "ckpt-" + id[:min(12, len(id))] }

// Push stores a checkpoint under ref, HOST/NAME[:TAG], and under Tag in the same repository.
// Nothing shows there before all of it is there. Blobs that an interrupted push has stored
// are not pushed again.
//
// Without a login it is ErrDenied; a registry that sends nonsense is ErrCorrupt.
func Push(ctx context.Context, ref string, cp Checkpoint, about About, opts Options) (Pushed, error) {
	r, err := parse(ref, opts)
	if err != nil {
		return Pushed{}, err
	}
	if _, ok := r.(name.Digest); ok {
		return Pushed{}, fmt.Errorf("reference %q: %w: what is pushed gets its digest from its content", ref,
			fault.ErrInvalid)
	}
	if len(about.Manifest) < 2 || len(about.Manifest) > maxManifest {
		return Pushed{}, fmt.Errorf("a manifest of %d bytes: %w", len(about.Manifest), fault.ErrInvalid)
	}
	own, err := name.NewTag(r.Context().Name()+":"+Tag(about.ID), name.StrictValidation)
	if err != nil {
		return Pushed{}, fmt.Errorf("checkpoint id %q: %w: %w", about.ID, fault.ErrInvalid, err)
	}
	// Without a tag only the checkpoint's own is set: :latest is for images.
	tags := []name.Reference{r.Context().Tag(own.TagStr())}
	if strings.Contains(path.Base(ref), ":") && r.Identifier() != own.TagStr() {
		tags = append(tags, r)
	}
	c, err := connect(ctx, r.Context(), transport.PushScope, opts)
	if err != nil {
		return Pushed{}, err
	}
	defer c.Close()
	p := &push{c: c, cp: cp, about: about, need: map[pack.ID]need{}}
	if err := p.run(ctx, tags); err != nil {
		return Pushed{}, err
	}
	return p.out, nil
}

// push is one run of Push.
type push struct {
	c     *client
	cp    Checkpoint
	about About
	need  map[pack.ID]need
	packs []packRef
	uses  []bitmap
	done  int64 // raw bytes
	total int64
	shown int64
	out   Pushed
}

// need is the state of a chunk.
type need struct {
	raw uint32
	had bool // by one of the packs
}

func (p *push) run(ctx context.Context, tags []name.Reference) error {
	if err := p.list(ctx); err != nil {
		return err
	}
	config := remote.Describe(ManifestType, p.about.Manifest)
	subject, err := p.c.subject(ctx, p.about.Image)
	if err != nil {
		return err
	}
	// The own artifact first: if it is whole, there is nothing to push.
	found, err := p.look(ctx, tags)
	if err != nil {
		return err
	}
	for _, a := range found {
		if a.m.Config.Digest == config.Digest && sameSubject(a.m.Subject, subject) &&
			maps.Equal(a.m.Annotations, p.about.Annotations) {
			if whole, err := p.whole(ctx, a); err != nil {
				return err
			} else if whole {
				return p.tag(ctx, a.raw, a.digest, tags)
			}
		}
	}
	if err := p.reuse(ctx, found); err != nil {
		return err
	}
	if err := p.fresh(ctx); err != nil {
		return err
	}
	data := encodeUses(p.uses)
	uses := remote.Describe(UsesType, data)
	for _, b := range []struct {
		desc v1.Descriptor
		data []byte
	}{{uses, data}, {config, p.about.Manifest}} {
		if err := p.upload(ctx, b.desc, inMemory(b.data), nil); err != nil {
			return err
		}
	}
	raw, err := encodeArtifact(config, uses, p.packs, subject, p.about.Annotations)
	if err != nil {
		return err
	}
	if _, err := parseArtifact(raw); err != nil {
		return fmt.Errorf("what would be pushed could not be pulled: %w", err)
	}
	return p.tag(ctx, raw, remote.Describe(types.OCIManifestSchema1, raw).Digest, tags)
}

// list asks what the checkpoint needs.
func (p *push) list(ctx context.Context) error {
	return p.cp.Chunks(ctx, func(digest string, raw int64) error {
		id, err := pack.ParseID(digest)
		if err != nil {
			return err
		}
		if raw < 1 || raw > pack.MaxChunk {
			return fmt.Errorf("piece %s of %d bytes: %w", digest, raw, fault.ErrInvalid)
		}
		if _, there := p.need[id]; !there {
			p.need[id] = need{raw: uint32(raw)}
			p.total += raw
		}
		if len(p.need) > maxChunks {
			return fmt.Errorf("more than %d pieces: %w", maxChunks, fault.ErrUnsupported)
		}
		return nil
	})
}

// look fetches the artifacts that may have some of the chunks: what is under
// the tags now, and the nearest ancestor.
func (p *push) look(ctx context.Context, tags []name.Reference) (found []*artifact, err error) {
	seen := map[v1.Hash]bool{}
	try := func(ref name.Reference) (bool, error) {
		a, err := p.c.artifact(ctx, ref)
		switch {
		case errors.Is(err, fault.ErrNotFound), errors.Is(err, fault.ErrInvalid), errors.Is(err, fault.ErrUnsupported),
			errors.Is(err, fault.ErrCorrupt):
			return false, nil // nothing that could be of use
		case err != nil:
			return false, err
		}
		if !seen[a.digest] {
			seen[a.digest] = true
			found = append(found, a)
		}
		return true, nil
	}
	for _, t := range tags {
		if _, err := try(t); err != nil {
			return nil, err
		}
	}
	for _, id := range p.about.Ancestors[:min(len(p.about.Ancestors), maxAncestors)] {
		if ok, err := try(p.c.Repo.Tag(Tag(id))); err != nil || ok {
			return found, err
		}
	}
	return found, nil
}

// candidate is a pack of another artifact.
type candidate struct {
	ref     packRef
	entries []entry
	stored  int64 // bytes of all chunks
	used    int64 // bytes of those that are needed and not yet had
}

// measure counts anew.
func (p *push) measure(c *candidate) {
	c.stored, c.used = 0, 0
	for _, e := range c.entries {
		c.stored += int64(e.stored)
		if n, needed := p.need[e.id]; needed && !n.had {
			c.used += int64(e.stored)
		}
	}
}

// reuse takes the packs of others of which enough is needed.
func (p *push) reuse(ctx context.Context, found []*artifact) error {
	var list []*candidate
	seen := map[v1.Hash]bool{}
	for _, a := range found {
		for _, ref := range a.packs {
			if seen[ref.pack.Digest] {
				continue
			}
			seen[ref.pack.Digest] = true
			entries, err := p.c.index(ctx, ref)
			if errors.Is(err, fault.ErrCorrupt) || errors.Is(err, fault.ErrNotFound) {
				continue
			}
			if err != nil {
				return err
			}
			cand := &candidate{ref: ref, entries: entries}
			if p.measure(cand); cand.used > 0 {
				list = append(list, cand)
			}
		}
	}
	slices.SortStableFunc(list, func(a, b *candidate) int { return cmp.Compare(b.used, a.used) })
	for _, cand := range list {
		if p.measure(cand); cand.used*minUse < cand.stored || cand.used == 0 || len(p.packs) == maxReused {
			continue
		}
		// A registry that collects garbage may have lost what a manifest names.
		there, err := p.c.Exists(ctx, cand.ref.pack)
		if err != nil {
			return err
		}
		if there {
			p.take(cand.ref, cand.entries)
			p.out.Skipped += cand.ref.pack.Size + cand.ref.index.Size
		}
	}
	p.progress(0)
	return nil
}

// take makes a pack one of the artifact's.
func (p *push) take(ref packRef, entries []entry) {
	m := newBitmap(len(entries))
	for i, e := range entries {
		if n, needed := p.need[e.id]; needed && !n.had {
			m.set(i)
			p.need[e.id] = need{n.raw, true}
			p.done += int64(n.raw)
		}
	}
	p.packs, p.uses = append(p.packs, ref), append(p.uses, m)
}

// fresh makes packs of what is left, and pushes them.
func (p *push) fresh(ctx context.Context) error {
	var ids []pack.ID
	for id, n := range p.need {
		if !n.had {
			ids = append(ids, id)
		}
	}
	if len(ids) == 0 {
		return nil
	}
	slices.SortFunc(ids, func(a, b pack.ID) int { return bytes.Compare(a[:], b[:]) })
	dir, err := os.MkdirTemp(p.c.opts.Scratch, "push-*")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	for len(ids) > 0 {
		b, err := build(ctx, filepath.Join(dir, "pack"), ids, p.cp.Chunk, p.c.opts.packSize)
		if err != nil {
			return err
		}
		if len(p.packs) == maxPacks {
			return fmt.Errorf("more than %d packs: %w", maxPacks, fault.ErrUnsupported)
		}
		if err := failpoint.Hit("registry.push.before-pack"); err != nil {
			return err
		}
		open := func() (io.ReadCloser, error) { return os.Open(b.path) }
		err = p.upload(ctx, b.desc, open, func(n int64) {
			p.progress(int64(float64(b.raw) * float64(n) / float64(b.desc.Size)))
		})
		if err != nil {
			return err
		}
		data := encodeIndex(b.entries)
		index := remote.Describe(IndexType, data)
		if err := p.upload(ctx, index, inMemory(data), nil); err != nil {
			return err
		}
		p.take(packRef{b.desc, index}, b.entries)
		p.progress(0)
		if err := os.Remove(b.path); err != nil {
			return err
		}
		ids = ids[len(b.entries):]
	}
	return nil
}

func inMemory(data []byte) func() (io.ReadCloser, error) {
	return func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(data)), nil }
}

func (p *push) progress(more int64) {
	if p.c.opts.Progress != nil {
		p.shown = max(p.shown, p.done+more) // what is tried again is not taken back
		p.c.opts.Progress(p.shown, p.total)
	}
}

// upload stores a blob, unless it is there.
func (p *push) upload(
	ctx context.Context, d v1.Descriptor, open func() (io.ReadCloser, error), sent func(int64),
) error {
	read := false
	b := &blob{desc: d, open: open, sent: func(n int64) {
		read = true
		if sent != nil {
			sent(n)
		}
	}}
	err := p.c.Retry(ctx, func() error { return p.c.Pusher.Upload(ctx, p.c.Repo, b) })
	if err != nil {
		return p.c.Explain(fmt.Errorf("push %s: %w", d.Digest, err))
	}
	if read {
		p.out.Bytes += d.Size
	} else {
		p.out.Skipped += d.Size
	}
	return nil
}

// whole reports whether an artifact of this very checkpoint has all of its
// chunks, and the registry all of its blobs.
func (p *push) whole(ctx context.Context, a *artifact) (bool, error) {
	skipped := a.m.Config.Size + a.uses.Size
	blobs := []v1.Descriptor{a.m.Config, a.uses}
	data, err := p.c.Small(ctx, a.uses)
	if errors.Is(err, fault.ErrCorrupt) || errors.Is(err, fault.ErrNotFound) {
		return false, nil
	} else if err != nil {
		return false, err
	}
	uses, err := parseUses(data, a.packs)
	if err != nil {
		return false, nil
	}
	got := make(map[pack.ID]bool, len(p.need))
	for i, ref := range a.packs {
		entries, err := p.c.index(ctx, ref)
		if errors.Is(err, fault.ErrCorrupt) || errors.Is(err, fault.ErrNotFound) {
			return false, nil
		} else if err != nil {
			return false, err
		}
		for k, e := range entries {
			if _, needed := p.need[e.id]; needed && uses[i].has(k) {
				got[e.id] = true
			}
		}
		blobs = append(blobs, ref.pack)
		skipped += ref.pack.Size + ref.index.Size
	}
	if len(got) != len(p.need) {
		return false, nil
	}
	for _, d := range blobs {
		if there, err := p.c.Exists(ctx, d); err != nil || !there {
			return false, err
		}
	}
	p.done = p.total
	p.progress(0)
	p.out.Skipped += skipped
	return true, nil
}

func sameSubject(a, b *v1.Descriptor) bool {
	if a == nil || b == nil {
		return a == b
	}
	return a.Digest == b.Digest
}

// tag publishes the artifact.
func (p *push) tag(ctx context.Context, raw []byte, digest v1.Hash, tags []name.Reference) error {
	for _, t := range tags {
		if err := failpoint.Hit("registry.push.before-tag"); err != nil {
			return err
		}
		if err := p.c.Retry(ctx, func() error { return p.c.Pusher.Put(ctx, t, rawManifest(raw)) }); err != nil {
			return p.c.Explain(fmt.Errorf("push %s: %w", t, err))
		}
	}
	p.out.Reference = p.c.Repo.Digest(digest.String()).Name()
	return nil
}

type rawManifest []byte

func (m rawManifest) RawManifest() ([]byte, error)        { return m, nil }
func (m rawManifest) MediaType() (types.MediaType, error) { return types.OCIManifestSchema1, nil }

// index reads and proves the index of a pack.
func (c *client) index(ctx context.Context, ref packRef) ([]entry, error) {
	data, err := c.Small(ctx, ref.index)
	if err != nil {
		return nil, err
	}
	return parseIndex(data, ref.pack.Size)
}
