package criu

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/checkpoint-restore/go-criu/v7/stats"

	"github.com/agentbox/agentbox/criu/criutest"
	"github.com/agentbox/agentbox/criu/freezer"
	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/internal/proc"
)

func TestDumpAndRestore(t *testing.T) {
	ctx := context.Background()
	b, rt := start(t, []string{"sh", "-c", "sleep 1000 & i=0; while :; do i=$((i+1)); " + criutest.Store +
		"; sleep 0.05; done"}, nil)
	b.Until("it counts", func() bool { return b.Count() >= 3 })

	if _, err := Dump(ctx, rt, DumpOptions{ImageDir: b.Images, WorkDir: b.Work}); !errors.Is(err, fault.ErrState) {
		t.Fatalf("dump of a running one: %v", err)
	}
	if err := rt.Pause(ctx); err != nil {
		t.Fatal(err)
	}
	if _, err := Dump(ctx, rt, DumpOptions{ImageDir: "images", WorkDir: b.Work}); !errors.Is(err, fault.ErrInvalid) {
		t.Fatalf("relative directory: %v", err)
	}
	cancelled, cancel := context.WithCancel(ctx)
	cancel()
	if _, err := Dump(cancelled, rt, DumpOptions{
		ImageDir: b.Images, WorkDir: b.Work,
	}); !errors.Is(err, context.Canceled) {
		t.Fatalf("cancelled before it began: %v", err)
	}

	res, err := Dump(ctx, rt, DumpOptions{ImageDir: b.Images, WorkDir: b.Work, LeaveRunning: true})
	if err != nil {
		t.Fatal(err)
	}
	dir, err := os.Open(b.Images)
	if err != nil {
		t.Fatal(err)
	}
	defer dir.Close()
	if st, err := stats.CriuGetDumpStats(dir); err != nil || st.GetPagesWritten() == 0 {
		t.Errorf("what was measured: %v (%v)", st, err)
	}
	if res.Took <= 0 || len(res.Processes) != 3 {
		t.Errorf("%+v", res)
	}
	if i := slices.IndexFunc(res.Processes, func(p Process) bool { return p.Ppid == 0 }); i < 0 ||
		res.Processes[i].Pid != 1 || res.Processes[i].Comm != "sh" {
		t.Errorf("processes: %+v", res.Processes)
	}
	if b.Status() != "paused" {
		t.Fatalf("after the dump it is %s", b.Status())
	}
	at := b.Count()
	if err := rt.Resume(ctx); err != nil {
		t.Fatal(err)
	}
	b.Until("it counts on", func() bool { return b.Count() > at })

	// Again, to the end of it.
	if err := rt.Pause(ctx); err != nil {
		t.Fatal(err)
	}
	at = b.Count()
	if err := os.RemoveAll(b.Images); err != nil {
		t.Fatal(err)
	}
	if _, err := Dump(ctx, rt, DumpOptions{ImageDir: b.Images, WorkDir: b.Work}); err != nil {
		t.Fatal(err)
	}
	if b.Status() != "gone" {
		t.Fatalf("after a dump that does not leave it running it is %s", b.Status())
	}
	restore(t, b, rt, Options{})
	b.Until("it counts on", func() bool { return b.Count() > at })
	if _, err := Dump(ctx, Runtime{rt.Binary, rt.Root, "nosuch"},
		DumpOptions{ImageDir: b.Images, WorkDir: b.Work}); !errors.Is(err, fault.ErrNotFound) {
		t.Errorf("dump of none: %v", err)
	}
}

// A refused dump leaves everything as it was and says why.
func TestDumpRefused(t *testing.T) { eachBundle(t, testDumpRefused) }

func testDumpRefused(t *testing.T, edit func(*specs.Spec)) {
	ctx := context.Background()
	// More than CRIU's own limit, 1 MiB.
	b, rt := start(t, []string{
		"sh", "-c", "busybox dd if=/dev/zero of=/big bs=1M count=2; exec 5</big; rm /big; i=0; while :; do i=$((i+1)); " + criutest.Store + "; sleep 0.05; done",
	}, edit)
	b.Until("it counts", func() bool { return b.Count() >= 3 })
	if err := rt.Pause(ctx); err != nil {
		t.Fatal(err)
	}
	_, err := Dump(ctx, rt, DumpOptions{
		ImageDir: b.Images, WorkDir: b.Work, LeaveRunning: true, Options: Options{GhostLimit: 1},
	})
	var de *DumpError
	if !errors.As(err, &de) || de.Code != "ghost-limit" || !strings.Contains(err.Error(), "/big") || de.Hint == "" ||
		de.Log != filepath.Join(b.Work, "dump.log") {
		t.Fatalf("%v: %+v", err, de)
	}
	if b.Status() != "paused" {
		t.Fatalf("it is %s", b.Status())
	}
	at := b.Count()
	if err := rt.Resume(ctx); err != nil {
		t.Fatal(err)
	}
	b.Until("it counts on", func() bool { return b.Count() > at })

	// With the usual limit the same container dumps.
	if err := rt.Pause(ctx); err != nil {
		t.Fatal(err)
	}
	if _, err := Dump(ctx, rt, DumpOptions{ImageDir: b.Images, WorkDir: b.Work, LeaveRunning: true}); err != nil {
		t.Fatal(err)
	}
}

func TestDumpToAFullDisk(t *testing.T) {
	ctx := context.Background()
	b, rt := start(t, criutest.Counter, nil)
	b.Until("it counts", func() bool { return b.Count() >= 2 })
	small := t.TempDir()
	if err := unix.Mount("tmpfs", small, "tmpfs", 0, "size=100k"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Unmount(small, unix.MNT_DETACH) })
	if err := rt.Pause(ctx); err != nil {
		t.Fatal(err)
	}
	_, err := Dump(ctx, rt, DumpOptions{ImageDir: filepath.Join(small, "images"), WorkDir: b.Work, LeaveRunning: true})
	var de *DumpError
	if !errors.As(err, &de) || de.Code != "no-space" {
		t.Fatalf("%v", err)
	}
	at := b.Count()
	if err := rt.Resume(ctx); err != nil {
		t.Fatal(err)
	}
	b.Until("it counts on", func() bool { return b.Count() > at })
}

func TestDumpWithoutCriu(t *testing.T) {
	ctx := context.Background()
	b, rt := start(t, criutest.Counter, nil)
	if err := rt.Pause(ctx); err != nil {
		t.Fatal(err)
	}
	// A runtime that cannot find CRIU, as runc says it.
	fake := filepath.Join(t.TempDir(), "runc")
	script := fmt.Sprintf("#!/bin/sh\ncase \"$*\" in *checkpoint*) echo 'time=\"x\" level=error msg=\"CRIU version check failed: exec: \\\"criu\\\": executable file not found in $PATH\"' >&2; exit 1;; esac\nexec %s \"$@\"\n", rt.Binary)
	if err := os.WriteFile(fake, []byte(script), 0o755); err != nil {
		t.Fatal(err)
	}
	rt.Binary = fake
	_, err := Dump(ctx, rt, DumpOptions{ImageDir: b.Images, WorkDir: b.Work, LeaveRunning: true})
	var de *DumpError
	if !errors.As(err, &de) || de.Code != "no-criu" || !errors.Is(err, fault.ErrUnsupported) || de.Log != "" {
		t.Fatalf("%v: %+v", err, de)
	}
}

// crun without CRIU, as Debian 12 has it, and without CRIU's library, as newer ones are.
func TestDumpByACrunWithout(t *testing.T) {
	ctx := context.Background()
	b, rt := start(t, criutest.Counter, nil)
	real := rt.Binary
	if err := rt.Pause(ctx); err != nil {
		t.Fatal(err)
	}
	for said, words := range map[string][]string{
		"unknown command checkpoint": {"without", "runc"},
		"2026-01-01T00:00:00.1Z: could not load `libcriu.so.2`": {
			"library", "apt-get install libcriu2", "dnf install criu-libs", "runc", "--files-only",
		},
		"could not load `libcriu.so.2`: `libcriu.so.2: no object`": {"library", "libcriu2", "criu-libs"},
	} {
		fake := filepath.Join(t.TempDir(), "crun")
		script := fmt.Sprintf("#!/bin/sh\ncase \"$*\" in *checkpoint*) echo '%s' >&2; exit 1;; esac\nexec %s \"$@\"\n",
			said, real)
		if err := os.WriteFile(fake, []byte(script), 0o755); err != nil {
			t.Fatal(err)
		}
		rt.Binary = fake
		_, err := Dump(ctx, rt, DumpOptions{ImageDir: b.Images, WorkDir: b.Work, LeaveRunning: true})
		var de *DumpError
		if !errors.As(err, &de) || de.Code != "no-criu" || !errors.Is(err, fault.ErrUnsupported) {
			t.Fatalf("%s: %v: %+v", said, err, de)
		}
		for _, w := range words {
			if !strings.Contains(de.Reason+de.Hint, w) {
				t.Errorf("%s: %q is not in %s: %s", said, w, de.Reason, de.Hint)
			}
		}
		if b.Status() != "paused" {
			t.Errorf("it is %s", b.Status())
		}
	}
}

// tail -f watches a file by inotify; on an overlay CRIU must be told where it is.
func TestDumpWatches(t *testing.T) { eachBundle(t, testDumpWatches) }

func testDumpWatches(t *testing.T, edit func(*specs.Spec)) {
	ctx := context.Background()
	dir := t.TempDir()
	root := filepath.Join(dir, "merged")
	for _, d := range []string{"upper", "work", "merged"} {
		if err := os.Mkdir(filepath.Join(dir, d), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	b := criutest.New(t, []string{"watch"}, func(s *specs.Spec) { s.Root.Path = root; edit(s) })
	if err := unix.Mount("overlay", root, "overlay", 0,
		fmt.Sprintf("lowerdir=%s,upperdir=%s/upper,workdir=%s/work,index=off,metacopy=off,redirect_dir=off", b.Files,
			dir, dir)); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Unmount(root, unix.MNT_DETACH) })
	build(t, filepath.Join(root, "bin", "watch"), "watch")
	rt := Runtime{b.Binary, b.State, b.ID}
	b.Start(nil)
	seen := func() bool { _, err := os.Stat(filepath.Join(root, "ready")); return err == nil }
	b.Until("it watches", seen)
	pid := b.Pid()
	if err := rt.Pause(ctx); err != nil {
		t.Fatal(err)
	}
	paths, err := Watches(pid)
	slices.Sort(paths)
	if err != nil || !slices.Equal(paths, []string{"/bin/busybox", "/some dir", "/some dir/file"}) {
		t.Fatalf("Watches = %q, %v", paths, err)
	}
	if _, err := Dump(ctx, rt, DumpOptions{ImageDir: b.Images, WorkDir: b.Work, LeaveRunning: true}); err != nil {
		t.Fatal(err)
	}
	b.End()
	restore(t, b, rt, Options{})
	if err := os.WriteFile(filepath.Join(root, "some dir", "new"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	b.Until("the restored watch tells of the new file", func() bool {
		data, _ := os.ReadFile(filepath.Join(root, "events"))
		return bytes.Contains(data, []byte("new"))
	})
}

// A debugger's process is refused at once, not after CRIU's ten seconds.
func TestDumpTraced(t *testing.T) {
	ctx := context.Background()
	b, rt := start(t, criutest.Counter, nil)
	b.Until("it counts", func() bool { return b.Count() >= 2 })
	pid := b.Pid()
	attached, detach, done := make(chan error), make(chan bool), make(chan bool)
	go func() {
		runtime.LockOSThread() // a tracer is a thread
		defer runtime.UnlockOSThread()
		attached <- unix.PtraceSeize(pid)
		<-detach
		_ = unix.PtraceInterrupt(pid)
		_, _ = unix.Wait4(pid, nil, unix.WALL, nil)
		_ = unix.PtraceDetach(pid)
		close(done)
	}()
	if err := <-attached; err != nil {
		t.Fatal(err)
	}
	if err := rt.Pause(ctx); err != nil {
		t.Fatal(err)
	}
	_, err := Dump(ctx, rt, DumpOptions{ImageDir: b.Images, WorkDir: b.Work, LeaveRunning: true})
	var de *DumpError
	if !errors.As(err, &de) || de.Code != "traced" || !errors.Is(err, fault.ErrState) || de.Hint == "" {
		t.Error(err)
	}
	if err := rt.Resume(ctx); err != nil {
		t.Fatal(err)
	}
	close(detach)
	<-done
	if err := rt.Pause(ctx); err != nil {
		t.Fatal(err)
	}
	if _, err := Dump(ctx, rt, DumpOptions{ImageDir: b.Images, WorkDir: b.Work, LeaveRunning: true}); err != nil {
		t.Errorf("after the tracer has gone: %v", err)
	}
}

// A thread that is frozen as it comes back from a fork is in no vfork.
func TestForkIsNoInstant(t *testing.T) {
	ctx := context.Background()
	b, rt := start(t, []string{"sh", "-c", "while :; do ( : ); done"}, nil)
	box, err := freezer.Open(rt.Root, rt.ID)
	if err != nil {
		t.Fatal(err)
	}
	pid := b.Pid()
	for range 100 {
		if err := box.Freeze(ctx); err != nil {
			t.Fatal(err)
		}
		if at := between([]int{pid}); at != nil {
			call, _ := os.ReadFile(fmt.Sprintf("/proc/%d/syscall", at.tid))
			t.Fatalf("thread %d (%d) waits in %q, in call %s", at.tid, at.why, freezer.Waits(at.tid), call)
		}
		if err := box.Thaw(); err != nil {
			t.Fatal(err)
		}
	}
}

// A process that a signal ends while it is frozen (cgroup v1 keeps it so) has ended when the
// dump begins: the images and what is on record of the processes are of one instant.
func TestKilledWhileFrozen(t *testing.T) {
	ctx := context.Background()
	for _, sig := range []syscall.Signal{syscall.SIGTERM, syscall.SIGKILL, syscall.SIGINT} {
		t.Run(sig.String(), func(t *testing.T) {
			b, rt := start(t, []string{"sh", "-c", "sleep 1000; exec sleep 2000"}, nil)
			child := 0
			for end := time.Now().Add(time.Minute); child == 0 && time.Now().Before(end); time.Sleep(time.Millisecond) {
				list, err := os.ReadFile(fmt.Sprintf("/proc/%[1]d/task/%[1]d/children", b.Pid()))
				if err != nil {
					t.Fatal(err)
				}
				if _, err := fmt.Sscan(string(list), &child); err == nil {
					if comm, _ := os.ReadFile(fmt.Sprintf("/proc/%d/comm", child)); string(comm) != "sleep\n" {
						child = 0 // it has not executed it yet
					}
				}
			}
			if err := rt.Pause(ctx); err != nil {
				t.Fatal(err)
			}
			if err := syscall.Kill(child, sig); err != nil {
				t.Fatal(err)
			}
			if _, err := os.Stat("/sys/fs/cgroup/cgroup.controllers"); err != nil { // cgroup v1
				if at := between([]int{b.Pid(), child}); at == nil || at.why != killedInstant || at.tid != child {
					t.Errorf("the instant is %+v", at)
				}
				if _, err := Dump(ctx, rt, DumpOptions{
					ImageDir: b.Images, WorkDir: b.Work, LeaveRunning: true,
				}); !Passing(err) || !strings.Contains(err.Error(), "is being ended and has not ended yet") {
					t.Errorf("the dump ends with %v", err)
				}
			}
			if _, err := rt.Settle(ctx, b.Pid()); err != nil {
				t.Fatal(err)
			}
			if at := between([]int{b.Pid()}); at != nil {
				t.Errorf("afterwards: %+v", at)
			}
			if p, err := proc.Read(child); err == nil && !p.Ended() {
				t.Errorf("the process is in state %c", p.State)
			}
			if _, err := Dump(ctx, rt, DumpOptions{
				ImageDir: b.Images, WorkDir: b.Work, LeaveRunning: true,
			}); err != nil {
				t.Error(err)
			}
		})
	}
}

// build compiles a program of testdata for a container.
func build(t *testing.T, path, program string) {
	t.Helper()
	cmd := exec.Command("go", "build", "-o", path, "./testdata/"+program)
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("go build: %v: %s", err, out)
	}
}

// A dump whose starter is killed goes on, and a lock on Hold stays held until
// it ends.
func TestHoldOutlivesTheStarter(t *testing.T) {
	if args := os.Getenv("AGENTBOX_TEST_DUMP"); args != "" {
		f := strings.Split(args, "\n") // binary, root, id, images, work, lock
		lock, err := os.Open(f[5])
		if err == nil {
			err = unix.Flock(int(lock.Fd()), unix.LOCK_EX)
		}
		if err == nil {
			_, err = Dump(context.Background(), Runtime{f[0], f[1], f[2]},
				DumpOptions{ImageDir: f[3], WorkDir: f[4], LeaveRunning: true, Hold: lock})
		}
		t.Log(err)
		return
	}
	ctx := context.Background()
	b, rt := start(t, criutest.Counter, nil)
	b.Until("it counts", func() bool { return b.Count() >= 2 })
	if err := rt.Pause(ctx); err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	lock, begun, goOn := filepath.Join(dir, "lock"), filepath.Join(dir, "begun"), filepath.Join(dir, "go")
	if err := os.WriteFile(lock, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	// A runtime that waits before it dumps, so that the kill lands in between.
	slow := filepath.Join(dir, "runc")
	script := fmt.Sprintf("#!/bin/sh\ncase \"$*\" in *checkpoint*) touch %s; while ! [ -e %s ]; do sleep 0.05; done;; esac\nexec %s \"$@\"\n", begun, goOn, rt.Binary)
	if err := os.WriteFile(slow, []byte(script), 0o755); err != nil {
		t.Fatal(err)
	}
	child := exec.Command(os.Args[0], "-test.run", "^TestHoldOutlivesTheStarter$")
	child.Env = append(os.Environ(), "AGENTBOX_TEST_DUMP="+
		strings.Join([]string{slow, rt.Root, rt.ID, b.Images, b.Work, lock}, "\n"))
	if err := child.Start(); err != nil {
		t.Fatal(err)
	}
	exists := func(path string) bool { _, err := os.Stat(path); return err == nil }
	b.Until("the dump has begun", func() bool { return exists(begun) })
	if err := child.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = child.Wait()
	f, err := os.Open(lock)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); !errors.Is(err, syscall.EWOULDBLOCK) {
		t.Fatalf("the lock is free while the dump runs: %v", err)
	}
	if err := os.WriteFile(goOn, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	start := time.Now()
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX); err != nil {
		t.Fatal(err)
	}
	t.Logf("the lock was free %v after the dump could go on", time.Since(start))
	log, err := os.ReadFile(filepath.Join(b.Work, "dump.log"))
	if err != nil || !bytes.Contains(log, []byte("Dumping finished successfully")) {
		t.Fatalf("the orphaned dump did not end well: %v", err)
	}
	if err := CheckImages(b.Images); err != nil {
		t.Fatal(err)
	}
	at := b.Count()
	if err := rt.Resume(ctx); err != nil {
		t.Fatal(err)
	}
	b.Until("it counts on", func() bool { return b.Count() > at })
}
