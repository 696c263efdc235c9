package main

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// fakeQEMU is a program that is called as QEMU is.
func fakeQEMU(t *testing.T, script string) (*emulator, machineOptions) {
	t.Helper()
	dir := t.TempDir()
	path := filepath.Join(dir, "qemu")
	if err := os.WriteFile(path, []byte("#!/bin/sh\n"+script), 0o700); err != nil {
		t.Fatal(err)
	}
	return &emulator{args: []string{path}}, machineOptions{
		Dir: dir, Console: filepath.Join(dir, "console"), Boot: 20 * time.Second, CPUs: 1, Memory: 64,
	}
}

func TestBootFails(t *testing.T) {
	for name, c := range map[string]struct {
		script string
		bound  time.Duration
		listen bool
		want   []string
	}{
		"QEMU ends": {
			"echo no such machine >&2; exit 3", time.Minute, false,
			[]string{"QEMU ended: exit status 3", "no such machine"},
		},
		"a panic": {
			"echo '[1.2] Kernel panic - not syncing: no init'; echo more; exec sleep 60", time.Minute, true,
			[]string{"kernel panicked", "no init", "more"},
		},
		"it hangs": {
			"echo Loading; exec sleep 60", 300 * time.Millisecond, false, []string{"not up within 300ms", "Loading"},
		},
		"it crashes": {"kill -SEGV $$", time.Minute, false, []string{"QEMU crashed: signal: segmentation fault"}},
	} {
		t.Run(name, func(t *testing.T) {
			q, opts := fakeQEMU(t, c.script)
			opts.Boot = c.bound
			if c.listen {
				l, err := net.Listen("unix", filepath.Join(opts.Dir, "port"))
				if err != nil {
					t.Fatal(err)
				}
				defer l.Close()
			}
			m, _, err := boot(t.Context(), q, opts)
			if err == nil {
				m.off()
				t.Fatal("it booted")
			}
			for _, want := range c.want {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("the error does not say %q: %v", want, err)
				}
			}
			if out, err := exec.Command("pgrep", "-f", opts.Dir+"/qemu").Output(); err == nil {
				t.Errorf("QEMU still runs: %s", out)
			}
		})
	}
}

// A QEMU that crashes as it boots, or whose guest hangs, is started again, thrice in all; but
// not where the guest may hang by what it has on its disk.
func TestBootAgain(t *testing.T) {
	for _, c := range []struct {
		fault  string
		faults int
		disk   string
		boots  int
		want   string
	}{
		{"kill -ABRT $$", 1, "", 2, "QEMU ended: exit status 3"},
		{"kill -ABRT $$", 3, "", 3, "QEMU crashed: signal: aborted"},
		{"kill -ABRT $$", 1, "its own", 2, "QEMU ended: exit status 3"},
		{"exec sleep 60", 1, "", 2, "QEMU ended: exit status 3"},
		{"exec sleep 60", 3, "", 3, "the guest was not up within 2s"},
		{"exec sleep 60", 1, "its own", 1, "the guest was not up within 2s"},
		{"echo 'I/O error, dev vda'; exec sleep 60", 3, "", 1, "this host failed the machine's disks"},
	} {
		q, opts := fakeQEMU(t, fmt.Sprintf("cd ${0%%/*}; echo >>boots; [ $(wc -l <boots) -gt %d ] && exit 3; %s",
			c.faults, c.fault))
		opts.Boot, opts.Disk = 2*time.Second, c.disk
		_, _, err := boot(t.Context(), q, opts)
		if err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%d times %q: %v, want %q", c.faults, c.fault, err, c.want)
		}
		if said, err := os.ReadFile(opts.Console); err != nil ||
			strings.Count(string(said), "==> a machine is booted") != c.boots {
			t.Errorf("%d times %q: the console's log is %q, %v", c.faults, c.fault, said, err)
		}
		if said, err := os.ReadFile(filepath.Join(opts.Dir, "boots")); err != nil || len(said) != c.boots {
			t.Errorf("%d times %q: it was started %d times, %v", c.faults, c.fault, len(said), err)
		}
	}
}

func TestCancelledBootEndsQEMU(t *testing.T) {
	q, opts := fakeQEMU(t, "exec sleep 60")
	ctx, cancel := context.WithCancelCause(t.Context())
	time.AfterFunc(200*time.Millisecond, func() { cancel(errInterrupted) })
	if _, _, err := boot(ctx, q, opts); !errors.Is(err, errInterrupted) || strings.Contains(err.Error(), "console") {
		t.Errorf("the error is %v", err)
	}
}

func TestTally(t *testing.T) {
	events := `{"Action":"output","Test":"TestA","Output":"fine\n"}
{"Action":"pass","Test":"TestA/sub"}
{"Action":"pass","Test":"TestA"}
{"Action":"output","Test":"TestB/sub","Output":"not so\n"}
{"Action":"fail","Test":"TestB/sub"}
{"Action":"fail","Test":"TestB"}
{"Action":"skip","Test":"TestC"}
{"Action":"fail"}
`
	var shown strings.Builder
	r := result{suite: suite{pkg: "p"}}
	if err := r.tally(strings.NewReader(events), &shown, false); err != nil {
		t.Fatal(err)
	}
	if r.passed != 1 || r.failed != 1 || r.skipped != 1 || r.ok() || strings.Join(r.failures, " ") != "TestB" {
		t.Errorf("the result is %+v", r)
	}
	if shown.String() != "not so\n" {
		t.Errorf("shown: %q", shown.String())
	}
	// One that ends without a test's failure, as by a leak found in the end.
	r = result{}
	if err := r.tally(strings.NewReader(`{"Action":"output","Output":"left behind\n"}`+"\n"+`{"Action":"fail"}`),
		&shown, false); err != nil || r.ok() {
		t.Errorf("the result is %+v (%v)", r, err)
	}
}

// A test that does not end is shown with what it said, and its suite's bound is told.
func TestTallyOfABound(t *testing.T) {
	events := `{"Action":"run","Test":"TestA"}
{"Action":"pass","Test":"TestA"}
{"Action":"run","Test":"TestB"}
{"Action":"run","Test":"TestB/sub"}
{"Action":"output","Test":"TestB/sub","Output":"panic: test timed out after 5s\n"}
{"Action":"output","Test":"TestB/sub","Output":"goroutine 7 [select]:\n"}
{"Action":"fail"}
`
	var shown strings.Builder
	r := result{suite: suite{pkg: "p"}}
	if err := r.tally(strings.NewReader(events), &shown, false); err == nil ||
		err.Error() != "ended after 5s, which is its bound (-timeout)" {
		t.Errorf("the error is %v", err)
	}
	if r.passed != 1 || r.failed != 1 || fmt.Sprint(r.failures) != "[TestB (it did not end)]" ||
		!strings.Contains(shown.String(), "goroutine 7") {
		t.Errorf("the result is %+v, shown: %q", r, shown.String())
	}
}

// The result of a part of a suite stays, whatever the next part comes to.
func TestParts(t *testing.T) {
	var r result
	ended := errors.New("ended after 5 s")
	for _, c := range []struct {
		name string
		part result
		want bool
	}{
		{"TestInstall", result{passed: 1}, true},
		{"TestService", result{err: ended}, false},
		{"TestBeforeReboot", result{passed: 1}, true},
		{"TestAfterReboot", result{skipped: 1}, false},
	} {
		if ok := r.add(c.name, c.part); ok != c.want {
			t.Errorf("%s passed: %v", c.name, ok)
		}
	}
	if !errors.Is(r.err, ended) || !strings.Contains(r.err.Error(), "TestService: ended") ||
		!strings.Contains(r.err.Error(), "TestAfterReboot: it was not run") || r.ok() || r.passed != 2 {
		t.Errorf("the suite is %+v", r)
	}
}

func TestTopLevel(t *testing.T) {
	for run, want := range map[string]string{
		"": "", "TestService/Restart": "TestService", "A/x|^B$/y/z|C": "A|^B$|C", "[/|]a/b": "[/|]a",
		"(A/|B)/c": "(A/|B)", `A\/b/c`: `A\/b`,
	} {
		if got := topLevel(run); got != want {
			t.Errorf("%q: %q, want %q", run, got, want)
		}
	}
}

// A suite that ran nothing proves nothing.
func TestVerdict(t *testing.T) {
	ok, none, lost := result{suite: suite{pkg: "a"}, passed: 1}, result{suite: suite{pkg: "b"}, skipped: 1},
		result{suite: suite{pkg: "c"}, err: errors.New("QEMU ended")}
	for _, c := range []struct {
		run     string
		results []result
		want    string
	}{
		{"", []result{ok}, ""},
		{"", []result{ok, none}, "of b nothing was run"},
		{"TestX", []result{ok, none}, ""},
		{"TestX", []result{none}, `nothing was run: no test passed or failed that matches -run "TestX"`},
		{"TestX", []result{ok, {suite: suite{pkg: "b"}, failed: 1}}, "tests failed"},
		{"", []result{ok, {failed: 1}, lost}, "c: QEMU ended"},
	} {
		var said strings.Builder
		list := make([]suite, len(c.results))
		if err := verdict(&said, list, c.results, "", c.run); err == nil && c.want != "" ||
			err != nil && err.Error() != c.want {
			t.Errorf("%q of %+v: %v, want %q", c.run, c.results, err, c.want)
		}
	}
	var said strings.Builder
	if err := verdict(&said, []suite{{pkg: "a"}, {pkg: "d"}}, []result{ok}, "", ""); err == nil ||
		!strings.Contains(said.String(), "not run: d") {
		t.Errorf("with one that was not begun: %v, %q", err, said.String())
	}
	if !strings.HasPrefix(none.String(), "NONE") {
		t.Errorf("it is %s", none)
	}
}

// A sandbox is ready once its line is whole, and no longer once it is to go.
func TestWorkSays(t *testing.T) {
	w := newWork()
	w.begin("restore")
	for _, part := range []string{
		"work: begins checkpoint w0\nwork: rea", "dy a x s\nnoise\nwork: ready b y s\nwork: goes a\n",
		"work: begins restore w0\nwork: ready c",
	} {
		if _, err := w.Write([]byte(part)); err != nil {
			t.Fatal(err)
		}
	}
	if len(w.ready) != 1 || w.ready[0] != "b y s" || w.now["w0"] != "restore" ||
		w.least["checkpoint"] == 0 || w.failed != "" {
		t.Errorf("%+v", w)
	}
	select {
	case <-w.reached:
	default:
		t.Error("the restore has begun, and nobody was told")
	}
	w.begin("prune")
	_, _ = w.Write([]byte("work: failed w0: no space\n"))
	<-w.reached
	if w.failed == "" || len(w.ready) != 1 {
		t.Errorf("%+v", w)
	}
}

// An overlay is of the size of what is below it, and names it.
func TestOverlay(t *testing.T) {
	below, over := filepath.Join(t.TempDir(), "disk.img"), filepath.Join(t.TempDir(), "over")
	if err := os.WriteFile(below, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(below, 12<<30); err != nil {
		t.Fatal(err)
	}
	if err := overlay(over, below); err != nil {
		t.Fatal(err)
	}
	data, err := os.ReadFile(over)
	if err != nil {
		t.Fatal(err)
	}
	at, size := binary.BigEndian.Uint64(data[8:]), binary.BigEndian.Uint32(data[16:])
	if string(data[:4]) != "QFI\xfb" || string(data[at:at+uint64(size)]) != below ||
		binary.BigEndian.Uint64(data[24:]) != 12<<30 {
		t.Errorf("its header is %q", data[:200])
	}
	if err := os.Truncate(below, 5<<40); err != nil {
		t.Fatal(err)
	}
	if err := overlay(over, below); err == nil {
		t.Error("a disk larger than the tables is taken")
	}
}

func TestPackageOf(t *testing.T) {
	for _, c := range []struct{ here, name, want string }{
		{"/payload/src/runtime/oci", "../../cmd/agentbox-runtime", "cmd/agentbox-runtime"},
		{"/payload/src/cmd/agentbox", ".", "cmd/agentbox"},
		{"/tmp/x", modulePath + "/cmd/agentbox", "cmd/agentbox"},
	} {
		if got, err := packageOf(c.here, c.name); err != nil || got != c.want {
			t.Errorf("%s from %s is %q (%v)", c.name, c.here, got, err)
		}
	}
	if got, err := packageOf("/payload/src", "../x"); err == nil {
		t.Errorf("../x is %q", got)
	}
}

func TestImageFlag(t *testing.T) {
	for _, i := range images {
		if o, err := parse([]string{"-image", i.name, "overlay"}); err != nil ||
			o.image != i.name || len(o.suites) != 1 {
			t.Errorf("-image %s: %+v (%v)", i.name, o, err)
		}
	}
	if o, err := parse(nil); err != nil || o.image != "trixie" {
		t.Errorf("without the flag: %+v (%v)", o, err)
	}
	// A useless argument is refused before minutes go into an image.
	for want, args := range map[string][]string{
		"docker28": {"-image", "nothing"}, "auto, kvm or tcg": {"-accel", "xen"}, "missing closing": {"-run", "("},
	} {
		if _, err := parse(args); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v", args, err)
		}
	}
}

func TestChosen(t *testing.T) {
	list, err := chosen([]string{"overlay", "runtime/oci"})
	if err != nil || len(list) != 2 || list[0].pkg != "runtime/oci" {
		t.Errorf("chosen: %v (%v)", list, err)
	}
	if _, err := chosen([]string{"nothing"}); err == nil {
		t.Error("a suite that is none is taken")
	}
	for _, s := range suites {
		if _, err := os.Stat(filepath.Join("../..", s.pkg)); err != nil {
			t.Errorf("suite %s: %v", s.pkg, err)
		}
	}
}
