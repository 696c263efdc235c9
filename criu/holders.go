package criu

import (
	"fmt"
	"os"
	"strings"
	"syscall"
)

// EndHolders kills the OCI runtimes and CRIUs that keep a file open which DumpOptions.Hold
// was, and reports whether there were any. Processes that such a CRIU works on may end with it.
func EndHolders(path string) (ended bool) {
	all, err := hostPids()
	if err != nil {
		return false
	}
	for _, p := range all {
		if name := comm(p); name != "criu" && !strings.HasPrefix(name, "runc") && name != "crun" && name != "exe" {
			continue
		}
		fds, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", p))
		if err != nil {
			continue
		}
		for _, fd := range fds {
			if link, err := os.Readlink(fmt.Sprintf("/proc/%d/fd/%s", p, fd.Name())); err == nil && link == path && p != os.Getpid() {
				ended = syscall.Kill(p, syscall.SIGKILL) == nil || ended
				break
			}
		}
	}
	return ended
}
