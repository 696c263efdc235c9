// Package stage is the contract between the engine and the OCI runtime
// wrapper: which container is to be restored instead of created.
//
// The engine puts a Restore into RUN/restore/ID, ID being the name the
// container engine gives the container. The wrapper finds it on `create`,
// restores, and marks it restored; on `start` it lets the processes run and
// clears it. What is staged stays staged until then, whatever fails: an
// engine that tries again must never get a fresh start in place of the
// restore it was promised.
//
// The wrapper imports this package and starts for every call of an engine, so
// it depends on the standard library and small leaves of internal only.
package stage

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/internal/fsx"
)

// Restore says how to bring one container back.
type Restore struct {
	Images string   `json:"images"`           // CRIU images
	Work   string   `json:"work"`             // where CRIU leaves restore.log; made when missing
	Flags  []string `json:"flags,omitempty"`  // for `runc restore`, e.g. --tcp-established
	Config string   `json:"config,omitempty"` // CRIU configuration file; empty: what the bundle's annotation names
	// Addresses are those that restored sockets are bound to. Some engines fill
	// the network namespace only after `create`.
	Addresses []netip.Addr `json:"addresses,omitempty"`
	// Paused: it was checkpointed while paused, and `start` leaves it frozen.
	Paused bool `json:"paused,omitempty"`
	// Times are those that directories had before the restore made and removed names in
	// them.
	Times []DirTime `json:"times,omitempty"`
	// Taken is when the checkpoint was taken; the images' own times are those of their layout on
	// disk. Zero: unknown.
	Taken time.Time `json:"taken,omitzero"`
	// Timeout ends a restore that hangs; 0 means DefaultTimeout.
	Timeout time.Duration `json:"timeout_ns,omitempty"`
}

// DirTime is when a directory of a container was modified.
type DirTime struct {
	Mount string `json:"mount,omitempty"` // the mount point of the workspace that it is in; empty: the root filesystem
	Path  string `json:"path"`            // below that
	Sec   int64  `json:"sec"`
	Nsec  int64  `json:"nsec"`
}

// Slot names the place of one container: RUN, and what the container's engine
// calls the container when it calls the OCI runtime.
type Slot struct{ Run, ID string }

// At returns the Slot of a container in RUN.
func At(run, id string) Slot { return Slot{Run: run, ID: id} }

// Under is the ID of a Slot for a container whose engine gives the same id to
// others, each beneath a root of its own for the OCI runtime (--root), as
// containerd does in its namespaces.
func Under(root, id string) string { return filepath.Base(root) + "@" + id }

// DefaultTimeout bounds a restore that names no timeout of its own.
const DefaultTimeout = 10 * time.Minute

const (
	stagedFile   = "restore.json"
	restoredFile = "restored"
	heldFile     = "held"
	maxStaged    = 1 << 20 // bytes a staged restore may have

	calledOffFile = "calledoff"
)

// Env names the environment variable that moves RUN.
const Env = "AGENTBOX_RUN"

// DefaultRun is RUN when Env is empty.
const DefaultRun = "/run/agentbox"

// Run returns RUN as this process was told it.
func Run() string {
	if run := os.Getenv(Env); run != "" {
		return run
	}
	return DefaultRun
}

// Valid reports whether id can name a container here.
func Valid(id string) bool {
	if id == "" || len(id) > 255 || id == "." || id == ".." {
		return false
	}
	for _, c := range []byte(id) {
		if c == '/' || c <= ' ' || c == 0x7f {
			return false
		}
	}
	return id[0] != '-'
}

// Put publishes r for the container id, in place of what was there.
func (at Slot) Put(r Restore) (err error) {
	dir, err := at.place()
	if err != nil {
		return err
	}
	if r.Images == "" || r.Work == "" {
		return fmt.Errorf("stage restore of %s: images and work directories are needed: %w", at.ID, fault.ErrInvalid)
	}
	data, err := json.Marshal(r)
	if err != nil {
		return fmt.Errorf("stage restore of %s: %w", at.ID, err)
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return fmt.Errorf("stage restore of %s: %w", at.ID, err)
	}
	// A mark of an earlier restore would make the next `start` resume a
	// container that was never restored.
	if err := remove(filepath.Join(dir, restoredFile)); err != nil {
		return fmt.Errorf("stage restore of %s: %w", at.ID, err)
	}
	if err := publish(dir, stagedFile, data); err != nil {
		return fmt.Errorf("stage restore of %s: %w", at.ID, err)
	}
	return nil
}

// Load returns what is staged for id. Nothing staged is ErrNotFound; staged
// but not readable is ErrCorrupt.
func (at Slot) Load() (Restore, error) { return at.load(stagedFile) }

func (at Slot) load(name string) (Restore, error) {
	dir, err := at.place()
	if err != nil {
		return Restore{}, err
	}
	var r Restore
	if err := readJSON(filepath.Join(dir, name), maxStaged, &r); err != nil {
		return Restore{}, fmt.Errorf("staged restore of %s: %w", at.ID, err)
	}
	if r.Images == "" || r.Work == "" {
		return Restore{}, fmt.Errorf("staged restore of %s: names no images: %w", at.ID, fault.ErrCorrupt)
	}
	return r, nil
}

// MarkRestored turns the staged restore of id into a mark that it is done.
// Nothing staged is ErrNotFound.
func (at Slot) MarkRestored() error {
	dir, err := at.place()
	if err != nil {
		return err
	}
	err = os.Rename(filepath.Join(dir, stagedFile), filepath.Join(dir, restoredFile))
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("staged restore of %s: %w", at.ID, fault.ErrNotFound)
	}
	if err != nil {
		return fmt.Errorf("mark %s restored: %w", at.ID, err)
	}
	return fsx.SyncDir(dir)
}

// Restored reports whether id was restored and waits for its `start`.
func (at Slot) Restored() bool {
	dir, err := at.place()
	if err != nil {
		return false
	}
	_, err = os.Lstat(filepath.Join(dir, restoredFile))
	return err == nil
}

// Used reports whether what was staged for id has been restored from.
func (at Slot) Used() bool {
	_, err := at.load(stagedFile)
	return errors.Is(err, fault.ErrNotFound)
}

// StaysPaused reports whether a restored container is to be left paused by its
// `start`.
func (at Slot) StaysPaused() bool {
	r, err := at.load(restoredFile)
	return err == nil && r.Paused
}

// KeepPaused notes that id is left paused by its `start` and its engine thinks
// that it runs. Like a Reap it outlives Clear.
func (at Slot) KeepPaused() error {
	path, err := at.pausedFile()
	if err == nil {
		err = os.MkdirAll(filepath.Dir(path), 0o700)
	}
	if err == nil {
		err = os.WriteFile(path, nil, 0o600)
	}
	if err != nil {
		return fmt.Errorf("note that %s is paused: %w", at.ID, err)
	}
	return nil
}

// KeptPaused reports whether KeepPaused is in force.
func (at Slot) KeptPaused() bool {
	path, err := at.pausedFile()
	if err != nil {
		return false
	}
	_, err = os.Lstat(path)
	return err == nil
}

// TakePaused ends KeepPaused and reports whether it was in force.
func (at Slot) TakePaused() bool {
	path, err := at.pausedFile()
	return err == nil && os.Remove(path) == nil
}

func (at Slot) pausedFile() (string, error) {
	if _, err := at.place(); err != nil {
		return "", err
	}
	return filepath.Join(at.Run, "paused", at.ID), nil
}

// BlockCreate keeps the container id from being created, by any caller, until a restore
// is staged for it, AllowCreate or Clear: its files are being replaced.
func (at Slot) BlockCreate() error {
	dir, err := at.place()
	if err != nil {
		return err
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return fmt.Errorf("hold %s: %w", at.ID, err)
	}
	if err := os.WriteFile(filepath.Join(dir, heldFile), nil, 0o600); err != nil {
		return fmt.Errorf("hold %s: %w", at.ID, err)
	}
	return nil
}

// AllowCreate ends BlockCreate. Idempotent.
func (at Slot) AllowCreate() error {
	dir, err := at.place()
	if err != nil {
		return err
	}
	if err := remove(filepath.Join(dir, heldFile)); err != nil {
		return fmt.Errorf("release %s: %w", at.ID, err)
	}
	// Goes only when nothing is staged.
	_ = os.Remove(dir)
	return nil
}

// Held reports whether BlockCreate is in force.
func (at Slot) Held() bool {
	dir, err := at.place()
	if err != nil {
		return false
	}
	_, err = os.Lstat(filepath.Join(dir, heldFile))
	return err == nil
}

// HeldBy names the file that blocks the creation, for messages.
func (at Slot) HeldBy() string { return filepath.Join(at.Run, "restore", at.ID, heldFile) }

// CallOff ends the restore of id that is under way, or about to be: it fails.
func (at Slot) CallOff() error {
	dir, err := at.place()
	if err == nil {
		err = os.WriteFile(filepath.Join(dir, calledOffFile), nil, 0o600)
	}
	if err != nil {
		return fmt.Errorf("call off the restore of %s: %w", at.ID, err)
	}
	return nil
}

// CalledOff reports whether CallOff is in force.
func (at Slot) CalledOff() bool {
	dir, err := at.place()
	if err != nil {
		return false
	}
	_, err = os.Lstat(filepath.Join(dir, calledOffFile))
	return err == nil
}

// ClearRestored drops the mark and leaves what is staged. Idempotent.
func (at Slot) ClearRestored() error {
	dir, err := at.place()
	if err != nil {
		return err
	}
	if err := remove(filepath.Join(dir, restoredFile)); err != nil {
		return fmt.Errorf("clear restored mark of %s: %w", at.ID, err)
	}
	// Goes only when nothing is staged.
	_ = os.Remove(dir)
	return nil
}

// Clear drops all that is staged for id: a restore, a hold, a start. Idempotent.
// What a started container's end still owes stays; see Start.Reap and Disarm.
func (at Slot) Clear() error {
	dir, err := at.place()
	if err != nil {
		return err
	}
	if err := os.RemoveAll(dir); err != nil {
		return fmt.Errorf("clear staged restore of %s: %w", at.ID, err)
	}
	return nil
}

// List returns the ids that have something staged or a mark.
func List(run string) ([]string, error) {
	entries, err := os.ReadDir(filepath.Join(run, "restore"))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("staged restores: %w", err)
	}
	var ids []string
	for _, e := range entries {
		if e.IsDir() && Valid(e.Name()) {
			ids = append(ids, e.Name())
		}
	}
	return ids, nil
}

func (at Slot) place() (string, error) {
	if !Valid(at.ID) {
		return "", fmt.Errorf("container id %q: %w", at.ID, fault.ErrInvalid)
	}
	if !filepath.IsAbs(at.Run) {
		return "", fmt.Errorf("run directory %q is not absolute: %w", at.Run, fault.ErrInvalid)
	}
	return filepath.Join(at.Run, "restore", at.ID), nil
}

// readJSON reads a small file of ours. A missing file is ErrNotFound, one that cannot be parsed
// ErrCorrupt; any other error says neither.
func readJSON(path string, most int64, v any) error {
	// Not blocking, so that not even a named pipe in the file's place holds us.
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return fault.ErrNotFound
	}
	if err != nil {
		if _, lerr := os.Lstat(path); lerr != nil {
			return err
		}
		return fmt.Errorf("%v: %w", err, fault.ErrCorrupt)
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return fmt.Errorf("%v: %w", err, fault.ErrCorrupt)
	}
	if !st.Mode().IsRegular() || st.Size() > most {
		return fmt.Errorf("not a small regular file: %w", fault.ErrCorrupt)
	}
	data, err := io.ReadAll(io.LimitReader(f, most+1))
	if err == nil {
		err = json.Unmarshal(data, v)
	}
	if err != nil {
		return fmt.Errorf("%v: %w", err, fault.ErrCorrupt)
	}
	return nil
}

func publish(dir, name string, data []byte) error {
	return fsx.Write(filepath.Join(dir, name), data, fsx.Options{})
}

func remove(path string) error {
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}
