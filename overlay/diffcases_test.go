package overlay

import (
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/fault"
)

// TestDiff tells in full what a few actions look like.
func TestDiff(t *testing.T) {
	write := func(p, data string) error {
		return errors.Join(os.MkdirAll(filepath.Dir(p), 0o755), os.WriteFile(p, []byte(data), 0o644))
	}
	cases := map[string]struct {
		do   func(root string) error
		want string
	}{
		"nothing":         {func(string) error { return nil }, ""},
		"new file":        {func(r string) error { return write(r+"/etc/new", "x") }, "A etc/new"},
		"new directories": {func(r string) error { return write(r+"/a/b/c", "x") }, "A a, A a/b, A a/b/c"},
		"file gone":       {func(r string) error { return os.Remove(r + "/etc/conf") }, "D etc/conf"},
		"directory gone": {func(r string) error {
			return os.RemoveAll(r + "/etc")
		}, "D etc, D etc/conf, D etc/link, D etc/sub, D etc/sub/deep"},
		"content": {func(r string) error {
			return write(r+"/etc/conf", "other")
		}, "M etc/conf content mtime"},
		"same bytes": {func(r string) error { return write(r+"/etc/conf", "conf") }, "M etc/conf mtime"},
		"mode":       {func(r string) error { return os.Chmod(r+"/etc/conf", 0o600) }, "M etc/conf mode"},
		"mode there and back": {func(r string) error {
			return errors.Join(os.Chmod(r+"/etc", 0), os.Chmod(r+"/etc", 0o755))
		}, ""},
		"owner of a dir": {func(r string) error { return os.Chown(r+"/etc", 7, 0) }, "M etc owner"},
		"attribute": {func(r string) error {
			return unix.Setxattr(r+"/etc/conf", "user.x", []byte("y"), 0)
		}, "M etc/conf xattrs"},
		"its own marks": {func(r string) error {
			return unix.Setxattr(r+"/etc/conf", "trusted.overlay.opaque", []byte("y"), 0)
		},
			"M etc/conf xattrs"}, // it is visible to the process that set it
		"symlink elsewhere": {func(r string) error {
			return errors.Join(os.Remove(r+"/etc/link"), os.Symlink("/nowhere", r+"/etc/link"),
				touch(r+"/etc/link", 7, 7))
		}, "M etc/link target"},
		"file to symlink": {func(r string) error {
			return errors.Join(os.Remove(r+"/etc/conf"), os.Symlink("/etc/shadow", r+"/etc/conf"))
		}, "T etc/conf"},
		"directory to file": {func(r string) error {
			return errors.Join(os.RemoveAll(r+"/etc/sub"), write(r+"/etc/sub", "x"))
		},
			"T etc/sub, D etc/sub/deep"},
		"file to directory": {func(r string) error {
			return errors.Join(os.Remove(r+"/etc/conf"), write(r+"/etc/conf/in", "x"))
		},
			"T etc/conf, A etc/conf/in"},
		"opaque": {func(r string) error {
			return errors.Join(os.RemoveAll(r+"/etc/sub"), write(r+"/etc/sub/new", "x"))
		},
			"A etc/sub/new, D etc/sub/deep"},
		"made again": {func(r string) error {
			return errors.Join(os.RemoveAll(r+"/etc"), write(r+"/etc/conf", "conf"), touch(r+"/etc/conf", 7, 7))
		}, "D etc/link, D etc/sub, D etc/sub/deep"},
		"hard link":   {func(r string) error { return os.Link(r+"/etc/conf", r+"/same") }, "A same"},
		"link broken": {func(r string) error { return write(r+"/two", "both") }, "M one mtime, M two mtime"},
		"renamed":     {func(r string) error { return os.Rename(r+"/etc/conf", r+"/moved") }, "R etc/conf -> moved"},
		"renamed and changed": {func(r string) error {
			return errors.Join(os.Rename(r+"/etc/conf", r+"/moved"), os.Chmod(r+"/moved", 0o600))
		}, "R etc/conf -> moved mode"},
		"moved out of a dir": {func(r string) error {
			return errors.Join(os.Rename(r+"/etc/sub/deep", r+"/deep"), os.Remove(r+"/etc/sub"))
		}, "R etc/sub/deep -> deep, D etc/sub"},
		"two of one content": {func(r string) error {
			return errors.Join(write(r+"/x", "conf"), write(r+"/y", "conf"), os.Remove(r+"/etc/conf"))
		}, "D etc/conf, A x, A y"},
		"empty files are no evidence": {func(r string) error {
			return errors.Join(os.Remove(r+"/empty"), write(r+"/void", ""))
		}, "D empty, A void"},
		"a device": {func(r string) error {
			return unix.Mknod(r+"/dev", unix.S_IFCHR|0o600, int(unix.Mkdev(3001, 1)))
		}, "A dev"},
		"a socket and a fifo": {func(r string) error {
			return errors.Join(unix.Mknod(r+"/s", unix.S_IFSOCK|0o600, 0), unix.Mkfifo(r+"/f", 0o600))
		}, "A f, A s"},
		"sparse": {func(r string) error {
			return errors.Join(write(r+"/hole", ""), os.Truncate(r+"/hole", 1<<40))
		}, "A hole"},
	}
	base := noDevices(t)
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			dir, err := os.MkdirTemp(base, "")
			must(t, err)
			m := Mount{
				Target: dir + "/merged", Upper: dir + "/upper", Work: dir + "/work",
				Lower: []string{dir + "/top", dir + "/bottom"},
			}
			for _, d := range append([]string{m.Target, m.Upper, m.Work}, m.Lower...) {
				must(t, os.Mkdir(d, 0o755))
			}
			must(t, errors.Join(write(m.Lower[1]+"/etc/conf", "hidden"), write(m.Lower[0]+"/etc/conf", "conf"),
				write(m.Lower[1]+"/etc/sub/deep", "deep"),
				os.Symlink("../target", m.Lower[1]+"/etc/link"), write(m.Lower[1]+"/empty", ""),
				touch(m.Lower[0]+"/etc/conf", 7, 7), touch(m.Lower[1]+"/etc/link", 7, 7)))
			must(t, m.Mount())
			defer func() { must(t, Unmount(m.Target, UnmountOptions{})) }()
			if name == "link broken" {
				must(t, errors.Join(write(m.Target+"/one", "both"), os.Link(m.Target+"/one", m.Target+"/two")))
			}
			then := fullTree(t, m.Upper)
			must(t, c.do(m.Target))
			list, err := FindRenames(t.Context(), changes(t, then, Side{Dir: m.Upper}, DiffOptions{Lower: m.Lower}))
			must(t, err)
			var got []string
			for _, c := range list {
				s := string(c.Kind) + " "
				if c.Kind == Renamed {
					s += c.From + " -> "
				}
				s += c.Path
				if c.Kind != TypeChanged && len(c.What) > 0 {
					s += " " + strings.Join(c.What, " ")
				}
				got = append(got, s)
			}
			// The order is that of paths, by new path for renames.
			want := strings.Split(c.want, ", ")
			if c.want == "" {
				want = nil
			}
			slices.Sort(want)
			sorted := slices.Sorted(slices.Values(got))
			if !slices.Equal(sorted, want) {
				t.Errorf("%q, want %q", got, want)
			}
		})
	}
}

// Two directories change places; the files in them are as old as ever.
func TestDiffSwappedDirectories(t *testing.T) {
	old := racy
	racy = 20 * time.Millisecond
	defer func() { racy = old }()
	dir := noDevices(t)
	for _, p := range []string{"a/deep", "b/deep"} {
		must(t, os.MkdirAll(filepath.Join(dir, p), 0o755))
		must(t, os.WriteFile(filepath.Join(dir, p, "f"), []byte(p), 0o644))
		must(t, touch(filepath.Join(dir, p, "f"), 7, 7))
	}
	time.Sleep(racy + 8*time.Millisecond) // until their times are old enough to be trusted
	then := fullTree(t, dir)
	must(t, unix.Renameat2(unix.AT_FDCWD, dir+"/a", unix.AT_FDCWD, dir+"/b", unix.RENAME_EXCHANGE))
	got := changes(t, then, Side{Dir: dir}, DiffOptions{})
	if len(got) != 2 || got[0].Path != "a/deep/f" || got[0].words() != "M content" || got[1].Path != "b/deep/f" {
		t.Error(got)
	}
}

// Layers that others made have marks that our own overlays never get.
func TestDiffOtherMarks(t *testing.T) {
	write := func(p string) { must(t, errors.Join(os.MkdirAll(filepath.Dir(p), 0o755), os.WriteFile(p, nil, 0o644))) }
	for _, prefix := range []string{"trusted.overlay.", "user.overlay."} {
		dir := noDevices(t)
		m := Mount{
			Target: dir + "/merged", Upper: dir + "/upper", Work: dir + "/work",
			Lower: []string{dir + "/top", dir + "/bottom"},
		}
		must(t, errors.Join(os.Mkdir(m.Target, 0o755), os.Mkdir(m.Upper, 0o755), os.Mkdir(m.Work, 0o755)))
		for _, f := range []string{"x/gone", "x/stays", "y/hidden", "z/hidden"} {
			write(m.Lower[1] + "/" + f)
		}
		write(m.Lower[0] + "/x/gone")
		write(m.Lower[0] + "/y/seen")
		write(m.Upper + "/z/seen")
		mark := func(p, name, value string) { must(t, unix.Setxattr(p, prefix+name, []byte(value), 0)) }
		mark(m.Lower[0], "opaque", "x")
		mark(m.Lower[0]+"/x", "opaque", "x")
		mark(m.Lower[0]+"/x/gone", "whiteout", "")
		mark(m.Lower[0]+"/y", "opaque", "y")
		mark(m.Upper+"/z", "opaque", "y")
		options := "lowerdir=" + strings.Join(m.Lower, ":") + ",upperdir=" + m.Upper + ",workdir=" + m.Work
		if prefix == "user.overlay." {
			options += ",userxattr"
		}
		must(t, unix.Mount("overlay", m.Target, "overlay", 0, options))
		seen := look(t, m.Target)
		must(t, Unmount(m.Target, UnmountOptions{}))
		opts := DiffOptions{Lower: m.Lower, UserXattr: prefix == "user.overlay."}
		// Against nothing but an empty layer, everything is an addition.
		empty := t.TempDir()
		must(t, os.Mkdir(empty+"/upper", 0o755))
		var list []string
		must(t, Diff(t.Context(), Side{}, Side{Dir: m.Upper}, opts, func(c Change) error {
			list = append(list, string(c.Kind)+" "+c.Path)
			return nil
		}))
		if want := []string{"D z/hidden", "A z/seen"}; !slices.Equal(list, want) {
			t.Errorf("%s: %q, want %q", prefix, list, want)
		}
		// An upperdir that hides all of the layers shows what they hold.
		for _, d := range []string{"x", "y"} {
			must(t, os.Mkdir(m.Upper+"/"+d, 0o755))
			mark(m.Upper+"/"+d, "opaque", "y")
		}
		list = nil
		must(t, Diff(t.Context(), Side{}, Side{Dir: m.Upper}, opts, func(c Change) error {
			if c.Kind == Deleted {
				list = append(list, c.Path)
			}
			return nil
		}))
		for _, p := range []string{"x/gone", "x/stays", "y/hidden", "y/seen"} {
			if _, there := seen[p]; there != slices.Contains(list, p) {
				t.Errorf("%s: %s is there: %v, deleted: %v", prefix, p, there, list)
			}
		}
	}
}

func TestDiffRefuses(t *testing.T) {
	dir := noDevices(t)
	upper := dir + "/upper"
	must(t, os.MkdirAll(upper+"/d", 0o755))
	must(t, os.WriteFile(upper+"/f", []byte("x"), 0o644))
	run := func(a, b Side, opts DiffOptions) error {
		return Diff(t.Context(), a, b, opts, func(Change) error { return nil })
	}
	live := Side{Dir: upper}
	tree := func(s string) Side {
		return Side{Tree: func() (io.ReadCloser, error) { return io.NopCloser(strings.NewReader(s)), nil }}
	}
	const root = `{"path":".","type":"dir","mode":"0755","uid":0,"gid":0,"mtime":[0,0]}` + "\n"
	for name, s := range map[string]string{
		"empty":    "",
		"no root":  `{"path":"a","type":"dir","mode":"0755","uid":0,"gid":0,"mtime":[0,0]}` + "\n",
		"cut":      root[:40],
		"dangling": root + `{"path":"b","type":"file","hardlink":"a"}` + "\n",
		"link to dir": root + `{"path":"a","type":"dir","mode":"0755","uid":0,"gid":0,"mtime":[0,0]}` + "\n" +
			`{"path":"b","type":"file","hardlink":"a"}` + "\n",
		"link to link": root + `{"path":"a","type":"fifo","mode":"0755","uid":0,"gid":0,"mtime":[0,0]}` + "\n" +
			`{"path":"b","type":"fifo","hardlink":"a"}` + "\n" + `{"path":"c","type":"fifo","hardlink":"b"}` + "\n",
	} {
		if err := run(tree(s), live, DiffOptions{}); !errors.Is(err, fault.ErrCorrupt) {
			t.Errorf("tree %s: %v", name, err)
		}
	}
	if err := run(Side{}, Side{}, DiffOptions{}); !errors.Is(err, fault.ErrInvalid) {
		t.Errorf("nothing at all: %v", err)
	}
	for _, s := range []Side{{Dir: dir + "/none"}, live} {
		if err := run(Side{}, s, DiffOptions{Lower: []string{dir + "/none"}}); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("a directory that is not there: %v", err)
		}
	}
	own := errors.New("own")
	if err := Diff(t.Context(), tree(root), live, DiffOptions{}, func(Change) error { return own }); err != own {
		t.Errorf("fn's error: %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := Diff(ctx, tree(root), live, DiffOptions{}, func(Change) error {
		return nil
	}); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled: %v", err)
	}
	failing := Side{Tree: func() (io.ReadCloser, error) { return closer{bytes.NewReader([]byte(root)), own}, nil }}
	if err := run(failing, live, DiffOptions{}); !errors.Is(err, own) {
		t.Errorf("a tree that proves wrong at its end: %v", err)
	}
	must(t, unix.Setxattr(upper+"/d", "trusted.overlay.redirect", []byte("/elsewhere"), 0))
	if err := run(Side{}, live, DiffOptions{Lower: []string{dir}}); !errors.Is(err, fault.ErrUnsupported) ||
		!strings.Contains(err.Error(), `"d"`) {
		t.Errorf("a redirect: %v", err)
	}
}

type closer struct {
	io.Reader
	err error
}

func (c closer) Close() error { return c.err }

// Links that a sandbox leaves in its upperdir lead nowhere else.
func TestDiffStaysInside(t *testing.T) {
	dir := noDevices(t)
	upper, outside := dir+"/upper", dir+"/outside"
	must(t, errors.Join(os.MkdirAll(upper+"/d", 0o755), os.Mkdir(outside, 0o755),
		os.WriteFile(outside+"/secret", []byte("secret"), 0o600)))
	must(t, os.WriteFile(upper+"/d/secret", []byte("secret"), 0o600))
	then := fullTree(t, upper)
	must(t, errors.Join(os.RemoveAll(upper+"/d"), os.Symlink(outside, upper+"/d"),
		os.Symlink(outside+"/secret", upper+"/s")))
	var got []string
	for _, c := range changes(t, then, Side{Dir: upper}, DiffOptions{}) {
		got = append(got, c.Path+" "+c.words())
	}
	if want := []string{"d T type", "d/secret D", "s A"}; !slices.Equal(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
}

// A tree as deep as is handled at all.
func TestDiffDeep(t *testing.T) {
	dir := noDevices(t)
	fd, err := unix.Open(dir, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	must(t, err)
	deep := 0
	for ; deep < maxDepth+50; deep++ {
		must(t, unix.Mkdirat(fd, "d", 0o755))
		next, err := unix.Openat(fd, "d", unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		must(t, err)
		must(t, unix.Close(fd))
		fd = next
	}
	must(t, unix.Close(fd))
	n := 0
	err = Diff(t.Context(), Side{}, Side{Dir: dir}, DiffOptions{Lower: []string{t.TempDir()}}, func(Change) error {
		n++
		return nil
	})
	if !errors.Is(err, fault.ErrUnsupported) || n < maxDepth-2 {
		t.Errorf("%d levels: %v", n, err)
	}
}
