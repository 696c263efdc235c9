package engine

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/agentbox/agentbox/internal/fsx"
	"github.com/agentbox/agentbox/runtime"
)

// ROOT/supervised/ID marks a sandbox as one to supervise, and ROOT/supervised/leases says that
// there are leases. Marks outlive a killed supervisor, and a reboot. The mark of a sandbox is
// written under its lock, but for one of an earlier boot that is adopted.

// leasesMark is the name of the mark of all leases. It is no sandbox's id.
const leasesMark = "leases"

// mark is the content of a mark: the boot of the host for which it was written, and a random
// number, by which a supervisor notices that the mark was written again.
type mark string

// current reports whether a mark was written in this boot. Others may come from another
// machine, with their root: to read that must not run its author's programs.
func (m mark) current() bool {
	boot, _, _ := strings.Cut(string(m), " ")
	return boot == bootID()
}

func (e *Engine) marksDir() string          { return filepath.Join(e.store.Root(), "supervised") }
func (e *Engine) markPath(id string) string { return filepath.Join(e.marksDir(), id) }

// setMark writes a mark. It does not make a root that is gone.
func (e *Engine) setMark(id, boot string) error {
	for {
		err := fsx.Write(e.markPath(id), []byte(boot+" "+newID()), fsx.Options{Volatile: true})
		if !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		if err := os.Mkdir(e.marksDir(), 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
			return err
		}
	}
}

func (e *Engine) unmark(id string) error {
	return ignoreMissing(errors.Join(os.Remove(e.markPath(id)), ignoreMissing(os.Remove(e.oldMark(id)))))
}

// readMark returns the mark of a sandbox; ok: there is one.
func (e *Engine) readMark(id string) (m mark, ok bool, err error) {
	data, err := os.ReadFile(e.markPath(id))
	return mark(data), err == nil, ignoreMissing(err)
}

// readMarks returns all marks by their names.
func (e *Engine) readMarks() (map[string]mark, error) {
	entries, err := os.ReadDir(e.marksDir())
	if err != nil {
		return nil, ignoreMissing(err)
	}
	marks := map[string]mark{}
	for _, entry := range entries {
		if strings.HasPrefix(entry.Name(), ".") {
			continue // one that is being written
		}
		m, ok, err := e.readMark(entry.Name())
		if err != nil {
			return nil, err
		}
		if ok {
			marks[entry.Name()] = m
		}
	}
	return marks, nil
}

func ignoreMissing(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// supervised reports whether a sandbox is to be supervised while it runs.
func supervised(s runtime.Spec) bool {
	return s.Resources.Storage > 0 || s.Lifetime.TTL > 0 || s.Lifetime.Idle > 0 || comesBack(s.Restart) || interval(s)
}

// mark has a running supervisor read the spec of a sandbox again, and a later command start a
// supervisor that is missing.
func (e *Engine) mark(s runtime.Spec) error {
	if !supervised(s) {
		if _, ok, err := e.readMark(s.ID); !ok {
			return err
		}
	}
	return e.setMark(s.ID, bootID())
}

// adoptMarks makes marks of earlier boots marks of this one.
func (e *Engine) adoptMarks() error {
	marks, err := e.readMarks()
	errs := []error{err}
	for id, m := range marks {
		if !m.current() {
			errs = append(errs, e.setMark(id, bootID()))
		}
	}
	return errors.Join(errs...)
}
