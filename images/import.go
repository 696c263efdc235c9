package images

import (
	"archive/tar"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"reflect"
	goruntime "runtime"
	"slices"
	"strings"
	"time"

	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/images/image"
	"github.com/agentbox/agentbox/images/layer"
	"github.com/agentbox/agentbox/internal/cptar/tree"
	"github.com/agentbox/agentbox/internal/failpoint"
	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/internal/fsx"
)

const defaultPath = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// Import makes the image name of source, a tar archive (plain or compressed
// with gzip, zstd, bzip2 or xz) or a directory, whose files become the root
// filesystem. An existing name moves to the new image. The same files always
// give the same digest. On error nothing is left.
func (s *Store) Import(ctx context.Context, name, source string) (image.Image, error) {
	canon, err := s.canonical(name)
	if err != nil {
		return image.Image{}, err
	}
	return s.importPath(ctx, canon, source)
}

// importPath imports under an index entry.
func (s *Store) importPath(ctx context.Context, canon, source string) (image.Image, error) {
	// Not to wait in the open for the writer of a FIFO, which no context ends.
	f, err := os.OpenFile(source, os.O_RDONLY|unix.O_NONBLOCK, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return image.Image{}, fmt.Errorf("%w: %w", fault.ErrNotFound, err)
	}
	if err != nil {
		return image.Image{}, err
	}
	defer f.Close()
	fi, err := f.Stat()
	if err != nil {
		return image.Image{}, err
	}
	if fi.Mode()&fs.ModeNamedPipe != 0 {
		if err := awaitWriter(ctx, f); err != nil {
			return image.Image{}, err
		}
	}
	if !fi.IsDir() {
		return s.importStream(ctx, canon, f)
	}
	return s.publish(ctx, canon, false, func(diff *os.File) (image.Config, error) {
		free, err := reserve(diff)
		if err != nil {
			return image.Config{}, err
		}
		_, err = tree.Clone(ctx, f, diff, tree.CloneOptions{MinFree: free, Progress: s.report(), Archived: true,
			Check: func(path string, st *unix.Stat_t, attrs []string) error {
				if err := checkName(path); err != nil {
					return err
				}
				for _, a := range attrs {
					if err := checkAttr(a); err != nil {
						return err
					}
				}
				if st.Mode&unix.S_IFMT == unix.S_IFCHR && st.Rdev == 0 {
					return errWhiteout
				}
				return nil
			}})
		return plainConfig(diff), err
	})
}

// awaitWriter waits until a FIFO has a writer: without one a read returns "end
// of file".
func awaitWriter(ctx context.Context, f *os.File) error {
	raw, err := f.SyscallConn()
	if err != nil {
		return err
	}
	for {
		var n int
		var err error
		_ = raw.Control(func(fd uintptr) {
			// ms; it cannot wait for a context
			n, err = unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 100)
		})
		switch {
		case ctx.Err() != nil:
			return ctx.Err()
		case err != nil && err != unix.EINTR:
			return fmt.Errorf("wait for the writer of %s: %w", f.Name(), err)
		case n > 0:
			return nil
		}
	}
}

// ImportFrom makes the image name of a tar stream, as Import does. It reads r to
// its end.
func (s *Store) ImportFrom(ctx context.Context, name string, r io.Reader) (image.Image, error) {
	canon, err := s.canonical(name)
	if err != nil {
		return image.Image{}, err
	}
	return s.importStream(ctx, canon, r)
}

func (s *Store) importStream(ctx context.Context, canon string, r io.Reader) (image.Image, error) {
	return s.publish(ctx, canon, false, func(diff *os.File) (image.Config, error) {
		free, err := reserve(diff)
		if err != nil {
			return image.Config{}, err
		}
		plain, done, err := layer.Decompress(ctx, r)
		if err != nil {
			return image.Config{}, err
		}
		rep, err := tree.Extract(ctx, diff, plain, tree.ExtractOptions{
			Fresh: true, Owners: true, Privileged: true, MinFree: free, Progress: s.report(),
			Xattr: func(name string) (bool, error) { return true, checkAttr(name) },
			Check: func(h *tar.Header) error {
				if h.Typeflag == tar.TypeChar && h.Devmajor == 0 && h.Devminor == 0 {
					return errWhiteout
				}
				return checkName(h.Name)
			},
		})
		if err = errors.Join(err, done(err)); err != nil {
			return image.Config{}, err
		}
		if n := int64(len(rep.Skipped)) + rep.SkippedMore; n > 0 {
			return image.Config{}, fmt.Errorf("%w: %d entries cannot be unpacked exactly, the first is %s",
				fault.ErrUnsupported, n, rep.Skipped[0])
		}
		return plainConfig(diff), checkLayout(diff.Name())
	})
}

// An image's tree becomes a lower directory, where overlayfs would obey its own
// marks instead of showing them.
var errWhiteout = fmt.Errorf("%w: it is a whiteout (character device 0:0): this is an overlay's upperdir, not a root filesystem", fault.ErrInvalid)

func checkAttr(name string) error {
	if strings.HasPrefix(name, "trusted.overlay.") {
		return fmt.Errorf("%w: it has the attribute %s: this is an overlay's upperdir, not a root filesystem",
			fault.ErrInvalid, name)
	}
	return nil
}

// checkName refuses names that mean something else in a layer.
func checkName(name string) error {
	if base := path.Base(name); strings.HasPrefix(base, ".wh.") {
		return fmt.Errorf("%w: in images, a name that begins with %q is a deletion", fault.ErrUnsupported, ".wh.")
	}
	return nil
}

// checkLayout refuses archives of whole images, which have the root filesystem in further
// archives.
func checkLayout(diff string) error {
	list, err := os.ReadDir(diff)
	if err != nil {
		return err
	}
	have := map[string]bool{}
	for _, e := range list {
		have[e.Name()] = true
	}
	if len(have) == 0 {
		return fmt.Errorf("%w: the archive holds no files", fault.ErrInvalid)
	}
	saved := have["oci-layout"] || have["manifest.json"]
	if saved && !have["bin"] && !have["usr"] && !have["etc"] {
		return &fault.Error{Op: "unpack",
			Err:  fmt.Errorf("%w: this is an archive of image layers ('docker save' or an OCI layout), not of a root filesystem", fault.ErrUnsupported),
			Hint: "Pull it instead: 'agentbox image pull docker-archive:FILE', oci-archive:FILE or oci:DIR."}
	}
	return nil
}

// plainConfig is the configuration of a tree that came without one.
func plainConfig(diff *os.File) image.Config {
	cfg := image.Config{Env: []string{defaultPath}}
	// An os.Root follows no link out of the tree; an absolute link to a shell
	// counts as none, which costs only a default.
	if root, err := os.OpenRoot(diff.Name()); err == nil {
		if fi, err := root.Stat("bin/sh"); err == nil && fi.Mode().IsRegular() {
			cfg.Cmd = []string{"sh"}
		}
		root.Close()
	}
	return cfg
}

func (s *Store) report() func(tree.Report) {
	if s.Progress == nil {
		return nil
	}
	var last time.Time
	return func(r tree.Report) {
		if now := time.Now(); now.Sub(last) > 100*time.Millisecond {
			last = now
			s.Progress(image.Progress{Entries: r.Entries, Bytes: r.Bytes})
		}
	}
}

// reserve is how much of a file system an import must leave free.
func reserve(dir *os.File) (int64, error) {
	var st unix.Statfs_t
	if err := unix.Fstatfs(int(dir.Fd()), &st); err != nil {
		return 0, err
	}
	return min(max(int64(st.Blocks)*st.Bsize/100, 16<<20), 1<<30), nil
}

// publish has fill make a tree and turns it into a layer, a record and a name.
func (s *Store) publish(
	ctx context.Context, name string, builtin bool, fill func(diff *os.File) (image.Config, error),
) (img image.Image, err error) {
	if err := s.sweep(partialAge); err != nil {
		return image.Image{}, err
	}
	tmp, hold, err := s.temp()
	if err != nil {
		return image.Image{}, err
	}
	defer func() { // a published layer has moved away
		err = errors.Join(err, os.RemoveAll(tmp))
		hold.Unlock()
	}()
	top := filepath.Join(tmp, "diff")
	if err := os.Mkdir(top, 0o755); err != nil {
		return image.Image{}, err
	}
	diff, err := os.Open(top)
	if err != nil {
		return image.Image{}, err
	}
	defer diff.Close()
	if err := diff.Chmod(0o755); err != nil { // under every umask, unless the source says otherwise
		return image.Image{}, err
	}
	cfg, err := fill(diff)
	if err != nil {
		return image.Image{}, err
	}
	if list, err := os.ReadDir(top); err != nil || len(list) == 0 {
		return image.Image{}, errors.Join(err, fmt.Errorf("%w: there are no files in it", fault.ErrInvalid))
	}
	rep, err := layer.Seal(ctx, hold.File())
	if err != nil {
		return image.Image{}, err
	}
	info := layerInfo{DiffID: rep.DiffID, Bytes: rep.Bytes, Entries: rep.Entries}
	if err := writeInfo(tmp, info); err != nil {
		return image.Image{}, err
	}
	if err := failpoint.Hit("images.import.before-sync"); err != nil {
		return image.Image{}, err
	}
	// One call for the whole file system instead of one per file.
	if err := unix.Syncfs(int(diff.Fd())); err != nil {
		return image.Image{}, fmt.Errorf("write the layer to disk: %w", err)
	}
	if err := ctx.Err(); err != nil {
		return image.Image{}, err
	}
	config, err := json.Marshal(ocispec.Image{
		Platform: ocispec.Platform{Architecture: goruntime.GOARCH, OS: "linux"},
		Config:   ocispec.ImageConfig{Cmd: cfg.Cmd, Env: cfg.Env},
		RootFS:   ocispec.RootFS{Type: "layers", DiffIDs: []digest.Digest{digest.Digest(rep.DiffID)}},
	})
	if err != nil {
		return image.Image{}, err
	}
	rec := record{Version: recordVersion, Platform: "linux/" + goruntime.GOARCH,
		Layers: []image.Layer{{DiffID: info.DiffID, Bytes: info.Bytes, Entries: info.Entries}},
		Lower:  []string{info.DiffID}, Created: time.Now().UTC(), Bytes: info.Bytes, Config: cfg}
	err = s.locked(func() error {
		if err := failpoint.Hit("images.import.before-rename"); err != nil {
			return err
		}
		if err := s.place(tmp, info.DiffID); err != nil {
			return err
		}
		if err := failpoint.Hit("images.import.after-rename"); err != nil {
			return err
		}
		return s.commit(config, rec, name, entry{Builtin: builtin})
	})
	if err != nil {
		return image.Image{}, err
	}
	idx, err := s.index()
	if err != nil {
		return image.Image{}, err
	}
	return s.image(idx, name, digestOf(config))
}

func writeInfo(dir string, info layerInfo) error {
	b, err := json.Marshal(info)
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(dir, "layer.json"), append(b, '\n'), 0o600)
}

// place makes a layer in tmp visible, unless it is there. The lock must be held.
func (s *Store) place(tmp, diffID string) error {
	if s.have(diffID) {
		return nil
	}
	hex, _ := hexOf(diffID)
	to := s.path("layers", hex)
	// A directory emptied by hand must not block its own repair.
	if err := os.Rename(to, s.path("tmp", tmpRemoved+random())); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if err := os.Rename(tmp, to); err != nil {
		return err
	}
	return fsx.SyncDir(s.path("layers"))
}

// commit publishes an image whose layers are published: its configuration, its record, then its
// name, if it gets one. The lock must be held.
func (s *Store) commit(config []byte, rec record, name string, e entry) error {
	e.Digest, e.Created = digestOf(config), rec.Created
	hex, _ := hexOf(e.Digest)
	for _, d := range rec.Lower {
		if !s.have(d) {
			return fmt.Errorf("%w: the layer %s was removed meanwhile", fault.ErrState, d)
		}
	}
	if _, err := s.config(e.Digest); err != nil {
		if err := s.writeFile(filepath.Join("configs", hex+".json"), config); err != nil {
			return err
		}
	}
	old, err := s.record(e.Digest)
	if err == nil { // what was known stays known
		if rec.Manifest == nil {
			rec.Source, rec.Manifest, rec.ManifestType, rec.Layers, rec.Size = old.Source, old.Manifest,
				old.ManifestType, old.Layers, old.Size
		}
		for _, d := range old.RepoDigests {
			if !slices.Contains(rec.RepoDigests, d) {
				rec.RepoDigests = append(rec.RepoDigests, d)
			}
		}
		rec.Created = old.Created
	}
	if err != nil || !reflect.DeepEqual(old, rec) {
		if err := s.writeJSON(filepath.Join("records", hex+".json"), rec); err != nil {
			return err
		}
	}
	if err := failpoint.Hit("images.import.before-index"); err != nil {
		return err
	}
	if name == "" {
		return nil
	}
	idx, err := s.index()
	if err != nil {
		return err
	}
	idx.Names[name] = e
	return s.writeJSON("index.json", idx)
}
