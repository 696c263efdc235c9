package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/creack/pty"
	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/runtime"
)

// fakeMain is agentbox over a fakeService, as a program of its own, so that a
// real terminal, real signals and a real exit code can be had. Its sandboxes
// run talk.
func fakeMain() {
	f := history()
	f.diff = patched().diff
	f.program = talk
	f.undoList = threeSteps(f)
	f.sandboxes[1].Spec.Terminal, f.sandboxes[1].Spec.OpenStdin = true, true
	f.exits[f.sandboxes[1].ID] = make(chan int, 1)
	a := newApp()
	a.open = func(context.Context, globals) (runtime.Service, error) { return f, nil }
	os.Exit(a.main(os.Args[1:]))
}

// talk says what reaches it: sizes, bytes and signals. The byte q ends it
// with 7, ! makes it panic, the detach keys detach.
func talk(ctx context.Context, s runtime.Streams, signals <-chan string) (int, error) {
	fmt.Fprintf(s.Stdout, "ready\n")
	bytes := make(chan byte)
	if s.Stdin != nil {
		go func() {
			r := bufio.NewReader(s.Stdin)
			for {
				b, err := r.ReadByte()
				if err != nil {
					return
				}
				bytes <- b
			}
		}()
	}
	typed := 0
	for {
		select {
		case size := <-s.Resize:
			fmt.Fprintf(s.Stdout, "size %dx%d\n", size.Width, size.Height)
		case sig := <-signals:
			fmt.Fprintf(s.Stdout, "signal %s\n", sig)
			if sig == "SIGTERM" {
				return 143, nil
			}
		case b := <-bytes:
			if typed < len(s.DetachKeys) && b == s.DetachKeys[typed] {
				if typed++; typed == len(s.DetachKeys) {
					return 0, runtime.ErrDetached
				}
				continue
			}
			typed = 0
			switch b {
			case 'q':
				return 7, nil
			case '!':
				panic("asked to")
			}
			fmt.Fprintf(s.Stdout, "byte %d\n", b)
		case <-ctx.Done():
			return 0, context.Cause(ctx)
		}
	}
}

// A terminal is agentbox-fake on a pseudo-terminal.
type ptyRun struct {
	t    *testing.T
	cmd  *exec.Cmd
	ctrl *os.File
	tty  *os.File
	seen strings.Builder
	out  chan string
}

func onPty(t *testing.T, args ...string) *ptyRun {
	t.Helper()
	ctrl, tty, err := pty.Open()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ctrl.Close(); tty.Close() })
	p := &ptyRun{t: t, ctrl: ctrl, tty: tty, out: make(chan string, 64)}
	p.resize(100, 30)
	p.cmd = fakeCommand(t, args...)
	p.cmd.Stdin, p.cmd.Stdout, p.cmd.Stderr = tty, tty, tty
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true}
	if p.raw() {
		t.Fatal("a new terminal is raw")
	}
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = p.cmd.Process.Kill() })
	go func() {
		buf := make([]byte, 4096)
		for {
			n, err := ctrl.Read(buf)
			if err != nil {
				return
			}
			p.out <- string(buf[:n])
		}
	}()
	return p
}

func fakeCommand(t *testing.T, args ...string) *exec.Cmd {
	t.Helper()
	path, err := exec.LookPath("agentbox-fake")
	if err != nil {
		t.Fatal(err)
	}
	return exec.Command(path, args...)
}

func (p *ptyRun) resize(w, h uint16) {
	p.t.Helper()
	if err := pty.Setsize(p.ctrl, &pty.Winsize{Cols: w, Rows: h}); err != nil {
		p.t.Fatal(err)
	}
}

// raw reports whether the terminal hands keys through as they come.
func (p *ptyRun) raw() bool {
	p.t.Helper()
	termios, err := unix.IoctlGetTermios(int(p.tty.Fd()), unix.TCGETS)
	if err != nil {
		p.t.Fatal(err)
	}
	return termios.Lflag&(unix.ICANON|unix.ISIG|unix.ECHO) == 0
}

func (p *ptyRun) write(s string) {
	p.t.Helper()
	if _, err := io.WriteString(p.ctrl, s); err != nil {
		p.t.Fatal(err)
	}
}

func (p *ptyRun) expect(want string) {
	p.t.Helper()
	deadline := time.After(2 * time.Minute)
	for !strings.Contains(p.seen.String(), want) {
		select {
		case s := <-p.out:
			p.seen.WriteString(s)
		case <-deadline:
			p.t.Fatalf("no %q in %q", want, p.seen.String())
		}
	}
}

// end waits for the exit, and sees to it that the terminal is as it was.
func (p *ptyRun) end(code int) {
	p.t.Helper()
	checkExit(p.t, p.cmd, code)
	if p.raw() {
		p.t.Error("the terminal is still raw")
	}
}

func checkExit(t *testing.T, cmd *exec.Cmd, code int) {
	t.Helper()
	timer := time.AfterFunc(2*time.Minute, func() { _ = cmd.Process.Kill() })
	defer timer.Stop()
	err := cmd.Wait()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		t.Fatal(err)
	}
	if got := cmd.ProcessState.ExitCode(); got != code {
		t.Errorf("exit code %d (%v), want %d", got, cmd.ProcessState, code)
	}
}

func TestTerminal(t *testing.T) {
	for _, verb := range [][]string{
		{"run", "-it", "busybox", "sh"},
		{"exec", "-it", "run", "sh"},
		{"attach", "run"},
		{"start", "-ai", "run"},
	} {
		t.Run(verb[0], func(t *testing.T) {
			p := onPty(t, verb...)
			p.expect("ready")
			p.expect("size 100x30") // the initial one
			if !p.raw() {
				t.Error("the terminal is not raw")
			}
			p.resize(120, 40)
			p.expect("size 120x40")
			p.write("a\x03\r") // in raw mode, ctrl-c and return are bytes
			p.expect("byte 97")
			p.expect("byte 3")
			p.expect("byte 13")
			p.write("q")
			p.end(7)
		})
	}
}

func TestDetach(t *testing.T) {
	p := onPty(t, "run", "-it", "--rm", "busybox", "sh")
	p.expect("size")
	p.write("\x10x\x10\x11")
	p.expect("byte 120")
	p.end(0)

	p = onPty(t, "attach", "--detach-keys", "ctrl-a,d", "run")
	p.expect("size")
	p.write("\x10\x11")
	p.expect("byte 17")
	p.write("\x01d")
	p.end(0)
}

func TestTerminalIsPutBack(t *testing.T) {
	t.Run("panic", func(t *testing.T) {
		p := onPty(t, "run", "-it", "busybox", "sh")
		p.expect("size")
		p.write("!")
		p.end(2)
	})
	for _, sig := range []syscall.Signal{syscall.SIGTERM, syscall.SIGHUP, syscall.SIGINT} {
		t.Run(sig.String(), func(t *testing.T) {
			p := onPty(t, "run", "-it", "busybox", "sh")
			p.expect("size")
			if err := p.cmd.Process.Signal(sig); err != nil {
				t.Fatal(err)
			}
			p.end(128 + int(sig))
		})
	}
}

// Without a terminal for the sandbox, signals are the sandbox's.
func TestSignals(t *testing.T) {
	start := func(args ...string) (*exec.Cmd, func(string), func(syscall.Signal)) {
		t.Helper()
		cmd := fakeCommand(t, args...)
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = cmd.Process.Kill() })
		lines := bufio.NewScanner(out)
		return cmd, func(want string) {
				t.Helper()
				if !lines.Scan() || lines.Text() != want {
					t.Errorf("%q, want %q", lines.Text(), want)
				}
			}, func(sig syscall.Signal) {
				t.Helper()
				if err := cmd.Process.Signal(sig); err != nil {
					t.Fatal(err)
				}
			}
	}
	cmd, line, send := start("run", "busybox", "x")
	line("ready")
	send(syscall.SIGINT)
	line("signal SIGINT")
	send(syscall.SIGUSR1)
	line("signal SIGUSR1")
	send(syscall.SIGTERM)
	line("signal SIGTERM")
	checkExit(t, cmd, 143)

	// The third of a kind ends agentbox.
	cmd, line, send = start("run", "busybox", "x")
	line("ready")
	send(syscall.SIGINT)
	line("signal SIGINT")
	send(syscall.SIGINT)
	line("signal SIGINT")
	send(syscall.SIGINT)
	checkExit(t, cmd, 130)

	cmd, line, send = start("run", "--sig-proxy=false", "busybox", "x")
	line("ready")
	send(syscall.SIGINT)
	checkExit(t, cmd, 130)
}

func TestSummariesOnTerminal(t *testing.T) {
	p := onPty(t, "checkpoint", "run")
	p.expect("checkpoint 3f2a3f2a3f2a… of run: full, 12 files, 3 processes, 1.23MB, 0B added, frozen 84 ms\r\n")
	p.end(0)
	p = onPty(t, "restore", "--verify", "run")
	p.expect("run is back at checkpoint 3f2a3f2a3f2a… (before): full, 12 files, 3 processes, down 120 ms, verified\r\n")
	p.end(0)
	p = onPty(t, "cp", "run:/d", "-")
	p.expect("stdout is a terminal")
	p.end(exitUsage)
}
