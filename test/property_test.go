package test

import (
	"bytes"
	"flag"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"pgregory.net/rapid"

	"github.com/agentbox/agentbox/internal/thorough"
)

// propertyTime is how long TestProperty draws new histories.
func propertyTime() time.Duration {
	if thorough.Asked() {
		return 40 * time.Second
	}
	return 20 * time.Second
}

// state is a sandbox's files: what its upperdir holds, whiteouts and opaque
// marks included, and what a process in it would see.
type state struct{ upper, seen map[string]string }

// past is a checkpoint of which the test knows what must be in it.
type past struct {
	id string
	state
}

// history is one random life of the sandbox "s", which is never started: its
// files are changed through an overlay that the test mounts itself.
type history struct {
	*box
	r       *rapid.T
	id      string // of "s"
	lower   string
	mount   string
	now     state
	past    []past
	undo    *state // what restore --undo leads to, if that is known
	counter int
}

// TestProperty has random changes to a real overlay, with checkpoints,
// restores, their undoing, forks, prunes, removals, archives and crashes at
// random instants between them. After each step the files, as an independent
// walker finds them, are those of the step before or those of the checkpoint.
func TestProperty(t *testing.T) {
	t.Parallel()
	b := memoryBox(t)
	image := propertyImage(t)
	b.ok("image", "import", "p", image)
	layers, err := filepath.Glob(b.root + "/images/layers/*/diff/lower")
	if err != nil || len(layers) != 1 {
		t.Fatalf("layers of the image: %q, %v", layers, err)
	}
	mount := t.TempDir()
	for name, value := range map[string]string{"rapid.checks": "1000", "rapid.shrinktime": "20s"} {
		if err := flag.Set(name, value); err != nil {
			t.Fatal(err)
		}
	}
	begun, n, steps := time.Now(), 0, 0
	rapid.Check(t, func(r *rapid.T) {
		if time.Since(begun) > propertyTime() && !t.Failed() {
			return
		}
		h := &history{box: b, r: r, lower: filepath.Dir(layers[0]), mount: mount}
		defer h.end()
		h.id = b.ok("create", "--name", "s", "--network", "none", "p", "/none")
		h.now = h.look()
		for range rapid.IntRange(4, 16).Draw(r, "steps") {
			h.step()
			steps++
		}
		h.settle()
		n++
	})
	t.Logf("%d histories of %d steps in all", n, steps)
	if n == 0 {
		t.Errorf("not one history in %v", propertyTime())
	}
}

// propertyImage makes the files that the sandbox lies over.
func propertyImage(t *testing.T) string {
	dir := t.TempDir()
	for path, text := range map[string]string{
		"lower/a": "a", "lower/b": strings.Repeat("b", 5000), "lower/d/c": "c", "lower/d/e/f": "f",
		"lower/g/h": "h", "bin/x": "x",
		"big": strings.Repeat("0123456789abcdef", 40_000),
	} {
		path = filepath.Join(dir, path)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	for _, err := range []error{os.Link(dir+"/lower/a", dir+"/lower/hard"), os.Symlink("a", dir+"/lower/soft")} {
		if err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

// ok is box's, with a failure that rapid can make smaller.
func (h *history) ok(args ...string) string {
	r := h.try(nil, args...)
	if r.code != 0 {
		h.r.Fatalf("%s", r)
	}
	return strings.TrimSpace(r.out)
}

func (h *history) end() {
	for _, c := range h.checkpoints() {
		h.try(nil, "checkpoint", "rm", c.ID)
	}
	for _, name := range strings.Fields(h.ok("ps", "-a", "-q", "--no-trunc")) {
		h.ok("rm", "-f", "--checkpoints", name)
	}
}

// onOverlay runs fn on the sandbox's files as a process in it would see them.
func (h *history) onOverlay(fn func(root string)) {
	dir := filepath.Join(h.root, "sandboxes", h.id)
	work, err := os.MkdirTemp(dir, "w")
	if err != nil {
		h.r.Fatal(err)
	}
	options := fmt.Sprintf("lowerdir=%s,upperdir=%s/upper,workdir=%s,redirect_dir=off,metacopy=off,index=off,xino=off",
		h.lower, dir, work)
	if err := unix.Mount("overlay", h.mount, "overlay", 0, options); err != nil {
		h.r.Fatalf("%s: %v", options, err)
	}
	defer func() {
		// A program that another test starts at this moment holds what is open
		// here until its exec is through.
		err := unix.Unmount(h.mount, 0)
		for deadline := time.Now().Add(10 * time.Second); err == unix.EBUSY &&
			time.Now().Before(deadline); err = unix.Unmount(h.mount, 0) {
			time.Sleep(time.Millisecond)
		}
		if err != nil {
			h.r.Fatal(err)
		}
		if err := os.RemoveAll(work); err != nil {
			h.r.Fatal(err)
		}
	}()
	fn(h.mount)
}

func (h *history) look() (s state) {
	h.onOverlay(func(root string) { s.seen = h.tree(root) })
	// After it: what the kernel does at a mount is not what is tested.
	s.upper = h.tree(h.inspect("s").Upperdir)
	return s
}

// differs returns how two states differ; "" if they do not.
func (s state) differs(from state) string {
	for _, m := range [][2]map[string]string{{s.upper, from.upper}, {s.seen, from.seen}} {
		for _, path := range slices.Sorted(maps.Keys(m[1])) {
			if m[0][path] != m[1][path] {
				return fmt.Sprintf("%q is\n  %s\nand was\n  %s", path, m[0][path], m[1][path])
			}
		}
		for path := range m[0] {
			if _, ok := m[1][path]; !ok {
				return fmt.Sprintf("%q is new", path)
			}
		}
	}
	return ""
}

func (h *history) mustBe(what string, want state) {
	if d := h.look().differs(want); d != "" {
		h.r.Fatalf("%s: %s", what, d)
	}
	h.now = want
}

// paths are few, so that operations meet.
var paths = []string{
	"lower/a", "lower/b", "lower/hard", "lower/soft", "lower/d", "lower/d/c", "lower/d/e", "lower/d/e/f",
	"lower/g", "lower/g/h", "lower",
	"big", "bin/x", "n", "n/1", "n/2", "n/d", "n/d/3", "new", "\xff odd\n", "lower/d/new", "bin",
}

// change does one thing to the files; what is not possible is not done.
func (h *history) change(root string) {
	path := func(label string) string { return filepath.Join(root, rapid.SampledFrom(paths).Draw(h.r, label)) }
	data := func() []byte {
		h.counter++
		one := fmt.Appendf(nil, "%d,", h.counter)
		return bytes.Repeat(one, rapid.SampledFrom([]int{0, 1, 100, 3000, 100_000}).Draw(h.r, "times"))
	}
	at := func() int64 { return rapid.SampledFrom([]int64{0, 1, 4095, 4096, 70_000, 1 << 20}).Draw(h.r, "at") }
	p := path("path")
	switch op := rapid.SampledFrom([]string{
		"write", "write", "patch", "patch", "same time", "append", "truncate", "hole", "rename", "rename", "exchange",
		"link", "symlink", "chmod",
		"chown", "xattr", "no xattr", "capability", "remove", "remove", "remove all", "opaque", "mkdir", "mkdir",
		"fifo", "device", "utimes",
	}).Draw(h.r, "op"); op {
	case "write":
		// A fifo must not keep us waiting.
		if f, err := os.OpenFile(p, os.O_WRONLY|os.O_CREATE|os.O_TRUNC|unix.O_NONBLOCK, 0o640); err == nil {
			_, _ = f.Write(data())
			_ = f.Close()
		}
	case "patch", "same time", "append", "hole":
		var before unix.Stat_t
		_ = unix.Lstat(p, &before)
		flags := os.O_WRONLY
		if op == "append" {
			flags |= os.O_APPEND
		}
		f, err := os.OpenFile(p, flags|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
		if err != nil {
			return
		}
		switch op {
		case "append":
			_, _ = f.Write(data())
		case "hole":
			_ = unix.Fallocate(int(f.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, at(), 8192)
		default:
			_, _ = f.WriteAt([]byte(fmt.Sprint(h.counter)), at())
			h.counter++
		}
		_ = f.Close()
		if op == "same time" { // what a tool does that hides its traces
			_ = unix.UtimesNanoAt(unix.AT_FDCWD, p, []unix.Timespec{before.Atim, before.Mtim}, unix.AT_SYMLINK_NOFOLLOW)
		}
	case "truncate":
		if info, err := os.Lstat(p); err == nil && info.Mode().IsRegular() {
			_ = os.Truncate(p, at())
		}
	case "rename":
		_ = os.Rename(p, path("to"))
	case "exchange":
		_ = unix.Renameat2(unix.AT_FDCWD, p, unix.AT_FDCWD, path("to"), unix.RENAME_EXCHANGE)
	case "link":
		_ = os.Link(p, path("to"))
	case "symlink":
		_ = os.Symlink(fmt.Sprint("../to/", h.counter), p)
	case "chmod":
		if info, err := os.Lstat(p); err == nil && info.Mode()&os.ModeSymlink == 0 {
			_ = unix.Chmod(p, rapid.SampledFrom([]uint32{0o644, 0o4755, 0o2770, 0o1777, 0}).Draw(h.r, "mode"))
		}
	case "chown":
		_ = os.Lchown(p, rapid.IntRange(0, 2).Draw(h.r, "uid"), 65534)
	case "xattr":
		_ = unix.Lsetxattr(p, "trusted.t", data()[:0], 0)
		_ = unix.Lsetxattr(p, "user.u", fmt.Append(nil, h.counter), 0)
	case "no xattr":
		_ = unix.Lremovexattr(p, "trusted.t")
	case "capability":
		_ = unix.Lsetxattr(p, "security.capability",
			[]byte("\x01\x00\x00\x02\x00\x04\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00"), 0)
	case "remove":
		_ = os.Remove(p)
	case "remove all":
		_ = removeAll(p)
	case "opaque":
		if removeAll(p) == nil && os.Mkdir(p, 0o750) == nil {
			_ = os.WriteFile(p+"/c", data(), 0o600)
		}
	case "mkdir":
		_ = os.Mkdir(p, 0o711)
	case "fifo":
		_ = unix.Mkfifo(p, 0o600)
	case "device":
		_ = unix.Mknod(p, unix.S_IFCHR|0o600, int(unix.Mkdev(1, 3)))
	case "utimes":
		_ = unix.UtimesNanoAt(unix.AT_FDCWD, p, []unix.Timespec{{Sec: 1}, {Sec: int64(h.counter), Nsec: 7}},
			unix.AT_SYMLINK_NOFOLLOW)
	}
}

// removeAll spares what lies below a FIFO: os.RemoveAll opens what is above, and
// would wait for a writer.
func removeAll(p string) error {
	if fi, err := os.Lstat(filepath.Dir(p)); err != nil || !fi.IsDir() {
		return unix.ENOTDIR
	}
	return os.RemoveAll(p)
}

// crashes are instants at which a verb may be broken.
var crashes = map[string][]string{
	"checkpoint": {"checkpoint.after-capture", "checkpoint.before-commit", "store.begin.after-dir",
		"store.pack.before-footer", "store.pack.after-fsync",
		"store.commit.before-fsync", "store.commit.after-pack", "store.commit.before-rename",
		"store.commit.after-rename", "store.commit.in-transaction", "store.commit.after-row",
		"checkpoint.after-commit"},
	"restore": {"restore.before-layout", "restore.after-undo", "overlay.update.staged", "restore.after-layout",
		"restore.before-stop", "restore.after-stop",
		"overlay.update.op", "overlay.update.times", "overlay.update.end", "restore.between-trees",
		"restore.after-apply", "restore.after-proof", "restore.after-head", "store.commit.after-rename"},
	"fork": {
		"restore.after-layout", "overlay.update.op", "restore.after-apply", "fork.before-reseed", "fork.after-reseed",
		"create.after-row", "restore.after-head",
	},
	"prune": {
		"store.remove.before-rename", "store.remove.before-row", "store.reclaim.before-rows",
		"store.reclaim.between-rows", "store.reclaim.after-rows", "store.reclaim.before-remove",
		"store.reclaim.before-row", "store.reclaim.in-switch", "store.reclaim.after-switch",
	},
	"rm": {
		"store.remove.before-mark", "store.remove.before-rename", "store.remove.before-row", "store.remove.before-tree",
	},
}

// verb runs a command, which one in three times is broken at some instant;
// then recovery has gone over what it left.
func (h *history) verb(kind string, args ...string) result {
	var env []string
	if rapid.IntRange(0, 2).Draw(h.r, "breaks") == 0 {
		env = failpoint(rapid.SampledFrom(crashes[kind]).Draw(h.r, "point"),
			rapid.SampledFrom([]string{"kill", "kill", "error", "enospc"}).Draw(h.r, "how"))
	}
	r := h.try(env, args...)
	h.r.Logf("%s agentbox %s: exit %d, killed %v %s", env, strings.Join(args, " "), r.code, r.killed, r.err)
	if env == nil && r.code != 0 {
		h.r.Fatalf("%s", r)
	}
	if r.code != 0 {
		h.ok("ps")
		h.ok("recover")
	}
	return r
}

func (h *history) step() {
	if rapid.IntRange(0, 3).Draw(h.r, "changes") > 0 {
		h.onOverlay(func(root string) {
			for range rapid.IntRange(1, 12).Draw(h.r, "operations") {
				h.change(root)
			}
		})
		h.now = h.look()
	}
	known := len(h.past) > 0
	switch verb := rapid.SampledFrom([]string{
		"checkpoint", "checkpoint", "checkpoint", "restore", "restore", "restore", "undo", "fork", "prune",
		"rm", "archive", "reindex",
	}).Draw(h.r, "verb"); {
	case verb == "checkpoint":
		h.counter++
		name := fmt.Sprint("c", h.counter)
		h.verb("checkpoint", "checkpoint", "--name", name, "s")
		h.mustBe("after a checkpoint", h.now)
		for _, c := range h.checkpoints("s") {
			if c.Name == name && c.Status == "ready" {
				h.past = append(h.past, past{c.ID, h.now})
			}
		}
	case verb == "restore" && known:
		to := rapid.SampledFrom(h.past).Draw(h.r, "to")
		h.move(to.state, "restore", "s", to.id)
	case verb == "undo" && h.undo != nil:
		h.move(*h.undo, "restore", "--undo", "s")
	case verb == "fork" && known:
		h.fork(rapid.SampledFrom(h.past).Draw(h.r, "of"))
	case verb == "prune":
		keep := rapid.IntRange(1, 4).Draw(h.r, "keep")
		before := len(h.past)
		r := h.verb("prune", "prune", "-f", "--keep-last", fmt.Sprint(keep))
		h.mustBe("after a prune", h.now)
		h.forget()
		if len(h.past) < min(keep, before) || r.code == 0 && len(h.past) > keep+1 {
			h.r.Fatalf("of %d checkpoints a prune that keeps %d left %d", before, keep, len(h.past))
		}
	case verb == "rm" && known:
		gone := rapid.SampledFrom(h.past).Draw(h.r, "gone")
		if r := h.verb("rm", "checkpoint", "rm", gone.id); r.code == 0 {
			h.past = slices.DeleteFunc(h.past, func(p past) bool { return p.id == gone.id })
		}
		h.forget()
	case verb == "archive" && known:
		h.archive(rapid.SampledFrom(h.past).Draw(h.r, "archived"))
	case verb == "reindex":
		h.ok("store", "reindex")
		before := len(h.past)
		h.forget()
		if len(h.past) != before {
			h.r.Fatalf("of %d checkpoints %d are there after a reindex", before, len(h.past))
		}
	}
}

// move restores; afterwards the files are as before or as they should be.
func (h *history) move(to state, args ...string) {
	from := h.now
	r := h.verb("restore", args...)
	now := h.look()
	toWhat, fromWhat := now.differs(to), now.differs(from)
	switch {
	case toWhat == "":
		h.now = to
		h.undo = &from
	case r.code == 0:
		h.r.Fatalf("restored wrongly: %s", toWhat)
	case fromWhat != "":
		h.r.Fatalf("a broken restore left neither what was there: %s\nnor what should be: %s", fromWhat, toWhat)
	}
	if r.code != 0 {
		h.undo = nil
	}
}

func (h *history) fork(of past) {
	r := h.verb("fork", "fork", "--no-start", "--name", "f", "s@"+of.id)
	h.mustBe("after a fork", h.now)
	f, ok := h.find("f")
	if !ok {
		if r.code == 0 {
			h.r.Fatal("there is no fork")
		}
		return
	}
	if d := (state{upper: h.tree(f.Upperdir)}).differs(state{upper: of.upper}); d != "" {
		h.r.Fatalf("fork (exit %d): %s", r.code, d)
	}
	h.ok("rm", "-f", "--checkpoints", "f")
}

// archive sends a checkpoint through a file.
func (h *history) archive(of past) {
	file := filepath.Join(h.root, "archive")
	defer os.Remove(file)
	h.ok("checkpoint", "export", of.id, file)
	h.ok("checkpoint", "rm", of.id)
	if rapid.Bool().Draw(h.r, "forget its pieces") {
		h.ok("prune", "-f")
	}
	if id := h.ok("checkpoint", "import", file); id != of.id {
		h.r.Fatalf("checkpoint %s came back as %s", of.id, id)
	}
}

// forget drops from the model what is not there any more.
func (h *history) forget() {
	there := map[string]bool{}
	for _, c := range h.checkpoints("s") {
		there[c.ID] = c.Status == "ready"
	}
	h.past = slices.DeleteFunc(h.past, func(p past) bool { return !there[p.id] })
}

// settle ends a history: everything that is there is whole, and once it is gone
// so is all it took.
func (h *history) settle() {
	h.ok("verify", "--all", "--read-data")
	for _, p := range h.past {
		h.ok("restore", "--verify", "--no-undo", "s", p.id)
		h.mustBe("at the end", p.state)
	}
	h.end()
	h.ok("prune", "-f")
	u := decode[struct{ Stored, Packs int64 }](h.box, h.ok("df", "--format", "json"))
	if u.Stored != 0 || u.Packs != 0 {
		h.r.Fatalf("with all checkpoints gone there is left: %+v", u)
	}
}
