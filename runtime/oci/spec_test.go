package oci

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/internal/bundle"
)

// limit reads a cgroup file of a container, by its v1 or v2 name.
func (x *fixture) limit(id, v1, v2 string) string {
	x.t.Helper()
	for _, m := range x.box.Cgroups {
		name := v1
		if m.V2 {
			name = v2
		}
		if data, err := os.ReadFile(filepath.Join(m.Path, x.box.Cgroup(id), name)); err == nil {
			return strings.TrimSpace(string(data))
		}
	}
	x.t.Fatalf("no %s and no %s", v1, v2)
	return ""
}

func TestLimits(t *testing.T) {
	x := newBox(t)
	id := x.up(with(spec("sleep", "1000"), func(s *runtime.Spec) {
		s.Resources = runtime.Resources{Memory: 64 << 20, CPUs: 0.5, Pids: 17}
	}))
	if got := x.limit(id, "memory.limit_in_bytes", "memory.max"); got != strconv.Itoa(64<<20) {
		t.Errorf("memory %s", got)
	}
	if got := x.limit(id, "pids.max", "pids.max"); got != "17" {
		t.Errorf("pids %s", got)
	}
	if got := x.limit(id, "cpu.cfs_quota_us", "cpu.max"); got != "50000" && got != "50000 100000" {
		t.Errorf("cpu %s", got)
	}
	if bundle.SwapAccounting(x.box.Cgroups) {
		swaps := x.up(with(spec("sleep", "1000"), func(s *runtime.Spec) {
			s.Resources = runtime.Resources{Memory: 64 << 20, Swap: 32 << 20}
		}))
		if got := x.limit(swaps, "memory.memsw.limit_in_bytes", "memory.swap.max"); got != strconv.Itoa(96<<20) &&
			got != strconv.Itoa(32<<20) {
			t.Errorf("some swap %s", got)
		}
		if got := x.limit(id, "memory.memsw.limit_in_bytes",
			"memory.swap.max"); got != strconv.Itoa(64<<20) && got != "0" {
			t.Errorf("swap %s", got)
		}
	}
	// The kernel enforces it: 137.
	_, _, exit := x.run(with(spec("dd", "if=/dev/zero", "of=/dev/null", "bs=60M", "count=1"), func(s *runtime.Spec) {
		s.Resources.Memory = 32 << 20
	}), "")
	if exit != 137 {
		t.Errorf("exit %d with more memory than the limit", exit)
	}
}

func TestLimitIO(t *testing.T) {
	dir, err := os.MkdirTemp("/var/tmp", "agentbox")
	must(t, err)
	t.Cleanup(func() { must(t, os.RemoveAll(dir)) })
	limited := with(spec("sleep", "1000"), func(s *runtime.Spec) { s.Resources.IO = 1 << 20 })
	disk, err := bundle.DiskOf(dir)
	if err != nil {
		t.Skip(err) // everything is in memory here
	}
	x := newBox(t, func(o *Options) { o.Root = filepath.Join(dir, "root") })
	id := x.up(limited)
	number := fmt.Sprintf("%d:%d ", disk.Major, disk.Minor)
	if got := x.limit(id, "blkio.throttle.read_bps_device", "io.max"); got != number+"1048576" &&
		!strings.HasPrefix(got, number+"rbps=1048576 wbps=1048576 ") {
		t.Errorf("%s: %q", number, got)
	}

	// Without a disk there is nothing to limit.
	mem := filepath.Join(dir, "memory")
	must(t, os.Mkdir(mem, 0o700))
	must(t, unix.Mount("tmpfs", mem, "tmpfs", 0, ""))
	defer func() { must(t, unix.Unmount(mem, 0)) }()
	if got, err := bundle.DiskOf(mem); !errors.Is(err, fault.ErrUnsupported) {
		t.Errorf("%+v, %v", got, err)
	}
}

func TestMounts(t *testing.T) {
	x := newBox(t)
	src := t.TempDir()
	must(t, os.Mkdir(filepath.Join(src, "sub"), 0o755))
	write(t, filepath.Join(src, "file"), "from the host\n", 0o644)
	s := with(sh("cat /vol/file; echo back > /vol/new; cat /ro/file; echo x > /ro/no; echo x > /a/b/single; "+
		"grep -c ' /scratch tmpfs .*size=1024k' /proc/mounts; stat -c %a /scratch; echo x > /root/no; echo x > /scratch/yes && cat /scratch/yes"), func(s *runtime.Spec) {
		s.ReadOnly = true
		s.Mounts = []runtime.Mount{
			{Type: "bind", Source: filepath.Join(src, "file"), Target: "/a/b/single", ReadOnly: true},
			{Type: "bind", Source: src, Target: "/vol"},
			{Type: "bind", Source: src, Target: "/ro", ReadOnly: true},
			{Type: "tmpfs", Target: "/scratch", Options: "size=1m,mode=1770"},
		}
	})
	out, errs, exit := x.run(s, "")
	if out != "from the host\nfrom the host\n1\n1770\nx\n" || exit != 0 ||
		strings.Count(errs, "Read-only file system") != 3 {
		t.Errorf("%q, %q, exit %d", out, errs, exit)
	}
	if data, err := os.ReadFile(filepath.Join(src, "new")); string(data) != "back\n" {
		t.Errorf("%q, %v", data, err)
	}
	for name, mount := range map[string]runtime.Mount{
		"a missing source": {Type: "bind", Source: filepath.Join(src, "missing"), Target: "/x"},
		"a bad option":     {Type: "tmpfs", Target: "/x", Options: "size=1m,upperdir=/etc"},
		"the root":         {Type: "tmpfs", Target: "/x/.."},
		"a strange type":   {Type: "nfs", Target: "/x"},
	} {
		bad := with(spec("true"), func(s *runtime.Spec) { s.Mounts = []runtime.Mount{mount} })
		err := x.Create(t.Context(), bad, []string{x.lower})
		if name == "a missing source" {
			if !errors.Is(err, fault.ErrNotFound) || !strings.Contains(err.Error(), mount.Source) {
				t.Errorf("%s: %v", name, err)
			}
		} else if !errors.Is(err, fault.ErrInvalid) {
			t.Errorf("%s: %v", name, err)
		}
		if x.box.Exists(bad.ID) {
			t.Errorf("%s left something", name)
		}
	}
}

// A link in the image must not make the runtime, or us, write elsewhere.
func TestMountOverLink(t *testing.T) {
	x := newBox(t)
	outside := t.TempDir()
	must(t, os.Symlink(outside, filepath.Join(x.lower, "link")))
	src := t.TempDir()
	_, _, exit := x.run(with(spec("true"), func(s *runtime.Spec) {
		s.Workdir = "/link/work"
		s.Mounts = []runtime.Mount{{Type: "bind", Source: src, Target: "/link/target"}}
	}), "")
	entries, err := os.ReadDir(outside)
	if err != nil || len(entries) > 0 || exit != 0 {
		t.Errorf("%v, %v, exit %d", entries, err, exit)
	}
}

// An image's declared directories stay in the sandbox.
func TestImageDirectories(t *testing.T) {
	x := newBox(t)
	outside := t.TempDir()
	for link, to := range map[string]string{
		"out": outside, "fd": "/proc/self/fd", "round": "round", "inside": "/tmp/../etc/..",
	} {
		must(t, os.Symlink(to, filepath.Join(x.lower, link)))
	}
	old := unix.Umask(0o077)
	defer unix.Umask(old)
	out, errs, exit := x.run(with(sh("stat -c '%n %a %u' /data /data/deep /rel /up /made /tmp; pwd"),
		func(s *runtime.Spec) {
			s.Volumes = []string{"/data/deep", "rel", "../../../up", "/inside/made", "/tmp", "/"}
			s.Workdir = "/inside/tmp"
		}), "")
	if want := "/data 755 0\n/data/deep 755 0\n/rel 755 0\n/up 755 0\n/made 755 0\n/tmp 777 0\n/inside/tmp\n"; out != want && out != strings.Replace(want, "/inside", "", 1) || exit != 0 {
		t.Errorf("%q, %q, exit %d", out, errs, exit)
	}
	for name, change := range map[string]func(*runtime.Spec){
		"a volume over a file":          func(s *runtime.Spec) { s.Volumes = []string{"/etc/passwd"} },
		"a volume through a link":       func(s *runtime.Spec) { s.Volumes = []string{"/out/x"} },
		"a volume in a circle":          func(s *runtime.Spec) { s.Volumes = []string{"/round/x"} },
		"descriptors":                   func(s *runtime.Spec) { s.Workdir = "/proc/self/fd/7" },
		"descriptors of the first":      func(s *runtime.Spec) { s.Workdir = "/etc/../proc//1/cwd" },
		"descriptors by a link":         func(s *runtime.Spec) { s.Workdir = "/inside/fd/7/../8" },
		"descriptors by /dev":           func(s *runtime.Spec) { s.Workdir = "/dev/fd/7" },
		"a working directory in circle": func(s *runtime.Spec) { s.Workdir = "/round/x" },
		"a long working directory":      func(s *runtime.Spec) { s.Workdir = strings.Repeat("/x", 4096) },
	} {
		id := x.create(with(spec("true"), change))
		if _, err := x.Start(t.Context(), id, runtime.StartOptions{}); !errors.Is(err, fault.ErrInvalid) {
			t.Errorf("%s: %v", name, err)
		}
		must(t, x.Remove(t.Context(), id))
	}
	if list, err := os.ReadDir(outside); err != nil || len(list) > 0 {
		t.Errorf("%v, %v", list, err)
	}
	id := x.up(spec("sleep", "1000"))
	if _, err := x.Exec(t.Context(), id, runtime.Process{Args: []string{"true"}, Workdir: "/fd/7"},
		runtime.Streams{}); !errors.Is(err, fault.ErrInvalid) {
		t.Errorf("exec: %v", err)
	}
}

func TestSyscallFilter(t *testing.T) {
	s := &specs.Spec{Process: &specs.Process{Capabilities: &specs.LinuxCapabilities{Bounding: []string{"CAP_CHOWN"}}}}
	filter, err := bundle.SyscallFilter(s, runtime.Security{})
	must(t, err)
	hits := 0
	for _, call := range filter.Syscalls {
		if slices.ContainsFunc(call.Names, func(name string) bool { return strings.HasPrefix(name, "io_uring") }) {
			hits++
			if call.Action != specs.ActErrno || call.ErrnoRet == nil || *call.ErrnoRet != 38 || len(call.Names) != 3 {
				t.Errorf("%+v", call)
			}
		}
	}
	if hits != 1 {
		t.Errorf("%d rules for io_uring", hits)
	}
	secret := slices.DeleteFunc(slices.Clone(filter.Syscalls), func(call specs.LinuxSyscall) bool {
		return !slices.Contains(call.Names, "memfd_secret")
	})
	if len(secret) != 1 || secret[0].Action != specs.ActErrno || secret[0].ErrnoRet == nil ||
		*secret[0].ErrnoRet != 38 {
		t.Errorf("memfd_secret: %+v", secret)
	}
	x := newBox(t)
	id := x.up(spec("sleep", "1000"))
	out, _ := x.exec(id, "grep", "Seccomp:", "/proc/self/status")
	if strings.Fields(out)[1] != "2" {
		t.Errorf("no filter: %q", out)
	}
}

func TestCapabilities(t *testing.T) {
	x := newBox(t)
	script := "grep Cap /proc/self/status; hostname other; mount -t tmpfs x /tmp; cat /proc/kcore | wc -c; ls /sys/firmware | wc -l; echo x > /proc/sys/kernel/hostname"
	out, errs, _ := x.run(sh(script), "")
	if !strings.Contains(out, "CapEff:\t00000000800404fb") ||
		strings.Count(errs, "not permitted")+strings.Count(errs, "denied") < 2 ||
		!strings.Contains(errs, "Read-only file system") {
		t.Errorf("%s\n%s", out, errs)
	}
	out, _, _ = x.run(with(spec("grep", "Cap", "/proc/self/status"), func(s *runtime.Spec) { s.User = "alice" }), "")
	if !strings.Contains(out, "CapEff:\t0000000000000000") || !strings.Contains(out, "CapBnd:\t00000000800404fb") {
		t.Error(out)
	}
}

func TestSyscallFilterAsked(t *testing.T) {
	s := &specs.Spec{Process: &specs.Process{Capabilities: &specs.LinuxCapabilities{}}}
	for _, c := range []struct {
		sec    runtime.Security
		action specs.LinuxSeccompAction // of the last rule, which is io_uring's
		rest   specs.LinuxSeccompAction
	}{
		{runtime.Security{IOUring: true}, specs.ActAllow, specs.ActErrno},
		{runtime.Security{Seccomp: "unconfined"}, specs.ActErrno, specs.ActAllow},
		{runtime.Security{SeccompProfile: `{"defaultAction": "SCMP_ACT_ALLOW"}`}, specs.ActErrno, specs.ActAllow},
		{runtime.Security{SeccompProfile: `{"defaultAction": "SCMP_ACT_ERRNO", "syscalls": [{"names": ["io_uring_setup", "read"], "action": "SCMP_ACT_ALLOW"}, {"name": "io_uring_enter", "action": "SCMP_ACT_ALLOW"}]}`}, specs.ActErrno, specs.ActErrno},
		{runtime.Security{
			IOUring: true, SeccompProfile: `{"defaultAction": "SCMP_ACT_ALLOW", "syscalls": [{"names": ["io_uring_setup"], "action": "SCMP_ACT_KILL"}]}`,
		}, specs.ActKill, specs.ActAllow},
	} {
		filter, err := bundle.SyscallFilter(s, c.sec)
		must(t, err)
		last := filter.Syscalls[len(filter.Syscalls)-1]
		if !slices.Contains(last.Names, "io_uring_setup") || last.Action != c.action || filter.DefaultAction != c.rest {
			t.Errorf("%+v: %+v, else %s", c.sec, last, filter.DefaultAction)
		}
		for _, rule := range filter.Syscalls[:len(filter.Syscalls)-1] {
			if slices.ContainsFunc(rule.Names, func(n string) bool { return strings.HasPrefix(n, "io_uring") }) {
				t.Errorf("%+v: also %+v", c.sec, rule)
			}
		}
	}
}

// wrapperBinary builds agentbox-runtime, which is the init as well.
func wrapperBinary(t *testing.T) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "agentbox-runtime")
	cmd := exec.Command("go", "build", "-o", path, "github.com/agentbox/agentbox/cmd/agentbox-runtime")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("build agentbox-runtime: %v\n%s", err, out)
	}
	return path
}

func TestInit(t *testing.T) {
	wrapper := wrapperBinary(t)
	x := newBox(t, func(o *Options) { o.Wrapper = wrapper })
	initially := func(s runtime.Spec) runtime.Spec { return with(s, func(s *runtime.Spec) { s.Init = true }) }
	id := x.up(initially(sh("trap 'echo got it; exit 21' TERM; echo ready; while :; do sleep 0.05; done")))
	eventually(t, "it is ready", func() bool {
		out, _ := x.logs(id, runtime.LogOptions{Tail: -1})
		return out == "ready\n"
	})
	for range 5 {
		x.exec(id, "sh", "-c", "(sleep 0.01 &) ; exit")
	}
	eventually(t, "no zombies", func() bool {
		out, _ := x.exec(id, "ps", "-o", "stat,comm")
		return !strings.Contains(out, "Z") && !strings.Contains(out, "sleep 0.01")
	})
	// As a user namespace has to have it where the root's filesystem is so.
	if out, _ := x.exec(id, "grep", bundle.InitPath,
		"/proc/self/mountinfo"); !strings.Contains(out, " ro,nosuid,nodev") {
		t.Errorf("it is mounted %q", out)
	}
	if out, _ := x.exec(id, "cat", "/proc/1/cmdline"); !strings.HasPrefix(out, bundle.InitPath+"\x00--\x00sh") {
		t.Errorf("process 1 is %q", out)
	}
	must(t, x.Stop(t.Context(), id, runtime.StopOptions{Timeout: 1 << 40}))
	if c := x.inspect(id); c.ExitCode != 21 {
		t.Errorf("%+v", c)
	}
	entries, err := os.ReadDir(x.box.Dir(id, "upper"))
	must(t, err)
	for _, e := range entries {
		if strings.Contains(e.Name(), "agentbox") {
			t.Errorf("%s in the upperdir", e.Name())
		}
	}
	for want, args := range map[int][]string{
		7: {"sh", "-c", "exit 7"}, 137: {"sh", "-c", "kill -9 $$"}, 127: {"no-such"}, 126: {"/etc/passwd"},
	} {
		if _, errs, exit := x.run(initially(spec(args...)), ""); exit != want {
			t.Errorf("%q: exit %d, %s", args, exit, errs)
		}
	}
	// With a terminal the command is in its foreground.
	out, _, exit := x.run(with(initially(sh("read x; echo $x; stty size")), func(s *runtime.Spec) {
		s.Terminal, s.OpenStdin = true, true
	}), "typed\n")
	if !strings.Contains(out, "typed\r\n") || exit != 0 {
		t.Errorf("%q, exit %d", out, exit)
	}
}

func TestBridge(t *testing.T) {
	x := newBox(t)
	id := x.up(with(spec("sleep", "1000"), func(s *runtime.Spec) { s.Network.Mode = runtime.NetworkBridge }))
	c := x.inspect(id)
	out, _ := x.exec(id, "sh", "-c", "ip -4 addr show eth0; cat /etc/hosts")
	if c.Address == "" || !strings.Contains(out, "inet "+c.Address+"/") || !strings.Contains(out, c.Address+"\tbox") {
		t.Errorf("%q: %s", c.Address, out)
	}
	must(t, x.Stop(t.Context(), id, runtime.StopOptions{Silent: true}))
	x.start(id)
	if again := x.inspect(id).Address; again != c.Address {
		t.Errorf("address %s became %s", c.Address, again)
	}
}

// Names of directories that are syntax to conmon, overlayfs or the mount table.
func TestAwkwardRoot(t *testing.T) {
	dir := filepath.Join(t.TempDir(), `a b:c d\e=f`+strings.Repeat("x", 100))
	x := newBox(t, func(o *Options) { o.Root, o.Run = filepath.Join(dir, "root"), filepath.Join(dir, "run") })
	out, _, exit := x.run(with(spec("sh"), func(s *runtime.Spec) { s.Terminal, s.OpenStdin = true, true }),
		"echo it works; exit 2\n")
	if !strings.Contains(out, "it works\r\n") || exit != 2 {
		t.Errorf("%q, exit %d", out, exit)
	}
}
