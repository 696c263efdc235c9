package images

import (
	"bytes"
	"context"
	"debug/elf"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/images/image"
	"github.com/agentbox/agentbox/internal/fault"
)

// busyboxPaths is where distributions put a busybox.
var busyboxPaths = []string{
	"/bin/busybox", "/usr/bin/busybox", "/usr/bin/busybox-static", "/bin/busybox-static",
	"/usr/lib/busybox/busybox", "/usr/sbin/busybox",
}

// makeBusybox makes the built-in image of the host's static busybox: the same
// binary always gives the same digest.
func (s *Store) makeBusybox(ctx context.Context) (image.Image, error) {
	s.builtin.Lock()
	defer s.builtin.Unlock()
	name, err := s.canonical("busybox")
	if err != nil {
		return image.Image{}, err
	}
	if idx, err := s.index(); err == nil {
		if e, ok := idx.Names[name]; ok {
			if img, err := s.image(idx, name, e.Digest); err == nil {
				return img, nil
			}
		}
	}
	bin, err := findBusybox(busyboxPaths)
	if err != nil {
		return image.Image{}, err
	}
	return s.publish(ctx, name, true, func(diff *os.File) (image.Config, error) {
		if err := fillBusybox(ctx, bin, diff.Name()); err != nil {
			return image.Config{}, fmt.Errorf("make the busybox image: %w", err)
		}
		return image.Config{Cmd: []string{"sh"}, Env: []string{defaultPath}}, nil
	})
}

// findBusybox returns the first static busybox.
func findBusybox(paths []string) (string, error) {
	dynamic := ""
	for _, p := range paths {
		f, err := elf.Open(p)
		if err != nil {
			continue
		}
		static := true
		for _, prog := range f.Progs {
			static = static && prog.Type != elf.PT_INTERP
		}
		f.Close()
		if static {
			return p, nil
		}
		dynamic = p
	}
	why := "this host has no busybox"
	if dynamic != "" {
		why = dynamic + " is linked dynamically and would not run without the host's libraries"
	}
	return "", &fault.Error{Op: "make image", ID: "busybox", Err: fmt.Errorf("%w: %s", fault.ErrUnsupported, why),
		Hint: "Install a static one (apt-get install busybox-static) or import an image of your own with 'agentbox image import NAME TARBALL|DIR'."}
}

func fillBusybox(ctx context.Context, bin, root string) error {
	in := func(p string) string { return filepath.Join(root, p) }
	// The mount points of a sandbox are here so that none of them has to be
	// made in its upperdir.
	dirs := map[string]os.FileMode{
		"bin": 0o755, "sbin": 0o755, "usr": 0o755, "usr/bin": 0o755, "usr/sbin": 0o755, "usr/local": 0o755,
		"usr/local/bin": 0o755, "usr/local/sbin": 0o755,
		"dev": 0o755, "etc": 0o755, "home": 0o755, "mnt": 0o755, "opt": 0o755, "proc": 0o555, "root": 0o700,
		"run": 0o755, "sys": 0o555,
		"tmp": 0o777 | os.ModeSticky, "var": 0o755, "var/log": 0o755, "var/tmp": 0o777 | os.ModeSticky,
	}
	for d, mode := range dirs {
		if err := errors.Join(os.MkdirAll(in(d), 0o755), os.Chmod(in(d), mode)); err != nil {
			return err
		}
	}
	for name, text := range map[string]string{
		"etc/passwd":        "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/home:/bin/false\n",
		"etc/group":         "root:x:0:\ntty:x:5:\nnogroup:x:65534:\n",
		"etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
		"etc/hosts":         "127.0.0.1 localhost\n::1 localhost\n",
		"etc/hostname":      "",
		"etc/resolv.conf":   "",
		"etc/profile":       "export PATH=${PATH:-" + strings.TrimPrefix(defaultPath, "PATH=") + "}\n",
	} {
		if err := errors.Join(os.WriteFile(in(name), []byte(text), 0o644), os.Chmod(in(name), 0o644)); err != nil {
			return err
		}
	}
	if err := copyFile(bin, in("bin/busybox")); err != nil {
		return err
	}
	if err := mendWget(ctx, in("bin/busybox")); err != nil {
		return err
	}
	applets, err := applets(ctx, bin)
	if err != nil {
		return err
	}
	for _, a := range applets {
		if _, known := dirs[path.Dir(a)]; !known {
			if err := errors.Join(os.MkdirAll(in(path.Dir(a)), 0o755), os.Chmod(in(path.Dir(a)), 0o755)); err != nil {
				return err
			}
		}
		// Relative, so that the tree works wherever it is looked at from.
		target := strings.Repeat("../", strings.Count(a, "/")) + "bin/busybox"
		if path.Dir(a) == "bin" {
			target = "busybox"
		}
		if err := os.Symlink(target, in(a)); err != nil && !errors.Is(err, fs.ErrExist) {
			return err
		}
	}
	return fixTimes(root)
}

// The options of wget, of which -T is a number ("+") to be put where the program has
// nothing for it, and the beginning of what it is told of them besides.
const wgetOptions, wgetNumber = "U:T:+t:n::\x00-1:", "+"

// mendWget has wget take -T SECONDS. Debian builds busybox without the timeouts of
// wget, whose code then means to ignore the option, and writes the number to address 0: the
// program ends by a segmentation fault. Without the mark of a number it does ignore it. Its
// shell takes its own wget before any in PATH, so that another program would be no help.
func mendWget(ctx context.Context, bin string) error {
	usage, _ := exec.CommandContext(ctx, bin, "wget", "--help").CombinedOutput()
	if !bytes.Contains(usage, []byte("\t-O FILE")) || bytes.Contains(usage, []byte("\t-T ")) {
		return nil // no wget, or one with timeouts
	}
	data, err := os.ReadFile(bin)
	if err != nil {
		return err
	}
	at := bytes.Index(data, []byte(wgetOptions))
	if at < 0 || bytes.Count(data, []byte(wgetOptions)) != 1 {
		return nil // an unknown one stays as the distribution has it
	}
	mark, rest := at+strings.Index(wgetOptions, wgetNumber), at+len(wgetOptions)
	end := rest + bytes.IndexByte(data[rest:], 0)
	if end < rest {
		return nil
	}
	copy(data[mark:end], data[mark+1:end])
	data[end-1] = 0

	mended := bin + ".mended"
	if err := errors.Join(os.WriteFile(mended, data, 0o755), os.Chmod(mended, 0o755)); err != nil {
		return err
	}
	// Without a URL it ends by its usage.
	var exit *exec.ExitError
	if err := exec.CommandContext(ctx, mended, "wget", "-T", "1").Run(); !errors.As(err, &exit) || !exit.Exited() {
		return errors.Join(ctx.Err(), os.Remove(mended))
	}
	return os.Rename(mended, bin)
}

// applets lists where the binary wants its links, relative to the root.
func applets(ctx context.Context, bin string) ([]string, error) {
	out, err := exec.CommandContext(ctx, bin, "--list-full").Output()
	if err != nil { // not built in everywhere
		if out, err = exec.CommandContext(ctx, bin, "--list").Output(); err != nil {
			return nil, fmt.Errorf("ask %s for its applets: %w", bin, err)
		}
	}
	list := []string{"bin/sh", "usr/bin/env"}
	for line := range bytes.Lines(out) {
		a := strings.TrimSpace(string(line))
		if !strings.Contains(a, "/") {
			if a == "" || a == "linuxrc" || a == "busybox" {
				continue
			}
			a = "bin/" + a
		}
		if !filepath.IsLocal(a) || path.Clean(a) != a {
			return nil, fmt.Errorf("%w: %s lists the applet %q", fault.ErrInvalid, bin, a)
		}
		list = append(list, a)
	}
	return list, nil
}

func copyFile(from, to string) (err error) {
	src, err := os.Open(from)
	if err != nil {
		return err
	}
	defer src.Close()
	dst, err := os.OpenFile(to, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o755)
	if err != nil {
		return err
	}
	_, err = io.Copy(dst, src)
	return errors.Join(err, dst.Chmod(0o755), dst.Close())
}

// fixTimes gives all files one time, so that the digest depends on content only.
func fixTimes(root string) error {
	at := time.Date(2000, 1, 1, 0, 0, 0, 0, time.UTC)
	ts := []unix.Timespec{{Sec: at.Unix()}, {Sec: at.Unix()}}
	return filepath.WalkDir(root, func(p string, _ fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		return unix.UtimesNanoAt(unix.AT_FDCWD, p, ts, unix.AT_SYMLINK_NOFOLLOW)
	})
}
