package images

import (
	"archive/tar"
	"bufio"
	"bytes"
	"compress/bzip2"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zstd"
	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/copy/tree"
	"github.com/agentbox/agentbox/internal/failpoint"
	"github.com/agentbox/agentbox/internal/fault"
)

const defaultPath = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// Import makes the image name of source, a tar archive (plain or compressed
// with gzip, zstd, bzip2 or xz) or a directory, whose files become the root
// filesystem. An existing name moves to the new image. The same files always
// give the same digest. On error nothing is left.
func (s *Store) Import(ctx context.Context, name, source string) (Image, error) {
	canon, err := canonical(name)
	if err != nil {
		return Image{}, err
	}
	// Not to wait in the open for the writer of a FIFO, which no context ends.
	f, err := os.OpenFile(source, os.O_RDONLY|unix.O_NONBLOCK, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return Image{}, fmt.Errorf("%w: %w", fault.ErrNotFound, err)
	}
	if err != nil {
		return Image{}, err
	}
	defer f.Close()
	fi, err := f.Stat()
	if err != nil {
		return Image{}, err
	}
	if fi.Mode()&fs.ModeNamedPipe != 0 {
		if err := awaitWriter(ctx, f); err != nil {
			return Image{}, err
		}
	}
	if !fi.IsDir() {
		return s.ImportFrom(ctx, name, f)
	}
	return s.publish(ctx, canon, false, func(diff *os.File) (Config, error) {
		free, err := reserve(diff)
		if err != nil {
			return Config{}, err
		}
		_, err = tree.Clone(ctx, f, diff, tree.CloneOptions{MinFree: free, Progress: s.report(),
			Check: func(_ string, st *unix.Stat_t, attrs []string) error {
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
			n, err = unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 100) // ms; it cannot wait for a context
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
func (s *Store) ImportFrom(ctx context.Context, name string, r io.Reader) (Image, error) {
	canon, err := canonical(name)
	if err != nil {
		return Image{}, err
	}
	return s.publish(ctx, canon, false, func(diff *os.File) (Config, error) {
		free, err := reserve(diff)
		if err != nil {
			return Config{}, err
		}
		plain, done, err := decompress(ctx, r)
		if err != nil {
			return Config{}, err
		}
		rep, err := tree.Extract(ctx, diff, plain, tree.ExtractOptions{
			Fresh: true, Owners: true, Privileged: true, MinFree: free, Progress: s.report(),
			Xattr: func(name string) (bool, error) { return true, checkAttr(name) },
			Check: func(h *tar.Header) error {
				if h.Typeflag == tar.TypeChar && h.Devmajor == 0 && h.Devminor == 0 {
					return errWhiteout
				}
				return nil
			},
		})
		if err = errors.Join(err, done(err)); err != nil {
			return Config{}, err
		}
		if n := int64(len(rep.Skipped)) + rep.SkippedMore; n > 0 {
			return Config{}, fmt.Errorf("%w: %d entries cannot be unpacked exactly, the first is %s", fault.ErrUnsupported, n, rep.Skipped[0])
		}
		return plainConfig(diff), checkLayout(diff.Name())
	})
}

// An image's tree becomes a lower directory, where overlayfs would obey its own
// marks instead of showing them.
var errWhiteout = fmt.Errorf("%w: it is a whiteout (character device 0:0): this is an overlay's upperdir, not a root filesystem", fault.ErrInvalid)

func checkAttr(name string) error {
	if strings.HasPrefix(name, "trusted.overlay.") {
		return fmt.Errorf("%w: it has the attribute %s: this is an overlay's upperdir, not a root filesystem", fault.ErrInvalid, name)
	}
	return nil
}

// checkLayout refuses the archives of whole images, whose root filesystem is
// inside of further archives.
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
		return &fault.Error{Op: "unpack", Err: fmt.Errorf("%w: this is an archive of image layers ('docker save' or an OCI layout), not of a root filesystem", fault.ErrUnsupported),
			Hint: "Export the files of a container instead: docker export $(docker create IMAGE) > rootfs.tar"}
	}
	return nil
}

// plainConfig is the configuration of a tree that came without one.
func plainConfig(diff *os.File) Config {
	cfg := Config{Env: []string{defaultPath}}
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
			s.Progress(Progress{Entries: r.Entries, Bytes: r.Bytes})
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
func (s *Store) publish(ctx context.Context, name string, builtin bool, fill func(diff *os.File) (Config, error)) (img Image, err error) {
	if err := s.sweep(); err != nil {
		return Image{}, err
	}
	tmp, hold, err := s.temp()
	if err != nil {
		return Image{}, err
	}
	defer func() { // a published layer has moved away
		err = errors.Join(err, os.RemoveAll(tmp), hold.Close())
	}()
	path := filepath.Join(tmp, "diff")
	if err := os.Mkdir(path, 0o755); err != nil {
		return Image{}, err
	}
	diff, err := os.Open(path)
	if err != nil {
		return Image{}, err
	}
	defer diff.Close()
	if err := diff.Chmod(0o755); err != nil { // under every umask, unless the source says otherwise
		return Image{}, err
	}
	cfg, err := fill(diff)
	if err != nil {
		return Image{}, err
	}
	if list, err := os.ReadDir(path); err != nil || len(list) == 0 {
		return Image{}, errors.Join(err, fmt.Errorf("%w: there are no files in it", fault.ErrInvalid))
	}
	hex, rep, err := tree.Hash(ctx, diff)
	if err != nil {
		return Image{}, err
	}
	l := layer{Digest: "sha256:" + hex, Bytes: rep.Bytes, Entries: rep.Entries}
	b, err := json.Marshal(l)
	if err != nil {
		return Image{}, err
	}
	if err := os.WriteFile(filepath.Join(tmp, "layer.json"), append(b, '\n'), 0o600); err != nil {
		return Image{}, err
	}
	if err := failpoint.Hit("images.import.before-sync"); err != nil {
		return Image{}, err
	}
	// One call for the whole file system instead of one per file.
	if err := unix.Syncfs(int(diff.Fd())); err != nil {
		return Image{}, fmt.Errorf("write the layer to disk: %w", err)
	}
	if err := ctx.Err(); err != nil {
		return Image{}, err
	}
	rec := record{Manifest: manifest{Version: 1, Layers: []string{l.Digest}, Config: cfg}, Created: time.Now().UTC(), Bytes: l.Bytes}
	digest := digestOf(rec.Manifest)
	err = s.locked(func() error { return s.commit(tmp, hex, digest, rec, name, builtin) })
	if err != nil {
		return Image{}, err
	}
	idx, err := s.index()
	if err != nil {
		return Image{}, err
	}
	return s.image(idx, name, digest)
}

// commit makes a layer in tmp visible, then its record, then its name. The lock
// must be held.
func (s *Store) commit(tmp, hex, digest string, rec record, name string, builtin bool) error {
	if err := failpoint.Hit("images.import.before-rename"); err != nil {
		return err
	}
	to := s.path("layers", hex)
	if _, err := os.Lstat(filepath.Join(to, "diff")); err != nil {
		// What somebody has emptied by hand must not block its own repair.
		if err := os.Rename(to, s.path("tmp", "removed-"+random())); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		if err := os.Rename(tmp, to); err != nil {
			return err
		}
		if err := syncDir(s.path("layers")); err != nil {
			return err
		}
	}
	if err := failpoint.Hit("images.import.after-rename"); err != nil {
		return err
	}
	recHex, _ := hexOf(digest)
	if _, err := s.record(digest); err != nil {
		if err := s.writeJSON(filepath.Join("records", recHex+".json"), rec); err != nil {
			return err
		}
	}
	if err := failpoint.Hit("images.import.before-index"); err != nil {
		return err
	}
	idx, err := s.index()
	if err != nil {
		return err
	}
	idx.Names[name] = entry{Digest: digest, Created: rec.Created, Builtin: builtin}
	return s.writeJSON("index.json", idx)
}

// temp makes a directory for an import. Its lock tells others that somebody
// still works on it.
func (s *Store) temp() (dir string, hold *os.File, err error) {
	err = s.locked(func() error {
		dir = s.path("tmp", "import-"+random())
		if err := os.Mkdir(dir, 0o700); err != nil {
			return err
		}
		if hold, err = os.Open(dir); err != nil {
			return err
		}
		return flock(hold, unix.LOCK_EX|unix.LOCK_NB)
	})
	return dir, hold, err
}

// sweep deletes what killed imports and removals left.
func (s *Store) sweep() error {
	var doomed []string
	err := s.locked(func() error { // so that nobody is between mkdir and flock
		list, err := os.ReadDir(s.path("tmp"))
		if err != nil {
			return err
		}
		for _, e := range list {
			f, err := os.Open(s.path("tmp", e.Name()))
			if err != nil {
				continue
			}
			if flock(f, unix.LOCK_EX|unix.LOCK_NB) == nil {
				doomed = append(doomed, s.path("tmp", e.Name()))
			}
			f.Close()
		}
		return nil
	})
	return errors.Join(err, removeAll(doomed))
}

func removeAll(dirs []string) error {
	var errs []error
	for _, d := range dirs {
		errs = append(errs, os.RemoveAll(d))
	}
	return errors.Join(errs...)
}

// writeJSON publishes v at name, below the store.
func (s *Store) writeJSON(name string, v any) (err error) {
	b, err := json.MarshalIndent(v, "", "  ")
	if err != nil {
		return err
	}
	tmp := s.path("tmp", "json-"+random())
	f, err := os.OpenFile(tmp, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			_ = os.Remove(tmp)
		}
	}()
	_, err = f.Write(append(b, '\n'))
	if err = errors.Join(err, f.Sync(), f.Close()); err != nil {
		return err
	}
	if err := os.Rename(tmp, s.path(name)); err != nil {
		return err
	}
	return syncDir(filepath.Dir(s.path(name)))
}

func syncDir(path string) error {
	d, err := os.Open(path)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

// source remembers whether reading itself failed, to tell that from damage.
type source struct {
	r   io.Reader
	err error
}

func (s *source) Read(p []byte) (int, error) {
	n, err := s.r.Read(p)
	if err != nil && err != io.EOF {
		s.err = err
	}
	return n, err
}

// unpacked calls every error of a decompressor damage, unless the source failed.
type unpacked struct {
	r   io.Reader
	src *source
}

func (u *unpacked) Read(p []byte) (int, error) {
	n, err := u.r.Read(p)
	switch {
	case err == nil || err == io.EOF:
	case u.src.err != nil:
		err = u.src.err
	case errors.Is(err, io.ErrUnexpectedEOF):
		err = fmt.Errorf("%w: the archive is cut short", fault.ErrInvalid)
	default:
		err = fmt.Errorf("%w: the archive is damaged: %w", fault.ErrInvalid, err)
	}
	return n, err
}

// decompress recognises a compression by its first bytes. done frees what was
// needed and reports an error that the stream itself did not.
func decompress(ctx context.Context, r io.Reader) (plain io.Reader, done func(error) error, err error) {
	src := &source{r: r}
	br := bufio.NewReaderSize(src, 256<<10)
	magic, err := br.Peek(6)
	if err != nil && err != io.EOF {
		return nil, nil, err
	}
	nothing := func(error) error { return nil }
	starts := func(s string) bool { return bytes.HasPrefix(magic, []byte(s)) }
	switch {
	case starts("\x1f\x8b"):
		z, err := gzip.NewReader(br)
		if err != nil {
			return nil, nil, fmt.Errorf("%w: the archive is damaged: %w", fault.ErrInvalid, err)
		}
		return &unpacked{z, src}, nothing, nil
	case starts("\x28\xb5\x2f\xfd"):
		// 128 MiB is the window of zstd's --long; a frame could ask for any.
		z, err := zstd.NewReader(br, zstd.WithDecoderMaxWindow(128<<20), zstd.WithDecoderConcurrency(2))
		if err != nil {
			return nil, nil, err
		}
		return &unpacked{z, src}, func(error) error { z.Close(); return nil }, nil
	case starts("BZh"):
		return &unpacked{bzip2.NewReader(br), src}, nothing, nil
	case starts("\xfd7zXZ\x00"):
		return unxz(ctx, br)
	}
	return br, nothing, nil
}

// unxz leaves xz to the tool of that name.
func unxz(ctx context.Context, r io.Reader) (io.Reader, func(error) error, error) {
	bin, err := exec.LookPath("xz")
	if err != nil {
		return nil, nil, &fault.Error{Op: "unpack", Hint: "Install it (apt-get install xz-utils) or decompress the archive first.",
			Err: fmt.Errorf("%w: the archive is compressed with xz, and the xz command is not there", fault.ErrUnsupported)}
	}
	var stderr bytes.Buffer
	cmd := exec.CommandContext(ctx, bin, "-dc", "--memlimit=512MiB")
	cmd.Stdin, cmd.Stderr = r, &stderr
	// Should the source never end, it must not hold the exit up.
	cmd.WaitDelay = time.Second
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, nil, err
	}
	return out, func(failed error) error {
		if failed != nil {
			_ = cmd.Process.Kill()
			_ = cmd.Wait()
			if msg := strings.TrimSpace(stderr.String()); msg != "" {
				return fmt.Errorf("%w: %s", fault.ErrInvalid, msg)
			}
			return nil
		}
		if err := cmd.Wait(); err != nil {
			return fmt.Errorf("%w: the archive is damaged: %w: %s", fault.ErrInvalid, err, strings.TrimSpace(stderr.String()))
		}
		return nil
	}, nil
}
