package portable

import (
	"archive/tar"
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"filippo.io/age"
	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zstd"

	"github.com/agentbox/agentbox/internal/failpoint"
	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/overlay"
)

// The members of an archive.
const (
	versionName  = "agentbox/version"
	manifestName = "agentbox/manifest.json"
	listName     = "agentbox/images.jsonl"
	treeFormat   = "agentbox/tree-%d.jsonl"

	configName    = "config.dump"
	specName      = "spec.dump"
	networkName   = "network.status"
	deletedName   = "deleted.files"
	rootfsName    = "rootfs-diff.tar"
	shmName       = "devshm-checkpoint.tar"
	volumesDir    = "volumes"
	workspacesDir = "workspaces"
	imagesDir     = "checkpoint"
	statsName     = "stats-dump" // what CRIU measured, among the images of a checkpoint

	// attachedName has the files of the host that belong to a checkpoint; other
	// readers leave it alone.
	attachedName = "agentbox/attached.tar"

	versionText = "agentbox checkpoint archive, version 1\n"
)

// Export writes a checkpoint to w. After an error the output is of no use. Memory does not
// grow with the checkpoint.
func Export(ctx context.Context, w io.Writer, c Checkpoint, opts Options) error {
	if err := export(ctx, w, c, opts); err != nil {
		return fmt.Errorf("export: %w", err)
	}
	return nil
}

func export(ctx context.Context, w io.Writer, c Checkpoint, opts Options) error {
	m, err := parseManifest(c.Manifest)
	if err != nil {
		return err
	}
	out, err := pack(w, opts)
	if err != nil {
		return err
	}
	x := &exporter{ctx: ctx, c: c, m: m, tar: tar.NewWriter(out), total: m.total(), progress: opts.Progress}
	if err := x.run(); err != nil {
		_ = out.Close() // frees the encoder; what it wrote is worth nothing
		return err
	}
	if err := failpoint.Hit("portable.export.before-end"); err != nil {
		return err
	}
	return errors.Join(x.tar.Close(), out.Close())
}

// pack puts compression and encryption between what is returned and w.
func pack(w io.Writer, opts Options) (io.WriteCloser, error) {
	var stack writers
	if len(opts.Recipients) > 0 {
		list, err := recipients(opts.Recipients)
		if err != nil {
			return nil, err
		}
		sealed, err := age.Encrypt(w, list...)
		if err != nil {
			return nil, fmt.Errorf("encrypt: %w", err)
		}
		stack, w = append(stack, sealed), sealed
	}
	switch opts.Compress {
	case "", Zstd:
		// With one thread the cut into blocks, and so the bytes, depend on nothing else.
		z, err := zstd.NewWriter(w, zstd.WithEncoderConcurrency(1), zstd.WithEncoderLevel(zstd.SpeedDefault),
			zstd.WithWindowSize(4<<20), zstd.WithEncoderCRC(true))
		if err != nil {
			return nil, err
		}
		stack, w = append(stack, z), z
	case Gzip:
		z := gzip.NewWriter(w)
		stack, w = append(stack, z), z
	case None:
	default:
		return nil, fmt.Errorf("compression %q: zstd, gzip and none are known: %w", opts.Compress, fault.ErrInvalid)
	}
	buf := bufio.NewWriterSize(w, 128<<10)
	return &packed{buf, stack}, nil
}

type writers []io.Closer

type packed struct {
	*bufio.Writer
	stack writers // the outermost first
}

func (p *packed) Close() error {
	err := p.Flush()
	for i := len(p.stack) - 1; i >= 0; i-- {
		err = errors.Join(err, p.stack[i].Close())
	}
	return err
}

type exporter struct {
	ctx         context.Context
	c           Checkpoint
	m           *manifest
	tar         *tar.Writer
	done, total int64
	progress    func(done, total int64)
}

func (x *exporter) run() error {
	if err := failpoint.Hit("portable.export.begin"); err != nil {
		return err
	}
	if err := x.small(versionName, []byte(versionText)); err != nil {
		return err
	}
	if err := x.small(manifestName, x.c.Manifest); err != nil {
		return err
	}
	if err := x.list(); err != nil {
		return err
	}
	for i := range x.m.trees() {
		if err := x.tree(i); err != nil {
			return fmt.Errorf("tree %d: %w", i, err)
		}
	}
	config, spec, err := podmanConfig(x.m, x.c)
	if err != nil {
		return err
	}
	for _, f := range []struct {
		name string
		v    any
	}{{configName, config}, {specName, spec}, {networkName, nil}} {
		data, err := json.MarshalIndent(f.v, "", "  ")
		if err != nil {
			return err
		}
		if err := x.small(f.name, data); err != nil {
			return err
		}
	}
	if err := failpoint.Hit("portable.export.after-facts"); err != nil {
		return err
	}
	for i := range x.m.trees() {
		if err := x.files(i); err != nil {
			return fmt.Errorf("%s: %w", x.m.archive(i), err)
		}
	}
	if err := failpoint.Hit("portable.export.after-files"); err != nil {
		return err
	}
	return x.images()
}

// member begins one. Readers other than ours restore names and modes; the rest
// is there to be the same every time.
func (x *exporter) member(name string, size int64) error {
	if err := x.ctx.Err(); err != nil {
		return context.Cause(x.ctx)
	}
	h := &tar.Header{
		Typeflag: tar.TypeReg, Name: name, Size: size, Mode: 0o600, ModTime: x.m.Created.UTC().Truncate(time.Second),
	}
	if strings.HasSuffix(name, "/") {
		h.Typeflag, h.Mode = tar.TypeDir, 0o700
	}
	return x.tar.WriteHeader(h)
}

func (x *exporter) small(name string, data []byte) error {
	if err := x.member(name, int64(len(data))); err != nil {
		return err
	}
	_, err := x.tar.Write(data)
	return err
}

// stream writes a member of which the length is known.
func (x *exporter) stream(name string, size int64, r io.Reader, count bool) error {
	if err := x.member(name, size); err != nil {
		return err
	}
	n, err := io.Copy(x.tar, &counted{x: x, r: io.LimitReader(r, size), on: count})
	if err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	var more [1]byte
	if k, err := io.ReadFull(r, more[:]); n != size || k != 0 {
		return corrupt("%s is not %d bytes long", name, size)
	} else if !errors.Is(err, io.EOF) { // a reader that proves does so at its end
		return fmt.Errorf("%s: %w", name, err)
	}
	return nil
}

// counted reports progress and ends when the caller does.
type counted struct {
	x  *exporter
	r  io.Reader
	on bool
}

func (c *counted) Read(p []byte) (int, error) {
	if err := c.x.ctx.Err(); err != nil {
		return 0, context.Cause(c.x.ctx)
	}
	n, err := c.r.Read(p)
	if c.on && n > 0 {
		c.x.done += int64(n)
		if c.x.progress != nil {
			c.x.progress(c.x.done, c.x.total)
		}
	}
	return n, err
}

// list writes the list of the images, and takes it.
func (x *exporter) list() (err error) {
	t := x.m.listed()
	if t == nil {
		return nil
	}
	r, err := x.c.Data.ImageList(x.ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, r.Close()) }()
	lines, err := io.ReadAll(io.LimitReader(r, t.Bytes+1))
	if err != nil {
		return fmt.Errorf("%s: %w", listName, err)
	}
	if int64(len(lines)) != t.Bytes {
		return corrupt("%s is not %d bytes long", listName, t.Bytes)
	}
	if err := x.m.list(lines); err != nil {
		return err
	}
	return x.small(listName, lines)
}

func (x *exporter) tree(i int) (err error) {
	r, err := x.c.Data.Tree(x.ctx, i)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, r.Close()) }()
	return x.stream(fmt.Sprintf(treeFormat, i), x.m.tree(i).Bytes, r, false)
}

// entries calls fn for the entries of a tree.
func (x *exporter) entries(i int, fn func(overlay.Entry) error) (err error) {
	r, err := x.c.Data.Tree(x.ctx, i)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, r.Close()) }()
	return overlay.ReadTree(r, fn)
}

// files writes what a tree has content of. A tar says how long its members are
// before it has them, so the entries are gone through twice.
func (x *exporter) files(i int) error {
	size := overlay.NewTarWriter(io.Discard)
	var gone, head measure
	list := &deletedWriter{w: &gone}
	deleted := newDeletions(x.c.Lower, list.add)
	err := x.entries(i, func(e overlay.Entry) error {
		if i == 0 {
			if err := deleted.next(e); err != nil {
				return err
			}
		}
		if e.Path == "." {
			root, err := rootHeader(e)
			head = measure(len(root))
			return err
		}
		if e, ok := view(e); ok {
			if err := size.Header(e); err != nil {
				return err
			}
			size.Skip()
		}
		return nil
	})
	if err := errors.Join(err, deleted.end(), list.end(), size.Close()); err != nil {
		return err
	}
	if list.n > 0 {
		if err := x.deleted(int64(gone)); err != nil {
			return err
		}
	}
	if err := x.member(x.m.archive(i), int64(head)+size.Size()); err != nil {
		return err
	}
	w := overlay.NewTarWriter(x.tar)
	src := x.c.Data.Source()
	err = x.entries(i, func(e overlay.Entry) error {
		if e.Path == "." {
			root, err := rootHeader(e)
			if err != nil {
				return err
			}
			_, err = x.tar.Write(root)
			return err
		}
		shown, ok := view(e)
		if !ok {
			return nil
		}
		if err := w.Header(shown); err != nil {
			return err
		}
		if e.Type != overlay.TypeFile || e.Hardlink != "" || e.DataSize() == 0 {
			return nil
		}
		return x.content(w, src, e)
	})
	return errors.Join(err, w.Close())
}

func (x *exporter) content(w io.Writer, src overlay.Source, e overlay.Entry) (err error) {
	r, err := src.Data(x.ctx, e)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, r.Close()) }()
	n, err := io.Copy(w, &counted{x: x, r: r, on: true})
	if err != nil {
		return err
	}
	if n != e.DataSize() {
		return corrupt("%q has %d bytes of data where its entry says %d", e.Path, n, e.DataSize())
	}
	return nil
}

func (x *exporter) deleted(size int64) error {
	if err := x.member(deletedName, size); err != nil {
		return err
	}
	buf := bufio.NewWriter(x.tar)
	list := &deletedWriter{w: buf}
	deleted := newDeletions(x.c.Lower, list.add)
	err := x.entries(0, deleted.next)
	return errors.Join(err, deleted.end(), list.end(), buf.Flush())
}

func (x *exporter) images() error {
	if x.m.Processes == nil {
		return nil
	}
	if err := x.member(imagesDir+"/", 0); err != nil {
		return err
	}
	for _, im := range x.m.images() {
		if err := x.image(im); err != nil {
			return err
		}
	}
	return failpoint.Hit("portable.export.after-images")
}

func (x *exporter) image(im image) (err error) {
	r, err := x.c.Data.Image(x.ctx, im.Name)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, r.Close()) }()
	return x.stream(im.member(), im.Bytes, r, true)
}

// member returns the name of an image in an archive: CRIU's statistics are above the images, where
// checkpointctl looks for them.
func (im image) member() string {
	if im.Name == statsName {
		return statsName
	}
	return imagesDir + "/" + im.Name
}

// measure counts what is written to it.
type measure int64

func (m *measure) Write(p []byte) (int, error) {
	*m += measure(len(p))
	return len(p), nil
}

// samePrefix reports whether data begins with magic.
func samePrefix(data []byte, magic string) bool { return bytes.HasPrefix(data, []byte(magic)) }
