package source

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/types"

	"github.com/agentbox/agentbox/images/image"
	"github.com/agentbox/agentbox/images/reference"
	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/internal/flock"
	"github.com/agentbox/agentbox/internal/fsx"
	"github.com/agentbox/agentbox/internal/guard"
)

// writeLayout adds an image to an OCI layout, which is made if it does not exist. An image that
// had the tag before loses it.
func writeLayout(
	ctx context.Context, ref reference.Reference, img v1.Image, opts image.SourceOptions,
) (h v1.Hash, err error) {
	if err := os.MkdirAll(ref.Path, 0o755); err != nil {
		return h, err
	}
	dir, err := flock.Try(ref.Path, flock.Dir)
	if errors.Is(err, flock.ErrHeld) {
		return h, fmt.Errorf("%w: another process writes to %s", fault.ErrBusy, ref.Path)
	}
	if err != nil {
		return h, err
	}
	defer dir.Unlock()
	root, err := os.OpenRoot(ref.Path)
	if err != nil {
		return h, err
	}
	defer root.Close()
	index := v1.IndexManifest{SchemaVersion: 2, MediaType: types.OCIImageIndex}
	raw, err := readSmall(dirFiles{root}, "index.json", maxManifest)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		// Not to litter a directory that is something else.
		if names, err := dir.File().Readdirnames(-1); err != nil {
			return h, err
		} else if slices.ContainsFunc(names, func(n string) bool { return n != "oci-layout" && n != "blobs" }) {
			return h, fmt.Errorf("%s: %w: it is not empty, and no OCI image layout", ref.Path, fault.ErrExists)
		}
	case err != nil:
		return h, err
	default:
		if err := json.Unmarshal(raw, &index); err != nil {
			return h, fmt.Errorf("%s/index.json: %w: %w", ref.Path, fault.ErrCorrupt, err)
		}
	}
	to := dirSink{root}
	if err := to.put("oci-layout", int64(len(layoutFile)), strings.NewReader(layoutFile)); err != nil {
		return h, err
	}
	d, err := putImage(ctx, to, img, ref.Tag, opts)
	if err != nil {
		return h, err
	}
	index.Manifests = slices.DeleteFunc(index.Manifests, func(o v1.Descriptor) bool {
		return o.Annotations[refName] == ref.Tag && (ref.Tag != "" || o.Digest == d.Digest)
	})
	index.Manifests = append(index.Manifests, d)
	b, err := json.Marshal(index)
	if err != nil {
		return h, err
	}
	for _, sub := range []string{"blobs/sha256", "blobs"} {
		if err := fsx.SyncDir(filepath.Join(ref.Path, sub)); err != nil {
			return h, err
		}
	}
	return d.Digest, to.replace("index.json", int64(len(b)), strings.NewReader(string(b)))
}

// dirSink puts files into a directory, each whole or not at all.
type dirSink struct{ *os.Root }

// put does nothing when the file is there in this size: the names of blobs are
// their digests.
func (d dirSink) put(name string, size int64, r io.Reader) error {
	if fi, err := d.Lstat(name); err == nil && fi.Mode().IsRegular() && fi.Size() == size {
		return nil
	}
	return d.replace(name, size, r)
}

func (d dirSink) replace(name string, size int64, r io.Reader) (err error) {
	if err := d.MkdirAll(filepath.Dir(name), 0o755); err != nil {
		return err
	}
	tmp := filepath.Join(filepath.Dir(name), ".new-"+filepath.Base(name)) // the layout is locked: there is no other
	if err := d.Remove(tmp); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	f, err := d.OpenFile(tmp, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o644)
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			_ = d.Remove(tmp)
		}
	}()
	n, err := io.Copy(f, r)
	if err == nil && n != size {
		err = fmt.Errorf("%s: %w: %d bytes in place of %d", name, fault.ErrCorrupt, n, size)
	}
	if err = errors.Join(err, f.Sync(), f.Close()); err != nil {
		return err
	}
	if err := d.Rename(tmp, name); err != nil {
		return err
	}
	top, err := d.Open(filepath.Dir(name))
	if err != nil {
		return err
	}
	return errors.Join(top.Sync(), top.Close())
}

// loadDaemon gives an image to the Docker daemon.
func loadDaemon(ctx context.Context, ref reference.Reference, img v1.Image, opts image.SourceOptions) (v1.Hash, error) {
	c, err := dockerClient()
	if err != nil {
		return v1.Hash{}, err
	}
	defer c.Close()
	r := saving(ctx, ref, img, opts)
	defer r.Close()
	resp, err := c.ImageLoad(ctx, r)
	if err != nil {
		return v1.Hash{}, daemonError(errors.Join(err, r.failed()))
	}
	defer resp.Body.Close()
	// The daemon says in the stream what went wrong.
	for dec := json.NewDecoder(io.LimitReader(resp.Body, 64<<20)); ; {
		var line struct {
			Error string `json:"error"`
		}
		if err := dec.Decode(&line); errors.Is(err, io.EOF) {
			return img.Digest()
		} else if err != nil {
			return v1.Hash{}, fmt.Errorf("what the Docker daemon answers: %w", err)
		}
		if line.Error != "" {
			return v1.Hash{}, errors.Join(fmt.Errorf("the Docker daemon: %.500q", line.Error), r.failed())
		}
	}
}

// loadPodman gives an image to Podman's storage.
func loadPodman(ctx context.Context, ref reference.Reference, img v1.Image, opts image.SourceOptions) (v1.Hash, error) {
	r := saving(ctx, ref, img, opts)
	defer r.Close()
	p, err := podman(ctx, r, "image", "load", "--quiet")
	if err != nil {
		return v1.Hash{}, err
	}
	_, err = io.Copy(io.Discard, p)
	if err := errors.Join(err, p.Close(), r.failed()); err != nil {
		return v1.Hash{}, err
	}
	return img.Digest()
}

// archive is the output of saveTo as a reader.
type archive struct {
	*io.PipeReader
	done chan struct{}
	err  error // after done
}

func saving(ctx context.Context, ref reference.Reference, img v1.Image, opts image.SourceOptions) *archive {
	r, w := io.Pipe()
	a := &archive{PipeReader: r, done: make(chan struct{})}
	guard.Go(func() {
		defer close(a.done)
		a.err = guard.Do(func() error { return saveTo(ctx, w, ref, img, opts) })
		w.CloseWithError(a.err)
	})
	return a
}

// failed returns why the archive is incomplete; nil if its reader merely stopped early.
func (a *archive) failed() error {
	_ = a.Close()
	if errors.Is(a.err, io.ErrClosedPipe) {
		return nil
	}
	return a.err
}

// Close ends the writer.
func (a *archive) Close() error {
	err := a.PipeReader.Close()
	<-a.done
	return err
}
