package tree

import (
	"archive/tar"
	"os"

	"golang.org/x/sys/unix"
)

// Pseudo reports whether the kernel makes up the contents of a filesystem of this type (statfs).
func Pseudo(magic int64) bool {
	switch magic {
	case unix.PROC_SUPER_MAGIC, unix.SYSFS_MAGIC, unix.CGROUP_SUPER_MAGIC, unix.CGROUP2_SUPER_MAGIC,
		unix.DEVPTS_SUPER_MAGIC,
		unix.DEBUGFS_MAGIC, unix.TRACEFS_MAGIC, unix.SECURITYFS_MAGIC, unix.SELINUX_MAGIC,
		unix.BPF_FS_MAGIC, unix.PSTOREFS_MAGIC,
		unix.EFIVARFS_MAGIC, unix.BINFMTFS_MAGIC, unix.NSFS_MAGIC, unix.RDTGROUP_SUPER_MAGIC, mqueueMagic,
		configfsMagic, fusectlMagic:
		return true
	}
	return false
}

// Types that x/sys does not name.
const (
	mqueueMagic   = 0x19800202
	configfsMagic = 0x62656570
	fusectlMagic  = 0x65735543
)

// magic is the type of the filesystem that the object behind h is on.
func magic(h *os.File) int64 {
	var st unix.Statfs_t
	if unix.Fstatfs(int(h.Fd()), &st) != nil {
		return 0
	}
	return int64(st.Type)
}

// pseudoLimit bounds what is read of a file of unknown size.
const pseudoLimit = 16 << 20

// unreadable is what becomes of an object that cannot be read: an error, but
// on a pseudo filesystem, where many are made for writing only or go with
// their process, it is skipped, unless it is all that was asked for.
func (p *packer) unreadable(h *os.File, name string, err error, top bool) error {
	if top || !Pseudo(magic(h)) {
		return wrap("read", name, err)
	}
	p.report.skip(name, "it cannot be read: "+err.Error())
	return nil
}

// pseudo packs a file that the kernel makes up when it is read, and whose size
// means nothing.
func (p *packer) pseudo(h *os.File, hdr *tar.Header, top bool) error {
	data, err := readPseudo(h)
	if err != nil {
		return p.unreadable(h, hdr.Name, err, top)
	}
	hdr.Typeflag, hdr.Size = tar.TypeReg, int64(len(data))
	p.report.Bytes += hdr.Size
	if err := p.tw.WriteHeader(hdr); err != nil {
		return wrap("write", hdr.Name, err)
	}
	_, err = p.tw.Write(data)
	return wrap("write", hdr.Name, err)
}

func readPseudo(h *os.File) ([]byte, error) {
	// Some block until there is something to tell.
	fd, err := unix.Open(procPath(h), unix.O_RDONLY|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	defer unix.Close(fd)
	var data []byte
	buf := make([]byte, 64<<10)
	for len(data) <= pseudoLimit {
		switch n, err := unix.Read(fd, buf); {
		case err == unix.EINTR:
		case err != nil:
			return nil, err
		case n <= 0:
			return data, nil
		default:
			data = append(data, buf[:n]...)
		}
	}
	return nil, unix.EFBIG
}
