package test

import (
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/agentbox/agentbox/runtime/api"
)

// unit is a service as systemd runs it: with a socket that is not its own, and a
// watchdog.
type unit struct {
	*box
	cmd    *exec.Cmd
	listen *net.UnixListener
	notify *net.UnixConn
}

// activate makes the socket of a unit, of a group.
func (b *box) activate(gid int) *unit {
	b.Helper()
	u := &unit{box: b}
	b.ok("ps", "-a") // what it makes of its directories is what the service finds
	path := filepath.Join(b.root, "run", api.SocketName)
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		b.Fatal(err)
	}
	var err error
	if u.listen, err = net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"}); err != nil {
		b.Fatal(err)
	}
	if err := os.Chown(path, 0, gid); err != nil {
		b.Fatal(err)
	}
	if err := os.Chmod(path, 0o660); err != nil {
		b.Fatal(err)
	}
	if u.notify, err = net.ListenUnixgram("unixgram", &net.UnixAddr{
		Name: filepath.Join(b.root, "notify"), Net: "unixgram",
	}); err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() {
		if u.cmd != nil && u.cmd.ProcessState == nil {
			_ = u.cmd.Process.Kill()
			_ = u.cmd.Wait()
		}
		u.notify.Close()
		u.listen.Close() // commands use the embedded engine from here on
	})
	return u
}

// up starts the service and waits until it says that it is ready.
func (u *unit) up() {
	u.Helper()
	f, err := u.listen.File()
	if err != nil {
		u.Fatal(err)
	}
	defer f.Close()
	u.cmd = exec.Command("sh", "-c", `LISTEN_PID=$$ WATCHDOG_PID=$$ exec "$@"`, "sh", filepath.Join(bin, "agentbox"),
		"--root", u.root, "serve")
	u.cmd.Env = append(os.Environ(), "LISTEN_FDS=1", "LISTEN_FDNAMES=agentbox.socket", "WATCHDOG_USEC=100000",
		"NOTIFY_SOCKET="+u.notify.LocalAddr().String())
	u.cmd.ExtraFiles = []*os.File{f}
	log, err := os.OpenFile(filepath.Join(u.root, "serve.log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		u.Fatal(err)
	}
	defer log.Close()
	u.cmd.Stderr = log
	if err := u.cmd.Start(); err != nil {
		u.Fatal(err)
	}
	u.told("READY=1")
}

// told waits until systemd is told something.
func (u *unit) told(want string) {
	u.Helper()
	if err := u.notify.SetReadDeadline(time.Now().Add(time.Minute)); err != nil {
		u.Fatal(err)
	}
	for buf := make([]byte, 4096); ; {
		n, err := u.notify.Read(buf)
		if err != nil {
			log, _ := os.ReadFile(filepath.Join(u.root, "serve.log"))
			u.Fatalf("systemd is not told %s: %v\n%s", want, err, log)
		}
		if string(buf[:n]) == want {
			return
		}
	}
}

// down ends the service as `systemctl stop` does, by its main process alone.
func (u *unit) down() {
	u.Helper()
	if err := u.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		u.Fatal(err)
	}
	u.told("STOPPING=1")
	if err := u.cmd.Wait(); err != nil {
		u.Fatal(err)
	}
}

// The service is restarted, as for an upgrade, below a sandbox, which does not notice; clients
// that connect meanwhile wait, and the next service knows all.
func TestServiceRestart(t *testing.T) {
	t.Parallel()
	u := memoryBox(t).activate(0)
	if r := u.try([]string{"AGENTBOX_HOST=none"}, "lease", "create", "--name", "l", "--for", "1h"); r.code != 0 {
		t.Fatal(r)
	}
	u.awaitSupervisor(true)
	if err := syscall.Kill(u.supervisor(), syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	u.awaitSupervisor(false)
	u.up() // and with it another supervisor, which must not keep its socket open
	u.awaitSupervisor(true)
	raw, err := u.listen.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	var socket string
	if err := raw.Control(func(fd uintptr) {
		socket, err = os.Readlink(fmt.Sprintf("/proc/self/fd/%d", fd))
	}); err != nil || socket == "" {
		t.Fatalf("%q, %v", socket, err)
	}
	held := fmt.Sprintf("/proc/%d/fd", u.supervisor())
	entries, err := os.ReadDir(held)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if to, _ := os.Readlink(filepath.Join(held, e.Name())); to == socket {
			t.Error("the supervisor has the socket of the service")
		}
	}
	u.ok("lease", "release", "l")
	u.told("WATCHDOG=1")
	u.told("WATCHDOG=1")
	u.start("c", "--network", "none", "busybox", "sh", "-c", counter)
	u.reaches("c", 5)
	pid := u.inspect("c").Pid
	one := u.checkpoint("--name", "one", "c")
	u.down()
	now := u.count("c")
	u.reaches("c", now+5)

	// No service accepts; the answer comes when there is one again.
	conn, err := net.Dial("unix", u.listen.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	fmt.Fprint(conn, "GET /v1/checkpoints/c@one HTTP/1.1\r\nHost: agentbox\r\nConnection: close\r\n\r\n")
	u.up()
	answer := make([]byte, 1<<16)
	if n, err := conn.Read(answer); err != nil || !strings.Contains(string(answer[:n]), one) {
		t.Errorf("%s, %v", answer[:n], err)
	}
	if got := u.inspect("c"); got.Pid != pid || got.Status != "running" {
		t.Errorf("after the restart of the service: %+v, its process was %d", got, pid)
	}
	u.ok("restore", "c", "one")
	u.reaches("c", 10)
	// killed, as by the watchdog
	if err := u.cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = u.cmd.Wait()
	pid = u.inspectNow("c")
	u.up()
	equal(u.box, "process", u.inspect("c").Pid, pid)
	u.down()
}

// inspectNow is the process of a sandbox, by the embedded engine.
func (u *unit) inspectNow(name string) int {
	u.Helper()
	r := u.try([]string{"AGENTBOX_HOST=none"}, "inspect", name)
	list := decode[[]sandbox](u.box, r.out)
	if len(list) != 1 || list[0].Pid == 0 {
		u.Fatal(r)
	}
	return list[0].Pid
}

// A member of the socket's group gets to it, though directories above it were made for root
// alone; others do not, and cannot list them.
func TestServiceGroup(t *testing.T) {
	t.Parallel()
	const gid = 54321
	u := memoryBox(t).activate(gid)
	u.up()
	defer u.down()
	as := func(id uint32, args ...string) (string, error) {
		cmd := exec.CommandContext(t.Context(), args[0], args[1:]...)
		cmd.Dir = "/"
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: id}}
		out, err := cmd.CombinedOutput()
		return string(out), err
	}
	ask := []string{"curl", "-sS", "--unix-socket", u.listen.Addr().String(), "http://agentbox/v1/sandboxes"}
	if out, err := as(gid, ask...); err != nil || out != "{\"items\":[]}\n" {
		t.Errorf("%q, %v", out, err)
	}
	if out, err := as(65534, ask...); err == nil {
		t.Errorf("a stranger gets %q", out)
	}
	for _, dir := range []string{u.root, filepath.Join(u.root, "run")} {
		if out, err := as(gid, "ls", dir); err == nil {
			t.Errorf("the group lists %s: %q", dir, out)
		}
	}
}

// Under systemd the log goes to the journal, with fields to look for.
func TestServiceJournal(t *testing.T) {
	t.Parallel()
	b := memoryBox(t)
	journal, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: filepath.Join(b.root,
		"journal"), Net: "unixgram"})
	if err != nil {
		t.Fatal(err)
	}
	defer journal.Close()
	stderr, err := os.Create(filepath.Join(b.root, "stderr"))
	if err != nil {
		t.Fatal(err)
	}
	defer stderr.Close()
	info, err := stderr.Stat()
	if err != nil {
		t.Fatal(err)
	}
	st := info.Sys().(*syscall.Stat_t)
	// A journal for this service alone is in the place of the host's.
	cmd := exec.Command("unshare", "-m", "sh", "-ec", `j=$1; shift
		mount -t tmpfs none /run; mkdir -p /run/systemd/journal; touch /run/systemd/journal/socket
		mount --bind "$j" /run/systemd/journal/socket; exec "$@"`, "sh", journal.LocalAddr().String(),
		filepath.Join(bin, "agentbox"), "--root", b.root, "serve")
	cmd.Env = append(os.Environ(), "JOURNAL_STREAM="+strconv.FormatUint(st.Dev, 10)+":"+strconv.FormatUint(st.Ino, 10))
	cmd.Stderr = stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if err := journal.SetReadDeadline(time.Now().Add(time.Minute)); err != nil {
		t.Fatal(err)
	}
	entry := func(message string) string {
		t.Helper()
		for buf := make([]byte, 1<<16); ; {
			n, err := journal.Read(buf)
			if err != nil {
				said, _ := os.ReadFile(stderr.Name())
				t.Fatalf("the journal is not told %q: %v: %s", message, err, said)
			}
			if text := "\n" + string(buf[:n]); strings.Contains(text, "\nMESSAGE="+message) {
				return text
			}
		}
	}
	entry("service listening")
	b.fails(3, "inspect", "nope")
	for text := entry("request"); ; text = entry("request") {
		if !strings.Contains(text, "\nSANDBOX=") {
			continue // the client's first request, for the service's Info
		}
		for _, want := range []string{
			"SANDBOX=nope", "VERB=get sandboxes", "CLIENT_UID=0", "STATUS=404", "PRIORITY=6",
		} {
			if !strings.Contains(text, "\n"+want+"\n") {
				t.Errorf("no %s in %s", want, text)
			}
		}
		break
	}
	if err := cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); err != nil {
		t.Fatal(err)
	}
	if said, err := os.ReadFile(stderr.Name()); err != nil || len(said) > 0 {
		t.Errorf("stderr: %s, %v", said, err)
	}
}
