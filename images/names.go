package images

import (
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"maps"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/agentbox/agentbox/internal/fault"
)

// The grammar of names is the distribution project's: an optional HOST[:PORT],
// path components, an optional tag.
var (
	nameRule = regexp.MustCompile(`^(?:[a-zA-Z0-9][a-zA-Z0-9.-]*(?::[0-9]+)?/)?[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*(?:/[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*)*$`)
	tagRule  = regexp.MustCompile(`^[\w][\w.-]{0,127}$`)
	hexRule  = regexp.MustCompile(`^[0-9a-f]{1,64}$`)
)

const maxName = 255

// canonical completes a name with its tag.
func canonical(ref string) (string, error) {
	name, tag := ref, "latest"
	if i := strings.LastIndexByte(ref, ':'); i > strings.LastIndexByte(ref, '/') {
		name, tag = ref[:i], ref[i+1:]
	}
	if len(name) > maxName || !nameRule.MatchString(name) || !tagRule.MatchString(tag) {
		return "", &fault.Error{Op: "read image name", ID: fmt.Sprintf("%.100q", ref),
			Err:  fmt.Errorf("%w: it is not an image name", fault.ErrInvalid),
			Hint: "Image names have lower-case letters, digits, '.', '_', '-' and '/', and an optional ':TAG'."}
	}
	return name + ":" + tag, nil
}

// familiar is the form that people write.
func familiar(name string) string { return strings.TrimSuffix(name, ":latest") }

func isBusybox(ref string) bool { return familiar(ref) == "busybox" }

// hexOf returns the hex digits of a whole digest.
func hexOf(digest string) (string, bool) {
	h, ok := strings.CutPrefix(digest, "sha256:")
	return h, ok && len(h) == 64 && hexRule.MatchString(h)
}

// find returns the digest that ref means, and the index entry if ref is one.
func (s *Store) find(idx index, ref string) (name, digest string, err error) {
	want := ref
	if before, d, ok := strings.Cut(ref, "@"); ok {
		if _, err := canonical(before); err != nil {
			return "", "", err
		}
		if _, ok := hexOf(d); !ok {
			return "", "", fmt.Errorf("%w: %q is not an image digest", fault.ErrInvalid, d)
		}
		want = d
	}
	prefix, isDigest := strings.CutPrefix(want, "sha256:")
	if !isDigest {
		if name, err = canonical(ref); err == nil {
			if e, ok := idx.Names[name]; ok {
				return name, e.Digest, nil
			}
		}
	}
	if hexRule.MatchString(prefix) {
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
	known := slices.Sorted(maps.Keys(idx.Names))
	for i, n := range known {
		known[i] = familiar(n)
	}
	if !slices.Contains(known, "busybox") {
		known = append([]string{"busybox"}, known...)
	}
	const most = 20
	more := ""
	if len(known) > most {
		more = fmt.Sprintf(" and %d more", len(known)-most)
		known = known[:most]
	}
	return "", "", &fault.Error{Op: "find image", ID: ref, Err: fmt.Errorf("%w: there is no such image", fault.ErrNotFound),
		Hint: "Make it with 'agentbox image import NAME TARBALL|DIR'. Known are: " + strings.Join(known, ", ") + more + "."}
}

// digestOf is the digest of an image. Its JSON is canonical: fields in order,
// map keys sorted, no indentation.
func digestOf(m manifest) string {
	b, err := json.Marshal(m)
	if err != nil {
		panic(err) // strings only
	}
	sum := sha256.Sum256(b)
	return "sha256:" + hex.EncodeToString(sum[:])
}

func random() string {
	var b [8]byte
	_, _ = rand.Read(b[:])
	return hex.EncodeToString(b[:])
}

func trimExt(name string) string { return strings.TrimSuffix(name, filepath.Ext(name)) }
