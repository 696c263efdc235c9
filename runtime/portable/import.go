package portable

import (
	"archive/tar"
	"bufio"
	"bytes"
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/zeebo/blake3"

	"github.com/agentbox/agentbox/internal/failpoint"
	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/overlay"
)

// begin reads up to the facts.
func (a *Archive) begin(ctx context.Context) error {
	h, err := a.next()
	if err == io.EOF {
		return corrupt("the archive is empty")
	}
	if err != nil {
		return err
	}
	if h.Name != versionName {
		a.header = h
		return a.beginForeign(ctx)
	}
	text, err := a.read(h, 4096)
	if err != nil {
		return err
	}
	if string(text) != versionText {
		return &fault.Error{
			Err:  fmt.Errorf("%q: %w", firstLine(text), fault.ErrUnsupported),
			Hint: "Use the agentbox that made the archive.",
		}
	}
	if h, err = a.expect(manifestName); err != nil {
		return err
	}
	data, err := a.read(h, maxManifest)
	if err != nil {
		return err
	}
	if a.manifest, err = parseManifest(data); err != nil {
		return err
	}
	a.facts = ownFacts(a.manifest, data)
	if err := a.list(); err != nil {
		return err
	}
	return failpoint.Hit("portable.import.after-facts")
}

// list reads the list of the images, if the manifest does not name them.
func (a *Archive) list() error {
	t := a.manifest.listed()
	if t == nil {
		return nil
	}
	h, err := a.expect(listName)
	if err != nil {
		return err
	}
	if h.Size != t.Bytes {
		return corrupt("%s has %d bytes, its manifest says %d", listName, h.Size, t.Bytes)
	}
	lines, err := a.read(h, maxManifest)
	if err != nil {
		return err
	}
	return a.manifest.list(lines)
}

func firstLine(text []byte) string {
	line, _, _ := bytes.Cut(text, []byte("\n"))
	return string(line[:min(len(line), 80)])
}

func ownFacts(m *manifest, raw []byte) Facts {
	f := Facts{Manifest: raw, Engine: "agentbox", ID: m.SandboxID, Name: m.SandboxName, Created: m.Created}
	for _, v := range m.Volumes {
		f.Volumes = append(f.Volumes, v.Name)
	}
	return f
}

// expect goes on to the next member, which must be that one.
func (a *Archive) expect(name string) (*tar.Header, error) {
	h, err := a.next()
	if err == io.EOF {
		return nil, corrupt("the archive ends before %s", name)
	}
	if err != nil {
		return nil, err
	}
	if h.Name != name || (h.Typeflag == tar.TypeDir) != strings.HasSuffix(name, "/") {
		return nil, corrupt("the member %.80q stands where %s belongs", h.Name, name)
	}
	return h, nil
}

// Import writes the checkpoint to target, which is the caller's to commit or to
// abort. It can be called once.
func (a *Archive) Import(ctx context.Context, target Target, opts ImportOptions) (Imported, error) {
	if a.tar == nil {
		return Imported{}, fmt.Errorf("import: the archive was read already: %w", fault.ErrState)
	}
	a.src.ctx = ctx
	im := &importer{Archive: a, ctx: ctx, target: target, opts: opts}
	defer im.free()
	var err error
	if a.manifest != nil {
		im.total = a.manifest.total()
		err = im.own()
	} else {
		err = im.foreign()
	}
	a.tar = nil
	if err != nil {
		return im.res, fmt.Errorf("import: %w", err)
	}
	return im.res, nil
}

// importer is an Import on its way.
type importer struct {
	*Archive
	ctx         context.Context
	target      Target
	opts        ImportOptions
	res         Imported
	files       []*os.File // unlinked ones
	done, total int64
}

func (im *importer) free() {
	for _, f := range im.files {
		_ = f.Close() // nothing in it is needed any more
	}
}

// scratch returns an empty file without a name, so no other process can open it by path.
func scratch(dir string) (*os.File, error) {
	f, err := os.CreateTemp(dir, "agentbox-import-")
	if err != nil {
		return nil, fmt.Errorf("scratch file: %w", err)
	}
	if err := os.Remove(f.Name()); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

func (im *importer) scratch() (*os.File, error) {
	f, err := scratch(im.Archive.opts.Scratch)
	if err == nil {
		im.files = append(im.files, f)
	}
	return f, err
}

// own reads an archive of ours: the members are known, and so is their order.
func (im *importer) own() error {
	m := im.manifest
	trees := make([]*os.File, m.trees())
	for i := range trees {
		f, err := im.spoolTree(i)
		if err != nil {
			return err
		}
		trees[i] = f
	}
	if err := failpoint.Hit("portable.import.after-trees"); err != nil {
		return err
	}
	for _, name := range []string{configName, specName, networkName} {
		h, err := im.expect(name)
		if err != nil {
			return err
		}
		if _, err := im.read(h, maxConfig); err != nil {
			return err
		}
	}
	if err := im.ownDeleted(); err != nil {
		return err
	}
	for i, f := range trees {
		cut, err := im.merge(i, f)
		if err != nil {
			return fmt.Errorf("%s: %w", m.archive(i), err)
		}
		trees[i] = cut
	}
	if err := failpoint.Hit("portable.import.after-files"); err != nil {
		return err
	}
	if err := im.ownImages(); err != nil {
		return err
	}
	if _, err := im.next(); err == nil {
		return corrupt("a member follows the last")
	} else if err != io.EOF {
		return err
	}
	if err := im.end(); err != nil {
		return err
	}
	return im.put(trees)
}

// put hands over all that was read, now that all of it is known to be good.
func (im *importer) put(trees []*os.File) error {
	if err := failpoint.Hit("portable.import.before-put"); err != nil {
		return err
	}
	for i, f := range trees {
		err := im.target.PutTree(im.ctx, i, func(fn func(overlay.Entry) error) error {
			if _, err := f.Seek(0, io.SeekStart); err != nil {
				return err
			}
			return overlay.ReadTree(f, fn)
		})
		if err != nil {
			return err
		}
	}
	im.res.Trees = len(trees)
	if im.res.Images > 0 {
		if err := im.target.PutImages(im.ctx); err != nil {
			return err
		}
	}
	return failpoint.Hit("portable.import.after-put")
}

// spoolTree copies a tree, because the files' data comes later, and proves it.
func (im *importer) spoolTree(i int) (*os.File, error) {
	name := fmt.Sprintf(treeFormat, i)
	h, err := im.expect(name)
	if err != nil {
		return nil, err
	}
	want := im.manifest.tree(i)
	if h.Size != want.Bytes {
		return nil, corrupt("%s has %d bytes, its manifest says %d", name, h.Size, want.Bytes)
	}
	f, err := im.scratch()
	if err != nil {
		return nil, err
	}
	sum := blake3.New()
	if err := im.copy(io.MultiWriter(f, sum), im.tar); err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	if got := digest(sum); got != want.Digest {
		return nil, corrupt("%s has the digest %s, its manifest says %s", name, got, want.Digest)
	}
	_, err = f.Seek(0, io.SeekStart)
	return f, err
}

func digest(sum *blake3.Hasher) string { return digestPrefix + hex.EncodeToString(sum.Sum(nil)) }

// copy writes a member to w. It distinguishes errors of w from those of r.
func (im *importer) copy(w io.Writer, r io.Reader) error {
	out := &keeps{w: w}
	if _, err := io.Copy(out, r); out.err != nil {
		return out.err
	} else if err != nil && !errors.Is(err, fault.ErrCorrupt) {
		return im.fail(err)
	} else {
		return err
	}
}

// keeps records an error of the writer.
type keeps struct {
	w   io.Writer
	err error
}

func (k *keeps) Write(p []byte) (n int, err error) {
	n, k.err = k.w.Write(p)
	return n, k.err
}

// ownDeleted checks deleted.files, which is for other engines: the tree has all that it says.
func (im *importer) ownDeleted() error {
	h, err := im.next()
	if err == io.EOF {
		return corrupt("the archive ends before %s", rootfsName)
	}
	if err != nil {
		return err
	}
	if h.Name != deletedName {
		im.header = h
		return nil
	}
	data, err := im.read(h, maxDeleted)
	if err != nil {
		return err
	}
	list, err := parseDeleted(data)
	im.res.Deleted = len(list)
	return err
}

// merge goes through a tree and the archive of its files side by side, gives
// their data away, and returns the tree as it is cut now.
func (im *importer) merge(i int, f *os.File) (*os.File, error) {
	if _, err := im.expect(im.manifest.archive(i)); err != nil {
		return nil, err
	}
	cut, err := im.scratch()
	if err != nil {
		return nil, err
	}
	data := bufio.NewReaderSize(&memberReader{im}, 64<<10)
	in, out, sink := overlay.NewTarReader(data), overlay.NewTreeWriter(cut), im.target.Sink()
	var sum overlay.Summary
	err = overlay.ReadTree(f, func(e overlay.Entry) error {
		if err := im.checkAttributes(&e); err != nil {
			return err
		}
		sum.Entries++
		if e.Path == "." {
			if err := expectRoot(data, e); err != nil {
				return err
			}
		}
		shown, ok := view(e)
		if ok {
			got, err := in.Next()
			if err == io.EOF {
				return corrupt("%.80q is in the tree and not among the files", e.Path)
			}
			if err != nil {
				return err
			}
			if want := shown.AppendJSON(nil); !bytes.Equal(got.AppendJSON(nil), want) {
				return corrupt("the tree has %.300q where among the files is %.300q", want, got.AppendJSON(nil))
			}
		}
		if n := e.DataSize(); ok && e.Type == overlay.TypeFile && n > 0 {
			sum.Data += n
			if err := im.content(sink, &e, n, in); err != nil {
				return err
			}
		}
		return out.Write(e)
	})
	if err != nil {
		return nil, err
	}
	if _, err := in.Next(); err == nil {
		return nil, corrupt("a file is not in the tree")
	} else if err != io.EOF {
		return nil, err
	}
	if want := im.manifest.tree(i); sum.Entries != want.Entries || sum.Data != want.Data {
		return nil, corrupt("%d entries with %d bytes, its manifest says %d with %d", sum.Entries, sum.Data,
			want.Entries, want.Data)
	}
	im.res.Entries += sum.Entries
	im.res.Data += sum.Data
	return cut, out.Close()
}

// expectRoot reads the root directory, with which the files begin.
func expectRoot(r io.Reader, e overlay.Entry) error {
	want, err := rootHeader(e)
	if err != nil {
		return corrupt("the root directory: %v", err)
	}
	got := make([]byte, len(want))
	if _, err := io.ReadFull(r, got); err == io.EOF || err == io.ErrUnexpectedEOF {
		return corrupt("the files are cut off")
	} else if err != nil {
		return err
	}
	if !bytes.Equal(got, want) {
		return corrupt("the root directory is another among the files than in the tree")
	}
	return nil
}

// content gives the data of a file away.
func (im *importer) content(sink overlay.Sink, e *overlay.Entry, n int64, r io.Reader) error {
	got, chunks, err := sink.Data(im.ctx, n, io.LimitReader(r, n))
	if err != nil {
		return err
	}
	if e.Digest != "" && e.Digest != got {
		return corrupt("%.80q has other content than its tree says", e.Path)
	}
	e.Digest, e.Chunks = got, chunks
	im.progress(n)
	return nil
}

func (im *importer) progress(n int64) {
	im.done += n
	if fn := im.Archive.opts.Progress; fn != nil {
		fn(im.done, im.total)
	}
}

// checkAttributes refuses what only an overlay of another kind understands.
// Ours follows neither: the file would be read as zeros, the directory as empty.
func (im *importer) checkAttributes(e *overlay.Entry) error {
	for _, name := range []string{
		"trusted.overlay.redirect", "trusted.overlay.metacopy", "user.overlay.redirect", "user.overlay.metacopy",
	} {
		if _, ok := e.Xattrs[name]; ok {
			return fmt.Errorf("%.80q has the attribute %s, which leads to another file: %w", e.Path,
				name, fault.ErrUnsupported)
		}
	}
	return nil
}

// memberReader reads the current member and attributes its errors.
type memberReader struct{ im *importer }

func (r *memberReader) Read(p []byte) (int, error) {
	n, err := r.im.tar.Read(p)
	if err != nil && err != io.EOF {
		err = r.im.fail(err)
	}
	return n, err
}

// ownImages reads the process images.
func (im *importer) ownImages() error {
	if im.manifest.Processes == nil {
		return nil
	}
	if _, err := im.expect(imagesDir + "/"); err != nil {
		return err
	}
	for _, want := range im.manifest.images() {
		h, err := im.expect(want.member())
		if err != nil {
			return err
		}
		if h.Size != want.Bytes {
			return corrupt("%s has %d bytes, its manifest says %d", h.Name, h.Size, want.Bytes)
		}
		got, err := im.image(want.Name, h.Size, im.tar)
		if err != nil {
			return fmt.Errorf("%s: %w", h.Name, err)
		}
		if got != want.Digest {
			return corrupt("%s has the digest %s, its manifest says %s", h.Name, got, want.Digest)
		}
	}
	if err := im.checkImages(); err != nil {
		return err
	}
	return failpoint.Hit("portable.import.after-images")
}

func (im *importer) checkImages() error {
	if im.opts.Trust {
		return nil
	}
	return checkImages(im.target.CRIUDir())
}

// image writes the current member as a process image. The name is one part of a
// path; the root takes care that it stays one.
func (im *importer) image(name string, size int64, r io.Reader) (sum string, err error) {
	if err := failpoint.Hit("portable.import.before-image"); err != nil {
		return "", err
	}
	if !plain(name) {
		return "", corrupt("%.80q cannot be the name of an image", name)
	}
	root, err := os.OpenRoot(im.target.CRIUDir())
	if err != nil {
		return "", err
	}
	defer root.Close()
	f, err := root.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if errors.Is(err, os.ErrExist) {
		return "", corrupt("it comes twice")
	}
	if err != nil {
		return "", err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	h := blake3.New()
	if err := im.copy(io.MultiWriter(f, h), r); err != nil {
		return "", err
	}
	im.res.Images++
	im.res.ImageData += size
	im.progress(size)
	return digest(h), nil
}
