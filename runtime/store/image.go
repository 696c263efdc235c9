package store

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"sort"
	"strings"
	"sync"
	"time"

	"github.com/zeebo/blake3"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/fault"
)

const (
	maxImages    = 1 << 20
	watchEvery   = 10 * time.Millisecond
	watchAtLeast = 1 << 20 // smaller files are hashed at the end
	watchAtMost  = 64      // open files
	syncers      = 16      // concurrent fsyncs: they share one journal commit of the filesystem
)

// imageWatch hashes and writes back large images while CRIU still appends to
// them, so that little is left to do while the sandbox stands frozen.
type imageWatch struct {
	dir  *os.File
	stop context.CancelFunc
	done chan struct{}

	files map[string]*watched // the goroutine's until done is closed
}

type watched struct {
	f    *os.File
	hash *blake3.Hasher
	n    int64
}

func watchImages(path string) (*imageWatch, error) {
	dir, err := openDir(path)
	if err != nil {
		return nil, err
	}
	ctx, stop := context.WithCancel(context.Background())
	w := &imageWatch{dir: dir, stop: stop, done: make(chan struct{}), files: map[string]*watched{}}
	go w.run(ctx)
	return w, nil
}

func (w *imageWatch) run(ctx context.Context) {
	defer close(w.done)
	// Writes to a file raise no event that tells how far they came, so the
	// sizes are looked at until the dump is over.
	t := time.NewTicker(watchEvery)
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-t.C:
			w.look(ctx)
		}
	}
}

// look only helps: whatever fails here is found by the final hashing.
func (w *imageWatch) look(ctx context.Context) {
	list, err := readDir(w.dir)
	if err != nil {
		return
	}
	for _, name := range list {
		x := w.files[name]
		// Only the page images: they are where the bytes are, and CRIU writes
		// them strictly from front to back (it can stream them into a pipe).
		if x == nil && len(w.files) < watchAtMost && strings.HasPrefix(name, "pages-") {
			f, info, err := openPlain(w.dir, name)
			if err != nil {
				continue
			}
			if info.Size() < watchAtLeast {
				_ = f.Close()
				continue
			}
			x = &watched{f: f, hash: blake3.New()}
			w.files[name] = x
		}
		if x == nil {
			continue
		}
		from := x.n
		if _, err := x.advance(ctx); err != nil {
			_ = x.f.Close()
			delete(w.files, name)
			continue
		}
		if x.n > from {
			startWriteback(x.f, from, x.n-from)
		}
	}
}

// advance hashes up to the present end of the file.
func (x *watched) advance(ctx context.Context) (int64, error) {
	buf := buffers.Get().(*[]byte)
	defer buffers.Put(buf)
	for {
		if err := ctx.Err(); err != nil {
			return x.n, context.Cause(ctx)
		}
		n, err := x.f.ReadAt(*buf, x.n)
		_, _ = x.hash.Write((*buf)[:n]) // never fails
		x.n += int64(n)
		if errors.Is(err, io.EOF) {
			return x.n, nil
		}
		if err != nil {
			return x.n, err
		}
	}
}

// end stops watching and keeps what was hashed.
func (w *imageWatch) end() {
	w.stop()
	<-w.done
}

func (w *imageWatch) close() {
	w.end()
	for _, x := range w.files {
		_ = x.f.Close()
	}
	w.files = nil
	_ = w.dir.Close()
}

func readDir(dir *os.File) ([]string, error) {
	if _, err := dir.Seek(0, io.SeekStart); err != nil {
		return nil, err
	}
	names, err := dir.Readdirnames(maxImages)
	if errors.Is(err, io.EOF) { // an empty one
		return nil, nil
	}
	return names, err
}

// sealImages hashes every file of a directory and makes it durable. Memory is
// bounded by the number of files, not by their sizes. w may be nil.
func sealImages(ctx context.Context, path string, w *imageWatch) ([]Image, error) {
	dir, err := openDir(path)
	if err != nil {
		return nil, err
	}
	defer dir.Close()
	list, err := listImages(dir)
	if err != nil {
		return nil, err
	}
	// The disk begins with all of them before a core has hashed the first.
	flush, fctx := errgroup.WithContext(ctx)
	flush.SetLimit(syncers)
	hash, hctx := errgroup.WithContext(ctx)
	hash.SetLimit(workers())
	names := make([]string, len(list)) // the list itself is being filled in
	for i := range list {
		names[i] = list[i].Name
	}
	var work sync.WaitGroup
	var flushErr error
	work.Go(func() {
		for _, name := range names {
			flush.Go(func() error { return flushImage(fctx, dir, name) })
		}
		flushErr = flush.Wait()
	})
	for i := range list {
		hash.Go(func() error { return hashImage(hctx, dir, w, &list[i]) })
	}
	err = hash.Wait()
	work.Wait()
	if err := errors.Join(err, flushErr); err != nil {
		return nil, err
	}
	sort.Slice(list, func(i, j int) bool { return list[i].Name < list[j].Name })
	return list, dir.Sync()
}

// listImages returns the files of a directory, the largest first so that the
// cores finish together. Anything but plain files is refused.
func listImages(dir *os.File) ([]Image, error) {
	names, err := readDir(dir)
	if err != nil {
		return nil, err
	}
	if len(names) == maxImages {
		return nil, fmt.Errorf("more than %d process images: %w", maxImages, fault.ErrUnsupported)
	}
	list := make([]Image, 0, len(names))
	for _, name := range names {
		var st unix.Stat_t
		if err := unix.Fstatat(int(dir.Fd()), name, &st, unix.AT_SYMLINK_NOFOLLOW); err != nil {
			return nil, fmt.Errorf("process image %s: %w", name, err)
		}
		if st.Mode&unix.S_IFMT != unix.S_IFREG {
			return nil, fmt.Errorf("process image %s is not a regular file: %w", name, fault.ErrCorrupt)
		}
		list = append(list, Image{Name: name, Bytes: st.Size})
	}
	sort.Slice(list, func(i, j int) bool { return list[i].Bytes > list[j].Bytes })
	return list, nil
}

func flushImage(ctx context.Context, dir *os.File, name string) error {
	if err := ctx.Err(); err != nil {
		return context.Cause(ctx)
	}
	f, _, err := openPlain(dir, name)
	if err != nil {
		return err
	}
	startWriteback(f, 0, 0)
	return errors.Join(f.Chmod(0o600), f.Sync(), f.Close())
}

// hashImage fills in the digest, from where the watcher left off if it knew the file.
func hashImage(ctx context.Context, dir *os.File, w *imageWatch, im *Image) (err error) {
	f, info, err := openPlain(dir, im.Name)
	if err != nil {
		return err
	}
	x := &watched{f: f, hash: blake3.New()}
	defer func() { err = errors.Join(err, f.Close()) }()
	if w != nil {
		if known := w.files[im.Name]; known != nil {
			was, err := known.f.Stat()
			if err == nil && os.SameFile(was, info) && known.n <= info.Size() {
				x = &watched{f: f, hash: known.hash, n: known.n}
			}
		}
	}
	if im.Bytes, err = x.advance(ctx); err != nil {
		return fmt.Errorf("process image %s: %w", im.Name, err)
	}
	if im.Bytes != info.Size() {
		return fmt.Errorf("process image %s is still being written: %w", im.Name, fault.ErrState)
	}
	im.Digest = sum(x.hash)
	return nil
}

// verifyImages holds the images below a checkpoint's directory against a list.
func verifyImages(ctx context.Context, parent *os.File, want []Image) error {
	fd, err := unix.Openat(int(parent.Fd()), ImagesName, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if errors.Is(err, unix.ENOTDIR) || errors.Is(err, unix.ELOOP) {
		return fmt.Errorf("%s is not a directory: %w", ImagesName, fault.ErrCorrupt)
	}
	if err != nil {
		return missing(ImagesName, os.NewSyscallError("openat", err))
	}
	dir := os.NewFile(uintptr(fd), parent.Name()+"/"+ImagesName)
	defer dir.Close()
	have, err := listImages(dir)
	if err != nil {
		return err
	}
	expect := make(map[string]Image, len(want))
	for _, im := range want {
		expect[im.Name] = im
	}
	g, gctx := errgroup.WithContext(ctx)
	g.SetLimit(workers())
	for _, im := range have {
		w, ok := expect[im.Name]
		if !ok {
			_ = g.Wait() // the surplus file is the error to tell
			return fmt.Errorf("%s/%s does not belong to the checkpoint: %w", ImagesName, im.Name, fault.ErrCorrupt)
		}
		delete(expect, im.Name)
		g.Go(func() error {
			if im.Bytes != w.Bytes {
				return fmt.Errorf("%s/%s has %d bytes, %d expected: %w", ImagesName, w.Name, im.Bytes, w.Bytes, fault.ErrCorrupt)
			}
			if err := hashImage(gctx, dir, nil, &im); err != nil {
				return err
			}
			if im != w {
				return fmt.Errorf("%s/%s has digest %s, %s expected: %w", ImagesName, w.Name, im.Digest, w.Digest, fault.ErrCorrupt)
			}
			return nil
		})
	}
	if err := g.Wait(); err != nil {
		return err
	}
	for _, im := range want {
		if _, gone := expect[im.Name]; gone {
			return fmt.Errorf("%s/%s is missing: %w", ImagesName, im.Name, fault.ErrCorrupt)
		}
	}
	return nil
}
