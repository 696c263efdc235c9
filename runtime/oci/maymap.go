package oci

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/criu"
	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/internal/idmap"
	"github.com/agentbox/agentbox/overlay"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/internal/box"
	"github.com/agentbox/agentbox/runtime/internal/kernel"
	"github.com/agentbox/agentbox/runtime/internal/record"
	"github.com/agentbox/agentbox/runtime/internal/userns"
)

var _ runtime.IDMapper = (*Backend)(nil)

// MayMap returns why a sandbox cannot have a user namespace here, or "".
func (b *Backend) MayMap(ctx context.Context, s runtime.Spec, lower []string, ids idmap.Map) (why string, err error) {
	if b.box.Wrapper == b.box.OCI {
		return "there is no agentbox-runtime to make its network", nil
	}
	if why, err := b.hostMaps(ctx); why != "" || err != nil {
		return why, err
	}
	if shut, err := userns.PrivateParent(b.box.Base, b.box.Stage); shut != "" || err != nil {
		return fmt.Sprintf("only root passes %s, below which its files are (chmod o+x lets others)", shut), err
	}
	return b.layersMap(s, lower, ids)
}

// layersMap looks at what is mounted into a sandbox.
func (b *Backend) layersMap(s runtime.Spec, lower []string, ids idmap.Map) (string, error) {
	var own unix.Stat_t
	if err := unix.Stat(b.box.Base, &own); err != nil {
		return "", &os.PathError{Op: "stat", Path: b.box.Base, Err: err}
	}
	var ns *os.File // made when it is needed
	defer func() { _ = ns.Close() }()
	look := func(path string, bind bool) (string, error) {
		var st unix.Stat_t
		if err := unix.Stat(path, &st); err != nil {
			return "", &os.PathError{Op: "stat", Path: path, Err: err}
		}
		if bind && (st.Uid >= ids.Size || st.Gid >= ids.Size) {
			return fmt.Sprintf("%s belongs to %d:%d, whom it would not have", path, st.Uid, st.Gid), nil
		}
		if !bind && st.Dev == own.Dev {
			return "", nil // as hostMaps tried it
		}
		if ns == nil {
			var err error
			if ns, err = ids.Namespace(); err != nil {
				return "", err
			}
		}
		if err := overlay.MayBind(path, ns); errors.Is(err, fault.ErrUnsupported) {
			return fmt.Sprintf("the ids of %s cannot be mapped", path), nil
		} else if err != nil {
			return "", err
		}
		return "", nil
	}
	for _, dir := range lower {
		if why, err := look(dir, false); why != "" || err != nil {
			return why, err
		}
	}
	for _, m := range s.Mounts {
		if m.Type != "bind" {
			continue
		}
		source, err := filepath.EvalSymlinks(m.Source)
		if err != nil {
			return "", err
		}
		if why, err := look(source, true); why != "" || err != nil {
			return why, err
		}
	}
	return "", nil
}

// mapping is the result for this host, and the kernel, mounts, programs and disk for which it
// holds.
type mapping struct {
	Of  string `json:"of"`
	Why string `json:"why"`
}

// hostMaps returns why no sandbox can have a user namespace here, or "". Trying takes some
// 50 ms, so the result is kept.
func (b *Backend) hostMaps(ctx context.Context) (string, error) {
	of, err := b.mapsOf()
	if err != nil {
		return "", err
	}
	path := filepath.Join(b.box.Run, "userns.json")
	var known mapping
	// A result that cannot be read is determined anew.
	if record.ReadJSON(path, &known) == nil && known.Of == of {
		return known.Why, nil
	}
	why, err := b.tryMapping(ctx)
	if err != nil {
		return "", fmt.Errorf("see whether sandboxes can have user namespaces: %w", err)
	}
	if err := record.WriteJSON(path, mapping{of, why}, false); err != nil {
		b.log.Debug("user namespace check not cached", "error", err)
	}
	return why, nil
}

// tryMapping tries in a directory that one process has at a time, so that what a
// killed one left can be taken away.
func (b *Backend) tryMapping(ctx context.Context) (why string, err error) {
	unlock, err := record.Lock(ctx, filepath.Join(b.box.Run, "tmp"), "the trial of user namespaces")
	if err != nil {
		return "", err
	}
	defer unlock()
	dir := filepath.Join(b.box.Base, ".userns")
	clear := func() error { return errors.Join(kernel.UnmountBelow(dir), os.RemoveAll(dir)) }
	if err := clear(); err != nil {
		return "", err
	}
	defer func() { err = errors.Join(err, clear()) }()
	if err := os.Mkdir(dir, 0o700); err != nil {
		return "", err
	}
	return userns.Unavailable(ctx, dir, b.box.OCI)
}

func (b *Backend) mapsOf() (string, error) {
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return "", err
	}
	mounts, err := os.Readlink("/proc/self/ns/mnt")
	if err != nil {
		return "", err
	}
	of := []string{strings.TrimSpace(string(boot)), mounts}
	paths := []string{b.box.Base, b.box.OCI}
	if path, err := criu.Program(); err == nil {
		paths = append(paths, path)
	}
	for i, path := range paths {
		var st unix.Stat_t
		if err := unix.Stat(path, &st); err != nil {
			return "", &os.PathError{Op: "stat", Path: path, Err: err}
		}
		if i == 0 {
			of = append(of, fmt.Sprint(st.Dev))
			continue
		}
		of = append(of, fmt.Sprintf("%s %d %d.%d", path, st.Size, st.Mtim.Sec, st.Mtim.Nsec))
	}
	return strings.Join(of, "; "), nil
}

// IDsElsewhere are the first ids of the ranges that running sandboxes of other
// roots have.
func (b *Backend) IDsElsewhere() ([]uint32, error) {
	var list []uint32
	dir := filepath.Join(b.box.Cgroups[0].Path, box.CgroupRoot)
	entries, err := os.ReadDir(dir)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	for _, e := range entries {
		id, _, ok := strings.Cut(e.Name(), "-")
		if !ok || !record.IsID(id) || box.CgroupRoot+"/"+e.Name() == b.box.Cgroup(id) {
			continue
		}
		// A process that ends meanwhile has none.
		pids, _ := os.ReadFile(filepath.Join(dir, e.Name(), "cgroup.procs"))
		pid, _, _ := strings.Cut(string(pids), "\n")
		ids, _ := os.ReadFile(filepath.Join("/proc", pid, "uid_map"))
		var inside, base uint32
		if n, _ := fmt.Sscan(string(ids), &inside, &base); n == 2 && inside == 0 && base > 0 {
			list = append(list, base)
		}
	}
	return list, nil
}
