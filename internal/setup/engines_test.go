package setup

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/agentbox/agentbox/internal/fault"
)

func TestContainerd(t *testing.T) {
	ctx := context.Background()
	config := filepath.Join(t.TempDir(), "config.toml")
	opts := ContainerdOptions{Options: Options{Config: config, Runtime: wrapper(t)}}

	opts.DryRun = true
	if r, err := Containerd(ctx, opts); err != nil || !r.Changed || !strings.Contains(r.Diff, "+    BinaryName = ") {
		t.Fatalf("%+v, %v", r, err)
	}
	if _, err := os.Stat(config); !os.IsNotExist(err) {
		t.Fatal("a dry run wrote")
	}
	opts.DryRun = false
	r, err := Containerd(ctx, opts)
	if err != nil || !r.Changed || !strings.Contains(fmt.Sprint(r.Notes), "--runc-binary") ||
		!strings.Contains(fmt.Sprint(r.Notes), "systemctl restart containerd") {
		t.Fatalf("%+v, %v", r, err)
	}
	// containerd itself finds the handler.
	dump, err := exec.Command("containerd", "--config", config, "config", "dump").Output()
	if err != nil {
		t.Fatal(err)
	}
	tree, err := decodeTOML(dump)
	if err != nil {
		t.Fatal(err)
	}
	if there, _ := lookup(tree, append(append([]string{}, criTables[2]...),
		"agentbox")...); !handlerIs(there, opts.Runtime) {
		t.Errorf("%v", there)
	}
	if r, err := Containerd(ctx, opts); err != nil || r.Changed {
		t.Errorf("a second time: %+v, %v", r, err)
	}
	opts.Remove = true
	if r, err := Containerd(ctx, opts); err != nil || !r.Changed {
		t.Errorf("%+v, %v", r, err)
	}
	if _, err := os.Stat(config); !os.IsNotExist(err) {
		t.Error("the file that setup made stays")
	}
	if r, err := Containerd(ctx, opts); err != nil || r.Changed {
		t.Errorf("%+v, %v", r, err)
	}

	// The former text comes back byte by byte, a missing last newline included; and a text that
	// containerd rejects is not written.
	for text, good := range map[string]bool{"version = 2\ndisabled_plugins = ['io.containerd.grpc.v1.cri'] # none": true, "version = 2\nroot = 3\n": false} {
		if err := os.WriteFile(config, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		opts.Remove = false
		r, err := Containerd(ctx, opts)
		switch {
		case good && (err != nil || !strings.Contains(fmt.Sprint(r.Notes), "disables the CRI")):
			t.Errorf("%+v, %v", r, err)
		case !good && !errors.Is(err, fault.ErrInvalid):
			t.Errorf("%+v, %v", r, err)
		}
		opts.Remove = true
		if _, err := Containerd(ctx, opts); err != nil {
			t.Error(err)
		}
		if data, _ := os.ReadFile(config); string(data) != text {
			t.Errorf("%q, was %q", data, text)
		}
	}
	opts.Restart = true
	if !haveSystemd() {
		if _, err := Containerd(ctx, opts); !errors.Is(err, fault.ErrUnsupported) {
			t.Errorf("%v", err)
		}
	}
}

func TestPodman(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Fatal("this test runs containers: run it as root")
	}
	ctx := context.Background()
	dir, err := os.MkdirTemp("", "abp")
	if err != nil {
		t.Fatal(err)
	}
	storage := filepath.Join(dir, "storage.conf")
	config := filepath.Join(dir, "containers.conf")
	before := fmt.Sprintf("[engine]\ncgroup_manager = \"cgroupfs\"\nevents_logger = \"file\"\ntmp_dir = %q\nstatic_dir = %q\nvolume_path = %q\n",
		dir+"/tmp", dir+"/static", dir+"/volumes")
	for path, text := range map[string]string{
		storage: fmt.Sprintf("[storage]\ndriver = \"overlay\"\ngraphroot = %q\nrunroot = %q\n",
			dir+"/root", dir+"/run"),
		config: before,
	} {
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	t.Setenv("CONTAINERS_STORAGE_CONF", storage)
	t.Setenv("CONTAINERS_CONF", "")
	podman := func(in []byte, args ...string) string {
		t.Helper()
		cmd := exec.Command("podman", args...)
		cmd.Env = append(os.Environ(), "CONTAINERS_CONF="+config)
		cmd.Stdin = bytes.NewReader(in)
		var stderr strings.Builder
		cmd.Stderr = &stderr
		out, err := cmd.Output()
		if err != nil {
			t.Errorf("podman %q: %v: %s", args, err, stderr.String())
		}
		return strings.TrimSpace(string(out))
	}
	t.Cleanup(func() {
		if err := os.WriteFile(config, []byte(before), 0o600); err != nil {
			t.Error(err)
		}
		podman(nil, "rm", "--all", "--force", "--time", "0")
		_ = exec.Command("umount", dir+"/root/overlay").Run() // podman's own bind mount of its storage
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})

	opts := Options{Config: config, Runtime: wrapper(t)}
	r, err := Podman(ctx, opts)
	if err != nil || !r.Changed || !r.Verified || r.Backup == "" {
		t.Fatalf("%+v, %v", r, err)
	}
	image, err := busyboxTar(t)
	if err != nil {
		t.Fatal(err)
	}
	podman(image, "import", "--quiet", "-", "bb")
	limits := []string{"--ulimit", "nofile=1024:1024", "--ulimit", "nproc=1024:1024", "--network", "none"}
	args := append([]string{"--runtime", "agentbox", "run", "-d", "--name", "c"}, limits...)
	podman(nil, append(args, "bb", "sleep", "1000")...)
	if got := podman(nil, "inspect", "--format", "{{.State.Running}} {{.OCIRuntime}}", "c"); got != "true agentbox" {
		t.Errorf("podman run: %q", got)
	}
	if r, err := Podman(ctx, opts); err != nil || r.Changed || !r.Verified {
		t.Errorf("a second time: %+v, %v", r, err)
	}
	opts.Remove = true
	if _, err := Podman(ctx, opts); !errors.Is(err, fault.ErrBusy) || !strings.Contains(err.Error(), "c") {
		t.Errorf("in use: %v", err)
	}
	podman(nil, "rm", "--force", "--time", "0", "c")
	if r, err := Podman(ctx, opts); err != nil || !r.Changed {
		t.Errorf("%+v, %v", r, err)
	}
	if data, _ := os.ReadFile(config); string(data) != before {
		t.Errorf("not as it was:\n%s", data)
	}

	// A value of another type is not setup's.
	bad := before + "\n[engine.runtimes]\nagentbox = 3\n"
	if err := os.WriteFile(config, []byte(bad), 0o600); err != nil {
		t.Fatal(err)
	}
	opts.Remove = false
	if _, err := Podman(ctx, opts); err == nil {
		t.Error("a value of another kind was replaced")
	}
	if data, _ := os.ReadFile(config); string(data) != bad {
		t.Errorf("changed:\n%s", data)
	}
}
