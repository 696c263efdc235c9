package overlay

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/fault"
)

// layers makes the directories of a mount below a name chosen by the test.
func layers(t testing.TB, below string, lowers int) Mount {
	t.Helper()
	base := filepath.Join(t.TempDir(), below)
	sub := func(name string) string {
		p := filepath.Join(base, name)
		must(t, os.MkdirAll(p, 0o755))
		return p
	}
	m := Mount{Upper: sub("upper"), Work: sub("work"), Target: sub("merged")}
	for i := range lowers {
		dir := sub(fmt.Sprintf("lower%d", i))
		must(t, os.WriteFile(filepath.Join(dir, fmt.Sprintf("from%d", i)), []byte("x"), 0o644))
		must(t, os.WriteFile(filepath.Join(dir, "top"), fmt.Append(nil, i), 0o644))
		m.Lower = append(m.Lower, dir)
	}
	return m
}

func mounted(t testing.TB, m Mount, mount func() error) {
	t.Helper()
	must(t, mount())
	t.Cleanup(func() { must(t, Unmount(m.Target, UnmountOptions{})) })
}

// TestMount mounts with both system calls and paths of many kinds.
func TestMount(t *testing.T) {
	long := strings.Repeat(strings.Repeat("l", 200)+"/", 5) + "end"
	for below, lowers := range map[string]int{
		"plain": 1, "two": 2, "co:lon,comma\\back slash": 3, "new\nline \xff": 2, long: 3, "many": 128,
	} {
		for _, how := range []string{"fsopen", "mount(2)"} {
			t.Run(fmt.Sprintf("%s %.20q %d", how, below, lowers), func(t *testing.T) {
				m := layers(t, below, lowers)
				mount := m.fsmount
				if how == "mount(2)" {
					mount = m.classic
				}
				mounted(t, m, mount)
				for i := range lowers {
					_, err := os.Stat(filepath.Join(m.Target, fmt.Sprintf("from%d", i)))
					must(t, err)
				}
				top, err := os.ReadFile(filepath.Join(m.Target, "top"))
				must(t, err)
				if string(top) != "0" {
					t.Errorf("layer %s is on top", top)
				}
				must(t, os.WriteFile(filepath.Join(m.Target, "new"), nil, 0o644))
				_, err = os.Stat(filepath.Join(m.Upper, "new"))
				must(t, err)
			})
		}
	}
}

// TestMountKeepsUpperPlain does the two things that a self-contained upperdir
// depends on: with redirects or metacopy they would leave pointers in it.
func TestMountKeepsUpperPlain(t *testing.T) {
	for _, how := range []string{"fsopen", "mount(2)"} {
		t.Run(how, func(t *testing.T) {
			m := layers(t, "x", 1)
			must(t, os.Mkdir(filepath.Join(m.Lower[0], "dir"), 0o755))
			mount := m.fsmount
			if how == "mount(2)" {
				mount = m.classic
			}
			mounted(t, m, mount)
			err := os.Rename(filepath.Join(m.Target, "dir"), filepath.Join(m.Target, "renamed"))
			if !errors.Is(err, unix.EXDEV) {
				t.Errorf("a layer's directory was renamed: %v", err)
			}
			must(t, os.Chmod(filepath.Join(m.Target, "top"), 0o600))
			got, err := os.ReadFile(filepath.Join(m.Upper, "top"))
			must(t, err)
			if string(got) != "0" {
				t.Errorf("copied up as %q", got)
			}
			if s := peekXattrs(t, filepath.Join(m.Upper, "top")); strings.Contains(s, "metacopy") {
				t.Error(s)
			}
		})
	}
}

// TestMountDistrustsRedirects plants a redirect in an upperdir.
func TestMountDistrustsRedirects(t *testing.T) {
	m := layers(t, "x", 1)
	must(t, os.Mkdir(filepath.Join(m.Lower[0], "secret"), 0o700))
	must(t, os.WriteFile(filepath.Join(m.Lower[0], "secret/f"), nil, 0o600))
	must(t, os.Mkdir(filepath.Join(m.Upper, "mine"), 0o755))
	must(t, unix.Setxattr(filepath.Join(m.Upper, "mine"), "trusted.overlay.redirect", []byte("/secret"), 0))
	mounted(t, m, m.Mount)
	if _, err := os.Stat(filepath.Join(m.Target, "mine/f")); err == nil {
		t.Error("a redirect was followed")
	}
}

func TestMountReadOnly(t *testing.T) {
	for name, change := range map[string]func(*Mount){
		"with an upperdir":  func(m *Mount) { m.ReadOnly = true },
		"without, 2 layers": func(m *Mount) { m.Upper, m.Work = "", "" },
		"without, 1 layer":  func(m *Mount) { m.Upper, m.Work, m.Lower = "", "", m.Lower[:1] },
	} {
		for _, how := range []string{"fsopen", "mount(2)"} {
			t.Run(name+" "+how, func(t *testing.T) {
				m := layers(t, "x", 2)
				change(&m)
				mount := m.fsmount
				if how == "mount(2)" {
					mount = m.classic
				}
				mounted(t, m, mount)
				_, err := os.Stat(filepath.Join(m.Target, "from0"))
				must(t, err)
				if err := os.WriteFile(filepath.Join(m.Target, "new"), nil, 0o644); !errors.Is(err, unix.EROFS) {
					t.Errorf("writing: %v", err)
				}
			})
		}
	}
}

func TestMountRefuses(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*Mount)
		want   error
		says   string
	}{
		"no layer":        {func(m *Mount) { m.Lower = nil }, fault.ErrInvalid, "lower"},
		"no work":         {func(m *Mount) { m.Work = "" }, fault.ErrInvalid, "work"},
		"no upper":        {func(m *Mount) { m.Upper = "" }, fault.ErrInvalid, "upper"},
		"missing layer":   {func(m *Mount) { m.Lower[0] += "x" }, fault.ErrNotFound, "lower0x"},
		"missing target":  {func(m *Mount) { m.Target += "x" }, fault.ErrNotFound, "mergedx"},
		"layer is a file": {func(m *Mount) { m.Lower[0] += "/top" }, fault.ErrInvalid, "not a directory"},
		"work is upper":   {func(m *Mount) { m.Work = m.Upper }, fault.ErrInvalid, "contain each other"},
		"work is in upper": {func(m *Mount) {
			m.Upper = filepath.Dir(m.Work)
		}, fault.ErrInvalid, "contain each other"},
		"work is elsewhere": {func(m *Mount) { m.Work = "/proc/fs" }, fault.ErrInvalid, "one mount"},
		// the kernel's words
		"upper cannot be one": {func(m *Mount) { m.Upper = "/proc/sys"; m.Work = "/proc/fs" }, unix.EINVAL, "upper"},
	} {
		t.Run(name, func(t *testing.T) {
			m := layers(t, "x", 1)
			target := m.Target
			c.change(&m)
			err := m.Mount()
			if !errors.Is(err, c.want) || !strings.Contains(err.Error(), c.says) {
				t.Errorf("%v, want %v that says %q", err, c.want, c.says)
			}
			if on, _ := Mounted(target); on {
				t.Error("it is mounted")
				must(t, Unmount(target, UnmountOptions{}))
			}
		})
	}
}

func TestUnmount(t *testing.T) {
	m := layers(t, "x", 1)
	check := func(want bool) {
		t.Helper()
		if on, err := Mounted(m.Target); err != nil || on != want {
			t.Fatalf("mounted: %v, %v; want %v", on, err, want)
		}
	}
	must(t, Unmount(m.Target, UnmountOptions{}))
	must(t, Unmount(m.Target+"/none", UnmountOptions{}))
	must(t, Unmount(filepath.Join(m.Lower[0], "top", "x"), UnmountOptions{}))
	check(false)
	must(t, m.Mount())
	check(true)
	f, err := os.Open(filepath.Join(m.Target, "top"))
	must(t, err)
	if err := Unmount(m.Target, UnmountOptions{}); !errors.Is(err, fault.ErrBusy) {
		t.Errorf("unmount in use: %v", err)
	}
	check(true)
	must(t, Unmount(m.Target, UnmountOptions{Lazy: true}))
	check(false)
	must(t, f.Close())

	must(t, m.Mount())
	must(t, unix.Mount("tmpfs", m.Target, "tmpfs", 0, ""))
	must(t, Unmount(m.Target, UnmountOptions{}))
	check(false)

	link := filepath.Join(t.TempDir(), "link")
	must(t, os.Symlink(m.Target, link))
	must(t, m.Mount())
	must(t, Unmount(link, UnmountOptions{}))
	check(true) // a symlink is not followed to what it names
	must(t, Unmount(m.Target, UnmountOptions{}))
	if on, err := Mounted(m.Target + "/none"); on || err != nil {
		t.Error(on, err)
	}
}
