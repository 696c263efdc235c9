package test

import (
	"strings"
	"testing"
)

// goneApp holds files of the image, and some of its own, by names that it then takes away.
// Asked, it says what it sees through them, and writes to those that it can write to.
const goneApp = `
import json, mmap, os, shutil, sys, time
L = os.path.dirname(os.__file__) + "/"
def page(p):
    with open(p, "rb") as f:
        return mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ)

# Of the image: deleted, with two descriptors, a path and a mapping.
a, b, path, mapped = open(L + "this.py", "rb"), open(L + "this.py", "rb"), os.open(L + "this.py", os.O_PATH), page(L + "this.py")
b.seek(7); os.unlink(L + "this.py")
# Replaced by a rename: a file, and the libraries and the program that run.
old = page(L + "pty.py"); open(L + "new", "w").write("new"); os.rename(L + "new", L + "pty.py")
for lib in set(line.split()[5] for line in open("/proc/self/maps") if " /usr/" in line and ".py" not in line):
    shutil.copy(lib, lib + ".new"); os.rename(lib + ".new", lib)
# Written in place below a mapping: that still shows the lower layer, descriptors do not.
there = open(L + "antigravity.py", "rb", 0); shown = page(L + "antigravity.py")
with open(L + "antigravity.py", "r+b") as f: f.write(b"# overwritten")
# Open for writing, by descriptor and by mapping, and deleted.
rw = open(L + "tabnanny.py", "r+b", 0); both = mmap.mmap(rw.fileno(), 0); os.unlink(L + "tabnanny.py")
# Directories: deleted, made again, and a file in the place of one.
os.makedirs("/build/sub"); os.chdir("/build/sub"); build = os.open("/build", os.O_RDONLY); shutil.rmtree("/build"); os.makedirs("/build/sub")
doc = os.open(L + "wsgiref/__pycache__", os.O_RDONLY); shutil.rmtree(L + "wsgiref")
os.makedirs("/q/r"); within = open("/q/r/f", "w+b", 0); within.write(b"within"); shutil.rmtree("/q"); open("/q", "w").write("file")
# Directories that are open, with files in them that are.
os.makedirs("/t/u/v"); top, deep = os.open("/t", os.O_RDONLY), os.open("/t/u/v", os.O_RDONLY)
inside, high = open("/t/u/v/f", "w+b", 0), open("/t/f", "w+b", 0); inside.write(b"deep"); high.write(b"high"); shutil.rmtree("/t")
# Names that are gone while others are left, also in memory.
f1 = open("/h1", "w+b", 0); f1.write(b"hard"); os.link("/h1", "/h2"); os.link("/h1", "/h3")
f2, f3, hard = open("/h2", "r+b", 0), open("/h3", "r+b", 0), mmap.mmap(f1.fileno(), 4); os.unlink("/h1"); os.unlink("/h3")
s1 = open("/dev/shm/s1", "w+b", 0); s1.write(b"shm"); os.link("/dev/shm/s1", "/dev/shm/s2"); os.unlink("/dev/shm/s1")

def name(fd):
    return os.readlink("/proc/self/fd/%d" % fd)
def answer():
    both[0:4] = b"MAPP"; rw.seek(4); rw.write(b"WRIT"); rw.seek(0)
    hard[0:1] = b"H"; f2.seek(0, 2); f2.write(b"er"); f1.seek(0); f3.seek(0)
    there.seek(0)
    s1.seek(0, 2); s1.write(b"s"); within.seek(0); inside.seek(0); high.seek(0)
    return [
        len(a.read()), len(b.read()), len(mapped[:].split()), os.fstat(a.fileno()).st_ino == os.fstat(b.fileno()).st_ino == os.fstat(path).st_ino,
        os.path.exists(L + "this.py"), name(a.fileno()), len(old[:].split()), open(L + "pty.py").read(), open("/proc/self/exe", "rb").read(4).hex(),
        there.read(13).decode(), shown[:13].decode(), both[:8].decode(), rw.read(8).decode(), os.listdir(build), os.listdir("."), os.listdir("/build"), os.listdir(doc), within.read().decode(), open("/q").read(),
        inside.read().decode(), high.read().decode(), os.listdir(top), os.listdir(deep),
        f1.read().decode(), f3.read().decode(), open("/h2").read(), os.stat("/h2").st_nlink, os.fstat(f1.fileno()).st_nlink, name(f1.fileno()), name(f2.fileno()),
        open("/dev/shm/s2").read(), sorted(os.listdir("/")), [n for n in os.listdir(L) if "link" in n or "ghost" in n], os.listdir("/dev/shm")]
open("/ready", "w").close()
while True:
    if os.path.exists("/ask"):
        os.remove("/ask")
        try:
            said = json.dumps(answer())
        except Exception as e:
            said = "failed: %r" % e
        open("/run/answer.new", "w").write(said)
        os.rename("/run/answer.new", "/run/answer")
    time.sleep(0.01)
`

// Files that processes hold are theirs, whatever has become of their names: an upgrade below a
// running program, a directory that is made anew, one of several hard links. None of it shows in
// the sandbox, which is as it was after a checkpoint and after a restore.
func TestDeletedFiles(t *testing.T) {
	b := debianBox(t)
	name := b.start("gone", "--network", "none", "debian", "python3", "-c", goneApp)
	has := func(path string) bool { return b.try(nil, "exec", name, "test", "-e", path).code == 0 }
	b.eventually("the program is ready", func() bool { return has("/ready") })
	answer := func() string {
		b.sh(name, "rm -f /run/answer; touch /ask")
		b.eventually("the program answers", func() bool { return has("/run/answer") })
		return strings.TrimSpace(b.sh(name, "cat /run/answer"))
	}
	unchanged := func(when, ck string) {
		t.Helper()
		if out := b.ok("diff", name+"@"+ck); out != "" {
			t.Errorf("%s the files differ:\n%s", when, out)
		}
	}
	ck := b.checkpoint(name)
	unchanged("after the checkpoint", ck)
	want := answer()
	if !strings.Contains(want, `"MAPPWRIT", "MAPPWRIT"`) || !strings.Contains(want, `"Harder", "Harder", "Harder"`) ||
		!strings.Contains(want, `"deep", "high", [], []`) {
		t.Fatalf("the program says %s", want)
	}
	for range 2 {
		b.ok("restore", name, ck)
		unchanged("after the restore", ck)
		again := b.checkpoint(name)
		equal(b, "after the restore", answer(), want)
		b.ok("restore", name, again)
		unchanged("after the second restore", again)
		equal(b, "after the second restore", answer(), want)
	}

	// One that is killed, at its worst instants, leaves nothing either.
	for _, point := range []string{"restore.after-stage", "restore.after-start"} {
		b.try(failpoint(point, "kill"), "restore", name, ck)
		b.ok("restore", name, ck)
		unchanged("after one that was killed at "+point, ck)
		equal(b, "after one that was killed at "+point, answer(), want)
	}
	b.try(failpoint("checkpoint.after-dump", "kill"), "checkpoint", name)
	b.ok("restore", name, ck)
	unchanged("after a checkpoint that was killed", ck)
}

// A directory that is gone, or is another one by now, is made anew. Its inode number, which no
// restore can choose, is told where a process works in it or has it open.
func TestDirectoryMadeAnew(t *testing.T) {
	t.Parallel()
	b := memoryBox(t)
	name := b.start("anew", "busybox", "sh", "-c",
		"mkdir /w /kept && cd /w && exec 5</w 6</kept && echo x >/ready; while :; do sleep 0.1; done")
	b.eventually("it works in its directory", func() bool { return b.there(name, "/ready") })
	ck := b.checkpoint(name)
	quiet := b.try(nil, "restore", name, ck)
	if quiet.code != 0 || strings.Contains(quiet.err, "made anew") {
		t.Errorf("of directories that are there: %d, %s", quiet.code, quiet.err)
	}
	b.sh(name, "mkdir /w2 && rmdir /w && mv /w2 /w")
	told := b.try(nil, "restore", name, ck)
	for _, want := range []string{
		"its working directory (/w) was made anew", "the directory of its file descriptor 5 (/w) was made anew",
	} {
		if told.code != 0 || !strings.Contains(told.err, want) {
			t.Errorf("no %q: %d, %s", want, told.code, told.err)
		}
	}
	if strings.Contains(told.err, "/kept") {
		t.Errorf("of a directory that is there: %s", told.err)
	}
	b.own("anewfork")
	if fork := b.try(nil, "fork", "--name", "anewfork", name+"@"+ck); fork.code != 0 ||
		strings.Contains(fork.err, "made anew") {
		t.Errorf("of a fork: %d, %s", fork.code, fork.err)
	}
}
