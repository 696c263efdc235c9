// Package enginetest starts container engines for tests: real daemons from the
// distribution's packages, with everything of theirs private to the test.
//
// A test binary that uses it has in its TestMain
//
//	func TestMain(m *testing.M) { os.Exit(enginetest.Main(m)) }
//
// which runs the tests in a network and mount namespace of their own, so that
// bridges, firewall rules and mounts of the engines never meet the host's and
// vanish with the last process, and in the end looks for what is left: a
// process, a cgroup or a file that an engine leaves behind fails the run.
package enginetest

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/thorough"
)

// baseEnv names, for the process in the namespaces, the directory that
// everything of the engines lies in.
const baseEnv = "AGENTBOX_ENGINETEST_BASE"

// patience bounds what the engines do.
var patience = time.Minute * thorough.Patience()

// Main runs the tests of m in namespaces of their own and returns the exit code.
func Main(m *testing.M) int {
	if base := os.Getenv(baseEnv); base != "" {
		if err := enter(); err != nil {
			fmt.Fprintln(os.Stderr, "enginetest:", err)
			return 1
		}
		return m.Run()
	}
	if os.Geteuid() != 0 {
		fmt.Fprintln(os.Stderr, "these tests run container engines and must be run as root")
		return 1
	}
	code, err := outside()
	if err != nil {
		fmt.Fprintln(os.Stderr, "enginetest:", err)
		code = max(code, 1)
	}
	return code
}

// outside runs this program again in the namespaces and cleans up after it.
func outside() (code int, err error) {
	// Short, because unix sockets' addresses are.
	base, err := os.MkdirTemp("", "et")
	if err != nil {
		return 1, err
	}
	// A daemon that remaps users has to get through as another one.
	if err := os.Chmod(base, 0o711); err != nil {
		return 1, err
	}
	cmd := exec.Command("/proc/self/exe", os.Args[1:]...)
	cmd.Args[0] = os.Args[0]
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.Env = append(os.Environ(), baseEnv+"="+base)
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWNS | unix.CLONE_NEWNET, Pdeathsig: unix.SIGKILL}
	err = cmd.Run()
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		code, err = max(exit.ExitCode(), 1), nil
	}
	return code, errors.Join(err, sweep(base))
}

// Outside is a command in the network that the tests were started in: theirs leads nowhere.
func Outside(name string, args ...string) *exec.Cmd {
	// The parent made the namespaces, and waits.
	return exec.Command("nsenter", append([]string{
		fmt.Sprintf("--net=/proc/%d/ns/net", os.Getppid()), "--", name,
	}, args...)...)
}

// enter makes the namespaces that this process was started in usable.
func enter() error {
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make mounts private: %w", err)
	}
	lo, err := netlink.LinkByName("lo")
	if err == nil {
		err = netlink.LinkSetUp(lo)
	}
	if err != nil {
		return fmt.Errorf("lo: %w", err)
	}
	return nil
}

// sweep ends what the engines left running, reports it, and deletes base.
func sweep(base string) error {
	var errs []error
	begun := time.Now()
	for ; ; time.Sleep(50 * time.Millisecond) {
		left := processes(base)
		for _, pid := range members(filepath.Base(base)) {
			left[pid] = "of a container"
		}
		if len(left) == 0 {
			break
		}
		// A monitor ends a moment after what it watched; nothing announces it.
		if time.Since(begun) < patience/6 {
			continue
		}
		if len(errs) == 0 {
			for pid, cmdline := range left {
				errs = append(errs, fmt.Errorf("left behind: process %d: %s", pid, cmdline))
			}
		}
		for pid := range left {
			_ = unix.Kill(pid, unix.SIGKILL)
		}
		if time.Since(begun) > patience {
			errs = append(errs, errors.New("they do not end"))
			break
		}
	}
	for _, dir := range cgroups(filepath.Base(base)) {
		if err := os.Remove(dir); err != nil && !errors.Is(err, os.ErrNotExist) {
			errs = append(errs, fmt.Errorf("left behind: cgroup %s: %w", dir, err))
		}
	}
	return errors.Join(append(errs, os.RemoveAll(base))...)
}

// processes lists those that name dir in their command line or environment.
func processes(dir string) map[int]string {
	found := map[int]string{}
	entries, _ := filepath.Glob("/proc/[0-9]*")
	for _, p := range entries {
		pid, _ := strconv.Atoi(filepath.Base(p))
		if pid == os.Getpid() {
			continue
		}
		cmdline, _ := os.ReadFile(p + "/cmdline")
		environ, _ := os.ReadFile(p + "/environ")
		if bytes.Contains(cmdline, []byte(dir+"/")) || bytes.Contains(environ, []byte("="+dir+"\x00")) ||
			bytes.Contains(environ, []byte(dir+"/")) {
			if stat, err := os.ReadFile(p + "/stat"); err == nil && !strings.Contains(string(stat), ") Z ") {
				found[pid] = string(bytes.ReplaceAll(cmdline, []byte{0}, []byte{' '}))
			}
		}
	}
	return found
}

// cgroups lists those with a name in their path, inner ones first.
func cgroups(name string) []string {
	var list []string
	_ = filepath.WalkDir("/sys/fs/cgroup", func(path string, d os.DirEntry, err error) error {
		if err == nil && d.IsDir() && strings.Contains(path, "/"+name) {
			list = append([]string{path}, list...)
		}
		return nil
	})
	return list
}

// members lists the processes in the cgroups whose path has a name in it, and
// thaws them, so that they can be killed.
func members(name string) (pids []int) {
	seen := map[int]bool{}
	for _, dir := range cgroups(name) {
		_ = os.WriteFile(filepath.Join(dir, "freezer.state"), []byte("THAWED"), 0)
		_ = os.WriteFile(filepath.Join(dir, "cgroup.freeze"), []byte("0"), 0)
		data, _ := os.ReadFile(filepath.Join(dir, "cgroup.procs"))
		for word := range strings.FieldsSeq(string(data)) {
			if pid, err := strconv.Atoi(word); err == nil && !seen[pid] {
				seen[pid] = true
				pids = append(pids, pid)
			}
		}
	}
	return pids
}

// base is where a test may put what belongs to engines.
func base(t testing.TB) string {
	t.Helper()
	dir := os.Getenv(baseEnv)
	if dir == "" {
		t.Fatal("the TestMain of this package must be enginetest.Main")
	}
	return dir
}

// Dir makes a directory with a short name that goes with the test run.
func Dir(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp(base(t), "")
	if err == nil {
		err = os.Chmod(dir, 0o711)
	}
	if err != nil {
		t.Fatal(err)
	}
	return dir
}

// built has where Build has put what, as to link anew takes seconds.
var built = struct {
	sync.Mutex
	dirs map[string]string
}{dirs: map[string]string{}}

// Build builds commands of this module into a directory and returns it: the
// same one to all tests that ask for the same. The tags are the go command's.
func Build(t testing.TB, tags string, commands ...string) string {
	t.Helper()
	built.Lock()
	defer built.Unlock()
	key := tags + " " + strings.Join(commands, " ")
	if dir := built.dirs[key]; dir != "" {
		return dir
	}
	dir := Dir(t)
	args := []string{"build", "-tags", tags, "-ldflags", "-s -w", "-o", dir + "/"}
	for _, c := range commands {
		args = append(args, "github.com/agentbox/agentbox/cmd/"+c)
	}
	build := exec.Command("go", args...)
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("build %s: %v\n%s", commands, err, out)
	}
	built.dirs[key] = dir
	return dir
}

// program finds what a distribution's package installs, or fails the test.
func program(t testing.TB, name, pkg string) string {
	t.Helper()
	for _, dir := range append(filepath.SplitList(os.Getenv("PATH")), "/usr/sbin", "/sbin", "/usr/local/sbin") {
		if p := filepath.Join(dir, name); unix.Access(p, unix.X_OK) == nil {
			return p
		}
	}
	t.Fatalf("this test needs %s: install the package %s", name, pkg)
	return ""
}
