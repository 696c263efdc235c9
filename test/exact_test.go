package test

import (
	"fmt"
	"slices"
	"strings"
	"testing"
)

// hostile makes one of every kind of file that an upperdir can hold.
const hostile = `
import os, socket, stat, struct
os.umask(0)
os.mkdir("/h"); os.chdir("/h")
def put(name, text=b"x", mode=0o644):
    with open(name, "wb") as f:
        f.write(text)
    os.chmod(name, mode)
for name in [b"plain", b".hidden", b"-rf", b"with space", b"new\nline", b"tab\t", b"\xff\xfe not utf-8", "snow \u2603".encode(), b"a=b", b"%41", b"*", b"\\", b"x" * 255, b".wh.file", b".wh..wh..opq"]:
    put(name, name * 3)
deep = b"deep"
for i in range(40):
    deep += b"/" + b"d" * 60
os.makedirs(deep); put(deep + b"/leaf")
for i, mode in enumerate([0o000, 0o4755, 0o2755, 0o1777, 0o6711, 0o777]):
    put(b"mode%d" % i, b"m", mode)
    os.mkdir("dir%d" % i); os.chmod("dir%d" % i, mode)
put("owned"); os.chown("owned", 12345, 54321)
put("empty", b"")
put("big", os.urandom(3 << 20))
with open("sparse", "wb") as f:
    f.truncate(10 << 30)
    for at in (0, 1 << 20, 3 << 30, (10 << 30) - 5):
        f.seek(at); f.write(b"data!")
with open("allhole", "wb") as f:
    f.truncate(123456789)
for i in range(3):
    os.link("plain", "hard%d" % i)
os.mkdir("other"); os.link("plain", "other/hard")
os.symlink("plain", "sym"); os.symlink("/etc/passwd", "abs"); os.symlink("../../../../etc", "up"); os.symlink("gone", "dangling"); os.symlink(b"\xff", b"sym\xff"); os.symlink("x" * 4000, "longlink")
os.link("sym", "hardsym", follow_symlinks=False)
os.mkfifo("fifo"); os.link("fifo", "fifo2")
s = socket.socket(socket.AF_UNIX); s.bind("sock"); os.chmod("sock", 0o600)
os.mknod("null", 0o666 | stat.S_IFCHR, os.makedev(1, 3)); os.mknod("block", 0o600 | stat.S_IFBLK, os.makedev(7, 99))
os.setxattr("plain", "user.note", b"\x00\xff=x\n"); os.setxattr("plain", "user.empty", b""); os.setxattr("dir5", "user.a=b", b"c"); os.setxattr("plain", b"user.\xff%", b"v")
os.setxattr("big", "security.capability", struct.pack("<5I", 0x02000001, 1 << 10, 0, 0, 0))
acl = struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *e) for e in [(1, 6, 0xffffffff), (2, 4, 1000), (4, 4, 0xffffffff), (16, 6, 0xffffffff), (32, 4, 0xffffffff)])
os.setxattr("owned", "system.posix_acl_access", acl); os.setxattr("dir5", "system.posix_acl_default", acl); os.setxattr("dir5", "system.posix_acl_access", acl)
# Over the image: deleted, replaced, made anew, changed, renamed.
os.remove("/etc/hostname.image")
os.remove("/usr/share/agentbox/gone"); os.mkfifo("/usr/share/agentbox/gone")
import shutil
shutil.rmtree("/usr/share/agentbox/opaque"); os.mkdir("/usr/share/agentbox/opaque"); put("/usr/share/agentbox/opaque/new")
shutil.rmtree("/usr/share/agentbox/deleted")
os.chmod("/usr/share/agentbox/touched", 0o600)
os.utime("/usr/share/agentbox/dir", ns=(1, 1234567890123456789))
put("/usr/share/agentbox/twin1", b"changed")  # one name of two in the image
# Times last: making entries moves a directory's.
for i, t in enumerate([0, 1, 999999999, 1234567890123456789, 2**33 * 10**9 + 7]):
    put("time%d" % i); os.utime("time%d" % i, ns=(t, t))
os.utime("sym", ns=(5, 5), follow_symlinks=False)
os.utime("fifo", ns=(6, 6)); os.utime("other", ns=(77, 77000000007))
os.utime("/h", ns=(9, 9000000009))
`

// imageParts is what hostile deletes, replaces and changes of the image;
// shared.open puts it there.
const imageParts = `set -e; mkdir -p etc usr/share/agentbox; echo x > etc/hostname.image; cd usr/share/agentbox
mkdir opaque deleted dir; echo x > gone; echo x > opaque/old; echo x > deleted/f; echo x > touched; echo x > twin1; ln twin1 twin2`

func TestExact(t *testing.T) {
	b := debianBox(t)
	b.start("h", "--network", "none", "--cap-add", "MKNOD", "debian", "sleep", "infinity")
	if r := b.try(nil, "exec", "h", "python3", "-c", hostile); r.code != 0 {
		t.Fatal(r)
	}
	upper := b.inspect("h").Upperdir
	before := b.tree(upper)
	for path, part := range map[string]string{
		"/etc/hostname.image":         "device 0:0",
		"/usr/share/agentbox/deleted": "device 0:0",
		"/usr/share/agentbox/opaque":  `trusted.overlay.opaque="y"`,
		"/h/\xff\xfe not utf-8":       "size",
		"/h/plain":                    `links ["/h/hard0" "/h/hard1" "/h/hard2" "/h/other/hard" "/h/plain"]`,
		"/h/sparse":                   "size 10737418240",
		"/h/owned":                    "posix_acl_access",
	} {
		if !strings.Contains(before[path], part) {
			t.Errorf("%q is %q, without %q: this test proves less than it should", path, before[path], part)
		}
	}
	wreck := `cd /h; rm -rf ./* ./.[!.]*; echo x > plain; mkdir sparse; echo new > malicious.py; setfacl -m u:1:r plain 2>/dev/null
rm -rf /usr/share/agentbox; mkdir -p /usr/share/agentbox/gone/x; echo back > /etc/hostname.image; chmod 700 /h; rm -rf /var/log; : > /etc/passwd`
	full := b.checkpoint("h")
	// CRIU makes and deletes a directory in the sandbox's /tmp while it dumps.
	dumped := b.tree(upper)
	files := b.checkpoint("--files-only", "h")
	for i, ref := range []string{full, files, full} {
		want := before
		if ref == files {
			want = dumped
		}
		b.sh("h", wreck)
		b.ok("restore", "--verify", "h", ref)
		equal(b, "the upperdir's path", b.inspect("h").Upperdir, upper)
		b.sameTree(fmt.Sprint("the upperdir after restore ", i), b.tree(upper), want)
		b.ok("checkpoint", "verify", ref)
	}
	// The sandbox's view is right, too: hard links of one file, holes, and what the image has
	// beneath.
	out := b.sh("h", `cd /h; test plain -ef hard0 && test plain -ef other/hard && echo linked
stat -c %b sparse allhole | awk '{ if ($1 > 4096) print "filled", $1 }'
test ! -e /etc/hostname.image && test -p /usr/share/agentbox/gone && ls /usr/share/agentbox/opaque`)
	equal(b, "the sandbox's view", out, "linked\nnew")
	if n := len(before); n < 60 || !slices.Contains(strings.Split(b.sh("h", "ls -a /h"), "\n"), ".wh.file") {
		t.Errorf("%d entries in the tree", n)
	}
}

// A dump and a capture of files run side by side. Temporary changes that the dump makes to the
// sandbox's files must not get into the archive.
func TestDumpLeavesNoTrace(t *testing.T) {
	b := newBox(t)
	b.start("c", "--network", "none", "busybox", "sh", "-c",
		"mkdir /a /tmp/mine; for i in $(seq 1000); do echo $i > /a/$i; done; for i in $(seq 300); do mkdir /tmp/mine/$i; done; echo x > /ready; sleep 1000")
	b.eventually("the files are made", func() bool { return b.file("c", "ready") != "" })
	upper := b.inspect("c").Upperdir
	for range 3 {
		before := b.tree(upper)
		b.checkpoint("c")
		b.ok("restore", "c")
		b.sameTree("the upperdir after the restore", b.tree(upper), before)
	}
}
