package overlay

import (
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/fault"
)

// ext4 and XFS can count what belongs to a project, a number that files have
// beside their owner, and hold it to a limit. An upperdir and what lies beside it
// are a project of their own; what is made in them joins it. The number stands in
// the directory and nowhere else, and is taken for as long as the filesystem counts
// anything for it, or has a limit for it.

// Numbers of ours are random ones of this range: people, LXD and Docker count up from small ones.
const firstProject, projects = 1 << 30, 1 << 30

// fileCounts is what a file counts for beside its blocks, as in Usage: a limit of
// bytes lets so many files be made.
const fileCounts = inodeSize

// Project is what the project of a directory takes and may take, in bytes and
// inodes; a limit of 0 is none.
type Project struct {
	Used, Limit     int64
	Files, MaxFiles int64
}

// Full reports whether next to nothing more fits.
func (p Project) Full() bool {
	return p.Limit > 0 && p.Used > p.Limit-max(64<<10, p.Limit/256) || p.MaxFiles > 0 && p.Files >= p.MaxFiles
}

// ProjectQuota is nil where the filesystem of a directory holds projects to their
// limits, and else ErrUnsupported that says what is missing.
func ProjectQuota(dir string) error {
	fd, err := openDirectory(dir)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	return projectQuota(fd)
}

func projectQuota(fd int) error {
	var state struct { // struct fs_quota_statv, in full
		version int8
		_       uint8
		flags   uint16
		_       [508]byte
	}
	state.version = 1
	const counted, enforced = 1 << 4, 1 << 5
	switch err := quotactl(fd, getState, 0, unsafe.Pointer(&state)); {
	case err == nil && state.flags&enforced != 0:
		if _, err := readQuota(fd, firstProject); err == unix.EPERM {
			return fmt.Errorf("%w: this needs CAP_SYS_ADMIN on the host", fault.ErrUnsupported)
		}
		return nil
	case err == nil && state.flags&counted != 0:
		return fmt.Errorf("%w: its filesystem counts projects, but is not mounted with the option prjquota",
			fault.ErrUnsupported)
	case err == nil:
		return fmt.Errorf("%w: its filesystem is not mounted with the option prjquota", fault.ErrUnsupported)
	default:
		return fmt.Errorf("%w: its filesystem has no project quotas: %w", fault.ErrUnsupported, err)
	}
}

// GiveProject makes directories that are empty as yet a project of their own, with
// all that will be made in them. False: their filesystem has no such thing.
func GiveProject(dirs ...string) (bool, error) {
	var attr fsxattr
	for i, dir := range dirs {
		fd, err := openDirectory(dir)
		if err != nil {
			return false, err
		}
		defer unix.Close(fd)
		if i == 0 {
			if projectQuota(fd) != nil {
				return false, nil
			}
			if attr.project, err = freeProject(fd); err != nil {
				return false, pathError("find a project for", dir, err)
			}
		}
		if err := joinProject(fd, attr.project); err != nil {
			return false, pathError("set the project of", dir, err)
		}
	}
	return true, nil
}

func freeProject(fd int) (uint32, error) {
	for range 100 {
		id := firstProject + rand.Uint32N(projects)
		q, err := readQuota(fd, id)
		if errors.Is(err, unix.ENOENT) || err == nil && q == (dqblk{valid: q.valid}) {
			return id, nil
		}
		if err != nil {
			return 0, err
		}
	}
	return 0, fmt.Errorf("%w: 100 numbers of projects were all taken", fault.ErrExists)
}

// joinProject makes a directory, and what will be made in it, part of a project.
func joinProject(fd int, project uint32) error {
	attr, err := readAttr(fd)
	if err != nil || attr.inherits(project) {
		return err
	}
	attr.flags, attr.project = attr.flags|inherit, project
	return attr.write(fd)
}

// ProjectOf is what the project of an upperdir takes. False: it is in none of ours.
func ProjectOf(dir string) (p Project, ours bool, err error) {
	err = ownProject(dir, func(fd int, id uint32) error {
		q, err := readQuota(fd, id)
		if errors.Is(err, unix.ENOENT) { // nothing is written yet
			err = nil
		}
		p = Project{
			Used: int64(q.space), Limit: int64(q.hard) << 10, Files: int64(q.files), MaxFiles: int64(q.hardFiles),
		}
		ours = true
		return err
	})
	return p, ours, err
}

// LimitProject limits the project of an upperdir to some bytes, and to as many files as Usage
// would let it have; 0 removes the limits. What is there already may exceed them. False: it is in
// none of ours, or limits are no longer enforced.
func LimitProject(dir string, bytes int64) (held bool, err error) {
	err = ownProject(dir, func(fd int, id uint32) error {
		held = bytes > 0
		const limits = 1 | 4 // QIF_BLIMITS, QIF_ILIMITS
		q := dqblk{hard: uint64(bytes+1023) >> 10, valid: limits}
		if bytes > 0 {
			q.hardFiles = uint64(bytes/fileCounts + 1)
		}
		return quotactl(fd, setQuota, int(id), unsafe.Pointer(&q))
	})
	return held && err == nil, err
}

// ownProject calls do if a directory is in a project of ours that can have limits.
func ownProject(dir string, do func(fd int, id uint32) error) error {
	fd, err := openDirectory(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	attr, err := readAttr(fd)
	if err != nil || attr.flags&inherit == 0 || attr.project < firstProject || attr.project-firstProject >= projects ||
		projectQuota(fd) != nil {
		return nil // filesystems without projects say so in many ways
	}
	if err := do(fd, attr.project); err != nil {
		return pathError("project quota", dir, err)
	}
	return nil
}

// likeProject makes an empty directory, and what will be made in it, part of the project of
// another directory, be it ours or not: nothing can be renamed between two projects.
func likeProject(fd, other int) error {
	attr, err := readAttr(other)
	if err != nil || attr.flags&inherit == 0 {
		return nil
	}
	return joinProject(fd, attr.project)
}

// fsxattr is struct fsxattr.
type fsxattr struct {
	flags, extent, extents, project, cowExtent uint32
	_                                          [8]byte
}

func (a fsxattr) inherits(project uint32) bool { return a.flags&inherit != 0 && a.project == project }

const (
	readAttrs, writeAttrs = 0x801c581f, 0x401c5820 // FS_IOC_FSGETXATTR, FS_IOC_FSSETXATTR
	inherit               = 0x200                  // FS_XFLAG_PROJINHERIT
)

func readAttr(fd int) (a fsxattr, err error) {
	if _, _, e := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), readAttrs, uintptr(unsafe.Pointer(&a))); e != 0 {
		return a, e
	}
	return a, nil
}

func (a fsxattr) write(fd int) error {
	if _, _, e := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), writeAttrs, uintptr(unsafe.Pointer(&a))); e != 0 {
		return e
	}
	return nil
}

// dqblk is struct if_dqblk: limits in KiB, use in bytes.
type dqblk struct {
	hard, soft, space, hardFiles, softFiles, files, times, fileTimes uint64
	valid                                                            uint32
}

func readQuota(fd int, project uint32) (q dqblk, err error) {
	return q, quotactl(fd, getQuota, int(project), unsafe.Pointer(&q))
}

const (
	getQuota, setQuota = 0x800007, 0x800008 // Q_GETQUOTA, Q_SETQUOTA
	getState           = 'X'<<8 | 8         // Q_XGETQSTATV, which ext4 answers as well
)

func quotactl(fd, cmd, id int, arg unsafe.Pointer) error {
	const project = 2 // PRJQUOTA
	if _, _, e := unix.Syscall6(unix.SYS_QUOTACTL_FD, uintptr(fd), uintptr(cmd<<8|project), uintptr(id),
		uintptr(arg), 0, 0); e != 0 {
		return e
	}
	return nil
}

func openDirectory(dir string) (int, error) {
	fd, err := unix.Open(dir, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, pathError("open", dir, err)
	}
	return fd, nil
}

// rejoin brings a directory that is updated, and a file or directory in it, into
// the project of the stage. Root in a sandbox without a user namespace can have
// given them another one.
func (a *updater) rejoin(dir int, name string) error {
	if err := likeProject(dir, a.stage); err != nil {
		return err
	}
	p, err := unix.Openat(dir, name, unix.O_PATH|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err == unix.ENOENT {
		return nil
	}
	if err != nil {
		return err
	}
	defer unix.Close(p)
	var st unix.Stat_t
	if err := unix.Fstat(p, &st); err != nil {
		return err
	}
	if t := st.Mode & unix.S_IFMT; t != unix.S_IFREG && t != unix.S_IFDIR {
		return nil // it cannot be given one
	}
	fd, err := unix.Open(procFD(p), unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	return errors.Join(likeProject(fd, a.stage), unix.Close(fd))
}

// rename is renameat2 between the stage and a directory that is updated.
func (a *updater) rename(from int, old string, to int, name string, flags uint) error {
	err := unix.Renameat2(from, old, to, name, flags)
	if err != unix.EXDEV {
		return err
	}
	dir, its := to, name
	if to == a.stage {
		dir, its = from, old
	}
	if again := a.rejoin(dir, its); again != nil {
		return errors.Join(err, again)
	}
	return unix.Renameat2(from, old, to, name, flags)
}
