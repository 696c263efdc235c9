package main

import (
	"errors"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// A service that is there and does not answer is what a command tells, and no
// other reason; root does without it, and says so.
func TestNoAnswer(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Fatal("this test needs root")
	}
	root, err := os.MkdirTemp("", "agentbox")
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(root)
	socket := filepath.Join(root, "run", "agentbox.sock")
	if err := errors.Join(os.Mkdir(filepath.Dir(socket), 0o755), os.Chmod(root, 0o755)); err != nil {
		t.Fatal(err)
	}
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: socket, Net: "unix"}) // and nobody accepts
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	l.SetUnlinkOnClose(false)
	full := filepath.Join(root, "full") // not even the kernel does
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err = errors.Join(err, unix.Bind(fd, &unix.SockaddrUnix{Name: full}), unix.Listen(fd, 0)); err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	held, err := net.Dial("unix", full)
	if err != nil {
		t.Fatal(err)
	}
	defer held.Close()
	self, err := os.Open("/proc/self/exe")
	if err != nil {
		t.Fatal(err)
	}
	defer self.Close()
	for _, path := range []string{socket, full} {
		if err := os.Chmod(path, 0o666); err != nil {
			t.Fatal(err)
		}
	}
	// As somebody who cannot get at the directory that the program is in.
	run := func(uid uint32, host string) (out string, code int) {
		cmd := exec.Command("/proc/self/fd/3", "ps")
		cmd.Args[0] = "agentbox"
		cmd.ExtraFiles = []*os.File{self}
		cmd.Dir = "/"
		cmd.Env = append(os.Environ(), "AGENTBOX_ROOT="+root, "AGENTBOX_HOST="+host)
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uid, Gid: uid}}
		data, err := cmd.CombinedOutput()
		var exit *exec.ExitError
		if err != nil && !errors.As(err, &exit) {
			t.Fatal(err)
		}
		return string(data), cmd.ProcessState.ExitCode()
	}
	const nobody = 65534
	expect := func(name string, uid uint32, host string, code int, texts ...string) {
		t.Helper()
		out, got := run(uid, host)
		if got != code || strings.Contains(out, "may have been done") || strings.Contains(out, "only root") {
			t.Errorf("%s: exit %d, want %d: %s", name, got, code, out)
		}
		for _, text := range texts {
			if !strings.Contains(out, text) {
				t.Errorf("%s: %q is not said: %s", name, text, out)
			}
		}
	}
	expect("silent", nobody, "", exitFailure, "does not answer within 3s")
	expect("silent, for root", 0, "", 0, "continuing without it", "does not answer within 3s", "IMAGE")
	expect("full", nobody, "unix://"+full, exitFailure, full, "temporarily unavailable")
	if err := os.Chmod(socket, 0o600); err != nil {
		t.Fatal(err)
	}
	expect("not for them", nobody, "", exitDenied, "permission denied", "members of its socket's group")
	if err := errors.Join(os.Chmod(socket, 0o666), l.Close()); err != nil {
		t.Fatal(err)
	}
	expect("gone", nobody, "", exitFailure, "connection refused", "Is it running?")
	if out, code := run(0, ""); code != 0 || strings.Contains(out, "service") {
		t.Errorf("gone, for root: exit %d: %s", code, out)
	}
	expect("named and gone", 0, "unix://"+socket, exitFailure, "connection refused", "Is it running?")
	expect("named and not there", 0, "unix://"+root+"/nope", exitFailure, "no such file")
}

// A member of the socket's group needs to read nothing of root's: policies are
// the service's, by whatever name, and so is what doctor finds.
func TestMember(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Fatal("this test needs root")
	}
	const group, nobody = 12345, 65534
	root, err := os.MkdirTemp("", "agentbox")
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(root)
	socket := filepath.Join(root, "run", "agentbox.sock")
	mine := filepath.Join(root, "mine.yaml")
	for path, text := range map[string]string{
		filepath.Join(root, "policies", "own.yaml"): "base: strict\ndescription: for our agents\n",
		filepath.Join(root, "policies",
			"strict.yaml"): "base: strict\ndescription: strict as this host means it\nlifetime: {ttl: 2h}\n",
		mine: "base: own\nlifetime: {ttl: 1h}\n",
	} {
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o700),
			os.WriteFile(path, []byte(text), 0o644)); err != nil {
			t.Fatal(err)
		}
	}
	if err := errors.Join(os.Mkdir(filepath.Dir(socket), 0o711), os.Chmod(root, 0o755)); err != nil {
		t.Fatal(err)
	}
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: socket, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if err := errors.Join(os.Lchown(socket, 0, group), os.Chmod(socket, 0o660)); err != nil {
		t.Fatal(err)
	}
	listening, err := l.File()
	if err != nil {
		t.Fatal(err)
	}
	defer listening.Close()
	bin := filepath.Join(root, "bin")
	if out, err := exec.Command("go", "build", "-ldflags", "-s -w", "-o", bin+"/", "../agentbox",
		"../agentbox-runtime").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	agentbox := filepath.Join(bin, "agentbox")
	serve := exec.Command("sh", "-c", `LISTEN_FDS=1 LISTEN_PID=$$ exec "$0" serve`, agentbox)
	serve.ExtraFiles = []*os.File{listening}
	serve.Env = append(os.Environ(), "AGENTBOX_ROOT="+root)
	if err := serve.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := errors.Join(serve.Process.Signal(syscall.SIGTERM), serve.Wait()); err != nil {
			t.Error(err)
		}
	}()
	run := func(args ...string) string {
		t.Helper()
		cmd := exec.Command(agentbox, args...)
		cmd.Dir = "/"
		cmd.Env = append(os.Environ(), "AGENTBOX_ROOT="+root)
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{
			Uid: nobody, Gid: nobody, Groups: []uint32{group},
		}}
		out, err := cmd.CombinedOutput()
		if err != nil && args[0] != "doctor" {
			t.Errorf("%q: %v: %s", args, err, out)
		}
		return string(out)
	}
	for _, tc := range []struct {
		args []string
		want string
	}{
		{[]string{"policy", "ls"}, "for our agents"},
		{[]string{"policy", "show", "strict"}, "strict as this host means it"},
		{[]string{"policy", "check", "own", mine}, mine + ": good"},
		{[]string{"policy", "explain", mine, "--memory", "1g"}, "1h"},
		{[]string{"create", "--name", "a", "--policy", "own", "busybox", "true"}, ""},
		{[]string{"create", "--name", "b", "--policy", mine, "busybox", "true"}, ""},
		{[]string{"inspect", "a"}, `"ttl_ns": 7200000000000`},
		{[]string{"inspect", "b"}, `"ttl_ns": 3600000000000`},
		{[]string{"doctor"}, "running as root"},
		{[]string{"rm", "a", "b"}, ""},
	} {
		if out := run(tc.args...); !strings.Contains(out, tc.want) {
			t.Errorf("%q does not say %q: %s", tc.args, tc.want, out)
		}
	}
}
