package wall_test

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/criu/criutest"
	"github.com/agentbox/agentbox/criu/freezer"
	"github.com/agentbox/agentbox/criu/host"
	"github.com/agentbox/agentbox/criu/wall"
)

// A container that a spec has made passes as one of that spec, and not as one of a spec that
// gives less.
func TestLook(t *testing.T) {
	bound, other := t.TempDir(), t.TempDir()
	shared := t.TempDir()
	must(t, unix.Mount("tmpfs", shared, "tmpfs", 0, ""))
	t.Cleanup(func() { must(t, unix.Unmount(shared, unix.MNT_DETACH)) })
	must(t, unix.Mount("", shared, "", unix.MS_SHARED, ""))
	b := criutest.New(t, []string{
		"sh", "-c", "exec 7</bin/busybox; sleep 1000 & echo up > /up; wait",
	}, func(s *specs.Spec) {
		s.Process.NoNewPrivileges = false
		s.Mounts = append(s.Mounts, specs.Mount{
			Destination: "/shared", Type: "bind", Source: shared, Options: []string{"rbind", "rshared"},
		},
			specs.Mount{Destination: "/slave", Type: "bind", Source: shared, Options: []string{"rbind", "rslave"}},
			specs.Mount{Destination: "/bound", Type: "bind", Source: bound, Options: []string{"rbind", "rprivate"}})
	})
	must(t, os.WriteFile(filepath.Join(b.Files, "plain"), nil, 0o666))
	look := looker(t, b, 2)
	must(t, look(nil))
	for want, edit := range map[string]func(*specs.Spec, *wall.Restored){
		"CapPrm": func(s *specs.Spec, _ *wall.Restored) { s.Process.Capabilities.Bounding = []string{"CAP_KILL"} },
		"Seccomp": func(s *specs.Spec, _ *wall.Restored) {
			s.Linux.Seccomp = &specs.LinuxSeccomp{DefaultAction: specs.ActErrno}
		},
		"ipc namespace": func(s *specs.Spec, _ *wall.Restored) {
			s.Linux.Namespaces = without(s.Linux.Namespaces, specs.IPCNamespace)
		},
		"user namespace": func(s *specs.Spec, _ *wall.Restored) {
			s.Linux.Namespaces = append(s.Linux.Namespaces, specs.LinuxNamespace{Type: specs.UserNamespace})
		},
		"pid namespace": func(s *specs.Spec, _ *wall.Restored) {
			s.Linux.Namespaces = append(without(s.Linux.Namespaces, specs.PIDNamespace),
				specs.LinuxNamespace{Type: specs.PIDNamespace, Path: "/proc/self/ns/pid"})
		},
		"NoNewPrivs": func(s *specs.Spec, _ *wall.Restored) {
			s.Process.NoNewPrivileges = true
		},
		`flags of the mount at "/"`: func(s *specs.Spec, _ *wall.Restored) { s.Root.Readonly = true },
		`mount at "/"`:              func(s *specs.Spec, _ *wall.Restored) { s.Root.Path = other },
		`mount at "/bound": it does`: func(s *specs.Spec, _ *wall.Restored) {
			s.Mounts[len(s.Mounts)-1].Source = other
		},
		`mount at "/bound": the con`: func(s *specs.Spec, _ *wall.Restored) {
			s.Mounts = s.Mounts[:len(s.Mounts)-1]
		},
		`mount at "/bound": it lack`: func(s *specs.Spec, _ *wall.Restored) {
			s.Mounts[len(s.Mounts)-1].Options = []string{"rbind", "ro"}
		},
		`propagation of the mount at "/shared"`: func(s *specs.Spec, _ *wall.Restored) {
			s.Mounts[len(s.Mounts)-3].Options = []string{"rbind", "rslave"}
		},
		`propagation of the mount at "/slave"`: func(s *specs.Spec, _ *wall.Restored) {
			s.Mounts[len(s.Mounts)-2].Options = []string{"rbind", "rprivate"}
		},
		"cgroup": func(_ *specs.Spec, r *wall.Restored) {
			r.Cgroups = map[string]string{"pids": "/sys/fs/cgroup/pids/agentbox-none"}
		},
	} {
		err := look(edit)
		refused := (*wall.Refusal)(nil)
		if !errors.As(err, &refused) || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", want, err)
		}
	}
	// Masks that are not there are made.
	more := func(s *specs.Spec, _ *wall.Restored) {
		s.Linux.MaskedPaths = append(s.Linux.MaskedPaths, "/proc/driver", "/proc/uptime")
		s.Linux.ReadonlyPaths = append(s.Linux.ReadonlyPaths, "/tmp", "/plain")
	}
	must(t, look(more))
	out, err := b.Do("exec", b.ID, "sh", "-c",
		"cat /proc/uptime; echo * | grep -c none; touch /proc/driver/x /tmp/x; echo >/plain")
	if err == nil || strings.Contains(out, ".") || strings.Count(out, "Read-only file system") != 3 {
		t.Errorf("masked: %v: %s", err, out)
	}
	// A file that was opened before they were made is refused.
	err = look(func(s *specs.Spec, r *wall.Restored) {
		more(s, r)
		s.Linux.ReadonlyPaths = append(s.Linux.ReadonlyPaths, "/bin")
	})
	if err == nil || !strings.Contains(err.Error(), "is hidden in the container, or read-only") {
		t.Errorf("open before: %v", err)
	}
	// A process that the runtime does not know is ended.
	err = look(func(_ *specs.Spec, r *wall.Restored) { r.Pids = r.Pids[:1] })
	if err == nil || !strings.Contains(err.Error(), "outside of the container's cgroup") {
		t.Errorf("a process outside: %v", err)
	}
	b.Until("all have ended", func() bool { return b.Status() == "stopped" })
}

func without(list []specs.LinuxNamespace, typ specs.LinuxNamespaceType) (rest []specs.LinuxNamespace) {
	for _, n := range list {
		if n.Type != typ {
			rest = append(rest, n)
		}
	}
	return rest
}

// looker starts a container of so many processes. The returned function looks at it by its spec,
// or another one.
func looker(t testing.TB, b *criutest.Box, processes int) func(func(*specs.Spec, *wall.Restored)) error {
	t.Helper()
	b.Start(nil)
	box, err := freezer.Open(b.State, b.ID)
	must(t, err)
	cgroups, err := freezer.Cgroups(b.State, b.ID)
	must(t, err)
	b.Until("it is up", func() bool {
		if why, _ := os.ReadFile(filepath.Join(b.Files, "failed")); len(why) > 0 {
			t.Fatal(string(why))
		}
		_, err := os.Stat(filepath.Join(b.Files, "up"))
		pids, _ := box.Processes() // runc's helpers may be among them still
		return err == nil && len(pids) == processes
	})
	return func(edit func(*specs.Spec, *wall.Restored)) error {
		t.Helper()
		data, err := os.ReadFile(filepath.Join(b.Bundle, "config.json"))
		must(t, err)
		s := &specs.Spec{}
		must(t, json.Unmarshal(data, s))
		s.Root.Path = b.Files
		pids, err := box.Processes()
		must(t, err)
		r := wall.Restored{Pid: box.Pid, Pids: pids, Cgroups: cgroups}
		if edit != nil {
			edit(s, &r)
		}
		dir := t.TempDir()
		data, err = json.Marshal(s)
		must(t, err)
		must(t, os.WriteFile(filepath.Join(dir, "config.json"), data, 0o600))
		spec, err := wall.Read(dir)
		must(t, err)
		return wall.Inspect(r, spec)
	}
}

// holder is a container of the test's program, with a directory of the host at /bound.
func holder(t testing.TB, what, bound string) *criutest.Box {
	t.Helper()
	must(t, os.WriteFile(filepath.Join(bound, "x"), make([]byte, 4096), 0o600))
	b := criutest.New(t, []string{"hold", what}, func(s *specs.Spec) {
		s.Mounts = append(s.Mounts, specs.Mount{
			Destination: "/bound", Type: "bind", Source: bound, Options: []string{"rbind", "rprivate"},
		})
	})
	installed(t, b.Files)
	return b
}

// Mapped and watched files are on the container's mounts. A mount that is detached from it is not
// one of them.
func TestLookOutside(t *testing.T) {
	for what, want := range map[string]string{"map": "memory at", "watches": "it watches file"} {
		t.Run(what, func(t *testing.T) {
			parent := t.TempDir()
			bound := filepath.Join(parent, "bound")
			must(t, os.Mkdir(bound, 0o755))
			b := holder(t, what, bound)
			look := looker(t, b, 1)
			must(t, look(nil))
			must(t, host.InMountsOf(b.Pid(), func() error { return unix.Unmount("/bound", unix.MNT_DETACH) }))
			err := look(nil)
			refused := (*wall.Refusal)(nil)
			if !errors.As(err, &refused) || !strings.Contains(err.Error(), want) {
				t.Errorf("%v, want %s", err, want)
			}
		})
	}
}

func BenchmarkLook(b *testing.B) {
	box := holder(b, "maps", b.TempDir())
	look := looker(b, box, 1)
	must(b, look(nil))
	for b.Loop() {
		must(b, look(nil))
	}
}
