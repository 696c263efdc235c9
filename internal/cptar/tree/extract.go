package tree

import (
	"archive/tar"
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"os"
	"slices"
	"sort"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/internal/idmap"
)

// Private PAX records, for what the format cannot say.
const (
	paxXattr    = "SCHILY.xattr."
	paxXattr64  = "AGENTBOX.xattr64." // attribute names with a "=", in unpadded base64url
	paxXattrOvl = "AGENTBOX.xattr."   // likewise, as overlay.TarWriter writes them
	paxSparse   = "GNU.sparse."
	maxEntries  = 10_000_000
	maxSparse   = 1 << 40  // bytes of one sparse file: holes cost the archive nothing, and us time
	maxTrailing = 64 << 20 // bytes after the end-of-archive marker; tar pads to a record
	maxMemory   = 32 << 20 // bytes of attributes and overlong names of directories: they are kept, and walked twice
	usualPath   = 256
	maxStack    = 256 // directories held open at a time
)

// ExtractOptions modify Extract. The zero value is for an untrusted archive and a directory that
// holds other things: files belong to the caller, setuid bits and attributes are dropped, devices
// are skipped and reported, existing directories stay as they are, and a directory and a
// non-directory never replace each other.
type ExtractOptions struct {
	Rename     string     // replaces each name's first component; ".": drops it; "": keeps it
	IDs        *idmap.Map // of the directory's mount; nil: the host's
	Owners     bool       // owners as in the archive, else the caller's
	Privileged bool       // setuid, setgid and sticky bits, and devices
	// existing directories take the archive's mode, owner and time; never the top one, unless Fresh
	Dirs bool
	// Whole has a file appear under its name when all of it is there. Until then the name
	// keeps what it had. It takes space for both.
	Whole bool
	// Fresh says that the directory was made for this archive: the last entry
	// of a name wins, and directories that have no entry of their own get a
	// fixed mode and time, so that the same archive always gives the same tree.
	Fresh bool
	// Xattr chooses the attributes to set. Those it does not want are
	// reported as skipped, an error refuses the archive. Nil: none, silently.
	Xattr func(name string) (bool, error)
	// Layer says that the archive is an image's layer and the directory, a
	// fresh one, becomes a lower directory of overlayfs: ".wh.NAME" makes a
	// whiteout and ".wh..wh..opq" an opaque directory.
	Layer bool
	// Frame is told what is needed to make the very same archive again of the
	// files that were unpacked. It needs Fresh.
	Frame Frame
	// Check may refuse an entry.
	Check func(*tar.Header) error

	MaxEntries int64 // default 10 million
	MaxBytes   int64 // of file contents, and of the archive; default: any
	MinFree    int64 // bytes of the file system that stay free
	// Progress is called after each entry and now and then inside of long ones.
	Progress func(Report)
}

// Extract unpacks the tar stream r, uncompressed, below the open directory top.
// It reads r to its end. An archive that is cut short, or holds a name that
// points outside, is refused with ErrInvalid; what was unpacked before stays.
func Extract(ctx context.Context, top *os.File, r io.Reader, opts ExtractOptions) (Report, error) {
	if opts.MaxEntries == 0 {
		opts.MaxEntries = maxEntries
	}
	if strings.Contains(opts.Rename, "/") || opts.Rename == ".." {
		return Report{}, fmt.Errorf("%w: %q is not the name of a file", fault.ErrInvalid, opts.Rename)
	}
	x := &extractor{ctx: ctx, top: top, opts: opts, buf: make([]byte, chunk)}
	defer x.closeParent()
	if opts.Fresh {
		x.dirs = append(x.dirs, pending{"", meta{}}) // if the archive has an entry for it, that comes later
		x.implicit = map[string]bool{"": true}
	} else {
		x.made = map[string]bool{}
	}
	in := &counter{r: r, frame: opts.Frame, max: opts.MaxBytes}
	err := x.all(in)
	if err == nil {
		// The tree is whole; an error of the stream's end comes after.
		if err = x.finishDirs(); err == nil {
			err = drain(in)
		}
	}
	x.report.Implicit = slices.Sorted(maps.Keys(x.implicit))
	return x.report, err
}

type extractor struct {
	ctx    context.Context
	top    *os.File
	opts   ExtractOptions
	buf    []byte
	report Report

	parentPath string // of the cached parent
	parent     *os.File
	stack      []level // if Fresh: the upper directories on the way to it

	dirs     []pending       // what the content of a directory would change is set at the end
	memory   int64           // bytes that dirs takes
	implicit map[string]bool // if Fresh: directories that have no entry of their own so far
	made     map[string]bool // unless Fresh: what this archive has made and may link to
	space    int64           // bytes that may still be written before the disk is asked again
	in       *counter
}

type level struct {
	name string
	dir  *os.File
}

type pending struct {
	path string
	meta meta
}

func (x *extractor) all(in *counter) error {
	x.in = in
	tr := tar.NewReader(in)
	for first := true; ; first = false {
		if err := x.ctx.Err(); err != nil {
			return err
		}
		at := in.n
		hdr, err := tr.Next()
		if err == io.EOF {
			if first && in.n == 0 {
				return fmt.Errorf("%w: the archive is empty", fault.ErrInvalid)
			}
			// The reader takes a stream that stops between two entries for a
			// whole one. The end-of-archive marker proves that it is.
			if pad := -at & 511; in.n-at < pad+512 {
				return fmt.Errorf("%w: the archive is cut short: its end marker is missing", fault.ErrInvalid)
			}
			return nil
		}
		if in.err != nil {
			return in.err
		}
		if err != nil {
			return badTar(err, first)
		}
		if err := x.entry(hdr, tr); err != nil {
			return err
		}
		// The rest of the data, so that what is read next is only padding.
		if _, err := x.copy(io.Discard, tr); err != nil {
			return badTar(err, false)
		}
		if x.opts.Progress != nil {
			x.opts.Progress(x.report)
		}
	}
}

func drain(r io.Reader) error {
	n, err := io.Copy(io.Discard, io.LimitReader(r, maxTrailing+1))
	if err != nil {
		return badTar(err, false)
	}
	if n > maxTrailing {
		return fmt.Errorf("%w: more than %d bytes follow the end of the archive", fault.ErrInvalid, maxTrailing)
	}
	return nil
}

func badTar(err error, first bool) error {
	switch {
	case errors.Is(err, io.ErrUnexpectedEOF):
		return fmt.Errorf("%w: the archive is cut short: %w", fault.ErrInvalid, err)
	case errors.Is(err, tar.ErrHeader) && first:
		return fmt.Errorf("%w: this is not a tar archive", fault.ErrInvalid)
	case errors.Is(err, tar.ErrHeader), errors.Is(err, tar.ErrFieldTooLong):
		return fmt.Errorf("%w: the archive is damaged: %w", fault.ErrInvalid, err)
	}
	return fmt.Errorf("read the archive: %w", err)
}

// split turns an archive's name into components. Absolute names are taken as
// relative, as tar does; a ".." is refused.
func (x *extractor) split(name string) ([]string, error) {
	if name == "" || len(name) > maxPath || strings.ContainsRune(name, 0) {
		return nil, fmt.Errorf("%w: the archive holds a name that is empty, too long or not a name: %.100q",
			fault.ErrInvalid, name)
	}
	parts := strings.Split(strings.TrimLeft(name, "/"), "/")
	if x.opts.Rename != "" {
		parts[0] = x.opts.Rename
	}
	list := parts[:0]
	for _, c := range parts {
		switch c {
		case "", ".":
			continue
		case "..":
			return nil, fmt.Errorf("%w: the archive holds a name that points outside: %.200q", fault.ErrInvalid, name)
		}
		list = append(list, c)
	}
	return list, nil
}

func (x *extractor) entry(hdr *tar.Header, r io.Reader) error {
	switch hdr.Typeflag {
	case tar.TypeXGlobalHeader, 'V': // comments and volume labels
		return nil
	}
	if x.report.Entries++; x.report.Entries > x.opts.MaxEntries {
		return fmt.Errorf("%w: the archive holds more than %d entries", fault.ErrInvalid, x.opts.MaxEntries)
	}
	if x.opts.MinFree > 0 && x.report.Entries%4096 == 1 {
		var fs unix.Statfs_t
		// Some file systems make inodes as they go and count none.
		if err := unix.Fstatfs(int(x.top.Fd()), &fs); err == nil && fs.Files > 0 && fs.Ffree < fs.Files/100 {
			return wrap("unpack", hdr.Name, fmt.Errorf("fewer than 1%% of the disk's inodes are free: %w", unix.ENOSPC))
		}
	}
	parts, err := x.split(hdr.Name)
	if err != nil {
		return err
	}
	if x.opts.Check != nil {
		if err := x.opts.Check(hdr); err != nil {
			return fmt.Errorf("%q: %w", hdr.Name, err)
		}
	}
	m, err := x.meta(hdr)
	if err != nil {
		return fmt.Errorf("%q: %w", hdr.Name, err)
	}
	if len(parts) == 0 {
		if hdr.Typeflag != tar.TypeDir {
			return fmt.Errorf("%w: the archive's top entry %q is not a directory", fault.ErrInvalid, hdr.Name)
		}
		return x.topDir(m)
	}
	if x.opts.Layer {
		if done, err := x.mark(parts); done || err != nil {
			return wrap("unpack", hdr.Name, err)
		}
	}
	base, path := parts[len(parts)-1], strings.Join(parts, "/")
	dir, err := x.openParent(parts[:len(parts)-1])
	if err != nil {
		return wrap("unpack", hdr.Name, err)
	}
	switch hdr.Typeflag {
	case tar.TypeDir:
		err = x.mkdir(dir, base, path, m)
	case tar.TypeReg, tar.TypeCont, tar.TypeGNUSparse:
		err = x.file(dir, base, path, hdr, r, m)
	case tar.TypeLink:
		err = x.link(dir, base, path, hdr.Linkname)
	case tar.TypeSymlink:
		err = x.symlink(dir, base, path, hdr.Linkname, m)
	case tar.TypeFifo:
		err = x.node(dir, base, path, unix.S_IFIFO, 0, m)
	case tar.TypeChar, tar.TypeBlock:
		if !x.opts.Privileged {
			x.report.skip(hdr.Name, "a device is not copied here")
			return nil
		}
		kind := uint32(unix.S_IFCHR)
		if hdr.Typeflag == tar.TypeBlock {
			kind = unix.S_IFBLK
		}
		if hdr.Devmajor < 0 || hdr.Devmajor > math.MaxUint32 || hdr.Devminor < 0 || hdr.Devminor > math.MaxUint32 {
			return fmt.Errorf("%w: %q is a device with an impossible number", fault.ErrInvalid, hdr.Name)
		}
		err = x.node(dir, base, path, kind, unix.Mkdev(uint32(hdr.Devmajor), uint32(hdr.Devminor)), m)
	default:
		err = fmt.Errorf("%w: the archive holds an entry of the unknown type %q", fault.ErrInvalid, hdr.Typeflag)
	}
	if err == nil && x.made != nil && hdr.Typeflag != tar.TypeDir {
		x.made[path] = true
	}
	return wrap("unpack", hdr.Name, err)
}

func (x *extractor) meta(hdr *tar.Header) (meta, error) {
	m := meta{mode: uint32(hdr.Mode) & 0o777, uid: -1, gid: -1}
	if x.opts.Privileged {
		m.mode = uint32(hdr.Mode) & 0o7777
	}
	if x.opts.Owners {
		// The largest id means "unchanged" to the kernel.
		if hdr.Uid < 0 || hdr.Uid >= math.MaxUint32 || hdr.Gid < 0 || hdr.Gid >= math.MaxUint32 {
			return m, fmt.Errorf("%w: an owner out of range: %d:%d", fault.ErrInvalid, hdr.Uid, hdr.Gid)
		}
		var err, gerr error
		m.uid, err = x.opts.IDs.Host(hdr.Uid)
		m.gid, gerr = x.opts.IDs.Host(hdr.Gid)
		if err = errors.Join(err, gerr); err != nil {
			return m, wrap("unpack", hdr.Name, err)
		}
	}
	m.mtime = unix.Timespec{Sec: hdr.ModTime.Unix(), Nsec: int64(hdr.ModTime.Nanosecond())}
	for key, value := range hdr.PAXRecords {
		name, ok, err := xattrOf(key)
		if err != nil {
			return m, err
		}
		if !ok {
			if strings.HasPrefix(key, "SCHILY.acl.") && x.opts.Xattr != nil && !plainACL(value) {
				x.report.skip(hdr.Name,
					"its access control list is written in text; make the archive with --xattrs instead of --acls")
			}
			continue
		}
		if x.opts.Xattr == nil || HostXattr(name) {
			continue
		}
		keep, err := x.opts.Xattr(name)
		if err != nil {
			return m, err
		}
		if !keep {
			x.report.skip(hdr.Name, fmt.Sprintf("its attribute %q is not copied", name))
			continue
		}
		if value, err = x.opts.IDs.XattrOnHost(name, value); err != nil {
			return m, wrap("unpack", hdr.Name, err)
		}
		m.xattrs = append(m.xattrs, xattr{name, value})
	}
	sort.Slice(m.xattrs, func(i, j int) bool { return m.xattrs[i].name < m.xattrs[j].name })
	return m, nil
}

// xattrOf returns the attribute that a PAX record is, if it is one.
func xattrOf(key string) (name string, ok bool, err error) {
	if name, ok = strings.CutPrefix(key, paxXattr); ok {
		return name, true, nil
	}
	enc, ok := strings.CutPrefix(key, paxXattr64)
	if !ok {
		enc, ok = strings.CutPrefix(key, paxXattrOvl)
	}
	if !ok {
		return "", false, nil
	}
	b, err := base64.RawURLEncoding.DecodeString(enc)
	if err != nil {
		return "", false, fmt.Errorf("%w: a damaged attribute name", fault.ErrInvalid)
	}
	return string(b), true, nil
}

// Xattrs returns the attributes that an entry has in an archive, but those of the
// host.
func Xattrs(hdr *tar.Header) (map[string]string, error) {
	all := map[string]string{}
	for key, value := range hdr.PAXRecords {
		name, ok, err := xattrOf(key)
		if err != nil {
			return nil, err
		}
		if ok && !HostXattr(name) {
			all[name] = value
		}
	}
	return all, nil
}

// plainACL reports whether a list repeats nothing but the mode bits.
func plainACL(text string) bool {
	for line := range strings.FieldsFuncSeq(text, func(r rune) bool { return r == ',' || r == '\n' }) {
		if !strings.HasPrefix(line, "user::") && !strings.HasPrefix(line, "group::") &&
			!strings.HasPrefix(line, "other::") {
			return false
		}
	}
	return true
}

// copy copies and counts, stops when the context ends, and looks at the disk.
func (x *extractor) copy(w io.Writer, r io.Reader) (int64, error) {
	var n int64
	for {
		if err := x.ctx.Err(); err != nil {
			return n, err
		}
		k, err := io.ReadFull(r, x.buf)
		if k > 0 {
			if w != io.Discard {
				if err := x.room(int64(k)); err != nil {
					return n, err
				}
				x.space -= int64(k)
				if x.report.Bytes += int64(k); x.opts.MaxBytes > 0 && x.report.Bytes > x.opts.MaxBytes {
					return n, fmt.Errorf("%w: the archive holds more than %d bytes", fault.ErrInvalid, x.opts.MaxBytes)
				}
			}
			if _, err := w.Write(x.buf[:k]); err != nil {
				return n, err
			}
			n += int64(k)
			if x.opts.Progress != nil && n&(64<<20-1) < chunk && w != io.Discard {
				x.opts.Progress(x.report)
			}
		}
		// ReadFull reports a short tail as unexpected; the archive reader
		// says so too when the archive itself is cut short.
		if err == io.EOF || err == io.ErrUnexpectedEOF && k > 0 && !truncated(r) {
			return n, nil
		}
		if err != nil {
			return n, badTar(err, false)
		}
	}
}

// truncated reports whether the entry of an archive reader ended before its size.
func truncated(r io.Reader) bool {
	var b [1]byte
	_, err := r.Read(b[:])
	return err != io.EOF
}

// room refuses before the disk is full: a host without space harms every program on it.
func (x *extractor) room(n int64) error {
	if x.opts.MinFree == 0 || n <= x.space {
		return nil
	}
	var fs unix.Statfs_t
	if err := unix.Fstatfs(int(x.top.Fd()), &fs); err != nil {
		return err
	}
	free := int64(fs.Bavail)*fs.Bsize - x.opts.MinFree
	if n > free {
		return fmt.Errorf("%d bytes do not fit (%d are kept free): %w", n, x.opts.MinFree, unix.ENOSPC)
	}
	x.space = min(free, 64<<20)
	return nil
}
