package oci

import (
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/runtime"
)

func TestRun(t *testing.T) {
	x := newBox(t)
	for _, test := range []struct {
		name           string
		spec           runtime.Spec
		stdin          string
		stdout, stderr string
		exit           int
	}{
		{name: "output", spec: sh("echo out; echo err >&2"), stdout: "out\n", stderr: "err\n"},
		{name: "exit code", spec: sh("exit 42"), exit: 42},
		{name: "signal", spec: sh("trap - TERM; kill -TERM $$; sleep 5; exit 3"), exit: 3}, // PID 1 ignores it
		{
			name: "stdin", spec: with(spec("cat"), func(s *runtime.Spec) { s.OpenStdin = true }),
			stdin: "to and fro", stdout: "to and fro",
		},
		{name: "no stdin", spec: spec("cat")},
		{name: "many lines", spec: sh("seq 1 20000 | wc -l; seq 1 20000"), stdout: "20000\n" + numbers(20000)},
		{name: "hostname", spec: sh("hostname; cat /etc/hostname; echo $HOSTNAME"), stdout: "box\nbox\nbox\n"},
		{
			name: "home and path", spec: sh("echo $HOME $PATH"),
			stdout: "/root /usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin\n",
		},
		{name: "workdir is made", spec: with(spec("pwd"), func(s *runtime.Spec) {
			s.Workdir = "/a/b/c"
		}), stdout: "/a/b/c\n"},
		{name: "loopback", spec: sh("ip addr show lo | grep -c 'inet 127.0.0.1'"), stdout: "1\n"},
		{name: "open files", spec: sh("ulimit -n"), stdout: "1024\n"},
		{name: "root directory", spec: spec("stat", "-c", "%a", "/"), stdout: "751\n"},
	} {
		t.Run(test.name, func(t *testing.T) {
			stdout, stderr, exit := x.run(test.spec, test.stdin)
			if stdout != test.stdout || stderr != test.stderr || exit != test.exit {
				t.Errorf("got %q, %q, exit %d\nwant %q, %q, exit %d", stdout, stderr, exit, test.stdout,
					test.stderr, test.exit)
			}
			if got := x.inspect(test.spec.ID).Status; got != runtime.Exited {
				t.Errorf("status %s", got)
			}
		})
	}
}

func numbers(n int) string {
	var b strings.Builder
	for i := 1; i <= n; i++ {
		b.WriteString(strconv.Itoa(i) + "\n")
	}
	return b.String()
}

func TestUser(t *testing.T) {
	x := newBox(t)
	for who, want := range map[string]string{
		"":             "uid=0(root) gid=0(root) groups=0(root)\n/root",
		"alice":        "uid=1000(alice) gid=1001(alice) groups=10(wheel),29(audio),1001(alice)\n/home/alice",
		"1000:wheel":   "uid=1000(alice) gid=10(wheel) groups=10(wheel)\n/home/alice",
		"12345:54321":  "uid=12345 gid=54321 groups=54321\n/",
		"nobody-there": "",
	} {
		t.Run(who, func(t *testing.T) {
			s := with(sh("id; echo $HOME"), func(s *runtime.Spec) { s.User = who })
			if want == "" {
				id := x.create(s)
				if _, err := x.Start(t.Context(), id, runtime.StartOptions{}); !errors.Is(err, fault.ErrInvalid) {
					t.Errorf("got %v", err)
				}
				return
			}
			out, _, _ := x.run(s, "")
			if strings.TrimSpace(out) != want {
				t.Errorf("got %q, want %q", out, want)
			}
		})
	}
}

// An account file that is a link out of the root, or no file, is not followed.
func TestHostilePasswd(t *testing.T) {
	x := newBox(t)
	host := filepath.Join(t.TempDir(), "passwd")
	write(t, host, "mallory:x:0:0::/:/bin/sh\n", 0o644)
	passwd := filepath.Join(x.lower, "etc/passwd")
	must(t, os.Remove(passwd))
	must(t, os.Symlink(host, passwd))
	id := x.create(with(spec("true"), func(s *runtime.Spec) { s.User = "mallory" }))
	if _, err := x.Start(t.Context(), id, runtime.StartOptions{}); err == nil {
		t.Error("a user of the host was taken for the sandbox's")
	}
	must(t, os.Remove(passwd))
	mkfifo(t, passwd)
	id = x.create(with(spec("true"), func(s *runtime.Spec) { s.User = "mallory" }))
	if _, err := x.Start(t.Context(), id, runtime.StartOptions{}); !errors.Is(err, fault.ErrInvalid) {
		t.Errorf("got %v", err)
	}
}

func TestCommandErrors(t *testing.T) {
	x := newBox(t)
	write(t, filepath.Join(x.lower, "etc/plain"), "x", 0o644)
	for _, test := range []struct {
		args []string
		code int
	}{
		{[]string{"no-such-command"}, 127},
		{[]string{"/no/such/command"}, 127},
		{[]string{"/etc/plain"}, 126},
		{[]string{"/etc"}, 126},
	} {
		t.Run(test.args[0], func(t *testing.T) {
			id := x.create(spec(test.args...))
			_, err := x.Start(t.Context(), id, runtime.StartOptions{Streams: &runtime.Streams{}})
			if !isExec(err, test.code) {
				t.Errorf("start: got %v", err)
			}
			if got := x.inspect(id).Status; got != runtime.Created {
				t.Errorf("status %s after a failed start", got)
			}
			x.gone(id)
			must(t, x.Remove(t.Context(), id))
			for _, left := range x.leftovers() {
				t.Errorf("left after a failed start: %s", left)
			}
		})
	}
	id := x.create(spec("sleep", "1000"))
	x.start(id)
	for _, test := range []struct {
		args []string
		code int
	}{
		{[]string{"no-such-command"}, 127},
		{[]string{"/no/such/command"}, 127},
		{[]string{"/etc/plain"}, 126},
		{[]string{"/etc"}, 126},
	} {
		for _, detach := range []bool{false, true} {
			_, err := x.Exec(t.Context(), id, runtime.Process{Args: test.args, Detach: detach}, runtime.Streams{})
			if !isExec(err, test.code) {
				t.Errorf("exec %q: got %v", test.args, err)
			}
		}
	}
	if _, err := x.Exec(t.Context(), id, runtime.Process{Args: []string{"true"}, Workdir: "/no/such"},
		runtime.Streams{}); !isExec(err, 126) {
		t.Errorf("exec in a missing directory: got %v", err)
	}
}

func TestStates(t *testing.T) {
	x := newBox(t)
	ctx := t.Context()
	s := spec("sleep", "1000")
	if _, err := x.Inspect(ctx, s.ID); !errors.Is(err, fault.ErrNotFound) {
		t.Errorf("inspect of nothing: %v", err)
	}
	if _, err := x.Inspect(ctx, "../../etc"); !errors.Is(err, fault.ErrNotFound) {
		t.Errorf("inspect of a path: %v", err)
	}
	id := x.create(s)
	if err := x.Create(ctx, s, []string{x.lower}); !errors.Is(err, fault.ErrExists) {
		t.Errorf("create again: %v", err)
	}
	if err := x.Stop(ctx, id, runtime.StopOptions{}); err != nil {
		t.Errorf("stop of a created one: %v", err)
	}
	if _, err := x.Wait(ctx, id); !errors.Is(err, fault.ErrState) {
		t.Errorf("wait for a created one: %v", err)
	}
	c, err := x.Inspect(ctx, id)
	if err != nil || c.Status != runtime.Created || c.Pid != 0 {
		t.Errorf("%+v, %v", c, err)
	}
	if st, err := os.Stat(c.Upper); err != nil || st.Mode().Perm() != 0o751 {
		t.Errorf("upperdir: %v, %v", st, err)
	}
	x.start(id)
	c, err = x.Inspect(ctx, id)
	if err != nil || c.Status != runtime.Running || c.Pid == 0 || time.Since(c.Started) > time.Minute {
		t.Errorf("%+v, %v", c, err)
	}
	if _, err := x.Start(ctx, id, runtime.StartOptions{}); !errors.Is(err, fault.ErrState) {
		t.Errorf("start of a running one: %v", err)
	}
	x.pause(id)
	if got := x.inspect(id).Status; got != runtime.Paused {
		t.Errorf("status %s", got)
	}
	if _, err := x.Exec(ctx, id, runtime.Process{Args: []string{"true"}},
		runtime.Streams{}); !errors.Is(err, fault.ErrState) {
		t.Errorf("exec in a paused one: %v", err)
	}
	x.resume(id)
	for range 2 {
		if err := x.Stop(ctx, id, runtime.StopOptions{}); err != nil {
			t.Fatal(err)
		}
		c, err = x.Inspect(ctx, id)
		if err != nil || c.Status != runtime.Exited || c.ExitCode != 137 || c.Pid != 0 || c.Finished.IsZero() {
			t.Errorf("%+v, %v", c, err)
		}
	}
	x.gone(id)
	x.start(id)
	if err := x.Remove(ctx, id); err != nil {
		t.Fatal(err)
	}
	if err := x.Remove(ctx, id); err != nil {
		t.Fatal(err)
	}
	x.gone(id)
	if exit, err := x.Wait(ctx, id); exit.Code != 137 || err != nil {
		t.Errorf("wait for one just removed: %+v, %v", exit, err)
	}
}
