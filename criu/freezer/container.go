// Package freezer freezes and thaws the processes of a container by its cgroup, without its OCI
// runtime. That takes a fraction of a millisecond, where a call of the runtime takes tens. It
// leaves nothing behind that would still freeze after its caller was killed. The runtimes read
// the state from the same cgroup, so what they report stays true.
//
// Open and Of find a Container, by the runtime's state or by a process; Freeze and Thaw are its
// methods. A Tracee is one thread of a frozen container in which system calls can be run.
package freezer

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/internal/proc"
)

// Container is what an OCI runtime has recorded of a container.
type Container struct {
	ID    string
	Pid   int    // of its init
	start uint64 // of its init, in clock ticks since boot: a pid is soon another's
	dir   string // its cgroup in the hierarchy that freezes
	v2    bool
}

const cgroupRoot = "/sys/fs/cgroup"

// Open looks a container up in the state directory (--root) of runc or crun.
// One that is not there is ErrNotFound.
func Open(root, id string) (Container, error) {
	c := Container{ID: id}
	if id == "" || id != filepath.Base(id) || id == "." || id == ".." {
		return c, fmt.Errorf("container %q: %w", id, fault.ErrInvalid)
	}
	dir := filepath.Join(root, id)
	err := c.runc(filepath.Join(dir, "state.json"))
	if errors.Is(err, fs.ErrNotExist) {
		err = c.crun(filepath.Join(dir, "status"))
	}
	if errors.Is(err, fs.ErrNotExist) {
		if _, e := os.Stat(dir); errors.Is(e, fs.ErrNotExist) {
			return c, fmt.Errorf("container %s does not exist: %w", id, fault.ErrNotFound)
		}
		return c, fmt.Errorf("container %s: %w: %s holds no state of runc or crun", id, fault.ErrUnsupported, dir)
	}
	if err != nil {
		return c, fmt.Errorf("container %s: %w", id, err)
	}
	if c.Pid <= 0 || !filepath.IsAbs(c.dir) {
		return c, fmt.Errorf("container %s: %w: its runtime has recorded no process or no cgroup that freezes",
			id, fault.ErrUnsupported)
	}
	return c, nil
}

// runc reads the record of runc.
func (c *Container) runc(path string) error {
	var s struct {
		Pid   int               `json:"init_process_pid"`
		Start uint64            `json:"init_process_start"`
		Paths map[string]string `json:"cgroup_paths"` // by controller; v2: ""
	}
	if err := readJSON(path, &s); err != nil {
		return err
	}
	c.Pid, c.start, c.dir = s.Pid, s.Start, s.Paths["freezer"]
	if c.dir == "" {
		c.dir, c.v2 = s.Paths[""], true
	}
	return nil
}

// Cgroups returns the cgroups of a container that its OCI runtime has recorded, by
// controller; v2: "". None where the runtime keeps no such record.
func Cgroups(root, id string) (map[string]string, error) {
	var s struct {
		Paths map[string]string `json:"cgroup_paths"`
	}
	err := readJSON(filepath.Join(root, filepath.Base(id), "state.json"), &s)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	return s.Paths, err
}

// crun reads the record of crun.
func (c *Container) crun(path string) error {
	var s struct {
		Pid    int    `json:"pid"`
		Start  uint64 `json:"process-start-time"`
		Cgroup string `json:"cgroup-path"`
	}
	if err := readJSON(path, &s); err != nil {
		return err
	}
	c.Pid, c.start = s.Pid, s.Start
	if s.Cgroup == "" {
		return nil
	}
	c.dir = filepath.Join(cgroupRoot, "freezer", s.Cgroup)
	if _, err := os.Stat(filepath.Join(cgroupRoot, "freezer", "cgroup.procs")); err != nil {
		c.dir, c.v2 = filepath.Join(cgroupRoot, s.Cgroup), true
	}
	return nil
}

const maxRecord = 16 << 20

func readJSON(path string, into any) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, maxRecord))
	if err != nil {
		return err
	}
	if err := json.Unmarshal(data, into); err != nil {
		return fmt.Errorf("%s: %w: %w", path, fault.ErrCorrupt, err)
	}
	return nil
}

// Of returns the container whose first process is pid, which is in the container's cgroup.
func Of(pid int) (Container, error) {
	c := Container{ID: "of process " + strconv.Itoa(pid), Pid: pid}
	data, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/cgroup")
	if err != nil {
		return c, err
	}
	var is bool
	if _, c.start, is = process(pid); !is {
		return c, fmt.Errorf("process %d: %w", pid, fault.ErrNotFound)
	}
	for line := range strings.Lines(string(data)) {
		f := strings.SplitN(strings.TrimSpace(line), ":", 3) // hierarchy:controllers:path
		switch {
		case len(f) != 3:
		case f[1] == "freezer":
			c.dir, c.v2 = filepath.Join(cgroupRoot, "freezer", f[2]), false
			return c, nil
		case f[1] == "":
			c.dir, c.v2 = filepath.Join(cgroupRoot, f[2]), true
		}
	}
	return c, nil
}

// Alive reports whether the container's init is there and has not ended.
func (c Container) Alive() bool {
	state, start, ok := process(c.Pid)
	return ok && start == c.start && (state != "Z" && state != "X" || ThreadsLive(c.Pid))
}

// ThreadsLive reports whether a process whose first thread has ended goes on: the others
// do so without it, and one that executes a program takes its place in a moment.
func ThreadsLive(pid int) bool {
	tasks, err := os.ReadDir(fmt.Sprintf("/proc/%d/task", pid))
	if err != nil {
		return false
	}
	for _, t := range tasks {
		tid, err := strconv.Atoi(t.Name())
		if err != nil || tid == pid {
			continue
		}
		if state, _, ok := thread(tid); ok && state != "Z" && state != "X" {
			return true
		}
	}
	return false
}

// Processes lists those in the container's cgroup and in cgroups within it. It
// is all of them while the container is frozen.
func (c Container) Processes() ([]int, error) {
	pids, err := c.members("cgroup.procs")
	if err != nil {
		return nil, fmt.Errorf("container %s: %w", c.ID, err)
	}
	return pids, nil
}

// members reads a file of the container's cgroup and of cgroups in it. One of
// those may go meanwhile, empty as it is then; and one that is threaded has no
// list of processes: they are in that of the cgroup above.
func (c Container) members(name string) (all []int, err error) {
	err = filepath.WalkDir(c.dir, func(path string, d fs.DirEntry, err error) error {
		if path != c.dir && errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err != nil || d.Name() != name {
			return err
		}
		data, err := os.ReadFile(path)
		if filepath.Dir(path) != c.dir && (errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENODEV) ||
			errors.Is(err, unix.EOPNOTSUPP)) {
			return nil
		}
		for _, f := range strings.Fields(string(data)) {
			if id, e := strconv.Atoi(f); e == nil && id > 0 {
				all = append(all, id)
			}
		}
		return err
	})
	return all, err
}

// process reads the state of a process and when it started.
func process(pid int) (state string, start uint64, ok bool) {
	return known(proc.Read(pid))
}

// thread is process of a single thread, which costs less.
func thread(tid int) (state string, start uint64, ok bool) {
	return known(proc.ReadThread(tid))
}

func known(p proc.Stat, err error) (state string, start uint64, ok bool) {
	if err != nil {
		return "", 0, false
	}
	return string(p.State), p.Start, true
}

func (c Container) stopped() error {
	return fmt.Errorf("container %s is stopped: %w", c.ID, fault.ErrState)
}

// Leave moves processes out of the hierarchy's cgroup that Freeze freezes, to where
// another process is.
func (c Container) Leave(to string, pids ...int) error {
	data, err := os.ReadFile("/proc/" + to + "/cgroup")
	if err != nil {
		return err
	}
	group, found := "", false
	for line := range strings.Lines(string(data)) {
		f := strings.SplitN(strings.TrimSpace(line), ":", 3) // hierarchy:controllers:path
		if len(f) == 3 && (c.v2 && f[1] == "" || !c.v2 && f[1] == "freezer") {
			group, found = f[2], true
		}
	}
	mount, err := mountOf(c.dir)
	if err != nil || !found {
		return errors.Join(err, fmt.Errorf("cgroup of process %s is not known", to))
	}
	for _, pid := range pids {
		if err := os.WriteFile(filepath.Join(mount, group, "cgroup.procs"), []byte(strconv.Itoa(pid)), 0); err != nil {
			return fmt.Errorf("move process %d out of container %s: %w", pid, c.ID, err)
		}
	}
	return nil
}

// mountOf returns the mount that a directory of a cgroup hierarchy lies on.
func mountOf(dir string) (string, error) {
	var st unix.Stat_t
	if err := unix.Stat(dir, &st); err != nil {
		return "", err
	}
	for dev := st.Dev; ; dir = filepath.Dir(dir) {
		if err := unix.Stat(filepath.Dir(dir), &st); err != nil || st.Dev != dev {
			return dir, err
		}
	}
}
