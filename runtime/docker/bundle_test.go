package docker

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/docker/docker/api/types/container"

	"github.com/agentbox/agentbox/internal/fault"
)

// begin starts a program that does nothing, under a name, in a directory.
func begin(t *testing.T, name, dir string) int {
	t.Helper()
	sleep, err := exec.LookPath("sleep")
	if err == nil {
		sleep, err = filepath.EvalSymlinks(sleep)
	}
	if err != nil {
		t.Fatal(err)
	}
	data, err := os.ReadFile(sleep)
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(path, data, 0o700); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(path, "100")
	cmd.Args[0] = "sleep"
	cmd.Dir = dir
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	for range 1000 { // the name comes with the exec
		if comm, _ := os.ReadFile(fmt.Sprintf("/proc/%d/comm",
			cmd.Process.Pid)); strings.TrimSuffix(string(comm), "\n") == name {
			return cmd.Process.Pid
		}
		time.Sleep(time.Millisecond)
	}
	t.Fatalf("no process %q", name)
	return 0
}

// The directory of a container's shim names programs that run as root: a process of the container
// cannot pass for the shim, by its name or where its pid was the first process's.
func TestShimIsNone(t *testing.T) {
	id := strings.Repeat("ab", 32)
	dir := filepath.Join(t.TempDir(), id)
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(dir+"/runtime", []byte("/evil"), 0o600); err != nil {
		t.Fatal(err)
	}
	of := func(pid int) box {
		return box{InspectResponse: container.InspectResponse{ContainerJSONBase: &container.ContainerJSONBase{
			ID: id, State: &container.State{Pid: pid},
		}}}
	}
	planted := begin(t, "planted", dir)
	named := begin(t, fmt.Sprintf("x) S %d ", planted), "/")
	if got, err := shimOf(of(named)); !errors.Is(err, fault.ErrUnsupported) {
		t.Errorf("%s is taken for the shim: %v", got, err)
	}
	if binary, _, _ := shim(of(named)); binary != "" {
		t.Errorf("%s would be called", binary)
	}

	// Its parent is, where it works in the bundle.
	t.Chdir(dir)
	if got, err := shimOf(of(named)); err != nil || got != fmt.Sprintf("/proc/%d", os.Getpid()) {
		t.Errorf("%s, %v", got, err)
	}
	if binary, _, _ := shim(of(named)); binary != "/evil" {
		t.Errorf("%q", binary)
	}
}

// The directories of an overlay are the engine's word, not that of a process that has mounted one.
func TestMountedLayers(t *testing.T) {
	write := func(text string) string {
		path := filepath.Join(t.TempDir(), "mountinfo")
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	const (
		disk   = "22 1 8:1 / / rw - ext4 /dev/sda1 rw\n"
		rootfs = "90 22 0:50 / /run/containerd/rootfs rw - overlay overlay rw,lowerdir=/l/1:/l/2,upperdir=/u/3/fs,workdir=/u/3/work\n"
		theirs = "200 90 0:50 / / rw - overlay overlay rw,lowerdir=/l/1:/l/2,upperdir=/u/3/fs,workdir=/u/3/work\n"
		own    = "300 200 0:77 / / rw - overlay overlay rw,lowerdir=/,upperdir=/etc,workdir=/tmp\n"
		lying  = "200 90 0:50 / / rw - overlay overlay rw,lowerdir=/,upperdir=/etc,workdir=/tmp\n"
	)
	shim := write(disk + rootfs)
	for _, process := range []string{theirs, lying, theirs + own} {
		upper, lower, err := mountedLayers(write(process), shim)
		if err != nil || upper != "/u/3/fs" || strings.Join(lower, ":") != "/l/1:/l/2" {
			t.Errorf("%q, %q, %v", upper, lower, err)
		}
	}
	for _, process := range []string{own, disk, ""} {
		if upper, _, err := mountedLayers(write(process), shim); err == nil {
			t.Errorf("%q: upperdir %s", process, upper)
		}
	}
}
