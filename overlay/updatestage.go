package overlay

import (
	"context"
	"errors"
	"fmt"
	"io"
	goruntime "runtime"
	"strconv"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/failpoint"
	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/internal/guard"
)

// Stage reads from src all data that the update needs, verifies it, and lays it out in the new
// directory stage, which is on the filesystem of dir, the directory to be updated, and beside it,
// not in it. Once Stage has returned nil, Apply no longer needs src. The contents of dir are not
// looked at and may be in use. The data counts for the project of dir, if it has one.
//
// Nothing is durable: after a power cut it is unknown how far Apply came, and all of the
// directory must be read again. The caller of Apply waits for the disk once, at the end.
//
// Data that does not match its entry is ErrCorrupt, a stage that exists already is ErrExists. On
// any other error the caller deletes stage.
func (u *Update) Stage(ctx context.Context, dir, stage string, src Source) error {
	if err := u.stage(ctx, dir, stage, src); err != nil {
		return fmt.Errorf("stage update: %w", err)
	}
	return nil
}

func (u *Update) stage(ctx context.Context, to, stage string, src Source) error {
	if err := checkPrivilege(); err != nil {
		return err
	}
	if err := unix.Mkdir(stage, 0o700); err != nil {
		if err == unix.EEXIST {
			return fmt.Errorf("%w: %w", fault.ErrExists, pathError("mkdir", stage, err))
		}
		return pathError("mkdir", stage, err)
	}
	dir, err := openEmpty(stage) // without the ACL that it may have inherited
	if err != nil {
		return err
	}
	defer unix.Close(dir)
	other, err := openDirectory(to)
	if err == nil {
		err = errors.Join(likeProject(dir, other), unix.Close(other))
	}
	if err != nil {
		return err
	}
	index := u.changes.index
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var next atomic.Int64
	var wg guard.WaitGroup
	for range min(max(goruntime.GOMAXPROCS(0), 2), 8, u.files) {
		wg.Go(func() {
			small := make([]byte, smallFile)
			for ctx.Err() == nil {
				i := int(next.Add(1)) - 1
				if i >= len(index) {
					return
				}
				if index[i].do != doFile {
					continue
				}
				if err := guard.Do(func() error { return u.stageFile(ctx, dir, i, src, small) }); err != nil {
					cancel(err)
				}
			}
		})
	}
	wg.Wait()
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return failpoint.Hit("overlay.update.staged")
}

// stageFile makes the i-th change's file, complete but for its name.
func (u *Update) stageFile(ctx context.Context, dir, i int, src Source, small []byte) (err error) {
	c, err := u.changes.at(i)
	if err != nil {
		return err
	}
	e := *c.New
	var fd int
	err = retry(func() (err error) {
		fd, err = unix.Openat(dir, strconv.Itoa(i),
			unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o600)
		return err
	})
	if err != nil {
		return pathError("create", e.Path, err)
	}
	defer func() {
		if cerr := unix.Close(fd); err == nil && cerr != nil {
			err = pathError("close", e.Path, cerr)
		}
	}()
	want := e.Digest
	w := newFileWriter(fd, &e)
	if err := copyData(ctx, &e, src, small, w.write); err != nil {
		return err
	}
	if err := w.end(); err != nil {
		return err
	}
	if e.Digest != want {
		return corrupt("the data of %q has digest %s, want %s", clip(e.Path), e.Digest, want)
	}
	return nil
}

// copyData gives use all data of a file, which is neither more nor less than
// its entry says.
func copyData(ctx context.Context, e *Entry, src Source, small []byte, use func([]byte) error) (err error) {
	size := e.data()
	if size == 0 {
		return nil
	}
	r, err := src.Data(ctx, *e)
	if err != nil {
		return fmt.Errorf("data of %q: %w", clip(e.Path), err)
	}
	defer func() {
		if cerr := r.Close(); err == nil && cerr != nil {
			err = fmt.Errorf("data of %q: %w", clip(e.Path), cerr)
		}
	}()
	fill := func(p []byte) error {
		if err := ctx.Err(); err != nil {
			return err
		}
		_, err := io.ReadFull(r, p)
		if err == io.EOF || errors.Is(err, io.ErrUnexpectedEOF) {
			return corrupt("the data of %q ends before its %d bytes", clip(e.Path), size)
		}
		if err != nil {
			return fmt.Errorf("data of %q: %w", clip(e.Path), err)
		}
		return nil
	}
	if size <= int64(len(small)) {
		if err = fill(small[:size]); err == nil {
			err = use(small[:size])
		}
	} else {
		err = inBuffers(size, fill, use)
	}
	if err != nil {
		return err
	}
	switch n, err := io.ReadFull(r, small[:1]); {
	case n > 0:
		return corrupt("the data of %q goes on after its %d bytes", clip(e.Path), size)
	case err != io.EOF:
		return fmt.Errorf("data of %q: %w", clip(e.Path), err)
	}
	return nil
}
