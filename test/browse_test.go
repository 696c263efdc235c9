package test

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// archived is what an archive holds: of each name all that its header says, and of hard links what
// they lead to and which names are one file.
func (b *box) archived(data string) map[string]string {
	b.Helper()
	seen, first, names := map[string]string{}, map[string]string{}, map[string][]string{}
	in := tar.NewReader(strings.NewReader(data))
	for {
		h, err := in.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			b.Fatal(err)
		}
		name := strings.TrimPrefix(strings.TrimSuffix(h.Name, "/"), "./")
		if h.Typeflag == tar.TypeLink {
			first[name] = strings.TrimPrefix(h.Linkname, "./")
			continue
		}
		sum := sha256.New()
		if _, err := io.Copy(sum, in); err != nil {
			b.Fatal(err)
		}
		var more []string
		for _, key := range slices.Sorted(maps.Keys(h.PAXRecords)) {
			if strings.Contains(key, "xattr") {
				more = append(more, fmt.Sprintf("%s=%q", key, h.PAXRecords[key]))
			}
		}
		when := h.ModTime.UnixNano()
		if slices.Contains([]string{"etc/hosts", "etc/hostname", "etc/resolv.conf"}, name) {
			when = 0 // a checkpoint has no time of what the backend writes
		}
		seen[name] = fmt.Sprintf("%c %o %d:%d %d %d %q %d:%d %x %s", h.Typeflag, h.Mode, h.Uid, h.Gid, h.Size,
			when, h.Linkname, h.Devmajor, h.Devminor, sum.Sum(nil)[:8], strings.Join(more, " "))
	}
	for name, to := range first {
		names[to] = append(names[to], name)
	}
	for to, links := range names {
		links = append(links, to)
		slices.Sort(links)
		what := seen[to]
		for _, name := range links {
			seen[name] = what + fmt.Sprintf(" one file: %q", links)
		}
	}
	return seen
}

// without leaves out what the kernel makes up.
func without(seen map[string]string) map[string]string {
	seen = maps.Clone(seen)
	maps.DeleteFunc(seen, func(name, _ string) bool {
		top, _, _ := strings.Cut(name, "/")
		return top == "dev" || top == "proc" || top == "sys"
	})
	return seen
}

func (b *box) sameArchive(what string, want, got map[string]string) {
	b.Helper()
	for name, w := range want {
		if got[name] != w {
			b.Errorf("%s: %q is %s, want %s", what, name, got[name], w)
		}
	}
	for name := range got {
		if _, ok := want[name]; !ok {
			b.Errorf("%s: %q should not be there", what, name)
		}
	}
}

// TestBrowse changes files of an image in every way, takes a checkpoint, and changes everything
// once more: what cp, cat, ls and find show of the checkpoint is what they showed of the sandbox
// then, also when nothing is left of its files, and when it is gone. Nothing is restored.
func TestBrowse(t *testing.T) {
	t.Parallel()
	b := newBox(t)
	b.start("seen", "busybox", "sleep", "1000")
	b.sh("seen", `set -e
		mkdir -p /work/sub/deeper /made; cd /work
		echo added > file; echo same > one; ln one two; ln one sub/three
		echo changed >> /etc/passwd; chmod 600 /etc/passwd; rm /bin/ls
		rm -r /var; mkdir -m 1777 /var; echo new > /var/new
		rm -r /root; echo 'a file now' > /root
		ln -s file link; ln -s ../../../../.. up; ln -s /work/sub /abs; ln -s nowhere dangling
		chown 1000:1001 sub; chmod 4755 file; mkfifo fifo
		touch -t 202103040506.07 sub/deeper
		dd if=/dev/zero of=sparse bs=1 count=1 seek=5000000 2>/dev/null
		echo secret > "$(printf 'odd\nname')"; echo 1.2.3.4 far >> /etc/hosts`)
	whole := func(ref string) string { return b.ok("cp", ref+":/", "-") }
	live := without(b.archived(whole("seen")))
	if len(live) < 100 || live["work/two"] == "" || live["bin/ls"] != "" {
		t.Fatalf("%d entries of the sandbox", len(live))
	}
	ls, find := b.ok("ls", "-lR", "seen", "/work"), b.ok("find", "seen", "/work")
	image := without(b.archived(whole("seen@image")))
	id := b.checkpoint("--name", "before", "seen")

	check := func(when string) {
		t.Helper()
		for _, ref := range []string{"seen@before", "seen@" + id[:12]} {
			b.sameArchive(when+", "+ref, live, without(b.archived(whole(ref))))
		}
		b.sameArchive(when+", the image", image, without(b.archived(whole("seen@image"))))
		equal(b, when+", ls", b.ok("ls", "-lR", "seen@before", "/work"), ls)
		equal(b, when+", find", b.ok("find", "seen@before", "/work"), find)
		equal(b, when+", cat", b.ok("cat", "seen@before:/work/up/abs/three", "seen@before:/var/new"), "same\nnew")
		b.fails(3, "cat", "seen@before:/bin/ls")
		b.fails(3, "cat", "seen@before:/root/x")
		b.fails(3, "cat", "seen@before:/work/dangling")
	}
	check("at once")
	b.sh("seen", `rm -r /work /abs /made; mkdir /work; echo other > /work/file; rm /root; mkdir /root
		echo more >> /etc/passwd; rm -r /var/new; ln -s /etc /work/sub`)
	check("after changes")
	b.sh("seen", "busybox rm -rf /bin /etc /home /lib* /opt /root /srv /usr /var /work /made /abs 2>/dev/null; true")
	check("after rm -rf")

	// A directory, and a file over one that is there.
	dir := t.TempDir()
	b.ok("cp", "-a", "seen@before:/work", dir)
	two, err := os.ReadFile(filepath.Join(dir, "work/sub/three"))
	if err != nil || string(two) != "same\n" {
		t.Errorf("%q, %v", two, err)
	}
	b.ok("cp", "seen@before:/work/file", filepath.Join(dir, "work/one"))
	equal(b, "the copied file", b.read(filepath.Join(dir, "work/one")), "added")
	equal(b, "its other name", b.read(filepath.Join(dir, "work/two")), "same")

	b.ok("stop", "-t", "0", "seen")
	check("once it is stopped")
	b.ok("rm", "seen")
	check("once it is removed")
	if data := whole("seen@before"); !bytes.Contains([]byte(data), []byte("added\n")) {
		t.Error("an archive without the file")
	}
}
