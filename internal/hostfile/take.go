package hostfile

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/overlay"
)

// tries is how often Take begins anew with a file that changes meanwhile.
const tries = 3

// Taken is a file as Take has found it.
type Taken struct {
	Entry *overlay.Entry // with the sink's digest and pieces; nil: it is not there
	st    unix.Stat_t
}

// Take reads a file, of one instant and of at most limit bytes, into a sink. before
// is what an earlier Take of it has returned, or nil: a file that has not changed since
// is not opened again. Between blocks it hears that ctx has ended.
func Take(ctx context.Context, path string, to overlay.Sink, limit int64, before *Taken) (*Taken, error) {
	dir, err := Open(filepath.Dir(path))
	if err != nil {
		return nil, err
	}
	defer dir.Close()
	for try := 1; ; try++ {
		t, err := dir.take(ctx, filepath.Base(path), to, limit, before)
		if err == nil || !errors.Is(err, ErrChanged) || try == tries {
			return t, err
		}
	}
}

func (d *Dir) take(ctx context.Context, name string, to overlay.Sink, limit int64, before *Taken) (*Taken, error) {
	if before != nil {
		if same, err := d.unchanged(name, before); err != nil || same {
			return before, err
		}
	}
	f, err := d.look(ctx, name)
	if err != nil || f == nil {
		return &Taken{}, err
	}
	defer f.close()
	if err := bounded(f.st.Size, limit); err != nil {
		return nil, err
	}
	f.flush()
	e, err := f.settled(ctx)
	if err != nil {
		return nil, err
	}
	if err := bounded(e.Size, limit); err != nil { // it has grown
		return nil, err
	}
	if e.Extents, err = extents(f.File, e.Size); err != nil {
		return nil, err
	}
	e.Digest, e.Chunks, err = to.Data(ctx, e.DataSize(), reader{ctx, data(f.File, e)})
	if errors.Is(err, io.ErrUnexpectedEOF) { // it was cut
		err = ErrChanged
	}
	if err != nil {
		return nil, err
	}
	var now unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &now); err != nil {
		return nil, err
	}
	if !same(&f.st, &now) {
		return nil, ErrChanged
	}
	return &Taken{e, f.st}, recordable(*e)
}

// unchanged reports whether a file is as it was taken.
func (d *Dir) unchanged(name string, t *Taken) (bool, error) {
	fd, st, err := d.find(name)
	if err != nil || fd < 0 {
		return err == nil && t.Entry == nil, err
	}
	return t.Entry != nil && same(&t.st, &st), unix.Close(fd)
}

func bounded(size, limit int64) error {
	if size > limit {
		return fmt.Errorf("%w: it has %d bytes, at most %d can be attached", fault.ErrInvalid, size, limit)
	}
	return nil
}

// recordable refuses what a list of entries cannot hold, before a caller relies on it.
func recordable(e overlay.Entry) error {
	e.Path = "0"
	if _, err := overlay.ParseEntry(e.AppendJSON(nil)); err != nil {
		return fmt.Errorf("%w: it cannot be recorded: %v", fault.ErrUnsupported, err)
	}
	return nil
}

// reader ends when its context does.
type reader struct {
	ctx context.Context
	io.Reader
}

func (r reader) Read(p []byte) (int, error) {
	if err := r.ctx.Err(); err != nil {
		return 0, context.Cause(r.ctx)
	}
	return r.Reader.Read(p)
}

// data reads the extents of a file, one after the other.
func data(f *os.File, e *overlay.Entry) io.Reader {
	if e.Extents == nil {
		return io.NewSectionReader(f, 0, e.Size)
	}
	var parts []io.Reader
	for _, x := range e.Extents {
		parts = append(parts, io.NewSectionReader(f, x.Off, x.Len))
	}
	return io.MultiReader(parts...)
}

// extents asks where a file has data; nil: everywhere.
func extents(f *os.File, size int64) ([]overlay.Extent, error) {
	list := []overlay.Extent{}
	for at := int64(0); at < size; {
		from, err := unix.Seek(int(f.Fd()), at, unix.SEEK_DATA)
		if errors.Is(err, unix.ENXIO) {
			return list, nil
		}
		if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EOPNOTSUPP) {
			return nil, nil // a filesystem that knows no holes
		}
		if err != nil {
			return nil, err
		}
		if at, err = unix.Seek(int(f.Fd()), from, unix.SEEK_HOLE); err != nil {
			return nil, err
		}
		if at = min(at, size); at > from {
			list = append(list, overlay.Extent{Off: from, Len: at - from})
		}
	}
	if len(list) == 1 && list[0] == (overlay.Extent{Len: size}) || size == 0 {
		return nil, nil
	}
	return list, nil
}
