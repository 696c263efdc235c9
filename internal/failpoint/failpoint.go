//go:build failpoint

// Package failpoint lets a test break agentbox at a named instant.
//
// Binaries built with the tag "failpoint" obey AGENTBOX_FAILPOINT, a list of
// NAME=ACTION separated by commas; all others compile the calls away. Actions:
// "kill" (SIGKILL to this process), "stop" (SIGSTOP, until SIGCONT arrives),
// "error" (Hit returns an error), "enospc" (Hit returns ENOSPC), "panic".
package failpoint

import (
	"fmt"
	"os"
	"runtime"
	"strings"
	"syscall"
)

// Hit is the named instant. It returns nil unless a test asked otherwise.
func Hit(name string) error {
	for _, p := range strings.Split(os.Getenv("AGENTBOX_FAILPOINT"), ",") {
		n, action, _ := strings.Cut(p, "=")
		if n != name {
			continue
		}
		switch action {
		case "kill":
			_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
			select {}
		case "stop":
			// To this thread: one sent to the process may be taken by another, and
			// this one would go on for a while.
			runtime.LockOSThread()
			_ = syscall.Tgkill(os.Getpid(), syscall.Gettid(), syscall.SIGSTOP)
			runtime.UnlockOSThread()
			return nil
		case "panic":
			panic("failpoint " + name)
		case "enospc":
			return fmt.Errorf("failpoint %s: %w", name, syscall.ENOSPC)
		default:
			return fmt.Errorf("failpoint %s", name)
		}
	}
	return nil
}
