package images

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/agentbox/agentbox/images/image"
	"github.com/agentbox/agentbox/internal/fault"
)

// One image that cannot be used takes none of the others with it, and can be
// removed.
func TestDamaged(t *testing.T) {
	for what, break_ := range map[string]func(s *Store, img image.Image) error{
		"layer led elsewhere": func(s *Store, img image.Image) error {
			dir := filepath.Dir(img.Lower[0])
			to := filepath.Join(filepath.Dir(s.dir), "outside")
			return errors.Join(os.Rename(dir, to), os.Symlink(to, dir))
		},
		"layer gone": func(s *Store, img image.Image) error { return os.RemoveAll(img.Lower[0]) },
		"record gone": func(s *Store, img image.Image) error {
			return os.Remove(s.path("records", img.Digest[7:]+".json"))
		},
		"record broken": func(s *Store, img image.Image) error {
			return os.WriteFile(s.path("records", img.Digest[7:]+".json"), []byte("{"), 0o600)
		},
	} {
		t.Run(what, func(t *testing.T) {
			s := store(t)
			var imgs []image.Image
			for _, name := range []string{"bad", "good", "other"} {
				img, err := s.ImportFrom(ctx, name, bytes.NewReader(rootfs(t, name)))
				ok(t, err)
				imgs = append(imgs, img)
			}
			ok(t, break_(s, imgs[0]))
			list, err := s.List(ctx)
			ok(t, err)
			var said []string
			for i, img := range list {
				if img.Digest != imgs[i].Digest || (img.Damaged != "") != (i == 0) {
					t.Errorf("%+v", img)
				}
				said = append(said, img.Name)
			}
			if got := strings.Join(said, " "); got != "bad good other" {
				t.Errorf("%q", got)
			}
			img, err := s.Resolve(ctx, "bad")
			if img.Digest != imgs[0].Digest || !errors.Is(err, fault.ErrCorrupt) && !errors.Is(err, fault.ErrNotFound) {
				t.Errorf("%+v, %v", img, err)
			}
			ok(t, s.Remove(ctx, "good", nil))
			if _, err := s.Resolve(ctx, "other"); err != nil {
				t.Error(err)
			}
			ok(t, s.Remove(ctx, "bad", nil))
			_, err = s.GC(ctx, nil)
			ok(t, err)
			leftovers(t, s, 1)
		})
	}
}

// No part of the store leads out of it, as one of a root from elsewhere may.
func TestForgedParts(t *testing.T) {
	for _, part := range []string{"", "configs", "records", "layers", "tmp"} {
		root, outside := t.TempDir(), t.TempDir()
		s, err := Open(root)
		ok(t, err)
		ok(t, os.RemoveAll(s.path(part)))
		ok(t, os.Symlink(outside, s.path(part)))
		if _, err := Open(root); !errors.Is(err, fault.ErrDenied) || !strings.Contains(err.Error(), "symbolic link") {
			t.Errorf("%q: %v", part, err)
		}
	}
}
