package test

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/creack/pty"
)

// terminal is a user at a terminal with agentbox in the foreground.
type terminal struct {
	b    *box
	cmd  *exec.Cmd
	tty  *os.File
	mu   sync.Mutex
	text []byte
	done chan struct{}
}

func (b *box) terminal(args ...string) *terminal {
	b.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), commandTimeout)
	b.Cleanup(cancel)
	return b.onTerminal(b.command(ctx, args...))
}

// onTerminal starts a command on a terminal.
func (b *box) onTerminal(cmd *exec.Cmd) *terminal {
	b.Helper()
	m := &terminal{b: b, cmd: cmd, done: make(chan struct{})}
	tty, err := pty.StartWithSize(m.cmd, &pty.Winsize{Rows: 30, Cols: 100})
	if err != nil {
		b.Fatal(err)
	}
	m.tty = tty
	b.Cleanup(func() { tty.Close() })
	go func() {
		defer close(m.done)
		buf := make([]byte, 4096)
		for {
			n, err := tty.Read(buf)
			m.mu.Lock()
			m.text = append(m.text, buf[:n]...)
			m.mu.Unlock()
			if err != nil {
				return // EIO: the last process that had it open is gone
			}
		}
	}()
	return m
}

func (m *terminal) screen() string {
	m.mu.Lock()
	defer m.mu.Unlock()
	return string(m.text)
}

func (m *terminal) enter(s string) {
	m.b.Helper()
	if _, err := m.tty.WriteString(s); err != nil {
		m.b.Fatal(err)
	}
}

func (m *terminal) shows(s string) {
	m.b.Helper()
	for deadline := time.Now().Add(2 * time.Minute); !strings.Contains(m.screen(),
		s); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			m.b.Fatalf("the screen never showed %q:\n%q", s, m.screen())
		}
	}
}

// ends waits for agentbox to end and returns its exit code.
func (m *terminal) ends() int {
	m.b.Helper()
	err := m.cmd.Wait()
	<-m.done
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		m.b.Fatal(err)
	}
	return m.cmd.ProcessState.ExitCode()
}

func TestTerminal(t *testing.T) {
	b := newBox(t)
	m := b.terminal("run", "-it", "--name", "t", "--network", "none", "busybox", "sh")
	m.enter("echo size: $(stty size)\r")
	m.shows("size: 30 100")
	if err := pty.Setsize(m.tty, &pty.Winsize{Rows: 20, Cols: 70}); err != nil {
		t.Fatal(err)
	}
	b.eventually("the sandbox's terminal has the new size", func() bool {
		m.enter("echo size: $(stty size)\r")
		return strings.Contains(m.screen(), "size: 20 70")
	})
	// Said by the command that is to be interrupted: a Ctrl-C that comes while the shell starts
	// it reaches no command.
	m.enter("sh -c \"echo rea''dy; exec sleep 1000\"\r")
	m.shows("ready")
	m.enter("\x03")
	m.enter("echo still he''re $?\r")
	m.shows("still here 130")
	m.enter("COLOUR=blue\r")
	m.enter("\x10\x11")
	equal(b, "exit after ctrl-p ctrl-q", m.ends(), 0)
	equal(b, "status after detaching", b.inspect("t").Status, "running")

	// A sandbox with a terminal is checkpointed and restored like any other.
	b.checkpoint("t")
	m = b.terminal("attach", "t")
	m.enter("echo colour $COLOUR.\r")
	m.shows("colour blue.")
	m.enter("COLOUR=red; echo now $COLOUR.\r")
	m.shows("now red.")
	m.enter("\x10\x11")
	equal(b, "exit after ctrl-p ctrl-q", m.ends(), 0)

	b.ok("restore", "t")
	m = b.terminal("attach", "t")
	if err := pty.Setsize(m.tty, &pty.Winsize{Rows: 25, Cols: 90}); err != nil {
		t.Fatal(err)
	}
	m.enter("echo after: $COLOUR.\r")
	m.shows("after: blue.")
	b.eventually("the restored terminal has the user's size", func() bool {
		m.enter("echo size: $(stty size)\r")
		return strings.Contains(m.screen(), "size: 25 90")
	})
	m.enter("sh -c \"echo on''ce more; exec sleep 1000\"\r")
	m.shows("once more")
	m.enter("\x03")
	m.enter("echo interr''upted\r")
	m.shows("interrupted")
	m.enter("exit 9\r")
	_ = m.ends()
	b.eventually("it has exited", func() bool { return b.inspect("t").Status == "exited" })
	equal(b, "exit code", b.inspect("t").ExitCode, 9)

	// The exit code of a command at a terminal is agentbox's.
	m = b.terminal("run", "-it", "--rm", "--name", "u", "--network", "none", "busybox", "sh", "-c", "exit 5")
	equal(b, "exit", m.ends(), 5)
	b.start("v", "--network", "none", "busybox", "sleep", "1000")
	m = b.terminal("exec", "-it", "v", "sh")
	m.enter("echo size: $(stty size)\r")
	m.shows("size: 30 100")
	m.enter("exit 6\r")
	equal(b, "exit", m.ends(), 6)
}

// TestTerminalStays: a terminal stays connected over a restore by another command, and what
// is typed meanwhile reaches the program that goes on.
func TestTerminalStays(t *testing.T) {
	t.Parallel()
	for _, kind := range []string{"engine", "service"} {
		t.Run(kind, func(t *testing.T) {
			b := memoryBox(t)
			if kind == "service" {
				b.serve()
			}
			m := b.terminal("run", "-it", "--rm", "--name", "t", "--network", "none", "busybox", "sh")
			m.enter("COLOUR=blue; echo colour $COLOUR.\r")
			m.shows("colour blue.")
			id := b.checkpoint("--name", "one", "t")
			x := b.terminal("exec", "-it", "t", "sh")
			x.enter("echo an ex''ec\r")
			x.shows("an exec")
			m.enter("COLOUR=red; echo red > /red; echo now $COLOUR.\r")
			m.shows("now red.")
			b.ok("restore", "t", "one")
			m.shows("t was restored to checkpoint " + id[:12] + " (one)")
			equal(b, "exit of the exec", x.ends(), 137)
			x.shows("t was restored to checkpoint " + id[:12] + " (one), which ended this command")
			m.enter("echo back to $COLOUR.; ls /red\r")
			m.shows("back to blue.")
			m.shows("ls: /red: No such file")
			b.ok("restore", "t", "one")
			b.eventually("it is back again", func() bool { return strings.Count(m.screen(), "(one)") == 2 })
			m.enter("echo size: $(stty size)\r")
			m.shows("size: 30 100")
			m.enter("exit 9\r")
			equal(b, "exit", m.ends(), 9)
			b.eventually("--rm removes it", func() bool { return b.ok("ps", "-a", "-q") == "" })
		})
	}
}

func TestForeground(t *testing.T) {
	b := newBox(t)
	r := b.input([]byte("one\ntwo\n"), nil, "run", "-i", "--rm", "--network", "none", "busybox", "sh", "-c",
		"cat; echo done >&2; exit 3")
	equal(b, "stdout", r.out, "one\ntwo\n")
	equal(b, "stderr", r.err, "done\n")
	equal(b, "exit", r.code, 3)
	b.eventually("--rm removes it", func() bool { return b.ok("ps", "-a", "-q") == "" })

	// Ctrl-C without a terminal goes to the command.
	ctx, cancel := context.WithTimeout(context.Background(), commandTimeout)
	defer cancel()
	cmd := b.command(ctx, "run", "--name", "s", "--network", "none", "busybox", "sh", "-c",
		"trap 'exit 44' INT; echo up > /up; while :; do sleep 0.02; done")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	b.eventually("it is up", func() bool {
		_, ok := b.find("s")
		return ok && b.file("s", "up") != ""
	})
	if err := cmd.Process.Signal(syscall.SIGINT); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait()
	equal(b, "exit", cmd.ProcessState.ExitCode(), 44)
	equal(b, "exit code", b.inspect("s").ExitCode, 44)
}

// A program that has opened /dev/tty, as less and ssh do, is dumped, has /dev/tty open still, and
// goes on with its terminal after a restore.
func TestOwnTerminal(t *testing.T) {
	t.Parallel()
	b := memoryBox(t)
	b.start("tty", "-t", "--network", "none", "busybox", "sh", "-c",
		"sh -c 'exec 3<>/dev/tty; while :; do echo alive >&3; sleep 0.1; done'; true")
	says := func(when string) {
		b.Helper()
		n := strings.Count(b.ok("logs", "tty"), "alive")
		b.eventually(when+" it writes to its terminal", func() bool {
			return strings.Count(b.ok("logs", "tty"), "alive") > n+2
		})
	}
	opened := func() string {
		b.Helper()
		// A process that it has just forked, for its sleep, still looks the same.
		return strings.TrimSpace(b.sh("tty",
			"for p in /proc/[0-9]*; do case $(tr '\\0' ' ' <$p/cmdline) in 'sh -c exec 3'*) readlink $p/fd/3;; esac; done | sort -u"))
	}
	says("at first")
	equal(b, "what it has open", opened(), "/dev/tty")
	r := b.try(nil, "checkpoint", "--name", "one", "tty")
	if r.code != 0 || !strings.Contains(r.err, "/dev/tty and job control fail in processes") {
		t.Fatalf("%s", r)
	}
	equal(b, "what it has open after the checkpoint", opened(), "/dev/tty")
	says("after the checkpoint")
	for range 2 {
		b.ok("restore", "tty", "one")
		equal(b, "what it has open after the restore", opened(), "/dev/pts/0")
		says("after the restore")
	}
	if again := b.try(nil, "checkpoint", "tty"); again.code != 0 {
		t.Errorf("%s", again)
	}
}
