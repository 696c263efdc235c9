package apply

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"io"
	"path"
	"slices"

	"github.com/agentbox/agentbox/overlay"
)

// Sum returns a digest of all that the apply does: what comes, what it takes the place of, and where.
// Two applies with one digest have the same effect.
func (s *Staged) Sum(ctx context.Context) (string, error) {
	h := sha256.New()
	enc := json.NewEncoder(h)
	if err := enc.Encode([]string{"apply 1", s.t.home.Name}); err != nil {
		return "", err
	}
	for _, p := range s.t.parts {
		if err := p.sum(ctx, enc); err != nil {
			return "", err
		}
	}
	return hex.EncodeToString(h.Sum(nil)), nil
}

func (p *part) sum(ctx context.Context, to *json.Encoder) error {
	if err := to.Encode([]any{p.At, p.From, p.from.dev, p.from.ino}); err != nil {
		return err
	}
	for _, o := range p.plan.Ops {
		o.NewIno, o.New = 0, "" // of what is staged
		if err := to.Encode(o); err != nil {
			return err
		}
	}
	for _, d := range p.plan.Dirs {
		d.Old.Sec, d.Old.Nsec, d.New.Sec, d.New.Nsec = 0, 0, 0, 0 // they follow from the rest
		if err := to.Encode(d); err != nil {
			return err
		}
	}
	for c, err := range p.staged() {
		if err == nil {
			err = ctx.Err()
		}
		if err != nil {
			return err
		}
		e, digest := c.Entry, ""
		if e.Type == overlay.TypeFile && e.Hardlink == "" {
			if digest, err = p.digest(ctx, c); err != nil {
				return err
			}
		}
		if p.plan.merged[e.Path] != nil {
			e.Mtime = overlay.Time{} // when it was merged
		}
		err = to.Encode([]any{
			[]byte(e.Path), e.Type, e.Mode, e.UID, e.GID, e.Size, e.Mtime.Sec, e.Mtime.Nsec, []byte(e.Link),
			[]byte(e.Hardlink), bytesXattrs(e.Xattrs), e.Major, e.Minor, digest,
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// digest returns the digest of the content of a file that comes.
func (p *part) digest(ctx context.Context, c *comer) (string, error) {
	h := sha256.New()
	if c.data != nil {
		_, _ = h.Write(c.data) // a hash takes all
		return hex.EncodeToString(h.Sum(nil)), nil
	}
	raw := c.from
	if raw.Digest != "" && raw.Extents == nil || raw.Size == 0 {
		return raw.Digest, nil
	}
	data, err := p.source.Data.Data(ctx, raw)
	if err != nil {
		return "", err
	}
	content := whole(&raw, data)
	defer content.Close()
	_, err = io.Copy(h, under{ctx, content})
	return hex.EncodeToString(h.Sum(nil)), err
}

// Removed lists the files that go, also those in directories that go, by their paths in the sandbox.
func (s *Staged) Removed(ctx context.Context) (list []string, err error) {
	for _, p := range s.t.parts {
		m := merger{part: p}
		for _, o := range p.plan.Ops {
			if o.Kind == opPut {
				continue
			}
			rel := string(o.Path)
			st, err := p.from.stat(rel)
			if err != nil {
				return nil, err
			}
			if !isDir(st) {
				if o.Kind == opRemove {
					list = append(list, path.Join(p.At, rel))
				}
				continue
			}
			below := map[string]bool{}
			if err := m.below(ctx, rel, below); err != nil {
				return nil, err
			}
			for one := range below {
				st, err := p.from.stat(one)
				if err != nil {
					return nil, err
				}
				if !isDir(st) {
					list = append(list, path.Join(p.At, one))
				}
			}
		}
	}
	slices.Sort(list)
	return list, nil
}
