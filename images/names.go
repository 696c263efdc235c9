package images

import (
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strings"

	"github.com/agentbox/agentbox/images/reference"
	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/internal/lazy"
)

var hexRule = lazy.Regexp(`^[0-9a-f]{1,64}$`)

// canonical is the whole form of a name that an image may be given: that of a
// repository with a tag, as in a registry.
func (s *Store) canonical(name string) (string, error) {
	ref, err := reference.Parse(name, s.Default)
	if err != nil {
		return "", err
	}
	if ref.Transport != reference.Docker || ref.Digest != "" {
		return "", &fault.Error{Op: "read image name", ID: fmt.Sprintf("%.100q", name),
			Hint: "Image names are NAME[:TAG].",
			Err:  fmt.Errorf("%w: it is not a name that an image can be given", fault.ErrInvalid)}
	}
	return ref.String(), nil
}

// familiar is the form of an index entry that people write.
func (s *Store) familiar(name string) string {
	if name == "" {
		return ""
	}
	ref, err := reference.Parse(name, s.Default)
	if err != nil {
		return name
	}
	return ref.Familiar()
}

func (s *Store) familiars(names []string) []string {
	list := make([]string, len(names))
	for i, n := range names {
		list[i] = s.familiar(n)
	}
	slices.Sort(list)
	return list
}

func isBusybox(ref string) bool { return ref == "busybox" || ref == "busybox:latest" }

// hexOf returns the hex digits of a whole digest.
func hexOf(digest string) (string, bool) {
	h, ok := strings.CutPrefix(digest, "sha256:")
	return h, ok && len(h) == 64 && hexRule().MatchString(h)
}

// find returns the digest that ref means, and the index entry if ref is one. A
// name wins over a prefix of a digest.
func (s *Store) find(idx index, ref string) (name, digest string, err error) {
	prefix, isDigest := strings.CutPrefix(ref, "sha256:")
	if !isDigest {
		var r reference.Reference
		if r, err = reference.Parse(ref, s.Default); err == nil {
			if e, ok := idx.Names[r.String()]; ok {
				return r.String(), e.Digest, nil
			}
			if r.Digest != "" {
				return s.byRepoDigest(r)
			}
		}
	}
	if hexRule().MatchString(prefix) {
		all, err := s.digests()
		if err != nil {
			return "", "", err
		}
		all = slices.DeleteFunc(all, func(d string) bool { return !strings.HasPrefix(d, "sha256:"+prefix) })
		if len(all) == 1 {
			return "", all[0], nil
		}
		if len(all) > 1 {
			return "", "", &fault.Error{Op: "find image", ID: ref, Hint: "Give more digits of the digest.",
				Err: fmt.Errorf("%w: %d images have digests that begin so", fault.ErrInvalid, len(all))}
		}
	}
	if err != nil {
		return "", "", err
	}
	return "", "", s.notFound(idx, ref)
}

func (s *Store) notFound(idx index, ref string) error {
	known := s.familiars(slices.Collect(maps.Keys(idx.Names)))
	if !slices.Contains(known, "busybox") {
		known = append([]string{"busybox"}, known...)
	}
	const most = 20
	more := ""
	if len(known) > most {
		more = fmt.Sprintf(" and %d more", len(known)-most)
		known = known[:most]
	}
	return &fault.Error{Op: "find image", ID: ref, Err: fmt.Errorf("%w: there is no such image", fault.ErrNotFound),
		Hint: "Get it with 'agentbox image pull', or make it with 'agentbox image import NAME TARBALL|DIR'. Known are: " + strings.Join(known, ", ") + more + "."}
}

// byRepoDigest finds NAME@DIGEST, where the digest is of a manifest in that
// repository or the image's own.
func (s *Store) byRepoDigest(r reference.Reference) (name, digest string, err error) {
	digests, err := s.digests()
	if err != nil {
		return "", "", err
	}
	if slices.Contains(digests, r.Digest) {
		return "", r.Digest, nil
	}
	for _, d := range digests {
		rec, err := s.record(d)
		if err == nil && slices.Contains(rec.RepoDigests, r.Name+"@"+r.Digest) {
			return "", d, nil
		}
	}
	return "", "", &fault.Error{Op: "find image", ID: r.Familiar(),
		Err:  fmt.Errorf("%w: there is no such image", fault.ErrNotFound),
		Hint: "Get it with 'agentbox image pull'."}
}

func digestOf(b []byte) string {
	sum := sha256.Sum256(b)
	return "sha256:" + hex.EncodeToString(sum[:])
}

func random() string {
	var b [8]byte
	_, _ = rand.Read(b[:])
	return hex.EncodeToString(b[:])
}

func trimExt(name string) string { return strings.TrimSuffix(name, filepath.Ext(name)) }
