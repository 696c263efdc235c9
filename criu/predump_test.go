package criu

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/agentbox/agentbox/criu/criutest"
	"github.com/agentbox/agentbox/internal/fault"
)

// tracks tells whether memory can be written ahead on this host.
func tracks(t *testing.T) bool {
	t.Helper()
	lacks, err := DirtyTracking(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("lacks: %q", lacks)
	return lacks == ""
}

// ahead writes the memory of a container ahead, which then runs.
func ahead(t *testing.T, b *criutest.Box, rt Runtime) (*Ahead, error) {
	t.Helper()
	ctx := context.Background()
	if err := rt.Pause(ctx); err != nil {
		t.Fatal(err)
	}
	let := 0
	a, err := PreDump(ctx, rt, DumpOptions{ImageDir: filepath.Join(filepath.Dir(b.Images), "pre"), WorkDir: filepath.Join(b.Work, "pre")}, func() error {
		let++
		if pids, err := Members(b.Pid()); err != nil {
			t.Error(err)
		} else if pid, _ := traced(pids); pid != 0 {
			t.Errorf("process %d is still held", pid)
		}
		if b.Status() != "paused" {
			t.Errorf("it is %s", b.Status())
		}
		return rt.Resume(ctx)
	})
	if let != 1 {
		t.Errorf("let go %d times", let)
	}
	if b.Status() != "running" {
		t.Errorf("it is %s", b.Status())
	}
	return a, err
}

// What was written ahead and what is dumped later are the container at the
// instant of the dump. Where that cannot be, it goes on, and is told why.
func TestPreDump(t *testing.T) { eachBundle(t, testPreDump) }

func testPreDump(t *testing.T, edit func(*specs.Spec)) {
	ctx := context.Background()
	b, rt := start(t, []string{"sh", "-c", "sleep 1000 & " + criutest.Counter[2]}, edit)
	b.Until("it counts", func() bool { return b.Count() >= 2 })
	a, err := ahead(t, b, rt)
	at := b.Count()
	b.Until("it counts on", func() bool { return b.Count() > at+1 })
	if !tracks(t) {
		var refused *DumpError
		if !errors.As(err, &refused) {
			t.Fatalf("written ahead, which this kernel cannot: %v", err)
		}
		return
	}
	if err != nil {
		t.Fatal(err)
	}
	if err := rt.Pause(ctx); err != nil {
		t.Fatal(err)
	}
	putBack := b.Keep()
	res, err := Dump(ctx, rt, DumpOptions{ImageDir: b.Images, WorkDir: b.Work, Ahead: a})
	if err != nil || res.Alone != nil {
		t.Fatal(err, res.Alone)
	}
	changed, err := pagesIn(b.Images)
	if err != nil {
		t.Fatal(err)
	}
	taken, err := a.Flatten(ctx, b.Images)
	if err != nil || taken <= 0 || taken > a.Bytes {
		t.Fatalf("%d bytes of %d written ahead: %v", taken, a.Bytes, err)
	}
	all, err := pagesIn(b.Images)
	if err != nil || all != changed+taken {
		t.Errorf("%d bytes, of which %d had changed and %d not: %v", all, changed, taken, err)
	}
	t.Logf("%d bytes written ahead, %d dumped, %d in all", a.Bytes, changed, all)
	putBack()
	at = b.Count()
	restore(t, b, rt, Options{})
	b.Until("it counts on", func() bool { return b.Count() > at })
	if pids, err := Members(b.Pid()); err != nil || len(pids) < 2 {
		t.Errorf("the sleep has ended: %v, %v", pids, err)
	}
}

// What was moved where something else was is dumped, whatever the kernel has marked,
// and so is what changed before somebody cleared the marks: see frames.go.
func TestPreDumpMarks(t *testing.T) {
	for _, how := range []string{"move", "clear"} {
		t.Run(how, func(t *testing.T) { testPreDumpMarks(t, how) })
	}
}

func testPreDumpMarks(t *testing.T, how string) {
	if !tracks(t) {
		t.Log("what moves is not looked for on this kernel")
		return
	}
	ctx := context.Background()
	program := filepath.Join(t.TempDir(), "ahead")
	if out, err := exec.Command("go", "build", "-o", program, "../test/testdata/ahead").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	b := criutest.New(t, []string{"/ahead", "0", how}, nil)
	data, err := os.ReadFile(program)
	if err == nil {
		err = os.WriteFile(filepath.Join(b.Files, "ahead"), data, 0o755)
	}
	if err != nil {
		t.Fatal(err)
	}
	b.Start(nil)
	rt := Runtime{Binary: b.Binary, Root: b.State, ID: b.ID}
	says := func(what string) (rest string) {
		b.Until("it says "+what, func() bool {
			text, _ := os.ReadFile(filepath.Join(b.Files, "says"))
			_, after, found := strings.Cut(string(text), what)
			rest, _, _ = strings.Cut(after, "\n")
			return found && strings.Contains(after, "\n")
		})
		return strings.TrimSpace(rest)
	}
	says("ready")
	a, err := ahead(t, b, rt)
	if err == nil {
		err = os.WriteFile(filepath.Join(b.Files, "go"), nil, 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
	var address uint64
	if _, err := fmt.Sscanf(says("done"), "%x", &address); err != nil {
		t.Fatal(err)
	}
	if err := rt.Pause(ctx); err != nil {
		t.Fatal(err)
	}
	begun := time.Now()
	_, err = a.settle(b.Images)
	t.Logf("settled in %v: %v", time.Since(begun), err)
	res, err := Dump(ctx, rt, DumpOptions{ImageDir: b.Images, WorkDir: b.Work, LeaveRunning: true, Ahead: a})
	if err != nil || (res.Alone != nil) != (how == "clear") {
		t.Fatal(err, res.Alone)
	}
	if _, err := a.Flatten(ctx, b.Images); err != nil {
		t.Fatal(err)
	}
	const pages = 4 << 20 / pageSize
	image, err := os.Open(filepath.Join(b.Images, "pages-1.img"))
	if err != nil {
		t.Fatal(err)
	}
	defer image.Close()
	found, offset := 0, int64(0)
	_, err = readPages(filepath.Join(b.Images, "pagemap-1.img"), func(_ []byte, e pageEntry) error {
		for i := range e.pages {
			if at := e.at + i*pageSize; at >= address && at < address+pages*pageSize {
				var first [1]byte
				if _, err := image.ReadAt(first[:], offset+int64(i)*pageSize); err != nil || first[0] != 'b' {
					return fmt.Errorf("at %#x is %q: %v", at, first, err)
				}
				found++
			}
		}
		if e.present {
			offset += int64(e.pages) * pageSize
		}
		return nil
	})
	if err != nil || found != pages {
		t.Errorf("%d of %d pages: %v", found, pages, err)
	}
}

func TestPreDumpRefused(t *testing.T) {
	b, rt := start(t, criutest.Counter, nil)
	opts := DumpOptions{ImageDir: filepath.Join(b.Work, "images"), WorkDir: b.Work}
	never := func() error { t.Error("let go of what was not held"); return nil }
	if _, err := PreDump(context.Background(), rt, opts, never); !errors.Is(err, fault.ErrState) {
		t.Errorf("of a running one: %v", err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	if err := rt.Pause(ctx); err != nil {
		t.Fatal(err)
	}
	cancel()
	if _, err := PreDump(ctx, rt, opts, never); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled before it began: %v", err)
	}
}

// The line is found however the log grows, and no later than its writer ends.
func TestLogWatch(t *testing.T) {
	for name, parts := range map[string][]string{"at once": {"some\n" + letGoLine + "\n"}, "in parts": {"some\n" + letGoLine[:5], letGoLine[5:]}, "never": {"some\n", letGoLine[:20]}} {
		path := filepath.Join(t.TempDir(), dumpLog)
		w := watchLog(path)
		ended := make(chan struct{})
		found := make(chan bool)
		go func() { found <- w.await(letGoLine, ended) }()
		f, err := os.Create(path)
		if err != nil {
			t.Fatal(err)
		}
		for _, p := range parts {
			if _, err := f.WriteString(p); err != nil {
				t.Fatal(err)
			}
		}
		if name == "never" {
			close(ended)
		}
		if <-found != (name != "never") {
			t.Errorf("%s: wrong", name)
		}
		w.close()
		_ = f.Close()
	}
}
