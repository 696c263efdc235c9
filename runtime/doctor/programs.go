package doctor

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/agentbox/agentbox/criu"
	"github.com/agentbox/agentbox/criu/host"
	"github.com/agentbox/agentbox/internal/fault"
)

// say runs a program and returns what it prints.
func say(ctx context.Context, path string, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, path, args...)
	cmd.WaitDelay = time.Second
	cmd.Env = host.Environ()
	out, err := cmd.CombinedOutput()
	return strings.TrimSpace(string(out)), err
}

func firstLine(s string) string {
	line, _, _ := strings.Cut(s, "\n")
	return strings.TrimSpace(line)
}

func runc(ctx context.Context) Check {
	const name = "runc"
	path, err := host.Find("runc", nil)
	if err != nil {
		return fail(name, installDeps, "not installed")
	}
	version, err := say(ctx, path, "--version")
	if err != nil {
		return fail(name, installDeps, "%s --version: %v: %s", path, err, firstLine(version))
	}
	help, err := say(ctx, path, "checkpoint", "--help")
	if err != nil || !strings.Contains(help, "--leave-running") {
		return fail(name, installDeps, "%s (%s) has no checkpoint command", path, firstLine(version))
	}
	var lacks []string
	for _, f := range []string{"tcp-established", "file-locks", "lazy-pages", "pre-dump"} {
		if !strings.Contains(help, "--"+f) {
			lacks = append(lacks, f)
		}
	}
	if len(lacks) > 0 {
		return warn(name, "Use runc 1.1 or newer.", "%s (%s) lacks %s", path, firstLine(version), strings.Join(lacks, ", "))
	}
	return ok(name, "%s (%s), checkpoints", strings.TrimPrefix(firstLine(version), "runc "), path)
}

// crun is an alternative, so that lacking it is nothing to warn of.
func crun(ctx context.Context) Check {
	const name = "crun"
	path, err := host.Find("crun", nil)
	if err != nil {
		return ok(name, "not installed (runc is used)")
	}
	version, err := say(ctx, path, "--version")
	if err != nil {
		return warn(name, "Reinstall or remove crun; runc is used.", "%s --version: %v", path, err)
	}
	if !strings.Contains(version, "+CRIU") {
		return ok(name, "%s (%s) is built without CRIU; runc is used", firstLine(version), path)
	}
	return ok(name, "%s (%s) with CRIU", firstLine(version), path)
}

func wrapper() Check {
	const name, program = "agentbox-runtime", "agentbox-runtime"
	if self, err := os.Executable(); err == nil {
		if path := filepath.Join(filepath.Dir(self), program); executable(path) {
			return ok(name, "%s", path)
		}
	}
	if path, err := host.Find(program, nil); err == nil {
		return ok(name, "%s", path)
	}
	return fail(name, "Run make build or make install.", "the runtime wrapper is neither beside agentbox nor in PATH: nothing can be restored")
}

func executable(path string) bool {
	st, err := os.Stat(path)
	return err == nil && st.Mode().IsRegular() && st.Mode()&0o111 != 0
}

func conmon(ctx context.Context) Check {
	const name = "conmon"
	path, err := host.Find("conmon", nil)
	if err != nil {
		return fail(name, installDeps, "not installed")
	}
	out, err := say(ctx, path, "--version")
	if err != nil {
		return fail(name, installDeps, "%s --version: %v: %s", path, err, firstLine(out))
	}
	return ok(name, "%s (%s)", strings.TrimPrefix(firstLine(out), "conmon "), path)
}

// criuChecks are all that CRIU tells, asked once.
func criuChecks(ctx context.Context) []Check {
	f, err := criu.Check(ctx)
	switch {
	case errors.Is(err, fault.ErrNotFound):
		return []Check{fail("criu", installDeps, "not installed: only files can be checkpointed")}
	case err != nil:
		return []Check{fail("criu", installDeps, "%v", err)}
	}
	return judgeCriu(f, func() bool { _, err := host.Find("iptables-restore", nil); return err == nil })
}

func judgeCriu(f criu.Features, haveIptables func() bool) []Check {
	what := fmt.Sprintf("version %s (%s)", f.VersionString(), f.Path)
	if !f.Works {
		return []Check{fail("criu", "Run scripts/install-deps.sh, which builds one that works.", "%s: `criu check` says: %s", what, f.Problem)}
	}
	checks := []Check{ok("criu", "%s, `criu check` passes", what)}
	if f.InetSockets {
		checks = append(checks, ok("sockets", "CRIU can dump TCP and UDP sockets on this kernel"))
	} else {
		checks = append(checks, fail("sockets", "Install CRIU 4.2 or newer (scripts/install-deps.sh builds one).",
			"CRIU %s cannot dump any TCP or UDP socket on Linux %s", f.VersionString(), f.KernelString))
	}
	switch {
	case f.Nftables:
		checks = append(checks, ok("network-lock", "CRIU uses nftables"))
	case haveIptables():
		checks = append(checks, ok("network-lock", "CRIU uses iptables"))
	default:
		checks = append(checks, warn("network-lock", "Install iptables, or a CRIU with nftables support.",
			"CRIU has neither nftables nor iptables: TCP connections cannot be checkpointed"))
	}
	if f.LazyPages {
		checks = append(checks, ok("lazy-pages", "memory can follow a restore (userfaultfd)"))
	} else {
		checks = append(checks, warn("lazy-pages", "Use a kernel with CONFIG_USERFAULTFD.", "restores must load all memory first"))
	}
	if f.DirtyTrack {
		checks = append(checks, ok("dirty-tracking", "memory can be dumped ahead and in increments"))
	} else {
		checks = append(checks, warn("dirty-tracking", "Use a kernel with CONFIG_MEM_SOFT_DIRTY.",
			"every full checkpoint writes all memory while the sandbox stands still"))
	}
	return checks
}
