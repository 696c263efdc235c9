package setup

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/internal/fsx"
)

// PluginName is the file name that makes agentbox a plugin of Docker's
// command line.
const PluginName = "docker-agentbox"

// pluginDirs are where the docker command looks for plugins of all users.
var pluginDirs = []string{
	"/usr/local/lib/docker/cli-plugins",
	"/usr/local/libexec/docker/cli-plugins",
	"/usr/lib/docker/cli-plugins",
	"/usr/libexec/docker/cli-plugins",
}

// A Link is the symlink that makes `docker agentbox` work.
type Link struct {
	Path    string `json:"path"`
	Target  string `json:"target"` // empty when removed
	Changed bool   `json:"changed"`
}

// planLink finds where the link to self goes, and whether it is there.
func planLink(dir, self string) (*Link, error) {
	if dir == "" {
		dir = pluginDirs[0]
		for _, d := range pluginDirs {
			if st, err := os.Stat(d); err == nil && st.IsDir() {
				dir = d
				break
			}
		}
	}
	dir, err := filepath.Abs(dir)
	if err != nil {
		return nil, err
	}
	l := &Link{Path: filepath.Join(dir, PluginName), Target: self}
	target, ours, err := readLink(l.Path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		l.Changed = true
	case err != nil:
		return nil, err
	case !ours:
		return nil, &fault.Error{
			Hint: "Remove it, name another directory with --cli-plugins, or leave the plugin out with --no-cli-plugin.",
			Err:  fmt.Errorf("%s is there and no link to agentbox: %w", l.Path, fault.ErrExists),
		}
	default:
		l.Changed = target != self
	}
	return l, nil
}

// planUnlink finds the link; nil if there is none of ours.
func planUnlink(dir string) (*Link, error) {
	dirs := pluginDirs
	if dir != "" {
		dirs = []string{dir}
	}
	for _, d := range dirs {
		d, err := filepath.Abs(d)
		if err != nil {
			return nil, err
		}
		l := &Link{Path: filepath.Join(d, PluginName), Changed: true}
		if _, ours, err := readLink(l.Path); err == nil && ours {
			return l, nil
		}
	}
	return nil, nil
}

// readLink tells where a link points and whether that is an agentbox, which
// may be gone by now.
func readLink(path string) (target string, ours bool, err error) {
	st, err := os.Lstat(path)
	if err != nil {
		return "", false, err
	}
	if st.Mode()&fs.ModeSymlink == 0 {
		return "", false, nil
	}
	target, err = os.Readlink(path)
	return target, filepath.Base(target) == "agentbox", err
}

// make creates or replaces the link.
func (l *Link) make() error {
	dir := filepath.Dir(l.Path)
	// Other users look in here, too.
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	tmp := filepath.Join(dir, fmt.Sprintf(".%s-%d", PluginName, os.Getpid()))
	_ = os.Remove(tmp)
	if err := os.Symlink(l.Target, tmp); err != nil {
		return err
	}
	if err := os.Rename(tmp, l.Path); err != nil {
		return errors.Join(err, os.Remove(tmp))
	}
	return fsx.SyncDir(dir)
}

func (l *Link) remove() error {
	if err := os.Remove(l.Path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return fsx.SyncDir(filepath.Dir(l.Path))
}
