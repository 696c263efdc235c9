package test

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/runtime"
)

// nothingFound compares the records with what there is while commands are at work.
func (b *box) nothingFound(when string) {
	b.Helper()
	report := decode[runtime.ReconcileReport](b, b.ok("recover", "--format", "json"))
	if len(report.Findings) > 0 {
		b.Errorf("%s: %+v", when, report.Findings)
	}
}

// A comparison touches nothing that a command is about to make, or to take away, however far that
// command has come, and the command ends as if there had been none.
func TestReconcileLeavesWorkAlone(t *testing.T) {
	t.Parallel()
	b := memoryBox(t)
	b.start("base", "--network", "none", "busybox", "sh", "-c", counter)
	b.reaches("base", 3)
	ck := b.checkpoint("base")
	archive := filepath.Join(t.TempDir(), "c.tar")
	b.ok("checkpoint", "export", "-o", archive, ck)
	n := 0
	for _, at := range []struct{ verb, point string }{
		{"run", "create.before-row"}, {"run", "create.after-row"}, {"run", "oci.create.after-dirs"},
		{"run", "create.after-backend"},
		{"run", "oci.start.after-mount"}, {"run", "oci.start.after-network"}, {"run", "oci.start.after-conmon"},
		{"run", "start.after-backend"},
		{"fork", "fork.before-reseed"}, {"fork", "restore.after-stage"}, {"fork", "oci.start.after-conmon"},
		{"fork", "fork.before-thaw"},
		{"checkpoint", "checkpoint.after-freeze"}, {"checkpoint", "store.commit.after-rename"},
		{"restore", "restore.after-layout"}, {"restore", "restore.after-stop"}, {"restore", "restore.after-apply"},
		{"restore", "restore.after-stage"},
		{"rm", "oci.remove.after-stop"}, {"rm", "remove.after-backend"}, {"rm", "remove.after-row"},
		{"rm", "store.remove.before-tree"},
		{"recreate", "restore.after-stage"}, {"recreate", "create.after-row"},
		{"import", "portable.import.after-put"},
	} {
		n++
		name := fmt.Sprintf("s%d", n)
		var args []string
		switch at.verb {
		case "run":
			b.own(name)
			args = []string{"run", "-d", "--name", name, "--network", "bridge", "busybox", "sh", "-c", counter}
		case "fork":
			b.own(name)
			args = []string{"fork", "--name", name, "base@" + ck}
		case "rm":
			b.start(name, "--network", "bridge", "busybox", "true")
			b.eventually("it has ended", func() bool { return b.inspect(name).Status == "exited" })
			b.eventually("nothing works for it", func() bool {
				return len(matching(processesOf(b.root), "conmon", b.inspect(name).ID)) == 0
			})
			b.checkpoint("--files-only", name)
			args = []string{"rm", "--checkpoints", name}
		case "recreate":
			b.start(name, "--network", "none", "busybox", "sh", "-c", counter)
			b.reaches(name, 1)
			b.checkpoint(name)
			b.ok("rm", "-f", name)
			b.eventually("nothing works for it", func() bool {
				return len(matching(processesOf(b.root), "conmon")) <= n
			})
			args = []string{"restore", name}
		case "import":
			args = []string{"checkpoint", "import", archive}
			b.ok("checkpoint", "rm", ck)
		default:
			name = "base"
			args = []string{at.verb, "base"}
		}
		release := b.held(at.point, args...)
		b.nothingFound(at.verb + " at " + at.point)
		if err := release(); err != nil {
			t.Errorf("%s, which stood at %s: %v", at.verb, at.point, err)
		}
		switch at.verb {
		case "rm":
			if _, there := b.find(name); there {
				t.Errorf("%s is there after %s stood at %s", name, at.verb, at.point)
			}
		case "import":
			b.ok("verify", ck)
		default:
			equal(b, at.verb+" at "+at.point, b.inspect(name).Status, "running")
			b.reaches(name, 1)
			if name != "base" {
				b.ok("rm", "-f", name)
			}
		}
	}
	b.ok("verify", "--all", "--read-data")
	// Its root filesystem is mounted while a command copies out of it, and no command's lock says
	// so.
	b.start("stopped", "--network", "none", "busybox", "sh", "-c", "dd if=/dev/zero of=/big bs=1M count=8 2>/dev/null")
	b.eventually("it has ended", func() bool { return b.inspect("stopped").Status == "exited" })
	b.eventually("nothing works for it", func() bool {
		return len(matching(processesOf(b.root), "conmon", b.inspect("stopped").ID)) == 0
	})
	cp := b.command(t.Context(), "cp", "stopped:/big", "-")
	out, err := cp.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cp.Start(); err != nil {
		t.Fatal(err)
	}
	merged := filepath.Join(b.root, "sandboxes", b.inspect("stopped").ID, "merged")
	b.eventually("it is mounted", func() bool { return len(matching(mountsUnder(b.root), merged)) > 0 })
	b.nothingFound("cp out of a stopped one")
	got, err := io.Copy(io.Discard, out)
	if err := cp.Wait(); err != nil || got < 8<<20 {
		t.Errorf("cp: %d bytes, %v", got, err)
	}
	if err != nil {
		t.Error(err)
	}
}

// matching are those lines that have all the words.
func matching(lines []string, words ...string) (found []string) {
	for _, l := range lines {
		all := true
		for _, w := range words {
			all = all && strings.Contains(l, w)
		}
		if all {
			found = append(found, l)
		}
	}
	return found
}

// What another backend has on the same root, and state.db does not know, is not an orphan for
// this one.
func TestReconcileLeavesOtherBackendsAlone(t *testing.T) {
	t.Parallel()
	b := memoryBox(t)
	b.start("a", "--network", "none", "busybox", "sleep", "1000")
	id, theirs := b.inspect("a").ID, strings.Repeat("5c", 16)
	if err := os.MkdirAll(filepath.Join(b.root, "containerd", "sandboxes", theirs), 0o700); err != nil {
		t.Fatal(err)
	}
	groups, _ := filepath.Glob("/sys/fs/cgroup/*/agentbox/" + id + "-*")
	unified, _ := filepath.Glob("/sys/fs/cgroup/agentbox/" + id + "-*")
	if groups = append(groups, unified...); len(groups) == 0 {
		t.Fatal("no cgroups")
	}
	group := strings.Replace(groups[0], id, theirs, 1)
	if err := os.Mkdir(group, 0o755); err != nil {
		t.Fatal(err)
	}
	defer unix.Rmdir(group)
	sleep := exec.Command("sleep", "1000")
	if err := sleep.Start(); err != nil {
		t.Fatal(err)
	}
	defer sleep.Wait()
	defer sleep.Process.Kill()
	if err := os.WriteFile(filepath.Join(group, "cgroup.procs"),
		[]byte(strconv.Itoa(sleep.Process.Pid)), 0); err != nil {
		t.Fatal(err)
	}
	b.nothingFound("another backend's sandbox")
	if stat := b.read(fmt.Sprintf("/proc/%d/stat", sleep.Process.Pid)); strings.Contains(stat, ") Z") {
		t.Error("its process was ended")
	}
}

// A container that is not there any more may be on a disk that is not mounted. The service says
// so, once, and repairs nothing unless asked.
func TestReconcileUnasked(t *testing.T) {
	t.Parallel()
	b := memoryBox(t)
	b.start("s", "--network", "none", "busybox", "true")
	b.eventually("it has ended", func() bool { return b.inspect("s").Status == "exited" })
	id := b.inspect("s").ID
	b.checkpoint("--files-only", "s")
	dir := filepath.Join(b.root, "sandboxes", id)
	if err := os.Rename(dir, dir+".elsewhere"); err != nil {
		t.Fatal(err)
	}
	b.serveArgs = []string{"--reconcile", "50ms"}
	_, socket := b.serve()
	client := http.Client{Transport: &http.Transport{
		DisableKeepAlives: true, DialContext: func(context.Context, string, string) (net.Conn, error) {
			return net.Dial("unix", socket)
		},
	}}
	figures := func() string {
		resp, err := client.Get("http://agentbox/metrics")
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		text, err := io.ReadAll(resp.Body)
		if err != nil {
			t.Fatal(err)
		}
		return string(text)
	}
	one := `agentbox_leaks_found_total{kind="gone"} 1`
	b.eventually("it is found", func() bool { return strings.Contains(figures(), one) })
	// Many looks later it is still one, and there.
	sum := sha256.Sum256([]byte("later"))
	stray := filepath.Join(b.root, "sandboxes", hex.EncodeToString(sum[:16]), "upper")
	if err := os.MkdirAll(stray, 0o700); err != nil {
		t.Fatal(err)
	}
	b.eventually("it looks again", func() bool { _, err := os.Stat(stray); return err != nil })
	if text := figures(); !strings.Contains(text, one) {
		t.Errorf("%s", text)
	}
	if err := os.Rename(dir+".elsewhere", dir); err != nil {
		t.Fatal(err)
	}
	b.ok("start", "s")
	b.ok("rm", "-f", "s")
}
