package host

import (
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/proc"
)

// orphan starts a CRIU and kills it while a child of it is stopped, and returns the child.
// The owner is the one that the environment names; empty: this process.
func orphan(t *testing.T, owner string) int {
	t.Helper()
	path, err := Find("criu", nil)
	if err != nil {
		t.Fatal(err)
	}
	for end := time.Now().Add(time.Minute); time.Now().Before(end); {
		cmd := exec.Command(path, "check")
		cmd.Env = Environ()
		if owner != "" {
			cmd.Env = append(cmd.Env, ownerEnv+"="+owner)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		ended := make(chan error, 1)
		go func() { ended <- cmd.Wait() }()
		child := 0
		for child == 0 && len(ended) == 0 {
			child = stoppedChild(cmd.Process.Pid)
		}
		_ = cmd.Process.Kill()
		<-ended
		if stays(child) {
			t.Cleanup(func() {
				if stays(child) {
					_ = syscall.Kill(child, syscall.SIGKILL)
				}
			})
			return child
		}
	}
	t.Fatal("no CRIU that was killed has left a child")
	return 0
}

// stoppedChild returns a child of a process that stands in a stop; 0: there is none.
func stoppedChild(pid int) int {
	list, _ := os.ReadFile(fmt.Sprintf("/proc/%d/task/%d/children", pid, pid))
	for _, field := range strings.Fields(string(list)) {
		if child, err := strconv.Atoi(field); err == nil && strings.Contains("tT", state(child)) {
			return child
		}
	}
	return 0
}

func state(pid int) string {
	p, err := proc.Read(pid)
	if err != nil {
		return "gone"
	}
	return string(p.State)
}

// stays reports whether a child stays stopped, after the end of its parent.
func stays(child int) bool {
	if child == 0 {
		return false
	}
	// In the first moment it is on its way from the stop by ptrace to that by the signal.
	for end := time.Now().Add(time.Second); time.Now().Before(end); time.Sleep(time.Millisecond) {
		switch state(child) {
		case "T":
			return isCRIU(child)
		case "gone", "Z", "X":
			return false
		}
	}
	return false
}

func TestEndOrphans(t *testing.T) {
	ours, past := orphan(t, ""), orphan(t, "1:1")
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		t.Fatal(err)
	}
	adopted := orphan(t, "") // by its owner, as an OCI runtime does
	defer func() { _, _ = syscall.Wait4(adopted, nil, 0, nil) }()
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0); err != nil {
		t.Fatal(err)
	}
	working := beCRIU(t, true)
	idle := beCRIU(t, false)
	child := exec.Command(criuLink(t), "60") // not an orphan: this process is its parent
	child.Env = append(Environ(), beEnv+"=idle")
	in, err := child.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := child.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { _, _ = in.Close(), child.Wait() }()
	for end := time.Now().Add(time.Minute); !isCRIU(child.Process.Pid); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("the child has not begun")
		}
	}

	// Another test's agentbox may end them as well.
	if _, err := EndOrphans(); err != nil {
		t.Error(err)
	}
	for what, pid := range map[string]int{
		"ours": ours, "of one that is gone": past, "that its owner adopted": adopted, "that traces nothing": idle,
	} {
		if s := state(pid); s != "gone" && s != "Z" {
			t.Errorf("the orphan %s is in state %s", what, s)
		}
	}
	for what, pid := range map[string]int{"an orphan at work": working, "a child": child.Process.Pid} {
		if s := state(pid); s != "S" && s != "R" {
			t.Errorf("%s is in state %s", what, s)
		}
	}
}

// A CRIU that dumps has written its title over its environment, and starts programs that have
// its owner in theirs: between their fork and a moment after they are executed these are no
// orphans, either.
func TestEndOrphansStarts(t *testing.T) {
	spawns := exec.Command(criuLink(t))
	spawns.Env = []string{beEnv + "=spawning", "PATH=" + os.Getenv("PATH")}
	out, err := spawns.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	in, err := spawns.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := spawns.Start(); err != nil {
		t.Fatal(err)
	}
	for end := time.Now().Add(time.Second); time.Now().Before(end); {
		list, _ := os.ReadFile(fmt.Sprintf("/proc/%[1]d/task/%[1]d/children", spawns.Process.Pid))
		for _, field := range strings.Fields(string(list)) {
			if pid, err := strconv.Atoi(field); err == nil {
				_, _ = EndOrphan(pid)
			}
		}
	}
	_ = in.Close()
	said, err := io.ReadAll(out)
	if err != nil {
		t.Fatal(err)
	}
	if err := spawns.Wait(); err != nil {
		t.Fatal(err)
	}
	var ran, failed int
	if _, err := fmt.Sscan(string(said), new(int), &ran, &failed); err != nil || ran < 10 || failed > 0 {
		t.Errorf("of %d programs %d were killed: %v", ran, failed, err)
	}
}

// beEnv makes this test a program named criu that waits for the end of its input: "idle",
// "tracing" a process meanwhile, or "spawning" programs, whose number and that of those
// that failed it says at the end.
const beEnv = "AGENTBOX_TEST_BE_CRIU"

func TestMain(m *testing.M) {
	switch os.Getenv(beEnv) {
	case "":
		os.Exit(m.Run())
	case "tracing":
		runtime.LockOSThread()
		cmd := exec.Command("/bin/sleep", "60")
		cmd.SysProcAttr = &syscall.SysProcAttr{Ptrace: true, Pdeathsig: syscall.SIGKILL}
		if err := cmd.Start(); err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
		defer func() { _ = cmd.Process.Kill() }()
	case "spawning":
		runtime.LockOSThread() // the main thread, whose children are listed
		fmt.Println(os.Getpid())
		ended := make(chan struct{})
		go func() { _, _ = io.Copy(io.Discard, os.Stdin); close(ended) }()
		for ran, failed := 0, 0; ; ran++ {
			select {
			case <-ended:
				fmt.Println(ran, failed)
				return
			default:
			}
			cmd := exec.Command("true")
			cmd.Env = append(os.Environ(), ownerEnv+"=1:1")
			if cmd.Run() != nil {
				failed++
			}
		}
	}
	fmt.Println(os.Getpid())
	_, _ = io.Copy(io.Discard, os.Stdin)
}

// criuLink names this test's program criu.
func criuLink(t *testing.T) string {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	link := filepath.Join(t.TempDir(), "criu")
	if err := os.Symlink(self, link); err != nil {
		t.Fatal(err)
	}
	return link
}

// beCRIU begins a program named criu whose parent has ended, and returns its pid.
func beCRIU(t *testing.T, tracing bool) int {
	t.Helper()
	theirs, ours, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = ours.Close() })
	be := "idle"
	if tracing {
		be = "tracing"
	}
	cmd := exec.Command("/bin/sh", "-c", `"$0" <&3 &`, criuLink(t))
	cmd.Env, cmd.ExtraFiles = append(Environ(), beEnv+"="+be), []*os.File{theirs}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	_ = theirs.Close()
	var pid int
	if _, err := fmt.Fscan(out, &pid); err != nil {
		t.Fatalf("it says no pid: %v", err)
	}
	if err := cmd.Wait(); err != nil {
		t.Fatal(err)
	}
	return pid
}
