// Package checks finds out whether this host can run, checkpoint and restore
// sandboxes, and what is missing if it cannot.
//
// Every precondition is one doctor.Check with one line of detail and, unless all is
// well, one line of remedy. A failed check means that the main job cannot run;
// a warning, that something does not work or costs more. Checks try the real
// thing where that is cheap (an overlay is mounted, a NAT rule is set in a
// network namespace of its own) and leave nothing behind.
package checks

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/agentbox/agentbox/internal/guard"
	"github.com/agentbox/agentbox/runtime/doctor"
)

// limit bounds all checks together, so that a hanging program cannot hang the doctor.
// They run at the same time and take a second; what is merely slow, as an emulated
// machine with much else to do, is not to be taken for what does not work.
const limit = time.Minute

// Examine checks the host for an installation whose state is below root.
// Cancelling ctx makes the checks that still run fail.
func Examine(ctx context.Context, root string) doctor.Report {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	probes := []func() []doctor.Check{
		one(user),
		one(kernel),
		one(func() doctor.Check { return overlayfs(root) }),
		one(cgroups),
		one(capabilities),
		one(protections),
		one(func() doctor.Check { return runc(ctx) }),
		one(func() doctor.Check { return crun(ctx) }),
		one(wrapper),
		one(func() doctor.Check { return conmon(ctx) }),
		one(func() doctor.Check { return nsenter(ctx) }),
		func() []doctor.Check { return criuChecks(ctx) },
		one(nat),
		one(forwarding),
		one(func() doctor.Check { return userNamespaces(ctx, root) }),
		one(func() doctor.Check { return disk(root) }),
		one(func() doctor.Check { return quota(root) }),
	}
	results := make([][]doctor.Check, len(probes))
	var wg guard.WaitGroup
	for i, probe := range probes {
		wg.Go(func() { results[i] = probe() })
	}
	wg.Wait()
	report := doctor.Report{OK: true}
	for _, r := range results {
		report.Checks = append(report.Checks, r...)
	}
	for _, c := range report.Checks {
		if c.Status == doctor.Fail {
			report.OK = false
		}
	}
	return report
}

func one(probe func() doctor.Check) func() []doctor.Check {
	return func() []doctor.Check { return []doctor.Check{probe()} }
}

func ok(name, format string, args ...any) doctor.Check {
	return doctor.Check{Name: name, Status: doctor.OK, Detail: fmt.Sprintf(format, args...)}
}

func warn(name, remedy, format string, args ...any) doctor.Check {
	return doctor.Check{Name: name, Status: doctor.Warn, Detail: fmt.Sprintf(format, args...), Remedy: remedy}
}

func fail(name, remedy, format string, args ...any) doctor.Check {
	return doctor.Check{Name: name, Status: doctor.Fail, Detail: fmt.Sprintf(format, args...), Remedy: remedy}
}

// install is the remedy for a program that is missing or does not work. A host with agentbox
// from a package lacks the script that knows more.
func install(pkg string) string {
	if script := depsScript(self()); script != "" {
		return "Run " + script + "."
	}
	return fmt.Sprintf("Install %s (Debian, Ubuntu: apt-get install %[1]s).", pkg)
}

// self returns the path of this program, or "" if it is unknown.
func self() string {
	path, _ := os.Executable()
	return path
}

// depsScript is scripts/install-deps.sh of the tree in whose bin a program is; empty:
// it is in none.
func depsScript(program string) string {
	path := filepath.Join(filepath.Dir(filepath.Dir(program)), "scripts", "install-deps.sh")
	if !executable(path) {
		return ""
	}
	return path
}
