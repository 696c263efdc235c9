//go:build vm

package systemd

import (
	"bytes"
	"encoding/json"
	"io"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// Two packages of the same tree.
const (
	older, olderVersion = "/payload/older.deb", "0.0~0"
	newer, newerVersion = "/payload/agentbox.deb", "0.0~vm"
)

// beats counts as counter does, and notes when, in seconds since the boot.
const beats = "cat /proc/sys/kernel/random/uuid >/nonce; i=0; while :; do i=$((i+1)); read -r up idle </proc/uptime; echo $up >>/beats; echo $i >/new; mv /new /count; sleep 0.2; done"

// longest is what may be between two beats, in seconds, on a machine that is emulated
// beside other work. An upgrade takes longer.
const longest = 15

// pack is the life of the package in a machine.
type pack struct {
	were  []string // traces before there was a package
	boxes map[string]*box
}

// box is a sandbox that beats.
type box struct {
	sandbox
	nonce string
}

// TestPackage goes through the life of the package beside sandboxes that run, in a
// machine of its own: what systemd does, and what the tests of the package in a root
// without it (make test-deb) cannot show.
func TestPackage(t *testing.T) {
	p := &pack{boxes: map[string]*box{}}
	for _, step := range []struct {
		name string
		run  func(*testing.T)
	}{
		{"Installed", p.installed}, {"Upgraded", p.upgraded}, {"Removed", p.removed}, {"Not purged", p.notPurged},
		{"Installed again", p.again}, {"Purged", p.purged},
	} {
		if !t.Run(step.name, step.run) {
			t.Fatalf("%s: what comes after it is not tried\n%s", step.name,
				sh(t, "journalctl -b -u agentbox --no-pager | tail -n 40"))
		}
	}
}

func (p *pack) installed(t *testing.T) {
	p.were = traces(t)
	sh(t, "dpkg -i "+older)
	equal(t, "the version", version(t), olderVersion)
	lease := agentbox(t, "lease", "create", "--for", "12h")
	for _, args := range [][]string{
		{"plain", "--network", "none"},
		{"always", "--network", "none", "--restart", "always"},
		{"net", "--egress", "203.0.113.1 80", "--lease", lease},
	} {
		agentbox(t, append(append([]string{"run", "-d", "--name"}, args...), "busybox", "sh", "-c", beats)...)
		p.find(t, args[0])
	}
	// Merely stopped: it keeps its place on the bridge.
	agentbox(t, "run", "--name", "stopped", "busybox", "touch", "/kept")
	p.denied(t, 81)
	agentbox(t, "checkpoint", "--name", "old", "plain")
}

// An upgrade replaces the service, and nothing else: not the socket, not sandboxes, not
// what the administrator said, and not what the old one had under way.
func (p *pack) upgraded(t *testing.T) {
	sh(t, "systemctl disable agentbox.service")
	pid := serves(t, "0")
	socket := func() string {
		return sh(t, "systemctl show agentbox.socket --value -p ActiveState -p ActiveEnterTimestampMonotonic")
	}
	bound := socket()
	verb := exec.Command(program, "exec", "-i", "plain", "sh", "-c", "echo begun; read -r word; echo $word")
	verb.Stderr = os.Stderr
	in, out := pipes(t, verb)
	equal(t, "what it says", line(t, out), "begun")
	var said bytes.Buffer
	apt := command("apt-get", "install", "-q", "-y", newer)
	apt.Stdout, apt.Stderr = &said, &said
	if err := apt.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- apt.Wait() }()
	eventually(t, "the old service ends", func() bool {
		select {
		case err := <-ended:
			t.Fatalf("the upgrade did not wait for a command under way: %v\n%s", err, said.String())
		default:
		}
		return unit(t, "ActiveState") == "deactivating"
	})
	if _, err := io.WriteString(in, "done\n"); err != nil {
		t.Error(err)
	}
	equal(t, "what a command under way says", line(t, out), "done")
	if err := verb.Wait(); err != nil {
		t.Errorf("a command under way: %v", err)
	}
	if err := <-ended; err != nil {
		t.Fatalf("the upgrade: %v\n%s", err, said.String())
	}
	equal(t, "the version", version(t), newerVersion)
	pid = serves(t, pid)
	is, err := os.Stat("/proc/" + pid + "/exe")
	want, err2 := os.Stat(program)
	if err != nil || err2 != nil || !os.SameFile(is, want) {
		t.Errorf("the service runs another program: %v, %v", err, err2)
	}
	equal(t, "how often systemd had to restart it", unit(t, "NRestarts"), "0")
	equal(t, "the socket", socket(), bound)
	equal(t, "what was disabled", sh(t,
		"systemctl is-enabled agentbox.service agentbox.socket || true"), "disabled\ndisabled")
	sh(t, "systemctl enable agentbox.service")
	p.same(t)
	p.goOn(t)
	p.restored(t, "old")
	agentbox(t, "checkpoint", "--name", "new", "plain")
	agentbox(t, "exec", "plain", "sh", "-c", ":>/beats") // of which a checkpoint stops some
	p.denied(t, 82)
	// Processes that the old version had started still do their work.
	p.comesBack(t, func(*box) {})
	agentbox(t, "verify", "--all", "--read-data")
	leaks(t)
}

// Without the package sandboxes run, and all that there is stays.
func (p *pack) removed(t *testing.T) {
	data := kept(t)
	said := apt(t, "remove", "agentbox")
	if !strings.Contains(said, "sandboxes are left, and go on without it") {
		t.Errorf("it does not say that sandboxes are left:\n%s", said)
	}
	p.gone(t)
	if left := sh(t, "ls -d "+program+
		" /usr/bin/agentbox-runtime /run/agentbox/agentbox.sock /usr/lib/systemd/system/agentbox.* 2>/dev/null || true"); left != "" {
		t.Errorf("it is there: %s", left)
	}
	equal(t, "processes of the service", sh(t, "pgrep -fx '"+program+" serve.*' || true"), "")
	equal(t, "the state of the package", state(t), "rc")
	equal(t, "the data", kept(t), data)
	p.goOn(t)
	// Its rules hold, too, and are told.
	net := p.boxes["net"]
	sh(t, "nsenter -t "+strconv.Itoa(net.Pid)+" -n curl -s -m 20 http://203.0.113.9:83/ || true")
	eventually(t, "what it was denied is on record", func() bool {
		said, err := os.ReadFile(root + "/egress/" + net.ID + ".jsonl")
		return err == nil && strings.Contains(string(said), "203.0.113.9:83")
	})
}

// A purge takes no files from under sandboxes.
func (p *pack) notPurged(t *testing.T) {
	data := kept(t)
	out, err := command("dpkg", "--purge", "agentbox").CombinedOutput()
	if err == nil || !strings.Contains(string(out), "sandboxes are left that have mounts in it") ||
		!strings.Contains(string(out), "install agentbox again") {
		t.Errorf("purged beside sandboxes: %v\n%s", err, out)
	}
	equal(t, "the state of the package", state(t), "pc") // a purge is asked for, and its files are there
	equal(t, "the data", kept(t), data)
	p.goOn(t)
	p.gone(t)
}

// A package that comes back finds everything, and is as one that was never gone.
func (p *pack) again(t *testing.T) {
	p.comesBack(t, func(b *box) {
		eventually(t, "without a program it does not come back", func() bool {
			_, err := os.Stat("/proc/" + strconv.Itoa(b.Pid))
			return err != nil
		})
		apt(t, "install", newer)
		equal(t, "the socket", sh(t, "systemctl is-active agentbox.socket"), "active")
		equal(t, "after a boot, too",
			sh(t, "systemctl is-enabled agentbox.socket agentbox.service"), "enabled\nenabled")
		agentbox(t, "ps")
		serves(t, "0")
	})
	p.same(t)
	p.goOn(t)
	equal(t, "stopped", inspect(t, "stopped").Status, "exited")
	p.restored(t, "new")
	p.restored(t, "old")
	p.denied(t, 84)
	agentbox(t, "verify", "--all", "--read-data")
	leaks(t)
}

// A purge leaves nothing: of a service that runs, of checkpoints, leases, and of
// sandboxes that are stopped.
func (p *pack) purged(t *testing.T) {
	for name := range p.boxes {
		agentbox(t, "rm", "-f", name)
	}
	if kept(t) == "" {
		t.Fatal("there is no data to be purged")
	}
	serves(t, "0")
	apt(t, "purge", "agentbox")
	p.gone(t)
	equal(t, "the state of the package", state(t), "")
	var now []string
	// A process that waits for the expiry of something that is gone notices soon.
	eventually(t, "no process is left", func() bool {
		now = traces(t)
		return !slices.ContainsFunc(now, func(l string) bool {
			return strings.HasPrefix(l, "process ") && !slices.Contains(p.were, l)
		})
	})
	for _, l := range now {
		if !slices.Contains(p.were, l) {
			t.Errorf("left behind: %s", l)
		}
	}
	for _, l := range p.were {
		if !slices.Contains(now, l) {
			t.Errorf("it was there before: %s", l)
		}
	}
	// As Debian has it: files may be its.
	sh(t, "getent group agentbox")
}

// find notes a sandbox as it is now.
func (p *pack) find(t *testing.T, name string) {
	t.Helper()
	b := &box{sandbox: inspect(t, name)}
	eventually(t, name+" beats", func() bool { return b.count() >= 3 })
	b.nonce = b.file("nonce")
	agentbox(t, "exec", name, "sh", "-c", ": >/beats") // of this life, in a row
	p.boxes[name] = b
}

// same compares sandboxes with what they were.
func (p *pack) same(t *testing.T) {
	t.Helper()
	for name, b := range p.boxes {
		equal(t, name, inspect(t, name), b.sandbox)
	}
}

// goOn asks, without agentbox, whether sandboxes are in the same life, and whether they
// have beaten in it all the time.
func (p *pack) goOn(t *testing.T) {
	t.Helper()
	for name, b := range p.boxes {
		b.goesOn(t)
		equal(t, name+": the life of its process", b.file("nonce"), b.nonce)
		most, last := 0.0, 0.0
		for i, f := range strings.Fields(b.file("beats")) {
			at, err := strconv.ParseFloat(f, 64)
			if err != nil {
				t.Fatal(err)
			}
			if i > 0 {
				most = max(most, at-last)
			}
			last = at
		}
		t.Logf("%s: %d beats, at most %.1f s between two", name, b.count(), most)
		if most > longest {
			t.Errorf("%s: %.1f s between two beats", name, most)
		}
	}
}

// restored restores a sandbox to a checkpoint from before.
func (p *pack) restored(t *testing.T, checkpoint string) {
	t.Helper()
	agentbox(t, "exec", "plain", "touch", "/lost")
	before := p.boxes["plain"]
	agentbox(t, "restore", "plain", checkpoint)
	p.find(t, "plain")
	after := p.boxes["plain"]
	equal(t, "the life of its process", after.nonce, before.nonce)
	if _, err := os.Lstat(after.Upperdir + "/lost"); err == nil {
		t.Error("a file newer than its checkpoint is there")
	}
	after.goesOn(t)
}

// comesBack kills a sandbox that is to come back, does something, and waits for it.
func (p *pack) comesBack(t *testing.T, meanwhile func(*box)) {
	t.Helper()
	b := p.boxes["always"]
	sh(t, "kill -KILL "+strconv.Itoa(b.Pid))
	meanwhile(b)
	eventually(t, "it comes back", func() bool {
		s := inspect(t, "always")
		return s.Status == "running" && s.Pid != b.Pid && s.file("nonce") != b.nonce && s.file("nonce") != ""
	})
	p.find(t, "always")
}

// denied has a sandbox try what it may not.
func (p *pack) denied(t *testing.T, port int) {
	t.Helper()
	to := strconv.Itoa(port)
	_ = exec.Command(program, "exec", "net", "nc", "-w", "20", "203.0.113.9", to).Run()
	eventually(t, "it was denied", func() bool {
		return strings.Contains(agentbox(t, "events", "net"), "203.0.113.9:"+to)
	})
}

// gone asks systemd whether it knows nothing of the units any more.
func (p *pack) gone(t *testing.T) {
	t.Helper()
	for _, name := range []string{"agentbox.service", "agentbox.socket"} {
		equal(t, name, sh(t, "systemctl show "+name+" --value -p LoadState -p ActiveState"), "not-found\ninactive")
	}
}

// version is what the installed program says that it is.
func version(t *testing.T) string {
	t.Helper()
	var v struct {
		Agentbox string `json:"agentbox"`
	}
	if err := json.Unmarshal([]byte(agentbox(t, "version", "--format", "json")), &v); err != nil {
		t.Fatal(err)
	}
	return v.Agentbox
}

// state is that of the package, in dpkg's two letters; empty: dpkg knows none.
func state(t *testing.T) string {
	t.Helper()
	return sh(t, "dpkg-query -W -f '${db:Status-Abbrev}' agentbox 2>/dev/null || true")
}

func command(name string, args ...string) *exec.Cmd {
	cmd := exec.Command(name, args...)
	cmd.Env = append(os.Environ(), "DEBIAN_FRONTEND=noninteractive")
	return cmd
}

func apt(t *testing.T, verb, what string) string {
	t.Helper()
	out, err := command("apt-get", verb, "-q", "-y", what).CombinedOutput()
	if err != nil {
		t.Fatalf("apt-get %s %s: %v\n%s", verb, what, err, out)
	}
	return string(out)
}

// pipes starts a command that is spoken with.
func pipes(t *testing.T, cmd *exec.Cmd) (io.Writer, io.Reader) {
	t.Helper()
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	return in, out
}

// line reads one, and nothing of the next.
func line(t *testing.T, r io.Reader) string {
	t.Helper()
	var said []byte
	for b := make([]byte, 1); ; said = append(said, b[0]) {
		if _, err := io.ReadFull(r, b); err != nil {
			t.Fatalf("it said %q: %v", said, err)
		}
		if b[0] == '\n' {
			return string(said)
		}
	}
}

// kept lists the data by which sandboxes and checkpoints come back.
func kept(t *testing.T) string {
	t.Helper()
	return sh(t, "cd "+root+" && find checkpoints packs images state.db network.json sandboxes -maxdepth 2 | sort")
}

// traces is what there is in the machine, a line each, that a package and its sandboxes
// might leave: every file, but for what apt, dpkg, systemd and logs keep for themselves;
// and of the kernel what is theirs by its name.
func traces(t *testing.T) []string {
	t.Helper()
	const script = `
list() { sed "s|^|$1 |"; }
find / -xdev \( -path /var/log -o -path /var/cache -o -path /var/tmp -o -path /var/lib/dpkg -o -path /var/lib/apt -o -path /root \
	-o -path /var/lib/systemd/timers \) -prune -o -print | grep -Ev '^/etc/(group|gshadow|passwd|shadow)-$|^/etc/\.pwd\.lock$' | list file
find /run /dev/shm -xdev -iname '*agentbox*' | list file
for dir in /proc/[0-9]*; do
	comm=$(cat "$dir/comm" 2>/dev/null) || continue
	if grep -q /agentbox/ "$dir/cgroup" 2>/dev/null || [ -n "$(echo "$comm" | grep -E '^(agentbox.*|conmon|runc|criu)$')" ]; then
		echo "process $comm, $(tr '\0' ' ' <"$dir/cmdline")"
	fi
done
grep -E ' - (overlay|nsfs) |agentbox' /proc/self/mountinfo | cut -d' ' -f5 | list mount
ip -o link | cut -d: -f2 | list link
nft list ruleset | list rule
find /sys/fs/cgroup -type d -iname '*agentbox*' | list cgroup
systemctl list-units --all --no-legend --plain 'agentbox*' | cut -d' ' -f1 | list unit
systemctl list-unit-files --no-legend 'agentbox*' | list enabled`
	lines := strings.Split(sh(t, script), "\n")
	slices.Sort(lines)
	return slices.Compact(lines)
}
