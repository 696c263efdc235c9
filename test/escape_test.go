package test

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/thorough"
)

// The escape suite: testdata/escape tries, as root, the published escapes from a container. Races
// with the file tools of `agentbox mcp` are in TestMCPRace.

// escapes is a root for it, with a file and a process of the host to reach for.
type escapes struct {
	*box
	program string // on the host; /escape inside
	dir     string // of the host, with one file
	witness int
}

// Data of the host, never to be seen inside.
const ofTheHost = "of the host"

func newEscapes(b *box) escapes {
	b.Helper()
	e := escapes{box: b, program: filepath.Join(programRoot(b.T, "escape"), "escape"), dir: b.T.TempDir()}
	if err := os.WriteFile(e.file(), []byte(ofTheHost), 0o644); err != nil {
		b.Fatal(err)
	}
	witness := exec.Command("sleep", "1000")
	if err := witness.Start(); err != nil {
		b.Fatal(err)
	}
	e.witness = witness.Process.Pid
	before := hostFacts(b)
	b.Cleanup(func() {
		b.Helper()
		if err := unix.Kill(e.witness, 0); err != nil {
			b.Errorf("the process of the host: %v", err)
		}
		_ = witness.Process.Kill()
		_ = witness.Wait()
		if after := hostFacts(b); after != before {
			b.Errorf("the host was %s and is %s", before, after)
		}
		e.untouched()
	})
	return e
}

func (e escapes) file() string { return filepath.Join(e.dir, "f") }

// untouched fails unless the directory of the host is as it was.
func (e escapes) untouched() {
	e.Helper()
	names, err := os.ReadDir(e.dir)
	if err != nil || len(names) != 1 || e.read(e.file()) != ofTheHost {
		e.Errorf("the host's directory now holds %v: %q (%v)", names, e.read(e.file()), err)
	}
}

// hostFacts is what an escape might have changed of the host.
func hostFacts(b *box) string {
	b.Helper()
	host, _ := os.Hostname()
	facts := host
	for _, path := range []string{
		"/proc/sys/kernel/core_pattern", "/proc/sys/kernel/modprobe", "/proc/sys/vm/panic_on_oom",
		"/sys/kernel/uevent_helper", "/sys/fs/cgroup/memory/release_agent", "/proc/self/mountinfo",
	} {
		text, _ := os.ReadFile(path)
		if path == "/proc/self/mountinfo" { // other tests mount what is theirs
			text, _, _ = bytes.Cut(text, []byte("\n"))
		}
		facts += fmt.Sprintf(" %s=%s", path, bytes.TrimSpace(text))
	}
	runc, err := exec.LookPath("runc")
	if err != nil {
		b.Fatal(err)
	}
	for _, program := range []string{runc, filepath.Join(bin, "agentbox-runtime"), filepath.Join(bin, "agentbox")} {
		f, err := os.Open(program)
		if err != nil {
			b.Fatal(err)
		}
		sum := sha256.New()
		_, err = io.Copy(sum, f)
		f.Close()
		if err != nil {
			b.Fatal(err)
		}
		facts += fmt.Sprintf(" %s=%.4x", program, sum.Sum(nil))
	}
	return facts
}

// up starts a sandbox that has the program.
func (e escapes) up(name string, args ...string) string {
	e.Helper()
	return e.start(name, append([]string{"--network", "none", "-v", e.program + ":/escape:ro"}, args...)...)
}

// report reads the lines that the program prints.
func report(b *box, text string) map[string]string {
	b.Helper()
	got := map[string]string{}
	for line := range strings.Lines(text) {
		what, result, ok := strings.Cut(strings.TrimRight(line, "\n"), "\t")
		if !ok || got[what] != "" {
			b.Fatalf("a line of the report: %q", line)
		}
		got[what] = result
	}
	return got
}

// refusals are what the tries end with that do not end with EPERM. A file that
// not every kernel has may be missing instead.
var refusals = map[string]string{
	"clone3":            "ENOSYS", // so that libraries fall back to clone, whose flags a filter sees
	"io_uring_setup":    "ENOSYS",
	"io_uring_enter":    "ENOSYS",
	"io_uring_register": "ENOSYS",

	"signal a process of the host":   "ESRCH",
	"trace a process of the host":    "ESRCH",
	"read a process of the host":     "ESRCH",
	"pidfd of a process of the host": "ESRCH",

	"a file of the host":                        "ENOENT",
	"a file of the host by /proc/1/root":        "ENOENT",
	"a file of the host by /proc/1/cwd":         "ENOENT",
	"a file of the host by a leaked descriptor": "ENOENT",
	"a file of the host out of a chroot":        "ENOENT EPERM",

	"/dev/mem":          "ENOENT",
	"/dev/kmsg":         "ENOENT",
	"read /proc/kmsg":   "EPERM EACCES", // the latter in a user namespace
	"/dev/fuse":         "ENOENT",
	"/dev/kvm":          "ENOENT",
	"/dev/loop-control": "ENOENT",
	"TIOCSTI on stdin":  "ENOTTY",

	"write /proc/sys/kernel/core_pattern":     "EROFS EACCES",
	"write /proc/sys/kernel/modprobe":         "EROFS EACCES ENOENT",
	"write /proc/sys/vm/panic_on_oom":         "EROFS EACCES",
	"write /proc/sys/fs/binfmt_misc/register": "EROFS EACCES ENOENT",
	"write /proc/sysrq-trigger":               "EROFS EACCES ENOENT",
	"write /sys/kernel/uevent_helper":         "EROFS EACCES ENOENT",
	"write /sys/kernel/mm/ksm/run":            "EROFS EACCES ENOENT",
	"write /sys/fs/cgroup/release_agent":      "EROFS EACCES ENOENT",
	"oom_score_adj below 0":                   "EACCES",
	"read /proc/kcore":                        "EOF ENOENT EACCES", // the last by AppArmor's profile
	"read /proc/keys":                         "EOF ENOENT",
	"read /proc/timer_list":                   "EOF ENOENT",
	"read /proc/sched_debug":                  "EOF ENOENT",
	"files of /sys that open for writing":     "none",
	"files of /proc that open for writing":    "none",
	"open the host's disk":                    "EPERM EACCES ENOENT",
	"open a device node of memory":            "EPERM EACCES ENOENT",
}

// The sandbox may have what these need; it reaches no further than its network namespace, and a
// node that cannot be opened.
var granted = map[string]int{
	"mknod of the host's disk": unix.CAP_MKNOD, "raw socket": unix.CAP_NET_RAW, "packet socket": unix.CAP_NET_RAW,
}

func TestEscape(t *testing.T) {
	t.Parallel()
	e := newEscapes(memoryBox(t))
	var st unix.Stat_t
	if err := unix.Stat("/", &st); err != nil {
		t.Fatal(err)
	}
	first := report(e.box, e.try(nil, "run", "--rm", "--network", "none", "-v", e.program+":/escape:ro", "busybox",
		"/escape", "list").out)
	equal(e.box, "what the first process has open of others", first["open files"], "")
	e.up("s", "busybox", "sleep", "1000")
	list := report(e.box, e.try(nil, "exec", "s", "/escape", "list").out)
	caps, err := strconv.ParseUint(list["CapBnd"], 16, 64)
	if err != nil {
		t.Fatal(err)
	}
	equal(e.box, "its seccomp mode", list["Seccomp"], "2")
	equal(e.box, "what it has open of others", list["open files"], "")
	equal(e.box, "its devices", list["devices"], "/dev/full /dev/null /dev/random /dev/tty /dev/urandom /dev/zero")
	for _, ns := range []string{"ipc", "mnt", "net", "pid", "uts"} {
		if host, err := os.Readlink("/proc/self/ns/" + ns); err != nil || host == list["ns "+ns] {
			t.Errorf("its %s namespace is the host's, %s (%v)", ns, host, err)
		}
	}
	got := report(e.box, e.ok("exec", "s", "/escape", "try", strconv.Itoa(e.witness), fmt.Sprint(unix.Major(st.Dev)),
		fmt.Sprint(unix.Minor(st.Dev)), e.file()))
	for what, result := range got {
		want := "EPERM"
		if w, ok := refusals[what]; ok {
			want = w
		}
		if c, ok := granted[what]; ok && caps&(1<<c) != 0 {
			want = "done"
		}
		if !slices.Contains(strings.Fields(want), result) {
			t.Errorf("%s: %s, want %s", what, result, want)
		}
	}
	for what := range refusals {
		if got[what] == "" {
			t.Errorf("%s was not tried", what)
		}
	}
	if on, _ := os.ReadFile("/sys/module/apparmor/parameters/enabled"); bytes.HasPrefix(on, []byte("Y")) {
		equal(e.box, "its AppArmor profile", e.ok("exec", "s", "cat", "/proc/self/attr/current"),
			"agentbox-default (enforce)")
		equal(e.box, "what only the profile denies", got["read /proc/kcore"], "EACCES")
	}
	for _, n := range []int{3, 7, 8} { // CVE-2024-21626
		dir := fmt.Sprintf("/proc/self/fd/%d", n)
		for _, args := range [][]string{{"run", "--rm", "-w", dir, "busybox", "ls"}, {"exec", "-w", dir, "s", "ls"}} {
			if r := e.try(nil, args...); r.code == 0 || r.out != "" ||
				!strings.Contains(r.err, "leads to the descriptors of a process") {
				t.Errorf("%s", r)
			}
		}
	}
	equal(e.box, "a new sandbox", e.ok("run", "--rm", "--network", "none", "busybox", "echo", "hi"), "hi")
}

// A program of the host that comes into the sandbox, as runc does, cannot be
// overwritten from there (CVE-2019-5736).
func TestEscapeRuntime(t *testing.T) {
	t.Parallel()
	e := newEscapes(memoryBox(t))
	e.up("s", "busybox", "/escape", "runtime")
	e.eventually("a program of the host was seen inside", func() bool {
		for range 3 {
			e.try(nil, "exec", "s", "/proc/self/exe")
			e.ok("exec", "s", "true")
		}
		return strings.TrimSpace(e.ok("logs", "s")) != ""
	})
	for line := range strings.Lines(e.ok("logs", "s")) {
		if program, result, _ := strings.Cut(strings.TrimSpace(line), "\t"); result == "done" {
			t.Errorf("%s was opened for writing", program)
		}
	}
}

// Programs without io_uring go on without it, and can be checkpointed.
func TestEscapeRings(t *testing.T) {
	t.Parallel()
	e := newEscapes(memoryBox(t))
	e.up("s", "busybox", "/escape", "rings")
	n := e.reaches("s", 3)
	e.checkpoint("s")
	e.ok("restore", "s")
	e.reaches("s", n+3)
	equal(e.box, "what it said", e.ok("logs", "s"), "io_uring_setup\tENOSYS")
}

// Hostile archives and hostile processes do not have `agentbox cp` and imports
// touch the host.
func TestEscapeCopies(t *testing.T) {
	t.Parallel()
	e := newEscapes(memoryBox(t))
	e.up("s", "busybox", "sh", "-c",
		fmt.Sprintf("mkdir -p /work/d; echo inside > /work/d/f; ln -s ../../../../../../..%s /work/l; exec /escape swap /work/d /work/l", e.dir))
	in := filepath.Join(e.T.TempDir(), "in")
	if err := os.WriteFile(in, []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	inside, refused := 0, 0
	for deadline := time.Now().Add(20 * time.Second * patience); (inside < 4 || refused < 4) &&
		time.Now().Before(deadline); {
		for _, args := range [][]string{
			{"cp", in, "s:/work/d/new"}, {"cp", "s:/work/d", "-"}, {"cp", "s:/work/d/f", "-"},
		} {
			r := e.try(nil, args...)
			switch {
			case strings.Contains(r.out, ofTheHost):
				t.Fatalf("escaped: %s", r)
			case r.code != 0:
				refused++
			case strings.Contains(r.out, "inside"):
				inside++
			}
		}
		e.untouched()
	}
	if inside == 0 || refused == 0 {
		t.Errorf("no race happened: %d inside, %d refused", inside, refused)
	}
	e.ok("stop", "-t", "0", "s")
	var bomb bytes.Buffer
	w := tar.NewWriter(&bomb)
	for _, h := range []tar.Header{
		{Name: "out", Typeflag: tar.TypeSymlink, Linkname: e.dir},
		{Name: "out/evil", Typeflag: tar.TypeReg, Mode: 0o644},
		{Name: "../../../../../../.." + e.dir + "/evil", Typeflag: tar.TypeReg, Mode: 0o644},
		{Name: e.dir + "/evil", Typeflag: tar.TypeReg, Mode: 0o644},
		{Name: "hard", Typeflag: tar.TypeLink, Linkname: e.file()}, {Name: "hard", Typeflag: tar.TypeReg, Mode: 0o644},
	} {
		if err := w.WriteHeader(&h); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	e.input(bomb.Bytes(), nil, "cp", "-", "s:/work")
	e.untouched()
	file := filepath.Join(e.T.TempDir(), "bomb.tar")
	if err := os.WriteFile(file, bomb.Bytes(), 0o600); err != nil {
		t.Fatal(err)
	}
	e.try(nil, "image", "import", "bomb", file)
	e.try(nil, "checkpoint", "import", file)
	e.untouched()
	// Links to links: 2^40 names, if all were followed.
	e.ok("start", "s")
	e.ok("exec", "s", "sh", "-c", "mkdir /bomb; cd /bomb; i=0; while [ $i -lt 40 ]; do mkdir $i; ln -s ../$((i+1)) $i/a; ln -s ../$((i+1)) $i/b; i=$((i+1)); done")
	e.ok("cp", "s:/bomb", filepath.Join(e.T.TempDir(), "bomb"))
	e.checkpoint("--files-only", "s")
	e.ok("diff", "s")
}

// pids is how many processes a sandbox has, as its cgroup counts them.
func (b *box) pids(name string) int {
	b.Helper()
	id := b.inspect(name).ID
	for _, pattern := range []string{"/sys/fs/cgroup/pids/agentbox/", "/sys/fs/cgroup/agentbox/"} {
		files, _ := filepath.Glob(pattern + id + "*/pids.current")
		for _, f := range files {
			n, err := strconv.Atoi(b.read(f))
			if err != nil {
				b.Fatal(err)
			}
			return n
		}
	}
	b.Fatal("no cgroup counts its processes")
	return 0
}

// A program that takes all there is takes it from its sandbox only.
func TestEscapeBombs(t *testing.T) {
	t.Parallel()
	b := memoryBox(t)
	e := newEscapes(b)
	// In a shell of its own: the first process must not fail to fork, and end.
	e.up("forks", "--pids-limit", "64", "busybox", "sh", "-c", "(b() { b | b & }; b) & exec sleep 1000")
	e.eventually("the processes are at their limit", func() bool { return e.pids("forks") >= 60 })
	if n := e.pids("forks"); n > 64 {
		t.Errorf("it has %d processes", n)
	}
	e.up("memory", "--memory", "64m", "busybox", "/escape", "memory")
	e.up("files", "busybox", "/escape", "files")
	e.up("output", "busybox", "sh", "-c",
		"yes 012345678901234567890123456789012345678901234567890123456789 | head -c 70000000")
	equal(b, "a sandbox beside them", e.ok("run", "--rm", "--network", "none", "busybox", "echo", "hi"), "hi")

	begun := time.Now()
	e.ok("rm", "-f", "forks")
	if took := time.Since(begun); took > 20*time.Second {
		t.Errorf("the end of the one with all the processes took %v", took)
	}
	equal(b, "the exit code of the one that took all memory", e.ok("wait", "memory"), "137")
	equal(b, "the exit code of the one that opened all it could", e.ok("wait", "files"), "0")
	if said := e.ok("logs", "files"); !strings.HasPrefix(said, "files\tEMFILE") {
		t.Errorf("it was told %q", said)
	}
	equal(b, "the exit code of the one that printed all it could", e.ok("wait", "output"), "0")
	if st, err := os.Stat(filepath.Join(b.root, "sandboxes", e.inspect("output").ID,
		"log")); err != nil || st.Size() > 65<<20 {
		t.Errorf("its log has %d bytes (%v)", st.Size(), err)
	}
}

// A sandbox that fills the disk is told so, and can be seen to and removed.
// Where --storage-size is given the limit is its own, not the disk's.
func TestEscapeDisk(t *testing.T) {
	if !thorough.Asked() {
		t.Skip("a monitor that cannot write down an exit is waited for 10 s: make test-long")
	}
	t.Parallel()
	root, err := os.MkdirTemp("/dev/shm", "ab")
	if err != nil {
		t.Fatal(err)
	}
	run, err := os.MkdirTemp("/dev/shm", "ab")
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("tmpfs", root, "tmpfs", 0, "mode=0700,size=48m"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(root, 0); err != nil {
			t.Error(err)
		}
		if err := errors.Join(os.Remove(root), os.RemoveAll(run)); err != nil {
			t.Error(err)
		}
	})
	// As on a host, what is not to last is elsewhere.
	transient := root + "/r/run"
	if err := errors.Join(os.MkdirAll(transient, 0o700), unix.Mount(run, transient, "", unix.MS_BIND, "")); err != nil {
		t.Fatal(err)
	}
	b := boxAt(t, root+"/r")
	t.Cleanup(func() { // before the root is looked through
		b.try(nil, "rm", "-f", "s") // it may be gone
		if err := unix.Unmount(transient, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	b.start("s", "--network", "none", "busybox", "sleep", "1000")
	if said := b.fails(1, "exec", "s", "dd", "if=/dev/zero", "of=/fill", "bs=1M"); !strings.Contains(said,
		"No space left on device") {
		t.Errorf("it was told %q", said)
	}
	equal(b, "its state", b.inspect("s").Status, "running")
	if r := b.try(nil, "checkpoint", "--files-only", "s"); r.code == 0 || !strings.Contains(r.err, "space") {
		t.Errorf("a checkpoint without space: %s", r)
	}
	b.ok("rm", "-f", "s")
	equal(b, "a new sandbox", b.ok("run", "--rm", "--network", "none", "busybox", "echo", "hi"), "hi")
}
