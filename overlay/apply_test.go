package overlay

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// TestApplyNoSpace fills a filesystem in the middle, in the small files, in a
// large one, with names alone, and with attributes.
func TestApplyNoSpace(t *testing.T) {
	small := []piece{rootDir()}
	for i := range 2000 {
		small = append(small, aFile(fmt.Sprintf("f%04d", i), strings.Repeat("x", 4096)))
	}
	names := []piece{rootDir()}
	for i := range 2000 {
		names = append(names, aDir(fmt.Sprintf("d%04d", i)))
	}
	for name, archive := range map[string][]byte{
		"small files": craft(t, small...),
		"large file":  craft(t, rootDir(), aFile("large", strings.Repeat("x", 5<<20))),
		"names":       craft(t, names...),
	} {
		t.Run("tmpfs, "+name, func(t *testing.T) {
			noSpace(t, tmpfs(t, "size=2m,nr_inodes=1500"), archive)
		})
		t.Run("ext4, "+name, func(t *testing.T) {
			noSpace(t, ext4(t, "2m", "-N", "1200", "-O", "^has_journal"), archive)
		})
	}
}

func noSpace(t *testing.T, dir string, archive []byte) {
	t.Helper()
	fds := openFiles(t)
	target := filepath.Join(dir, "target")
	must(t, os.Mkdir(target, 0o755))
	_, err := Apply(t.Context(), bytes.NewReader(archive), target, ApplyOptions{Sync: true})
	if !errors.Is(err, syscall.ENOSPC) || !strings.Contains(err.Error(), "no space left on device") {
		t.Errorf("%v", err)
	}
	if now := openFiles(t); now != fds {
		t.Errorf("%d files are open, %d were before", now, fds)
	}
}

// TestApplyIntoDirtyRoot gives Apply a directory with attributes of its own:
// none may stay, and none may colour what is created in it.
func TestApplyIntoDirtyRoot(t *testing.T) {
	base := t.TempDir()
	src, dst := filepath.Join(base, "src"), filepath.Join(base, "dst")
	must(t, os.Mkdir(src, 0o755))
	must(t, os.Mkdir(dst, 0o755))
	everything(t, src)
	archive, _ := captureDir(t, src)
	must(t, unix.Setxattr(dst, "user.stale", []byte("x"), 0))
	must(t, unix.Setxattr(dst, "trusted.overlay.opaque", []byte("y"), 0))
	must(t, unix.Setxattr(dst, "system.posix_acl_default", posixACL(7, 1234), 0))
	must(t, os.Chown(dst, 1000, 1000))
	must(t, unix.Chmod(dst, 0o7777))
	defer unix.Umask(unix.Umask(0o777))
	// Until it is whole no other user may look in.
	looked := false
	private := slowly(func(n int64) error {
		var st unix.Stat_t
		if err := unix.Stat(dst, &st); err != nil || st.Mode&0o7777 != 0o700 || st.Uid != 0 {
			t.Errorf("after %d bytes: mode %o, owner %d, %v", n, st.Mode, st.Uid, err)
		}
		looked = true
		return nil
	}).write(io.Discard)
	_, err := Apply(t.Context(), io.TeeReader(bytes.NewReader(archive), private), dst, ApplyOptions{})
	must(t, err)
	if !looked {
		t.Error("nobody looked")
	}
	samePeek(t, "applied", peek(t, src), peek(t, dst))
}

// TestApplyContradictingACL has an ACL that the mode would change silently.
func TestApplyContradictingACL(t *testing.T) {
	p := aFile("f", "x")
	p.entry.Mode = 0o600
	p.entry.Xattrs = map[string]string{"system.posix_acl_access": string(posixACL(7, 1000))}
	_, err := Apply(t.Context(), bytes.NewReader(craft(t, rootDir(), p)), t.TempDir(), ApplyOptions{})
	if err == nil || !strings.Contains(err.Error(), "contradicts its mode") {
		t.Error(err)
	}
}

// TestApplyTooLargeForFilesystem has a size that ext4 cannot hold.
func TestApplyTooLargeForFilesystem(t *testing.T) {
	p := piece{entry: Entry{Path: "f", Type: TypeFile, Size: 1 << 60, Extents: []Extent{}}}
	_, err := Apply(t.Context(), bytes.NewReader(craft(t, rootDir(), p)), t.TempDir(), ApplyOptions{})
	if err == nil || !strings.Contains(err.Error(), "more than this filesystem's files can") {
		t.Error(err)
	}
}
