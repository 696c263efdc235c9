package wall

import (
	"archive/tar"
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"path"
	"path/filepath"
	"strings"

	"github.com/agentbox/agentbox/internal/fault"
)

// contents is what Judge remembers of a tmpfs: its symlinks.
type contents struct{ links map[string]bool }

const (
	maxFiles = 4 << 20  // of a tmpfs
	maxTmpfs = 64 << 30 // bytes of its files: no loop of a few bytes goes on for ever
)

// tmpfs reads the archive of a tmpfs, which CRIU has tar unpack as root.
func (j *judge) tmpfs(name string) error {
	f, err := j.open(name)
	if err != nil {
		return fmt.Errorf("image %s: %w", name, err)
	}
	defer f.Close()
	if st, err := f.Stat(); err == nil && st.Size() == 0 {
		return nil
	}
	damaged := func(err error) error { return fmt.Errorf("image %s: %w: %w", name, err, fault.ErrCorrupt) }
	unzipped, err := gzip.NewReader(f)
	if err != nil {
		return damaged(err)
	}
	c := &contents{links: map[string]bool{}}
	j.tars[name] = c
	in := tar.NewReader(io.LimitReader(unzipped, maxTmpfs))
	for n := 0; ; n++ {
		h, err := in.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return damaged(err)
		}
		if n == maxFiles {
			return damaged(errors.New("it has more files than any dump"))
		}
		if err := j.member(name, h, c); err != nil {
			return err
		}
	}
}

func (j *judge) member(name string, h *tar.Header, c *contents) error {
	at := path.Clean(h.Name)
	if path.IsAbs(h.Name) || at == ".." || strings.HasPrefix(at, "../") || strings.ContainsRune(h.Name, 0) {
		return refuse(name, "name", "%s leads out of its filesystem", quoted(h.Name))
	}
	if on := c.link(path.Dir(at)); on != "" {
		return refuse(name, "name", "%s lies behind the symlink %s", quoted(h.Name), quoted(on))
	}
	switch h.Typeflag {
	case tar.TypeReg, tar.TypeDir, tar.TypeFifo, tar.TypeGNUSparse, tar.TypeCont:
		if c.links[at] {
			return refuse(name, "name", "%s is there twice, as a symlink first", quoted(h.Name))
		}
	case tar.TypeSymlink:
		c.links[at] = true
	case tar.TypeLink:
		to := path.Clean(h.Linkname)
		if path.IsAbs(h.Linkname) || to == ".." || strings.HasPrefix(to, "../") || c.link(path.Dir(to)) != "" {
			return refuse(name, "link", "%s to %s leads out of its filesystem",
				quoted(h.Name), quoted(h.Linkname))
		}
	case tar.TypeChar, tar.TypeBlock:
		major, minor := uint32(h.Devmajor), uint32(h.Devminor)
		if major == 0 && minor == 0 && h.Typeflag == tar.TypeChar { // a whiteout: no device
			return nil
		}
		if !j.spec.can("MKNOD") && !j.spec.device(h.Typeflag == tar.TypeBlock, major, minor) {
			return refuse(name, "device", "%s is device %d:%d, which the container has not",
				quoted(h.Name), major, minor)
		}
	default:
		return refuse(name, "type", "%s is of type %q", quoted(h.Name), h.Typeflag)
	}
	return nil
}

// link returns the symlink on the way to a name; empty: there is none.
func (c *contents) link(at string) string {
	for at != "." && at != "/" {
		if c.links[at] {
			return at
		}
		at = path.Dir(at)
	}
	return ""
}

// checkLinks proves that a mount of a part of a tmpfs does not go by a symlink of it: CRIU
// would follow it from the host's root.
func (j *judge) checkLinks(image string, m mount) error {
	if m.fstype != "tmpfs" || m.root == "/" || m.external != "" {
		return nil
	}
	for _, name := range []string{
		fmt.Sprintf("tmpfs-dev-%d.tar.gz.img", m.dev), fmt.Sprintf("tmpfs-%d.tar.gz.img", m.id),
	} {
		if c := j.tars[name]; c != nil {
			if on := c.link(strings.TrimPrefix(filepath.Clean(m.root), "/")); on != "" {
				return refuse(image, m.field("root"), "%s goes by the symlink %s", quoted(m.root), quoted(on))
			}
		}
	}
	return nil
}
