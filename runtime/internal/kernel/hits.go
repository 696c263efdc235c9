package kernel

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

// Hits are how often the limits of a cgroup have come into force.
type Hits struct {
	OOMKills int64 `json:"oom_kills,omitempty"` // processes that the kernel killed for memory
	PidsMax  int64 `json:"pids_max,omitempty"`  // processes and threads that could not be made
}

// HitsOf returns what counts those of a process's cgroup since that was made,
// once the process has ended, too.
func (c Cgroups) HitsOf(pid int) (func() Hits, error) {
	paths, err := groupsOf(pid)
	return func() (h Hits) {
		for _, path := range paths {
			in := c.HitsIn(path)
			h.OOMKills, h.PidsMax = max(h.OOMKills, in.OOMKills), max(h.PidsMax, in.PidsMax)
		}
		return h
	}, err
}

// HitsIn are those of a container's cgroups.
func (c Cgroups) HitsIn(path string) (h Hits) {
	for _, m := range c {
		dir := filepath.Join(m.Path, path)
		// Each is in one hierarchy only. The first is v2's name, the second v1's.
		h.OOMKills = max(h.OOMKills, counter(filepath.Join(dir, "memory.events"), "oom_kill"),
			counter(filepath.Join(dir, "memory.oom_control"), "oom_kill"))
		h.PidsMax = max(h.PidsMax, counter(filepath.Join(dir, "pids.events"), "max"))
	}
	return h
}

// MembersWith lists the processes in a process's cgroups, itself included.
func (c Cgroups) MembersWith(pid int) ([]int, error) {
	paths, err := groupsOf(pid)
	var all []int
	errs := []error{err}
	for _, path := range paths {
		for _, m := range c {
			for _, dir := range subtree(filepath.Join(m.Path, path)) {
				pids, err := members(dir)
				all, errs = append(all, pids...), append(errs, err)
			}
		}
	}
	slices.Sort(all)
	return slices.Compact(all), errors.Join(errs...)
}

// groupsOf lists the cgroups of a process, which has the same path in most
// hierarchies, each once and without the roots.
func groupsOf(pid int) ([]string, error) {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid))
	if err != nil {
		return nil, err
	}
	var paths []string
	for line := range strings.Lines(strings.TrimSpace(string(data))) {
		_, rest, _ := strings.Cut(strings.TrimSpace(line), ":")
		if _, path, _ := strings.Cut(rest, ":"); path != "/" && !slices.Contains(paths, path) {
			paths = append(paths, path)
		}
	}
	return paths, nil
}

// counter reads one of the numbers in a file of NAME NUMBER lines, or the one
// number in a file; 0: it is not there.
func counter(file, name string) int64 {
	data, err := os.ReadFile(file)
	if err != nil {
		return 0
	}
	if name != "" {
		name += " "
	}
	for line := range strings.Lines(string(data)) {
		if n, ok := strings.CutPrefix(line, name); ok {
			v, _ := strconv.ParseInt(strings.TrimSpace(n), 10, 64) // the kernel wrote it
			return v
		}
	}
	return 0
}
