package tree

import (
	"archive/tar"
	"bufio"
	"context"
	"encoding/base64"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/internal/idmap"
)

// PackOptions modify Pack.
type PackOptions struct {
	Name  string            // of the top entry in the archive; "." gives "./", "./a", ...
	Xattr func(string) bool // the attributes to write; nil: none
	Owner *Owner            // of every entry instead of its own
	IDs   *idmap.Map        // of the directory's mount; nil: the host's

	// Sorted makes equal trees equal archives: names come in the order of
	// their bytes, and holes are zeros like others.
	Sorted bool
	// Frame is told what is needed to make the archive again.
	Frame Frame

	// Leave reports whether to leave out the contents of a directory that begins another
	// filesystem, named relative to the top entry, of the given type (statfs). nil: it is packed
	// like any other.
	Leave func(rel string, magic int64) bool
}

// Owner is a numeric user and group.
type Owner struct{ UID, GID int }

// Pack writes base in the open directory dir, a final symlink not followed, and
// all below it, as a PAX tar stream with its end marker. Base "." is dir itself.
// Hard links among the entries stay links. Sockets have no entry in a tar
// archive: they are reported as skipped, and one that is asked for by itself is
// ErrUnsupported. On a filesystem that the kernel makes up, such as proc, files
// that cannot be read are reported as skipped, too, and those that say they
// are empty are read to see.
func Pack(ctx context.Context, dir *os.File, base string, w io.Writer, opts PackOptions) (Report, error) {
	bw := bufio.NewWriterSize(w, chunk)
	raw := &frameWriter{w: bw, frame: opts.Frame}
	p := &packer{
		ctx: ctx, raw: raw, tw: tar.NewWriter(raw), opts: opts, buf: make([]byte, chunk), links: map[inode]string{},
	}
	h, err := handle(dir, base)
	if err != nil {
		return p.report, wrap("read", opts.Name, err)
	}
	defer h.Close()
	if st, err := fstat(h); err == nil && st.Mode&unix.S_IFMT == unix.S_IFSOCK {
		return p.report, fmt.Errorf("%w: %q is a socket, which no archive can hold", fault.ErrUnsupported, opts.Name)
	}
	if err := p.entry(h, opts.Name, nil); err != nil {
		return p.report, err
	}
	if err := p.tw.Close(); err != nil {
		return p.report, err
	}
	return p.report, bw.Flush()
}

type inode struct{ dev, ino uint64 }

type packer struct {
	ctx    context.Context
	raw    *frameWriter // below tw, for the sparse headers that it cannot write
	tw     *tar.Writer
	opts   PackOptions
	buf    []byte
	links  map[inode]string
	report Report
}

// entry packs one object and all below it; parent is nil for the top one.
func (p *packer) entry(h *os.File, name string, parent *unix.Stat_t) error {
	if err := p.ctx.Err(); err != nil {
		return err
	}
	if len(name) >= maxPath {
		return fmt.Errorf("%w: the path %.100q... is too long", fault.ErrInvalid, name)
	}
	st, err := fstat(h)
	if err != nil {
		return wrap("read", name, err)
	}
	if st.Mode&unix.S_IFMT == unix.S_IFSOCK {
		p.report.skip(name, "a socket has no place in an archive")
		return nil
	}
	hdr := &tar.Header{
		Name: name, Mode: int64(st.Mode & 0o7777), Uid: p.opts.IDs.Tree(int(st.Uid)), Gid: p.opts.IDs.Tree(int(st.Gid)),
		ModTime: time.Unix(st.Mtim.Sec, st.Mtim.Nsec), Format: tar.FormatPAX, PAXRecords: map[string]string{},
	}
	if o := p.opts.Owner; o != nil {
		hdr.Uid, hdr.Gid = o.UID, o.GID
	}
	p.report.Entries++
	id := inode{st.Dev, st.Ino}
	if first, ok := p.links[id]; ok {
		hdr.Typeflag, hdr.Linkname = tar.TypeLink, first
		return wrap("write", name, p.tw.WriteHeader(hdr))
	}
	if st.Nlink > 1 && st.Mode&unix.S_IFMT != unix.S_IFDIR {
		p.links[id] = name
	}
	if p.opts.Xattr != nil {
		list, err := xattrs(h, p.opts.Xattr)
		if err != nil {
			return p.unreadable(h, name, err, parent == nil)
		}
		for _, x := range list {
			if x.value, err = p.opts.IDs.XattrInTree(x.name, x.value); err != nil {
				return wrap("read", name, err)
			}
			if strings.Contains(x.name, "=") {
				hdr.PAXRecords[paxXattr64+base64.RawURLEncoding.EncodeToString([]byte(x.name))] = x.value
			} else {
				hdr.PAXRecords[paxXattr+x.name] = x.value
			}
		}
	}
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFREG:
		if Pseudo(magic(h)) {
			return p.pseudo(h, hdr, parent == nil)
		}
		return wrap("read", name, p.file(h, &st, hdr))
	case unix.S_IFDIR:
		leave := p.opts.Leave != nil && parent != nil && parent.Dev != st.Dev &&
			p.opts.Leave(strings.TrimPrefix(name, p.opts.Name+"/"), magic(h))
		return p.dir(h, &st, hdr, leave)
	case unix.S_IFLNK:
		hdr.Typeflag = tar.TypeSymlink
		if hdr.Linkname, err = readlink(h); err != nil {
			return p.unreadable(h, name, err, parent == nil)
		}
	case unix.S_IFIFO:
		hdr.Typeflag = tar.TypeFifo
	case unix.S_IFCHR, unix.S_IFBLK:
		hdr.Typeflag = tar.TypeChar
		if st.Mode&unix.S_IFMT == unix.S_IFBLK {
			hdr.Typeflag = tar.TypeBlock
		}
		hdr.Devmajor, hdr.Devminor = int64(unix.Major(st.Rdev)), int64(unix.Minor(st.Rdev))
	}
	return wrap("write", name, p.tw.WriteHeader(hdr))
}

func (p *packer) dir(h *os.File, st *unix.Stat_t, hdr *tar.Header, leave bool) error {
	name := hdr.Name
	hdr.Typeflag, hdr.Name = tar.TypeDir, name+"/"
	if err := p.tw.WriteHeader(hdr); err != nil {
		return wrap("write", name, err)
	}
	if leave {
		return nil
	}
	d, err := reopen(h, unix.O_RDONLY|unix.O_DIRECTORY)
	if err != nil {
		return p.unreadable(h, name, err, false)
	}
	defer d.Close()
	list, err := names(d)
	if err != nil {
		return p.unreadable(h, name, err, false)
	}
	if p.opts.Sorted {
		slices.Sort(list)
	}
	for _, base := range list {
		c, err := handle(d, base)
		if err == unix.ENOENT { // deleted since
			continue
		}
		if err != nil {
			return wrap("read", name+"/"+base, err)
		}
		err = p.entry(c, name+"/"+base, st)
		c.Close()
		if err != nil {
			return err
		}
	}
	return nil
}

func (p *packer) file(h *os.File, st *unix.Stat_t, hdr *tar.Header) error {
	f, err := reopen(h, unix.O_RDONLY|unix.O_NOATIME)
	if err == unix.EPERM { // O_NOATIME is for the owner
		f, err = reopen(h, unix.O_RDONLY)
	}
	if err != nil {
		return err
	}
	defer f.Close()
	hdr.Typeflag, hdr.Size = tar.TypeReg, st.Size
	p.report.Bytes += st.Size
	list, whole, err := extents(f, st)
	if err != nil {
		return err
	}
	if whole || p.opts.Sorted {
		if err := p.tw.WriteHeader(hdr); err != nil {
			return err
		}
		p.raw.off, p.raw.sum = st.Size > 0, 0
		err := p.data(p.tw, f, extent{0, st.Size}, hdr.Name)
		if err == nil && p.raw.off && p.opts.Frame != nil {
			err = p.opts.Frame.File(strings.TrimPrefix(hdr.Name, p.opts.Name+"/"), st.Size, p.raw.sum)
		}
		p.raw.off = false
		return err
	}
	return p.sparse(f, hdr, list)
}

// data copies one run. Should the file have shrunk since its size was read, its
// end is zeros, and the report says so.
func (p *packer) data(w io.Writer, f *os.File, e extent, name string) error {
	for off, end := e.off, e.off+e.len; off < end; {
		if err := p.ctx.Err(); err != nil {
			return err
		}
		b := p.buf[:min(int64(len(p.buf)), end-off)]
		n, err := f.ReadAt(b, off)
		if err == io.EOF && n == 0 {
			p.report.skip(name, fmt.Sprintf("it shrank while it was read: %d bytes at its end are zeros", end-off))
			for ; off < end; off += int64(len(b)) {
				b = zeros[:min(hole, end-off)]
				if _, err := w.Write(b); err != nil {
					return err
				}
			}
			return nil
		}
		if err != nil && err != io.EOF {
			return err
		}
		if _, err := w.Write(b[:n]); err != nil {
			return err
		}
		off += int64(n)
	}
	return nil
}

// sparse writes an entry in the PAX sparse format 1.0, which archive/tar reads
// but does not write: an extended header with the true name and size, then a
// file whose data is the list of runs followed by the runs.
func (p *packer) sparse(f *os.File, hdr *tar.Header, list []extent) error {
	if err := p.tw.Flush(); err != nil {
		return err
	}
	size := hdr.Size
	if n := len(list); n == 0 || list[n-1].off+list[n-1].len < size {
		list = append(list, extent{size, 0}) // an empty run marks the end after a hole
	}
	var m strings.Builder
	fmt.Fprintf(&m, "%d\n", len(list))
	stored := int64(0)
	for _, e := range list {
		fmt.Fprintf(&m, "%d\n%d\n", e.off, e.len)
		stored += e.len
	}
	m.WriteString(strings.Repeat("\x00", -m.Len()&511))
	stored += int64(m.Len())

	rec := hdr.PAXRecords
	rec["GNU.sparse.major"], rec["GNU.sparse.minor"] = "1", "0"
	rec["GNU.sparse.name"] = hdr.Name
	rec["GNU.sparse.realsize"] = strconv.FormatInt(size, 10)
	rec["mtime"] = paxTime(hdr.ModTime)
	rec["size"] = strconv.FormatInt(stored, 10)
	rec["uid"], rec["gid"] = strconv.Itoa(hdr.Uid), strconv.Itoa(hdr.Gid)
	var ext strings.Builder
	for k, v := range rec {
		ext.WriteString(paxRecord(k, v))
	}
	if err := writeBlock(p.raw, "PaxHeaders.0/sparse", 'x', 0o644, int64(ext.Len())); err != nil {
		return err
	}
	if _, err := io.WriteString(p.raw, ext.String()+strings.Repeat("\x00", -ext.Len()&511)); err != nil {
		return err
	}
	if err := writeBlock(p.raw, "GNUSparseFile.0/file", '0', hdr.Mode, min(stored, 1<<33-1)); err != nil {
		return err
	}
	if _, err := io.WriteString(p.raw, m.String()); err != nil {
		return err
	}
	for _, e := range list {
		if err := p.data(p.raw, f, e, hdr.Name); err != nil {
			return err
		}
	}
	_, err := p.raw.Write(zeros[:-stored&511])
	return err
}

// paxTime is decimal seconds; before 1970 the sign goes for the fraction too.
func paxTime(t time.Time) string {
	sec, ns, sign := t.Unix(), t.Nanosecond(), ""
	if sec < 0 {
		sec, sign = -sec, "-"
		if ns > 0 {
			sec, ns = sec-1, 1e9-ns
		}
	}
	return fmt.Sprintf("%s%d.%09d", sign, sec, ns)
}

// paxRecord is "LENGTH KEY=VALUE\n", the length counting itself.
func paxRecord(k, v string) string {
	rest := " " + k + "=" + v + "\n"
	n := len(rest) + len(strconv.Itoa(len(rest)))
	n = len(rest) + len(strconv.Itoa(n))
	return strconv.Itoa(n) + rest
}

// writeBlock writes a ustar header whose other fields an extended one overrides.
func writeBlock(w io.Writer, name string, typeflag byte, mode, size int64) error {
	var b [512]byte
	copy(b[0:100], name)
	copy(b[100:], fmt.Sprintf("%07o\x00", mode))
	copy(b[108:], "0000000\x000000000\x00")
	copy(b[124:], fmt.Sprintf("%011o\x00%011o\x00", size, 0))
	copy(b[148:], "        ") // the checksum counts as spaces
	b[156] = typeflag
	copy(b[257:], "ustar\x0000")
	sum := 0
	for _, c := range b {
		sum += int(c)
	}
	copy(b[148:], fmt.Sprintf("%06o\x00 ", sum))
	_, err := w.Write(b[:])
	return err
}
