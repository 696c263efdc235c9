package apply

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Bounds of what is merged: a file, all that one apply merges, and the time for one.
const (
	maxText   = 4 << 20
	maxMerged = 256 << 20
	mergeTime = 20 * time.Second
)

// errNoText is that of a file which is too large for a merge, or no text.
var errNoText = errors.New("no text to merge")

// readText reads a file of text.
func readText(ctx context.Context, s side) ([]byte, error) {
	if s.Size > maxText {
		return nil, errNoText
	}
	f, err := s.open(ctx)
	if err != nil {
		return nil, err
	}
	data, err := io.ReadAll(io.LimitReader(f, maxText+1))
	if err = errors.Join(err, f.Close()); err != nil {
		return nil, err
	}
	if len(data) > maxText || bytes.IndexByte(data, 0) >= 0 {
		return nil, errNoText
	}
	return data, nil
}

// mergeText merges what two sides made of a text, with git. clean: without conflicts; the text has
// markers around them otherwise. Without git on the host it is errNoText.
func mergeText(ctx context.Context, ours, base, theirs []byte, names [3]string) (text []byte, clean bool, err error) {
	git, err := exec.LookPath("git")
	if err != nil {
		return nil, false, errNoText
	}
	ctx, cancel := context.WithTimeout(ctx, mergeTime)
	defer cancel()
	args := []string{"merge-file", "-p", "-q"}
	for _, name := range names {
		args = append(args, "-L", name)
	}
	var files []*os.File
	defer func() {
		for _, f := range files {
			_ = f.Close()
		}
	}()
	for i, data := range [][]byte{ours, base, theirs} {
		f, err := memFile(data)
		if err != nil {
			return nil, false, err
		}
		files = append(files, f)
		args = append(args, fmt.Sprintf("/proc/self/fd/%d", 3+i))
	}
	cmd := exec.CommandContext(ctx, git, args...)
	cmd.Dir = "/"
	cmd.Env = append(gitEnv(), "GIT_DIR=/dev/null") // of no repository
	cmd.ExtraFiles = files
	var out, said bytes.Buffer
	cmd.Stdout, cmd.Stderr = &limited{to: &out, left: 4*maxText + 1<<20}, &limited{to: &said, left: 4 << 10}
	err = cmd.Run()
	if ctx.Err() != nil {
		return nil, false, context.Cause(ctx)
	}
	var exit *exec.ExitError
	switch {
	case err == nil:
		return out.Bytes(), true, nil
	case errors.As(err, &exit) && exit.ExitCode() > 0 && exit.ExitCode() < 128:
		return out.Bytes(), false, nil // so many conflicts
	}
	return nil, false, fmt.Errorf("git merge-file: %w: %.500s", err, strings.TrimSpace(said.String()))
}

// gitEnv is the environment of a git that reads no one's configuration.
func gitEnv() []string {
	return []string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL=C", "HOME=/nonexistent",
		"GIT_CONFIG_NOSYSTEM=1", "GIT_CONFIG_GLOBAL=/dev/null", "GIT_CONFIG_SYSTEM=/dev/null"}
}

// memFile returns a file that is nowhere on the disk.
func memFile(data []byte) (*os.File, error) {
	fd, err := unix.MemfdCreate("merge", unix.MFD_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("memfd: %w", err)
	}
	f := os.NewFile(uintptr(fd), "merge")
	if _, err := f.Write(data); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

// limited writes until so many bytes are written.
type limited struct {
	to   io.Writer
	left int
}

func (l *limited) Write(p []byte) (int, error) {
	if len(p) > l.left {
		return 0, errNoText
	}
	l.left -= len(p)
	return l.to.Write(p)
}
