package apply

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path"
	"slices"
	"strings"
)

// The index of a git repository changes with every `git status`, which notes there what it has seen
// of files. What counts of it is what is staged.

// maxIndex bounds an index that is compared.
const maxIndex = 256 << 20

// isGitIndex reports whether a path is that of the index of a repository.
func isGitIndex(p string) bool {
	names := strings.Split(strings.Trim(p, "/"), "/")
	return names[len(names)-1] == "index" && slices.ContainsFunc(names[:len(names)-1], isGitDir)
}

// resolveIndex decides about an index that was changed on both sides, if only one has staged anything:
// that one's counts. sure: it has decided.
func (m *merger) resolveIndex(ctx context.Context, rel string, s, b, f side) (take, sure bool, err error) {
	if !isGitIndex(path.Join(m.From, rel)) || !s.isFile() || !b.isFile() || !f.isFile() {
		return false, false, nil
	}
	var staged [3]string
	for i, one := range []side{s, b, f} {
		if staged[i], err = stagedIn(ctx, one); errors.Is(err, errNoIndex) {
			return false, false, nil
		} else if err != nil {
			return false, false, err
		}
	}
	switch staged[1] {
	case staged[2]:
		return true, true, nil
	case staged[0]:
		return false, true, nil
	}
	return false, staged[0] == staged[2], nil
}

// errNoIndex is that of an index that git cannot read, or of a host without git.
var errNoIndex = errors.New("no index to compare")

// stagedIn returns what is staged in an index, as git lists it.
func stagedIn(ctx context.Context, s side) (string, error) {
	git, err := exec.LookPath("git")
	if err != nil || s.Size > maxIndex {
		return "", errNoIndex
	}
	f, err := s.open(ctx)
	if err != nil {
		return "", err
	}
	data, err := io.ReadAll(io.LimitReader(f, maxIndex))
	if err = errors.Join(err, f.Close()); err != nil {
		return "", err
	}
	index, err := memFile(data)
	if err != nil {
		return "", err
	}
	defer index.Close()
	// Of no repository that is anyone's: git reads the index only in one.
	dir, err := os.MkdirTemp("", "agentbox-git-")
	if err != nil {
		return "", err
	}
	defer os.RemoveAll(dir)
	ctx, cancel := context.WithTimeout(ctx, mergeTime)
	defer cancel()
	var out bytes.Buffer
	for _, args := range [][]string{
		{"init", "-q", "--bare", "--template=", dir},
		{"--git-dir=" + dir, "--work-tree=" + dir, "ls-files", "--stage", "-v", "-z"},
	} {
		cmd := exec.CommandContext(ctx, git, args...)
		cmd.Dir, cmd.ExtraFiles = dir, []*os.File{index}
		cmd.Env = append(gitEnv(), "GIT_INDEX_FILE=/proc/self/fd/3")
		cmd.Stdout = &limited{to: &out, left: 4 * maxIndex}
		err := cmd.Run()
		if ctx.Err() != nil {
			return "", fmt.Errorf("read an index with git: %w", context.Cause(ctx))
		}
		if err != nil {
			return "", errNoIndex
		}
	}
	return out.String(), nil
}
