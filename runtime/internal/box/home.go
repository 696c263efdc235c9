package box

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/internal/fsx"
	"github.com/agentbox/agentbox/runtime/internal/kernel"
	"github.com/agentbox/agentbox/runtime/internal/record"
)

// home keeps the records of a backend's sandboxes. It hides the names of the files, which of them
// outlast a power failure, and the order of their removal, so that an interrupted verb's leftovers
// are still found. All paths are real ones, as in the mount table.
type home struct {
	Base, Root string // lasting state: of all backends, of this one
	Stage, Run string // transient state: of all backends, among it staged restores; of this one
	State      string // of the OCI runtime
	tag        string // of Base, among all on this machine
}

// openHome makes the directories of the backend whose part of root and run this is. With existing
// it makes no lasting ones: what has been removed of the root since is not made again.
func openHome(root, run, part string, existing bool) (h home, err error) {
	if root == "" || run == "" {
		return h, fmt.Errorf("%w: a backend without root or run directory", fault.ErrInvalid)
	}
	if strings.Contains(run, ",") {
		// runc takes it for the end of a namespace's path.
		return h, fmt.Errorf("%w: run directory %s: its path must not have a comma", fault.ErrInvalid, run)
	}
	if h.Base, err = directory(root, existing, filepath.Join(part, "sandboxes")); err != nil {
		return h, err
	}
	// A boot may have removed these.
	if h.Stage, err = directory(run, false, filepath.Join(part, "runc"), "exits"); err != nil {
		return h, err
	}
	h.Root, h.Run = filepath.Join(h.Base, part), filepath.Join(h.Stage, part)
	h.State = filepath.Join(h.Run, "runc")
	// A root from elsewhere may have them lead out of it.
	if err := errors.Join(fsx.NoLinks(h.Root, "", "sandboxes"), fsx.NoLinks(h.Run, "", "runc")); err != nil {
		return h, fmt.Errorf("%w: %w", fault.ErrDenied, err)
	}
	sum := sha256.Sum256([]byte(h.Base))
	h.tag = hex.EncodeToString(sum[:4])
	return h, nil
}

// CgroupRoot holds the cgroups of all containers and of their monitors.
const CgroupRoot = "/agentbox"

// Cgroup is the cgroup of a sandbox. It follows from root and id: a checkpoint
// that was carried to another root of this machine brings its sandbox's id
// along, and one root's clearing up must not end the other's processes.
func (h home) Cgroup(id string) string { return CgroupRoot + "/" + id + "-" + h.tag }

// OfCgroup is the reverse of Cgroup: the sandbox of this root whose cgroup has a name.
func (h home) OfCgroup(name string) (id string, ok bool) {
	id, ok = strings.CutSuffix(filepath.Base(name), "-"+h.tag)
	return id, ok && record.IsID(id)
}

// directory makes dir with children, unless they have to exist, and returns its real path.
func directory(dir string, existing bool, children ...string) (string, error) {
	for _, child := range children {
		path := filepath.Join(dir, child)
		if _, err := os.Stat(path); existing && errors.Is(err, fs.ErrNotExist) {
			return "", fmt.Errorf("%s: %w", path, fault.ErrNotFound)
		}
		if err := os.MkdirAll(path, 0o700); err != nil {
			return "", err
		}
	}
	real, err := filepath.EvalSymlinks(dir)
	if err != nil {
		return "", err
	}
	return filepath.Abs(real)
}

// Program finds an executable and returns its absolute path.
func Program(name string) (string, error) {
	path, err := exec.LookPath(name)
	if err != nil {
		return "", fmt.Errorf("%w: %w", fault.ErrUnsupported, err)
	}
	return filepath.Abs(path)
}

// runtimes finds the OCI runtime, which is runc unless another is named, and the
// program to call in its place: the wrapper that is named, else the one beside
// self, the agentbox binary, else, without self, the OCI runtime.
func runtimes(runtime, wrapper, self string) (real, called string, err error) {
	if real, err = Program(cmp.Or(runtime, "runc")); err != nil {
		return "", "", err
	}
	if wrapper == "" && self != "" {
		// Through symlinks: /usr/local/bin/agentbox may point into a build tree.
		self, err := filepath.EvalSymlinks(self)
		if err != nil {
			return "", "", err
		}
		wrapper = filepath.Join(filepath.Dir(self), "agentbox-runtime")
	}
	if wrapper == "" {
		return real, real, nil
	}
	called, err = Program(wrapper)
	return real, called, err
}

// Dir returns the directory of a sandbox's lasting state, or a path in it.
func (h home) Dir(id string, elem ...string) string {
	return filepath.Join(append([]string{h.Root, "sandboxes", id}, elem...)...)
}

// RunDir returns the directory of a sandbox's transient state, or a path in it.
func (h home) RunDir(id string, elem ...string) string {
	return filepath.Join(append([]string{h.Run, id}, elem...)...)
}

// StartDir returns the directory of start n, or a path in it.
func (h home) StartDir(id string, n int, elem ...string) string {
	return h.Dir(id, append([]string{"runs", strconv.Itoa(n)}, elem...)...)
}

// Bundle returns the directory of start n's files while it lasts. Every start has its own, so that
// an old monitor and the next start's cannot meet: conmon removes its attach socket by name as the
// last thing it does.
func (h home) Bundle(id string, n int, elem ...string) string {
	return h.RunDir(id, append([]string{"bundle." + strconv.Itoa(n)}, elem...)...)
}

// ReadRecord reads a sandbox's record into rec, of which id is to name the sandbox; a
// sandbox without a record does not exist.
func (h home) ReadRecord(id string, rec any, named *string) error {
	if err := record.CheckID(id); err != nil {
		return err
	}
	if err := h.noLinks(id, "", "upper", "work", "merged", "etc", "runs", "log", "workspaces", "container.json"); err != nil {
		return err
	}
	err := record.ReadJSON(h.Dir(id, "container.json"), rec)
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("container %s: %w", id, fault.ErrNotFound)
	}
	if err == nil && *named != id {
		err = fmt.Errorf("container %s: its record names %q: %w", id, *named, fault.ErrCorrupt)
	}
	return err
}

// noLinks refuses symlinks among what is kept of a sandbox: in a root from elsewhere they lead
// out of it, and what is below them is written and removed.
func (h home) noLinks(id string, names ...string) error {
	if err := errors.Join(fsx.NoLinks(h.Dir(id), names...), fsx.NoLinks(h.RunDir(id), "")); err != nil {
		return &fault.Error{Op: "container " + id,
			Hint: "agentbox has not made it. Do not use a root directory that others could write to.",
			Err:  fmt.Errorf("%w: %w", fault.ErrCorrupt, err)}
	}
	return nil
}

// Save makes a sandbox exist, for good.
func (h home) Save(id string, rec any) error {
	if err := record.WriteJSON(h.Dir(id, "container.json"), rec, true); err != nil {
		return err
	}
	return fsx.SyncDir(filepath.Dir(h.Dir(id)))
}

// removeRecord makes a sandbox a half-made one, which cannot be started.
func (h home) removeRecord(id string) error {
	if err := os.Remove(h.Dir(id, "container.json")); err != nil {
		return gone(err)
	}
	return fsx.SyncDir(h.Dir(id))
}

// Lock serialises the verbs that change a sandbox, across processes.
func (h home) Lock(ctx context.Context, id string) (unlock func(), err error) {
	if err := record.CheckID(id); err != nil {
		return nil, err
	}
	if err := h.noLinks(id, ""); err != nil {
		return nil, err
	}
	return record.Lock(ctx, h.Dir(id), "container "+id)
}

// Busy reports whether a verb holds a sandbox's lock.
func (h home) Busy(id string) bool { return record.CheckID(id) == nil && record.Locked(h.Dir(id)) }

// OwnedByOther reports whether a sandbox belongs to another backend on the same root. Backends share
// networks and the names of cgroups, so a sandbox unknown to one may belong to another.
func (h home) OwnedByOther(id string) bool {
	if _, err := os.Lstat(h.Dir(id)); err == nil {
		return false
	}
	parts, err := os.ReadDir(h.Base)
	if err != nil {
		return false
	}
	dirs := []string{h.Base}
	for _, part := range parts {
		dirs = append(dirs, filepath.Join(h.Base, part.Name()))
	}
	return slices.ContainsFunc(dirs, func(dir string) bool {
		_, err := os.Lstat(filepath.Join(dir, "sandboxes", id))
		return err == nil
	})
}

// gone returns nil for the error that says that a file does not exist.
func gone(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// claim makes a sandbox's directory, if need be, and takes its lock. left reports whether
// anything of a sandbox of that id was there.
func (h home) claim(ctx context.Context, id string) (unlock func(), left bool, err error) {
	left = h.Exists(id)
	if err := os.Mkdir(h.Dir(id), 0o700); errors.Is(err, fs.ErrExist) {
		left = true
	} else if err != nil {
		return nil, left, err
	}
	unlock, err = h.Lock(ctx, id)
	return unlock, left, err
}

// Exists reports whether anything of a sandbox exists. These directories go last.
func (h home) Exists(id string) bool {
	for _, path := range []string{h.Dir(id), h.RunDir(id), filepath.Join(h.State, id)} {
		if _, err := os.Lstat(path); err == nil {
			return true
		}
	}
	return false
}

// names lists what may be sandboxes by their files.
func (h home) names() (names []string, err error) {
	for _, dir := range []string{filepath.Join(h.Root, "sandboxes"), h.Run, h.State} {
		entries, err := os.ReadDir(dir)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, err
		}
		for _, e := range entries {
			names = append(names, e.Name())
		}
	}
	return names, nil
}

// ClearRun removes what starts and exec sessions keep in RUN. It leaves the Engine's files
// there.
func (h home) ClearRun(id string) error {
	entries, err := os.ReadDir(h.RunDir(id))
	errs := []error{gone(err)}
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), "bundle.") || e.Name() == "exec" {
			errs = append(errs, os.RemoveAll(h.RunDir(id, e.Name())))
		}
	}
	return errors.Join(errs...)
}

// NotStarted reports whether runc has made a sandbox whose command waits for its start:
// the fifo that the start opens is still there.
func (h home) NotStarted(id string) bool {
	_, err := os.Lstat(filepath.Join(h.State, id, "exec.fifo"))
	return err == nil
}

// removeState deletes the OCI runtime's state of a sandbox. The processes and cgroups behind it are
// freed elsewhere, so a call of `runc delete` would add only the time of a program start, and
// fail on a half-written state. A killed restore leaves the root filesystem mounted in there,
// and CRIU's view of the cgroups in its working directory: deleting through them would delete
// the sandbox's files.
func (h home) removeState(id string) error {
	state := filepath.Join(h.State, id)
	if err := kernel.UnmountBelow(state, filepath.Join(h.Stage, id, "restore")); err != nil {
		return err
	}
	return os.RemoveAll(state)
}

// removeFiles removes all files of a sandbox whose mounts are gone. Its directory,
// which is the lock, stays.
func (h home) removeFiles(id string) error {
	entries, err := os.ReadDir(h.Dir(id))
	if err != nil {
		return err
	}
	for _, e := range entries {
		if err := os.RemoveAll(h.Dir(id, e.Name())); err != nil {
			return err
		}
	}
	return os.RemoveAll(h.RunDir(id))
}
