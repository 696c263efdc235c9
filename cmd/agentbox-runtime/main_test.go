package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/criu/criutest"
	"github.com/agentbox/agentbox/criu/host"
	"github.com/agentbox/agentbox/criu/stage"
	"github.com/opencontainers/runtime-spec/specs-go"
)

var wrapperBinary = sync.OnceValues(func() (string, error) {
	dir, err := os.MkdirTemp("", "agentbox-runtime-test")
	if err != nil {
		return "", err
	}
	path := filepath.Join(dir, "agentbox-runtime")
	out, err := exec.Command("go", "build", "-o", path, ".").CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("go build: %w: %s", err, out)
	}
	return path, nil
})

func TestMain(m *testing.M) {
	code := m.Run()
	if path, err := wrapperBinary(); err == nil {
		os.RemoveAll(filepath.Dir(path))
	}
	os.Exit(code)
}

func wrapperPath(t testing.TB) string {
	path, err := wrapperBinary()
	if err != nil {
		t.Fatal(err)
	}
	return path
}

type result struct {
	code        int
	out, stderr string
}

func call1(t testing.TB, env []string, name string, args ...string) result {
	t.Helper()
	cmd := exec.Command(name, args...)
	var out, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &stderr
	cmd.Env = append(os.Environ(), env...)
	err := cmd.Run()
	var e *exec.ExitError
	if err != nil && !errors.As(err, &e) {
		t.Fatal(err)
	}
	return result{cmd.ProcessState.ExitCode(), out.String(), stderr.String()}
}

// A call that the wrapper does not handle must be as if runc had been called.
func TestPassThrough(t *testing.T) {
	criutest.Root(t)
	w, run := wrapperPath(t), t.TempDir()
	runc, err := host.Find("runc", nil)
	if err != nil {
		t.Fatal(err)
	}
	env := []string{"AGENTBOX_RUN=" + run, "AGENTBOX_RUNTIME=" + runc}
	state := t.TempDir()
	for _, args := range [][]string{
		{"--version"}, {"-v"}, {"--help"}, {}, {"features"}, {"--root", state, "list"}, {"--root", state, "list", "-q"},
		{"--root", state, "state", "nosuch"}, {"--root", state, "start", "nosuch"},
		{"--root", state, "delete", "nosuch"},
		{"--root", state, "delete", "-f", "nosuch"}, {"--no-such-flag", "state", "x"}, {"no-such-command"}, {"exec"},
		{"--root", state, "exec", "nosuch", "true"}, {"--root", state, "create", "--no-such", "x"},
		{"--root", state, "create", "--bundle", "/nonexistent", "x"}, {"--root", state, "start", "../x"},
		{"--root", state, "kill", "nosuch", "KILL"},
		{"--root", state, "--log", "/dev/stderr", "--log-format", "json", "state", "nosuch"},
	} {
		want, got := call1(t, env, runc, args...), call1(t, env, w, args...)
		// runc stamps its log lines.
		for _, r := range []*result{&want, &got} {
			r.stderr = stamp(r.stderr)
		}
		if got != want {
			t.Errorf("%q: got %+v\n\twant %+v", args, got, want)
		}
	}
}

// stamp takes the time out of runc's log lines.
func stamp(s string) string {
	lines := strings.Split(s, "\n")
	for i, l := range lines {
		if j := strings.Index(l, "level="); j > 0 && strings.HasPrefix(l, "time=") {
			lines[i] = l[j:]
		}
		if j := strings.Index(l, `"time":`); j > 0 {
			lines[i] = l[:j]
		}
	}
	return strings.Join(lines, "\n")
}

// Arguments and file descriptors arrive untouched, whatever bytes they are.
func TestArgumentsUntouched(t *testing.T) {
	w, dir := wrapperPath(t), t.TempDir()
	fake := filepath.Join(dir, "fake")
	script := "#!/bin/sh\nfor a in \"$@\"; do printf '<%s>' \"$a\"; done\necho in:$(cat) >&2\ncat <&3 >&2\nexit 42\n"
	if err := os.WriteFile(fake, []byte(script), 0o755); err != nil {
		t.Fatal(err)
	}
	r, wr, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	fmt.Fprint(wr, "three")
	wr.Close()
	args := []string{"--x", "", "create ", "a\nb", "\xff\xfe", "--", "-", "$HOME"}
	cmd := exec.Command(w, args...)
	cmd.Stdin = strings.NewReader("zero")
	cmd.ExtraFiles = []*os.File{r}
	var out, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &stderr
	cmd.Env = append(os.Environ(), "AGENTBOX_RUNTIME="+fake, "AGENTBOX_RUN="+dir)
	_ = cmd.Run()
	want := ""
	for _, a := range args {
		want += "<" + a + ">"
	}
	if out.String() != want || stderr.String() != "in:zero\nthree" || cmd.ProcessState.ExitCode() != 42 {
		t.Fatalf("got %q %q %d, want %q", out.String(), stderr.String(), cmd.ProcessState.ExitCode(), want)
	}
}

func TestNeverCallsItself(t *testing.T) {
	criutest.Root(t)
	w, dir := wrapperPath(t), t.TempDir()
	if r := call1(t, []string{"AGENTBOX_RUNTIME=" + w}, w, "--version"); r.code != 127 ||
		!strings.Contains(r.stderr, "itself") {
		t.Errorf("AGENTBOX_RUNTIME=itself: %+v", r)
	}
	data, err := os.ReadFile(w)
	if err != nil {
		t.Fatal(err)
	}
	copied := filepath.Join(dir, "runc")
	if err := os.WriteFile(copied, data, 0o755); err != nil {
		t.Fatal(err)
	}
	// A copy is another file, so only the guard can tell.
	if r := call1(t, []string{"AGENTBOX_RUNTIME=" + copied}, w, "--version"); r.code != 127 ||
		!strings.Contains(r.stderr, "itself") {
		t.Errorf("AGENTBOX_RUNTIME=a copy: %+v", r)
	}
	// Installed as runc, it finds the real one behind it.
	if err := os.Remove(copied); err != nil {
		t.Fatal(err)
	}
	if err := os.Link(w, copied); err != nil {
		if err := os.Symlink(w, copied); err != nil {
			t.Fatal(err)
		}
	}
	if r := call1(t, []string{"PATH=" + dir, "AGENTBOX_RUNTIME="}, copied, "--version"); r.code != 0 ||
		!strings.Contains(r.out, "runc version") {
		t.Errorf("as runc in PATH: %+v", r)
	}
	if r := call1(t, []string{"PATH=", "AGENTBOX_RUNTIME="}, w, "--version"); r.code != 0 ||
		!strings.Contains(r.out, "runc version") {
		t.Errorf("with no PATH: %+v", r)
	}
}

// box is a container whose runtime is the wrapper.
type box struct {
	*criutest.Box
	run string
}

func newBox(t *testing.T, args []string, edit func(*specs.Spec)) *box {
	b := &box{criutest.New(t, args, edit), t.TempDir()}
	t.Setenv("AGENTBOX_RUNTIME", b.Binary)
	t.Setenv("AGENTBOX_RUN", b.run)
	b.Binary = wrapperPath(t)
	return b
}

// dump checkpoints and ends the container.
func (b *box) dump(t *testing.T, flags ...string) {
	t.Helper()
	if out, err := b.Do("pause", b.ID); err != nil {
		t.Fatal(out)
	}
	args := append([]string{
		"checkpoint", "--leave-running", "--file-locks", "--image-path", b.Images, "--work-path", b.Work,
	}, flags...)
	if out, err := b.Do(append(args, b.ID)...); err != nil {
		log, _ := os.ReadFile(filepath.Join(b.Work, "dump.log"))
		t.Fatalf("%s%s", out, log)
	}
}

func TestRestore(t *testing.T) {
	b := newBox(t, criutest.Counter, nil)
	null, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	defer null.Close()
	// The first life's output goes to a pipe, as conmon's containers' does.
	first, firstW, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	go io.Copy(io.Discard, first)
	b.Start(firstW)
	firstW.Close()
	b.Until("it counts", func() bool { return b.Count() >= 5 })
	b.dump(t)
	at, putBack := b.Count(), b.Keep()
	b.End()
	if stage.At(b.run, b.ID).Restored() {
		t.Fatal("marked without a restore")
	}

	for round := range 2 { // images restore any number of times
		putBack()
		if err := stage.At(b.run, b.ID).Put(stage.Restore{
			Images: b.Images, Work: b.Work, Flags: []string{"--file-locks"}, Config: b.Config,
		}); err != nil {
			t.Fatal(err)
		}
		out, outW, err := os.Pipe()
		if err != nil {
			t.Fatal(err)
		}
		pidFile, log := filepath.Join(b.Work, "pid"), filepath.Join(b.Work, "log")
		create := b.Cmd(outW, "--log", log, "--log-format", "json", "create", "--bundle", b.Bundle,
			"--pid-file", pidFile, b.ID)
		if err := create.Run(); err != nil {
			text, _ := os.ReadFile(log)
			t.Fatalf("round %d: create: %v: %s", round, err, text)
		}
		if s := b.Status(); s != "paused" {
			t.Fatalf("after create it is %s, want paused", s)
		}
		if !stage.At(b.run, b.ID).Restored() {
			t.Fatal("not marked restored")
		}
		pid, err := os.ReadFile(pidFile)
		if err != nil || string(pid) != strconv.Itoa(b.Pid()) {
			t.Fatalf("pid file has %q (%v), the container has pid %d", pid, err, b.Pid())
		}
		if err := b.Cmd(outW, "--log", log, "start", b.ID).Run(); err != nil {
			t.Fatalf("start: %v", err)
		}
		outW.Close()
		if s := b.Status(); s != "running" {
			t.Fatalf("after start it is %s", s)
		}
		if stage.At(b.run, b.ID).Restored() {
			t.Fatal("still marked after start")
		}
		b.Until("it counts on", func() bool { return b.Count() > at+5 })
		line := make([]byte, 32)
		n, err := out.Read(line)
		if err != nil {
			t.Fatal(err)
		}
		if got, _ := strconv.Atoi(strings.Fields(string(line[:n]))[0]); got < at || got > at+3 {
			t.Fatalf("its output goes on at %q, it was dumped at %d", line[:n], at)
		}
		b.End() // the writer: closing the reader first would kill it by SIGPIPE
		out.Close()
	}
	if ids, _ := stage.List(b.run); len(ids) != 0 {
		t.Fatalf("left behind: %v", ids)
	}
	// With nothing staged it starts afresh, as under runc.
	b.Start(nil)
	b.Until("it starts afresh", func() bool { return b.Count() > 0 && b.Count() < at })
}

func TestRestoreWithTerminal(t *testing.T) {
	b := newBox(t, []string{"sh", "-c", "n=kept; echo ready; while read l; do echo \"got $l $n\"; done"},
		func(s *specs.Spec) { s.Process.Terminal = true })
	master, socket := console(t)
	if out, err := b.Do("create", "--bundle", b.Bundle, "--console-socket", socket, b.ID); err != nil {
		t.Fatal(out)
	}
	tty := master()
	if out, err := b.Do("start", b.ID); err != nil {
		t.Fatal(out)
	}
	expect(t, tty, "ready")
	fmt.Fprintln(tty, "one")
	expect(t, tty, "got one kept")
	b.dump(t)
	b.End()
	tty.Close()
	if err := stage.At(b.run, b.ID).Put(stage.Restore{Images: b.Images, Work: b.Work}); err != nil {
		t.Fatal(err)
	}
	master, socket = console(t)
	if out, err := b.Do("create", "--bundle", b.Bundle, "--console-socket", socket, b.ID); err != nil {
		log, _ := os.ReadFile(filepath.Join(b.Work, "restore.log"))
		t.Fatalf("%s%s", out, log)
	}
	tty = master()
	defer tty.Close()
	if out, err := b.Do("start", b.ID); err != nil {
		t.Fatal(out)
	}
	fmt.Fprintln(tty, "two")
	expect(t, tty, "got two kept")
}

// console makes a console socket; master waits for what arrives there.
func console(t *testing.T) (master func() *os.File, path string) {
	t.Helper()
	path = filepath.Join(t.TempDir(), "tty")
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.Bind(fd, &unix.SockaddrUnix{Name: path}); err != nil {
		t.Fatal(err)
	}
	if err := unix.Listen(fd, 1); err != nil {
		t.Fatal(err)
	}
	return func() *os.File {
		t.Helper()
		defer unix.Close(fd)
		conn, _, err := unix.Accept4(fd, unix.SOCK_CLOEXEC)
		if err != nil {
			t.Fatal(err)
		}
		defer unix.Close(conn)
		data, oob := make([]byte, 4096), make([]byte, unix.CmsgSpace(4))
		_, n, _, _, err := unix.Recvmsg(conn, data, oob, unix.MSG_CMSG_CLOEXEC)
		if err != nil {
			t.Fatal(err)
		}
		msgs, err := unix.ParseSocketControlMessage(oob[:n])
		if err != nil || len(msgs) != 1 {
			t.Fatal("no terminal arrived", err)
		}
		fds, err := unix.ParseUnixRights(&msgs[0])
		if err != nil {
			t.Fatal(err)
		}
		if err := unix.SetNonblock(fds[0], true); err != nil { // so that deadlines work
			t.Fatal(err)
		}
		return os.NewFile(uintptr(fds[0]), "tty")
	}, path
}

func expect(t *testing.T, tty *os.File, want string) {
	t.Helper()
	_ = tty.SetReadDeadline(time.Now().Add(2 * time.Minute))
	var seen []byte
	buf := make([]byte, 1024)
	for !bytes.Contains(seen, []byte(want)) {
		n, err := tty.Read(buf)
		seen = append(seen, buf[:n]...)
		if err != nil {
			t.Fatalf("waiting for %q: %v; seen %q", want, err, seen)
		}
	}
}

func TestFailedRestore(t *testing.T) {
	b := newBox(t, criutest.Counter, nil)
	b.Start(nil)
	b.Until("it counts", func() bool { return b.Count() >= 2 })
	b.dump(t)
	b.End()
	// Files of another instant than the processes.
	if err := os.WriteFile(filepath.Join(b.Files, "bin", "busybox"), []byte("other"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := stage.At(b.run, b.ID).Put(stage.Restore{Images: b.Images, Work: b.Work}); err != nil {
		t.Fatal(err)
	}
	for _, format := range []string{"json", "text"} {
		log := filepath.Join(b.Work, "log."+format)
		pidFile := filepath.Join(b.Work, "pid")
		cmd := b.Cmd(nil, "--log", log, "--log-format", format, "create", "--bundle", b.Bundle,
			"--pid-file", pidFile, b.ID)
		var stderr bytes.Buffer
		cmd.Stderr = &stderr
		if err := cmd.Run(); err == nil {
			t.Fatal("create succeeded")
		}
		const why = "the file /bin/busybox has 5 bytes"
		if !strings.Contains(stderr.String(), why) {
			t.Errorf("stderr: %s", stderr.String())
		}
		text, err := os.ReadFile(log)
		if err != nil {
			t.Fatal(err)
		}
		lines := strings.Split(strings.TrimSpace(string(text)), "\n")
		last := lines[len(lines)-1]
		if !strings.Contains(last, why) {
			t.Errorf("the log's last line: %s", last)
		}
		if format == "json" {
			var entry struct{ Level, Msg, Time string }
			if err := json.Unmarshal([]byte(last), &entry); err != nil || entry.Level != "error" ||
				entry.Msg == "" || entry.Time == "" {
				t.Errorf("log entry %s: %v", last, err)
			}
		}
		if s := b.Status(); s != "gone" {
			t.Errorf("the container is %s after a failed restore", s)
		}
		if _, err := os.Stat(pidFile); err == nil {
			t.Error("the pid file is left")
		}
		// The engine does this next; a second try must not start afresh.
		_, _ = b.Do("delete", "--force", b.ID)
		if _, err := stage.At(b.run, b.ID).Load(); err != nil {
			t.Fatalf("not staged any more: %v", err)
		}
	}
	noMounts(t, filepath.Dir(b.State))
}

// Cut-off page images send CRIU into a loop that fills its log: the wrapper
// ends it, and nothing of the container's files is lost in cleaning up.
func TestHangingRestore(t *testing.T) {
	b := newBox(t, criutest.Counter, nil)
	b.Start(nil)
	b.Until("it counts", func() bool { return b.Count() >= 2 })
	b.dump(t)
	b.End()
	pages, err := filepath.Glob(filepath.Join(b.Images, "pages-*.img"))
	if err != nil || len(pages) == 0 {
		t.Fatal("no page images", err)
	}
	for _, p := range pages {
		if err := os.Truncate(p, 0); err != nil {
			t.Fatal(err)
		}
	}
	if err := stage.At(b.run, b.ID).Put(stage.Restore{
		Images: b.Images, Work: b.Work, Timeout: 1500 * time.Millisecond,
	}); err != nil {
		t.Fatal(err)
	}
	start := time.Now()
	out, err := b.Do("create", "--bundle", b.Bundle, b.ID)
	if err == nil || !strings.Contains(out, "was killed") {
		t.Fatalf("create: %v: %s", err, out)
	}
	if d := time.Since(start); d > time.Minute {
		t.Errorf("it took %v", d)
	}
	if s := b.Status(); s != "gone" {
		t.Errorf("the container is %s", s)
	}
	if _, err := os.Stat(filepath.Join(b.Files, "bin", "busybox")); err != nil {
		t.Errorf("the container's files were harmed: %v", err)
	}
	noMounts(t, filepath.Dir(b.State))
	cgroups, err := filepath.Glob("/sys/fs/cgroup/*/" + b.ID)
	if more, _ := filepath.Glob("/sys/fs/cgroup/" + b.ID); err != nil || len(cgroups)+len(more) > 0 {
		t.Errorf("left behind: %v %v", cgroups, more)
	}
	for _, p := range processes(t) {
		if strings.Contains(p, b.Images) || strings.Contains(p, b.ID) {
			t.Errorf("still there: %s", p)
		}
	}
}

func noMounts(t *testing.T, below string) {
	t.Helper()
	mounts, err := os.ReadFile("/proc/self/mounts")
	if err != nil {
		t.Fatal(err)
	}
	for _, l := range strings.Split(string(mounts), "\n") {
		if strings.Contains(l, below) {
			t.Errorf("left mounted: %s", l)
		}
	}
}

func processes(t *testing.T) (lines []string) {
	t.Helper()
	files, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range files {
		if data, err := os.ReadFile(f); err == nil && filepath.Base(filepath.Dir(f)) != strconv.Itoa(os.Getpid()) {
			lines = append(lines, strings.ReplaceAll(string(data), "\x00", " "))
		}
	}
	return lines
}

// A live container must survive an attempt to restore over it.
func TestNeverOverALiveOne(t *testing.T) {
	b := newBox(t, criutest.Counter, nil)
	b.Start(nil)
	b.Until("it counts", func() bool { return b.Count() >= 2 })
	if err := stage.At(b.run, b.ID).Put(stage.Restore{Images: b.Images, Work: b.Work}); err != nil {
		t.Fatal(err)
	}
	out, err := b.Do("create", "--bundle", b.Bundle, b.ID)
	if err == nil || !strings.Contains(out, "exists") {
		t.Fatalf("create: %v: %s", err, out)
	}
	at := b.Count()
	b.Until("it still counts", func() bool { return b.Count() > at+2 })
}

func TestStagedButNotUnderstood(t *testing.T) {
	criutest.Root(t)
	w, run := wrapperPath(t), t.TempDir()
	env := []string{"AGENTBOX_RUN=" + run}
	if err := stage.At(run, "c1").Put(stage.Restore{Images: "/i", Work: filepath.Join(run, "w")}); err != nil {
		t.Fatal(err)
	}
	for _, args := range [][]string{{"create", "--new-flag", "x", "c1"}, {"run", "c1"}, {"--odd", "create", "c1"}} {
		if r := call1(t, env, w, args...); r.code == 0 || !strings.Contains(r.stderr, "staged") {
			t.Errorf("%q: %+v", args, r)
		}
	}
	if err := os.WriteFile(filepath.Join(run, "restore", "c1", "restore.json"), []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	if r := call1(t, env, w, "create", "c1"); r.code == 0 || !strings.Contains(r.stderr, "corrupt") {
		t.Errorf("corrupt: %+v", r)
	}
	// State of ours that is not there at all is none.
	if r := call1(t, []string{"AGENTBOX_RUN=/proc/nonexistent"}, w, "--root", run, "state",
		"c1"); !strings.Contains(r.stderr, "does not exist") {
		t.Errorf("unreadable run directory: %+v", r)
	}
}

func TestKillTree(t *testing.T) {
	cmd := exec.Command("sh", "-c", "sh -c 'sleep 300 & sleep 301 & wait' & sleep 302 & wait")
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	criutest.Until(t, "all five run", func() bool { return len(tree(cmd.Process.Pid)) == 5 })
	pids := tree(cmd.Process.Pid)
	killTree(cmd.Process.Pid)
	_ = cmd.Wait()
	for _, p := range pids {
		criutest.Until(t, "they are dead", func() bool {
			stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", p))
			return err != nil || strings.Contains(string(stat), ") Z ")
		})
	}
}
