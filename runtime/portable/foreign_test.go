package portable

import (
	"archive/tar"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/checkpoint-restore/go-criu/v7/crit/images/mnt"
	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"

	"github.com/checkpoint-restore/go-criu/v7/crit/images/creds"
	criucore "github.com/checkpoint-restore/go-criu/v7/crit/images/criu-core"
	"github.com/checkpoint-restore/go-criu/v7/crit/images/netdev"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/overlay"
)

// podmanArchive is one that Podman 4.3.1 wrote, of a container that deleted
// /del, made /dir anew, has hard links, a volume and an open file in /dev/shm.
func podmanArchive(t testing.TB) []byte {
	t.Helper()
	data, err := os.ReadFile("testdata/podman-4.3.1.tar.zst")
	must(t, err)
	return data
}

// lowerDirs is an image that has only directories.
func lowerDirs(path string) (overlay.Entry, error) {
	switch path {
	case ".", "dir", "etc":
		return overlay.Entry{
			Path: path, Type: overlay.TypeDir, Mode: 0o751, UID: 7, GID: 8, Mtime: overlay.Time{Sec: 1000, Nsec: 5},
			Xattrs: map[string]string{"user.mark": path, "trusted.overlay.origin": "x"},
		}, nil
	}
	return overlay.Entry{}, fault.ErrNotFound
}

func TestPodmanArchive(t *testing.T) {
	m, f, res := imported(t, podmanArchive(t), OpenOptions{}, ImportOptions{Lower: lowerDirs})
	if f.Manifest != nil || f.Engine != "podman" || f.Name != "c" || f.Image != "localhost/bb:latest" ||
		!hexID().MatchString(f.ImageID) ||
		f.Network != "none" || f.Memory != 64<<20 || f.Labels["a"] != "b" ||
		!slices.Contains(f.Env, "MARK=1") || f.Hostname == "" ||
		f.Workdir != "/" || f.Args[0] != "sh" || f.Runtime != "runc" || f.Signal != "15" {
		t.Errorf("facts: %+v", f)
	}
	if d := cmp.Diff([]Mount{{
		Type: "volume", Source: "data", Target: "/data",
		Options: []string{"rw", "rprivate", "nosuid", "nodev", "rbind"},
	}}, f.Mounts); d != "" {
		t.Errorf("mounts: %s", d)
	}
	if !slices.Equal(f.Volumes, []string{"data"}) || res.Trees != 2 || res.Deleted != 2 || len(res.Notes) != 0 {
		t.Errorf("volumes %v, %+v", f.Volumes, res)
	}
	got := map[string]overlay.Entry{}
	var order []string
	for _, e := range m.entries(t, 0) {
		got[e.Path] = e
		order = append(order, e.Path)
	}
	want := []string{
		".", "count", "data", "del", "dir", "dir/n", "etc", "etc/group", "etc/passwd", "w", "w/a", "w/ff", "w/x",
		"w/x/f", "w/x/l", "w/z",
	}
	if d := cmp.Diff(want, order); d != "" {
		t.Error(d)
	}
	for name, e := range map[string]overlay.Entry{
		"del": {Type: overlay.TypeWhiteout, Mtime: overlay.Time{Sec: f.Created.Unix()}},
		"dir": {
			Type: overlay.TypeDir, Mode: 0o751, UID: 7, GID: 8, Mtime: overlay.Time{Sec: 1000, Nsec: 5},
			Xattrs: map[string]string{"user.mark": "dir", "trusted.overlay.opaque": "y"},
		},
		"etc": {
			Type: overlay.TypeDir, Mode: 0o751, UID: 7, GID: 8, Mtime: overlay.Time{Sec: 1000, Nsec: 5},
			Xattrs: map[string]string{"user.mark": "etc"},
		},
		// As the processes know it, not as the image has it.
		".": {
			Type: overlay.TypeDir, Mode: 0o555, UID: 7, GID: 8, Mtime: overlay.Time{Sec: 1000, Nsec: 5},
			Xattrs: map[string]string{"user.mark": "."},
		},
		"w/x/f": {Type: overlay.TypeFile, Hardlink: "w/a"},
		"w/z":   {Type: overlay.TypeFile, Hardlink: "w/a"},
		"w/a":   {Type: overlay.TypeFile, Mode: 0o4755, Size: 3, Digest: sum([]byte("hi\n")), Mtime: got["w/a"].Mtime},
		"w/ff":  {Type: overlay.TypeFifo, Mode: 0o644, UID: 5, GID: 6, Mtime: got["w/ff"].Mtime},
	} {
		e.Path = name
		if d := cmp.Diff(e, got[name]); d != "" {
			t.Errorf("%s: %s", name, d)
		}
	}
	volume := m.entries(t, 1)
	if len(volume) != 2 || volume[1].Path != "v" || volume[1].Digest != sum([]byte("vol\n")) {
		t.Errorf("the volume has %+v", volume)
	}

	// The images are those of a sandbox.
	targets := map[string]*mnt.MntEntry{}
	for _, name := range slices.Sorted(mapKeys(m.images)) {
		if strings.HasPrefix(name, "mountpoints-") {
			must(t, entriesOf(name, m.images[name], magicMounts, func(data []byte) error {
				e := &mnt.MntEntry{}
				must(t, proto.Unmarshal(data, e))
				targets[e.GetMountpoint()] = e
				return nil
			}))
		}
	}
	for target, e := range targets {
		if strings.HasPrefix(target, "/run/") || strings.HasPrefix(target, "/sys/fs/cgroup") {
			t.Errorf("%s is still mounted", target)
		}
		if e.GetExtKey() != "" && !slices.Contains([]string{
			"/dev/null", "/etc/hosts", "/etc/hostname", "/data",
		}, e.GetExtKey()) {
			t.Errorf("%s comes from outside, from %s", target, e.GetExtKey())
		}
	}
	shm := targets["/dev/shm"]
	if shm == nil || shm.GetExtKey() != "" || shm.GetFstype() != uint32(mnt.Fstype_TMPFS) {
		t.Fatalf("/dev/shm is %v", shm)
	}
	if _, ok := m.images[fmt.Sprintf("tmpfs-dev-%d.tar.gz.img", shm.GetRootDev())]; !ok {
		t.Errorf("/dev/shm has no image: %v", slices.Sorted(mapKeys(m.images)))
	}
	nets := 0
	for name, data := range m.images {
		if strings.HasPrefix(name, "netns-") {
			must(t, entriesOf(name, data, magicNetns, func(data []byte) error {
				e := &netdev.NetnsEntry{}
				must(t, proto.Unmarshal(data, e))
				if e.GetExtKey() == externalNetns {
					nets++
				}
				return nil
			}))
		}
	}
	if nets != 1 {
		t.Errorf("%d network namespaces come from outside", nets)
	}
}

// part is a member of an archive that a test makes.
type part struct {
	name string
	data []byte
	head tar.Header
}

func tarOf(t testing.TB, parts ...part) []byte {
	t.Helper()
	var buf bytes.Buffer
	w := tar.NewWriter(&buf)
	for _, p := range parts {
		h := p.head
		h.Name, h.Size = p.name, int64(len(p.data))
		if h.Typeflag == 0 {
			h.Typeflag = tar.TypeReg
		}
		if h.Mode == 0 {
			h.Mode = 0o644
		}
		must(t, w.WriteHeader(&h))
		_, err := w.Write(p.data)
		must(t, err)
	}
	must(t, w.Close())
	return buf.Bytes()
}

const (
	plainConfig = `{"id":"1234","name":"x","rootfsImageID":"` +
		"7f55b334023ea843d8921946bf448416d7ae54a69fb8670afc7a0d675c785061" +
		`","rootfsImageName":"localhost/bb:latest","createNetNS":true,"createdTime":"2026-01-02T03:04:05Z"}`
	plainSpec = `{"ociVersion":"1.0.2","process":{"user":{"uid":0,"gid":0},"args":["sh"],"cwd":"/"},"root":{"path":"rootfs"},"hostname":"h"}`
)

// foreignParts is the least that another engine's archive has.
func foreignParts(more ...part) []part {
	return append([]part{
		{name: "config.dump", data: []byte(plainConfig)}, {name: "spec.dump", data: []byte(plainSpec)},
		{name: "checkpoint", head: tar.Header{Typeflag: tar.TypeDir}},
		{name: "checkpoint/inventory.img", data: []byte("i")},
	}, more...)
}

func rootfs(t testing.TB, parts ...part) part {
	return part{name: rootfsName, data: tarOf(t, parts...)}
}

func list(paths ...string) part {
	data, _ := json.Marshal(paths)
	return part{name: deletedName, data: data}
}

// The order of another's members does not matter.
func TestForeignOrder(t *testing.T) {
	parts := foreignParts(
		rootfs(t, part{name: "a/f", data: []byte("x")}, part{
			name: "dir", head: tar.Header{Typeflag: tar.TypeDir},
		}, part{name: "dir/n"}),
		list("/gone", "/dir", "/sub/x", "/gone/below"), part{name: "dump.log", data: []byte("log")},
		part{name: "artifacts/x"}, part{name: "new-thing", data: []byte("?")},
	)
	forward, _, res := imported(t, tarOf(t, parts...), OpenOptions{}, ImportOptions{})
	slices.Reverse(parts)
	backward, _, again := imported(t, tarOf(t, parts...), OpenOptions{}, ImportOptions{})
	if d := cmp.Diff(string(forward.trees[0]), string(backward.trees[0])); d != "" {
		t.Error(d)
	}
	var paths []string
	for _, e := range forward.entries(t, 0) {
		paths = append(paths, fmt.Sprintf("%s %s %v", e.Path, e.Type, opaque(&e)))
	}
	want := []string{
		". dir false", "a dir false", "a/f file false", "dir dir true", "dir/n file false", "gone whiteout false",
		"sub dir false", "sub/x whiteout false",
	}
	if d := cmp.Diff(want, paths); d != "" {
		t.Error(d)
	}
	for _, r := range []Imported{res, again} {
		if len(r.Notes) != 1 || !strings.Contains(r.Notes[0], "new-thing") {
			t.Errorf("notes: %q", r.Notes)
		}
	}
}

// Without files there is a root, and a word about it.
func TestForeignWithoutFiles(t *testing.T) {
	m, _, res := imported(t, tarOf(t, foreignParts()...), OpenOptions{}, ImportOptions{})
	if e := m.entries(t, 0); len(e) != 1 || e[0].Path != "." || e[0].Mode != 0o555 {
		t.Errorf("%+v", e)
	}
	if len(res.Notes) != 1 || !strings.Contains(res.Notes[0], "ignore-rootfs") {
		t.Errorf("notes: %q", res.Notes)
	}
}

// hostile are archives that would do harm, and the words they are refused with.
func hostile(t testing.TB) map[string]struct {
	archive []byte
	words   string
} {
	t.Helper()
	type bad = struct {
		archive []byte
		words   string
	}
	link := func(kind byte, to string) tar.Header { return tar.Header{Typeflag: kind, Linkname: to} }
	dir := tar.Header{Typeflag: tar.TypeDir}
	sparse := tarOf(t, foreignParts()...)
	out := map[string]bad{
		"a member outside":     {tarOf(t, part{name: "../evil"}), "leads out"},
		"a member far outside": {tarOf(t, part{name: "checkpoint/../../evil"}), "leads out"},
		"an absolute member":   {tarOf(t, part{name: "/etc/passwd"}), "absolute"},
		"a member that is a symlink": {tarOf(t, foreignParts(part{
			name: "checkpoint/x", head: link(tar.TypeSymlink, "/etc/passwd"),
		})...), "no plain file"},
		"a member that is a hard link": {tarOf(t, foreignParts(part{
			name: "checkpoint/x", head: link(tar.TypeLink, "config.dump"),
		})...), "no plain file"},
		"a member that is a device": {tarOf(t, foreignParts(part{
			name: "x", head: tar.Header{Typeflag: tar.TypeBlock, Devmajor: 8},
		})...), "no plain file"},
		"an image in a directory": {tarOf(t, foreignParts(part{name: "checkpoint/a/b"})...), "cannot be the name"},
		"an image twice": {tarOf(t,
			foreignParts(part{name: "checkpoint/inventory.img"})...), "comes twice"},
		"an image by two spellings": {tarOf(t,
			foreignParts(part{name: "./checkpoint/inventory.img"})...), "comes twice"},
		"a configuration twice": {tarOf(t, foreignParts(part{
			name: "config.dump", data: []byte(plainConfig),
		})...), "comes twice"},
		"no inventory":     {tarOf(t, foreignParts()[:3]...), "inventory.img is missing"},
		"no specification": {tarOf(t, foreignParts()[:1]...), "spec.dump is missing"},
		"nothing":          {nil, "the archive is"},
		"no archive":       {[]byte(strings.Repeat("hello world ", 1000)), "no archive"},
		"a volume that nobody named": {tarOf(t, foreignParts(part{
			name: "volumes/x.tar", data: tarOf(t),
		})...), "no volume"},
		"a file outside":        {tarOf(t, foreignParts(rootfs(t, part{name: "../x"}))...), `".."`},
		"a file outside, later": {tarOf(t, foreignParts(rootfs(t, part{name: "a/../../x"}))...), `".."`},
		"an absolute file":      {tarOf(t, foreignParts(rootfs(t, part{name: "/etc/passwd"}))...), "absolute"},
		"a file below a symlink": {tarOf(t, foreignParts(rootfs(t,
			part{name: "l", head: link(tar.TypeSymlink, "/")}, part{name: "l/x"}))...), "no directory"},
		"a file below a file": {tarOf(t, foreignParts(rootfs(t, part{name: "f"},
			part{name: "f/x/y"}))...), "no directory"},
		"a file twice": {tarOf(t, foreignParts(rootfs(t, part{name: "f"},
			part{name: "./f"}))...), "comes twice"},
		"a hard link outside": {tarOf(t, foreignParts(rootfs(t,
			part{name: "f", head: link(tar.TypeLink, "../../etc/shadow")}))...), `".."`},
		"an absolute hard link": {tarOf(t, foreignParts(rootfs(t,
			part{name: "f", head: link(tar.TypeLink, "/etc/shadow")}))...), "absolute"},
		"a hard link to nothing": {tarOf(t, foreignParts(rootfs(t,
			part{name: "f", head: link(tar.TypeLink, "g")}))...), "not there"},
		"a hard link to itself": {tarOf(t, foreignParts(rootfs(t,
			part{name: "f", head: link(tar.TypeLink, "f")}))...), "not there"},
		"a hard link to a directory": {tarOf(t, foreignParts(rootfs(t, part{name: "d", head: dir},
			part{name: "f", head: link(tar.TypeLink, "d")}))...), "cannot have one"},
		"a hard link that is a file": {tarOf(t, foreignParts(rootfs(t, part{name: "f"}, part{name: "g"},
			part{name: "g", head: link(tar.TypeLink, "f")}))...), "comes twice"},
		"a file below a hard link": {tarOf(t, foreignParts(rootfs(t, part{name: "f"},
			part{name: "g", head: link(tar.TypeLink, "f")}, part{name: "g/x"}))...), "no directory"},
		"a whiteout": {tarOf(t, foreignParts(rootfs(t,
			part{name: "f", head: tar.Header{Typeflag: tar.TypeChar}}))...), "0:0"},
		"an impossible device": {tarOf(t, foreignParts(rootfs(t,
			part{name: "f", head: tar.Header{Typeflag: tar.TypeChar, Devmajor: 1 << 20}}))...), "device"},
		"an overlay's attribute": {tarOf(t, foreignParts(rootfs(t,
			part{name: "d", head: tar.Header{
				Typeflag: tar.TypeDir, PAXRecords: map[string]string{"SCHILY.xattr.trusted.overlay.redirect": "/etc"},
			}}))...), "trusted.overlay.redirect"},
		"a name that is too long": {tarOf(t, foreignParts(rootfs(t,
			part{name: strings.Repeat("n", 300)}))...), "300 bytes"},
		"a path that is too deep": {tarOf(t, foreignParts(rootfs(t,
			part{name: strings.Repeat("d/", 3000) + "f"}))...), "levels"},
		"deleted: outside":           {tarOf(t, foreignParts(list("/../../etc"))...), `".."`},
		"deleted: relative":          {tarOf(t, foreignParts(list("etc"))...), "not the path"},
		"deleted: the root":          {tarOf(t, foreignParts(list("/"))...), "not the path"},
		"deleted: the root, spelled": {tarOf(t, foreignParts(list("/."))...), "not the path"},
		"deleted: twice absolute":    {tarOf(t, foreignParts(list("//etc"))...), "absolute"},
		"deleted: a NUL":             {tarOf(t, foreignParts(list("/a\x00b"))...), "NUL"},
		"deleted: no list": {tarOf(t, foreignParts(part{
			name: deletedName, data: []byte(`{"a":1}`),
		})...), "deleted.files"},
		"deleted: and there": {tarOf(t, foreignParts(rootfs(t, part{name: "f"}), list("/f"))...), "both"},
		"deleted: below a file": {tarOf(t, foreignParts(rootfs(t, part{name: "f"}),
			list("/f/x"))...), "no directory"},
		"a working directory": {tarOf(t, part{name: "config.dump", data: []byte(plainConfig)},
			part{name: "spec.dump", data: []byte(strings.Replace(plainSpec, `"cwd":"/"`, `"cwd":"x"`,
				1))}), "working directory"},
		"an id that is a path": {tarOf(t, part{name: "config.dump", data: []byte(`{"id":"../../x"}`)},
			part{name: "spec.dump", data: []byte(plainSpec)}), "id"},
		"a volume that is a path": {tarOf(t, part{
			name: "config.dump", data: []byte(`{"id":"1","namedVolumes":[{"volumeName":"../x","dest":"/d"}]}`),
		}, part{name: "spec.dump", data: []byte(plainSpec)}), "volume"},
		"something behind":    {append(tarOf(t, foreignParts()...), "behind"...), "follows"},
		"a cut tar":           {sparse[:len(sparse)-1024], "cut off"},
		"a member with holes": {sparseTar(t, 1<<50), "holes"},
		"a file with holes": {tarOf(t, foreignParts(part{
			name: rootfsName, data: sparseTar(t, 1<<50),
		})...), "holes"},
		"configuration without end": {tarOf(t, part{
			name: "config.dump", data: bytes.Repeat([]byte(" "), maxConfig+1),
		}), "longer"},
	}
	return out
}

// sparseTar has a file that is a hole.
func sparseTar(t testing.TB, size int64) []byte {
	t.Helper()
	var buf bytes.Buffer
	w := overlay.NewTarWriter(&buf)
	must(t, w.Header(overlay.Entry{
		Path: "checkpoint", Type: overlay.TypeFile, Mode: 0o600, Size: size, Extents: []overlay.Extent{},
	}))
	must(t, w.Close())
	return buf.Bytes()
}

func TestHostile(t *testing.T) {
	for name, bad := range hostile(t) {
		t.Run(name, func(t *testing.T) {
			for _, data := range [][]byte{bad.archive, zstded(t, bad.archive)} {
				_, _, _, err := importBytes(t, data, OpenOptions{}, ImportOptions{})
				if !errors.Is(err, fault.ErrCorrupt) || !strings.Contains(fmt.Sprint(err), bad.words) {
					t.Errorf("got %v, want %q", err, bad.words)
				}
			}
		})
	}
}

// An archive that unpacks to too much is given up as soon as that is known.
func TestBombs(t *testing.T) {
	big := zstded(t, tarOf(t, foreignParts(part{name: "checkpoint/pages-1.img", data: make([]byte, 64<<20)})...))
	_, _, _, err := importBytes(t, big, OpenOptions{MaxBytes: 32 << 20}, ImportOptions{})
	if !errors.Is(err, fault.ErrCorrupt) || !strings.Contains(err.Error(), "unpacks to more than") {
		t.Errorf("too long: %v", err)
	}
	b := &bounded{src: &source{n: 1 << 20}, r: zeros{}, most: 1 << 62, ratio: 1000}
	b.n = freeRatio
	if _, err := b.Read(make([]byte, 10)); !errors.Is(err, fault.ErrCorrupt) {
		t.Errorf("too dense: %v", err)
	}
	if _, _, _, err := importBytes(t, big, OpenOptions{}, ImportOptions{}); err != nil {
		t.Errorf("64 MiB of zeros are fine: %v", err)
	}
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) { clear(p); return len(p), nil }

// Members of an archive of ours stand in one order, and agree.
func TestHostileOwn(t *testing.T) {
	_, c := full(t)
	archive := exported(t, c, Options{Compress: None})
	names, content := members(t, archive)
	build := func(change func(parts []part) []part) []byte {
		var parts []part
		for _, name := range names {
			p := part{name: name, data: content[name]}
			if strings.HasSuffix(name, "/") {
				p.head.Typeflag = tar.TypeDir
			}
			parts = append(parts, p)
		}
		return tarOf(t, change(parts)...)
	}
	if _, _, _, err := importBytes(t, build(func(p []part) []part { return p }), OpenOptions{},
		ImportOptions{}); err != nil {
		t.Fatalf("the members packed anew: %v", err)
	}
	at := func(parts []part, name string) int {
		return slices.IndexFunc(parts, func(p part) bool { return p.name == name })
	}
	edit := func(name string, fn func(data []byte) []byte) func([]part) []part {
		return func(parts []part) []part {
			i := at(parts, name)
			parts[i].data = fn(bytes.Clone(parts[i].data))
			return parts
		}
	}
	for name, change := range map[string]func([]part) []part{
		"two swapped":        func(p []part) []part { p[4], p[5] = p[5], p[4]; return p },
		"one twice":          func(p []part) []part { return slices.Insert(p, 3, p[2]) },
		"one more":           func(p []part) []part { return append(p, part{name: "agentbox/more"}) },
		"one in the middle":  func(p []part) []part { return slices.Insert(p, 7, part{name: "x"}) },
		"one less":           func(p []part) []part { return p[:len(p)-1] },
		"no files":           func(p []part) []part { i := at(p, rootfsName); return slices.Delete(p, i, i+1) },
		"a crafted deletion": edit(deletedName, func([]byte) []byte { return []byte(`["/../../../etc"]`) }),
		"another tree": edit("agentbox/tree-0.jsonl", func(d []byte) []byte {
			return bytes.Replace(d, []byte("fifo"), []byte("fifx"), 1)
		}),
		"other content": edit(rootfsName, func(d []byte) []byte {
			return bytes.Replace(d, []byte("content\n"), []byte("CONTENT\n"), 1)
		}),
		"another owner": edit(rootfsName, func(d []byte) []byte {
			return bytes.Replace(d, []byte("setuid"), []byte("setuid"), 1)[:len(d)-2048]
		}),
		"another root":   edit(rootfsName, func(d []byte) []byte { d[100] ^= 1; return d }),
		"another image":  edit("checkpoint/inventory.img", func(d []byte) []byte { d[0] ^= 1; return d }),
		"a longer image": edit("checkpoint/inventory.img", func(d []byte) []byte { return append(d, 0) }),
		"a longer tree":  edit("agentbox/tree-0.jsonl", func(d []byte) []byte { return append(d, '\n') }),
		"no manifest":    edit(manifestName, func([]byte) []byte { return []byte("{}") }),
		"another file": edit(rootfsName, func(d []byte) []byte {
			return append(d[:len(d)-1024], tarOf(t, part{name: "zzz"})...)
		}),
	} {
		t.Run(name, func(t *testing.T) {
			if _, _, _, err := importBytes(t, build(change), OpenOptions{},
				ImportOptions{}); !errors.Is(err, fault.ErrCorrupt) {
				t.Errorf("it was taken: %v", err)
			}
		})
	}
	later := build(edit(versionName, func([]byte) []byte { return []byte("agentbox checkpoint archive, version 2\n") }))
	if _, _, _, err := importBytes(t, later, OpenOptions{}, ImportOptions{}); !errors.Is(err, fault.ErrUnsupported) {
		t.Errorf("a later version: %v", err)
	}
}

// An upperdir that leads elsewhere cannot come back as what it was.
func TestRedirects(t *testing.T) {
	m := newMemory(t)
	dir := t.TempDir()
	must(t, os.Mkdir(filepath.Join(dir, "d"), 0o755))
	must(t, unix.Setxattr(filepath.Join(dir, "d"), "trusted.overlay.redirect", []byte("/etc"), 0))
	m.put(t, dir)
	archive := exported(t, Checkpoint{Manifest: m.manifest(t), Data: m}, Options{})
	if _, _, _, err := importBytes(t, archive, OpenOptions{}, ImportOptions{}); !errors.Is(err, fault.ErrUnsupported) {
		t.Errorf("a redirect: %v", err)
	}
}

// Processes that could do more than a container's are not taken on trust.
func TestForgedImages(t *testing.T) {
	image := func(magic uint32, list ...proto.Message) []byte {
		dir := t.TempDir()
		root, err := os.OpenRoot(dir)
		must(t, err)
		defer root.Close()
		must(t, replaceImage(root, "x", magic, list))
		data, err := root.ReadFile("x")
		must(t, err)
		return data
	}
	mount := func(kind mnt.Fstype, target, source string, flags uint32) *mnt.MntEntry {
		return &mnt.MntEntry{
			Fstype: proto.Uint32(uint32(kind)), MntId: proto.Uint32(1), RootDev: proto.Uint32(1),
			ParentMntId: proto.Uint32(1), Flags: proto.Uint32(flags),
			Root: proto.String("/"), Mountpoint: proto.String(target), Source: proto.String(source),
			Options: proto.String(""),
		}
	}
	root := mount(mnt.Fstype_OVERLAYFS, "/", "overlay", 0)
	core := &criucore.CoreEntry{
		Mtype: criucore.CoreEntry_X86_64.Enum(),
		ThreadCore: &criucore.ThreadCoreEntry{FutexRla: proto.Uint64(0), FutexRlaLen: proto.Uint32(0),
			Creds: &creds.CredsEntry{
				Uid: proto.Uint32(0), Gid: proto.Uint32(0), Euid: proto.Uint32(0), Egid: proto.Uint32(0),
				Suid: proto.Uint32(0), Sgid: proto.Uint32(0),
				Fsuid: proto.Uint32(0), Fsgid: proto.Uint32(0), Secbits: proto.Uint32(0),
				CapEff: []uint32{1 << unix.CAP_SYS_ADMIN, 0},
			}},
	}
	bare := &criucore.CoreEntry{Mtype: core.Mtype, ThreadCore: &criucore.ThreadCoreEntry{
		FutexRla: proto.Uint64(0), FutexRlaLen: proto.Uint32(0),
	}}
	child := proto.Clone(core).(*criucore.CoreEntry)
	child.ThreadCore.Creds.CapEff, child.ThreadCore.Creds.LsmProfile = nil, proto.String("agentbox-default//more")
	for name, p := range map[string]part{
		"no credentials":    {name: "checkpoint/core-7.img", data: image(magicCore, bare)},
		"old credentials":   {name: "checkpoint/creds-1.img", data: image(magicCore)},
		"AppArmor policy":   {name: "checkpoint/apparmor.img", data: image(magicCore)},
		"part of a profile": {name: "checkpoint/core-7.img", data: image(magicCore, child)},
		"a disk": {
			name: "checkpoint/mountpoints-9.img", data: image(magicMounts, root,
				mount(mnt.Fstype_AUTO, "/mnt", "/dev/vda", 0)),
		},
		"two roots": {name: "checkpoint/mountpoints-9.img", data: image(magicMounts, root, root)},
		"no root":   {name: "checkpoint/mountpoints-9.img", data: image(magicMounts)},
		"a writable /sys": {
			name: "checkpoint/mountpoints-9.img", data: image(magicMounts, root,
				mount(mnt.Fstype_SYSFS, "/sys", "sysfs", 0)),
		},
		"a writable sysctl": {
			name: "checkpoint/mountpoints-9.img", data: image(magicMounts, root,
				mount(mnt.Fstype_PROC, "/proc", "proc", 0)),
		},
		"the host's cgroups": {
			name: "checkpoint/mountpoints-9.img", data: image(magicMounts, root,
				mount(mnt.Fstype_CGROUP2, "/c", "cgroup", 0)),
		},
		"CAP_SYS_ADMIN": {name: "checkpoint/core-1.img", data: image(magicCore, core)},
	} {
		archive := tarOf(t, foreignParts(p)...)
		if _, _, _, err := importBytes(t, archive, OpenOptions{}, ImportOptions{}); !errors.Is(err, fault.ErrDenied) {
			t.Errorf("%s: %v", name, err)
		}
		if _, _, _, err := importBytes(t, archive, OpenOptions{}, ImportOptions{Trust: true}); err != nil {
			t.Errorf("%s, trusted: %v", name, err)
		}
	}
	// The container's own, where its host has cgroup v2: a sandbox does without.
	unified := part{
		name: "checkpoint/mountpoints-9.img", data: image(magicMounts, root,
			mount(mnt.Fstype_CGROUP2, "/sys/fs/cgroup", "cgroup", unix.MS_RDONLY)),
	}
	m, _, _ := imported(t, tarOf(t, foreignParts(unified)...), OpenOptions{}, ImportOptions{})
	must(t, entriesOf("mountpoints-9.img", m.images["mountpoints-9.img"], magicMounts, func(data []byte) error {
		e := &mnt.MntEntry{}
		must(t, proto.Unmarshal(data, e))
		if e.GetMountpoint() != "/" {
			t.Errorf("%s is still mounted", e.GetMountpoint())
		}
		return nil
	}))
	// A sandbox's own is taken as it is, and nothing else of the kind.
	filesystem := func(e *mnt.MntEntry) *mnt.MntEntry { // read-only as a whole, it says
		e.SbFlags = proto.Uint32(unix.MS_RDONLY)
		return e
	}
	for _, try := range []struct {
		mount *mnt.MntEntry
		want  error
	}{
		{filesystem(mount(mnt.Fstype_CGROUP2, "/sys/fs/cgroup", "cgroup", unix.MS_NOSUID)), fault.ErrDenied},
		{filesystem(mount(mnt.Fstype_SYSFS, "/sys", "sysfs", 0)), fault.ErrDenied},
		{filesystem(mount(mnt.Fstype_SYSFS, "/sys", "sysfs", unix.MS_RDONLY)), nil},
		{mount(mnt.Fstype_CGROUP2, "/sys/fs/cgroup", "cgroup", unix.MS_RDONLY|unix.MS_NOSUID), nil},
		{mount(mnt.Fstype_CGROUP2, "/sys/fs/cgroup", "cgroup", unix.MS_NOSUID), fault.ErrDenied},
		{mount(mnt.Fstype_CGROUP2, "/c", "cgroup", unix.MS_RDONLY), fault.ErrDenied},
		{mount(mnt.Fstype_CGROUP, "/sys/fs/cgroup", "cgroup", unix.MS_RDONLY), fault.ErrDenied},
	} {
		dir := t.TempDir()
		must(t, os.WriteFile(filepath.Join(dir, "mountpoints-9.img"), image(magicMounts, root, try.mount), 0o600))
		if err := checkImages(dir); !errors.Is(err, try.want) {
			t.Errorf("%v: %v, want %v", try.mount, err, try.want)
		}
	}
	for flags, want := range map[uint32]error{unix.MS_RDONLY: nil, 0: fault.ErrDenied} {
		dir := t.TempDir()
		must(t, os.WriteFile(filepath.Join(dir, "mountpoints-9.img"), image(magicMounts, root,
			mount(mnt.Fstype_PROC, "/proc", "proc", 0), filesystem(mount(mnt.Fstype_PROC, "/proc/sys",
				"proc", flags))), 0o600))
		if err := checkImages(dir); !errors.Is(err, want) {
			t.Errorf("/proc/sys with %#x: %v, want %v", flags, err, want)
		}
	}
	cut := image(magicCore, core)
	if _, _, _, err := importBytes(t, tarOf(t, foreignParts(part{
		name: "checkpoint/core-1.img", data: cut[:len(cut)-1],
	})...), OpenOptions{}, ImportOptions{}); !errors.Is(err, fault.ErrCorrupt) {
		t.Errorf("a cut image: %v", err)
	}
}
