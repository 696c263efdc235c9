//go:build failpoint

package network

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
)

// Killed anywhere, a verb leaves what the next one repairs and List names.
// Run with -tags failpoint.
func TestCrash(t *testing.T) {
	for _, point := range []string{
		"setup after-reserve", "setup after-bridge", "setup after-netns", "setup after-veth", "setup after-rules",
		"teardown after-veth", "teardown after-netns",
		"release after-links", "release before-save",
	} {
		verb, _, _ := strings.Cut(point, " ")
		for _, next := range []string{"setup", "release", "nothing else"} {
			t.Run(point+" then "+next, func(t *testing.T) {
				w := open(t)
				if verb != "setup" {
					w.setup("a", crashNetwork)
				}
				killed(t, verb+" "+w.m.root+" a", "network."+strings.Replace(point, " ", ".", 1)+"=kill")
				if ids, err := w.m.List(t.Context()); err != nil || !slices.Equal(ids, []string{"a"}) {
					t.Errorf("List: %v, %v", ids, err)
				}
				switch next {
				case "setup":
					e := w.setup("a", crashNetwork)
					serve(t, e.Path, "tcp4", ":80")
					serve(t, internet, "tcp4", ":102")
					mustReach(t, "", "tcp4", "127.0.0.1:8099", "")
					mustReach(t, e.Path, "tcp4", internetAddress+":102", hostAddress)
				case "nothing else":
					// Another sandbox is not hindered by the remains.
					e := w.setup("b", bridged)
					serve(t, e.Path, "tcp4", ":80")
					mustReach(t, "", "tcp4", e.Address.String()+":80", "")
					w.release("b")
				}
				w.release("a")
				if left := leftovers(t, w.m.root); len(left) > 0 {
					t.Errorf("left: %q", left)
				}
			})
		}
	}
}

// A verb that fails half-way takes back what it did.
func TestFailedSetup(t *testing.T) {
	for _, point := range []string{"after-reserve", "after-bridge", "after-netns", "after-veth", "after-rules"} {
		t.Run(point, func(t *testing.T) {
			w := open(t)
			t.Setenv("AGENTBOX_FAILPOINT", "network.setup."+point+"=enospc")
			if _, err := w.m.Setup(t.Context(), "a", crashNetwork); !errors.Is(err, syscall.ENOSPC) {
				t.Errorf("error %v, want %v", err, syscall.ENOSPC)
			}
			if left := leftovers(t, w.m.root); len(left) > 0 {
				t.Errorf("left: %q", left)
			}
			t.Setenv("AGENTBOX_FAILPOINT", "")
			e := w.setup("a", crashNetwork)
			w.teardown("a")
			t.Setenv("AGENTBOX_FAILPOINT", "network.setup."+point+"=error")
			if _, err := w.m.Setup(t.Context(), "a", crashNetwork); err == nil {
				t.Error("no error")
			}
			t.Setenv("AGENTBOX_FAILPOINT", "")
			if again := w.setup("a", crashNetwork); again.Address != e.Address {
				t.Errorf("address %s, was %s", again.Address, e.Address)
			}
		})
	}
}

func killed(t *testing.T, role, point string) {
	t.Helper()
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), roleEnv+"="+role, "AGENTBOX_FAILPOINT="+point)
	cmd.Stderr = os.Stderr
	err := cmd.Run()
	var exit *exec.ExitError
	if !errors.As(err, &exit) || exit.Sys().(syscall.WaitStatus).Signal() != syscall.SIGKILL {
		t.Fatalf("%s at %s: %v, want a kill", filepath.Base(role), point, err)
	}
}
