package criu

import (
	"errors"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/internal/proc"
)

func TestStrays(t *testing.T) {
	b, rt := start(t, []string{"sh", "-c", "sleep 1001 & sleep 1002 & wait"}, nil)
	pid := b.Pid()
	b.Until("three processes run", func() bool { m, err := Members(pid); return err == nil && len(m) == 3 })
	if s, err := Strays(pid, nil); err != nil || len(s) != 0 {
		t.Fatalf("Strays = %v, %v, want none", s, err)
	}
	// An attached exec session with a child of its own.
	exec1 := exec.Command(rt.Binary, "--root", rt.Root, "exec", rt.ID, "sh", "-c", "sleep 1003 & sleep 1004; true")
	if err := exec1.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { b.End(); _ = exec1.Wait() }()
	b.Until("the session's three processes are seen, with what they execute", func() bool {
		strays, err := Strays(pid, nil)
		if err != nil {
			t.Fatal(err)
		}
		var lines []string
		for _, s := range strays {
			lines = append(lines, s.Cmdline)
		}
		slices.Sort(lines)
		return slices.Equal(lines, []string{"sh -c sleep 1003 & sleep 1004; true", "sleep 1003", "sleep 1004"})
	})
	// The pids of its cgroup, given.
	members, err := Members(pid)
	if err != nil {
		t.Fatal(err)
	}
	if s, err := Strays(pid, members); err != nil || len(s) != 3 {
		t.Fatalf("Strays of given pids = %v, %v", s, err)
	}
	// A process that a detached session leaves behind belongs to the init, and is dumped.
	if err := b.Cmd(nil, "exec", "--detach", rt.ID, "sh", "-c", "sleep 1005 & true").Run(); err != nil {
		t.Fatal(err)
	}
	b.Until("the orphan is the init's", func() bool {
		s, err := Strays(pid, nil)
		m, merr := Members(pid)
		return err == nil && merr == nil && len(s) == 3 && len(m) == 7
	})
	if _, err := Strays(1<<22+7, nil); !errors.Is(err, fault.ErrNotFound) {
		t.Errorf("no such init: %v", err)
	}
}

func TestSelf(t *testing.T) {
	st, err := proc.Read(os.Getpid())
	if err != nil || st.Parent != os.Getppid() {
		t.Fatalf("%+v, %v", st, err)
	}
	if c := cmdline(os.Getpid()); !strings.Contains(c, "test") {
		t.Errorf("cmdline = %q", c)
	}
}
