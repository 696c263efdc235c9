package runtime

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/overlay"
	"github.com/agentbox/agentbox/runtime/store"
)

// tree is one directory that a restore replaces: the upperdir, or the data of
// a volume that the checkpoint took along.
type tree struct {
	Dir    string `json:"dir"`
	Staged string `json:"staged"` // its replacement, beside it
	Inode  uint64 `json:"inode"`  // of the replacement: tells which of the two is which
	Volume int    `json:"volume"` // place in the manifest's list, from 1; 0: the upperdir
}

// newTree plans to replace a directory.
func newTree(dir string, volume int) tree {
	return tree{Dir: dir, Staged: dir + ".new", Volume: volume}
}

// exchanged tells whether the replacement is in its place.
func (t tree) exchanged() bool {
	var st unix.Stat_t
	return unix.Lstat(t.Dir, &st) == nil && st.Ino == t.Inode
}

// replacement is where the replacement lies now.
func (t tree) replacement() string {
	if t.exchanged() {
		return t.Dir
	}
	return t.Staged
}

// mark remembers the replacement's inode.
func (t *tree) mark() error {
	var st unix.Stat_t
	if err := unix.Lstat(t.Staged, &st); err != nil {
		return fmt.Errorf("%s: %w", t.Staged, err)
	}
	t.Inode = st.Ino
	return nil
}

// layOut builds the replacement from the checkpoint, proving every entry.
func (t tree) layOut(ctx context.Context, r *store.Reader) error {
	if err := discard(t.Staged); err != nil {
		return err
	}
	if err := os.Mkdir(t.Staged, 0o700); err != nil {
		return err
	}
	return extract(ctx, t.content(r), t.Staged)
}

// prove compares the replacement, wherever it lies, with the checkpoint.
func (t tree) prove(ctx context.Context, r *store.Reader) error {
	list, err := t.content(r).Tree(ctx)
	if err != nil {
		return err
	}
	defer list.Close()
	return equal(overlay.Verify(ctx, t.replacement(), list, overlay.CompareOptions{Limit: 1}))
}

// content is what a checkpoint has of one tree.
type content interface {
	Files(ctx context.Context) (io.ReadCloser, error)
	Tree(ctx context.Context) (io.ReadCloser, error)
}

func (t tree) content(r *store.Reader) content {
	if t.Volume == 0 {
		return r
	}
	return volumeContent{r, t.Volume - 1}
}

type volumeContent struct {
	*store.Reader
	i int
}

func (v volumeContent) Files(ctx context.Context) (io.ReadCloser, error) {
	return v.VolumeFiles(ctx, v.i)
}

func (v volumeContent) Tree(ctx context.Context) (io.ReadCloser, error) {
	return v.VolumeTree(ctx, v.i)
}

// each does the same to every tree, side by side.
func each(ctx context.Context, trees []tree, do func(context.Context, tree) error) error {
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(2)
	for _, t := range trees {
		group.Go(func() error { return do(ctx, t) })
	}
	return group.Wait()
}

// swapped tells whether all trees are exchanged: the sandbox has the
// checkpoint's files.
func (r restoring) swapped() bool {
	return len(r.Trees) > 0 && !slices.ContainsFunc(r.Trees, func(t tree) bool { return !t.exchanged() })
}

// discard deletes what lies beside the trees: replacements that were not used,
// or what they replaced.
func (r restoring) discard() error {
	var errs []error
	for _, t := range r.Trees {
		errs = append(errs, discard(t.Staged))
	}
	return errors.Join(errs...)
}

// plan lists what the restore replaces.
func (r *restoration) plan() error {
	r.data.Trees = []tree{newTree(r.c.Upper, 0)}
	for i, v := range r.reader.Manifest().Volumes {
		at := slices.IndexFunc(r.c.Volumes, func(have Volume) bool { return have.Name == v.Name })
		if at < 0 {
			return hint(fmt.Errorf("%w: volume %s of the checkpoint is not the sandbox's any more", ErrState, v.Name), "Make it and the container again as they were.")
		}
		if err := r.c.Volumes[at].alone(); err != nil {
			return err
		}
		r.data.Trees = append(r.data.Trees, newTree(r.c.Volumes[at].Path, i+1))
	}
	return nil
}

// checkAlone proves, at the last moment, that nobody has begun to use a volume
// that is about to be replaced.
func (e *Engine) checkAlone(ctx context.Context, r *restoration) error {
	if len(r.data.Trees) < 2 {
		return nil
	}
	now, err := r.sb.host.Inspect(ctx, r.sb.ID)
	if err != nil {
		return err
	}
	for _, t := range r.data.Trees[1:] {
		for _, v := range now.Volumes {
			if v.Path == t.Dir && !t.exchanged() {
				if err := v.alone(); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

// alone refuses a volume in which others could write at this moment.
func (v Volume) alone() error {
	if len(v.Users) == 0 {
		return nil
	}
	return hint(fmt.Errorf("%w: volume %s is in use by %s, too", ErrState, v.Name, strings.Join(v.Users, ", ")), "Stop that first, or leave the volume out.")
}

// takeVolumes plans to take the volumes of a sandbox along.
func (k *making) takeVolumes() error {
	for _, v := range k.c.Volumes {
		if err := v.alone(); err != nil {
			return err
		}
		k.parts.Volumes = append(k.parts.Volumes, store.Volume{Name: v.Name})
	}
	return nil
}

// captureVolumes writes the volumes' archives and lists.
func captureVolumes(ctx context.Context, k *making, draft *store.Draft) error {
	for i := range k.parts.Volumes {
		files, err := draft.VolumeFilesWriter(i)
		if err != nil {
			return err
		}
		list, err := draft.VolumeTreeWriter(i)
		if err != nil {
			return errors.Join(err, files.Close())
		}
		k.parts.Volumes[i].Files.Entries, err = captureTree(ctx, k.c.Volumes[i].Path, files, list, overlay.CaptureOptions{})
		if err != nil {
			return fmt.Errorf("volume %s: %w", k.c.Volumes[i].Name, err)
		}
	}
	return nil
}
