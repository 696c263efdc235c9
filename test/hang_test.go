package test

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/nftables"
	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/proc"
)

// underWay is a verb whose CRIU runs.
type underWay struct {
	agentbox *os.Process
	criu     int
	done     <-chan result
}

// begin begins a verb.
func (b *box) begin(args ...string) underWay {
	b.Helper()
	cmd := b.command(context.Background(), args...)
	out := &bytes.Buffer{}
	cmd.Stdout, cmd.Stderr = out, out
	cmd.WaitDelay = time.Second // a monitor that outlives the command has its output, too
	if err := cmd.Start(); err != nil {
		b.Fatal(err)
	}
	done := make(chan result, 1)
	go func() {
		_ = cmd.Wait()
		done <- result{args: args, err: out.String(), code: cmd.ProcessState.ExitCode()}
	}()
	return underWay{agentbox: cmd.Process, done: done}
}

// seize begins a verb and takes hold of the CRIU that it runs, by a function that reports
// whether it has.
func (b *box) seize(hold func(criu int) bool, args ...string) underWay {
	b.Helper()
	v := b.begin(args...)
	for end := time.Now().Add(time.Minute * patience); time.Now().Before(end); {
		if v.criu = b.criu(); v.criu != 0 && hold(v.criu) {
			return v
		}
		select {
		case r := <-v.done: // it was quicker than we
			if r.code != 0 {
				b.Fatalf("%v: %s", args, r)
			}
			v = b.begin(args...)
		default:
		}
	}
	b.Fatalf("%v runs no CRIU", args)
	return v
}

// hang begins a verb and stops the CRIU that it runs, by SIGSTOP.
func (b *box) hang(args ...string) underWay {
	b.Helper()
	return b.seize(func(criu int) bool { return syscall.Kill(criu, syscall.SIGSTOP) == nil }, args...)
}

// fails waits for the end of the verb, which has to be a failure that says a text.
func (v underWay) fails(b *box, what, says string) {
	b.Helper()
	select {
	case r := <-v.done:
		if r.code == 0 || !strings.Contains(r.err, says) {
			b.Errorf("%s does not fail saying %q: %s", what, says, r)
		}
	case <-time.After(2 * time.Minute * patience):
		b.Fatalf("%s has not ended", what)
	}
}

// goesOn waits until the counter of a sandbox counts on.
func (b *box) goesOn(name, when string) {
	b.Helper()
	n := b.count(name)
	b.eventually(when+": it counts on", func() bool { return b.count(name) > n })
}

// criu finds a CRIU that works for this root, by what it has open.
func (b *box) criu() int {
	comms, _ := filepath.Glob("/proc/[0-9]*/comm")
	for _, comm := range comms {
		if data, _ := os.ReadFile(comm); strings.TrimSpace(string(data)) != "criu" {
			continue
		}
		fds, _ := filepath.Glob(filepath.Dir(comm) + "/fd/*")
		for _, fd := range fds {
			if link, _ := os.Readlink(fd); strings.HasPrefix(link, b.root+"/") && strings.HasSuffix(link, ".log") {
				pid, _ := strconv.Atoi(filepath.Base(filepath.Dir(comm)))
				return pid
			}
		}
	}
	return 0
}

// TestHangingCRIU has a CRIU that does not go on: the verb ends by its timeout, says where
// CRIU stood, and the sandbox goes on, or is as it was.
func TestHangingCRIU(t *testing.T) {
	b := newBox(t)
	b.start("s", "--network", "none", "busybox", "sh", "-c", counter)
	b.reaches("s", 3)
	v := b.hang("checkpoint", "s", "--timeout", "3s")
	b.eventually("ps says what goes on", func() bool { return strings.Contains(b.ok("ps"), "Checkpointing") })
	v.fails(b, "a checkpoint", "CRIU")
	b.goesOn("s", "after a checkpoint that hung")
	one := b.checkpoint("s")

	b.hang("restore", "s", one, "--no-undo", "--timeout", "3s").fails(b, "a restore", "CRIU")
	if status := b.inspect("s").Status; status != "exited" && status != "running" {
		t.Errorf("after a restore that hung it is %s", status)
	}
	b.ok("restore", "s", one)
	b.goesOn("s", "after the restore")

	v = b.hang("checkpoint", "s")
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute*patience)
	defer cancel()
	if out, err := b.command(ctx, "rm", "-f", "s").CombinedOutput(); err != nil {
		t.Errorf("rm -f of a sandbox whose checkpoint hangs: %v: %s", err, out)
	}
	v.fails(b, "the checkpoint of a removed sandbox", "CRIU")
}

// TestHangingCRIUCalledOff ends verbs whose CRIU hangs in each other way: by Ctrl-C, by a
// kill of CRIU, by one of agentbox, by rm -f.
func TestHangingCRIUCalledOff(t *testing.T) {
	t.Parallel()
	b := memoryBox(t)
	b.start("s", "--network", "none", "busybox", "sh", "-c", counter)
	b.reaches("s", 3)
	pid := b.inspect("s").Pid
	unmoved := func(when string) {
		b.Helper()
		b.goesOn("s", when)
		equal(b, "pid "+when, b.inspect("s").Pid, pid)
	}
	send := func(pid int, signal syscall.Signal) {
		b.Helper()
		if err := syscall.Kill(pid, signal); err != nil {
			t.Fatal(err)
		}
	}
	v := b.hang("checkpoint", "s")
	send(v.agentbox.Pid, syscall.SIGINT)
	v.fails(b, "a checkpoint that Ctrl-C ends", "CRIU")
	unmoved("after Ctrl-C")

	v = b.hang("checkpoint", "s")
	send(v.criu, syscall.SIGKILL)
	v.fails(b, "a checkpoint whose CRIU is killed", "CRIU was killed")
	unmoved("after a checkpoint whose CRIU was killed")

	v = b.hang("checkpoint", "s")
	send(v.agentbox.Pid, syscall.SIGKILL)
	v.fails(b, "a checkpoint that is killed", "")
	b.ok("recover")
	unmoved("after the kill of a checkpoint")

	one := b.checkpoint("s")
	restore := []string{"restore", "s", one, "--no-undo"}
	back := func(what string) {
		b.Helper()
		if status := b.inspect("s").Status; status != "exited" && status != "running" {
			t.Errorf("after a restore %s it is %s", what, status)
		}
		b.ok(restore...)
		b.goesOn("s", "after the restore after one "+what)
	}
	v = b.hang(restore...)
	b.eventually("ps says what goes on", func() bool { return strings.Contains(b.ok("ps"), "Restoring") })
	send(v.agentbox.Pid, syscall.SIGINT)
	v.fails(b, "a restore that Ctrl-C ends", "")
	back("that Ctrl-C ended")

	v = b.hang(restore...)
	send(v.criu, syscall.SIGKILL)
	v.fails(b, "a restore whose CRIU is killed", "CRIU was killed")
	back("whose CRIU was killed")

	v = b.hang(restore...)
	b.ok("rm", "-f", "s")
	v.fails(b, "a restore of what is removed", "")
	if now, there := b.find("s"); there {
		t.Errorf("after rm -f in a restore it is %s", now.Status)
	}
}

// TestCRIUKilledWithNetworkLock has the watchdog kill a CRIU that no gentler way ends, as
// another process traces it, while it holds the network of a sandbox with a connection still.
func TestCRIUKilledWithNetworkLock(t *testing.T) {
	t.Parallel()
	b := memoryBox(t)
	b.ok("image", "import", "echo", programRoot(t, "echo"))
	b.start("s", "--network", "bridge", "echo", "/echo", ":7777")
	sb := b.inspect("s")
	var conn net.Conn
	b.eventually("it is reached", func() (ok bool) {
		var err error
		conn, err = net.DialTimeout("tcp", sb.Address+":7777", 10*time.Second)
		return err == nil
	})
	defer conn.Close()
	talks := func(when string) {
		b.Helper()
		_ = conn.SetDeadline(time.Now().Add(2 * time.Minute * patience))
		got := make([]byte, 5)
		if _, err := conn.Write([]byte("hello")); err != nil {
			t.Fatalf("%s: %v", when, err)
		}
		if _, err := io.ReadFull(conn, got); err != nil || string(got) != "hello" {
			t.Fatalf("%s: %q, %v", when, got, err)
		}
	}
	talks("at first")
	ended := make(chan error, 1)
	v := b.seize(func(criu int) bool {
		return holdAtLock(criu, sb.Pid, ended)
	}, "checkpoint", "--tcp", "established", "s")
	if err := v.agentbox.Signal(syscall.SIGINT); err != nil {
		t.Fatal(err)
	}
	v.fails(b, "a checkpoint whose CRIU nothing ends", "it had to be killed")
	if err := <-ended; err != nil {
		t.Errorf("CRIU: %v", err)
	}
	equal(b, "pid", b.inspect("s").Pid, sb.Pid)
	if locks := networkLocks(sb.Pid); len(locks) > 0 {
		t.Errorf("left in the sandbox's network: %v", locks)
	}
	talks("after the kill")
	b.checkpoint("--tcp", "established", "s")
	talks("after a checkpoint")
}

// holdAtLock traces a CRIU until it has locked the network of a process, and keeps it there. It
// reports whether it does; ended then receives CRIU's end.
func holdAtLock(criu, pid int, ended chan<- error) bool {
	held := make(chan bool)
	go func() {
		runtime.LockOSThread() // and never unlocked: whatever is traced is let go of with the thread
		signal := 0            // that it is to have
		step := func() bool {
			var status unix.WaitStatus
			_, err := unix.Wait4(criu, &status, unix.WALL, nil)
			for err == unix.EINTR {
				_, err = unix.Wait4(criu, &status, unix.WALL, nil)
			}
			if signal = 0; status.Stopped() && int(status)>>16 == 0 && status.StopSignal() != unix.SIGTRAP {
				signal = int(status.StopSignal())
			}
			return err == nil && status.Stopped()
		}
		if unix.PtraceSeize(criu) != nil || unix.PtraceInterrupt(criu) != nil || !step() {
			held <- false
			return
		}
		for len(networkLocks(pid)) == 0 {
			if unix.PtraceSyscall(criu, signal) != nil || !step() {
				held <- false // it has ended, or was never to lock anything
				return
			}
		}
		held <- true
		var status unix.WaitStatus
		_, err := unix.Wait4(criu, &status, unix.WALL, nil)
		if err == nil && !(status.Signaled() && status.Signal() == unix.SIGKILL) {
			err = fmt.Errorf("it was not killed: %#x", status)
		}
		ended <- err
	}()
	return <-held
}

// networkLocks lists the tables by which a CRIU holds the network of a process still.
func networkLocks(pid int) (names []string) {
	ns, err := os.Open(fmt.Sprintf("/proc/%d/ns/net", pid))
	if err != nil {
		return nil
	}
	defer ns.Close()
	conn, err := nftables.New(nftables.WithNetNSFd(int(ns.Fd())))
	if err != nil {
		return nil
	}
	tables, _ := conn.ListTables()
	for _, table := range tables {
		if strings.HasPrefix(table.Name, "CRIU-") {
			names = append(names, table.Name)
		}
	}
	return names
}

// TestOrphansOfCRIU kills a CRIU, and all that runs with it, while a child process of it is
// stopped, in which it tries how the kernel behaves. Such a child would stay for ever, and
// would hold the sandbox's lock.
func TestOrphansOfCRIU(t *testing.T) {
	t.Parallel()
	b := memoryBox(t)
	b.start("s", "--network", "none", "busybox", "sh", "-c", counter)
	b.reaches("s", 3)
	var orphan int
	// killed kills a verb's CRIU, and what kills names, at that moment.
	killed := func(kills func(criu int) []int, args ...string) underWay {
		b.Helper()
		return b.seize(func(criu int) bool {
			for orphan = 0; orphan == 0; orphan = stoppedChild(criu) {
				if comm, err := os.ReadFile(fmt.Sprintf("/proc/%d/comm", criu)); err != nil || len(comm) == 0 {
					return false
				}
			}
			for _, pid := range append(kills(criu), criu) {
				_ = syscall.Kill(pid, syscall.SIGKILL)
			}
			return true
		}, args...)
	}
	gone := func(when string) {
		b.Helper()
		b.eventually(when+": CRIU's child is gone", func() bool {
			p, err := proc.Read(orphan)
			return err != nil || p.Ended()
		})
	}
	alone := func(int) []int { return nil }
	v := killed(alone, "checkpoint", "s")
	v.fails(b, "a checkpoint whose CRIU is killed", "")
	gone("a checkpoint whose CRIU was killed")
	one := b.checkpoint("s")

	all := func(criu int) []int {
		runc := parent(criu)
		return []int{parent(runc), runc}
	}
	v = killed(all, "checkpoint", "s")
	v.fails(b, "a checkpoint of which all is killed", "")
	begun := time.Now()
	b.ok("recover")
	if took := time.Since(begun); took > 5*time.Second*patience {
		t.Errorf("the recovery took %v", took)
	}
	gone("a checkpoint of which all was killed")
	b.goesOn("s", "after the kill of a checkpoint")

	v = killed(alone, "restore", "s", one, "--no-undo")
	v.fails(b, "a restore whose CRIU is killed", "CRIU was killed")
	gone("a restore whose CRIU was killed")
	b.ok("restore", "s", one)
	b.goesOn("s", "after the restore")
}

// parent returns the parent of a process.
func parent(pid int) int {
	p, _ := proc.Read(pid)
	return p.Parent
}

// stoppedChild returns a child of a process that is stopped; 0: there is none.
func stoppedChild(pid int) int {
	list, _ := os.ReadFile(fmt.Sprintf("/proc/%d/task/%d/children", pid, pid))
	for _, field := range strings.Fields(string(list)) {
		child, err := strconv.Atoi(field)
		if err != nil {
			continue
		}
		if p, err := proc.Read(child); err == nil && (p.State == 'T' || p.State == 't') {
			return child
		}
	}
	return 0
}
