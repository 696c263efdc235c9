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

	"github.com/agentbox/agentbox/criu/host"
	"github.com/agentbox/agentbox/internal/proc"
)

// sight is what is seen of a restore under way.
type sight struct {
	runtime int    // the OCI runtime's process
	id      string // of the container
	log     string // CRIU's
	criu    int
	gone    int             // how often in a row there was none, though it has not finished
	ended   int             // how often in a row it was one that a signal has ended
	cgroups map[string]bool // of the container, that CRIU was put into
}

// endsItself is how many looks a runtime has to end whose CRIU has logged why it failed.
const endsItself = int(killLimit / lookAgain)

// died looks at the runtime's CRIU, and reports whether a signal has ended it.
func (s *sight) died() bool {
	// The runtime adopts what a CRIU leaves that has ended, and waits as long as that keeps
	// its connection open.
	for _, p := range children(s.runtime) {
		_, _ = host.EndOrphan(p) // it is tried again
	}
	if _, err := os.Stat(fmt.Sprintf("/proc/%d", s.criu)); err != nil {
		s.criu = criuBelow(s.runtime) // the runtime has asked another one for its version before
	}
	if s.criu == 0 {
		if silent(s.log) {
			s.gone++
		}
		return s.gone > 2
	}
	s.gone = 0
	for _, dir := range cgroupsOf(s.criu) {
		if strings.Contains(filepath.Base(dir), s.id) {
			if s.cgroups == nil {
				s.cgroups = map[string]bool{}
			}
			s.cgroups[dir] = true
		}
	}
	p, err := proc.Read(s.criu)
	if err != nil || p.State != 'Z' || !syscall.WaitStatus(p.Exit).Signaled() {
		s.ended = 0
		return false
	}
	// A CRIU that fails kills those that it has forked, and they are called the same: the runtime
	// is about to end by itself.
	s.ended++
	return silent(s.log) || s.ended > endsItself
}

// criuBelow finds the CRIU that a runtime has begun; 0: none.
func criuBelow(runtime int) int {
	for _, p := range tree(runtime)[1:] {
		if name, _ := os.ReadFile(fmt.Sprintf("/proc/%d/comm", p)); string(name) == "criu\n" {
			return p
		}
	}
	return 0
}

// clear kills what a failed restore, whose parent may have ended, has left in the container's
// cgroups, and removes the cgroups.
func (s *sight) clear() {
	for end := time.Now().Add(killLimit); len(s.cgroups) > 0 &&
		time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
		for dir := range s.cgroups {
			if cleared(dir) {
				delete(s.cgroups, dir)
			}
		}
	}
}

// cleared kills what is in a cgroup and in those below, and reports whether they are gone.
func cleared(dir string) bool {
	var dirs []string
	_ = filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err == nil && d.IsDir() {
			dirs = append(dirs, path)
		}
		return nil // one may go meanwhile
	})
	for _, dir := range slices.Backward(dirs) {
		procs, _ := os.ReadFile(filepath.Join(dir, "cgroup.procs"))
		for _, field := range strings.Fields(string(procs)) {
			if p, err := strconv.Atoi(field); err == nil && p > 0 {
				_ = syscall.Kill(p, syscall.SIGKILL)
			}
		}
		// Frozen they would not end.
		if f, err := os.OpenFile(filepath.Join(dir, "freezer.state"), os.O_WRONLY, 0); err == nil {
			_, _ = f.WriteString("THAWED")
			_ = f.Close()
		}
		_ = os.Remove(dir)
	}
	_, err := os.Lstat(dir)
	return errors.Is(err, fs.ErrNotExist)
}
