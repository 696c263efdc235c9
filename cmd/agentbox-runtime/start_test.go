package main

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/criu/criutest"
	"github.com/agentbox/agentbox/criu/host"
	"github.com/agentbox/agentbox/criu/stage"
	"github.com/opencontainers/runtime-spec/specs-go"
)

// printEnv stores what its variable is and goes on.
var printEnv = []string{"sh", "-c", `echo "$WHO" > /who; cat /managed > /copy; i=0; while :; do i=$((i+1)); ` +
	criutest.Store + `; sleep 0.05; done`}

// managedBox is a container with a file of its engine bound into it.
func managedBox(t *testing.T) (b *box, managed string) {
	managed = filepath.Join(t.TempDir(), "managed")
	if err := os.WriteFile(managed, []byte("the engine's"), 0o644); err != nil {
		t.Fatal(err)
	}
	b = newBox(t, printEnv, func(s *specs.Spec) {
		s.Process.Env = append(s.Process.Env, "WHO=nobody", "WHO=again")
		s.Mounts = append(s.Mounts, specs.Mount{
			Destination: "/managed", Source: managed, Type: "bind", Options: []string{"bind"},
		})
	})
	return b, managed
}

// startOver does what an engine does that writes its file between the two calls,
// as Docker does since version 28.
func (b *box) startOver(t *testing.T, managed string) {
	t.Helper()
	for _, args := range [][]string{{"create", "--bundle", b.Bundle, b.ID}, {"start", b.ID}} {
		if err := b.Cmd(nil, args...).Run(); err != nil {
			t.Fatalf("%s: %v", args[0], err)
		}
		if args[0] == "create" {
			if err := os.WriteFile(managed, []byte("the engine's, after create"), 0o644); err != nil {
				t.Fatal(err)
			}
		}
	}
}

func (b *box) read(t *testing.T, name string) string {
	t.Helper()
	data, err := os.ReadFile(filepath.Join(b.Files, name))
	if err != nil {
		t.Fatal(err)
	}
	return strings.TrimSpace(string(data))
}

// A staged start holds for one create; what reaps it for the end of that one.
func TestStart(t *testing.T) {
	b, managed := managedBox(t)
	before, err := os.Stat(managed)
	if err != nil {
		t.Fatal(err)
	}
	reaped := filepath.Join(t.TempDir(), "reaped")
	s := stage.Start{
		Env:   []string{"WHO=it's <me> & \"you\"", "NEW=1"},
		Files: []stage.File{{Path: managed, Mode: 0o640, GID: 2, Data: []byte("agentbox's")}},
		Reap: []string{
			"/bin/sh", "-c", `ls -l /proc/self/fd > "$0.tmp"; ps -o sid= -p $$ >> "$0.tmp"; mv "$0.tmp" "$0.$$"`,
			reaped,
		},
	}
	if err := stage.At(b.run, b.ID).PutStart(s); err != nil {
		t.Fatal(err)
	}
	b.startOver(t, managed)
	b.Until("it counts", func() bool { return b.Count() > 1 })
	if got := b.read(t, "who"); got != `it's <me> & "you"` {
		t.Errorf("WHO=%s", got)
	}
	if got := b.read(t, "copy"); got != "agentbox's" {
		t.Errorf("the managed file says %q", got)
	}
	after, err := os.Stat(managed)
	if err != nil || !os.SameFile(before, after) || after.Mode().Perm() != 0o640 {
		t.Errorf("the managed file is another one: %v, %v", after, err)
	}
	if _, err := stage.At(b.run, b.ID).LoadStart(); err == nil {
		t.Error("still staged after it was used")
	}
	// The engine does this after each restore.
	if err := stage.At(b.run, b.ID).Clear(); err != nil {
		t.Fatal(err)
	}
	seen := func() []string { m, _ := filepath.Glob(reaped + ".*"); return m }
	if len(seen()) > 0 {
		t.Fatal("reaped while it runs")
	}
	// Something an engine may have left open for us must not stay open in the reaper.
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	cmd := b.Cmd(nil, "delete", "--force", b.ID)
	cmd.ExtraFiles = []*os.File{w}
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("delete: %v: %s", err, out)
	}
	w.Close()
	r.Close()
	b.Until("it is reaped", func() bool { return len(seen()) == 1 && !strings.HasSuffix(seen()[0], "tmp") })
	text, err := os.ReadFile(seen()[0])
	if err != nil {
		t.Fatal(err)
	}
	if n := strings.Count(string(text), "/dev/null"); n < 2 || strings.Contains(string(text), "pipe:") {
		t.Errorf("the reaper's files and session:\n%s", text)
	}

	// Afresh, from a bundle that the engine has made anew.
	if err := edit(b.Bundle, changes{env: []string{"WHO=nobody"}}); err != nil {
		t.Fatal(err)
	}
	b.Start(nil)
	b.Until("it runs afresh", func() bool { return b.read(t, "who") == "nobody" })
	b.End()
	if n := len(seen()); n != 1 {
		t.Errorf("reaped %d times", n)
	}
	noState(t, b.run)
}

// noState fails the test when the wrapper has left anything.
func noState(t *testing.T, run string) {
	t.Helper()
	err := filepath.WalkDir(run, func(path string, e os.DirEntry, err error) error {
		if err == nil && !e.IsDir() {
			t.Errorf("left: %s", path)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
}

// A create that came to nothing owes no reaping.
func TestStartFails(t *testing.T) {
	b, _ := managedBox(t)
	reaped := filepath.Join(t.TempDir(), "reaped")
	if err := os.Remove(filepath.Join(b.Files, "bin", "sh")); err != nil {
		t.Fatal(err)
	}
	if err := stage.At(b.run, b.ID).PutStart(stage.Start{Reap: []string{"/usr/bin/touch", reaped}}); err != nil {
		t.Fatal(err)
	}
	if out, err := b.Do("create", "--bundle", b.Bundle, b.ID); err == nil {
		t.Fatalf("create without its program: %s", out)
	}
	if out, err := b.Do("delete", "--force", b.ID); err != nil {
		t.Fatalf("delete: %v: %s", err, out)
	}
	noState(t, b.run)
	if _, err := os.Stat(reaped); err == nil {
		t.Error("reaped")
	}
}

// A restore takes the staged start along: its files must be those of the dump.
func TestStartOfARestore(t *testing.T) {
	b, managed := managedBox(t)
	b.Start(nil)
	b.Until("it counts", func() bool { return b.Count() >= 3 })
	b.dump(t)
	b.End()
	if err := os.WriteFile(managed, []byte("regenerated"), 0o644); err != nil {
		t.Fatal(err)
	}
	reaped := filepath.Join(t.TempDir(), "reaped")
	if err := stage.At(b.run, b.ID).Put(stage.Restore{Images: b.Images, Work: b.Work}); err != nil {
		t.Fatal(err)
	}
	err := stage.At(b.run, b.ID).PutStart(stage.Start{
		Env:   []string{"WHO=restored"},
		Files: []stage.File{{Path: managed, Mode: 0o644, Data: []byte("the dump's")}},
		Reap:  []string{"/usr/bin/touch", reaped},
	})
	if err != nil {
		t.Fatal(err)
	}
	at := b.Count()
	b.startOver(t, managed)
	b.Until("it counts on", func() bool { return b.Count() > at })
	if out, err := b.Do("exec", b.ID, "cat", "/managed"); err != nil || out != "the dump's" {
		t.Errorf("the managed file in the restored one: %q, %v", out, err)
	}
	data, err := os.ReadFile(filepath.Join(b.Bundle, "config.json"))
	if err != nil || !bytes.Contains(data, []byte("WHO=restored")) {
		t.Errorf("config.json: %v", err)
	}
	b.End()
	b.Until("it is reaped", func() bool { _, err := os.Stat(reaped); return err == nil })
	noState(t, b.run)
}

// One that comes back paused can be paused by an engine that thinks it runs;
// once, for then the engine knows.
func TestPauseOfARestored(t *testing.T) {
	b := newBox(t, criutest.Counter, nil)
	b.Start(nil)
	b.Until("it counts", func() bool { return b.Count() >= 3 })
	b.dump(t)
	b.End()
	if err := stage.At(b.run, b.ID).Put(stage.Restore{Images: b.Images, Work: b.Work, Paused: true}); err != nil {
		t.Fatal(err)
	}
	b.Start(nil)
	if err := stage.At(b.run, b.ID).Clear(); err != nil { // as the engine of agentbox does
		t.Fatal(err)
	}
	if s := b.Status(); s != "paused" {
		t.Fatalf("it is %s", s)
	}
	at := b.Count()
	if out, err := b.Do("pause", b.ID); err != nil {
		t.Errorf("the first pause: %v: %s", err, out)
	}
	if _, err := b.Do("pause", b.ID); err == nil {
		t.Error("the second pause, which the real runtime refuses, went well")
	}
	if b.Count() != at {
		t.Errorf("it ran from %d to %d", at, b.Count())
	}
	if out, err := b.Do("resume", b.ID); err != nil {
		t.Fatalf("resume: %v: %s", err, out)
	}
	b.Until("it counts on", func() bool { return b.Count() > at })
	b.End()
	noState(t, b.run)
}

func TestWithOwn(t *testing.T) {
	const base, own = "127.0.0.1\tlocalhost\n10.1.2.3\tpeer\n", "172.17.0.2\tbox\n"
	for _, c := range []struct{ kept, engines, want string }{
		{base, base + own, base + own},
		{base + "10.9.9.9 first\n", base + own, base + own + "10.9.9.9 first\n"},
		{base + own + "10.9.9.9 first\n", base + own, base + own + "10.9.9.9 first\n"},
		{base + own, base + own, base + own},
		{"10.9.9.9 only", base + own, own + "10.9.9.9 only"}, // what was taken out stays out
		{"", base + own, own},
		{base, "", base},
		{base, base + "172.17.0.3\tboxes\n", base},
	} {
		if got := string(withOwn([]byte(c.kept), []byte(c.engines), "box")); got != c.want {
			t.Errorf("%q with the lines of %q is %q, want %q", c.kept, c.engines, got, c.want)
		}
	}
}

func TestOverwrite(t *testing.T) {
	dir := t.TempDir()
	victim, link, pipe := filepath.Join(dir, "victim"), filepath.Join(dir, "link"), filepath.Join(dir, "pipe")
	if err := os.WriteFile(victim, []byte("precious"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(victim, link); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mkfifo(pipe, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{link, pipe, dir, filepath.Join(dir, "none", "x")} {
		if err := overwrite(stage.File{Path: path, Mode: 0o600, Data: []byte("x")}); err == nil {
			t.Errorf("overwrote %s", path)
		}
	}
	if data, _ := os.ReadFile(victim); string(data) != "precious" {
		t.Errorf("the link was followed: %q", data)
	}
	for _, text := range []string{"short", "much longer than that", "precious", ""} {
		if err := overwrite(stage.File{Path: victim, Mode: 0o4755, UID: 5, GID: 6, Data: []byte(text)}); err != nil {
			t.Fatal(err)
		}
		var st unix.Stat_t
		data, err := os.ReadFile(victim)
		if serr := unix.Stat(victim, &st); err != nil || serr != nil || string(data) != text ||
			st.Mode&0o7777 != 0o4755 || st.Uid != 5 || st.Gid != 6 {
			t.Errorf("%q: %q, %+v, %v", text, data, st, err)
		}
	}
	if err := overwrite(stage.File{Path: filepath.Join(dir, "new"), Mode: 0o640, Data: []byte("x")}); err != nil {
		t.Error(err)
	}
}

// fake is a runtime that says how it was called and what bundle it found.
func fake(t *testing.T) (env []string, run, bundle string) {
	t.Helper()
	dir := t.TempDir()
	path, bundle := filepath.Join(dir, "fake"), filepath.Join(dir, "bundle")
	script := "#!/bin/sh\nfor a in \"$@\"; do printf '<%s>' \"$a\"; done\nsha256sum " + bundle +
		"/config.json\nexit 42\n"
	if err := os.WriteFile(path, []byte(script), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(bundle, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(bundle, "config.json"),
		[]byte(" { \"process\" : { \"env\" : [ ] } } "), 0o600); err != nil {
		t.Fatal(err)
	}
	run = filepath.Join(dir, "run")
	return []string{"AGENTBOX_RUNTIME=" + path, "AGENTBOX_RUN=" + run}, run, bundle
}

// State that cannot be looked at is none: the wrapper is runc then. State that
// is there for the container and makes no sense fails it.
func TestStateOfOurs(t *testing.T) {
	criutest.Root(t)
	w := wrapperPath(t)
	write := func(path, text string) {
		t.Helper()
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for name, state := range map[string]struct {
		make   func(run string)
		create string // why create fails; empty: it is passed through
	}{
		"missing":            {func(string) {}, ""},
		"empty":              {func(run string) { _ = os.MkdirAll(run, 0o700) }, ""},
		"a file":             {func(run string) { write(run, "x") }, ""},
		"a file for restore": {func(run string) { write(filepath.Join(run, "restore"), "x") }, ""},
		"a file for the id":  {func(run string) { write(filepath.Join(run, "restore", "c1"), "x") }, ""},
		"a file for reap":    {func(run string) { write(filepath.Join(run, "reap"), "x") }, ""},
		"a loop":             {func(run string) { _ = os.Symlink(run, run) }, ""},
		"another's": {func(run string) {
			write(filepath.Join(run, "restore", "c2", "restore.json"), "{")
		}, ""},
		"a mark": {func(run string) { write(filepath.Join(run, "restore", "c1", "restored"), "{") }, ""},
		"garbage": {func(run string) {
			write(filepath.Join(run, "restore", "c1", "restore.json"), "{")
		}, "corrupt"},
		"no images": {func(run string) {
			write(filepath.Join(run, "restore", "c1", "restore.json"), "{}")
		}, "corrupt"},
		"a directory": {func(run string) {
			_ = os.MkdirAll(filepath.Join(run, "restore", "c1", "restore.json"), 0o700)
		}, "corrupt"},
		"a dangling link": {func(run string) {
			write(filepath.Join(run, "restore", "c1", "x"), "")
			_ = os.Symlink("none", filepath.Join(run, "restore", "c1", "restore.json"))
		}, "corrupt"},
		"a pipe": {func(run string) {
			write(filepath.Join(run, "restore", "c1", "x"), "")
			_ = unix.Mkfifo(filepath.Join(run, "restore", "c1", "restore.json"), 0o600)
		}, "corrupt"},
		"garbage for a start": {func(run string) {
			write(filepath.Join(run, "restore", "c1", "start.json"), "[]")
		}, "corrupt"},
		"bad start": {func(run string) {
			write(filepath.Join(run, "restore", "c1", "start.json"), `{"env":["novalue"]}`)
		}, "corrupt"},
		"bad file in a start": {func(run string) {
			write(filepath.Join(run, "restore", "c1", "start.json"), `{"files":[{"path":"/proc/none/x"}]}`)
		}, "/proc/none/x"},
		"held": {func(run string) { _ = stage.At(run, "c1").BlockCreate() }, "being restored"},
		"held, and a start": {func(run string) {
			_ = stage.At(run, "c1").BlockCreate()
			_ = stage.At(run, "c1").PutStart(stage.Start{})
		}, "being restored"},
		"an empty start":        {func(run string) { _ = stage.At(run, "c1").PutStart(stage.Start{}) }, ""},
		"a start of other verb": {func(run string) { write(filepath.Join(run, "reap", "due", "c2"), "{") }, ""},
	} {
		t.Run(name, func(t *testing.T) {
			env, run, bundle := fake(t)
			state.make(run)
			args := []string{"--root", filepath.Dir(bundle), "--log-format", "json", "create", "--bundle", bundle, "c1"}
			want := call1(t, env, strings.TrimPrefix(env[0], "AGENTBOX_RUNTIME="), args...)
			got := call1(t, env, w, args...)
			if state.create == "" && got != want {
				t.Errorf("got %+v\nwant %+v", got, want)
			}
			if state.create != "" && (got.code != 1 || got.out != "" || !strings.Contains(got.stderr, state.create)) {
				t.Errorf("got %+v, want a failure with %q", got, state.create)
			}
			// All other verbs do not care, but for the `delete` of what is there.
			for _, verb := range []string{"state", "start", "kill", "delete", "features", "list", "ps", "exec"} {
				args := []string{"--root", "/nonexistent", verb, "c1"}
				if want, got := call1(t, env, strings.TrimPrefix(env[0], "AGENTBOX_RUNTIME="), args...),
					call1(t, env, w, args...); got != want && !(verb == "start" && name == "a mark") {
					t.Errorf("%s: got %+v\nwant %+v", verb, got, want)
				}
			}
		})
	}
}

// The wrapper stands before every call of an engine: this is what it costs.
func BenchmarkCalls(b *testing.B) {
	criutest.Root(b)
	runc, err := host.Find("runc", nil)
	if err != nil {
		b.Fatal(err)
	}
	b.Setenv("AGENTBOX_RUN", b.TempDir())
	state := b.TempDir()
	for _, args := range [][]string{
		{"--version"}, {"--root", state, "state", "none"}, {"--root", state, "list"},
		{"--root", state, "create", "--bundle", "/nonexistent", "none"},
	} {
		for _, bin := range []string{runc, wrapperPath(b)} {
			b.Run(fmt.Sprint(args[len(args)-min(len(args), 2)], "/", filepath.Base(bin)), func(b *testing.B) {
				for b.Loop() {
					_ = exec.Command(bin, args...).Run()
				}
				b.ReportMetric(float64(b.Elapsed().Microseconds())/1000/float64(b.N), "ms/call")
			})
		}
	}
}

// The benchmark's figure, as a promise: 10 ms, or on a slower machine no more than runc itself
// takes.
func TestOverhead(t *testing.T) {
	criutest.Root(t)
	runc, err := host.Find("runc", nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Setenv("AGENTBOX_RUN", t.TempDir())
	bins := []string{runc, wrapperPath(t)}
	// CPU time, of the best of many calls: what else the machine does is not in it.
	least := [2]time.Duration{time.Hour, time.Hour}
	for range 41 {
		for i, bin := range bins {
			cmd := exec.Command(bin, "--version")
			if err := cmd.Run(); err != nil {
				t.Fatal(err)
			}
			least[i] = min(least[i], cmd.ProcessState.UserTime()+cmd.ProcessState.SystemTime())
		}
	}
	most := max(10*time.Millisecond, least[0])
	if over := least[1] - least[0]; over > most {
		t.Errorf("the wrapper adds %v to a call, more than %v", over, most)
	}
	t.Logf("runc %v, through the wrapper %v", least[0], least[1])
}

// A bind mount whose source is a symlink is restored, too.
func TestRestoreOfLinkedSource(t *testing.T) {
	dir := t.TempDir()
	link := filepath.Join(dir, "link")
	if err := errors.Join(os.Mkdir(filepath.Join(dir, "real"), 0o755), os.Symlink("real", link)); err != nil {
		t.Fatal(err)
	}
	b := newBox(t, criutest.Counter, func(s *specs.Spec) {
		s.Mounts = append(s.Mounts, specs.Mount{
			Destination: "/mnt", Source: link, Type: "bind", Options: []string{"rbind"},
		})
	})
	b.Start(nil)
	b.Until("it counts", func() bool { return b.Count() >= 3 })
	b.dump(t)
	at := b.Count()
	b.End()
	if err := stage.At(b.run, b.ID).Put(stage.Restore{Images: b.Images, Work: b.Work, Config: b.Config}); err != nil {
		t.Fatal(err)
	}
	b.Start(nil)
	b.Until("it counts on", func() bool { return b.Count() > at })
}

// A restore staged for a container beneath one root of the runtime is not for one of the same
// name beneath another.
func TestRootsApart(t *testing.T) {
	b := newBox(t, criutest.Counter, nil)
	b.Start(nil)
	b.Until("it counts", func() bool { return b.Count() >= 20 })
	b.dump(t)
	at, putBack := b.Count(), b.Keep()
	b.End()
	staged := stage.Restore{Images: b.Images, Work: b.Work, Config: b.Config}
	other, own := stage.Under("/elsewhere/ns2", b.ID), stage.Under(b.State, b.ID)
	if err := errors.Join(stage.At(b.run, other).Put(staged), stage.At(b.run, other).BlockCreate()); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(b.Files, "count"), []byte("0"), 0o600); err != nil {
		t.Fatal(err)
	}
	b.Start(nil)
	b.Until("it starts", func() bool { return b.Count() > 0 })
	b.End()
	if _, err := os.Stat(filepath.Join(b.Work, "restore.log")); !errors.Is(err, os.ErrNotExist) {
		t.Fatalf("it did not start afresh: %v", err)
	}
	if _, err := stage.At(b.run, other).Load(); err != nil {
		t.Fatalf("the other's was used: %v", err)
	}
	putBack()
	if err := stage.At(b.run, own).Put(staged); err != nil {
		t.Fatal(err)
	}
	b.Start(nil)
	b.Until("it counts on", func() bool { return b.Count() > at })
	if ids, _ := stage.List(b.run); !reflect.DeepEqual(ids, []string{other}) {
		t.Fatalf("left behind: %v", ids)
	}
}
