package criu

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/agentbox/agentbox/criu/criutest"
	"github.com/agentbox/agentbox/criu/host"
	"github.com/agentbox/agentbox/internal/fault"
)

// start makes and starts a container.
func start(t *testing.T, args []string, edit func(*specs.Spec)) (*criutest.Box, Runtime) {
	t.Helper()
	b := criutest.New(t, args, edit)
	b.Start(nil)
	return b, Runtime{Binary: b.Binary, Root: b.State, ID: b.ID}
}

func TestControl(t *testing.T) {
	ctx := context.Background()
	b, rt := start(t, criutest.Counter, nil)
	b.Until("it counts", func() bool { return b.Count() > 1 })
	s, err := rt.State(ctx)
	if err != nil || s.Status != "running" || s.Pid == 0 || s.Bundle != b.Bundle ||
		s.Annotations[ConfigAnnotation] != b.Config {
		t.Fatalf("State = %+v, %v", s, err)
	}
	if err := rt.Resume(ctx); err != nil {
		t.Fatalf("resuming a running one: %v", err)
	}
	for range 2 { // pausing a paused one is nil
		if err := rt.Pause(ctx); err != nil {
			t.Fatal(err)
		}
	}
	at := b.Count()
	if s, err := rt.State(ctx); err != nil || s.Status != "paused" {
		t.Fatalf("State = %+v, %v", s, err)
	}
	if b.Count() != at {
		t.Fatal("it counts while paused")
	}
	if err := rt.Resume(ctx); err != nil {
		t.Fatal(err)
	}
	b.Until("it counts on", func() bool { return b.Count() > at })
	if err := rt.Delete(ctx, false); err == nil {
		t.Fatal("deleted a running one without force")
	}
	if err := rt.Kill(ctx, "NOSUCH", false); err == nil {
		t.Fatal("killed by a signal that is none")
	}
	if err := rt.Kill(ctx, "KILL", true); err != nil {
		t.Fatal(err)
	}
	b.Until("it is stopped", func() bool { return b.Status() == "stopped" })
	if err := rt.Kill(ctx, "TERM", false); err != nil {
		t.Fatalf("killing a stopped one: %v", err)
	}
	if err := rt.Pause(ctx); !errors.Is(err, fault.ErrState) {
		t.Fatalf("pausing a stopped one: %v", err)
	}
	for range 2 { // deleting one that is gone is nil
		if err := rt.Delete(ctx, false); err != nil {
			t.Fatal(err)
		}
	}
	if err := rt.Delete(ctx, true); err != nil {
		t.Fatal(err)
	}
	_, err = rt.State(ctx)
	for verb, err := range map[string]error{
		"state": err, "pause": rt.Pause(ctx), "resume": rt.Resume(ctx), "kill": rt.Kill(ctx, "KILL", false),
	} {
		if !errors.Is(err, fault.ErrNotFound) || !strings.Contains(err.Error(), rt.ID) {
			t.Errorf("%s of one that is gone: %v", verb, err)
		}
	}
	_, err = Runtime{Binary: "/nonexistent/runc", Root: b.State, ID: "x"}.State(ctx)
	if err == nil || errors.Is(err, fault.ErrNotFound) {
		t.Errorf("no runtime: %v", err)
	}
}

func TestDeleteForced(t *testing.T) {
	b, rt := start(t, criutest.Counter, nil)
	if err := rt.Delete(context.Background(), true); err != nil {
		t.Fatal(err)
	}
	if b.Status() != "gone" {
		t.Fatal("still there")
	}
}

// A cancelled call says why: it was not the runtime's failure.
func TestBrokenOff(t *testing.T) {
	slow := filepath.Join(t.TempDir(), "runc")
	if err := os.WriteFile(slow, []byte("#!/bin/sh\nexec sleep 1000\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	rt := Runtime{Binary: slow, ID: "x"}
	for name, call := range map[string]func(context.Context) error{
		"state":    func(ctx context.Context) error { _, err := rt.State(ctx); return err },
		"versions": func(ctx context.Context) error { _, err := ToolVersions(ctx, rt); return err },
	} {
		ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
		if err := call(ctx); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("%s: %v", name, err)
		}
		cancel()
	}
}

func TestLastMessage(t *testing.T) {
	for in, want := range map[string]string{
		"": "", "\n": "", "one\ntwo\n": "two",
		`time="2026-01-01T00:00:00Z" level=error msg="criu failed: type NOTIFY errno 0\nlog file: /w/dump.log"`: "criu failed: type NOTIFY errno 0, log file: /w/dump.log",
		`time="x" level=warning msg=short`: "short",
	} {
		if got := lastMessage(in); got != want {
			t.Errorf("lastMessage(%q) = %q, want %q", in, got, want)
		}
	}
}

func TestWriteConfig(t *testing.T) {
	path := filepath.Join(t.TempDir(), "criu.conf")
	for _, c := range []struct {
		o          Options
		has, lacks []string
	}{
		{
			Options{}, []string{"tcp-established", "file-locks", "skip-in-flight", "ghost-limit 1073741824"},
			[]string{"tcp-close", "timeout", "link-remap"},
		},
		{
			Options{TCP: TCPClose, GhostLimit: 7, Timeout: 1}, []string{"tcp-close", "ghost-limit 7", "timeout 1"},
			[]string{"tcp-established"},
		},
		{Options{TCP: TCPRefuse}, nil, []string{"tcp-close", "tcp-established"}},
		{Options{ScanPaths: []string{"/a b", "/c#d", "rel", "/e\"f", "/g\nh", "/\xff"}},
			[]string{`irmap-scan-path "/a b"`, `irmap-scan-path "/c#d"`, "irmap-scan-path \"/\xff\""},
			[]string{"rel", "e\"f", "/g"}},
	} {
		if err := WriteConfig(path, c.o); err != nil {
			t.Fatal(err)
		}
		data, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		lines := "\n" + string(data)
		for _, l := range c.has {
			if !strings.Contains(lines, "\n"+l+"\n") {
				t.Errorf("%+v lacks %q:%s", c.o, l, lines)
			}
		}
		for _, l := range c.lacks {
			if strings.Contains(lines, l) {
				t.Errorf("%+v has %q:%s", c.o, l, lines)
			}
		}
	}
	if err := WriteConfig(path, Options{TCP: "maybe"}); !errors.Is(err, fault.ErrInvalid) {
		t.Errorf("tcp maybe: %v", err)
	}
	if entries, _ := os.ReadDir(filepath.Dir(path)); len(entries) != 1 {
		t.Errorf("temporary files left: %v", entries)
	}
}

// restore brings a dumped container back with runc itself.
func restore(t *testing.T, b *criutest.Box, rt Runtime, o Options, lines ...string) {
	t.Helper()
	if err := WriteConfig(b.Config, o); err != nil {
		t.Fatal(err)
	}
	config, err := os.ReadFile(b.Config)
	if err != nil {
		t.Fatal(err)
	}
	config = append(config, strings.Join(lines, "\n")...)
	if err := os.WriteFile(b.Config, config, 0o600); err != nil {
		t.Fatal(err)
	}
	args := append([]string{
		"restore", "--detach", "--bundle", b.Bundle, "--image-path", b.Images, "--work-path", b.Work,
	}, o.RuntimeFlags()...)
	cmd := b.Cmd(nil, append(args, b.ID)...)
	cmd.Env = append(host.Environ(), configEnv+"="+b.Config) // for a bundle without annotation
	if err := cmd.Run(); err != nil {
		log, _ := os.Open(filepath.Join(b.Work, "restore.log"))
		defer log.Close()
		t.Fatalf("restore: %v: %+v", err, Diagnose(log))
	}
}

// eachBundle runs a test with a bundle that names CRIU's configuration file,
// as ours do, and with one that does not, as those of engines.
func eachBundle(t *testing.T, test func(t *testing.T, edit func(*specs.Spec))) {
	t.Run("annotated", func(t *testing.T) { test(t, func(*specs.Spec) {}) })
	t.Run("foreign", func(t *testing.T) { test(t, func(s *specs.Spec) { s.Annotations = nil }) })
}
