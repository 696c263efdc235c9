package portable

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"

	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/agentbox/agentbox/internal/failpoint"
	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/overlay"
)

// maxEarly bounds what may come before the facts.
const maxEarly = 1 << 12

// beginForeign reads another engine's archive until both of its descriptions
// have come, and keeps what comes before them.
func (a *Archive) beginForeign(context.Context) error {
	var conf *container
	var spec *specs.Spec
	for conf == nil || spec == nil {
		h, err := a.next()
		if err == io.EOF {
			return corrupt("no archive of a checkpoint: %s or %s is missing", configName, specName)
		}
		if err != nil {
			return err
		}
		name := cleanMember(h.Name)
		var data []byte
		switch {
		case name == configName && conf == nil || name == specName && spec == nil:
			if data, err = a.read(h, maxConfig); err != nil {
				return err
			}
			if name == configName {
				conf, err = parseConfig(data)
			} else {
				spec, err = parseSpec(data)
			}
		default:
			err = a.keep(h, name)
		}
		if err != nil {
			return err
		}
	}
	if conf.Pod != "" {
		return fmt.Errorf("a container of a pod: %w", fault.ErrUnsupported)
	}
	a.facts = facts(conf, spec)
	return failpoint.Hit("portable.import.after-facts")
}

// cleanMember is a member's name without what says nothing.
func cleanMember(name string) string {
	return strings.TrimSuffix(strings.TrimPrefix(name, "./"), "/")
}

// keep spools a member.
func (a *Archive) keep(h *tar.Header, name string) error {
	if len(a.early) == maxEarly {
		return corrupt("%d members and no %s", maxEarly, configName)
	}
	m := member{name: name, size: h.Size, dir: h.Typeflag == tar.TypeDir}
	if h.Size > 0 && known(name) {
		f, err := scratch(a.opts.Scratch)
		if err != nil {
			return err
		}
		m.file = f
		out := &keeps{w: f}
		if _, err := io.Copy(out, a.tar); err != nil {
			return errors.Join(out.err, a.failUnless(out.err, err), f.Close())
		}
	}
	a.early = append(a.early, m)
	return nil
}

// failUnless is fail, unless the writer was at fault.
func (a *Archive) failUnless(writer, err error) error {
	if writer != nil {
		return nil
	}
	return a.fail(err)
}

// known reports whether a member is one that an import reads.
func known(name string) bool {
	return slices.Contains([]string{rootfsName, deletedName, shmName}, name) ||
		strings.HasPrefix(name, imagesDir+"/") || strings.HasPrefix(name, volumesDir+"/")
}

// silent are members that say nothing that a checkpoint keeps.
var silent = []string{
	"", "artifacts", statsName, "dump.log", "restore.log", "ctr.log", networkName, imagesDir, volumesDir,
	"status.dump", "bind.mounts", "io.kubernetes.cri-o.LogPath",
}

// foreignImport is the state of the import of another engine's archive.
type foreignImport struct {
	*importer
	seen    map[string]bool
	trees   []*gathered // 0: the files; nil: there was no archive of it
	deleted []string
	shm     *os.File
}

// foreign reads the rest of another engine's archive. Its members may come in
// any order.
func (im *importer) foreign() error {
	f := &foreignImport{importer: im, seen: map[string]bool{}, trees: make([]*gathered, 1+len(im.facts.Volumes))}
	for _, m := range im.early {
		var r io.Reader = strings.NewReader("")
		if m.file != nil {
			if _, err := m.file.Seek(0, io.SeekStart); err != nil {
				return err
			}
			r = m.file
		}
		if err := f.take(m.name, m.size, m.dir, r); err != nil {
			return err
		}
	}
	for {
		h, err := im.next()
		if err == io.EOF {
			break
		}
		if err != nil {
			return err
		}
		if err := f.take(cleanMember(h.Name), h.Size, h.Typeflag == tar.TypeDir, &memberReader{im}); err != nil {
			return err
		}
	}
	if err := im.end(); err != nil {
		return err
	}
	return f.finish()
}

// take reads one member.
func (f *foreignImport) take(name string, size int64, dir bool, r io.Reader) error {
	if f.seen[name] {
		return corrupt("the member %.80q comes twice", name)
	}
	f.seen[name] = true
	if dir {
		return nil // an engine makes them; what lies in them has names of its own
	}
	image, isImage := strings.CutPrefix(name, imagesDir+"/")
	volume, isVolume := strings.CutPrefix(name, volumesDir+"/")
	switch {
	case isImage:
		if _, err := f.image(image, size, r); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		return nil
	case isVolume:
		volume, ok := strings.CutSuffix(volume, ".tar")
		i := slices.Index(f.facts.Volumes, volume)
		if !ok || i < 0 {
			return corrupt("%.80q is no volume that %s names", name, configName)
		}
		return f.gather(1+i, name, r)
	case name == rootfsName:
		return f.gather(0, name, r)
	case name == deletedName:
		if size > maxDeleted {
			return corrupt("%s is longer than %d bytes", name, maxDeleted)
		}
		data, err := io.ReadAll(r)
		if err != nil {
			return err
		}
		f.deleted, err = parseDeleted(data)
		f.res.Deleted = len(f.deleted)
		return err
	case name == shmName:
		var err error
		if f.shm, err = f.scratch(); err != nil {
			return err
		}
		_, err = io.Copy(f.shm, r)
		return err
	case name == configName || name == specName:
		return corrupt("the member %s comes twice", name)
	case strings.HasPrefix(name, "pre-checkpoint"):
		return fmt.Errorf("only the first half of a checkpoint (--pre-checkpoint): %w", fault.ErrUnsupported)
	case !slices.Contains(silent, name) && !strings.HasPrefix(name, "artifacts/"):
		f.note("The archive's member %.80q is unknown and was left out.", name)
	}
	return nil
}

func (f *foreignImport) note(format string, a ...any) {
	const most = 20
	if len(f.res.Notes) < most {
		f.res.Notes = append(f.res.Notes, fmt.Sprintf(format, a...))
	}
}

func (f *foreignImport) gather(i int, name string, r io.Reader) error {
	spool, err := f.scratch()
	if err != nil {
		return err
	}
	g := &gathered{im: f.importer, spool: spool, sink: f.target.Sink()}
	if err := g.read(r); err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	f.trees[i] = g
	return nil
}

// finish makes trees of what came, and fits the process images to a sandbox.
func (f *foreignImport) finish() error {
	if !f.seen[imagesDir+"/inventory.img"] {
		return corrupt("%s/inventory.img is missing", imagesDir)
	}
	if f.trees[0] == nil && f.deleted == nil {
		f.note("The archive has no changed files of the root filesystem (--ignore-rootfs?).")
	}
	// The storage of Podman and CRI-O gives the root of every image this mode.
	mode, known, err := rootMode(f.target.CRIUDir())
	if err != nil {
		return fmt.Errorf("process images: %w", err)
	}
	if !known {
		mode = 0o555
	}
	var trees []*os.File
	for i, g := range f.trees {
		deleted, lower := f.deleted, f.opts.Lower
		if i > 0 {
			deleted, lower = nil, nil
			if g == nil {
				f.note("The archive has no content of the volume %s.", f.facts.Volumes[i-1])
			}
		}
		if g == nil {
			g = &gathered{im: f.importer}
		}
		cut, err := f.scratch()
		if err != nil {
			return err
		}
		how := implied{deleted: deleted, lower: lower, created: overlay.Time{Sec: f.facts.Created.Unix()}, root: mode}
		if i > 0 {
			how.root = 0o755
		}
		if err := g.write(cut, how); err != nil {
			return err
		}
		trees = append(trees, cut)
	}
	if err := failpoint.Hit("portable.import.after-files"); err != nil {
		return err
	}
	notes, err := adaptImages(f.target.CRIUDir(), f.shm, f.facts)
	f.res.Notes = append(f.res.Notes, notes...)
	if err != nil {
		return fmt.Errorf("process images: %w", err)
	}
	if err := f.checkImages(); err != nil {
		return err
	}
	if err := failpoint.Hit("portable.import.after-images"); err != nil {
		return err
	}
	return f.put(trees)
}
