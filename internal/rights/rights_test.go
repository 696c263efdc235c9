package rights

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
	"testing"
)

// TestLists opens directories as a user who is none of their owners, by each right that there is.
func TestLists(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Fatal("run it as root: it takes the rights of other users")
	}
	top, err := os.MkdirTemp("/dev/shm", "rights")
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(top)
	if err := os.Chmod(top, 0o755); err != nil {
		t.Fatal(err)
	}
	dir := func(name string, uid, gid int, mode os.FileMode) string {
		path := filepath.Join(top, name)
		if err := errors.Join(os.Mkdir(path, 0o700), os.Chown(path, uid, gid), os.Chmod(path, mode)); err != nil {
			t.Fatal(err)
		}
		return path
	}
	roots := dir("roots", 0, 0, 0o700)
	dir("roots/open", 1000, 1000, 0o777)
	link := filepath.Join(top, "link")
	if err := os.Symlink("own", link); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(top, "file")
	if err := os.WriteFile(file, nil, 0o666); err != nil {
		t.Fatal(err)
	}
	u := User{UID: 1000, GID: 1001, Groups: []uint32{1002}}
	for _, c := range []struct {
		path string
		err  error
	}{
		{dir("own", 1000, 0, 0o500), nil},
		{dir("group", 0, 1001, 0o050), nil},
		{dir("groups", 0, 1002, 0o750), nil},
		{dir("all", 0, 0, 0o755), nil},
		{dir("not-list", 0, 0, 0o711), fs.ErrPermission},
		{dir("other-group", 0, 1003, 0o770), fs.ErrPermission},
		{dir("shut-out", 1000, 1001, 0o077), fs.ErrPermission},
		{roots, fs.ErrPermission},
		{roots + "/open", fs.ErrPermission},
		{roots + "/missing", fs.ErrPermission},
		{top + "/missing", fs.ErrNotExist},
		{file, syscall.ENOTDIR},
		{link, syscall.ENOTDIR},
	} {
		if err := Lists(u, c.path); !errors.Is(err, c.err) {
			t.Errorf("%s: %v, want %v", c.path, err, c.err)
		}
		if err := Lists(User{}, roots); err != nil {
			t.Fatalf("root's own rights are not back: %v", err)
		}
	}
}

// TestAs makes files as a user, and is root again afterwards, on the same thread.
func TestAs(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Fatal("run it as root: it takes the rights of other users")
	}
	dir := t.TempDir()
	if err := errors.Join(os.Chmod(filepath.Dir(dir), 0o755), os.Chown(dir, 1000, 1000)); err != nil {
		t.Fatal(err)
	}
	made, failed := filepath.Join(dir, "made"), errors.New("failed")
	err := As(User{UID: 1000, GID: 1001}, func() error {
		return errors.Join(os.WriteFile(made, nil, 0o600), failed)
	})
	if !errors.Is(err, failed) {
		t.Fatal(err)
	}
	st, err := os.Stat(made)
	if err != nil {
		t.Fatal(err)
	}
	if sys := st.Sys().(*syscall.Stat_t); sys.Uid != 1000 || sys.Gid != 1001 {
		t.Errorf("it belongs to %d:%d", sys.Uid, sys.Gid)
	}
}
