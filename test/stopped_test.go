package test

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
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
	tasks, _ := filepath.Glob("/proc/[0-9]*/task/[0-9]*")
	for _, task := range tasks {
		var p int
		if _, err := fmt.Sscanf(filepath.Base(task), "%d", &p); err != nil || pidns(p) != ns {
			continue
		}
		if at, _ := freezerOf(b.read(task + "/cgroup")); !strings.HasPrefix(at, home) {
			list = append(list, task+" in "+at)
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
	b.start("s", "--network", "none", "busybox", "sh", "-c", `for i in 1 2; do sleep 1000 & kill -STOP $!; done; `+counter)
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

// stops begins four processes, each of four threads that count, which stop themselves in
// each way there is, and counts in the first process.
const stops = `
import os, signal, threading, time
def put(name, n):
    with open(name + ".new", "w") as f:
        f.write(str(n))
    os.rename(name + ".new", name)
def count(name):
    n = 0
    while True:
        n += 1; put(name, n); time.sleep(0.02)
for sig in (signal.SIGSTOP, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU):
    if os.fork() == 0:
        os.setpgid(0, 0)
        for i in range(3):
            threading.Thread(target=count, args=("/n.%s.%d" % (sig.name, i),)).start()
        os.kill(os.getpid(), sig)
        count("/n.%s.3" % sig.name)
count("/count")
`

// TestStoppedInAllWays checkpoints and restores processes of several threads that a signal
// has stopped: they stay so, and go on once they are told to.
func TestStoppedInAllWays(t *testing.T) {
	b := debianBox(t)
	b.start("ways", "--network", "none", "debian", "python3", "-c", stops)
	threads := func() int {
		return strings.Count(b.sh("ways", "cat /proc/[0-9]*/task/*/stat 2>/dev/null || true"), ") T ")
	}
	b.eventually("all are stopped", func() bool { return threads() == 16 })
	b.reaches("ways", 3)
	counts := func() string { return b.sh("ways", "cd /; for n in n.*; do echo $n $(cat $n); done") }
	before := counts()
	same := func(when string) {
		b.Helper()
		b.goesOn("ways", when)
		equal(b, "stopped threads "+when, threads(), 16)
		equal(b, "what they have counted "+when, counts(), before)
	}
	one := b.checkpoint("ways")
	same("after the checkpoint")
	equal(b, "outside of the cgroup", strings.Join(b.outsiders("ways"), ", "), "")
	b.ok("restore", "ways", one)
	same("after the restore")
	two := b.checkpoint("ways") // of what was restored
	b.ok("restore", "ways", two)
	same("after another")
	b.sh("ways", `for p in /proc/[0-9]*; do grep -q "^State:.T" $p/status 2>/dev/null && kill -CONT ${p#/proc/}; done; true`)
	b.eventually("none is stopped", func() bool { return threads() == 0 })
	for _, sig := range []string{"SIGSTOP", "SIGTSTP", "SIGTTIN", "SIGTTOU"} {
		for i := range 4 {
			name := fmt.Sprintf("n.%s.%d", sig, i)
			n := b.file("ways", name)
			b.eventually(name+" goes on", func() bool { now := b.file("ways", name); return now != n && now != "" })
		}
	}
}

// TestJobControl has a user stop a program by Ctrl-Z: it is a stopped job of the shell after a
// checkpoint and a restore, and goes on by fg.
func TestJobControl(t *testing.T) {
	b := debianBox(t)
	b.own("jobs")
	m := b.terminal("run", "-it", "--name", "jobs", "--network", "none", "debian", "bash", "--norc", "-i")
	m.enter("bash -c 'echo rea''dy; while read line; do echo got $line.; done'\r")
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
		m.enter("a word\r")
		m.shows("got a word.")
		m.enter("\x03")
		m.enter("echo interr''upted $?\r")
		m.shows("interrupted 130")
		m.enter("\x10\x11")
		equal(b, "exit after ctrl-p ctrl-q", m.ends(), 0)
	}
}
