package registry

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"io"
	"os"
	"path/filepath"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/remote/transport"
	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/failpoint"
	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/internal/flock"
	"github.com/agentbox/agentbox/runtime/store/pack"
)

// Target is the destination of Pull; a *store.Draft is one.
type Target interface {
	// Missing returns those of the chunks that neither the store has nor was
	// put here.
	Missing(ctx context.Context, digests []string) ([]string, error)
	// PutChunk takes a chunk, which is proven. raw is the caller's afterwards.
	PutChunk(ctx context.Context, digest string, raw []byte) error
}

// Pulled is the result of Pull.
type Pulled struct {
	Reference string // HOST/NAME@sha256:HEX
	Manifest  []byte // manifest.json
	Bytes     int64  // that travelled
	Skipped   int64  // of packs that the target has all chunks of
}

// Pull brings the checkpoint under ref, HOST/NAME:TAG or HOST/NAME@DIGEST.
// Once it has the manifest, begin makes the target; an error of begin (say, the
// checkpoint is there already) ends the pull. The manifest is not checked but
// against its digest, and that all chunks are there is for the caller to
// prove when he commits.
//
// What is not there is ErrNotFound, without a login it may be ErrDenied, what
// is no checkpoint is ErrInvalid, and a registry that sends nonsense ErrCorrupt.
func Pull(
	ctx context.Context, ref string, begin func(ctx context.Context, manifest []byte) (Target, error), opts Options,
) (Pulled, error) {
	r, err := parse(ref, opts)
	if err != nil {
		return Pulled{}, err
	}
	c, err := connect(ctx, r.Context(), transport.PullScope, opts)
	if err != nil {
		return Pulled{}, err
	}
	defer c.Close()
	a, err := c.artifact(ctx, r)
	if err != nil {
		return Pulled{}, err
	}
	p := &pull{c: c, dir: opts.Scratch}
	p.out.Reference = c.Repo.Digest(a.digest.String()).Name()
	if p.out.Manifest, err = c.Small(ctx, a.m.Config); err != nil {
		return Pulled{}, err
	}
	data, err := c.Small(ctx, a.uses)
	if err != nil {
		return Pulled{}, err
	}
	uses, err := parseUses(data, a.packs)
	if err != nil {
		return Pulled{}, err
	}
	p.out.Bytes = int64(len(p.out.Manifest) + len(data))
	if p.target, err = begin(ctx, p.out.Manifest); err != nil {
		return Pulled{}, err
	}
	if p.dir == "" {
		if p.dir, err = os.MkdirTemp("", "agentbox-pull-*"); err != nil {
			return Pulled{}, err
		}
		defer os.RemoveAll(p.dir)
	}
	for i, ref := range a.packs {
		if err := p.pack(ctx, ref, uses[i]); err != nil {
			return Pulled{}, fmt.Errorf("pack %s: %w", ref.pack.Digest, err)
		}
	}
	return p.out, nil
}

// pull is one run of Pull.
type pull struct {
	c      *client
	dir    string
	target Target
	done   int64
	total  int64
	shown  int64
	out    Pulled
}

func (p *pull) progress(more int64) {
	if p.c.opts.Progress != nil {
		p.shown = max(p.shown, p.done+more) // what is tried again is not taken back
		p.c.opts.Progress(p.shown, p.total)
	}
}

// pack brings those chunks of a pack that are used and missing.
func (p *pull) pack(ctx context.Context, ref packRef, uses bitmap) error {
	entries, err := p.c.index(ctx, ref)
	if err != nil {
		return err
	}
	p.out.Bytes += ref.index.Size
	if len(entries) != ref.chunks() {
		return fmt.Errorf("%w: its index has another length than it says", fault.ErrCorrupt)
	}
	var used []string
	for i, e := range entries {
		if uses.has(i) {
			used = append(used, e.id.String())
		}
	}
	names, err := p.target.Missing(ctx, used)
	if err != nil {
		return err
	}
	if len(names) == 0 {
		p.out.Skipped += ref.pack.Size
		return nil
	}
	missing := make(map[pack.ID]bool, len(names))
	for _, n := range names {
		id, err := pack.ParseID(n)
		if err != nil {
			return err
		}
		missing[id] = true
	}
	p.total += ref.pack.Size
	f, err := p.fetch(ctx, ref.pack)
	if err != nil {
		return err
	}
	defer f.Close()
	p.done += ref.pack.Size
	if err := failpoint.Hit("registry.pull.after-pack"); err != nil {
		return err
	}
	if err := p.put(ctx, f, missing); err != nil {
		return err
	}
	if err := failpoint.Hit("registry.pull.before-remove"); err != nil {
		return err
	}
	return os.Remove(f.Name())
}

// put gives the missing chunks of a pack to the target.
func (p *pull) put(ctx context.Context, f *os.File, missing map[pack.ID]bool) error {
	r, err := pack.Open(f)
	if err != nil {
		return err
	}
	var room []byte
	err = r.Each(func(b pack.Blob) error {
		if !missing[b.ID] {
			return nil
		}
		if err := ctx.Err(); err != nil {
			return err
		}
		raw, err := r.Read(b, room)
		if err != nil {
			return err
		}
		room = raw[:0]
		delete(missing, b.ID)
		return p.target.PutChunk(ctx, b.ID.String(), raw)
	})
	if err != nil {
		return err
	}
	for id := range missing {
		return fmt.Errorf("%w: piece %s, which its index lists, is not in it", fault.ErrCorrupt, id)
	}
	return nil
}

// fetch brings a pack into the scratch directory and proves it. It continues what an earlier
// attempt left there. The file is open and locked; the caller removes it.
func (p *pull) fetch(ctx context.Context, d v1.Descriptor) (_ *os.File, err error) {
	lock, err := flock.Try(filepath.Join(p.dir, d.Digest.Hex+".part"), 0)
	if errors.Is(err, flock.ErrHeld) {
		return nil, fmt.Errorf("%w: another pull has it in work", fault.ErrBusy)
	}
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			lock.Unlock()
		}
	}()
	f := lock.File()
	part := &part{f: f, size: d.Size}
	if err := part.resume(); err != nil {
		return nil, err
	}
	again := part.n > 0 // what lies there may not be the beginning of it
	for {
		if err := p.complete(ctx, d, part); err != nil {
			if errors.Is(err, unix.ENOSPC) { // the full disk needs this space, too
				err = errors.Join(err, os.Remove(f.Name()))
			}
			return nil, err
		}
		if part.digest() == d.Digest.Hex {
			return f, nil
		}
		err := fmt.Errorf("%w: its bytes are those of sha256:%s", fault.ErrCorrupt, part.digest())
		if e := part.reset(); e != nil {
			return nil, e
		}
		if !again {
			return nil, errors.Join(err, os.Remove(f.Name()))
		}
		again = false
	}
}

// complete brings what is lacking.
func (p *pull) complete(ctx context.Context, d v1.Descriptor, part *part) error {
	r := p.c.Blob(ctx, d, part.n)
	defer r.Close()
	buf := make([]byte, 256<<10)
	for {
		n, err := r.Read(buf)
		if n > 0 {
			if err := part.add(buf[:n]); err != nil {
				return err
			}
			p.out.Bytes += int64(n)
			p.progress(part.n)
		}
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
	}
}

// part is a pack that is partly here.
type part struct {
	f    *os.File
	size int64 // when it is whole
	n    int64 // what is here
	sum  hash.Hash
}

// resume reads what an earlier try left.
func (p *part) resume() (err error) {
	p.sum = sha256.New()
	if p.n, err = io.Copy(p.sum, p.f); err != nil {
		return err
	}
	if p.n > p.size {
		return p.reset()
	}
	return nil
}

func (p *part) reset() error {
	p.n, p.sum = 0, sha256.New()
	return p.f.Truncate(0)
}

func (p *part) add(b []byte) error {
	if _, err := p.f.WriteAt(b, p.n); err != nil {
		return err
	}
	p.n += int64(len(b))
	p.sum.Write(b)
	return nil
}

func (p *part) digest() string { return hex.EncodeToString(p.sum.Sum(nil)) }
