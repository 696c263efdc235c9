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

// marks are the files ROOT/supervised/ID, one for each sandbox that is supervised, and one for leases.
type marks struct {
	*core

	restarts *restartLog
}

// mark is the content of a mark: the boot of the host for which it was written, and a random
// number, by which a supervisor notices that the mark was written again.
type mark string

// current reports whether a mark was written in this boot. Others may come from another
// machine, with their root: to read that must not run its author's programs.
func (m mark) current() bool {
	boot, _, _ := strings.Cut(string(m), " ")
	return boot == bootID()
}

func (ms *marks) dir() string           { return filepath.Join(ms.store.Root(), "supervised") }
func (ms *marks) path(id string) string { return filepath.Join(ms.dir(), id) }

// setMark writes a mark. It does not make a root that is gone.
func (ms *marks) set(id, boot string) error {
	for {
		err := fsx.Write(ms.path(id), []byte(boot+" "+newID()), fsx.Options{Volatile: true})
		if !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		if err := os.Mkdir(ms.dir(), 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
			return err
		}
	}
}

func (ms *marks) remove(id string) error {
	return ignoreMissing(errors.Join(os.Remove(ms.path(id)), ignoreMissing(os.Remove(ms.oldOf(id)))))
}

// readMark returns the mark of a sandbox; ok: there is one.
func (ms *marks) read(id string) (m mark, ok bool, err error) {
	data, err := os.ReadFile(ms.path(id))
	return mark(data), err == nil, ignoreMissing(err)
}

// readMarks returns all marks by their names.
func (ms *marks) all() (map[string]mark, error) {
	entries, err := os.ReadDir(ms.dir())
	if err != nil {
		return nil, ignoreMissing(err)
	}
	marks := map[string]mark{}
	for _, entry := range entries {
		if strings.HasPrefix(entry.Name(), ".") {
			continue // one that is being written
		}
		m, ok, err := ms.read(entry.Name())
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
func (ms *marks) mark(s runtime.Spec) error {
	if !supervised(s) {
		if _, ok, err := ms.read(s.ID); !ok {
			return err
		}
	}
	return ms.set(s.ID, bootID())
}

// adoptMarks makes marks of earlier boots marks of this one.
func (ms *marks) adopt() error {
	marks, err := ms.all()
	errs := []error{err}
	for id, m := range marks {
		if !m.current() {
			errs = append(errs, ms.set(id, bootID()))
		}
	}
	return errors.Join(errs...)
}
