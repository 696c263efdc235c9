package kernel

import (
	"cmp"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/agentbox/agentbox/runtime/internal/record"
)

// Use is what a cgroup uses now; limits are its own, and 0: none.
type Use struct {
	CPU                 time.Duration // since it was made
	Memory, MemoryLimit int64         // bytes; files that are only cached, and not in use, do not count
	Pids, PidsLimit     int64         // processes and threads
}

// UseOf is that of a process's cgroups.
func (c Cgroups) UseOf(pid int) (Use, error) {
	data, _, err := record.Read(fmt.Sprintf("/proc/%d/cgroup", pid))
	return c.use(string(data)), err
}

func (c Cgroups) use(of string) (u Use) {
	for line := range strings.Lines(of) {
		f := strings.SplitN(strings.TrimSpace(line), ":", 3) // hierarchy:controllers:path
		if len(f) != 3 || f[2] == "/" {
			continue
		}
		controllers := strings.Split(f[1], ",")
		i := slices.IndexFunc(c, func(m Hierarchy) bool {
			return m.V2 && f[1] == "" || !m.V2 && slices.Contains(m.options, controllers[0])
		})
		if i < 0 {
			continue
		}
		dir := filepath.Join(c[i].Path, f[2])
		read := func(file, name string) int64 { return counter(filepath.Join(dir, file), name) }
		if c[i].V2 {
			// It is the last line. On a hybrid host v1 has the controllers, while v2 counts
			// processor time as well for the processes in it.
			u.CPU = cmp.Or(u.CPU, time.Duration(read("cpu.stat", "usage_usec"))*time.Microsecond)
			u.Memory = cmp.Or(u.Memory, read("memory.current", "")-read("memory.stat", "inactive_file"))
			u.MemoryLimit = cmp.Or(u.MemoryLimit, read("memory.max", ""))
			u.Pids, u.PidsLimit = cmp.Or(u.Pids, read("pids.current", "")), cmp.Or(u.PidsLimit, read("pids.max", ""))
			continue
		}
		for _, name := range controllers {
			switch name {
			case "cpuacct":
				u.CPU = time.Duration(read("cpuacct.usage", ""))
			case "memory":
				u.Memory = read("memory.usage_in_bytes", "") - read("memory.stat", "total_inactive_file")
				if n := read("memory.limit_in_bytes", ""); n < 1<<62 { // without one it is the most there can be
					u.MemoryLimit = n
				}
			case "pids":
				u.Pids, u.PidsLimit = read("pids.current", ""), read("pids.max", "")
			}
		}
	}
	u.Memory = max(u.Memory, 0) // the two were not read at one instant
	return u
}
