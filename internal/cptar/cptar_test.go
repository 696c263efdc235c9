package cptar

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"sort"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/internal/idmap"
)

func TestMain(m *testing.M) {
	if os.Getuid() != 0 {
		fmt.Fprintln(os.Stderr, "these tests make devices and foreign owners: run them as root")
		os.Exit(1)
	}
	os.Exit(m.Run())
}

var ctx = context.Background()

func ok(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// sandbox makes TMP/outside and TMP/root, a small root filesystem.
func sandbox(t *testing.T) (root, outside string) {
	t.Helper()
	tmp := t.TempDir()
	root, outside = tmp+"/root", tmp+"/outside"
	for _, d := range []string{root + "/etc", root + "/usr/bin", root + "/work/sub", outside} {
		ok(t, os.MkdirAll(d, 0o755))
	}
	ok(t, os.WriteFile(outside+"/secret", []byte("outside"), 0o600))
	ok(t, os.WriteFile(root+"/etc/passwd", []byte("inside"), 0o644))
	ok(t, os.WriteFile(root+"/work/f", []byte("f"), 0o640))
	ok(t, os.WriteFile(root+"/work/sub/g", []byte("g"), 0o600))
	ok(t, os.Chown(root+"/work/f", 1000, 1001))
	ok(t, os.Symlink("/usr/bin", root+"/bin"))
	ok(t, os.Symlink("/etc/passwd", root+"/abs"))
	ok(t, os.Symlink(outside, root+"/out"))
	ok(t, os.Symlink(outside+"/secret", root+"/work/secret"))
	return root, outside
}

func entries(t *testing.T, r io.Reader) string {
	t.Helper()
	var names []string
	for tr := tar.NewReader(r); ; {
		h, err := tr.Next()
		if err == io.EOF {
			break
		}
		ok(t, err)
		names = append(names, h.Name)
	}
	sort.Strings(names)
	return strings.Join(names, " ")
}

func TestStat(t *testing.T) {
	root, outside := sandbox(t)
	for p, want := range map[string]Stat{
		"/work":        {Name: "work", Dir: true, Mode: uint32(fs.ModeDir | 0o755)},
		"/work/f":      {Name: "f", Mode: 0o640, Size: 1},
		"/abs":         {Name: "abs", Mode: uint32(fs.ModeSymlink | 0o777), Size: 11, Link: "/etc/passwd"},
		"/bin":         {Name: "bin", Mode: uint32(fs.ModeSymlink | 0o777), Size: 8, Link: "/usr/bin"},
		"/bin/":        {Name: "bin", Dir: true, Mode: uint32(fs.ModeDir | 0o755)},
		"/out":         {Name: "out", Mode: uint32(fs.ModeSymlink | 0o777), Size: int64(len(outside)), Link: outside},
		"/../../../..": {Name: "..", Dir: true, Mode: uint32(fs.ModeDir | 0o755)},
	} {
		got, err := StatPath(root, p)
		if got.Dir {
			got.Size = 0
		}
		if err != nil || got != want {
			t.Errorf("%s: %+v, %v", p, got, err)
		}
	}
	for _, p := range []string{"/none", "/out/secret", outside + "/secret", ""} {
		if _, err := StatPath(root, p); !errors.Is(err, fault.ErrNotFound) {
			t.Errorf("%s: %v", p, err)
		}
	}
}

func TestFrom(t *testing.T) {
	root, _ := sandbox(t)
	ok(t, unix.Mknod(root+"/work/sub/sock", unix.S_IFSOCK|0o600, 0))
	for p, want := range map[string]string{
		"/work":          "work/ work/f work/secret work/sub/ work/sub/g",
		"/work/":         "work/ work/f work/secret work/sub/ work/sub/g",
		"/work/.":        "./ ./f ./secret ./sub/ ./sub/g",
		"/work/sub/..":   "./ ./f ./secret ./sub/ ./sub/g",
		"/bin/../../abs": "abs",
		"/bin":           "bin",
		"/bin/":          "bin/",
		"/out":           "out",
		"/etc/passwd":    "passwd",
		"etc":            "etc/ etc/passwd",
	} {
		var buf bytes.Buffer
		err := From(ctx, root, nil, p, &buf)
		if part := (*Partial)(nil); strings.Contains(want, "sub/ ") {
			if !errors.As(err, &part) || len(part.Report.Skipped) != 1 || !strings.Contains(err.Error(), "sock") {
				t.Errorf("%s: %v", p, err)
			}
		} else if err != nil {
			t.Errorf("%s: %v", p, err)
		}
		if got := entries(t, &buf); got != want {
			t.Errorf("%s: %s", p, got)
		}
	}
	for p, want := range map[string]error{
		"/none": fault.ErrNotFound, "/work/f/": unix.ENOTDIR, "/out/secret": fault.ErrNotFound,
		"/work/sub/sock": fault.ErrUnsupported, "": fault.ErrNotFound,
	} {
		if err := From(ctx, root, nil, p, io.Discard); !errors.Is(err, want) {
			t.Errorf("%s: %v", p, err)
		}
	}
}

// The whole way: host to sandbox to host, by the rules of docker cp.
func TestPlaceAndCopy(t *testing.T) {
	cases := []struct {
		src, dst string
		want     string // where "f" of the source's content (or the file itself) lands
		err      error
	}{
		{"file", "new", "new", nil},
		{"file", "new/", "", fault.ErrNotFound},
		{"file", "old", "old", nil},
		{"file", "old/", "", fault.ErrInvalid},
		{"file", "dir", "dir/file", nil},
		{"file", "dir/", "dir/file", nil},
		{"file", "none/x", "", fault.ErrNotFound},
		{"dir", "new", "new/f", nil},
		{"dir", "new/", "new/f", nil},
		{"dir", "old", "", fault.ErrInvalid},
		{"dir", "dir", "dir/src/f", nil},
		{"dir/.", "dir", "dir/f", nil},
		{"dir/.", "new", "new/f", nil},
		{"dir/.", "old", "", fault.ErrInvalid},
	}
	for _, c := range cases {
		t.Run(c.src+" to "+c.dst, func(t *testing.T) {
			for _, into := range []bool{true, false} {
				host, root := t.TempDir(), t.TempDir()
				from, to := host, root
				if !into {
					from, to = root, host
				}
				ok(t, os.WriteFile(from+"/file", []byte("new"), 0o600))
				ok(t, os.Mkdir(from+"/src", 0o700))
				ok(t, os.WriteFile(from+"/src/f", []byte("new"), 0o600))
				ok(t, os.WriteFile(to+"/old", []byte("old"), 0o600))
				ok(t, os.Mkdir(to+"/dir", 0o700))
				src := map[string]string{"file": "/file", "dir": "/src", "dir/.": "/src/."}[c.src]
				var target Target
				if fi, err := os.Lstat(to + "/" + c.dst); err == nil || errors.Is(err, unix.ENOTDIR) {
					target = Target{true, err == nil && fi.IsDir()}
				}
				dir, rename, err := Place("/"+c.dst, target, c.src != "file", c.src == "dir/.")
				if err == nil {
					var buf bytes.Buffer
					if into {
						_, err = TarPath(ctx, host+src, rename, &buf)
						ok(t, err)
						err = To(ctx, root, nil, dir, &buf)
					} else {
						err = From(ctx, root, nil, src, &buf)
						ok(t, err)
						_, err = Untar(ctx, host+dir, &buf, UntarOptions{Rename: rename})
					}
				}
				if !errors.Is(err, c.err) {
					t.Fatalf("%v, want %v", err, c.err)
				}
				if c.err != nil {
					continue
				}
				if b, err := os.ReadFile(to + "/" + c.want); string(b) != "new" {
					out, _ := exec.Command("find", to).Output()
					t.Errorf("into=%v: %q %v\n%s", into, b, err, out)
				}
			}
		})
	}
}

func TestTarPath(t *testing.T) {
	root, _ := sandbox(t)
	for p, want := range map[string][2]string{
		"/work/sub": {"", "sub/ sub/g"}, "/work/sub/": {"x", "x/ x/g"}, "/work/sub/.": {"", "./ ./g"},
		"/bin": {"", "bin"}, "/work/f": {"y", "y"},
	} {
		var buf bytes.Buffer
		if _, err := TarPath(ctx, root+p, want[0], &buf); err != nil {
			t.Errorf("%s: %v", p, err)
		} else if got := entries(t, &buf); got != want[1] {
			t.Errorf("%s: %s", p, got)
		}
	}
	t.Chdir(root + "/work/sub")
	var buf bytes.Buffer
	_, err := TarPath(ctx, "g", "", &buf)
	ok(t, err)
	if got := entries(t, &buf); got != "g" {
		t.Error(got)
	}
	for _, p := range []string{"none", root + "/none/x"} {
		if _, err := TarPath(ctx, p, "", io.Discard); !errors.Is(err, unix.ENOENT) {
			t.Errorf("%s: %v", p, err)
		}
	}
}

type ent struct {
	tar.Header
	data string
}

func archive(t *testing.T, list ...ent) *bytes.Reader {
	t.Helper()
	var buf bytes.Buffer
	tw := tar.NewWriter(&buf)
	for _, e := range list {
		e.Header.Size = int64(len(e.data))
		ok(t, tw.WriteHeader(&e.Header))
		_, err := io.WriteString(tw, e.data)
		ok(t, err)
	}
	ok(t, tw.Close())
	return bytes.NewReader(buf.Bytes())
}

func TestTo(t *testing.T) {
	root, outside := sandbox(t)
	f := ent{tar.Header{Name: "d/tool", Mode: 0o4755, Uid: 1000, Gid: 1001,
		ModTime: time.Unix(5, 7), Format: tar.FormatPAX,
		PAXRecords: map[string]string{"SCHILY.xattr.user.k": "v", "SCHILY.xattr.trusted.overlay.opaque": "y"}}, "tool"}
	err := To(ctx, root, nil, "/bin", archive(t, f))
	if part := (*Partial)(nil); !errors.As(err, &part) || !strings.Contains(err.Error(), "trusted.overlay.opaque") {
		t.Errorf("skipped: %v", err)
	}
	var st unix.Stat_t
	ok(t, unix.Stat(root+"/usr/bin/d/tool", &st))
	if st.Uid != 1000 || st.Gid != 1001 || st.Mode != unix.S_IFREG|0o4755 ||
		st.Mtim != (unix.Timespec{Sec: 5, Nsec: 7}) {
		t.Errorf("%+v", st)
	}
	for p, want := range map[string]error{
		"/none": fault.ErrNotFound, "/etc/passwd": unix.ENOTDIR, "/out": fault.ErrNotFound, outside: fault.ErrNotFound,
	} {
		if err := To(ctx, root, nil, p, archive(t, f)); !errors.Is(err, want) {
			t.Errorf("to %s: %v", p, err)
		}
	}
	for what, list := range map[string][]ent{
		"dotdot":           {{tar.Header{Name: "../outside/evil"}, "x"}},
		"through old link": {{tar.Header{Name: "out/evil"}, "x"}},
		"dir over link":    {{tar.Header{Name: "out", Typeflag: tar.TypeDir, Mode: 0o777}, ""}},
		"dir over file":    {{tar.Header{Name: "etc/passwd", Typeflag: tar.TypeDir, Mode: 0o777}, ""}},
		"file over dir":    {{tar.Header{Name: "etc"}, "x"}},
		"hard link": {
			{tar.Header{Name: "h", Typeflag: tar.TypeLink, Linkname: "out/secret"}, ""}, {tar.Header{Name: "h"}, "x"},
		},
	} {
		if err := To(ctx, root, nil, "/", archive(t, list...)); !errors.Is(err, fault.ErrInvalid) &&
			!errors.Is(err, fault.ErrExists) {
			t.Errorf("%s: %v", what, err)
		}
	}
	// A file takes a symlink's place; the link's target is not touched.
	err = To(ctx, root, nil, "/work", archive(t, ent{tar.Header{Name: "secret", Mode: 0o600}, "mine"}))
	ok(t, err)
	if b, _ := os.ReadFile(root + "/work/secret"); string(b) != "mine" {
		t.Errorf("%q", b)
	}
	if b, _ := os.ReadFile(outside + "/secret"); string(b) != "outside" {
		t.Fatalf("escaped: %q", b)
	}
}

// A hostile sandbox streams names and links that aim at the host.
func TestUntarHostile(t *testing.T) {
	for what, list := range map[string][]ent{
		"dotdot": {{tar.Header{Name: "x/../../evil"}, "x"}},
		"symlink": {
			{tar.Header{Name: "x", Typeflag: tar.TypeSymlink, Linkname: "/"}, ""}, {tar.Header{Name: "x/evil"}, "x"},
		},
		"rel symlink": {
			{tar.Header{Name: "x", Typeflag: tar.TypeSymlink, Linkname: ".."}, ""}, {tar.Header{Name: "x/evil"}, "x"},
		},
		"user's link": {{tar.Header{Name: "link/evil"}, "x"}},
		"user's link2": {
			{tar.Header{Name: "link", Typeflag: tar.TypeDir, Mode: 0o777}, ""}, {tar.Header{Name: "link/evil"}, "x"},
		},
		"hard link": {
			{tar.Header{Name: "h", Typeflag: tar.TypeLink, Linkname: "mine"}, ""}, {tar.Header{Name: "h"}, "x"},
		},
		"hard link2": {{tar.Header{Name: "h", Typeflag: tar.TypeLink, Linkname: "/etc/shadow"}, ""}},
	} {
		for _, a := range []bool{false, true} {
			tmp := t.TempDir()
			ok(t, os.Mkdir(tmp+"/dst", 0o700))
			ok(t, os.Symlink("..", tmp+"/dst/link"))
			ok(t, os.WriteFile(tmp+"/dst/mine", []byte("mine"), 0o600))
			if _, err := Untar(ctx, tmp+"/dst", archive(t, list...), UntarOptions{Archive: a}); err == nil {
				t.Errorf("%s: no error", what)
			}
			if l, _ := os.ReadDir(tmp); len(l) != 1 {
				t.Fatalf("%s: escaped: %v", what, l)
			}
			if b, _ := os.ReadFile(tmp + "/dst/mine"); string(b) != "mine" {
				t.Errorf("%s: changed %q", what, b)
			}
		}
	}
	dst := t.TempDir()
	list := []ent{
		{tar.Header{Name: "src/", Typeflag: tar.TypeDir, Mode: 0o777}, ""},
		{tar.Header{
			Name: "src/suid", Mode: 0o4755, Uid: 12,
			PAXRecords: map[string]string{"SCHILY.xattr.security.capability": "\x01\x00\x00\x02\x00\x20\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00"},
		}, "x"},
		{tar.Header{Name: "src/sda", Typeflag: tar.TypeBlock, Devmajor: 8}, ""},
	}
	rep, err := Untar(ctx, dst, archive(t, list...), UntarOptions{Rename: "dst"})
	ok(t, err)
	var st unix.Stat_t
	ok(t, unix.Stat(dst+"/dst/suid", &st))
	if n, err := unix.Getxattr(dst+"/dst/suid", "security.capability", nil); err == nil || st.Mode&0o7000 != 0 ||
		st.Uid != 0 || len(rep.Skipped) != 2 {
		t.Errorf("privilege crossed: %d %o %d %q", n, st.Mode, st.Uid, rep.Skipped)
	}
	_, err = Untar(ctx, dst, archive(t, list...), UntarOptions{Rename: "kept", Archive: true})
	ok(t, err)
	ok(t, unix.Stat(dst+"/kept/suid", &st))
	if _, err := unix.Getxattr(dst+"/kept/suid", "security.capability", nil); err != nil ||
		st.Mode&0o7000 != 0o4000 || st.Uid != 12 {
		t.Errorf("lost: %v %o %d", err, st.Mode, st.Uid)
	}
}

// While files go in and out, a process inside swaps the directories for
// symlinks to the outside.
func TestRace(t *testing.T) {
	root, outside := sandbox(t)
	ok(t, os.Symlink(outside, root+"/evil"))
	ok(t, os.Symlink("/../../../../../../"+outside, root+"/work/evil"))
	stop := make(chan struct{})
	var wg sync.WaitGroup
	for _, pair := range [][2]string{{"/work", "/evil"}, {"/work/sub", "/work/evil"}} {
		wg.Add(1)
		go func() {
			defer wg.Done()
			for {
				select {
				case <-stop:
					return
				default:
					_ = unix.Renameat2(unix.AT_FDCWD, root+pair[0], unix.AT_FDCWD, root+pair[1], unix.RENAME_EXCHANGE)
				}
			}
		}()
	}
	var worked, failed int
	deadline := time.Now().Add(3 * time.Second)
	for i := 0; i < 3000 && time.Now().Before(deadline); i++ {
		err := To(ctx, root, nil, "/work", archive(t, ent{tar.Header{Name: "sub/new", Mode: 0o4777, Uid: 9}, "x"},
			ent{tar.Header{Name: "sub/n", Typeflag: tar.TypeFifo, Mode: 0o666, Uid: 9}, ""},
			ent{tar.Header{Name: "secret", Mode: 0o666}, "x"}))
		if err == nil {
			worked++
		} else {
			failed++
		}
		var buf bytes.Buffer
		if err := From(ctx, root, nil, "/work", &buf); err == nil {
			for tr := tar.NewReader(&buf); ; {
				h, err := tr.Next()
				if err != nil {
					break
				}
				if b, _ := io.ReadAll(tr); string(b) == "outside" {
					t.Fatalf("escaped: %s was read", h.Name)
				}
			}
		}
	}
	close(stop)
	wg.Wait()
	if l, _ := os.ReadDir(outside); len(l) != 1 {
		t.Fatalf("escaped: %v", l)
	}
	if b, _ := os.ReadFile(filepath.Join(outside, "secret")); string(b) != "outside" {
		t.Fatalf("escaped: %q", b)
	}
	t.Logf("%d worked, %d failed", worked, failed)
	if worked == 0 || failed == 0 {
		t.Error("no race happened")
	}
}

// A socket in the source makes an error at the end, after all else, directory
// times included, has arrived.
func TestPartialThroughPipe(t *testing.T) {
	root, _ := sandbox(t)
	ok(t, unix.Mknod(root+"/work/sub/sock", unix.S_IFSOCK|0o600, 0))
	past := time.Unix(1000, 5)
	ok(t, os.Chtimes(root+"/work", past, past))
	dst := t.TempDir()
	pr, pw := io.Pipe()
	go func() { pw.CloseWithError(From(ctx, root, nil, "/work", pw)) }()
	_, err := Untar(ctx, dst, pr, UntarOptions{})
	if part := (*Partial)(nil); !errors.As(err, &part) || !errors.Is(err, fault.ErrUnsupported) {
		t.Errorf("%v", err)
	}
	if b, err := os.ReadFile(dst + "/work/sub/g"); string(b) != "g" {
		t.Errorf("%q %v", b, err)
	}
	if fi, err := os.Stat(dst + "/work"); err != nil || !fi.ModTime().Equal(past) {
		t.Errorf("%v %v", fi.ModTime(), err)
	}
}

// The root of a live process in its own mount namespace, as a backend names it.
func TestProcessRoot(t *testing.T) {
	root, _ := sandbox(t)
	ok(t, unix.Mkfifo(root+"/ready", 0o600))
	cmd := exec.Command("unshare", "-m", "sh", "-c",
		`mount --bind "$0" "$0" && mount -t tmpfs tmpfs "$0/work" && echo live >"$0/work/f" && cp /bin/busybox "$0/usr/bin/" && : >"$0/ready" && exec chroot "$0" /usr/bin/busybox sleep 60`, root)
	ok(t, cmd.Start())
	defer func() { _ = cmd.Process.Kill(); _ = cmd.Wait() }()
	_, err := os.ReadFile(root + "/ready") // blocks until the mounts are made
	ok(t, err)
	live := fmt.Sprintf("/proc/%d/root", cmd.Process.Pid)
	for deadline := time.Now().Add(time.Minute); ; { // no event tells that chroot was called
		if _, err := os.Stat(live + "/ready"); err == nil {
			break
		}
		if time.Now().After(deadline) {
			t.Fatal("the process has not changed its root")
		}
		time.Sleep(5 * time.Millisecond)
	}
	ok(t, To(ctx, live, nil, "/work", archive(t, ent{tar.Header{Name: "new", Mode: 0o600}, "x"})))
	var buf bytes.Buffer
	ok(t, From(ctx, live, nil, "/work", &buf))
	if got := entries(t, &buf); got != "work/ work/f work/new" {
		t.Error(got)
	}
	if st, err := StatPath(live, "/abs"); err != nil || st.Link != "/etc/passwd" {
		t.Errorf("%+v %v", st, err)
	}
	if _, err := os.Lstat(root + "/work/new"); err == nil {
		t.Error("it landed on the host's side of the mount")
	}
}

// A live root has /proc, /sys and /dev mounted.
func TestPseudo(t *testing.T) {
	root, _ := sandbox(t)
	for _, d := range []string{"proc", "sys", "dev", "tmp"} {
		ok(t, os.Mkdir(root+"/"+d, 0o755))
	}
	ok(t, unix.Mkfifo(root+"/ready", 0o600))
	cmd := exec.Command("unshare", "-m", "sh", "-c",
		`cd "$0" && mount -t proc proc proc && mount -t sysfs -o ro sysfs sys &&
		mount -t tmpfs tmpfs dev && mkdir dev/pts && mount -t devpts -o newinstance devpts dev/pts && mknod dev/null c 1 3 &&
		mount -t tmpfs tmpfs tmp && echo live >tmp/f && : >ready && exec sleep 60`, root)
	ok(t, cmd.Start())
	defer func() { _ = cmd.Process.Kill(); _ = cmd.Wait() }()
	_, err := os.ReadFile(root + "/ready") // blocks until the mounts are made
	ok(t, err)
	live := fmt.Sprintf("/proc/%d/root%s", cmd.Process.Pid, root)
	read := func(p string) (string, map[string]string, error) {
		t.Helper()
		var buf bytes.Buffer
		err := From(ctx, live, nil, p, &buf)
		content := map[string]string{}
		var names []string
		for r := tar.NewReader(bytes.NewReader(buf.Bytes())); ; {
			h, err := r.Next()
			if err != nil {
				break
			}
			names = append(names, h.Name)
			b, err := io.ReadAll(r)
			ok(t, err)
			content[h.Name] = string(b)
		}
		return strings.Join(names, " "), content, err
	}
	for _, p := range []string{"/", "/."} {
		names, content, err := read(p)
		ok(t, err)
		for _, dir := range []string{"./proc/", "./sys/", "./dev/", "./tmp/"} {
			if !strings.Contains(names, dir) {
				t.Errorf("%s: without %s: %s", p, dir, names)
			}
		}
		if strings.Contains(names, "./proc/s") || strings.Contains(names, "./sys/k") ||
			strings.Contains(names, "./dev/n") {
			t.Errorf("%s: %.300s", p, names)
		}
		if content["./tmp/f"] != "live\n" || content["./etc/passwd"] != "inside" {
			t.Errorf("%s: %q", p, content)
		}
	}
	names, _, err := read("/dev")
	ok(t, err)
	if names != "dev/ dev/null dev/pts/" {
		t.Error(names)
	}
	_, content, err := read("/proc/version")
	ok(t, err)
	if !strings.Contains(content["version"], "Linux") {
		t.Errorf("%q", content)
	}
	var part *Partial
	_, content, err = read("/proc/sys/net/ipv4")
	if !errors.As(err, &part) || content["ipv4/ip_forward"] == "" {
		t.Errorf("%v %d", err, len(content))
	}
	if _, _, err := read("/proc/sys/net/ipv4/route/flush"); err == nil || errors.As(err, &part) {
		t.Error(err)
	}
}

// listing is what List finds: paths, with the letter of their type, owner and target.
func listing(t *testing.T, root, p string, recursive bool) (list []string, err error) {
	t.Helper()
	letters := map[uint32]string{unix.S_IFDIR: "d", unix.S_IFREG: "f", unix.S_IFLNK: "l", unix.S_IFSOCK: "s"}
	err = List(ctx, root, &idmap.Map{Base: 1 << 20, Size: 1 << 16}, p, recursive, func(f Listed) error {
		s := fmt.Sprintf("%s %s %d", letters[f.Stat.Mode&unix.S_IFMT], f.Path, f.Stat.Uid)
		if f.Link != "" {
			s += " -> " + f.Link
		}
		list = append(list, s)
		return nil
	})
	return list, err
}

func TestList(t *testing.T) {
	root, outside := sandbox(t)
	ok(t, os.Chown(root+"/work/f", 1<<20+7, 1<<20))
	ok(t, unix.Mknod(root+"/work/sub/sock", unix.S_IFSOCK|0o600, 0))
	ok(t, os.Symlink("work", root+"/w"))
	for _, c := range []struct {
		p         string
		recursive bool
		want      string
	}{
		{"/work", false,
			"d /work 65534, f /work/f 7, l /work/secret 65534 -> " + outside + "/secret, d /work/sub 65534"},
		{"/w", true, "d /work 65534, f /work/f 7, l /work/secret 65534 -> " + outside + "/secret, d /work/sub 65534, " +
			"f /work/sub/g 65534, s /work/sub/sock 65534"},
		{"w/sub/../f", false, "f /work/f 7"},
		{"/abs", false, "l /abs 65534 -> /etc/passwd"},
		{"/work/secret", false, "l /work/secret 65534 -> " + outside + "/secret"},
		{"/../../bin/", false, "d /usr/bin 65534"},
	} {
		got, err := listing(t, root, c.p, c.recursive)
		if err != nil || strings.Join(got, ", ") != c.want {
			t.Errorf("%s: %q, %v", c.p, got, err)
		}
	}
	for _, p := range []string{"/none", "/out/secret", "/work/f/", ""} {
		if got, err := listing(t, root, p, true); !errors.Is(err, fault.ErrNotFound) || len(got) > 0 {
			t.Errorf("%s: %q, %v", p, got, err)
		}
	}
	own := errors.New("own")
	if err := List(ctx, root, nil, "/", true, func(Listed) error { return own }); err != own {
		t.Error(err)
	}
	ended, cancel := context.WithCancel(ctx)
	if err := List(ended, root, nil, "/", true, func(Listed) error {
		cancel()
		return nil
	}); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}

// A file whose data ends early leaves no part of it, and what was there stays.
func TestUntarWhole(t *testing.T) {
	var b bytes.Buffer
	tw := tar.NewWriter(&b)
	ok(t, tw.WriteHeader(&tar.Header{Name: "f", Typeflag: tar.TypeReg, Mode: 0o644, Size: 100000}))
	_, err := tw.Write(make([]byte, 50000))
	ok(t, err)
	for _, there := range []bool{true, false} {
		dir := t.TempDir()
		if there {
			ok(t, os.WriteFile(dir+"/f", []byte("old"), 0o600))
		}
		if _, err := Untar(ctx, dir, bytes.NewReader(b.Bytes()), UntarOptions{}); !errors.Is(err, fault.ErrInvalid) {
			t.Error(err)
		}
		list, err := os.ReadDir(dir)
		ok(t, err)
		data, _ := os.ReadFile(dir + "/f")
		if there && (len(list) != 1 || string(data) != "old") || !there && len(list) > 0 {
			t.Errorf("%v, %q", list, data)
		}
	}
	dir := t.TempDir()
	ok(t, os.Mkdir(dir+"/f", 0o755))
	if _, err := Untar(ctx, dir, bytes.NewReader(b.Bytes()), UntarOptions{}); !errors.Is(err, fault.ErrExists) {
		t.Error(err)
	}
}
