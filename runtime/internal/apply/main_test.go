package apply

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/overlay"
	"github.com/agentbox/agentbox/runtime"
)

func TestMain(m *testing.M) {
	if root := os.Getenv("APPLY_TEST_ROOT"); root != "" {
		if err := play(root, os.Getenv("APPLY_TEST_ROLE")); err != nil {
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

// places are where the directories lie: on the home's own mount or on another.
var places = map[string]string{"near": "", "far": ""}

// inMemory runs the tests on file systems of memory: they wait for the disk
// hundreds of times.
func inMemory(m *testing.M) (code int) {
	for place := range places {
		dir, err := os.MkdirTemp("", "apply")
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
	return m.Run()
}

// tb is what a rapid test and an ordinary one have in common.
type tb interface {
	Helper()
	Fatalf(string, ...any)
	Fatal(...any)
	Errorf(string, ...any)
}

func must(t tb, errs ...error) {
	t.Helper()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
}

// lab is a sandbox with some workspaces, each in a directory w0, w1, ... of the lab: from is the
// host's, base what it was when the sandbox began.
type lab struct {
	root string
	n    int
	far  string // where the directories lie; empty: in the lab
	keep map[string]BaseEntry
	note any
	same bool // all lie over one directory

	review  func() error // called once the result has been looked at; nil: nothing
	sum     string       // the digest of the last apply
	removed []string     // what went with it

	canaries []Canary
	lax      bool // a change since the plan is no reason to refuse, unless it is in the way
}

func newLab(t tb, place string, n int) (*lab, func()) {
	t.Helper()
	root, err := os.MkdirTemp(places["near"], "lab")
	must(t, err)
	l := &lab{root: root, n: n}
	if place == "far" {
		l.far, err = os.MkdirTemp(places["far"], "from")
		must(t, err)
		must(t, os.WriteFile(root+"/far", []byte(l.far), 0o600))
	}
	for i := range n {
		must(t, os.MkdirAll(l.from(i), 0o755), os.MkdirAll(l.at(i, "upper"), 0o755), os.Mkdir(l.at(i, "work"), 0o755),
			os.Mkdir(l.at(i, "merged"), 0o755))
	}
	must(t, os.Mkdir(root+"/home", 0o700))
	return l, func() { must(t, os.RemoveAll(root), os.RemoveAll(l.far)) }
}

func openLab(root string) *lab {
	l := &lab{root: root, canaries: []Canary{{
		Takes: func(_, rel string) bool { return rel == "a" || rel == "n/deep/f" },
		Check: func(context.Context) error { return nil },
	}}}
	far, _ := os.ReadFile(root + "/far")
	l.far = string(far)
	for {
		if _, err := os.Stat(l.at(l.n, "upper")); err != nil {
			return l
		}
		l.n++
	}
}

func (l *lab) at(i int, name string) string {
	return filepath.Join(l.root, fmt.Sprintf("w%d", i), name)
}

func (l *lab) from(i int) string {
	if l.same {
		i = 0
	}
	if l.far != "" {
		return filepath.Join(l.far, fmt.Sprint(i))
	}
	return l.at(i, "from")
}

// begin keeps what the directories are as the base.
func (l *lab) begin(t tb) {
	t.Helper()
	for i := range l.n {
		must(t, os.RemoveAll(l.at(i, "base")), os.Mkdir(l.at(i, "base"), 0o755),
			copyTree(context.Background(), l.from(i), l.at(i, "base")))
	}
}

// inside runs fn on a workspace as the sandbox sees it.
func (l *lab) inside(t tb, i int, fn func(dir string)) {
	t.Helper()
	m := overlay.Mount{
		Lower: []string{l.from(i)}, Upper: l.at(i, "upper"), Work: l.at(i, "work"), Target: l.at(i, "merged"),
	}
	must(t, m.Mount())
	defer func() { must(t, overlay.Unmount(m.Target, overlay.UnmountOptions{})) }()
	fn(m.Target)
}

func (l *lab) home() Home {
	var list []runtime.Volume
	for i := range l.n {
		list = append(list, runtime.Volume{Target: fmt.Sprintf("/w%d", i), Lower: l.from(i), Path: l.at(i, "upper")})
	}
	return OfWorkspaces(l.root+"/home", "c", list, slog.New(slog.DiscardHandler))
}

// run applies all workspaces.
func (l *lab) run(opts runtime.ApplyOptions, change func(*Change)) (out runtime.Applied, err error) {
	ctx := context.Background()
	h := l.home()
	h.Note = l.note
	var list []Change
	for i, p := range h.Places {
		upper, err := OpenRoot(l.at(i, "upper"))
		if err != nil {
			return out, err
		}
		defer upper.Close()
		c := Change{Place: p, Source: Upperdir(ctx, upper), Base: l.baseOf(i)}
		if l.keep != nil {
			c.Base = func(context.Context, map[string]bool) (map[string]BaseEntry, error) { return l.keep, nil }
		}
		if change != nil {
			change(&c)
		}
		list = append(list, c)
	}
	h.Canaries, h.Judged = l.canaries, !l.lax
	staged := map[int]map[string]string{}
	h.Review = func(ctx context.Context, s *Staged) error {
		if err := l.look(ctx, s, staged); err != nil || l.review == nil {
			return err
		}
		return l.review()
	}
	out = Nothing(opts)
	if err := Run(ctx, h, list, opts, &out); err != nil {
		return out, err
	}
	for i, want := range staged {
		if opts.DryRun || l.lax {
			break
		}
		got, err := exact(l.from(i))
		if err != nil || !maps.Equal(got, want) {
			return out, fmt.Errorf("%w: the directory is\n%sand was staged as\n%s", err, text(got), text(want))
		}
	}
	return out, nil
}

// look notes what the staged result of an apply shows of each workspace.
func (l *lab) look(ctx context.Context, s *Staged, to map[int]map[string]string) (err error) {
	if l.sum, err = s.Sum(ctx); err != nil {
		return err
	}
	if l.removed, err = s.Removed(ctx); err != nil {
		return err
	}
	for i := range l.n {
		if l.same { // another one changes the directory, too
			break
		}
		dir, err := os.MkdirTemp(l.root, "staged")
		if err != nil {
			return err
		}
		m := overlay.Mount{
			Lower: []string{l.from(i)}, Upper: dir + "/upper", Work: dir + "/work", Target: dir + "/merged",
		}
		if err := errors.Join(os.Mkdir(m.Work, 0o755), os.Mkdir(m.Target, 0o755), MakeUpper(m.Upper, l.from(i))); err != nil {
			return err
		}
		if err := s.Lay(ctx, fmt.Sprintf("/w%d", i), m.Upper); err != nil {
			return err
		}
		if err := m.Mount(); err != nil {
			return err
		}
		to[i], err = exact(m.Target)
		if err := errors.Join(err, overlay.Unmount(m.Target, overlay.UnmountOptions{}), os.RemoveAll(dir)); err != nil {
			return err
		}
	}
	return nil
}

// exact describes what a directory has, but for the times of directories, which renames change.
func exact(dir string) (map[string]string, error) {
	out := map[string]string{}
	err := filepath.WalkDir(dir, func(p string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		var st unix.Stat_t
		if err := unix.Lstat(p, &st); err != nil {
			return err
		}
		said := fmt.Sprintf("%o %d:%d", st.Mode, st.Uid, st.Gid)
		rel, _ := filepath.Rel(dir, p)
		switch {
		case d.Type()&fs.ModeSymlink != 0:
			to, err := os.Readlink(p)
			out[rel] = said + " -> " + to
			return err
		case d.Type().IsRegular():
			data, err := os.ReadFile(p)
			out[rel] = fmt.Sprintf("%s %d.%09d %q", said, st.Mtim.Sec, st.Mtim.Nsec, data)
			return err
		}
		out[rel] = said
		return nil
	})
	return out, err
}

func (l *lab) baseOf(i int) Base {
	return func(ctx context.Context, _ map[string]bool) (map[string]BaseEntry, error) {
		dir, err := OpenRoot(l.at(i, "base"))
		if err != nil {
			return nil, err
		}
		defer dir.Close()
		found := map[string]BaseEntry{}
		return found, overlay.Walk(ctx, dir.Proc(), overlay.WalkOptions{}, func(e overlay.Entry) error {
			data, err := os.ReadFile(l.at(i, "base/"+e.Path))
			if err != nil && e.Type == overlay.TypeFile {
				return err
			}
			found[e.Path] = BaseEntry{e, memory(data)}
			return nil
		})
	}
}

// memory is the data of a file.
type memory []byte

func (m memory) Data(context.Context, overlay.Entry) (io.ReadCloser, error) {
	return io.NopCloser(bytes.NewReader(m)), nil
}

// files describes what a directory has: files and links by what is in them, and empty directories.
func files(t tb, dir string) map[string]string {
	t.Helper()
	out := map[string]string{}
	must(t, filepath.WalkDir(dir, func(p string, d fs.DirEntry, err error) error {
		if err != nil || p == dir {
			return err
		}
		rel, _ := filepath.Rel(dir, p)
		switch {
		case d.IsDir():
			if list, err := os.ReadDir(p); err != nil || len(list) > 0 {
				return err
			}
			out[rel] = "(empty directory)"
		case d.Type()&fs.ModeSymlink != 0:
			to, err := os.Readlink(p)
			out[rel] = "-> " + to
			return err
		default:
			data, err := os.ReadFile(p)
			out[rel] = string(data)
			return err
		}
		return nil
	}))
	return out
}

func text(m map[string]string) string {
	var b strings.Builder
	for _, k := range slices.Sorted(maps.Keys(m)) {
		fmt.Fprintf(&b, "%s: %q\n", k, m[k])
	}
	return b.String()
}

func same(t tb, what string, got, want map[string]string) {
	t.Helper()
	if !maps.Equal(got, want) {
		t.Fatalf("%s has\n%swant\n%s", what, text(got), text(want))
	}
}

// edit does some steps to a directory: "put PATH TEXT", "rm PATH", "ln PATH TARGET", "mv A B",
// "mode PATH MODE".
func edit(t tb, dir string, steps string) {
	t.Helper()
	for line := range strings.SplitSeq(strings.TrimSpace(steps), "\n") {
		f := strings.SplitN(strings.TrimSpace(line), " ", 3)
		if f[0] == "" {
			continue
		}
		p := filepath.Join(dir, f[1])
		switch f[0] {
		case "put":
			must(t, os.MkdirAll(filepath.Dir(p), 0o755),
				os.WriteFile(p, []byte(strings.ReplaceAll(f[2], `\n`, "\n")), 0o644))
		case "dir":
			must(t, os.MkdirAll(p, 0o755))
		case "rm":
			must(t, os.RemoveAll(p))
		case "ln":
			must(t, os.Symlink(f[2], p))
		case "mv":
			must(t, os.MkdirAll(filepath.Dir(filepath.Join(dir, f[2])), 0o755), os.Rename(p, filepath.Join(dir, f[2])))
		case "mode":
			var mode uint32
			_, err := fmt.Sscanf(f[2], "%o", &mode)
			must(t, err, unix.Chmod(p, mode))
		default:
			t.Fatalf("step %q", line)
		}
	}
}

// play is what a test has another process do, to break it off.
func play(root, role string) error {
	l := openLab(root)
	switch role {
	case "apply":
		_, err := l.run(runtime.ApplyOptions{}, nil)
		return err
	case "undo":
		_, err := Undo(context.Background(), l.home(), false)
		return err
	case "settle":
		_, err := Settle(l.home())
		return err
	}
	return fmt.Errorf("unknown role %q", role)
}

// two is a sandbox that has changed two workspaces.
func two(t *testing.T, place string) (l *lab, old, new []map[string]string) {
	t.Helper()
	l, end := newLab(t, place, 2)
	t.Cleanup(end)
	for i := range l.n {
		edit(t, l.from(i), "put a a\nput d/x x\nput d/y y\nput gone/z z\nput file f")
	}
	l.begin(t)
	for i := range l.n {
		l.inside(t, i, func(dir string) {
			edit(t, dir, "put a A\nput d/x X\nrm gone\nput n/deep/f f\nrm file\nput file/in in\nrm d\nput d/y y")
			new = append(new, files(t, dir))
		})
		old = append(old, files(t, l.from(i)))
	}
	return l, old, new
}
