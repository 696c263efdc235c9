package overlay

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"iter"
	"os"
	"path/filepath"
	"strconv"

	"github.com/zeebo/blake3"
	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/fault"
)

// An update can keep what it replaces, so that the way back needs no copy of it:
//
//	Stage -> WriteBefore -> ApplyDisplacing
//	Collect -> PlanUpdate(Before) -> Stage(OpenDisplaced) -> Apply, to go back, from wherever it was left

// displacedPrefix begins the names, in the stage, of what was there and goes.
const displacedPrefix = "was-"

// CanDisplace reports whether the update is one for ApplyDisplacing: what differs fits into
// memory, and the directory stage lies on a filesystem that can exchange two names.
func (u *Update) CanDisplace(stage string) (ok bool, err error) {
	if u.changes.file != nil {
		return false, nil
	}
	names := [2]string{filepath.Join(stage, "a"), filepath.Join(stage, "b")}
	for _, name := range names {
		if err := os.Mkdir(name, 0o700); err != nil {
			return false, err
		}
		defer func() { err = errors.Join(err, os.Remove(name)) }()
	}
	err = unix.Renameat2(unix.AT_FDCWD, names[0], unix.AT_FDCWD, names[1], unix.RENAME_EXCHANGE)
	if err == unix.EINVAL || err == unix.ENOSYS || err == unix.EOPNOTSUPP {
		return false, nil
	}
	return err == nil, err
}

// ApplyDisplacing is Apply, but what it replaces and removes lies in stage
// afterwards, also when it fails.
func (u *Update) ApplyDisplacing(ctx context.Context, dir, stage string) error {
	if err := u.apply(ctx, dir, stage, true); err != nil {
		return fmt.Errorf("update %s: %w", dir, err)
	}
	return nil
}

// displace takes a name out of the directory that the i-th change is about.
func (a *updater) displace(i, dir int, name, path string) error {
	if err := a.rename(dir, name, a.stage, displacedPrefix+strconv.Itoa(i), unix.RENAME_NOREPLACE); err != nil {
		return pathError("move aside", path, err)
	}
	return nil
}

// A before is what WriteBefore writes: a line for each change, in order, "+" and
// the entry that was there, or "-" and the path of one that was not; then "=" and
// the BLAKE3 of all that in hex.

// WriteBefore writes down to the new file path what the directory had where the
// update changes it. The caller makes it durable.
func (u *Update) WriteBefore(path string) (err error) {
	var b []byte
	for i := range u.changes.index {
		c, err := u.changes.at(i)
		if err != nil {
			return err
		}
		if c.Old != nil {
			b = c.Old.AppendJSON(append(b, '+'))
		} else {
			absent := Entry{Path: c.Path, Type: TypeWhiteout}
			b = absent.AppendJSON(append(b, '-'))
		}
		b = append(b, '\n')
	}
	b = fmt.Appendf(b, "=%x\n", blake3.Sum256(b))
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(b)
	return errors.Join(err, f.Close())
}

// Before returns what the directory had before the update whose WriteBefore
// wrote the file path, which was on its way to want. A file that is damaged is
// ErrCorrupt, one that is cut off also io.ErrUnexpectedEOF.
func Before(path string, want iter.Seq2[Entry, error]) (iter.Seq2[Entry, error], error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("what was before: %w", err)
	}
	at := bytes.LastIndexByte(bytes.TrimSuffix(b, []byte("\n")), '\n') + 1
	if len(b)-at != len("=\n")+64 || b[at] != '=' || b[len(b)-1] != '\n' {
		return nil, fmt.Errorf("what was before, %s: %w: %w", path, fault.ErrCorrupt, io.ErrUnexpectedEOF)
	}
	if string(b[at:]) != fmt.Sprintf("=%x\n", blake3.Sum256(b[:at])) {
		return nil, fmt.Errorf("what was before, %s: %w", path, fault.ErrCorrupt)
	}
	return func(yield func(Entry, error) bool) {
		changes := bufio.NewReader(bytes.NewReader(b[:at]))
		var old Entry
		var there bool
		next := func() error {
			line, err := readLine(changes)
			if err == io.EOF {
				old = Entry{}
				return nil
			}
			if err == nil {
				there = line[0] == '+'
				old, err = ParseEntry(line[1:])
			}
			return err
		}
		// upTo yields what comes before path; none: what is left.
		upTo := func(path string) bool {
			for old.Path != "" && (path == "" || ComparePaths(old.Path, path) < 0) {
				if there && !yield(old, nil) {
					return false
				}
				if err := next(); err != nil {
					yield(Entry{}, err)
					return false
				}
			}
			return true
		}
		if err := next(); err != nil {
			yield(Entry{}, err)
			return
		}
		for w, err := range want {
			if err != nil {
				yield(w, err)
				return
			}
			if !upTo(w.Path) || w.Path != old.Path && !yield(w, nil) {
				return
			}
		}
		upTo("")
	}, nil
}

// Displaced is a Source of the files that lie in a directory, by their digests.
type Displaced struct {
	dir   string
	files map[string]Entry
}

// OpenDisplaced reads all files below dir.
func OpenDisplaced(ctx context.Context, dir string) (*Displaced, error) {
	d := &Displaced{dir, map[string]Entry{}}
	err := Walk(ctx, dir, WalkOptions{Digest: true}, func(e Entry) error {
		if e.Type == TypeFile && e.Hardlink == "" {
			d.files[e.Digest] = e
		}
		return nil
	})
	return d, err
}

// Data: see Source. A missing file is ErrNotFound.
func (d *Displaced) Data(ctx context.Context, e Entry) (io.ReadCloser, error) {
	have, ok := d.files[e.Digest]
	if !ok || have.data() != e.data() {
		return nil, fmt.Errorf("data of %q: %w", clip(e.Path), fault.ErrNotFound)
	}
	root, err := unix.Open(d.dir, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, pathError("open", d.dir, err)
	}
	defer unix.Close(root)
	parent, name := splitPath(have.Path)
	from := root
	if parent != "." {
		if from, err = openBeneath(root, parent); err != nil {
			return nil, pathError("open", parent, err)
		}
		defer unix.Close(from)
	}
	fd, err := openAt(from, name, 0)
	if err != nil {
		return nil, pathError("open", have.Path, err)
	}
	return &displacedData{dataReader{ctx: ctx, fd: fd, path: have.Path, spans: have.spans(), left: have.data()}}, nil
}

type displacedData struct{ dataReader }

func (d *displacedData) Close() error { return unix.Close(d.fd) }
