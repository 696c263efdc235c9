package overlay

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"
)

func TestMain(m *testing.M) {
	if os.Geteuid() != 0 {
		fmt.Fprintln(os.Stderr, "the tests of overlay mount filesystems and make devices: run them as root")
		os.Exit(1)
	}
	goleak.VerifyTestMain(m)
}

// tb is what a test, a benchmark, a fuzz target and a rapid check have in common.
type tb interface {
	Helper()
	Cleanup(func())
	Errorf(string, ...any)
	Fatal(...any)
	Fatalf(string, ...any)
}

// must fails the test on an error.
func must(t tb, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// capture captures dir into memory, entries included.
func captureDir(t tb, dir string) (archive []byte, tree []byte) {
	t.Helper()
	var buf, lines bytes.Buffer
	tw := NewTreeWriter(&lines)
	sum, err := Capture(context.Background(), dir, &buf, CaptureOptions{Entry: func(e Entry) error {
		if err := e.check(); err != nil {
			return err
		}
		return tw.Write(e)
	}})
	must(t, err)
	must(t, tw.Close())
	if sum.Archive != int64(buf.Len()) {
		t.Fatalf("summary says %d bytes of archive, there are %d", sum.Archive, buf.Len())
	}
	return buf.Bytes(), lines.Bytes()
}

// applyTo applies an archive to a new directory below parent and returns it
// with the tree that Apply reported.
func applyTo(t tb, parent string, archive []byte) (dir string, tree []byte) {
	t.Helper()
	dir, err := os.MkdirTemp(parent, "applied-")
	must(t, err)
	var lines bytes.Buffer
	tw := NewTreeWriter(&lines)
	_, err = Apply(context.Background(), bytes.NewReader(archive), dir, ApplyOptions{Entry: tw.Write})
	must(t, err)
	must(t, tw.Close())
	return dir, lines.Bytes()
}

// tmpfs mounts a tmpfs for the test.
func tmpfs(t testing.TB, options string) string {
	t.Helper()
	dir := t.TempDir()
	must(t, unix.Mount("tmpfs", dir, "tmpfs", unix.MS_NODEV|unix.MS_NOSUID, options))
	t.Cleanup(func() { must(t, Unmount(dir, UnmountOptions{})) })
	return dir
}

// ext4 mounts an image of the given size. The benchmarks need one with a
// journal: without, ext4 searches so long for an inode that was not deleted
// lately that making ten thousand files takes seconds instead of 0.2 s.
func ext4(t testing.TB, size string, mkfs ...string) string {
	t.Helper()
	dir := t.TempDir()
	img, mnt := filepath.Join(dir, "img"), filepath.Join(dir, "mnt")
	must(t, os.Mkdir(mnt, 0o755))
	for _, args := range [][]string{
		{"truncate", "-s", size, img},
		append(append([]string{"mkfs.ext4", "-q", "-F"}, mkfs...), img),
		{"mount", "-o", "loop,nodev", img, mnt},
	} {
		if out, err := exec.Command(args[0], args[1:]...).CombinedOutput(); err != nil {
			t.Fatalf("%s: %v\n%s", args[0], err, out)
		}
	}
	t.Cleanup(func() { must(t, Unmount(mnt, UnmountOptions{})) })
	return mnt
}

// noDevices returns a temporary directory on the disk in which no device node
// can be opened and no set-id bit works, whatever a test makes there.
func noDevices(t testing.TB) string {
	t.Helper()
	dir := t.TempDir()
	must(t, unix.Mount(dir, dir, "", unix.MS_BIND, ""))
	t.Cleanup(func() { must(t, Unmount(dir, UnmountOptions{})) })
	must(t, unix.Mount("", dir, "", unix.MS_REMOUNT|unix.MS_BIND|unix.MS_NODEV|unix.MS_NOSUID, ""))
	return dir
}

// tenThousand makes 10,000 files of 4 KiB in 100 directories.
func tenThousand(t testing.TB, dir string) {
	t.Helper()
	data := make([]byte, 4096)
	for i := range 10_000 {
		sub := filepath.Join(dir, fmt.Sprintf("d%02d", i%100))
		if i < 100 {
			must(t, os.Mkdir(sub, 0o755))
		}
		for j := range data {
			data[j] = byte(i + j*j)
		}
		must(t, os.WriteFile(filepath.Join(sub, fmt.Sprintf("file-%d", i)), data, 0o644))
	}
}

func newReader(b []byte) *bufio.Reader { return bufio.NewReader(bytes.NewReader(b)) }
