//go:build vm

package systemd

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
)

// notes is what the tests before a boot tell those after it.
const notes = "/root/before.json"

// before is a sandbox as it was.
type before struct {
	Count int
	Nonce string
}

// TestBeforeReboot leaves sandboxes of every kind; the host reboots the machine then.
func TestBeforeReboot(t *testing.T) {
	run := func(name string, args ...string) sandbox {
		t.Helper()
		args = append([]string{"run", "-d", "--name", name, "--network", "none"}, args...)
		agentbox(t, append(args, "busybox", "sh", "-c", counter)...)
		s := inspect(t, name)
		eventually(t, name+" counts", func() bool { return s.count() >= 3 })
		return s
	}
	note := map[string]before{}
	run("always", "--restart", "always")
	head := run("head", "--restart", "unless-stopped", "--restart-from", "head")
	run("stopped", "--restart", "unless-stopped")
	run("failure", "--restart", "on-failure")
	run("plain")
	agentbox(t, "checkpoint", "--name", "kept", "plain")
	agentbox(t, "stop", "-t", "0", "stopped")
	agentbox(t, "checkpoint", "head")
	note["head"] = before{head.count(), head.file("nonce")}
	agentbox(t, "exec", "head", "touch", "/lost")
	always := inspect(t, "always")
	note["always"] = before{always.count(), always.file("nonce")}
	data, err := json.Marshal(note)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(notes, data, 0o600); err != nil {
		t.Fatal(err)
	}
	leaks(t)
	sh(t, "sync")
}

// TestAfterReboot finds them as their restart policies have it, and nothing else.
func TestAfterReboot(t *testing.T) {
	data, err := os.ReadFile(notes)
	note := map[string]before{}
	if err != nil || json.Unmarshal(data, &note) != nil {
		t.Fatalf("what was before: %v, %s", err, data)
	}
	equal(t, "a clean end of the machine before",
		sh(t, "journalctl -b -1 -u agentbox --no-pager | tail -n 3 | grep -c 'Stopped agentbox.service'"), "1")
	serves(t, "0") // multi-user.target has brought it up
	for _, name := range []string{"always", "head"} {
		eventually(t, name+" is back", func() bool { return inspect(t, name).Status == "running" })
	}
	always, head := inspect(t, "always"), inspect(t, "head")
	always.goesOn(t)
	head.goesOn(t)
	if got := always.file("nonce"); got == note["always"].Nonce || got == "" {
		t.Errorf("always: its process is of the life %q, and was of %q", got, note["always"].Nonce)
	}
	equal(t, "head: the life of its process", head.file("nonce"), note["head"].Nonce)
	if got := head.count(); got < note["head"].Count {
		t.Errorf("head counts %d; its checkpoint was at %d", got, note["head"].Count)
	}
	if _, err := os.Lstat(filepath.Join(head.Upperdir, "lost")); err == nil {
		t.Error("head: a file newer than its checkpoint is there")
	}
	for _, name := range []string{"stopped", "failure", "plain"} {
		equal(t, name, inspect(t, name).Status, "exited")
	}
	agentbox(t, "restore", "plain", "kept")
	inspect(t, "plain").goesOn(t)
	leaks(t)
	for _, name := range []string{"always", "head", "stopped", "failure", "plain"} {
		agentbox(t, "rm", "-f", "--checkpoints", name)
	}
	leaks(t)
}

// workers are the sandboxes that are at work when the power is cut.
var workers = []string{"w0", "w1"}

// TestWork makes checkpoints, restores and prunes until the power is cut, and says
// to the host what it begins, what is ready, and what is to go.
func TestWork(t *testing.T) {
	var line sync.Mutex
	say := func(format string, args ...any) {
		line.Lock()
		defer line.Unlock()
		fmt.Printf("work: "+format+"\n", args...)
	}
	var all sync.WaitGroup
	for _, name := range workers {
		all.Go(func() {
			if err := work(name, say); err != nil {
				say("failed %s: %v", name, err)
			}
		})
	}
	all.Wait()
	t.Error("the power was not cut")
}

// work works with one sandbox.
func work(name string, say func(string, ...any)) error {
	do := func(args ...string) (string, error) {
		out, err := exec.Command(program, args...).Output()
		if err != nil {
			var said string
			if exit, ok := err.(*exec.ExitError); ok {
				said = string(exit.Stderr)
			}
			err = fmt.Errorf("agentbox %s: %w %s", strings.Join(args, " "), err, said)
		}
		return strings.TrimSpace(string(out)), err
	}
	if _, err := do("inspect", name); err != nil {
		if _, err := do("run", "-d", "--name", name, "--network", "none", "busybox", "sh", "-c", counter); err != nil {
			return err
		}
	} else if _, err := do("start", name); err != nil {
		return err
	}
	var mine []string // newest last
	for n := 1; ; n++ {
		mark := strconv.FormatUint(rand.Uint64(), 36)
		if _, err := do("exec", name, "sh", "-c", "echo "+mark+
			" >/mark; head -c 300000 /dev/urandom >/data; sha256sum /data >/sum; mkdir -p /d; touch /d/"+
			mark); err != nil {
			return err
		}
		say("begins checkpoint %s", name)
		args := []string{"checkpoint", name}
		if n%2 == 0 {
			args = append(args, "--files-only")
		}
		id, err := do(args...)
		if err != nil {
			return err
		}
		say("ready %s %s %s", id, mark, name)
		mine = append(mine, id)
		if n%2 == 0 {
			say("begins restore %s", name)
			if _, err := do("restore", name, mine[rand.IntN(len(mine))]); err != nil {
				return err
			}
		}
		if len(mine) > 2 {
			say("goes %s", mine[0])
			say("begins prune %s", name)
			if _, err := do("checkpoint", "rm", mine[0]); err != nil {
				return err
			}
			mine = mine[1:]
			// What it frees; the rule keeps everything.
			if _, err := do("prune", "-f", "--keep-last", "1000", name); err != nil {
				return err
			}
		}
		say("begins nothing %s", name)
	}
}

// TestAfterCut proves, after the boot that follows a cut, that all is there that the
// host was told is ready: READY has "ID MARK SANDBOX", a
// line each.
func TestAfterCut(t *testing.T) {
	serves(t, "0")
	agentbox(t, "recover")
	agentbox(t, "verify", "--all", "--read-data")
	var list []struct {
		ID     string `json:"id"`
		Status string `json:"status"`
	}
	if err := json.Unmarshal([]byte(agentbox(t, "checkpoint", "ls", "-a", "--format", "json")), &list); err != nil {
		t.Fatal(err)
	}
	status := map[string]string{}
	for _, c := range list {
		status[c.ID] = c.Status
	}
	ready := strings.Split(strings.TrimSpace(os.Getenv("READY")), "\n")
	ready = slices.DeleteFunc(ready, func(l string) bool { return l == "" })
	for _, l := range ready {
		if id, _, _ := strings.Cut(l, " "); status[id] != "ready" {
			t.Errorf("checkpoint %s was reported ready, and is %q", id, status[id])
		}
	}
	for _, name := range workers {
		// The second one may not have been made yet.
		if exec.Command(program, "inspect", name).Run() != nil {
			continue
		}
		s := inspect(t, name)
		said := sh(t, "journalctl -b -u agentbox -o cat --no-pager")
		finished := strings.Contains(said, "finished the restore of sandbox "+s.ID[:12]+" ")
		switch {
		// A restore that had stopped it already was gone on with, and starts it.
		case finished && s.Status == "running":
			s.goesOn(t)
			agentbox(t, "stop", "-t", "0", name)
		case finished:
			t.Errorf("%s is %s, and its restore was finished\n%s", name, s.Status, said)
		case s.Status == "running":
			t.Errorf("%s runs, and nobody has started it\n%s", name, said)
		}
	}
	// The newest one comes back, whole.
	if len(ready) > 0 {
		f := strings.Fields(ready[len(ready)-1])
		id, mark, name := f[0], f[1], f[2]
		agentbox(t, "fork", "--name", "proof", "--files-only", name+"@"+id)
		equal(t, "the mark in the newest checkpoint", agentbox(t, "exec", "proof", "cat", "/mark"), mark)
		agentbox(t, "exec", "proof", "sh", "-c", "sha256sum -c /sum && test -e /d/"+mark)
		agentbox(t, "rm", "-f", "proof")
	}
	leaks(t)
}
