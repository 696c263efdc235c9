package main

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/criu/criutest"
	"github.com/agentbox/agentbox/criu/stage"
)

// restored is a container that was dumped and restored.
func restored(t *testing.T) *box {
	t.Helper()
	b := newBox(t, criutest.Counter, nil)
	b.Start(nil)
	b.Until("it counts", func() bool { return b.Count() >= 2 })
	b.dump(t)
	putBack := b.Keep()
	b.End()
	putBack()
	if err := stage.At(b.run, b.ID).Put(stage.Restore{
		Images: b.Images, Work: b.Work, Flags: []string{"--file-locks"}, Config: b.Config,
	}); err != nil {
		t.Fatal(err)
	}
	b.Start(nil)
	return b
}

// A program executed in a restored container is in its time namespace, and ends as its command
// does; the state is the runtime's own again, and no mount is left.
func TestExec(t *testing.T) {
	b := restored(t)
	clocks := func(pid string) string {
		t.Helper()
		link, err := os.Readlink("/proc/" + pid + "/ns/time")
		if err != nil {
			t.Fatal(err)
		}
		return link
	}
	theirs := clocks(fmt.Sprint(b.Pid()))
	if theirs == clocks("self") {
		t.Skip("this CRIU restores into no time namespace")
	}
	state := filepath.Join(b.State, b.ID, stateFile)
	noted, err := os.ReadFile(state)
	if err != nil {
		t.Fatal(err)
	}
	for _, flags := range [][]string{nil, {"--cwd", "/"}, {"--no-such=1"}, {"--log-level", b.ID}} {
		out, err := b.Do(append(append([]string{"exec"}, flags...), b.ID, "sh", "-c",
			"busybox readlink /proc/self/ns/time; exit 7")...)
		var exit *exec.ExitError
		known := len(flags) == 0 || flags[0] == "--cwd"
		if known && (strings.TrimSpace(out) != theirs || !errors.As(err, &exit) || exit.ExitCode() != 7) {
			t.Errorf("exec %q: %q, %v; its first process is in %s", flags, out, err, theirs)
		}
		if !known && !strings.Contains(out, "flag provided but not defined") {
			t.Errorf("exec %q: %q, %v", flags, out, err)
		}
	}
	// An exec that is killed leaves nothing, either.
	cmd := b.Cmd(nil, "exec", b.ID, "sh", "-c", "echo up; sleep 1000")
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	cmd.Stdout = w
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	w.Close()
	if _, err := r.Read(make([]byte, 3)); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait()
	r.Close()
	if mounts, err := os.ReadFile("/proc/self/mountinfo"); err != nil || strings.Contains(string(mounts), b.State) {
		t.Errorf("mounted below %s: %v\n%s", b.State, err, mounts)
	}
	if now, err := os.ReadFile(state); err != nil || !bytes.Equal(now, noted) {
		t.Errorf("the runtime's state was\n%s\nand is\n%s, %v", noted, now, err)
	}
	if s := b.Status(); s != "running" {
		t.Errorf("it is %s", s)
	}

	// Without nsenter it fails, and says what is missing.
	hidden := exec.Command("unshare", "-m", "sh", "-c",
		`for p in /bin /usr/bin /sbin /usr/sbin /usr/local/bin /usr/local/sbin; do
		[ ! -e $p/nsenter ] || mount --bind /dev/null $p/nsenter || exit
	done; exec "$0" "$@"`, b.Binary, "--root", b.State, "exec", b.ID, "true")
	if out, err := hidden.CombinedOutput(); err == nil || !strings.Contains(string(out), "Install util-linux") {
		t.Errorf("without nsenter: %v, %s", err, out)
	}
}

// Pipes are given to the user of a process, named pipes and files are not.
func TestGive(t *testing.T) {
	criutest.Root(t)
	uids, gids := []mapping{{0, 100000, 1000}, {5000, 7000, 1}}, []mapping{{0, 200000, 1000}}
	var st unix.Stat_t
	for _, c := range []struct {
		uid, gid  int64
		terminal  bool
		want, and uint32
	}{
		{0, 0, false, 100000, 200000}, {999, 1, false, 100999, 200001}, {5000, 0, false, 7000, 200000},
		{1000, 0, false, 0, 0}, {0, 0, true, 0, 0},
	} {
		r, w, err := os.Pipe()
		if err != nil {
			t.Fatal(err)
		}
		u := user{Terminal: c.terminal}
		u.User.UID, u.User.GID = c.uid, c.gid
		stdout, err := unix.Dup(1)
		if err != nil {
			t.Fatal(err)
		}
		err = unix.Dup2(int(w.Fd()), 1)
		u.give(uids, gids)
		if err := errors.Join(err, unix.Dup2(stdout, 1), unix.Close(stdout)); err != nil {
			t.Fatal(err)
		}
		if err := unix.Fstat(int(r.Fd()), &st); err != nil || st.Uid != c.want || st.Gid != c.and {
			t.Errorf("%+v: the pipe belongs to %d:%d, %v", c, st.Uid, st.Gid, err)
		}
		r.Close()
		w.Close()
	}
}
