package test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/api"
)

// awaitSandboxes waits until a root has so many, and calls no command for that,
// which would itself end leases.
func (b *box) awaitSandboxes(n int) {
	b.Helper()
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(20 * time.Millisecond) {
		list, err := os.ReadDir(filepath.Join(b.root, "sandboxes"))
		if err != nil && !os.IsNotExist(err) {
			b.Fatal(err)
		}
		if len(list) == n {
			return
		}
		if time.Now().After(deadline) {
			b.Fatalf("there are %d sandboxes, not %d", len(list), n)
		}
	}
}

// supervisor is the pid of the process that ends the leases of a root, and holds its sandboxes to
// their limits; 0: none.
func (b *box) supervisor() int {
	b.Helper()
	dirs, err := filepath.Glob("/proc/[0-9]*")
	if err != nil {
		b.Fatal(err)
	}
	for _, dir := range dirs {
		args, _ := os.ReadFile(filepath.Join(dir, "cmdline")) // it may have ended
		text := string(args)
		if strings.Contains(text, "\x00"+b.root+"\x00") && strings.HasSuffix(text, "\x00supervise\x00") {
			pid, _ := strconv.Atoi(filepath.Base(dir))
			return pid
		}
	}
	return 0
}

func (b *box) awaitSupervisor(there bool) {
	b.Helper()
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(20 * time.Millisecond) {
		if there == (b.supervisor() != 0) {
			return
		}
		if time.Now().After(deadline) {
			b.Fatalf("a supervisor is there: %v, want %v", !there, there)
		}
	}
}

// killSupervisor ends it with SIGKILL, and returns once there is none.
func (b *box) killSupervisor() {
	b.Helper()
	for pid := b.supervisor(); pid != 0; pid = b.supervisor() {
		if err := syscall.Kill(pid, syscall.SIGKILL); err != nil && !errors.Is(err, syscall.ESRCH) {
			b.Fatal(err)
		}
		b.noProcess(pid)
	}
}

// owner starts a process that holds a lease.
func owner(t *testing.T) *exec.Cmd {
	t.Helper()
	cmd := exec.Command("sleep", "1000")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _, _ = cmd.Process.Kill(), cmd.Wait() })
	return cmd
}

// killOwner kills an owner and returns once it has ended, without reaping it.
func killOwner(t *testing.T, who *exec.Cmd) {
	t.Helper()
	if err := who.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	for {
		switch err := unix.Waitid(unix.P_PID, who.Process.Pid, nil, unix.WEXITED|unix.WNOWAIT, nil); err {
		case nil:
			return
		case unix.EINTR:
		default:
			t.Fatal(err)
		}
	}
}

// An owner that is killed takes its sandboxes along without any command being called; where the
// supervisor was killed, too, the next command sees to it.
func TestLeaseOwnerKilled(t *testing.T) {
	t.Parallel()
	b := memoryBox(t)
	for _, supervised := range []bool{true, false} {
		who := owner(t)
		l := b.ok("lease", "create", "--name", "l", "--pid", fmt.Sprint(who.Process.Pid))
		b.start("c", "--lease", "l", "--rm", "--network", "none", "busybox", "sleep", "1000")
		b.ok("checkpoint", "--temporary", "c")
		b.awaitSupervisor(true)
		if !supervised {
			b.killSupervisor()
		}
		killOwner(t, who)
		if supervised {
			b.eventually("its end is on record", func() bool {
				return decode[[]runtime.Lease](b, b.ok("lease", "inspect", l))[0].State == "ended"
			})
		}
		if got := b.ok("ps", "-aq"); got != "" {
			t.Errorf("left: %s", got)
		}
		if got := b.checkpoints(); len(got) != 0 {
			t.Errorf("left: %+v", got)
		}
		got := decode[[]runtime.Lease](b, b.ok("lease", "inspect", l))[0]
		if got.State != "ended" || got.Reason != fmt.Sprintf("its owner, process %d, has ended", who.Process.Pid) ||
			len(got.Sandboxes) != 1 || len(got.Checkpoints) != 1 {
			t.Errorf("on record: %+v", got)
		}
		b.awaitSupervisor(false) // nothing is left to supervise
	}
}

// A heartbeat that is missed, and a deadline.
func TestLeaseTimes(t *testing.T) {
	t.Parallel()
	b := memoryBox(t)
	b.ok("lease", "create", "--name", "beat", "--heartbeat", "20s")
	b.ok("lease", "create", "--name", "dead", "--for", "15s")
	b.start("a", "--lease", "beat", "--network", "none", "busybox", "sleep", "1000")
	b.start("b", "--lease", "dead", "--network", "none", "busybox", "sleep", "1000")
	for there := true; there; _, there = b.find("b") {
		b.ok("lease", "renew", "beat")
	}
	if _, ok := b.find("a"); !ok {
		t.Error("renewed, and removed all the same")
	}
	b.awaitSandboxes(0)
	for name, want := range map[string]string{
		"beat": "it was not renewed within 20s", "dead": "its deadline, after 15s, has passed",
	} {
		if got := decode[[]runtime.Lease](b, b.ok("lease", "inspect", name))[0]; got.Reason != want {
			t.Errorf("%s: %q", name, got.Reason)
		}
	}
	b.fails(4, "lease", "renew", "beat")
	b.fails(4, "create", "--lease", "dead", "busybox", "true")
}

// A lease that a connection to the service holds ends with it: when it is cut, when
// the caller returns, and when the service is killed.
func TestLeaseOfConnection(t *testing.T) {
	t.Parallel()
	b := memoryBox(t)
	cmd, socket := b.serve()
	hold := func() net.Conn {
		t.Helper()
		conn, err := net.Dial("unix", socket)
		if err != nil {
			t.Fatal(err)
		}
		body := `{"name":"l"}`
		fmt.Fprintf(conn, "POST /v1/leases/hold HTTP/1.1\r\nHost: agentbox\r\nAccept: text/event-stream\r\nContent-Length: %d\r\n\r\n%s", len(body), body)
		r := bufio.NewReader(conn)
		resp, err := http.ReadResponse(r, nil)
		if err != nil || resp.StatusCode != 200 {
			t.Fatal(resp, err)
		}
		line, err := bufio.NewReader(resp.Body).ReadString('\n')
		if err != nil || line != "event: progress\n" {
			t.Fatalf("%q, %v", line, err)
		}
		b.start("c", "--lease", "l", "--network", "none", "busybox", "sleep", "1000")
		return conn
	}
	conn := hold()
	if err := conn.Close(); err != nil {
		t.Fatal(err)
	}
	b.awaitSandboxes(0)
	b.eventually("its name is free", func() bool {
		return decode[[]runtime.Lease](b, b.ok("lease", "inspect", "l"))[0].State == "ended"
	})

	svc := api.Dial(socket)
	defer svc.Close()
	err := svc.HoldLease(t.Context(), runtime.LeaseRequest{Name: "l"}, func(_ context.Context, l runtime.Lease) error {
		b.start("c", "--lease", l.ID, "--network", "none", "busybox", "sleep", "1000")
		return nil
	})
	if err != nil {
		t.Error(err)
	}
	if got := b.ok("ps", "-aq"); got != "" {
		t.Errorf("left when the caller has returned: %s", got)
	}

	conn = hold()
	defer conn.Close()
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait() // it was killed
	b.awaitSandboxes(0)
	var got runtime.Lease
	b.eventually("its end is on record", func() bool {
		got = decode[[]runtime.Lease](b, b.ok("lease", "inspect", "l"))[0]
		return got.State == "ended"
	})
	if !strings.Contains(got.Reason, "the service") {
		t.Errorf("%+v", got)
	}
}

// The supervisor of a root that is removed, as by a purge, ends, and makes nothing of it again.
func TestSupervisorOfRemovedRoot(t *testing.T) {
	t.Parallel()
	b := memoryBox(t)
	b.ok("lease", "create", "--for", "1h")
	lock := "run/supervisor"
	b.eventually("the supervisor has begun", func() bool {
		f, err := os.Open(filepath.Join(b.root, lock))
		if err != nil {
			return false
		}
		defer f.Close()
		return errors.Is(unix.Flock(int(f.Fd()), unix.LOCK_SH|unix.LOCK_NB), unix.EWOULDBLOCK)
	})
	// All at once: what is seen in between would be a root that is not whole.
	away := b.root + ".away"
	if err := os.Rename(b.root, away); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(away) })
	if err := os.Remove(filepath.Join(away, lock)); err != nil { // which wakes it
		t.Fatal(err)
	}
	b.awaitSupervisor(false)
	if _, err := os.Lstat(b.root); err == nil {
		t.Error("it has made its root again")
	}
}
