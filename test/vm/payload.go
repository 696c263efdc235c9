package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"
)

// workMB is how much the guest may write, workNow how much of it has to be free here.
const workMB, workNowMB = 16 << 10, 4 << 10

// image is what a machine boots, as scripts/vm-image.sh makes it.
type image struct{ name, has string }

// images are all there are, the usual one first.
var images = []image{
	{"trixie", "Debian 13"},
	{"docker28", "Debian 13 with Docker Engine 28, containerd and runc of Debian sid"},
}

func imageNames() string {
	var names []string
	for _, i := range images {
		names = append(names, fmt.Sprintf("%s (%s)", i.name, i.has))
	}
	return strings.Join(names, " or ")
}

// makeImages has scripts/vm-image.sh make what it boots from, and returns its directory. No other
// run removes it until it is unlocked, not even for another tree's image of that name.
func makeImages(ctx context.Context, name string, qemu bool) (dir string, unlock func(), err error) {
	args := []string{"--image", name}
	if qemu {
		args = append(args, "--qemu")
	}
	cmd := exec.CommandContext(ctx, "scripts/vm-image.sh", args...)
	cmd.Stderr = os.Stderr
	clearsUp(cmd)
	out, err := cmd.Output()
	if ctx.Err() != nil {
		return "", nil, errors.New("interrupted while the image was made; nothing of it is kept")
	}
	if err != nil {
		return "", nil, fmt.Errorf("scripts/vm-image.sh: %w", err)
	}
	dir = strings.TrimSpace(string(out))
	f, err := os.Open(dir)
	if err != nil {
		return "", nil, err
	}
	if err := locked(f, syscall.LOCK_SH|syscall.LOCK_NB); err != nil {
		return "", nil, errors.Join(fmt.Errorf("%s is being removed: begin again: %w", dir, err), f.Close())
	}
	return dir, func() { _ = f.Close() }, nil
}

// clearsUp has a program and all that it starts end with ctx, and clear up first.
func clearsUp(cmd *exec.Cmd) {
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGTERM) }
	cmd.WaitDelay = time.Minute
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGTERM}
}

// locked locks a directory that is still there by its name once it is locked.
func locked(f *os.File, how int) error {
	if err := syscall.Flock(int(f.Fd()), how); err != nil {
		return err
	}
	was, err := f.Stat()
	if err != nil {
		return err
	}
	is, err := os.Stat(f.Name())
	if err == nil && !os.SameFile(was, is) {
		err = fmt.Errorf("%s was replaced: %w", f.Name(), os.ErrNotExist)
	}
	return err
}

// scratch makes a directory for the files of one run, and removes those of runs
// that were killed.
func scratch(in string) (dir string, done func(), err error) {
	old, err := filepath.Glob(filepath.Join(in, "run.*"))
	if err != nil {
		return "", nil, err
	}
	for _, d := range old {
		if f, err := os.Open(d); err == nil {
			if syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB) == nil {
				_ = os.RemoveAll(d)
			}
			_ = f.Close()
		}
	}
	var f *os.File
	for {
		if dir, err = os.MkdirTemp(in, "run."); err != nil {
			return "", nil, err
		}
		if f, err = os.Open(dir); err == nil {
			if err = locked(f, syscall.LOCK_EX); err == nil {
				break
			}
			_ = f.Close()
		}
		if !errors.Is(err, os.ErrNotExist) { // else another run took it for one that was killed
			return "", nil, errors.Join(err, os.RemoveAll(dir))
		}
	}
	return dir, func() { _, _ = os.RemoveAll(dir), f.Close() }, nil
}

func freeMB(dir string) (uint64, error) {
	var free syscall.Statfs_t
	err := syscall.Statfs(dir, &free)
	return free.Bavail * uint64(free.Bsize) >> 20, err
}

func enough(dir string) error {
	mb, err := freeMB(dir)
	if err == nil && mb < workNowMB {
		err = fmt.Errorf("%s has %d MB free and the machine needs %d; AGENTBOX_CACHE puts it elsewhere", dir, mb,
			workNowMB)
	}
	return err
}

// payloadIn is where, in a run's directory, what the guest runs is put together.
func payloadIn(dir string) string { return filepath.Join(dir, "payload") }

// makePayload puts together, in dir, what the guest runs, and returns a digest per
// suite; machine is what it is run in.
func makePayload(ctx context.Context, dir string, list []suite, o options, machine string) (map[string]string, error) {
	if err := enough(dir); err != nil {
		return nil, err
	}
	root := payloadIn(dir)
	fmt.Fprintln(os.Stderr, "compiling")
	if err := errors.Join(os.MkdirAll(filepath.Join(root, "bin"), 0o755),
		os.MkdirAll(filepath.Join(root, "src"), 0o755)); err != nil {
		return nil, err
	}
	if err := compile(ctx, root, list); err != nil {
		return nil, err
	}
	// Tests ask for go by its name; what answers is this program.
	if err := os.Symlink("../vm", filepath.Join(root, "bin", "go")); err != nil {
		return nil, err
	}
	for _, name := range []string{"agentbox", "agentbox-runtime"} {
		if err := os.Symlink("../built/cmd/"+name, filepath.Join(root, "bin", name)); err != nil {
			return nil, err
		}
	}
	if slices.ContainsFunc(list, func(s suite) bool { return s.boots }) {
		fmt.Fprintln(os.Stderr, "making the package")
		if err := run(ctx, "scripts/install-deps.sh", "--package"); err != nil {
			return nil, err
		}
		if err := debPackage(ctx, "0.0~vm", filepath.Join(root, "agentbox.deb")); err != nil {
			return nil, err
		}
		if asksFor(o.run, "TestPackage") { // it upgrades this one to that
			if err := debPackage(ctx, "0.0~0", filepath.Join(root, "older.deb")); err != nil {
				return nil, err
			}
		}
	}
	if err := sources(ctx, filepath.Join(root, "src")); err != nil {
		return nil, err
	}
	return digest(root, list, machine, o)
}

// makeDisks makes, in dir, the disk with what was put together and the one that the
// guest works on.
func makeDisks(ctx context.Context, dir string) error {
	root := payloadIn(dir)
	if err := disk(ctx, filepath.Join(dir, "payload.img"), "payload", 0, "-d", root); err != nil {
		return err
	}
	// The machine needs the space that is free now.
	if err := errors.Join(os.RemoveAll(root), enough(dir)); err != nil {
		return err
	}
	return disk(ctx, filepath.Join(dir, "work.img"), "work", workMB, "-O", "quota,project", "-E",
		"quotatype=prjquota,lazy_itable_init=1,lazy_journal_init=1")
}

// compile makes this program, the programs that tests build, and the tests. Their commit
// is not in them: of the same sources they are the same.
func compile(ctx context.Context, root string, list []suite) error {
	if err := run(ctx, "go", "build", "-buildvcs=false", "-ldflags", "-s -w", "-o", filepath.Join(root, "vm"),
		"./test/vm"); err != nil {
		return err
	}
	for tags, packages := range builds {
		for _, p := range packages {
			if err := run(ctx, "go", "build", "-buildvcs=false", "-tags", tags, "-ldflags", "-s -w", "-o",
				filepath.Join(root, "built", tags, p), "./"+p); err != nil {
				return err
			}
		}
	}
	for _, s := range list {
		if err := run(ctx, "go", "test", "-c", "-vet=off", "-tags", "failpoint vm", "-ldflags", "-s -w", "-o",
			s.binary(root), "./"+s.pkg); err != nil {
			return err
		}
	}
	return nil
}

// debPackage makes a package of this tree that a suite installs.
func debPackage(ctx context.Context, version, to string) error {
	// All in the run's directory, which the next run removes if this one is killed.
	dir := filepath.Join(filepath.Dir(filepath.Dir(to)), "deb")
	if err := os.Mkdir(dir, 0o755); err != nil {
		return err
	}
	if err := run(ctx, "env", "DEB_VERSION="+version, "DEB_OUT="+dir, "TMPDIR="+dir,
		"scripts/deb.sh", "amd64"); err != nil {
		return err
	}
	return errors.Join(os.Rename(filepath.Join(dir, "agentbox_"+version+"_amd64.deb"), to), os.RemoveAll(dir))
}

// sources copies the tree as git has it, with what is new in it.
func sources(ctx context.Context, to string) error {
	return run(ctx, "sh", "-c", `git ls-files -z -co --exclude-standard --deduplicate | xargs -0 sh -c 'for f; do [ -f "$f" ] && printf "%s\0" "$f"; done' - | tar -c --null -T - | tar -x -C "$1"`, "-", to)
}

// disk makes a disk with a filesystem; without a size, one that is as large as
// what is put on it.
func disk(ctx context.Context, path, label string, mb int, opts ...string) error {
	size := fmt.Sprint(mb, "M")
	if mb == 0 {
		out, err := exec.CommandContext(ctx, "du", "-sm", "--apparent-size", opts[len(opts)-1]).Output()
		if err != nil {
			return err
		}
		var used int
		if _, err := fmt.Sscan(string(out), &used); err != nil {
			return err
		}
		size = fmt.Sprint(used*5/4+64, "M")
	}
	args := append([]string{"-q", "-F", "-t", "ext4", "-L", label}, opts...)
	return run(ctx, "mke2fs", append(args, path, size)...)
}

// run runs a program of the host's, whose output is told only if it fails.
func run(ctx context.Context, name string, args ...string) error {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	clearsUp(cmd)
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Run(); err != nil {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		return fmt.Errorf("%s %s: %w\n%s", name, strings.Join(args[:min(len(args), 4)], " "), err, out.String())
	}
	return nil
}
