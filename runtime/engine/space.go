package engine

import (
	"errors"
	"fmt"
	"path/filepath"
	"strings"

	"github.com/docker/go-units"
	"golang.org/x/sys/unix"
)

// explainFull adds to the error of a restore that found no room how much it needs, how much
// is free now that its stage is gone, and what to do.
func (e *core) explainFull(r *restoration, err error) error {
	if !errors.Is(err, unix.ENOSPC) && !errors.Is(err, unix.EDQUOT) {
		return err
	}
	type disk struct {
		dir        string
		need, free int64
	}
	var disks []*disk
	seen := map[unix.Fsid]*disk{}
	add := func(dir string, need int64) {
		var st unix.Statfs_t
		if unix.Statfs(dir, &st) != nil {
			return // the directory was removed with a sandbox that was being recreated
		}
		if seen[st.Fsid] == nil {
			seen[st.Fsid] = &disk{dir: dir, free: int64(st.Bavail) * st.Bsize}
			disks = append(disks, seen[st.Fsid])
		}
		seen[st.Fsid].need += need
	}
	images := int64(0)
	if r.reader != nil && r.full() {
		images = r.reader.Manifest().Processes.Bytes()
	}
	add(e.store.Root(), images)
	for i, t := range r.data.Trees {
		need := int64(0)
		if i < len(r.files.changes) {
			need = r.files.changes[i].Bytes()
		}
		add(filepath.Dir(t.Dir), need)
	}
	var says []string
	for _, d := range disks {
		text := fmt.Sprintf("%s is free at %s", units.HumanSize(float64(d.free)), d.dir)
		if d.need > 0 {
			text = fmt.Sprintf("about %s is needed beside the present state, and %s",
				units.HumanSize(float64(d.need)), text)
		}
		says = append(says, text)
	}
	err = hint(fmt.Errorf("%w (%s)", err, strings.Join(says, "; ")),
		"Free space with agentbox prune, which lets old checkpoints go with --keep-last N, or make the disk larger.")
	if r.data.Phase == phasePrepare && !r.data.Recreated {
		err = hint(err, "The sandbox is as it was.")
	}
	return err
}
