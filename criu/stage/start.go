package stage

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/agentbox/agentbox/internal/fault"
)

// Start changes the coming start of a container whose engine builds the bundle
// itself, be it a restore or not.
//
// Env and Files hold for one `create`, which uses them up; when it restores
// and fails they stay, as the staged restore does. The Files are written a
// second time by the `start` that follows it. Reap is kept until the
// `delete` of the container that was then started, whatever is staged or
// cleared meanwhile; a container that was created and never started is not
// reaped.
type Start struct {
	Env []string `json:"env,omitempty"` // KEY=value: set, or replaced, in the first process's environment
	// Files are what the engine binds over the root filesystem and may have
	// written anew just before `create`, or between that and `start`: they are
	// overwritten in place.
	Files []File `json:"files,omitempty"`
	// Reap is a command, begun once the container is deleted and left to itself.
	Reap []string `json:"reap,omitempty"`
}

// File is one file on the host.
type File struct {
	Path string `json:"path"`
	Mode uint32 `json:"mode"` // permission bits, as chmod takes them
	UID  uint32 `json:"uid"`
	GID  uint32 `json:"gid"`
	Data []byte `json:"data"`
	// Host is set for a hosts file that is the engine's to begin with: the lines
	// that the engine has written for this name by `start` are added to Data.
	Host string `json:"host,omitempty"`
}

const (
	startFile = "start.json"
	maxStart  = 32 << 20 // bytes, as JSON
)

// PutStart publishes s for the next `create` of the container id, in place of
// what was there.
func (at Slot) PutStart(s Start) error {
	dir, err := at.place()
	if err != nil {
		return err
	}
	if err := s.check(); err != nil {
		return fmt.Errorf("stage start of %s: %w", at.ID, err)
	}
	data, err := json.Marshal(s)
	if err == nil && len(data) > maxStart {
		err = fmt.Errorf("%d bytes are too many: %w", len(data), fault.ErrInvalid)
	}
	if err == nil {
		err = os.MkdirAll(dir, 0o700)
	}
	if err == nil {
		err = publish(dir, startFile, data)
	}
	if err != nil {
		return fmt.Errorf("stage start of %s: %w", at.ID, err)
	}
	return nil
}

// LoadStart returns what PutStart left for id and no `create` has used.
// Nothing is ErrNotFound; something unreadable is ErrCorrupt.
func (at Slot) LoadStart() (Start, error) {
	dir, err := at.place()
	if err != nil {
		return Start{}, err
	}
	s, err := readStart(filepath.Join(dir, startFile))
	if err != nil {
		return Start{}, fmt.Errorf("staged start of %s: %w", at.ID, err)
	}
	return s, nil
}

// ClearStart drops what PutStart left for id. Idempotent.
func (at Slot) ClearStart() error {
	dir, err := at.place()
	if err != nil {
		return err
	}
	if err := remove(filepath.Join(dir, startFile)); err != nil {
		return fmt.Errorf("clear staged start of %s: %w", at.ID, err)
	}
	// Goes only when nothing is staged.
	_ = os.Remove(dir)
	return nil
}

// UseStart turns the staged start of id, whose container is being created,
// into the Files that its `start` writes again and the Reap that its end owes.
func (at Slot) UseStart(s Start) error {
	if err := at.keepFiles(s.Files); err != nil {
		return err
	}
	if len(s.Reap) == 0 {
		return errors.Join(at.Disarm(), at.ClearStart())
	}
	made, due, err := at.reaps()
	if err != nil {
		return err
	}
	data, err := json.Marshal(Start{Reap: s.Reap})
	if err == nil {
		err = os.MkdirAll(filepath.Dir(made), 0o700)
	}
	if err == nil {
		err = os.MkdirAll(filepath.Dir(due), 0o700)
	}
	if err == nil {
		err = publish(filepath.Dir(made), at.ID, data)
	}
	if err == nil {
		err = remove(due)
	}
	if err != nil {
		return fmt.Errorf("keep what reaps %s: %w", at.ID, err)
	}
	return at.ClearStart()
}

func (at Slot) keepFiles(files []File) error {
	if len(files) == 0 {
		return at.DropFiles()
	}
	path, err := at.filesOf()
	if err != nil {
		return err
	}
	data, err := json.Marshal(Start{Files: files})
	if err == nil {
		err = os.MkdirAll(filepath.Dir(path), 0o700)
	}
	if err == nil {
		err = publish(filepath.Dir(path), at.ID, data)
	}
	if err != nil {
		return fmt.Errorf("keep files of %s: %w", at.ID, err)
	}
	return nil
}

// TakeFiles returns the Files of the start that a `create` has used; they are
// gone then. None is no error.
func (at Slot) TakeFiles() ([]File, error) {
	path, err := at.filesOf()
	if err != nil {
		return nil, err
	}
	s, err := readStart(path)
	if errors.Is(err, fault.ErrNotFound) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("files of %s: %w", at.ID, err)
	}
	return s.Files, at.DropFiles()
}

// DropFiles forgets them. Idempotent; what cannot be looked at is none.
func (at Slot) DropFiles() error {
	path, err := at.filesOf()
	if _, none := os.Lstat(path); err == nil && none == nil {
		err = remove(path)
	}
	if err != nil {
		return fmt.Errorf("files of %s: %w", at.ID, err)
	}
	return nil
}

// filesOf is apart from what is staged, which is cleared meanwhile.
func (at Slot) filesOf() (string, error) {
	_, err := at.place()
	return filepath.Join(at.Run, "files", at.ID), err
}

// ArmReap makes the Reap of a container that is about to be started due when
// it is deleted. It does nothing when there is none.
func (at Slot) ArmReap() error {
	made, due, err := at.reaps()
	if err != nil {
		return err
	}
	if err := os.Rename(made, due); err != nil {
		if _, none := os.Lstat(made); none == nil {
			return fmt.Errorf("keep what reaps %s: %w", at.ID, err)
		}
	}
	return nil
}

// Armed reports whether anything is kept for the `delete` of id.
func (at Slot) Armed() bool {
	made, due, err := at.reaps()
	if err != nil {
		return false
	}
	for _, path := range []string{due, made} {
		if _, err := os.Lstat(path); err == nil {
			return true
		}
	}
	return false
}

// TakeReap returns the Reap that is due, to one caller only: it is gone
// then. Nil when there is none.
func (at Slot) TakeReap() ([]string, error) {
	made, due, err := at.reaps()
	if err != nil {
		return nil, err
	}
	s, err := readStart(due)
	if errors.Is(err, fault.ErrNotFound) {
		return nil, at.Disarm()
	}
	if rerr := os.Remove(due); rerr != nil {
		if errors.Is(rerr, fs.ErrNotExist) {
			return nil, nil // another one took it
		}
		return nil, fmt.Errorf("what reaps %s: %w", at.ID, rerr)
	}
	if err != nil {
		return nil, fmt.Errorf("what reaps %s: %w", at.ID, err)
	}
	return s.Reap, remove(made)
}

// Disarm drops the Reap of id, due or not. Idempotent.
func (at Slot) Disarm() error {
	made, due, err := at.reaps()
	if err != nil {
		return err
	}
	if err := errors.Join(remove(made), remove(due)); err != nil {
		return fmt.Errorf("disarm the reaper of %s: %w", at.ID, err)
	}
	return nil
}

// reaps are the files of a container's Reap: made, and due. They are apart from
// what is staged, because they must outlive Clear.
func (at Slot) reaps() (made, due string, err error) {
	if _, err := at.place(); err != nil {
		return "", "", err
	}
	return filepath.Join(at.Run, "reap", "made", at.ID), filepath.Join(at.Run, "reap", "due", at.ID), nil
}

func readStart(path string) (s Start, err error) {
	if err := readJSON(path, maxStart, &s); err != nil {
		return Start{}, err
	}
	if err := s.check(); err != nil {
		return Start{}, fmt.Errorf("%v: %w", err, fault.ErrCorrupt)
	}
	return s, nil
}

func (s Start) check() error {
	for _, kv := range s.Env {
		if i := strings.IndexByte(kv, '='); i < 1 || strings.IndexByte(kv, 0) >= 0 {
			return fmt.Errorf("environment entry %q: %w", kv, fault.ErrInvalid)
		}
	}
	for _, f := range s.Files {
		if !filepath.IsAbs(f.Path) || f.Mode&^0o7777 != 0 {
			return fmt.Errorf("file %q, mode %o: %w", f.Path, f.Mode, fault.ErrInvalid)
		}
	}
	if len(s.Reap) > 0 && !filepath.IsAbs(s.Reap[0]) {
		return fmt.Errorf("command %q is not absolute: %w", s.Reap[0], fault.ErrInvalid)
	}
	return nil
}
