package setup

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/agentbox/agentbox/internal/fault"
)

// A tomlEdit is the way of a TOML configuration from the old text to the new.
type tomlEdit struct {
	opts     Options
	result   *Result
	add      func(doc []byte, path string) ([]byte, error)
	remove   func(doc []byte) ([]byte, error)
	validate func(path string) (known bool, err error)
	path     func(tree map[string]any) string // of the runtime that is registered now
	empty    func(doc []byte) bool            // nothing is left in it
	inUse    func() ([]string, error)         // may be nil

	file file
	data []byte
	gone bool
}

func (e *tomlEdit) run() (err error) {
	if e.file, err = readFile(e.opts.Config); err != nil {
		return err
	}
	if !e.opts.DryRun {
		if err := os.MkdirAll(filepath.Dir(e.file.path), 0o755); err != nil {
			return err
		}
		unlock, err := e.file.lock()
		if err != nil {
			return err
		}
		defer unlock()
	}
	if e.data, err = e.edit(); err != nil {
		return in(e.file.path, err)
	}
	e.result.Diff = e.file.diff(e.data, e.gone)
	e.result.Changed = e.result.Diff != ""
	if !e.result.Changed || e.opts.DryRun {
		return nil
	}
	if e.inUse != nil && e.opts.Remove && !e.opts.Force {
		users, err := e.inUse()
		if err != nil {
			return err
		}
		if len(users) > 0 {
			return &fault.Error{
				Hint: "Remove them, or use --force; without the runtime they cannot be started.",
				Err: fmt.Errorf("runtime %q is in use by %s: %w", e.opts.Name,
					strings.Join(users, ", "), fault.ErrBusy),
			}
		}
	}
	return e.write()
}

// edit makes the new text.
func (e *tomlEdit) edit() ([]byte, error) {
	if !e.opts.Remove {
		return e.add(e.file.data, e.opts.Runtime)
	}
	tree, err := decodeTOML(e.file.data)
	if err != nil {
		return nil, err
	}
	path := e.path(tree)
	if path == "" {
		return e.file.data, nil
	}
	old, ok := e.file.before(func(old []byte) ([]byte, error) {
		if tree, err := decodeTOML(old); err != nil || e.path(tree) != "" {
			return nil, fault.ErrExists // it was in there by then
		}
		return e.add(old, path)
	})
	if ok {
		return old, nil
	}
	data, err := e.remove(e.file.data)
	if err != nil {
		return nil, err
	}
	if e.empty(data) { // of a file that setup created, nothing is left
		e.gone = true
		return nil, nil
	}
	return data, nil
}

func (e *tomlEdit) write() error {
	if e.gone {
		return e.file.remove()
	}
	d, err := e.file.draft(e.data)
	if err != nil {
		return err
	}
	defer d.discard()
	known, err := e.validate(d.temp.Name())
	if err != nil {
		e.result.Changed = false
		return &fault.Error{Hint: "Nothing was changed.", Err: in(e.file.path, err)}
	}
	if !known {
		e.result.note("%s is not installed here and did not validate the new configuration; agentbox checked that it is TOML and that only its own entry changed", e.result.Engine)
	}
	if e.result.Backup, err = e.file.backup(e.opts.Now()); err != nil {
		return fmt.Errorf("backup: %w", err)
	}
	return d.commit()
}

// putBack undoes write.
func (e *tomlEdit) putBack(cause error) error {
	present, err := readFile(e.file.path)
	switch {
	case err != nil:
	case e.file.exists:
		err = present.replace(e.file.data)
	case present.exists:
		err = present.remove()
	}
	if err != nil {
		return errors.Join(cause, fmt.Errorf("put %s back: %w", e.file.path, err))
	}
	e.result.Changed = false
	return &fault.Error{Hint: "The configuration is as it was.", Err: cause}
}
