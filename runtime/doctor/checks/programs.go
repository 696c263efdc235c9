package checks

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/agentbox/agentbox/criu"
	"github.com/agentbox/agentbox/criu/host"
	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/runtime/doctor"
)

// say runs a program and returns what it prints.
func say(ctx context.Context, path string, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, path, args...)
	cmd.WaitDelay = time.Second
	cmd.Env = host.Environ()
	out, err := cmd.CombinedOutput()
	if err != nil && ctx.Err() != nil {
		err = ctx.Err() // not that it was killed, for that
	}
	return strings.TrimSpace(string(out)), err
}

// broken is a program that fails, and how; or what is to be known of one that may
// only be slow.
func broken(name, remedy, path string, err error, said string) doctor.Check {
	if errors.Is(err, context.DeadlineExceeded) || errors.Is(err, context.Canceled) {
		return fail(name, "Try again when this machine has less to do; if it stays so, the program hangs.",
			"%s did not end in time", path)
	}
	return fail(name, remedy, "%s", strings.TrimSuffix(fmt.Sprintf("%s: %v: %s", path, err, firstLine(said)), ": "))
}

func firstLine(s string) string {
	line, _, _ := strings.Cut(s, "\n")
	return strings.TrimSpace(line)
}

func runc(ctx context.Context) doctor.Check {
	const name = "runc"
	path, err := host.Find("runc", nil)
	if err != nil {
		return fail(name, install("runc"), "not installed")
	}
	version, err := say(ctx, path, "--version")
	if err != nil {
		return broken(name, install("runc"), path+" --version", err, version)
	}
	help, err := say(ctx, path, "checkpoint", "--help")
	if ctx.Err() != nil {
		return broken(name, "", path+" checkpoint --help", err, help)
	}
	if err != nil || !strings.Contains(help, "--leave-running") {
		return fail(name, install("runc"), "%s (%s) has no checkpoint command", path, firstLine(version))
	}
	var lacks []string
	for _, f := range []string{"tcp-established", "file-locks"} {
		if !strings.Contains(help, "--"+f) {
			lacks = append(lacks, f)
		}
	}
	if len(lacks) > 0 {
		return warn(name, "Use runc 1.1 or newer.", "%s (%s) lacks %s", path, firstLine(version),
			strings.Join(lacks, ", "))
	}
	return ok(name, "%s (%s), checkpoints", strings.TrimPrefix(firstLine(version), "runc "), path)
}

// crun is an alternative, so that lacking it is nothing to warn of.
func crun(ctx context.Context) doctor.Check {
	const name = "crun"
	path, err := host.Find("crun", nil)
	if err != nil {
		return ok(name, "not installed (runc is used)")
	}
	version, err := say(ctx, path, "--version")
	if err != nil {
		c := broken(name, "Reinstall or remove crun; runc is used.", path+" --version", err, version)
		c.Status = doctor.Warn
		return c
	}
	if !strings.Contains(version, "+CRIU") {
		return ok(name, "%s (%s) is built without CRIU; runc is used", firstLine(version), path)
	}
	return ok(name, "%s (%s) with CRIU", firstLine(version), path)
}

func wrapper() doctor.Check {
	const name, program = "agentbox-runtime", "agentbox-runtime"
	if self, err := os.Executable(); err == nil {
		if path := filepath.Join(filepath.Dir(self), program); executable(path) {
			return ok(name, "%s", path)
		}
	}
	if path, err := host.Find(program, nil); err == nil {
		return ok(name, "%s", path)
	}
	return fail(name, "Install agentbox whole: agentbox-runtime belongs beside it (from source: make build).",
		"the runtime wrapper is neither beside agentbox nor in PATH: nothing can be restored")
}

func executable(path string) bool {
	st, err := os.Stat(path)
	return err == nil && st.Mode().IsRegular() && st.Mode()&0o111 != 0
}

func conmon(ctx context.Context) doctor.Check {
	const name = "conmon"
	path, err := host.Find("conmon", nil)
	if err != nil {
		return fail(name, install("conmon"), "not installed")
	}
	out, err := say(ctx, path, "--version")
	if err != nil {
		return broken(name, install("conmon"), path+" --version", err, out)
	}
	return ok(name, "%s (%s)", strings.TrimPrefix(firstLine(out), "conmon "), path)
}

// nsenter is what brings a process into the time namespace of a restored sandbox, for a
// runc before 1.3.
func nsenter(ctx context.Context) doctor.Check {
	const name, own = "nsenter", "/proc/self/ns/time"
	if _, err := os.Stat(own); errors.Is(err, fs.ErrNotExist) {
		return ok(name, "not needed: this kernel has no time namespaces")
	}
	path, err := host.Find(name, nil)
	if err != nil {
		return fail(name, install("util-linux"),
			"not installed: exec in a restored sandbox fails with a runc before 1.3")
	}
	if out, err := say(ctx, path, "--no-fork", "--time="+own, "--", "true"); err != nil {
		return broken(name, install("util-linux"), path+" --time", err, out)
	}
	return ok(name, "%s enters time namespaces", path)
}

// criuChecks returns all checks of CRIU, which is asked once.
func criuChecks(ctx context.Context) []doctor.Check {
	f, err := criu.Check(ctx)
	switch {
	case errors.Is(err, fault.ErrNotFound):
		return []doctor.Check{fail("criu", install("criu"), "not installed: only files can be checkpointed")}
	case err != nil:
		return []doctor.Check{broken("criu", newerCriu(), f.Path, err, "")}
	}
	return judgeCriu(f, func() bool { _, err := host.Find("iptables-restore", nil); return err == nil })
}

// newerCriu is the remedy for a CRIU that does not do on this kernel, which is mostly
// too old for it. The distribution has no other then.
func newerCriu() string {
	if script := depsScript(self()); script != "" {
		return "Run " + script + ", which builds one that works."
	}
	return "Install CRIU 4.2 or newer: of a later release of the distribution, or built from source (https://criu.org/Installation)."
}

func judgeCriu(f criu.Features, haveIptables func() bool) []doctor.Check {
	what := fmt.Sprintf("version %s (%s)", f.VersionString(), f.Path)
	if !f.Works {
		return []doctor.Check{fail("criu", newerCriu(), "%s: `criu check` says: %s", what, f.Problem)}
	}
	checks := []doctor.Check{ok("criu", "%s, `criu check` passes", what)}
	if f.InetSockets {
		checks = append(checks, ok("sockets", "CRIU can dump TCP and UDP sockets on this kernel"))
	} else {
		checks = append(checks, fail("sockets", newerCriu(),
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
	// No warning: a kernel need not be changed for what agentbox does not use.
	for _, c := range []struct {
		name, what string
		has        bool
	}{
		{"lazy-pages", "load memory after a restore", f.LazyPages},
		{"dirty-tracking", "dump memory ahead and in increments", f.DirtyTrack},
	} {
		word := "can"
		if !c.has {
			word = "cannot"
		}
		checks = append(checks, ok(c.name,
			"CRIU %s %s on this kernel; agentbox does not make use of it yet", word, c.what))
	}
	return checks
}
