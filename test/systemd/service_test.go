//go:build vm

package systemd

import (
	"bufio"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
)

// TestService goes through what systemd does with the service, in this order, with
// the same sandbox alive all the time.
func TestService(t *testing.T) {
	for _, step := range []struct {
		name string
		run  func(*testing.T)
	}{
		{"Activation", activation}, {"Verbs", verbs}, {"Journal", journal}, {"Confined", confined},
		{"Restart", restart}, {"Killed", killed}, {"Watchdog", watchdog}, {"Drain", drain}, {"Slow start", slowStart},
		{"Doctor", healthy}, {"Leaks", leaks},
	} {
		if !t.Run(step.name, step.run) {
			t.Fatalf("%s: what comes after it is not tried\n%s", step.name,
				sh(t, "systemctl status agentbox --no-pager -l -n 40 || true"))
		}
	}
}

// TestInstall installs the package, which brings its socket up, and no service yet.
func TestInstall(t *testing.T) {
	sh(t, "dpkg -i /payload/agentbox.deb")
	sh(t, "systemctl enable --now agentbox.socket")
	equal(t, "the socket", sh(t, "systemctl is-active agentbox.socket"), "active")
	equal(t, "after a boot, too", sh(t, "systemctl is-enabled agentbox.socket agentbox.service"), "enabled\nenabled")
	equal(t, "the service", unit(t, "ActiveState"), "inactive")
	equal(t, "its kind", unit(t, "Type"), "notify")
}

// The first use of all starts the service.
func activation(t *testing.T) {
	agentbox(t, "ps")
	pid := serves(t, "0")
	equal(t, "nobody has restarted it", unit(t, "NRestarts"), "0")
	environ, err := os.ReadFile("/proc/" + pid + "/environ")
	if err != nil {
		t.Fatal(err)
	}
	if !slices.Contains(strings.Split(string(environ), "\x00"), "HOME=/root") {
		t.Errorf("it does not find root's logins: its environment is %q", environ)
	}
	if mounts := sh(t, "systemctl show -p RequiresMountsFor --value agentbox.service"); !slices.Contains(strings.Fields(mounts), root) {
		t.Errorf("what has to be mounted before it is %q, without %s", mounts, root)
	}
	equal(t, "how often it may fail", unit(t, "StartLimitIntervalUSec"), "0")
}

// Everything that the unit might take from sandboxes is there.
func verbs(t *testing.T) {
	agentbox(t, "run", "-d", "--name", "c", "--network", "none", "busybox", "sh", "-c", counter)
	c := inspect(t, "c")
	c.goesOn(t)
	equal(t, "exec", agentbox(t, "exec", "c", "sh", "-c", "echo kept >/file; cat /file"), "kept")
	n, nonce := c.count(), c.file("nonce") // it counts on once the checkpoint is taken
	agentbox(t, "checkpoint", "--name", "one", "c")
	agentbox(t, "exec", "c", "sh", "-c", "echo lost >/file; echo lost >/more")
	agentbox(t, "restore", "c", "one")
	c = inspect(t, "c")
	equal(t, "the file", c.file("file"), "kept")
	equal(t, "the new file", c.file("more"), "")
	equal(t, "the life of its process", c.file("nonce"), nonce)
	c.goesOn(t)
	agentbox(t, "fork", "--name", "f", "c@one")
	f := inspect(t, "f")
	equal(t, "the life of the fork's process", f.file("nonce"), nonce)
	f.goesOn(t)
	if got := f.count(); got <= n {
		t.Errorf("the fork counts %d, and was at %d before its checkpoint", got, n)
	}
	equal(t, "exec in the fork", agentbox(t, "exec", "f", "cat", "/file"), "kept")
	agentbox(t, "rm", "-f", "f")
}

// The journal has the fields to look for.
func journal(t *testing.T) {
	if out, err := exec.Command(program, "inspect", "nope").CombinedOutput(); err == nil {
		t.Fatalf("it is there: %s", out)
	}
	eventually(t, "the journal has the request", func() bool {
		return strings.Contains(
			sh(t, "journalctl -b -u agentbox SANDBOX=nope CLIENT_UID=0 STATUS=404 -o json --no-pager || true"),
			`"VERB":"get sandboxes"`)
	})
}

// A sandbox is confined by AppArmor's profile, and is in no cgroup of the service's.
func confined(t *testing.T) {
	c := inspect(t, "c")
	read := func(name string) string {
		t.Helper()
		data, err := os.ReadFile(fmt.Sprintf("/proc/%d/%s", c.Pid, name))
		if err != nil {
			t.Fatal(err)
		}
		return strings.TrimSpace(string(data))
	}
	equal(t, "its AppArmor profile", read("attr/current"), "agentbox-default (enforce)")
	equal(t, "that of a command in it", agentbox(t, "exec", "c", "cat", "/proc/self/attr/current"),
		"agentbox-default (enforce)")
	if out, err := exec.Command(program, "exec", "c", "head", "-c1", "/proc/kcore").CombinedOutput(); err == nil ||
		!strings.Contains(string(out), "Permission denied") {
		t.Errorf("what the profile denies: %v: %s", err, out)
	}
	if got := read("cgroup"); !strings.HasPrefix(got, "0::/agentbox/"+c.ID) {
		t.Errorf("its cgroup is %s", got)
	}
	equal(t, "no profile, when that is asked for", agentbox(t, "run", "--rm", "--network", "none", "--policy",
		"trusted", "--security-opt", "apparmor=unconfined", "busybox", "cat", "/proc/self/attr/current"), "unconfined")
}

// Sandboxes do not notice a restart of the service, however it is done.
func stays(t *testing.T, other func(pid string)) {
	t.Helper()
	before := inspect(t, "c")
	pid := unit(t, "MainPID")
	other(pid)
	before.goesOn(t)
	serves(t, pid)
	after := inspect(t, "c")
	equal(t, "the sandbox", after, before)
	after.goesOn(t)
}

func restart(t *testing.T) {
	stays(t, func(string) { sh(t, "systemctl restart agentbox") })
}

func killed(t *testing.T) {
	stays(t, func(pid string) { sh(t, "kill -KILL "+pid) })
	equal(t, "systemd has restarted it", unit(t, "NRestarts"), "1")
}

// A service that stands still is ended and started again within two minutes.
func watchdog(t *testing.T) {
	equal(t, "the watchdog", unit(t, "WatchdogUSec"), "1min")
	stays(t, func(pid string) { sh(t, "kill -STOP "+pid) })
	equal(t, "systemd has restarted it", unit(t, "NRestarts"), "2")
	if said := sh(t, "journalctl -b -u agentbox --no-pager | grep -i 'watchdog timeout'"); said == "" {
		t.Error("it was not the watchdog")
	}
}

// A stop waits for what is under way; sandboxes go on, and the socket with them.
func drain(t *testing.T) {
	c := inspect(t, "c")
	cmd := exec.Command(program, "exec", "c", "sh", "-c", "echo begun; sleep 5; echo done")
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	lines := bufio.NewScanner(out)
	if !lines.Scan() || lines.Text() != "begun" {
		t.Fatalf("it said %q", lines.Text())
	}
	pid := unit(t, "MainPID")
	sh(t, "systemctl stop agentbox.service")
	if !lines.Scan() || lines.Text() != "done" {
		t.Errorf("a command under way said %q", lines.Text())
	}
	if err := cmd.Wait(); err != nil {
		t.Errorf("a command under way: %v", err)
	}
	equal(t, "the service", unit(t, "ActiveState"), "inactive")
	equal(t, "how it ended", unit(t, "Result"), "success")
	equal(t, "the socket", sh(t, "systemctl is-active agentbox.socket"), "active")
	c.goesOn(t)
	equal(t, "the sandbox, by a service that it brings up", inspect(t, "c"), c)
	serves(t, pid)
	agentbox(t, "rm", "-f", "--checkpoints", "c")
}

// A command waits for a service that systemd is starting, however long that takes: by
// itself, or since it comes after another unit, as in a boot.
func slowStart(t *testing.T) {
	const units = "/run/systemd/system"
	defer sh(t, "cd "+units+"; rm -rf agentbox.service.d slow.service; systemctl daemon-reload")
	for name, script := range map[string]string{
		"itself": "printf '[Service]\nExecStartPre=/bin/sleep 20\n' >agentbox.service.d/slow.conf",
		"another": "printf '[Unit]\nWants=slow.service\nAfter=slow.service\n' >agentbox.service.d/slow.conf; " +
			"printf '[Service]\nType=oneshot\nExecStart=/bin/sleep 20\n' >slow.service",
	} {
		sh(t, "cd "+units+"; mkdir -p agentbox.service.d; "+script+
			"; systemctl daemon-reload; systemctl stop agentbox.service")
		out, err := exec.Command(program, "inspect", "waited-"+name).CombinedOutput()
		if err == nil || strings.Count(string(out), "waiting for the service to be started by systemd") != 1 ||
			strings.Contains(string(out), "continuing without") {
			t.Errorf("%s: %v: %s", name, err, out)
		}
		eventually(t, "it was the service that answered", func() bool {
			return strings.Contains(sh(t, "journalctl -b -u agentbox SANDBOX=waited-"+name+
				" STATUS=404 -o json --no-pager || true"), `"VERB":"get sandboxes"`)
		})
	}
}

// The service's own host can do everything.
func healthy(t *testing.T) { agentbox(t, "doctor") }
