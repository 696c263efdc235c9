package project

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
)

// Trust remembers which files a user has confirmed, each for one directory and one content. It is
// a directory of the user's configuration, with an empty file for each.
type Trust struct{ Dir string }

func (t Trust) path(dir string, data []byte) string {
	h := sha256.New()
	fmt.Fprintf(h, "%d %s", len(dir), dir)
	h.Write(data)
	return filepath.Join(t.Dir, fmt.Sprintf("%x", h.Sum(nil)))
}

// Has reports whether the content of a directory's file was confirmed.
func (t Trust) Has(dir string, data []byte) (bool, error) {
	_, err := os.Lstat(t.path(dir, data))
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	return err == nil, err
}

// Add remembers that the content of a directory's file was confirmed.
func (t Trust) Add(dir string, data []byte) error {
	if err := os.MkdirAll(t.Dir, 0o700); err != nil {
		return err
	}
	f, err := os.OpenFile(t.path(dir, data), os.O_CREATE|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	return f.Close()
}
