package kernel

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/runtime/internal/record"
)

// Cgroups are the hierarchies of this host; a path in them is the same in each.
type Cgroups []Hierarchy

// Hierarchy is one mounted hierarchy.
type Hierarchy struct {
	Path    string
	V2      bool
	Freezer bool     // the one to freeze by
	Systemd bool     // v1: name=systemd, by which systemd finds a service's processes
	options []string // of its mount; v1: the controllers are among them
}

// Hierarchies lists the hierarchies: one on a unified host, many under v1, many and one
// without controllers on a hybrid one. If one is mounted twice, the first mount counts: CRIU
// mounts all of them for as long as a restore takes, and a later write there would go to a
// plain directory. The list is made once: the mount table of a host with many sandboxes is
// long.
func Hierarchies() (Cgroups, error) {
	found.Lock()
	defer found.Unlock()
	var err error
	if found.list == nil {
		found.list, err = hierarchies()
	}
	return found.list, err
}

var found struct {
	sync.Mutex
	list Cgroups
}

func hierarchies() (Cgroups, error) {
	type device struct{ major, minor int }
	seen := map[device]bool{}
	infos, err := mountinfo.GetMounts(func(i *mountinfo.Info) (skip, stop bool) {
		d := device{i.Major, i.Minor}
		if i.FSType != "cgroup" && i.FSType != "cgroup2" || seen[d] ||
			strings.Contains(i.Mountpoint, "/.criu.cgyard.") {
			return true, false
		}
		seen[d] = true
		return false, false
	})
	if err != nil {
		return nil, fmt.Errorf("list cgroup hierarchies: %w", err)
	}
	var list Cgroups
	v1freezer := false
	for _, i := range infos {
		opts := strings.Split(i.VFSOptions, ",")
		m := Hierarchy{Path: i.Mountpoint, V2: i.FSType == "cgroup2", options: opts}
		m.Freezer = slices.Contains(opts, "freezer")
		m.Systemd = slices.Contains(opts, "name=systemd")
		v1freezer = v1freezer || m.Freezer
		list = append(list, m)
	}
	for i := range list {
		list[i].Freezer = list[i].Freezer || list[i].V2 && !v1freezer
	}
	return list, nil
}

// dying bounds how long killed processes take to end.
const dying = 10 * time.Second

// Unified reports whether v2 has the controllers. It checks the usual mount point of cgroups:
// some programs add a hierarchy of v1, for net_cls or with no controller at all.
func (c Cgroups) Unified() bool {
	return slices.ContainsFunc(c, func(m Hierarchy) bool { return m.V2 && m.Path == "/sys/fs/cgroup" })
}

// frozenBy returns the file of a cgroup that says whether it is to be frozen, and its content if
// not.
func (m Hierarchy) frozenBy() (file, runs string) {
	if m.V2 {
		return "cgroup.freeze", "0"
	}
	return "freezer.state", "THAWED"
}

// Frozen reports whether a container's processes were told to stand still. Most of
// them do, then, and only Thaw lets them go on, even when there is one that
// cannot be frozen yet (FREEZING under v1), or has come in since.
func (c Cgroups) Frozen(path string) (bool, error) {
	for _, m := range c {
		if !m.Freezer {
			continue
		}
		file, runs := m.frozenBy()
		data, _, err := record.Read(filepath.Join(m.Path, path, file))
		if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENODEV) {
			continue // the cgroup is gone
		}
		if err != nil {
			return false, err
		}
		if strings.TrimSpace(string(data)) != runs {
			return true, nil
		}
	}
	return false, nil
}

// Freezer is the cgroup of a container, held on to so that Frozen can be asked again
// and again for one call of the kernel each.
type Freezer struct {
	files []*os.File
	runs  []string
}

// Freezer holds on to a container's cgroup, which has to be there.
func (c Cgroups) Freezer(path string) (*Freezer, error) {
	z := &Freezer{}
	for _, m := range c {
		if !m.Freezer {
			continue
		}
		file, runs := m.frozenBy()
		f, err := os.Open(filepath.Join(m.Path, path, file))
		if err != nil {
			z.Close()
			return nil, err
		}
		z.files, z.runs = append(z.files, f), append(z.runs, runs)
	}
	return z, nil
}

// Frozen is that of Cgroups; of a cgroup that is gone, or after Close, it fails.
func (z *Freezer) Frozen() (bool, error) {
	for i, f := range z.files {
		var buf [32]byte
		n, err := f.ReadAt(buf[:], 0)
		if err != nil && err != io.EOF {
			return false, err
		}
		if strings.TrimSpace(string(buf[:n])) != z.runs[i] {
			return true, nil
		}
	}
	return false, nil
}

// Close lets go of it.
func (z *Freezer) Close() {
	for _, f := range z.files {
		_ = f.Close() // nothing was written
	}
}

// Chain lists the cgroups by which a process of a container may be frozen: its own and those
// above it, up to the container's at path. An OCI runtime may put the processes into one
// beneath that (crun with systemd does), and freeze that one. For a process that is gone, or
// elsewhere, Chain returns path alone.
func (c Cgroups) Chain(pid int, path string) ([]string, error) {
	data, _, err := record.Read(fmt.Sprintf("/proc/%d/cgroup", pid))
	if err := notGone(err); err != nil {
		return nil, err
	}
	return c.chain(string(data), path), nil
}

func (c Cgroups) chain(groups, top string) (list []string) {
	for line := range strings.Lines(groups) {
		f := strings.SplitN(strings.TrimSpace(line), ":", 3) // hierarchy:controllers:path
		if len(f) != 3 || !slices.ContainsFunc(c, func(m Hierarchy) bool { return m.freezes(f[1]) }) {
			continue
		}
		for at := path.Clean(f[2]); strings.HasPrefix(at, top+"/"); at = path.Dir(at) {
			if !slices.Contains(list, at) {
				list = append(list, at)
			}
		}
	}
	return append(list, top)
}

// freezes reports whether it is the hierarchy to freeze by, given the controllers that
// a line of /proc/PID/cgroup names.
func (m Hierarchy) freezes(controllers string) bool {
	return m.Freezer && (m.V2 && controllers == "" || !m.V2 &&
		slices.Contains(strings.Split(controllers, ","), "freezer"))
}

// FrozenProcess reports whether the cgroup that a process is in stands still.
func (c Cgroups) FrozenProcess(pid int) (bool, error) {
	data, _, err := record.Read(fmt.Sprintf("/proc/%d/cgroup", pid))
	if err != nil {
		return false, notGone(err)
	}
	for line := range strings.Lines(string(data)) {
		f := strings.SplitN(strings.TrimSpace(line), ":", 3) // hierarchy:controllers:path
		if len(f) != 3 {
			continue
		}
		for _, m := range c {
			if m.freezes(f[1]) {
				if frozen, err := (Cgroups{m}).Frozen(f[2]); err != nil || frozen {
					return frozen, err
				}
			}
		}
	}
	return false, nil
}

// Thaw lets a container's processes go on.
func (c Cgroups) Thaw(path string) error {
	var errs []error
	for _, m := range c {
		if !m.Freezer {
			continue
		}
		file, value := m.frozenBy()
		err := os.WriteFile(filepath.Join(m.Path, path, file), []byte(value), 0)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// KillAll sends SIGKILL to every process of a container's cgroups and thaws
// them. A frozen process takes the signal before anything else once it thaws,
// so a paused container ends without running another instruction. It returns
// how many processes it found.
func (c Cgroups) KillAll(path string) (int, error) {
	seen := map[int]bool{}
	var errs []error
	for _, m := range c {
		for _, dir := range subtree(filepath.Join(m.Path, path)) {
			pids, err := members(dir)
			if err != nil {
				errs = append(errs, err)
			}
			for _, pid := range pids {
				seen[pid] = true
			}
		}
	}
	for pid := range seen {
		// The pid cannot have been reused for another's process as long as it
		// is listed in a cgroup that is ours alone; between the list and the
		// pidfd it can, so it is looked up again.
		p, err := OpenMember(pid, path)
		if p != nil {
			err = p.Kill(unix.SIGKILL)
			p.Close()
		}
		if err != nil {
			errs = append(errs, err)
		}
	}
	return len(seen), errors.Join(append(errs, c.Thaw(path))...)
}

// Terminate ends the processes of a cgroup: it sends sig to the first process and, if that has not
// ended in time, kills it, and the rest of its PID namespace with it. Frozen processes are
// killed at once, for they take no other signal.
func (c Cgroups) Terminate(
	ctx context.Context, first *Process, path string, frozen bool, sig unix.Signal, limit time.Duration,
) (killed bool, err error) {
	if frozen {
		_, err = c.KillAll(path)
		return true, err
	}
	if limit > 0 {
		if ended, err := first.Ask(ctx, sig, limit); ended || err != nil {
			return false, err
		}
	}
	return true, first.Kill(unix.SIGKILL)
}

// Empty kills until no process is left.
func (c Cgroups) Empty(ctx context.Context, path string) error {
	deadline := time.Now().Add(dying)
	for wait := time.Millisecond; ; wait = min(2*wait, 50*time.Millisecond) {
		n, err := c.KillAll(path)
		if n == 0 {
			return err
		}
		if time.Now().After(deadline) {
			return errors.Join(err, fmt.Errorf("cgroup %s: %d processes survive SIGKILL", path, n))
		}
		// v1 has no event for "empty" that does not need a release agent.
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(wait):
		}
	}
}

// Remove removes a container's cgroups; their processes are gone.
func (c Cgroups) Remove(ctx context.Context, path string) error {
	var errs []error
	for _, m := range c {
		dirs := subtree(filepath.Join(m.Path, path))
		slices.Reverse(dirs) // children first
		for _, dir := range dirs {
			if err := removeCgroup(ctx, dir); err != nil {
				errs = append(errs, err)
			}
		}
	}
	return errors.Join(errs...)
}

// removeCgroup retries while the kernel still takes its last processes apart.
func removeCgroup(ctx context.Context, dir string) error {
	for tries := 0; ; tries++ {
		err := unix.Rmdir(dir)
		if err == nil || errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if !errors.Is(err, unix.EBUSY) || tries == 50 {
			return fmt.Errorf("remove cgroup %s: %w", dir, err)
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(10 * time.Millisecond):
		}
	}
}

// subtree lists a cgroup and all below it, parents first.
func subtree(dir string) []string {
	// A cgroup's link count shows how many others are in it; to list one takes a stat of each
	// of its many files.
	var st unix.Stat_t
	if err := unix.Lstat(dir, &st); errors.Is(err, fs.ErrNotExist) {
		return nil
	} else if err == nil && st.Nlink == 2 {
		return []string{dir}
	}
	var dirs []string
	_ = filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err == nil && d.IsDir() {
			dirs = append(dirs, path)
		}
		return nil
	})
	return dirs
}

// Children lists the names of the cgroups in one, in whatever hierarchy.
func (c Cgroups) Children(path string) []string {
	seen := map[string]bool{}
	for _, m := range c {
		entries, err := os.ReadDir(filepath.Join(m.Path, path))
		if err != nil {
			continue // this one has none
		}
		for _, e := range entries {
			if e.IsDir() {
				seen[e.Name()] = true
			}
		}
	}
	return slices.Collect(maps.Keys(seen))
}

func members(dir string) ([]int, error) {
	data, _, err := record.Read(filepath.Join(dir, "cgroup.procs"))
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENODEV) || errors.Is(err, unix.EOPNOTSUPP) {
		return nil, nil // it is gone, or threaded
	}
	if err != nil {
		return nil, err
	}
	var pids []int
	for _, field := range strings.Fields(string(data)) {
		if pid, err := strconv.Atoi(field); err == nil && pid > 0 {
			pids = append(pids, pid)
		}
	}
	return pids, nil
}

// monitors makes the cgroup of all monitors in one hierarchy. They have one of
// their own, so that ending the login session or the service in which agentbox
// was called does not end them.
func monitors(m Hierarchy, path string) (dir string, err error) {
	dir = filepath.Join(m.Path, path)
	return dir, os.MkdirAll(dir, 0o755)
}

// StartIn starts a command in the cgroup path where the kernel has v2 (it can
// since 5.7), and reports whether it did. To be born there takes no time; to be
// moved takes some 10 ms, since the kernel waits for every processor to take
// notice. systemd, too, finds a service's processes by v2 if it is there,
// beside v1 as well.
func (c Cgroups) StartIn(cmd *exec.Cmd, path string) (born bool, err error) {
	i := slices.IndexFunc(c, func(m Hierarchy) bool { return m.V2 })
	if i < 0 {
		return false, cmd.Start()
	}
	dir, err := monitors(c[i], path)
	if err != nil {
		return false, cmd.Start()
	}
	f, err := os.OpenFile(dir, unix.O_PATH|unix.O_DIRECTORY, 0)
	if err != nil {
		return false, cmd.Start()
	}
	defer f.Close()
	plain := *cmd.SysProcAttr
	cmd.SysProcAttr.UseCgroupFD, cmd.SysProcAttr.CgroupFD = true, int(f.Fd())
	if err = cmd.Start(); err == nil {
		return true, nil
	}
	// Not here: an older kernel, or a cgroup that takes no processes.
	again := exec.Command(cmd.Path)
	again.Args, again.Env, again.Dir, again.ExtraFiles = cmd.Args, cmd.Env, cmd.Dir, cmd.ExtraFiles
	again.Stdin, again.Stdout, again.Stderr = cmd.Stdin, cmd.Stdout, cmd.Stderr
	again.SysProcAttr = &plain
	*cmd = *again
	return false, cmd.Start()
}

// MoveTo moves a command that StartIn has started to its cgroup. Where that cannot be done
// the command stays in its caller's. One that was born there is moved to where it is: that
// makes the kernel wait now until all processors have noticed that a move is under way, which
// the runtime, about to move the container's process, then finds done. No caller needs to
// wait for MoveTo.
func (c Cgroups) MoveTo(pid int, path string, born bool) error {
	var errs []error
	for _, m := range c {
		if !m.V2 && (born || !m.Systemd) {
			continue
		}
		dir, err := monitors(m, path)
		if err == nil {
			err = os.WriteFile(filepath.Join(dir, "cgroup.procs"), []byte(strconv.Itoa(pid)), 0)
		}
		if err != nil {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}
