package overlay

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/fault"
)

// TestUpdateStays has a directory that is not what was planned with, most of
// all one in which symlinks lead out of it.
func TestUpdateStays(t *testing.T) {
	for name, change := range map[string]func(d, outside string) error{
		"parent is a symlink": func(d, out string) error {
			return errors.Join(os.RemoveAll(d+"/sub"), os.Symlink(out, d+"/sub"))
		},
		"parent of a removed one is a symlink": func(d, out string) error {
			return errors.Join(os.RemoveAll(d+"/gone"), os.Symlink(out, d+"/gone"))
		},
		"file in place is a symlink": func(d, out string) error {
			return errors.Join(os.Remove(d+"/attrs"), os.Symlink(out+"/f", d+"/attrs"))
		},
		"file in place is a FIFO": func(d, out string) error {
			return errors.Join(os.Remove(d+"/attrs"), unix.Mkfifo(d+"/attrs", 0o600))
		},
		"source of a link is a symlink": func(d, out string) error {
			return errors.Join(os.Remove(d+"/keep"), os.Symlink(out+"/f", d+"/keep"))
		},
		"file is gone": func(d, out string) error { return os.Remove(d + "/attrs") },
		"replaced file is a directory": func(d, out string) error {
			return errors.Join(os.Remove(d+"/data"), os.Mkdir(d+"/data", 0o700))
		},
		"added file is there": func(d, out string) error {
			return os.WriteFile(d+"/new", []byte("mine"), 0o600)
		},
		"added directory is there": func(d, out string) error { return os.Symlink(out, d+"/newdir") },
		"mount point": func(d, out string) error {
			return unix.Mount(out, d+"/gone/deep", "", unix.MS_BIND, "")
		},
	} {
		t.Run(name, func(t *testing.T) {
			base := noDevices(t)
			dir, want, outside := base+"/dir", base+"/want", base+"/outside"
			for _, d := range []string{
				dir, want, outside, outside + "/deep", dir + "/sub", want + "/sub", dir + "/gone", dir + "/gone/deep",
			} {
				must(t, os.Mkdir(d, 0o755))
			}
			write := func(p, data string) { must(t, os.WriteFile(p, []byte(data), 0o644)); must(t, touch(p, 1000, 0)) }
			for _, d := range []string{outside, outside + "/deep"} {
				for _, f := range []string{"f", "g", "data", "attrs", "deep/f"} {
					if _, err := os.Stat(filepath.Dir(d + "/" + f)); err == nil {
						write(d+"/"+f, "precious")
					}
				}
			}
			for i, d := range []string{dir, want} {
				write(d+"/keep", "same")
				write(d+"/attrs", "same")
				write(d+"/data", fmt.Sprint("data", i))
				write(d+"/sub/f", fmt.Sprint("data", i))
			}
			write(dir+"/gone/deep/f", "x")
			must(t, os.Chmod(want+"/attrs", 0o600))
			must(t, os.Link(want+"/keep", want+"/zlink"))
			must(t, os.Mkdir(want+"/newdir", 0o755))
			write(want+"/newdir/f", "new")
			write(want+"/new", "new")
			u := planDirs(t, dir, want)
			stage := dir + ".stage"
			must(t, u.Stage(t.Context(), dir, stage, &dirSource{dir: want}))
			must(t, change(dir, outside))
			before, inos := peek(t, outside), inodes(t, outside)
			err := u.Apply(t.Context(), dir, stage)
			if !errors.Is(err, fault.ErrState) {
				t.Errorf("want ErrState, got %v", err)
			}
			samePeek(t, "outside", before, peek(t, outside))
			if fmt.Sprint(inos) != fmt.Sprint(inodes(t, outside)) {
				t.Error("something outside was touched")
			}
			if name == "mount point" {
				must(t, unix.Unmount(dir+"/gone/deep", unix.MNT_DETACH))
			}
			must(t, os.RemoveAll(stage))
			update(t, dir, want)
			samePeek(t, "outside", before, peek(t, outside))
		})
	}
}

// TestUpdateDamage has sources that do not give what they should.
func TestUpdateDamage(t *testing.T) {
	own := errors.New("own")
	for name, c := range map[string]struct {
		hurt func(e Entry, r io.Reader) io.Reader
		want error
	}{
		"short": {func(e Entry, r io.Reader) io.Reader { return io.LimitReader(r, e.data()-1) }, fault.ErrCorrupt},
		"empty": {func(e Entry, r io.Reader) io.Reader { return strings.NewReader("") }, fault.ErrCorrupt},
		"long": {func(e Entry, r io.Reader) io.Reader {
			return io.MultiReader(r, strings.NewReader("x"))
		}, fault.ErrCorrupt},
		"other": {func(e Entry, r io.Reader) io.Reader {
			return io.MultiReader(strings.NewReader("!"), io.LimitReader(r, e.data()-1))
		}, fault.ErrCorrupt},
		"failed": {func(e Entry, r io.Reader) io.Reader {
			return io.MultiReader(io.LimitReader(r, e.data()/2), broken{own})
		}, own},
	} {
		for _, size := range []int{10, smallFile, smallFile + 1, 3 << 20} {
			t.Run(fmt.Sprint(name, size), func(t *testing.T) {
				base := t.TempDir()
				dir, want := base+"/dir", base+"/want"
				must(t, os.Mkdir(dir, 0o755))
				must(t, os.Mkdir(want, 0o755))
				must(t, os.WriteFile(want+"/f", bytes.Repeat([]byte("0123456789"), size/10+1)[:size], 0o644))
				before := peek(t, dir)
				u := planDirs(t, dir, want)
				err := u.Stage(t.Context(), dir, base+"/stage", &dirSource{dir: want, hurt: c.hurt})
				if !errors.Is(err, c.want) || !strings.Contains(err.Error(), `"f"`) {
					t.Errorf("want %v that names the file, got %v", c.want, err)
				}
				samePeek(t, "untouched", before, peek(t, dir))
				if err := u.Stage(t.Context(), dir, base+"/stage",
					&dirSource{dir: want}); !errors.Is(err, fault.ErrExists) {
					t.Error(err)
				}
			})
		}
	}
}

type broken struct{ err error }

func (b broken) Read([]byte) (int, error) { return 0, b.err }

// TestUpdateNoSpace has no room for what is to be staged.
func TestUpdateNoSpace(t *testing.T) {
	base := tmpfs(t, "size=4m")
	want := t.TempDir()
	dir := base + "/dir"
	must(t, os.Mkdir(dir, 0o755))
	must(t, os.WriteFile(dir+"/f", []byte("old"), 0o644))
	for i := range 20 {
		must(t, os.WriteFile(fmt.Sprintf("%s/f%d", want, i), make([]byte, 400_000), 0o644))
	}
	before := peek(t, dir)
	u := planDirs(t, dir, want)
	err := u.Stage(t.Context(), dir, base+"/stage", &dirSource{dir: want})
	if !errors.Is(err, unix.ENOSPC) {
		t.Errorf("want ENOSPC, got %v", err)
	}
	must(t, os.RemoveAll(base+"/stage"))
	samePeek(t, "untouched", before, peek(t, dir))
}

func TestUpdateCancelled(t *testing.T) {
	base := t.TempDir()
	dir, want := base+"/dir", base+"/want"
	must(t, os.Mkdir(dir, 0o755))
	must(t, os.Mkdir(want, 0o755))
	for i := range 100 {
		must(t, os.WriteFile(fmt.Sprintf("%s/f%d", want, i), []byte("x"), 0o644))
	}
	u := planDirs(t, dir, want)
	ctx, cancel := context.WithCancel(t.Context())
	src := &dirSource{dir: want}
	src.hurt = func(e Entry, r io.Reader) io.Reader {
		if src.calls.Load() == 10 {
			cancel()
		}
		return r
	}
	if err := u.Stage(ctx, dir, base+"/stage", src); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	if n := src.calls.Load(); n > 30 {
		t.Errorf("went on for %d files", n)
	}
	if err := u.Apply(ctx, dir, base+"/stage"); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	if _, err := plan(ctx, digested(dir), digested(want)); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}
