package test

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/agentbox/agentbox/internal/proc"
)

// outsiders lists the threads of a sandbox that are not in its cgroup that freezes.
func (b *box) outsiders(name string) (list []string) {
	b.Helper()
	pid := b.inspect(name).Pid
	ns := pidns(pid)
	home, ok := freezerOf(b.read(fmt.Sprintf("/proc/%d/cgroup", pid)))
	if !ok {
		return nil // of cgroups of v2, where no thread is ever taken out
	}
	for _, task := range tasksOf(ns) {
		at, ok := freezerOf(b.read(task + "/cgroup"))
		if !ok || strings.HasPrefix(at, home) { // it has ended, or is in
			continue
		}
		// The kernel says of one that is about to end that it is in the root.
		tid, _ := strconv.Atoi(filepath.Base(task))
		if st, err := proc.ReadThread(tid); err != nil || st.Ending || st.Ended() {
			continue
		}
		list = append(list, task+" in "+at)
	}
	return list
}

// tasksOf lists the threads in a pid namespace.
func tasksOf(ns string) (list []string) {
	tasks, _ := filepath.Glob("/proc/[0-9]*/task/[0-9]*")
	for _, task := range tasks {
		if tid, err := strconv.Atoi(filepath.Base(task)); err == nil && pidns(tid) == ns {
			list = append(list, task)
		}
	}
	return list
}

// pidns names the pid namespace of a thread; empty: it has ended.
func pidns(tid int) string {
	link, _ := os.Readlink(fmt.Sprintf("/proc/%d/ns/pid", tid))
	return link
}

// freezerOf finds the freezer in what /proc/PID/cgroup has.
func freezerOf(groups string) (string, bool) {
	for line := range strings.Lines(groups) {
		if f := strings.SplitN(strings.TrimSpace(line), ":", 3); len(f) == 3 && f[1] == "freezer" {
			return f[2], true
		}
	}
	return "", false
}

// TestStoppedKilled has agentbox killed in a checkpoint of a sandbox with stopped processes,
// while one is outside of the frozen cgroup, and before CRIU, which waits for them, is helped:
// the next command brings all of them back, and the dump to an end.
func TestStoppedKilled(t *testing.T) {
	t.Parallel()
	b := memoryBox(t)
	b.start("s", "--network", "none", "busybox", "sh", "-c",
		`for i in 1 2; do sleep 1000 & kill -STOP $!; done; `+counter)
	stopped := func() bool { return strings.Count(b.sh("s", "cat /proc/[0-9]*/stat 2>/dev/null || true"), ") T ") == 2 }
	b.eventually("they are stopped", stopped)
	if _, v1 := freezerOf(b.read(fmt.Sprintf("/proc/%d/cgroup", b.inspect("s").Pid))); !v1 {
		t.Skip("cgroups of v2")
	}
	for _, point := range []string{"stopped.out", "stopped.unstick"} {
		if r := b.try(failpoint(point, "kill"), "checkpoint", "s"); !r.killed {
			t.Fatalf("not killed at %s: %s", point, r)
		}
		b.ok("recover")
		equal(b, "status after "+point, b.inspect("s").Status, "running")
		equal(b, "outside of the cgroup after "+point, strings.Join(b.outsiders("s"), ", "), "")
		equal(b, "both are stopped after "+point, stopped(), true)
		b.reaches("s", b.count("s")+1)
	}
	one := b.checkpoint("s")
	b.ok("restore", "s", one)
	equal(b, "both are stopped after the restore", stopped(), true)
	b.reaches("s", b.count("s")+1)
}

// halted counts the threads of a sandbox's processes but the first that a signal has stopped,
// and the others.
func (b *box) halted(name string) (stopped, others int) {
	b.Helper()
	pid := b.inspect(name).Pid
	for _, task := range tasksOf(pidns(pid)) {
		status := b.read(task + "/status")
		switch {
		case status == "" || strings.Contains(status, fmt.Sprintf("\nTgid:\t%d\n", pid)):
		case strings.Contains(status, "\nState:\tT"):
			stopped++
		default:
			others++
		}
	}
	return stopped, others
}

// TestStoppedInAllWays checkpoints and restores processes of several threads that a signal
// has stopped: they stay so, and go on once they are told to.
func TestStoppedInAllWays(t *testing.T) {
	t.Parallel()
	b := memoryBox(t)
	b.ok("image", "import", "stops", programRoot(t, "stops"))
	b.start("s", "--network", "none", "stops", "/stops")
	want := 0
	b.eventually("all are stopped", func() bool {
		stopped, others := b.halted("s")
		want = stopped
		return others == 0 && stopped >= 4*4
	})
	var names []string
	for _, signal := range []syscall.Signal{syscall.SIGSTOP, syscall.SIGTSTP, syscall.SIGTTIN, syscall.SIGTTOU} {
		for i := range 3 {
			names = append(names, fmt.Sprintf("%d.%d", signal, i))
		}
	}
	counts := func() (text string) {
		for _, name := range names {
			text += name + "=" + b.file("s", name) + " "
		}
		return text
	}
	before := counts()
	same := func(when string) {
		b.Helper()
		b.goesOn("s", when)
		stopped, others := b.halted("s")
		equal(b, "stopped threads "+when, stopped, want)
		equal(b, "others "+when, others, 0)
		equal(b, "what they have counted "+when, counts(), before)
		equal(b, "outside of the cgroup "+when, strings.Join(b.outsiders("s"), ", "), "")
	}
	same("at first")
	one := b.checkpoint("s")
	same("after the checkpoint")
	b.ok("restore", "s", one)
	same("after the restore")
	two := b.checkpoint("s") // of what was restored
	b.ok("restore", "s", two)
	same("after another")
	for _, task := range tasksOf(pidns(b.inspect("s").Pid)) {
		if pid, err := strconv.Atoi(filepath.Base(task)); err == nil {
			_ = syscall.Kill(pid, syscall.SIGCONT)
		}
	}
	for _, name := range names {
		n := b.file("s", name)
		b.eventually(name+" counts on", func() bool { now := b.file("s", name); return now != n && now != "" })
	}
}

// TestJobControl has a user stop a program by Ctrl-Z: it is a stopped job of the shell after a
// checkpoint and a restore, and goes on by fg.
func TestJobControl(t *testing.T) {
	t.Parallel()
	b := memoryBox(t)
	m := b.terminal("run", "-it", "--name", "jobs", "--network", "none", "busybox", "sh", "-i")
	m.enter("sh -c 'echo rea''dy; while read line; do echo got $line.; done'\r")
	m.shows("ready")
	m.enter("\x1a")
	m.enter("jobs > /jobs; echo ta''ken\r")
	m.shows("taken")
	jobs := func(when string) {
		b.Helper()
		if got := b.file("jobs", "jobs"); !strings.Contains(got, "Stopped") {
			b.Errorf("jobs %s: %q", when, got)
		}
	}
	jobs("at first")
	m.enter("\x10\x11")
	equal(b, "exit after ctrl-p ctrl-q", m.ends(), 0)
	one := b.checkpoint("jobs")
	for i, when := range []string{"after the checkpoint", "after the restore"} {
		if i > 0 {
			b.ok("restore", "jobs", one)
		}
		m = b.terminal("attach", "jobs")
		m.enter("jobs > /jobs; echo ag''ain\r")
		m.shows("again")
		jobs(when)
		m.enter("fg\r")
		m.shows("read line") // the shell has left the terminal to the job
		m.enter("a word\r")
		m.shows("got a word.")
		m.enter("\x03")
		b.eventually("a prompt after ctrl-c", func() bool { // the shell drops what was typed before it
			_, after, _ := strings.Cut(m.screen(), "^C")
			return strings.Contains(after, "/ # ")
		})
		m.enter("echo interr''upted $?\r")
		m.shows("interrupted 130")
		m.enter("\x10\x11")
		equal(b, "exit after ctrl-p ctrl-q", m.ends(), 0)
	}
}
