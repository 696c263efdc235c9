package test

import (
	"bytes"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// disk is a filesystem of its own whose power can be cut.
type disk struct {
	*testing.T
	image, loop, at string
}

func newDisk(t *testing.T) *disk {
	t.Helper()
	dir, err := os.MkdirTemp("", "ab")
	if err != nil {
		t.Fatal(err)
	}
	d := &disk{t, filepath.Join(dir, "image"), "", filepath.Join(dir, "m")}
	t.Cleanup(func() {
		if d.loop != "" {
			d.detach()
		}
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	if err := os.Mkdir(d.at, 0o755); err != nil {
		t.Fatal(err)
	}
	d.do("truncate", "-s", "256M", d.image)
	d.do("mkfs.ext4", "-q", "-F", d.image)
	d.loop = d.do("losetup", "--find", "--show", d.image)
	d.do("mount", d.loop, d.at)
	return d
}

func (d *disk) do(args ...string) string {
	d.Helper()
	out, err := exec.Command(args[0], args[1:]...).CombinedOutput()
	if err != nil {
		d.Fatalf("%q: %v\n%s", args, err, out)
	}
	return strings.TrimSpace(string(out))
}

func (d *disk) unmount() {
	d.Helper()
	if exec.Command("mountpoint", "-q", d.at).Run() != nil {
		return
	}
	// A process that has just ended may hold on to it for a moment.
	for end := time.Now().Add(20 * time.Second); exec.Command("umount",
		d.at).Run() != nil; time.Sleep(20 * time.Millisecond) {
		if time.Now().After(end) {
			d.Fatalf("%s stays in use:\n%s", d.at, d.do("sh", "-c",
				"grep -l "+d.at+" /proc/[0-9]*/mountinfo; cat /proc/self/mounts; losetup -a"))
		}
	}
}

func (d *disk) detach() {
	d.Helper()
	d.unmount()
	d.do("losetup", "-d", d.loop)
	// It is freed once nothing looks at it any more.
	for end := time.Now().Add(20 * time.Second); exec.Command("losetup",
		d.loop).Run() == nil; time.Sleep(20 * time.Millisecond) {
		if time.Now().After(end) {
			d.Fatalf("%s stays in use: %s", d.loop, d.do("losetup", "-a"))
		}
	}
}

// alter silently makes every block that is full of one letter full of another.
func (d *disk) alter(from, to string) {
	d.Helper()
	d.unmount()
	defer d.do("mount", d.loop, d.at)
	f, err := os.OpenFile(d.image, os.O_RDWR, 0)
	if err != nil {
		d.Fatal(err)
	}
	defer f.Close()
	old, block := bytes.Repeat([]byte(from), 1024), make([]byte, 1024)
	for at := int64(0); ; at += int64(len(block)) {
		if _, err := f.ReadAt(block, at); err == io.EOF {
			return
		} else if err != nil {
			d.Fatal(err)
		}
		if bytes.Equal(block, old) {
			if _, err := f.WriteAt(bytes.Repeat([]byte(to), 1024), at); err != nil {
				d.Fatal(err)
			}
		}
	}
}

// cut returns what has reached the disk by now.
func (d *disk) cut() (image string) {
	d.Helper()
	image = d.image + ".cut"
	d.do("cp", "--sparse=always", d.image, image)
	return image
}

// comeBack mounts what was left by a cut in the place of what is there.
func (d *disk) comeBack(image string) {
	d.Helper()
	d.detach()
	d.image = image
	loop := d.loop
	d.loop = ""
	d.do("losetup", loop, image)
	d.loop = loop
	d.do("mount", d.loop, d.at)
}

// TestPowerCut takes the power away while a file has its new times on the disk, and
// its old data. Nothing may take it for what it was when it was looked at last.
func TestPowerCut(t *testing.T) {
	d := newDisk(t)
	root := filepath.Join(d.at, "ab")
	b := boxAt(t, root)
	b.ok("run", "-d", "--name", "s", "--network", "none", "busybox", "sleep", "infinity")
	upper := b.inspect("s").Upperdir
	file := filepath.Join(upper, "f")
	write := func(c string) {
		t.Helper()
		b.sh("s", "head -c 1048576 /dev/zero | tr '\\0' "+c+" | dd of=/f bs=64k conv=notrunc")
	}
	has := func() string {
		t.Helper()
		data, err := os.ReadFile(file)
		if err != nil || len(data) != 1<<20 || !bytes.Equal(bytes.Repeat(data[:1], len(data)), data) {
			t.Fatalf("%d bytes: %v", len(data), err)
		}
		return string(data[:1])
	}
	write("C")
	d.do("sync", "-f", file)
	older := b.checkpoint("s", "--files-only")
	write("D")
	newer := b.checkpoint("s", "--files-only")
	// That has made its own packs durable, and the journal with the times of all files.
	image := d.cut()
	b.ok("rm", "-f", "s")
	d.comeBack(image)
	if err := os.RemoveAll(filepath.Join(root, "run")); err != nil {
		t.Fatal(err)
	}
	equal(b, "the file after the cut (else the cut is none)", has(), "C")

	b.ok("restore", "s", newer)
	equal(b, "restored to the newer one", has(), "D")
	b.ok("restore", "--undo", "s")
	equal(b, "the undo of it", has(), "C")
	b.ok("restore", "s", older)
	equal(b, "restored to the older one", has(), "C")

	// Damage that only a look at the data itself finds.
	b.ok("restore", "s", newer)
	b.ok("stop", "-t", "0", "s")
	d.alter("D", "X")
	equal(b, "the file after its disk has changed it", has(), "X")
	b.ok("restore", "--verify", "s", newer)
	equal(b, "restored and verified", has(), "D")
	b.ok("stop", "-t", "0", "s")
	d.alter("D", "X")
	b.ok("restore", "--verify", "--no-undo", "s", newer)
	equal(b, "restored and verified, with no undo", has(), "D")
}
