package freezer_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/criu/freezer"
	"github.com/agentbox/agentbox/internal/fault"
)

// hierarchies are those of this host that freeze: v1 alone, v2 alone, or both.
func hierarchies(t *testing.T) map[string]string {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Fatal("this test freezes real processes: run it as root")
	}
	found := map[string]string{}
	for version, dirs := range map[string][]string{
		"v1": {"/sys/fs/cgroup/freezer"}, "v2": {"/sys/fs/cgroup", "/sys/fs/cgroup/unified"},
	} {
		for _, dir := range dirs {
			var st unix.Statfs_t
			if err := unix.Statfs(dir, &st); err != nil {
				continue
			}
			if st.Type == unix.CGROUP2_SUPER_MAGIC && version == "v2" ||
				st.Type == unix.CGROUP_SUPER_MAGIC && version == "v1" {
				found[version] = dir
			}
		}
	}
	if len(found) == 0 {
		t.Fatal("no cgroup hierarchy freezes")
	}
	return found
}

// box is a process in a cgroup, and the record of it under a runtime's root.
type box struct {
	root, id, cgroup, file string
	cmd                    *exec.Cmd
}

const counts = `i=0; while :; do i=$((i+1)); echo $i > "$0"; done`

// newBox starts a shell script, which finds the name of a file in $0.
func newBox(t *testing.T, version, hierarchy, script string) *box {
	t.Helper()
	b := &box{root: t.TempDir(), id: fmt.Sprintf("abfreezer-%d-%d", os.Getpid(), time.Now().UnixNano())}
	b.file = filepath.Join(b.root, "file")
	b.cgroup = filepath.Join(hierarchy, b.id)
	must(t, os.Mkdir(b.cgroup, 0o755))
	b.cmd = exec.Command("sh", "-c", "read go; "+script, b.file)
	in, err := b.cmd.StdinPipe()
	must(t, err)
	must(t, b.cmd.Start())
	t.Cleanup(func() {
		for file, thawed := range map[string]string{"freezer.state": "THAWED", "cgroup.freeze": "0"} {
			_ = os.WriteFile(filepath.Join(b.cgroup, file), []byte(thawed), 0) // killed, a frozen one does not end
		}
		for range 1000 {
			data, _ := os.ReadFile(filepath.Join(b.cgroup, "cgroup.procs"))
			for _, pid := range strings.Fields(string(data)) {
				n, _ := strconv.Atoi(pid)
				_ = unix.Kill(n, unix.SIGKILL)
			}
			if len(data) == 0 {
				break
			}
			time.Sleep(time.Millisecond) // nothing tells that a cgroup is empty
		}
		_ = b.cmd.Wait()
		if err := os.Remove(b.cgroup); err != nil {
			t.Error(err)
		}
	})
	must(t, os.WriteFile(filepath.Join(b.cgroup, "cgroup.procs"), []byte(strconv.Itoa(b.cmd.Process.Pid)), 0))
	path := map[string]string{"freezer": b.cgroup}
	if version == "v2" {
		path = map[string]string{"": b.cgroup}
	}
	b.record(t, "state.json", map[string]any{
		"init_process_pid": b.cmd.Process.Pid, "init_process_start": b.started(t), "cgroup_paths": path,
	})
	must(t, in.Close())
	return b
}

func (b *box) started(t *testing.T) uint64 {
	t.Helper()
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", b.cmd.Process.Pid))
	must(t, err)
	n, err := strconv.ParseUint(strings.Fields(string(stat[strings.LastIndexByte(string(stat), ')'):]))[20], 10, 64)
	must(t, err)
	return n
}

func (b *box) record(t *testing.T, name string, record any) {
	t.Helper()
	data, err := json.Marshal(record)
	must(t, err)
	must(t, os.RemoveAll(filepath.Join(b.root, b.id)))
	must(t, os.Mkdir(filepath.Join(b.root, b.id), 0o700))
	must(t, os.WriteFile(filepath.Join(b.root, b.id, name), data, 0o600))
}

func (b *box) open(t *testing.T) freezer.Container {
	t.Helper()
	c, err := freezer.Open(b.root, b.id)
	must(t, err)
	return c
}

// goesOn waits until the script writes.
func (b *box) goesOn(t *testing.T) {
	t.Helper()
	must(t, os.RemoveAll(b.file))
	for end := time.Now().Add(2 * time.Minute); ; time.Sleep(time.Millisecond) {
		if _, err := os.Stat(b.file); err == nil {
			return
		}
		if time.Now().After(end) {
			t.Fatal("it does not go on")
		}
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func isFrozen(t *testing.T, c freezer.Container) bool {
	t.Helper()
	is, err := c.Frozen()
	must(t, err)
	return is
}

func isFreezing(t *testing.T, c freezer.Container) bool {
	t.Helper()
	is, err := c.Freezing()
	must(t, err)
	return is
}

func TestFreeze(t *testing.T) {
	ctx := context.Background()
	for version, hierarchy := range hierarchies(t) {
		t.Run(version, func(t *testing.T) {
			b := newBox(t, version, hierarchy, counts)
			c := b.open(t)
			b.goesOn(t)
			for range 3 {
				for range 2 { // freezing a frozen one is nil
					must(t, c.Freeze(ctx))
				}
				must(t, os.RemoveAll(b.file))
				time.Sleep(2 * time.Millisecond) // it would write a hundred times
				if _, err := os.Stat(b.file); err == nil || !isFrozen(t, c) || !isFreezing(t, c) {
					t.Fatal("it runs")
				}
				for range 2 { // and so is thawing one that runs
					must(t, c.Thaw())
				}
				b.goesOn(t)
				if isFreezing(t, c) {
					t.Fatal("it is to freeze")
				}
			}
			must(t, b.cmd.Process.Kill())
			_ = b.cmd.Wait()
			for verb, err := range map[string]error{"freeze": c.Freeze(ctx), "thaw": c.Thaw()} {
				if !errors.Is(err, fault.ErrState) {
					t.Errorf("%s one that has ended: %v", verb, err)
				}
			}
			if isFrozen(t, c) && version == "v1" {
				t.Error("the empty cgroup is left frozen")
			}
		})
	}
}

// Processes that fork all the time are caught, every one.
func TestFreezeForking(t *testing.T) {
	for version, hierarchy := range hierarchies(t) {
		t.Run(version, func(t *testing.T) {
			b := newBox(t, version, hierarchy, `while :; do (echo x > "$0"; true) & (true | true); wait; done`)
			c := b.open(t)
			b.goesOn(t)
			for range 30 {
				must(t, c.Freeze(context.Background()))
				if !isFrozen(t, c) {
					t.Fatal("it is not frozen")
				}
				must(t, c.Thaw())
			}
			b.goesOn(t)
		})
	}
}

// One that cannot be frozen, here because it waits for a filesystem that does
// not answer, is named, and the others go on.
func TestFreezeRefused(t *testing.T) {
	for version, hierarchy := range hierarchies(t) {
		t.Run(version, func(t *testing.T) {
			dir := t.TempDir()
			fuse, err := os.OpenFile("/dev/fuse", os.O_RDWR, 0)
			must(t, err)
			defer fuse.Close()
			must(t, unix.Mount("none", dir, "fuse", 0,
				fmt.Sprintf("fd=%d,rootmode=40000,user_id=0,group_id=0", fuse.Fd())))
			defer func() { must(t, unix.Unmount(dir, unix.MNT_FORCE|unix.MNT_DETACH)) }()
			// Both look up in one directory, and one waits for the other's
			// lock: that, unlike the answer, cannot be interrupted.
			b := newBox(t, version, hierarchy, "cat "+dir+"/a & touch "+dir+"/b & "+counts)
			c := b.open(t)
			b.goesOn(t)
			stuck(t, b)
			ctx, cancel := context.WithTimeout(context.Background(), 400*time.Millisecond)
			defer cancel()
			err = c.Freeze(ctx)
			if !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "state D") {
				t.Fatalf("Freeze: %v", err)
			}
			b.goesOn(t)
			state, _ := os.ReadFile(filepath.Join(b.cgroup, "freezer.state"))
			if version == "v2" {
				state, _ = os.ReadFile(filepath.Join(b.cgroup, "cgroup.freeze"))
			}
			if s := strings.TrimSpace(string(state)); s != "THAWED" && s != "0" {
				t.Fatalf("it is left %s", s)
			}
		})
	}
}

// stuck waits until the two wait for the filesystem.
func stuck(t *testing.T, b *box) {
	t.Helper()
	for end := time.Now().Add(2 * time.Minute); time.Now().Before(end); time.Sleep(time.Millisecond) {
		data, err := os.ReadFile(filepath.Join(b.cgroup, "cgroup.procs"))
		must(t, err)
		waiting := 0
		for _, pid := range strings.Fields(string(data)) {
			stat, _ := os.ReadFile("/proc/" + pid + "/stat")
			if s := string(stat); strings.Contains(s, "(cat) D") || strings.Contains(s, "(touch) D") {
				waiting++
			}
		}
		if waiting == 2 {
			return
		}
	}
	t.Fatal("they do not get to wait")
}

func TestOpen(t *testing.T) {
	for version, hierarchy := range hierarchies(t) {
		b := newBox(t, version, hierarchy, counts)
		if version == "v1" || hierarchy == "/sys/fs/cgroup" {
			b.record(t, "status", map[string]any{
				"pid": b.cmd.Process.Pid, "process-start-time": b.started(t), "cgroup-path": "/" + b.id,
			})
			c := b.open(t)
			must(t, c.Freeze(context.Background()))
			must(t, c.Thaw())
		}
		b.record(t, "state.json", map[string]any{
			"init_process_pid": b.cmd.Process.Pid, "init_process_start": 1,
			"cgroup_paths": map[string]string{"freezer": b.cgroup},
		})
		if err := b.open(t).Freeze(context.Background()); !errors.Is(err, fault.ErrState) {
			t.Errorf("a pid that is another's by now: %v", err)
		}
		b.record(t, "state.json", map[string]any{"init_process_pid": b.cmd.Process.Pid})
		if _, err := freezer.Open(b.root, b.id); !errors.Is(err, fault.ErrUnsupported) {
			t.Errorf("no cgroup: %v", err)
		}
		b.record(t, "state.json", "x")
		if _, err := freezer.Open(b.root, b.id); !errors.Is(err, fault.ErrCorrupt) {
			t.Errorf("damaged: %v", err)
		}
		b.record(t, "other", "x")
		if _, err := freezer.Open(b.root, b.id); !errors.Is(err, fault.ErrUnsupported) {
			t.Errorf("another runtime: %v", err)
		}
		if _, err := freezer.Open(b.root, "nosuch"); !errors.Is(err, fault.ErrNotFound) {
			t.Errorf("none: %v", err)
		}
		if _, err := freezer.Open(b.root, "../x"); !errors.Is(err, fault.ErrInvalid) {
			t.Errorf("no name: %v", err)
		}
	}
}

// The processes of a container are found while cgroups in it come and go, and
// where one of those is threaded.
func TestProcesses(t *testing.T) {
	for version, hierarchy := range hierarchies(t) {
		b := newBox(t, version, hierarchy, counts)
		if version == "v2" {
			threaded := filepath.Join(b.cgroup, "threaded")
			must(t, os.Mkdir(threaded, 0o755))
			defer os.Remove(threaded)
			must(t, os.WriteFile(filepath.Join(threaded, "cgroup.type"), []byte("threaded"), 0))
			if _, err := os.ReadFile(filepath.Join(threaded, "cgroup.procs")); !errors.Is(err, unix.EOPNOTSUPP) {
				t.Fatalf("processes of a threaded cgroup: %v", err)
			}
		}
		stop, stopped := make(chan struct{}), make(chan struct{})
		go func() {
			defer close(stopped)
			sub := filepath.Join(b.cgroup, "sub")
			for {
				_ = os.Mkdir(sub, 0o755)
				_ = os.Remove(sub)
				select {
				case <-stop:
					return
				default:
				}
			}
		}()
		c := b.open(t)
		want, err := os.ReadFile(filepath.Join(b.cgroup, "cgroup.procs"))
		must(t, err)
		for range 2000 {
			pids, err := c.Processes()
			if got := strings.Fields(strings.Trim(fmt.Sprint(pids), "[]")); err != nil ||
				strings.Join(got, " ") != strings.Join(strings.Fields(string(want)), " ") {
				t.Errorf("%s: %v, %v; want %s", version, pids, err, want)
				break
			}
		}
		close(stop)
		<-stopped
	}
}
