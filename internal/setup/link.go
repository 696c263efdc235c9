package setup

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/internal/fsx"
)

// PluginName is the program that is a plugin of Docker's command line.
const PluginName = "docker-agentbox"

// PluginVariable is in the environment of an agentbox that docker-agentbox has started for the
// docker command.
const PluginVariable = "AGENTBOX_DOCKER_PLUGIN"

// Beside returns the path of the program of that name in the directory of self, which may be a
// link, or else on the PATH.
func Beside(self, name string) (string, error) {
	real, err := filepath.EvalSymlinks(self)
	if err != nil {
		return "", err
	}
	paths := []string{filepath.Join(filepath.Dir(real), name)}
	if path, err := exec.LookPath(name); err == nil {
		paths = append(paths, path)
	}
	for _, path := range paths {
		if is, err := filepath.EvalSymlinks(path); err == nil && is != real { // a link to self would not end
			return filepath.Abs(path)
		}
	}
	return "", &fault.Error{
		Err:  fmt.Errorf("program %s: %w", name, fault.ErrNotFound),
		Hint: "Install it beside " + real + ", or in a directory of the PATH.",
	}
}

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

// planLink finds where the link to the program goes, by default to the one beside self, and
// whether it is there.
func planLink(dir, self, program string) (*Link, error) {
	if program == "" {
		var err error
		if program, err = Beside(self, PluginName); err != nil {
			return nil, &fault.Error{Err: err, Hint: "Or leave it out with --no-cli-plugin."}
		}
	}
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
	l := &Link{Path: filepath.Join(dir, PluginName), Target: program}
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
		l.Changed = target != program
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

// readLink returns where a link points, and whether that is a program of agentbox, which may be
// gone by now.
func readLink(path string) (target string, ours bool, err error) {
	st, err := os.Lstat(path)
	if err != nil {
		return "", false, err
	}
	if st.Mode()&fs.ModeSymlink == 0 {
		return "", false, nil
	}
	target, err = os.Readlink(path)
	name := filepath.Base(target)
	return target, name == PluginName || name == "agentbox", err // once they were one program
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
