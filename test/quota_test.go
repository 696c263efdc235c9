package test

import (
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/agentbox/agentbox/overlay"
)

// quotaDisk returns a new root on a filesystem of its own with project quotas;
// empty: this kernel has none. That of `make test-vm` has to have them.
func quotaDisk(t *testing.T, kind string) (root string) {
	t.Helper()
	mkfs := []string{"mkfs.xfs", "-q"}
	if kind == "ext4" {
		mkfs = []string{"mkfs.ext4", "-q", "-O", "quota,project", "-E", "quotatype=prjquota"}
	}
	root, err := filesystem(t, 600, "loop,prjquota", mkfs...)
	if err != nil {
		if os.Getenv("AGENTBOX_VM") == "" {
			t.Logf("no project quotas here, see make test-vm: %v", err)
			return ""
		}
		t.Fatal(err)
	}
	return root
}

// stored is a box whose sandboxes the kernel holds to --storage-size.
type stored struct{ *box }

// writes has a sandbox write so many megabytes to a file, which there is to be room for.
func (b stored) writes(name, file string, mb int, as ...string) {
	b.Helper()
	b.ok(append(append([]string{"exec"}, as...), name, "dd", "if=/dev/zero", "of="+file, "bs=1M",
		"count="+strconv.Itoa(mb))...)
}

// refuses is writes for what does not fit.
func (b stored) refuses(name, file string, mb int, as ...string) {
	b.Helper()
	said := b.fails(1, append(append([]string{"exec"}, as...), name, "dd", "if=/dev/zero", "of="+file, "bs=1M",
		"count="+strconv.Itoa(mb))...)
	if !strings.Contains(said, "quota exceeded") && !strings.Contains(said, "No space left") {
		b.Errorf("it was told %q", said)
	}
	equal(b.box, "the sandbox that was refused more", b.inspect(name).Status, "running")
}

func (b stored) project(name string) overlay.Project {
	b.Helper()
	p, ours, err := overlay.ProjectOf(b.inspect(name).Upperdir)
	if err != nil || !ours {
		b.Fatalf("the project of %s: %v, %v", name, ours, err)
	}
	return p
}

// hit is limit_hits.storage.
type hit struct {
	Used, Limit int64
	Refused     bool
}

func (b stored) hit(name string) *hit {
	b.Helper()
	list := decode[[]struct {
		Hits struct{ Storage *hit } `json:"limit_hits"`
	}](b.box, b.ok("inspect", name))
	return list[0].Hits.Storage
}

func (b stored) doctor() string {
	b.Helper()
	r := b.try(nil, "doctor", "--format", "json") // something else may be wrong with this host
	report := decode[struct {
		Checks []struct{ Name, Detail string }
	}](b.box, r.out)
	for _, c := range report.Checks {
		if c.Name == "quota" {
			return c.Detail
		}
	}
	b.Fatalf("no check of it: %s", r)
	return ""
}

// TestStorageQuota holds sandboxes to --storage-size by project quotas: what is
// more is refused, also after restores, forks and a kill, with a user namespace and
// without. Where the kernel has none the doctor says so, and the supervisor holds them.
func TestStorageQuota(t *testing.T) {
	for _, kind := range []string{"ext4", "xfs"} {
		for _, userns := range []string{"auto", "host"} {
			t.Run(kind+"-"+userns, func(t *testing.T) {
				t.Parallel()
				root := quotaDisk(t, kind)
				if root == "" {
					b := stored{newBox(t)}
					if said := b.doctor(); (overlay.ProjectQuota(b.root) == nil) == strings.HasPrefix(said,
						"none at ") {
						t.Errorf("the doctor says %q", said)
					}
					return
				}
				stored{boxAt(t, root)}.quota(userns)
			})
		}
	}
}

func (b stored) quota(userns string) {
	b.Helper()
	const mb = 1 << 20
	if said := b.doctor(); !strings.Contains(said, "the kernel holds sandboxes") {
		b.Errorf("the doctor says %q", said)
	}
	e := newEscapes(b.box)
	e.up("s", "--userns", userns, "--storage-size", "20m", "busybox", "sh", "-c", "while :; do sleep 1; done")
	b.sh("s", "mkdir -m 777 /d; ln -s one /d/link; mkfifo /d/fifo")
	b.writes("s", "/d/one", 12, "-u", "1000:1000")
	one := b.checkpoint("s")
	b.sh("s", "rm /d/one")
	b.writes("s", "/d/two", 12)
	b.refuses("s", "/d/three", 12, "-u", "1000:1000")
	b.eventually("it is known that more was refused", func() bool { return b.hit("s") != nil })
	if h := b.hit("s"); !h.Refused || h.Limit != 20*mb || h.Used < 19*mb || h.Used > 20*mb {
		b.Errorf("the hit of the limit: %+v", h)
	}
	if said := b.ok("events", "--type", "storage-limit", "s"); !strings.Contains(said,
		"more is refused: its files take") {
		b.Errorf("the events: %q", said)
	}

	// It is full, and a restore lays out what the checkpoint has beside that.
	asItWas := func(name string) {
		b.Helper()
		equal(b.box, "its files", b.sh(name, "cd /d; ls; stat -c %s one; readlink link"),
			"fifo\nlink\none\n12582912\none")
		b.refuses(name, "/d/three", 12)
		b.sh(name, "rm /d/three")
	}
	b.ok("restore", "s", one)
	asItWas("s")

	b.ok("update", "--storage-size", "40m", "s")
	b.writes("s", "/d/four", 12)
	b.ok("update", "--storage-size", "20m", "s")
	b.refuses("s", "/d/five", 1)
	b.ok("update", "--storage-size", "none", "s")
	b.writes("s", "/d/five", 12)
	b.ok("stop", "-t", "0", "s")
	b.ok("update", "--storage-size", "20m", "s")
	b.ok("restore", "--no-undo", "s", one) // of what stands still: what goes is moved aside
	asItWas("s")

	// A restore that was killed has lifted the limit.
	b.writes("s", "/d/six", 6)
	if r := b.try(failpoint("restore.after-layout", "kill"), "restore", "s", one); !r.killed {
		b.Fatalf("not killed: %s", r)
	}
	b.ok("recover")
	b.eventually("the limit is set again", func() bool { return b.project("s").Limit == 20*mb })
	b.refuses("s", "/d/seven", 12)
	b.ok("restore", "s", one)
	asItWas("s")

	// Others have a project of their own.
	b.ok("fork", "--files-only", "--name", "f", "s@"+one)
	asItWas("f")
	b.sh("f", "rm /d/one")
	if f, s := b.project("f"), b.project("s"); f.Used > mb || s.Used < 12*mb || f.Limit != 20*mb {
		b.Errorf("the fork takes %+v, its origin %+v", f, s)
	}
	b.ok("rm", "-f", "f", "s")
	b.ok("restore", "s", one)
	asItWas("s")

	tried := report(b.box, b.ok("exec", "s", "/escape", "project", "/d/one"))
	want := map[string]string{"auto": "EINVAL", "host": "done"}[userns]
	for _, what := range []string{"set the project", "leave the project"} {
		equal(b.box, what, tried[what], want)
	}
	if userns == "host" {
		b.try(nil, "exec", "s", "dd", "if=/dev/zero", "of=/d/out", "bs=1M", "count=100")
		b.eventually("what has left its project is killed", func() bool { return b.inspect("s").Status == "exited" })
		if h := b.hit("s"); h == nil || h.Refused || h.Limit != 20*mb || h.Used <= 40*mb {
			b.Errorf("the hit of the limit: %+v", h)
		}
		b.ok("restore", "s", one)
		equal(b.box, "its files", b.sh("s", "cd /d; ls; stat -c %s one; readlink link"),
			"fifo\nlink\none\n12582912\none")
	}
	b.ok("rm", "-f", "s")
	b.free()
}

// free proves that no project of ours takes anything, or has a limit.
func (b stored) free() {
	b.Helper()
	out, err := exec.Command("repquota", "-P", "-n", "-v", filepath.Dir(b.root)).CombinedOutput()
	if err != nil {
		b.Fatalf("repquota: %v: %s", err, out)
	}
	for line := range strings.Lines(string(out)) {
		f := strings.Fields(line)
		if len(f) < 8 || !strings.HasPrefix(f[0], "#") {
			continue
		}
		id, err := strconv.ParseUint(f[0][1:], 10, 32)
		if err == nil && id >= 1<<30 && strings.Join(f[2:8], "") != "000000" {
			b.Errorf("a project is left: %s", line)
		}
	}
}
