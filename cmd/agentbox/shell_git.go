package main

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/fsx"
	"github.com/agentbox/agentbox/internal/rights"
)

// warnGit says that git does not work in the sandbox, because the repository lies outside of the directory:
// it is a worktree or a submodule, or in one.
func (sh *shell) warnGit() {
	var at string
	err := rights.As(sh.user.User, func() (err error) {
		at, err = gitElsewhere(sh.dir)
		return err
	})
	if err != nil || at == "" { // git itself says what is wrong
		return
	}
	fmt.Fprintf(sh.app.stderr, "git finds no repository in it: %s is not in the sandbox; work over what has both, or over a clone\n",
		printable(sh.user.short(at)))
}

// gitElsewhere returns where the git repository of a directory is if it lies outside of it.
func gitElsewhere(dir string) (string, error) {
	for at := dir; ; at = filepath.Dir(at) {
		info, err := os.Lstat(filepath.Join(at, ".git"))
		switch {
		case errors.Is(err, fs.ErrNotExist):
			if at == "/" {
				return "", nil
			}
			continue
		case err != nil:
			return "", err
		case at == dir && info.Mode().IsRegular():
			to, err := gitLink(dir)
			if err != nil || to == "" || fsx.Within(dir, to) {
				return "", err
			}
			return to, nil
		case at == dir:
			return "", nil
		}
		return filepath.Join(at, ".git"), nil
	}
}

// gitLink returns the directory that the file .git names; empty: it names none.
func gitLink(dir string) (string, error) {
	root, err := os.OpenRoot(dir)
	if err != nil {
		return "", err
	}
	defer root.Close()
	f, err := root.OpenFile(".git", os.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		return "", err
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, unix.PathMax))
	to, ok := strings.CutPrefix(strings.TrimSpace(string(data)), "gitdir: ")
	if err != nil || !ok {
		return "", err
	}
	if !filepath.IsAbs(to) {
		to = filepath.Join(dir, to)
	}
	return filepath.Clean(to), nil
}
