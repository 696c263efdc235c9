//go:build failpoint

package oci

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/runtime"
)

// points are the instants at which the package can be broken, with the verb
// that passes them.
var points = []struct{ name, verb string }{
	{"oci.create.after-dirs", "create"},
	{"oci.create.after-record", "create"},
	{"oci.start.after-mount", "start"},
	{"oci.start.after-network", "start"},
	{"oci.start.after-bundle", "start"},
	{"oci.start.after-conmon", "start"},
	{"oci.start.after-attach", "start"},
	{"oci.start.after-start", "start"},
	{"oci.stop.after-kill", "stop"},
	{"oci.stop.after-exit", "stop"},
	{"oci.stop.after-processes", "stop"},
	{"oci.stop.after-delete", "stop"},
	{"oci.stop.after-unmount", "stop"},
	{"oci.stop.after-network", "stop"},
	{"oci.stop.after-cgroups", "stop"},
	{"oci.stop.after-bundle", "stop"},
	{"oci.remove.after-stop", "remove"},
	{"oci.remove.after-record", "remove"},
	{"oci.remove.after-release", "remove"},
	{"oci.remove.after-files", "remove"},
	{"oci.exec.after-dir", "exec"},
	{"oci.exec.after-start", "exec"},
}

// TestVerb is the process that is killed.
func TestVerb(t *testing.T) {
	verb := os.Getenv("OCI_TEST_VERB")
	if verb == "" {
		t.Skip("only as a child of TestKilled")
	}
	b, err := Open(Options{Root: os.Getenv("OCI_TEST_ROOT"), Run: os.Getenv("OCI_TEST_RUN")})
	must(t, err)
	must(t, do(b, verb, os.Getenv("OCI_TEST_ID"), os.Getenv("OCI_TEST_LOWER")))
}

func do(b *Backend, verb, id, lower string) (err error) {
	ctx := context.Background()
	switch verb {
	case "create":
		err = b.Create(ctx, victim(id), []string{lower})
	case "start":
		_, err = b.Start(ctx, id, runtime.StartOptions{Streams: &runtime.Streams{}})
	case "stop":
		err = b.Stop(ctx, id, runtime.StopOptions{})
	case "remove":
		err = b.Remove(ctx, id)
	case "exec":
		_, err = b.Exec(ctx, id, runtime.Process{Args: []string{"sleep", "1000"}}, runtime.Streams{})
	}
	return err
}

func victim(id string) runtime.Spec {
	return with(sh("echo x >> /runs; echo hello; sleep 1000"), func(s *runtime.Spec) {
		s.ID, s.Network.Mode = id, runtime.NetworkBridge
	})
}

// bring makes a container that verb can work on.
func (x *fixture) bring(verb string) string {
	x.t.Helper()
	id := newID()
	if verb == "create" {
		return id
	}
	must(x.t, x.Create(x.t.Context(), victim(id), []string{x.lower}))
	if verb != "start" {
		x.start(id)
	}
	return id
}

func TestKilled(t *testing.T) {
	for _, p := range points {
		t.Run(p.name, func(t *testing.T) {
			x := newBox(t)
			id := x.bring(p.verb)
			cmd := exec.Command(os.Args[0], "-test.run=^TestVerb$")
			cmd.Env = append(os.Environ(), "OCI_TEST_VERB="+p.verb, "OCI_TEST_ROOT="+x.box.Base,
				"OCI_TEST_RUN="+x.box.Run,
				"OCI_TEST_ID="+id, "OCI_TEST_LOWER="+x.lower, "AGENTBOX_FAILPOINT="+p.name+"=kill")
			out, err := cmd.CombinedOutput()
			var exit *exec.ExitError
			if !errors.As(err, &exit) || exit.Sys().(syscall.WaitStatus).Signal() != syscall.SIGKILL {
				t.Fatalf("not killed there: %v\n%s", err, out)
			}
			x.usable(id, p.verb, p.name)
		})
	}
}

// usable checks that a container whose verb was broken is as before it or as
// after it, and that every verb works on.
func (x *fixture) usable(id, verb, point string) {
	t, ctx := x.t, x.t.Context()
	c, err := x.Inspect(ctx, id)
	switch verb {
	case "create", "remove":
		if errors.Is(err, fault.ErrNotFound) {
			must(t, x.Create(ctx, victim(id), []string{x.lower}))
		} else if err != nil {
			t.Fatal(err)
		}
	case "start":
		must(t, err)
		if want := point == "oci.start.after-start"; (c.Status == runtime.Running) != want {
			t.Errorf("%s", c.Status)
		}
	case "exec":
		must(t, err)
		if c.Status != runtime.Running {
			t.Errorf("%s", c.Status)
		}
	}
	must(t, x.Stop(ctx, id, runtime.StopOptions{}))
	for _, left := range x.leftovers("mount", "process", x.box.State) {
		t.Errorf("left by %s after a Stop: %s", verb, left)
	}
	x.gone(id)
	x.start(id)
	if out, exit := x.exec(id, "echo", "fine"); out != "fine\n" || exit != 0 {
		t.Errorf("%q, exit %d", out, exit)
	}
}

// TestBroken is TestKilled with an error instead of a death: the verb itself
// must leave everything as it was, or say what is left to do again.
func TestBroken(t *testing.T) {
	for _, p := range points {
		t.Run(p.name, func(t *testing.T) {
			x := newBox(t)
			id := x.bring(p.verb)
			t.Setenv("AGENTBOX_FAILPOINT", p.name+"=error")
			err := do(x.Backend, p.verb, id, x.lower)
			t.Setenv("AGENTBOX_FAILPOINT", "")
			if err == nil || !strings.Contains(err.Error(), p.name) {
				t.Fatalf("not broken there: %v", err)
			}
			switch c, err := x.Inspect(t.Context(), id); {
			case p.verb == "create" && !errors.Is(err, fault.ErrNotFound):
				t.Errorf("%+v, %v", c, err)
			case p.verb == "create" && x.box.Exists(id):
				t.Error("a failed Create left something")
			case p.verb == "start" && (err != nil || c.Status != runtime.Created):
				t.Errorf("%+v, %v", c, err)
			}
			if p.verb == "start" {
				for _, left := range x.leftovers("mount", "process") {
					t.Errorf("left by a failed start: %s", left)
				}
				x.gone(id)
			}
			x.usable(id, p.verb, "")
		})
	}
}
