package oci

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
)

// cgroupParent holds one cgroup per container, named by its id, and one,
// "conmon", for the monitors. Ids are random, so that installations with other
// roots do not collide; for the same reason no one may take a cgroup found
// here for his own.
const cgroupParent = "/agentbox"

func cgroupPath(id string) string { return cgroupParent + "/" + id }

// cgroupMount is one mounted hierarchy.
type cgroupMount struct {
	path    string
	v2      bool
	freezer bool // the one to freeze by
	systemd bool // v1: name=systemd, by which systemd finds a service's processes
}

// cgroupMounts lists the hierarchies: one on a unified host, many under v1,
// many and one without controllers on a hybrid one.
func cgroupMounts() ([]cgroupMount, error) {
	infos, err := mountinfo.GetMounts(func(i *mountinfo.Info) (skip, stop bool) {
		return i.FSType != "cgroup" && i.FSType != "cgroup2", false
	})
	if err != nil {
		return nil, fmt.Errorf("list cgroup hierarchies: %w", err)
	}
	var list []cgroupMount
	v1freezer := false
	for _, i := range infos {
		opts := strings.Split(i.VFSOptions, ",")
		m := cgroupMount{path: i.Mountpoint, v2: i.FSType == "cgroup2"}
		m.freezer = slices.Contains(opts, "freezer")
		m.systemd = slices.Contains(opts, "name=systemd")
		v1freezer = v1freezer || m.freezer
		list = append(list, m)
	}
	for i := range list {
		list[i].freezer = list[i].freezer || list[i].v2 && !v1freezer
	}
	return list, nil
}

// unified tells whether v2 has the controllers.
func (b *Backend) unified() bool {
	return !slices.ContainsFunc(b.cgroups, func(m cgroupMount) bool { return !m.v2 })
}

// frozen tells whether a container's processes stand still.
func (b *Backend) frozen(id string) bool {
	for _, m := range b.cgroups {
		if !m.freezer {
			continue
		}
		file, want := "freezer.state", "FROZEN"
		if m.v2 {
			file, want = "cgroup.freeze", "1"
		}
		data, _, err := readSmall(filepath.Join(m.path, cgroupPath(id), file))
		if err == nil && strings.TrimSpace(string(data)) == want {
			return true
		}
	}
	return false
}

// thaw lets a container's processes go on.
func (b *Backend) thaw(id string) error {
	var errs []error
	for _, m := range b.cgroups {
		if !m.freezer {
			continue
		}
		file, value := "freezer.state", "THAWED"
		if m.v2 {
			file, value = "cgroup.freeze", "0"
		}
		err := os.WriteFile(filepath.Join(m.path, cgroupPath(id), file), []byte(value), 0)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// killAll sends SIGKILL to every process of a container's cgroups and thaws
// them. A frozen process takes the signal before anything else once it thaws,
// so a paused container ends without running another instruction. It returns
// how many processes it found.
func (b *Backend) killAll(id string) (int, error) {
	seen := map[int]bool{}
	for _, m := range b.cgroups {
		for _, dir := range subtree(filepath.Join(m.path, cgroupPath(id))) {
			for _, pid := range members(dir) {
				seen[pid] = true
			}
		}
	}
	var errs []error
	for pid := range seen {
		// The pid cannot have been reused for another's process as long as it
		// is listed in a cgroup that is ours alone; between the list and the
		// pidfd it can, so it is looked up again.
		p, err := openProcess(pid)
		if err != nil {
			continue
		}
		if p.inCgroup(id) {
			if err := p.kill(unix.SIGKILL); err != nil {
				errs = append(errs, err)
			}
		}
		p.close()
	}
	return len(seen), errors.Join(append(errs, b.thaw(id))...)
}

// emptyCgroups kills until no process is left.
func (b *Backend) emptyCgroups(ctx context.Context, id string) error {
	deadline := time.Now().Add(grace)
	for wait := time.Millisecond; ; wait = min(2*wait, 50*time.Millisecond) {
		n, err := b.killAll(id)
		if n == 0 {
			return err
		}
		if time.Now().After(deadline) {
			return errors.Join(err, fmt.Errorf("container %s: %d processes survive SIGKILL", id, n))
		}
		// v1 has no event for "empty" that does not need a release agent.
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(wait):
		}
	}
}

// removeCgroups removes a container's cgroups; their processes are gone.
func (b *Backend) removeCgroups(ctx context.Context, id string) error {
	var errs []error
	for _, m := range b.cgroups {
		dirs := subtree(filepath.Join(m.path, cgroupPath(id)))
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
	// A cgroup's link count tells how many others are in it; to list one
	// takes a stat of each of its many files.
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

func members(dir string) []int {
	data, _, err := readSmall(filepath.Join(dir, "cgroup.procs"))
	if err != nil {
		return nil
	}
	var pids []int
	for _, field := range strings.Fields(string(data)) {
		if pid, err := strconv.Atoi(field); err == nil && pid > 0 {
			pids = append(pids, pid)
		}
	}
	return pids
}

// monitorCgroup makes the cgroup of all conmons in one hierarchy. They have one
// of their own, so that ending the login session or the service in which
// agentbox was called does not end them.
func monitorCgroup(m cgroupMount) (dir string, err error) {
	dir = filepath.Join(m.path, cgroupParent, "conmon")
	return dir, os.MkdirAll(dir, 0o755)
}

// startMonitor starts a conmon, in its cgroup where the kernel has v2 (it can
// since 5.7). To be born there takes no time; to be moved takes some 10 ms,
// since the kernel waits for every processor to take notice. systemd, too,
// finds a service's processes by v2 if it is there, beside v1 as well.
func (b *Backend) startMonitor(cmd *exec.Cmd) (adopted bool, err error) {
	i := slices.IndexFunc(b.cgroups, func(m cgroupMount) bool { return m.v2 })
	if i < 0 {
		return false, cmd.Start()
	}
	dir, err := monitorCgroup(b.cgroups[i])
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
	again.Args, again.Env, again.Dir, again.Stderr, again.ExtraFiles = cmd.Args, cmd.Env, cmd.Dir, cmd.Stderr, cmd.ExtraFiles
	again.SysProcAttr = &plain
	*cmd = *again
	return false, cmd.Start()
}

// adoptMonitor moves a conmon to its cgroup. Where that cannot be done it stays
// in its caller's. One that was born there is moved to where it is: that makes
// the kernel wait now for what the runtime, which is about to move the
// container's process, then finds done, all processors having taken notice
// that a move is under way. Nobody needs to wait for that.
func (b *Backend) adoptMonitor(pid int, born bool) {
	for _, m := range b.cgroups {
		if !m.v2 && (born || !m.systemd) {
			continue
		}
		dir, err := monitorCgroup(m)
		if err == nil {
			err = os.WriteFile(filepath.Join(dir, "cgroup.procs"), []byte(strconv.Itoa(pid)), 0)
		}
		if err != nil {
			b.log.Debug("conmon stays in the caller's cgroup", "error", err)
		}
	}
}
