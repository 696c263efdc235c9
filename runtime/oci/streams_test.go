package oci

import (
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/creack/pty"
	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/internal/streams"
)

func TestDetachKeys(t *testing.T) {
	for _, test := range []struct {
		keys, in, out string
		detached      bool
		rest          string
	}{
		{"\x10\x11", "hello", "hello", false, ""},
		{"\x10\x11", "he\x10\x11llo", "he", true, ""},
		{"\x10\x11", "he\x10llo", "he\x10llo", false, ""},
		{"\x10\x11", "\x10\x10\x11", "\x10", true, ""},
		{"\x10\x11", "a\x10", "a", false, "\x10"},
		{"aab", "aaab", "a", true, ""},
		{"abac", "ababac", "ab", true, ""},
		{"abac", "abab", "ab", false, "ab"},
		{"q", "q", "", true, ""},
		{"", "anything", "anything", false, ""},
	} {
		// All at once, and byte by byte, must come to the same.
		for _, size := range []int{len(test.in), 1} {
			d := streams.Detacher{Keys: []byte(test.keys)}
			var out []byte
			detached := false
			for in := []byte(test.in); len(in) > 0 && !detached; in = in[min(size, len(in)):] {
				var got []byte
				got, detached = d.Filter(in[:min(size, len(in))])
				out = append(out, got...)
			}
			if string(out) != test.out || detached != test.detached || !detached && string(d.Rest()) != test.rest {
				t.Errorf("%q in %q: got %q, %v", test.keys, test.in, out, detached)
			}
		}
	}
}

// A real pseudo-terminal on our side, as a command line has it.
func TestTerminal(t *testing.T) {
	x := newBox(t)
	near, far, err := pty.Open()
	must(t, err)
	defer near.Close()
	defer far.Close()
	raw(t, far)
	sizes := make(chan runtime.Size, 8)
	sizes <- runtime.Size{Width: 101, Height: 33}
	var screen buffer
	go func() { _, _ = io.Copy(&screen, near) }()

	id := x.create(with(spec("sh"), func(s *runtime.Spec) { s.Terminal, s.OpenStdin = true, true }))
	wait, err := x.Start(t.Context(), id, runtime.StartOptions{Streams: &runtime.Streams{
		Stdin: far, Stdout: far, Resize: sizes, DetachKeys: []byte{16, 17},
	}})
	must(t, err)
	ended := make(chan error, 1)
	go func() { ended <- wait() }()
	enter := func(s string) {
		_, err := near.WriteString(s)
		must(t, err)
	}
	enter("echo term $TERM tty $(tty); stty size\n")
	eventually(t, "the initial size", screen.has("33 101"))
	eventually(t, "a terminal", screen.has("term xterm tty /dev/pts/0"))
	// A burst: the last one must win.
	for i := range 8 {
		sizes <- runtime.Size{Width: uint16(50 + i), Height: uint16(10 + i)}
	}
	eventually(t, "the last size of many", func() bool {
		enter("stty size\n")
		return screen.has("17 57")()
	})
	// Before the shell has read the line, Ctrl-C would take it back.
	enter("trap 'echo inter''rupted' INT; echo rea''dy; sleep 100\n")
	eventually(t, "the shell waits", screen.has("ready\r\n"))
	eventually(t, "Ctrl-C arrives", func() bool {
		enter("\x03")
		return screen.has("interrupted\r\n")()
	})
	enter("\x10\x11")
	if err := <-ended; !errors.Is(err, runtime.ErrDetached) {
		t.Fatalf("after the detach keys: %v", err)
	}
	if got := x.inspect(id).Status; got != runtime.Running {
		t.Fatalf("status %s", got)
	}

	var again buffer
	in, typed := io.Pipe()
	go func() {
		ended <- x.Attach(t.Context(), id, runtime.Streams{Stdin: in, Stdout: &again})
	}()
	_, err = typed.Write([]byte("echo attached\n"))
	must(t, err)
	eventually(t, "the second attachment", again.has("attached\r\n"))
	_, err = typed.Write([]byte("exit 9\n"))
	must(t, err)
	must(t, <-ended)
	if exit, err := x.Wait(t.Context(), id); exit.Code != 9 || err != nil {
		t.Errorf("exit %+v, %v", exit, err)
	}
}

func raw(t *testing.T, f *os.File) {
	t.Helper()
	tio, err := unix.IoctlGetTermios(int(f.Fd()), unix.TCGETS)
	must(t, err)
	tio.Lflag &^= unix.ICANON | unix.ECHO | unix.ISIG
	tio.Iflag &^= unix.ICRNL | unix.IXON
	tio.Oflag &^= unix.OPOST
	must(t, unix.IoctlSetTermios(int(f.Fd()), unix.TCSETS, tio))
}

func TestExecTerminal(t *testing.T) {
	x := newBox(t)
	id := x.up(spec("sleep", "1000"))
	sizes := make(chan runtime.Size, 1)
	sizes <- runtime.Size{Width: 77, Height: 22}
	var out buffer
	in, typed := io.Pipe()
	done := make(chan int, 1)
	go func() {
		exit, err := x.Exec(t.Context(), id, runtime.Process{Args: []string{"sh"}, Terminal: true},
			runtime.Streams{Stdin: in, Stdout: &out, Resize: sizes})
		if err != nil {
			t.Error(err)
		}
		done <- exit
	}()
	_, _ = typed.Write([]byte("stty size\n"))
	eventually(t, "the initial size", out.has("22 77"))
	_, _ = typed.Write([]byte("exit 5\n"))
	if exit := <-done; exit != 5 {
		t.Errorf("exit %d", exit)
	}
	// The last words of a process that leaves at once are not lost.
	for i := range 10 {
		var out buffer
		_, err := x.Exec(t.Context(), id, runtime.Process{Args: []string{"echo", "bye"}, Terminal: i%2 == 0},
			runtime.Streams{Stdout: &out})
		must(t, err)
		if strings.TrimSpace(out.String()) != "bye" {
			t.Fatalf("round %d: %q", i, out.String())
		}
	}
}

// Unread input must not cost output.
func TestOutputSurvivesUnreadInput(t *testing.T) {
	x := newBox(t)
	for range 5 {
		s := with(sh("echo all of it; exit 4"), func(s *runtime.Spec) { s.OpenStdin = true })
		out, _, exit := x.run(s, strings.Repeat("unread\n", 20000))
		if out != "all of it\n" || exit != 4 {
			t.Fatalf("%q, exit %d", out, exit)
		}
	}
}

func TestExecSessions(t *testing.T) {
	x := newBox(t)
	id := x.up(with(spec("sleep", "1000"), func(s *runtime.Spec) {
		s.Env = []string{"A=1", "B=2"}
		s.Workdir = "/tmp"
	}))
	var out buffer
	exit, err := x.Exec(t.Context(), id, runtime.Process{
		Args: []string{"sh", "-c", "echo $A $B $C; pwd; id -u; cat; echo err >&2; exit 3"},
		Env:  []string{"B=3", "C=4"}, User: "alice",
	}, runtime.Streams{Stdin: strings.NewReader("in\n"), Stdout: &out, Stderr: &out})
	must(t, err)
	if got := strings.Fields(out.String()); exit != 3 || strings.Join(got, " ") != "1 3 4 /tmp 1000 in err" {
		t.Errorf("%q, exit %d", got, exit)
	}
	// A detached one goes on, and what it leaves is swept up later.
	_, err = x.Exec(t.Context(), id, runtime.Process{Args: []string{
		"sh", "-c", "echo > /tmp/started; sleep 0.1; echo > /tmp/ended",
	}, Detach: true}, runtime.Streams{})
	must(t, err)
	upper := x.inspect(id).Upper
	eventually(t, "the detached one ends", func() bool {
		_, err := os.Stat(filepath.Join(upper, "tmp/ended"))
		return err == nil
	})
	dirs, err := os.ReadDir(x.box.RunDir(id, "exec"))
	if err != nil || len(dirs) != 1 {
		t.Fatalf("%v, %v", dirs, err)
	}
	old := time.Now().Add(-time.Hour)
	must(t, os.Chtimes(x.box.RunDir(id, "exec", dirs[0].Name()), old, old))
	eventually(t, "the session is forgotten", func() bool {
		x.exec(id, "true")
		dirs, err := os.ReadDir(x.box.RunDir(id, "exec"))
		return err == nil && len(dirs) == 0
	})
	// Stop ends attached sessions, and their callers learn of it.
	done := make(chan error, 1)
	go func() {
		_, err := x.Exec(t.Context(), id, runtime.Process{Args: []string{"sleep", "1000"}}, runtime.Streams{})
		done <- err
	}()
	eventually(t, "it runs", func() bool { out, _ := x.exec(id, "ps"); return strings.Count(out, "sleep 1000") == 2 })
	must(t, x.Stop(t.Context(), id, runtime.StopOptions{}))
	<-done
	if _, err := x.Exec(t.Context(), id, runtime.Process{Args: []string{"true"}},
		runtime.Streams{}); !errors.Is(err, fault.ErrState) {
		t.Errorf("exec in a stopped one: %v", err)
	}
}

// TestExecRefused has a container frozen between our look at it and the runtime's: the refusal
// leaves nothing behind.
func TestExecRefused(t *testing.T) {
	x := newBox(t)
	id := x.up(spec("sleep", "1000"))
	for try := 0; ; try++ {
		sizes, paused := make(chan runtime.Size, 1), make(chan error, 1)
		go func() {
			paused <- x.Pause(t.Context(), id)
			sizes <- runtime.Size{Width: 80, Height: 24} // for which the exec waits after its look
		}()
		_, err := x.Exec(t.Context(), id, runtime.Process{Args: []string{"true"}, Terminal: true},
			runtime.Streams{Stdin: strings.NewReader("typed"), Stdout: io.Discard, Resize: sizes})
		must(t, <-paused)
		x.resume(id)
		if err != nil && strings.Contains(err.Error(), "exec failed") {
			if !errors.Is(err, runtime.ErrState) {
				t.Error(err)
			}
			break
		}
		if try == 100 {
			t.Fatalf("never refused by the runtime: %v", err)
		}
	}
	if left := x.leftovers(filepath.Join(x.box.Run, "tmp")); len(left) > 0 {
		t.Errorf("left over: %q", left)
	}
}
