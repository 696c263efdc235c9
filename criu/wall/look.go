package wall

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/proc"
)

// Restored is a container that CRIU has restored, frozen.
type Restored struct {
	Pid     int   // of its first process
	Pids    []int // of the processes in its cgroup
	Cgroups map[string]string
}

// Inspect holds what the kernel says of restored processes against the container's spec.
// They are frozen and have not run. A difference is a *Refusal.
func Inspect(r Restored, spec *Spec) error {
	l := &look{
		spec: spec, Restored: r, own: "/proc/thread-self/", views: map[string]*view{},
		members: map[string]map[int]bool{},
	}
	all, err := l.all()
	if err != nil {
		return err
	}
	for _, pid := range all {
		if !slices.Contains(r.Pids, pid) {
			l.end(all)
			return refuse("", fmt.Sprintf("process %d", pid), "it is outside of the container's cgroup")
		}
	}
	first := func(a, b int) int { // whose mounts are looked at, and completed, before the files of any
		return cmp.Or(-cmp.Compare(btoi(a == r.Pid), btoi(b == r.Pid)), a-b)
	}
	for _, pid := range slices.SortedFunc(slices.Values(r.Pids), first) {
		if err := l.process(pid); err != nil && !gone(err) {
			return err
		}
	}
	return nil
}

func btoi(is bool) int {
	if is {
		return 1
	}
	return 0
}

// look is an Inspect under way.
type look struct {
	Restored
	spec  *Spec
	own   string
	views map[string]*view // by mount namespace

	covered []string                // masks and the like that the images did not have
	members map[string]map[int]bool // by controller: the processes in the container's cgroup
}

func gone(err error) bool { return errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ESRCH) }

// all lists the processes of the container, wherever they are: those that descend from its
// first, and, if the container has a pid namespace of its own, those in that.
func (l *look) all() (list []int, err error) {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil, err
	}
	theirs, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/pid", l.Pid))
	if err != nil {
		return nil, err
	}
	ours, err := os.Readlink(l.own + "ns/pid")
	if err != nil {
		return nil, err
	}
	parents := map[int]int{}
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		if p, err := proc.Read(pid); err == nil && !p.Ended() {
			parents[pid] = p.Parent
		}
	}
	for pid := range parents {
		in := false
		for at, n := pid, 0; at > 1 && n < 1<<12 && !in; at, n = parents[at], n+1 {
			in = at == l.Pid
		}
		if !in && theirs != ours {
			ns, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/pid", pid))
			in = err == nil && ns == theirs
		}
		if in {
			list = append(list, pid)
		}
	}
	slices.Sort(list)
	return list, nil
}

// end kills processes that the OCI runtime does not know.
func (l *look) end(pids []int) {
	for _, pid := range pids {
		if pid > 1 && pid != os.Getpid() {
			_ = unix.Kill(pid, unix.SIGKILL)
		}
	}
}

func (l *look) process(pid int) error {
	dir := fmt.Sprintf("/proc/%d/", pid)
	s, err := readStatus(dir + "status")
	if err != nil || s["State"] == "" || strings.HasPrefix(s["State"], "Z") || strings.HasPrefix(s["State"], "X") {
		return err
	}
	for _, step := range []func(int, string) error{
		l.namespaces, l.maps, l.cgroups, l.threads, l.mounted, l.files, l.mapped,
	} {
		if err := step(pid, dir); err != nil {
			return err
		}
	}
	return nil
}

func refuseOf(pid int, what, format string, a ...any) error {
	return refuse("", fmt.Sprintf("%s of process %d", what, pid), format, a...)
}

func (l *look) namespaces(pid int, dir string) error {
	for _, ns := range []struct{ typ, file string }{
		{"pid", "pid"}, {"network", "net"}, {"ipc", "ipc"}, {"uts", "uts"}, {"mount", "mnt"},
		{"user", "user"}, {"cgroup", "cgroup"},
	} {
		theirs, err := os.Readlink(dir + "ns/" + ns.file)
		if err != nil {
			return err
		}
		ours, err := os.Readlink(l.own + "ns/" + ns.file)
		if err != nil {
			return err
		}
		want := l.spec.namespace(ns.typ)
		switch {
		case want == nil && theirs != ours:
			// It may have made one, with a capability in the host's user namespace.
			if !l.spec.mounter() {
				return refuseOf(pid, ns.typ+" namespace", "it is one of its own, and the container has the host's")
			}
		case want != nil && want.Path == "" && theirs == ours:
			if ns.typ == "cgroup" { // CRIU restores it only where the images have it
				continue
			}
			return refuseOf(pid, ns.typ+" namespace", "it is the host's")
		case want != nil && want.Path != "":
			if st, err := os.Stat(want.Path); err == nil && !l.spec.mounter() {
				var is unix.Stat_t
				if err := unix.Stat(dir+"ns/"+ns.file, &is); err != nil {
					return err
				}
				if ino := inode(st); ino != 0 && ino != is.Ino {
					return refuseOf(pid, ns.typ+" namespace", "it is not %s", want.Path)
				}
			}
		}
	}
	return nil
}

func (l *look) maps(pid int, dir string) error {
	ns := l.spec.namespace("user")
	if ns != nil && ns.Path != "" {
		return nil
	}
	for _, m := range []struct {
		file string
		want []IDs
	}{{"uid_map", l.spec.Linux.UIDMappings}, {"gid_map", l.spec.Linux.GIDMappings}} {
		got, err := readMap(dir + m.file)
		if err != nil {
			return err
		}
		want := m.want
		if ns == nil {
			if want, err = readMap(l.own + m.file); err != nil {
				return err
			}
		}
		if !sameIDs(got, want) {
			return refuseOf(pid, m.file, "it is %v, and the container's is %v", got, want)
		}
	}
	return nil
}

func readMap(path string) (list []IDs, err error) {
	data, err := os.ReadFile(path)
	for line := range strings.Lines(string(data)) {
		var m IDs
		if n, _ := fmt.Sscan(line, &m.Container, &m.Host, &m.Size); n == 3 {
			list = append(list, m)
		}
	}
	return list, err
}

// cgroups proves that a process is in the container's cgroup of each hierarchy, or below.
func (l *look) cgroups(pid int, dir string) error {
	for ctl, path := range l.Cgroups {
		if l.members[ctl] == nil {
			members, err := within(path)
			if err != nil && !gone(err) { // without the hierarchy no process is in it
				return err
			}
			l.members[ctl] = members
		}
		if !l.members[ctl][pid] {
			if _, err := os.Lstat(dir); err != nil {
				return err
			}
			return refuseOf(pid, "cgroup", "it is not in the container's %s", path)
		}
	}
	return nil
}

// within lists the processes of a cgroup and of those below.
func within(dir string) (map[int]bool, error) {
	in := map[int]bool{}
	return in, filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || !d.IsDir() {
			return err
		}
		data, err := os.ReadFile(filepath.Join(path, "cgroup.procs"))
		if errors.Is(err, unix.EOPNOTSUPP) { // a threaded one, of which the domain above has the processes
			return nil
		}
		for field := range strings.FieldsSeq(string(data)) {
			if pid, err := strconv.Atoi(field); err == nil {
				in[pid] = true
			}
		}
		return err
	})
}

type status map[string]string

func readStatus(path string) (status, error) {
	data, err := os.ReadFile(path)
	s := status{}
	for line := range strings.Lines(string(data)) {
		k, v, _ := strings.Cut(line, ":")
		s[k] = strings.TrimSpace(v)
	}
	return s, err
}

func (l *look) threads(pid int, dir string) error {
	entries, err := os.ReadDir(dir + "task")
	if err != nil {
		return err
	}
	most := l.spec.bounding()
	for _, e := range entries {
		s, err := readStatus(dir + "task/" + e.Name() + "/status")
		if gone(err) {
			continue
		}
		if err != nil {
			return err
		}
		if strings.HasPrefix(s["State"], "Z") || strings.HasPrefix(s["State"], "X") {
			continue
		}
		for _, set := range []string{"CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"} {
			bits, err := strconv.ParseUint(s[set], 16, 64)
			if err != nil {
				return fmt.Errorf("process %d: %s: %w", pid, set, err)
			}
			if more := bits &^ most; more != 0 {
				return refuseOf(pid, set, "the container cannot have %s", capNames(more))
			}
		}
		if l.spec.Process.NoNewPrivileges && s["NoNewPrivs"] != "1" {
			return refuseOf(pid, "NoNewPrivs", "it is not set, as it is in the container")
		}
		if l.spec.filtered() && s["Seccomp"] != strconv.Itoa(modeFilter) {
			return refuseOf(pid, "Seccomp", "it has mode %s, and the container's processes have a filter", s["Seccomp"])
		}
	}
	return nil
}

// view is what the processes of a mount namespace see.
type view struct {
	mounts []mount
	ids    map[uint32]bool
}

func (l *look) mounted(pid int, dir string) error {
	_, err := l.view(pid, dir)
	return err
}

func (l *look) view(pid int, dir string) (*view, error) {
	ns, err := os.Readlink(dir + "ns/mnt")
	if err != nil {
		return nil, err
	}
	if v := l.views[ns]; v != nil {
		return v, nil
	}
	// As the namespace's root has it, not a process that has changed its own.
	list, err := readMounts(dir + "mountinfo")
	if err != nil {
		return nil, err
	}
	v := &view{mounts: list, ids: map[uint32]bool{}}
	for _, m := range list {
		v.ids[m.id] = true
	}
	if len(l.views) > 0 && !l.spec.mounter() {
		return nil, refuseOf(pid, "mount namespace", "there is a second one, which takes CAP_SYS_ADMIN")
	}
	l.views[ns] = v
	if pid != l.Pid {
		return v, nil // which may be in a part of the tree
	}
	host, err := readMounts(l.own + "mountinfo")
	if err != nil {
		return nil, err
	}
	outside := map[uint32]bool{}
	for _, m := range host {
		outside[m.group] = true
	}
	delete(outside, 0)
	if err := l.spec.checkMounts("", list, outside); err != nil {
		return nil, err
	}
	return v, l.complete(dir+"root", list)
}

// complete proves that the container has the mounts of its spec, and sees by them what it shall.
func (l *look) complete(root string, list []mount) error {
	dir, err := unix.Open(root, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(dir)
	if err := l.same("/", l.spec.Root.Path, dir); err != nil {
		return err
	}
	for _, m := range l.spec.Mounts {
		if err := l.sees(dir, m, list); err != nil {
			return err
		}
	}
	if l.spec.mounter() {
		return nil // which may have uncovered what is masked
	}
	shown, writable, err := l.bare(dir)
	if err != nil || len(shown)+len(writable) == 0 {
		return err
	}
	// Images of elsewhere have other ones.
	l.covered = slices.Concat(shown, writable)
	if err := cover(l.Pid, shown, writable); err != nil {
		return refuse("", "masks", "%v are not covered, and cannot be: %v", l.covered, err)
	}
	shown, writable, err = l.bare(dir)
	if err == nil && len(shown)+len(writable) > 0 {
		return refuse("", "masks", "%v are not covered", slices.Concat(shown, writable))
	}
	return err
}

// bare lists the masked paths of which something is seen, and those that are writable and shall not be.
func (l *look) bare(dir int) (shown, writable []string, err error) {
	for _, p := range l.spec.Linux.MaskedPaths {
		is, err := l.hides(dir, p)
		if err != nil {
			return nil, nil, err
		}
		if !is {
			shown = append(shown, p)
		}
	}
	for _, p := range l.spec.Linux.ReadonlyPaths {
		fd, err := openIn(dir, p)
		if err != nil {
			continue // it is not there, or nothing is seen of it
		}
		var st unix.Statfs_t
		err = unix.Fstatfs(fd, &st)
		unix.Close(fd)
		if err != nil {
			return nil, nil, err
		}
		if st.Flags&unix.ST_RDONLY == 0 {
			writable = append(writable, p)
		}
	}
	return shown, writable, nil
}

// openIn opens a path in a root directory, going by links there alone.
func openIn(root int, path string) (int, error) {
	return unix.Openat2(root, cmp.Or(strings.TrimPrefix(path, "/"), "."), &unix.OpenHow{
		Flags: unix.O_PATH | unix.O_CLOEXEC, Resolve: unix.RESOLVE_IN_ROOT | unix.RESOLVE_NO_MAGICLINKS,
	})
}

// sees proves that a mount of the spec, where there is one, is what is seen at its place.
func (l *look) sees(root int, w SpecMount, list []mount) error {
	at := func(format string, a ...any) error {
		return refuse("", "mount at "+quoted(w.Destination), format, a...)
	}
	fd, err := openIn(root, w.Destination)
	if err != nil {
		return nil // there is none
	}
	defer unix.Close(fd)
	id, err := mountID(fmt.Sprintf("/proc/self/fdinfo/%d", fd))
	if err != nil {
		return err
	}
	i := slices.IndexFunc(list, func(m mount) bool { return m.id == id })
	if i < 0 {
		return at("it is outside of the container's mounts")
	}
	m := list[i]
	if m.point != l.spec.inRoot(w.Destination) {
		// There is none: images of another engine's container may have fewer. What is underneath
		// is judged.
		return nil
	}
	if !w.bind() {
		return nil // judged with the others
	}
	return l.same(w.Destination, w.Source, fd)
}

// same proves that an open file is that of a path of the host.
func (l *look) same(place, source string, fd int) error {
	var want, is unix.Stat_t
	if !filepath.IsAbs(source) || unix.Stat(source, &want) != nil {
		return nil // it was moved or removed since the OCI runtime took it
	}
	if err := unix.Fstat(fd, &is); err != nil {
		return err
	}
	if want.Dev != is.Dev || want.Ino != is.Ino {
		return refuse("", "mount at "+quoted(place), "it does not show %s", source)
	}
	return nil
}

// hides reports whether nothing is seen of a masked path.
func (l *look) hides(root int, path string) (bool, error) {
	fd, err := openIn(root, path)
	if err != nil {
		return true, nil // it is not there
	}
	defer unix.Close(fd)
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return false, err
	}
	var on unix.Statfs_t
	if err := unix.Fstatfs(fd, &on); err != nil {
		return false, err
	}
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFCHR:
		return unix.Major(st.Rdev) == 1 && unix.Minor(st.Rdev) == 3, nil
	case unix.S_IFDIR:
		return on.Type == unix.TMPFS_MAGIC && on.Flags&unix.ST_RDONLY != 0, nil
	}
	return false, nil
}

// mountID reads the id of the mount that a file is on.
func mountID(fdinfo string) (uint32, error) {
	data, err := os.ReadFile(fdinfo)
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(data)) {
		if v, ok := strings.CutPrefix(line, "mnt_id:"); ok {
			id, err := strconv.ParseUint(strings.TrimSpace(v), 10, 32)
			return uint32(id), err
		}
	}
	return 0, fmt.Errorf("%s names no mount", fdinfo)
}

// files proves that what a process stands in, runs and has open is on mounts of the container,
// and that it has no device open that the container has not.
func (l *look) files(pid int, dir string) error {
	v, err := l.view(pid, dir)
	if err != nil {
		return err
	}
	for _, what := range []string{"root", "cwd", "exe"} {
		fd, err := unix.Open(dir+what, unix.O_PATH|unix.O_CLOEXEC, 0)
		if err != nil {
			return err
		}
		id, err := mountID(fmt.Sprintf("/proc/self/fdinfo/%d", fd))
		unix.Close(fd)
		if err != nil {
			return err
		}
		if target, err := os.Readlink(dir + what); err == nil && l.under(target) {
			return refuseOf(pid, what, "%s is hidden in the container, or read-only", quoted(target))
		}
		if !v.ids[id] && !l.anywhere(id) {
			return refuseOf(pid, what, "it is outside of the container's mounts")
		}
	}
	entries, err := os.ReadDir(dir + "fd")
	if err != nil {
		return err
	}
	for _, e := range entries {
		target, err := os.Readlink(dir + "fd/" + e.Name())
		if err != nil {
			return err
		}
		if target == "anon_inode:inotify" || target == "anon_inode:[fanotify]" {
			if err := l.watches(pid, dir, e.Name()); err != nil {
				return err
			}
		}
		if noMount(target) {
			continue
		}
		if l.under(target) {
			return refuseOf(pid, "file descriptor "+e.Name(),
				"%s is hidden in the container, or read-only", quoted(target))
		}
		id, err := mountID(dir + "fdinfo/" + e.Name())
		if err != nil {
			return err
		}
		if !v.ids[id] && !l.anywhere(id) {
			return refuseOf(pid, "file descriptor "+e.Name(),
				"%s is outside of the container's mounts", quoted(target))
		}
		var st unix.Stat_t
		if err := unix.Stat(dir+"fd/"+e.Name(), &st); err != nil {
			return err
		}
		if err := l.device(pid, "file descriptor "+e.Name(), target, &st); err != nil {
			return err
		}
	}
	return nil
}

// under reports whether a file lies where the images had no mask: it was opened before.
func (l *look) under(target string) bool {
	return slices.ContainsFunc(l.covered, func(p string) bool { return below(target, filepath.Clean(p)) })
}

// anywhere reports whether a mount is one of any of the container's namespaces.
func (l *look) anywhere(id uint32) bool {
	for _, v := range l.views {
		if v.ids[id] {
			return true
		}
	}
	return l.spec.mounter() // others may be in namespaces that no process is in any more
}
