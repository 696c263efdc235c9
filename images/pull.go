package images

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/images/image"
	"github.com/agentbox/agentbox/images/layer"
	"github.com/agentbox/agentbox/images/reference"
	"github.com/agentbox/agentbox/images/source"
	"github.com/agentbox/agentbox/internal/failpoint"
	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/internal/flock"
	"github.com/agentbox/agentbox/internal/guard"
)

// A blob may unpack to this many times its size, or to the floor if that is
// more. Gzip's limit is 1032, zstd has none.
const (
	maxRatio   = 200
	ratioFloor = 2 << 30
)

// Pull gets the image that ref means from where it is, unless the policy is
// content with what is here, and gives it the name ref. Layers that are here are
// not fetched; those that have arrived when it fails stay for the next try, until
// GC. Nothing else of a failed pull is left but the beginning of blobs, which
// the next pull continues.
func (s *Store) Pull(ctx context.Context, ref string, opts image.PullOptions) (image.Image, error) {
	switch opts.Policy = cmp.Or(opts.Policy, image.PullMissing); opts.Policy {
	case image.PullAlways, image.PullMissing:
	case image.PullNever:
		return s.Resolve(ctx, ref)
	default:
		return image.Image{}, fmt.Errorf("%w: the pull policy %q: it is always, missing or never",
			fault.ErrInvalid, opts.Policy)
	}
	def := s.Default
	if c := opts.Source.Config; def == "" && c != nil {
		def = c.Default
	}
	r, err := reference.Parse(ref, def)
	// Files may be others than last time, and looking costs little.
	files := []reference.Transport{reference.Dir, reference.OCI, reference.OCIArchive, reference.DockerArchive}
	local := err == nil && slices.Contains(files, r.Transport)
	if err == nil && r.Transport == reference.Bootstrap {
		if r, err = source.Complete(r, opts.Source); err != nil {
			return image.Image{}, err
		}
		ref = r.String()
	}
	if opts.Policy == image.PullMissing && !local {
		img, rerr := s.Resolve(ctx, ref)
		if rerr == nil && (opts.Source.Platform == "" || img.Builtin ||
			samePlatform(img.Platform, opts.Source.Platform)) {
			return img, nil
		}
		if err != nil && rerr != nil { // a digest, or its prefix
			return image.Image{}, rerr
		}
		if rerr != nil && !errors.Is(rerr, fault.ErrNotFound) && !errors.Is(rerr, fault.ErrCorrupt) {
			return image.Image{}, rerr
		}
	}
	if err != nil {
		return image.Image{}, err
	}
	opts.Source.Scratch = s.path("tmp")
	opts.Source.Progress = nil
	switch r.Transport {
	case reference.Dir:
		return s.importPath(ctx, r.String(), r.Path)
	case reference.Bootstrap:
		t, err := source.Tree(ctx, r, opts.Source)
		if err != nil {
			return image.Image{}, err
		}
		img, err := s.importStream(ctx, r.String(), t)
		return img, errors.Join(err, t.Close())
	}
	if opts.Progress != nil { // of a daemon, which hands the image over whole
		var mu sync.Mutex
		opts.Source.Progress = func(p image.SourceProgress) {
			mu.Lock()
			defer mu.Unlock()
			opts.Progress(image.Progress{Layer: p.Digest, Stage: image.StagePulling, Done: p.Done, Total: p.Total})
		}
	}
	from, err := source.Open(ctx, r, opts.Source)
	if err != nil {
		return image.Image{}, err
	}
	img, err := s.take(ctx, r, r.String(), from, opts)
	return img, errors.Join(err, from.Close())
}

// samePlatform reports whether an image's platform is the one asked for; a variant
// that one of them does not name is any.
func samePlatform(have, want string) bool {
	return have == want || strings.HasPrefix(have, want+"/") || strings.HasPrefix(want, have+"/")
}

// take makes an image of a source's.
func (s *Store) take(
	ctx context.Context, ref reference.Reference, name string, from source.Image, opts image.PullOptions,
) (image.Image, error) {
	config, layers := from.Config(), from.Layers()
	f, cfg, err := parseConfig(config)
	if err != nil {
		return image.Image{}, err
	}
	if len(f.RootFS.DiffIDs) != len(layers) {
		return image.Image{}, fmt.Errorf("%w: the image has %d layers, and its configuration %d", fault.ErrCorrupt,
			len(layers), len(f.RootFS.DiffIDs))
	}
	for i, l := range layers {
		if _, ok := hexOf(l.DiffID); !ok || f.RootFS.DiffIDs[i].String() != l.DiffID {
			return image.Image{}, fmt.Errorf("%w: the layer %q is not the configuration's", fault.ErrCorrupt, l.DiffID)
		}
	}
	if err := s.sweep(partialAge); err != nil {
		return image.Image{}, err
	}
	pin, err := s.pin(layers)
	if err != nil {
		return image.Image{}, err
	}
	defer pin.release()
	if err := s.fetch(ctx, layers, opts); err != nil {
		return image.Image{}, err
	}
	rec := record{Version: recordVersion, Platform: platformOf(f), Created: time.Now().UTC(), Config: cfg}
	var infos []layerInfo
	for _, l := range layers {
		info, err := s.layerInfo(l.DiffID)
		if err != nil {
			return image.Image{}, err
		}
		infos = append(infos, info)
		rec.Layers = append(rec.Layers, image.Layer{
			DiffID: l.DiffID, Digest: l.Digest, MediaType: l.MediaType, Size: l.Size,
			Bytes: info.Bytes, Entries: info.Entries,
		})
		rec.Bytes += info.Bytes
		rec.Size += l.Size
	}
	if rec.Lower, err = s.stack(ctx, infos, pin); err != nil {
		return image.Image{}, err
	}
	manifest, kind, digest := from.Manifest()
	e := entry{Manifest: digest}
	if manifest == nil { // made here
		for i := range rec.Layers {
			rec.Layers[i].Digest, rec.Layers[i].Size = "", 0
		}
		rec.Size = 0
	} else {
		rec.Source, rec.Manifest, rec.ManifestType = ref.String(), manifest, kind
		if ref.Transport == reference.Docker {
			rec.RepoDigests = []string{ref.Name + "@" + digest}
			if ref.Digest != "" && ref.Digest != digest { // of an index
				rec.RepoDigests = append(rec.RepoDigests, ref.Name+"@"+ref.Digest)
			}
		}
	}
	if err := failpoint.Hit("images.pull.before-record"); err != nil {
		return image.Image{}, err
	}
	if err := s.locked(func() error { return s.commit(config, rec, name, e) }); err != nil {
		return image.Image{}, err
	}
	idx, err := s.index()
	if err != nil {
		return image.Image{}, err
	}
	return s.image(idx, name, digestOf(config))
}

// pin keeps layers from being collected while they have no record.
type pin struct {
	lock *flock.Handle
}

func (s *Store) pin(layers []source.Layer) (*pin, error) {
	p := &pin{}
	err := s.locked(func() (err error) { // no collection or sweep runs meanwhile
		p.lock, err = flock.Try(s.path("tmp", tmpPull+random()), 0)
		if err != nil {
			return err
		}
		for _, l := range layers {
			err = errors.Join(err, p.add(l.DiffID))
		}
		return err
	})
	if err != nil && p.lock != nil {
		p.release()
	}
	return p, err
}

// add wants the store's lock, and the layer placed under the same.
func (p *pin) add(diffID string) error {
	_, err := p.lock.File().WriteString(diffID + "\n")
	return err
}

// release cannot fail in a way that matters: what is left behind is swept.
func (p *pin) release() {
	_ = p.lock.Remove()
}

// pinned lists the layers that pulls under way need.
func (s *Store) pinned() (map[string]bool, error) {
	all := map[string]bool{}
	files, err := filepath.Glob(s.path("tmp", tmpPull+"*"))
	if err != nil {
		return nil, err
	}
	for _, path := range files {
		held, err := flock.Held(path, flock.Shared)
		if err != nil {
			return nil, err
		}
		if !held {
			continue
		}
		b, err := os.ReadFile(path)
		if err != nil && !errors.Is(err, os.ErrNotExist) { // the pull may have ended
			return nil, err
		}
		for line := range strings.Lines(string(b)) {
			all[strings.TrimSpace(line)] = true
		}
	}
	return all, nil
}

// fetch gets the layers that are not here.
func (s *Store) fetch(ctx context.Context, layers []source.Layer, opts image.PullOptions) error {
	var mu sync.Mutex
	say := func(p image.Progress) {
		if opts.Progress != nil {
			mu.Lock()
			defer mu.Unlock()
			opts.Progress(p)
		}
	}
	var todo []source.Layer
	seen := map[string]bool{}
	for _, l := range layers {
		if seen[l.DiffID] {
			continue
		}
		seen[l.DiffID] = true
		p := image.Progress{Layer: l.Digest, Stage: image.StageWaiting, Total: l.Size}
		if s.have(l.DiffID) {
			p.Stage, p.Done = image.StagePresent, l.Size
		} else {
			todo = append(todo, l)
		}
		say(p)
	}
	if len(todo) == 0 {
		return nil
	}
	pub := s.publisher(ctx)
	defer pub.close()
	group, ctx := guard.WithContext(ctx)
	group.SetLimit(cmp.Or(opts.Parallel, 3))
	for _, l := range todo {
		group.Go(func() error {
			err := s.layer(ctx, l, pub, say)
			if err != nil && ctx.Err() == nil {
				err = fmt.Errorf("layer %s: %w", l.Digest, err)
			}
			return err
		})
	}
	return group.Wait()
}

// layer gets one layer, unless another does.
func (s *Store) layer(ctx context.Context, l source.Layer, pub *publisher, say func(image.Progress)) error {
	hex, _ := hexOf(l.DiffID)
	dir, hold, err := s.claim(ctx, tmpLayer+hex, func() bool { return s.have(l.DiffID) })
	if err != nil {
		return err
	}
	if dir == "" {
		say(image.Progress{Layer: l.Digest, Stage: image.StagePresent, Done: l.Size, Total: l.Size})
		return nil
	}
	defer hold.Unlock() // and others may have it
	info, err := s.unpack(ctx, l, hold.File(), say)
	if err == nil {
		err = writeInfo(dir, info)
	}
	if err == nil {
		err = pub.publish(dir, hold.File(), l.DiffID)
	}
	if err != nil {
		return errors.Join(err, os.RemoveAll(dir))
	}
	say(image.Progress{
		Layer: l.Digest, Stage: image.StageDone, Done: l.Size, Total: l.Size, Entries: info.Entries, Bytes: info.Bytes,
	})
	return nil
}

// unpack fetches a layer into dir, continuing what an earlier pull had of it.
func (s *Store) unpack(ctx context.Context, l source.Layer, dir *os.File, say func(image.Progress)) (layerInfo, error) {
	info, resumed, err := s.unpackOnce(ctx, l, dir, say)
	if resumed && errors.Is(err, fault.ErrCorrupt) { // what was there was not the blob's beginning
		if err := clearDir(dir.Name()); err != nil {
			return info, err
		}
		info, _, err = s.unpackOnce(ctx, l, dir, say)
	}
	return info, err
}

func (s *Store) unpackOnce(
	ctx context.Context, l source.Layer, dir *os.File, say func(image.Progress),
) (info layerInfo, resumed bool, err error) {
	part := s.begun(l)
	defer part.close()
	resumed = part.have > 0
	body, err := part.open(ctx, l)
	if err == nil {
		info, err = s.unpackBody(ctx, l, dir, body, part, say)
		err = errors.Join(err, body.Close())
	}
	if err == nil || errors.Is(err, fault.ErrCorrupt) || errors.Is(err, unix.ENOSPC) {
		part.forget()
	}
	return info, resumed, err
}

func (s *Store) unpackBody(
	ctx context.Context, l source.Layer, dir *os.File, body io.ReadCloser, part *begun, say func(image.Progress),
) (layerInfo, error) {
	var done int64
	var last time.Time
	ahead := layer.ReadAhead(body, func(p []byte) {
		part.see(p)
		done += int64(len(p))
		if now := time.Now(); now.Sub(last) > 100*time.Millisecond {
			last = now
			say(image.Progress{Layer: l.Digest, Stage: image.StagePulling, Done: done, Total: l.Size})
		}
	})
	defer ahead.Close()
	plain, finish, err := layer.Decompress(ctx, ahead)
	if err != nil {
		return layerInfo{}, err
	}
	free, err := reserve(dir)
	if err != nil {
		return layerInfo{}, finished(finish, err)
	}
	rep, err := layer.Unpack(ctx, plain, dir, layer.Options{MinFree: free, MaxBytes: max(ratioFloor, maxRatio*l.Size)})
	if err = finished(finish, err); err != nil {
		// A stream that is not what was promised explains what came of it, and only
		// its end tells.
		if errors.Is(err, fault.ErrInvalid) {
			if _, rerr := io.Copy(io.Discard, ahead); errors.Is(rerr, fault.ErrCorrupt) {
				err = rerr
			}
		}
		return layerInfo{}, err
	}
	if _, err := io.Copy(io.Discard, ahead); err != nil { // up to its digest
		return layerInfo{}, err
	}
	if rep.DiffID != l.DiffID {
		return layerInfo{}, fmt.Errorf("%w: it unpacks to %s, and the configuration has %s",
			fault.ErrCorrupt, rep.DiffID, l.DiffID)
	}
	return layerInfo{
		DiffID: rep.DiffID, Bytes: rep.Bytes, Entries: rep.Entries, Implicit: rep.Implicit, Opaque: rep.Opaque,
	}, nil
}

func finished(finish func(error) error, err error) error {
	return errors.Join(err, finish(err))
}
