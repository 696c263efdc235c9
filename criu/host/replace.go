package host

import (
	"errors"
	"io/fs"
	"os"
	"syscall"
)

// Replace publishes data in place of a file, whose owner and mode it keeps. It is not
// fsynced: process images are laid out for one restore, and none goes on after a power cut.
func Replace(path string, data []byte) (err error) {
	st, err := os.Lstat(path)
	if err != nil {
		return err
	}
	temp := path + ".new"
	if err := os.Remove(temp); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	f, err := os.OpenFile(temp, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(data)
	if s, ok := st.Sys().(*syscall.Stat_t); ok && err == nil {
		err = f.Chown(int(s.Uid), int(s.Gid))
	}
	if err == nil {
		err = f.Chmod(st.Mode().Perm())
	}
	if err = errors.Join(err, f.Close()); err == nil {
		err = os.Rename(temp, path)
	}
	if err != nil {
		_ = os.Remove(temp)
	}
	return err
}
