package engine

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/internal/kernel"
	"github.com/agentbox/agentbox/runtime/store"
)

// TestMountpoint: a mount is made on an empty directory that is the caller's own, by its own rights, where
// the caller can see it.
func TestMountpoint(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Fatal("run it as root: it takes the rights of other users")
	}
	root := t.TempDir()
	st, err := store.Open(t.Context(), root)
	if err != nil {
		t.Fatal(err)
	}
	defer st.Close()
	run := filepath.Join(root, "run")
	if err := os.MkdirAll(filepath.Join(run, "in"), 0o700); err != nil {
		t.Fatal(err)
	}
	cs := &checkpoints{core: &core{store: st, run: run}}
	top, err := os.MkdirTemp("/dev/shm", "mountpoint")
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(top)
	in := func(names ...string) string { return filepath.Join(append([]string{top}, names...)...) }
	err = errors.Join(os.Chmod(top, 0o755), os.Mkdir(in("mine"), 0o700), os.Chown(in("mine"), 1000, 1000),
		os.Mkdir(in("roots"), 0o777), os.MkdirAll(in("locked", "mine"), 0o700), os.Chown(in("locked", "mine"), 1000, 1000),
		os.Symlink(in("mine"), in("link")), os.Mkdir(in("full"), 0o755), os.WriteFile(in("full", "f"), nil, 0o600),
		os.Mkdir(in("odd"), 0o700))
	if err != nil {
		t.Fatal(err)
	}
	apart := exec.Command("unshare", "--mount", "sh", "-c", "echo ready; exec sleep 1000")
	out, err := apart.StdoutPipe()
	if err == nil {
		err = apart.Start()
	}
	if err == nil {
		_, err = out.Read(make([]byte, 6)) // it is in its own namespace
	}
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		_ = apart.Process.Kill()
		_ = apart.Wait()
	}()
	self := os.Getpid()
	user := &runtime.Caller{UID: 1000, GID: 1000, Pid: self}
	for _, c := range []struct {
		what   string
		caller *runtime.Caller
		dir    string
		want   error
	}{
		{"this process", nil, in("odd"), nil},
		{"root", &runtime.Caller{Pid: self}, in("mine"), nil},
		{"its own", user, in("mine"), nil},
		{"one that is root's", user, in("roots"), runtime.ErrDenied},
		{"its own, which it cannot reach", user, in("locked", "mine"), runtime.ErrDenied},
		{"a symlink to its own", user, in("link"), runtime.ErrInvalid},
		{"one with a file in it", &runtime.Caller{Pid: self}, in("full"), runtime.ErrInvalid},
		{"a relative path", nil, "odd", runtime.ErrInvalid},
		{"none", nil, in("none"), runtime.ErrNotFound},
		{"a file", nil, in("full", "f"), runtime.ErrInvalid},
		{"one in the root", nil, filepath.Join(run, "in"), runtime.ErrInvalid},
		{"another mount namespace", &runtime.Caller{Pid: apart.Process.Pid}, in("odd"), runtime.ErrUnsupported},
		{"a client by TLS", &runtime.Caller{Client: "CN=c", Address: "192.0.2.1:1"}, in("odd"), runtime.ErrUnsupported},
	} {
		ctx := t.Context()
		if c.caller != nil {
			ctx = runtime.WithCaller(ctx, *c.caller)
		}
		f, path, err := cs.mountpoint(ctx, c.dir)
		if !errors.Is(err, c.want) || err == nil && path != c.dir {
			t.Errorf("%s: %q, %v, want %v", c.what, path, err, c.want)
		}
		if err == nil {
			f.Close()
		}
	}
}

// TestMountUnder: a mount with another one over it keeps its files until it can be taken out.
func TestMountUnder(t *testing.T) {
	root := t.TempDir()
	st, err := store.Open(t.Context(), root)
	if err != nil {
		t.Fatal(err)
	}
	defer st.Close()
	e := &core{store: st}
	m, err := e.newMount()
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	for _, source := range []string{m.source(), "other"} {
		if err := unix.Mount(source, dir, "tmpfs", 0, ""); err != nil {
			t.Fatal(err)
		}
		defer func() { _ = unix.Unmount(dir, unix.MNT_DETACH) }()
	}
	m.lock.Unlock() // as if its process was killed
	if did, err := e.freeMounts(); !errors.Is(err, runtime.ErrBusy) || len(did) > 0 {
		t.Errorf("freed below another mount: %q, %v", did, err)
	}
	if _, err := os.Stat(m.dir()); err != nil {
		t.Error(err)
	}
	if err := unix.Unmount(dir, 0); err != nil {
		t.Fatal(err)
	}
	if did, err := e.freeMounts(); err != nil || len(did) != 1 {
		t.Errorf("freed: %q, %v", did, err)
	}
	if left, err := kernel.MountsFrom(m.source()); err != nil || len(left) > 0 {
		t.Errorf("still mounted: %v, %v", left, err)
	}
}
