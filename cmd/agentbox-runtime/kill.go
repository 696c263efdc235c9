package main

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// killTree kills a process and all its descendants, and removes the cgroups that a restore had
// put them into: the runtime, which does not know the container yet, would leave those behind. It
// lists the tree before it kills, because a dead parent's children cannot be told from others,
// and repeats until no process is left that was not yet killed.
func killTree(pid int) {
	killed := map[int]bool{}
	cgroups := map[string]bool{}
	for range 100 {
		fresh := 0
		for _, p := range tree(pid) {
			if !killed[p] {
				killed[p] = true
				fresh++
				for _, dir := range cgroupsOf(p) {
					cgroups[dir] = true
				}
				// Stopped first, so that it forks no more while the others are looked for.
				_ = syscall.Kill(p, syscall.SIGSTOP)
			}
		}
		if fresh == 0 {
			break
		}
	}
	for p := range killed {
		_ = syscall.Kill(p, syscall.SIGKILL)
	}
	for _, dir := range cgroupsOf(os.Getpid()) {
		delete(cgroups, dir) // inherited, not made by the restore
	}
	// A cgroup can be removed only after its last process has left, so poll.
	for end := time.Now().Add(2 * time.Second); len(cgroups) > 0 &&
		time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
		for dir := range cgroups {
			// Only empty ones can be removed, so nothing living is hurt.
			if err := os.Remove(dir); err == nil || errors.Is(err, fs.ErrNotExist) {
				delete(cgroups, dir)
			}
		}
	}
}

// cgroupsOf returns the directories of the cgroups that a process is in.
func cgroupsOf(pid int) (dirs []string) {
	mounts, err := os.ReadFile("/proc/self/mounts")
	if err != nil {
		return nil
	}
	memberships, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid))
	if err != nil {
		return nil
	}
	for _, line := range strings.Split(string(memberships), "\n") {
		f := strings.SplitN(line, ":", 3) // hierarchy:controllers:path
		if len(f) != 3 || strings.Trim(f[2], "/") == "" {
			continue
		}
		for _, m := range strings.Split(string(mounts), "\n") {
			mf := strings.Fields(m) // source target type options
			if len(mf) < 4 {
				continue
			}
			unified := f[1] == "" && mf[2] == "cgroup2"
			legacy := f[1] != "" && mf[2] == "cgroup" && hasAll(mf[3], f[1])
			if unified || legacy {
				dirs = append(dirs, filepath.Join(mf[1], f[2]))
			}
		}
	}
	return dirs
}

// hasAll reports whether the comma-separated have contains all of want.
func hasAll(have, want string) bool {
	for _, w := range strings.Split(want, ",") {
		if !slices.Contains(strings.Split(have, ","), w) {
			return false
		}
	}
	return true
}

// tree lists pid and its descendants.
func tree(pid int) []int {
	pids := []int{pid}
	for i := 0; i < len(pids); i++ {
		pids = append(pids, children(pids[i])...)
	}
	return pids
}

// children lists those of a process.
func children(pid int) (list []int) {
	tasks, _ := os.ReadDir(fmt.Sprintf("/proc/%d/task", pid))
	for _, t := range tasks {
		children, _ := os.ReadFile(fmt.Sprintf("/proc/%d/task/%s/children", pid, t.Name()))
		for _, f := range strings.Fields(string(children)) {
			if p, err := strconv.Atoi(f); err == nil {
				list = append(list, p)
			}
		}
	}
	return list
}
