package criu

import (
	"bytes"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/internal/proc"
)

// Stray is a process in a container that does not descend from its init: an
// exec session attached from outside. A dump succeeds without it.
type Stray struct {
	Pid     int    `json:"pid"`     // on the host
	Cmdline string `json:"cmdline"` // words separated by spaces
}

// Strays lists the strays among pids or, when that is nil, among the members of the init's pid
// namespace (and of those nested in it). A process whose parent is a stray is one too.
func Strays(initPid int, pids []int) ([]Stray, error) {
	if pids == nil {
		var err error
		if pids, err = Members(initPid); err != nil {
			return nil, err
		}
	}
	parents := make(map[int]int, len(pids))
	for _, p := range pids {
		if st, err := proc.Read(p); err == nil && !st.Ended() {
			parents[p] = st.Parent
		}
	}
	if _, ok := parents[initPid]; !ok {
		if _, err := proc.Read(initPid); err != nil {
			return nil, fmt.Errorf("process %d: %w", initPid, fault.ErrNotFound)
		}
		parents[initPid] = 0
	}
	var strays []Stray
	for _, p := range pids {
		if _, alive := parents[p]; !alive {
			continue
		}
		// Up to the init, or to a parent that is not of the container. Frozen
		// processes have no new parents, others may for a moment form a circle.
		q := p
		for steps := 0; q != initPid && steps <= len(parents); steps++ {
			next, inside := parents[q]
			if !inside || next == 0 {
				break
			}
			q = next
		}
		if q != initPid {
			strays = append(strays, Stray{p, cmdline(p)})
		}
	}
	return strays, nil
}

// Members lists the processes of the pid namespace that initPid is in, those
// of namespaces nested in it included, by their pids on the host.
func Members(initPid int) ([]int, error) {
	ns, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/pid", initPid))
	if err != nil {
		return nil, fmt.Errorf("process %d: %w", initPid, fault.ErrNotFound)
	}
	depth := nsDepth(initPid)
	// Others may be in the namespace: it is the host's (--pid host), or another
	// container has joined it.
	group, among := cgroupOf(initPid), []int(nil)
	if group != "" && !slices.Contains(strings.Split(group, "/"), "..") { // else it lies outside of our cgroup namespace
		if among = groupPids(group); !slices.Contains(among, initPid) {
			among = nil // its hierarchy is mounted elsewhere
		}
	}
	if among == nil {
		if among, err = hostPids(); err != nil {
			return nil, err
		}
		if group != "" {
			among = slices.DeleteFunc(among, func(p int) bool { return p != initPid && !within(cgroupOf(p), group) })
		}
	}
	var members []int
	for _, p := range among {
		link, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/pid", p))
		if err != nil {
			continue // it has ended
		}
		if link == ns || nsDepth(p) > depth && descends(p, ns) {
			members = append(members, p)
		}
	}
	return members, nil
}

// groupPids lists the processes of a cgroup that cgroupOf has named, and of those
// in it, sorted. To ask each process of the host for its cgroup would take as long as
// there are processes, while the container may be standing still.
func groupPids(group string) (pids []int) {
	for _, hierarchy := range []string{"freezer", "unified", ""} { // the last is the unified one where there is no other
		_ = filepath.WalkDir(filepath.Join("/sys/fs/cgroup", hierarchy, group),
			func(path string, d fs.DirEntry, err error) error {
				if err != nil || !d.IsDir() {
					return nil // gone, or a file
				}
				// a threaded one has none: they are its parent's
				data, _ := os.ReadFile(filepath.Join(path, "cgroup.procs"))
				for _, field := range strings.Fields(string(data)) {
					if p, err := strconv.Atoi(field); err == nil && p > 0 {
						pids = append(pids, p)
					}
				}
				return nil
			})
		if len(pids) > 0 {
			break
		}
	}
	slices.Sort(pids)
	return slices.Compact(pids)
}

// cgroupOf returns the cgroup that a process is in, of the hierarchy of the
// freezer or, where there is none, the unified one; empty: the root, or unknown.
func cgroupOf(pid int) (group string) {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid))
	if err != nil {
		return ""
	}
	for line := range strings.Lines(string(data)) {
		f := strings.SplitN(strings.TrimSpace(line), ":", 3) // hierarchy:controllers:path
		if len(f) == 3 && (f[1] == "freezer" || f[1] == "" && group == "") {
			group = strings.TrimSuffix(f[2], "/")
		}
	}
	return group
}

func within(group, outer string) bool {
	return group == outer || strings.HasPrefix(group, outer+"/")
}

// traced returns a thread among the processes that another process traces, and
// the tracer; 0 when there is none.
func traced(pids []int) (thread, tracer int) {
	for _, p := range pids {
		tasks, err := os.ReadDir(fmt.Sprintf("/proc/%d/task", p))
		if err != nil {
			continue // it has ended
		}
		for _, t := range tasks {
			data, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%s/status", p, t.Name()))
			if err != nil {
				continue
			}
			_, after, _ := bytes.Cut(data, []byte("\nTracerPid:"))
			if f := bytes.Fields(after); len(f) > 0 && string(f[0]) != "0" {
				thread, _ = strconv.Atoi(t.Name())
				tracer, _ = strconv.Atoi(string(f[0]))
				return thread, tracer
			}
		}
	}
	return 0, 0
}

// nsDepth returns in how many pid namespaces, as seen from here, a process is.
func nsDepth(pid int) int {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return 0
	}
	for _, line := range strings.Split(string(data), "\n") {
		if ids, ok := strings.CutPrefix(line, "NSpid:"); ok {
			return len(strings.Fields(ids))
		}
	}
	return 0
}

// descends reports whether an ancestor of pid is in the pid namespace ns.
func descends(pid int, ns string) bool {
	for range 1 << 10 {
		st, err := proc.Read(pid)
		if err != nil || st.Parent <= 1 {
			return false
		}
		pid = st.Parent
		if link, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/pid", pid)); err == nil && link == ns {
			return true
		}
	}
	return false
}

func hostPids() ([]int, error) {
	d, err := os.Open("/proc")
	if err != nil {
		return nil, err
	}
	defer d.Close()
	names, err := d.Readdirnames(-1)
	if err != nil {
		return nil, err
	}
	var pids []int
	for _, n := range names {
		if p, err := strconv.Atoi(n); err == nil {
			pids = append(pids, p)
		}
	}
	return pids, nil
}

// cmdline returns a process's command line, bounded and printable.
func cmdline(pid int) string {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
	if err != nil || len(data) == 0 {
		comm, _ := os.ReadFile(fmt.Sprintf("/proc/%d/comm", pid))
		data = bytes.TrimSpace(comm)
	}
	s := strings.Map(func(r rune) rune {
		switch {
		case r == 0:
			return ' '
		case r < ' ' || r == 0x7f || r == '\uFFFD':
			return '?'
		}
		return r
	}, strings.TrimRight(string(data), "\x00"))
	if r := []rune(s); len(r) > 200 {
		s = string(r[:200]) + "..."
	}
	return s
}

// Live is one process of a running container.
type Live struct {
	Pid     int    // in the container's pid namespace
	Cmdline string // words separated by spaces
}

// Alive lists the processes of the container whose first process is initPid. Processes that end
// meanwhile are left out.
func Alive(initPid int) ([]Live, error) {
	pids, err := Members(initPid)
	if err != nil {
		return nil, err
	}
	var list []Live
	for _, pid := range pids {
		if st, err := proc.Read(pid); err != nil || st.Ended() {
			continue
		}
		data, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
		if err != nil {
			continue
		}
		_, rest, _ := strings.Cut(string(data), "\nNSpid:")
		line, _, _ := strings.Cut(rest, "\n")
		fields := strings.Fields(line)
		depth := nsDepth(initPid)
		if depth < 1 || len(fields) < depth {
			continue
		}
		inside, err := strconv.Atoi(fields[depth-1])
		if err != nil {
			continue
		}
		list = append(list, Live{inside, cmdline(pid)})
	}
	return list, nil
}
