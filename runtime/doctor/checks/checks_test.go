package checks

import (
	"context"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/criu"
	"github.com/agentbox/agentbox/runtime/doctor"
)

func root(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Fatal("this test mounts filesystems: run it as root")
	}
}

func TestExamine(t *testing.T) {
	root(t)
	dir := filepath.Join(t.TempDir(), "not", "there", "yet")
	start := time.Now()
	r := Examine(context.Background(), dir)
	took := time.Since(start)
	seen := map[string]bool{}
	for _, c := range r.Checks {
		t.Logf("%-5s %-17s %s  %s", c.Status, c.Name, c.Detail, c.Remedy)
		if seen[c.Name] || c.Detail == "" || strings.ContainsAny(c.Detail+c.Remedy, "\n\r") {
			t.Errorf("%+v", c)
		}
		if c.Status == doctor.OK && c.Remedy != "" {
			t.Errorf("a remedy for what is well: %+v", c)
		}
		seen[c.Name] = true
	}
	for _, name := range []string{
		"root", "kernel", "overlayfs", "userns", "cgroups", "capabilities", "protections", "runc", "crun", "conmon",
		"criu", "nat", "ip_forward", "disk", "quota", "agentbox-runtime",
	} {
		if !seen[name] {
			t.Errorf("no check %s", name)
		}
	}
	if took > 20*time.Second {
		t.Errorf("it took %v", took)
	}
	if entries, err := os.ReadDir(filepath.Dir(filepath.Dir(filepath.Dir(dir)))); err != nil || len(entries) != 0 {
		t.Errorf("left behind: %v %v", entries, err)
	}
	mounts, err := os.ReadFile("/proc/self/mounts")
	if err != nil || strings.Contains(string(mounts), t.TempDir()) {
		t.Error("left mounted")
	}
	data, err := json.Marshal(r)
	if err != nil || !strings.Contains(string(data),
		`"checks":[{"name":"root","status":"ok","detail":"running as root"}`) {
		t.Errorf("%s %v", data, err)
	}
}

func TestNothingInstalled(t *testing.T) {
	ctx := context.Background()
	// The directories that are always searched have the real programs, so
	// broken ones go before them.
	dir := t.TempDir()
	for _, p := range []string{"runc", "conmon", "criu", "crun", "nsenter"} {
		if err := os.WriteFile(filepath.Join(dir, p),
			[]byte("#!/bin/sh\necho broken >&2\nexit 3\n"), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	t.Setenv("PATH", dir+":/usr/local/sbin")
	for _, c := range []doctor.Check{runc(ctx), conmon(ctx), nsenter(ctx), criuChecks(ctx)[0]} {
		if c.Status != doctor.Fail || c.Remedy == "" {
			t.Errorf("%+v", c)
		}
	}
	if c := crun(ctx); c.Status != doctor.Warn {
		t.Errorf("%+v", c)
	}
}

// A slow program is not reported as broken: reinstalling it would not help.
func TestSlow(t *testing.T) {
	dir := t.TempDir()
	for _, p := range []string{"runc", "conmon", "criu", "crun", "nsenter"} {
		if err := os.WriteFile(filepath.Join(dir, p), []byte("#!/bin/sh\nexec sleep 100\n"), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	t.Setenv("PATH", dir+":"+os.Getenv("PATH"))
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	for _, c := range []doctor.Check{runc(ctx), conmon(ctx), crun(ctx), nsenter(ctx), criuChecks(ctx)[0]} {
		if c.Status == doctor.OK || !strings.Contains(c.Detail, dir+"/"+c.Name) ||
			!strings.Contains(c.Detail, "did not end in time") || !strings.Contains(c.Remedy, "Try again") {
			t.Errorf("%+v", c)
		}
	}
}

// The remedy names what the user has: the script of a tree, else the package.
func TestRemedy(t *testing.T) {
	if got := install("runc"); got != "Install runc (Debian, Ubuntu: apt-get install runc)." {
		t.Errorf("for runc: %s", got)
	}
	if got := newerCriu(); !strings.Contains(got, "https://criu.org/Installation") {
		t.Errorf("for CRIU: %s", got)
	}
	tree := t.TempDir()
	script, program := filepath.Join(tree, "scripts", "install-deps.sh"), filepath.Join(tree, "bin", "agentbox")
	if got := depsScript(program); got != "" {
		t.Errorf("a script that is not there: %s", got)
	}
	if err := os.Mkdir(filepath.Dir(script), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(script, nil, 0o755); err != nil {
		t.Fatal(err)
	}
	if got := depsScript(program); got != script {
		t.Errorf("the script of the tree is %q", got)
	}
}

func TestOldRunc(t *testing.T) {
	dir := t.TempDir()
	t.Setenv("PATH", dir+":/usr/local/sbin")
	for help, want := range map[string]doctor.Status{
		"--leave-running": doctor.Warn, "unknown command": doctor.Fail,
		"--leave-running --tcp-established --file-locks --lazy-pages --pre-dump": doctor.OK,
	} {
		script := "#!/bin/sh\n[ $1 = --version ] && echo runc version 1.0 || echo ' " + help + "'\n"
		if err := os.WriteFile(filepath.Join(dir, "runc"), []byte(script), 0o755); err != nil {
			t.Fatal(err)
		}
		if c := runc(context.Background()); c.Status != want {
			t.Errorf("%q: %+v", help, c)
		}
	}
}

// An overlay upon an overlay's upperdir, or on a filesystem without trusted
// attributes, must not pass.
func TestOverlayRefused(t *testing.T) {
	root(t)
	dir := t.TempDir()
	if err := unix.Mount("proc", dir, "proc", 0, ""); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unix.Unmount(dir, unix.MNT_DETACH) }()
	if c := overlayfs(dir); c.Status != doctor.Fail || c.Remedy == "" {
		t.Errorf("%+v", c)
	}
}

func TestJudgeCapabilities(t *testing.T) {
	all := func(int) bool { return true }
	if c := judge("c", all); c.Status != doctor.OK {
		t.Errorf("%+v", c)
	}
	c := judge("c", func(n int) bool { return n != unix.CAP_SYS_RESOURCE })
	if c.Status != doctor.Warn || !strings.Contains(c.Detail, "another user than root cannot be checkpointed") {
		t.Errorf("%+v", c)
	}
	if c := judge("c", func(n int) bool {
		return n != unix.CAP_SYS_ADMIN && n != unix.CAP_NET_RAW
	}); c.Status != doctor.Fail {
		t.Errorf("%+v", c)
	}
}

func TestJudgeCriu(t *testing.T) {
	statuses := func(f criu.Features, iptables bool) string {
		var s []string
		for _, c := range judgeCriu(f, func() bool { return iptables }) {
			s = append(s, c.Name+"="+string(c.Status))
		}
		return strings.Join(s, " ")
	}
	for want, f := range map[string]criu.Features{
		"criu=fail": {Problem: "no"},
		"criu=ok sockets=fail network-lock=warn lazy-pages=ok dirty-tracking=ok": {Works: true},
		"criu=ok sockets=ok network-lock=ok lazy-pages=ok dirty-tracking=ok": {
			Works: true, InetSockets: true, Nftables: true, LazyPages: true, DirtyTrack: true,
		},
	} {
		if got := statuses(f, false); got != want {
			t.Errorf("%+v: %s, want %s", f, got, want)
		}
	}
	for _, has := range []bool{true, false} {
		for _, c := range judgeCriu(criu.Features{
			Works: true, LazyPages: has, DirtyTrack: has, Nftables: true,
		}, nil)[3:] {
			if strings.Contains(c.Detail, "cannot") == has || !strings.Contains(c.Detail, "does not make use of it") {
				t.Errorf("%v: %+v", has, c)
			}
		}
	}
	if got := statuses(criu.Features{Works: true, InetSockets: true}, true); !strings.Contains(got, "network-lock=ok") {
		t.Error(got)
	}
}

func TestSpace(t *testing.T) {
	const g = 1 << 30
	for _, c := range []struct {
		free, total, inodes, all uint64
		want                     doctor.Status
	}{
		{100 * g, 200 * g, 50, 100, doctor.OK}, {g / 2, g, 50, 100, doctor.Warn},
		{4 * g, 100 * g, 50, 100, doctor.Warn},
		{100 * g, 200 * g, 1, 100, doctor.Warn}, {100 * g, 200 * g, 0, 0, doctor.OK}, {0, 0, 0, 0, doctor.Warn},
	} {
		if got := space("disk", "/x", c.free, c.total, c.inodes, c.all); got.Status != c.want {
			t.Errorf("%+v: %+v", c, got)
		}
	}
}
