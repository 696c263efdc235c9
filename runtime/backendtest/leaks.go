package backendtest

import (
	"bufio"
	"bytes"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/moby/sys/signal"
)

// leaks fails the case for everything on this host that still carries its
// mark: mounts, processes, cgroups, network devices and files.
func (e *bench) leaks(before map[string]bool) {
	e.Helper()
	var found []string
	// A monitor ends a moment after what it watched; nothing announces it.
	for deadline := time.Now().Add(patience); ; time.Sleep(20 * time.Millisecond) {
		if found = e.search(before); len(found) == 0 {
			return
		}
		if time.Now().After(deadline) {
			break
		}
	}
	for _, f := range found {
		e.Errorf("left behind: %s", f)
	}
}

func (e *bench) search(before map[string]bool) (found []string) {
	found = append(found, mountsUnder(e.root)...)
	found = append(found, e.processes()...)
	if e.f.Leaks != nil {
		found = append(found, e.f.Leaks(e.T, e.ids)...)
	}
	for _, id := range e.ids {
		found = append(found, cgroupsNamed(id)...)
	}
	// Devices of other tests come and go beside ours: only those that are
	// named after one of our ids are ours.
	for name := range snapshot() {
		for _, id := range e.ids {
			if !before[name] && strings.Contains(name, id[:8]) {
				found = append(found, "network device "+name)
			}
		}
	}
	for _, id := range e.ids {
		_ = filepath.WalkDir(e.root, func(path string, d fs.DirEntry, err error) error {
			// Two kinds of names outlive their owner: a lock file cannot be deleted without a
			// race, and a backend may keep the exit code of a removed container for callers
			// still in Wait.
			if err == nil && !d.IsDir() && strings.Contains(path, id) && !strings.Contains(path, "/locks/") &&
				!strings.Contains(path, "/run/exits/") {
				found = append(found, "file "+path)
			}
			return nil
		})
	}
	return found
}

// mountsUnder lists this host's mounts below dir.
func mountsUnder(dir string) (found []string) {
	b, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return []string{err.Error()}
	}
	for s := bufio.NewScanner(bytes.NewReader(b)); s.Scan(); {
		f := strings.Fields(s.Text())
		if len(f) > 4 && strings.HasPrefix(f[4], dir+"/") {
			found = append(found, "mount "+f[4])
		}
	}
	return found
}

// overlaysOn lists this host's overlay mounts over an upperdir.
func overlaysOn(upper string) (found []string) {
	b, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return []string{err.Error()}
	}
	for s := bufio.NewScanner(bytes.NewReader(b)); s.Scan(); {
		if strings.Contains(s.Text(), "upperdir="+upper+",") {
			found = append(found, "overlay "+strings.Fields(s.Text())[4])
		}
	}
	return found
}

// size is a file's; one that is not there has none.
func size(path string) int64 {
	st, err := os.Stat(path)
	if err != nil {
		return 0
	}
	return st.Size()
}

// alive reports whether a process runs, or is stopped.
func alive(pid int) bool {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	return err == nil && !strings.Contains(string(stat), ") Z ")
}

// signalProcess sends a signal from the host.
func signalProcess(pid int, name string) error {
	sig, err := signal.ParseSignal(name)
	if err != nil {
		return err
	}
	return syscall.Kill(pid, sig)
}

// processes lists the processes that have the case's mark in their environment
// or its root in their command line, except this one.
func (e *bench) processes() (found []string) {
	dirs, _ := filepath.Glob("/proc/[0-9]*")
	for _, dir := range dirs {
		if filepath.Base(dir) == fmt.Sprint(os.Getpid()) {
			continue
		}
		cmdline, _ := os.ReadFile(dir + "/cmdline")
		environ, _ := os.ReadFile(dir + "/environ")
		if bytes.Contains(environ, []byte(e.mark)) || bytes.Contains(cmdline, []byte(e.root+"/")) {
			found = append(found, fmt.Sprintf("process %s: %s", filepath.Base(dir),
				bytes.ReplaceAll(cmdline, []byte{0}, []byte{' '})))
		}
	}
	return found
}

// cgroupsNamed lists the cgroups with an id in their name.
func cgroupsNamed(id string) (found []string) {
	_ = filepath.WalkDir("/sys/fs/cgroup", func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return nil // it went away while we walked
		}
		if d.IsDir() && strings.Contains(d.Name(), id) {
			found = append(found, "cgroup "+path)
			return fs.SkipDir
		}
		return nil
	})
	return found
}

// snapshot is the set of network devices.
func snapshot() map[string]bool {
	set := map[string]bool{}
	links, _ := net.Interfaces()
	for _, l := range links {
		set[l.Name] = true
	}
	return set
}
