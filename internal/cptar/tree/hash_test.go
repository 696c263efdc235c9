package tree

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"hash"
	"io"
	"os"
	"sort"

	"golang.org/x/sys/unix"
)

// Hash digests everything below the open directory top: a SHA-256, in hex, over
// a listing in byte order of the names that holds type, mode, owner, time,
// link target, device number, hard link groups, attributes and content of each
// entry. Trees have the same digest exactly if they are the same, wherever they
// lie and however their holes are laid out.
func Hash(ctx context.Context, top *os.File) (digest string, r Report, err error) {
	h := &hasher{ctx: ctx, sum: sha256.New(), links: map[inode]string{}, buf: make([]byte, 64<<10)}
	io.WriteString(h.sum, "agentbox tree 1\n")
	d, err := reopen(top, unix.O_RDONLY|unix.O_DIRECTORY)
	if err != nil {
		return "", r, err
	}
	defer d.Close()
	if err := h.entry(d, "."); err != nil {
		return "", h.report, err
	}
	return hex.EncodeToString(h.sum.Sum(nil)), h.report, nil
}

type hasher struct {
	ctx    context.Context
	sum    hash.Hash
	links  map[inode]string
	buf    []byte
	report Report
}

func (h *hasher) entry(o *os.File, path string) error {
	if err := h.ctx.Err(); err != nil {
		return err
	}
	st, err := fstat(o)
	if err != nil {
		return wrap("hash", path, err)
	}
	h.report.Entries++
	kind := st.Mode & unix.S_IFMT
	if kind != unix.S_IFDIR && st.Nlink > 1 {
		id := inode{st.Dev, st.Ino}
		if first, ok := h.links[id]; ok {
			fmt.Fprintf(h.sum, "%q = %q\n", path, first)
			return nil
		}
		h.links[id] = path
	}
	fmt.Fprintf(h.sum, "%q %o %d:%d %d.%09d", path, st.Mode, st.Uid, st.Gid, st.Mtim.Sec, st.Mtim.Nsec)
	list, err := xattrs(o, func(name string) bool { return !HostXattr(name) })
	if err != nil {
		return wrap("hash", path, err)
	}
	sort.Slice(list, func(i, j int) bool { return list[i].name < list[j].name })
	for _, x := range list {
		fmt.Fprintf(h.sum, " %q=%q", x.name, x.value)
	}
	switch kind {
	case unix.S_IFREG:
		content, err := h.content(o, &st)
		if err != nil {
			return wrap("hash", path, err)
		}
		h.report.Bytes += st.Size
		fmt.Fprintf(h.sum, " %d %x\n", st.Size, content)
		return nil
	case unix.S_IFLNK:
		target, err := readlink(o)
		if err != nil {
			return wrap("hash", path, err)
		}
		fmt.Fprintf(h.sum, " %q\n", target)
		return nil
	case unix.S_IFCHR, unix.S_IFBLK:
		fmt.Fprintf(h.sum, " %d,%d\n", unix.Major(st.Rdev), unix.Minor(st.Rdev))
		return nil
	case unix.S_IFDIR:
		io.WriteString(h.sum, "\n")
		return h.dir(o, path)
	}
	io.WriteString(h.sum, "\n")
	return nil
}

func (h *hasher) dir(o *os.File, path string) error {
	d, err := reopen(o, unix.O_RDONLY|unix.O_DIRECTORY)
	if err != nil {
		return wrap("hash", path, err)
	}
	defer d.Close()
	list, err := names(d)
	if err != nil {
		return wrap("hash", path, err)
	}
	sort.Strings(list)
	for _, base := range list {
		c, err := handle(d, base)
		if err != nil {
			return wrap("hash", path+"/"+base, err)
		}
		err = h.entry(c, path+"/"+base)
		c.Close()
		if err != nil {
			return err
		}
	}
	return nil
}

// content digests the blocks of 64 KiB that are not all zero, each with its
// number, so that holes need not be read and do not matter.
func (h *hasher) content(o *os.File, st *unix.Stat_t) ([]byte, error) {
	f, err := reopen(o, unix.O_RDONLY)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	list, whole, err := extents(f, st)
	if err != nil {
		return nil, err
	}
	if whole {
		list = []extent{{0, st.Size}}
	}
	size := int64(len(h.buf))
	sum, next := sha256.New(), int64(0)
	var number [8]byte
	for _, e := range list {
		for block := max(next, e.off/size); block*size < e.off+e.len; block++ {
			if err := h.ctx.Err(); err != nil {
				return nil, err
			}
			n, err := f.ReadAt(h.buf[:min(size, st.Size-block*size)], block*size)
			if err != nil && err != io.EOF {
				return nil, err
			}
			next = block + 1
			if b := h.buf[:n]; !isZero(b[:min(n, hole)]) || !isZero(b[min(n, hole):]) {
				binary.LittleEndian.PutUint64(number[:], uint64(block))
				sum.Write(number[:])
				sum.Write(b)
			}
		}
	}
	return sum.Sum(nil), nil
}
