package layer

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"os"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/internal/guard"
)

// Pack gives the very stream again that the layer in dir was unpacked from. A
// file that is not as it was is ErrCorrupt, with its name. Close the reader, not
// dir, before it was read to its end.
func Pack(ctx context.Context, dir *os.File) io.ReadCloser {
	ctx, cancel := context.WithCancel(ctx)
	r, w := io.Pipe()
	done := make(chan struct{})
	guard.Go(func() {
		defer close(done)
		_ = w.CloseWithError(guard.Do(func() error { return Write(ctx, dir, w) })) // never fails
	})
	return &packed{PipeReader: r, cancel: cancel, done: done}
}

type packed struct {
	*io.PipeReader
	cancel context.CancelFunc
	done   chan struct{}
}

func (p *packed) Close() error {
	p.cancel()
	err := p.PipeReader.Close()
	<-p.done
	return err
}

// Write is Pack into a writer.
func Write(ctx context.Context, dir *os.File, w io.Writer) (err error) {
	p := packer{ctx: ctx, dir: dir, w: w, buf: make([]byte, blockSize), spares: map[string][]int{}}
	if err := p.each(func(rec record) error {
		if rec.kind == recReplaced {
			p.spares[rec.path] = append(p.spares[rec.path], rec.number)
		}
		return nil
	}); err != nil {
		return err
	}
	if p.diff, err = openDir(dir, diffName); err != nil {
		return fmt.Errorf("%w: %w", fault.ErrCorrupt, err)
	}
	defer p.diff.Close()
	return p.each(p.record)
}

// Digest is the diffID of what Pack gives.
func Digest(ctx context.Context, dir *os.File) (string, error) {
	sum := sha256.New()
	if err := Write(ctx, dir, sum); err != nil {
		return "", err
	}
	return "sha256:" + hex.EncodeToString(sum.Sum(nil)), nil
}

type packer struct {
	ctx    context.Context
	dir    *os.File
	diff   *os.File
	w      io.Writer
	buf    []byte
	spares map[string][]int // of paths that were replaced: where their contents are, in order
}

func (p *packer) each(fn func(record) error) error {
	r, err := openFrame(p.dir)
	if err != nil {
		return err
	}
	defer r.close()
	for {
		rec, err := r.next()
		if err == io.EOF {
			return nil
		}
		if err == nil {
			err = p.ctx.Err()
		}
		if err == nil {
			err = fn(rec)
		}
		if err != nil {
			return err
		}
	}
}

func (p *packer) record(rec record) error {
	switch rec.kind {
	case recRaw:
		_, err := p.w.Write(rec.raw)
		return err
	case recFile:
		return p.file(rec)
	}
	return nil
}

func (p *packer) file(rec record) error {
	dir, path := p.diff, rec.path
	if list := p.spares[rec.path]; len(list) > 0 {
		dir, path = p.dir, spareName+"/"+strconv.Itoa(list[0])
		p.spares[rec.path] = list[1:]
	}
	// Beneath also refuses links that lead outside.
	fd, err := unix.Openat2(int(dir.Fd()), path,
		&unix.OpenHow{Flags: unix.O_RDONLY | unix.O_CLOEXEC | unix.O_NOFOLLOW | unix.O_NONBLOCK | unix.O_NOATIME,
			Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_XDEV})
	if err != nil {
		return fmt.Errorf("%w: the file %q of the layer: %w", fault.ErrCorrupt, rec.path, err)
	}
	defer unix.Close(fd)
	sum := uint32(0)
	for left := rec.size; left > 0; {
		n, err := unix.Read(fd, p.buf[:min(left, int64(len(p.buf)))])
		if err == unix.EINTR {
			continue
		}
		if err == nil {
			err = p.ctx.Err()
		}
		if err != nil {
			return fmt.Errorf("read %q: %w", rec.path, err)
		}
		if n == 0 {
			return errChanged(rec.path)
		}
		sum = crc32.Update(sum, castagnoli, p.buf[:n])
		if _, err := p.w.Write(p.buf[:n]); err != nil {
			return err
		}
		left -= int64(n)
	}
	if n, err := unix.Read(fd, p.buf[:1]); sum != rec.sum || n != 0 || err != nil {
		return errors.Join(errChanged(rec.path), err)
	}
	return nil
}

func errChanged(path string) error {
	return fmt.Errorf("%w: the file %q has changed", fault.ErrCorrupt, path)
}
