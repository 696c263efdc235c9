package overlay

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/internal/idmap"
)

// Mount is an overlay to mount.
type Mount struct {
	Lower    []string // read-only directories, top first; at least one
	Upper    string   // where changes go; empty: none are possible
	Work     string   // an empty directory on Upper's mount; the kernel's own
	Target   string
	Open     *os.File // the target, where its path may lead elsewhere by now; nil: what is at the path. Not with IDs
	ReadOnly bool
	Guarded  bool       // it has no devices, and no set-id bit of a file counts
	Source   string     // what the table of mounts names; empty: overlay
	IDs      *idmap.Map // of the mounted tree; nil: the host's
}

// layerOptions make an upperdir self-contained: renamed directories and changed
// attributes are copied up whole instead of pointing into the layers below,
// so that the directory can be captured and applied as plain files. Options of
// the kernel or of the distribution's module settings must not bring them back.
// For each the values are tried in turn; an empty one leaves the option out, which
// is right where a kernel does not know it because it lacks the feature.
var layerOptions = []struct {
	key    string
	values []string
}{
	// nofollow is off, and does not trust redirects that an upperdir holds.
	{"redirect_dir", []string{"nofollow", "off"}},
	{"metacopy", []string{"off", ""}},
	{"index", []string{"off", ""}},
}

// Mount mounts m on its target. A layer or target that does not exist is
// ErrNotFound. The kernel's own reason is part of the error where it gives one.
func (m Mount) Mount() error {
	if err := m.check(); err != nil {
		return fmt.Errorf("mount %s: %w", m.Target, err)
	}
	mount := m.mount
	if m.IDs != nil {
		mount = m.mapped
	}
	if err := mount(); err != nil {
		return fmt.Errorf("mount %s: %w", m.Target, err)
	}
	return nil
}

func (m Mount) mount() error {
	err := m.fsmount()
	if errors.Is(err, unix.ENOSYS) || errors.Is(err, errOldMount) {
		if err = m.classic(); err != nil {
			err = fmt.Errorf("by mount(2): %w", err)
		}
	}
	if errors.Is(err, unix.ENODEV) {
		err = fmt.Errorf("%w: this kernel has no overlay filesystem (modprobe overlay)", fault.ErrUnsupported)
	}
	return err
}

func (m Mount) check() error {
	if len(m.Lower) == 0 {
		return fmt.Errorf("no lower directory: %w", fault.ErrInvalid)
	}
	if (m.Upper == "") != (m.Work == "") {
		return fmt.Errorf("an upper directory needs a work directory and the other way round: %w", fault.ErrInvalid)
	}
	dirs := append([]string{m.at()}, m.Lower...)
	if m.Upper != "" {
		dirs = append(dirs, m.Upper, m.Work)
	}
	for _, dir := range dirs {
		st, err := os.Stat(dir)
		if errors.Is(err, os.ErrNotExist) {
			return fmt.Errorf("directory %s: %w", dir, fault.ErrNotFound)
		}
		if err != nil {
			return err
		}
		if !st.IsDir() {
			return fmt.Errorf("%s is not a directory: %w", dir, fault.ErrInvalid)
		}
	}
	return m.checkWork()
}

// checkWork finds what the kernel refuses with a bare EINVAL, its reason being
// in the kernel log only.
func (m Mount) checkWork() error {
	if m.Upper == "" {
		return nil
	}
	var paths [2]string
	var st [2]unix.Statx_t
	for i, dir := range []string{m.Upper, m.Work} {
		var err error
		if paths[i], err = filepath.EvalSymlinks(dir); err != nil {
			return err
		}
		if err := unix.Statx(unix.AT_FDCWD, paths[i], 0, statxMask, &st[i]); err != nil {
			return pathError("stat", dir, err)
		}
	}
	if strings.HasPrefix(paths[0]+"/", paths[1]+"/") || strings.HasPrefix(paths[1]+"/", paths[0]+"/") {
		return fmt.Errorf("the upper directory %s and the work directory %s must not contain each other: %w", m.Upper,
			m.Work, fault.ErrInvalid)
	}
	if st[0].Dev_major != st[1].Dev_major || st[0].Dev_minor != st[1].Dev_minor || st[0].Mnt_id != st[1].Mnt_id {
		return fmt.Errorf("the upper directory %s and the work directory %s must be on one mount: %w", m.Upper,
			m.Work, fault.ErrInvalid)
	}
	return nil
}

// at is the target as calls that follow symlinks can have it.
func (m Mount) at() string {
	if m.Open != nil {
		return procFD(int(m.Open.Fd()))
	}
	return m.Target
}

// errOldMount says that the kernel has fsopen, but not for all of this.
var errOldMount = errors.New("not possible with fsconfig")

// bare reports whether there is nothing to overlay: the kernel wants two layers.
func (m Mount) bare() bool { return m.Upper == "" && len(m.Lower) == 1 }

// fsmount mounts by fsopen, which takes any number of layers and any bytes in
// their paths.
func (m Mount) fsmount() (err error) {
	if m.bare() {
		return m.bind()
	}
	fs, err := unix.Fsopen("overlay", unix.FSOPEN_CLOEXEC)
	if err != nil {
		return err
	}
	defer unix.Close(fs)
	defer func() {
		if err != nil && err != errOldMount {
			err = withReasons(fs, err)
		}
	}()
	layers := &layerSet{fs: fs}
	defer layers.close()
	if err := m.layers(layers); err != nil {
		return err
	}
	for _, o := range layerOptions {
		if err := setOption(fs, o.key, o.values); err != nil {
			return err
		}
	}
	if err := unix.FsconfigSetString(fs, "source", cmp.Or(m.Source, "overlay")); err != nil {
		return err
	}
	if err := unix.FsconfigCreate(fs); err != nil {
		return fmt.Errorf("make the overlay: %w", err)
	}
	flags := 0
	if m.ReadOnly {
		flags |= unix.MOUNT_ATTR_RDONLY
	}
	if m.Guarded {
		flags |= unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NODEV
	}
	mnt, err := unix.Fsmount(fs, unix.FSMOUNT_CLOEXEC, flags)
	if err != nil {
		return err
	}
	defer unix.Close(mnt)
	if m.Open != nil {
		err = unix.MoveMount(mnt, "", int(m.Open.Fd()), "", unix.MOVE_MOUNT_F_EMPTY_PATH|unix.MOVE_MOUNT_T_EMPTY_PATH)
	} else {
		err = unix.MoveMount(mnt, "", unix.AT_FDCWD, m.Target, unix.MOVE_MOUNT_F_EMPTY_PATH)
	}
	if err != nil {
		return fmt.Errorf("attach the overlay: %w", err)
	}
	return nil
}

func (m Mount) layers(set *layerSet) error {
	for _, dir := range m.Lower {
		if err := set.add("lowerdir+", dir); err != nil {
			if err == unix.EINVAL {
				return errOldMount // lowerdir+ came with Linux 6.7
			}
			return fmt.Errorf("layer %s: %w", dir, err)
		}
	}
	if m.Upper == "" {
		return nil
	}
	if err := set.add("upperdir", m.Upper); err != nil {
		return fmt.Errorf("upper directory %s: %w", m.Upper, err)
	}
	if err := set.add("workdir", m.Work); err != nil {
		return fmt.Errorf("work directory %s: %w", m.Work, err)
	}
	return nil
}

// layerSet hands layers to a filesystem context. fsconfig takes at most 255
// bytes of path, and overlayfs takes a backslash for an escape; such a path goes
// by descriptor, by way of /proc so that kernels before 6.13 can do it.
type layerSet struct {
	fs  int
	fds []int
}

func (s *layerSet) add(key, dir string) error {
	if len(dir) <= 255 && !strings.Contains(dir, `\`) {
		return unix.FsconfigSetString(s.fs, key, dir)
	}
	p, err := s.short(dir)
	if err != nil {
		return err
	}
	return unix.FsconfigSetString(s.fs, key, p)
}

func (s *layerSet) short(dir string) (string, error) {
	fd, err := unix.Open(dir, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return "", pathError("open", dir, err)
	}
	s.fds = append(s.fds, fd)
	return procFD(fd), nil
}

func (s *layerSet) close() {
	for _, fd := range s.fds {
		_ = unix.Close(fd)
	}
}

func setOption(fs int, key string, values []string) error {
	var err error
	for _, v := range values {
		if v == "" {
			return nil
		}
		if err = unix.FsconfigSetString(fs, key, v); err != unix.EINVAL {
			break
		}
	}
	if err != nil {
		return fmt.Errorf("option %s: %w", key, err)
	}
	return nil
}

// withReasons adds what the kernel noted in the context: it says in words what
// errno says in a number.
func withReasons(fs int, err error) error {
	var notes []string
	buf := make([]byte, 4096)
	for range 16 {
		n, rerr := unix.Read(fs, buf)
		if rerr != nil || n <= 0 {
			break
		}
		note := strings.TrimSpace(string(buf[:n]))
		if len(note) > 2 && note[1] == ' ' { // "e ", "w " or "i "
			note = note[2:]
		}
		notes = append(notes, strings.TrimPrefix(note, "overlay: "))
	}
	if len(notes) == 0 {
		return err
	}
	return fmt.Errorf("%w: %s", err, strings.Join(notes, "; "))
}

// classic mounts by mount(2), whose options are one string of at most a page in
// which commas and colons mean something.
func (m Mount) classic() error {
	if m.bare() {
		return m.bind()
	}
	set := &layerSet{}
	defer set.close()
	base, err := m.options(set, false)
	if err == nil && len(base)+100 >= os.Getpagesize() {
		base, err = m.options(set, true)
	}
	if err != nil {
		return err
	}
	if len(base)+100 >= os.Getpagesize() {
		return fmt.Errorf("%d layers are more than this kernel takes: %w", len(m.Lower), fault.ErrUnsupported)
	}
	var flags uintptr
	if m.ReadOnly {
		flags |= unix.MS_RDONLY
	}
	if m.Guarded {
		flags |= unix.MS_NOSUID | unix.MS_NODEV
	}
	// EINVAL does not say which option it means, so whole sets are tried, the
	// strictest first.
	for _, opts := range []string{
		",redirect_dir=nofollow,metacopy=off,index=off",
		",redirect_dir=off,metacopy=off,index=off",
		",redirect_dir=off,index=off", // before 4.19 there was no metacopy
	} {
		if err = unix.Mount(cmp.Or(m.Source, "overlay"), m.at(), "overlay", flags, base+opts); err != unix.EINVAL {
			break
		}
	}
	return err
}

// options returns the layers as mount(2) wants them, by descriptor if short.
func (m Mount) options(set *layerSet, short bool) (string, error) {
	path := func(dir string) (string, error) {
		if short || strings.ContainsAny(dir, `\:,`) {
			return set.short(dir)
		}
		return dir, nil
	}
	lower := make([]string, len(m.Lower))
	for i, dir := range m.Lower {
		var err error
		if lower[i], err = path(dir); err != nil {
			return "", err
		}
	}
	opts := "lowerdir=" + strings.Join(lower, ":")
	if m.Upper == "" {
		return opts, nil
	}
	upper, err := path(m.Upper)
	if err != nil {
		return "", err
	}
	work, err := path(m.Work)
	return opts + ",upperdir=" + upper + ",workdir=" + work, err
}

// bind shows a single layer as it is, read-only: there is nowhere to write to.
func (m Mount) bind() error {
	if err := unix.Mount(m.Lower[0], m.Target, "", unix.MS_BIND, ""); err != nil {
		return err
	}
	err := unix.Mount("", m.Target, "", unix.MS_REMOUNT|unix.MS_BIND|unix.MS_RDONLY, "")
	if err != nil {
		return errors.Join(err, Unmount(m.Target, UnmountOptions{Lazy: true}))
	}
	return nil
}

// UnmountOptions modify Unmount.
type UnmountOptions struct {
	// Lazy takes the mount out of sight at once and lets it end with its last
	// user. Until then the upperdir is not at rest.
	Lazy bool
}

// Unmount unmounts all that is mounted on target. It is idempotent: nil means
// that nothing is mounted there any more, also when target does not exist. A
// mount in use is ErrBusy.
func Unmount(target string, opts UnmountOptions) error {
	flags := unix.UMOUNT_NOFOLLOW
	if opts.Lazy {
		flags |= unix.MNT_DETACH
	}
	for {
		switch err := unix.Unmount(target, flags); err {
		case nil, unix.EINTR:
			// Something else may have been mounted below it.
		case unix.EINVAL, unix.ENOENT, unix.ENOTDIR:
			return nil
		case unix.EBUSY:
			return fmt.Errorf("unmount %s: %w: a process has its working directory or an open file in it, or something is mounted below it", target, fault.ErrBusy)
		default:
			return fmt.Errorf("unmount %s: %w", target, err)
		}
	}
}

// Mounted reports whether something is mounted on target; false when target does
// not exist.
func Mounted(target string) (bool, error) {
	var st unix.Statx_t
	err := unix.Statx(unix.AT_FDCWD, target, unix.AT_SYMLINK_NOFOLLOW|unix.AT_NO_AUTOMOUNT, 0, &st)
	if err == unix.ENOENT || err == unix.ENOTDIR {
		return false, nil
	}
	if err != nil {
		return false, pathError("stat", target, err)
	}
	return st.Attributes&unix.STATX_ATTR_MOUNT_ROOT != 0, nil
}
