package proc

import (
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// A process that names itself after another one's stat is read as what it is.
func TestReadForgedName(t *testing.T) {
	sleep, err := exec.LookPath("sleep")
	must(t, err)
	data, err := os.ReadFile(sleep)
	must(t, err)
	path := filepath.Join(t.TempDir(), "x) Z 1234 ) (") // at most 15 bytes
	must(t, os.WriteFile(path, data, 0o755))
	cmd := exec.Command(path, "60")
	must(t, cmd.Start())
	killed := false
	defer func() {
		if !killed {
			_, _ = cmd.Process.Kill(), cmd.Wait()
		}
	}()
	comm, err := os.ReadFile("/proc/" + strconv.Itoa(cmd.Process.Pid) + "/comm")
	must(t, err)
	if !strings.HasPrefix(string(comm), "x) Z 1234 ) (") {
		t.Fatalf("its name is %q", comm)
	}
	s, err := Read(cmd.Process.Pid)
	must(t, err)
	th, err := ReadThread(cmd.Process.Pid)
	must(t, err)
	if s.Parent != os.Getpid() || s.Ended() || s.Forked || s.Start == 0 ||
		th.Parent != s.Parent || th.Start != s.Start {
		t.Errorf("%+v, its thread %+v", s, th)
	}
	self, err := Read(os.Getpid())
	must(t, err)
	if self.Start > s.Start {
		t.Errorf("it began at %d, before its parent (%d)", s.Start, self.Start)
	}
	must(t, cmd.Process.Signal(syscall.SIGSTOP))
	is(t, cmd.Process.Pid, func(s Stat) bool { return s.State == 'T' })
	must(t, cmd.Process.Kill())
	is(t, cmd.Process.Pid, func(s Stat) bool {
		return s.Ended() && syscall.WaitStatus(s.Exit).Signal() == syscall.SIGKILL
	})
	killed = true
	_ = cmd.Wait()
	if _, err := Read(cmd.Process.Pid); !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, syscall.ESRCH) {
		t.Errorf("of one that is gone: %v", err)
	}
}

// is waits until a process is so.
func is(t *testing.T, pid int, so func(Stat) bool) {
	t.Helper()
	for end := time.Now().Add(time.Minute); ; time.Sleep(time.Millisecond) {
		s, err := Read(pid)
		must(t, err)
		if so(s) {
			return
		}
		if time.Now().After(end) {
			t.Fatalf("it is %+v", s)
		}
	}
}

func TestParse(t *testing.T) {
	whole := "7 (a) b) S 3 7 7 0 -1 64 0 0 0 0 5 6 0 0 20 0 1 0 99 " + strings.Repeat("0 ", 29) + "9\n"
	s, err := parse([]byte(whole))
	if want := (Stat{State: 'S', Parent: 3, Forked: true, Used: 11, Start: 99, Exit: 9}); err != nil || s != want {
		t.Errorf("%+v, %v", s, err)
	}
	for _, text := range []string{"", ")", "7 (a) S", "7 a S 3 7 7 0 -1 64 0 0 0 0 5 6 0 0 20 0 1 0 99",
		strings.Replace(whole, " 99 ", " -9 ", 1), strings.Replace(whole, "S 3 ", "S x ", 1),
		strings.Replace(whole, ") S ", ") SS ", 1)} {
		if s, err := parse([]byte(text)); err == nil || s != (Stat{}) {
			t.Errorf("%q: %+v, %v", text, s, err)
		}
	}
}
