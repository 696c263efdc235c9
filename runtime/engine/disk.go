package engine

import (
	"context"
	"errors"
	"io/fs"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/agentbox/agentbox/internal/fsx"
	"github.com/agentbox/agentbox/runtime"
)

// onDisk adds up the disk usage of a directory's files, hard links once. Files that vanish
// in the meantime do not count.
func onDisk(ctx context.Context, dir string) (n int64, err error) {
	if dir == "" {
		return 0, nil
	}
	return n, eachOnDisk(ctx, dir, nil, func(_ string, blocks int64) { n += blocks })
}

// rootOnDisk returns the disk usage of a root, without filesystems mounted in it. uppers
// has the sizes of sandboxes' directories that were added up already.
func rootOnDisk(ctx context.Context, root string, uppers map[string]int64) (d runtime.DiskUsage, err error) {
	known := map[string]int64{} // by the paths that the walk visits
	for path, n := range uppers {
		known[fsx.Resolved(path)] = n
	}
	root = fsx.Resolved(root)
	skip := func(path string) bool { _, ok := known[path]; return ok }
	add := func(path string, n int64) {
		rel, err := filepath.Rel(root, path)
		if err != nil || rel == ".." || strings.HasPrefix(rel, "../") {
			d.Elsewhere += n
			return
		}
		part := strings.SplitN(rel, "/", 3)
		into := &d.Rest
		switch {
		case part[0] == "packs":
			into = &d.Packs
		case part[0] == "checkpoints":
			into = &d.Records
		case part[0] == "images":
			into = &d.Images
		case part[0] == "sandboxes", part[0] == "volumes", len(part) > 1 && part[1] == "sandboxes":
			into = &d.Sandboxes
		}
		*into += n
		d.Total += n
	}
	err = eachOnDisk(ctx, root, skip, add)
	for path, n := range known {
		add(path, n)
	}
	return d, err
}

// eachOnDisk calls each with the disk usage of every file of a directory, on the same
// filesystem, without the directories to skip.
func eachOnDisk(
	ctx context.Context, dir string, skip func(path string) bool, each func(path string, blocks int64),
) error {
	var dev uint64
	seen := map[uint64]bool{}
	return filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err == nil {
			err = ctx.Err()
		}
		var info fs.FileInfo
		if err == nil {
			info, err = d.Info()
		}
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err != nil {
			return err
		}
		st := info.Sys().(*syscall.Stat_t)
		if path == dir {
			dev = st.Dev
		}
		switch {
		case d.IsDir() && (st.Dev != dev || skip != nil && skip(path)):
			return fs.SkipDir
		case d.IsDir():
		case st.Dev != dev:
			return nil // a mount over a file, such as a network namespace
		case st.Nlink > 1 && seen[st.Ino]:
			return nil
		case st.Nlink > 1:
			seen[st.Ino] = true
		}
		each(path, st.Blocks*512)
		return nil
	})
}
