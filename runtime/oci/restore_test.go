package oci

import (
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/agentbox/agentbox/criu/stage"
	"github.com/agentbox/agentbox/policy"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/internal/box"
)

// dump freezes a container and dumps it with all that CRIU needs to be told.
func (x *fixture) dump(id string) string {
	x.t.Helper()
	images := x.t.TempDir()
	x.pause(id)
	err := x.call(x.t.Context(), x.box.OCI, "checkpoint", "--leave-running", "--tcp-established", "--file-locks",
		"--image-path", images, "--work-path", images, id)
	if err != nil {
		log, _ := os.ReadFile(filepath.Join(images, "dump.log"))
		lines := strings.Split(string(log), "\n")
		x.t.Fatalf("%v\n%s", err, strings.Join(lines[max(0, len(lines)-20):], "\n"))
	}
	return images
}

// restore stops a frozen container and brings it back.
func (x *fixture) restore(id, images string, streams *runtime.Streams) func() error {
	x.t.Helper()
	must(x.t, x.Stop(x.t.Context(), id, runtime.StopOptions{Silent: true}))
	work := x.t.TempDir()
	must(x.t, stage.At(x.box.Run, id).Put(stage.Restore{
		Images: images, Work: work, Flags: []string{"--tcp-established", "--file-locks"},
	}))
	wait, err := x.Start(x.t.Context(), id, runtime.StartOptions{Streams: streams, Env: []string{"ATTEMPT=2"}})
	if err != nil {
		log, _ := os.ReadFile(filepath.Join(work, "restore.log"))
		lines := strings.Split(string(log), "\n")
		x.t.Fatalf("%v\n%s", err, strings.Join(lines[max(0, len(lines)-20):], "\n"))
	}
	return wait
}

// Processes of when the usual was more have what it is now, as what is started beside them.
func TestRestoreOlder(t *testing.T) {
	x := newBox(t, func(o *Options) { o.Wrapper = wrapperBinary(t) })
	s := sh("echo ready; while :; do sleep 1000; done") // of runc's own dump some systems' sleep wakes up
	s.Security = runtime.Security{Capabilities: policy.DockerCapabilities, NewPrivileges: true}
	id := x.up(s)
	eventually(t, "it is ready", func() bool {
		out, _ := x.logs(id, runtime.LogOptions{Tail: -1})
		return out == "ready\n"
	})
	images := x.dump(id)
	s.Security = runtime.Security{NoNewPrivileges: true}
	must(t, x.box.Save(id, box.Container{Spec: s, Lower: []string{x.lower}}))
	x.restore(id, images, nil)
	out, _ := x.exec(id, "grep", "-hE", "CapBnd|NoNewPrivs", "/proc/1/status", "/proc/self/status")
	if want := "CapBnd:\t00000000800404fb\nNoNewPrivs:\t1\nCapBnd:\t00000000800404fb\nNoNewPrivs:\t1\n"; out != want {
		t.Errorf("%q, want %q", out, want)
	}
}

// Everything that a bundle may hold comes back, with pipes and with a
// terminal, with and without our init, and a second time too.
func TestRestore(t *testing.T) {
	wrapper := wrapperBinary(t)
	for name, change := range map[string]func(*runtime.Spec){
		"pipes":    func(*runtime.Spec) {},
		"terminal": func(s *runtime.Spec) { s.Terminal = true },
		"init":     func(s *runtime.Spec) { s.Init = true },
		"both":     func(s *runtime.Spec) { s.Init, s.Terminal = true, true },
		"bridge":   func(s *runtime.Spec) { s.Network.Mode = runtime.NetworkBridge },
		"host":     func(s *runtime.Spec) { s.Network.Mode = runtime.NetworkHost },
		"read-only": func(s *runtime.Spec) {
			s.ReadOnly = true
			s.Resources = runtime.Resources{Memory: 256 << 20, CPUs: 1, Pids: 50}
		},
	} {
		t.Run(name, func(t *testing.T) {
			x := newBox(t, func(o *Options) { o.Wrapper = wrapper })
			host := t.TempDir()
			write(t, filepath.Join(host, "file"), "of the host\n", 0o644)
			id := x.create(with(sh("exec 5</etc/hosts 6</vol/file; echo kept > /scratch/f; n=0; "+
				"while read line; do n=$((n+1)); echo $n $line $(cat /scratch/f); done; cat <&5 | grep -c localhost; cat <&6; exit 33"), func(s *runtime.Spec) {
				s.OpenStdin, s.Security.NoNewPrivileges = true, true
				s.Mounts = []runtime.Mount{
					{Type: "bind", Source: host, Target: "/vol", ReadOnly: true},
					{Type: "tmpfs", Target: "/scratch"},
				}
				change(s)
			}))
			in, typed := io.Pipe()
			var out buffer
			wait, err := x.Start(t.Context(), id, runtime.StartOptions{Streams: &runtime.Streams{
				Stdin: in, Stdout: &out, Stderr: &out,
			}})
			must(t, err)
			_, err = typed.Write([]byte("one\n"))
			must(t, err)
			eventually(t, "the first line", out.has("1 one kept"))
			pid := x.inspect(id).Pid
			for _, next := range []string{"two", "three"} {
				images := x.dump(id)
				ended := make(chan error, 1)
				go func(wait func() error) { ended <- wait() }(wait)
				in, typed = io.Pipe()
				wait = x.restore(id, images, &runtime.Streams{Stdin: in, Stdout: &out, Stderr: &out})
				must(t, <-ended)
				c := x.inspect(id)
				if c.Status != runtime.Running || c.Pid == pid {
					t.Errorf("%+v, was %d", c, pid)
				}
				_, err = typed.Write([]byte(next + "\n"))
				must(t, err)
				eventually(t, next, out.has(next+" kept"))
				if got, _ := x.exec(id, "sh", "-c",
					"echo $ATTEMPT $(wc -l < /etc/resolv.conf | tr -d ' 0-9')"); strings.TrimSpace(got) != "2" {
					t.Errorf("exec in a restored one: %q", got)
				}
			}
			if !out.has("3 three kept")() {
				t.Errorf("%q", out.String())
			}
			if got, _ := x.exec(id, "grep", "NoNewPrivs", "/proc/1/status"); got != "NoNewPrivs:\t1\n" {
				t.Errorf("of the restored one: %q", got)
			}
			if name == "read-only" {
				if got := x.limit(id, "pids.max", "pids.max"); got != "50" {
					t.Errorf("pids limit %s", got)
				}
			}
			end := "\x04"
			if name == "terminal" || name == "both" {
				_, err = typed.Write([]byte(end))
				must(t, err)
			}
			must(t, typed.Close())
			must(t, wait())
			if exit, err := x.Wait(t.Context(), id); exit.Code != 33 || err != nil {
				t.Errorf("exit %+v, %v", exit, err)
			}
			if !strings.Contains(out.String(), "of the host") {
				t.Errorf("%q", out.String())
			}
		})
	}
}
