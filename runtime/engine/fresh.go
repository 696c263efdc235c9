package engine

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"strings"

	"github.com/agentbox/agentbox/criu"
	"github.com/agentbox/agentbox/policy"
	"github.com/agentbox/agentbox/runtime"
)

// Some engines mount a directory such as /dev/shm into a container from outside, empty at
// every start (Container.Fresh). Its files are lost when the container ends, and a
// checkpoint cannot bring them back. A checkpoint warns of such files, and a full one fails
// if a process has one open, because its restore would fail.

// warnFresh warns of fresh directories that are not empty.
func (k *making) warnFresh() error {
	for _, dir := range k.c.Fresh {
		jail, err := policy.Open(fmt.Sprintf("/proc/%d/root", k.c.Pid))
		if err != nil {
			return err
		}
		h, err := jail.Handle(dir, false)
		_ = jail.Close()
		if errors.Is(err, fs.ErrNotExist) || errors.Is(err, runtime.ErrNotFound) {
			continue
		}
		if err != nil {
			return err
		}
		list, err := os.ReadDir(fmt.Sprintf("/proc/self/fd/%d", h.Fd()))
		_ = h.Close()
		if err != nil {
			return err
		}
		if len(list) > 0 {
			k.row.Warnings = append(k.row.Warnings,
				fmt.Sprintf("%s is mounted by the engine, and what is in it (%d files) is not part of the checkpoint",
					dir, len(list)))
		}
	}
	return nil
}

// checkFresh refuses process images that have files in a fresh directory open.
func (k *making) checkFresh(images string) error {
	if len(k.c.Fresh) == 0 {
		return nil
	}
	files, err := criu.OpenFiles(images)
	if err != nil {
		return err
	}
	for _, f := range files {
		for _, dir := range k.c.Fresh {
			if below, in := strings.CutPrefix(path.Clean(f.Path), dir+"/"); in && below != "" {
				return hint(fmt.Errorf("%w: a process has %s open, and the engine mounts %s empty at every start",
					runtime.ErrUnsupported, f.Path, dir),
					fmt.Sprintf("Start the container with one of its own (--tmpfs %s), or take a checkpoint with --files-only.", dir))
			}
		}
	}
	return nil
}
