package volume

import (
	"context"
	"crypto/sha256"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/overlay"
	"github.com/agentbox/agentbox/runtime"
)

func TestMain(m *testing.M) {
	if role := os.Getenv("VOLUME_TEST_ROLE"); role != "" {
		if err := play(role); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	if os.Geteuid() != 0 {
		fmt.Fprintln(os.Stderr, "these tests mount overlays: run them as root")
		os.Exit(1)
	}
	os.Exit(inMemory(m))
}

// inMemory runs the tests on file systems of memory: they wait for the disk
// hundreds of times.
func inMemory(m *testing.M) (code int) {
	for place := range places {
		dir, err := os.MkdirTemp("", "vol")
		if err == nil {
			defer os.Remove(dir)
			err = unix.Mount("tmpfs", dir, "tmpfs", 0, "mode=700")
		}
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		defer func() {
			if err := unix.Unmount(dir, unix.UMOUNT_NOFOLLOW); err != nil {
				fmt.Fprintln(os.Stderr, "left mounted:", dir, err)
				code = 1
			}
		}()
		places[place] = dir
	}
	if err := os.Setenv("TMPDIR", places["near"]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return m.Run()
}

// play is what a test lets another process do, to break it off.
func play(role string) error {
	root := os.Getenv("VOLUME_TEST_ROOT")
	v, err := Open(Options{Root: root, Run: root + "/run", Engine: fakeEngine{}})
	if err != nil {
		return err
	}
	ctx := context.Background()
	b := Backend{v}
	switch role {
	case "apply":
		_, err = b.Apply(ctx, "ws", runtime.ApplyOptions{Force: os.Getenv("VOLUME_TEST_FORCE") != "", Owners: true})
	case "undo":
		_, err = b.Apply(ctx, "ws", runtime.ApplyOptions{Undo: true})
	case "settle":
		err = v.Sweep(ctx)
	case "mount":
		_, err = v.Mount(ctx, "ws", "child")
	case "unmount":
		err = v.Unmount(ctx, "ws", "child")
	case "create":
		err = v.Create(ctx, "ws", CreateOptions{})
	case "remove":
		err = v.Remove(ctx, "ws")
	default:
		err = fmt.Errorf("unknown role %q", role)
	}
	return err
}

// fakeEngine has the users that a test gives it.
type fakeEngine struct{ users *[]User }

func (f fakeEngine) Using(context.Context, string, string) ([]User, error) {
	if f.users == nil {
		return nil, nil
	}
	return slices.Clone(*f.users), nil
}

func (f fakeEngine) set(id string, paused bool) error {
	for i := range *f.users {
		if u := &(*f.users)[i]; u.ID == id {
			u.Paused = paused
			return nil
		}
	}
	return fault.ErrNotFound
}
func (f fakeEngine) Pause(_ context.Context, id string) error { return f.set(id, true) }
func (f fakeEngine) Unpause(_ context.Context, id string) error {
	if f.users == nil {
		return nil
	}
	_ = f.set(id, false)
	return nil
}

// tb is what a rapid test and an ordinary one have in common.
type tb interface {
	Helper()
	Fatalf(string, ...any)
	Fatal(...any)
	Errorf(string, ...any)
}

func must(t tb, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// bench is a root with volumes, and a directory to lay one over.
type bench struct {
	Backend
	root, from string
	users      []User
}

// places are where the original lies: on the volumes' own mount or on another.
var places = map[string]string{"near": "", "far": ""}

func newBench(t testing.TB, place string) *bench {
	t.Helper()
	b, cleanup := makeBench(t, place)
	t.Cleanup(cleanup)
	return b
}

func makeBench(t tb, place string) (*bench, func()) {
	t.Helper()
	root, err := os.MkdirTemp("", "vol")
	must(t, err)
	from, err := os.MkdirTemp(places[place], "from")
	must(t, err)
	b := &bench{root: root, from: from}
	v, err := Open(Options{Root: root, Run: root + "/run", Engine: fakeEngine{&b.users}})
	must(t, err)
	b.Backend = Backend{v}
	return b, func() {
		seen, err := sightingsBelow(root)
		if err != nil || len(seen) > 0 {
			t.Errorf("mounts left: %v, %v", seen, err)
		}
		for _, m := range seen {
			_ = overlay.Unmount(m, overlay.UnmountOptions{Lazy: true})
		}
		_ = os.RemoveAll(root)
		_ = os.RemoveAll(from)
	}
}

func sightingsBelow(root string) ([]string, error) {
	data, err := os.ReadFile("/proc/self/mountinfo")
	var list []string
	for line := range strings.SplitSeq(string(data), "\n") {
		if f := strings.Fields(line); len(f) > 4 && strings.HasPrefix(f[4], root+"/") {
			list = append(list, f[4])
		}
	}
	return list, err
}

// create makes the volume ws over the bench's directory.
func (b *bench) create(t tb) stored {
	t.Helper()
	must(t, b.Volumes.Create(context.Background(), "ws", CreateOptions{From: b.from}))
	rec, err := b.load("ws")
	must(t, err)
	return rec
}

// view is the volume as its users see it.
func (b *bench) view(t tb) map[string]string {
	t.Helper()
	var out map[string]string
	must(t, b.With(context.Background(), "ws", func(p string) error {
		out = look(t, p)
		return nil
	}))
	return out
}

// look describes all that is below a directory, itself included, by path: all
// that an apply must carry.
func look(t tb, dir string) map[string]string {
	t.Helper()
	out := map[string]string{}
	groups := map[[2]uint64][]string{}
	err := filepath.WalkDir(dir, func(p string, _ fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, _ := filepath.Rel(dir, p)
		var st unix.Stat_t
		if err := unix.Lstat(p, &st); err != nil {
			return err
		}
		s := fmt.Sprintf("mode=%o uid=%d gid=%d mtime=%d.%09d rdev=%d", st.Mode, st.Uid, st.Gid,
			st.Mtim.Sec, st.Mtim.Nsec, st.Rdev)
		raw := xattrs(t, p)
		for _, k := range slices.Sorted(maps.Keys(raw)) {
			s += fmt.Sprintf(" %s=%q", k, raw[k])
		}
		switch st.Mode & unix.S_IFMT {
		case unix.S_IFREG:
			f, err := os.Open(p)
			if err != nil {
				return err
			}
			h := sha256.New()
			n, err := io.Copy(h, f)
			hole, e2 := f.Seek(0, unix.SEEK_HOLE)
			if err = errors.Join(err, e2, f.Close()); err != nil && n > 0 {
				return err
			}
			s += fmt.Sprintf(" size=%d sha=%x sparse=%v", n, h.Sum(nil)[:8], hole < n)
		case unix.S_IFLNK:
			l, err := os.Readlink(p)
			if err != nil {
				return err
			}
			s += " -> " + l
		}
		if st.Mode&unix.S_IFMT != unix.S_IFDIR && st.Nlink > 1 {
			k := [2]uint64{st.Dev, st.Ino}
			groups[k] = append(groups[k], rel)
		}
		out[rel] = s
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	for _, paths := range groups {
		if len(paths) > 1 {
			slices.Sort(paths)
			for _, p := range paths {
				out[p] += " group=" + paths[0]
			}
		}
	}
	return out
}

// xattrs reads all attributes of a path.
func xattrs(t tb, p string) map[string]string {
	t.Helper()
	buf, out := make([]byte, 64<<10), map[string]string{}
	n, err := unix.Llistxattr(p, buf)
	must(t, err)
	for name := range strings.SplitSeq(strings.TrimSuffix(string(buf[:n]), "\x00"), "\x00") {
		if name == "" {
			continue
		}
		value := make([]byte, 64<<10)
		n, err := unix.Lgetxattr(p, name, value)
		must(t, err)
		out[name] = string(value[:n])
	}
	return out
}

// rawPath is the path of a refusal in bytes.
func rawPath(t tb, r runtime.Refusal) string {
	t.Helper()
	if r.PathB64 == "" {
		return r.Path
	}
	b, err := base64.StdEncoding.DecodeString(r.PathB64)
	must(t, err)
	return string(b)
}

// differ lists where two looks differ.
func differ(want, got map[string]string) string {
	var list []string
	for p, w := range want {
		if g, ok := got[p]; !ok {
			list = append(list, "missing "+p+": "+w)
		} else if g != w {
			list = append(list, "differs "+p+":\n   want "+w+"\n   got  "+g)
		}
	}
	for p, g := range got {
		if _, ok := want[p]; !ok {
			list = append(list, "surplus "+p+": "+g)
		}
	}
	slices.Sort(list)
	return strings.Join(list, "\n")
}

func equalLook(t tb, what string, want, got map[string]string) {
	t.Helper()
	if d := differ(want, got); d != "" {
		t.Fatalf("%s:\n%s", what, d)
	}
}
