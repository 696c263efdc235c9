package backendtest

import (
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/agentbox/agentbox/runtime"
)

func specProcess(e *bench) {
	s := e.spec(sh("echo $COLOUR $(pwd) $(id -u):$(id -g) $(id -G) $(hostname) $HOME")...)
	s.Env = append(s.Env, "COLOUR=red and blue")
	s.Workdir, s.User, s.Hostname = "/made/anew", "agent", "box-one"
	out, _, exit := e.run(s, "")
	equal(e, "exit", exit, 0)
	equal(e, "output", out, "red and blue /made/anew 1000:1000 1000 2000 box-one /root\n")
	s = e.spec(sh("echo $(id -u):$(id -g)")...)
	s.User = "1234:4321"
	out, _, _ = e.run(s, "")
	equal(e, "numeric user", out, "1234:4321\n")
}

func specMounts(e *bench) {
	src := filepath.Join(e.root, "shared dir")
	if err := os.Mkdir(src, 0o755); err != nil {
		e.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(src, "in"), []byte("from the host\n"), 0o644); err != nil {
		e.Fatal(err)
	}
	s := e.spec(sh("cat /mnt/in /ro/in; echo out > /mnt/out; echo no > /ro/no || echo refused; echo x > /tmp/x; df -k /tmp | tail -n 1 | awk '{print $2}'")...)
	s.Mounts = []runtime.Mount{
		{Type: "bind", Source: src, Target: "/mnt"},
		{Type: "bind", Source: src, Target: "/ro", ReadOnly: true},
		{Type: "tmpfs", Target: "/tmp", Options: "size=64m,mode=1777"},
	}
	out, _, exit := e.run(s, "")
	equal(e, "exit", exit, 0)
	equal(e, "output", out, "from the host\nfrom the host\nrefused\n65536\n")
	if b, err := os.ReadFile(filepath.Join(src, "out")); string(b) != "out\n" {
		e.Errorf("what it wrote to the bind mount: %q, %v", b, err)
	}
	if _, err := os.Stat(e.upper(s.ID, "tmp/x")); err == nil {
		e.Error("a file in a tmpfs is in the upperdir")
	}
}

func specReadOnly(e *bench) {
	s := e.spec(sh("echo x > /x || echo refused; echo x > /tmp/x && cat /tmp/x")...)
	s.ReadOnly = true
	s.Mounts = []runtime.Mount{{Type: "tmpfs", Target: "/tmp"}}
	out, _, exit := e.run(s, "")
	equal(e, "output", out, "refused\nx\n")
	equal(e, "exit", exit, 0)
}

// control reads one of a process's cgroup files, by its name on v1 or v2.
func (e *bench) control(pid int, controller, v1, v2 string) string {
	e.Helper()
	b, err := os.ReadFile("/proc/" + itoa(pid) + "/cgroup")
	if err != nil {
		e.Fatal(err)
	}
	for _, line := range strings.Split(strings.TrimSpace(string(b)), "\n") {
		f := strings.SplitN(line, ":", 3)
		for _, name := range strings.Split(f[1], ",") {
			if name == controller {
				b, _ := os.ReadFile(filepath.Join("/sys/fs/cgroup", controller, f[2], v1))
				return strings.TrimSpace(string(b))
			}
		}
		if f[0] == "0" {
			if b, err := os.ReadFile(filepath.Join("/sys/fs/cgroup", f[2], v2)); err == nil {
				return strings.TrimSpace(string(b))
			}
		}
	}
	return ""
}

func specLimits(e *bench) {
	s := e.spec("sleep", "1000")
	s.Resources = runtime.Resources{Memory: 64 << 20, CPUs: 0.5, Pids: 17}
	pid := e.is(e.startSpec(s), runtime.Running).Pid
	equal(e, "memory limit", e.control(pid, "memory", "memory.limit_in_bytes", "memory.max"), "67108864")
	equal(e, "pids limit", e.control(pid, "pids", "pids.max", "pids.max"), "17")
	if cpu := e.control(pid, "cpu", "cpu.cfs_quota_us", "cpu.max"); cpu != "50000" && cpu != "50000 100000" {
		e.Errorf("cpu limit: %q", cpu)
	}
}

func specSecurity(e *bench) {
	show := sh("grep -E '^(CapEff|NoNewPrivs|Seccomp):' /proc/self/status | tr -s '\\n\\t' ' '")
	s := e.spec(show...)
	out, _, _ := e.run(s, "")
	equal(e, "the usual", out, "CapEff: 00000000800404fb NoNewPrivs: 0 Seccomp: 2 ")
	s = e.spec(sh("for f in /proc/kcore /proc/keys /proc/timer_list /proc/interrupts; do cat $f 2>/dev/null; done; ls /sys/firmware /proc/acpi /proc/scsi 2>/dev/null | grep -v :; " +
		"for f in /proc/sys/kernel/core_pattern /proc/sysrq-trigger /sys/kernel/uevent_helper; do echo x 2>/dev/null >$f && echo wrote $f; done; " +
		"mknod /tmp/disk b 7 0; cat /tmp/disk 2>&1 | grep -v -e 'not permitted' -e 'No such'; ls /dev/sd* /dev/vd* /dev/nvme* /dev/loop* /dev/mem /dev/fuse 2>/dev/null; true")...)
	s.Security.Capabilities = []string{"MKNOD", "DAC_OVERRIDE"}
	out, _, _ = e.run(s, "")
	equal(e, "what there is of the host's devices and knobs", strings.TrimSpace(out), "")
	s = e.spec(show...)
	s.Security = runtime.Security{Capabilities: []string{}, NoNewPrivileges: true}
	out, _, _ = e.run(s, "")
	equal(e, "as little as can be", out, "CapEff: 0000000000000000 NoNewPrivs: 1 Seccomp: 2 ")
	s = e.spec("sleep", "1000")
	s.Security = runtime.Security{Capabilities: []string{"CHOWN", "SYS_PTRACE"}, Seccomp: "unconfined", IOUring: true}
	id := e.startSpec(s)
	out, _ = e.exec(id, show...)
	equal(e, "of an exec", out, "CapEff: 0000000000080001 NoNewPrivs: 0 Seccomp: 0 ")
}

func specInit(e *bench) {
	s := e.spec("sleep", "1000")
	s.Init = true
	id := e.startSpec(s)
	// An orphan that ends is reaped: no zombie of it stays.
	_, _ = e.exec(id, sh("(sleep 0.1 &) ; exit 0")...)
	e.eventually("the orphan is reaped", func() bool {
		out, _ := e.exec(id, sh("ps -o stat,comm | grep -c '^Z' || true")...)
		return out == "0\n"
	})
	// Without an init, the first process ignores signals it does not handle.
	e.stopsAtOnce(id)
	equal(e, "exit", e.is(id, runtime.Exited).ExitCode, 143)
	s = e.spec(sh("exit 9")...)
	s.Init = true
	_, _, exit := e.run(s, "")
	equal(e, "a code passed on", exit, 9)
}

func specNetworkNone(e *bench) {
	s := e.spec(sh("ip -o link | wc -l; ping -c 1 -W 5 127.0.0.1 > /dev/null && echo reached")...)
	s.Security.Capabilities = []string{"NET_RAW"} // busybox knows no other way
	out, _, _ := e.run(s, "")
	equal(e, "output", out, "1\nreached\n")
}

func specNetworkHost(e *bench) {
	s := e.spec("readlink", "/proc/self/ns/net")
	s.Network.Mode, s.IDs = runtime.NetworkHost, nil
	out, _, _ := e.run(s, "")
	want, err := os.Readlink("/proc/self/ns/net")
	if err != nil {
		e.Fatal(err)
	}
	equal(e, "network namespace", out, want+"\n")
}

func specNetworkBridge(e *bench) {
	s := e.spec(sh("while :; do echo hello | nc -l -p 5000; done")...)
	s.Network.Mode = runtime.NetworkBridge
	id := e.startSpec(s)
	read := func() string {
		conn, err := net.DialTimeout("tcp", net.JoinHostPort(e.inspect(id).Address, "5000"), 10*time.Second)
		if err != nil {
			return ""
		}
		defer conn.Close()
		_ = conn.SetReadDeadline(time.Now().Add(10 * time.Second))
		b := make([]byte, 16)
		n, _ := conn.Read(b)
		return string(b[:n])
	}
	address := e.inspect(id).Address
	if net.ParseIP(address).To4() == nil {
		e.Fatalf("address %q is no IPv4 address", address)
	}
	e.eventually("the host reaches it", func() bool { return read() == "hello\n" })
	e.stop(id)
	e.restart(id)
	equal(e, "address after a restart", e.inspect(id).Address, address)
	e.eventually("the host reaches it again", func() bool { return read() == "hello\n" })
}

func manyAtOnce(e *bench) {
	var all sync.WaitGroup
	for i := range 5 {
		s := e.spec(sh("echo $N > /n; cat /n; trap 'exit 4' TERM; while :; do sleep 0.02; done")...)
		s.Env = append(s.Env, "N="+itoa(i))
		e.own(s.ID)
		all.Go(func() {
			fail := func(what string, err error) bool {
				if err != nil {
					e.Errorf("container %d: %s: %v", i, what, err)
				}
				return err != nil
			}
			if fail("Create", e.b.Create(e.ctx, s, e.lower)) {
				return
			}
			if _, err := e.b.Start(e.ctx, s.ID, runtime.StartOptions{}); fail("Start", err) {
				return
			}
			var out buffer
			for deadline := time.Now().Add(patience); out.String() != itoa(i)+"\n" &&
				time.Now().Before(deadline); time.Sleep(20 * time.Millisecond) {
				out = buffer{}
				if fail("Logs", e.b.Logs(e.ctx, s.ID, runtime.LogOptions{Tail: -1}, &out, nil)) {
					return
				}
			}
			if out.String() != itoa(i)+"\n" {
				e.Errorf("container %d: log %q", i, out.String())
			}
			if exit, err := e.b.Exec(e.ctx, s.ID, runtime.Process{Args: sh("exit " + itoa(10+i))},
				runtime.Streams{}); fail("Exec", err) || exit != 10+i {
				e.Errorf("container %d: Exec: %d", i, exit)
			}
			fail("Stop", e.b.Stop(e.ctx, s.ID, runtime.StopOptions{Timeout: patience}))
			if exit, err := e.b.Wait(e.ctx, s.ID); fail("Wait", err) || exit.Code != 4 && exit.Code != 137 {
				e.Errorf("container %d: Wait: %+v", i, exit)
			}
			fail("Remove", e.b.Remove(e.ctx, s.ID))
		})
	}
	all.Wait()
}

func manyRounds(e *bench) {
	id := e.create(e.spec(sh("echo x >> /rounds; sleep 1000")...))
	const rounds = 6
	for i := range rounds {
		e.restart(id)
		e.eventually("it runs", func() bool { return e.file(id, "rounds") == strings.Repeat("x\n", i+1) })
		e.stop(id)
	}
}
