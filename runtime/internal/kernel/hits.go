package kernel

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// Hits are how often the limits of a cgroup have come into force.
type Hits struct {
	OOMKills int64 // processes that the kernel killed for memory
	PidsMax  int64 // processes and threads that could not be made
}

// HitsOf are those of a process's cgroup, since that was made.
func (c Cgroups) HitsOf(pid int) (h Hits, err error) {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid))
	if err != nil {
		return h, err
	}
	for line := range strings.Lines(strings.TrimSpace(string(data))) {
		_, rest, _ := strings.Cut(strings.TrimSpace(line), ":")
		_, path, _ := strings.Cut(rest, ":")
		for _, m := range c {
			dir := filepath.Join(m.Path, path)
			// Each is in one hierarchy only. The first is v2's name, the second v1's.
			h.OOMKills = max(h.OOMKills, counter(filepath.Join(dir, "memory.events"), "oom_kill"), counter(filepath.Join(dir, "memory.oom_control"), "oom_kill"))
			h.PidsMax = max(h.PidsMax, counter(filepath.Join(dir, "pids.events"), "max"))
		}
	}
	return h, nil
}

// counter reads one of the numbers in a file of NAME NUMBER lines; 0: it is not
// there.
func counter(file, name string) int64 {
	data, err := os.ReadFile(file)
	if err != nil {
		return 0
	}
	for line := range strings.Lines(string(data)) {
		if n, ok := strings.CutPrefix(line, name+" "); ok {
			v, _ := strconv.ParseInt(strings.TrimSpace(n), 10, 64) // the kernel wrote it
			return v
		}
	}
	return 0
}
